// SPDX-License-Identifier: Apache-2.0
//! What a tier has done since it was opened.

use hdrhistogram::Histogram;
use std::time::Duration;

/// Longest time that is distinguished: a minute.
const LATENCY_US_MAX: u64 = 60_000_000;

/// How long requests took, in microseconds; all 0 before the first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Latency {
    /// Requests measured.
    pub count: u64,
    /// Half of them took no longer.
    pub p50_us: u64,
    /// 99 of 100 took no longer.
    pub p99_us: u64,
    /// The longest one.
    pub max_us: u64,
}

/// What the server of a remote tier says of its append-only file: what is still there when it has ended and is
/// started again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Durability {
    /// Each page that was acknowledged (`appendfsync always`).
    Always,
    /// Pages but for those of the last second or seconds.
    Lagging,
    /// At most an older snapshot (`appendonly no`).
    Nothing,
    /// It does not say.
    #[default]
    Unknown,
}

/// The figures of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierFigures {
    /// Most bytes that it may take.
    pub limit_bytes: u64,
    /// Bytes that stored pages take.
    pub stored_bytes: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Bytes read for them.
    pub read_bytes: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Batches that they were in.
    pub batches_written: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Batches whose write failed.
    pub write_errors: u64,
    /// Requests that took longer than their time bound; also counted as failed.
    pub overdue: u64,
    /// Requests refused because the queue was full or the tier was not working.
    pub refused: u64,
    /// How often it was found to have lost what it was given.
    pub losses: u64,
    /// Pages that were read and not there.
    pub pages_not_there: u64,
    /// What it keeps if it ends; `None` for a tier that keeps all.
    pub durability: Option<Durability>,
    /// How long reads took, from the call to the answer.
    pub read_latency: Latency,
    /// How long writes took, from the call to the answer.
    pub write_latency: Latency,
}

/// Latencies as they are recorded: to two digits, in some kilobytes.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        let Ok(histogram) = Histogram::new_with_bounds(1, LATENCY_US_MAX, 2) else {
            unreachable!("the bounds are constants that fit");
        };
        Self(histogram)
    }
}

impl Latencies {
    /// Records one.
    pub fn record(&mut self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(LATENCY_US_MAX);
        self.0.saturating_record(us.max(1));
    }

    /// Those recorded so far.
    #[must_use]
    pub fn latency(&self) -> Latency {
        Latency {
            count: self.0.len(),
            p50_us: self.0.value_at_quantile(0.5),
            p99_us: self.0.value_at_quantile(0.99),
            max_us: self.0.max(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_two_digits() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.latency(), Latency::default());
        for us in 1..=1000 {
            latencies.record(Duration::from_micros(us));
        }
        latencies.record(Duration::from_secs(3600));
        let latency = latencies.latency();
        assert_eq!(latency.count, 1001);
        assert!((495..=505).contains(&latency.p50_us), "{latency:?}");
        assert!((985..=1000).contains(&latency.p99_us), "{latency:?}");
        assert!(latency.max_us >= LATENCY_US_MAX, "{latency:?}");
    }
}
