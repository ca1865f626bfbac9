// SPDX-License-Identifier: Apache-2.0
//! [`Memory`]: the sections of one VM, present or evicted, and the reclaim loop that keeps it within its
//! limit.
//!
//! The decisions are the daemon's ([`pagetide_policy::reclaim`]): [`ReclaimLoop`] says what comes next,
//! and [`Selection`] which sections are unmapped and evicted. What this file adds is what they are told
//! and what carries their orders out, in virtual time:
//! - *A section is one page*: it is unmapped, touched, evicted and filled as a whole.
//! - *Heat* is known exactly, not from samples: a sweep finds all sections that were touched since the
//!   last one. Sweeps are as far apart as the daemon's would be if they cost nothing
//!   ([`Want::sweep_min`](pagetide_policy::sampling::Want::sweep_min)).
//! - *Nothing forbids eviction*, and carrying out an order takes no time.
//! - A *fill* that finds no room evicts a section that is ready, as in the daemon. If there is none it
//!   goes ahead, and counts as one over the limit if there is no room until [`ADMISSION_WAIT`] later:
//!   in the daemon it would have waited.
//!
//! A fill counts as a touch by its requester: the page tables have the page then. A section that was
//! swapped in ahead counts as untouched. Since a section is one page, nothing is evicted together with it.

use super::touched::TouchedSections;
use pagetide_addr::{PAGE_BYTES, SectionNo};
use pagetide_policy::{
    candidates::{After, Ready},
    prefetch::{Prefetched, Rest},
    protect::ProtectedSections,
    reclaim::{
        Attempt, DIRECT_SECTIONS_MAX, Evicted, Eviction, Order, ReclaimLoop, Sections, Selection,
        Situation, Unmapped,
    },
    set_times::SetTimes,
    sets::Level,
    victims::{Taken, Then},
    watermarks::{ADMISSION_WAIT, Headroom},
};
use std::{
    collections::{HashSet, VecDeque},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

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
    /// Touched since the last sweep.
    const TOUCHED: Self = Self(2);
    /// Absent, with content in the store.
    const EVICTED: Self = Self(4);
    /// A device touched it at any time.
    const DEVICES: Self = Self(8);
    /// Touched since it was unmapped.
    const MAPPED: Self = Self(16);

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

/// Whether an access is found by the next sweep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Trace {
    Left,
    None,
}

/// The counters of the memory.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counts {
    pub(super) evicted_sections: u64,
    pub(super) evicted_protected: u64,
    pub(super) sweeps: u64,
    pub(super) over_limit_fills: u64,
    /// Swapped in though nothing had asked for them.
    pub(super) swapped_in_ahead: u64,
}

/// The states of all sections, on which the orders are carried out.
struct States {
    sections: Vec<State>,
    section_pages: u64,
    present: u64,
    limit: Option<u64>,
    now: Duration,
    /// Filled since the reclaim loop last asked.
    filled: Vec<SectionNo>,
    /// Ready for eviction, coldest first.
    reserve: VecDeque<Ready>,
    /// Evicted, and the protector was not told yet.
    evicted: Vec<SectionNo>,
    /// When fills that found no room would have waited long enough.
    waiting_fills: VecDeque<Duration>,
    counts: Counts,
    /// Every order of the loop, and every section unmapped or evicted for it.
    #[cfg(test)]
    log: Vec<String>,
}

impl Sections for States {
    type Stop = Infallible;

    fn present_pages(&self, section: SectionNo) -> u64 {
        let is_present = self.sections[section.index()].is(State::PRESENT);
        u64::from(is_present) * self.section_pages
    }

    fn filled(&mut self) -> Option<Vec<SectionNo>> {
        let mut filled = std::mem::take(&mut self.filled);
        filled.retain(|section| self.sections[section.index()].is(State::PRESENT));
        Some(filled)
    }

    fn evict(&mut self, section: SectionNo, _pages_max: u64) -> Attempt<Infallible> {
        let evicted = self.evict_whole(section);
        #[cfg(test)]
        if evicted.taken.pages > 0 {
            self.log.push(format!("evict {}", section.0));
        }
        Attempt::Done(evicted)
    }

    fn unmap(&mut self, sections: &[SectionNo]) -> Result<Unmapped, Infallible> {
        #[cfg(test)]
        self.log.push(format!("unmap {sections:?}"));
        for section in sections {
            let state = &mut self.sections[section.index()];
            *state = state.but(State::MAPPED);
        }
        Ok(Unmapped {
            sections: sections.to_vec(),
            at: self.now,
        })
    }

