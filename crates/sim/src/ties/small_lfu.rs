// SPDX-License-Identifier: Apache-2.0
//! The program's LFU for sets of at most eight ways, ties included, in three words a set.
//!
//! The lists of [`super::program`] are packed here into the bytes of words, in the order in which the
//! program's map lists the keys of the set:
//!
//! ```text
//!   ways      3 0 2 1 …     where each key is in the cache
//!   buckets   7 7 12 0 …    its bucket in the map: 13 buckets never fill up
//!   counts    0 4 1 0 …     its uses
//! ```
//! So finding, inserting or removing a key costs a few operations on words, as do the least count and its
//! keys. Counts stay below 16 and buckets below 13, so bytes never carry into each other; unused positions
//! hold [`UNUSED`] and are masked where that matters.

use std::cell::RefCell;
use std::rc::Rc;

use super::program::ProgramRand;

/// Ways that fit.
pub(crate) const SMALL_WAYS: u32 = 8;

/// Buckets of the program's map, as long as it holds no more than 13 keys.
const BUCKETS: u64 = 13;
/// A use count at which all of the set are halved.
const SATURATED: u64 = 15;
/// The byte of an unused position.
const UNUSED: u64 = 0x7f;

const ONES: u64 = 0x0101_0101_0101_0101;
const LOW_BITS: u64 = 0x7f * ONES;
const HIGH_BITS: u64 = !LOW_BITS;

/// One set.
#[derive(Clone, Copy, Debug)]
struct Set {
    ways: u64,
    buckets: u64,
    counts: u64,
    len: u32,
}

impl Set {
    const EMPTY: Self = Self {
        ways: UNUSED * ONES,
        buckets: UNUSED * ONES,
        counts: UNUSED * ONES,
        len: 0,
    };

    /// Bit 7 of the byte of each position in use; there must be at least one.
    const fn in_use(&self) -> u64 {
        HIGH_BITS >> (u64::BITS - 8 * self.len)
    }

    fn insert(&mut self, at: u32, way: u64, bucket: u64) {
        self.ways = with_byte(self.ways, at, way);
        self.buckets = with_byte(self.buckets, at, bucket);
        self.counts = with_byte(self.counts, at, 0);
        self.len += 1;
    }

    fn remove(&mut self, at: u32) {
        self.ways = without_byte(self.ways, at);
        self.buckets = without_byte(self.buckets, at);
        self.counts = without_byte(self.counts, at);
        self.len -= 1;
    }
}

/// Counts and map orders of all sets of a cache.
#[derive(Debug)]
pub(crate) struct SmallLfu {
    rand: Rc<RefCell<ProgramRand>>,
    sets: Vec<Set>,
}

impl SmallLfu {
    /// `sets` empty sets; the program has one `rand()` for all its caches.
    pub(crate) fn new(rand: &Rc<RefCell<ProgramRand>>, sets: usize) -> Self {
        Self {
            rand: Rc::clone(rand),
            sets: vec![Set::EMPTY; sets],
        }
    }

    /// The key with `hash` was inserted into `set`, which had room, at `way`.
    #[inline]
    pub(crate) fn enters(&mut self, set: usize, hash: u64, way: u64) {
        let set = &mut self.sets[set];
        let bucket = hash % BUCKETS;
        let same = bytes_equal(set.buckets, bucket);
        // A key goes in front of its bucket, a new bucket to the front of all.
        let at = if same == 0 { 0 } else { first_byte(same) };
        set.insert(at, way, bucket);
    }

    /// The key at `way` is used.
    #[inline]
    pub(crate) fn use_way(&mut self, set: usize, way: u64) {
        let set = &mut self.sets[set];
        let at = first_byte(bytes_equal(set.ways, way));
        set.counts += 1 << (8 * at);
        if set.counts >> (8 * at) & 0xff == SATURATED {
            set.counts = set.counts >> 1 & LOW_BITS;
        }
    }

    /// The key of entry `at` is used, of sets of `ways`.
    #[inline(always)]
    pub(crate) fn use_entry(&mut self, at: usize, ways: usize) {
        // A division takes as long as all of the rest.
        let (set, way) = match ways {
            8 => (at / 8, at % 8),
            4 => (at / 4, at % 4),
            _ => (at / ways, at % ways),
        };
        self.use_way(set, way as u64);
    }

