// SPDX-License-Identifier: Apache-2.0
//! A peer modelled on Linux's IOVA allocator (`drivers/iommu/iova.c`) as its fast path is used by the DMA
//! API.
//!
//! - Allocated ranges in an ordered tree (a `BTreeMap` for the rb-tree; its cursor walks as cheaply).
//!   Search is top-down first fit from a *cached node*, the range allocated last, or a freed one's
//!   successor if that lies higher; starts are aligned to the size, rounded up to a power of two. When
//!   nothing is found below the cached node, the search restarts from the top.
//! - Sizes up to 32 pages are rounded up to a power of two and pass through *rcaches*, orders 0 to 5: for
//!   each CPU two magazines of 127, loaded and previous, under their own lock, and for each order a depot
//!   of full magazines under another. A range in a magazine stays in the tree.
//!
//! Omitted, all to its advantage: the worker that trims depots after 100 ms, the initial attempt below 4
//! GiB, and the flush of all magazines when the space is exhausted, which does not happen here. A thread
//! represents a CPU, which avoids the contention that preempted threads would cause.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagetide_addr::PAGE_BYTES;

use super::load::{Allocator, SPACE_PAGES};

/// Orders that are cached: 1 to 32 pages.
const ORDERS: usize = 6;
/// Entries of a magazine: with its size it fills 1,024 bytes.
const MAGAZINE: usize = 127;
/// Number of CPUs represented.
const CPUS: usize = 8;

/// The allocator.
pub(super) struct LinuxLike {
    tree: Mutex<Tree>,
    cpus: Vec<[CpuCache; ORDERS]>,
    depots: [Mutex<Vec<Magazine>>; ORDERS],
}

/// Page numbers.
type Magazine = Vec<u64>;

/// The magazines of one CPU and order.
#[repr(align(128))]
struct CpuCache(Mutex<Magazines>);

struct Magazines {
    loaded: Magazine,
    previous: Magazine,
}

/// Allocated ranges.
struct Tree {
    /// Last page by first page.
    ranges: BTreeMap<u64, u64>,
    /// First page of the cached node; `SPACE_PAGES` is the anchor above all.
    cached: u64,
}

impl LinuxLike {
    pub(super) fn new() -> Self {
        let magazine = || Vec::with_capacity(MAGAZINE);
        let cache = |_| {
            CpuCache(Mutex::new(Magazines {
                loaded: magazine(),
                previous: magazine(),
            }))
        };
        Self {
            tree: Mutex::new(Tree {
                ranges: BTreeMap::new(),
                cached: SPACE_PAGES,
            }),
            cpus: (0..CPUS).map(|_| std::array::from_fn(cache)).collect(),
            depots: std::array::from_fn(|_| Mutex::new(Vec::new())),
        }
    }
}

impl Allocator for LinuxLike {
    fn alloc(&self, pages: u64) -> Option<u64> {
        let cached = match cached_order(pages) {
            Some(order) => lock(&self.cpus[cpu()][order].0).get(&self.depots[order]),
            None => None,
        };
        let page = match cached {
            Some(page) => page,
            None => lock(&self.tree).alloc(rounded(pages), pages)?,
        };
        Some(page * PAGE_BYTES)
    }

    fn free(&self, start: u64, pages: u64) -> bool {
        let page = start / PAGE_BYTES;
        match cached_order(pages) {
            Some(order) => {
                lock(&self.cpus[cpu()][order].0).insert(page, &self.depots[order]);
                true
            }
            None => lock(&self.tree).free(page),
        }
    }
}

impl Magazines {
    /// `__iova_rcache_get`.
    fn get(&mut self, depot: &Mutex<Vec<Magazine>>) -> Option<u64> {
        if self.loaded.is_empty() {
            if self.previous.is_empty() {
                self.loaded = lock(depot).pop()?;
            } else {
                std::mem::swap(&mut self.loaded, &mut self.previous);
            }
        }
        self.loaded.pop()
    }

