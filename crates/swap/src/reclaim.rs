// SPDX-License-Identifier: Apache-2.0
//! [`Reclaimer`]: the reclaim loop of one VM (Taiji 4.2).
//!
//! [`pagetide_policy::victims`] decides which sections are evicted, and in which order. This module
//! supplies its input, which pages were touched, and carries out its decisions: one section after the
//! other through the [`Evictor`].
//!
//! # How heat is learned
//! By samples: a few pages of each section in each sweep, at a pace that does not slow the guest
//! down ([`crate::heat`]).
//!
//! # Which pages may be evicted
//! A section to be evicted is first unmapped as a whole (its content stays). A page is evicted only if
//! it has been unmapped for at least [`UNMAPPED_MIN`] and was not mapped again: then no reference to
//! it was taken through a page table lately, which the write protection of the eviction round alone
//! would not show. This is checked when pages are chosen, and again when they are protected.
//!
//! ```text
//!   reclaim   evict ready sections, coldest first ─► enough? ─► done
//!                 │ not enough
//!                 └─► unmap the next ones, coldest first ─► the caller lets them age, and calls again
//! ```
//! Somewhat more sections than needed are unmapped at a time, so that they age while others are
//! evicted. Those that are left over form the reserve.
//!
//! # Sections without pages
//! A section whose pages are all absent is not scanned until it has pages again. Each sweep ends
//! with a check of all these sections, and so does a reclaim that falls short.
//!
//! # When a section counts as evicted
//! The idle pages of a section in use may be evicted again and again while the others stay. A policy that
//! predicts which pages a device will find absent would learn nonsense from that, so [`Took`] says whether
//! a pass took a section as a whole: at least [`WHOLE_EIGHTHS`](crate::taken::WHOLE_EIGHTHS) eighths of
//! the pages it then had. A device that accesses any of it will then most likely find it absent. The share
//! is of the pages present, not of the section: if only part of its pages came back, these are all there
//! is to take.
//!
//! The caller supplies the clock: times are durations since any fixed moment.

pub use crate::taken::{ReclaimStop, Reclaimed, Took};

pub use crate::tracker::{AccessTracker, Sampled, Touched, TrackerError};

use crate::{
    direct::{DirectReclaim, TellTaken},
    evictor::Evictor,
    heat::{Heat, HeatCost, HeatReport, SAMPLE_BATCH},
    limit::Limit,
    reserve::{After, OFFERED_MAX, Ready, Reserve},
};
use pagetide_addr::SectionNo;
use pagetide_policy::{
    candidates::{Candidates, Readiness},
    protect::ProtectedSections,
    sampling::Want,
    sets::HotColdSets,
    victims::{Taken, Then, Victims},
};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

mod plan;
pub(crate) mod taking;

use plan::Plan;
use taking::{Memory, is_warm};

pub use pagetide_policy::victims::{Reach, UNMAPPED_MIN};

/// Largest multiple of the wanted pages that is unmapped ahead, if little of it can be evicted.
const AHEAD_FACTOR_MAX: u64 = 64;
/// Longest time that one call of [`Reclaimer::sample`] runs.
const SAMPLE_MAX: Duration = Duration::from_millis(20);
/// Sections are unmapped in batches of this size: the tracker's buffers are bounded.
const UNMAP_BATCH: usize = 64;

/// See the module. One per VM.
pub struct Reclaimer {
    victims: Victims,
    candidates: Candidates,
    heat: Heat,
    protected: Arc<ProtectedSections>,
    memory: Memory,
    /// Whether sections without pages were checked since the last sweep.
    looked_at_empty: bool,
    /// Multiple of the wanted pages that is unmapped ahead.
    ahead_factor: u64,
    /// Notified of each section that pages were evicted from.
    taken: TellTaken,
}

impl Reclaimer {
    /// A reclaimer that does not know yet what is cold, and spares nothing.
    #[must_use]
    pub fn new(
        evictor: Evictor,
        limit: Arc<Limit>,
        tracker: Arc<dyn AccessTracker>,
        cost: HeatCost,
    ) -> Self {
        let mut victims = Victims::default();
        victims.follow(evictor.space().table().sections());
        Self {
            victims,
            candidates: Candidates::default(),
            heat: Heat::new(cost),
            protected: Arc::default(),
            memory: Memory {
                evictor,
                limit,
                tracker,
            },
            looked_at_empty: false,
            ahead_factor: 1,
            taken: Arc::new(|_, _| ()),
        }
    }

