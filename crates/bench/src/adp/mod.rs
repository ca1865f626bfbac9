// SPDX-License-Identifier: Apache-2.0
//! `bench adp`: I/O page faults that DMA protectors save, and the memory they pin for it, as in figures 16
//! and 17 of VPRI.
//!
//! ```text
//!   14 made guests of 8 to 64 GiB ─► an overcommitted host, for an hour of virtual time
//!       for each seed, each overcommit (10, 20, 30 %), each mode and each arm:
//!       modes   the scan sees CPUs only (the paper's: `figures.ARM`) │ DMA is seen (ours: `figures.dma_seen.ARM`)
//!       arms    none │ lru │ adp, which beside this evictor has the paper's times │ adp_follow, times that follow it
//! ```
//! The evictor, the policies and the choice of victims are the product's own. What the guests do was fitted to
//! what the paper states of DMA and of cold memory, and each of these figures is printed beside the paper's.
//! A figure of one overcommit is the mean over the seeds, with the least and the most; a headline is the worst
//! overcommit's mean.
//!
//! # What the paper does not say
//! The idle time after which its evictor takes a section, and how the memory that the host lacks is divided
//! among the VMs. Both decide what a protector can save. Here a section is taken when it was left alone for
//! [`COLD_AFTER`]: the paper promotes after 180 s ("the threshold reflects the reclaim policy in the memory
//! subsystem", 6.2) and scans every 20 s, so that all are promoted by then. And as many VMs as make up what is
//! lacking by half of their memory give all that they have of that, and the others share the rest, so that the
//! ratios go from 0 to 50 % as in the paper. `figures.vms` has ratio and ages of each VM, and
//! `figures.sensitivity` what other times, other guests and a division by need lead to; `--plots DIR` draws that.
//!
//! The last part measures how long fleets of a thousand devices take to replay (`fleets.rs`).

mod figures;
mod fleets;
mod plots;
mod sensitivity;

use crate::harness::{
    report::{BenchError, BenchReport, failed},
    rounds::progress,
};
use pagetide_policy::protect::PolicyChoice;
use pagetide_sim::{
    fleet::{GuestRecipe, GuestStatistics, Load, Round, paper_fleet, statistics},
    replay::{Division, DmaTouches, Summary, VmAccount},
};
use std::{num::NonZeroUsize, path::PathBuf, time::Duration};

const NAME: &str = "adp";
/// A section left alone for so long is taken.
const COLD_AFTER: Duration = Duration::from_secs(200);
/// Name of each arm, and its policy. The first is what the others are compared with.
const ARMS: [(&str, &str); 4] = [
    ("none", "none"),
    ("lru", "lru"),
    ("adp", "adp"),
    ("adp_follow", "adp:follow=1"),
];
/// The modes; the first is the paper's.
const MODES: [DmaTouches; 2] = [DmaTouches::Unseen, DmaTouches::Seen];

/// The parameters of the bench.
#[derive(Clone, PartialEq, Debug)]
pub struct AdpBenchOptions {
    /// The guests of the host, for each seed.
    pub fleets: Vec<Vec<GuestRecipe>>,
    /// Memory promised beyond the existing memory, each in its own round.
    pub overcommits: Vec<f64>,
    /// Virtual seconds of a round.
    pub seconds: u64,
    /// Idle times after which sections are taken, in seconds, for the picture of what they decide.
    pub cold_after_s: Vec<u64>,
    /// VMs of each fleet of the last part; each has two devices.
    pub fleet_vms: usize,
    /// Sections of each of them.
    pub fleet_sections: u64,
    /// Virtual seconds of the fleet with the steady load.
    pub steady_seconds: u64,
    /// Virtual seconds of the fleet of synthetic guests.
    pub guest_seconds: u64,
    /// Where pictures are drawn, if any are.
    pub plots: Option<PathBuf>,
}

/// How long DMA is observed for the guests' statistics, as in 4.2.
const STATISTICS_S: u64 = 1_800;

/// Seeds, unless others are asked for.
const SEEDS: u64 = 5;

