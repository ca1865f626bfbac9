// SPDX-License-Identifier: Apache-2.0
//! [`Victims`]: which section is evicted next (Taiji 4.2, VPRI 6.2).
//!
//! # Which sections may be evicted
//! A section to be evicted is first unmapped as a whole, and stays so for at least [`UNMAPPED_MIN`].
//! Then those of its pages may be evicted that were not mapped again: no reference to them was taken
//! through a page table lately ([`crate::candidates`]).
//!
//! # The passes of one reclaim
//! ```text
//!   ColdOnly      sections on the cold side that are not protected, coldest first
//!   AllResting    not enough: the whole VM is hot; what stays unmapped for UNMAPPED_MIN, of any
//!                 section that is not protected
//!   Protected     not enough, and a limit that must be kept: protected ones that stay unmapped
//!   TryAgain      not enough: wait for UNMAPPED_MIN, and all of them again, also those that were
//!                 found in use; at most TRIES_MAX times
//! ```
//! [`passes`] yields this order; [`crate::reclaim`] goes through it until there is enough.
//!
//! Protected sections are spared, not locked: a VM whose limit cannot be kept otherwise loses
//! protected sections, and that is counted. Each other section that is idle for [`UNMAPPED_MIN`] is
//! evicted before a protected one, and a protected one before sections that were found in use are
//! tried again: a fill that waits for room has no time for that.
//!
//! So the third pass is left out as long as free memory is above the low watermark, or if there was
//! no time to try all the others.

use crate::{
    set_times::SetTimes,
    sets::{HotColdSets, Level},
};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// How long a page must have been unmapped before it may be evicted. A reference that a copy in the
/// kernel took just before the unmapping is gone by then.
pub const UNMAPPED_MIN: Duration = Duration::from_millis(50);

/// Times that one reclaim tries again before it gives up for now.
const TRIES_MAX: u32 = 4;

/// Which sections a pass may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Sections on the cold side, except protected ones.
    ColdOnly,
    /// All sections, except protected ones.
    AllResting,
    /// Protected sections.
    Protected,
}

/// How urgent a reclaim is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// A limit must be kept: protected sections are evicted before the VM exceeds it.
    Limit,
    /// A plain request: protected sections stay.
    Wish,
}

/// One step of a reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Passes with this reach, until nothing is left in it.
    Take(Reach),
    /// Sections that were found in use may be tried again, after a wait of [`UNMAPPED_MIN`].
    TryAgain,
}

/// The steps of one reclaim, to be done until there is enough. See the module.
pub fn passes(need: Need) -> impl Iterator<Item = Step> {
    let protected = match need {
        Need::Limit => Some(Step::Take(Reach::Protected)),
        Need::Wish => None,
    };
    let resting = [Step::Take(Reach::ColdOnly), Step::Take(Reach::AllResting)];
    let takes = move || resting.into_iter().chain(protected);
    let again = (0..TRIES_MAX).flat_map(move |_| [Step::TryAgain].into_iter().chain(takes()));
    takes().chain(again)
}

/// Outcome for one section that was offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Pages of it that were evicted.
    pub pages: u64,
    /// How to continue.
    pub then: Then,
}

/// How a pass continues after a section was offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// With the next section.
    Next,
    /// With the next section; this one has no pages left and leaves the sets.
    Emptied,
    /// With the next section; a device was using this one.
    Busy,
    /// The pass ends.
    Stop,
}

/// Result of one pass.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Reclaimed {
    /// Pages evicted.
    pub evicted_pages: u64,
    /// Of them, pages of protected sections.
    pub protected_pages: u64,
    /// Sections skipped because a device was using them.
    pub busy_sections: u64,
    /// Sections skipped because they are protected.
    pub spared_sections: u64,
    /// True if the pass was stopped, and did not end because there was enough or nothing left.
    pub was_stopped: bool,
}

/// The sections of one VM as the evictor sees them. See the module.
#[derive(Debug, Default)]
pub struct Victims {
    sets: HotColdSets,
}

