// SPDX-License-Identifier: Apache-2.0
//! A set-associative cache of tags with any of the paper's replacement policies, and the rule for the set
//! that a request may use.
//!
//! A cache holds no translations, only their presence: the model needs hits and misses, never an address.
//! An entry is a tag and one number of its policy:
//!
//! ```text
//!   LRU     tick of the last use          victim: the least
//!   LFU     4-bit count of uses           victim: the least, ties by the seed
//!   oracle  index of the next use         victim: the greatest
//! ```
//!
//! The set is chosen by partition and address: `partition << address_bits | address bits`. The address bits
//! begin at bit 21 for every cache of translations, so that a page of any size is found without knowing its
//! size first.

use crate::config::{CacheConfig, PartitionBy, Replacement};
pub(crate) use crate::hints::ENTRIES_MAX;
use crate::hints::Hints;
use crate::outcome::CacheCounts;
use crate::request::{NEVER, NO_TAG, Page, Tag, address_of, domain_of};
use crate::ties::{ProgramTies, SMALL_WAYS, SmallLfu, TieBreak, Ties};

/// A use count at which all counts of the set are halved: 4 bits (V-C).
const LFU_SATURATED: u64 = 15;

/// One cache.
#[derive(Debug)]
pub(crate) struct Cache {
    geometry: Geometry,
    /// The same as in `policy`: needed on each use, and cheaper to test.
    is_lru: bool,
    policy: Policy,
    ways: usize,
    /// One more than the capacity; the last stays empty for ever, as the target of hints without a
    /// position.
    entries: Vec<Entry>,
    /// Entries in use, of each set.
    used: Vec<u32>,
    hints: Hints,
    tick: u64,
    counts: CacheCounts,
}

/// One entry.
#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: Tag,
    /// The policy's number.
    mark: u64,
}

/// The replacement policy, and its state besides the marks.
#[derive(Debug)]
enum Policy {
    /// Marks are ticks, with the entry's index in the lower bits: the least mark of a set also gives its
    /// entry.
    Lru,
    /// Marks are use counts.
    Lfu(Ties),
    /// Use counts and ties are kept together.
    SmallLfu(SmallLfu),
    /// Marks are indices of requests. Pages that are not used again are equally far: the first entry is
    /// evicted, or the first in the order of the program's map.
    Oracle(Option<ProgramTies>),
}

impl Policy {
    fn new(config: &CacheConfig, ties: &TieBreak, sets: usize) -> Self {
        match config.replacement {
            Replacement::Lru => Self::Lru,
            Replacement::Oracle => match ties {
                TieBreak::Program(rand) => Self::Oracle(Some(ProgramTies::new(rand, sets))),
                TieBreak::Seed(_) => Self::Oracle(None),
            },
            Replacement::Lfu => match ties {
                TieBreak::Program(rand) if config.ways <= SMALL_WAYS => {
                    Self::SmallLfu(SmallLfu::new(rand, sets))
                }
                _ => Self::Lfu(Ties::new(ties, sets)),
            },
        }
    }
}

impl Cache {
    /// The cache that `config` describes, or `None` if it has no entries. `shift` is the lowest address bit
    /// that selects a set.
    pub(crate) fn new(config: &CacheConfig, shift: u32, ties: &TieBreak) -> Option<Self> {
        if config.entries == 0 || config.ways == 0 {
            return None;
        }
        let geometry = Geometry::new(config, shift);
        let ways = config.ways as usize;
        let entries = geometry.sets() * ways;
        let empty = Entry {
            tag: NO_TAG,
            mark: 0,
        };
        Some(Self {
            geometry,
            is_lru: config.replacement == Replacement::Lru,
            policy: Policy::new(config, ties, geometry.sets()),
            ways,
            entries: vec![empty; entries + 1],
            used: vec![0; geometry.sets()],
            hints: Hints::new(entries),
            tick: 0,
            counts: CacheCounts::default(),
        })
    }

