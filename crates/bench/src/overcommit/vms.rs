// SPDX-License-Identifier: Apache-2.0
//! What the bench wants of VMs that serve requests, be they stand-ins or real guests.

use super::guest::Served;
use crate::harness::{figures::to_f64, latencies::Latencies};
use std::time::{Duration, Instant};

/// Between two looks at what happens beside a measurement.
const LOOK: Duration = Duration::from_millis(50);

/// What is done again and again beside a measurement.
pub(super) type Beside<'a> = dyn FnMut() -> Result<(), String> + 'a;

/// Running VMs that serve requests without a pause; ended on drop.
pub(super) trait Vms {
    /// Their process ids.
    fn pids(&self) -> Vec<u32>;

    /// The requests that each serves in `time` from now on.
    fn measure(&mut self, time: Duration, beside: &mut Beside<'_>) -> Result<Vec<Served>, String>;

    /// Makes all of their RAM present: a detach does not bring pages of zeros back.
    fn touch_all(&mut self) -> Result<(), String>;

    /// Compares all that they have stored.
    fn verify_all(&mut self) -> Result<(), String>;
}

/// Calls `beside` for `time`.
pub(super) fn while_measuring(time: Duration, beside: &mut Beside<'_>) -> Result<(), String> {
    let begun = Instant::now();
    while begun.elapsed() < time {
        beside()?;
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// How fast one VM serves.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Speed {
    /// Requests a second.
    pub per_s: f64,
    /// 99 % of the requests take no longer than this many microseconds.
    pub p99_us: f64,
}

impl Speed {
    /// Of one VM.
    pub(super) fn of(served: &Served) -> Self {
        let times: Latencies = served.ns.iter().copied().collect();
        Self {
            per_s: to_f64(served.requests) * 1e9 / to_f64(served.wall_ns.max(1)),
            p99_us: times.us(990),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_by_the_length_of_the_interval() {
        let speed = Speed::of(&Served {
            requests: 30,
            wall_ns: 2_000_000_000,
            ns: vec![1000, 9000, 2000],
        });
        assert!((speed.per_s - 15.0).abs() < 1e-9 && (speed.p99_us - 9.0).abs() < 1e-9);
    }

    #[test]
    fn failure_beside_a_measurement_ends_it() {
        let mut calls = 0;
        let failed = while_measuring(Duration::from_secs(60), &mut || {
            calls += 1;
            Err("no".to_owned())
        });
        assert_eq!((failed, calls), (Err("no".to_owned()), 1));
    }
}
