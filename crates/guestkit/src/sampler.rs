// SPDX-License-Identifier: Apache-2.0
//! Resident memory of a guest, sampled from outside the daemon.
//!
//! The daemon must not be its own witness: the kernel counts the blocks of the memfd, whether the daemon
//! runs or not.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::guest::resident_bytes;

const PERIOD: Duration = Duration::from_millis(100);

/// The samples so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Resident in the last sample.
    pub now_bytes: u64,
    /// Most resident since watching began.
    pub max_bytes: u64,
    /// Time between samples that were both at or below the ceiling.
    pub below: Duration,
}

#[derive(Debug, Default)]
struct State {
    seen: Seen,
    ceiling_bytes: Option<u64>,
    last: Option<Instant>,
    last_was_below: bool,
    stop: bool,
}

impl State {
    fn add(&mut self, now: Instant, bytes: u64) {
        self.seen.now_bytes = bytes;
        let Some(ceiling_bytes) = self.ceiling_bytes else {
            return;
        };
        self.seen.max_bytes = self.seen.max_bytes.max(bytes);
        let below = bytes <= ceiling_bytes;
        if let Some(last) = self.last
            && below
            && self.last_was_below
        {
            self.seen.below += now.saturating_duration_since(last);
        }
        self.last = Some(now);
        self.last_was_below = below;
    }
}

/// Samples until dropped.
#[derive(Debug)]
pub struct Sampler {
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts to sample the QEMU process `pid`; stops by itself when that process ends.
    #[must_use]
    pub fn start(pid: u32) -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            while let Ok(bytes) = resident_bytes(pid) {
                let mut state = lock(&shared);
                state.add(Instant::now(), bytes);
                if state.stop {
                    return;
                }
                drop(state);
                thread::sleep(PERIOD);
            }
        });
        Self {
            state,
            thread: Some(thread),
        }
    }

    /// From now on records the maximum, and the time at or below `ceiling_bytes`.
    pub fn watch(&self, ceiling_bytes: u64) {
        let mut state = lock(&self.state);
        let now_bytes = state.seen.now_bytes;
        state.seen = Seen {
            now_bytes,
            ..Seen::default()
        };
        state.ceiling_bytes = Some(ceiling_bytes);
        state.last = None;
    }

    /// The samples so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        lock(&self.state).seen
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        lock(&self.state).stop = true;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("guestkit: the sampler panicked");
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_only_between_two_samples_below_the_ceiling() {
        let start = Instant::now();
        let mut state = State {
            ceiling_bytes: Some(100),
            ..State::default()
        };
        for (second, bytes) in [(0, 90), (1, 100), (2, 101), (3, 99), (5, 98)] {
            state.add(start + Duration::from_secs(second), bytes);
        }
        assert_eq!(state.seen.below, Duration::from_secs(3));
        assert_eq!((state.seen.max_bytes, state.seen.now_bytes), (101, 98));
    }
}
