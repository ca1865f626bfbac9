// SPDX-License-Identifier: Apache-2.0
//! Where in a cache a tag may be: most look-ups are answered without searching a set.
//!
//! Tags fall into buckets, four for each entry of the cache. A bucket knows how
//! many tags of the cache fell into it and where the last one is. None: the tag
//! is not there. One, and it is another: not there either. Else the set is
//! searched.

use crate::request::Tag;

/// The buckets of one cache.
#[derive(Debug)]
pub(crate) struct Hints {
    buckets: Vec<Hint>,
    shift: u32,
}

/// One bucket: position of the last tag that came in the upper, number of tags
/// in the lower bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hint(u32);

/// Buckets of a cache of few entries, for which it costs nothing to have plenty.
const BUCKETS_MIN: usize = 1024;

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

    /// Where the last tag is; no position of an entry if that is not known.
    #[inline(always)]
    pub(crate) const fn position(self) -> usize {
        (self.0 >> HINT_TAGS_BITS) as usize
    }

    /// Tags of the bucket.
    #[inline(always)]
    pub(crate) const fn tags(self) -> u32 {
        self.0 & HINT_TAGS_MAX
    }
}

impl Hints {
    /// No tags, of a cache of `entries` entries.
    pub(crate) fn new(entries: usize) -> Self {
        let buckets = (entries * 4).next_power_of_two().max(BUCKETS_MIN);
        Self {
            buckets: vec![Hint::NONE; buckets],
            shift: u64::BITS - buckets.ilog2(),
        }
    }

    /// Where `tag` may be.
    #[inline(always)]
    pub(crate) fn of(&self, tag: Tag) -> Hint {
        self.buckets[self.bucket(tag)]
    }

    /// `tag` is at `at` now.
    #[inline]
    pub(crate) fn learn(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
        let position = at as u32;
        *hint = Hint::new(position, (hint.tags() + 1).min(HINT_TAGS_MAX));
    }

    /// `tag` is not at `at` any more.
    #[inline]
    pub(crate) fn forget(&mut self, tag: Tag, at: usize) {
        let bucket = self.bucket(tag);
        let hint = &mut self.buckets[bucket];
        let position = if hint.position() == at {
            UNKNOWN
        } else {
            hint.0 >> HINT_TAGS_BITS
        };
        let tags = match hint.tags() {
            HINT_TAGS_MAX => HINT_TAGS_MAX,
            tags => tags - 1,
        };
        *hint = Hint::new(position, tags);
    }

    /// Multiplicative hashing: the upper bits of the product are well mixed.
    #[inline(always)]
    fn bucket(&self, tag: Tag) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let bucket = (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        bucket
    }
}
