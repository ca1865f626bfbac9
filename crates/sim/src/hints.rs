// SPDX-License-Identifier: Apache-2.0
//! The positions of a tag in a cache, without a search of sets.
//!
//! Tags fall into buckets, four for each entry of the cache. The entries of a bucket are a chain, the last one that
//! came first. Most chains have one entry; whether there are more is a bit of the bucket, so that most look-ups read
//! the bucket and one entry.
//!
//! ```text
//!   bucket of a tag ─► 17, more ─► next[17] = 4 ─► next[4] = none
//! ```
//! An empty bucket points at an entry that never holds a tag. So a miss takes the same path through the code
//! whether its bucket is empty or not, which is as good as random.

use crate::request::Tag;

/// The buckets of one cache.
#[derive(Debug)]
pub(crate) struct Hints {
    buckets: Vec<Hint>,
    /// The entry after each one in its chain, or [`Self::nowhere`].
    next: Vec<u32>,
    shift: u32,
    /// The position that means none.
    nowhere: u32,
}

/// One bucket: position of the first entry in the upper bits, in the lowest whether there are more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hint(u32);

/// Buckets of a cache of few entries, for which plenty of them cost nothing.
const BUCKETS_MIN: usize = 1024;

/// Most entries that a position can name.
pub(crate) const ENTRIES_MAX: u32 = 1 << 24;

impl Hint {
    #[inline(always)]
    const fn new(position: u32, has_more: u32) -> Self {
        Self(position << 1 | has_more)
    }

    /// Position of the first entry; past the last one of the cache if there is none.
    #[inline(always)]
    pub(crate) const fn position(self) -> usize {
        (self.0 >> 1) as usize
    }

    /// True if there are more.
    #[inline(always)]
    pub(crate) const fn has_more(self) -> bool {
        self.0 & 1 != 0
    }
}

impl Hints {
    /// No tags, of a cache of `entries` entries, at most [`ENTRIES_MAX`].
    pub(crate) fn new(entries: usize) -> Self {
        let buckets = (entries * 4).next_power_of_two().max(BUCKETS_MIN);
        let nowhere = narrow(entries);
        Self {
            buckets: vec![Hint::new(nowhere, 0); buckets],
            next: vec![nowhere; entries],
            shift: u64::BITS - buckets.ilog2(),
            nowhere,
        }
    }

    /// The first entry in the bucket of `tag`.
    #[inline(always)]
    pub(crate) fn of(&self, tag: Tag) -> Hint {
        self.buckets[self.bucket(tag)]
    }

    /// All entries in the bucket of `tag`.
    pub(crate) fn all_of(&self, tag: Tag) -> impl Iterator<Item = usize> {
        let first = self.of(tag).position();
        let nowhere = self.nowhere as usize;
        std::iter::successors(Some(first), |at| Some(*self.next.get(*at)? as usize))
            .take_while(move |at| *at != nowhere)
    }

    /// `tag` is at `at` now.
    #[inline]
    pub(crate) fn learn(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let first = narrow(self.buckets[bucket].position());
        self.next[at] = first;
        let has_more = u32::from(first != self.nowhere);
        self.buckets[bucket] = Hint::new(narrow(at), has_more);
    }

    /// `tag` is no longer at `at`, where it was.
    #[inline]
    pub(crate) fn forget(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let after = self.next[at];
        let mut first = narrow(self.buckets[bucket].position());
        if first as usize == at {
            first = after;
        } else {
            let mut before = first as usize;
            while self.next[before] as usize != at {
                before = self.next[before] as usize;
            }
            self.next[before] = after;
        }
        let second = self.next.get(first as usize).copied();
        let has_more = u32::from(second.unwrap_or(self.nowhere) != self.nowhere);
        self.buckets[bucket] = Hint::new(first, has_more);
    }

    /// Multiplicative hashing: the upper bits of the product are well mixed.
    #[inline(always)]
    fn bucket(&self, tag: Tag) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let bucket = (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        bucket
    }
}

/// A position as a hint holds it.
#[inline(always)]
const fn narrow(position: usize) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
    let position = position as u32;
    position
}
