// SPDX-License-Identifier: Apache-2.0
//! [`HostScheduler`]: threads that obey [`pagetide_policy::scheduler`].
//!
//! ```text
//!   fault thread                   scheduler                        thread of a task
//!                                                                   begin() ── waits
//!   fault() ─── counter + 1 ─────►                                    ▲
//!     … serves it                  dispatch ◄── every event           │ grant
//!   drop ────── counter - 1 ─────►   │      ◄── timer of one of them  │
//!               and when             └───────────────────────────────►┘
//!                                    under one lock                 run: go_on() between two steps
//!                                                                   drop ── time used, dispatch
//! ```
//! Threads of work block in [`WorkTask::begin`] until they are granted a run. They do their work in steps
//! and ask [`WorkRun::go_on`] between two of them; on a reason to yield they drop the run and begin again.
//! A step should take some ten microseconds. CPU time is that of the thread, so a thread that the kernel
//! leaves waiting uses none.
//!
//! # What faults pay
//! A fault adds to a counter when it begins; when it ends, it notes the time and subtracts. It takes no lock and
//! wakes nobody: the vCPU that was served needs this CPU now. Work goes on after a lull, and looks itself whether
//! there is one.
//!
//! A fault that sleeps for want of room is not under way, and takes the lock: reclaim of its VM runs with its
//! priority meanwhile.
//!
//! # The timer
//! Time alone may entitle a task to a run. If each waiting thread watched the clock for that, all of them would
//! wake at once for the one that is next. So one of them, the *leader*, waits with a timer; it dispatches for all,
//! and who is granted nothing sleeps on. A leader that leaves hands over to the next one.
//!
//! # Priorities of threads
//! | class | priority | why |
//! |---|---|---|
//! | reclaim | `SCHED_FIFO`, the lowest; niceness 5 in idle time | its runs are short, and whole: see below |
//! | scan | `SCHED_IDLE` | nothing is lost when it is late |
//! | background | niceness 19 | it makes progress even on a busy host |
//!
//! *Whole runs.* A thread of the ordinary class that works beside a vCPU gets its CPU at the moment at which the
//! vCPU goes to sleep in a fault. It has the CPU for some hundred microseconds, and the vCPU, whose page was there
//! after five, waits for that. So a run of two milliseconds delayed some ten faults. A real-time thread takes the
//! CPU where it is woken, mostly while the vCPU computes, and has it until the run is over. What vCPUs lose is the
//! same, and is bounded by shares and slices; but at most one fault waits for each run.
//!
//! Niceness and `SCHED_IDLE` are relative to threads of the same cgroup. Where vCPUs are in another cgroup
//! than the daemon, the weights of the two decide first (`cpu.weight`, `cpu.shares`). Slices and CPUs hold
//! in any case.
//!
//! A weak thread may lose its CPU while it holds a lock. If a fault can wait for that lock, the fault is as
//! slow as the weak thread. So between two runs no thread is weaker than niceness 5, for it takes this module's
//! lock, and the parts of a scan that hold what faults wait for are done with that priority
//! ([`firmly`](turns::Turns::firmly)). Without the right to become ordinary again no thread is made weak ([`Weakness`]).
//!
//! # Groups
//! The tasks of one VM take turns on one thread: they are a [`WorkGroup`](group::WorkGroup). When reclaim is needed
//! ([`hurry`](group::WorkGroup::hurry)), a scan or background work of the same VM must not keep the thread: from then until
//! [`calm`](group::WorkGroup::calm) such a task yields and is granted nothing, and its thread is made ordinary at once by
//! the thread that needs reclaim.

mod faults;
pub mod group;
mod standing;
mod task;
pub mod turns;
mod weakness;

pub use faults::FaultUnderWay;
pub use task::{Stopper, WorkRun, WorkTask};
pub use weakness::Weakness;

use faults::{Asleep, Counted, SERVED_HERE};
use pagetide_policy::scheduler::{
    ClassFigures, FAULT_LULL_NS, FaultClass, FaultLoad, Grant, GroupId, SchedulerSettings,
    SettingsError, TaskId, TaskScheduler, TooManyTasks, WorkClass,
};
use standing::GroupState;
use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

/// A task's place in the scheduler.
#[derive(Debug)]
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
    timer: Option<Timer>,
}

impl State {
    /// How long the thread of the waiting task `id` may wait without a look at the time; `None`: as long as it
    /// likes, another one looks.
    fn lead(&mut self, id: TaskId) -> Option<Duration> {
        if self.timer.as_ref().is_some_and(|timer| timer.leader != id) {
            return None;
        }
        let until = self.machine.wait_until()?;
        self.timer = Some(Timer { leader: id, until });
        Some(until)
    }

    /// The thread of `id` waits no more: another one looks at the time from now on.
    fn stop_leading(&mut self, id: TaskId) {
        if self.timer.as_ref().is_some_and(|timer| timer.leader != id) {
            return;
        }
        self.timer = None;
        let next = self.machine.next_waiting();
        if let Some(seat) = next.and_then(|id| self.seats.get(&id)) {
            seat.changed.notify_all();
        }
    }
}

