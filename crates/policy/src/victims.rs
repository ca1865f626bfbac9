// SPDX-License-Identifier: Apache-2.0
//! [`Victims`]: which section is evicted next (Taiji 4.2, VPRI 6.2).
//!
//! # Who may go
//! A scan takes every page out of the page tables and tells which sections were in use since the
//! scan before. What goes must have rested since the scan for at least [`UNMAPPED_MIN`]: then nobody
//! took a reference to it through a page table lately. Whether a page did rest, the owner of the
//! pages says.
//!
//! # The passes of one reclaim
//! ```text
//!   ColdOnly      sections on the cold side that are not protected, coldest first
//!   AllResting    not enough: the whole VM is hot; what rested since the scan, of any
//!                 section that is not protected
//!   Protected     not enough, and a limit that must be kept: protected ones that rested
//!   Scan          not enough: scan, rest for UNMAPPED_MIN, and all of them again; at most
//!                 PRESSED_SCANS_MAX times, for each costs every mapped page a small fault
//! ```
//! [`passes`] tells this order, the owner does the steps and stops when it has enough.
//!
//! Sparing what is protected is not locking it: a VM whose limit cannot be kept otherwise loses
//! protected sections, and that is counted. What stands between them and the others is whether
//! the others *rest*: each section that was left alone since the last scan, a few seconds ago, goes
//! before a protected one, and a protected one goes before the whole VM is scanned again for pages
//! that rest for no longer than [`UNMAPPED_MIN`]. Such a scan finds nearly all that the vCPUs work
//! with; to take that first would cost more than a device's fault, and the scan's time is
//! what a fill does not have that waits for room.
//!
//! So the owner leaves the third pass out as long as free memory is above the low mark, or if it had
//! no time to look at all the others.
//!
//! The clock is the caller's: times are durations since any fixed moment, and the same code serves
//! the daemon and a replay in virtual time.

use crate::{
    marks::PRESSED_SCANS_MAX,
    sets::{Drift, HotColdSets, Level},
};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// How long a page must have been unmapped before it may go. A reference taken just before the
/// unmapping by a copy in the kernel is gone by then.
pub const UNMAPPED_MIN: Duration = Duration::from_millis(50);
/// Sections drift towards cold at most this often, however often pressure makes the VM be scanned.
pub const DRIFT_MIN: Duration = Duration::from_secs(1);

/// Which sections a pass may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Sections on the cold side, but for protected ones.
    ColdOnly,
    /// All sections, but for protected ones.
    AllResting,
    /// Protected sections.
    Protected,
}

/// How much a reclaim wants what it wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// A limit must be kept: protected sections go rather than that the VM exceeds it.
    Limit,
    /// It was only asked for: what is protected stays.
    Wish,
}

/// One step of a reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// [`Victims::reclaim`] with this reach.
    Take(Reach),
    /// A scan, and then a rest of [`UNMAPPED_MIN`].
    Scan,
}

/// The steps of one reclaim, to be done until there is enough. See the module.
pub fn passes(need: Need) -> impl Iterator<Item = Step> {
    let protected = match need {
        Need::Limit => Some(Step::Take(Reach::Protected)),
        Need::Wish => None,
    };
    let resting = [Step::Take(Reach::ColdOnly), Step::Take(Reach::AllResting)];
    let takes = move || resting.into_iter().chain(protected);
    let pressed = (0..PRESSED_SCANS_MAX).flat_map(move |_| [Step::Scan].into_iter().chain(takes()));
    takes().chain(pressed)
}

/// What became of one section that was offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Pages of it that went.
    pub pages: u64,
    /// And now?
    pub then: Then,
}

/// How it goes on after a section was offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// To the next section.
    Next,
    /// To the next section; this one has no page any more and leaves the sets.
    Emptied,
    /// To the next section; a device was using this one.
    Busy,
    /// No further.
    Stop,
}

