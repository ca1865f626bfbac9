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
use crate::request::{NEVER, NO_TAG, Page, Tag, address_of, domain_of, widest_page};
use crate::ties::{TieBreak, Ties};

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
    pub(crate) fn new(config: &CacheConfig, shift: u32, ties: &TieBreak) -> Option<Self> {
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
            ties: Ties::new(ties, geometry.sets()),
            counts: CacheCounts::default(),
        })
    }

    /// Looks for `tag`; a hit counts as a use. `next_use` is for the oracle.
    #[inline]
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

    /// Sees to it that `tag` is there. A tag already there counts as used; one
    /// put in has not been used yet.
    #[inline]
    pub(crate) fn fill(&mut self, page: &Page, tag: Tag, next_use: u64) {
        match self.find(page, tag) {
            Some(at) => self.touch(at, next_use),
            None => self.insert(page, tag, next_use),
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
    fn find(&self, page: &Page, tag: Tag) -> Option<usize> {
        let hint = self.hints.of(tag);
        let at = hint.position() as usize;
        match self.tags.get(at) {
            Some(other) if *other == tag && self.may_hit(page, tag, at) => Some(at),
            // The bucket's only tag is another one, or another set's, or it has none.
            Some(_) if hint.tags() <= 1 => None,
            _ if hint.tags() == 0 => None,
            _ => self.search(page, tag),
        }
    }

    /// True if the entry at `at`, which has this tag, is in the set that
    /// the request may use. It is, where the tag alone decides the set; but two
    /// sources of one domain may have partitions of their own, and a page larger
    /// than what the set's address bits begin at is kept in several sets.
    #[inline]
    fn may_hit(&self, page: &Page, tag: Tag, at: usize) -> bool {
        if self.geometry.tag_tells_set && widest_page(tag) <= self.geometry.shift {
            return true;
        }
        self.geometry
            .set(page)
            .is_some_and(|set| at / self.ways == set)
    }

    #[cold]
    fn search(&self, page: &Page, tag: Tag) -> Option<usize> {
        let first = self.geometry.set(page)? * self.ways;
        let way = position(&self.tags[first..first + self.ways], tag)?;
        Some(first + way)
    }

    #[inline]
    fn touch(&mut self, at: usize, next_use: u64) {
        let mark = &mut self.marks[at];
        match self.replacement {
            Replacement::Lru => {
                self.tick += 1;
                *mark = self.tick;
            }
            Replacement::Oracle => *mark = next_use,
            Replacement::Lfu => {
                *mark += 1;
                if *mark == LFU_SATURATED {
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
        for mark in &mut self.marks[first..first + self.used[set] as usize] {
            *mark >>= 1;
        }
    }

    fn insert(&mut self, page: &Page, tag: Tag, next_use: u64) {
        let Some(set) = self.geometry.set(page) else {
            return;
        };
        let first = set * self.ways;
        let used = self.used[set] as usize;
        let at = if used < self.ways {
            self.used[set] += 1;
            first + used
        } else {
            self.counts.evictions += 1;
            let at = first + self.victim(first);
            self.hints.forget(self.tags[at], at);
            at
        };
        self.hints.learn(tag, at);
        if let Ties::Program(program) = &mut self.ties {
            #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
            let way = (at - first) as u32;
            if used == self.ways {
                program.leaves(set, way);
            }
            program.enters(set, program_hash(tag), way);
        }
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
    #[inline]
    fn victim(&mut self, first: usize) -> usize {
        let marks = &self.marks[first..first + self.ways];
        match self.replacement {
            Replacement::Oracle => position_of_furthest(marks),
            // Ticks are never equal.
            Replacement::Lru if marks.len() <= 64 => ways_of_least(marks).trailing_zeros() as usize,
            Replacement::Lru => position_of_least(marks),
            Replacement::Lfu => self.victim_of_least_used(first),
        }
    }

    /// The way with the least use count, or one of several.
    #[inline]
    fn victim_of_least_used(&mut self, first: usize) -> usize {
        let marks = &self.marks[first..first + self.ways];
        match &mut self.ties {
            Ties::Random(random) if marks.len() <= 64 => {
                let mut tied = ways_of_least(marks);
                for _ in 0..random.choose(tied.count_ones() as usize) {
                    tied &= tied - 1;
                }
                tied.trailing_zeros() as usize
            }
            Ties::Random(random) => {
                let least = marks.iter().copied().min().unwrap_or(0);
                let tied = || (0..marks.len()).filter(|way| marks[*way] == least);
                let chosen = random.choose(tied().count());
                tied().nth(chosen).unwrap_or(0)
            }
            Ties::Program(program) => {
                let least = marks.iter().copied().min().unwrap_or(0);
                let is_least = |way: u32| marks[way as usize] == least;
                program.choose(first / self.ways, is_least).unwrap_or(0) as usize
            }
        }
    }

    /// Tells the program's ties that entry `from` takes the place of `to`.
    fn program_moves(&mut self, from: usize, to: usize) {
        let ways = self.ways;
        if let Ties::Program(program) = &mut self.ties {
            let set = to / ways;
            #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
            let way = |at: usize| (at % ways) as u32;
            program.leaves(set, way(to));
            if from != to {
                program.moves(set, way(from), way(to));
            }
        }
    }

    /// Moves entry `from`, the last of its set, to `to`, whose entry is dropped.
    fn move_entry(&mut self, from: usize, to: usize) {
        self.hints.forget(self.tags[to], to);
        self.program_moves(from, to);
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

/// One bucket: position of the last tag that came in the upper, number of tags
/// in the lower bits.
#[derive(Clone, Copy, Debug)]
struct Hint(u32);

/// Bits of the number; a bucket of more tags than that is searched for ever.
const HINT_TAGS_BITS: u32 = 7;
const HINT_TAGS_MAX: u32 = (1 << HINT_TAGS_BITS) - 1;
/// The last tag of a bucket has gone; where the others are is not known.
const UNKNOWN: u32 = u32::MAX >> HINT_TAGS_BITS;
/// Entries that a position can name.
pub(crate) const ENTRIES_MAX: u32 = 1 << 24;
const _: () = assert!(ENTRIES_MAX <= UNKNOWN);

impl Hint {
    const NONE: Self = Self::new(UNKNOWN, 0);

    #[inline]
    const fn new(position: u32, tags: u32) -> Self {
        Self(position << HINT_TAGS_BITS | tags)
    }

    #[inline]
    const fn position(self) -> u32 {
        self.0 >> HINT_TAGS_BITS
    }

    #[inline]
    const fn tags(self) -> u32 {
        self.0 & HINT_TAGS_MAX
    }
}

impl Hints {
    fn new(entries: usize) -> Self {
        let buckets = (entries * 4).next_power_of_two();
        Self {
            buckets: vec![Hint::NONE; buckets],
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
        #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
        let position = at as u32;
        *hint = Hint::new(position, (hint.tags() + 1).min(HINT_TAGS_MAX));
    }

    #[inline]
    fn forget(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        let position = match hint.position() {
            position if position as usize == at => UNKNOWN,
            position => position,
        };
        let tags = match hint.tags() {
            HINT_TAGS_MAX => HINT_TAGS_MAX,
            tags => tags - 1,
        };
        *hint = Hint::new(position, tags);
    }

    /// Multiplicative hashing: the upper bits of the product are well mixed.
    #[inline]
    fn bucket(&self, tag: Tag) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let bucket = (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        bucket
    }
}

/// Hash of a tag in the authors' program.
fn program_hash(tag: Tag) -> u64 {
    address_of(tag) << 16 | u64::from(domain_of(tag))
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

/// The ways, at most 64, with the least mark, as a set of bits.
#[inline]
fn ways_of_least(marks: &[u64]) -> u64 {
    // The common sizes are worth loops of a known length.
    if let Ok(eight) = <&[u64; 8]>::try_from(marks) {
        return ways_of_least_in(eight);
    }
    if let Ok(sixteen) = <&[u64; 16]>::try_from(marks) {
        return ways_of_least_in(sixteen);
    }
    ways_of_least_in(marks)
}

#[inline(always)]
fn ways_of_least_in<'a>(marks: impl IntoIterator<Item = &'a u64> + Copy) -> u64 {
    let least = marks
        .into_iter()
        .fold(u64::MAX, |least, mark| least.min(*mark));
    let bits = marks.into_iter().enumerate();
    bits.fold(0, |all, (way, mark)| all | u64::from(*mark == least) << way)
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
    /// The partition follows from the domain, which is part of the tag.
    tag_tells_set: bool,
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
            tag_tells_set: match config.partition_by {
                PartitionBy::DomainBits => true,
                PartitionBy::SourceBits => partition_bits == 0,
                PartitionBy::FullMatch => false,
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

#[cfg(test)]
mod tests;
