// SPDX-License-Identifier: Apache-2.0
//! [`PromotionAge`]: how long a device leaves a section alone before the section is protected.
//!
//! Protection is of use just before the evictor would come. The paper promotes after 180 s, a time
//! that "reflects the reclaim policy in the memory subsystem" and was set "empirically" (VPRI 6.2).
//! Where the evictor takes sections that were idle for 15 s, such a policy protects nothing: all is
//! gone before. Where it takes nothing at all, the policy spends memory for nothing. So the age begins
//! as it is written and follows the evictor, by what becomes of sections that grow idle:
//! ```text
//!   a section grows idle ──┬── it is evicted first   (lost)
//!                          └── it is promoted first  (in time)
//!
//!   looked at once a round, a ninth of the age (the paper: 20 s of 180 s):
//!     more than one lost for `follow` in time    too late: 7/8 of the oldest age of those lost, but at
//!                                                least half of what it was; no try for 30 rounds
//!     some dropped for lack of slots, and none
//!     that it knows evicted for the age          nobody comes: longer by a quarter
//!     shorter than it is written                 a try: longer by 1/64
//!   a section that it knows is evicted           at most as it is written
//! ```
//! One round is one step, however many sections it saw: the buffers of a network interface grow idle
//! all at once. A round that saw few sections goes on. 7/8, because a promotion comes up to a ninth of
//! the age late; and the oldest, because a sudden demand for memory takes younger sections for a moment.
//! For that reason, too, it takes more than a few losses: an age that is too short is as bad as one that is too
//! long, wastes the slots on sections that are not about to go, and shows no loss by which it could be known.
//!
//! That nothing is evicted shows nothing where all that is idle has a slot; so it takes dropped sections that the
//! evictor leaves alone.
//!
//! One for all devices of a VM, since they share an evictor: an interface that is idle for the first time
//! profits from what a disk has shown.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Shortest age: the evictor of the daemon takes nothing that it found in use less than two rounds
/// of its samples ago.
pub const AGE_MIN: Duration = Duration::from_secs(10);
/// Longest age. A section that is not touched for so long is not worth a slot.
pub const AGE_MAX: Duration = Duration::from_secs(3_600);
/// A round is the age divided by this: the paper's 180 s by its 20 s.
const ROUNDS: u32 = 9;
/// A round with fewer sections than this goes on for the whole age.
const SECTIONS_MIN: u64 = 17;
/// Rounds without a try after sections were lost.
const HOLD_ROUNDS: u32 = 30;
/// A try makes the age longer by a part in this many.
const TRY_PART: u32 = 64;
/// And a round without an evictor by a part in this many.
const ALONE_PART: u32 = 4;

/// See the module. Used by one thread at a time; locked because policies are sent to others.
#[derive(Debug)]
pub struct PromotionAge(Mutex<State>);

#[derive(Debug)]
struct State {
    /// As it is written.
    start: Duration,
    age: Duration,
    /// When the last round ended.
    looked_at: Option<Duration>,
    /// When a section was evicted last that a device had touched not long ago.
    evicted_at: Option<Duration>,
    /// Rounds until the next try.
    hold_rounds: u32,
    /// Since the last round: sections dropped for lack of slots.
    dropped: u64,
    /// Likewise sections evicted first, the oldest age of them, and sections promoted first.
    lost: u64,
    oldest_lost: Duration,
    in_time: u64,
}

impl PromotionAge {
    /// It is `age` until something is learnt.
    #[must_use]
    pub fn starting_at(age: Duration) -> Self {
        Self(Mutex::new(State {
            start: age,
            age,
            looked_at: None,
            evicted_at: None,
            hold_rounds: 0,
            dropped: 0,
            lost: 0,
            oldest_lost: Duration::ZERO,
            in_time: 0,
        }))
    }

    /// The age.
    #[must_use]
    pub fn get(&self) -> Duration {
        self.lock().age
    }

    /// A section was evicted that a device had touched not long ago: the evictor is near.
    pub fn evicted(&self, now: Duration) {
        let mut state = self.lock();
        state.evicted_at = Some(now.max(state.evicted_at.unwrap_or_default()));
        state.age = state.age.min(state.start);
    }

    /// A section was evicted before it was promoted; the device had left it alone for `idle`.
    pub fn evicted_first(&self, idle: Duration) {
        let mut state = self.lock();
        state.lost = state.lost.saturating_add(1);
        state.oldest_lost = state.oldest_lost.max(idle);
    }

    /// A section was promoted before it was evicted.
    pub fn promoted_first(&self) {
        let mut state = self.lock();
        state.in_time = state.in_time.saturating_add(1);
    }

    /// A section that was old enough was dropped for lack of slots.
    pub fn dropped(&self) {
        let mut state = self.lock();
        state.dropped = state.dropped.saturating_add(1);
    }

