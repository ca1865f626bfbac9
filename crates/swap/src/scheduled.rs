// SPDX-License-Identifier: Apache-2.0
//! [`HostScheduler`]: threads that obey [`pagetide_policy::scheduler`].
//!
//! ```text
//!   fault thread                   scheduler                        thread of a task
//!                                                                   begin() ── waits
//!   fault() ─── counter + 1 ─────►                                    ▲
//!     … serves it                  dispatch ◄── every event           │ grant
//!   drop ────── counter - 1 ─────►   └───────────────────────────────►┘
//!        only if work is held:       under one lock                 run: go_on() between two steps
//!        dispatch                                                   drop ── time used, dispatch
//! ```
//! Threads of work block in [`WorkTask::begin`] until they are granted a run. They do their work in steps
//! and ask [`WorkRun::go_on`] between two of them; on a reason to yield they drop the run and begin again.
//! A step should take some ten microseconds. CPU time is that of the thread, so a thread that the kernel
//! leaves waiting uses none.
//!
//! # What faults pay
//! A fault adds to a counter when it begins and subtracts when it ends. It takes the lock only when it is
//! the last one under way and work is held back by faults. No lost wake-up: a thread about to wait sets
//! `held` before it reads the counter, and a fault subtracts before it reads `held`, all of it sequentially
//! consistent, so at least one of them sees the other.
//!
//! A fault that sleeps is not under way: [`FaultUnderWay::sleep`]. If it sleeps for want of room, reclaim
//! runs with its priority meanwhile.
//!
//! # How threads are made weak
//! | class | priority | why |
//! |---|---|---|
//! | reclaim | niceness 5; ordinary while a fault waits for it | a third of a vCPU's weight: enough to keep up |
//! | scan | `SCHED_IDLE` | nothing is lost when it is late |
//! | background | niceness 19 | it makes progress even on a busy host |
//!
//! Niceness and `SCHED_IDLE` are relative to threads of the same cgroup. Where vCPUs are in another cgroup
//! than the daemon, the weights of the two decide first (`cpu.weight`, `cpu.shares`). Slices and CPUs hold
//! in any case.
//!
//! A weak thread may lose its CPU while it holds a lock. If a fault can wait for that lock, the fault is as
//! slow as the weak thread. So a thread is weak only between two calls to this module, whose lock faults
//! take, and the parts of a scan that hold what faults wait for are done with the priority of reclaim
//! ([`Turns::firmly`]). Without the right to become ordinary again no thread is made weak ([`Weakness`]).
//!
//! # Groups
//! The tasks of one VM take turns on one thread: they are a [`WorkGroup`]. When reclaim is needed
//! ([`WorkGroup::hurry`]), a scan or background work of the same VM must not keep the thread: from then until
//! [`WorkGroup::calm`] such a task yields and is granted nothing, and its thread is made ordinary at once by
//! the thread that needs reclaim.

mod group;
mod turns;
mod weakness;

pub use group::WorkGroup;
pub use turns::{Turn, Turns};
pub use weakness::Weakness;

use group::GroupState;
use pagetide_policy::scheduler::{
    Basis, ClassFigures, FaultClass, FaultLoad, Grant, SchedulerSettings, SettingsError, TaskId,
    TaskScheduler, TooManyTasks, WorkClass, YieldReason,
};
use pagetide_sys::cpu::{self, Urgency};
use std::{
    cell::RefCell,
    collections::HashMap,
    marker::PhantomData,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};
use weakness::{take_cpus, take_urgency};

/// Why a fault sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SleepsFor {
    /// Reclaim has to make room for it.
    Room,
    /// A slow tier, or another thread that fills the page.
    Other,
}

/// A task's place in the scheduler.
#[derive(Debug, Default)]
struct Seat {
    changed: Arc<Condvar>,
    grant: Option<Grant>,
    is_stopped: bool,
    group: Arc<GroupState>,
    /// The thread in a run that has made it weak.
    weak_thread: Option<u32>,
}

/// What classes of work have waited for their runs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Held {
    /// Runs that were not granted at once.
    pub runs: u64,
    /// Time until they were granted, or not wanted any more.
    pub time: Duration,
}

/// Faults of a class.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FaultFigures {
    /// Those that have ended.
    pub faults: u64,
    /// Time in which they were served, without sleep.
    pub time: Duration,
}

#[derive(Debug)]
struct State {
    machine: TaskScheduler,
    seats: HashMap<TaskId, Seat>,
    held: [Held; WorkClass::ALL.len()],
}

