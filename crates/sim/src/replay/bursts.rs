// SPDX-License-Identifier: Apache-2.0
//! Bursts of I/O page faults of one VM: "more than 5 IOPF within 1 second" (VPRI 3.4).
//!
//! ```text
//!   faults   | |      ||||||||||||      |       the window of one second moves with each fault;
//!                     └1 s┘             time    a burst begins with the sixth fault in it, and
//!                          ▲ burst              has ended when a fault finds five or fewer
//! ```

use serde::Serialize;
use std::{collections::VecDeque, time::Duration};

/// The window.
const WINDOW: Duration = Duration::from_secs(1);

/// Bursts of one VM, over all its devices.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Bursts {
    /// How many began.
    pub bursts: u64,
    /// Most faults in any second.
    pub most_in_a_second: u64,
}

impl Bursts {
    /// Most faults in a second that are no burst.
    pub const NO_BURST_MAX: u64 = 5;

    /// Those that are not in `before`, an earlier state of this account. The most in a second stays that of both.
    #[must_use]
    pub const fn since(self, before: Self) -> Self {
        Self {
            bursts: self.bursts - before.bursts,
            ..self
        }
    }
}

/// Faults of the last second.
#[derive(Clone, Default, Debug)]
pub(super) struct FaultWindow {
    recent: VecDeque<Duration>,
    is_burst: bool,
}

impl FaultWindow {
    /// A fault at `at`, not before the previous one.
    pub(super) fn fault(&mut self, at: Duration, bursts: &mut Bursts) {
        while let Some(first) = self.recent.front() {
            if at.saturating_sub(*first) < WINDOW {
                break;
            }
            self.recent.pop_front();
        }
        self.recent.push_back(at);
        let count = self.recent.len() as u64;
        bursts.most_in_a_second = bursts.most_in_a_second.max(count);
        let is_burst = count > Bursts::NO_BURST_MAX;
        bursts.bursts += u64::from(is_burst && !self.is_burst);
        self.is_burst = is_burst;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bursts of faults at these times, in milliseconds.
    fn of(times_ms: impl IntoIterator<Item = u64>) -> Bursts {
        let (mut window, mut bursts) = (FaultWindow::default(), Bursts::default());
        for at_ms in times_ms {
            window.fault(Duration::from_millis(at_ms), &mut bursts);
        }
        bursts
    }

    #[test]
    fn burst_is_six_faults_in_less_than_a_second() {
        assert_eq!(of((0..5).map(|n| n * 10)).bursts, 0);
        assert_eq!(of((0..6).map(|n| n * 10)).bursts, 1);
        // The sixth comes a second after the first.
        assert_eq!(of((0..6).map(|n| n * 200)).bursts, 0);
        assert_eq!(of((0..6).map(|n| n * 199)).bursts, 1);
    }

    #[test]
    fn burst_that_goes_on_counts_once_and_one_after_a_rest_again() {
        let long = of((0..100).map(|n| n * 50));
        assert_eq!((long.bursts, long.most_in_a_second), (1, 20));
        let two = of((0..6).chain(5_000..5_006));
        assert_eq!((two.bursts, two.most_in_a_second), (2, 6));
        assert_eq!(two.since(of(0..6)).bursts, 1);
    }
}
