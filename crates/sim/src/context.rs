// SPDX-License-Identifier: Apache-2.0
//! The context cache: the sources whose domains the device has. Fully associative, so its entries are rows
//! of the table of tenants.

use crate::config::{CacheConfig, Replacement};
use crate::outcome::CacheCounts;
use crate::ties::{TieBreak, Ties};

/// A use count at which all are halved, as in [`crate::cache`].
const LFU_SATURATED: u64 = 15;

/// Use counts, as an array has them.
const COUNTS: usize = 15;
const _: () = assert!(COUNTS as u64 == LFU_SATURATED);

/// The place of a use count in an array of [`COUNTS`].
#[inline]
const fn count_index(mark: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "below LFU_SATURATED")]
    let index = mark as usize;
    index
}

/// The state of one tenant.
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
    /// Of the resident entries, how many have each use count (LFU): the least count and its number of entries
    /// are known without a look at them.
    counted: [u32; COUNTS],
    tick: u64,
    ties: Ties,
    counts: CacheCounts,
}

impl ContextCache {
    /// An empty cache of the size in `config`.
    pub(crate) fn new(config: &CacheConfig, ties: &TieBreak) -> Self {
        Self {
            capacity: config.entries as usize,
            replacement: config.replacement,
            entries: Vec::new(),
            resident: Vec::new(),
            counted: [0; COUNTS],
            tick: 0,
            ties: Ties::new(ties, 1),
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

    /// Ensures that the entry of `tenant`, whose source id is `source`, is present.
    #[inline]
    pub(crate) fn fill(&mut self, tenant: u32, source: u32) {
        if self.capacity > 0 && !self.use_if_there(tenant) {
            self.insert(tenant, source);
        }
    }

    /// Drops the entries for which `is_void` holds, by tenant.
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

    /// The counts so far.
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
            let mark = count_index(entry.mark);
            entry.mark += 1;
            self.counted[mark] -= 1;
            if entry.mark == LFU_SATURATED {
                self.halve();
            } else {
                self.counted[mark + 1] += 1;
            }
        } else {
            self.tick += 1;
            entry.mark = self.tick;
        }
        true
    }

    #[cold]
    fn halve(&mut self) {
        self.counted = [0; COUNTS];
        for tenant in &self.resident {
            let mark = &mut self.entries[*tenant as usize].mark;
            *mark >>= 1;
            self.counted[count_index(*mark)] += 1;
        }
    }

    #[cold]
    fn insert(&mut self, tenant: u32, source: u32) {
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
        if let Ties::Program(program) = &mut self.ties {
            program.enters(0, u64::from(source), tenant);
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "no more than its capacity, 32 bits"
        )]
        let position = self.resident.len() as u32;
        self.entries[at] = Entry {
            mark: if self.replacement == Replacement::Lfu {
                self.counted[0] += 1;
                0
            } else {
                self.tick
            },
            position,
        };
    }

    /// Position of the victim.
    fn victim(&mut self) -> usize {
        let mark = |tenant: &u32| self.entries[*tenant as usize].mark;
        let (least, tied) = if self.replacement == Replacement::Lfu {
            let mut counts = (0..).zip(&self.counted);
            let least = counts.find(|(_, tied)| **tied > 0);
            least.map_or((0, 1), |(count, tied)| (count, *tied as usize))
        } else {
            // Ticks differ.
            (self.resident.iter().map(mark).min().unwrap_or(0), 1)
        };
        match &mut self.ties {
            Ties::Random(random) => {
                let chosen = random.index(tied);
                let is_least = |at: &usize| mark(&self.resident[*at]) == least;
                (0..self.resident.len())
                    .filter(is_least)
                    .nth(chosen)
                    .unwrap_or(0)
            }
            Ties::Program(program) => {
                let victim = program.choose_of(0, tied, |tenant| mark(&tenant) == least);
                victim.map_or(0, |tenant| {
                    self.entries[tenant as usize].position as usize - 1
                })
            }
        }
    }

    fn remove(&mut self, at: usize) {
        let gone = self.resident.swap_remove(at);
        if let Ties::Program(program) = &mut self.ties {
            program.leaves(0, gone);
        }
        let entry = &mut self.entries[gone as usize];
        entry.position = 0;
        if self.replacement == Replacement::Lfu {
            self.counted[count_index(entry.mark)] -= 1;
        }
        if let Some(moved) = self.resident.get(at) {
            #[expect(clippy::cast_possible_truncation, reason = "no more than its capacity")]
            let position = at as u32 + 1;
            self.entries[*moved as usize].position = position;
        }
    }
}

#[cfg(test)]
mod tests;
