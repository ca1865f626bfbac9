// SPDX-License-Identifier: Apache-2.0
//! Exact latencies: a counter for each nanosecond value up to a bound, a map above.

use std::collections::BTreeMap;

use crate::outcome::{LatencySummary, ratio};

/// Values below this have a counter each; a walk takes 1 or 2 µs, so nearly all do.
const COUNTED_NS: usize = 1 << 14;

/// How often each latency occurred.
#[derive(Debug, Default)]
pub(crate) struct Latencies {
    counted: Vec<u64>,
    longer: BTreeMap<u64, u64>,
}

impl Latencies {
    /// Counts one.
    #[inline]
    pub(crate) fn add(&mut self, took_ns: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let at = took_ns as usize;
        match self.counted.get_mut(at) {
            Some(count) => *count += 1,
            None => self.add_new(at),
        }
    }

    #[cold]
    fn add_new(&mut self, at: usize) {
        if at < COUNTED_NS {
            self.counted.resize(at + 1, 0);
            self.counted[at] = 1;
        } else {
            *self.longer.entry(at as u64).or_default() += 1;
        }
    }

    /// Mean and percentiles.
    pub(crate) fn summary(&self) -> LatencySummary {
        let counted = self.counted.iter().enumerate();
        let all = counted
            .map(|(took, count)| (took as u64, *count))
            .chain(self.longer.iter().map(|(took, count)| (*took, *count)))
            .filter(|(_, count)| *count > 0);
        let total: u64 = all.clone().map(|(_, count)| count).sum();
        let time: u64 = all.clone().map(|(took, count)| took * count).sum();
        // The least value that `per_mille` of all do not exceed.
        let quantile = |per_mille: u64| {
            let mut below = 0;
            let wanted = (total * per_mille).div_ceil(1000);
            all.clone()
                .find(|(_, count)| {
                    below += count;
                    below >= wanted
                })
                .map_or(0, |(took, _)| took)
        };
        LatencySummary {
            mean_ns: ratio(time, total),
            p50_ns: quantile(500),
            p90_ns: quantile(900),
            p99_ns: quantile(990),
            p999_ns: quantile(999),
            max_ns: all.clone().next_back().map_or(0, |(took, _)| took),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_equal_those_of_the_sorted_values() {
        let mut latencies = Latencies::default();
        let mut values: Vec<u64> = (0..1000).map(|n| n * n % 20_011).collect();
        for value in &values {
            latencies.add(*value);
        }
        values.sort_unstable();
        let summary = latencies.summary();
        assert_eq!(summary.p50_ns, values[499]);
        assert_eq!(summary.p999_ns, values[998]);
        assert_eq!(summary.max_ns, values[999]);
    }

    #[test]
    fn summary_of_nothing_is_zero() {
        assert_eq!(Latencies::default().summary(), LatencySummary::default());
    }
}