/// The timer that one of the waiting threads keeps for all of them.
#[derive(Debug)]
struct Timer {
    leader: TaskId,
    until: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct HostScheduler {
    started: Instant,
    state: Mutex<State>,
    /// Faults under way, without those that sleep.
    under_way: AtomicU32,
    /// When the last fault ended, in nanoseconds since the start; 0 if there was none.
    last_fault_ns: AtomicU64,
    groups: AtomicU64,
    /// Time used by faults and not reported yet, by class.
    fault_ns: [AtomicU64; 2],
    /// The same, reported.
    reported_ns: [AtomicU64; 2],
    faults: [AtomicU64; 2],
    /// Counts dispatches that granted runs, which may outrank others.
    grants: AtomicU64,
    /// Threads that could not be placed or made weak.
    unplaced: AtomicU64,
    weakness: Weakness,
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
            timer: None,
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
            last_fault_ns: AtomicU64::new(0),
            groups: AtomicU64::new(0),
            fault_ns: Default::default(),
            reported_ns: Default::default(),
            faults: Default::default(),
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

    /// A task of `class` that is a group by itself, for one thread.
    ///
    /// # Errors
    /// There are too many already.
    pub fn task(self: &Arc<Self>, class: WorkClass) -> Result<WorkTask, TooManyTasks> {
        self.task_with(class, self.new_group())
    }

    fn new_group(&self) -> Arc<GroupState> {
        let number = self.groups.fetch_add(1, Relaxed);
        Arc::new(GroupState::new(GroupId(number)))
    }

    fn task_with(
        self: &Arc<Self>,
        class: WorkClass,
        group: Arc<GroupState>,
    ) -> Result<WorkTask, TooManyTasks> {
        let mut state = self.lock();
        let id = state.machine.add(class, group.id)?;
        let seat = Seat {
            changed: Arc::default(),
            grant: None,
            is_stopped: false,
            group: Arc::clone(&group),
            weak_thread: None,
        };
        state.seats.insert(id, seat);
        drop(state);
        Ok(WorkTask::new(Arc::clone(self), id, class, group))
    }

    /// A fault is served by this thread until the value is dropped.
    #[must_use]
    pub fn fault(self: &Arc<Self>, class: FaultClass) -> FaultUnderWay {
        self.under_way.fetch_add(1, SeqCst);
        FaultUnderWay::new(Arc::clone(self), class)
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

    /// Runs `wait`, in which this thread waits for room in the memory of `group`: so does the fault that it
    /// serves, if there is one. Reclaim of that group has the priority of faults meanwhile.
    fn wait_for_room<T>(&self, group: GroupId, wait: impl FnOnce() -> T) -> T {
        match SERVED_HERE.with_borrow_mut(Vec::pop) {
            Some(mut fault) => {
                let result = fault.asleep(group, wait);
                SERVED_HERE.with_borrow_mut(|faults| faults.push(fault));
                result
            }
            None => {
                let _asleep = Asleep::begin(self, group, Counted::No);
                wait()
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
        // The counter first: a fault that has left it has noted the time before.
        let under_way = self.under_way.load(SeqCst);
        let load = FaultLoad {
            under_way,
            last_end: self.last_fault(),
            used: used.map(Duration::from_nanos),
        };
        let now = self.now();
        state.machine.report_faults(now, &load);
        now
    }

    fn last_fault(&self) -> Option<Duration> {
        let ns = self.last_fault_ns.load(SeqCst);
        (ns > 0).then(|| Duration::from_nanos(ns))
    }

    /// Whether faults are under way at `now`, or were a moment ago.
    fn is_burst(&self, now: Duration) -> bool {
        let lull = Duration::from_nanos(FAULT_LULL_NS);
        self.under_way.load(SeqCst) > 0 || self.last_fault().is_some_and(|end| now < end + lull)
    }

    /// Grants what can be granted now, and wakes the threads concerned.
    fn dispatch(&self, state: &mut State) {
        let now = self.report_faults(state);
        for grant in state.machine.dispatch(now) {
            self.grants.fetch_add(1, SeqCst);
            if let Some(seat) = state.seats.get_mut(&grant.task) {
                seat.changed.notify_all();
                seat.grant = Some(grant);
            }
        }
        if let Some(timer) = &state.timer
            && let Some(leader) = state.seats.get(&timer.leader)
            && let Some(until) = state.machine.wait_until()
            && until < timer.until
        {
            leader.changed.notify_all();
        }
    }

    /// A fault has ended or fallen asleep.
    fn fault_ended(&self) {
        let now_ns = u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX);
        // Before it leaves the counter, see `report_faults`.
        self.last_fault_ns.store(now_ns.max(1), SeqCst);
        self.under_way.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests;