impl AdpBenchOptions {
    /// The bench over so many seeds, with pictures in `plots`.
    #[must_use]
    pub fn of(seeds: Option<u64>, plots: Option<PathBuf>) -> Self {
        Self {
            fleets: (1..=seeds.unwrap_or(SEEDS)).map(paper_fleet).collect(),
            overcommits: vec![0.1, 0.2, 0.3],
            seconds: 3_600,
            cold_after_s: vec![60, 90, 120, 150, 180, 200, 220, 240, 300, 420, 600, 900],
            fleet_vms: 500,
            fleet_sections: 8_192,
            steady_seconds: 2 * 3_600,
            guest_seconds: 1_200,
            plots,
        }
    }
}

/// One round, and the results.
struct Outcome {
    mode: DmaTouches,
    overcommit: f64,
    arm: &'static str,
    summary: Summary,
    accounts: Vec<VmAccount>,
}

/// What a round is made of beside its guests.
#[derive(Clone, Copy)]
struct Setting {
    mode: DmaTouches,
    overcommit: f64,
    division: Division,
    cold_after: Duration,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError::Failed`] if the guests cannot be replayed, or a picture cannot be drawn.
pub fn run(options: &AdpBenchOptions) -> Result<BenchReport, BenchError> {
    let mut report = BenchReport::new(NAME);
    progress(NAME, "the guests' statistics");
    figures::guests(&mut report, &analyse(options)?);
    let outcomes = rounds(options)?;
    figures::vms(&mut report, options, &outcomes);
    figures::arms(&mut report, options, &outcomes);
    figures::capacity(&mut report, &outcomes);
    let points = sensitivity::run(options)?;
    figures::sensitivity(&mut report, &points);
    if let Some(dir) = &options.plots {
        let files = plots::draw(dir, &points, &outcomes).map_err(failed)?;
        report
            .figures
            .insert("plots".into(), serde_json::json!(files));
    }
    fleets::run(&mut report, options)?;
    figures::paper(&mut report);
    Ok(report)
}

/// The statistics of all guests of the first seed.
fn analyse(options: &AdpBenchOptions) -> Result<Vec<(Load, GuestStatistics)>, BenchError> {
    let guests = options.fleets.first().into_iter().flatten();
    let one = |guest: &GuestRecipe| Ok((guest.load, statistics(guest, STATISTICS_S)?));
    guests
        .map(one)
        .collect::<Result<_, pagetide_sim::replay::ReplayError>>()
        .map_err(failed)
}

fn rounds(options: &AdpBenchOptions) -> Result<Vec<Outcome>, BenchError> {
    let mut outcomes = Vec::new();
    for mode in MODES {
        for overcommit in options.overcommits.iter().copied() {
            let setting = Setting {
                mode,
                overcommit,
                division: Division::InTurn,
                cold_after: COLD_AFTER,
            };
            for (seed, guests) in (1..).zip(&options.fleets) {
                let percent = overcommit * 100.0;
                progress(
                    NAME,
                    format_args!("DMA {mode:?}, overcommit {percent:.0} %, seed {seed}"),
                );
                outcomes.extend(arms(options, guests, &setting)?);
            }
        }
    }
    Ok(outcomes)
}

/// The rounds of all arms.
fn arms(
    options: &AdpBenchOptions,
    guests: &[GuestRecipe],
    setting: &Setting,
) -> Result<Vec<Outcome>, BenchError> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    for (arm, policy) in ARMS {
        let policy: PolicyChoice = policy.parse().map_err(failed)?;
        let round = Round {
            guests: guests.to_vec(),
            policy,
            overcommit: setting.overcommit,
            division: setting.division,
            cold_after: setting.cold_after,
            dma: setting.mode,
            seconds: options.seconds,
            capacity_every: Some(Duration::from_secs(60)),
            threads: threads(),
        };
        let accounts = round.run().map_err(failed)?;
        let base = outcomes.first().map_or(&accounts, |base| &base.accounts);
        let summary = Summary::of(&accounts, Some(base));
        outcomes.push(Outcome {
            mode: setting.mode,
            overcommit: setting.overcommit,
            arm,
            summary,
            accounts,
        });
    }
    Ok(outcomes)
}

fn threads() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sim::replay::SteadyLoad;
    use serde_json::Value;

    fn tiny() -> AdpBenchOptions {
        let small = |guest: GuestRecipe| GuestRecipe {
            sections: 512,
            ..guest
        };
        let fleet = |seed| paper_fleet(seed).into_iter().take(4).map(small).collect();
        AdpBenchOptions {
            fleets: [1, 2].map(fleet).into(),
            overcommits: vec![0.1, 0.3],
            seconds: 1_200,
            cold_after_s: vec![120, 300],
            fleet_vms: 2,
            fleet_sections: 256,
            steady_seconds: 300,
            guest_seconds: 60,
            plots: None,
        }
    }

    #[test]
    fn report_has_each_arms_worst_means_and_the_ranges_of_each_overcommit_in_both_modes() {
        let report = run(&tiny()).expect("tiny guests");
        let seen = &report.figures["dma_seen"];
        for (arm, _) in ARMS {
            for figures in [&report.figures[arm], &seen[arm]] {
                for name in ["nic_reduction", "block_reduction", "vm_pinned_share"] {
                    let each = ["overcommit_10", "overcommit_30"].map(|at| &figures[at][name]);
                    let means = each.map(|each| each["mean"].as_f64());
                    assert!(means.contains(&figures[name].as_f64()), "{arm} {name}");
                    for each in each {
                        let [least, mean, most] =
                            ["least", "mean", "most"].map(|of| each[of].as_f64());
                        assert!(least <= mean && mean <= most, "{arm} {name} {each}");
                    }
                }
            }
        }
        assert_eq!(report.figures["none"]["vm_pinned_share"], Value::from(0.0));
        assert!(report.figures["lru"]["vm_pinned_share"].as_f64() > Some(0.0));
        let vms = &report.figures["vms"]["overcommit_30"];
        assert_eq!(vms.as_array().map(Vec::len), Some(4));
        assert!(vms[0]["taken_share"].as_f64() > Some(0.2), "{vms}");
        // Two ages in turn, one by need, and two other kinds of guests.
        let points = report.figures["sensitivity"].as_array().map(Vec::len);
        assert_eq!(points, Some(5));
    }

    #[test]
    fn report_has_the_fleets_and_the_paper_beside_what_was_made() {
        let report = run(&tiny()).expect("tiny guests");
        for fleet in ["fleet", "fleet_of_guests"] {
            let figures = &report.figures[fleet];
            assert_eq!(figures["devices"], Value::from(4), "{fleet}");
            assert_eq!(figures["vm_sections"], Value::from(256), "{fleet}");
        }
        // Two VMs, each for 300 s.
        let touches = 2 * 300 * SteadyLoad::PER_SECOND;
        assert_eq!(report.figures["fleet"]["touches"], Value::from(touches));
        assert!(report.ratios.contains_key("rpr_nic_adp_over_lru"));
        assert!(report.ratios.contains_key("rpr_block_adp_over_lru"));
        assert!(report.peers.keys().all(|name| name.starts_with("paper_")));
        let cold = &report.figures["generator"]["cold_share_after_120s"];
        assert_eq!(cold["paper"], Value::from(0.45));
        assert!(cold["made"].as_f64() > Some(0.3), "{cold}");
    }

    #[test]
    fn pictures_are_drawn_where_they_are_asked_for() {
        let dir = std::env::temp_dir().join(format!("pagetide-adp-plots-{}", std::process::id()));
        let options = AdpBenchOptions {
            plots: Some(dir.clone()),
            ..tiny()
        };
        let report = run(&options).expect("tiny guests");
        let files = report.figures["plots"].as_array().expect("a list");
        assert_eq!(files.len(), 4);
        for file in files {
            let text =
                std::fs::read_to_string(file.as_str().expect("a path")).expect("it is there");
            assert!(text.contains("<svg") || text.starts_with('{'), "{file}");
        }
        std::fs::remove_dir_all(dir).expect("it was made");
    }
}
