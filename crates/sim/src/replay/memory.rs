// SPDX-License-Identifier: Apache-2.0
//! [`Memory`]: the sections of one VM, present or evicted, and the rounds that keep it within its limit.
//!
//! The rounds are those of the daemon, in virtual time:
//! ```text
//!   every 5 s                scan: what was touched becomes warmer, the rest drifts
//!   free below the low mark  the passes of one reclaim (`pagetide_policy::victims`), until free is above
//!                            the high mark
//! ```
//! A section is idle while it has not been touched since the last scan. A fill counts as a touch by its
//! requester: the page tables have the page then. A prefetched section counts as untouched.
//!
//! As in the daemon, the evictor is not notified of fills. A section that was evicted and filled is in no
//! set until a scan finds it touched, or examines it among those without pages: it examines some of them
//! each time, and all if the idle sections do not suffice.

use super::touched::TouchedSections;
use pagetide_addr::{PAGE_BYTES, SectionNo};
use pagetide_policy::{
    marks::{HIGH_PERMILLE, LOW_PERMILLE, SCAN_ROUND},
    protect::ProtectedSections,
    sets::Level,
    victims::{self, Need, Reach, Step, Taken, Then, UNMAPPED_MIN, Victims},
};
use std::time::Duration;

/// Sections without pages that each scan examines.
const EMPTY_LOOKED_AT: u64 = 256;

/// The content of a VM's memory when a replay starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Start {
    /// All of it is present: the VM has been running for a while.
    AllPresent,
    /// None of it was ever touched: the VM boots. A first touch allocates memory and is no fault.
    Untouched,
}

/// The state of a section at a touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Present,
    /// It never had content.
    Fresh,
    Evicted,
}

/// The state of one section: one byte, since touches are random and cache misses dominate a replay.
#[derive(Clone, Copy, Default, Debug)]
struct State(u8);

impl State {
    const PRESENT: Self = Self(1);
    /// Touched since the last scan.
    const TOUCHED: Self = Self(2);
    /// Absent, with content in the store.
    const EVICTED: Self = Self(4);
    /// A policy had it prefetched, and it was not touched since.
    const BROUGHT_BACK: Self = Self(8);
    /// A device touched it at any time.
    const DEVICES: Self = Self(16);

