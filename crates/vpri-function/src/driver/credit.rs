// SPDX-License-Identifier: Apache-2.0
//! How long a device may still delay callers that hold a section's lock.
//!
//! A device that answers each event after nearly [`PATIENCE`] would never be given
//! up, and would hold VMs up forever. So waits are charged to an account:
//! [`PATIENCE`] at once, and a tenth of the time in the long run ([`EARNED`]). Waits
//! below [`SHORT`] are free, and any wait may take that long. Simultaneous waits of
//! several callers count once. The account belongs to the driver, so that a device
//! gains nothing by reconnecting.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long the device may take to answer, in addition to the time it may wait for DMA to end. A
/// device that is scheduled at all takes some microseconds; section locks are held meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// A wait that is free: the device's CPU had something else to do.
pub(crate) const SHORT: Duration = Duration::from_millis(100);
/// One part in this many of the passing time is earned.
pub(crate) const EARNED: u32 = 10;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Credit(Mutex<Account>);

#[derive(Debug, Default)]
struct Account {
    used: Duration,
    /// The time up to which waits are counted.
    until: Option<Instant>,
}

impl Account {
    /// The amount used at `now`.
    fn used_at(&self, now: Instant) -> Duration {
        let passed = (self.until).map_or(Duration::ZERO, |it| now.saturating_duration_since(it));
        self.used.saturating_sub(passed / EARNED)
    }
}

impl Credit {
    /// How long a wait that begins at `now` may take.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        PATIENCE.saturating_sub(self.lock().used_at(now)).max(SHORT)
    }

    /// Charges the wait of a caller from `from` to `to`.
    pub(crate) fn spend(&self, from: Instant, to: Instant) {
        if to.saturating_duration_since(from) < SHORT {
            return;
        }
        let mut account = self.lock();
        let from = account.until.map_or(from, |until| from.max(until));
        let used = account.used_at(from);
        account.used = used.saturating_add(to.saturating_duration_since(from));
        account.until = Some(from.max(to));
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn short_waits_cost_nothing_however_many_there_are() {
        let credit = Credit::default();
        let mut now = Instant::now();
        for _ in 0..1000 {
            let to = now + SHORT - Duration::from_micros(1);
            credit.spend(now, to);
            now = to;
        }
        assert_eq!(credit.left(now), PATIENCE);
    }

    #[test]
    fn long_waits_use_the_patience_up_and_time_brings_it_back() {
        let credit = Credit::default();
        let begin = Instant::now();
        let now = begin + SECOND * 3 / 2;
        credit.spend(begin, now);
        assert_eq!(credit.left(now), PATIENCE - SECOND * 3 / 2);
        assert_eq!(credit.left(now + SECOND * 5), PATIENCE - SECOND);
        assert_eq!(
            credit.left(now + SECOND * 60),
            PATIENCE,
            "no more than that"
        );
        credit.spend(now, now + SECOND);
        assert_eq!(credit.left(now + SECOND), SHORT, "any wait may be short");
    }

    #[test]
    fn device_that_answers_each_time_just_before_its_end_holds_locks_a_tenth_of_the_time_at_most() {
        let credit = Credit::default();
        let begin = Instant::now();
        let (mut now, mut waited) = (begin, Duration::ZERO);
        // A device that does not answer is given up by then. This one always answers, as late as it
        // may, unless only free waits are left.
        while now < begin + SECOND * 600 {
            let left = credit.left(now);
            if left <= SHORT {
                now += SECOND;
                continue;
            }
            credit.spend(now, now + left);
            now += left;
            waited += left;
        }
        assert!(waited <= PATIENCE + SECOND * 60, "{waited:?}");
    }

    #[test]
    fn waits_of_several_callers_at_one_time_count_once() {
        let credit = Credit::default();
        let begin = Instant::now();
        let end = begin + SECOND;
        credit.spend(begin, end);
        credit.spend(begin + SECOND / 4, end);
        credit.spend(begin, end + SECOND / 2);
        assert_eq!(credit.left(end + SECOND / 2), PATIENCE - SECOND * 3 / 2);
    }
}