    /// Looks for `tag`; a hit counts as a use. `next_use` is for the oracle.
    #[inline(always)]
    pub(crate) fn look_up(&mut self, page: &Page, tag: Tag, next_use: u64) -> bool {
        self.counts.lookups += 1;
        match self.find(page, tag) {
            Some(at) => {
                self.counts.hits += 1;
                self.touch(at, next_use);
                true
            }
            None => false,
        }
    }

    /// Ensures that `tag` is present. A tag already present counts as used; an inserted one has not been
    /// used yet.
    #[inline(always)]
    pub(crate) fn fill(&mut self, page: &Page, tag: Tag, next_use: u64) {
        match self.find(page, tag) {
            Some(at) => self.touch(at, next_use),
            None => self.insert(page, tag, next_use),
        }
    }

    /// Drops every entry for whose tag `is_void` holds.
    pub(crate) fn invalidate(&mut self, is_void: impl Fn(Tag) -> bool) {
        for set in 0..self.used.len() {
            let first = set * self.ways;
            let mut end = first + self.used[set] as usize;
            let mut at = first;
            while at < end {
                if is_void(self.entries[at].tag) {
                    end -= 1;
                    self.move_entry(end, at);
                    self.used[set] -= 1;
                    self.counts.invalidated += 1;
                } else {
                    at += 1;
                }
            }
        }
    }

    /// The counts so far.
    pub(crate) fn counts(&self) -> CacheCounts {
        self.counts
    }

    #[inline(always)]
    fn find(&self, page: &Page, tag: Tag) -> Option<usize> {
        let hint = self.hints.of(tag);
        let at = hint.position();
        if self.entries[at].tag == tag && self.may_hit(page, at) {
            Some(at)
        } else if hint.others() == 0 {
            None
        } else {
            self.search(page, tag)
        }
    }

    /// True if the entry at `at`, which has this tag, is in the set that the
    /// request may use.
    #[inline(always)]
    fn may_hit(&self, page: &Page, at: usize) -> bool {
        u32::from(page.shift) <= self.geometry.plain_shift || self.is_in_set(page, at)
    }

    #[cold]
    fn is_in_set(&self, page: &Page, at: usize) -> bool {
        let set = self.geometry.set(page);
        set.is_some_and(|set| at / self.ways == set)
    }

    #[inline(never)]
    fn search(&self, page: &Page, tag: Tag) -> Option<usize> {
        let first = self.geometry.set(page)? * self.ways;
        let set = &self.entries[first..first + self.ways];
        let way = set.iter().position(|entry| entry.tag == tag)?;
        Some(first + way)
    }

    #[inline(always)]
    fn touch(&mut self, at: usize, next_use: u64) {
        let Some(entry) = self.entries.get_mut(at) else {
            return;
        };
        if self.is_lru {
            self.tick += 1;
            entry.mark = lru_mark(self.tick, at);
            return;
        }
        match &mut self.policy {
            Policy::Lru => {}
            Policy::Oracle(_) => entry.mark = next_use,
            Policy::SmallLfu(small) => small.used(at / self.ways, (at % self.ways) as u64),
            Policy::Lfu(_) => {
                entry.mark += 1;
                if entry.mark == LFU_SATURATED {
                    self.halve(at);
                }
            }
        }
    }

    /// Halves the use counts of the set that `at` is in.
    #[cold]
    fn halve(&mut self, at: usize) {
        let set = at / self.ways;
        let first = set * self.ways;
        for entry in &mut self.entries[first..first + self.used[set] as usize] {
            entry.mark >>= 1;
        }
    }

