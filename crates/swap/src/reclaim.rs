// SPDX-License-Identifier: Apache-2.0
//! [`Reclaimer`]: the reclaim loop of one VM (Taiji 4.2).
//!
//! [`pagetide_policy::reclaim`] decides which sections are unmapped and evicted, and in which order.
//! This module supplies its input, which pages were touched, and carries out its decisions: one
//! section after the other through the [`Evictor`].
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

use crate::{
    demoter::Demoter,
    direct::{DirectReclaim, TellTaken},
    evictor::Evictor,
    heat::{Heat, HeatCost, HeatReport, SAMPLE_BATCH},
    limit::Limit,
    pace::Pace,
    reserve::Reserve,
};
use pagetide_addr::{PageNo, PageRange, SectionNo};
use pagetide_gmem::{Cause, PageState, Readahead, Wait};
use pagetide_policy::{
    candidates::Ready,
    demotion::Demotion,
    prefetch::{Prefetched, Rest},
    protect::ProtectedSections,
    reclaim::{Attempt, Sections, Selection, Unmapped, is_warm},
    sampling::Want,
    set_times::SetTimes,
    sets::HotColdSets,
    swap_in::Wanted,
    tracker::{AccessTracker, TrackerError},
};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

mod packing;
mod sinking;
mod stayed;
pub(crate) mod taking;
mod trials;

use sinking::Sinking;
use taking::Memory;

pub use stayed::Stayed;

pub use pagetide_policy::victims::{Need, Reach, UNMAPPED_MIN};

/// Longest time that one call of [`Reclaimer::sample`] runs.
const SAMPLE_MAX: Duration = Duration::from_millis(20);

/// Pages that are asked for at a time when a section is swapped in: some ten microseconds.
const SWAP_IN_PAGES: usize = 16;

