// SPDX-License-Identifier: Apache-2.0
//! [`Pauses`]: between looks for something that another process is about to give up.
//!
//! Mostly it does so within a millisecond, and guests may wait for it; if it does not, looking often is of no use. So
//! the first pause is short, and each one is twice as long as the one before, up to a limit.

use std::time::Duration;

/// The first one.
const FIRST: Duration = Duration::from_micros(250);

/// See the module.
#[derive(Debug)]
pub struct Pauses {
    next: Duration,
    longest: Duration,
}

impl Pauses {
    /// None of them is longer than this.
    #[must_use]
    pub fn up_to(longest: Duration) -> Self {
        Self {
            next: FIRST.min(longest),
            longest,
        }
    }

    /// Makes the next one.
    pub fn pause(&mut self) {
        std::thread::sleep(self.take());
    }

    fn take(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.longest);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_begin_short_and_grow_to_their_limit() {
        let mut pauses = Pauses::up_to(Duration::from_millis(1));
        let us: Vec<u128> = (0..5).map(|_| pauses.take().as_micros()).collect();
        assert_eq!(us, [250, 500, 1000, 1000, 1000]);
        let mut short = Pauses::up_to(Duration::from_micros(10));
        assert_eq!(short.take(), Duration::from_micros(10));
    }
}
