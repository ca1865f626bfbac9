// SPDX-License-Identifier: Apache-2.0
//! [`Others`]: CPU time used by other processes during the measurement.
//!
//! Their CPU time is lost now to one side and now to the other, so ratios scatter. A reader who sees widely
//! scattered ratios should know whether the machine was quiet.

use crate::harness::figures::to_f64;
use std::time::{Duration, Instant};

/// Ticks of `/proc/stat` in a second, on all architectures that Linux has there.
const TICKS_A_SECOND: u64 = 100;

/// CPU time of all, and of the bench, since it began.
pub(super) struct Others {
    began: Instant,
    busy: Duration,
    ours_ns: u64,
}

impl Others {
    /// Starts now; the bench's own processes have used `ours_ns` so far.
    pub(super) fn begin(ours_ns: u64) -> Option<Self> {
        Some(Self {
            began: Instant::now(),
            busy: busy()?,
            ours_ns,
        })
    }

    /// CPUs that others kept busy, on average; the bench's own processes have used `ours_ns` by now.
    pub(super) fn cpus(&self, ours_ns: u64) -> Option<f64> {
        let busy = busy()?.saturating_sub(self.busy);
        let ours = Duration::from_nanos(ours_ns.saturating_sub(self.ours_ns));
        let others = busy.saturating_sub(ours);
        Some(others.as_secs_f64() / self.began.elapsed().as_secs_f64())
    }
}

/// Time that CPUs were busy, since the machine started.
fn busy() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/stat").ok();
    busy_of(&stat?)
}

/// user, nice, system, idle, iowait, irq, softirq: all but the two in the middle.
fn busy_of(stat: &str) -> Option<Duration> {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks = all.split_whitespace().map(str::parse::<u64>);
    let ticks: Result<Vec<u64>, _> = ticks.take(7).collect();
    let Ok(&[user, nice, system, _, _, irq, softirq]) = ticks.as_deref() else {
        return None;
    };
    let ticks = user + nice + system + irq + softirq;
    Some(Duration::from_secs_f64(
        to_f64(ticks) / to_f64(TICKS_A_SECOND),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_that_of_all_cpus_but_idle_and_waiting() {
        let stat = "cpu  100 20 30 9999 7777 4 6 0 0 0\ncpu0 1 2 3 4 5 6 7 0 0 0\n";
        assert_eq!(busy_of(stat), Some(Duration::from_millis(1600)));
        assert_eq!(busy_of("cpu 1 2\n"), None);
        assert_eq!(busy_of(""), None);
    }
}