/// See the module. One per VM.
pub struct Reclaimer {
    selection: Selection,
    heat: Heat,
    memory: Memory,
    demotion: Demotion,
    demoter: Demoter,
    sinking: Option<Sinking>,
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
        let mut selection = Selection::default();
        selection.follow(evictor.space().table().sections());
        let demoter = Demoter::new(Arc::clone(evictor.space()), Arc::clone(evictor.store()));
        Self {
            selection,
            heat: Heat::new(cost),
            demotion: Demotion::default(),
            demoter,
            sinking: None,
            memory: Memory {
                evictor,
                limit,
                tracker,
                trials: Arc::default(),
            },
            taken: Arc::new(|_, _| ()),
        }
    }

    /// From now on these sections are spared.
    pub fn spare(&mut self, protected: Arc<ProtectedSections>) {
        self.selection.spare(protected);
    }

    /// From now on `taken` is called for each section that pages were evicted from, with how much
    /// was evicted.
    pub fn tell(&mut self, taken: impl Fn(SectionNo, Took) + Send + Sync + 'static) {
        self.taken = Arc::new(taken);
    }

    /// From now on sections are scanned, and stay in their sets, for these times.
    pub fn set_times(&mut self, times: SetTimes) {
        self.selection.set_times(times);
        self.heat.set_scan(times.scan);
    }

    /// A direct reclaim from this reclaimer's reserve, as it is set up now, with the same `clock` and
    /// the same callback.
    #[must_use]
    pub fn direct(&self, clock: impl Fn() -> Duration + Send + Sync + 'static) -> DirectReclaim {
        DirectReclaim {
            protected: Arc::clone(self.selection.protected()),
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
        self.selection.sets()
    }

    /// What is known of the VM's heat, and what learning it has cost.
    #[must_use]
    pub fn heat(&self) -> HeatReport {
        self.heat.report()
    }

    /// Memory of this process that records which sections are hot, in bytes, about.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        let sinking = self.sinking.as_ref().map_or(0, Sinking::bytes);
        self.heat.sampler.bytes() + self.selection.bytes() + self.demotion.bytes() + sinking
    }

    /// Number of sections unmapped for eviction.
    #[must_use]
    pub fn reserve_sections(&self) -> u64 {
        self.selection.reserve_sections()
    }

    /// Continues the sweep by as much as its cost allows. `own` is the CPU time that the calling thread has
    /// used, `cpu` that of the VMM. Keeps to `pace`.
    ///
    /// # Errors
    /// The tracker's; what is known of a section is then unchanged.
    pub fn sample(
        &mut self,
        clock: impl Fn() -> Duration,
        own: impl Fn() -> Duration,
        cpu: Duration,
        want: Want,
        pace: &impl Pace,
    ) -> Result<(), TrackerError> {
        let sections = self.memory.evictor.space().table().section_count();
        let mut left = self.heat.sections(clock(), cpu, sections, want);
        let began = clock();
        while left > 0 && clock().saturating_sub(began) < SAMPLE_MAX && pace.go_on() {
            let part = left.min(SAMPLE_BATCH);
            left -= part;
            self.sample_part(&clock, &own, part, pace)?;
        }
        Ok(())
    }

    /// Scans up to `sections_max` sections of the sweep, and ends the sweep if there are no more.
    fn sample_part(
        &mut self,
        clock: &impl Fn() -> Duration,
        own: &impl Fn() -> Duration,
        sections_max: u64,
        pace: &impl Pace,
    ) -> Result<(), TrackerError> {
        if !self.heat.sampler.is_sweeping() {
            self.begin_sweep(clock);
        }
        let began = own();
        self.apply_outcomes();
        let (mut looks, mut standing) = (Vec::new(), Vec::new());
        let mut looked = 0;
        while looked < sections_max
            && let Some(section) = self.heat.sampler.next(self.selection.sets())
        {
            looked += 1;
            if self.selection.stands(section) {
                standing.push(section);
                continue;
            }
            let present = self.memory.present(section);
            looks.extend(self.heat.sampler.look(section, &present));
        }
        // It holds the VMM's address space, and then the reserve.
        let sampled = pace.firmly(|| {
            let sampled = self.memory.tracker.sample(&looks);
            if sampled.is_err() {
                looks.iter().for_each(|look| self.heat.sampler.failed(look));
            }
            let sampled = sampled?;
            standing
                .into_iter()
                .try_for_each(|section| self.look_at_reserve(section))?;
            Ok::<_, TrackerError>(sampled)
        })?;
        let spent = own().saturating_sub(began);
        self.heat.sampled(&looks, &sampled, looked, spent);
        if let Some(touched) = self.heat.sampler.end() {
            let now = clock();
            pace.firmly(|| {
                let (selection, mut pages) = self.parts(clock, &|| false);
                selection.swept(now, touched, &mut pages);
            });
            self.heat.swept(clock());
        }
        Ok(())
    }

    fn begin_sweep(&mut self, clock: &impl Fn() -> Duration) {
        let space = Arc::clone(self.memory.evictor.space());
        let table = space.table();
        let sections: Vec<SectionNo> = table.sections().collect();
        let is_there = |section: SectionNo| !table.pages_of(section).is_empty();
        let (selection, mut pages) = self.parts(clock, &|| false);
        selection.begin_sweep(sections.iter().copied(), is_there, &mut pages);
        self.heat.sampler.keep(is_there);
        self.heat.sampler.begin(sections);
    }

    /// Applies the outcomes of sections that fills have evicted by direct reclaim.
    fn apply_outcomes(&mut self) {
        for (section, after) in self.reserve().outcomes() {
            self.selection.evicted_elsewhere(section, after);
        }
    }

    /// The selection, and what carries out its orders.
    fn parts<'a, C, G>(
        &'a mut self,
        clock: &'a C,
        pace: &'a G,
    ) -> (&'a mut Selection, SectionPages<'a, C, G>) {
        let pages = SectionPages {
            memory: &mut self.memory,
            tell: &self.taken,
            clock,
            pace,
        };
        (&mut self.selection, pages)
    }

    /// An unmapped section is in use if a good part of it is mapped again.
    fn look_at_reserve(&mut self, section: SectionNo) -> Result<(), TrackerError> {
        let mapped = self.memory.tracker.mapped(section)?;
        let is_warm = is_warm(mapped.len(), self.memory.present(section).len());
        // A section that a fill is taking now is left alone.
        if is_warm && self.reserve().withdraw(section) {
            self.heat.sampler.touched(section);
            self.selection.in_use(section);
        }
        Ok(())
    }

    /// Sweeps all sections at once, whatever it costs. `own` is the CPU time that the calling thread has used;
    /// `pace` is asked after every few sections.
    ///
    /// # Errors
    /// The tracker's.
    pub fn sweep(
        &mut self,
        clock: impl Fn() -> Duration,
        own: impl Fn() -> Duration,
        pace: &impl Pace,
    ) -> Result<(), TrackerError> {
        self.begin_sweep(&clock);
        let before = self.heat.report().sweeps;
        while self.heat.report().sweeps == before && pace.go_on() {
            self.sample_part(&clock, &own, SAMPLE_BATCH, pace)?;
        }
        Ok(())
    }

    /// Memory was added or removed, and page numbers may be reused: from now on no section is known to
    /// be unmapped, and the sets hold the sections that there are now.
    pub fn ram_changed(&mut self, now: Duration) {
        self.demotions().for_each(Demotion::forget_all);
        self.find_stored(now);
        self.reserve().ram_changed();
        self.heat.sampler.keep(|_| false);
        let sections = self.memory.evictor.space().table().sections();
        self.selection.ram_changed(sections);
    }

    /// Sections that were found in use may be tried again.
    pub fn try_again(&mut self) {
        let (selection, mut pages) = self.parts(&no_time, &|| false);
        selection.try_again(&mut pages);
    }

    /// Evicts up to `pages` pages, coldest sections first, within `reach`, from sections that have been
    /// unmapped for [`UNMAPPED_MIN`]; if that is not enough, the next ones are unmapped. `pace` is
    /// asked before each section that is evicted, and within it. `clock` is also read after sections were
    /// unmapped.
    pub fn reclaim(
        &mut self,
        clock: impl Fn() -> Duration,
        pages: u64,
        reach: Reach,
        need: Need,
        pace: &impl Pace,
    ) -> Reclaimed {
        self.apply_outcomes();
        let now = clock();
        let (selection, mut memory) = self.parts(&clock, pace);
        selection.reclaim(now, pages, reach, need, &mut memory)
    }

    /// Keeps about `pages` pages of cold sections unmapped, so that they can be evicted at once when
    /// room is needed. Pauses as `pace` says, but does all of it.
    ///
    /// # Errors
    /// The tracker's.
    pub fn keep_ready(
        &mut self,
        clock: impl Fn() -> Duration,
        pages: u64,
        pace: &impl Pace,
    ) -> Result<(), TrackerError> {
        self.apply_outcomes();
        let now = clock();
        let (selection, mut memory) = self.parts(&clock, pace);
        let kept = selection.keep_ready(now, pages, &mut memory);
        kept.map_err(|stop| stop.to_string().into())
    }

    /// Why sections are wanted back `now`, if there are any.
    pub fn wanted_back(&mut self, now: Duration) -> Option<Wanted> {
        let faulted = self.memory.limit.faulted().take();
        self.selection.faulted(now, faulted);
        self.selection.wanted_back()
    }

    /// Fills about `pages` pages of sections that are wanted back for this reason, as far as there is room for
    /// them and `pace` lets it; returns how many it filled. Waits for nothing else, and evicts nothing.
    pub fn swap_in(
        &mut self,
        clock: impl Fn() -> Duration,
        wanted: Wanted,
        pages: u64,
        pace: &impl Pace,
    ) -> u64 {
        self.apply_outcomes();
        let now = clock();
        let (selection, mut memory) = self.parts(&clock, pace);
        selection.swap_in(now, wanted, pages, &mut memory)
    }

    /// Returns memory that the store no longer needs to the system.
    ///
    /// # Errors
    /// The kernel's.
    pub fn trim_store(&self) -> Result<(), pagetide_sys::memory_file::FileError> {
        self.memory.evictor.store().trim()
    }
}

