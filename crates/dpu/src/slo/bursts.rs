// SPDX-License-Identifier: Apache-2.0
//! The rate of faults: the most within a second, and bursts of them (VPRI 3.4).
//!
//! A second is ten steps of 100 ms, so it slides by a tenth. A *burst* begins when more than
//! [`BURST_ABOVE`] faults have come within a second, and ends when that is no longer so.

use super::bins::{BIN_NS, BINS_PER_SECOND};

/// More faults than this within a second are a burst (VPRI 3.4).
pub(crate) const BURST_ABOVE: u32 = 5;
const STEPS: usize = 10;
const _: () = assert!(STEPS as u64 == BINS_PER_SECOND);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Burst {
    #[default]
    Over,
    GoesOn,
}

/// The rate after a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    /// Faults of the last second.
    pub per_second: u32,
    /// 1 if a burst has just begun, else 0.
    pub bursts: u32,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct FaultMeter {
    step: u64,
    /// Indexed by step, modulo their number.
    recent: [u32; STEPS],
    burst: Burst,
}

impl FaultMeter {
    /// Records faults.
    pub fn record(&mut self, at_ns: u64, count: u32) -> Rate {
        self.pass(at_ns / BIN_NS);
        let now = &mut self.recent[slot(self.step)];
        *now = now.saturating_add(count);
        let per_second = self.per_second();
        let bursts = u32::from(per_second > BURST_ABOVE && self.burst == Burst::Over);
        if bursts == 1 {
            self.burst = Burst::GoesOn;
        }
        Rate { per_second, bursts }
    }

    fn per_second(&self) -> u32 {
        self.recent.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Advances step by step: a burst may end in any step.
    fn pass(&mut self, step: u64) {
        for next in (self.step + 1..=step).take(STEPS) {
            self.recent[slot(next)] = 0;
            if self.per_second() <= BURST_ABOVE {
                self.burst = Burst::Over;
            }
        }
        // Reports of engines may be slightly out of order: late faults count as of now.
        self.step = self.step.max(step);
    }
}

fn slot(step: u64) -> usize {
    // Below ten, so nothing is lost.
    usize::try_from(step % BINS_PER_SECOND).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn six_faults_within_a_second_are_one_burst_and_five_are_none() {
        let mut meter = FaultMeter::default();
        let mut bursts = 0;
        for i in 0..5 {
            bursts += meter.record((5_000 + 100 * i) * MS, 1).bursts;
        }
        assert_eq!(bursts, 0);
        for i in 5..20 {
            bursts += meter.record((5_000 + 100 * i) * MS, 1).bursts;
        }
        assert_eq!(bursts, 1, "it goes on");
        bursts += meter.record(9_000 * MS, 6).bursts;
        assert_eq!(bursts, 2, "after a pause it is another");
    }

    #[test]
    fn rate_is_that_of_the_last_second_also_after_a_long_pause() {
        let mut meter = FaultMeter::default();
        assert_eq!(meter.record(100 * MS, 30).per_second, 30);
        assert_eq!(meter.record(900 * MS, 4).per_second, 34);
        assert_eq!(meter.record(1_150 * MS, 1).per_second, 5);
        assert_eq!(meter.record(987_654_321 * MS, 2).per_second, 2);
        assert_eq!(meter.record(5 * MS, 1).per_second, 3, "late ones count now");
    }
}
