// SPDX-License-Identifier: Apache-2.0
//! [`Candidates`]: sections selected for eviction.
//!
//! A sample of a section is not enough to evict it: pages that were not watched may be in use, and a copy
//! in the kernel may have pinned a mapped page just now. So a section to be evicted is first unmapped as
//! a whole, and stays so for at least [`UNMAPPED_MIN`]. Then those of its pages are evicted that were not
//! mapped again.
//!
//! ```text
//!                 unmapped as a whole        UNMAPPED_MIN later
//!   in the sets ──────────────────► resting ──────────────────► ready ──► its pages go, or some
//!        ▲                                                        │
//!        └──── another reclaim ◄──── tried ◄──── what is left is in use
//! ```
//! A section that is ready and not needed stays ready: it belongs to the *reserve*, from which memory
//! is available at once. Only a look at the whole section may unmap pages of it meanwhile, because an
//! unmapped page counts as one that was not used since then. So it is not sampled
//! ([`Candidates::stands`]). The kernel might still unmap pages (a huge page that it tries to make and
//! gives up); so after [`READY_MAX`] a section is looked at again, which costs nothing if all of it is
//! still unmapped.
//!
//! Times are durations since any fixed moment.

use crate::victims::UNMAPPED_MIN;
use pagetide_addr::SectionNo;
use rustc_hash::FxHashMap;
use std::{ops::Range, time::Duration};

/// How long a section stays ready before it is looked at again.
pub const READY_MAX: Duration = Duration::from_secs(10);
const _: () = assert!(UNMAPPED_MIN.as_nanos() < READY_MAX.as_nanos());

/// How far the eviction of a section has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Readiness {
    /// It must be unmapped first, or looked at again.
    Mapped,
    /// It was unmapped a moment ago.
    Resting,
    /// Its unmapped pages may be evicted.
    Ready,
    /// What is left of it was found in use.
    Tried,
}

/// A section that may be evicted for a while.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// The section.
    pub section: SectionNo,
    /// From when it may be evicted until it must be checked again.
    pub within: Range<Duration>,
}

