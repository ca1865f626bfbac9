// SPDX-License-Identifier: Apache-2.0
//! [`PromotionAge`]: how long a device leaves a section alone before the section is protected, as
//! late as the evictor of its VM allows.
//!
//! Protection is of use just before the evictor would come. The paper promotes after 180 s, a time
//! that "reflects the reclaim policy in the memory subsystem" and was set "empirically" (VPRI 6.2).
//! Where the evictor takes sections that were idle for 15 s, such a policy protects nothing: all is
//! gone before. Where it takes nothing younger than an hour, it spends its slots on sections that
//! nobody is going to take. So the age is learnt:
//! ```text
//!   a section grows idle ──┬── it is evicted first     too late:   age shorter by 1/16
//!                          └── it is promoted first    in time:    age longer by 1/16 of 1/follow
//! ```
//! It never becomes shorter than 7/8 of the age at which that section was evicted, for this would have been
//! enough: a scan for promotion comes a ninth of the age late at most. So a pool of buffers that goes as a whole
//! counts as one loss.
//!
//! The two are in balance when one in `follow` + 1 sections is evicted before it is promoted,
//! whatever the size of the VM and its pace, and the age is then at that quantile of the ages at
//! which sections of devices are evicted. A VM from which nothing is taken protects less and less.
//!
//! One for all devices of a VM, since they share an evictor: a network interface that is idle for
//! the first time profits from what a disk has shown.

use super::recency::nanos;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Shortest age: the evictor of the daemon takes nothing that it found in use less than two rounds
/// of its samples ago.
pub const AGE_MIN: Duration = Duration::from_secs(10);
/// Longest age. A section that is not touched for so long is not worth a slot.
pub const AGE_MAX: Duration = Duration::from_secs(3_600);
/// One eviction of a section that was not promoted yet makes the age shorter by a part in this many.
const STEP: u64 = 16;

/// See the module. Used by one thread at a time; atomic because policies are sent to others.
#[derive(Debug)]
pub struct PromotionAge(AtomicU64);

impl PromotionAge {
    /// It is `age` until something is learnt.
    #[must_use]
    pub fn starting_at(age: Duration) -> Self {
        Self(AtomicU64::new(nanos(age)))
    }

    /// The age.
    #[must_use]
    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }

    /// A section was evicted at the age `evicted_at`, before it was promoted.
    pub fn evicted_first(&self, evicted_at: Duration) {
        let age = self.0.load(Relaxed);
        let enough = nanos(evicted_at) / 8 * 7;
        self.set((age - age / STEP).max(enough.min(age)));
    }

    /// A section was old enough before it was evicted; one in `follow` may be evicted first.
    pub fn promoted_first(&self, follow: u64) {
        let age = self.0.load(Relaxed);
        self.set(age.saturating_add(age / STEP.saturating_mul(follow).max(1)));
    }

    fn set(&self, age_ns: u64) {
        let bounded = age_ns.clamp(nanos(AGE_MIN), nanos(AGE_MAX));
        self.0.store(bounded, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    /// Sections that nobody touches again, and an evictor that takes each at an age from `least_s`
    /// to `most_s`; the age that is learnt, and the share of the last sections that were evicted first.
    fn learnt(start_s: u64, least_s: u64, most_s: u64, follow: u64) -> (u64, f64) {
        let age = PromotionAge::starting_at(Duration::from_secs(start_s));
        let mut random = SplitMix64::new(7);
        let mut lost = 0_u32;
        for number in 0..40_000 {
            let evicted_at = Duration::from_secs(random.between(least_s, most_s + 1));
            if evicted_at < age.get() {
                age.evicted_first(evicted_at);
                lost += u32::from(number >= 20_000);
            } else {
                age.promoted_first(follow);
            }
        }
        (age.get().as_secs(), f64::from(lost) / 20_000.0)
    }

    #[test]
    fn age_is_where_one_section_in_so_many_is_evicted_first_wherever_it_began() {
        for start_s in [20, 180, 3_000] {
            let (age_s, lost) = learnt(start_s, 100, 200, 16);
            assert!((98..125).contains(&age_s), "{age_s} s after {start_s} s");
            assert!((0.05..0.07).contains(&lost), "{lost}");
        }
        let (age_s, lost) = learnt(180, 15, 25, 4);
        assert!((14..21).contains(&age_s), "{age_s}");
        assert!((0.17..0.23).contains(&lost), "{lost}");
    }

    #[test]
    fn pool_that_goes_as_a_whole_makes_the_age_no_shorter_than_it_must_be() {
        let age = PromotionAge::starting_at(Duration::from_secs(180));
        for _ in 0..600 {
            age.evicted_first(Duration::from_secs(176));
        }
        assert_eq!(age.get(), Duration::from_secs(154));
    }

    #[test]
    fn age_stays_within_its_bounds_whatever_happens() {
        let age = PromotionAge::starting_at(Duration::from_secs(180));
        for _ in 0..10_000 {
            age.evicted_first(Duration::ZERO);
        }
        assert_eq!(age.get(), AGE_MIN);
        for _ in 0..10_000 {
            age.promoted_first(1);
        }
        assert_eq!(age.get(), AGE_MAX);
    }
}
