// SPDX-License-Identifier: Apache-2.0
//! [`Selection`]: which sections a pass unmaps and evicts.
//!
//! ```text
//!   pass   evict ready sections, coldest first ─► enough? ─► done
//!              │ not enough
//!              └─► unmap the next ones, coldest first ─► the caller lets them age, and calls again
//! ```
//! Somewhat more sections than needed are unmapped at a time, so that they age while others are
//! evicted. Those that are left over form the reserve.
//!
//! # Sections without pages
//! A section whose pages are all absent is not in the sets until it has pages again. Each sweep ends
//! with a check of all these sections, and so does a pass that falls short: pages that came back
//! without a touch are evicted before protected ones.
//!
//! # Sections that come back unasked
//! The way in is ordered here too: [`Selection::swap_in`] has the sections filled that [`SwapIn`] names, which
//! is told of all evictions and scans.
//!
//! What is done to pages is behind [`Sections`]; times are durations since any fixed moment.

use super::plan::Plan;
use crate::{
    candidates::{After, Candidates, Readiness, Ready},
    prefetch::{Prefetched, Rest},
    protect::ProtectedSections,
    set_times::SetTimes,
    sets::{HotColdSets, Level},
    swap_in::{SwapIn, Use, Wanted},
    victims::{Need, Reach, Taken, Then, Victims},
};
use pagetide_addr::SectionNo;
use rustc_hash::FxHashSet;
use std::{sync::Arc, time::Duration};

/// Largest multiple of the wanted pages that is unmapped ahead, if little of it can be evicted.
const AHEAD_FACTOR_MAX: u64 = 64;
/// Sections are unmapped in batches of this size: buffers of a tracker are bounded.
const UNMAP_BATCH: usize = 64;
/// Most sections that are offered to fills at a time.
pub const OFFERED_MAX: usize = 256;
/// Most sections that one fill tries to evict.
pub const DIRECT_SECTIONS_MAX: usize = 4;
const _: () = assert!(DIRECT_SECTIONS_MAX <= OFFERED_MAX);
/// A section is in use if more than this share of its pages was mapped again after it was unmapped.
const WARM_EIGHTHS: u64 = 1;

/// The sections of one VM, on which a [`Selection`]'s orders are carried out.
pub trait Sections {
    /// Why nothing more can be evicted at all.
    type Stop;

    /// Pages of `section` that are present.
    fn present_pages(&self, section: SectionNo) -> u64;

    /// Sections that had lost all their pages and got some since the last call, if the owner hears of
    /// that. `None`: every section without pages is to be examined.
    fn filled(&mut self) -> Option<Vec<SectionNo>> {
        None
    }

    /// Evicts up to `pages_max` pages of `section` that were not mapped again since it was unmapped.
    fn evict(&mut self, section: SectionNo, pages_max: u64) -> Attempt<Self::Stop>;

    /// Unmaps `sections` as a whole. Those that another thread is evicting are left alone.
    ///
    /// # Errors
    /// Why it failed.
    fn unmap(&mut self, sections: &[SectionNo]) -> Result<Unmapped, Self::Stop>;

    /// From now on fills that need room may evict these, coldest first, and no others.
    fn offer(&mut self, ready: Vec<Ready>);

    /// Fills up to about `pages_max` stored pages of `section` that can be filled without a wait or an eviction;
    /// `None` if there is no time for it in this turn.
    fn swap_in(&mut self, section: SectionNo, pages_max: u64) -> Option<Prefetched>;
}

/// The outcome of [`Sections::unmap`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unmapped {
    /// The sections that were unmapped.
    pub sections: Vec<SectionNo>,
    /// When the last of them was.
    pub at: Duration,
}

/// The outcome of [`Sections::evict`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Attempt<Stop> {
    /// There is no time for it, nor for others in this pass.
    NotNow,
    /// Another thread is evicting it, and will report that.
    Elsewhere,
    /// It was tried.
    Done(Evicted<Stop>),
}

