// SPDX-License-Identifier: Apache-2.0
//! The generator of random numbers: [`SplitMix64`] (Steele, Lea and Flood, *Fast splittable pseudorandom
//! number generators*, OOPSLA 2014). Loads, samples, simulations and tests draw from it, always from a seed,
//! so that a run can be repeated on any machine.
//!
//! ```text
//!   state ──► + GAMMA ──► state             a Weyl sequence: every 64-bit state once, then again
//!               └─► mixed(state) ──► number    a bijection whose every output bit depends on every input bit
//! ```
//! It passes the usual statistical tests, needs no warm-up, and any seed will do, 0 and neighbouring ones
//! too. **It is no source of secrets**: one output determines all others.
//!
//! # Reductions
//! | function | number below `bound` | for |
//! |---|---|---|
//! | [`SplitMix64::below`] | upper half of the 128-bit product; no division | everything new |
//! | [`SplitMix64::remainder`] | remainder of a division | what was drawn so from recorded seeds, and must be drawn again |
//!
//! The bias of both is at most `bound` over 2^64.
//!
//! Two generators remain beside it: synthetic traces are drawn by PCG32, since their recipes promise the same
//! events for ever; and flavour *hypersio* repeats the C library's `rand`, as its authors' program uses it.

/// The increment of the state: the golden ratio's fraction of 2^64, made odd.
pub const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A generator; equal seeds give equal sequences.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitMix64 {
    state: u64,
}

/// The finalizer: each bit of the result depends on each of `word`, and different words give different
/// results. Scatters numbers that are close together; zero stays zero.
#[inline]
#[must_use]
pub const fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl SplitMix64 {
    /// The generator of `seed`.
    #[inline]
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The generator number `stream` of `seed`; those of one seed are unrelated.
    #[must_use]
    pub const fn stream(seed: u64, stream: u64) -> Self {
        let mut random = Self::new(seed ^ stream.wrapping_mul(GAMMA).rotate_left(17));
        random.next_u64();
        random
    }

    /// 64 random bits.
    #[inline]
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mixed(self.state)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    #[inline]
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// A number below `bound`, which must not be 0, by division: for sequences recorded so.
    #[inline]
    pub const fn remainder(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// An index into something `len` long; 0 if that is empty.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than `len`")]
    pub const fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number from `start` to below `end`; `start` if there is none.
    #[inline]
    pub const fn between(&mut self, start: u64, end: u64) -> u64 {
        start + self.below(end.saturating_sub(start))
    }

    /// From 0 to below 1, in steps of 2^-53.
    #[inline]
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub const fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponentially distributed, with mean 1. Libraries round logarithms differently, so the last bits
    /// differ between machines.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Puts `items` into random order (Fisher and Yates).
    pub const fn shuffle<T>(&mut self, items: &mut [T]) {
        let mut left = items.len();
        while left > 1 {
            items.swap(left - 1, self.index(left));
            left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_that_of_the_published_program() {
        // Of Vigna's splitmix64.c with this state.
        let mut random = SplitMix64::new(1_234_567);
        let drawn = [(); 5].map(|()| random.next_u64());
        assert_eq!(
            drawn,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821,
            ]
        );
    }

    #[test]
    fn each_number_below_a_bound_comes_as_often_as_the_others() {
        type Draw = fn(&mut SplitMix64) -> u64;
        let draws: [Draw; 3] = [
            |random| random.below(6),
            |random| random.remainder(6),
            |random| random.between(10, 16) - 10,
        ];
        for draw in draws {
            let mut random = SplitMix64::new(7);
            let mut seen = [0_u32; 6];
            for _ in 0..60_000 {
                seen[usize::try_from(draw(&mut random)).unwrap()] += 1;
            }
            assert!(seen.iter().all(|n| (9_500..10_500).contains(n)), "{seen:?}");
        }
    }

    #[test]
    fn empty_ranges_give_their_start_and_a_bound_of_one_gives_zero() {
        let mut random = SplitMix64::new(0);
        assert_eq!((random.below(0), random.below(1)), (0, 0));
        assert_eq!((random.index(0), random.index(1)), (0, 0));
        assert_eq!((random.between(5, 5), random.between(5, 2)), (5, 5));
        assert_eq!(random.remainder(1), 0);
        assert!((0..1000).all(|_| random.below(u64::MAX) < u64::MAX));
    }

    #[test]
    fn streams_of_one_seed_and_seeds_of_one_stream_differ() {
        let drawn = |seed, stream| SplitMix64::stream(seed, stream).next_u64();
        let mut all: Vec<u64> = (0..50)
            .flat_map(|seed| (0..50).map(move |stream| drawn(seed, stream)))
            .collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2500);
    }

    #[test]
    fn unit_and_exponential_have_their_range_and_their_mean() {
        let mut random = SplitMix64::new(3);
        let (mut units, mut waits) = (0.0, 0.0);
        for _ in 0..100_000 {
            let unit = random.unit();
            assert!((0.0..1.0).contains(&unit));
            units += unit;
            let wait = random.exponential();
            assert!(wait >= 0.0 && wait.is_finite());
            waits += wait;
        }
        assert!((units / 100_000.0 - 0.5).abs() < 0.01, "{units}");
        assert!((waits / 100_000.0 - 1.0).abs() < 0.02, "{waits}");
    }

    #[test]
    fn shuffle_keeps_every_item_and_favours_no_place() {
        let mut random = SplitMix64::new(11);
        let mut first = [0_u32; 5];
        for _ in 0..10_000 {
            let mut items = [0_usize, 1, 2, 3, 4];
            random.shuffle(&mut items);
            first[items[0]] += 1;
            items.sort_unstable();
            assert_eq!(items, [0, 1, 2, 3, 4]);
        }
        assert!(
            first.iter().all(|n| (1_800..2_200).contains(n)),
            "{first:?}"
        );
        random.shuffle::<u8>(&mut []);
    }
}
