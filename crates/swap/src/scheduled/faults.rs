// SPDX-License-Identifier: Apache-2.0
//! [`FaultUnderWay`]: a fault as the scheduler counts it, awake or waiting for room.

use super::HostScheduler;
use pagetide_policy::scheduler::{FaultClass, GroupId};
use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::Instant,
};

thread_local! {
    /// Faults that this thread serves: one, unless serving it leads to another.
    pub(super) static SERVED_HERE: RefCell<Vec<FaultUnderWay>> = const { RefCell::new(Vec::new()) };
}

/// A fault that a thread serves. See [`HostScheduler::fault`].
#[derive(Debug)]
pub struct FaultUnderWay {
    scheduler: Arc<HostScheduler>,
    class: FaultClass,
    since: Instant,
}

impl FaultUnderWay {
    /// A fault that was counted as under way.
    pub(super) fn new(scheduler: Arc<HostScheduler>, class: FaultClass) -> Self {
        Self {
            scheduler,
            class,
            since: Instant::now(),
        }
    }

    /// Runs `wait`, in which the thread waits for room in the memory of `group`.
    pub(super) fn asleep<T>(&mut self, group: GroupId, wait: impl FnOnce() -> T) -> T {
        self.count_time();
        let asleep = Asleep::begin(&self.scheduler, group, Counted::Yes);
        let result = wait();
        drop(asleep);
        self.since = Instant::now();
        result
    }

    /// Elapsed time is taken for CPU time: to ask for the latter costs a system call.
    fn count_time(&self) {
        let ns = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.scheduler.fault_ns[self.class as usize].fetch_add(ns, Relaxed);
    }
}

impl Drop for FaultUnderWay {
    fn drop(&mut self) {
        self.count_time();
        self.scheduler.faults[self.class as usize].fetch_add(1, Relaxed);
        self.scheduler.fault_ended();
    }
}

/// Whether a thread that falls asleep serves a fault, which was counted as under way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    Yes,
    No,
}

/// While a thread waits for room, also if it panics.
pub(super) struct Asleep<'a> {
    scheduler: &'a HostScheduler,
    group: GroupId,
    counted: Counted,
}

impl<'a> Asleep<'a> {
    pub(super) fn begin(scheduler: &'a HostScheduler, group: GroupId, counted: Counted) -> Self {
        let mut state = scheduler.lock();
        state.machine.room_wanted(scheduler.now(), group);
        if counted == Counted::Yes {
            scheduler.fault_ended();
        }
        scheduler.dispatch(&mut state);
        Self {
            scheduler,
            group,
            counted,
        }
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        if self.counted == Counted::Yes {
            self.scheduler.under_way.fetch_add(1, SeqCst);
        }
        let mut state = self.scheduler.lock();
        let now = self.scheduler.now();
        state.machine.room_found(now, self.group);
    }
}
