// SPDX-License-Identifier: Apache-2.0
//! Peers that are one structure under one lock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use pagetide_addr::PAGE_BYTES;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use super::load::{Allocator, SPACE_PAGES};

/// Free ranges by address, for coalescing, and by length, so that the best fit
/// is found without a search through all of them.
pub(super) struct BestFit(Mutex<FreeRanges>);

struct FreeRanges {
    /// Pages by first page.
    by_page: BTreeMap<u64, u64>,
    /// Pages and first page.
    by_length: BTreeSet<(u64, u64)>,
}

impl BestFit {
    pub(super) fn new() -> Self {
        Self(Mutex::new(FreeRanges {
            by_page: BTreeMap::from([(0, SPACE_PAGES)]),
            by_length: BTreeSet::from([(SPACE_PAGES, 0)]),
        }))
    }
}

impl FreeRanges {
    fn insert(&mut self, page: u64, pages: u64) {
        self.by_page.insert(page, pages);
        self.by_length.insert((pages, page));
    }

    fn remove(&mut self, page: u64, pages: u64) {
        self.by_page.remove(&page);
        self.by_length.remove(&(pages, page));
    }
}

impl Allocator for BestFit {
    fn alloc(&self, pages: u64) -> Option<u64> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let &(length, page) = free.by_length.range((pages, 0)..).next()?;
        free.remove(page, length);
        if length > pages {
            free.insert(page + pages, length - pages);
        }
        Some(page * PAGE_BYTES)
    }

    fn free(&self, start: u64, pages: u64) -> bool {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut page, mut pages) = (start / PAGE_BYTES, pages);
        let before = free.by_page.range(..page).next_back();
        let after = free.by_page.range(page..).next();
        let (before, after) = (
            before.map(|(&page, &pages)| (page, pages)),
            after.map(|(&page, &pages)| (page, pages)),
        );
        if let Some((other, length)) = after
            && page + pages == other
        {
            free.remove(other, length);
            pages += length;
        }
        if let Some((other, length)) = before
            && other + length == page
        {
            free.remove(other, length);
            page = other;
            pages += length;
        }
        free.insert(page, pages);
        true
    }
}

/// rust-vmm's allocator, with its users' policy.
pub(super) struct VmAllocator(Mutex<Option<AddressAllocator>>);

impl VmAllocator {
    pub(super) fn new() -> Self {
        Self(Mutex::new(
            AddressAllocator::new(0, SPACE_PAGES * PAGE_BYTES).ok(),
        ))
    }
}

impl Allocator for VmAllocator {
    fn alloc(&self, pages: u64) -> Option<u64> {
        let mut allocator = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let policy = AllocPolicy::FirstMatch;
        let range = allocator
            .as_mut()?
            .allocate(pages * PAGE_BYTES, PAGE_BYTES, policy);
        range.ok().map(|range| range.start())
    }

    fn free(&self, start: u64, pages: u64) -> bool {
        let mut allocator = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let range = RangeInclusive::new(start, start + pages * PAGE_BYTES - 1);
        match (allocator.as_mut(), range) {
            (Some(allocator), Ok(range)) => allocator.free(&range).is_ok(),
            _ => false,
        }
    }
}