impl Victims {
    /// From now on exactly these sections exist; see [`HotColdSets::follow`].
    pub fn follow(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.sets.follow(sections);
    }

    /// Hot and cold as far as known.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        &self.sets
    }

    /// From now on these times hold.
    pub fn set_times(&mut self, times: SetTimes) {
        self.sets.set_times(times);
    }

    /// It is `now`.
    pub fn passed(&mut self, now: Duration) {
        self.sets.passed(now);
    }

    /// A scan has found that exactly these sections were touched since the previous one. `now` is
    /// when the last page was unmapped. The cost is proportional to the sections touched.
    pub fn scanned(&mut self, now: Duration, touched: impl IntoIterator<Item = SectionNo>) {
        self.sets.scanned(now, touched);
    }

    /// These sections were found in use between two scans.
    pub fn used(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.sets.used(sections);
    }

    /// `section` had lost all its pages, and has some again.
    pub fn filled(&mut self, section: SectionNo) {
        self.sets.filled(section);
    }

    /// `section` had lost all its pages, and has some again that nobody asked for yet.
    pub fn filled_ahead(&mut self, section: SectionNo) {
        self.sets.filled_ahead(section);
    }

    /// `section` has lost all its pages, by other means than a pass.
    pub fn emptied(&mut self, section: SectionNo) {
        self.sets.emptied(section);
    }

    /// One pass: offers sections within `reach` to `evict`, coldest first, with the number of pages
    /// still wanted, until `pages` are evicted or nothing is left.
    pub fn offer(
        &mut self,
        pages: u64,
        reach: Reach,
        protected: impl Fn(SectionNo) -> bool,
        mut evict: impl FnMut(SectionNo, u64) -> Taken,
    ) -> Reclaimed {
        let mut done = Reclaimed::default();
        let mut next = self.sets.coldest();
        while let Some(slot) = next {
            let left = pages.saturating_sub(done.evicted_pages);
            let too_warm =
                reach == Reach::ColdOnly && self.sets.level_at(slot) > Some(Level::Inactive);
            if left == 0 || too_warm {
                break;
            }
            next = self.sets.next_coldest(slot);
            let section = self.sets.section(slot);
            match (protected(section), reach) {
                (true, Reach::ColdOnly | Reach::AllResting) => {
                    done.spared_sections += 1;
                    continue;
                }
                (false, Reach::Protected) => continue,
                (true, Reach::Protected) | (false, Reach::ColdOnly | Reach::AllResting) => {}
            }
            let taken = evict(section, left);
            done.evicted_pages += taken.pages;
            if reach == Reach::Protected {
                done.protected_pages += taken.pages;
            }
            match taken.then {
                Then::Next => {}
                Then::Emptied => self.sets.emptied_at(slot),
                Then::Busy => done.busy_sections += 1,
                Then::Stop => {
                    done.was_stopped = true;
                    break;
                }
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::set_times::TIME_MIN;

    /// Sections 0 and 1 are cold, 2 is cool, 3 is hot; 1 and 3 are protected.
    fn victims() -> Victims {
        let mut victims = Victims::default();
        victims.follow((0..4).map(SectionNo));
        for (scan, touched) in [&[2, 3][..], &[3], &[3], &[3]].iter().enumerate() {
            let at = TIME_MIN * u32::try_from(scan + 1).unwrap();
            victims.scanned(at, touched.iter().copied().map(SectionNo));
        }
        let levels = (0..4).map(|section| victims.sets().level(SectionNo(section)).unwrap());
        let expected = [Level::Cold, Level::Cold, Level::Cool, Level::Hot];
        assert!(levels.eq(expected));
        victims
    }

    fn is_protected(section: SectionNo) -> bool {
        section.0 % 2 == 1
    }

    /// Offers sections of `section_pages` pages each; returns which were offered, and the result.
    fn take(
        victims: &mut Victims,
        pages: u64,
        reach: Reach,
        section_pages: u64,
    ) -> (Vec<u64>, Reclaimed) {
        let mut offered = Vec::new();
        let done = victims.offer(pages, reach, is_protected, |section, left| {
            offered.push(section.0);
            Taken {
                pages: left.min(section_pages),
                then: Then::Emptied,
            }
        });
        (offered, done)
    }

    #[test]
    fn each_pass_offers_what_is_in_its_reach_coldest_first() {
        for (reach, expected, spared) in [
            (Reach::ColdOnly, &[0, 2][..], 1),
            (Reach::AllResting, &[0, 2], 2),
            (Reach::Protected, &[1, 3], 0),
        ] {
            let (offered, done) = take(&mut victims(), 100, reach, 10);
            assert_eq!(offered, expected, "{reach:?}");
            assert_eq!(done.evicted_pages, 20, "{reach:?}");
            assert_eq!(done.spared_sections, spared, "{reach:?}");
            let protected = if reach == Reach::Protected { 20 } else { 0 };
            assert_eq!(done.protected_pages, protected, "{reach:?}");
        }
    }

    #[test]
    fn pass_ends_when_there_is_enough_and_offers_what_is_still_wanted() {
        let mut victims = victims();
        let mut wanted = Vec::new();
        let done = victims.offer(
            5,
            Reach::AllResting,
            |_| false,
            |_, left| {
                wanted.push(left);
                Taken {
                    pages: left.min(3),
                    then: Then::Next,
                }
            },
        );
        assert_eq!(wanted, [5, 2]);
        assert_eq!(done.evicted_pages, 5);
        assert!(!done.was_stopped);
    }

    #[test]
    fn emptied_section_is_not_offered_again_until_it_is_filled() {
        let mut victims = victims();
        assert_eq!(take(&mut victims, 10, Reach::ColdOnly, 10).0, [0]);
        assert_eq!(take(&mut victims, 10, Reach::ColdOnly, 10).0, [2]);
        assert_eq!(take(&mut victims, 10, Reach::ColdOnly, 10).0, []);
        victims.filled(SectionNo(0));
        assert_eq!(take(&mut victims, 10, Reach::AllResting, 10).0, [0]);
    }

    #[test]
    fn busy_sections_are_counted_and_a_stop_ends_the_pass() {
        let mut victims = victims();
        let mut offered = 0;
        let done = victims.offer(
            10,
            Reach::AllResting,
            |_| false,
            |section, _| {
                offered += 1;
                let then = if section.0 < 2 {
                    Then::Busy
                } else {
                    Then::Stop
                };
                Taken { pages: 0, then }
            },
        );
        assert_eq!((offered, done.busy_sections), (3, 2));
        assert!(done.was_stopped);
    }

    #[test]
    fn scans_in_quick_succession_let_nothing_sink() {
        let mut victims = Victims::default();
        victims.follow([SectionNo(0)]);
        for scan in 0..20 {
            victims.scanned(TIME_MIN / 20 * scan, []);
        }
        let level = |victims: &Victims| victims.sets().level(SectionNo(0));
        assert_eq!(level(&victims), Some(Level::Active));
        victims.scanned(TIME_MIN, []);
        assert_eq!(level(&victims), Some(Level::Inactive));
    }

    #[test]
    fn protected_sections_come_after_all_others_before_another_try_and_only_for_a_limit() {
        let resting = [Step::Take(Reach::ColdOnly), Step::Take(Reach::AllResting)];
        for (need, protected) in [
            (Need::Wish, None),
            (Need::Limit, Some(Step::Take(Reach::Protected))),
        ] {
            let mut expected = Vec::from(resting);
            expected.extend(protected);
            for _ in 0..TRIES_MAX {
                expected.push(Step::TryAgain);
                expected.extend(resting);
                expected.extend(protected);
            }
            assert!(passes(need).eq(expected), "{need:?}");
        }
    }
}
