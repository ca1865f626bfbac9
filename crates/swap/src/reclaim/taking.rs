// SPDX-License-Identifier: Apache-2.0
//! [`Memory`]: evicts the pages of one section.

use super::ReclaimStop;
use crate::{
    evictor::{Evictor, EvictorError},
    limit::Limit,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::{EvictionError, PageState, PlaceError};
use pagetide_policy::tracker::AccessTracker;
use pagetide_policy::{
    reclaim::Evicted,
    victims::{Taken, Then},
};
use std::sync::Arc;

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
    pub fn take(
        &mut self,
        section: SectionNo,
        pages: u64,
        holds: impl Fn() -> bool,
    ) -> Evicted<ReclaimStop> {
        let there = self.section_pages(section);
        let present = self.present(section);
        let mut outcome = Evicted {
            taken: Taken {
                pages: 0,
                then: Then::Next,
            },
            present_pages: present.len(),
            mapped_pages: 0,
            stop: None,
        };
        match self.evict(section, pages, present, holds, &mut outcome) {
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
        section: SectionNo,
        pages: u64,
        present: PageSet,
        holds: impl Fn() -> bool,
        outcome: &mut Evicted<ReclaimStop>,
    ) -> Result<Then, ReclaimStop> {
        if present.is_empty() {
            return Ok(Then::Emptied);
        }
        let mapped = self.tracker.mapped(section);
        let mapped = mapped.map_err(|error| ReclaimStop::Kernel(error.to_string()))?;
        outcome.mapped_pages = mapped.len();
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
                limit.evicted_from(section, batch);
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
