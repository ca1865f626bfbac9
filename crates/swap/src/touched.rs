// SPDX-License-Identifier: Apache-2.0
//! [`TouchedSections`]: sections of which pages were stored, or stored pages were needed, lately: what
//! [`pagetide_policy::demotion`] is to be told.
//!
//! An eviction notes its section in a set: each is heard of. A fill notes its section without a lock and without a wait; the reclaim thread takes what was noted, some
//! times a second. There is one cell for each of many sections: a note may be lost to that of another section.
//! Then a section is demoted a little too early, and nothing else.

use pagetide_addr::{SectionNo, to_usize};
use std::{
    collections::BTreeSet,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

/// Cells: more than the sections that fills come from between two rounds of the reclaim thread, mostly.
const CELLS: usize = 512;
const EMPTY: u64 = 0;

/// See the module. One per VM.
#[derive(Debug)]
pub struct TouchedSections {
    is_on: AtomicBool,
    /// Number of a section and one.
    cells: Box<[AtomicU64]>,
    stored: Mutex<BTreeSet<SectionNo>>,
}

impl Default for TouchedSections {
    fn default() -> Self {
        Self {
            is_on: AtomicBool::new(false),
            cells: (0..CELLS).map(|_| AtomicU64::new(EMPTY)).collect(),
            stored: Mutex::default(),
        }
    }
}

impl TouchedSections {
    /// From now on sections are noted.
    pub(crate) fn begin(&self) {
        self.is_on.store(true, Relaxed);
    }

    /// Notes that pages of `section` were evicted.
    pub(crate) fn note_stored(&self, section: SectionNo) {
        if self.is_on.load(Relaxed) {
            self.lock().insert(section);
        }
    }

    /// Takes the sections of which pages were evicted.
    pub(crate) fn take_stored(&self) -> BTreeSet<SectionNo> {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<SectionNo>> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a stored page of `section` was needed.
    pub(crate) fn note(&self, section: SectionNo) {
        if !self.is_on.load(Relaxed) {
            return;
        }
        let cell = &self.cells[to_usize(section.0 % CELLS as u64)];
        let noted = section.0 + 1;
        // Pages of one section are mostly needed one after the other: no write for each.
        if cell.load(Relaxed) != noted {
            cell.store(noted, Relaxed);
        }
    }

    /// Takes what was noted.
    pub(crate) fn take(&self) -> impl Iterator<Item = SectionNo> + '_ {
        self.cells.iter().filter_map(|cell| {
            let noted = match cell.load(Relaxed) {
                EMPTY => EMPTY,
                _ => cell.swap(EMPTY, Relaxed),
            };
            noted.checked_sub(1).map(SectionNo)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_noted_once_they_are_wanted_and_taken_once() {
        let touched = TouchedSections::default();
        touched.note(SectionNo(4));
        assert_eq!(touched.take().count(), 0);
        touched.begin();
        for section in [7, 7, 0, 511, 7] {
            touched.note(SectionNo(section));
        }
        let taken: Vec<SectionNo> = touched.take().collect();
        assert_eq!(taken, [SectionNo(0), SectionNo(7), SectionNo(511)]);
        assert_eq!(touched.take().count(), 0);
        // One of two that share a cell.
        touched.note(SectionNo(7));
        touched.note(SectionNo(7 + CELLS as u64));
        assert_eq!(touched.take().count(), 1);
        // Evictions are heard of, all of them.
        touched.note_stored(SectionNo(7));
        touched.note_stored(SectionNo(7 + CELLS as u64));
        assert_eq!(touched.take_stored().len(), 2);
        assert_eq!(touched.take_stored().len(), 0);
    }
}
