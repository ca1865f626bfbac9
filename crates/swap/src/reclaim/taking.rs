// SPDX-License-Identifier: Apache-2.0
//! [`Memory`]: evicts the pages of one section.

use super::{AccessTracker, ReclaimStop};
use crate::{
    evictor::{Evictor, EvictorError},
    limit::Limit,
    reserve::After,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::{EvictionError, PageState, PlaceError};
use pagetide_policy::victims::{Taken, Then};
use std::sync::Arc;

/// A section is in use if more than this share of its pages was mapped again after it was unmapped.
const WARM_EIGHTHS: u64 = 1;

/// True if so many present pages were mapped again that the section is in use.
pub(super) fn is_warm(mapped: &PageSet, present: &PageSet) -> bool {
    mapped.len() * 8 > present.len() * WARM_EIGHTHS
}

/// Result of an eviction from a section.
pub(crate) struct Outcome {
    pub taken: Taken,
    /// Why nothing more can be evicted at all, if so.
    pub stop: Option<ReclaimStop>,
    /// Its present pages before.
    pub present: PageSet,
    /// Those of them that were in use.
    pub mapped: PageSet,
}

impl Outcome {
    /// State of the section after `left` pages of it were wanted; `None`: unchanged.
    pub fn after(&self, left: u64) -> Option<After> {
        match self.taken.then {
            Then::Emptied => Some(After::Emptied),
            // Nothing was found out about it.
            Then::Stop => None,
            // There was enough: the rest of it is unchanged.
            Then::Next if self.taken.pages >= left => None,
            Then::Next | Then::Busy if is_warm(&self.mapped, &self.present) => Some(After::Warm),
            Then::Next | Then::Busy => Some(After::Tried),
        }
    }
}

/// The VM's pages, evicted a section at a time.
pub(crate) struct Memory {
    pub evictor: Evictor,
    pub limit: Arc<Limit>,
    pub tracker: Arc<dyn AccessTracker>,
}

impl Memory {
    /// The same for another thread.
    pub fn another(&self) -> Self {
        Self {
            evictor: self.evictor.another(),
            limit: Arc::clone(&self.limit),
            tracker: Arc::clone(&self.tracker),
        }
    }

    pub fn present(&self, section: SectionNo) -> PageSet {
        let table = self.evictor.space().table();
        table.pages_in_state(section, |state| state == PageState::Present)
    }

    /// Evicts up to `pages` pages of `section`; none if `holds` returns false because the memory
    /// has changed.
    pub fn take(&mut self, section: SectionNo, pages: u64, holds: impl Fn() -> bool) -> Outcome {
        let there = self.section_pages(section);
        let present = self.present(section);
        let mut outcome = Outcome {
            taken: Taken {
                pages: 0,
                then: Then::Next,
            },
            stop: None,
            present,
            mapped: PageSet::EMPTY,
        };
        match self.evict((section, pages), holds, &mut outcome) {
            Ok(then) => outcome.taken.then = then,
            // Memory removed from the VM meanwhile is no error.
            Err(ReclaimStop::Kernel(_)) if self.section_pages(section) < there => {}
            Err(stop) => {
                outcome.taken.then = Then::Stop;
                outcome.stop = Some(stop);
            }
        }
        outcome
    }

    fn section_pages(&self, section: SectionNo) -> u64 {
        self.evictor.space().table().pages_of(section).len()
    }

    fn evict(
        &mut self,
        (section, pages): (SectionNo, u64),
        holds: impl Fn() -> bool,
        outcome: &mut Outcome,
    ) -> Result<Then, ReclaimStop> {
        let present = outcome.present;
        if present.is_empty() {
            return Ok(Then::Emptied);
        }
        let mapped = self.tracker.mapped(section);
        let mapped = mapped.map_err(|error| ReclaimStop::Kernel(error.to_string()))?;
        outcome.mapped = mapped;
        let evicted = &mut outcome.taken.pages;
        let mut wanted = present;
        wanted.subtract(&mapped);
        if wanted.is_empty() {
            return Ok(Then::Next);
        }
        let (tracker, limit) = (&self.tracker, &self.limit);
        let touched = || match holds() {
            true => tracker.mapped(section),
            false => Ok(present),
        };
        let result = self
            .evictor
            .evict(section, &wanted, pages, touched, |batch| {
                *evicted += batch;
                limit.evicted(batch);
            });
        match result {
            // A page that comes back meanwhile was touched by the access that needed it.
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
