// SPDX-License-Identifier: Apache-2.0
//! Nested TLB: host translations that walks need (a host walk each without it). Not in the paper; AMD's IOMMUs and
//! CPUs have one.
//!
//! A walk reads an entry of each level of the guest's table, and the host translates where it is: the
//! guest-physical address of that table. At the end the host translates the page's own. The trace does not have
//! guest-physical addresses, so they are assumed:
//!
//! ```text
//!   a page          where its I/O virtual address says
//!   its tables      above 2^56, those of one level in a row, in the order of what they map
//!
//!   2^56 | level << 52 | index << 12      index of level n: address >> (12 + 9 n)
//! ```
//! So with 4 KiB pages of the host each table has an entry of its own; with 2 MiB 512 tables that follow one
//! another share one.
//!
//! A walk looks all its host translations up when it begins, from the top of the guest's table to the page. A hit
//! costs `walk_cache_hit_ns` in the place of a host walk. At its end the walk puts them all there. Invalidations of
//! the guest are about its own table and do not concern host translations; those of everything do, and a page
//! that the host takes away.

use crate::cache::Cache;
use crate::config::Config;
use crate::flavour::VoidSpan;
use crate::outcome::CacheCounts;
use crate::request::Page;
use crate::ties::TieBreak;

/// Tables lie from this guest-physical address on; pages below.
pub(crate) const TABLES: u64 = 1 << 56;
const LEVEL_SHIFT: u32 = 52;

/// The cache, and the size of what an entry is for.
#[derive(Debug)]
pub(super) struct NestedTlb {
    cache: Cache,
    /// log2 of the host's page size.
    host_shift: u8,
}

impl NestedTlb {
    /// An empty one, if `config` has one.
    pub(super) fn new(config: &Config, ties: &TieBreak) -> Option<Self> {
        let host_shift = config.walk.host_page.shift();
        Some(Self {
            cache: Cache::new(&config.nested_tlb, host_shift.into(), ties)?,
            host_shift,
        })
    }

    /// Looks up what a walk for `page` needs that reads the levels from `first` down to `last`; returns the number
    /// of hits.
    pub(super) fn look_up(&mut self, page: &Page, first: u32, last: u32) -> u64 {
        let mut hits = 0;
        for place in self.places(page, first, last) {
            hits += u64::from(self.cache.look_up(&place, place.tag(), 0));
        }
        hits
    }

    /// The same walk has ended.
    pub(super) fn fill(&mut self, page: &Page, first: u32, last: u32) {
        for place in self.places(page, first, last) {
            self.cache.fill(&place, place.tag(), 0);
        }
    }

    /// The host's pages around the tables from level `first` down to `last`, and around the page.
    fn places(&self, page: &Page, first: u32, last: u32) -> impl Iterator<Item = Page> + use<> {
        let page = *page;
        let shift = self.host_shift;
        let tables = (last..=first).rev().map(move |level| {
            let index = page.iova >> (12 + 9 * level);
            TABLES | u64::from(level) << LEVEL_SHIFT | index << 12
        });
        tables
            .chain([page.iova & (TABLES - 1)])
            .map(move |iova| Page {
                iova,
                shift,
                ..page
            })
    }

    /// Drops what an invalidation by the guest voids.
    pub(super) fn invalidate(&mut self, span: &VoidSpan) {
        if *span == VoidSpan::All {
            self.cache.invalidate(&[], |_| true);
        }
    }

    /// Drops the translations of memory that the host has taken away.
    pub(super) fn host_unmaps(&mut self, page: Page) {
        let span = VoidSpan::Pages(page);
        let shift = u32::from(self.host_shift);
        self.cache.invalidate(&[], |tag| span.meets(tag, shift));
    }

    /// The counts so far.
    pub(super) fn counts(&self) -> CacheCounts {
        self.cache.counts()
    }
}