/// See the module.
#[derive(Debug)]
pub struct HostScheduler {
    started: Instant,
    state: Mutex<State>,
    /// Faults under way, without those that sleep.
    under_way: AtomicU32,
    sleeping_for_room: AtomicU32,
    /// Time used by faults and not reported yet, by class.
    fault_ns: [AtomicU64; 2],
    /// The same, reported.
    reported_ns: [AtomicU64; 2],
    faults: [AtomicU64; 2],
    /// Whether work waits that was held back by faults.
    held: AtomicBool,
    /// Counts dispatches that granted runs, which may outrank others.
    grants: AtomicU64,
    /// Threads that could not be placed or made weak.
    unplaced: AtomicU64,
    weakness: Weakness,
}

thread_local! {
    /// Faults that this thread serves: one, unless serving it leads to another.
    static SERVED_HERE: RefCell<Vec<FaultUnderWay>> = const { RefCell::new(Vec::new()) };
}

impl HostScheduler {
    /// A scheduler on a host that has the CPUs `known`. Tries which priorities threads can leave again.
    ///
    /// # Errors
    /// Wrong settings.
    pub fn new(settings: SchedulerSettings, known: &[usize]) -> Result<Arc<Self>, SettingsError> {
        let state = State {
            machine: TaskScheduler::new(settings, known, Duration::ZERO)?,
            seats: HashMap::new(),
            held: Default::default(),
        };
        let weakness = Weakness::of_this_process();
        if weakness != Weakness::Full {
            tracing::warn!(
                ?weakness,
                "background threads are not made as weak as they could be: without CAP_SYS_NICE they would stay so"
            );
        }
        Ok(Arc::new(Self {
            started: Instant::now(),
            state: Mutex::new(state),
            under_way: AtomicU32::new(0),
            sleeping_for_room: AtomicU32::new(0),
            fault_ns: Default::default(),
            reported_ns: Default::default(),
            faults: Default::default(),
            held: AtomicBool::new(false),
            grants: AtomicU64::new(0),
            unplaced: AtomicU64::new(0),
            weakness,
        }))
    }

    /// Changes the settings from the next cycle on.
    ///
    /// # Errors
    /// Wrong settings; nothing has changed then.
    pub fn change(
        &self,
        settings: SchedulerSettings,
        known: &[usize],
    ) -> Result<(), SettingsError> {
        let mut state = self.lock();
        state.machine.change(self.now(), settings, known)?;
        self.dispatch(&mut state);
        Ok(())
    }

    /// The settings that were set last.
    #[must_use]
    pub fn settings(&self) -> SchedulerSettings {
        self.lock().machine.next_settings().clone()
    }

    /// What a class has got so far.
    #[must_use]
    pub fn figures(&self, class: WorkClass) -> ClassFigures {
        self.lock().machine.figures(class)
    }

    /// How long a class was held back so far.
    #[must_use]
    pub fn held(&self, class: WorkClass) -> Held {
        self.lock().held[class.index()]
    }

    /// What faults of a class have used so far.
    #[must_use]
    pub fn faults(&self, class: FaultClass) -> FaultFigures {
        let at = class as usize;
        let ns = self.fault_ns[at].load(Relaxed) + self.reported_ns[at].load(Relaxed);
        FaultFigures {
            faults: self.faults[at].load(Relaxed),
            time: Duration::from_nanos(ns),
        }
    }

    /// Which priorities threads get.
    #[must_use]
    pub fn weakness(&self) -> Weakness {
        self.weakness
    }

    /// Times that a thread could not be placed on its CPUs or given its priority.
    #[must_use]
    pub fn unplaced(&self) -> u64 {
        self.unplaced.load(Relaxed)
    }

    /// A task of `class`, for one thread.
    ///
    /// # Errors
    /// There are too many already.
    pub fn task(self: &Arc<Self>, class: WorkClass) -> Result<WorkTask, TooManyTasks> {
        self.task_with(class, Arc::default())
    }

    fn task_with(
        self: &Arc<Self>,
        class: WorkClass,
        group: Arc<GroupState>,
    ) -> Result<WorkTask, TooManyTasks> {
        let mut state = self.lock();
        let id = state.machine.add(class)?;
        let seat = Seat {
            group: Arc::clone(&group),
            ..Seat::default()
        };
        state.seats.insert(id, seat);
        let scheduler = Arc::clone(self);
        Ok(WorkTask {
            scheduler,
            id,
            class,
            group,
            run: None,
        })
    }

    /// A fault is served by this thread until the value is dropped.
    #[must_use]
    pub fn fault(self: &Arc<Self>, class: FaultClass) -> FaultUnderWay {
        self.under_way.fetch_add(1, SeqCst);
        FaultUnderWay {
            scheduler: Arc::clone(self),
            class,
            since: Instant::now(),
        }
    }

    /// The same, until this thread calls [`Self::fault_ends`].
    pub fn fault_begins(self: &Arc<Self>, class: FaultClass) {
        let fault = self.fault(class);
        SERVED_HERE.with_borrow_mut(|faults| faults.push(fault));
    }

