// SPDX-License-Identifier: Apache-2.0
//! Who may use CPU time for memory work, when, for how long and where (Taiji 4.3, Fig. 9).
//!
//! # Terms
//! A *task* is one thread's work of one class: the reclaim of a VM, its scan, its readahead. A *run* is
//! what it is granted at a time: a *slice* of CPU time on the allowed CPUs. Time is divided into
//! *cycles*; each class has a *share* of the CPU time that the allowed CPUs have in a cycle.
//!
//! ```text
//!   level  class         held back  share                           unused time
//!   0      vCPU faults   never      reserved, not a limit            │ passed
//!   1      I/O faults    never      reserved, not a limit            ▼ down
//!   2      reclaim       yes        a guarantee; beyond it the class uses what is passed down,
//!   3      scan          yes        and idle time if `IdleTime::Lent`
//!   4      background    yes
//! ```
//!
//! # Rules
//! 1. *Faults run.* They are reported, not asked for: no call here can hold one back. While a fault is
//!    under way no work begins, and work in progress is asked to yield.
//! 2. *Except for the guarantee.* From the latest time at which the classes can still use what they have
//!    left of their own shares in this cycle, these come first: they are no longer held back by faults, and
//!    precede what was passed down, also to a higher class. So faults push work to the end of a cycle but
//!    not out of it.
//! 3. *A fault that waits for reclaim lends it its priority.* Otherwise it would wait for a task that
//!    is held back because of it. Such runs are at the expense of the vCPU faults' share.
//! 4. *By priority.* As many tasks run as there are allowed CPUs. A class with time left precedes lower
//!    classes; if no CPU is free for it, it is granted a run at once and the lowest running task is asked
//!    to yield. Tasks of one class run in the order of their requests.
//! 5. *Passed down.* Of a share, the part that accrues while its class does not need it may be used by
//!    lower classes, in order of priority (`ledger.rs`).
//! 6. *Idle time.* A CPU that no entitled class wants is lent to any class, as long as no fault is under
//!    way and until an entitled class wants it.
//! 7. *Overruns are paid.* What a run uses beyond its slice is charged to the class, if necessary in later
//!    cycles. Beyond a small grace ([`OVERRUN_GRACE_NS`]) the task owes a penalty besides: while it owes, it
//!    gets one run in a cycle, with a slice that is shorter by what it owes. A task that runs for too long is thus held back even in a class
//!    that has time.
//! 8. *A run that is not reported* for the length of a cycle (the kernel may not give a weak thread any CPU)
//!    no longer occupies a CPU.
//! 9. *New settings* take effect with the next cycle. Debts, penalties and queues stay.
//!
//! # What is guaranteed
//! A class that wants to run throughout a cycle, with at least as many tasks as there are CPUs, gets its
//! share of that cycle, less its debts and less one run; with `k` tasks on `n` CPUs at least `k/n` of it.
//! It gets at most its share and what was passed down (and idle time), plus less than one slice saved up
//! and one run that began before the cycle. This is about permissions: whether a permitted thread gets CPU
//! time from the kernel depends on how it was placed. If a class has fewer tasks than its share could use,
//! what it cannot use lapses, and the end of rule 2's time may be noticed with the next event only.
//!
//! # Example
//! One CPU, cycle 50 ms, shares 40, 20, 25, 10 and 5 percent. Reclaim wants to run all the time, a scan
//! too, and no fault comes. Reclaim uses its 12.5 ms, and the 30 ms of the faults as they accrue: at 31 ms
//! its own share is used up, and from then on it gets 60 percent of the time. The scan fills the gaps with
//! its 5 ms. What remains is the share of background work, 2.5 ms that no lower class can draw: idle time,
//! which is lent. Had faults been under way all the time, reclaim would have begun at 32.5 ms and the scan
//! at 45.
//!
//! No clock, no thread: every call passes the time, as a duration since any fixed moment. The threads that
//! obey are in `pagetide-swap`.

mod class;
mod ledger;
mod settings;
mod task;
#[cfg(test)]
mod tests;

