// SPDX-License-Identifier: Apache-2.0
//! How long QEMU's threads were runnable but had no CPU of this machine.
//!
//! A gap of the guest may be caused by us or by the machine. The kernel counts each thread's wait on a run
//! queue (`schedstat`); samples of it are reported beside the longest gap, and never subtracted.

use std::collections::VecDeque;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Board;
use super::report::longest_gap_ms;
use crate::guest::SoakReport;

const PERIOD: Duration = Duration::from_millis(250);
/// Samples kept: a minute of them.
const SAMPLES: usize = 240;
/// A gap is reported at most this long after its end.
const SLACK: Duration = Duration::from_millis(2_500);

/// Samples of the threads' waits.
#[derive(Debug, Default)]
pub struct Starvation {
    samples: Mutex<VecDeque<(Instant, u64)>>,
    gap_ms: AtomicU64,
    in_gap_ms: AtomicU64,
    longest_ms: AtomicU64,
}

impl Starvation {
    /// Samples the QEMU process `pid` until the soak is over.
    pub fn sample(&self, pid: u32, board: &Board) {
        while !board.is_over() {
            self.add(Instant::now(), waited_ms(pid));
            board.rest(PERIOD);
        }
    }

    /// If a report has a longer gap than any before, keeps the wait around that time.
    pub fn look(&self, report: Option<SoakReport>) {
        let Some(report) = report else { return };
        let gap_ms = longest_gap_ms(&report.progress);
        if gap_ms <= self.gap_ms.load(Relaxed) {
            return;
        }
        self.gap_ms.store(gap_ms, Relaxed);
        let since = report.at.checked_sub(Duration::from_millis(gap_ms) + SLACK);
        let waited = since.map_or(0, |since| self.waited_since(since));
        self.in_gap_ms.store(waited.min(gap_ms), Relaxed);
    }

    /// Longest wait around the longest gap.
    pub fn in_longest_gap_ms(&self) -> u64 {
        self.in_gap_ms.load(Relaxed)
    }

    /// Longest wait within a second.
    pub fn longest_ms(&self) -> u64 {
        self.longest_ms.load(Relaxed)
    }

    fn add(&self, at: Instant, waited_ms: u64) {
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.push_back((at, waited_ms));
        if samples.len() > SAMPLES {
            samples.pop_front();
        }
        let second = at.checked_sub(Duration::from_secs(1));
        let earlier = samples.iter().rev().find(|(then, _)| Some(*then) <= second);
        if let Some((_, earlier_ms)) = earlier {
            let waited = waited_ms.saturating_sub(*earlier_ms);
            self.longest_ms.fetch_max(waited, Relaxed);
        }
    }

    fn waited_since(&self, since: Instant) -> u64 {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let first = samples.iter().find(|(at, _)| *at >= since);
        match (first, samples.back()) {
            (Some((_, first_ms)), Some((_, last_ms))) => last_ms.saturating_sub(*first_ms),
            _ => 0,
        }
    }
}

/// Wait since its start of the thread that waited most.
fn waited_ms(pid: u32) -> u64 {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return 0;
    };
    let waited = threads.flatten().filter_map(|entry| {
        // A thread may end between the list and here.
        let text = fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
        waited_in(&text)
    });
    waited.max().unwrap_or(0)
}

/// The second of `schedstat`'s three numbers, which is in nanoseconds.
fn waited_in(schedstat: &str) -> Option<u64> {
    match schedstat.split_whitespace().nth(1)?.parse::<u64>() {
        Ok(ns) => Some(ns / 1_000_000),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_is_the_second_number_in_milliseconds() {
        assert_eq!(waited_in("123456789 5000000 42"), Some(5));
        assert_eq!(waited_in(""), None);
    }

    #[test]
    fn longest_wait_is_of_one_second() {
        let starvation = Starvation::default();
        let start = Instant::now();
        for (ms, waited) in [(0, 0), (500, 10), (1_000, 300), (1_600, 310), (3_000, 320)] {
            starvation.add(start + Duration::from_millis(ms), waited);
        }
        // From 0 to 1,000 ms, and from 500 to 1,600 ms.
        assert_eq!(starvation.longest_ms(), 300);
        let since = start + Duration::from_millis(400);
        assert_eq!(starvation.waited_since(since), 310);
    }
}
