// SPDX-License-Identifier: Apache-2.0
//! A set-associative cache of tags with any of the paper's replacement
//! policies, and the rule that says which set a request may use.
//!
//! A cache holds no translations, only the fact that it has them: the model
//! asks for hits and misses, never for an address. An entry is a tag and one
//! number of its policy:
//!
//! ```text
//!   LRU     tick of the last use          victim: the least
//!   LFU     4-bit count of uses           victim: the least, ties by the seed
//!   oracle  index of the next use         victim: the greatest
//! ```
//!
//! The set is chosen by partition and address: `partition << address_bits | address bits`.
//! The address bits begin at bit 21 for every cache of translations, so that a
//! page of any size is found without knowing its size first.

use crate::config::{CacheConfig, PartitionBy, Replacement};
use crate::outcome::CacheCounts;
use crate::request::{NEVER, NO_TAG, Page, Tag};

/// A use count at which all counts of the set are halved: 4 bits (V-C).
const LFU_SATURATED: u64 = 15;

/// One cache.
#[derive(Debug)]
pub(crate) struct Cache {
    geometry: Geometry,
    replacement: Replacement,
    ways: usize,
    tags: Vec<Tag>,
    /// The policy's number of each entry.
    marks: Vec<u64>,
    /// Entries in use, of each set.
    used: Vec<u32>,
    hints: Hints,
    tick: u64,
    ties: Ties,
    counts: CacheCounts,
}

impl Cache {
    /// The cache that `config` describes, or `None` if it has no entries.
    /// `shift` is the lowest address bit that takes part in choosing a set.
    pub(crate) fn new(config: &CacheConfig, shift: u32, seed: u64) -> Option<Self> {
        if config.entries == 0 || config.ways == 0 {
            return None;
        }
        let geometry = Geometry::new(config, shift);
        let ways = config.ways as usize;
        let entries = geometry.sets() * ways;
        Some(Self {
            geometry,
            replacement: config.replacement,
            ways,
            tags: vec![NO_TAG; entries],
            marks: vec![0; entries],
            used: vec![0; geometry.sets()],
            hints: Hints::new(entries),
            tick: 0,
            ties: Ties(seed),
            counts: CacheCounts::default(),
        })
    }

    /// Looks for `tag`; a hit counts as a use. `next_use` is for the oracle.
    #[inline]
    pub(crate) fn look_up(&mut self, page: &Page, tag: Tag, next_use: u64) -> bool {
        self.counts.lookups += 1;
        let Some(set) = self.geometry.set(page) else {
            return false;
        };
        let Some(at) = self.find(set, tag) else {
            return false;
        };
        self.counts.hits += 1;
        self.touch(set, at, next_use);
        true
    }

    /// Sees to it that `tag` is there. A tag already there counts as used; one
    /// put in has not been used yet.
    #[inline]
    pub(crate) fn fill(&mut self, page: &Page, tag: Tag, next_use: u64) {
        let Some(set) = self.geometry.set(page) else {
            return;
        };
        match self.find(set, tag) {
            Some(at) => self.touch(set, at, next_use),
            None => self.insert(set, tag, next_use),
        }
    }