    /// See [`Self::fault_begins`].
    pub fn fault_ends(&self) {
        // Dropped after the borrow has ended.
        let ended = SERVED_HERE.with_borrow_mut(Vec::pop);
        drop(ended);
    }

    /// Runs `sleep`, in which this thread waits: so does the fault that it serves, if there is one.
    /// Whoever waits for room lends reclaim the priority of faults.
    pub fn sleep<T>(&self, why: SleepsFor, sleep: impl FnOnce() -> T) -> T {
        match SERVED_HERE.with_borrow_mut(Vec::pop) {
            Some(mut fault) => {
                let result = fault.sleep(why, sleep);
                SERVED_HERE.with_borrow_mut(|faults| faults.push(fault));
                result
            }
            None => {
                let _asleep = Asleep::begin(self, why, Counted::No);
                sleep()
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn report_faults(&self, state: &mut State) -> Duration {
        let used = self.fault_ns.each_ref().map(|ns| ns.swap(0, Relaxed));
        for (total, ns) in self.reported_ns.iter().zip(used) {
            total.fetch_add(ns, Relaxed);
        }
        let load = FaultLoad {
            under_way: self.under_way.load(SeqCst),
            waiting_for_reclaim: self.sleeping_for_room.load(SeqCst),
            used: used.map(Duration::from_nanos),
        };
        let now = self.now();
        state.machine.report_faults(now, &load);
        now
    }

    /// Grants what can be granted now, and wakes the threads concerned.
    fn dispatch(&self, state: &mut State) {
        // Before the counter is read; pairs with the end of a fault.
        self.held.store(true, SeqCst);
        let now = self.report_faults(state);
        for grant in state.machine.dispatch(now) {
            self.grants.fetch_add(1, SeqCst);
            let seat = state.seats.entry(grant.task).or_default();
            seat.changed.notify_all();
            seat.grant = Some(grant);
        }
        if !state.machine.has_held() {
            self.held.store(false, SeqCst);
        }
    }

    /// A fault has ended or fallen asleep.
    fn fault_ended(&self) {
        let was_last = self.under_way.fetch_sub(1, SeqCst) == 1;
        if was_last && self.held.load(SeqCst) {
            self.dispatch(&mut self.lock());
        }
    }
}

/// A fault that a thread serves. See [`HostScheduler::fault`].
#[derive(Debug)]
pub struct FaultUnderWay {
    scheduler: Arc<HostScheduler>,
    class: FaultClass,
    since: Instant,
}

impl FaultUnderWay {
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
enum Counted {
    Yes,
    No,
}

/// While a thread sleeps, also if it panics.
struct Asleep<'a> {
    scheduler: &'a HostScheduler,
    why: SleepsFor,
    counted: Counted,
}

impl<'a> Asleep<'a> {
    fn begin(scheduler: &'a HostScheduler, why: SleepsFor, counted: Counted) -> Self {
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
enum Asked {
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
    fn ask_for_run(&mut self, by: Option<Instant>) -> Asked {
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
        self.take(urgency);
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
                seat.weak_thread = Some(cpu::thread_id());
                if is_held {
                    self.count_held(&mut state, asked_at);
                }
                return Ok(grant);
            }
            is_held = true;
            let changed = Arc::clone(&seat.changed);
            let until = state.machine.wait_until(self.id);
            let until = by.map_or(until, |by| by.min(until));
            let waited = changed.wait_timeout(state, until.saturating_sub(now));
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
        let is_calm = scheduler.under_way.load(SeqCst) == 0 && grants == run.grants;
        if is_calm && now < run.until {
            return None;
        }
        self.take(Urgency::Ordinary);
        let reason = self.ask(run, used, grants);
        if reason.is_none() {
            self.take(run.urgency);
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
    fn end_run(&mut self) {
        let Some(run) = self.run.take() else {
            return;
        };
        let used = run.used().saturating_sub(run.reported);
        self.take(Urgency::Ordinary);
        let mut state = self.scheduler.lock();
        self.end(&mut state, used);
        self.scheduler.dispatch(&mut state);
    }

    /// Runs `work` with `urgency`, and then goes on with that of the run, if there is one.
    fn with_urgency<T>(&self, urgency: Urgency, work: impl FnOnce() -> T) -> T {
        let Some(run) = &self.run else {
            return work();
        };
        self.take(urgency);
        let result = work();
        self.take(run.urgency);
        result
    }

    /// Runs `work`, whose CPU time is not the run's.
    fn aside<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let before = cpu::thread_time();
        let result = self.with_urgency(Urgency::Ordinary, work);
        if let Some(run) = &mut self.run {
            run.began += cpu::thread_time().saturating_sub(before);
        }
        result
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

#[cfg(test)]
mod tests;
