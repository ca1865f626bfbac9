// SPDX-License-Identifier: Apache-2.0
//! Whether an engine with nothing to do polls a little before it sleeps.
//!
//! To poll for less time than a sleep and a wake-up cost is a gain if an event comes, and a loss if
//! not. Whether one comes depends on what the engine waits for: a guest that was just notified of
//! completions answers soon; a disk takes its own time. So each of the two has a score:
//!
//! ```text
//!   something came while polling: +1 (up to 8)     nothing came: -2 (down to 0)
//!   score above 0: poll                            score 0: poll every 16th time, to learn
//! ```

use std::time::{Duration, Instant};

const SCORE_MAX: u8 = 8;
const LOSS: u8 = 2;
/// One in so many idle periods is polled even though polling has not paid off.
const PROBE_EVERY: u8 = 16;

/// What an idle engine waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// I/O is under way.
    Disk,
    /// None is.
    Guest,
}

/// An idle period.
#[derive(Debug, Clone, Copy)]
pub(super) struct Idle {
    waits_for: WaitsFor,
    /// End of polling; `None`: do not poll.
    until: Option<Instant>,
}

impl Idle {
    /// True once it is time to sleep.
    pub fn is_over(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() >= until)
    }
}

#[derive(Debug, Clone, Copy)]
struct Score {
    score: u8,
    until_probe: u8,
}

/// The scores that an engine has learnt.
#[derive(Debug)]
pub(super) struct Patience {
    poll_max: Duration,
    disk: Score,
    guest: Score,
}

impl Patience {
    /// Polls for at most `poll_max` at a time.
    pub fn new(poll_max: Duration) -> Self {
        let score = Score {
            score: LOSS,
            until_probe: PROBE_EVERY,
        };
        Self {
            poll_max,
            disk: score,
            guest: score,
        }
    }

    fn score(&mut self, waits_for: WaitsFor) -> &mut Score {
        match waits_for {
            WaitsFor::Disk => &mut self.disk,
            WaitsFor::Guest => &mut self.guest,
        }
    }

    /// Begins an idle period.
    pub fn begin(&mut self, waits_for: WaitsFor) -> Idle {
        let poll_max = self.poll_max;
        let score = self.score(waits_for);
        let mut polls = score.score > 0;
        if !polls {
            score.until_probe -= 1;
            if score.until_probe == 0 {
                score.until_probe = PROBE_EVERY;
                polls = true;
            }
        }
        let polls = polls && !poll_max.is_zero();
        Idle {
            waits_for,
            until: polls.then(|| Instant::now() + poll_max),
        }
    }

    /// An event came while polling.
    pub fn rewarded(&mut self, idle: Idle) {
        if idle.until.is_some() {
            let score = self.score(idle.waits_for);
            score.score = (score.score + 1).min(SCORE_MAX);
        }
    }

    /// No event came.
    pub fn disappointed(&mut self, idle: Idle) {
        if idle.until.is_some() {
            let score = self.score(idle.waits_for);
            score.score = score.score.saturating_sub(LOSS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polls(idle: Idle) -> bool {
        idle.until.is_some()
    }

    #[test]
    fn polling_that_never_pays_is_tried_once_in_sixteen_times() {
        let mut patience = Patience::new(Duration::from_micros(50));
        let mut polled = 0;
        for _ in 0..160 {
            let idle = patience.begin(WaitsFor::Disk);
            polled += usize::from(polls(idle));
            patience.disappointed(idle);
        }
        assert!((10..=12).contains(&polled), "{polled}");
    }

    #[test]
    fn polling_that_pays_goes_on_through_a_disappointment() {
        let mut patience = Patience::new(Duration::from_micros(50));
        for _ in 0..20 {
            let idle = patience.begin(WaitsFor::Guest);
            patience.rewarded(idle);
        }
        let idle = patience.begin(WaitsFor::Guest);
        patience.disappointed(idle);
        assert!(polls(patience.begin(WaitsFor::Guest)));
    }

    #[test]
    fn waits_for_the_disk_and_for_the_guest_are_learnt_apart() {
        let mut patience = Patience::new(Duration::from_micros(50));
        for _ in 0..8 {
            let idle = patience.begin(WaitsFor::Disk);
            patience.disappointed(idle);
            let idle = patience.begin(WaitsFor::Guest);
            patience.rewarded(idle);
        }
        assert!(polls(patience.begin(WaitsFor::Guest)));
        assert!(!polls(patience.begin(WaitsFor::Disk)));
    }

    #[test]
    fn engine_that_may_not_poll_never_does() {
        let mut patience = Patience::new(Duration::ZERO);
        assert!((0..40).all(|_| !polls(patience.begin(WaitsFor::Guest))));
    }
}