    fn offer(&mut self, ready: Vec<Ready>) {
        self.reserve = ready.into();
    }

    fn swap_in(&mut self, section: SectionNo, _pages_max: u64) -> Option<Prefetched> {
        let is_evicted = self.sections[section.index()].is(State::EVICTED);
        let mut done = Prefetched {
            pages: 0,
            rest: Rest::None,
        };
        if is_evicted && !self.has_room() {
            done.rest = Rest::Some;
        } else if is_evicted {
            self.put(section, State::PRESENT);
            self.counts.swapped_in_ahead += 1;
            done.pages = self.section_pages;
        }
        Some(done)
    }
}

impl States {
    /// Evicts a section that was not touched since it was unmapped.
    fn evict_whole(&mut self, section: SectionNo) -> Evicted<Infallible> {
        let present_pages = self.present_pages(section);
        let state = &mut self.sections[section.index()];
        let is_mapped = state.is(State::MAPPED);
        let mut taken = Taken {
            pages: 0,
            then: Then::Emptied,
        };
        if is_mapped {
            taken.then = Then::Next;
        } else if state.is(State::PRESENT) {
            *state = state
                .but(State::PRESENT)
                .but(State::TOUCHED)
                .and(State::EVICTED);
            self.counts.evicted_sections += 1;
            self.present -= 1;
            self.evicted.push(section);
            taken.pages = self.section_pages;
            if self.free_pages() >= 0 {
                self.waiting_fills.clear();
            }
        }
        Evicted {
            taken,
            present_pages,
            mapped_pages: u64::from(is_mapped) * present_pages,
            stop: None,
        }
    }

    fn put(&mut self, section: SectionNo, how: State) {
        let state = &mut self.sections[section.index()];
        *state = state.and(how).but(State::EVICTED);
        self.present += 1;
        self.filled.push(section);
    }

    /// Evicts a section that is ready, for a fill that needs room.
    fn evict_ready(&mut self, protected: &ProtectedSections) -> Option<(SectionNo, After)> {
        let now = self.now;
        let is_ready = |ready: &Ready| ready.within.contains(&now);
        let place = self.reserve.iter().position(is_ready)?;
        let section = self.reserve.remove(place)?.section;
        // It was protected after it was offered: only the reclaim loop may evict it.
        if protected.contains(section) {
            return None;
        }
        let after = self.evict_whole(section).after(u64::MAX)?;
        Some((section, after))
    }

    fn headroom(&self) -> Headroom {
        match self.limit {
            None => Headroom::Unlimited,
            Some(limit) => Headroom::Limited {
                limit_pages: pages(limit.saturating_mul(self.section_pages)),
                free_pages: self.free_pages(),
            },
        }
    }

    fn free_pages(&self) -> i64 {
        let limit = self.limit.map_or(i64::MAX, |limit| {
            pages(limit.saturating_mul(self.section_pages))
        });
        limit.saturating_sub(pages(self.present * self.section_pages))
    }

    fn has_room(&self) -> bool {
        self.free_pages() >= self.section_pages.cast_signed()
    }
}

fn pages(pages: u64) -> i64 {
    i64::try_from(pages).unwrap_or(i64::MAX)
}

/// See the module.
pub(super) struct Memory {
    states: States,
    selection: Selection,
    decisions: ReclaimLoop,
    /// When the loop goes on.
    loop_at: Duration,
    /// The loop waits for work, or rests whatever comes.
    is_waiting: bool,
    touched: TouchedSections,
    swept_at: Option<Duration>,
    busy_sections: u64,
}

/// How long ago sections were used when a replay starts.
#[derive(Default)]
pub(super) struct Ages<'a> {
    /// The last ones, so many, are in use all the time.
    pub(super) busy_sections: u64,
    /// The longest ago first; others were used before those.
    pub(super) oldest_first: &'a [SectionNo],
}

