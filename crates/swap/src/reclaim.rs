// SPDX-License-Identifier: Apache-2.0
//! [`Reclaimer`]: which sections go, and when (Taiji 4.2; the reclaim loop of one VM).
//!
//! # Which pages may go
//! A scan takes every page out of the page tables (its content stays) and tells
//! which were in use since the scan before. A page goes only if it has been
//! unmapped for at least [`UNMAPPED_MIN`] and was not mapped again: then nobody
//! took a reference to it through a page table lately, which the write
//! protection of the eviction round alone would not tell. This is looked at to
//! choose, and again when the pages are protected.
//!
//! # Which go first
//! Sections coldest first. A first pass takes sections on the cold side only.
//! If that is not enough, the whole VM is hot: a second pass takes the pages
//! that rested since the last scan, whatever their section. If even that is not
//! enough, the caller scans again and comes back a moment later.
//!
//! The clock is the caller's: times are durations since any fixed moment.

use crate::{
    evictor::{Evictor, EvictorError},
    limit::Limit,
    sets::{HotColdSets, Level, Seen},
    store::PutError,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::{EvictionError, PlaceError, State};
use std::{sync::Arc, time::Duration};

/// How long a page must have been unmapped before it may go. A reference taken just before the
/// unmapping by a copy in the kernel is gone by then.
pub const UNMAPPED_MIN: Duration = Duration::from_millis(50);

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

/// How much may be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Sections on the cold side.
    ColdOnly,
    /// Every page that rested since the last scan.
    AllResting,
}

/// What reclaiming brought.
#[derive(Debug, Default)]
pub struct Reclaimed {
    /// Pages absent now that were present.
    pub evicted_pages: u64,
    /// Sections passed over because a device was using them.
    pub busy_sections: u64,
    /// Why it ended early, if it did.
    pub stopped: Option<ReclaimStop>,
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
    evictor: Evictor,
    limit: Arc<Limit>,
    tracker: Box<dyn AccessTracker>,
    sets: HotColdSets,
    scanned_at: Option<Duration>,
    drifted_at: Option<Duration>,
}

/// Sections drift towards cold at most this often, however often pressure makes the VM be scanned.
const DRIFT_MIN: Duration = Duration::from_secs(1);

impl Reclaimer {
    /// A reclaimer that knows nothing yet of what is cold.
    #[must_use]
    pub fn new(evictor: Evictor, limit: Arc<Limit>, tracker: Box<dyn AccessTracker>) -> Self {
        let mut sets = HotColdSets::default();
        sets.follow(evictor.space().table().sections());
        Self {
            evictor,
            limit,
            tracker,
            sets,
            scanned_at: None,
            drifted_at: None,
        }
    }

    /// Hot and cold as far as known.
    #[must_use]
    pub fn sets(&self) -> &HotColdSets {
        &self.sets
    }

    /// When the last scan was.
    #[must_use]
    pub fn scanned_at(&self) -> Option<Duration> {
        self.scanned_at
    }

    /// Looks at every section there is now and moves it among the sets. `clock` is read when all are
    /// unmapped.
    ///
    /// # Errors
    /// The tracker's; what is known of a section is then as before.
    pub fn scan(&mut self, clock: impl Fn() -> Duration) -> Result<(), TrackerError> {
        let sections: Vec<SectionNo> = self.evictor.space().table().sections().collect();
        self.sets.follow(sections.iter().copied());
        // A look that fails half-way has unmapped some pages just now.
        self.scanned_at = None;
        let touched = self.tracker.look(&sections)?;
        // Only now: pages must have rested since the last of them was unmapped.
        let now = clock();
        let drift = self
            .drifted_at
            .is_none_or(|at| now.saturating_sub(at) >= DRIFT_MIN);
        if drift {
            self.drifted_at = Some(now);
        }
        for (section, touched) in sections.iter().zip(touched) {
            if !touched.cpu.is_empty() || !touched.dma.is_empty() {
                self.sets.saw(*section, Seen::Touched);
            } else if drift {
                self.sets.saw(*section, Seen::Untouched);
            }
        }
        self.scanned_at = Some(now);
        Ok(())
    }

    /// True if the last scan is long enough ago for pages to be taken.
    #[must_use]
    pub fn is_rested(&self, now: Duration) -> bool {
        self.scanned_at
            .is_some_and(|at| now.saturating_sub(at) >= UNMAPPED_MIN)
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
        let mut done = Reclaimed::default();
        if !self.is_rested(now) {
            return done;
        }
        let order: Vec<SectionNo> = self.sets.coldest_first().collect();
        for section in order {
            let left = pages.saturating_sub(done.evicted_pages);
            let in_reach =
                reach == Reach::AllResting || self.sets.level(section) <= Some(Level::Inactive);
            if left == 0 || !in_reach || !go_on() {
                break;
            }
            let table = self.evictor.space().table();
            let scanned = table.pages_of(section).len();
            match self.reclaim_section(section, left, &mut done) {
                // Memory that was taken out of the VM meanwhile is no trouble.
                Err(ReclaimStop::Kernel(_)) if self.is_shorter(section, scanned) => {}
                Err(stop) => {
                    done.stopped = Some(stop);
                    break;
                }
                Ok(()) => {}
            }
        }
        done
    }

    fn is_shorter(&self, section: SectionNo, pages: u64) -> bool {
        self.evictor.space().table().pages_of(section).len() < pages
    }

    fn reclaim_section(
        &mut self,
        section: SectionNo,
        pages: u64,
        done: &mut Reclaimed,
    ) -> Result<(), ReclaimStop> {
        let table = self.evictor.space().table();
        let mut wanted = table.pages_in_state(section, |state| state == State::Present);
        if wanted.is_empty() {
            return Ok(());
        }
        let mapped = self
            .tracker
            .mapped(section)
            .map_err(|error| ReclaimStop::Kernel(error.to_string()))?;
        wanted.subtract(&mapped);
        if wanted.is_empty() {
            return Ok(());
        }
        let limit = Arc::clone(&self.limit);
        let mut evicted = 0;
        let tracker = &self.tracker;
        let touched = || tracker.mapped(section);
        let result = self
            .evictor
            .evict(section, &wanted, pages, touched, |batch| {
                evicted += batch;
                limit.evicted(batch);
            });
        done.evicted_pages += evicted;
        match result {
            Ok(_)
            | Err(EvictorError::Round(EvictionError::Nothing | EvictionError::RoundUnderWay)) => {
                Ok(())
            }
            Err(EvictorError::Round(EvictionError::Busy)) => {
                done.busy_sections += 1;
                Ok(())
            }
            Err(EvictorError::Store(error)) => Err(ReclaimStop::Store(error)),
            Err(
                EvictorError::Place(PlaceError::Gone)
                | EvictorError::Round(EvictionError::Place(PlaceError::Gone)),
            ) => Err(ReclaimStop::Gone),
            Err(error) => Err(ReclaimStop::Kernel(error.to_string())),
        }
    }

    /// Gives memory of the store that is not needed any more back to the system.
    ///
    /// # Errors
    /// The kernel's.
    pub fn trim_store(&self) -> Result<(), pagetide_sys::memory_file::FileError> {
        self.evictor.store().trim()
    }
}
