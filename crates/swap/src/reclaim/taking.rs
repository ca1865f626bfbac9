// SPDX-License-Identifier: Apache-2.0
//! [`Memory`]: the pages of one section, taken.

use super::{AccessTracker, ReclaimStop};
use crate::{
    evictor::{Evictor, EvictorError},
    limit::Limit,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::{EvictionError, PlaceError, State};
use pagetide_policy::{
    candidates::Candidates,
    victims::{Taken, Then},
};
use std::sync::Arc;

/// A section of whose pages more than this share came back while it stood unmapped is in use.
const WARM_EIGHTHS: u64 = 1;

/// True if so much of what is there was mapped again that the section is in use.
pub(super) fn is_warm(mapped: &PageSet, present: &PageSet) -> bool {
    mapped.len() * 8 > present.len() * WARM_EIGHTHS
}

/// What became of a section.
pub(super) struct Outcome {
    pub taken: Taken,
    /// Why nothing more can go at all, if that is so.
    pub stop: Option<ReclaimStop>,
    /// Its pages before.
    pub present: PageSet,
    /// Those of them that were in use.
    pub mapped: PageSet,
}

/// Whether a section was found in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Warmth {
    Warm,
    Cold,
}

impl Outcome {
    /// Notes how `section` stands now, of which `left` pages were wanted.
    pub fn file(&self, section: SectionNo, left: u64, candidates: &mut Candidates) -> Warmth {
        match self.taken.then {
            Then::Emptied => candidates.forget(section),
            // Nothing was found out about it.
            Then::Stop => {}
            // There was enough: the rest of it stands as before.
            Then::Next if self.taken.pages >= left => {}
            Then::Next | Then::Busy => candidates.tried(section),
        }
        match is_warm(&self.mapped, &self.present) {
            true => Warmth::Warm,
            false => Warmth::Cold,
        }
    }
}

/// The VM's pages, to be taken a section at a time.
pub(super) struct Memory {
    pub evictor: Evictor,
    pub limit: Arc<Limit>,
    pub tracker: Box<dyn AccessTracker>,
}

impl Memory {
    pub fn present(&self, section: SectionNo) -> PageSet {
        let table = self.evictor.space().table();
        table.pages_in_state(section, |state| state == State::Present)
    }

    /// Evicts up to `pages` pages of `section`.
    pub fn take(&mut self, section: SectionNo, pages: u64) -> Outcome {
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
        match self.evict(section, pages, &mut outcome) {
            Ok(then) => outcome.taken.then = then,
            // Memory that was taken out of the VM meanwhile is no trouble.
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
