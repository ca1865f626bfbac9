// SPDX-License-Identifier: Apache-2.0
//! [`Trials`]: what a reclaim's tries came to, as far as it cannot be seen afterwards.

use pagetide_addr::{PageSet, SectionNo};
use pagetide_policy::victims::Then;
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// What the last try of a section came to.
#[derive(Clone, Copy, Default)]
pub(super) struct Trial {
    /// A device was using it.
    pub(super) was_busy: bool,
    /// The store had no room for these pages.
    pub(super) refused: PageSet,
}

/// The tries of a reclaim, by all threads that take part in it; nothing while none is to be noted.
#[derive(Default)]
pub(crate) struct Trials(Mutex<Option<HashMap<SectionNo, Trial>>>);

impl Trials {
    /// From now on tries are noted.
    pub(crate) fn begin(&self) {
        *self.lock() = Some(HashMap::new());
    }

    /// `section` was tried.
    pub(crate) fn note(&self, section: SectionNo, then: Then, refused: PageSet) {
        let mut trials = self.lock();
        let Some(trials) = trials.as_mut() else {
            return;
        };
        let was_busy = then == Then::Busy;
        match was_busy || !refused.is_empty() {
            true => trials.insert(section, Trial { was_busy, refused }),
            false => trials.remove(&section),
        };
    }

    /// What was noted; nothing more is from now on.
    pub(super) fn end(&self) -> HashMap<SectionNo, Trial> {
        self.lock().take().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Option<HashMap<SectionNo, Trial>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
