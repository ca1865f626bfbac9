// SPDX-License-Identifier: Apache-2.0
//! An element for every page of a space, allocated only for the GiBs that need it.
//!
//! ```text
//!   slot      0        1        2        …        1023      24 or 32 bytes each
//!          ┌──────┬─────────┬───────┬─────────┬────────┐
//!          │ none │    ●    │ none  │    …    │  none  │    a space of 1 TiB
//!          └──────┴────│────┴───────┴─────────┴────────┘
//!                      └──► elements of GiB 1, made at first need
//! ```
//! Readers take no lock, so it is never certain that no reader is active:
//! elements stay until the whole structure is dropped. A space that was busy all
//! over keeps its elements when it is quiet again; they are small (64 KiB a GiB
//! of the PA-bitmap).
//! KiB a GiB of the PA-bitmap).
//!
//! A slot may carry a small state: what has to be known of a GiB without
//! elements is then in the same cache line as the absence of elements.

use crate::sync::OnceLock;
use pagetide_addr::{FilePage, FileRange, PAGE_BYTES, SECTION_PAGES, to_usize};

/// Pages of a GiB.
pub(crate) const PAGES_PER_GIB: u64 = (1 << 30) / PAGE_BYTES;
/// Sections of a GiB.
pub(crate) const SECTIONS_PER_GIB: u64 = PAGES_PER_GIB / SECTION_PAGES;

/// Elements of a space by GiB, with a state `S` for each GiB.
pub(crate) struct Sparse<T, S = ()> {
    slots: Box<[Slot<T, S>]>,
}

/// What a space has for one GiB.
pub(crate) struct Slot<T, S> {
    elements: OnceLock<Box<[T]>>,
    /// The state.
    pub beside: S,
}

impl<T, S> Slot<T, S> {
    /// The elements, if there are any.
    #[inline]
    pub fn get(&self) -> Option<&[T]> {
        self.elements.get().map(|elements| &**elements)
    }

    /// The elements, made by `make` if there are none; never `None`. The caller must make sure that
    /// only one thread at a time calls this.
    #[cold]
    pub fn get_or_make(&self, make: impl FnOnce() -> Box<[T]>) -> Option<&[T]> {
        if self.get().is_none() && self.elements.set(make()).is_err() {
            debug_assert!(false, "two threads made the elements of a GiB");
        }
        self.get()
    }
}

impl<T, S> Sparse<T, S> {
    /// Slots for a space of `page_count` pages, all empty.
    pub fn new(page_count: u64, mut beside: impl FnMut() -> S) -> Self {
        let slots = (0..gib_count(page_count)).map(|_| Slot {
            elements: OnceLock::new(),
            beside: beside(),
        });
        Self {
            slots: slots.collect(),
        }
    }

    /// The slot of a GiB; `None` past the end.
    #[inline]
    pub fn slot(&self, gib: usize) -> Option<&Slot<T, S>> {
        self.slots.get(gib)
    }

    /// The elements of a GiB, if it has any.
    #[inline]
    pub fn get(&self, gib: usize) -> Option<&[T]> {
        self.slot(gib)?.get()
    }

    /// The elements of all GiBs that have any, ascending.
    pub fn made(&self) -> impl Iterator<Item = &[T]> {
        self.slots.iter().filter_map(Slot::get)
    }

    /// Memory in use, in bytes.
    pub fn bytes(&self) -> u64 {
        let made: usize = self.made().map(std::mem::size_of_val).sum();
        (std::mem::size_of_val(&*self.slots) + made) as u64
    }
}

impl<T, S> std::fmt::Debug for Sparse<T, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Sparse({} of {} GiB)",
            self.made().count(),
            self.slots.len()
        )
    }
}

/// Number of GiBs that `page_count` pages fill, counting a partial last one.
pub(crate) fn gib_count(page_count: u64) -> u64 {
    page_count.div_ceil(PAGES_PER_GIB)
}

/// The GiB of `page`.
#[inline]
pub(crate) fn gib_of(page: FilePage) -> usize {
    to_usize(page.0 / PAGES_PER_GIB)
}

/// The pages of a GiB, cut off at `page_count`.
pub(crate) fn pages_of(gib: usize, page_count: u64) -> FileRange {
    let start = (gib as u64 * PAGES_PER_GIB).min(page_count);
    let end = (start + PAGES_PER_GIB).min(page_count);
    FileRange::new(FilePage(start), FilePage(end))
}

/// `range` cut at borders of GiBs, ascending.
#[inline]
pub(crate) fn by_gib(range: FileRange) -> impl Iterator<Item = (usize, FileRange)> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        if start >= range.end {
            return None;
        }
        let gib = gib_of(start);
        let end = FilePage((start.0 / PAGES_PER_GIB + 1) * PAGES_PER_GIB).min(range.end);
        let part = FileRange::new(start, end);
        start = end;
        Some((gib, part))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn empty_space_of_a_terabyte_takes_a_slot_a_gib_and_no_element() {
        let sparse: Sparse<u64> = Sparse::new(1 << 28, || ());
        assert_eq!(sparse.made().count(), 0);
        assert_eq!(sparse.bytes(), 1024 * 24);
        assert!(sparse.get(1023).is_none());
        let slot = sparse.slot(5).unwrap();
        assert_eq!(slot.get_or_make(|| Box::new([7])), Some(&[7][..]));
        assert_eq!(slot.get_or_make(|| Box::new([8])), Some(&[7][..]));
        assert_eq!(sparse.get(5), Some(&[7][..]));
        assert_eq!(sparse.bytes(), 1024 * 24 + 8);
        assert!(sparse.slot(1024).is_none());
    }

    #[test]
    fn range_is_cut_at_each_gib_and_no_page_is_lost() {
        let range = FileRange::new(FilePage(PAGES_PER_GIB - 1), FilePage(3 * PAGES_PER_GIB + 2));
        let parts: Vec<_> = by_gib(range).collect();
        assert_eq!(
            parts.iter().map(|(gib, _)| *gib).collect::<Vec<_>>(),
            [0, 1, 2, 3]
        );
        assert_eq!(parts.iter().map(|(_, p)| p.len()).sum::<u64>(), range.len());
        assert_eq!(parts[1].1, pages_of(1, u64::MAX));
        assert_eq!(by_gib(FileRange::new(FilePage(9), FilePage(9))).count(), 0);
    }
}
