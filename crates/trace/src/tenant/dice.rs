// SPDX-License-Identifier: Apache-2.0
//! Random numbers that are the same on every machine: PCG32 and integer arithmetic only. Libraries round
//! logarithms and powers differently, so these are not used.

use rand_core::Rng;
use rand_pcg::Pcg32;

/// A stream of random numbers, determined by a seed and its purpose.
#[derive(Clone, Debug)]
pub(crate) struct Dice(Pcg32);

impl Dice {
    /// The stream number `stream` of `seed`; streams of one seed are unrelated.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let start = mixed(seed ^ mixed(stream));
        Self(Pcg32::new(start, mixed(start ^ stream)))
    }

    /// A number below `n`, uniform except for a bias of at most `n / 2^32`; 0 if `n` is.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.0.next_u32()) * u64::from(n)) >> 32) as u32
    }

    /// As [`Dice::below`], for wide numbers.
    pub(crate) fn below_u64(&mut self, n: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// True once in `n` times; always if `n` is 0 or 1.
    pub(crate) fn once_in(&mut self, n: u32) -> bool {
        n <= 1 || self.below(n) == 0
    }
}

/// The finaliser of SplitMix64: every bit of the result depends on every bit of `x`.
fn mixed(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_of_one_seed_and_two_streams_differ() {
        let mut a = Dice::new(1, 0);
        let mut b = Dice::new(1, 1);
        let rolls = |d: &mut Dice| (0..8).map(|_| d.below(1000)).collect::<Vec<_>>();
        assert_ne!(rolls(&mut a), rolls(&mut b));
    }

    #[test]
    fn numbers_below_n_are_even_and_in_range() {
        let mut dice = Dice::new(7, 7);
        let mut seen = [0_u32; 6];
        for _ in 0..60_000 {
            seen[dice.below(6) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (9_500..10_500).contains(n)), "{seen:?}");
        assert_eq!(dice.below(0), 0);
        assert_eq!(dice.below_u64(1), 0);
    }
}
