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
//! take, and work under locks that faults wait for must not be done in scans.

use pagetide_policy::scheduler::{
    Basis, ClassFigures, FaultClass, FaultLoad, Grant, SchedulerSettings, SettingsError, TaskId,
    TaskScheduler, TooManyTasks, WorkClass, YieldReason,
};
use pagetide_sys::cpu::{self, Urgency};
use std::{
    collections::HashMap,
    marker::PhantomData,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread::ThreadId,
    time::{Duration, Instant},
};

/// Niceness of reclaim: about a third of the weight of an ordinary thread.
const RECLAIM_NICENESS: u8 = 5;
/// Niceness of background work: the highest.
const BACKGROUND_NICENESS: u8 = 19;

/// Priority of a run on the host.
#[must_use]
pub fn urgency_of(class: WorkClass, basis: Basis) -> Urgency {
    match (class, basis) {
        (_, Basis::Inherited) => Urgency::Ordinary,
        (WorkClass::Reclaim, _) => Urgency::Yielding(RECLAIM_NICENESS),
        (WorkClass::Scan, _) => Urgency::Idle,
        (WorkClass::Background, _) => Urgency::Yielding(BACKGROUND_NICENESS),
    }
}

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
}

#[derive(Debug)]
struct State {
    machine: TaskScheduler,
    seats: HashMap<TaskId, Seat>,
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
    /// Whether work waits that was held back by faults.
    held: AtomicBool,
    /// Counts dispatches that granted runs, which may outrank others.
    grants: AtomicU64,
    /// Threads that could not be placed or made weak.
    unplaced: AtomicU64,
}

