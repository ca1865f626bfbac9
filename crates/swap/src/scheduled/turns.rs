// SPDX-License-Identifier: Apache-2.0
//! [`Turns`]: a task whose work is cut into steps, with a run begun and ended in between as the scheduler says.
//!
//! ```text
//!   step() ─► true, go on ─► step() ─► must yield: run ended, waits ─► next run begun: true ─► …
//!                                                        └─ not in time, or stopped: no run
//! ```

use super::{Asked, WorkTask};
use pagetide_policy::scheduler::WorkClass;
use pagetide_sys::cpu::Urgency;
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

    /// Ends the task's waits from another thread.
    #[must_use]
    pub fn stopper(&self) -> super::Stopper {
        self.lock().stopper()
    }

    /// The class of the work.
    #[must_use]
    pub fn class(&self) -> WorkClass {
        self.lock().class
    }

    /// Between two steps: whether this thread may go on. If it has to yield, waits for its next run, but no
    /// longer than until `by`.
    pub fn step(&self, by: Option<Instant>) -> Turn {
        if self.may_stay() {
            return Turn::Granted;
        }
        let mut task = self.lock();
        task.end_run();
        match task.ask_for_run(by) {
            Asked::Granted => Turn::Granted,
            Asked::Late => Turn::Late,
            Asked::Stopped => Turn::Stopped,
        }
    }

    /// Whether a run is under way and need not yield. Does not wait.
    pub fn may_stay(&self) -> bool {
        let mut task = self.lock();
        task.run.is_some() && task.must_yield().is_none()
    }

    /// Ends the run, if there is one: to be called before the thread waits for anything else.
    pub fn end(&self) {
        self.lock().end_run();
    }

    /// Runs a part of the work that holds what faults wait for: no weaker than reclaim.
    pub fn firmly<T>(&self, work: impl FnOnce() -> T) -> T {
        let task = self.lock();
        let urgency = task
            .run
            .as_ref()
            .map_or(Urgency::Ordinary, |run| run.urgency);
        task.with_urgency(task.scheduler.weakness.firm(urgency), work)
    }

    /// Runs what has to be done now and is not part of the work: as an ordinary thread, and not at the
    /// expense of the run, if there is one.
    pub fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.lock().aside(work)
    }

    fn lock(&self) -> MutexGuard<'_, WorkTask> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
