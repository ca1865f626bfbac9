// SPDX-License-Identifier: Apache-2.0
//! [`Memory`]: evicts the pages of one section.

use super::{ReclaimStop, trials::Trials};
use crate::{
    evictor::{Evictor, EvictorError},
    limit::Limit,
    pace::Pace,
};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::{EvictionError, PageState, PlaceError};
use pagetide_policy::tracker::AccessTracker;
use pagetide_policy::{
    reclaim::Evicted,
    victims::{Taken, Then},
};
use std::{ops::ControlFlow, sync::Arc};

/// What is wanted of one section.
struct Wanted {
    section: SectionNo,
    pages: u64,
    present: PageSet,
    /// Of them, those that a full store has refused: they need not be read again.
    refused: PageSet,
}

/// How it continues after an eviction round.
struct Next {
    then: Then,
    /// The round was ended for a pause.
    is_cut: bool,
    /// It was to take the first pages only, and the store has refused some of them.
    goes_on: bool,
    refused: PageSet,
}

impl Next {
    const fn uncut(then: Then) -> Self {
        Self {
            then,
            is_cut: false,
            goes_on: false,
            refused: PageSet::EMPTY,
        }
    }
}

/// The outcome of one eviction round.
struct Part {
    evicted: Evicted<ReclaimStop>,
    was_cut: bool,
    goes_on: bool,
    /// By a store that is full, or has no room for such pages.
    refused: PageSet,
}

impl Part {
    /// Both together.
    fn and(self, next: Self) -> Self {
        let (first, last) = (self.evicted, next.evicted);
        let mut refused = self.refused;
        refused.unite(&next.refused);
        Self {
            evicted: Evicted {
                taken: Taken {
                    pages: first.taken.pages + last.taken.pages,
                    then: last.taken.then,
                },
                present_pages: first.present_pages,
                mapped_pages: first.mapped_pages.max(last.mapped_pages),
                stop: last.stop,
            },
            was_cut: next.was_cut,
            goes_on: next.goes_on,
            refused,
        }
    }
}

/// The VM's pages, evicted a section at a time.
pub(crate) struct Memory {
    pub evictor: Evictor,
    pub limit: Arc<Limit>,
    pub tracker: Arc<dyn AccessTracker>,
    /// Shared by all that take pages of the VM.
    pub trials: Arc<Trials>,
}

impl Memory {
    /// The same for another thread.
    pub fn another(&self) -> Self {
        Self {
            evictor: self.evictor.another(),
            limit: Arc::clone(&self.limit),
            tracker: Arc::clone(&self.tracker),
            trials: Arc::clone(&self.trials),
        }
    }

    pub fn present(&self, section: SectionNo) -> PageSet {
        let table = self.evictor.space().table();
        table.pages_in_state(section, |state| state == PageState::Present)
    }

    /// Evicts up to `pages` pages of `section`; none if `holds` returns false because the memory
    /// has changed. Where `pace` wants a pause within the section, it ends the eviction round, pauses, and
    /// begins another one, behind what a full store has refused: else it would find nothing but that, in one
    /// round after the other. So it does where the first pages are refused, because they do not compress, and others
    /// behind them may go.
    pub fn take(
        &mut self,
        section: SectionNo,
        pages: u64,
        holds: impl Fn() -> bool,
        pace: &impl Pace,
    ) -> Evicted<ReclaimStop> {
        let whole = Wanted {
            section,
            pages,
            present: self.present(section),
            refused: PageSet::EMPTY,
        };
        let mut whole = self.take_part(whole, &holds, pace);
        while whole.was_cut || whole.goes_on {
            if whole.was_cut && !pace.go_on() {
                // What was found out about the rest of the section is not known to the pass.
                whole.evicted.taken.then = Then::Stop;
                break;
            }
            let rest = Wanted {
                section,
                pages: pages - whole.evicted.taken.pages,
                present: self.present(section),
                refused: whole.refused,
            };
            let part = self.take_part(rest, &holds, pace);
            whole = whole.and(part);
        }
        let then = whole.evicted.taken.then;
        self.trials.note(section, then, whole.refused);
        whole.evicted
    }

    fn take_part(&mut self, part: Wanted, holds: impl Fn() -> bool, pace: &impl Pace) -> Part {
        let (section, pages) = (part.section, part.pages);
        let there = self.section_pages(section);
        let mut outcome = Evicted {
            taken: Taken {
                pages: 0,
                then: Then::Next,
            },
            present_pages: part.present.len(),
            mapped_pages: 0,
            stop: None,
        };
        let (mut was_cut, mut goes_on, mut refused) = (false, false, PageSet::EMPTY);
        let progress = |evicted| match evicted < pages && !pace.may_stay() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match self.evict(&part, holds, progress, &mut outcome) {
            Ok(next) => {
                outcome.taken.then = next.then;
                (was_cut, goes_on, refused) = (next.is_cut, next.goes_on, next.refused);
            }
            // Memory removed from the VM meanwhile is no error.
            Err(ReclaimStop::Kernel(_)) if self.section_pages(section) < there => {}
            Err(stop) => {
                outcome.taken.then = Then::Stop;
                outcome.stop = Some(stop);
            }
        }
        Part {
            evicted: outcome,
            was_cut,
            goes_on,
            refused,
        }
    }

    fn section_pages(&self, section: SectionNo) -> u64 {
        self.evictor.space().table().pages_of(section).len()
    }

    /// `progress` is told how many pages were evicted so far.
    fn evict(
        &mut self,
        wanted: &Wanted,
        holds: impl Fn() -> bool,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
        outcome: &mut Evicted<ReclaimStop>,
    ) -> Result<Next, ReclaimStop> {
        let Wanted {
            section,
            pages,
            present,
            refused,
        } = *wanted;
        let then = |then| Ok(Next::uncut(then));
        if present.is_empty() {
            return then(Then::Emptied);
        }
        let mapped = self.tracker.mapped(section);
        let mapped = mapped.map_err(|error| ReclaimStop::Kernel(error.to_string()))?;
        outcome.mapped_pages = mapped.len();
        let evicted = &mut outcome.taken.pages;
        let mut wanted = present;
        wanted.subtract(&mapped);
        wanted.subtract(&refused);
        if wanted.is_empty() {
            return then(Then::Next);
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
                progress(*evicted)
            });
        match result {
            // A page that comes back meanwhile was touched by the access that needed it.
            Ok(_) if *evicted == present.len() => then(Then::Emptied),
            Ok(report) => Ok(Next {
                then: Then::Next,
                is_cut: report.was_cut,
                goes_on: report.was_trimmed && !report.refused.is_empty() && *evicted < pages,
                refused: report.refused,
            }),
            Err(EvictorError::Round(EvictionError::Nothing | EvictionError::RoundUnderWay)) => {
                then(Then::Next)
            }
            Err(EvictorError::Round(EvictionError::Busy)) => then(Then::Busy),
            Err(EvictorError::Store(error)) => Err(ReclaimStop::Store(error)),
            Err(
                EvictorError::Place(PlaceError::Gone)
                | EvictorError::Round(EvictionError::Place(PlaceError::Gone)),
            ) => Err(ReclaimStop::Gone),
            Err(error) => Err(ReclaimStop::Kernel(error.to_string())),
        }
    }
}
