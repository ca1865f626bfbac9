// SPDX-License-Identifier: Apache-2.0
//! [`Trial`]: less for a VM that does not notice, while another one lacks memory.
//!
//! Scans tell what is cold only after a while: when a VM lets go of most of its memory, all of that counts as
//! in use for half a minute more, and another VM that lacks memory pays with faults. So while one lacks memory, less is
//! trusted of what scans say of another that hardly refaults, in steps that double:
//!
//! ```text
//!   resident ──┐ 1/32
//!              └──┐ 1/16       as long as hardly any of it comes back
//!                 └────┐ 1/8   and somebody has taken it
//!   working set ─ ─ ─ ─└──┬─   it comes back: what is resident is in use, and is left alone for a while
//! ```
//! Its coldest sections go first, so the first that comes back ends the trial near its working set. What a trial
//! in vain costs is its first step; the pause after each of those is twice as long as the one before.

use super::units::{Bytes, Rate};
use std::time::Duration;

/// The first step, as a part of what is resident.
const FIRST_PARTS: u64 = 32;
/// Steps are no faster than this, or than an eighth of what is resident in a second.
const FASTEST: Rate = Rate(Bytes::mib(128));
const FASTEST_PARTS: u64 = 8;
/// Nor larger than this part of what is resident: the last one goes too far.
const STEP_PARTS: u64 = 4;
/// A step is noticed if more than one part in this many of it is refaulted.
const NOTICED_PARTS: u64 = 4;
/// A trial was of use if it took more than one part in this many of what was resident.
const USE_PARTS: u64 = 8;
/// Pause after a trial, and the longest after trials in vain.
const REST: Duration = Duration::from_secs(2);
const REST_MAX: Duration = Duration::from_secs(320);

/// Whether a VM under the budget refaults so much that it lacks memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lack {
    None,
    OfSome,
}

/// A VM after a period.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub resident: Bytes,
    pub refaulted: Bytes,
    pub length: Duration,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    /// At most so much counts as in use.
    trusted: Option<Bytes>,
    began_at: Bytes,
    step: Bytes,
    /// Until the next one may begin.
    rests: Duration,
    rest: Duration,
}

impl Default for Trial {
    fn default() -> Self {
        Self {
            trusted: None,
            began_at: Bytes::ZERO,
            step: Bytes::ZERO,
            rests: Duration::ZERO,
            rest: REST,
        }
    }
}

impl Trial {
    /// The most that counts as in use, while it is tried with less.
    pub fn trusted(&self) -> Option<Bytes> {
        self.trusted
    }

    /// Another period is over.
    pub fn go_on(&mut self, seen: &Seen, lack: Lack) {
        self.rests = self.rests.saturating_sub(seen.length);
        let first = seen.resident.part(1, FIRST_PARTS);
        let is_noticed = seen.refaulted > self.step.max(first).part(1, NOTICED_PARTS);
        match self.trusted {
            Some(_) if is_noticed => self.end(seen),
            Some(_) if lack == Lack::None => self.trusted = None,
            // What was tried is not evicted yet: nobody takes it, or not so fast.
            Some(trusted) if seen.resident > trusted + self.step => {}
            Some(trusted) => self.lower(trusted.min(seen.resident), self.step + self.step, seen),
            None if lack == Lack::None || is_noticed || self.rests > Duration::ZERO => {}
            None => {
                self.began_at = seen.resident;
                self.lower(seen.resident, first, seen);
            }
        }
    }

    fn lower(&mut self, from: Bytes, step: Bytes, seen: &Seen) {
        let rate = Rate(FASTEST.0.max(seen.resident.part(1, FASTEST_PARTS)));
        let most = rate
            .over(seen.length)
            .min(seen.resident.part(1, STEP_PARTS));
        self.step = step.min(most);
        self.trusted = Some(from.less(self.step));
    }

    fn end(&mut self, seen: &Seen) {
        let was_of_use = self.began_at.less(seen.resident) > self.began_at.part(1, USE_PARTS);
        if was_of_use {
            self.rest = REST;
        }
        self.rests = self.rest;
        self.rest = (2 * self.rest).min(REST_MAX);
        self.trusted = None;
        self.step = Bytes::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A VM that gives what is tried, and refaults all that it lacks of `used`.
    fn seconds(trial: &mut Trial, resident: Bytes, used: Bytes, count: u32) -> (Bytes, Bytes) {
        let (mut resident, mut refaulted_in_all) = (resident, Bytes::ZERO);
        for _ in 0..count {
            resident = trial
                .trusted()
                .map_or(resident, |trusted| trusted.min(resident));
            let refaulted = used.less(resident);
            resident += refaulted;
            refaulted_in_all += refaulted;
            let seen = Seen {
                resident,
                refaulted,
                length: SECOND,
            };
            trial.go_on(&seen, Lack::OfSome);
        }
        (resident, refaulted_in_all)
    }

    #[test]
    fn unused_memory_goes_in_steps_that_double_until_it_is_noticed() {
        let mut trial = Trial::default();
        let (resident, refaulted) = seconds(&mut trial, Bytes::mib(640), Bytes::mib(100), 12);
        assert!(resident < Bytes::mib(130), "{resident}");
        assert!(refaulted < Bytes::mib(130), "{refaulted}");
    }

    #[test]
    fn vm_that_uses_all_it_has_is_tried_ever_more_seldom() {
        let mut trial = Trial::default();
        let all = Bytes::mib(640);
        let (resident, refaulted) = seconds(&mut trial, all, all, 1000);
        assert_eq!(resident, all);
        // 2, 4, 8 … 256, 320 s apart: ten trials of 20 MiB each.
        assert!(refaulted <= Bytes::mib(11 * 20), "{refaulted}");
    }

    #[test]
    fn nothing_is_tried_while_nobody_lacks_memory_or_nobody_takes_what_was_tried() {
        let mut trial = Trial::default();
        let seen = Seen {
            resident: Bytes::mib(640),
            refaulted: Bytes::ZERO,
            length: SECOND,
        };
        trial.go_on(&seen, Lack::None);
        assert_eq!(trial.trusted(), None);
        for _ in 0..5 {
            trial.go_on(&seen, Lack::OfSome);
            assert_eq!(trial.trusted(), Some(Bytes::mib(620)));
        }
        trial.go_on(&seen, Lack::None);
        assert_eq!(trial.trusted(), None);
    }
}