    /// It is `now`: ends the round if it is over. One section may be lost for `follow` in time.
    pub fn look(&self, now: Duration, follow: u64) {
        let mut state = self.lock();
        let begun = *state.looked_at.get_or_insert(now);
        let round = match state.lost.saturating_add(state.in_time) {
            SECTIONS_MIN.. => state.age / ROUNDS,
            _ => state.age,
        };
        if now.saturating_sub(begun) >= round {
            state.end_round(now, follow);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing within a change can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn end_round(&mut self, now: Duration, follow: u64) {
        let age = self.age;
        let is_alone = |at: Duration| now.saturating_sub(at) >= age;
        let wanted = if self.lost.saturating_mul(follow) > self.in_time {
            self.hold_rounds = HOLD_ROUNDS;
            let enough = self.oldest_lost / 8 * 7;
            enough.min(age).max(age / 2)
        } else if self.dropped > 0 && self.evicted_at.is_none_or(is_alone) {
            age + age / ALONE_PART
        } else if self.hold_rounds > 0 {
            self.hold_rounds -= 1;
            age
        } else if age < self.start {
            (age + age / TRY_PART).min(self.start)
        } else {
            age
        };
        self.age = wanted.clamp(AGE_MIN.min(self.start), AGE_MAX.max(self.start));
        self.looked_at = Some(now);
        (self.lost, self.oldest_lost, self.in_time) = (0, Duration::ZERO, 0);
        self.dropped = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    const SECOND: Duration = Duration::from_secs(1);

    /// An hour in which a section grows idle each second, and an evictor that takes each at an age from
    /// `least_s` to `most_s`; the mean age in the second half, and the share of sections lost in it.
    fn learnt(start_s: u64, least_s: u64, most_s: u64, follow: u64) -> (f64, f64) {
        let age = PromotionAge::starting_at(SECOND * u32::try_from(start_s).unwrap());
        let mut random = SplitMix64::new(7);
        let (mut lost, mut sum) = (0_u32, 0.0);
        for second in 0..7_200_u32 {
            let now = SECOND * second;
            let idle = Duration::from_secs(random.between(least_s, most_s + 1));
            age.evicted(now);
            if idle < age.get() {
                age.evicted_first(idle);
                lost += u32::from(second >= 3_600);
            } else {
                age.promoted_first();
            }
            age.look(now, follow);
            if second >= 3_600 {
                sum += age.get().as_secs_f64();
            }
        }
        (sum / 3_600.0, f64::from(lost) / 3_600.0)
    }

    #[test]
    fn age_stays_as_written_where_that_is_in_time_and_follows_an_evictor_that_comes_sooner() {
        let (age_s, lost) = learnt(180, 190, 210, 1);
        assert!((179.9..180.1).contains(&age_s), "{age_s}");
        assert!(lost < 0.001, "{lost}");
        let (age_s, lost) = learnt(3_000, 190, 210, 1);
        assert!((170.0..205.0).contains(&age_s), "{age_s}");
        assert!(lost < 0.25, "{lost}");
        let (age_s, lost) = learnt(180, 18, 22, 1);
        assert!((14.0..20.5).contains(&age_s), "{age_s}");
        assert!(lost < 0.25, "{lost}");
    }

    #[test]
    fn pool_that_goes_as_a_whole_is_one_step_and_no_longer_than_it_must_be() {
        let age = PromotionAge::starting_at(SECOND * 180);
        age.look(Duration::ZERO, 1);
        for _ in 0..600 {
            age.evicted_first(SECOND * 176);
        }
        age.look(SECOND * 19, 1);
        assert_eq!(age.get(), SECOND * 180, "the round is not over");
        age.look(SECOND * 20, 1);
        assert_eq!(age.get(), SECOND * 154);
        for round in 2..=32 {
            for _ in 0..600 {
                age.promoted_first();
            }
            age.evicted(SECOND * 20 * round);
            age.look(SECOND * 20 * round, 1);
            let tries = u32::from(round > 31);
            assert_eq!(
                age.get(),
                SECOND * 154 + SECOND * 154 * tries / 64,
                "{round}"
            );
        }
    }

    #[test]
    fn age_grows_while_what_was_dropped_is_not_evicted_and_stays_within_its_bounds_whatever_happens()
     {
        let age = PromotionAge::starting_at(SECOND * 180);
        for second in 0..20_000 {
            age.look(SECOND * second, 1);
            assert!(second > 0 || age.get() == SECOND * 180);
            age.dropped();
        }
        assert_eq!(age.get(), AGE_MAX);
        age.evicted(SECOND * 20_000);
        assert_eq!(age.get(), SECOND * 180);
        for second in 20_000..40_000 {
            age.evicted(SECOND * second);
            age.evicted_first(Duration::ZERO);
            age.look(SECOND * second, 1);
        }
        assert_eq!(age.get(), AGE_MIN);
    }
}
