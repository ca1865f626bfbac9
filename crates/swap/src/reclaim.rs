// SPDX-License-Identifier: Apache-2.0
//! [`Reclaimer`]: the reclaim loop of one VM (Taiji 4.2).
//!
//! Which sections go, and in which order, [`pagetide_policy::victims`] decides. Here is what it is told and what
//! is done about it: which pages were touched, and one section after the other through the [`Evictor`].
//!
//! # Which pages may go
//! A scan takes every page out of the page tables (its content stays) and tells
//! which were in use since the scan before. A page goes only if it has been
//! unmapped for at least [`UNMAPPED_MIN`] and was not mapped again: then nobody
//! took a reference to it through a page table lately, which the write
//! protection of the eviction round alone would not tell. This is looked at to
//! choose, and again when the pages are protected.
//!
//! # Sections without pages
//! A section whose pages are all away is not looked at again before something is
//! touched in it. Pages may come back without a touch (a device that asked for one, and then did
//! not use it); so each scan looks at some of these sections, and all of them are looked
//! at when memory is short.
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
    evictor::{Evictor, EvictorError},
    limit::Limit,
    store::PutError,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::{EvictionError, PlaceError, State};
use pagetide_policy::{
    protect::ProtectedSections,
    sets::HotColdSets,
    victims::{Taken, Then, Victims},
};
use std::{sync::Arc, time::Duration};

pub use pagetide_policy::victims::{Reach, UNMAPPED_MIN};

/// Sections without pages that each scan looks at: about half a millisecond.
const EMPTY_LOOKED_AT: u64 = 256;

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
    fn of(evicted_pages: u64, present_pages: u64) -> Self {
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

/// How accesses are seen; the kernel decides which ways there are.
pub trait AccessTracker: Send {
    /// What was accessed since the last look, for each of `sections`; then begins anew.
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
    protected: Arc<ProtectedSections>,
    memory: Memory,
    empty: Looked,
    /// Told of each section that pages were taken of.
    taken: Box<dyn Fn(SectionNo, Took) + Send>,
}

/// Which sections without pages were looked at since the last scan.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Looked {
    AtSome,
    AtAll,
}

impl Reclaimer {
    /// A reclaimer that knows nothing yet of what is cold, and spares nothing.
    #[must_use]
    pub fn new(evictor: Evictor, limit: Arc<Limit>, tracker: Box<dyn AccessTracker>) -> Self {
        let mut victims = Victims::default();
        victims.follow(evictor.space().table().sections());
        Self {
            victims,
            protected: Arc::default(),
            memory: Memory {
                evictor,
                limit,
                tracker,
            },
            empty: Looked::AtSome,
            taken: Box::new(|_, _| ()),
        }
    }

    /// From now on these sections are spared.
    pub fn spare(&mut self, protected: Arc<ProtectedSections>) {
        self.protected = protected;
    }

    /// From now on `taken` is told of each section that pages were taken of, with how much went.
    pub fn tell(&mut self, taken: impl Fn(SectionNo, Took) + Send + 'static) {
        self.taken = Box::new(taken);
    }

