// SPDX-License-Identifier: Apache-2.0
//! How much memory a guest uses at what time.

use super::super::{Bytes, units::millis};
use super::recipe::DAY;
use pagetide_random::SplitMix64;
use std::time::Duration;

/// A demand for memory over time.
#[derive(Clone, Debug)]
pub(super) enum Demand {
    /// It follows the day, with bursts and idle hours.
    Daily(Daily),
    /// About the same all the time.
    Steady { around: Bytes, random: SplitMix64 },
}

/// See [`super`].
#[derive(Clone, Debug)]
pub(super) struct Daily {
    /// Working set at noon and at midnight.
    pub by_day: Bytes,
    pub by_night: Bytes,
    pub state: State,
    /// Its own, so that what a guest does depends on nothing else.
    pub random: SplitMix64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Usual,
    Burst { until: Duration },
    Idle { until: Duration },
}

impl Demand {
    /// The working set from `now` on, of a guest of `ram`. `step` is the time to the next call.
    pub fn at(&mut self, now: Duration, step: Duration, ram: Bytes) -> Bytes {
        match self {
            Self::Daily(daily) => daily.at(now, step, ram),
            Self::Steady { around, random } => {
                // A sixty-fourth more or less.
                around.part(63 * 512 + random.below(1024), 64 * 512)
            }
        }
    }
}

impl Daily {
    fn at(&mut self, now: Duration, step: Duration, ram: Bytes) -> Bytes {
        let by_chance = |random: &mut SplitMix64, once_in: Duration| {
            random.below(millis(once_in)) < millis(step)
        };
        let random = &mut self.random;
        self.state = match self.state {
            State::Burst { until } | State::Idle { until } if now < until => self.state,
            _ if by_chance(random, DAY / 4) => State::Burst {
                until: now + Duration::from_secs(60 + random.below(900)),
            },
            _ if by_chance(random, DAY * 2) => State::Idle {
                until: now + Duration::from_secs(3600 + random.below(36_000)),
            },
            _ => State::Usual,
        };
        // From midnight to noon and back, in a straight line.
        let of_day = now.as_secs() % DAY.as_secs();
        let noon = DAY.as_secs() / 2;
        let usual = self.by_day.part(noon - of_day.abs_diff(noon), noon)
            + self.by_night.part(of_day.abs_diff(noon), noon);
        match self.state {
            State::Usual => usual,
            State::Burst { .. } => usual + usual,
            State::Idle { .. } => ram.part(1, 50),
        }
    }
}
