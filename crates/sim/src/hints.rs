// SPDX-License-Identifier: Apache-2.0
//! The possible position of a tag in a cache: most look-ups need no search of a set.
//!
//! Tags fall into buckets, four for each entry of the cache. A bucket has the position of the last tag that
//! fell into it, and the number of others. If the tag there is a different one and there are no others, the
//! tag is not in the cache; with others, its set is searched.
//!
//! A bucket without a position, because it is empty or its last tag was evicted, points at an entry that
//! never holds a tag. So a miss takes the same path through the code whether its bucket is empty or not,
//! which is as good as random.

use crate::request::Tag;

/// The buckets of one cache.
#[derive(Debug)]
pub(crate) struct Hints {
    buckets: Vec<Hint>,
    shift: u32,
    /// The position that means none.
    nowhere: u32,
}

/// One bucket: position of the last tag inserted in the upper, number of the others in the lower bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hint(u32);

/// Buckets of a cache of few entries, for which plenty of them cost nothing.
const BUCKETS_MIN: usize = 1024;

/// Bits of the number; a bucket with more others than that is searched for ever.
const OTHERS_BITS: u32 = 7;
const OTHERS_MAX: u32 = (1 << OTHERS_BITS) - 1;
/// Most entries that a position can name.
pub(crate) const ENTRIES_MAX: u32 = 1 << 24;
const _: () = assert!(ENTRIES_MAX <= u32::MAX >> OTHERS_BITS);

impl Hint {
    #[inline(always)]
    const fn new(position: u32, others: u32) -> Self {
        Self(position << OTHERS_BITS | others)
    }

    /// Position of the last tag; past the last entry if that is unknown.
    #[inline(always)]
    pub(crate) const fn position(self) -> usize {
        (self.0 >> OTHERS_BITS) as usize
    }

    /// Tags of the bucket that are elsewhere.
    #[inline(always)]
    pub(crate) const fn others(self) -> u32 {
        self.0 & OTHERS_MAX
    }
}

impl Hints {
    /// No tags, of a cache of `entries` entries, at most [`ENTRIES_MAX`].
    pub(crate) fn new(entries: usize) -> Self {
        let buckets = (entries * 4).next_power_of_two().max(BUCKETS_MIN);
        let nowhere = narrow(entries);
        Self {
            buckets: vec![Hint::new(nowhere, 0); buckets],
            shift: u64::BITS - buckets.ilog2(),
            nowhere,
        }
    }

    /// The possible position of `tag`.
    #[inline(always)]
    pub(crate) fn of(&self, tag: Tag) -> Hint {
        self.buckets[self.bucket(tag)]
    }

    /// `tag` is at `at` now.
    #[inline]
    pub(crate) fn learn(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        // The bucket's previous tag is now one of the others.
        let known = u32::from(hint.position() != self.nowhere as usize);
        *hint = Hint::new(narrow(at), (hint.others() + known).min(OTHERS_MAX));
    }

    /// `tag` is no longer at `at`.
    #[inline]
    pub(crate) fn forget(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        let others = hint.others();
        *hint = if hint.position() == at {
            Hint::new(self.nowhere, others)
        } else {
            // Once the number was too large, it is unknown from then on.
            let gone = u32::from(others != OTHERS_MAX);
            Hint(hint.0 - gone)
        };
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