/// What one pass brought.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Reclaimed {
    /// Pages that went.
    pub evicted_pages: u64,
    /// Of them, pages of protected sections.
    pub protected_pages: u64,
    /// Sections passed over because a device was using them.
    pub busy_sections: u64,
    /// Sections passed over because they are protected.
    pub spared_sections: u64,
    /// True if it ended because it was stopped, and not because there was enough or nothing left.
    pub was_stopped: bool,
}

/// The sections of one VM as the evictor sees them. See the module.
#[derive(Debug, Default)]
pub struct Victims {
    sets: HotColdSets,
    scanned_at: Option<Duration>,
    drifted_at: Option<Duration>,
}

impl Victims {
    /// From now on there are just these sections; see [`HotColdSets::follow`].
    pub fn follow(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.sets.follow(sections);
    }

    /// Hot and cold as far as known.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        &self.sets
    }

    /// A scan has begun. Until [`Self::scanned`] nothing may go: a look that fails half-way has
    /// unmapped some pages just now.
    pub fn scan_begun(&mut self) {
        self.scanned_at = None;
    }

    /// A scan has found that just these sections were touched since the one before. `now` is when the
    /// last page was unmapped. Costs as much as was touched.
    pub fn scanned(&mut self, now: Duration, touched: impl IntoIterator<Item = SectionNo>) {
        let is_late = |at: Duration| now.saturating_sub(at) >= DRIFT_MIN;
        let drift = if self.drifted_at.is_none_or(is_late) {
            self.drifted_at = Some(now);
            Drift::OneSet
        } else {
            Drift::None
        };
        self.sets.scanned(touched, drift);
        self.scanned_at = Some(now);
    }

    /// Sections that were found in use between two scans.
    pub fn used(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.sets.scanned(sections, Drift::None);
    }

    /// When the last scan was, if it succeeded.
    #[must_use]
    pub fn scanned_at(&self) -> Option<Duration> {
        self.scanned_at
    }

    /// True if the last scan is long enough ago for pages to be taken.
    #[must_use]
    pub fn is_rested(&self, now: Duration) -> bool {
        self.scanned_at
            .is_some_and(|at| now.saturating_sub(at) >= UNMAPPED_MIN)
    }

    /// `section`, which had lost all its pages, has some again.
    pub fn filled(&mut self, section: SectionNo) {
        self.sets.filled(section);
    }

    /// `section` has lost all its pages, not to a pass of this one.
    pub fn emptied(&mut self, section: SectionNo) {
        self.sets.emptied(section);
    }

    /// Looks for emptied sections that have pages again though nobody touched them; see
    /// [`HotColdSets::look_at_empty`].
    pub fn look_at_empty(&mut self, sections_max: u64, has_pages: impl FnMut(SectionNo) -> bool) {
        self.sets.look_at_empty(sections_max, has_pages);
    }

    /// One pass: offers sections within `reach` to `evict`, coldest first, with the number of pages
    /// still wanted, until `pages` went or nothing is left. Nothing is offered before the last scan is
    /// [`UNMAPPED_MIN`] ago.
    pub fn reclaim(
        &mut self,
        now: Duration,
        pages: u64,
        reach: Reach,
        protected: impl Fn(SectionNo) -> bool,
        evict: impl FnMut(SectionNo, u64) -> Taken,
    ) -> Reclaimed {
        if self.is_rested(now) {
            self.offer(pages, reach, protected, evict)
        } else {
            Reclaimed::default()
        }
    }

    /// [`Self::reclaim`] for an owner who knows of each section by itself whether it rests
    /// ([`crate::candidates`]).
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

    const NOW: Duration = Duration::from_secs(60);

    /// Sections 0 and 1 are cold, 2 is cool, 3 is hot; 1 and 3 are protected.
    fn victims() -> Victims {
        let mut victims = Victims::default();
        victims.follow((0..4).map(SectionNo));
        for (scan, touched) in [&[2, 3][..], &[3], &[3], &[3]].iter().enumerate() {
            let at = DRIFT_MIN * u32::try_from(scan).unwrap();
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

    /// Offers sections of `section_pages` pages each; returns which were offered, and what came of it.
    fn take(
        victims: &mut Victims,
        pages: u64,
        reach: Reach,
        section_pages: u64,
    ) -> (Vec<u64>, Reclaimed) {
        let mut offered = Vec::new();
        let done = victims.reclaim(NOW, pages, reach, is_protected, |section, left| {
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
        let done = victims.reclaim(
            NOW,
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
    fn nothing_is_offered_before_the_scan_has_rested_or_after_one_that_failed() {
        let mut victims = victims();
        victims.scanned(NOW, []);
        assert!(!victims.is_rested(NOW + UNMAPPED_MIN / 2));
        assert_eq!(take(&mut victims, 10, Reach::AllResting, 10).0, []);
        assert!(victims.is_rested(NOW + UNMAPPED_MIN));
        victims.scan_begun();
        assert!(!victims.is_rested(NOW + UNMAPPED_MIN));
    }

    #[test]
    fn busy_sections_are_counted_and_a_stop_ends_the_pass() {
        let mut victims = victims();
        let mut offered = 0;
        let done = victims.reclaim(
            NOW,
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
    fn scans_in_quick_succession_let_nothing_drift() {
        let mut victims = Victims::default();
        victims.follow([SectionNo(0)]);
        for scan in 0..20 {
            victims.scanned(DRIFT_MIN / 20 * scan, []);
        }
        let level = victims.sets().level(SectionNo(0));
        assert_eq!(level, Some(Level::Inactive), "one drift, at the first scan");
        victims.scanned(DRIFT_MIN, []);
        assert_eq!(victims.sets().level(SectionNo(0)), Some(Level::Cool));
    }

    #[test]
    fn protected_sections_come_before_a_scan_after_all_others_and_only_for_a_limit() {
        let resting = [Step::Take(Reach::ColdOnly), Step::Take(Reach::AllResting)];
        for (need, protected) in [
            (Need::Wish, None),
            (Need::Limit, Some(Step::Take(Reach::Protected))),
        ] {
            let mut expected = Vec::from(resting);
            expected.extend(protected);
            for _ in 0..PRESSED_SCANS_MAX {
                expected.push(Step::Scan);
                expected.extend(resting);
                expected.extend(protected);
            }
            assert!(passes(need).eq(expected), "{need:?}");
        }
    }

    /// What a VM gives up for `pages` pages that a limit demands, by the section, while its sections
    /// `in_use` are touched all the time, and how often it is scanned for that.
    fn press(pages: u64, in_use: &[u64]) -> (Vec<u64>, u32) {
        let mut victims = victims();
        let (mut now, mut scans, mut gone) = (NOW, 0, Vec::new());
        for step in passes(Need::Limit) {
            let left = pages - gone.len() as u64;
            match step {
                _ if left == 0 => break,
                Step::Scan => {
                    victims.scanned(now, in_use.iter().copied().map(SectionNo));
                    now += UNMAPPED_MIN;
                    scans += 1;
                }
                Step::Take(reach) => {
                    victims.reclaim(now, left, reach, is_protected, |section, _| {
                        let rests = !in_use.contains(&section.0);
                        gone.extend(rests.then_some(section.0));
                        let pages = u64::from(rests);
                        let then = if rests { Then::Emptied } else { Then::Next };
                        Taken { pages, then }
                    });
                }
            }
        }
        (gone, scans)
    }

    #[test]
    fn limit_that_protected_sections_can_keep_costs_no_scan() {
        assert_eq!(press(2, &[]), (vec![0, 2], 0), "others rest");
        assert_eq!(press(2, &[2]), (vec![0, 1], 0), "one of them");
        assert_eq!(press(2, &[0, 2]), (vec![1, 3], 0), "none of them");
    }

    #[test]
    fn limit_that_nothing_can_keep_costs_no_more_than_its_scans() {
        assert_eq!(press(2, &[0, 1, 2, 3]), (vec![], PRESSED_SCANS_MAX));
    }
}
