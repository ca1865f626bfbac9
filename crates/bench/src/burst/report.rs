// SPDX-License-Identifier: Apache-2.0
//! The figures of the bench, from all rounds.

use super::slice::{BURSTING, Reference, STEADY, Slice, Told};
use crate::harness::{
    figures::{median, rounded, thousandths, to_f64},
    latencies::Latencies,
    report::BenchReport,
};
use serde_json::{Map, Value, json};

/// What Taiji promises of nine in ten faults.
const PROMISED_US: f64 = 10.0;

/// Sizes of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Sizes {
    pub budget_bytes: u64,
    pub min_bytes: u64,
    pub low_bytes: u64,
    pub high_bytes: u64,
    /// What a byte takes once it is evicted, all content of both tenants.
    pub stored_share: f64,
}

/// A round: the reference, our burst, and zram's.
pub(super) struct Measured {
    pub reference: Reference,
    pub ours: Slice,
    pub zram: Option<Slice>,
}

impl Measured {
    /// Longest time in the daemon that counts as within the promise.
    pub(super) fn served_limit_us(&self) -> f64 {
        PROMISED_US + self.reference.copies.us(500)
    }

    /// The same of a whole fault.
    pub(super) fn whole_limit_us(&self) -> f64 {
        PROMISED_US + self.reference.round_trips.us(500)
    }

    fn free_min_bytes(&self, sizes: &Sizes) -> u64 {
        sizes
            .budget_bytes
            .saturating_sub(self.ours.used_max_bytes())
    }
}

/// Share of `latencies` that took at most `us`.
pub(super) fn share_within(latencies: &Latencies, us: f64) -> f64 {
    let within = (0..=1000)
        .rev()
        .find(|permille| latencies.us(*permille) <= us);
    to_f64(within.unwrap_or(0) as u64) / 1e3
}

/// Writes all figures of `rounds`.
pub(super) fn describe(sizes: &Sizes, rounds: &[Measured], report: &mut BenchReport) {
    memory(sizes, rounds, &mut report.figures);
    recovery(rounds, report);
    tenants(rounds, &mut report.figures);
    faults(rounds, &mut report.figures);
    scheduler(rounds, &mut report.figures);
}

fn of(rounds: &[Measured], figure: impl Fn(&Measured) -> f64) -> f64 {
    median(rounds.iter().map(figure))
}

fn memory(sizes: &Sizes, rounds: &[Measured], figures: &mut Map<String, Value>) {
    let least = rounds.iter().map(|round| round.free_min_bytes(sizes)).min();
    let least = least.unwrap_or(0);
    let over_min = to_f64(least) / to_f64(sizes.min_bytes.max(1));
    for (name, value) in [
        ("budget_bytes", json!(sizes.budget_bytes)),
        ("min_bytes", json!(sizes.min_bytes)),
        ("low_bytes", json!(sizes.low_bytes)),
        ("high_bytes", json!(sizes.high_bytes)),
        ("stored_share", thousandths(sizes.stored_share)),
        ("free_min_bytes", json!(least)),
        ("free_min_over_min", thousandths(over_min)),
    ] {
        figures.insert(name.into(), value);
    }
}

fn recovery(rounds: &[Measured], report: &mut BenchReport) {
    let ours = |round: &Measured| round.ours.recovery_s(round.reference.bursting);
    let figures = &mut report.figures;
    figures.insert("recovery_s".into(), thousandths(of(rounds, ours)));
    let all: Vec<f64> = rounds.iter().map(|round| rounded(ours(round))).collect();
    figures.insert("recovery_s_by_round".into(), json!(all));
    let recovered = rounds
        .iter()
        .filter(|round| round.ours.has_recovered(round.reference.bursting));
    figures.insert("recovered_rounds".into(), recovered.count().into());
    let after = of(rounds, |round| {
        round.ours.after_share(round.reference.bursting)
    });
    figures.insert("after_share".into(), thousandths(after));
    let with_zram: Vec<(&Measured, &Slice)> = rounds
        .iter()
        .filter_map(|round| Some((round, round.zram.as_ref()?)))
        .collect();
    if with_zram.is_empty() {
        return;
    }
    let theirs = |(round, zram): &(&Measured, &Slice)| zram.recovery_s(round.reference.bursting);
    let beyond = median(with_zram.iter().map(|both| ours(both.0) - theirs(both)));
    figures.insert("recovery_beyond_zram_s".into(), thousandths(beyond));
    let by_round: Vec<f64> = with_zram.iter().map(|both| rounded(theirs(both))).collect();
    let median_of = |figure: &dyn Fn(&(&Measured, &Slice)) -> f64| {
        thousandths(median(with_zram.iter().map(figure)))
    };
    let used = with_zram
        .iter()
        .map(|(_, zram)| zram.used_max_bytes())
        .max();
    let zram = json!({
        "recovery_s": median_of(&theirs),
        "recovery_s_by_round": by_round,
        "recovered_rounds": with_zram.iter().filter(|(round, zram)| zram.has_recovered(round.reference.bursting)).count(),
        "after_share": median_of(&|(round, zram)| zram.after_share(round.reference.bursting)),
        "steady_least_share": median_of(&|(round, zram)| zram.steady_least_share(round.reference.steady)),
        "whole_p50_us": median_of(&|(_, zram)| zram.faults.us(500)),
        "whole_p90_us": median_of(&|(_, zram)| zram.faults.us(900)),
        "whole_p99_us": median_of(&|(_, zram)| zram.faults.us(990)),
        "used_max_bytes": used,
    });
    report.peers.insert("zram".into(), zram);
    let over = median(with_zram.iter().map(|both| ours(both.0) / theirs(both)));
    report
        .ratios
        .insert("recovery_over_zram".into(), thousandths(over));
    let p90 = median(
        with_zram
            .iter()
            .map(|(round, zram)| round.ours.faults.us(900) / zram.faults.us(900)),
    );
    report
        .ratios
        .insert("whole_p90_over_zram".into(), thousandths(p90));
}

