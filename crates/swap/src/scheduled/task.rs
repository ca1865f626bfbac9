// SPDX-License-Identifier: Apache-2.0
//! [`WorkTask`]: work of one thread that asks for runs; and [`WorkRun`], a run.

use super::{
    HostScheduler, Seat, State,
    standing::GroupState,
    weakness::Weakness,
    weakness::{take_cpus, take_urgency},
};
use pagetide_policy::scheduler::{Basis, Grant, TaskId, WorkClass, YieldReason};
use pagetide_sys::cpu::{self, Urgency};
use std::{
    marker::PhantomData,
    sync::{
        Arc, PoisonError,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::{Duration, Instant},
};

/// Ends a task's waits, now and later. See [`WorkTask::stopper`].
#[derive(Clone, Debug)]
pub struct Stopper {
    scheduler: Arc<HostScheduler>,
    id: TaskId,
}

impl Stopper {
    /// From now on the task is granted no run; one under way goes on.
    pub fn stop(&self) {
        let mut state = self.scheduler.lock();
        if let Some(seat) = state.seats.get_mut(&self.id) {
            seat.is_stopped = true;
            seat.changed.notify_all();
        }
    }
}

/// What came of asking for a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    Granted,
    /// Not in time, or the thread is needed for reclaim.
    Late,
    Stopped,
}

/// Work of one thread.
#[derive(Debug)]
pub struct WorkTask {
    scheduler: Arc<HostScheduler>,
    id: TaskId,
    class: WorkClass,
    group: Arc<GroupState>,
    run: Option<Running>,
}

/// A run under way.
#[derive(Debug)]
struct Running {
    grant: Grant,
    /// Grants made when it was last checked whether it must yield.
    grants: u64,
    /// CPU time of the thread when the run began.
    began: Duration,
    /// CPU time reported so far.
    reported: Duration,
    /// The scheduler is asked again at this time at the latest.
    until: Duration,
    urgency: Urgency,
}

impl Running {
    fn used(&self) -> Duration {
        cpu::thread_time().saturating_sub(self.began)
    }
}

