// SPDX-License-Identifier: Apache-2.0
//! Random numbers that are the same on every machine: PCG32 and integer arithmetic only. Libraries round
//! logarithms and powers differently, so these are not used. Recipes promise the same events for ever, so the
//! generator stays what it was.

use pagetide_random::SplitMix64;
use rand_core::Rng;
use rand_pcg::Pcg32;

/// A stream of random numbers, determined by a seed and its purpose.
#[derive(Clone, Debug)]
pub(crate) struct RandomStream(Pcg32);

impl RandomStream {
    /// The stream number `stream` of `seed`; streams of one seed are unrelated.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let start = mixed(seed ^ mixed(stream));
        Self(Pcg32::new(start, mixed(start ^ stream)))
    }

    /// A number below `n`, uniform except for a bias of at most `n / 2^32`; 0 if `n` is.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.0.next_u32()) * u64::from(n)) >> 32) as u32
    }

    /// As [`RandomStream::below`], for wide numbers.
    pub(crate) fn below_u64(&mut self, n: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// True once in `n` times; always if `n` is 0 or 1.
    pub(crate) fn once_in(&mut self, n: u32) -> bool {
        n <= 1 || self.below(n) == 0
    }
}

/// A number that is close to no other's, of `x`.
const fn mixed(x: u64) -> u64 {
    SplitMix64::new(x).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_one_seed_and_two_streams_differ() {
        let mut a = RandomStream::new(1, 0);
        let mut b = RandomStream::new(1, 1);
        let rolls = |d: &mut RandomStream| (0..8).map(|_| d.below(1000)).collect::<Vec<_>>();
        assert_ne!(rolls(&mut a), rolls(&mut b));
    }

    #[test]
    fn numbers_below_n_are_even_and_in_range() {
        let mut random = RandomStream::new(7, 7);
        let mut seen = [0_u32; 6];
        for _ in 0..60_000 {
            seen[random.below(6) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (9_500..10_500).contains(n)), "{seen:?}");
        assert_eq!(random.below(0), 0);
        assert_eq!(random.below_u64(1), 0);
    }
}
