// SPDX-License-Identifier: Apache-2.0
//! [`SwapIn`]: which sections are swapped in before anybody waits for them (Taiji 4.2.2, the task `Swap_in`).
//!
//! ```text
//!   pages evicted while in use ──┐
//!   touched, and on the way up ──┴──► ahead ─────► spare memory? ──┐
//!                                                                  ├──► order: fill a section
//!   a page of it faulted ───────────► together ──► above low? ─────┘
//! ```
//! *Ahead*: sections that were in use when pages of them were evicted, because the limit was low; and sections
//! of which pages are absent and which are touched scan after scan. They come back once the limit is raised or
//! others were evicted, latest first, while so much memory is free that no eviction follows
//! ([`Headroom::spare_pages`]). A section that was not touched since sinks to the cold sets like any other. What
//! was evicted more than [`LATELY`] ago is no longer known to be of use, and waits for a fault.
//!
//! *Together*, if that is switched on ([`Together`]): the pages of a section are evicted in one pass, and are
//! often used together too. So a fault on one of them brings back the others. That is a guess at each fault, not
//! knowledge, and is of use at once or not at all: so a request is forgotten after [`SOON`]. It uses memory down
//! to the low watermark, at which it would cause an eviction.
//!
//! Neither evicts anything, and neither goes beyond a limit. What a client has had evicted does not come back by
//! itself. Pages come back in turns of [`TURN_PAGES`](crate::prefetch::TURN_PAGES), by the VM's reclaim thread,
//! as work of the lowest class.
//!
//! [`Headroom::spare_pages`]: crate::watermarks::Headroom::spare_pages

use crate::{
    cells::List,
    links::Links,
    prefetch::WAITING_MAX,
    section_set::SectionSet,
    sets::{HotColdSets, Level},
};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// For how long a section is known to have been in use: the time over which the paper measures cold memory
/// (2.1.3).
pub const LATELY: Duration = Duration::from_secs(600);
/// For how long the neighbours of a fault are worth bringing back.
pub const SOON: Duration = Duration::from_secs(1);

/// Whether a fault brings back what was evicted with its page.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Together {
    /// It does not.
    #[default]
    Off,
    /// It does.
    On,
}

/// Why a section is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// A page that was evicted with others of it is in use again.
    Together,
    /// It was in use lately.
    Ahead,
}

impl Wanted {
    /// For how long.
    const fn age_max(self) -> Duration {
        match self {
            Self::Together => SOON,
            Self::Ahead => LATELY,
        }
    }
}

/// Whether a section was in use when pages of it were evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// It was.
    Lately,
    /// It was cold, or nothing is known of it.
    Unknown,
}

/// A section that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Waiting {
    /// The section.
    pub section: SectionNo,
    at: Duration,
    /// Part of it has come back.
    is_begun: bool,
}

impl Waiting {
    /// The same with part of it filled.
    pub const fn begun(self) -> Self {
        Self {
            is_begun: true,
            ..self
        }
    }
}

/// Since when a section waits.
#[derive(Clone, Copy, Debug)]
struct Since {
    at: Duration,
    is_begun: bool,
}

/// Sections that wait, each once.
#[derive(Debug, Default)]
struct Queue {
    sections: Links<Since>,
    /// The latest last.
    waiting: List,
}

impl Queue {
    /// Waits as the latest; the first leaves if there are too many.
    fn push(&mut self, new: Waiting) {
        if let Some(slot) = self.sections.find(new.section) {
            self.sections.remove(&mut self.waiting, slot);
        }
        let since = Since {
            at: new.at,
            is_begun: new.is_begun,
        };
        self.sections
            .insert_last(&mut self.waiting, new.section, since);
        if self.waiting.len() > WAITING_MAX as u64
            && let Some(first) = self.waiting.first()
        {
            self.sections.remove(&mut self.waiting, first);
        }
    }

    fn pop(&mut self) -> Option<Waiting> {
        let latest = self.waiting.last()?;
        let Since { at, is_begun } = *self.sections.value(latest);
        let section = self.sections.remove(&mut self.waiting, latest);
        Some(Waiting {
            section,
            at,
            is_begun,
        })
    }

    fn is_empty(&self) -> bool {
        self.waiting.len() == 0
    }

    fn clear(&mut self) {
        while self.pop().is_some() {}
    }
}

