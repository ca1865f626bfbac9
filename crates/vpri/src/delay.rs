// SPDX-License-Identifier: Apache-2.0
//! Deliberate delay, to try what a slower look-up would cost (VPRI 7.1).
//!
//! The paper adds 100 ns to each look-up of its DPU and sees no difference. So
//! short a time cannot be measured with a clock, whose reading alone takes a
//! quarter of it. The delay is work that takes as long: multiplications that
//! each need the result of the last, measured once beforehand.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Multiplications in one calibration run: about a millisecond.
const TRY_STEPS: u32 = 1 << 20;
/// Calibration runs, of which the shortest counts: the others were interrupted.
const TRIES: u32 = 16;

/// Work that takes a fixed time on the machine where it was calibrated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delay {
    steps: u32,
}

impl Delay {
    /// A delay of about `time`, at most a few milliseconds. This call itself computes for some
    /// milliseconds.
    #[must_use]
    pub fn calibrated(time: Duration) -> Self {
        let shortest = (0..TRIES).map(|_| {
            let began = Instant::now();
            Self { steps: TRY_STEPS }.pass();
            began.elapsed()
        });
        let shortest_ns = shortest.min().unwrap_or_default().as_nanos().max(1);
        let steps = time.as_nanos() * u128::from(TRY_STEPS) / shortest_ns;
        Self {
            steps: u32::try_from(steps).unwrap_or(u32::MAX),
        }
    }

    /// Spends the delay.
    #[inline]
    pub fn pass(self) {
        let mut state = black_box(1_u64);
        for _ in 0..self.steps {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
        }
        black_box(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_delay_is_more_work() {
        let short = Delay::calibrated(Duration::from_nanos(100));
        let long = Delay::calibrated(Duration::from_micros(100));
        assert!(
            short.steps > 0 && long.steps > 50 * short.steps,
            "{short:?} {long:?}"
        );
        assert_eq!(Delay::calibrated(Duration::ZERO).steps, 0);
    }
}
