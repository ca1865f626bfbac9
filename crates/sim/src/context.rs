// SPDX-License-Identifier: Apache-2.0
//! The context cache: which sources' domains the device knows. Fully
//! associative, so its entries are rows of the table of tenants.

use crate::config::{CacheConfig, Replacement};
use crate::outcome::CacheCounts;

/// A use count at which all are halved, as in [`crate::cache`].
const LFU_SATURATED: u64 = 15;

/// What is known of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Use count or tick of the last use.
    mark: u64,
    /// Position in `resident`, plus one; 0: not there.
    position: u32,
}

/// Context entries that the device holds.
#[derive(Debug)]
pub(crate) struct ContextCache {
    capacity: usize,
    replacement: Replacement,
    entries: Vec<Entry>,
    resident: Vec<u32>,
    tick: u64,
    ties: crate::cache::Ties,
    counts: CacheCounts,
}

impl ContextCache {
    /// An empty cache of the size that `config` says.
    pub(crate) fn new(config: &CacheConfig, seed: u64) -> Self {
        Self {
            capacity: config.entries as usize,
            replacement: config.replacement,
            entries: Vec::new(),
            resident: Vec::new(),
            tick: 0,
            ties: crate::cache::Ties(seed),
            counts: CacheCounts::default(),
        }
    }

    /// Looks for the entry of `tenant`; a hit counts as a use.
    #[inline]
    pub(crate) fn look_up(&mut self, tenant: u32) -> bool {
        self.counts.lookups += 1;
        let found = self.use_if_there(tenant);
        self.counts.hits += u64::from(found);
        found
    }

    /// Sees to it that the entry of `tenant` is there.
    #[inline]
    pub(crate) fn fill(&mut self, tenant: u32) {
        if self.capacity > 0 && !self.use_if_there(tenant) {
            self.insert(tenant);
        }
    }

    /// Drops the entries that `is_void` holds for, by tenant.
    pub(crate) fn invalidate(&mut self, is_void: impl Fn(u32) -> bool) {
        let mut at = 0;
        while at < self.resident.len() {
            if is_void(self.resident[at]) {
                self.remove(at);
                self.counts.invalidated += 1;
            } else {
                at += 1;
            }
        }
    }

    /// What happened so far.
    pub(crate) fn counts(&self) -> CacheCounts {
        self.counts
    }

    #[inline]
    fn use_if_there(&mut self, tenant: u32) -> bool {
        let Some(entry) = self.entries.get_mut(tenant as usize) else {
            return false;
        };
        if entry.position == 0 {
            return false;
        }
        if self.replacement == Replacement::Lfu {
            entry.mark += 1;
            if entry.mark == LFU_SATURATED {
                self.halve();
            }
        } else {
            self.tick += 1;
            entry.mark = self.tick;
        }
        true
    }

    #[cold]
    fn halve(&mut self) {
        for tenant in &self.resident {
            self.entries[*tenant as usize].mark >>= 1;
        }
    }

    #[cold]
    fn insert(&mut self, tenant: u32) {
        if self.resident.len() == self.capacity {
            let victim = self.victim();
            self.remove(victim);
            self.counts.evictions += 1;
        }
        self.counts.insertions += 1;
        self.resident.push(tenant);
        let at = tenant as usize;
        if self.entries.len() <= at {
            self.entries.resize(at + 1, Entry::default());
        }
        self.tick += 1;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "no more than its capacity, 32 bits"
        )]
        let position = self.resident.len() as u32;
        self.entries[at] = Entry {
            mark: if self.replacement == Replacement::Lfu {
                0
            } else {
                self.tick
            },
            position,
        };
    }

    /// Position of the entry that must go.
    fn victim(&mut self) -> usize {
        let mark = |tenant: &u32| self.entries[*tenant as usize].mark;
        let least = self.resident.iter().map(mark).min().unwrap_or(0);
        let candidates =
            || (0..self.resident.len()).filter(|at| mark(&self.resident[*at]) == least);
        let chosen = self.ties.choose(candidates().count());
        candidates().nth(chosen).unwrap_or(0)
    }

    fn remove(&mut self, at: usize) {
        let gone = self.resident.swap_remove(at);
        self.entries[gone as usize].position = 0;
        if let Some(moved) = self.resident.get(at) {
            #[expect(clippy::cast_possible_truncation, reason = "no more than its capacity")]
            let position = at as u32 + 1;
            self.entries[*moved as usize].position = position;
        }
    }
}
