// SPDX-License-Identifier: Apache-2.0
//! [`PrefetchQueue`]: the sections that policies want prefetched, and which of them is filled next.
//!
//! ```text
//!   requested ──► waiting ──► order ──┬─ part of it filled, some left ──► waiting, in front
//!                    │                ├─ filled, or part of it and no more can be ──► done
//!                    │                └─ nothing filled ──────────────────┐
//!                    ├─ more than WAITING_MAX: the oldest ────────────────┤
//!                    └─ little headroom, or nobody fills: all of them ────┴──► refused
//! ```
//! Requests are served in turns of [`TURN_PAGES`], [`TURN`] apart while any wait, oldest first. A
//! prefetch is not worth an eviction: as soon as memory is below the low watermark, all requests are
//! refused. Policies are to be notified of each refusal ([`Fate::NotBroughtBack`]), for otherwise they
//! would wait for a section that stays absent. A request whose memory was removed, or whose policy was
//! replaced, is forgotten instead.
//!
//! No clock and no I/O: the caller begins the turns, fills, and reports what came of it.
//!
//! [`Fate::NotBroughtBack`]: crate::protect::Fate::NotBroughtBack

use pagetide_addr::SectionNo;
use std::{collections::VecDeque, time::Duration};

/// Time between two turns.
pub const TURN: Duration = Duration::from_millis(50);
/// Pages prefetched in one turn of a VM, about: 20,000 a second, a few per cent of a CPU's time.
pub const TURN_PAGES: u64 = 1024;
/// Most sections that wait; the oldest beyond that are refused.
pub const WAITING_MAX: usize = 2048;

/// A section that is to be filled now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct PrefetchOrder {
    /// The section.
    pub section: SectionNo,
    /// About how many pages of it to fill.
    pub pages_max: u64,
    /// Part of it was filled in an earlier turn.
    is_begun: bool,
}

/// Whether a turn may fill anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// It may.
    Enough,
    /// Memory is below the low watermark, or nobody fills any more.
    TooLittle,
}

/// What came of a [`PrefetchOrder`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefetched {
    /// Pages filled.
    pub pages: u64,
    /// Whether there is more to fill.
    pub rest: Rest,
}

/// What is left of a section after an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rest {
    /// Pages that can be filled in another turn.
    Some,
    /// None, or none that can be filled without waiting.
    None,
}

/// What a turn is to do next.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum Step {
    /// Fill a section, and report it by [`PrefetchQueue::filled`].
    Fill(PrefetchOrder),
    /// These are refused, and the turn is over.
    Refuse(Vec<SectionNo>),
    /// The turn is over.
    Over,
}

/// See the module. One per VM.
#[derive(Debug, Default)]
pub struct PrefetchQueue {
    waiting: VecDeque<Waiting>,
    /// Pages that this turn may still fill.
    left_pages: u64,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    section: SectionNo,
    is_begun: bool,
}

impl PrefetchQueue {
    /// Policies request these. Returns the requests that are refused because too many wait.
    #[must_use]
    pub fn request(&mut self, sections: impl IntoIterator<Item = SectionNo>) -> Vec<SectionNo> {
        self.waiting
            .extend(sections.into_iter().map(|section| Waiting {
                section,
                is_begun: false,
            }));
        let surplus = self.waiting.len().saturating_sub(WAITING_MAX);
        let refused = self.waiting.drain(..surplus);
        refused.map(|waiting| waiting.section).collect()
    }

    /// True while no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The memory of `section` was removed.
    pub fn forget(&mut self, section: SectionNo) {
        self.waiting.retain(|waiting| waiting.section != section);
    }

    /// Other policies decide from now on.
    pub fn forget_all(&mut self) {
        self.waiting.clear();
    }

    /// Begins a turn of `pages` pages.
    pub fn begin_turn(&mut self, pages: u64) {
        self.left_pages = pages;
    }

    /// What the turn does next.
    pub fn next(&mut self, room: Room) -> Step {
        if self.left_pages == 0 {
            return Step::Over;
        }
        if room == Room::TooLittle {
            let refused = self.waiting.drain(..);
            return Step::Refuse(refused.map(|waiting| waiting.section).collect());
        }
        match self.waiting.pop_front() {
            Some(Waiting { section, is_begun }) => Step::Fill(PrefetchOrder {
                section,
                pages_max: self.left_pages,
                is_begun,
            }),
            None => Step::Over,
        }
    }

    /// An order was carried out. Returns the section if that counts as refused.
    #[must_use]
    pub fn filled(&mut self, order: PrefetchOrder, done: Prefetched) -> Option<SectionNo> {
        let PrefetchOrder { section, .. } = order;
        // Finding that there is nothing to fill takes time too.
        self.left_pages = self.left_pages.saturating_sub(done.pages.max(1));
        let is_begun = order.is_begun || done.pages > 0;
        match done.rest {
            Rest::Some => {
                self.waiting.push_front(Waiting { section, is_begun });
                None
            }
            Rest::None => (!is_begun).then_some(section),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SectionNo = SectionNo(1);
    const B: SectionNo = SectionNo(2);

    fn queue(sections: &[SectionNo]) -> PrefetchQueue {
        let mut queue = PrefetchQueue::default();
        assert!(queue.request(sections.iter().copied()).is_empty());
        queue
    }

    fn order_of(step: Step) -> PrefetchOrder {
        match step {
            Step::Fill(order) => order,
            other => panic!("{other:?}"),
        }
    }

    fn done(pages: u64, rest: Rest) -> Prefetched {
        Prefetched { pages, rest }
    }

    #[test]
    fn section_that_does_not_fit_into_a_turn_is_first_in_the_next() {
        let mut queue = queue(&[A, B]);
        queue.begin_turn(100);
        let order = order_of(queue.next(Room::Enough));
        assert_eq!((order.section, order.pages_max), (A, 100));
        assert_eq!(queue.filled(order, done(100, Rest::Some)), None);
        assert_eq!(queue.next(Room::Enough), Step::Over);
        queue.begin_turn(100);
        let order = order_of(queue.next(Room::Enough));
        assert_eq!(order.section, A);
        // Nothing more of it can be filled, but part of it was.
        assert_eq!(queue.filled(order, done(0, Rest::None)), None);
        let order = order_of(queue.next(Room::Enough));
        assert_eq!((order.section, order.pages_max), (B, 99));
        assert_eq!(queue.filled(order, done(0, Rest::None)), Some(B));
        assert!(queue.is_empty());
    }

    #[test]
    fn little_room_refuses_all_that_wait() {
        let mut queue = queue(&[A, B]);
        queue.begin_turn(100);
        let refused = queue.next(Room::TooLittle);
        assert_eq!(refused, Step::Refuse(vec![A, B]));
        assert!(queue.is_empty());
    }

    #[test]
    fn oldest_beyond_the_bound_are_refused_and_forgotten_ones_are_not() {
        let mut queue = queue(&[A, B]);
        let many = (10..10 + WAITING_MAX as u64).map(SectionNo);
        assert_eq!(queue.request(many), [A, B]);
        queue.forget(SectionNo(10));
        queue.begin_turn(1);
        assert_eq!(order_of(queue.next(Room::Enough)).section, SectionNo(11));
        queue.forget_all();
        assert!(queue.is_empty());
    }
}
