// SPDX-License-Identifier: Apache-2.0
//! LFU with ties by a seed for sets of at most sixteen ways: the 4-bit counts of a set are one word.
//!
//! ```text
//!   way     15 … 3 2 1 0
//!   count    0 … 4 0 9 1      least: 0, of ways 2 and 15
//! ```
//! A use adds to a nibble, halving is a shift, and the ways with the least count are found by comparing all nibbles
//! with 0, then with 1, and so on: few are needed, as new entries begin at 0.

use pagetide_random::SplitMix64;

/// Ways that fit.
pub(crate) const PACKED_WAYS: u32 = 16;

/// A use count at which all of the set are halved.
const SATURATED: u64 = 15;
/// The lowest bit of every nibble.
const ONES: u64 = 0x1111_1111_1111_1111;
/// The lower three bits of every nibble.
const LOW_BITS: u64 = 0x7777_7777_7777_7777;

/// Counts of all sets of a cache.
#[derive(Debug)]
pub(crate) struct PackedLfu {
    random: SplitMix64,
    /// log2 of the ways.
    ways_shift: u32,
    sets: Vec<u64>,
}

impl PackedLfu {
    /// `sets` sets of `ways` ways, a power of two and at most [`PACKED_WAYS`], none of them used.
    pub(crate) fn new(seed: u64, sets: usize, ways: u32) -> Self {
        assert!(ways.is_power_of_two() && ways <= PACKED_WAYS);
        Self {
            random: SplitMix64::new(seed),
            ways_shift: ways.ilog2(),
            sets: vec![0; sets],
        }
    }

    /// Set and lowest bit of the count of entry `at`.
    #[inline(always)]
    const fn place(&self, at: usize) -> (usize, u32) {
        #[expect(clippy::cast_possible_truncation, reason = "below PACKED_WAYS")]
        let way = (at & ((1 << self.ways_shift) - 1)) as u32;
        (at >> self.ways_shift, 4 * way)
    }

    /// Entry `at` is used.
    #[inline(always)]
    pub(crate) fn use_entry(&mut self, at: usize) {
        let (set, bit) = self.place(at);
        let counts = &mut self.sets[set];
        *counts += 1 << bit;
        if *counts >> bit & SATURATED == SATURATED {
            *counts = *counts >> 1 & LOW_BITS;
        }
    }

    /// Entry `at` is new.
    #[inline(always)]
    pub(crate) fn enters(&mut self, at: usize) {
        let (set, bit) = self.place(at);
        self.sets[set] &= !(SATURATED << bit);
    }

    /// What was entry `from` is entry `to` of the same set now.
    pub(crate) fn moves(&mut self, from: usize, to: usize) {
        let ((set, from), (_, to)) = (self.place(from), self.place(to));
        let count = self.sets[set] >> from & SATURATED;
        self.sets[set] = self.sets[set] & !(SATURATED << to) | count << to;
    }

    /// A least-used entry of the full set `set`.
    #[inline(always)]
    pub(crate) fn evict(&mut self, set: usize) -> usize {
        let counts = self.sets[set];
        let in_use = u64::MAX >> (u64::BITS - (4 << self.ways_shift));
        let mut count = 0;
        let mut tied = nibbles_equal(counts, count) & in_use;
        while tied == 0 && count < SATURATED {
            count += 1;
            tied = nibbles_equal(counts, count) & in_use;
        }
        for _ in 0..self.random.index(tied.count_ones() as usize) {
            tied &= tied - 1;
        }
        (set << self.ways_shift) + tied.trailing_zeros() as usize / 4
    }
}

/// The lowest bit of each nibble of `word` that equals `nibble`.
#[inline(always)]
const fn nibbles_equal(word: u64, nibble: u64) -> u64 {
    let differ = word ^ (nibble * ONES);
    !(differ | differ >> 1 | differ >> 2 | differ >> 3) & ONES
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packed_counts_choose_as_a_list_does(
            ways_shift in 0..5_u32,
            seed in any::<u64>(),
            steps in proptest::collection::vec((0..4_u8, any::<usize>()), 1..400),
        ) {
            let ways = 1_usize << ways_shift;
            let mut packed = PackedLfu::new(seed, 3, 1 << ways_shift);
            let mut random = SplitMix64::new(seed);
            // Counts of the entries of set 1; the others stay empty.
            let mut naive = vec![0_u64; ways];
            for (step, number) in steps {
                let way = number % ways;
                match step {
                    0 => {
                        let least = naive.iter().min().unwrap();
                        let tied: Vec<usize> =
                            (0..ways).filter(|way| naive[*way] == *least).collect();
                        let expected = tied[random.index(tied.len())];
                        prop_assert_eq!(packed.evict(1), ways + expected);
                        packed.enters(ways + expected);
                        naive[expected] = 0;
                    }
                    1 => {
                        packed.moves(2 * ways - 1, ways + way);
                        naive[way] = naive[ways - 1];
                    }
                    _ => {
                        packed.use_entry(ways + way);
                        naive[way] += 1;
                        if naive[way] == SATURATED {
                            naive.iter_mut().for_each(|count| *count /= 2);
                        }
                    }
                }
            }
            prop_assert_eq!((packed.sets[0], packed.sets[2]), (0, 0));
        }
    }
}
