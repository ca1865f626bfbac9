// SPDX-License-Identifier: Apache-2.0
//! Times of single operations and their percentiles: of one slice ([`Latencies`]), and by round
//! ([`LatenciesByRound`]).

use super::figures::{at_permille, median, rounded, thousandths, to_f64};
use serde_json::{Map, Value, json};

/// Times of one slice in nanoseconds, ascending.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Latencies(Vec<u64>);

impl<T: Into<u64>> FromIterator<T> for Latencies {
    fn from_iter<I: IntoIterator<Item = T>>(ns: I) -> Self {
        let mut sorted: Vec<u64> = ns.into_iter().map(Into::into).collect();
        sorted.sort_unstable();
        Self(sorted)
    }
}

impl Latencies {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The least time that `permille` thousandths do not exceed; 0 if there is none.
    pub(crate) fn ns(&self, permille: usize) -> u64 {
        at_permille(&self.0, permille).unwrap_or(0)
    }

    /// The same in microseconds; NaN if there is none.
    pub(crate) fn us(&self, permille: usize) -> f64 {
        at_permille(&self.0, permille).map_or(f64::NAN, |ns| to_f64(ns) / 1e3)
    }

    /// Their mean in nanoseconds; NaN if there is none.
    pub(crate) fn mean_ns(&self) -> f64 {
        self.sum_ns() / to_f64(self.count() as u64)
    }

    fn sum_ns(&self) -> f64 {
        to_f64(self.0.iter().sum())
    }

    /// An object of percentiles in microseconds: a name, and its thousandths.
    pub(crate) fn report_us(&self, percentiles: &[(&str, usize)]) -> Value {
        let named = percentiles
            .iter()
            .map(|(name, permille)| ((*name).to_owned(), thousandths(self.us(*permille))));
        Value::Object(named.collect::<Map<_, _>>())
    }
}

/// Times of one kind over all rounds of a bench.
#[derive(Default)]
pub(crate) struct LatenciesByRound(Vec<Latencies>);

impl LatenciesByRound {
    /// Adds those of one more round.
    pub(crate) fn add(&mut self, round_ns: Vec<u32>) {
        self.0.push(round_ns.into_iter().collect());
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(Latencies::count).sum()
    }

    /// The median of the rounds' means, in microseconds: a disturbed round has no effect.
    pub(crate) fn mean_us(&self) -> f64 {
        median(self.0.iter().map(|round| round.mean_ns() / 1e3))
    }

    /// The total time of a round over that of `peer`, the median of the rounds.
    pub(crate) fn whole_over(&self, peer: &Self) -> f64 {
        super::figures::median_ratio(&self.0, &peer.0, Latencies::sum_ns)
    }

    /// The value that `permille` thousandths do not exceed, in microseconds.
    pub(crate) fn us(&self, permille: usize) -> f64 {
        let all = self.0.iter().flat_map(|round| round.0.iter().copied());
        all.collect::<Latencies>().us(permille)
    }

    /// The same of each round.
    pub(crate) fn us_by_round(&self, permille: usize) -> Vec<f64> {
        self.0.iter().map(|round| round.us(permille)).collect()
    }

    /// `{p50, p90, p99, n}` in microseconds, less `base_us`.
    pub(crate) fn report(&self, base_us: f64) -> Value {
        let us = |permille| rounded(self.us(permille) - base_us);
        json!({ "p50": us(500), "p90": us(900), "p99": us(990), "n": self.count() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_over_all_rounds_and_of_each() {
        let mut samples = LatenciesByRound::default();
        samples.add((1..=50).rev().map(|us| us * 1000).collect());
        samples.add((51..=100).map(|us| us * 1000).collect());
        assert_eq!(samples.us(500), 50.0);
        assert_eq!(samples.us(990), 99.0);
        assert_eq!(samples.us_by_round(1000), [50.0, 100.0]);
        assert_eq!(samples.report(10.0)["p90"], 80.0);
        assert_eq!(samples.count(), 100);
        assert_eq!(samples.mean_us(), 75.5);
        let mut peer = LatenciesByRound::default();
        peer.add(vec![2_550_000]);
        assert_eq!(samples.whole_over(&peer), 0.5);
    }

    #[test]
    fn report_has_the_percentiles_asked_for_whatever_the_order_of_the_times() {
        let times: Latencies = (1..=10_000_u64).rev().map(|us| us * 1000).collect();
        let report = times.report_us(&[("p50", 500), ("p999", 999), ("worst", 1000)]);
        assert_eq!(
            report,
            json!({"p50": 5000.0, "p999": 9990.0, "worst": 10_000.0})
        );
        assert_eq!((times.count(), times.mean_ns()), (10_000, 5_000_500.0));
        assert_eq!(times.ns(500), 5_000_000);
    }

    #[test]
    fn of_no_times_there_is_no_percentile() {
        let none = Latencies::default();
        assert!(none.us(500).is_nan() && none.mean_ns().is_nan());
        assert_eq!((none.count(), none.ns(500)), (0, 0));
        assert_eq!(none.report_us(&[("p50", 500)])["p50"], Value::Null);
    }
}
