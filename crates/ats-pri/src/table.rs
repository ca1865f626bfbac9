// SPDX-License-Identifier: Apache-2.0
//! The I/O page table: a radix tree of four levels with 512 entries each, like
//! VT-d's second-stage tables and x86's own.
//!
//! ```text
//!   page number   35 … 27 │ 26 … 18 │ 17 … 9 │ 8 … 0
//!                    │         │         │       │
//!                  root ──► table ──► table ──► leaf ──► entry
//!
//!   entry   51 ………… 12 │ 6 │ 5 │ 1 │ 0
//!           page's home │ D │ A │ W │ R
//! ```
//! A walk takes no lock: three pointers and the entry. Upper entries appear once
//! and stay while the table lives, since a walk may be under way at any time; leaf
//! entries change by one atomic operation each. The walker sets *accessed* (A)
//! when it translates, and *dirty* (D) when it translates for a write, like an
//! IOMMU with access and dirty tracking.

use pagetide_addr::{Access, FilePage, FileRange, PAGE_SHIFT, to_usize};
use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

/// Entries of a table.
const FAN_OUT: usize = 512;
const INDEX_BITS: u32 = FAN_OUT.trailing_zeros();
/// Most pages of a table: 48 bits of address.
pub(super) const PAGES_MAX: u64 = 1 << (4 * INDEX_BITS);

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const HOME: u64 = (PAGES_MAX - 1) << PAGE_SHIFT;

/// The result of a walk: an entry as it was at one instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry(u64);

impl Entry {
    /// True if it allows `access`.
    #[must_use]
    pub const fn allows(self, access: Access) -> bool {
        self.0 & bits(access) == bits(access)
    }

    /// The strongest access it allows; `None` if the page is absent.
    #[must_use]
    pub const fn access(self) -> Option<Access> {
        match self.0 & (READ | WRITE) {
            0 => None,
            READ => Some(Access::Read),
            _ => Some(Access::Write),
        }
    }

    /// Where the page lies in the RAM file. Meaningful only if it is present.
    #[must_use]
    pub const fn home(self) -> FilePage {
        FilePage((self.0 & HOME) >> PAGE_SHIFT)
    }
}

const fn bits(access: Access) -> u64 {
    match access {
        Access::Read => READ,
        Access::Write => READ | WRITE,
    }
}

struct Leaf([AtomicU64; FAN_OUT]);

impl Default for Leaf {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; FAN_OUT])
    }
}

/// A table of tables, each made at first need.
struct Level<T>([OnceLock<Box<T>>; FAN_OUT]);

impl<T> Default for Level<T> {
    fn default() -> Self {
        Self([const { OnceLock::new() }; FAN_OUT])
    }
}

impl<T: Default> Level<T> {
    fn get(&self, index: usize) -> Option<&T> {
        self.0.get(index)?.get().map(|below| &**below)
    }

    fn get_or_make(&self, index: usize) -> Option<&T> {
        let slot = self.0.get(index)?;
        Some(slot.get_or_init(Box::default))
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct IoPageTable {
    root: Box<Level<Level<Level<Leaf>>>>,
}

impl IoPageTable {
    /// The entry for `page`; the walk marks it if it allows `access`.
    pub fn walk(&self, page: FilePage, access: Access) -> Entry {
        let Some(entry) = self.entry(page) else {
            return Entry(0);
        };
        let marks = match access {
            Access::Read => ACCESSED,
            Access::Write => ACCESSED | DIRTY,
        };
        // Acquire: a walk that sees the page present sees its content (pairs with `grant`).
        let mut now = entry.load(Ordering::Acquire);
        while Entry(now).allows(access) && now & marks != marks {
            // Not a plain `or`: the entry may have been cleared since, and must stay so.
            let marked = now | marks;
            match entry.compare_exchange_weak(now, marked, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Entry(marked),
                Err(other) => now = other,
            }
        }
        Entry(now)
    }

    /// Allows `access` to all of `range`; writable pages stay writable.
    pub fn grant(&self, range: FileRange, access: Access) {
        for page in range.iter() {
            if let Some(entry) = self.entry_made(page) {
                let home = page.0 << PAGE_SHIFT & HOME;
                entry.fetch_or(home | bits(access), Ordering::Release);
            }
        }
    }

    /// Makes all of `range` absent in the table.
    pub fn clear(&self, range: FileRange) {
        self.change(range, |entry| entry.store(0, Ordering::Release));
    }

    /// Makes all of `range` read-only where it was writable.
    pub fn forbid_writes(&self, range: FileRange) {
        self.change(range, |entry| {
            entry.fetch_and(!WRITE, Ordering::AcqRel);
        });
    }

    /// Calls `visit` for each page of `range` that was accessed since its mark was cleared.
    pub fn accessed(&self, range: FileRange, visit: &mut dyn FnMut(FilePage)) {
        for page in range.iter() {
            let entry = self.entry(page);
            if entry.is_some_and(|entry| entry.load(Ordering::Acquire) & ACCESSED != 0) {
                visit(page);
            }
        }
    }

    /// Clears the marks of all of `range`.
    pub fn forget(&self, range: FileRange) {
        self.change(range, |entry| {
            entry.fetch_and(!(ACCESSED | DIRTY), Ordering::AcqRel);
        });
    }

    fn change(&self, range: FileRange, change: impl Fn(&AtomicU64)) {
        let mut page = range.start;
        while page < range.end {
            let next = FilePage((page.0 / FAN_OUT as u64 + 1) * FAN_OUT as u64).min(range.end);
            // A leaf that does not exist has nothing to restrict.
            if let Some(leaf) = self.leaf(page) {
                let within = index(page, 0)..index(page, 0) + to_usize(next.0 - page.0);
                leaf.0
                    .get(within)
                    .unwrap_or_default()
                    .iter()
                    .for_each(&change);
            }
            page = next;
        }
    }

    fn entry(&self, page: FilePage) -> Option<&AtomicU64> {
        self.leaf(page)?.0.get(index(page, 0))
    }

    fn leaf(&self, page: FilePage) -> Option<&Leaf> {
        if page.0 >= PAGES_MAX {
            return None;
        }
        let upper = self.root.get(index(page, 3))?.get(index(page, 2))?;
        upper.get(index(page, 1))
    }

    fn entry_made(&self, page: FilePage) -> Option<&AtomicU64> {
        if page.0 >= PAGES_MAX {
            return None;
        }
        let upper = self.root.get_or_make(index(page, 3))?;
        let leaf = upper
            .get_or_make(index(page, 2))?
            .get_or_make(index(page, 1))?;
        leaf.0.get(index(page, 0))
    }
}

impl std::fmt::Debug for IoPageTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoPageTable")
    }
}

