// SPDX-License-Identifier: Apache-2.0
//! A set-associative cache of tags with any replacement policy, and the rule for the set
//! that a request may use.
//!
//! A cache holds no translations, only their presence: the model needs hits and misses, never an address.
//! An entry is a tag and one number of its policy ([`crate::policy::replacement`]).
//!
//! The set is chosen by partition and address: `partition << address_bits | address bits`. The address bits
//! begin at bit 21 for every cache of translations, so that a page of any size is found without knowing its
//! size first.

use crate::config::{CacheConfig, PartitionBy};
use crate::hints::Hints;
use crate::outcome::CacheCounts;
use crate::policy::replacement::{AnyPolicy, Entries, Entry, Place, ReplacementPolicy};
use crate::request::{NO_TAG, Page, Tag};
use crate::ties::TieBreak;

/// Most sets that an invalidation of a few tags visits one by one.
const SETS_MAX: usize = 8;

/// One cache.
#[derive(Debug)]
pub(crate) struct Cache {
    geometry: Geometry,
    policy: AnyPolicy,
    /// What the policy did wrong.
    failure: Option<String>,
    ways: usize,
    /// One more than the capacity; the last stays empty for ever, as the target of hints without a
    /// position.
    entries: Vec<Entry>,
    /// Entries in use, of each set.
    used: Vec<u32>,
    hints: Hints,
    counts: CacheCounts,
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
            policy: AnyPolicy::new(config, ties, geometry.sets()),
            failure: None,
            ways,
            entries: vec![empty; entries + 1],
            used: vec![0; geometry.sets()],
            hints: Hints::new(entries),
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

    /// Drops every entry for whose tag `is_void` holds. If only some of `tags` may be, and these are all, the
    /// cost is that of their sets; an empty list: any tag may be.
    pub(crate) fn invalidate(&mut self, tags: &[Tag], is_void: impl Fn(Tag) -> bool) {
        if let Some((mut sets, count)) = self.sets_of(tags) {
            let sets = &mut sets[..count];
            sets.sort_unstable();
            let mut last = usize::MAX;
            for set in sets {
                if std::mem::replace(&mut last, *set) != *set {
                    self.invalidate_set(*set, &is_void);
                }
            }
            return;
        }
        for set in 0..self.used.len() {
            self.invalidate_set(set, &is_void);
        }
    }

    /// The sets in which the entries of a few tags are, each once or several times, and how many that are; `None`
    /// if they are many.
    fn sets_of(&self, tags: &[Tag]) -> Option<([usize; SETS_MAX], usize)> {
        if tags.is_empty() {
            return None;
        }
        let (mut sets, mut count) = ([0; SETS_MAX], 0);
        for tag in tags {
            for at in self.hints.all_of(*tag) {
                if self.entries[at].tag == *tag {
                    *sets.get_mut(count)? = at / self.ways;
                    count += 1;
                }
            }
        }
        Some((sets, count))
    }

    fn invalidate_set(&mut self, set: usize, is_void: &impl Fn(Tag) -> bool) {
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
        } else if hint.has_more() {
            self.search(page, tag)
        } else {
            None
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
        let mut all = self.hints.all_of(tag);
        all.find(|at| self.entries[*at].tag == tag && self.may_hit(page, *at))
    }

    #[inline(always)]
    fn touch(&mut self, at: usize, next_use: u64) {
        self.policy
            .touched(&mut self.entries, self.ways, at, next_use);
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
        self.entries[at] = Entry { tag, mark: 0 };
        let place = Place {
            at,
            set,
            way: at - first,
        };
        let mut entries = Entries::new(&mut self.entries, self.ways);
        self.policy.entered(&mut entries, place, tag, next_use);
    }

    /// The victim of the full set `set`.
    #[inline]
    fn evict(&mut self, set: usize) -> usize {
        let mut entries = Entries::new(&mut self.entries, self.ways);
        let victim = self.policy.victim(&mut entries, set);
        let is_right = !self.policy.is_own() || {
            let first = set * self.ways;
            (first..first + self.ways).contains(&victim)
        };
        match is_right {
            true => victim,
            false => self.fail(set, victim),
        }
    }

    /// Notes that the policy named a victim that is not in its set; one that is.
    #[cold]
    fn fail(&mut self, set: usize, victim: usize) -> usize {
        let first = set * self.ways;
        self.failure = Some(format!(
            "it names entry {victim} as the victim of set {set}, which has the entries {first} to {}",
            first + self.ways - 1
        ));
        first
    }

    /// Replaces the policy; the cache must be empty.
    pub(crate) fn set_policy(&mut self, policy: Box<dyn ReplacementPolicy>) {
        self.policy = AnyPolicy::Own(policy);
    }

    /// What the policy did wrong, if anything.
    pub(crate) fn failure(&mut self) -> Option<String> {
        // A policy that gives up may have had to name some victim all the same: its own word is the reason.
        self.policy.failure().or_else(|| self.failure.take())
    }

    /// Moves entry `from`, the last of its set, to `to`, whose entry is dropped.
    fn move_entry(&mut self, from: usize, to: usize) {
        let (moved, gone) = (self.entries[from], self.entries[to]);
        self.hints.forget(gone.tag, to);
        if from != to {
            self.hints.forget(moved.tag, from);
            self.hints.learn(moved.tag, to);
        }
        self.policy
            .removed(&mut Entries::new(&mut self.entries, self.ways), to);
        if from != to {
            self.entries[to] = moved;
            let mut entries = Entries::new(&mut self.entries, self.ways);
            self.policy.moved(&mut entries, from, to);
        }
        self.entries[from].tag = NO_TAG;
    }
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