fn tenants(rounds: &[Measured], figures: &mut Map<String, Value>) {
    let half = |round: &Measured| round.ours.end_s() / 2.0;
    let hot = |tenant: usize, from: f64, to: f64| {
        of(rounds, |round| {
            let end = round.ours.end_s();
            let told = |told: &Told| to_f64(told.hot_sections[tenant]);
            round.ours.told_between(from * end, to * end, told)
        })
    };
    for (name, value) in [
        (
            "steady_least_share",
            of(rounds, |round| {
                round.ours.steady_least_share(round.reference.steady)
            }),
        ),
        (
            "hot_steady_share",
            of(rounds, |round| round.ours.hot_share(STEADY, 0.0)),
        ),
        (
            "hot_bursting_share",
            of(rounds, |round| round.ours.hot_share(BURSTING, half(round))),
        ),
        ("hot_bursting_sections_before", hot(BURSTING, -1.0, 0.0)),
        ("hot_bursting_sections_after", hot(BURSTING, 0.5, 2.0)),
        (
            "cold_share_before",
            of(rounds, |round| {
                round.ours.told_between(-9.0, 0.0, |told| told.cold_share)
            }),
        ),
        (
            "cold_least_share",
            of(rounds, |round| round.ours.cold_least_share()),
        ),
        (
            "cold_share_after",
            of(rounds, |round| {
                round
                    .ours
                    .told_between(half(round), f64::INFINITY, |told| told.cold_share)
            }),
        ),
    ] {
        figures.insert(name.into(), thousandths(value));
    }
}

fn faults(rounds: &[Measured], figures: &mut Map<String, Value>) {
    for (name, value) in [
        (
            "served_within_10us_share",
            of(rounds, |round| {
                round.ours.served.share_within(round.served_limit_us())
            }),
        ),
        ("served_limit_us", of(rounds, Measured::served_limit_us)),
        (
            "served_faults",
            of(rounds, |round| round.ours.served.count()),
        ),
        (
            "whole_within_share",
            of(rounds, |round| {
                share_within(&round.ours.faults, round.whole_limit_us())
            }),
        ),
        ("whole_limit_us", of(rounds, Measured::whole_limit_us)),
        (
            "whole_faults",
            of(rounds, |round| to_f64(round.ours.faults.count() as u64)),
        ),
        (
            "whole_p50_us",
            of(rounds, |round| round.ours.faults.us(500)),
        ),
        (
            "whole_p90_us",
            of(rounds, |round| round.ours.faults.us(900)),
        ),
        (
            "whole_p99_us",
            of(rounds, |round| round.ours.faults.us(990)),
        ),
        (
            "uffdio_copy_us",
            of(rounds, |round| round.reference.copies.us(500)),
        ),
        (
            "uffd_round_trip_us",
            of(rounds, |round| round.reference.round_trips.us(500)),
        ),
    ] {
        figures.insert(name.into(), thousandths(value));
    }
}

/// The most that each class of the scheduler used, before the burst and from then on.
fn scheduler(rounds: &[Measured], figures: &mut Map<String, Value>) {
    let Some(first) = rounds.first().and_then(|round| round.ours.told.first()) else {
        return;
    };
    let share = |class: usize, from: f64, to: f64| {
        of(rounds, |round| {
            round
                .ours
                .told_between(from, to, |told| told.shares[class].1)
        })
    };
    let named = first.shares.iter().enumerate().map(|(class, (name, _))| {
        let shares = json!({
            "before": rounded(share(class, -9.0, 0.0)),
            "burst": rounded(share(class, 0.0, 2.0)),
            "after": rounded(share(class, 2.0, f64::INFINITY)),
        });
        (name.replace('-', "_"), shares)
    });
    figures.insert("scheduler_share".into(), Value::Object(named.collect()));
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::slice::tests::slice, *};

    pub(crate) fn measured(zram: Option<Slice>) -> Measured {
        Measured {
            reference: Reference {
                bursting: 200.0,
                steady: 100.0,
                copies: [2500_u64].into_iter().collect(),
                round_trips: [5000_u64].into_iter().collect(),
            },
            ours: slice(5),
            zram,
        }
    }

    pub(crate) const SIZES: Sizes = Sizes {
        budget_bytes: 1000,
        min_bytes: 5,
        low_bytes: 20,
        high_bytes: 40,
        stored_share: 0.5,
    };

    #[test]
    fn report_compares_with_zram_where_there_is_one() {
        let mut report = BenchReport::new("burst");
        describe(&SIZES, &[measured(Some(slice(15)))], &mut report);
        let figures = &report.figures;
        assert_eq!(figures["free_min_over_min"], json!(2.0));
        assert_eq!(figures["whole_limit_us"], json!(15.0));
        assert_eq!(figures["served_limit_us"], json!(12.5));
        assert_eq!(figures["whole_within_share"], json!(0.666));
        assert_eq!(figures["scheduler_share"]["reclaim"]["burst"], json!(0.1));
        assert!(figures["recovery_beyond_zram_s"].as_f64().unwrap() < 0.0);
        let mut alone = BenchReport::new("burst");
        describe(&SIZES, &[measured(None)], &mut alone);
        assert!(alone.peers.is_empty() && alone.ratios.is_empty());
        assert_eq!(alone.figures["recovery_s"], figures["recovery_s"]);
    }
}