/// See the module. One per VM.
#[derive(Debug, Default)]
pub struct SwapIn {
    /// Sections that have lost pages and did not come back as a whole.
    short: SectionSet,
    ahead: Queue,
    together: Queue,
}

impl SwapIn {
    /// Pages of `section` were evicted `now`.
    pub fn evicted(&mut self, section: SectionNo, now: Duration, used: Use) {
        self.short.insert(section);
        if used == Use::Lately {
            self.ahead.push(waiting(section, now));
        }
    }

    /// A scan that ended `now` has found `section` touched, and it is on its way to Hot.
    pub fn rose(&mut self, section: SectionNo, now: Duration) {
        if self.short.contains(section) {
            self.ahead.push(waiting(section, now));
        }
    }

    /// A page of `section` has come back by a fault, and was stored.
    pub fn faulted(&mut self, section: SectionNo, now: Duration) {
        self.together.push(waiting(section, now));
    }

    /// A client wants memory evicted: what waits is not to come back by itself.
    pub fn forget_ahead(&mut self) {
        self.ahead.clear();
    }

    /// Memory was added or removed: nothing is known any more.
    pub fn forget_all(&mut self) {
        *self = Self::default();
    }

    /// What is wanted first, if anything.
    #[must_use]
    pub fn wanted(&self) -> Option<Wanted> {
        if !self.together.is_empty() {
            return Some(Wanted::Together);
        }
        (!self.ahead.is_empty()).then_some(Wanted::Ahead)
    }

    /// The next section to be filled. Those that are cold by now, or have waited for too long, are forgotten.
    pub fn next(&mut self, wanted: Wanted, now: Duration, sets: &HotColdSets) -> Option<Waiting> {
        loop {
            let next = self.queue(wanted).pop()?;
            let is_in_time = now.saturating_sub(next.at) <= wanted.age_max();
            let level = sets.level(next.section);
            let is_of_use = match wanted {
                Wanted::Together => true,
                // One that was begun is where guesses are put, and not cold for that.
                Wanted::Ahead => next.is_begun || level.is_none_or(Level::is_warm_side),
            };
            if is_in_time && is_of_use {
                return Some(next);
            }
        }
    }

    /// There is more of it to be filled, in another turn.
    pub fn put_back(&mut self, wanted: Wanted, waiting: Waiting) {
        self.queue(wanted).push(waiting);
    }

    /// Nothing of `section` is left that could be filled.
    pub fn is_done(&mut self, section: SectionNo) {
        self.short.remove(section);
    }

    fn queue(&mut self, wanted: Wanted) -> &mut Queue {
        match wanted {
            Wanted::Together => &mut self.together,
            Wanted::Ahead => &mut self.ahead,
        }
    }

    /// Memory it takes, in bytes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.short.bytes() + self.ahead.sections.bytes() + self.together.sections.bytes()
    }
}

