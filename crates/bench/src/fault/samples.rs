// SPDX-License-Identifier: Apache-2.0
//! Latencies of one kind over all rounds, and their percentiles.

use crate::figures::{at_permille, median, rounded};
use serde_json::{Value, json};

/// Latencies in nanoseconds, separate by round.
#[derive(Default)]
pub(crate) struct Samples {
    rounds: Vec<Vec<u32>>,
}

impl Samples {
    /// Adds those of one more round.
    pub(crate) fn add(&mut self, mut round_ns: Vec<u32>) {
        round_ns.sort_unstable();
        self.rounds.push(round_ns);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.rounds.iter().map(Vec::len).sum()
    }

    /// The median of the rounds' means, in microseconds: a disturbed round has no effect.
    pub(crate) fn mean_us(&self) -> f64 {
        let mean = |round: &Vec<u32>| {
            let sum: u64 = round.iter().map(|ns| u64::from(*ns)).sum();
            ratio(sum, round.len() as u64) / 1e3
        };
        median(self.rounds.iter().map(mean))
    }

    /// The total time of a round over that of `peer`, the median of the rounds.
    pub(crate) fn whole_over(&self, peer: &Self) -> f64 {
        let sum = |round: &Vec<u32>| round.iter().map(|ns| u64::from(*ns)).sum();
        let rounds = self.rounds.iter().zip(&peer.rounds);
        median(rounds.map(|(ours, theirs)| ratio(sum(ours), sum(theirs))))
    }

    /// The value that `permille` thousandths do not exceed, in microseconds.
    pub(crate) fn us(&self, permille: usize) -> f64 {
        let mut all: Vec<u32> = self.rounds.iter().flatten().copied().collect();
        all.sort_unstable();
        at(&all, permille)
    }

    /// The same of each round.
    pub(crate) fn us_by_round(&self, permille: usize) -> Vec<f64> {
        self.rounds
            .iter()
            .map(|round| at(round, permille))
            .collect()
    }

    /// `{p50, p90, p99, n}` in microseconds, less `base_us`.
    pub(crate) fn report(&self, base_us: f64) -> Value {
        let us = |permille| rounded(self.us(permille) - base_us);
        json!({ "p50": us(500), "p90": us(900), "p99": us(990), "n": self.count() })
    }
}

fn at(sorted: &[u32], permille: usize) -> f64 {
    at_permille(sorted, permille).map_or(f64::NAN, |ns| f64::from(ns) / 1e3)
}

/// `part` over `whole`.
pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
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
        let mut peer = Samples::default();
        peer.add(vec![2_550_000]);
        assert_eq!(samples.whole_over(&peer), 0.5);
    }
}
