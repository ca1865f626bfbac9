// SPDX-License-Identifier: Apache-2.0
//! A growing number over time, in a bounded number of points.

use std::time::Duration;

/// Points of a curve, at most: a day by the minute is 1,440.
pub const CURVE_POINTS_MAX: usize = 2048;

/// Step that a curve begins with.
const FIRST_STEP: Duration = Duration::from_secs(60);

/// The count at the end of each step, the first step from 0.
///
/// When the points run out, every other one is dropped and the step doubles: the rest is still exact.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrowthCurve {
    step: Duration,
    points: Vec<u64>,
    total: u64,
}

impl Default for GrowthCurve {
    fn default() -> Self {
        Self {
            step: FIRST_STEP,
            points: Vec::new(),
            total: 0,
        }
    }
}

impl GrowthCurve {
    /// Adds one at `at`, which is not before the last growth.
    pub fn grow(&mut self, at: Duration) {
        self.until(at);
        self.total += 1;
        if let Some(last) = self.points.last_mut() {
            *last = self.total;
        }
    }

    /// Extends the curve to `at` without growth.
    pub fn until(&mut self, at: Duration) {
        let mut steps = self.steps_to(at);
        while steps > CURVE_POINTS_MAX as u128 {
            self.points = halved(&self.points);
            self.step *= 2;
            steps = self.steps_to(at);
        }
        let steps = usize::try_from(steps).unwrap_or(CURVE_POINTS_MAX);
        if steps > self.points.len() {
            self.points.resize(steps, self.total);
        }
    }

    /// Steps up to and including the one that contains `at`.
    fn steps_to(&self, at: Duration) -> u128 {
        at.as_nanos() / self.step.as_nanos() + 1
    }

    /// Time from one point to the next.
    #[must_use]
    pub const fn step(&self) -> Duration {
        self.step
    }

    /// The count at the end of each step.
    #[must_use]
    pub fn points(&self) -> &[u64] {
        &self.points
    }

    /// The current count.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }
}

/// The count at the end of every two steps; of an unpaired last one at its own end.
fn halved(points: &[u64]) -> Vec<u64> {
    points
        .chunks(2)
        .filter_map(|pair| pair.last().copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curve_tells_the_total_at_the_end_of_each_step() {
        let mut curve = GrowthCurve::default();
        for seconds in [0, 59, 60, 250] {
            curve.grow(Duration::from_secs(seconds));
        }
        curve.until(Duration::from_secs(300));
        assert_eq!(curve.points(), [2, 3, 3, 3, 4, 4]);
        assert_eq!(curve.step(), Duration::from_secs(60));
    }

    #[test]
    fn curve_that_is_full_is_as_one_with_longer_steps() {
        let grown = [3, 70, 4000, 100_000, 123_456, 200_000, 245_759, 245_760];
        let mut curve = GrowthCurve::default();
        for seconds in grown {
            curve.grow(Duration::from_secs(seconds));
        }
        assert_eq!(curve.step(), Duration::from_secs(240));
        for (point, total) in curve.points().iter().enumerate() {
            let end = (point as u64 + 1) * 240;
            let naive = grown.iter().filter(|at| **at < end).count() as u64;
            assert_eq!(*total, naive, "point {point}");
        }
    }

    #[test]
    fn curve_of_the_longest_time_there_is_stays_bounded() {
        let mut curve = GrowthCurve::default();
        curve.grow(Duration::ZERO);
        curve.grow(Duration::from_nanos(u64::MAX));
        assert!(curve.points().len() <= CURVE_POINTS_MAX);
        assert_eq!(curve.points().last(), Some(&2));
    }
}