/// Index of `page` in its table of `level`; 0 is the leaf.
const fn index(page: FilePage, level: u32) -> usize {
    to_usize(page.0 >> (level * INDEX_BITS) & (FAN_OUT as u64 - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    fn range(start: u64, end: u64) -> FileRange {
        FileRange::new(FilePage(start), FilePage(end))
    }

    #[test]
    fn entry_of_a_page_is_found_by_each_of_its_four_indices() {
        let table = IoPageTable::default();
        let pages = [0, 1, 511, 512, 1 << 18, (1 << 27) + 5, PAGES_MAX - 1].map(FilePage);
        for page in pages {
            assert_eq!(table.walk(page, Access::Read).access(), None);
            table.grant(page.single(), Access::Read);
        }
        for page in pages {
            let found = table.walk(page, Access::Read);
            assert_eq!((found.access(), found.home()), (Some(Access::Read), page));
            assert!(!found.allows(Access::Write));
        }
        table.grant(FilePage(PAGES_MAX).single(), Access::Write);
        assert_eq!(table.walk(FilePage(PAGES_MAX), Access::Read).access(), None);
        assert_eq!(table.walk(FilePage(u64::MAX), Access::Read).access(), None);
    }

    #[test]
    fn random_changes_give_what_a_map_of_pages_gives() {
        const PAGES: u64 = 2000;
        let table = IoPageTable::default();
        let mut naive: BTreeMap<u64, Access> = BTreeMap::new();
        let mut generator = SplitMix64::new(7);
        let mut random = |below: u64| generator.below(below);
        for _ in 0..500 {
            let start = random(PAGES);
            let part = range(start, (start + random(700)).min(PAGES));
            let pages = part.start.0..part.end.0;
            match random(4) {
                0 => {
                    table.clear(part);
                    naive.retain(|page, _| !pages.contains(page));
                }
                1 => {
                    table.forbid_writes(part);
                    for (_, access) in naive.range_mut(pages) {
                        *access = Access::Read;
                    }
                }
                2 => {
                    table.grant(part, Access::Read);
                    for page in pages {
                        naive.entry(page).or_insert(Access::Read);
                    }
                }
                _ => {
                    table.grant(part, Access::Write);
                    naive.extend(pages.map(|page| (page, Access::Write)));
                }
            }
        }
        for page in 0..PAGES + 600 {
            let found = table.walk(FilePage(page), Access::Read);
            assert_eq!(found.access(), naive.get(&page).copied(), "page {page}");
        }
    }

    #[test]
    fn walk_marks_what_it_translates_and_nothing_else() {
        let table = IoPageTable::default();
        table.grant(range(0, 4), Access::Read);
        table.walk(FilePage(1), Access::Read);
        table.walk(FilePage(2), Access::Write);
        let accessed = || {
            let mut pages = Vec::new();
            table.accessed(range(0, 1000), &mut |page| pages.push(page.0));
            pages
        };
        assert_eq!(accessed(), [1]);
        table.grant(range(0, 4), Access::Write);
        table.walk(FilePage(2), Access::Write);
        assert_eq!(accessed(), [1, 2]);
        table.forget(range(0, 2));
        assert_eq!(accessed(), [2]);
        table.clear(range(0, 4));
        assert!(accessed().is_empty());
    }
}
