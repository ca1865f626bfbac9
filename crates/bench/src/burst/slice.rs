// SPDX-License-Identifier: Apache-2.0
//! What was seen of one burst, and what follows from it. Times are in seconds since the burst, so those
//! before it are negative.

use super::served::Served;
use crate::harness::{
    figures::{mean, median, to_f64},
    latencies::Latencies,
};

/// Places of the tenants.
pub(super) const STEADY: usize = 0;
pub(super) const BURSTING: usize = 1;
/// Throughput counts as recovered when its mean over so many samples is back.
const RECOVERED_SAMPLES: usize = 5;
/// Share of the throughput before that counts as back.
pub(super) const RECOVERED_SHARE: f64 = 0.95;

/// Pages a second that each tenant used in an interval.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Rates {
    pub from_s: f64,
    pub to_s: f64,
    pub steady: f64,
    pub bursting: f64,
}

/// What the daemon told at a moment.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Told {
    pub at_s: f64,
    /// Sections on the warm side of each tenant's sets: hot, warm and active.
    pub hot_sections: [u64; 2],
    /// Cold ones of both, of all that are in sets or were evicted.
    pub cold_share: f64,
    /// Share of the machine's CPU time that each class of the scheduler used since the last moment.
    pub shares: Vec<(String, f64)>,
}

/// One burst.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Slice {
    pub rates: Vec<Rates>,
    pub told: Vec<Told>,
    /// Bytes used, of the budget or of the cgroup with what zram holds.
    pub used: Vec<(f64, u64)>,
    /// Faults of the tenant that bursts, as its vCPU saw them, since the burst.
    pub faults: Latencies,
    /// The same as the daemon saw them.
    pub served: Served,
}

/// What was measured with all memory present, before the arms of a round.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Reference {
    /// Pages a second of the tenant that bursts, with its larger working set.
    pub bursting: f64,
    /// Of the steady one beside that.
    pub steady: f64,
    /// `UFFDIO_COPY` of a page, and a whole fault answered by that.
    pub copies: Latencies,
    pub round_trips: Latencies,
}

impl Slice {
    /// When the tenant's throughput was back at [`RECOVERED_SHARE`] of `before`, and stayed there for half a
    /// second; the end of the slice if it never was.
    pub(super) fn recovery_s(&self, before: f64) -> f64 {
        let after: Vec<&Rates> = self
            .rates
            .iter()
            .filter(|rates| rates.from_s >= 0.0)
            .collect();
        let is_back = |part: &&[&Rates]| {
            mean(part.iter().map(|rates| rates.bursting)) >= RECOVERED_SHARE * before
        };
        let found = after.windows(RECOVERED_SAMPLES).find(is_back);
        match found {
            Some(part) => part[0].from_s,
            None => after.last().map_or(0.0, |rates| rates.to_s),
        }
    }

    /// Whether it ever was.
    pub(super) fn has_recovered(&self, before: f64) -> bool {
        let last = self.rates.last().map_or(0.0, |rates| rates.to_s);
        self.recovery_s(before) < last
    }

    /// Median throughput of the tenant in the last third, over `before`.
    pub(super) fn after_share(&self, before: f64) -> f64 {
        let end = self.rates.last().map_or(0.0, |rates| rates.to_s);
        let late = self
            .rates
            .iter()
            .filter(|rates| rates.from_s >= end * 2.0 / 3.0);
        median(late.map(|rates| rates.bursting)) / before
    }

    /// The least that the steady tenant did in half a second after the burst, over `before`.
    pub(super) fn steady_least_share(&self, before: f64) -> f64 {
        let after: Vec<f64> = self
            .rates
            .iter()
            .filter(|rates| rates.from_s >= 0.0)
            .map(|rates| rates.steady)
            .collect();
        let means = after
            .windows(RECOVERED_SAMPLES)
            .map(|part| mean(part.iter().copied()));
        means.fold(f64::INFINITY, f64::min) / before
    }

