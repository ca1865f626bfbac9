// SPDX-License-Identifier: Apache-2.0
//! [`FaultedSections`]: sections that faults have led back to, for the reclaim thread to bring back the rest.
//!
//! A fault only notes its section: the pages that were evicted with its page are filled as background work
//! ([`pagetide_policy::swap_in`]). While that is switched off, a fault reads one flag.

use pagetide_addr::SectionNo;
use pagetide_policy::swap_in::Together;
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Most sections that are noted until the reclaim thread takes them: it fills a few in a turn, and what waits
/// for long is of no use.
const NOTED_MAX: usize = 64;

/// See the module. One per VM.
#[derive(Debug, Default)]
pub struct FaultedSections {
    is_on: AtomicBool,
    noted: Mutex<Vec<SectionNo>>,
}

impl FaultedSections {
    /// From now on sections are noted, or not.
    pub fn set(&self, together: Together) {
        self.is_on.store(together == Together::On, Relaxed);
        self.lock().clear();
    }

    /// True while sections are noted.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Notes `section`; true if it was not noted already.
    pub(crate) fn note(&self, section: SectionNo) -> bool {
        let mut noted = self.lock();
        let is_new = noted.len() < NOTED_MAX && !noted.contains(&section);
        if is_new {
            noted.push(section);
        }
        is_new
    }

    /// Takes what was noted, in order.
    pub(crate) fn take(&self) -> Vec<SectionNo> {
        match self.is_on() {
            true => std::mem::take(&mut *self.lock()),
            false => Vec::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SectionNo>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_is_noted_once_until_it_is_taken_and_not_beyond_the_bound() {
        let faulted = FaultedSections::default();
        faulted.set(Together::On);
        assert!(faulted.note(SectionNo(7)) && !faulted.note(SectionNo(7)));
        assert_eq!(faulted.take(), [SectionNo(7)]);
        assert!(faulted.note(SectionNo(7)));
        let others = (100..100 + NOTED_MAX as u64).map(SectionNo);
        assert_eq!(
            others.filter(|section| faulted.note(*section)).count(),
            NOTED_MAX - 1
        );
        assert_eq!(faulted.take().len(), NOTED_MAX);
        faulted.note(SectionNo(1));
        faulted.set(Together::Off);
        assert!(!faulted.is_on() && faulted.take().is_empty());
    }
}