pub use class::{FaultClass, Shares, WorkClass};
pub use ledger::DEBT_CYCLES_MAX;
pub use settings::{
    CYCLE_US_MAX, CYCLE_US_MIN, IdleTime, PENALTY_PERCENT_MAX, SLICE_NS_MIN, SchedulerSettings,
    SettingsError,
};
pub use task::{
    Basis, ClassFigures, FaultLoad, Grant, TASKS_MAX, TaskId, TooManyTasks, YieldReason,
};

use class::WORK_CLASSES;
use ledger::{Draw, Ledger, Source};
use settings::Terms;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};
use task::{Phase, Run, Task, TaskState, rank};

/// A run may exceed its slice by this without a penalty: a task looks at its time between two steps of its
/// work, so it always exceeds its slice by a part of a step. The class is charged all the same.
pub const OVERRUN_GRACE_NS: u64 = SLICE_NS_MIN;
/// Most that a task can owe, in longest runs: after so many cycles it is free again.
pub const PENALTY_RUNS_MAX: u64 = 20;

/// See the module.
#[derive(Debug)]
pub struct TaskScheduler {
    settings: SchedulerSettings,
    terms: Terms,
    next: Option<(SchedulerSettings, Terms)>,
    ledger: Ledger,
    now_ns: u64,
    /// Number of the cycle under way, from 1.
    cycle: u64,
    under_way: u32,
    waiting_for_reclaim: u32,
    tasks: HashMap<TaskId, Task>,
    next_task: u64,
    /// Waiting tasks, in the order of their requests.
    queues: [VecDeque<TaskId>; WORK_CLASSES],
    /// Waiting tasks that owe a penalty and have had their run of this cycle.
    barred: [VecDeque<TaskId>; WORK_CLASSES],
    /// In the order of their grants.
    running: Vec<TaskId>,
    figures: [ClassFigures; WORK_CLASSES],
}

/// In nanoseconds, at most 292 years.
fn ns(time: Duration) -> u64 {
    let longest = i64::MAX.cast_unsigned();
    u64::try_from(time.as_nanos()).map_or(longest, |ns| ns.min(longest))
}

impl TaskScheduler {
    /// A scheduler whose first cycle begins at `now`, on a host that has the CPUs `known`.
    ///
    /// # Errors
    /// Wrong settings.
    pub fn new(
        settings: SchedulerSettings,
        known: &[usize],
        now: Duration,
    ) -> Result<Self, SettingsError> {
        let terms = Terms::of(&settings, known)?;
        Ok(Self {
            ledger: Ledger::new(&terms, ns(now)),
            settings,
            terms,
            next: None,
            now_ns: ns(now),
            cycle: 1,
            under_way: 0,
            waiting_for_reclaim: 0,
            tasks: HashMap::new(),
            next_task: 0,
            queues: Default::default(),
            barred: Default::default(),
            running: Vec::new(),
            figures: Default::default(),
        })
    }

    /// Changes the settings from the cycle after `now` on.
    ///
    /// # Errors
    /// Wrong settings; nothing has changed then.
    pub fn change(
        &mut self,
        now: Duration,
        settings: SchedulerSettings,
        known: &[usize],
    ) -> Result<(), SettingsError> {
        let terms = Terms::of(&settings, known)?;
        self.advance(now);
        self.next = Some((settings, terms));
        Ok(())
    }

    /// The settings in effect.
    #[must_use]
    pub fn settings(&self) -> &SchedulerSettings {
        &self.settings
    }

    /// The settings that the next cycle will have.
    #[must_use]
    pub fn next_settings(&self) -> &SchedulerSettings {
        let next = self.next.as_ref();
        next.map_or(&self.settings, |(settings, _)| settings)
    }

    /// What each class has got. Runs under way count as far as they were reported.
    #[must_use]
    pub fn figures(&self, class: WorkClass) -> ClassFigures {
        self.figures[class.index()]
    }

