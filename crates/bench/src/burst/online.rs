// SPDX-License-Identifier: Apache-2.0
//! A host in small as time goes by, after Taiji 5.3.2 and Fig 15 a, b and d: both tenants' working sets change
//! every few seconds, the same way in each run.
//!
//! | turns | working set, of what it is before the burst |
//! |---|---|
//! | eight in ten | four to six fifths of it |
//! | one in ten | twice as much |
//! | one in ten | a tenth: the tenant is idle |
//!
//! As on a host where days are measured, no tenant keeps its CPU busy: each rests after some pages ([`REST_US`]),
//! and used a fifth of a CPU where that was looked at.

use super::{
    report::{Measured, Sizes, share_within},
    slice::Slice,
};
use crate::harness::figures::{mean, rounded, to_f64};
use pagetide_random::SplitMix64;
use serde_json::{Value, json};
use std::time::Duration;

/// A working set stays as it is for so long.
pub(super) const TURN: Duration = Duration::from_secs(5);
/// A tenant rests for so many microseconds after each [`BATCH`](crate::busy::guest::BATCH) of pages.
pub(super) const REST_US: u64 = 200;
/// Of the tenants' demands.
const SEED: u64 = 15;
/// Taiji's 99 of 100 faults take less than this.
const NEARLY_ALL_US: f64 = 15.0;
/// Names of the states against the watermarks, the lowest first.
const WATER: [&str; 4] = ["below_min", "below_low", "between", "above_high"];

/// What a tenant uses, turn after turn.
pub(super) struct Demand {
    random: SplitMix64,
    /// The working set before the burst, in thousandths of the RAM.
    hot_permille: u32,
}

impl Demand {
    /// That of the tenant at this place, whose working set is of `hot_permille` before the burst.
    pub(super) fn of(tenant: usize, hot_permille: u32) -> Self {
        Self {
            random: SplitMix64::stream(SEED, tenant as u64),
            hot_permille,
        }
    }

    /// The working set of the next turn, in thousandths of the RAM.
    pub(super) fn next_permille(&mut self) -> u32 {
        let usual = self.hot_permille;
        let some = self.random.below(u64::from(usual) * 2 / 5);
        match self.random.below(10) {
            0 => usual * 2,
            1 => usual / 10,
            _ => usual * 4 / 5 + u32::try_from(some).unwrap_or(0),
        }
    }
}

/// Shares of the time by state against the watermarks.
fn water(sizes: &Sizes, slice: &Slice) -> Value {
    let mut counts = [0; WATER.len()];
    for (_, used) in &slice.used {
        let free = sizes.budget_bytes.saturating_sub(*used);
        let marks = [sizes.min_bytes, sizes.low_bytes, sizes.high_bytes];
        let state = marks.iter().filter(|mark| free >= **mark).count();
        counts[state] += 1;
    }
    let all = to_f64(slice.used.len().max(1) as u64);
    let named = WATER
        .iter()
        .zip(counts)
        .map(|(name, count)| ((*name).to_owned(), rounded(to_f64(count) / all).into()));
    Value::Object(named.collect())
}

/// Cold shares of all samples, ascending.
pub(super) fn cold_shares(slice: &Slice) -> Vec<f64> {
    let mut shares: Vec<f64> = slice.told.iter().map(|told| told.cold_share).collect();
    shares.sort_unstable_by(f64::total_cmp);
    shares
}

/// The figures of `slice`; what `round` measured says what faults may take.
pub(super) fn describe(sizes: &Sizes, round: &Measured, slice: &Slice) -> Value {
    let cold = cold_shares(slice);
    let at = |permille: usize| cold.get((cold.len() * permille / 1000).min(cold.len().max(1) - 1));
    let most_used = slice.used_max_bytes();
    let copy_us = round.reference.copies.us(500);
    json!({
        "seconds": rounded(slice.end_s()),
        "free_min_bytes": sizes.budget_bytes.saturating_sub(most_used),
        "water_share": water(sizes, slice),
        "cold_share": {
            "least": at(0).copied().map(rounded),
            "p10": at(100).copied().map(rounded),
            "p50": at(500).copied().map(rounded),
            "mean": rounded(mean(cold.iter().copied())),
        },
        "served_faults": slice.served.count(),
        "served_within_10us_share": rounded(slice.served.share_within(round.served_limit_us())),
        "served_within_15us_share": rounded(slice.served.share_within(NEARLY_ALL_US + copy_us)),
        "whole_within_share": rounded(share_within(&slice.faults, round.whole_limit_us())),
        "whole_p90_us": rounded(slice.faults.us(900)),
        "whole_p99_us": rounded(slice.faults.us(990)),
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            report::tests::{SIZES, measured},
            slice::tests::slice,
        },
        *,
    };

    #[test]
    fn demands_differ_by_tenant_and_are_the_same_again() {
        let some = |tenant| {
            let mut demand = Demand::of(tenant, 250);
            (0..200)
                .map(|_| demand.next_permille())
                .collect::<Vec<u32>>()
        };
        assert_eq!(some(0), some(0));
        assert_ne!(some(0), some(1));
        for permille in [500, 25] {
            let count = some(0).iter().filter(|turn| **turn == permille).count();
            assert!((5..40).contains(&count), "{permille}: {count} of 200");
        }
    }

    #[test]
    fn shares_are_by_the_watermarks_and_over_all_samples() {
        let figures = describe(&SIZES, &measured(None), &slice(5));
        // Free: 300, 10 and 200 of 1000; low is 20 and high 40.
        assert_eq!(figures["water_share"]["above_high"], json!(0.667));
        assert_eq!(figures["water_share"]["below_low"], json!(0.333));
        assert_eq!(figures["cold_share"]["least"], json!(0.3));
        assert_eq!(figures["cold_share"]["p50"], json!(0.5));
        assert_eq!(figures["served_within_10us_share"], json!(0.8));
        assert_eq!(figures["free_min_bytes"], json!(10));
    }
}