    const fn is(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn but(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// The outcome of a request to prefetch a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BroughtBack {
    Yes,
    /// It is present, or never had content.
    NothingToBring,
    /// There is no room under the limit.
    NoRoom,
}

/// A reclaim that has just scanned, and continues when pages have been idle.
struct Resting {
    again_at: Duration,
    steps: Steps,
}

/// The remaining steps of a reclaim.
type Steps = Box<dyn Iterator<Item = Step> + Send>;

/// The counters of the memory.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counts {
    pub(super) evicted_sections: u64,
    pub(super) evicted_protected: u64,
    pub(super) scans: u64,
    pub(super) over_limit_fills: u64,
    pub(super) bring_backs: u64,
    pub(super) wasted_bring_backs: u64,
    /// Prefetched sections that are present and not touched yet.
    pub(super) brought_back: u64,
}

/// See the module.
pub(super) struct Memory {
    sections: Vec<State>,
    section_pages: u64,
    present: u64,
    limit: Option<u64>,
    victims: Victims,
    touched: TouchedSections,
    /// True if all sections without pages were examined since the last scan.
    looked_at_empty: bool,
    scan_at: Duration,
    resting: Option<Resting>,
    counts: Counts,
}

impl Memory {
    pub(super) fn new(sections: u64, section_bytes: u64, start: Start) -> Self {
        let present = start == Start::AllPresent;
        let state = if present {
            State::PRESENT
        } else {
            State::default()
        };
        let numbers = (0..sections).map(SectionNo);
        let mut victims = Victims::default();
        victims.follow(numbers.clone());
        if !present {
            numbers.for_each(|section| victims.emptied(section));
        }
        Self {
            sections: vec![state; usize::try_from(sections).unwrap_or(usize::MAX)],
            section_pages: (section_bytes / PAGE_BYTES).max(1),
            present: if present { sections } else { 0 },
            limit: None,
            victims,
            touched: TouchedSections::default(),
            looked_at_empty: false,
            scan_at: Duration::ZERO,
            resting: None,
            counts: Counts::default(),
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    pub(super) fn present(&self) -> u64 {
        self.present
    }

    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }

    pub(super) fn len(&self) -> u64 {
        self.sections.len() as u64
    }

    /// Sections on the cold side, and absent ones.
    pub(super) fn cold(&self) -> u64 {
        let warm = |(level, count): (Level, u64)| if level > Level::Inactive { count } else { 0 };
        self.len() - self.victims.sets().counts().map(warm).iter().sum::<u64>()
    }

    pub(super) fn set_limit(&mut self, sections: Option<u64>) {
        self.limit = sections;
    }

    /// Brings the sections' states into the processor's cache.
    pub(super) fn warm_up(&self) {
        self.victims.sets().warm_up();
    }

    /// When [`Self::pass`] is due next.
    pub(super) fn due(&self) -> Duration {
        match &self.resting {
            Some(resting) => resting.again_at.min(self.scan_at),
            None => self.scan_at,
        }
    }

    /// Does everything due at `now`. Evicted sections are added to `evicted`.
    pub(super) fn pass(
        &mut self,
        now: Duration,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        if now >= self.scan_at {
            self.scan(now);
        }
        if let Some(resting) = self.resting.take_if(|resting| now >= resting.again_at) {
            self.reclaim(now, resting.steps, protected, evicted);
        }
    }

    /// A section is touched.
    pub(super) fn touch(&mut self, section: SectionNo) -> Found {
        let state = &mut self.sections[section.index()];
        if !state.is(State::PRESENT) {
            return if state.is(State::EVICTED) {
                Found::Evicted
            } else {
                Found::Fresh
            };
        }
        if !state.is(State::TOUCHED) {
            self.touched.insert(section);
        }
        self.counts.brought_back -= u64::from(state.is(State::BROUGHT_BACK));
        *state = state.and(State::TOUCHED).but(State::BROUGHT_BACK);
        Found::Present
    }

    /// A device touches a section. True if none did before.
    pub(super) fn touch_by_device(&mut self, section: SectionNo) -> bool {
        let state = &mut self.sections[section.index()];
        let is_first = !state.is(State::DEVICES);
        *state = state.and(State::DEVICES);
        is_first
    }

    /// Makes an absent section present. At the limit, others are evicted first.
    pub(super) fn fill(
        &mut self,
        now: Duration,
        section: SectionNo,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        if self.free_pages() < self.section_pages.cast_signed() {
            self.press(now, protected, evicted);
            if self.free_pages() < self.section_pages.cast_signed() {
                self.counts.over_limit_fills += 1;
            }
        }
        self.present += 1;
        let state = &mut self.sections[section.index()];
        *state = state.and(State::PRESENT).but(State::EVICTED);
        self.touch(section);
        self.keep(now, protected, evicted);
    }

    /// Prefetches a section for a policy, if there is room: nothing is evicted for it.
    pub(super) fn bring_back(&mut self, section: SectionNo) -> BroughtBack {
        let has_room = self.free_pages() >= self.section_pages.cast_signed();
        let Some(state) = self.sections.get_mut(section.index()) else {
            return BroughtBack::NothingToBring;
        };
        if !state.is(State::EVICTED) {
            return BroughtBack::NothingToBring;
        }
        if !has_room {
            return BroughtBack::NoRoom;
        }
        *state = state
            .and(State::PRESENT)
            .and(State::BROUGHT_BACK)
            .but(State::EVICTED);
        self.present += 1;
        self.counts.bring_backs += 1;
        self.counts.brought_back += 1;
        BroughtBack::Yes
    }

    pub(super) fn section_pages(&self) -> u64 {
        self.section_pages
    }

    /// Starts to reclaim if too little is free.
    pub(super) fn keep(
        &mut self,
        now: Duration,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        if self.is_below_low_mark() {
            self.press(now, protected, evicted);
        }
    }

    /// Reclaims, unless a reclaim is under way and waits for pages to be idle.
    fn press(
        &mut self,
        now: Duration,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        if self.resting.is_none() {
            let steps = Box::new(victims::passes(Need::Limit));
            self.reclaim(now, steps, protected, evicted);
        }
    }

    fn reclaim(
        &mut self,
        now: Duration,
        mut steps: Steps,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        loop {
            let wanted = self.pages_to_high_mark();
            if wanted == 0 {
                return;
            }
            match steps.next() {
                // Not because there is little room under the limit, but only to keep it.
                Some(Step::Take(Reach::Protected)) if !self.is_below_low_mark() => {}
                Some(Step::Take(reach)) => {
                    self.evict(now, wanted, reach, protected, evicted);
                    self.evict_found(now, reach, protected, evicted);
                }
                Some(Step::Scan) => {
                    self.scan(now);
                    let again_at = now + UNMAPPED_MIN;
                    self.resting = Some(Resting { again_at, steps });
                    return;
                }
                None => return,
            }
        }
    }

    /// The idle sections did not suffice: examines all sections without pages, once after each scan. The
    /// sections found are evicted before protected ones.
    fn evict_found(
        &mut self,
        now: Duration,
        reach: Reach,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        let wanted = self.pages_to_high_mark();
        if reach != Reach::AllResting || wanted == 0 || self.looked_at_empty {
            return;
        }
        self.look_at_empty(u64::MAX);
        self.looked_at_empty = true;
        self.evict(now, wanted, reach, protected, evicted);
    }

    fn look_at_empty(&mut self, sections_max: u64) {
        let sections = &self.sections;
        let has_pages = |section: SectionNo| sections[section.index()].is(State::PRESENT);
        self.victims.look_at_empty(sections_max, has_pages);
    }

    fn evict(
        &mut self,
        now: Duration,
        pages: u64,
        reach: Reach,
        protected: &ProtectedSections,
        evicted: &mut Vec<SectionNo>,
    ) {
        let (sections, counts, present) = (&mut self.sections, &mut self.counts, &mut self.present);
        let section_pages = self.section_pages;
        let spared = |section| protected.contains(section);
        let take = |section: SectionNo, _left| {
            let state = &mut sections[section.index()];
            if !state.is(State::PRESENT) || state.is(State::TOUCHED) {
                return Taken {
                    pages: 0,
                    then: Then::Next,
                };
            }
            let is_wasted = u64::from(state.is(State::BROUGHT_BACK));
            counts.wasted_bring_backs += is_wasted;
            counts.brought_back -= is_wasted;
            counts.evicted_sections += 1;
            *present -= 1;
            *state = state
                .but(State::PRESENT)
                .but(State::BROUGHT_BACK)
                .and(State::EVICTED);
            evicted.push(section);
            Taken {
                pages: section_pages,
                then: Then::Emptied,
            }
        };
        let done = self.victims.reclaim(now, pages, reach, spared, take);
        counts.evicted_protected += done.protected_pages / section_pages;
    }

    fn scan(&mut self, now: Duration) {
        let sections = &mut self.sections;
        let touched = self.touched.drain().inspect(|section| {
            let state = &mut sections[section.index()];
            *state = state.but(State::TOUCHED);
        });
        // In order of memory, as in the daemon.
        self.victims.scanned(now, touched);
        self.look_at_empty(EMPTY_LOOKED_AT);
        self.looked_at_empty = false;
        self.scan_at = now + SCAN_ROUND;
        self.counts.scans += 1;
    }

    fn limit_pages(&self) -> Option<i64> {
        let pages = self.limit?.saturating_mul(self.section_pages);
        Some(i64::try_from(pages).unwrap_or(i64::MAX / 1000))
    }

    fn free_pages(&self) -> i64 {
        let present = (self.present * self.section_pages).cast_signed();
        self.limit_pages()
            .map_or(i64::MAX, |limit| limit.saturating_sub(present))
    }

    pub(super) fn is_below_low_mark(&self) -> bool {
        let low = |limit: i64| limit.saturating_mul(LOW_PERMILLE) / 1000;
        self.limit_pages()
            .is_some_and(|limit| self.free_pages() < low(limit))
    }

    fn pages_to_high_mark(&self) -> u64 {
        let Some(limit) = self.limit_pages() else {
            return 0;
        };
        let high = limit.saturating_mul(HIGH_PERMILLE) / 1000;
        u64::try_from(high - self.free_pages()).unwrap_or(0)
    }
}