    /// Adds a task.
    ///
    /// # Errors
    /// There are [`TASKS_MAX`] already.
    pub fn add(&mut self, class: WorkClass) -> Result<TaskId, TooManyTasks> {
        if self.tasks.len() >= TASKS_MAX {
            return Err(TooManyTasks);
        }
        let id = TaskId(self.next_task);
        self.next_task += 1;
        let task = Task {
            class,
            state: TaskState::Resting,
            owed_ns: 0,
            last_cycle: 0,
        };
        self.tasks.insert(id, task);
        Ok(id)
    }

    /// Forgets a task; its run ends, if it has one.
    pub fn remove(&mut self, now: Duration, id: TaskId) {
        self.withdraw(now, id);
        if self.running.contains(&id) {
            self.ended(now, id, Duration::ZERO);
        }
        self.tasks.remove(&id);
    }

    /// The faults of this moment, and their CPU time since the last report.
    pub fn report_faults(&mut self, now: Duration, load: &FaultLoad) {
        self.advance(now);
        for (class, used) in FaultClass::ALL.into_iter().zip(load.used) {
            self.ledger.fault_used(class, ns(used));
        }
        self.under_way = load.under_way;
        self.waiting_for_reclaim = load.waiting_for_reclaim;
    }

    /// A task that neither waits nor runs wants to run.
    pub fn want(&mut self, now: Duration, id: TaskId) {
        self.advance(now);
        let task = task_of(&mut self.tasks, id);
        assert!(matches!(task.state, TaskState::Resting));
        task.state = TaskState::Waiting;
        let queues = match task.is_barred(self.cycle) {
            true => &mut self.barred,
            false => &mut self.queues,
        };
        queues[task.class.index()].push_back(id);
    }

    /// A task that may be waiting does not want to run any more.
    pub fn withdraw(&mut self, now: Duration, id: TaskId) {
        self.advance(now);
        let task = task_of(&mut self.tasks, id);
        if matches!(task.state, TaskState::Waiting) {
            task.state = TaskState::Resting;
            for queues in [&mut self.queues, &mut self.barred] {
                queues[task.class.index()].retain(|waiting| *waiting != id);
            }
        }
    }

    /// A running task has used this much CPU time since its last report.
    pub fn ran(&mut self, now: Duration, id: TaskId, used: Duration) {
        self.advance(now);
        let task = task_of(&mut self.tasks, id);
        let class = task.class;
        let TaskState::Running(run) = &mut task.state else {
            panic!("{id:?} reports CPU time but does not run");
        };
        let before_ns = run.used_ns;
        run.used_ns = before_ns.saturating_add(ns(used));
        let within_ns = run.used_ns.min(run.slice_ns) - before_ns.min(run.slice_ns);
        let beyond_ns = ns(used) - within_ns;
        let figures = &mut self.figures[class.index()];
        let time = Duration::from_nanos;
        match run.basis {
            Basis::Entitled => {
                let own_ns = run.draw.own_left_ns(before_ns) - run.draw.own_left_ns(run.used_ns);
                figures.own += time(own_ns);
                figures.passed_down += time(within_ns - own_ns);
            }
            Basis::Idle => figures.idle += time(within_ns),
            Basis::Inherited => {
                figures.inherited += used;
                self.ledger.fault_used(FaultClass::Vcpu, ns(used));
                return;
            }
        }
        figures.own += time(beyond_ns);
        figures.overrun += time(beyond_ns);
        self.ledger.overrun(class, beyond_ns);
    }

    /// A run has ended, having used this much CPU time since the last report.
    pub fn ended(&mut self, now: Duration, id: TaskId, used: Duration) {
        self.ran(now, id, used);
        let task = task_of(&mut self.tasks, id);
        let TaskState::Running(run) = std::mem::replace(&mut task.state, TaskState::Resting) else {
            return;
        };
        self.running.retain(|running| *running != id);
        if run.basis == Basis::Inherited {
            return;
        }
        task.last_cycle = self.cycle;
        if run.basis == Basis::Entitled && run.cycle == self.cycle {
            let unused_ns = run.slice_ns.saturating_sub(run.used_ns);
            self.ledger.give_back(task.class, &run.draw, unused_ns);
        }
        let overrun_ns = run.used_ns.saturating_sub(run.slice_ns);
        if overrun_ns > OVERRUN_GRACE_NS {
            self.figures[task.class.index()].overruns += 1;
            let penalty_ns = overrun_ns.saturating_mul(self.terms.penalty_percent) / 100;
            let most_ns = PENALTY_RUNS_MAX * self.terms.longest_ns;
            task.owed_ns = task.owed_ns.saturating_add(penalty_ns).min(most_ns);
        }
    }

