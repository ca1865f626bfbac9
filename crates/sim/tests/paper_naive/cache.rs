// SPDX-License-Identifier: Apache-2.0
//! Caches of the naive model: a vector of vectors, searched from the front.

use pagetide_random::SplitMix64;
use pagetide_sim::CacheCounts;
use pagetide_sim::config::{CacheConfig, PartitionBy, Replacement};

use crate::model::Page;

/// Domain and first address: what an entry is known by.
pub type Key = (u32, u64);

struct Entry {
    key: Key,
    uses: u32,
    last_use: u64,
    next_use: u64,
}

/// Any cache of the model; a context cache is one whose keys are tenants.
pub struct Cache {
    config: CacheConfig,
    /// Lowest address bit that chooses a set.
    shift: u32,
    sets: Vec<Vec<Entry>>,
    clock: u64,
    random: SplitMix64,
    new_goes_last: bool,
    pub counts: CacheCounts,
}

impl Cache {
    pub fn new(config: &CacheConfig, shift: u32, seed: u64) -> Self {
        let sets = config.entries.checked_div(config.ways).unwrap_or(0);
        Self {
            config: config.clone(),
            shift,
            sets: (0..sets).map(|_| Vec::new()).collect(),
            clock: 0,
            random: SplitMix64::new(seed),
            new_goes_last: false,
            counts: CacheCounts::default(),
        }
    }

    /// The same for keys that are tenants.
    pub fn of_contexts(config: &CacheConfig, seed: u64) -> Self {
        Self {
            new_goes_last: true,
            ..Self::new(config, 0, seed)
        }
    }

    pub fn exists(&self) -> bool {
        !self.sets.is_empty()
    }

    fn set_of(&self, page: &Page) -> Option<usize> {
        let partitions = self.config.partitions;
        let partition = match self.config.partition_by {
            PartitionBy::DomainBits => page.domain % partitions,
            // Functions of one device share a partition.
            PartitionBy::SourceBits => (page.source >> self.config.source_low_bit) % partitions,
            PartitionBy::FullMatch => {
                let partition = page.tenant / self.config.sources_per_partition;
                if partition >= partitions {
                    return None;
                }
                partition
            }
        };
        let sets_each = self.sets.len() as u64 / u64::from(partitions);
        let set = u64::from(partition) * sets_each + (page.iova >> self.shift) % sets_each;
        Some(usize::try_from(set).unwrap())
    }

    pub fn look_up(&mut self, page: &Page, key: Key, next_use: u64) -> bool {
        if !self.exists() {
            return false;
        }
        self.counts.lookups += 1;
        let hit = self
            .set_of(page)
            .is_some_and(|set| self.use_entry(set, key, next_use));
        self.counts.hits += u64::from(hit);
        hit
    }

    pub fn fill(&mut self, page: &Page, key: Key, next_use: u64) {
        if !self.exists() {
            return;
        }
        let Some(set) = self.set_of(page) else {
            return;
        };
        if self.use_entry(set, key, next_use) {
            return;
        }
        self.clock += 1;
        let new = Entry {
            key,
            uses: 0,
            last_use: self.clock,
            next_use,
        };
        self.counts.insertions += 1;
        if self.sets[set].len() < self.config.ways as usize {
            self.sets[set].push(new);
        } else {
            self.counts.evictions += 1;
            let victim = self.victim(set);
            // Where the new one comes to lie decides how ties are broken later.
            if self.new_goes_last {
                self.sets[set].swap_remove(victim);
                self.sets[set].push(new);
            } else {
                self.sets[set][victim] = new;
            }
        }
    }

    fn use_entry(&mut self, set: usize, key: Key, next_use: u64) -> bool {
        let Some(entry) = self.sets[set].iter_mut().find(|entry| entry.key == key) else {
            return false;
        };
        self.clock += 1;
        entry.last_use = self.clock;
        entry.next_use = next_use;
        entry.uses += 1;
        if entry.uses == 15 {
            for entry in &mut self.sets[set] {
                entry.uses /= 2;
            }
        }
        true
    }

    fn victim(&mut self, set: usize) -> usize {
        let entries = &self.sets[set];
        let all = 0..entries.len();
        match self.config.replacement {
            Replacement::Lru => all.min_by_key(|at| entries[*at].last_use).unwrap(),
            // The first of those that are furthest.
            Replacement::Oracle => all.rev().max_by_key(|at| entries[*at].next_use).unwrap(),
            Replacement::Lfu => {
                let least = entries.iter().map(|entry| entry.uses).min().unwrap();
                let tied: Vec<usize> = all.filter(|at| entries[*at].uses == least).collect();
                tied[self.random.index(tied.len())]
            }
        }
    }

    /// Removes what `void` says; the last of a set takes the place of what goes.
    pub fn invalidate(&mut self, void: impl Fn(Key) -> bool) {
        for set in &mut self.sets {
            let mut at = 0;
            while at < set.len() {
                if void(set[at].key) {
                    set.swap_remove(at);
                    self.counts.invalidated += 1;
                } else {
                    at += 1;
                }
            }
        }
    }
}