const fn waiting(section: SectionNo, at: Duration) -> Waiting {
    Waiting {
        section,
        at,
        is_begun: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::set_times::TIME_MIN;
    use pagetide_random::SplitMix64;

    const NOW: Duration = Duration::from_secs(100);
    const A: SectionNo = SectionNo(1);
    const B: SectionNo = SectionNo(2);

    fn next(
        swap_in: &mut SwapIn,
        wanted: Wanted,
        now: Duration,
        sets: &HotColdSets,
    ) -> Option<u64> {
        swap_in.next(wanted, now, sets).map(|next| next.section.0)
    }

    #[test]
    fn what_was_in_use_comes_back_latest_first_and_each_section_once() {
        let (mut swap_in, sets) = (SwapIn::default(), HotColdSets::new(9));
        swap_in.evicted(A, NOW, Use::Lately);
        swap_in.evicted(B, NOW, Use::Lately);
        swap_in.evicted(A, NOW, Use::Lately);
        swap_in.evicted(SectionNo(3), NOW, Use::Unknown);
        assert_eq!(swap_in.wanted(), Some(Wanted::Ahead));
        let all: Vec<u64> = (0..3)
            .filter_map(|_| next(&mut swap_in, Wanted::Ahead, NOW, &sets))
            .collect();
        // The first was evicted once more, after the second.
        assert_eq!(all, [1, 2]);
        assert_eq!(swap_in.wanted(), None);
    }

    #[test]
    fn section_on_the_way_up_is_wanted_while_pages_of_it_are_absent() {
        let (mut swap_in, sets) = (SwapIn::default(), HotColdSets::new(9));
        swap_in.rose(A, NOW);
        assert_eq!(swap_in.wanted(), None);
        swap_in.evicted(A, NOW, Use::Unknown);
        assert_eq!(swap_in.wanted(), None);
        swap_in.rose(A, NOW);
        assert_eq!(next(&mut swap_in, Wanted::Ahead, NOW, &sets), Some(1));
        swap_in.is_done(A);
        swap_in.rose(A, NOW);
        assert_eq!(swap_in.wanted(), None);
    }

    #[test]
    fn section_that_is_cold_or_was_evicted_long_ago_is_not_wanted() {
        let (mut swap_in, mut sets) = (SwapIn::default(), HotColdSets::new(4));
        sets.emptied(SectionNo(3));
        for section in [1, 2, 3] {
            swap_in.evicted(SectionNo(section), NOW, Use::Lately);
        }
        sets.scanned(TIME_MIN, [A]);
        sets.scanned(2 * TIME_MIN, [A]);
        // The third has no pages, the second is cold.
        assert_eq!(
            next(&mut swap_in, Wanted::Ahead, NOW + LATELY, &sets),
            Some(3)
        );
        assert_eq!(
            next(&mut swap_in, Wanted::Ahead, NOW + LATELY, &sets),
            Some(1)
        );
        swap_in.evicted(A, NOW, Use::Lately);
        let late = NOW + LATELY + TIME_MIN;
        assert_eq!(next(&mut swap_in, Wanted::Ahead, late, &sets), None);
        swap_in.faulted(B, NOW);
        assert_eq!(
            next(&mut swap_in, Wanted::Together, NOW + SOON, &sets),
            Some(2)
        );
        swap_in.faulted(B, NOW);
        let late = NOW + 2 * SOON;
        assert_eq!(next(&mut swap_in, Wanted::Together, late, &sets), None);
    }

    #[test]
    fn section_that_was_begun_is_first_in_the_next_turn_wherever_it_is_by_then() {
        let (mut swap_in, mut sets) = (SwapIn::default(), HotColdSets::new(4));
        sets.emptied(A);
        swap_in.evicted(A, NOW, Use::Lately);
        let first = swap_in.next(Wanted::Ahead, NOW, &sets).unwrap();
        sets.filled_ahead(A);
        swap_in.put_back(Wanted::Ahead, first.begun());
        let again = swap_in.next(Wanted::Ahead, NOW, &sets);
        assert_eq!(again, Some(first.begun()));
    }

    #[test]
    fn faults_go_before_what_is_wanted_ahead_and_a_client_ends_only_the_latter() {
        let (mut swap_in, sets) = (SwapIn::default(), HotColdSets::new(9));
        swap_in.evicted(A, NOW, Use::Lately);
        swap_in.faulted(A, NOW);
        swap_in.forget_ahead();
        assert_eq!(swap_in.wanted(), Some(Wanted::Together));
        assert_eq!(next(&mut swap_in, Wanted::Together, NOW, &sets), Some(1));
        assert_eq!(swap_in.wanted(), None);
        swap_in.evicted(A, NOW, Use::Lately);
        swap_in.forget_all();
        assert_eq!(swap_in.wanted(), None);
        swap_in.rose(A, NOW);
        assert_eq!(swap_in.wanted(), None, "nothing is known to be absent");
    }

    #[test]
    fn queue_is_bounded_and_holds_the_latest_whatever_comes() {
        let mut random = SplitMix64::new(4);
        let (mut swap_in, sets) = (SwapIn::default(), HotColdSets::new(0));
        // The latest last.
        let mut model: Vec<u64> = Vec::new();
        for _ in 0..30_000 {
            let section = random.below(4_000);
            if random.below(5) == 0 {
                assert_eq!(next(&mut swap_in, Wanted::Ahead, NOW, &sets), model.pop());
            } else {
                swap_in.evicted(SectionNo(section), NOW, Use::Lately);
                model.retain(|other| *other != section);
                model.push(section);
                let surplus = model.len().saturating_sub(WAITING_MAX);
                model.drain(..surplus);
            }
            assert_eq!(swap_in.ahead.waiting.len(), model.len() as u64);
        }
        let left = std::iter::from_fn(|| next(&mut swap_in, Wanted::Ahead, NOW, &sets));
        assert!(left.eq(model.into_iter().rev()));
    }
}