    /// The waiting tasks that run from now on. To be called after every event, and at the latest at
    /// [`Self::wait_until`].
    #[must_use = "a task that was granted a run counts as running"]
    pub fn dispatch(&mut self, now: Duration) -> Vec<Grant> {
        self.advance(now);
        let mut grants = Vec::new();
        grants.extend(std::iter::from_fn(|| self.grant_inherited()));
        if self.is_held_by_faults() {
            return grants;
        }
        if self.phase() == Phase::Last {
            self.grant_entitled(Source::Own, &mut grants);
        }
        if self.under_way == 0 {
            self.grant_entitled(Source::OwnAndPassed, &mut grants);
            grants.extend(std::iter::from_fn(|| self.grant_idle()));
        }
        grants
    }

    /// Whether a running task must yield, and why. The time that it has used since its last report is not
    /// considered.
    #[must_use]
    pub fn must_yield(&mut self, now: Duration, id: TaskId) -> Option<YieldReason> {
        self.advance(now);
        let task = self.tasks.get(&id)?;
        let TaskState::Running(run) = &task.state else {
            return None;
        };
        if run.used_ns >= run.slice_ns || self.now_ns >= run.stale_ns {
            return Some(YieldReason::SliceOver);
        }
        if run.basis == Basis::Inherited || self.inherits(task.class) {
            return None;
        }
        if self.under_way > 0 && (run.basis == Basis::Idle || self.is_held_by_faults()) {
            return Some(YieldReason::Fault);
        }
        let own_rank = rank(task.class, run.basis, run.draw.source(), self.phase());
        let own_at = self.running.iter().position(|running| *running == id)?;
        let ahead = self.occupied(|at, rank| (rank, at) < (own_rank, own_at));
        (ahead >= self.terms.cpu_count()).then_some(YieldReason::Outranked)
    }

    /// The latest time at which a waiting task must have [`Self::dispatch`] called, if no event comes
    /// before. Always later than the last event.
    #[must_use]
    pub fn wait_until(&self, id: TaskId) -> Duration {
        let end_ns = self.ledger.end_ns();
        let task = self.tasks.get(&id);
        let Some(task) = task.filter(|task| !task.is_barred(self.cycle)) else {
            return Duration::from_nanos(end_ns);
        };
        // The faults' time may accrue later than estimated: do not look more often than this.
        let often_ns = self.now_ns + SLICE_NS_MIN;
        let tasks = self.able_tasks();
        let passed_ns = match self.under_way {
            0 => self.ledger.when_ns(task.class, SLICE_NS_MIN, tasks),
            _ => None,
        };
        let passed_ns = passed_ns.map(|when_ns| when_ns.max(often_ns));
        let stale_ns = self.runs().map(|(_, run)| run.stale_ns);
        let times = stale_ns.chain(passed_ns).chain([self.latest_start_ns()]);
        let next_ns = times.filter(|time| *time > self.now_ns).min();
        Duration::from_nanos(next_ns.unwrap_or(end_ns).min(end_ns))
    }

    /// Whether a task waits that may be granted a run as soon as no fault is under way.
    #[must_use]
    pub fn has_held(&self) -> bool {
        self.under_way > 0 && self.queues.iter().any(|queue| !queue.is_empty())
    }

    /// Whether a task waits, for whatever reason.
    #[must_use]
    pub fn has_tasks_waiting(&self) -> bool {
        let queues = self.queues.iter().chain(&self.barred);
        queues.into_iter().any(|queue| !queue.is_empty())
    }