impl WorkTask {
    /// The task `id`, which has a seat.
    pub(super) fn new(
        scheduler: Arc<HostScheduler>,
        id: TaskId,
        class: WorkClass,
        group: Arc<GroupState>,
    ) -> Self {
        Self {
            scheduler,
            id,
            class,
            group,
            run: None,
        }
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> TaskId {
        self.id
    }

    /// Whether a run is under way that need not yield.
    pub(super) fn may_stay(&mut self) -> bool {
        self.run.is_some() && self.must_yield().is_none()
    }

    /// Ends the task's waits from another thread.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper {
            scheduler: Arc::clone(&self.scheduler),
            id: self.id,
        }
    }

    /// Waits until this thread may run; `None` once the task is stopped. During the run the thread has the
    /// priority of its class. It stays on the CPUs allowed for work.
    pub fn begin(&mut self) -> Option<WorkRun<'_>> {
        match self.ask_for_run(None) {
            Asked::Granted => Some(WorkRun {
                task: self,
                _of_this_thread: PhantomData,
            }),
            Asked::Late | Asked::Stopped => None,
        }
    }

    /// Waits until this thread may run, or until `by`.
    pub(super) fn ask_for_run(&mut self, by: Option<Instant>) -> Asked {
        assert!(self.run.is_none(), "a run of {:?} is under way", self.id);
        let grant = match self.wait(by) {
            Ok(grant) => grant,
            Err(asked) => return asked,
        };
        if let Err(error) = take_cpus(&grant.cpus) {
            self.unplaced(&error.to_string());
        }
        let urgency = self.scheduler.weakness.urgency_of(self.class, grant.basis);
        self.run = Some(Running {
            grants: self.scheduler.grants.load(SeqCst),
            began: cpu::thread_time(),
            reported: Duration::ZERO,
            until: self.scheduler.now() + grant.slice,
            urgency,
            grant,
        });
        self.weaken(urgency);
        Asked::Granted
    }

    /// The grant, or why there is none.
    fn wait(&self, by: Option<Instant>) -> Result<Grant, Asked> {
        let by = by.map(|by| by.saturating_duration_since(self.scheduler.started));
        let mut state = self.scheduler.lock();
        let is_stopped = |seat: &Seat| seat.is_stopped || self.group.is_stopped();
        if state.seats.get(&self.id).is_none_or(is_stopped) {
            return Err(Asked::Stopped);
        }
        if self.group.is_hurried(self.class) {
            return Err(Asked::Late);
        }
        let asked_at = self.scheduler.now();
        state.machine.want(asked_at, self.id);
        let mut is_held = false;
        let given_up = loop {
            self.scheduler.dispatch(&mut state);
            let now = self.scheduler.now();
            let Some(seat) = state.seats.get_mut(&self.id) else {
                return Err(Asked::Stopped);
            };
            if is_stopped(seat) {
                break Asked::Stopped;
            }
            let is_late = by.is_some_and(|by| now >= by) && seat.grant.is_none();
            if is_late || self.group.is_hurried(self.class) {
                break Asked::Late;
            }
            if let Some(grant) = seat.grant.take() {
                let urgency = self.scheduler.weakness.urgency_of(self.class, grant.basis);
                let is_weak = Weakness::locking(urgency) != urgency;
                seat.weak_thread = is_weak.then(cpu::thread_id);
                if is_held {
                    self.count_held(&mut state, asked_at);
                }
                state.stop_leading(self.id);
                return Ok(grant);
            }
            is_held = true;
            // It may be woken only to look at the time, and then vCPUs come first.
            self.take(self.scheduler.weakness.waiting());
            let changed = Arc::clone(&seat.changed);
            let until = state.lead(self.id);
            let until = [until, by].into_iter().flatten().min();
            let wait = until.map_or(Duration::MAX, |until| until.saturating_sub(now));
            let waited = changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        if is_held {
            self.count_held(&mut state, asked_at);
        }
        let seat = state.seats.get_mut(&self.id);
        match seat.and_then(|seat| seat.grant.take()) {
            Some(_) => self.end(&mut state, Duration::ZERO),
            None => state.machine.withdraw(self.scheduler.now(), self.id),
        }
        self.scheduler.dispatch(&mut state);
        state.stop_leading(self.id);
        drop(state);
        self.take(Urgency::Ordinary);
        Err(given_up)
    }

    fn count_held(&self, state: &mut State, since: Duration) {
        let held = &mut state.held[self.class.index()];
        held.runs += 1;
        held.time += self.scheduler.now().saturating_sub(since);
    }

    fn end(&self, state: &mut State, used: Duration) {
        if let Some(seat) = state.seats.get_mut(&self.id) {
            seat.weak_thread = None;
        }
        state.machine.ended(self.scheduler.now(), self.id, used);
    }

    /// To be asked between two steps of a run: `None` to go on, or why it must end now.
    fn must_yield(&mut self) -> Option<YieldReason> {
        let Some(mut run) = self.run.take() else {
            return Some(YieldReason::SliceOver);
        };
        let reason = self.reason_to_yield(&mut run);
        self.run = Some(run);
        reason
    }

    fn reason_to_yield(&self, run: &mut Running) -> Option<YieldReason> {
        let scheduler = &self.scheduler;
        let used = run.used();
        if used >= run.grant.slice {
            return Some(YieldReason::SliceOver);
        }
        if self.group.is_hurried(self.class) {
            return Some(YieldReason::Outranked);
        }
        let (now, grants) = (scheduler.now(), scheduler.grants.load(SeqCst));
        let is_calm = !scheduler.is_burst(now) && grants == run.grants;
        if is_calm && now < run.until {
            return None;
        }
        self.take(Weakness::locking(run.urgency));
        let reason = self.ask(run, used, grants);
        if reason.is_none() {
            self.weaken(run.urgency);
        }
        reason
    }

    fn ask(&self, run: &mut Running, used: Duration, grants: u64) -> Option<YieldReason> {
        let mut state = self.scheduler.lock();
        let now = self.scheduler.report_faults(&mut state);
        let since = used.saturating_sub(run.reported);
        state.machine.ran(now, self.id, since);
        (run.reported, run.grants) = (used, grants);
        run.until = now + run.grant.slice;
        state.machine.must_yield(now, self.id)
    }

    /// Ends the run, if there is one.
    pub(super) fn end_run(&mut self) {
        let Some(run) = self.run.take() else {
            return;
        };
        let used = run.used().saturating_sub(run.reported);
        self.take(Weakness::locking(run.urgency));
        let mut state = self.scheduler.lock();
        self.end(&mut state, used);
        self.scheduler.dispatch(&mut state);
        drop(state);
        self.take(Urgency::Ordinary);
    }

    /// Runs a part that holds what faults wait for: no weaker than reclaim.
    pub(super) fn firmly<T>(&self, work: impl FnOnce() -> T) -> T {
        let run = self.run.as_ref();
        let urgency = run.map_or(Urgency::Ordinary, |run| run.urgency);
        self.with_urgency(self.scheduler.weakness.firm(urgency), work)
    }

    /// Runs `work` with `urgency`, and then goes on with that of the run, if there is one.
    fn with_urgency<T>(&self, urgency: Urgency, work: impl FnOnce() -> T) -> T {
        let Some(run) = &self.run else {
            return work();
        };
        self.take(urgency);
        let result = work();
        self.weaken(run.urgency);
        result
    }

    /// The same for `work` whose CPU time is not the run's.
    pub(super) fn aside<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let before = cpu::thread_time();
        let run = self.run.as_ref();
        let urgency = run.map_or(Urgency::Ordinary, |run| run.urgency);
        let result = self.with_urgency(self.scheduler.weakness.aside(urgency), work);
        if let Some(run) = &mut self.run {
            run.began += cpu::thread_time().saturating_sub(before);
        }
        result
    }

    /// Takes the priority of a run, unless the thread is needed for something more urgent.
    fn weaken(&self, urgency: Urgency) {
        if !self.group.is_hurried(self.class) {
            self.take(urgency);
        }
    }

    /// Without the right to change its priority the thread keeps the one it has.
    fn take(&self, urgency: Urgency) {
        if let Err(error) = take_urgency(urgency) {
            self.unplaced(&format!("no priority {urgency:?}: {error}"));
        }
    }

    fn unplaced(&self, why: &str) {
        if self.scheduler.unplaced.fetch_add(1, Relaxed) == 0 {
            tracing::warn!(class = ?self.class, "a background thread runs as it is: {why}");
        }
    }
}