    /// Removes a least-used key, and returns its way.
    #[inline]
    pub(crate) fn evict(&mut self, set: usize) -> u64 {
        let set = &mut self.sets[set];
        let in_use = set.in_use();
        let mut count = 0;
        let mut least = bytes_equal(set.counts, count) & in_use;
        while least == 0 && count < SATURATED {
            count += 1;
            least = bytes_equal(set.counts, count) & in_use;
        }
        // The number of such keys up to each position; the last has the total.
        let up_to = (least >> 7).wrapping_mul(ONES);
        let tied = (up_to >> 56).max(1);
        let chosen = u64::from(self.rand.borrow_mut().next()) % tied;
        let at = first_byte(bytes_equal(up_to, chosen + 1));
        let way = set.ways >> (8 * at) & 0xff;
        set.remove(at);
        way
    }

    /// The key at `way` was removed.
    pub(crate) fn leaves(&mut self, set: usize, way: u64) {
        let set = &mut self.sets[set];
        set.remove(first_byte(bytes_equal(set.ways, way)));
    }

    /// The key at `from` is at `to` now.
    pub(crate) fn moves(&mut self, set: usize, from: u64, to: u64) {
        let set = &mut self.sets[set];
        let at = first_byte(bytes_equal(set.ways, from));
        set.ways ^= (from ^ to) << (8 * at);
    }
}

/// Bit 7 of each byte of `word` that equals `byte`; all are below 128.
#[inline]
const fn bytes_equal(word: u64, byte: u64) -> u64 {
    // Adding 127 sets bit 7 of every byte that is not zero.
    !((word ^ (byte * ONES)) + LOW_BITS) & HIGH_BITS
}

/// Position of the first byte whose bit 7 is set; at most 7.
#[inline]
const fn first_byte(bits: u64) -> u32 {
    bits.trailing_zeros() / 8 % SMALL_WAYS
}

/// `word` with `byte` inserted at position `at`; the last byte drops out.
#[inline]
const fn with_byte(word: u64, at: u32, byte: u64) -> u64 {
    let below = (1 << (8 * at)) - 1;
    word & below | byte << (8 * at) | (word & !below) << 8
}

/// `word` without the byte at position `at`; [`UNUSED`] comes in at the end.
#[inline]
const fn without_byte(word: u64, at: u32) -> u64 {
    let below = (1 << (8 * at)) - 1;
    word & below | word >> 8 & !below | UNUSED << 56
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ties::ProgramTies;

    fn rand() -> Rc<RefCell<ProgramRand>> {
        Rc::new(RefCell::new(ProgramRand::new()))
    }

    proptest! {
        #[test]
        fn packed_set_chooses_as_the_lists_do(
            ways in 1..9_usize,
            steps in proptest::collection::vec((0..8_u8, any::<u64>()), 1..300),
        ) {
            let mut small = SmallLfu::new(&rand(), 1);
            let mut lists = ProgramTies::new(&rand(), 1);
            // Hash and count of the key at each way.
            let mut keys: Vec<(u64, u64)> = Vec::new();
            for (kind, random) in steps {
                let way = usize::try_from(random % ways as u64).unwrap();
                if kind == 0 && way < keys.len() {
                    let narrow = |way: usize| u32::try_from(way).unwrap();
                    lists.leaves(0, narrow(way));
                    small.leaves(0, way as u64);
                    let from = keys.len() - 1;
                    if from != way {
                        lists.moves(0, narrow(from), narrow(way));
                        small.moves(0, from as u64, way as u64);
                    }
                    keys.swap_remove(way);
                } else if kind < 3 {
                    let mut free = keys.len();
                    if free == ways {
                        let least = keys.iter().map(|(_, count)| *count).min();
                        let is_least = |way: u32| Some(keys[way as usize].1) == least;
                        let victim = lists.choose(0, is_least).unwrap();
                        prop_assert_eq!(small.evict(0), u64::from(victim));
                        free = victim as usize;
                        lists.leaves(0, victim);
                        keys[free] = (random, 0);
                    } else {
                        keys.push((random, 0));
                    }
                    lists.enters(0, random, u32::try_from(free).unwrap());
                    small.enters(0, random, free as u64);
                } else if way < keys.len() {
                    small.use_way(0, way as u64);
                    keys[way].1 += 1;
                    if keys[way].1 == SATURATED {
                        keys.iter_mut().for_each(|(_, count)| *count >>= 1);
                    }
                }
            }
        }
    }
}