    /// Lets time pass: shares lapse, cycles end. A time before the last one counts as the last one.
    fn advance(&mut self, now: Duration) {
        self.now_ns = self.now_ns.max(ns(now));
        self.end_cycles();
        self.ledger.lapse(self.now_ns, self.able_tasks());
    }

    /// Ends cycles until the present time is in one.
    fn end_cycles(&mut self) {
        let mut last_begin = None;
        while self.now_ns >= self.ledger.end_ns() {
            let tasks = self.able_tasks();
            self.ledger.lapse(self.ledger.end_ns(), tasks);
            if let Some((settings, terms)) = self.next.take() {
                (self.settings, self.terms) = (settings, terms);
            }
            let forgiven = self.ledger.next_cycle(&self.terms, tasks);
            for (figures, forgiven_ns) in self.figures.iter_mut().zip(forgiven) {
                figures.forgiven += Duration::from_nanos(forgiven_ns);
            }
            for (queue, barred) in self.queues.iter_mut().zip(&mut self.barred) {
                queue.append(barred);
            }
            self.cycle += 1;
            let own_ns = WorkClass::ALL.map(|class| self.ledger.own_ns(class));
            let begin = Some((self.able_tasks(), own_ns));
            if begin == last_begin {
                // Nothing happens in this cycle, so the next ones are the same.
                self.cycle += self.ledger.skip_cycles(self.now_ns);
            }
            last_begin = begin;
        }
    }

    /// Tasks of each class that could use CPU time now.
    fn able_tasks(&self) -> [u64; WORK_CLASSES] {
        let mut tasks = WorkClass::ALL.map(|class| self.queues[class.index()].len() as u64);
        for running in &self.running {
            tasks[self.tasks[running].class.index()] += 1;
        }
        tasks
    }

    /// Whether tasks of `class` run with the priority of a fault.
    fn inherits(&self, class: WorkClass) -> bool {
        class == WorkClass::Reclaim && self.waiting_for_reclaim > 0
    }

    /// Whether faults hold back all work, also that with time of its own.
    fn is_held_by_faults(&self) -> bool {
        self.under_way > 0 && self.phase() == Phase::Open
    }

    fn phase(&self) -> Phase {
        match self.now_ns < self.latest_start_ns() {
            true => Phase::Open,
            false => Phase::Last,
        }
    }

    /// The latest time at which work can begin and still use what its classes have left of their shares.
    fn latest_start_ns(&self) -> u64 {
        let cpus = self.terms.cpu_count();
        let tasks = self.able_tasks();
        let mut left = WorkClass::ALL.map(|class| self.ledger.own_ns(class).max(0).cast_unsigned());
        for (class, run) in self.runs() {
            // Not used yet, so the CPUs still need time for it.
            left[class.index()] += run.draw.own_left_ns(run.used_ns);
        }
        let able = || left.into_iter().zip(tasks).filter(|(_, tasks)| *tasks > 0);
        let sum: u64 = able().map(|(left, _)| left).sum();
        let of_classes = able().map(|(left, tasks)| left.div_ceil(tasks.min(cpus)));
        let needed_ns = of_classes.chain([sum.div_ceil(cpus)]).max().unwrap_or(0);
        self.ledger.end_ns().saturating_sub(needed_ns)
    }

    /// Runs in the order of their grants.
    fn runs(&self) -> impl Iterator<Item = (WorkClass, &Run)> {
        self.running.iter().filter_map(|id| match &self.tasks[id] {
            Task {
                class,
                state: TaskState::Running(run),
                ..
            } => Some((*class, run)),
            _ => None,
        })
    }

    /// How many CPUs are occupied by runs for which `is_ahead`, given each one's place and rank.
    fn occupied(&self, is_ahead: impl Fn(usize, usize) -> bool) -> u64 {
        let phase = self.phase();
        let runs = self.runs().enumerate();
        let ahead = runs.filter(|(at, (class, run))| {
            let rank = rank(*class, run.basis, run.draw.source(), phase);
            self.now_ns < run.stale_ns && is_ahead(*at, rank)
        });
        ahead.count() as u64
    }

