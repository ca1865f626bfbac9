// SPDX-License-Identifier: Apache-2.0
//! Random numbers of loads, the same on any machine.

use pagetide_random::SplitMix64;

/// What loads are drawn from.
#[derive(Clone, Debug)]
pub(super) struct LoadRandom(SplitMix64);

impl LoadRandom {
    /// A separate stream for each pair of `seed` and `stream`.
    pub(super) const fn new(seed: u64, stream: u64) -> Self {
        Self(SplitMix64::stream(seed, stream))
    }

    /// 64 bits.
    pub(super) const fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Below `end`; 0 if `end` is 0.
    pub(super) const fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    /// From `start` to below `end`.
    pub(super) const fn between(&mut self, start: u64, end: u64) -> u64 {
        self.0.between(start, end)
    }

    /// From 0 to below 1, in steps of 2^-32: finer ones would change the guests whose figures are published.
    pub(super) fn unit(&mut self) -> f64 {
        let high = u32::try_from(self.0.next_u64() >> 32).unwrap_or(0);
        f64::from(high) / 4_294_967_296.0
    }

    /// With mean 1.
    pub(super) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Normal, with mean 0 and deviation 1.
    pub(super) fn normal(&mut self) -> f64 {
        // Box and Muller; an exponential number is half the square of the distance.
        let turn = std::f64::consts::TAU * self.unit();
        (2.0 * self.exponential()).sqrt() * turn.cos()
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