    /// `__iova_rcache_insert`.
    fn insert(&mut self, page: u64, depot: &Mutex<Vec<Magazine>>) {
        if self.loaded.len() == MAGAZINE {
            if self.previous.len() == MAGAZINE {
                let full = std::mem::replace(&mut self.loaded, Vec::with_capacity(MAGAZINE));
                lock(depot).push(full);
            } else {
                std::mem::swap(&mut self.loaded, &mut self.previous);
            }
        }
        self.loaded.push(page);
    }
}

impl Tree {
    /// `__alloc_and_insert_iova_range` for `rounded` pages, aligned to `pages` rounded up.
    fn alloc(&mut self, rounded: u64, pages: u64) -> Option<u64> {
        let align = !(pages.next_power_of_two() - 1);
        let from = self.cached;
        let first = self.search(from, rounded, align).or_else(|| {
            if from == SPACE_PAGES {
                None
            } else {
                self.search(SPACE_PAGES, rounded, align)
            }
        })?;
        self.ranges.insert(first, first + rounded - 1);
        self.cached = first;
        Some(first)
    }

    /// Top-down below the node that begins at `below`.
    fn search(&self, below: u64, pages: u64, align: u64) -> Option<u64> {
        let mut limit = below;
        for (&first, &last) in self.ranges.range(..below).rev() {
            let candidate = limit.checked_sub(pages)? & align;
            if candidate > last {
                return Some(candidate);
            }
            limit = first;
        }
        Some(limit.checked_sub(pages)? & align)
    }

    /// `free_iova` with `__cached_rbnode_delete_update`.
    fn free(&mut self, first: u64) -> bool {
        if self.ranges.remove(&first).is_none() {
            return false;
        }
        if first >= self.cached {
            let next = self.ranges.range(first..).next();
            self.cached = next.map_or(SPACE_PAGES, |(&next, _)| next);
        }
        true
    }
}

/// The order of the rcache for `pages`, if there is one.
fn cached_order(pages: u64) -> Option<usize> {
    let order = pages.next_power_of_two().trailing_zeros() as usize;
    (order < ORDERS).then_some(order)
}

/// The size actually allocated: a power of two where a magazine may hold it.
fn rounded(pages: u64) -> u64 {
    if cached_order(pages).is_some() {
        pages.next_power_of_two()
    } else {
        pages
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The CPU that this thread represents.
fn cpu() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<Option<usize>> = const { Cell::new(None) };
    }
    OWN.with(|own| match own.get() {
        Some(cpu) => cpu,
        None => {
            // Relaxed: only a number; no other data depends on it.
            let cpu = NEXT.fetch_add(1, Ordering::Relaxed) % CPUS;
            own.set(Some(cpu));
            cpu
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_goes_down_from_the_cached_node_and_then_once_from_the_top() {
        let allocator = LinuxLike::new();
        let top = allocator.alloc(64).unwrap();
        assert_eq!(top, (SPACE_PAGES - 64) * PAGE_BYTES);
        let below = allocator.alloc(33).unwrap();
        assert_eq!(below, (SPACE_PAGES - 128) * PAGE_BYTES, "aligned to 64");
        assert!(allocator.free(top, 64));
        assert_eq!(allocator.alloc(40), Some(top), "the freed node was higher");
        assert!(!allocator.free(0, 64));
    }

    #[test]
    fn freed_small_range_comes_back_from_the_magazine() {
        let allocator = LinuxLike::new();
        let ranges: Vec<u64> = (0..1000).map(|_| allocator.alloc(3).unwrap()).collect();
        for &start in &ranges {
            assert!(allocator.free(start, 3));
        }
        assert_eq!(allocator.alloc(4), ranges.last().copied(), "same order");
        let again: Vec<u64> = (1..1000).map(|_| allocator.alloc(4).unwrap()).collect();
        assert!(again.iter().all(|start| ranges.contains(start)));
    }
}