    /// Grants a run to the next task for which a fault waits.
    fn grant_inherited(&mut self) -> Option<Grant> {
        let class = WorkClass::ALL
            .into_iter()
            .find(|class| self.inherits(*class))?;
        let at = class.index();
        let id = *self.queues[at].front().or(self.barred[at].front())?;
        let longest_ns = self.terms.longest_ns;
        Some(self.grant(id, Basis::Inherited, longest_ns, Draw::default()))
    }

    /// Grants the runs that classes are entitled to, by time from `source`.
    fn grant_entitled(&mut self, source: Source, grants: &mut Vec<Grant>) {
        for class in WorkClass::ALL {
            grants.extend(std::iter::from_fn(|| self.grant_next(class, source)));
        }
    }

    fn grant_next(&mut self, class: WorkClass, source: Source) -> Option<Grant> {
        let id = *self.queues[class.index()].front()?;
        let available_ns = self.ledger.available_ns(class, source);
        let own_rank = rank(class, Basis::Entitled, source, self.phase());
        let occupied = self.occupied(|_, rank| rank <= own_rank);
        if available_ns < SLICE_NS_MIN || occupied >= self.terms.cpu_count() {
            return None;
        }
        let slice_ns = self.slice_ns(id, available_ns.min(self.terms.longest_ns));
        let draw = self.ledger.draw(class, source, slice_ns);
        Some(self.grant(id, Basis::Entitled, slice_ns, draw))
    }

    /// Lends an idle CPU to the first task that wants it.
    fn grant_idle(&mut self) -> Option<Grant> {
        let is_lent = self.terms.idle_time == IdleTime::Lent && self.under_way == 0;
        if !is_lent || self.occupied(|_, _| true) >= self.terms.cpu_count() {
            return None;
        }
        let id = *self.queues.iter().find_map(VecDeque::front)?;
        let slice_ns = self.slice_ns(id, self.terms.longest_ns);
        Some(self.grant(id, Basis::Idle, slice_ns, Draw::default()))
    }

    /// The slice of a task that may use up to `most_ns`: less what it owes, which is paid by that.
    fn slice_ns(&mut self, id: TaskId, most_ns: u64) -> u64 {
        let longest_ns = self.terms.longest_ns;
        let task = task_of(&mut self.tasks, id);
        if task.owed_ns == 0 {
            return most_ns;
        }
        // A cycle without a run pays as much as one with the shortest.
        let rested = self.cycle - task.last_cycle - 1;
        task.owed_ns = task
            .owed_ns
            .saturating_sub(rested.saturating_mul(longest_ns));
        if task.owed_ns == 0 {
            return most_ns;
        }
        let slice_ns = longest_ns
            .saturating_sub(task.owed_ns)
            .max(SLICE_NS_MIN)
            .min(most_ns);
        let paid_ns = (longest_ns - slice_ns).max(SLICE_NS_MIN).min(task.owed_ns);
        task.owed_ns -= paid_ns;
        self.figures[task.class.index()].withheld += Duration::from_nanos(paid_ns);
        slice_ns
    }

    /// Makes the first waiting task of its class a running one.
    fn grant(&mut self, id: TaskId, basis: Basis, slice_ns: u64, draw: Draw) -> Grant {
        let task = task_of(&mut self.tasks, id);
        for queues in [&mut self.queues, &mut self.barred] {
            let queue = &mut queues[task.class.index()];
            if queue.front() == Some(&id) {
                queue.pop_front();
            }
        }
        task.state = TaskState::Running(Run {
            basis,
            slice_ns,
            used_ns: 0,
            draw,
            cycle: self.cycle,
            stale_ns: self.now_ns.saturating_add(self.terms.cycle_ns),
        });
        self.running.push(id);
        self.figures[task.class.index()].runs += 1;
        Grant {
            task: id,
            slice: Duration::from_nanos(slice_ns),
            basis,
            cpus: Arc::clone(&self.terms.cpus),
        }
    }
}

fn task_of(tasks: &mut HashMap<TaskId, Task>, id: TaskId) -> &mut Task {
    tasks
        .get_mut(&id)
        .expect("a task that was added and not removed")
}
