// SPDX-License-Identifier: Apache-2.0
//! What the things decide that the paper does not state: the idle time after which the evictor takes a
//! section, which VMs give the memory that the host lacks, and how many sections come again after three to
//! five minutes. One seed, the overcommit in the middle, the paper's mode; all else as in the rounds.

use super::{AdpBenchOptions, COLD_AFTER, MODES, NAME, Outcome, Setting, arms};
use crate::harness::{report::BenchError, rounds::progress};
use pagetide_sim::{
    fleet::GuestRecipe,
    replay::{Division, EvictionAges, Service},
};
use std::time::Duration;

/// Other shares of periodic sections, with all else as in the rounds.
const PERIODIC: [f64; 2] = [0.0, 0.02];

/// One choice of the three.
pub(super) struct Point {
    /// Of the guests, if it is another than in the rounds.
    pub(super) periodic: Option<f64>,
    pub(super) division: Division,
    pub(super) cold_after: Duration,
    /// Median age of evicted sections of disks and NICs, without a protector.
    pub(super) eviction_age_s: Option<u64>,
    /// Faults of disks without a protector.
    pub(super) block_faults: u64,
    /// By arm: share of the disks' faults that is saved, and of memory that is protected.
    pub(super) arms: Vec<(&'static str, Option<f64>, f64)>,
}

/// All points: sections taken at each age in turn; by need at the age of the rounds; and other guests.
pub(super) fn run(options: &AdpBenchOptions) -> Result<Vec<Point>, BenchError> {
    let in_turn = options.cold_after_s.iter().map(|cold_after_s| {
        let cold_after = Duration::from_secs(*cold_after_s);
        (Division::InTurn, cold_after, None)
    });
    let by_need = (Division::ByNeed, COLD_AFTER, None);
    let others = PERIODIC.map(|periodic| (Division::InTurn, COLD_AFTER, Some(periodic)));
    let all = in_turn.chain([by_need]).chain(others);
    all.map(|(division, cold_after, periodic)| point(options, division, cold_after, periodic))
        .collect()
}

fn point(
    options: &AdpBenchOptions,
    division: Division,
    cold_after: Duration,
    periodic: Option<f64>,
) -> Result<Point, BenchError> {
    progress(
        NAME,
        format_args!("sections taken after {cold_after:?}, {division:?}, periodic {periodic:?}"),
    );
    let (guests, overcommit) = middle(options);
    let setting = Setting {
        mode: MODES[0],
        overcommit,
        division,
        cold_after,
    };
    let guests: Vec<GuestRecipe> = guests
        .iter()
        .map(|guest| GuestRecipe {
            periodic: periodic.unwrap_or(guest.periodic),
            ..*guest
        })
        .collect();
    let outcomes = arms(options, &guests, &setting)?;
    let mut ages = EvictionAges::default();
    let none = outcomes.first().map_or(&[][..], |none| &none.accounts);
    for vm in none {
        ages.sum(&vm.eviction_ages);
    }
    let of = |outcome: &Outcome| {
        let block = outcome.summary.service(Service::Block);
        let reduction = block.and_then(|block| block.reduction);
        (outcome.arm, reduction, outcome.summary.vm_pinned_share)
    };
    Ok(Point {
        periodic,
        division,
        cold_after,
        eviction_age_s: ages.quantile_s(500),
        block_faults: none.iter().map(|vm| vm.faults(Service::Block)).sum(),
        arms: outcomes.iter().skip(1).map(of).collect(),
    })
}

/// The guests of the first seed, and the overcommit in the middle.
fn middle(options: &AdpBenchOptions) -> (&[GuestRecipe], f64) {
    let guests = options.fleets.first().map_or(&[][..], Vec::as_slice);
    let overcommits = &options.overcommits;
    let overcommit = overcommits.get(overcommits.len() / 2).copied();
    (guests, overcommit.unwrap_or(0.0))
}
