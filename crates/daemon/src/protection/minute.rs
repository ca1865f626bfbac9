// SPDX-License-Identifier: Apache-2.0
//! [`Minute`]: the number of faults in the last sixty seconds.

use std::collections::VecDeque;

/// Seconds over which faults are counted.
const SECONDS: usize = 60;

/// Faults of the last minute, second by second.
#[derive(Default)]
pub(super) struct Minute {
    before: u64,
    seconds: VecDeque<u64>,
}

impl Minute {
    /// A minute that starts now, after `before` faults since the start.
    pub(super) fn beginning_at(before: u64) -> Self {
        Self {
            before,
            ..Self::default()
        }
    }

    /// A second has passed; `faults` is their number since the start.
    pub(super) fn second_ends(&mut self, faults: u64) {
        self.seconds.push_back(faults.saturating_sub(self.before));
        self.before = faults;
        if self.seconds.len() > SECONDS {
            self.seconds.pop_front();
        }
    }

    /// Number of faults in the minute.
    pub(super) fn total(&self) -> u64 {
        self.seconds.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minute_holds_the_faults_of_sixty_seconds() {
        let mut minute = Minute::default();
        for second in 1..=100 {
            minute.second_ends(second * 2);
        }
        assert_eq!(minute.total(), 120);
    }
}