    #[inline(never)]
    fn insert(&mut self, page: &Page, tag: Tag, next_use: u64) {
        let Some(set) = self.geometry.set(page) else {
            return;
        };
        if u32::from(page.shift) > self.geometry.shift {
            // From now on the set does not follow from the tag.
            self.geometry.plain_shift = 0;
        }
        let first = set * self.ways;
        let used = self.used[set] as usize;
        let at = if used < self.ways {
            self.used[set] += 1;
            first + used
        } else {
            self.counts.evictions += 1;
            let at = self.evict(set);
            self.hints.forget(self.entries[at].tag, at);
            at
        };
        self.hints.learn(tag, at);
        self.counts.insertions += 1;
        let mark = match &mut self.policy {
            Policy::Lru => {
                self.tick += 1;
                lru_mark(self.tick, at)
            }
            Policy::Oracle(order) => {
                if let Some(order) = order {
                    order.enters(set, program_hash(tag), narrow(at - first));
                }
                next_use
            }
            Policy::SmallLfu(small) => {
                small.enters(set, program_hash(tag), (at - first) as u64);
                0
            }
            Policy::Lfu(ties) => {
                if let Ties::Program(program) = ties {
                    program.enters(set, program_hash(tag), narrow(at - first));
                }
                0
            }
        };
        self.entries[at] = Entry { tag, mark };
    }

    /// The victim of the full set `set`.
    #[inline]
    fn evict(&mut self, set: usize) -> usize {
        let first = set * self.ways;
        let entries = &self.entries[first..first + self.ways];
        match &mut self.policy {
            Policy::Lru => lru_entry(least_mark(entries)),
            Policy::Oracle(None) => first + position_of_furthest(entries),
            Policy::Oracle(Some(order)) => {
                let furthest = entries[position_of_furthest(entries)].mark;
                let is_furthest = |way: u32| entries[way as usize].mark == furthest;
                let way = order.first(set, is_furthest).unwrap_or(0);
                order.leaves(set, way);
                first + way as usize
            }
            Policy::SmallLfu(small) => {
                #[expect(clippy::cast_possible_truncation, reason = "below SMALL_WAYS")]
                let way = small.evict(set) as usize;
                first + way
            }
            Policy::Lfu(ties) => {
                let way = way_of_least_used(entries, set, ties);
                if let Ties::Program(program) = ties {
                    program.leaves(set, narrow(way));
                }
                first + way
            }
        }
    }

    /// Moves entry `from`, the last of its set, to `to`, whose entry is dropped.
    fn move_entry(&mut self, from: usize, to: usize) {
        let (moved, gone) = (self.entries[from], self.entries[to]);
        self.hints.forget(gone.tag, to);
        if from != to {
            self.hints.forget(moved.tag, from);
            self.hints.learn(moved.tag, to);
        }
        self.policy_moves(from, to);
        self.entries[to] = moved;
        if matches!(self.policy, Policy::Lru) {
            self.entries[to].mark = lru_mark(lru_tick(moved.mark), to);
        }
        self.entries[from].tag = NO_TAG;
    }

    /// Notifies the policy that entry `from` replaces `to`.
    fn policy_moves(&mut self, from: usize, to: usize) {
        let set = to / self.ways;
        let (from_way, to_way) = (from % self.ways, to % self.ways);
        match &mut self.policy {
            Policy::SmallLfu(small) => {
                small.leaves(set, to_way as u64);
                if from != to {
                    small.moves(set, from_way as u64, to_way as u64);
                }
            }
            Policy::Lfu(Ties::Program(program)) | Policy::Oracle(Some(program)) => {
                program.leaves(set, narrow(to_way));
                if from != to {
                    program.moves(set, narrow(from_way), narrow(to_way));
                }
            }
            _ => {}
        }
    }
}

/// A way as the policies write it.
const fn narrow(way: usize) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
    let way = way as u32;
    way
}

/// Hash of a tag in the authors' program.
fn program_hash(tag: Tag) -> u64 {
    address_of(tag) << 16 | u64::from(domain_of(tag))
}

/// Bits of an entry's index in a mark of [`Policy::Lru`]; 40 bits remain for the
/// tick, 10^12 uses.
const LRU_ENTRY_BITS: u32 = ENTRIES_MAX.ilog2();

#[inline(always)]
const fn lru_mark(tick: u64, at: usize) -> u64 {
    tick << LRU_ENTRY_BITS | at as u64
}

const fn lru_tick(mark: u64) -> u64 {
    mark >> LRU_ENTRY_BITS
}

#[inline(always)]
const fn lru_entry(mark: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "24 bits")]
    let at = mark as usize & (ENTRIES_MAX as usize - 1);
    at
}

