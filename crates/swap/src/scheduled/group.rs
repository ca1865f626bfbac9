// SPDX-License-Identifier: Apache-2.0
//! [`WorkGroup`]: the tasks of one VM, which take turns on one thread.
//!
//! A thread that scans, or waits for its turn to scan, cannot reclaim. While reclaim is needed the other tasks
//! of its VM therefore stand back.

use super::{HostScheduler, standing::GroupState, turns::Turns, weakness::take_urgency};
use pagetide_policy::scheduler::{Basis, FaultClass, TooManyTasks, WorkClass};
use pagetide_sys::cpu::{self, Urgency};
use std::sync::{Arc, atomic::Ordering::SeqCst};

/// See the module.
#[derive(Clone, Debug)]
pub struct WorkGroup {
    scheduler: Arc<HostScheduler>,
    state: Arc<GroupState>,
}

impl WorkGroup {
    /// A group without tasks.
    #[must_use]
    pub fn new(scheduler: &Arc<HostScheduler>) -> Self {
        Self {
            scheduler: Arc::clone(scheduler),
            state: scheduler.new_group(),
        }
    }

    /// A task of `class` for the group's thread.
    ///
    /// # Errors
    /// There are too many already.
    pub fn turns(&self, class: WorkClass) -> Result<Turns, TooManyTasks> {
        let task = self.scheduler.task_with(class, Arc::clone(&self.state))?;
        Ok(Turns::new(task))
    }

    /// Reclaim is needed: other tasks of the group get no run until [`Self::calm`], and one under way ends
    /// with its next step.
    pub fn hurry(&self) {
        if !self.state.needs_reclaim.swap(true, SeqCst) {
            self.wake();
        }
    }

    /// Undoes [`Self::hurry`].
    pub fn calm(&self) {
        self.state.needs_reclaim.store(false, SeqCst);
    }

    /// No task of the group gets a run any more, until [`Self::go_on`]; a run under way goes on until it has
    /// to yield.
    pub fn stop(&self) {
        self.state.is_stopped.store(true, SeqCst);
        self.wake();
    }

    /// Undoes [`Self::stop`].
    pub fn go_on(&self) {
        self.state.is_stopped.store(false, SeqCst);
    }

    /// Ends the waits of tasks that have to, and the weakness of the thread that has to come to an end.
    fn wake(&self) {
        let state = self.scheduler.lock();
        let seats = state.seats.values();
        for seat in seats.filter(|seat| Arc::ptr_eq(&seat.group, &self.state)) {
            seat.changed.notify_all();
            // It cannot end meanwhile: its run ends under this lock.
            if let Some(thread) = seat.weak_thread
                && let Err(error) = cpu::make_ordinary(thread)
            {
                tracing::debug!(%error, "a weak thread stays weak until its next step");
            }
        }
    }

    /// This thread begins to serve a fault.
    pub fn fault_begins(&self, class: FaultClass) {
        self.scheduler.fault_begins(class);
    }

    /// It has served it.
    pub fn fault_ends(&self) {
        self.scheduler.fault_ends();
    }

    /// Runs `work` with the priority of a run of reclaim, where that is allowed: evictions on a thread that
    /// serves faults, when it has served one. They are short, and do not wait.
    pub fn run_whole<T>(&self, work: impl FnOnce() -> T) -> T {
        let class = WorkClass::Reclaim;
        let urgency = self.scheduler.weakness.urgency_of(class, Basis::Inherited);
        let is_placed = take_urgency(urgency).is_ok();
        let result = work();
        if is_placed && let Err(error) = take_urgency(Urgency::Ordinary) {
            tracing::debug!(%error, "a thread that serves faults keeps the priority of reclaim");
        }
        result
    }

    /// Runs `wait`, in which this thread waits until reclaim of this group has made room.
    pub fn wait_for_room<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.scheduler.wait_for_room(self.state.id, wait)
    }
}
