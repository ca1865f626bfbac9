// SPDX-License-Identifier: Apache-2.0
//! [`FaultUnderWay`]: a fault as the scheduler counts it, awake or asleep.

use super::HostScheduler;
use pagetide_policy::scheduler::FaultClass;
use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::Instant,
};

/// Why a fault sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SleepsFor {
    /// Reclaim has to make room for it.
    Room,
    /// A slow tier, or another thread that fills the page.
    Other,
}

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

    /// Runs `sleep`, in which the thread waits and needs no CPU.
    pub fn sleep<T>(&mut self, why: SleepsFor, sleep: impl FnOnce() -> T) -> T {
        self.count_time();
        let _asleep = Asleep::begin(&self.scheduler, why, Counted::Yes);
        let result = sleep();
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

/// While a thread sleeps, also if it panics.
pub(super) struct Asleep<'a> {
    scheduler: &'a HostScheduler,
    why: SleepsFor,
    counted: Counted,
}

impl<'a> Asleep<'a> {
    pub(super) fn begin(scheduler: &'a HostScheduler, why: SleepsFor, counted: Counted) -> Self {
        match (why, counted) {
            (SleepsFor::Room, _) => {
                // Before it ends to be under way: reclaim must not be seen as held for nobody.
                scheduler.sleeping_for_room.fetch_add(1, SeqCst);
                if counted == Counted::Yes {
                    scheduler.under_way.fetch_sub(1, SeqCst);
                }
                scheduler.dispatch(&mut scheduler.lock());
            }
            (SleepsFor::Other, Counted::Yes) => scheduler.fault_ended(),
            (SleepsFor::Other, Counted::No) => {}
        }
        Self {
            scheduler,
            why,
            counted,
        }
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        if self.counted == Counted::Yes {
            self.scheduler.under_way.fetch_add(1, SeqCst);
        }
        if self.why == SleepsFor::Room {
            self.scheduler.sleeping_for_room.fetch_sub(1, SeqCst);
        }
    }
}
