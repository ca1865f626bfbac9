// SPDX-License-Identifier: Apache-2.0
//! Latencies of one kind over all rounds, and their percentiles.

use crate::bench::figures::{at_permille, median, rounded};
use serde_json::{Value, json};

/// Latencies in nanoseconds, kept apart by round.
#[derive(Default)]
pub(super) struct Samples {
    rounds: Vec<Vec<u32>>,
}

impl Samples {
    /// Takes those of one more round.
    pub(super) fn add(&mut self, mut round_ns: Vec<u32>) {
        round_ns.sort_unstable();
        self.rounds.push(round_ns);
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.rounds.iter().map(Vec::len).sum()
    }

    /// The mean of a round in microseconds, of the middle one: a disturbed round is left out.
    pub(super) fn mean_us(&self) -> f64 {
        let mean = |round: &Vec<u32>| {
            let sum: u64 = round.iter().map(|ns| u64::from(*ns)).sum();
            ratio(sum, round.len() as u64) / 1e3
        };
        median(self.rounds.iter().map(mean))
    }

    /// The value that `permille` thousandths are not above, in microseconds.
    pub(super) fn us(&self, permille: usize) -> f64 {
        let mut all: Vec<u32> = self.rounds.iter().flatten().copied().collect();
        all.sort_unstable();
        at(&all, permille)
    }

    /// The same of each round.
    pub(super) fn us_by_round(&self, permille: usize) -> Vec<f64> {
        self.rounds
            .iter()
            .map(|round| at(round, permille))
            .collect()
    }

    /// `{p50, p90, p99, n}` in microseconds, less `base_us`.
    pub(super) fn report(&self, base_us: f64) -> Value {
        let us = |permille| rounded(self.us(permille) - base_us);
        json!({ "p50": us(500), "p90": us(900), "p99": us(990), "n": self.count() })
    }
}

fn at(sorted: &[u32], permille: usize) -> f64 {
    at_permille(sorted, permille).map_or(f64::NAN, |ns| f64::from(ns) / 1e3)
}

/// `part` over `whole`.
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    let ratio = part as f64 / whole as f64;
    ratio
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_over_all_rounds_and_of_each() {
        let mut samples = Samples::default();
        samples.add((1..=50).rev().map(|us| us * 1000).collect());
        samples.add((51..=100).map(|us| us * 1000).collect());
        assert_eq!(samples.us(500), 50.0);
        assert_eq!(samples.us(990), 99.0);
        assert_eq!(samples.us_by_round(1000), [50.0, 100.0]);
        assert_eq!(samples.report(10.0)["p90"], 80.0);
        assert_eq!(samples.count(), 100);
    }
}
