// SPDX-License-Identifier: Apache-2.0
//! PASID: a request names an address space of its source, and the agent has to know that space's entry of the
//! source's PASID table before anything else (VT-d 3.4.3; there the table is of two levels).
//!
//! A request that the agent does not know the entry for waits while it is read, and comes to the agent again. The
//! entry is kept in the PASID cache from then on. Invalidations of context entries void the entries of the same
//! sources or domains; those of translations do not.

use crate::cache::Cache;
use crate::config::Config;
use crate::outcome::CacheCounts;
use crate::request::{Page, Tag, address_of, domain_of};
use crate::ties::TieBreak;

/// Sets of the PASID cache are chosen by the low bits of the domain, which are these bits of an address made of
/// both ids.
const DOMAIN_SHIFT: u32 = 12;
/// Bits of the domain in that address.
const DOMAIN_LOW_BITS: u32 = 13;
/// The source stands above them.
const SOURCE_SHIFT: u32 = DOMAIN_SHIFT + DOMAIN_LOW_BITS;
const _: () = assert!(SOURCE_SHIFT + u32::BITS <= pagetide_trace::IOVA_BITS);

/// What the agent knows of address spaces.
#[derive(Debug)]
pub(super) struct Pasids {
    cache: Option<Cache>,
    /// How long reading an entry takes.
    pub(super) read_ns: u64,
}

/// Source and domain as a cache's page.
fn key(page: &Page) -> Page {
    let low = u64::from(page.domain) & ((1 << DOMAIN_LOW_BITS) - 1);
    Page {
        iova: u64::from(page.source) << SOURCE_SHIFT | low << DOMAIN_SHIFT,
        shift: 12,
        ..*page
    }
}

const fn source_of(tag: Tag) -> u64 {
    address_of(tag) >> SOURCE_SHIFT
}

impl Pasids {
    /// None known yet; `None` if requests have no PASID.
    pub(super) fn new(config: &Config, ties: &TieBreak) -> Option<Self> {
        config.pasid.enabled.then(|| Self {
            cache: Cache::new(&config.pasid_cache, DOMAIN_SHIFT, ties),
            read_ns: config.pasid.table_accesses * config.latency.dram_ns,
        })
    }

    /// True if the agent knows the entry for a page.
    pub(super) fn look_up(&mut self, page: &Page) -> bool {
        let key = key(page);
        match &mut self.cache {
            Some(cache) => cache.look_up(&key, key.tag(), 0),
            None => false,
        }
    }

    /// The entry for a page was read.
    pub(super) fn fill(&mut self, page: &Page) {
        let key = key(page);
        if let Some(cache) = &mut self.cache {
            cache.fill(&key, key.tag(), 0);
        }
    }

    /// The counts so far.
    pub(super) fn counts(&self) -> CacheCounts {
        self.cache.as_ref().map(Cache::counts).unwrap_or_default()
    }

    /// Drops the entries for whose source and domain `is_void` holds.
    pub(super) fn invalidate(&mut self, is_void: impl Fn(u64, u32) -> bool) {
        if let Some(cache) = &mut self.cache {
            cache.invalidate(&[], |tag| is_void(source_of(tag), domain_of(tag)));
        }
    }
}
