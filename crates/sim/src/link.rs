// SPDX-License-Identifier: Apache-2.0
//! The I/O link: a packet may arrive at each slot, and one that finds no room is retried at the next
//! (IV-C).
//!
//! The length of a slot is a fraction of nanoseconds (61.68 at 200 Gb/s and 1542 B); slot `n` begins at
//! `floor(n * length)`, so the rate is exact in the long run although time is whole.

/// Slots of the link.
#[derive(Debug)]
pub(crate) struct Link {
    /// Slot length as `numerator / denominator` ns.
    numerator: u64,
    denominator: u64,
    next_ns: u64,
    /// Part of a nanosecond by which the exact time of the next slot is later, times `denominator`.
    remainder: u64,
}

impl Link {
    /// A link whose first slot is at time 0.
    pub(crate) const fn new(numerator: u64, denominator: u64) -> Self {
        Self {
            numerator,
            denominator,
            next_ns: 0,
            remainder: 0,
        }
    }

    /// Beginning of the next slot.
    #[inline]
    pub(crate) const fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Uses the next slot up.
    #[inline]
    pub(crate) const fn take(&mut self) {
        if self.denominator == 1 {
            self.next_ns += self.numerator;
            return;
        }
        let exact = self.remainder + self.numerator;
        self.next_ns += exact / self.denominator;
        self.remainder = exact % self.denominator;
    }

    /// Skips the slots up to and at `now_ns`, and returns how many.
    #[inline]
    pub(crate) const fn skip_to(&mut self, now_ns: u64) -> u64 {
        let mut skipped = 0;
        while self.next_ns <= now_ns {
            if now_ns - self.next_ns >= self.numerator {
                skipped += self.leap(now_ns);
            } else {
                self.take();
                skipped += 1;
            }
        }
        skipped
    }

    /// Skips all slots but the last few before `now_ns` at once.
    #[inline]
    const fn leap(&mut self, now_ns: u64) -> u64 {
        let slots = (now_ns - self.next_ns) / self.numerator.div_ceil(self.denominator);
        let exact = self.remainder + slots * self.numerator;
        self.next_ns += exact / self.denominator;
        self.remainder = exact % self.denominator;
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_a_fractional_length_keep_the_rate_in_the_long_run() {
        let mut link = Link::new(1542 * 8, 200);
        for _ in 0..200 {
            link.take();
        }
        assert_eq!(link.next_ns(), 12336);
    }

    #[test]
    fn leaping_over_many_slots_ends_where_single_steps_do() {
        for (numerator, denominator) in [(61, 1), (1542 * 8, 200), (64 * 8, 511), (3, 2)] {
            for now_ns in [0, 1, 60, 61, 62, 1_000, 123_456] {
                let mut leaping = Link::new(numerator, denominator);
                let mut stepping = Link::new(numerator, denominator);
                let mut steps = 0;
                while stepping.next_ns() <= now_ns {
                    stepping.take();
                    steps += 1;
                }
                assert_eq!(leaping.skip_to(now_ns), steps);
                assert_eq!(leaping.next_ns(), stepping.next_ns());
                assert_eq!(leaping.remainder, stepping.remainder);
            }
        }
    }

    #[test]
    fn skipping_counts_the_slots_that_go_by() {
        let mut link = Link::new(61, 1);
        assert_eq!(link.skip_to(0), 1);
        assert_eq!(link.skip_to(60), 0);
        assert_eq!(link.skip_to(200), 3);
        assert_eq!(link.next_ns(), 244);
    }
}
