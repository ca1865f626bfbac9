// SPDX-License-Identifier: Apache-2.0
//! Random numbers that are the same on any machine.

/// `SplitMix64` (Steele, Lea and Flood, 2014): small, seeded, good enough for loads.
#[derive(Clone, Debug)]
pub(super) struct Chance(u64);

impl Chance {
    /// A separate stream for each pair of `seed` and `stream`.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut chance = Self(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17));
        chance.next();
        chance
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `end`; 0 if `end` is 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(end);
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// From `start` to below `end`.
    pub(super) fn between(&mut self, start: u64, end: u64) -> u64 {
        start + self.below(end.saturating_sub(start))
    }

    /// From 0 to below 1, in steps of 2^-32.
    pub(super) fn unit(&mut self) -> f64 {
        let high = u32::try_from(self.next() >> 32).unwrap_or(0);
        f64::from(high) / 4_294_967_296.0
    }

    /// With mean 1.
    pub(super) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// `rate` on average: its whole part, plus one with the probability of the rest.
    pub(super) fn count(&mut self, rate: f64) -> u64 {
        whole(rate + self.unit())
    }
}

/// Whole part of a small, non-negative number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast from a float saturates, and the part behind the point is what is to go"
)]
pub(super) fn whole(number: f64) -> u64 {
    number as u64
}

/// A count of sections, chunks or seconds as a floating-point number: exact up to 2^53.
#[expect(
    clippy::cast_precision_loss,
    reason = "counts of one VM are far below 2^53"
)]
pub(super) fn number(count: u64) -> f64 {
    count as f64
}
