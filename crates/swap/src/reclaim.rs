// SPDX-License-Identifier: Apache-2.0
//! [`Reclaimer`]: the reclaim loop of one VM (Taiji 4.2).
//!
//! Which sections go, and in which order, [`pagetide_policy::victims`] decides. Here is what it is told and what
//! is done about it: which pages were touched, and one section after the other through the [`Evictor`].
//!
//! # How heat is learnt
//! By samples, a few pages of each section in each sweep, at a pace that the guest does not feel
//! ([`crate::heat`]).
//!
//! # Which pages may go
//! A section that is to go is taken out of the page tables as a whole (its content stays). A page goes
//! only if it has been unmapped for at least [`UNMAPPED_MIN`] and was not mapped again: then nobody
//! took a reference to it through a page table lately, which the write
//! protection of the eviction round alone would not tell. This is looked at to
//! choose, and again when the pages are protected.
//!
//! ```text
//!   reclaim   take what stands ready, coldest first ─► enough? ─► done
//!                 │ not enough
//!                 └─► unmap the next ones, coldest first ─► the caller lets them rest, and asks again
//! ```
//! Some more than are needed are unmapped at a time, so that they rest while others are taken. What
//! is left of them stands ready as a reserve.
//!
//! # Sections without pages
//! A section whose pages are all away is not looked at again before it has pages again: each sweep
//! ends with a look at all of these sections, and so does a reclaim that is short.
//!
//! # When a section is gone
//! Of a section that is in use the pages that rest may go, again and again, while the others stay. Who
//! predicts what a device will find absent would learn nonsense from that, so [`Took`] tells whether a pass
//! took a section as a whole: at least [`WHOLE_EIGHTHS`] eighths of the pages it then had.
//! A device that asks for any of it will then most likely find it away. It is a share of what there
//! was, not of a section: of one whose pages came back in part, these are all there is to take.
//!
//! The clock is the caller's: times are durations since any fixed moment.

