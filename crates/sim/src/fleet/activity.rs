// SPDX-License-Identifier: Apache-2.0
//! The busy and quiet times of a network interface.
//!
//! ```text
//!   busy ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▁▁▁▁▁▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▁▇▇▇▇▇▇▇…     80 % of the time
//! ```
//! Lengths are without memory: most quiet times are short, and one in five is longer than 180 s, after which
//! the paper expects an eviction.

use super::random::{LoadRandom, whole};

/// Mean length of a quiet time, in seconds.
const QUIET_MEAN_S: f64 = 110.0;

/// What goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pace {
    /// Its work.
    Busy,
    /// Almost none.
    Quiet,
}

/// Alternating busy and quiet times.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    random: LoadRandom,
    intensity: f64,
    pace: Pace,
    until_s: u64,
}

impl Activity {
    /// Busy for the share `intensity` of the time, and at first.
    pub(super) fn new(random: LoadRandom, intensity: f64) -> Self {
        let mut activity = Self {
            random,
            intensity,
            pace: Pace::Busy,
            until_s: 0,
        };
        activity.until_s = activity.length_s();
        activity
    }

    /// What goes on in this second. Seconds must be requested in order.
    pub(super) fn pace(&mut self, second: u64) -> Pace {
        while second >= self.until_s {
            self.pace = match self.pace {
                Pace::Busy => Pace::Quiet,
                Pace::Quiet => Pace::Busy,
            };
            self.until_s += self.length_s();
        }
        self.pace
    }

    fn length_s(&mut self) -> u64 {
        let quiet = QUIET_MEAN_S * self.random.exponential();
        let idle = (1.0 - self.intensity).max(0.01);
        let length = match self.pace {
            Pace::Busy => quiet * self.intensity / idle,
            Pace::Quiet => quiet,
        };
        whole(length).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::number;
    use super::*;

    #[test]
    fn activity_over_days_is_busy_for_the_share_it_was_told() {
        const END_S: u64 = 20 * 86_400;
        let mut activity = Activity::new(LoadRandom::new(1, 2), 0.8);
        let busy = (0..END_S).filter(|second| activity.pace(*second) == Pace::Busy);
        let share = number(busy.count() as u64) / number(END_S);
        assert!((0.78..0.82).contains(&share), "{share}");
    }
}
