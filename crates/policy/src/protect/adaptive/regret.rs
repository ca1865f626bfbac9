// SPDX-License-Identifier: Apache-2.0
//! [`Regret`]: what an eviction costs, so that it is known what a bring-back must save.
//!
//! A section that is brought back takes the place of another, which the evictor takes in its stead. So a
//! bring-back pays only if its section is touched more surely than one that was just evicted would have
//! been: and for those it can be seen. Each evicted section, or one of many, is watched for as long as the
//! end of a bring-back is waited for, an hour. If the device touches it in that time, the eviction is
//! *regretted*, whether the section was away by then or not.
//!
//! ```text
//!   memory that is much too small, touched at random: every other eviction is regretted. What is brought
//!     back must be touched in more than half of all cases; it is not, and nothing is brought back
//!   memory of which much is cold: nearly no eviction is regretted. A bring-back costs next to nothing
//! ```
//! An eviction counts at once and the regret when it comes, so that the first hour is not lost; until then the
//! share is too low, and never too high.

use super::pending::{Code, Pending};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// A section that is touched so long after its eviction is another matter.
pub(super) const WATCHED_TIME: Duration = Duration::from_secs(3_600);
/// Most evictions that are watched at a time. Those beyond are as good as the ones that are.
const WATCHED_MAX: usize = 1 << 10;
/// How much of what was learnt is left each time it is weighed.
const KEPT: f64 = 0.97;
/// Evictions that the belief from before counts for: that none is regretted.
const BELIEF: f64 = 2.0;
/// A bring-back must be touched by so much more surely, since it costs the host work too.
const MARGIN: f64 = 1.25;
const MARGIN_LEAST: f64 = 0.05;

/// The one reason to wait.
#[derive(Debug)]
struct Watched;

impl Code for Watched {
    fn code(&self) -> u32 {
        1
    }

    fn of(code: u32) -> Option<Self> {
        (code == 1).then_some(Self)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Regret {
    /// Evicted sections; their end is the touch.
    watched: Pending<Watched>,
    regretted: f64,
    evictions: f64,
}

impl Regret {
    pub(super) fn evicted(&mut self, section: SectionNo, now: Duration) {
        if self.watched.len() < WATCHED_MAX && !self.watched.contains(section) {
            self.watched.begin(section, now, &Watched);
            self.evictions += 1.0;
        }
    }

    pub(super) fn touched(&mut self, section: SectionNo) {
        if self.watched.end(section).is_some() {
            self.regretted += 1.0;
        }
    }

    /// It is no more, and will not be touched.
    pub(super) fn gone(&mut self, section: SectionNo) {
        self.watched.end(section);
    }

    /// Does not watch any more what was evicted an hour ago.
    pub(super) fn passed(&mut self, now: Duration) {
        while let Some((age, _)) = self.watched.oldest(now)
            && age >= WATCHED_TIME
        {
            self.watched.take_oldest();
        }
    }

    /// Forgets a little.
    pub(super) fn fade(&mut self) {
        self.regretted *= KEPT;
        self.evictions *= KEPT;
    }

    /// Share of the evictions that are regretted.
    pub(super) fn share(&self) -> f64 {
        self.regretted / (self.evictions + BELIEF)
    }

    /// A bring-back pays if its section is touched, before it is evicted again, with more than this
    /// probability.
    pub(super) fn least(&self) -> f64 {
        self.share() * MARGIN + MARGIN_LEAST
    }

    /// True if a place that another section must leave is better used for what is touched so often in a second.
    pub(super) fn is_paid_by(&self, touches_per_s: f64) -> bool {
        touches_per_s * WATCHED_TIME.as_secs_f64() >= self.share() * MARGIN
    }

    pub(super) fn bytes(&self) -> u64 {
        self.watched.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_that_of_evictions_whose_section_was_touched_in_time() {
        let mut regret = Regret::default();
        for number in 0..10_000 {
            // One in ten seconds: fewer than can be watched.
            let now = Duration::from_secs(10 * number);
            regret.evicted(SectionNo(number), now);
            // Every fourth is touched in time, the others too late.
            if number % 4 == 0 {
                regret.touched(SectionNo(number));
            }
            regret.passed(now);
            if number >= 361 {
                regret.touched(SectionNo(number - 361));
            }
        }
        assert!((regret.share() - 0.25).abs() < 0.01, "{}", regret.share());
        assert!(regret.watched.len() <= 361);
        regret.gone(SectionNo(9_999));
        regret.passed(Duration::from_secs(999_999));
        assert_eq!(regret.watched.len(), 0);
    }

    #[test]
    fn what_is_watched_is_bounded() {
        let mut regret = Regret::default();
        for number in 0..100_000 {
            regret.evicted(SectionNo(number), Duration::ZERO);
        }
        assert_eq!(regret.watched.len(), WATCHED_MAX);
        assert!(regret.bytes() < 24 << 10, "{}", regret.bytes());
    }
}
