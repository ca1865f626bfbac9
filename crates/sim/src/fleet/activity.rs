// SPDX-License-Identifier: Apache-2.0
//! The busy and quiet times of a guest.
//!
//! ```text
//!   busy ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▁▁▁▁▁▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▁▁▁▁▇▇▇…     80 % of the time
//! ```

use super::random::{LoadRandom, whole};

/// Mean length of a quiet time, in seconds; each is between a fifth of that and nine fifths.
const QUIET_MEAN_S: f64 = 300.0;

/// The activity of a part of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pace {
    /// Its work.
    Busy,
    /// Almost none.
    Quiet,
}

/// Alternating busy and quiet times of one part of a guest.
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
        // It may have started some time ago.
        let length_s = activity.length_s();
        activity.until_s = activity.random.between(length_s / 4, length_s).max(1);
        activity
    }

    /// Its activity in this second. Seconds must be requested in order.
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
        let spread = 0.2 + 1.6 * self.random.unit();
        let quiet = QUIET_MEAN_S * spread;
        let idle = (1.0 - self.intensity).max(0.01);
        let length = match self.pace {
            Pace::Busy => quiet * self.intensity / idle,
            Pace::Quiet => quiet,
        };
        whole(length).max(1)
    }
}

/// Share of the seconds below `end_s` that are busy: for tests and reports.
#[cfg(test)]
pub(super) fn busy_share(mut activity: Activity, end_s: u64) -> f64 {
    let busy = (0..end_s)
        .filter(|second| activity.pace(*second) == Pace::Busy)
        .count();
    super::random::number(busy as u64) / super::random::number(end_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activity_over_days_is_busy_for_the_share_it_was_told() {
        let activity = Activity::new(LoadRandom::new(1, 2), 0.8);
        let share = busy_share(activity, 20 * 86_400);
        assert!((0.78..0.82).contains(&share), "{share}");
    }
}