/// State of a section that pages were evicted from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// It has no pages left.
    Emptied,
    /// Its remaining pages are in use.
    Tried,
    /// A good part of it was in use.
    Warm,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stand {
    Unmapped { since: Duration },
    Tried,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Candidates {
    stands: FxHashMap<SectionNo, Stand>,
    unmapped: u64,
}

impl Candidates {
    /// How far the eviction of `section` has come.
    #[must_use]
    pub fn readiness(&self, section: SectionNo, now: Duration) -> Readiness {
        match self.stands.get(&section) {
            None => Readiness::Mapped,
            Some(Stand::Tried) => Readiness::Tried,
            Some(Stand::Unmapped { since }) if now.saturating_sub(*since) < UNMAPPED_MIN => {
                Readiness::Resting
            }
            Some(Stand::Unmapped { since }) if now.saturating_sub(*since) > READY_MAX => {
                Readiness::Mapped
            }
            Some(Stand::Unmapped { .. }) => Readiness::Ready,
        }
    }

    /// True while `section` is kept unmapped as a whole.
    #[must_use]
    pub fn stands(&self, section: SectionNo) -> bool {
        matches!(self.stands.get(&section), Some(Stand::Unmapped { .. }))
    }

    /// The time within which the unmapped pages of `section` may be evicted, if it is kept
    /// unmapped.
    #[must_use]
    pub fn ready_within(&self, section: SectionNo) -> Option<Range<Duration>> {
        match self.stands.get(&section) {
            Some(Stand::Unmapped { since }) => Some(*since + UNMAPPED_MIN..*since + READY_MAX),
            Some(Stand::Tried) | None => None,
        }
    }

    /// Memory they take, in bytes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let entry = size_of::<(SectionNo, Stand)>() + 1;
        (self.stands.capacity() * entry) as u64
    }

    /// The sections kept unmapped.
    pub fn standing(&self) -> impl Iterator<Item = SectionNo> {
        // All others were tried in this reclaim, or there are none at all.
        let stands = (self.unmapped > 0).then_some(&self.stands);
        let unmapped = stands
            .into_iter()
            .flatten()
            .filter(|(_, stand)| matches!(stand, Stand::Unmapped { .. }));
        unmapped.map(|(section, _)| *section)
    }

    /// Number of sections kept unmapped.
    #[must_use]
    pub fn unmapped_sections(&self) -> u64 {
        self.unmapped
    }

    /// `section` was unmapped as a whole; `now` is when its last page was.
    pub fn unmapped(&mut self, section: SectionNo, now: Duration) {
        self.put(section, Some(Stand::Unmapped { since: now }));
    }

    /// What is left of `section` is in use.
    pub fn tried(&mut self, section: SectionNo) {
        self.put(section, Some(Stand::Tried));
    }

    /// Pages of `section` were evicted.
    pub fn evicted(&mut self, section: SectionNo, after: After) {
        match after {
            After::Emptied => self.forget(section),
            After::Tried | After::Warm => self.tried(section),
        }
    }

    /// `section` has no pages left, or is mapped again.
    pub fn forget(&mut self, section: SectionNo) {
        self.put(section, None);
    }

    /// Sections that were found in use may be tried again.
    pub fn try_again(&mut self) {
        self.stands
            .retain(|_, stand| matches!(stand, Stand::Unmapped { .. }));
    }

    /// Nothing is known of the page tables from now on.
    pub fn forget_all(&mut self) {
        self.stands.clear();
        self.unmapped = 0;
    }

    /// Forgets sections that no longer exist.
    pub fn keep(&mut self, there: impl Fn(SectionNo) -> bool) {
        self.stands.retain(|section, _| there(*section));
        let unmapped = self.stands.values();
        self.unmapped = unmapped
            .filter(|stand| matches!(stand, Stand::Unmapped { .. }))
            .count() as u64;
    }

    fn put(&mut self, section: SectionNo, stand: Option<Stand>) {
        let before = match stand {
            Some(stand) => self.stands.insert(section, stand),
            None => self.stands.remove(&section),
        };
        let counts =
            |stand: Option<Stand>| u64::from(matches!(stand, Some(Stand::Unmapped { .. })));
        self.unmapped = self.unmapped + counts(stand) - counts(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Duration = Duration::from_secs(7);
    const A: SectionNo = SectionNo(1);
    const B: SectionNo = SectionNo(2);

    #[test]
    fn section_is_ready_when_it_has_rested_and_not_before() {
        let mut all = Candidates::default();
        assert_eq!(all.readiness(A, AT), Readiness::Mapped);
        all.unmapped(A, AT);
        let almost = AT + UNMAPPED_MIN - Duration::from_nanos(1);
        assert_eq!(all.readiness(A, almost), Readiness::Resting);
        assert_eq!(all.readiness(A, AT + UNMAPPED_MIN), Readiness::Ready);
        // Unmapped once more: its wait starts over.
        all.unmapped(A, AT + UNMAPPED_MIN);
        assert_eq!(all.readiness(A, AT + UNMAPPED_MIN), Readiness::Resting);
        assert_eq!(all.unmapped_sections(), 1);
        let within = all.ready_within(A).unwrap();
        assert_eq!(within, AT + 2 * UNMAPPED_MIN..AT + UNMAPPED_MIN + READY_MAX);
        assert_eq!(all.ready_within(B), None);
        // It is looked at again after a while, and not sampled until then.
        assert_eq!(all.readiness(A, AT + 2 * READY_MAX), Readiness::Mapped);
        assert!(all.stands(A));
    }

    #[test]
    fn section_that_is_in_use_is_tried_once_in_a_reclaim_and_the_reserve_stays() {
        let mut all = Candidates::default();
        all.unmapped(A, AT);
        all.unmapped(B, AT);
        all.tried(A);
        assert_eq!(all.readiness(A, AT + UNMAPPED_MIN), Readiness::Tried);
        assert!(!all.stands(A) && all.stands(B));
        assert_eq!(all.unmapped_sections(), 1);
        assert!(all.standing().eq([B]));
        all.try_again();
        assert_eq!(all.readiness(A, AT + UNMAPPED_MIN), Readiness::Mapped);
        assert_eq!(all.readiness(B, AT + UNMAPPED_MIN), Readiness::Ready);
        all.keep(|section| section != B);
        assert_eq!((all.unmapped_sections(), all.standing().count()), (0, 0));
        assert_eq!(all.readiness(B, AT + UNMAPPED_MIN), Readiness::Mapped);
        all.unmapped(A, AT);
        all.forget(A);
        all.forget(A);
        assert_eq!(all.unmapped_sections(), 0);
    }
}