    /// Drops every entry whose tag `is_void` holds for.
    pub(crate) fn invalidate(&mut self, is_void: impl Fn(Tag) -> bool) {
        for set in 0..self.used.len() {
            let first = set * self.ways;
            let mut end = first + self.used[set] as usize;
            let mut at = first;
            while at < end {
                if is_void(self.tags[at]) {
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

    /// What happened so far.
    pub(crate) fn counts(&self) -> CacheCounts {
        self.counts
    }

    #[inline]
    fn find(&self, set: usize, tag: Tag) -> Option<usize> {
        let hint = self.hints.of(tag);
        if hint.tags == 0 {
            return None;
        }
        let first = set * self.ways;
        if hint.position != UNKNOWN {
            // Two sources of one domain may keep a page in two partitions.
            let at = hint.position as usize;
            if self.tags[at] == tag && at.wrapping_sub(first) < self.ways {
                return Some(at);
            }
            if hint.tags == 1 {
                return None;
            }
        }
        position(&self.tags[first..first + self.ways], tag).map(|way| first + way)
    }

    #[inline]
    fn touch(&mut self, set: usize, at: usize, next_use: u64) {
        match self.replacement {
            Replacement::Lru => {
                self.tick += 1;
                self.marks[at] = self.tick;
            }
            Replacement::Oracle => self.marks[at] = next_use,
            Replacement::Lfu => {
                self.marks[at] += 1;
                if self.marks[at] == LFU_SATURATED {
                    let first = set * self.ways;
                    for mark in &mut self.marks[first..first + self.used[set] as usize] {
                        *mark >>= 1;
                    }
                }
            }
        }
    }

    fn insert(&mut self, set: usize, tag: Tag, next_use: u64) {
        let first = set * self.ways;
        let used = self.used[set] as usize;
        let at = if used < self.ways {
            self.used[set] += 1;
            first + used
        } else {
            self.counts.evictions += 1;
            first + self.victim(first)
        };
        if self.tags[at] != NO_TAG {
            self.hints.forget(self.tags[at], at);
        }
        self.hints.learn(tag, at);
        self.counts.insertions += 1;
        self.tags[at] = tag;
        self.marks[at] = match self.replacement {
            Replacement::Lru => {
                self.tick += 1;
                self.tick
            }
            Replacement::Lfu => 0,
            Replacement::Oracle => next_use,
        };
    }

    /// The way of the full set beginning at `first` that must go.
    fn victim(&mut self, first: usize) -> usize {
        let marks = &self.marks[first..first + self.ways];
        match self.replacement {
            Replacement::Lru => position_of_least(marks),
            Replacement::Oracle => position_of_furthest(marks),
            Replacement::Lfu => {
                let least = marks.iter().copied().min().unwrap_or(0);
                let ties = marks.iter().filter(|mark| **mark == least).count();
                let chosen = self.ties.choose(ties);
                (0..marks.len())
                    .filter(|way| marks[*way] == least)
                    .nth(chosen)
                    .unwrap_or(0)
            }
        }
    }

    /// Moves entry `from`, the last of its set, to `to`, whose entry is dropped.
    fn move_entry(&mut self, from: usize, to: usize) {
        self.hints.forget(self.tags[to], to);
        if from != to {
            self.hints.forget(self.tags[from], from);
            self.hints.learn(self.tags[from], to);
        }
        self.tags[to] = self.tags[from];
        self.marks[to] = self.marks[from];
        self.tags[from] = NO_TAG;
    }
}

/// Where a tag may be: most look-ups are answered without searching a set.
///
/// Tags fall into buckets, four for each entry of the cache. A bucket knows how
/// many tags of the cache fell into it and where the last one is. None: the tag
/// is not there. One, and it is another: not there either. Else the set is
/// searched.
#[derive(Debug)]
struct Hints {
    buckets: Vec<Hint>,
    shift: u32,
}

/// The last tag of a bucket has gone; where the others are is not known.
const UNKNOWN: u32 = u32::MAX;

/// One bucket.
#[derive(Clone, Copy, Debug, Default)]
struct Hint {
    /// Position of the last tag that came.
    position: u32,
    /// Tags of the cache in this bucket.
    tags: u32,
}

impl Hints {
    fn new(entries: usize) -> Self {
        let buckets = (entries * 4).next_power_of_two();
        Self {
            buckets: vec![Hint::default(); buckets],
            shift: u64::BITS - buckets.ilog2(),
        }
    }

    #[inline]
    fn of(&self, tag: Tag) -> Hint {
        self.buckets[self.bucket(tag)]
    }

    #[inline]
    fn learn(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        hint.tags += 1;
        #[expect(clippy::cast_possible_truncation, reason = "a cache has at most 2^24 entries")]
        let position = at as u32;
        hint.position = position;
    }

    #[inline]
    fn forget(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        hint.tags -= 1;
        if hint.position as usize == at {
            hint.position = UNKNOWN;
        }
    }

    /// Multiplicative hashing: the upper bits of the product are well mixed.
    #[inline]
    fn bucket(&self, tag: Tag) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let bucket = (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        bucket
    }
}

/// Position of `tag`. Eight at a time and without a branch for each, since the
/// position is as good as random to the branch predictor.
#[inline]
fn position(tags: &[Tag], tag: Tag) -> Option<usize> {
    let (eights, rest) = tags.as_chunks::<8>();
    for (number, eight) in eights.iter().enumerate() {
        let mut found = 0_u32;
        for (way, other) in eight.iter().enumerate() {
            found |= u32::from(*other == tag) << way;
        }
        if found != 0 {
            return Some(number * 8 + found.trailing_zeros() as usize);
        }
    }
    let before = eights.len() * 8;
    rest.iter()
        .position(|other| *other == tag)
        .map(|way| before + way)
}

#[inline]
fn position_of_least(marks: &[u64]) -> usize {
    let mut least = (u64::MAX, 0);
    for (way, mark) in marks.iter().enumerate() {
        if *mark < least.0 {
            least = (*mark, way);
        }
    }
    least.1
}

#[inline]
fn position_of_furthest(marks: &[u64]) -> usize {
    let mut furthest = (0, 0);
    for (way, mark) in marks.iter().enumerate() {
        if *mark > furthest.0 {
            furthest = (*mark, way);
            if *mark == NEVER {
                break;
            }
        }
    }
    furthest.1
}

/// Which set a request may use.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    partition_by: PartitionBy,
    partition_bits: u32,
    address_bits: u32,
    shift: u32,
    sources_per_partition: u32,
}

/// Source ids are bus, device and function; tenants on functions of their own
/// devices differ from bit 3 on, so the low bits say nothing (III: 'lower bits
/// of SID').
const SOURCE_FUNCTION_BITS: u32 = 3;

impl Geometry {
    /// Sets and partitions are rounded down to powers of two; configurations
    /// that are none are refused before, except in flavour hypersio.
    fn new(config: &CacheConfig, shift: u32) -> Self {
        let set_bits = (config.entries / config.ways).max(1).ilog2();
        let partition_bits = config.partitions.max(1).ilog2().min(set_bits);
        Self {
            partition_by: config.partition_by,
            partition_bits,
            address_bits: set_bits - partition_bits,
            shift,
            sources_per_partition: config.sources_per_partition.max(1),
        }
    }

    const fn sets(&self) -> usize {
        1 << (self.partition_bits + self.address_bits)
    }

    #[inline]
    fn set(&self, page: &Page) -> Option<usize> {
        let partition = match self.partition_by {
            PartitionBy::DomainBits => page.domain,
            PartitionBy::SourceBits => page.source >> SOURCE_FUNCTION_BITS,
            PartitionBy::FullMatch => {
                let tagged = page.tenant / self.sources_per_partition;
                if tagged >> self.partition_bits != 0 {
                    return None;
                }
                tagged
            }
        } as usize
            & ((1 << self.partition_bits) - 1);
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let address = (page.iova >> self.shift) as usize & ((1 << self.address_bits) - 1);
        Some(partition << self.address_bits | address)
    }
}

/// Breaks ties: SplitMix64, chosen because it is a dozen operations and the
/// same everywhere; its quality matters little for a choice among a few ways.
#[derive(Debug)]
pub(crate) struct Ties(pub(crate) u64);

impl Ties {
    pub(crate) fn choose(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        #[expect(clippy::cast_possible_truncation, reason = "less than `count`")]
        let chosen = (u128::from(z) * count as u128 >> 64) as usize;
        chosen
    }
}