fn no_time() -> Duration {
    Duration::ZERO
}

/// The pages of a VM, as a [`Selection`] has them unmapped and evicted.
struct SectionPages<'a, C, G> {
    memory: &'a mut Memory,
    tell: &'a TellTaken,
    /// Read after sections were unmapped.
    clock: &'a C,
    /// Asked before and within each eviction.
    pace: &'a G,
}

impl<C: Fn() -> Duration, G: Pace> Sections for SectionPages<'_, C, G> {
    type Stop = ReclaimStop;

    fn present_pages(&self, section: SectionNo) -> u64 {
        self.memory.present(section).len()
    }

    fn evict(&mut self, section: SectionNo, pages_max: u64) -> Attempt<ReclaimStop> {
        if !self.pace.go_on() {
            return Attempt::NotNow;
        }
        let limit = Arc::clone(&self.memory.limit);
        // A fill that is taking the section now reports it itself.
        let Some(_claim) = limit.reserve().claim(section) else {
            return Attempt::Elsewhere;
        };
        let evicted = self.memory.take(section, pages_max, || true, self.pace);
        if evicted.taken.pages > 0 {
            let took = Took::of(evicted.taken.pages, evicted.present_pages);
            (self.tell)(section, took);
        }
        Attempt::Done(evicted)
    }

    fn unmap(&mut self, sections: &[SectionNo]) -> Result<Unmapped, ReclaimStop> {
        let reserve = self.memory.limit.reserve();
        // A section that a fill is taking now has aged, and must not be unmapped during that.
        let free = |section: &SectionNo| reserve.withdraw(*section);
        let sections: Vec<SectionNo> = sections.iter().copied().filter(free).collect();
        for part in sections.chunks(self.pace.unmapped_sections_max()) {
            self.pace.pause();
            // Weak threads must not hold the VMM's address space.
            let looked = self.pace.firmly(|| self.memory.tracker.take_out(part));
            looked.map_err(|error| ReclaimStop::Kernel(error.to_string()))?;
        }
        Ok(Unmapped {
            sections,
            // Only now: the age counts from when the last page was unmapped.
            at: (self.clock)(),
        })
    }

    fn offer(&mut self, ready: Vec<Ready>) {
        self.memory.limit.reserve().offer(ready);
    }

    fn swap_in(&mut self, section: SectionNo, pages_max: u64) -> Option<Prefetched> {
        if !self.pace.go_on() {
            return None;
        }
        let space = self.memory.evictor.space();
        if space.goes_whole(section) {
            return Some(self.fill_whole(section));
        }
        let table = space.table();
        let is_stored = |state| matches!(state, PageState::Stored(_));
        let stored = table.pages_in_state(section, is_stored);
        let mut pages = 0;
        for run in stored.runs(section).into_iter().flat_map(in_steps) {
            let goes_on = pages == 0 || self.pace.may_stay() || self.pace.go_on();
            let filled = match goes_on && pages < pages_max {
                true => self.fill(run),
                false => 0,
            };
            if filled == 0 {
                let rest = Rest::Some;
                return Some(Prefetched { pages, rest });
            }
            pages += filled;
        }
        let rest = Rest::None;
        Some(Prefetched { pages, rest })
    }
}