    /// From now on these sections are spared.
    pub fn spare(&mut self, protected: Arc<ProtectedSections>) {
        self.protected = protected;
    }

    /// From now on `taken` is called for each section that pages were evicted from, with how much
    /// was evicted.
    pub fn tell(&mut self, taken: impl Fn(SectionNo, Took) + Send + Sync + 'static) {
        self.taken = Arc::new(taken);
    }

    /// A direct reclaim from this reclaimer's reserve, as it is set up now, with the same `clock` and
    /// the same callback.
    #[must_use]
    pub fn direct(&self, clock: impl Fn() -> Duration + Send + Sync + 'static) -> DirectReclaim {
        DirectReclaim {
            protected: Arc::clone(&self.protected),
            taken: Arc::clone(&self.taken),
            clock: Box::new(clock),
            workers: Mutex::default(),
            pattern: self.memory.another(),
        }
    }

    /// The sections that are ready.
    fn reserve(&self) -> &Reserve {
        self.memory.limit.reserve()
    }

    /// Hot and cold as far as known; sections without pages are in no set.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        self.victims.sets()
    }

    /// What is known of the VM's heat, and what learning it has cost.
    #[must_use]
    pub fn heat(&self) -> HeatReport {
        self.heat.report()
    }

    /// Number of sections unmapped for eviction.
    #[must_use]
    pub fn reserve_sections(&self) -> u64 {
        self.candidates.unmapped_sections()
    }

    /// Continues the sweep by as much as its cost allows. `cpu` is the CPU time that the VMM has
    /// used.
    ///
    /// # Errors
    /// The tracker's; what is known of a section is then unchanged.
    pub fn sample(
        &mut self,
        clock: impl Fn() -> Duration,
        cpu: Duration,
        want: Want,
    ) -> Result<(), TrackerError> {
        let sections = self.memory.evictor.space().table().section_count();
        let mut left = self.heat.sections(clock(), cpu, sections, want);
        let began = clock();
        while left > 0 && clock().saturating_sub(began) < SAMPLE_MAX {
            let part = left.min(SAMPLE_BATCH);
            left -= part;
            self.sample_part(&clock, part)?;
        }
        Ok(())
    }

    /// Scans up to `sections_max` sections of the sweep, and ends the sweep if there are no more.
    fn sample_part(
        &mut self,
        clock: &impl Fn() -> Duration,
        sections_max: u64,
    ) -> Result<(), TrackerError> {
        if !self.heat.sampler.is_sweeping() {
            self.begin_sweep();
        }
        let began = clock();
        self.apply_outcomes();
        let (mut looks, mut standing) = (Vec::new(), Vec::new());
        let mut looked = 0;
        while looked < sections_max
            && let Some(section) = self.heat.sampler.next(self.victims.sets())
        {
            looked += 1;
            if self.candidates.stands(section) {
                standing.push(section);
                continue;
            }
            let present = self.memory.present(section);
            looks.extend(self.heat.sampler.look(section, &present));
        }
        let sampled = self.memory.tracker.sample(&looks);
        if sampled.is_err() {
            looks.iter().for_each(|look| self.heat.sampler.failed(look));
        }
        let sampled = sampled?;
        standing
            .into_iter()
            .try_for_each(|section| self.look_at_reserve(section))?;
        self.heat
            .sampled(&looks, &sampled, (looked, clock().saturating_sub(began)));
        if let Some(touched) = self.heat.sampler.end() {
            self.victims.scanned(clock(), touched);
            // Sections that were in use may be idle by now.
            self.candidates.try_again();
            self.look_at_empty();
            self.looked_at_empty = false;
            self.heat.swept(clock());
        }
        Ok(())
    }

    fn begin_sweep(&mut self) {
        let table = self.memory.evictor.space().table();
        let sections: Vec<SectionNo> = table.sections().collect();
        self.victims.follow(sections.iter().copied());
        let is_there = |section: SectionNo| !table.pages_of(section).is_empty();
        self.candidates.keep(is_there);
        self.offer();
        self.heat.sampler.keep(is_there);
        self.heat.sampler.begin(sections);
    }

    /// Applies the outcomes of sections that fills have evicted by direct reclaim.
    fn apply_outcomes(&mut self) {
        for (section, after) in self.reserve().outcomes() {
            self.file(section, after);
            if after == After::Warm {
                self.victims.used([section]);
            }
        }
    }

    fn file(&mut self, section: SectionNo, after: After) {
        match after {
            After::Emptied => self.candidates.forget(section),
            After::Tried | After::Warm => self.candidates.tried(section),
        }
    }

    /// Offers unmapped sections to fills that need room.
    fn offer(&self) {
        let standing = usize::try_from(self.candidates.unmapped_sections()).unwrap_or(usize::MAX);
        let ready = |section| {
            let within = self.candidates.ready_within(section)?;
            Some(Ready { section, within })
        };
        let coldest = self.victims.sets().coldest_first();
        let ready = coldest.filter_map(ready).take(standing);
        let free = ready.filter(|ready| !self.protected.contains(ready.section));
        self.reserve().offer(free.take(OFFERED_MAX).collect());
    }

    /// An unmapped section is in use if a good part of it is mapped again.
    fn look_at_reserve(&mut self, section: SectionNo) -> Result<(), TrackerError> {
        let mapped = self.memory.tracker.mapped(section)?;
        let is_warm = is_warm(&mapped, &self.memory.present(section));
        // A section that a fill is taking now is left alone.
        if is_warm && self.reserve().withdraw(section) {
            self.heat.sampler.touched(section);
            self.candidates.forget(section);
        }
        Ok(())
    }

    /// Sweeps all sections at once, whatever it costs. `go_on` is called after every few of them.
    ///
    /// # Errors
    /// The tracker's.
    pub fn sweep(
        &mut self,
        clock: impl Fn() -> Duration,
        go_on: impl Fn() -> bool,
    ) -> Result<(), TrackerError> {
        self.begin_sweep();
        let before = self.heat.report().sweeps;
        while self.heat.report().sweeps == before && go_on() {
            self.sample_part(&clock, SAMPLE_BATCH)?;
        }
        Ok(())
    }

    /// True as long as hot memory cannot be told from cold: a section is known once it was scanned
    /// twice.
    #[must_use]
    pub fn knows_nothing(&self) -> bool {
        self.heat.report().sweeps < 2
    }

    fn look_at_empty(&mut self) {
        let memory = &self.memory;
        let has_pages = |section| !memory.present(section).is_empty();
        self.victims.look_at_empty(u64::MAX, has_pages);
    }

    /// Memory was added or removed, and page numbers may be reused: from now on no section is known to
    /// be unmapped, and the sets hold the sections that there are now.
    pub fn ram_changed(&mut self) {
        self.reserve().ram_changed();
        self.candidates.forget_all();
        self.heat.sampler.keep(|_| false);
        let sections = self.memory.evictor.space().table().sections();
        self.victims.follow(sections);
    }

    /// Sections that were found in use may be tried again.
    pub fn try_again(&mut self) {
        self.candidates.try_again();
        self.look_at_empty();
    }

    /// Evicts up to `pages` pages, coldest sections first, within `reach`, from sections that have been
    /// unmapped for [`UNMAPPED_MIN`]; if that is not enough, the next ones are unmapped. `go_on` is
    /// called before each section that is evicted. `clock` is also read after sections were unmapped.
    pub fn reclaim(
        &mut self,
        clock: impl Fn() -> Duration,
        pages: u64,
        reach: Reach,
        go_on: impl Fn() -> bool,
    ) -> Reclaimed {
        if reach == Reach::Protected && self.protected.is_empty() {
            return Reclaimed::default();
        }
        self.apply_outcomes();
        let (mut done, mut plan) = self.pass(clock(), pages, reach, &go_on);
        let is_short = reach == Reach::AllResting && done.evicted_pages < pages;
        if is_short && done.stopped.is_none() && plan.is_empty() && !self.looked_at_empty {
            // Pages that came back to them without a touch are evicted before protected ones.
            self.look_at_empty();
            self.looked_at_empty = true;
            let left = pages - done.evicted_pages;
            let (more, next) = self.pass(clock(), left, reach, &go_on);
            done.add(more);
            plan = next;
        }
        done.rests = plan.resting_pages > 0;
        // Where nearly everything is in use, more is tried at a time.
        self.ahead_factor = match done.evicted_pages < pages / 8 {
            true => (2 * self.ahead_factor).min(AHEAD_FACTOR_MAX),
            false => 1,
        };
        if done.stopped.is_none() && !plan.next.is_empty() {
            match self.unmap(&plan.next, &clock) {
                Ok(()) => done.rests = true,
                Err(error) => done.stopped = Some(ReclaimStop::Kernel(error.to_string())),
            }
        }
        self.offer();
        done
    }

    /// Keeps about `pages` pages of cold sections unmapped, so that they can be evicted at once when
    /// room is needed.
    ///
    /// # Errors
    /// The tracker's.
    pub fn keep_ready(
        &mut self,
        clock: impl Fn() -> Duration,
        pages: u64,
    ) -> Result<(), TrackerError> {
        let nobody = || false;
        self.apply_outcomes();
        let (_, plan) = self.pass(clock(), pages, Reach::ColdOnly, &nobody);
        let unmapped = self.unmap(&plan.next, &clock);
        self.offer();
        unmapped
    }

    fn unmap(
        &mut self,
        sections: &[SectionNo],
        clock: &impl Fn() -> Duration,
    ) -> Result<(), TrackerError> {
        for part in sections.chunks(UNMAP_BATCH) {
            // A section that a fill is taking now has aged, and must not be unmapped during that.
            let free = |section: &SectionNo| self.reserve().withdraw(*section);
            let part: Vec<SectionNo> = part.iter().copied().filter(free).collect();
            self.memory.tracker.look(&part)?;
            // Only now: the age counts from when the last page was unmapped.
            let now = clock();
            for section in part {
                self.candidates.unmapped(section, now);
            }
        }
        Ok(())
    }

    fn pass(
        &mut self,
        now: Duration,
        pages: u64,
        reach: Reach,
        go_on: &impl Fn() -> bool,
    ) -> (Reclaimed, Plan) {
        let mut stopped = None;
        let (mut warm, mut offered) = (Vec::new(), 0_u64);
        let mut plan = Plan::new(pages.saturating_mul(self.ahead_factor));
        let protected = |section| self.protected.contains(section);
        let (memory, tell, candidates) = (&mut self.memory, &self.taken, &mut self.candidates);
        let limit = Arc::clone(&memory.limit);
        let mut standing = candidates.unmapped_sections();
        let evict = |section, left| {
            let readiness = candidates.readiness(section, now);
            standing -= u64::from(candidates.stands(section));
            let mut taken = Taken {
                pages: 0,
                then: Then::Next,
            };
            if readiness == Readiness::Ready && go_on() {
                // A fill that is taking the section now reports it itself.
                if let Some(_claim) = limit.reserve().claim(section) {
                    offered += 1;
                    let outcome = memory.take(section, left, || true);
                    if outcome.taken.pages > 0 {
                        let took = Took::of(outcome.taken.pages, outcome.present.len());
                        tell(section, took);
                    }
                    match outcome.after(left) {
                        Some(After::Emptied) => candidates.forget(section),
                        Some(After::Tried | After::Warm) => candidates.tried(section),
                        None => {}
                    }
                    if is_warm(&outcome.mapped, &outcome.present) {
                        warm.push(section);
                    }
                    taken = outcome.taken;
                    stopped = outcome.stop;
                }
            } else if !plan.is_full() {
                plan.take(section, readiness, memory.present(section).len());
            }
            // Once enough sections are to be unmapped, only those that are ready matter.
            if plan.is_full() && standing == 0 && taken.then == Then::Next {
                taken.then = Then::Stop;
            }
            taken
        };
        let done = self.victims.offer(pages, reach, protected, evict);
        self.victims.used(warm);
        self.protected.count_taken(done.protected_pages);
        let reclaimed = Reclaimed {
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
        (reclaimed, plan)
    }

    /// Returns memory that the store no longer needs to the system.
    ///
    /// # Errors
    /// The kernel's.
    pub fn trim_store(&self) -> Result<(), pagetide_sys::memory_file::FileError> {
        self.memory.evictor.store().trim()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_is_taken_as_a_whole_if_no_more_than_an_eighth_of_its_pages_stays() {
        for (evicted, present, took) in [
            (512, 512, Took::Whole),
            (448, 512, Took::Whole),
            (447, 512, Took::Part),
            (100, 512, Took::Part),
            (16, 16, Took::Whole),
            (13, 16, Took::Part),
            (1, 1, Took::Whole),
            (1, 2, Took::Part),
            // Pages came back between the look and the eviction.
            (16, 12, Took::Whole),
        ] {
            assert_eq!(Took::of(evicted, present), took, "{evicted} of {present}");
        }
    }
}
