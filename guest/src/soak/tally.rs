// SPDX-License-Identifier: Apache-2.0
//! The counters of a soak's loads.
//!
//! Counters are relaxed: each is read on its own, and the last report is made after all loads were joined.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::wire::{Phase, SoakProgress};

/// Further findings are counted but not printed.
const LINES_MAX: u64 = 60;

/// Counters of all loads.
#[derive(Debug, Default)]
pub struct Tally {
    wrong_bytes: AtomicU64,
    io_errors: AtomicU64,
    lines: AtomicU64,
    disk: Pulse,
    memory: Pulse,
    beats: AtomicU64,
    /// Bytes that fio wrote and read.
    pub fio_bytes: AtomicU64,
    /// Values written and read.
    pub redis_operations: AtomicU64,
    /// Times redis was killed and had kept everything.
    pub redis_restarts: AtomicU64,
    /// Trees that were made, verified and deleted.
    pub trees: AtomicU64,
    /// Operations of stress-ng.
    pub stress_ng_bogo_ops: AtomicU64,
}

/// The state of one heartbeat.
#[derive(Debug, Default)]
struct Pulse {
    longest_gap_ms: AtomicU64,
    /// Its last beat; `None` before the first and after the stop.
    last: Mutex<Option<Instant>>,
}

impl Pulse {
    /// The longest gap so far, including the current one.
    fn longest_gap_ms(&self) -> u64 {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let open = last.map_or(0, |last| millis(last.elapsed()));
        self.longest_gap_ms.load(Relaxed).max(open)
    }

    fn set_last(&self, last: Option<Instant>) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Which heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heart {
    /// Writes to the disk.
    Disk,
    /// Touches memory.
    Memory,
}

impl Tally {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Relaxed);
    }

    /// Counts wrong content of this many bytes.
    pub fn wrong(&self, bytes: u64, what: &str) {
        self.wrong_bytes.fetch_add(bytes.max(1), Relaxed);
        self.say(&format!("WRONG CONTENT, {bytes} bytes: {what}"));
    }

    /// Counts an operation that failed without a permitted reason.
    pub fn failed(&self, what: &str) {
        self.io_errors.fetch_add(1, Relaxed);
        self.say(&format!("FAILED: {what}"));
    }

    /// Counts a beat, `gap` after the last one.
    pub fn beat(&self, heart: Heart, gap: Duration) {
        let ms = millis(gap);
        let pulse = self.pulse(heart);
        pulse.set_last(Some(Instant::now()));
        let before = pulse.longest_gap_ms.fetch_max(ms, Relaxed);
        self.beats.fetch_add(1, Relaxed);
        if ms > before.max(1_000) {
            eprintln!("guest-work: longest gap of the {heart:?} heartbeat so far: {ms} ms");
        }
    }

    /// Stops a heartbeat: the time from now on is no gap.
    pub fn rest(&self, heart: Heart) {
        self.pulse(heart).set_last(None);
    }

    fn pulse(&self, heart: Heart) -> &Pulse {
        match heart {
            Heart::Disk => &self.disk,
            Heart::Memory => &self.memory,
        }
    }

    /// Whether each load has made progress.
    #[must_use]
    pub fn all_loads_began(&self) -> bool {
        [&self.beats, &self.redis_operations, &self.trees]
            .iter()
            .all(|counter| counter.load(Relaxed) > 0)
    }

    /// All counters of the tally.
    #[must_use]
    pub fn progress(&self, phase: Phase) -> SoakProgress {
        SoakProgress {
            phase,
            wrong_bytes: self.wrong_bytes.load(Relaxed),
            io_errors: self.io_errors.load(Relaxed),
            longest_disk_gap_ms: self.disk.longest_gap_ms(),
            longest_memory_gap_ms: self.memory.longest_gap_ms(),
            beats: self.beats.load(Relaxed),
            fio_bytes: self.fio_bytes.load(Relaxed),
            redis_operations: self.redis_operations.load(Relaxed),
            redis_restarts: self.redis_restarts.load(Relaxed),
            trees: self.trees.load(Relaxed),
            stress_ng_bogo_ops: self.stress_ng_bogo_ops.load(Relaxed),
            memory_bytes_verified: 0,
            swapped_pages: 0,
        }
    }

    fn say(&self, finding: &str) {
        if self.lines.fetch_add(1, Relaxed) < LINES_MAX {
            eprintln!("guest-work: {finding}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_content_of_unknown_size_counts_as_a_byte() {
        let tally = Tally::default();
        tally.wrong(0, "a crash");
        tally.wrong(12, "a value");
        assert_eq!(tally.progress(Phase::Work).wrong_bytes, 13);
    }

    #[test]
    fn longest_gap_is_kept_for_each_heart() {
        let tally = Tally::default();
        for (heart, ms) in [(Heart::Disk, 900), (Heart::Disk, 100), (Heart::Memory, 300)] {
            tally.beat(heart, Duration::from_millis(ms));
        }
        let progress = tally.progress(Phase::Work);
        assert_eq!(progress.longest_disk_gap_ms, 900);
        assert_eq!(progress.longest_memory_gap_ms, 300);
        assert_eq!(progress.beats, 3);
    }

    #[test]
    fn heart_that_stands_still_has_a_gap_though_it_never_beats_again() {
        let tally = Tally::default();
        tally.beat(Heart::Disk, Duration::ZERO);
        let gap = || tally.progress(Phase::Work).longest_disk_gap_ms;
        while gap() < 3 {
            std::thread::yield_now();
        }
        tally.rest(Heart::Disk);
        assert_eq!(gap(), 0, "it has not beaten again, and need not");
    }
}