impl<C, G: Pace> SectionPages<'_, C, G> {
    /// Fills stored pages, as far as there is room and nothing is in the way; returns how many.
    fn fill(&self, run: PageRange) -> u64 {
        let cause = Cause::Readahead(Readahead::SwapIn(run));
        let space = self.memory.evictor.space();
        // It holds the section's lock, and a fault may wait for what it fills.
        let served = self.pace.firmly(|| space.fault(&cause, Wait::Never));
        served.map_or(0, |served| served.installed.count_ones().into())
    }

    /// The same for all of a section that goes whole: more pages than one answer tells of.
    fn fill_whole(&self, section: SectionNo) -> Prefetched {
        let table = self.memory.evictor.space().table();
        let before = table.stored_pages(section);
        if before > 0 {
            self.fill(table.pages_of(section));
        }
        let left = table.stored_pages(section);
        Prefetched {
            pages: before.saturating_sub(left),
            rest: match left {
                0 => Rest::None,
                _ => Rest::Some,
            },
        }
    }
}

/// A run in parts of [`SWAP_IN_PAGES`] pages at most.
fn in_steps(run: PageRange) -> impl Iterator<Item = PageRange> {
    let part = move |first: PageNo| {
        let end = first.plus(SWAP_IN_PAGES as u64).min(run.end);
        PageRange::new(first, end)
    };
    run.iter().step_by(SWAP_IN_PAGES).map(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pool, PoolCap, PoolStore};
    use pagetide_addr::{DeviceId, PAGE_BYTES, PageSet, SECTION_PAGES};
    use pagetide_gmem::{
        MemoryParts, RegionRequest,
        fake::{self, FakeMmu, FakePlace},
    };
    use pagetide_policy::{
        sampling::{Look, Sampled, Touched},
        tracker::TrackerError,
    };
    use std::ops::ControlFlow;

    struct Untouched;

    impl AccessTracker for Untouched {
        fn sample(&self, _: &[Look]) -> Result<Sampled, TrackerError> {
            Ok(Sampled::default())
        }

        fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
            Ok(vec![Touched::default(); sections.len()])
        }

        fn mapped(&self, _: SectionNo) -> Result<PageSet, TrackerError> {
            Ok(PageSet::EMPTY)
        }
    }

    #[test]
    fn swapping_in_a_section_that_goes_whole_counts_all_of_its_pages() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let pages = 2 * SECTION_PAGES;
        let pool = Pool::create_empty(&folder.path().join("a.pool"), pages, 1, b"").unwrap();
        let pool = pool.within(&PoolCap::new(None)).unwrap();
        let store = Arc::new(PoolStore::new(Arc::new(pool)));
        let place = Arc::new(FakePlace::default());
        place.put_zeros(PageNo(0).run(pages));
        place.go_whole(0);
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            ..fake::parts(pages, Arc::clone(&place) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(FakeMmu::vcpus()));
        let all = RegionRequest::of_bytes(pages * PAGE_BYTES);
        space.alloc(&all).unwrap();
        let section = SectionNo(1);
        let mut evictor = Evictor::new(Arc::clone(space.memory().unwrap()), store);
        let wanted = PageSet::of_range(section, section.first_page().run(SECTION_PAGES));
        let none = || Ok(PageSet::EMPTY);
        let goes_on = |_| ControlFlow::Continue(());
        let done = evictor.evict(section, &wanted, u64::MAX, none, goes_on);
        assert_eq!(done.unwrap().evicted_pages, SECTION_PAGES);
        let mut memory = Memory {
            evictor,
            limit: Arc::new(Limit::new()),
            tracker: Arc::new(Untouched),
            trials: Arc::default(),
        };
        let tell: TellTaken = Arc::new(|_, _| ());
        let mut pages = SectionPages {
            memory: &mut memory,
            tell: &tell,
            clock: &no_time,
            pace: &|| true,
        };
        let filled = pages.swap_in(section, 16).unwrap();
        assert_eq!((filled.pages, filled.rest), (SECTION_PAGES, Rest::None));
        assert_eq!(place.present_pages(), 2 * SECTION_PAGES);
        let again = pages.swap_in(section, 16).unwrap();
        assert_eq!((again.pages, again.rest), (0, Rest::None));
    }

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
