// SPDX-License-Identifier: Apache-2.0
//! [`Trial`]: determines whether prefetching helps, by pausing it for a while.
//!
//! A prefetched section takes the room of another, and the cost of that depends on all users of the VM's
//! memory. On most disks it costs little; where a guest loops over more data than its memory holds, all
//! room given away is missed at once. What the policy sees of single sections does not distinguish the
//! two. So the policy *acts* and *rests* in slices of time, and compares:
//!
//! ```text
//!   first eviction                                     ┌ act, 8 times as long ┐ rest, twice as long …
//!     │ rest ┌ act, 8 times as long ┐ rest ┌ better? ───┤
//!     │                                                 └ rest, 8 times        ┐ act, twice as long …
//!
//!   missed := faults / returns     of a slice past its first third, in which the one before shows still
//! ```
//! A *return* is a touch after at least [`RETURN_S`] of idle time: only such a touch can fault, so load cancels
//! out. The first slices are short, since much can be gained or lost soon. Each one that confirms the
//! assumption makes the next longer, up to hours: a guest with a loop of an hour shows its loss only after that
//! time.

use std::time::Duration;

/// The mode of a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// Sections are prefetched.
    Act,
    /// They are not.
    Rest,
}

impl Mode {
    fn other(self) -> Self {
        match self {
            Self::Act => Self::Rest,
            Self::Rest => Self::Act,
        }
    }
}

/// A touch after this long an idle time may be a fault.
pub(super) const RETURN_S: u64 = 15;
/// Length of the first and the longest trial of the mode that is not assumed better.
const TRIAL_FIRST: Duration = Duration::from_secs(360);
const TRIAL_MAX: Duration = Duration::from_secs(2 * 3_600);
/// The better mode is used for this many times the length of a trial: at first, and at most.
const BETTER_TIMES: u32 = 8;
const BETTER_TIMES_MAX: u32 = 16;
/// The first part of a slice, one in this many, is not counted.
const SETTLING: u32 = 3;
/// Part of a mode's counts that is left after another slice of it.
const KEPT: f64 = 0.7;
/// Fewer returns are ignored.
const KNOWN_LEAST: f64 = 20.0;

#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    returns: f64,
    faults: f64,
}