impl Drop for WorkTask {
    fn drop(&mut self) {
        self.end_run();
        let mut state = self.scheduler.lock();
        state.machine.remove(self.scheduler.now(), self.id);
        state.seats.remove(&self.id);
        self.scheduler.dispatch(&mut state);
    }
}

/// A run; ends when it is dropped.
#[derive(Debug)]
pub struct WorkRun<'a> {
    task: &'a mut WorkTask,
    /// CPU time is that of the thread that began.
    _of_this_thread: PhantomData<*const ()>,
}

impl WorkRun<'_> {
    fn run(&self) -> &Running {
        let run = self.task.run.as_ref();
        run.expect("a run that ends only when this is dropped")
    }

    /// CPU time that the run may use.
    #[must_use]
    pub fn slice(&self) -> Duration {
        self.run().grant.slice
    }

    /// At whose expense it is.
    #[must_use]
    pub fn basis(&self) -> Basis {
        self.run().grant.basis
    }

    /// CPU time that it has used.
    #[must_use]
    pub fn used(&self) -> Duration {
        self.run().used()
    }

    /// To be asked between two steps: `None` to go on, or why the run must be dropped now.
    pub fn go_on(&mut self) -> Option<YieldReason> {
        self.task.must_yield()
    }
}

impl Drop for WorkRun<'_> {
    fn drop(&mut self) {
        self.task.end_run();
    }
}