    /// Hot and cold as far as known; sections without pages are in no set.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        self.victims.sets()
    }

    /// When the last scan was.
    #[must_use]
    pub fn scanned_at(&self) -> Option<Duration> {
        self.victims.scanned_at()
    }

    /// Looks at every section there is now and moves it among the sets. `clock` is read when all are
    /// unmapped.
    ///
    /// # Errors
    /// The tracker's; what is known of a section is then as before.
    pub fn scan(&mut self, clock: impl Fn() -> Duration) -> Result<(), TrackerError> {
        let sections: Vec<SectionNo> = self.memory.evictor.space().table().sections().collect();
        self.victims.follow(sections.iter().copied());
        self.victims.scan_begun();
        let looks = self.memory.tracker.look(&sections)?;
        // Only now: pages must have rested since the last of them was unmapped.
        let now = clock();
        let touched = sections
            .iter()
            .zip(looks)
            .filter(|(_, touched)| !touched.cpu.is_empty() || !touched.dma.is_empty())
            .map(|(section, _)| *section);
        self.victims.scanned(now, touched);
        self.look_at_empty(EMPTY_LOOKED_AT);
        self.empty = Looked::AtSome;
        Ok(())
    }

    fn look_at_empty(&mut self, sections_max: u64) {
        let memory = &self.memory;
        let has_pages = |section| !memory.present(section).is_empty();
        self.victims.look_at_empty(sections_max, has_pages);
    }

    /// True if the last scan is long enough ago for pages to be taken.
    #[must_use]
    pub fn is_rested(&self, now: Duration) -> bool {
        self.victims.is_rested(now)
    }

    /// Evicts up to `pages` pages, coldest sections first, within `reach`. Nothing is taken before
    /// the last scan is [`UNMAPPED_MIN`] ago. `go_on` is asked before each section.
    pub fn reclaim(
        &mut self,
        now: Duration,
        pages: u64,
        reach: Reach,
        go_on: impl Fn() -> bool,
    ) -> Reclaimed {
        let mut done = self.pass(now, pages, reach, &go_on);
        let left = pages.saturating_sub(done.evicted_pages);
        let is_short = reach == Reach::AllResting && left > 0 && done.stopped.is_none();
        if is_short && !done.has_more && self.empty == Looked::AtSome {
            self.look_at_empty(u64::MAX);
            self.empty = Looked::AtAll;
            // What it found goes before what is protected, and before another scan.
            done.add(self.pass(now, left, reach, &go_on));
        }
        done
    }

    fn pass(
        &mut self,
        now: Duration,
        pages: u64,
        reach: Reach,
        go_on: &impl Fn() -> bool,
    ) -> Reclaimed {
        if reach == Reach::Protected && self.protected.is_empty() {
            return Reclaimed::default();
        }
        let mut stopped = None;
        let protected = |section| self.protected.contains(section);
        let (memory, tell) = (&mut self.memory, &self.taken);
        let evict = |section, left| {
            if !go_on() {
                let then = Then::Stop;
                return Taken { pages: 0, then };
            }
            let present = memory.present(section).len();
            let (taken, stop) = memory.take(section, left);
            stopped = stop;
            if taken.pages > 0 {
                tell(section, Took::of(taken.pages, present));
            }
            taken
        };
        let done = self.victims.reclaim(now, pages, reach, protected, evict);
        self.protected.count_taken(done.protected_pages);
        Reclaimed {
            evicted_pages: done.evicted_pages,
            busy_sections: done.busy_sections,
            protected_pages: done.protected_pages,
            has_more: done.was_stopped && done.evicted_pages > 0,
            stopped,
        }
    }

    /// Gives memory of the store that is not needed any more back to the system.
    ///
    /// # Errors
    /// The kernel's.
    pub fn trim_store(&self) -> Result<(), pagetide_sys::memory_file::FileError> {
        self.memory.evictor.store().trim()
    }
}

/// The VM's pages, to be taken a section at a time.
struct Memory {
    evictor: Evictor,
    limit: Arc<Limit>,
    tracker: Box<dyn AccessTracker>,
}

impl Memory {
    fn present(&self, section: SectionNo) -> PageSet {
        let table = self.evictor.space().table();
        table.pages_in_state(section, |state| state == State::Present)
    }

    /// Evicts up to `pages` pages of `section`. With why nothing more can go at all, if that is so.
    fn take(&mut self, section: SectionNo, pages: u64) -> (Taken, Option<ReclaimStop>) {
        let there = self.section_pages(section);
        let mut evicted = 0;
        let (then, stop) = match self.evict(section, pages, &mut evicted) {
            Ok(then) => (then, None),
            // Memory that was taken out of the VM meanwhile is no trouble.
            Err(ReclaimStop::Kernel(_)) if self.section_pages(section) < there => {
                (Then::Next, None)
            }
            Err(stop) => (Then::Stop, Some(stop)),
        };
        let taken = Taken {
            pages: evicted,
            then,
        };
        (taken, stop)
    }

    fn section_pages(&self, section: SectionNo) -> u64 {
        self.evictor.space().table().pages_of(section).len()
    }

    fn evict(
        &mut self,
        section: SectionNo,
        pages: u64,
        evicted: &mut u64,
    ) -> Result<Then, ReclaimStop> {
        let present = self.present(section);
        if present.is_empty() {
            return Ok(Then::Emptied);
        }
        let mapped = self
            .tracker
            .mapped(section)
            .map_err(|error| ReclaimStop::Kernel(error.to_string()))?;
        let mut wanted = present;
        wanted.subtract(&mapped);
        if wanted.is_empty() {
            return Ok(Then::Next);
        }
        let (tracker, limit) = (&self.tracker, &self.limit);
        let touched = || tracker.mapped(section);
        let result = self
            .evictor
            .evict(section, &wanted, pages, touched, |batch| {
                *evicted += batch;
                limit.evicted(batch);
            });
        match result {
            // What comes back meanwhile is touched by whoever needed it.
            Ok(_) if *evicted == present.len() => Ok(Then::Emptied),
            Ok(_)
            | Err(EvictorError::Round(EvictionError::Nothing | EvictionError::RoundUnderWay)) => {
                Ok(Then::Next)
            }
            Err(EvictorError::Round(EvictionError::Busy)) => Ok(Then::Busy),
            Err(EvictorError::Store(error)) => Err(ReclaimStop::Store(error)),
            Err(
                EvictorError::Place(PlaceError::Gone)
                | EvictorError::Round(EvictionError::Place(PlaceError::Gone)),
            ) => Err(ReclaimStop::Gone),
            Err(error) => Err(ReclaimStop::Kernel(error.to_string())),
        }
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
