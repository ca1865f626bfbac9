// SPDX-License-Identifier: Apache-2.0
//! [`Turns`]: a task whose work is cut into steps, with a run begun and ended in between as the scheduler says.
//!
//! ```text
//!   step() ─► true, go on ─► step() ─► must yield: run ended, waits ─► next run begun: true ─► …
//!                                                        └─ not in time, or stopped: no run
//! ```

use super::task::{Asked, WorkTask};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// What came of asking for a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// This thread has one.
    Granted,
    /// It got none in time, or its VM needs reclaim first.
    Late,
    /// The task is stopped.
    Stopped,
}

/// See the module. Of one thread at a time, which ends its run before another one takes over.
#[derive(Debug)]
pub struct Turns {
    task: Mutex<WorkTask>,
}

impl Turns {
    /// Turns of `task`.
    pub(super) fn new(task: WorkTask) -> Self {
        Self {
            task: Mutex::new(task),
        }
    }

    /// Between two steps: whether this thread may go on. If it has to yield, waits for its next run, but no
    /// longer than until `by`.
    pub fn step(&self, by: Option<Instant>) -> Turn {
        let mut task = self.lock();
        if task.may_stay() {
            return Turn::Granted;
        }
        task.end_run();
        match task.ask_for_run(by) {
            Asked::Granted => Turn::Granted,
            Asked::Late => Turn::Late,
            Asked::Stopped => Turn::Stopped,
        }
    }

    /// Whether a run is under way and need not yield. Does not wait.
    pub fn may_stay(&self) -> bool {
        self.lock().may_stay()
    }

    /// Ends the run, if there is one: to be called before the thread waits for anything else.
    pub fn end(&self) {
        self.lock().end_run();
    }

    /// Runs a part of the work that holds what faults wait for: no weaker than reclaim.
    pub fn firmly<T>(&self, work: impl FnOnce() -> T) -> T {
        self.lock().firmly(work)
    }

    /// Runs what has to be done now and is not part of the work: no weaker than reclaim, and not at the expense of
    /// the run, if there is one.
    pub fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.lock().aside(work)
    }

    fn lock(&self) -> MutexGuard<'_, WorkTask> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