impl Tally {
    fn missed(self) -> Option<f64> {
        (self.returns >= KNOWN_LEAST).then(|| self.faults / self.returns)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Trial {
    mode: Mode,
    better: Mode,
    /// When the slice began; none before the first eviction.
    began: Option<Duration>,
    slice: Tally,
    of_modes: [Tally; 2],
    /// Length of the next trial.
    trial: Duration,
    /// Consecutive trials with the same result.
    confirmed: u32,
}

impl Default for Trial {
    /// Acting is assumed better, but resting is measured first: in the first minutes the policy has
    /// learned nothing that it could act on.
    fn default() -> Self {
        Self {
            mode: Mode::Rest,
            better: Mode::Act,
            began: None,
            slice: Tally::default(),
            of_modes: [Tally::default(); 2],
            trial: TRIAL_FIRST,
            confirmed: 0,
        }
    }
}

impl Trial {
    /// Stays in `mode`, for tests of its behaviour.
    #[cfg(test)]
    pub(super) fn of(mode: Mode) -> Self {
        Self {
            mode,
            better: mode,
            trial: Duration::MAX / 16,
            ..Self::default()
        }
    }

    /// True if sections are to be prefetched now.
    pub(super) fn acts(&self) -> bool {
        self.mode == Mode::Act
    }

    /// True once the evictor took a section.
    pub(super) fn has_begun(&self) -> bool {
        self.began.is_some()
    }

    /// The evictor took a section.
    pub(super) fn evicted(&mut self, now: Duration) {
        self.began.get_or_insert(now);
    }

    /// The device touched a section after an idle time of [`RETURN_S`] or more.
    pub(super) fn returned(&mut self, now: Duration) {
        self.slice.returns += self.weight(now);
    }

    /// Such a touch was a fault.
    pub(super) fn faulted(&mut self, now: Duration) {
        self.slice.faults += self.weight(now);
    }

    fn weight(&self, now: Duration) -> f64 {
        let is_settled = |began| now.saturating_sub(began) >= self.length() / SETTLING;
        f64::from(u8::from(self.began.is_some_and(is_settled)))
    }

    fn length(&self) -> Duration {
        if self.mode == self.better {
            self.trial * (BETTER_TIMES + self.confirmed).min(BETTER_TIMES_MAX)
        } else {
            self.trial
        }
    }

    /// It is `now`. Acting must save at least the share `gain_least` of the faults.
    pub(super) fn passed(&mut self, now: Duration, gain_least: f64) {
        let Some(began) = self.began else { return };
        if now.saturating_sub(began) < self.length() {
            return;
        }
        let tally = &mut self.of_modes[self.mode as usize];
        tally.returns = tally.returns * KEPT + self.slice.returns;
        tally.faults = tally.faults * KEPT + self.slice.faults;
        self.slice = Tally::default();
        self.began = Some(now);
        if self.mode != self.better {
            self.compare(gain_least);
        } else {
            self.mode = self.better.other();
        }
    }

    /// The mode that was not assumed better was tried: compares the two.
    fn compare(&mut self, gain_least: f64) {
        let [act, rest] = [Mode::Act, Mode::Rest].map(|mode| self.of_modes[mode as usize].missed());
        if let (Some(act), Some(rest)) = (act, rest) {
            let better = if act < rest * (1.0 - gain_least) {
                Mode::Act
            } else {
                Mode::Rest
            };
            if better == self.better {
                self.confirmed += 1;
            } else {
                (self.confirmed, self.trial) = (0, TRIAL_FIRST);
            }
            if self.confirmed > 1 {
                self.trial = (self.trial * 2).min(TRIAL_MAX);
            }
            self.better = better;
        }
        self.mode = self.better;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of the seconds in which it acts, for a device that returns once a second, with the given
    /// misses per thousand while it acts and while it rests.
    fn acting_share(act_permille: u64, rest_permille: u64, hours: u64) -> f64 {
        let (mut trial, mut acting, mut owed) = (Trial::default(), 0_u32, 0);
        trial.evicted(Duration::ZERO);
        let end = hours * 3_600;
        for now in (0..end).map(Duration::from_secs) {
            acting += u32::from(trial.acts());
            trial.returned(now);
            owed += if trial.acts() {
                act_permille
            } else {
                rest_permille
            };
            if owed >= 1_000 {
                owed -= 1_000;
                trial.faulted(now);
            }
            trial.passed(now, 0.05);
        }
        f64::from(acting) / f64::from(u32::try_from(end).unwrap())
    }

    #[test]
    fn device_that_gains_acts_nearly_always_and_one_that_loses_nearly_never() {
        assert!(acting_share(300, 700, 480) > 0.92);
        assert!(acting_share(700, 300, 480) < 0.08);
        // Only as good as without is not good enough.
        assert!(acting_share(500, 500, 480) < 0.08);
    }

    #[test]
    fn first_hour_is_acting_but_for_the_look_at_what_resting_is_like() {
        let share = acting_share(300, 700, 1);
        assert!((0.75..0.92).contains(&share), "{share}");
    }

    #[test]
    fn device_that_changes_is_followed() {
        let mut trial = Trial::default();
        trial.evicted(Duration::ZERO);
        for second in 0..400 * 3_600 {
            let now = Duration::from_secs(second);
            let gains = second < 100 * 3_600;
            trial.returned(now);
            // It misses every second return, and every fourth in the better mode.
            let every = if trial.acts() == gains { 4 } else { 2 };
            if second % every == 0 {
                trial.faulted(now);
            }
            trial.passed(now, 0.05);
            if second == 99 * 3_600 {
                assert_eq!(trial.better, Mode::Act);
            }
        }
        assert_eq!(trial.better, Mode::Rest);
    }

    #[test]
    fn device_that_hardly_returns_is_believed_to_gain() {
        let mut trial = Trial::default();
        trial.evicted(Duration::ZERO);
        for second in 0..100_000 {
            trial.passed(Duration::from_secs(second), 0.05);
        }
        assert_eq!((trial.better, trial.trial), (Mode::Act, TRIAL_FIRST));
    }

    #[test]
    fn nothing_evicted_means_nothing_to_try() {
        let mut trial = Trial::default();
        trial.passed(Duration::from_secs(1_000_000), 0.05);
        assert!(!trial.acts() && trial.began.is_none());
    }
}