impl Memory {
    /// Sections that `protected` names are spared, and what was left alone for these times is cold.
    pub(super) fn new(
        sections: u64,
        section_bytes: u64,
        start: Start,
        protected: Arc<ProtectedSections>,
        times: SetTimes,
        ages: Ages<'_>,
    ) -> Self {
        let present = start == Start::AllPresent;
        let state = if present {
            State::PRESENT
        } else {
            State::default()
        };
        let numbers = (0..sections).map(SectionNo);
        let mut selection = Selection::default();
        selection.spare(protected);
        selection.set_times(times);
        // In a set the first to arrive is the coldest.
        let used: HashSet<SectionNo> = ages.oldest_first.iter().copied().collect();
        let unused = numbers.clone().filter(|section| !used.contains(section));
        selection.follow(unused.chain(ages.oldest_first.iter().copied()));
        let busy_sections = ages.busy_sections;
        if !present {
            numbers
                .clone()
                .for_each(|section| selection.emptied(section));
        }
        // What is in no set is never chosen.
        let busy = numbers.skip(usize::try_from(sections - busy_sections).unwrap_or(usize::MAX));
        busy.for_each(|section| selection.emptied(section));
        Self {
            states: States {
                sections: vec![state; usize::try_from(sections).unwrap_or(usize::MAX)],
                section_pages: (section_bytes / PAGE_BYTES).max(1),
                present: if present { sections } else { 0 },
                limit: None,
                now: Duration::ZERO,
                filled: Vec::new(),
                reserve: VecDeque::new(),
                evicted: Vec::new(),
                waiting_fills: VecDeque::new(),
                counts: Counts::default(),
                #[cfg(test)]
                log: Vec::new(),
            },
            selection,
            decisions: ReclaimLoop::new(0),
            loop_at: Duration::ZERO,
            is_waiting: true,
            touched: TouchedSections::default(),
            swept_at: None,
            busy_sections,
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.states.counts
    }

    pub(super) fn present(&self) -> u64 {
        self.states.present
    }

    pub(super) fn limit(&self) -> Option<u64> {
        self.states.limit
    }

    pub(super) fn len(&self) -> u64 {
        self.states.sections.len() as u64
    }

    fn headroom(&self) -> Headroom {
        self.states.headroom()
    }

    /// Sections on the cold side, and absent ones.
    pub(super) fn cold(&self) -> u64 {
        let warm = |(level, count): (Level, u64)| if level > Level::Inactive { count } else { 0 };
        let warm: u64 = self.selection.sets().counts().map(warm).iter().sum();
        self.len() - self.busy_sections - warm
    }

    /// Sections by which the limit may be lower than the memory so that nothing but the coldest set is
    /// evicted for it, and nothing that is protected.
    pub(super) fn givable(&self) -> u64 {
        let sets = self.selection.sets();
        let [(_, coldest), ..] = sets.counts();
        let is_coldest = |section| sets.level(section) == Some(Level::Cold);
        let spared = self.selection.protected().count(is_coldest);
        let stays = self.present() - (coldest - spared);
        // Reclaim ends when the limit is not quite used.
        self.len().saturating_sub(Headroom::limit_over(stays))
    }

    /// Sections that are absent.
    pub(super) fn absent(&self) -> u64 {
        self.len() - self.present()
    }

    pub(super) fn set_limit(&mut self, sections: Option<u64>) {
        self.states.limit = sections;
    }

    /// Brings the sections' states into the processor's cache.
    pub(super) fn warm_up(&self) {
        self.selection.sets().warm_up();
    }

    /// Takes the sections evicted since the last call.
    pub(super) fn take_evicted(&mut self) -> Vec<SectionNo> {
        std::mem::take(&mut self.states.evicted)
    }

    /// When [`Self::pass`] is due next.
    pub(super) fn due(&self) -> Duration {
        let waiting = self.states.waiting_fills.front();
        waiting.map_or(self.loop_at, |at| self.loop_at.min(*at))
    }

    /// Does everything due at `now`.
    pub(super) fn pass(&mut self, now: Duration) {
        let waiting = &mut self.states.waiting_fills;
        while waiting.front().is_some_and(|at| *at <= now) {
            waiting.pop_front();
            self.states.counts.over_limit_fills += 1;
        }
        if now >= self.loop_at {
            self.run(now);
        }
    }

    /// A section is touched.
    pub(super) fn touch(&mut self, section: SectionNo) -> Found {
        let found = self.look(section);
        if found != Found::Present {
            return found;
        }
        let state = &mut self.states.sections[section.index()];
        if !state.is(State::TOUCHED) {
            self.touched.insert(section);
        }
        *state = state.and(State::TOUCHED).and(State::MAPPED);
        Found::Present
    }

    /// The state of a section for an access that leaves no trace in the page tables of CPUs.
    pub(super) fn look(&self, section: SectionNo) -> Found {
        let state = self.states.sections[section.index()];
        match (state.is(State::PRESENT), state.is(State::EVICTED)) {
            (true, _) => Found::Present,
            (false, true) => Found::Evicted,
            (false, false) => Found::Fresh,
        }
    }

    /// A device touches a section. True if none did before.
    pub(super) fn touch_by_device(&mut self, section: SectionNo) -> bool {
        let state = &mut self.states.sections[section.index()];
        let is_first = !state.is(State::DEVICES);
        *state = state.and(State::DEVICES);
        is_first
    }

    /// Makes an absent section present, for a requester that leaves this trace. At the limit, another is evicted
    /// first if one is ready.
    pub(super) fn fill(&mut self, now: Duration, section: SectionNo, trace: Trace) {
        self.states.now = now;
        self.make_room();
        if !self.states.has_room() {
            self.states.waiting_fills.push_back(now + ADMISSION_WAIT);
        }
        self.states.put(section, State::PRESENT.and(State::MAPPED));
        if trace == Trace::Left {
            self.touch(section);
        }
        self.wake(now);
    }

    fn make_room(&mut self) {
        for _ in 0..DIRECT_SECTIONS_MAX {
            if self.states.has_room() {
                return;
            }
            let protected = self.selection.protected();
            if let Some((section, after)) = self.states.evict_ready(protected) {
                self.selection.evicted_elsewhere(section, after);
            }
        }
    }

    /// Wakes the reclaim loop if memory is below the low watermark and it waits for that.
    pub(super) fn wake(&mut self, now: Duration) {
        if self.is_waiting && self.headroom().is_below_low() {
            self.run(now);
        }
    }

    /// Carries out the loop's orders until it waits or rests.
    fn run(&mut self, now: Duration) {
        self.states.now = now;
        loop {
            let order = self.decisions.next(&Situation {
                now,
                headroom: self.headroom(),
                eviction: Eviction::Allowed,
                sweeps: self.states.counts.sweeps,
                requested_pages: None,
                wanted_back: self.selection.wanted_back(),
                demotion_in: None,
            });
            #[cfg(test)]
            self.states
                .log
                .push(format!("{} {order:?}", now.as_millis()));
            match order {
                Order::Wait(time) | Order::Rest(time) => {
                    self.loop_at = now + time;
                    self.is_waiting = order == Order::Wait(time);
                    return;
                }
                Order::Sample(want) => {
                    let scan = self.selection.sets().times().scan;
                    let is_due = |at: Duration| now.saturating_sub(at) >= want.sweep_min(scan);
                    if self.swept_at.is_none_or(is_due) {
                        self.sweep(now);
                    }
                }
                Order::Sweep { .. } => self.sweep(now),
                Order::TryAgain => self.selection.try_again(&mut self.states),
                Order::Evict(order) => {
                    let (pages, reach, need) = (order.pages, order.reach, order.need);
                    let pass = (self.selection).reclaim(now, pages, reach, need, &mut self.states);
                    self.decisions.passed(&pass);
                    let protected = pass.protected_pages / self.states.section_pages;
                    self.states.counts.evicted_protected += protected;
                }
                Order::KeepReady { pages } => {
                    let Ok(()) = self.selection.keep_ready(now, pages, &mut self.states);
                }
                Order::SwapIn { wanted, pages } => {
                    let filled = self.selection.swap_in(now, wanted, pages, &mut self.states);
                    #[cfg(test)]
                    self.states.log.push(format!("filled {filled}"));
                    self.decisions.swapped_in(filled);
                }
                // Nothing forbids eviction here, counts are exact, and nobody sends requests. Accesses are
                // those of the trace, at its times: a hold stops none of them.
                Order::EndSuspension
                | Order::Demote
                | Order::Hold(_)
                | Order::Release
                | Order::Poll
                | Order::CheckHazards
                | Order::CorrectHeadroom
                | Order::Finish(_)
                | Order::RefuseRequests => {}
            }
        }
    }

    /// All sections move among the sets by what was touched since the last sweep.
    fn sweep(&mut self, now: Duration) {
        let mut touched = Vec::new();
        for section in self.touched.drain() {
            let state = &mut self.states.sections[section.index()];
            if !state.is(State::TOUCHED) {
                // It was evicted since, and has nothing to be looked at.
                continue;
            }
            *state = state.but(State::TOUCHED);
            if self.selection.stands(section) {
                if !state.is(State::MAPPED) {
                    continue;
                }
                // It was unmapped to be evicted, and is in use after all.
                self.selection.in_use(section);
            }
            touched.push(section);
        }
        // In order of memory, as in the daemon.
        self.selection.swept(now, touched, &mut self.states);
        self.swept_at = Some(now);
        self.states.counts.sweeps += 1;
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
