// SPDX-License-Identifier: Apache-2.0
//! State shared by the two loops and the port: counters, the pause and the end.
//!
//! Counters are relaxed: each is read on its own, and the numbers that matter are read after the loops were
//! joined. The pause and the end are one mutex with a condition variable, checked between steps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::wire::{Phase, Progress};

/// The next action of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Take another step.
    Step,
    /// Leave the loop for the last verification.
    Finish,
}

/// The part of the memory that is under work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    #[default]
    Whole,
    /// The lower half; the upper is free.
    Half,
}

#[derive(Debug, Default)]
struct Control {
    quiet: bool,
    stop: bool,
    extent: Extent,
}

/// Counters of one loop.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes under work.
    pub bytes: AtomicU64,
    /// Bytes compared.
    pub bytes_verified: AtomicU64,
    /// Wrong pages or blocks, failed operations.
    pub errors: AtomicU64,
    /// Complete rounds.
    pub rounds: AtomicU64,
    /// Bytes compared by the last verification.
    pub final_bytes: AtomicU64,
    /// In plugged RAM: bytes of memory that lie there now, or bytes of disk moved by direct I/O with
    /// buffers there so far.
    pub plugged_bytes: AtomicU64,
    /// Whether all content was written once.
    pub filled: AtomicBool,
}

impl Counters {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Relaxed);
    }

    /// Counts an error; true for the first few, which are printed.
    #[must_use]
    pub fn count_error(&self) -> bool {
        self.errors.fetch_add(1, Relaxed) < 20
    }
}

/// All that is shared.
#[derive(Debug, Default)]
pub struct Shared {
    /// Counters of the memory loop.
    pub memory: Counters,
    /// Counters of the disk loop.
    pub disk: Counters,
    control: Mutex<Control>,
    changed: Condvar,
}

impl Shared {
    /// Waits while the host wants quiet, then returns whether to go on.
    pub fn order(&self) -> Order {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        while control.quiet && !control.stop {
            control = self
                .changed
                .wait(control)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if control.stop {
            Order::Finish
        } else {
            Order::Step
        }
    }

    /// The part of the memory that the host wants under work.
    pub fn extent(&self) -> Extent {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.extent
    }

    /// Makes the memory loop change to `extent` at its next step.
    pub fn resize(&self, extent: Extent) {
        self.change(|control| control.extent = extent);
    }

    /// Pauses both loops at their next step.
    pub fn quiet(&self) {
        self.change(|control| control.quiet = true);
    }

    /// Lets both loops go on.
    pub fn go(&self) {
        self.change(|control| control.quiet = false);
    }

    /// Ends both loops at their next step.
    pub fn stop(&self) {
        self.change(|control| control.stop = true);
    }

    /// All counters now; `phase` is the caller's unless content is still missing.
    #[must_use]
    pub fn progress(&self, phase: Phase) -> Progress {
        let (memory, disk) = (&self.memory, &self.disk);
        let filled = memory.filled.load(Relaxed) && disk.filled.load(Relaxed);
        Progress {
            phase: if filled || phase > Phase::Work {
                phase
            } else {
                Phase::Fill
            },
            memory_bytes: memory.bytes.load(Relaxed),
            disk_bytes: disk.bytes.load(Relaxed),
            memory_bytes_verified: memory.bytes_verified.load(Relaxed),
            disk_bytes_verified: disk.bytes_verified.load(Relaxed),
            memory_errors: memory.errors.load(Relaxed),
            disk_errors: disk.errors.load(Relaxed),
            memory_rounds: memory.rounds.load(Relaxed),
            disk_rounds: disk.rounds.load(Relaxed),
            final_memory_bytes: memory.final_bytes.load(Relaxed),
            final_disk_bytes: disk.final_bytes.load(Relaxed),
            memory_plugged_bytes: memory.plugged_bytes.load(Relaxed),
            disk_plugged_bytes: disk.plugged_bytes.load(Relaxed),
        }
    }

    fn change(&self, apply: impl FnOnce(&mut Control)) {
        apply(&mut self.control.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}