/// What an eviction from one section came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Evicted<Stop> {
    /// Pages evicted, and how a pass continues.
    pub taken: Taken,
    /// Pages that were present before.
    pub present_pages: u64,
    /// Those of them that were in use.
    pub mapped_pages: u64,
    /// Why nothing more can be evicted at all, if so.
    pub stop: Option<Stop>,
}

impl<Stop> Evicted<Stop> {
    /// True if a good part of the section was in use.
    #[must_use]
    pub fn is_warm(&self) -> bool {
        is_warm(self.mapped_pages, self.present_pages)
    }

    /// State of the section after `pages_max` pages of it were wanted; `None`: unchanged.
    #[must_use]
    pub fn after(&self, pages_max: u64) -> Option<After> {
        match self.taken.then {
            Then::Emptied => Some(After::Emptied),
            // Nothing was found out about it.
            Then::Stop => None,
            // There was enough: the rest of it is unchanged.
            Then::Next if self.taken.pages >= pages_max => None,
            Then::Next | Then::Busy if self.is_warm() => Some(After::Warm),
            Then::Next | Then::Busy => Some(After::Tried),
        }
    }
}

/// True if so many present pages were mapped again that their section is in use.
#[must_use]
pub fn is_warm(mapped_pages: u64, present_pages: u64) -> bool {
    mapped_pages * 8 > present_pages * WARM_EIGHTHS
}

/// The result of a pass, or of several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PassReport<Stop> {
    /// Pages absent now that were present.
    pub evicted_pages: u64,
    /// Sections skipped because a device was using them.
    pub busy_sections: u64,
    /// Of the pages, those that a DMA protector would have kept.
    pub protected_pages: u64,
    /// True if the last pass made progress but was told to end before it reached all sections.
    pub has_more: bool,
    /// True if sections were unmapped and still have to age.
    pub rests: bool,
    /// Why it ended early, if it did.
    pub stopped: Option<Stop>,
}

impl<Stop> Default for PassReport<Stop> {
    fn default() -> Self {
        Self {
            evicted_pages: 0,
            busy_sections: 0,
            protected_pages: 0,
            has_more: false,
            rests: false,
            stopped: None,
        }
    }
}

impl<Stop> PassReport<Stop> {
    /// Adds the result of another pass.
    pub fn add(&mut self, pass: Self) {
        self.evicted_pages += pass.evicted_pages;
        self.busy_sections += pass.busy_sections;
        self.protected_pages += pass.protected_pages;
        self.has_more = pass.has_more;
        self.rests = pass.rests;
        self.stopped = pass.stopped.or(self.stopped.take());
    }
}

/// What a pass is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Pages are to be evicted.
    Evict,
    /// Sections are to be unmapped, so that they can be evicted later.
    KeepReady,
}

/// See the module. One per VM.
#[derive(Debug)]
pub struct Selection {
    victims: Victims,
    candidates: Candidates,
    protected: Arc<ProtectedSections>,
    swap_in: SwapIn,
    /// What the last pass was for.
    need: Need,
    /// Whether sections without pages were checked since the last sweep.
    looked_at_empty: bool,
    /// Multiple of the wanted pages that is unmapped ahead.
    ahead_factor: u64,
}

impl Default for Selection {
    fn default() -> Self {
        Self {
            victims: Victims::default(),
            candidates: Candidates::default(),
            protected: Arc::default(),
            swap_in: SwapIn::default(),
            need: Need::Limit,
            looked_at_empty: false,
            ahead_factor: 1,
        }
    }
}

impl Selection {
    /// From now on these sections are spared.
    pub fn spare(&mut self, protected: Arc<ProtectedSections>) {
        self.protected = protected;
    }

    /// The sections that are spared.
    #[must_use]
    pub fn protected(&self) -> &Arc<ProtectedSections> {
        &self.protected
    }

    /// From now on a section stays in a set for these times.
    pub fn set_times(&mut self, times: SetTimes) {
        self.victims.set_times(times);
    }

    /// From now on exactly these sections exist; see [`HotColdSets::follow`].
    pub fn follow(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.victims.follow(sections);
    }

