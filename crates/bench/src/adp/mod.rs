// SPDX-License-Identifier: Apache-2.0
//! `bench adp`: I/O page faults that DMA protectors save, and the memory they pin for it, as in figures 16
//! and 17 of VPRI.
//!
//! 14 synthetic guests of 8 to 64 GiB share a host that is overcommitted by 10, 20 and 30 %, for an hour of
//! virtual time each, under every policy: the product's own policies and its own choice of victims. The
//! analysis of `trace analyze` describes the guests' DMA beside the paper's figures, so that a reader can
//! judge the guests. Each headline figure is the worst of the three overcommits; the figures of each are
//! reported beside it.
//!
//! The last part measures how long fleets of a thousand devices take to replay (`fleets.rs`).

mod figures;
mod fleets;

use crate::harness::{
    report::{BenchError, BenchReport, failed},
    rounds::progress,
};
use pagetide_policy::protect::PolicyChoice;
use pagetide_sim::{
    fleet::{GuestRecipe, Load, Round, paper_fleet, statistics},
    replay::{Summary, VmAccount},
};
use pagetide_trace::DeviceAnalysis;
use std::{num::NonZeroUsize, time::Duration};

const NAME: &str = "adp";

/// The parameters of the bench.
#[derive(Clone, PartialEq, Debug)]
pub struct AdpBenchOptions {
    /// The guests of the host.
    pub guests: Vec<GuestRecipe>,
    /// Memory promised beyond the existing memory, each in its own round.
    pub overcommits: Vec<f64>,
    /// Virtual seconds of a round.
    pub seconds: u64,
    /// VMs of each fleet of the last part; each has two devices.
    pub fleet_vms: usize,
    /// Sections of each of them.
    pub fleet_sections: u64,
    /// Virtual seconds of the fleet with the steady load.
    pub steady_seconds: u64,
    /// Virtual seconds of the fleet of synthetic guests.
    pub guest_seconds: u64,
}

/// How long DMA is observed for the guests' statistics, as in 4.2.
const STATISTICS_S: u64 = 1_800;
impl Default for AdpBenchOptions {
    fn default() -> Self {
        Self {
            guests: paper_fleet(1),
            overcommits: vec![0.1, 0.2, 0.3],
            seconds: 3_600,
            fleet_vms: 500,
            fleet_sections: 8_192,
            steady_seconds: 24 * 3_600,
            guest_seconds: 1_200,
        }
    }
}

/// One round: an overcommit, a policy, and the results.
struct Outcome {
    overcommit: f64,
    policy: PolicyChoice,
    summary: Summary,
    accounts: Vec<VmAccount>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError::Failed`] if the guests cannot be replayed.
pub fn run(options: &AdpBenchOptions) -> Result<BenchReport, BenchError> {
    let mut report = BenchReport::new(NAME);
    progress(NAME, "the guests' statistics");
    let guests = analyse(options)?;
    figures::guests(&mut report, options, &guests);
    let outcomes = rounds(options)?;
    figures::policies(&mut report, &outcomes);
    figures::capacity(&mut report, &outcomes);
    fleets::run(&mut report, options)?;
    figures::paper(&mut report);
    Ok(report)
}

fn analyse(options: &AdpBenchOptions) -> Result<Vec<(Load, DeviceAnalysis)>, BenchError> {
    let mut all = Vec::new();
    for guest in &options.guests {
        let analysis = statistics(guest, STATISTICS_S).map_err(failed)?;
        all.extend(
            analysis
                .devices
                .into_iter()
                .map(|device| (guest.load, device)),
        );
    }
    Ok(all)
}

fn rounds(options: &AdpBenchOptions) -> Result<Vec<Outcome>, BenchError> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    for overcommit in &options.overcommits {
        let begin = outcomes.len();
        for policy in PolicyChoice::all() {
            progress(
                NAME,
                format_args!("overcommit {overcommit}, policy {policy}"),
            );
            let accounts = round(options, &policy, *overcommit).run().map_err(failed)?;
            // The first policy is `none`.
            let base = outcomes.get(begin).map_or(&accounts, |base| &base.accounts);
            let summary = Summary::of(&accounts, Some(base));
            outcomes.push(Outcome {
                overcommit: *overcommit,
                policy,
                summary,
                accounts,
            });
        }
    }
    Ok(outcomes)
}

fn round(options: &AdpBenchOptions, policy: &PolicyChoice, overcommit: f64) -> Round {
    Round {
        guests: options.guests.clone(),
        policy: policy.clone(),
        overcommit,
        seconds: options.seconds,
        capacity_every: Some(Duration::from_secs(60)),
        threads: threads(),
    }
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
            sections: 256,
            ..guest
        };
        AdpBenchOptions {
            guests: paper_fleet(1)
                .into_iter()
                .skip(2)
                .take(4)
                .map(small)
                .collect(),
            overcommits: vec![0.1, 0.3],
            seconds: 1_200,
            fleet_vms: 2,
            fleet_sections: 256,
            steady_seconds: 300,
            guest_seconds: 60,
        }
    }

    #[test]
    fn report_has_each_policys_worst_figures_and_those_of_each_overcommit() {
        let report = run(&tiny()).expect("tiny guests");
        for policy in PolicyChoice::NAMES {
            let figures = &report.figures[policy];
            for name in [
                "nic_reduction",
                "block_reduction",
                "vm_pinned_share",
                "nic_pinned_share",
                "block_pinned_share",
                "rpr_nic",
                "rpr_block",
            ] {
                let each = ["overcommit_10", "overcommit_30"].map(|at| &figures[at][name]);
                let worst = &figures[name];
                assert!(each.contains(&worst), "{policy} {name} {worst}");
                let largest = each.iter().filter_map(|each| each.as_f64());
                if name.ends_with("share") {
                    let largest = largest.fold(f64::MIN, f64::max);
                    assert_eq!(worst.as_f64(), Some(largest), "{policy} {name}");
                }
            }
        }
        assert_eq!(report.figures["none"]["vm_pinned_share"], Value::from(0.0));
        assert!(report.figures["adp"]["vm_pinned_share"].as_f64() > Some(0.0));
        for fleet in ["fleet", "fleet_adaptive", "fleet_of_guests"] {
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
    }
}