use crate::{
    evictor::Evictor,
    heat::{Heat, HeatCost, HeatReport, SAMPLE_BATCH},
    limit::Limit,
    reserve::{After, DirectReclaim, OFFERED_MAX, Ready, Reserve, TellTaken},
    store::PutError,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_policy::{
    candidates::{Candidates, Readiness},
    protect::ProtectedSections,
    sampling::{Look, Want},
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

/// Most times that what is wanted is unmapped ahead, if little of it goes.
const AHEAD_FACTOR_MAX: u64 = 64;
/// Longest time that one call of [`Reclaimer::sample`] goes on.
const SAMPLE_MAX: Duration = Duration::from_millis(20);
/// Sections are unmapped in parts of so many: the tracker's buffers are bounded.
const UNMAP_BATCH: usize = 64;

/// Who took so many eighths of a section's pages took the section. What stays beyond that is a page or
/// a few that something else in the section keeps in use.
const WHOLE_EIGHTHS: u64 = 7;

/// How much of a section a pass has taken. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Took {
    /// All, or nearly all.
    Whole,
    /// Some pages; a good many stay.
    Part,
}

impl Took {
    pub(crate) fn of(evicted_pages: u64, present_pages: u64) -> Self {
        if evicted_pages * 8 >= present_pages * WHOLE_EIGHTHS {
            Self::Whole
        } else {
            Self::Part
        }
    }
}

/// Failure of a tracker, which has its own reasons.
pub type TrackerError = Box<dyn std::error::Error + Send + Sync>;

/// Which pages of a section were accessed since the last look.
#[derive(Debug, Clone, Copy, Default)]
pub struct Touched {
    /// By the VMM: vCPUs and its own threads.
    pub cpu: PageSet,
    /// By our DMA.
    pub dma: PageSet,
}

/// What a sample brought.
#[derive(Debug, Clone, Default)]
pub struct Sampled {
    /// For each section: by CPUs, which of the pages that were asked about; by DMA, which of all.
    pub touched: Vec<Touched>,
    /// Pages that were taken out of the page tables.
    pub unmapped_pages: u64,
    /// How long the VMM's address space was locked for that.
    pub unmapping: Duration,
}

/// How accesses are seen; the kernel decides which ways there are.
pub trait AccessTracker: Send + Sync {
    /// What was accessed of a few pages of each section; then begins anew with others.
    ///
    /// # Errors
    /// Its own.
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError>;

    /// What was accessed since the last look, for each of `sections` as a whole; then begins anew. They
    /// are to be evicted: pages of them may be punched one by one afterwards, if they are not
    /// [`AccessTracker::mapped`].
    ///
    /// # Errors
    /// Its own.
    fn look(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError>;

    /// The pages of `section` accessed since the last look, which goes on.
    ///
    /// # Errors
    /// Its own.
    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError>;
}

/// What reclaiming brought.
#[derive(Debug, Default)]
pub struct Reclaimed {
    /// Pages absent now that were present.
    pub evicted_pages: u64,
    /// Sections passed over because a device was using them.
    pub busy_sections: u64,
    /// Of the pages, those that a DMA protector would have kept.
    pub protected_pages: u64,
    /// True if the last pass got on but was told to end before it had come to all sections.
    pub has_more: bool,
    /// True if sections were unmapped to go, and rest.
    pub rests: bool,
    /// Why it ended early, if it did.
    pub stopped: Option<ReclaimStop>,
}

impl Reclaimed {
    /// Takes another pass into account.
    pub fn add(&mut self, pass: Self) {
        self.evicted_pages += pass.evicted_pages;
        self.busy_sections += pass.busy_sections;
        self.protected_pages += pass.protected_pages;
        self.has_more = pass.has_more;
        self.rests = pass.rests;
        self.stopped = pass.stopped.or(self.stopped.take());
    }
}

/// Why reclaiming ends although pages are still wanted.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimStop {
    /// The store is full, or fails.
    #[error(transparent)]
    Store(PutError),
    /// The VM's memory is gone.
    #[error("the VM is gone")]
    Gone,
    /// The kernel would not do its part.
    #[error("{0}")]
    Kernel(String),
}

/// See the module. One a VM.
pub struct Reclaimer {
    victims: Victims,
    candidates: Candidates,
    heat: Heat,
    protected: Arc<ProtectedSections>,
    memory: Memory,
    /// Whether sections without pages were looked at since the last sweep.
    looked_at_empty: bool,
    /// How many times what is wanted is unmapped ahead.
    ahead_factor: u64,
    /// Told of each section that pages were taken of.
    taken: TellTaken,
}

impl Reclaimer {
    /// A reclaimer that knows nothing yet of what is cold, and spares nothing.
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

    /// From now on `taken` is told of each section that pages were taken of, with how much went.
    pub fn tell(&mut self, taken: impl Fn(SectionNo, Took) + Send + Sync + 'static) {
        self.taken = Arc::new(taken);
    }

    /// What takes from the reserve of this one as it is now, by the same `clock`, and tells the same.
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

    /// The sections that stand ready.
    fn reserve(&self) -> &Reserve {
        self.memory.limit.reserve()
    }

    /// Hot and cold as far as known; sections without pages are in no set.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        self.victims.sets()
    }

    /// What is known of the VM's heat, and what that has cost.
    #[must_use]
    pub fn heat(&self) -> HeatReport {
        self.heat.report()
    }

    /// Pages of sections that stand unmapped to go.
    #[must_use]
    pub fn reserve_sections(&self) -> u64 {
        self.candidates.unmapped_sections()
    }

    /// Goes on with the sweep, by as much as its cost allows. `cpu` is the CPU time that the VMM has
    /// used.
    ///
    /// # Errors
    /// The tracker's; what is known of a section is then as before.
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

    /// Looks at up to `sections_max` sections of the sweep, and ends it if there are no more.
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
            // What was in use may rest by now.
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

    /// Takes note of what became of the sections that fills have taken by themselves.
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

    /// Offers what stands unmapped to fills that need room.
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

    /// A section that stands unmapped is in use if a good part of it is mapped again.
    fn look_at_reserve(&mut self, section: SectionNo) -> Result<(), TrackerError> {
        let mapped = self.memory.tracker.mapped(section)?;
        let is_warm = is_warm(&mapped, &self.memory.present(section));
        // What a fill is taking now stands as it does.
        if is_warm && self.reserve().withdraw(section) {
            self.heat.sampler.touched(section);
            self.candidates.forget(section);
        }
        Ok(())
    }

    /// A sweep at once, over all sections, whatever it costs. `go_on` is asked after every few of them.
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

    /// True as long as nothing tells hot memory from cold: a section is known when it was looked at
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

    /// Memory has come or gone, and may have the numbers of other memory: no section stands unmapped as
    /// far as is known, and those that there are now are in the sets.
    pub fn ram_changed(&mut self) {
        self.reserve().ram_changed();
        self.candidates.forget_all();
        self.heat.sampler.keep(|_| false);
        let sections = self.memory.evictor.space().table().sections();
        self.victims.follow(sections);
    }

    /// What was found in use may be tried again.
    pub fn try_again(&mut self) {
        self.candidates.try_again();
        self.look_at_empty();
    }

    /// Evicts up to `pages` pages, coldest sections first, within `reach`, of those that stand unmapped
    /// for [`UNMAPPED_MIN`]; if that is not enough, the next ones are unmapped. `go_on` is asked before
    /// each section that is evicted. `clock` is read when sections have been unmapped, too.
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
            // What came back to them without a touch goes before what is protected.
            self.look_at_empty();
            self.looked_at_empty = true;
            let left = pages - done.evicted_pages;
            let (more, next) = self.pass(clock(), left, reach, &go_on);
            done.add(more);
            plan = next;
        }
        done.rests = plan.resting_pages > 0;
        // Where nearly all is in use more is tried at a time.
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

    /// Sees to it that about so many pages of cold sections stand unmapped, to go at once when they are
    /// needed.
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
            // What a fill is taking now has rested, and is not to be unmapped under its hands.
            let free = |section: &SectionNo| self.reserve().withdraw(*section);
            let part: Vec<SectionNo> = part.iter().copied().filter(free).collect();
            self.memory.tracker.look(&part)?;
            // Only now: pages must rest from when the last of them was unmapped.
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
                // What a fill is taking now, that fill will tell of.
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
            // Only sections that stand ready are of interest once enough are to be unmapped.
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
            // Each that was offered is tried, or has fewer pages: so this comes to an end.
            has_more: plan.was_cut && offered > 0,
            rests: false,
            stopped,
        };
        if done.evicted_pages >= pages {
            plan.next.clear();
        }
        (reclaimed, plan)
    }

    /// Gives memory of the store that is not needed any more back to the system.
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
