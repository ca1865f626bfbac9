// SPDX-License-Identifier: Apache-2.0
//! The context cache: the sources whose domains the device has. Fully associative, so its entries are rows
//! of the table of tenants.
//!
//! With more tenants than entries a victim is wanted for nearly every packet, and nearly all entries are used equally
//! little. So the one that the draw chooses among them is found by counts of blocks of entries.

use pagetide_random::SplitMix64;

use crate::config::{CacheConfig, Replacement};
use crate::outcome::CacheCounts;
use crate::ties::{BlockOrder, TieBreak};

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

/// Who goes among several entries that are used equally little.
#[derive(Debug)]
enum Order {
    /// A random one.
    Random {
        random: SplitMix64,
        /// Entries by use count, of every [`BLOCK`] positions.
        counts: Vec<[u8; COUNTS]>,
    },
    /// The one that the authors' program evicts.
    Program(BlockOrder),
}

/// Positions that are counted together.
const BLOCK: usize = 64;

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
    order: Order,
    /// The order knows the use counts (LFU): from the first victim on, until they are halved.
    knows_counts: bool,
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
            order: match ties {
                TieBreak::Seed(seed) => Order::Random {
                    random: SplitMix64::new(*seed),
                    counts: Vec::new(),
                },
                TieBreak::Program(rand) => Order::Program(BlockOrder::new(rand)),
            },
            knows_counts: false,
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
                if self.knows_counts {
                    self.tell_use(tenant, mark);
                }
            }
        } else {
            self.tick += 1;
            entry.mark = self.tick;
        }
        true
    }

    /// Tells the order that `tenant` is used once more than `count` times.
    #[inline(never)]
    fn tell_use(&mut self, tenant: u32, count: usize) {
        match &mut self.order {
            Order::Random { counts, .. } => {
                let position = self.entries[tenant as usize].position as usize - 1;
                let of_block = &mut counts[position / BLOCK];
                of_block[count] -= 1;
                of_block[count + 1] += 1;
            }
            Order::Program(order) => order.used(tenant, count),
        }
    }

    #[cold]
    fn halve(&mut self) {
        self.counted = [0; COUNTS];
        for tenant in &self.resident {
            let mark = &mut self.entries[*tenant as usize].mark;
            *mark >>= 1;
            self.counted[count_index(*mark)] += 1;
        }
        self.knows_counts = false;
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
        #[expect(
            clippy::cast_possible_truncation,
            reason = "no more than its capacity, 32 bits"
        )]
        let position = self.resident.len() as u32;
        if self.replacement != Replacement::Lfu {
            self.entries[at] = Entry {
                mark: self.tick,
                position,
            };
            return;
        }
        self.counted[0] += 1;
        self.entries[at] = Entry { mark: 0, position };
        let entries = &self.entries;
        match &mut self.order {
            Order::Program(order) => order.enters(source, tenant, &count_of(entries)),
            Order::Random { counts, .. } if self.knows_counts => {
                counts[(self.resident.len() - 1) / BLOCK][0] += 1;
            }
            Order::Random { .. } => (),
        }
    }

    /// Position of the victim.
    fn victim(&mut self) -> usize {
        if self.replacement != Replacement::Lfu {
            // Ticks differ, but the program draws all the same.
            if let Order::Program(order) = &self.order {
                order.draw(1);
            }
            let mark = |at: &usize| self.entries[self.resident[*at] as usize].mark;
            let oldest = (0..self.resident.len()).min_by_key(mark);
            return oldest.unwrap_or(0);
        }
        if !self.knows_counts {
            self.count();
        }
        let mut by_count = self.counted.iter().enumerate();
        let least = by_count.find(|(_, tied)| **tied > 0);
        let (least, tied) = least.map_or((0, 1), |(count, tied)| (count, *tied as usize));
        let count_of = count_of(&self.entries);
        match &mut self.order {
            Order::Random { random, counts } => {
                let mut left = random.index(tied);
                let has_it = |of_block: &[u8; COUNTS]| {
                    let of_least = usize::from(of_block[least]);
                    let has_it = left < of_least;
                    left -= if has_it { 0 } else { of_least };
                    has_it
                };
                let block = counts.iter().position(has_it).unwrap_or(0);
                let is_least = |at: &usize| count_of(self.resident[*at]) == least;
                (block * BLOCK..self.resident.len())
                    .filter(is_least)
                    .nth(left)
                    .unwrap_or(0)
            }
            Order::Program(order) => {
                let victim = order.choose(tied, least, &count_of);
                victim.map_or(0, |tenant| {
                    self.entries[tenant as usize].position as usize - 1
                })
            }
        }
    }

    /// Lets the order know the use counts.
    #[cold]
    fn count(&mut self) {
        let count_of = count_of(&self.entries);
        match &mut self.order {
            Order::Random { counts, .. } => {
                counts.clear();
                counts.resize(self.capacity.div_ceil(BLOCK), [0; COUNTS]);
                for (block, residents) in counts.iter_mut().zip(self.resident.chunks(BLOCK)) {
                    for tenant in residents {
                        block[count_of(*tenant)] += 1;
                    }
                }
            }
            Order::Program(order) => order.count(&count_of),
        }
        self.knows_counts = true;
    }

    fn remove(&mut self, at: usize) {
        let last = self.resident.len() - 1;
        let gone = self.resident.swap_remove(at);
        let entry = &mut self.entries[gone as usize];
        let mark = entry.mark;
        entry.position = 0;
        let moved = self.resident.get(at).copied();
        if let Some(moved) = moved {
            #[expect(clippy::cast_possible_truncation, reason = "no more than its capacity")]
            let position = at as u32 + 1;
            self.entries[moved as usize].position = position;
        }
        if self.replacement != Replacement::Lfu {
            return;
        }
        let mark = count_index(mark);
        self.counted[mark] -= 1;
        match &mut self.order {
            Order::Program(order) => order.leaves(gone, mark),
            Order::Random { counts, .. } if self.knows_counts => {
                counts[at / BLOCK][mark] -= 1;
                if let Some(moved) = moved {
                    let mark = count_index(self.entries[moved as usize].mark);
                    counts[last / BLOCK][mark] -= 1;
                    counts[at / BLOCK][mark] += 1;
                }
            }
            Order::Random { .. } => (),
        }
    }
}

/// The use count of a tenant's entry.
fn count_of(entries: &[Entry]) -> impl Fn(u32) -> usize {
    move |tenant| count_index(entries[tenant as usize].mark)
}

#[cfg(test)]
mod tests;