/// The least mark. Four at a time, each with its own minimum, so that no comparison waits for the previous
/// one.
#[inline(always)]
fn least_mark(entries: &[Entry]) -> u64 {
    let (fours, rest) = entries.as_chunks::<4>();
    let mut least = [u64::MAX; 4];
    for four in fours {
        for (least, entry) in least.iter_mut().zip(four) {
            *least = entry.mark.min(*least);
        }
    }
    let rest = rest.iter().map(|entry| entry.mark);
    least.into_iter().chain(rest).min().unwrap_or(u64::MAX)
}

/// The way with the least use count, or one of several.
#[inline]
fn way_of_least_used(entries: &[Entry], set: usize, ties: &mut Ties) -> usize {
    let least = least_mark(entries);
    match ties {
        Ties::Random(random) if entries.len() <= 64 => {
            let bits = entries.iter().enumerate();
            let mut tied = bits.fold(0_u64, |all, (way, entry)| {
                all | u64::from(entry.mark == least) << way
            });
            for _ in 0..random.index(tied.count_ones() as usize) {
                tied &= tied - 1;
            }
            tied.trailing_zeros() as usize
        }
        Ties::Random(random) => {
            let tied = || (0..entries.len()).filter(|way| entries[*way].mark == least);
            let chosen = random.index(tied().count());
            tied().nth(chosen).unwrap_or(0)
        }
        Ties::Program(program) => {
            let is_least = |way: u32| entries[way as usize].mark == least;
            program.choose(set, is_least).unwrap_or(0) as usize
        }
    }
}

#[inline]
fn position_of_furthest(entries: &[Entry]) -> usize {
    let mut furthest = (0, 0);
    for (way, entry) in entries.iter().enumerate() {
        if entry.mark > furthest.0 {
            furthest = (entry.mark, way);
            if entry.mark == NEVER {
                break;
            }
        }
    }
    furthest.1
}

/// The set that a request may use.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    partition_by: PartitionBy,
    partition_bits: u32,
    address_bits: u32,
    partition_mask: u32,
    address_mask: u64,
    shift: u32,
    sources_per_partition: u32,
    source_low_bit: u32,
    /// Pages up to this size are in the set that their tag alone determines. There are none where two
    /// sources of one domain may have different partitions, nor after a page larger than the start of the
    /// set's address bits, since such a page is kept in several sets.
    plain_shift: u32,
}

impl Geometry {
    /// Sets and partitions are rounded down to powers of two; other configurations are refused before,
    /// except in flavour hypersio.
    fn new(config: &CacheConfig, shift: u32) -> Self {
        let set_bits = (config.entries / config.ways).max(1).ilog2();
        let partition_bits = config.partitions.max(1).ilog2().min(set_bits);
        Self {
            partition_by: config.partition_by,
            partition_bits,
            address_bits: set_bits - partition_bits,
            partition_mask: (1 << partition_bits) - 1,
            address_mask: (1 << (set_bits - partition_bits)) - 1,
            shift,
            sources_per_partition: config.sources_per_partition.max(1),
            source_low_bit: config.source_low_bit,
            plain_shift: match config.partition_by {
                PartitionBy::DomainBits => shift,
                PartitionBy::SourceBits if partition_bits == 0 => shift,
                PartitionBy::SourceBits | PartitionBy::FullMatch => 0,
            },
        }
    }

    const fn sets(&self) -> usize {
        1 << (self.partition_bits + self.address_bits)
    }

    #[inline]
    fn set(&self, page: &Page) -> Option<usize> {
        let partition = match self.partition_by {
            PartitionBy::DomainBits => page.domain,
            PartitionBy::SourceBits => page.source >> self.source_low_bit,
            PartitionBy::FullMatch => {
                let tagged = page.tenant / self.sources_per_partition;
                if tagged >> self.partition_bits != 0 {
                    return None;
                }
                tagged
            }
        };
        let partition = (partition & self.partition_mask) as usize;
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let address = (page.iova >> self.shift & self.address_mask) as usize;
        Some(partition << self.address_bits | address)
    }
}

#[cfg(test)]
mod tests;