impl HostScheduler {
    /// A scheduler on a host that has the CPUs `known`.
    ///
    /// # Errors
    /// Wrong settings.
    pub fn new(settings: SchedulerSettings, known: &[usize]) -> Result<Arc<Self>, SettingsError> {
        let state = State {
            machine: TaskScheduler::new(settings, known, Duration::ZERO)?,
            seats: HashMap::new(),
        };
        Ok(Arc::new(Self {
            started: Instant::now(),
            state: Mutex::new(state),
            under_way: AtomicU32::new(0),
            sleeping_for_room: AtomicU32::new(0),
            fault_ns: Default::default(),
            held: AtomicBool::new(false),
            grants: AtomicU64::new(0),
            unplaced: AtomicU64::new(0),
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
        let mut state = self.lock();
        let id = state.machine.add(class)?;
        state.seats.insert(id, Seat::default());
        let scheduler = Arc::clone(self);
        Ok(WorkTask {
            scheduler,
            id,
            class,
            placed: Placed::default(),
        })
    }

    /// A fault is served by this thread until the value is dropped.
    #[must_use]
    pub fn fault(&self, class: FaultClass) -> FaultUnderWay<'_> {
        self.under_way.fetch_add(1, SeqCst);
        FaultUnderWay {
            scheduler: self,
            class,
            since: Instant::now(),
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
pub struct FaultUnderWay<'a> {
    scheduler: &'a HostScheduler,
    class: FaultClass,
    since: Instant,
}

impl FaultUnderWay<'_> {
    /// Runs `sleep`, in which the thread waits and needs no CPU.
    pub fn sleep<T>(&mut self, why: SleepsFor, sleep: impl FnOnce() -> T) -> T {
        self.count_time();
        let _asleep = Asleep::begin(self.scheduler, why);
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

impl Drop for FaultUnderWay<'_> {
    fn drop(&mut self) {
        self.count_time();
        self.scheduler.fault_ended();
    }
}

/// While a fault sleeps, also if it panics.
struct Asleep<'a>(&'a HostScheduler, SleepsFor);

impl<'a> Asleep<'a> {
    fn begin(scheduler: &'a HostScheduler, why: SleepsFor) -> Self {
        match why {
            SleepsFor::Room => {
                // Before it ends to be under way: reclaim must not be seen as held for nobody.
                scheduler.sleeping_for_room.fetch_add(1, SeqCst);
                scheduler.under_way.fetch_sub(1, SeqCst);
                scheduler.dispatch(&mut scheduler.lock());
            }
            SleepsFor::Other => scheduler.fault_ended(),
        }
        Self(scheduler, why)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_add(1, SeqCst);
        if self.1 == SleepsFor::Room {
            self.0.sleeping_for_room.fetch_sub(1, SeqCst);
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
        if let Some(seat) = self.scheduler.lock().seats.get_mut(&self.id) {
            seat.is_stopped = true;
            seat.changed.notify_all();
        }
    }
}

/// Work of one thread.
#[derive(Debug)]
pub struct WorkTask {
    scheduler: Arc<HostScheduler>,
    id: TaskId,
    class: WorkClass,
    placed: Placed,
}

/// How a task's thread was placed last.
#[derive(Debug)]
struct Placed {
    thread: Option<ThreadId>,
    cpus: Option<Arc<[usize]>>,
    urgency: Urgency,
    /// The kernel has refused a priority.
    is_refused: bool,
}

impl Default for Placed {
    fn default() -> Self {
        Self {
            thread: None,
            cpus: None,
            urgency: Urgency::Ordinary,
            is_refused: false,
        }
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
        let thread = std::thread::current().id();
        if self.placed.thread != Some(thread) {
            self.placed = Placed {
                thread: Some(thread),
                ..Placed::default()
            };
        }
        let grant = self.wait()?;
        self.take_cpus(&grant.cpus);
        self.take_urgency(urgency_of(self.class, grant.basis));
        Some(WorkRun {
            grants: self.scheduler.grants.load(SeqCst),
            began: cpu::thread_time(),
            reported: Duration::ZERO,
            until: self.scheduler.now() + grant.slice,
            task: self,
            grant,
            _of_this_thread: PhantomData,
        })
    }

    fn wait(&self) -> Option<Grant> {
        let mut state = self.scheduler.lock();
        if state.seats.get(&self.id)?.is_stopped {
            return None;
        }
        state.machine.want(self.scheduler.now(), self.id);
        loop {
            self.scheduler.dispatch(&mut state);
            let seat = state.seats.get_mut(&self.id)?;
            let (grant, is_stopped) = (seat.grant.take(), seat.is_stopped);
            match grant {
                Some(_) if !is_stopped => return grant,
                Some(_) => self.end(&mut state, Duration::ZERO),
                None if is_stopped => state.machine.withdraw(self.scheduler.now(), self.id),
                None => {
                    let until = state.machine.wait_until(self.id);
                    let wait = until.saturating_sub(self.scheduler.now());
                    let changed = Arc::clone(&state.seats.get(&self.id)?.changed);
                    let waited = changed.wait_timeout(state, wait);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            }
            self.scheduler.dispatch(&mut state);
            return None;
        }
    }

    fn end(&self, state: &mut State, used: Duration) {
        state.machine.ended(self.scheduler.now(), self.id, used);
    }

    fn take_cpus(&mut self, cpus: &Arc<[usize]>) {
        if self.placed.cpus.as_ref() == Some(cpus) {
            return;
        }
        if let Err(error) = cpu::set_affinity(cpus) {
            self.unplaced(&error.to_string());
        }
        self.placed.cpus = Some(Arc::clone(cpus));
    }

    fn take_urgency(&mut self, urgency: Urgency) {
        if self.placed.urgency == urgency || self.placed.is_refused {
            return;
        }
        match cpu::set_urgency(urgency) {
            Ok(()) => self.placed.urgency = urgency,
            // Without the right to raise its priority it keeps the one it has.
            Err(error) => {
                self.placed.is_refused = true;
                self.unplaced(&format!("no priority {urgency:?}: {error}"));
            }
        }
    }

    fn unplaced(&self, why: &str) {
        self.scheduler.unplaced.fetch_add(1, Relaxed);
        tracing::warn!(class = ?self.class, "a background thread runs as it is: {why}");
    }
}

impl Drop for WorkTask {
    fn drop(&mut self) {
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
    grant: Grant,
    /// Grants made when it was last checked whether it must yield.
    grants: u64,
    /// CPU time of the thread when the run began.
    began: Duration,
    /// CPU time reported so far.
    reported: Duration,
    /// The scheduler is asked again at this time at the latest.
    until: Duration,
    /// CPU time is that of the thread that began.
    _of_this_thread: PhantomData<*const ()>,
}

impl WorkRun<'_> {
    /// CPU time that the run may use.
    #[must_use]
    pub fn slice(&self) -> Duration {
        self.grant.slice
    }

    /// At whose expense it is.
    #[must_use]
    pub fn basis(&self) -> Basis {
        self.grant.basis
    }

    /// CPU time that it has used.
    #[must_use]
    pub fn used(&self) -> Duration {
        cpu::thread_time().saturating_sub(self.began)
    }

    /// To be asked between two steps: `None` to go on, or why the run must be dropped now.
    pub fn go_on(&mut self) -> Option<YieldReason> {
        let scheduler = &self.task.scheduler;
        let used = cpu::thread_time().saturating_sub(self.began);
        if used >= self.grant.slice {
            return Some(YieldReason::SliceOver);
        }
        let (now, grants) = (scheduler.now(), scheduler.grants.load(SeqCst));
        let is_calm = scheduler.under_way.load(SeqCst) == 0 && grants == self.grants;
        if is_calm && now < self.until {
            return None;
        }
        self.task.take_urgency(Urgency::Ordinary);
        let reason = self.ask(used, grants);
        if reason.is_none() {
            let urgency = urgency_of(self.task.class, self.grant.basis);
            self.task.take_urgency(urgency);
        }
        reason
    }

    fn ask(&mut self, used: Duration, grants: u64) -> Option<YieldReason> {
        let mut state = self.task.scheduler.lock();
        let now = self.task.scheduler.report_faults(&mut state);
        let since = used.saturating_sub(self.reported);
        state.machine.ran(now, self.task.id, since);
        (self.reported, self.grants) = (used, grants);
        self.until = now + self.grant.slice;
        state.machine.must_yield(now, self.task.id)
    }
}

impl Drop for WorkRun<'_> {
    fn drop(&mut self) {
        let used = self.used().saturating_sub(self.reported);
        self.task.take_urgency(Urgency::Ordinary);
        let mut state = self.task.scheduler.lock();
        self.task.end(&mut state, used);
        self.task.scheduler.dispatch(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_policy::scheduler::CYCLE_US_MAX;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Longest wait for something that must happen; far below the end of the long cycle.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// Nothing happens by itself for nine seconds: a cycle of ten, little work guaranteed.
    fn long_cycle() -> SchedulerSettings {
        let mut settings = SchedulerSettings::on(vec![one_cpu()]);
        settings.cycle_us = CYCLE_US_MAX;
        // Where this is a VM, time stolen by its host may look like an overrun.
        settings.penalty_percent = 0;
        settings.shares_permille.reclaim = 20;
        settings.shares_permille.scan = 20;
        settings.shares_permille.background = 20;
        settings
    }

    fn one_cpu() -> usize {
        *cpu::affinity().unwrap().last().unwrap()
    }

    fn scheduler(settings: SchedulerSettings) -> Arc<HostScheduler> {
        HostScheduler::new(settings, &cpu::affinity().unwrap()).unwrap()
    }

    fn wait_until(scheduler: &HostScheduler, is_so: impl Fn(&TaskScheduler) -> bool, what: &str) {
        let started = Instant::now();
        while !is_so(&scheduler.lock().machine) {
            assert!(
                started.elapsed() < PATIENCE,
                "not within {PATIENCE:?}: {what}"
            );
            std::thread::yield_now();
        }
    }

    /// Computes until `run` must yield.
    fn compute(run: &mut WorkRun<'_>) -> YieldReason {
        loop {
            if let Some(reason) = run.go_on() {
                return reason;
            }
            std::hint::black_box((0..1_000_u64).sum::<u64>());
        }
    }

    /// Policy and niceness of this thread: fields 41 and 19 of its `stat`, behind the name.
    fn policy_and_niceness() -> (i32, i32) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        (fields[38].parse().unwrap(), fields[16].parse().unwrap())
    }

    /// A thread that does work of `class` until it is stopped, and tells of each run.
    fn worker(
        scheduler: &Arc<HostScheduler>,
        class: WorkClass,
    ) -> (
        Stopper,
        Receiver<(Basis, YieldReason)>,
        std::thread::JoinHandle<()>,
    ) {
        let mut task = scheduler.task(class).unwrap();
        let stopper = task.stopper();
        let (tell, told): (Sender<_>, _) = channel();
        let thread = std::thread::spawn(move || {
            while let Some(mut run) = task.begin() {
                let reason = compute(&mut run);
                tell.send((run.basis(), reason)).unwrap();
            }
        });
        (stopper, told, thread)
    }

    #[test]
    fn a_fault_makes_work_yield_and_its_end_lets_it_go_on() {
        let mut settings = long_cycle();
        // It has no other reason to yield.
        settings.longest_run_us = CYCLE_US_MAX;
        let scheduler = scheduler(settings);
        let (stopper, told, thread) = worker(&scheduler, WorkClass::Background);
        for runs in 1..=20 {
            let has_begun =
                |machine: &TaskScheduler| machine.figures(WorkClass::Background).runs >= runs;
            wait_until(
                &scheduler,
                has_begun,
                "work goes on when no fault is under way",
            );
            let fault = scheduler.fault(FaultClass::Vcpu);
            wait_until(
                &scheduler,
                TaskScheduler::has_held,
                "work waits while a fault is under way",
            );
            drop(fault);
        }
        let last = scheduler.fault(FaultClass::Vcpu);
        wait_until(&scheduler, TaskScheduler::has_held, "the last run yields");
        stopper.stop();
        thread.join().unwrap();
        drop(last);
        let yielded = told
            .try_iter()
            .filter(|(_, reason)| *reason == YieldReason::Fault);
        assert!(yielded.count() > 10);
    }

    #[test]
    fn a_fault_that_sleeps_for_room_gets_reclaim_at_once() {
        let scheduler = scheduler(long_cycle());
        let _other = scheduler.fault(FaultClass::Io);
        let mut fault = scheduler.fault(FaultClass::Vcpu);
        let (stopper, told, thread) = worker(&scheduler, WorkClass::Reclaim);
        fault.sleep(SleepsFor::Room, || {
            let (basis, _) = told.recv_timeout(PATIENCE).unwrap();
            assert_eq!(basis, Basis::Inherited);
        });
        stopper.stop();
        thread.join().unwrap();
        assert!(scheduler.figures(WorkClass::Reclaim).inherited > Duration::ZERO);
    }

    #[test]
    fn a_run_ends_with_its_slice_and_its_time_is_counted() {
        let scheduler = scheduler(long_cycle());
        let mut task = scheduler.task(WorkClass::Scan).unwrap();
        let mut run = task.begin().unwrap();
        assert_eq!(compute(&mut run), YieldReason::SliceOver);
        let (slice, used) = (run.slice(), run.used());
        assert!(used >= slice);
        drop(run);
        let figures = scheduler.figures(WorkClass::Scan);
        let counted = figures.own + figures.passed_down + figures.idle;
        assert!(counted >= used && figures.runs == 1, "{figures:?}");
    }

    #[test]
    fn a_waiting_thread_ends_when_it_is_stopped_and_is_granted_nothing_after() {
        let scheduler = scheduler(long_cycle());
        let fault = scheduler.fault(FaultClass::Vcpu);
        let mut waiting = scheduler.task(WorkClass::Scan).unwrap();
        let stopper = waiting.stopper();
        let thread = std::thread::spawn(move || {
            assert!(waiting.begin().is_none());
            assert!(waiting.begin().is_none());
        });
        wait_until(&scheduler, TaskScheduler::has_held, "the task waits");
        stopper.stop();
        thread.join().unwrap();
        drop(fault);
        stopper.stop();
        assert_eq!(scheduler.figures(WorkClass::Scan).runs, 0);
        assert!(scheduler.lock().seats.is_empty());
    }

    #[test]
    fn a_thread_is_weak_on_its_cpus_during_a_run_and_ordinary_after() {
        let scheduler = scheduler(long_cycle());
        let allowed = one_cpu();
        let placed = |class| {
            let mut task = scheduler.task(class).unwrap();
            std::thread::spawn(move || {
                let run = task.begin().unwrap();
                assert_eq!(cpu::affinity().unwrap(), [allowed]);
                let within = policy_and_niceness();
                drop(run);
                let after = policy_and_niceness();
                (within, after, task)
            })
            .join()
            .unwrap()
        };
        for (class, policy, niceness) in [
            (WorkClass::Reclaim, 0, i32::from(RECLAIM_NICENESS)),
            (WorkClass::Scan, 5, 0),
            (WorkClass::Background, 0, i32::from(BACKGROUND_NICENESS)),
        ] {
            let ((got, nice), after, task) = placed(class);
            assert_eq!(got, policy, "{class:?}");
            assert!(policy == 5 || nice == niceness, "{class:?} {nice}");
            match scheduler.unplaced() {
                0 => assert_eq!(after, (0, 0), "{class:?}"),
                _ => eprintln!("SKIPPED the way back: no CAP_SYS_NICE"),
            }
            drop(task);
        }
    }

    #[test]
    fn threads_of_all_classes_get_their_runs_beside_faults() {
        let mut settings = SchedulerSettings::on(vec![one_cpu()]);
        settings.cycle_us = 10_000;
        settings.longest_run_us = 500;
        let scheduler = scheduler(settings.clone());
        let workers = [WorkClass::ALL; 2].concat();
        let workers: Vec<_> = workers
            .into_iter()
            .map(|class| worker(&scheduler, class))
            .collect();
        for round in 0..40 {
            // Some faults at a time, and one that sleeps.
            let faults = [(); 3].map(|()| scheduler.fault(FaultClass::Vcpu));
            let mut sleeper = scheduler.fault(FaultClass::Io);
            let (_, told, _) = &workers[round % workers.len()];
            while told.try_recv().is_ok() {}
            // A scan may have to wait for a CPU that nothing else on this host wants.
            sleeper.sleep(SleepsFor::Other, || {
                told.recv_timeout(10 * PATIENCE).unwrap()
            });
            drop(faults);
            settings.longest_run_us = 500 + round as u64;
            scheduler
                .change(settings.clone(), &cpu::affinity().unwrap())
                .unwrap();
        }
        for (stopper, _, thread) in &workers {
            stopper.stop();
            wait_until(&scheduler, |_| thread.is_finished(), "a worker ends");
        }
        for class in WorkClass::ALL {
            assert!(scheduler.figures(class).runs > 0, "{class:?}");
        }
        assert_eq!(scheduler.settings(), settings);
        assert_eq!(scheduler.under_way.load(SeqCst), 0);
        assert!(scheduler.lock().seats.is_empty());
    }
}