    /// `section` has no pages.
    pub fn emptied(&mut self, section: SectionNo) {
        self.victims.emptied(section);
    }

    /// Hot and cold as far as known; sections without pages are in no set.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        self.victims.sets()
    }

    /// Memory that sets and candidates take, in bytes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.victims.sets().bytes() + self.candidates.bytes() + self.swap_in.bytes()
    }

    /// Number of sections unmapped for eviction.
    #[must_use]
    pub fn reserve_sections(&self) -> u64 {
        self.candidates.unmapped_sections()
    }

    /// True while `section` is kept unmapped as a whole. It must not be sampled.
    #[must_use]
    pub fn stands(&self, section: SectionNo) -> bool {
        self.candidates.stands(section)
    }

    /// A sweep begins; exactly `sections` exist.
    pub fn begin_sweep(
        &mut self,
        sections: impl IntoIterator<Item = SectionNo>,
        is_there: impl Fn(SectionNo) -> bool,
        memory: &mut impl Sections,
    ) {
        self.follow(sections);
        self.candidates.keep(is_there);
        self.offer(memory);
    }

    /// A section that was kept unmapped was found in use.
    pub fn in_use(&mut self, section: SectionNo) {
        self.candidates.forget(section);
    }

    /// A sweep is over: exactly these sections were touched since the previous one.
    pub fn swept(
        &mut self,
        now: Duration,
        touched: impl IntoIterator<Item = SectionNo>,
        memory: &mut impl Sections,
    ) {
        let touched: Vec<SectionNo> = touched.into_iter().collect();
        self.victims.scanned(now, touched.iter().copied());
        for section in touched {
            if self.sets().level(section) >= Some(Level::Warm) {
                self.swap_in.rose(section, now);
            }
        }
        // Sections that were in use may be idle by now.
        self.try_again(memory);
        self.looked_at_empty = false;
    }

    /// Another thread has evicted pages of `section`.
    pub fn evicted_elsewhere(&mut self, section: SectionNo, after: After) {
        self.note_evicted(section);
        self.candidates.evicted(section, after);
        if after == After::Warm {
            self.victims.used([section]);
        }
    }

    /// For [`SwapIn`]: pages of `section` were evicted.
    fn note_evicted(&mut self, section: SectionNo) {
        let used = match (self.need, self.sets().is_in_use(section)) {
            (Need::Limit, true) => Use::Lately,
            (Need::Limit, false) | (Need::Wish, _) => Use::Unknown,
        };
        let now = self.sets().now();
        self.swap_in.evicted(section, now, used);
    }

    /// Memory was added or removed, and page numbers may be reused: from now on no section is known to
    /// be unmapped, and the sets hold the sections that there are now.
    pub fn ram_changed(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.candidates.forget_all();
        self.swap_in.forget_all();
        self.victims.follow(sections);
    }

    /// Sections that were found in use may be tried again.
    pub fn try_again(&mut self, memory: &mut impl Sections) {
        self.candidates.try_again();
        self.look_at_empty(memory);
    }

    /// Evicts up to `pages` pages, coldest sections first, within `reach`, from sections that have been
    /// unmapped for [`UNMAPPED_MIN`](crate::victims::UNMAPPED_MIN) at `now`; if that is not enough, the
    /// next ones are unmapped.
    pub fn reclaim<M: Sections>(
        &mut self,
        now: Duration,
        pages: u64,
        reach: Reach,
        need: Need,
        memory: &mut M,
    ) -> PassReport<M::Stop> {
        self.victims.passed(now);
        self.need = need;
        if need == Need::Wish {
            self.swap_in.forget_ahead();
        }
        if reach == Reach::Protected && self.protected.is_empty() {
            return PassReport::default();
        }
        let (mut done, mut plan) = self.pass(now, pages, Purpose::Evict, reach, memory);
        let is_short = reach == Reach::AllResting && done.evicted_pages < pages;
        if is_short && done.stopped.is_none() && plan.is_empty() && !self.looked_at_empty {
            // Pages that came back to them without a touch are evicted before protected ones. `now` is that of
            // the first pass: a section that aged meanwhile waits for the next call.
            self.look_at_empty(memory);
            self.looked_at_empty = true;
            let left = pages - done.evicted_pages;
            let (more, next) = self.pass(now, left, Purpose::Evict, reach, memory);
            done.add(more);
            plan = next;
        }
        done.rests = plan.resting_pages > 0;
        // Where nearly everything is in use, more is tried at a time. A pass that had no time has not found out.
        self.ahead_factor = match done.evicted_pages < pages / 8 {
            true if plan.was_cut => self.ahead_factor,
            true => (2 * self.ahead_factor).min(AHEAD_FACTOR_MAX),
            false => 1,
        };
        if done.stopped.is_none() && !plan.next.is_empty() {
            match self.unmap(&plan.next, memory) {
                Ok(()) => done.rests = true,
                Err(stop) => done.stopped = Some(stop),
            }
        }
        self.offer(memory);
        done
    }

    /// Keeps about `pages` pages of cold sections unmapped, so that they can be evicted at once when
    /// room is needed.
    ///
    /// # Errors
    /// That of [`Sections::unmap`].
    pub fn keep_ready<M: Sections>(
        &mut self,
        now: Duration,
        pages: u64,
        memory: &mut M,
    ) -> Result<(), M::Stop> {
        self.victims.passed(now);
        let (_, plan) = self.pass(now, pages, Purpose::KeepReady, Reach::ColdOnly, memory);
        let unmapped = self.unmap(&plan.next, memory);
        self.offer(memory);
        unmapped
    }

    /// Which sections are wanted back first, if any.
    #[must_use]
    pub fn wanted_back(&self) -> Option<Wanted> {
        self.swap_in.wanted()
    }

    /// Pages of these sections have come back by faults `now`, and what was evicted with them is wanted too.
    pub fn faulted(&mut self, now: Duration, sections: impl IntoIterator<Item = SectionNo>) {
        for section in sections {
            self.swap_in.faulted(section, now);
        }
    }

    /// Fills about `pages` pages of sections that are wanted back for this reason; returns how many it filled.
    pub fn swap_in(
        &mut self,
        now: Duration,
        wanted: Wanted,
        pages: u64,
        memory: &mut impl Sections,
    ) -> u64 {
        self.victims.passed(now);
        let (mut filled, mut left) = (0, pages);
        while left > 0 {
            let Some(next) = self.swap_in.next(wanted, now, self.victims.sets()) else {
                break;
            };
            // It is unmapped to be evicted: it must be as cold as that.
            if self.candidates.stands(next.section) {
                continue;
            }
            let Some(done) = memory.swap_in(next.section, left) else {
                self.swap_in.put_back(wanted, next);
                break;
            };
            filled += done.pages;
            // Finding that there is nothing to fill takes time too.
            left = left.saturating_sub(done.pages.max(1));
            if done.pages > 0 {
                self.victims.filled_ahead(next.section);
            }
            match (done.rest, done.pages) {
                (Rest::None, _) => self.swap_in.is_done(next.section),
                // There is no room after all, or nothing of it can be had: it waits for a fault, for otherwise
                // it might keep all others waiting. The turn is over.
                (Rest::Some, 0) => break,
                (Rest::Some, _) => self.swap_in.put_back(wanted, next.begun()),
            }
        }
        filled
    }

    fn pass<M: Sections>(
        &mut self,
        now: Duration,
        pages: u64,
        purpose: Purpose,
        reach: Reach,
        memory: &mut M,
    ) -> (PassReport<M::Stop>, Plan) {
        let mut stopped = None;
        let (mut warm, mut gone, mut offered) = (Vec::new(), Vec::new(), 0_u64);
        let mut plan = Plan::new(pages.saturating_mul(self.ahead_factor));
        let protected = |section| self.protected.contains(section);
        let mut standing = self.standing_within(reach);
        let candidates = &mut self.candidates;
        let evict = |section, left| {
            let readiness = candidates.readiness(section, now);
            standing.remove(&section);
            let mut taken = Taken {
                pages: 0,
                then: Then::Next,
            };
            let attempt = match (readiness, purpose) {
                (Readiness::Ready, Purpose::Evict) => memory.evict(section, left),
                _ => Attempt::NotNow,
            };
            match attempt {
                Attempt::Done(evicted) => {
                    offered += 1;
                    if let Some(after) = evicted.after(left) {
                        candidates.evicted(section, after);
                    }
                    warm.extend(evicted.is_warm().then_some(section));
                    gone.extend((evicted.taken.pages > 0).then_some(section));
                    taken = evicted.taken;
                    stopped = evicted.stop;
                    // In the middle of the section its time was over.
                    plan.was_cut |= taken.then == Then::Stop && stopped.is_none();
                }
                Attempt::Elsewhere => {}
                Attempt::NotNow if plan.is_full() => {}
                Attempt::NotNow => plan.take(section, readiness, memory.present_pages(section)),
            }
            // Once enough sections are to be unmapped, only those that are ready matter.
            if plan.is_full() && standing.is_empty() && taken.then == Then::Next {
                taken.then = Then::Stop;
            }
            taken
        };
        let done = self.victims.offer(pages, reach, protected, evict);
        for section in gone {
            self.note_evicted(section);
        }
        self.victims.used(warm);
        self.protected.count_taken(done.protected_pages);
        let report = PassReport {
            evicted_pages: done.evicted_pages,
            busy_sections: done.busy_sections,
            protected_pages: done.protected_pages,
            // Each section offered is tried, or has fewer pages: so this terminates.
            has_more: plan.was_cut && offered > 0,
            rests: false,
            stopped,
        };
        if done.evicted_pages >= pages {
            plan.next.clear();
        }
        (report, plan)
    }

    fn unmap<M: Sections>(
        &mut self,
        sections: &[SectionNo],
        memory: &mut M,
    ) -> Result<(), M::Stop> {
        for part in sections.chunks(UNMAP_BATCH) {
            let unmapped = memory.unmap(part)?;
            for section in unmapped.sections {
                self.candidates.unmapped(section, unmapped.at);
            }
        }
        Ok(())
    }

    /// The sections kept unmapped that a pass with this reach comes to. If it looked for others, too, it would go
    /// through all sections, each time.
    fn standing_within(&self, reach: Reach) -> FxHashSet<SectionNo> {
        let sets = self.victims.sets();
        let is_within = |section: &SectionNo| {
            let level = sets.level(*section);
            let is_protected = || self.protected.contains(*section);
            match reach {
                Reach::ColdOnly => {
                    level.is_some_and(|level| !level.is_warm_side()) && !is_protected()
                }
                Reach::AllResting => level.is_some() && !is_protected(),
                Reach::Protected => level.is_some() && is_protected(),
            }
        };
        self.candidates.standing().filter(is_within).collect()
    }

    /// Offers unmapped sections to fills that need room.
    fn offer(&self, memory: &mut impl Sections) {
        let free = self.standing_within(Reach::AllResting);
        let ready = |section| {
            let within = self.candidates.ready_within(section)?;
            Some(Ready { section, within })
        };
        let coldest = self.victims.sets().coldest_first();
        let coldest = coldest.filter(|section| free.contains(section));
        let ready = coldest.take(free.len().min(OFFERED_MAX)).filter_map(ready);
        memory.offer(ready.collect());
    }

    fn look_at_empty(&mut self, memory: &mut impl Sections) {
        let mut filled = memory.filled().unwrap_or_else(|| {
            let empty = self.victims.sets().empty_sections();
            let has_pages = |section: &SectionNo| memory.present_pages(*section) > 0;
            empty.filter(has_pages).collect()
        });
        // In order of memory, however they were found.
        filled.sort_unstable();
        for section in filled {
            self.victims.filled(section);
        }
    }
}

#[cfg(test)]
#[path = "selection_tests.rs"]
mod tests;