    /// The most that was ever used.
    pub(super) fn used_max_bytes(&self) -> u64 {
        self.used.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0)
    }

    /// The fewest hot sections of a tenant over the most, from `from_s` on: 1 if they stay the same.
    pub(super) fn hot_share(&self, tenant: usize, from_s: f64) -> f64 {
        let late = self.told.iter().filter(|told| told.at_s >= from_s);
        let counts: Vec<u64> = late.map(|told| told.hot_sections[tenant]).collect();
        let (least, most) = (counts.iter().min(), counts.iter().max());
        match (least, most) {
            (Some(least), Some(most)) if *most > 0 => to_f64(*least) / to_f64(*most),
            _ => f64::NAN,
        }
    }

    /// Median of a figure that the daemon told, between two times.
    pub(super) fn told_between(
        &self,
        from_s: f64,
        to_s: f64,
        figure: impl Fn(&Told) -> f64,
    ) -> f64 {
        let within = self
            .told
            .iter()
            .filter(|told| (from_s..to_s).contains(&told.at_s));
        median(within.map(figure))
    }

    /// The least cold share from the burst on.
    pub(super) fn cold_least_share(&self) -> f64 {
        let after = self.told.iter().filter(|told| told.at_s >= 0.0);
        after
            .map(|told| told.cold_share)
            .fold(f64::INFINITY, f64::min)
    }

    /// End of the slice.
    pub(super) fn end_s(&self) -> f64 {
        self.rates.last().map_or(0.0, |rates| rates.to_s)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A slice whose tenant does nothing for `stall` tenths of a second after its burst.
    pub(crate) fn slice(stall: u32) -> Slice {
        let rates = (-20..60).map(|tenth| Rates {
            from_s: f64::from(tenth) / 10.0,
            to_s: f64::from(tenth + 1) / 10.0,
            steady: if tenth == 3 { 50.0 } else { 100.0 },
            bursting: if (0..i32::try_from(stall).unwrap()).contains(&tenth) {
                10.0
            } else {
                200.0
            },
        });
        let told = (-10..30).map(|fifth| Told {
            at_s: f64::from(fifth) / 5.0,
            hot_sections: [if fifth == 2 { 9 } else { 10 }, 20],
            cold_share: if fifth == 1 { 0.3 } else { 0.5 },
            shares: vec![("reclaim".to_owned(), 0.1), ("scan".to_owned(), 0.05)],
        });
        Slice {
            rates: rates.collect(),
            told: told.collect(),
            used: vec![(-1.0, 700), (0.5, 990), (2.0, 800)],
            faults: [5000_u64, 12_000, 40_000].into_iter().collect(),
            served: Served::of(
                "pagetide_vm_vcpu_fault_us_bucket{vm=\"bursting\",le=\"10.0\"} 8\n\
                 pagetide_vm_vcpu_fault_us_bucket{vm=\"bursting\",le=\"+Inf\"} 10\n",
                "bursting",
            )
            .unwrap(),
        }
    }

    #[test]
    fn recovery_is_when_throughput_is_back_for_half_a_second() {
        assert!(slice(0).recovery_s(200.0).abs() < 1e-9);
        assert!((slice(17).recovery_s(200.0) - 1.7).abs() < 0.21);
        let never = slice(60);
        assert!((never.recovery_s(200.0) - 6.0).abs() < 1e-9);
        assert!(!never.has_recovered(200.0) && slice(17).has_recovered(200.0));
        assert!((slice(3).after_share(250.0) - 0.8).abs() < 1e-9);
    }

    #[test]
    fn shares_tell_the_worst_moment() {
        let slice = slice(3);
        assert!((slice.steady_least_share(100.0) - 0.9).abs() < 1e-9);
        assert_eq!(slice.used_max_bytes(), 990);
        assert!((slice.hot_share(0, 0.0) - 0.9).abs() < 1e-9);
        assert!((slice.hot_share(1, 0.0) - 1.0).abs() < 1e-9);
        assert!((slice.cold_least_share() - 0.3).abs() < 1e-9);
        let before = slice.told_between(-9.0, 0.0, |told| told.cold_share);
        assert!((before - 0.5).abs() < 1e-9);
    }
}
