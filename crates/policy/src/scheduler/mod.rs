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
//!    under way no work begins, and work in progress is asked to yield. Faults come in bursts: a vCPU that has
//!    been served faults on the next page some microseconds later. So one counts as under way until none has
//!    come for a *lull* ([`FAULT_LULL_NS`]). Otherwise work would begin at the end of each fault of a burst: at
//!    the moment at which the vCPU that was served needs its CPU.
//! 2. *Except for the guarantee.* From the latest time at which the classes can still use what they have
//!    left of their own shares in this cycle, these come first: they are no longer held back by faults, and
//!    precede what was passed down, also to a higher class. So faults push work to the end of a cycle but
//!    not out of it. A class uses its own share before what was passed down to it: what it got between two
//!    bursts need not be guaranteed once more.
//! 3. *A fault that waits for reclaim lends it its priority.* Otherwise it would wait for a task that
//!    is held back because of it. It lends it to the tasks of its own VM (*group*) only, since no other can make
//!    room for it. Such runs are at the expense of the vCPU faults' share.
//! 4. *By priority.* As many tasks run as there are allowed CPUs. A class with time left precedes lower
//!    classes; if no CPU is free for it, it is granted a run at once and the lowest running task is asked
//!    to yield. Tasks of one class run in the order of their requests.
//! 5. *Passed down.* Of a share, the part that accrues while its class does not need it may be used by
//!    lower classes, in order of priority (`ledger.rs`).
//! 6. *Idle time.* A CPU that no entitled class wants is lent to any class, as long as no fault is under
//!    way and until an entitled class wants it.
//! 7. *Overruns are paid.* What a run uses beyond its slice is charged to the class, if necessary in later
//!    cycles. Beyond a small grace ([`OVERRUN_GRACE_NS`]) the task owes a penalty besides: when it would be
//!    granted its next run, it is *barred* for as long as it owes, and others run instead. So a penalty costs
//!    the time that it says, also if nobody else wants to run, and waiting for other reasons does not pay it. A
//!    task that runs for too long is thus held back even in a class that has time.
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
//! too, and no fault comes. Reclaim uses its 12.5 ms, and then what accrues of the faults' 30 ms: at 31 ms
//! it has caught up with that, and from then on it gets 60 percent of the time. The scan fills the gaps with
//! its 5 ms. What remains is the share of background work, 2.5 ms that no lower class can draw: idle time,
//! which is lent. Had faults been under way all the time, reclaim would have begun at 32.5 ms and the scan
//! at 45.
//!
//! No clock, no thread: every call passes the time, as a duration since any fixed moment. The threads that
//! obey are in `pagetide-swap`.

mod class;
mod grants;
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
    Basis, ClassFigures, FaultLoad, Grant, GroupId, TASKS_MAX, TaskId, TooManyTasks, YieldReason,
};

use class::WORK_CLASSES;
use ledger::Ledger;
use settings::Terms;
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};
use task::{Task, TaskState};

/// A run may exceed its slice by this without a penalty: a task looks at its time between two steps of its
/// work, so it always exceeds its slice by a part of a step. The class is charged all the same.
pub const OVERRUN_GRACE_NS: u64 = SLICE_NS_MIN;
/// Most that a task can owe, in longest runs: 40 ms by default.
pub const PENALTY_RUNS_MAX: u64 = 20;
/// Penalties are in whole microseconds, as times that are set.
const PENALTY_UNIT_NS: u64 = 1_000;
/// Time without any fault after which a burst of them is over. A vCPU that touches one absent page after the
/// other has a fault every ten to some hundred microseconds; and what work loses at the end of a burst must stay
/// small beside a cycle.
pub const FAULT_LULL_NS: u64 = 1_000_000;
/// Longest time between two looks whether a burst is over. Each takes some microseconds of a vCPU that may be in a
/// fault, so a burst is looked at ever less often.
const LOOK_NS_MAX: u64 = 4 * FAULT_LULL_NS;

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
    /// When the burst of faults began, or was first heard of.
    burst_ns: u64,
    /// It is over at this time, if no fault comes before.
    lull_ns: u64,
    /// Groups with faults that sleep until reclaim has made room, and how many.
    short_of_room: HashMap<GroupId, u32>,
    tasks: HashMap<TaskId, Task>,
    next_task: u64,
    requests: u64,
    /// Waiting tasks, in the order of their requests.
    queues: [VecDeque<TaskId>; WORK_CLASSES],
    /// Waiting tasks that pay a penalty, in the order in which they were barred.
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
            burst_ns: 0,
            lull_ns: 0,
            short_of_room: HashMap::new(),
            tasks: HashMap::new(),
            next_task: 0,
            requests: 0,
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

    /// Adds a task of `group`.
    ///
    /// # Errors
    /// There are [`TASKS_MAX`] already.
    pub fn add(&mut self, class: WorkClass, group: GroupId) -> Result<TaskId, TooManyTasks> {
        if self.tasks.len() >= TASKS_MAX {
            return Err(TooManyTasks);
        }
        let id = TaskId(self.next_task);
        self.next_task += 1;
        let task = Task {
            class,
            group,
            state: TaskState::Resting,
            request: 0,
            owed_ns: 0,
            barred_until_ns: 0,
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
        if !self.is_burst() {
            self.burst_ns = self.now_ns;
        }
        self.under_way = load.under_way;
        if let Some(end) = load.last_end {
            self.lull_ns = self.lull_ns.max(ns(end).saturating_add(FAULT_LULL_NS));
        }
    }

    /// A fault of `group` sleeps until reclaim has made room.
    pub fn room_wanted(&mut self, now: Duration, group: GroupId) {
        self.advance(now);
        *self.short_of_room.entry(group).or_default() += 1;
    }

    /// It sleeps no more.
    pub fn room_found(&mut self, now: Duration, group: GroupId) {
        self.advance(now);
        if let Some(faults) = self.short_of_room.get_mut(&group) {
            *faults -= 1;
            if *faults == 0 {
                self.short_of_room.remove(&group);
            }
        }
    }

    /// A task that neither waits nor runs wants to run.
    pub fn want(&mut self, now: Duration, id: TaskId) {
        self.advance(now);
        self.requests += 1;
        let task = task_of(&mut self.tasks, id);
        assert!(matches!(task.state, TaskState::Resting));
        (task.state, task.request) = (TaskState::Waiting, self.requests);
        let queues = match task.is_barred(self.now_ns) {
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
        if run.basis == Basis::Entitled && run.cycle == self.cycle {
            let unused_ns = run.slice_ns.saturating_sub(run.used_ns);
            self.ledger.give_back(task.class, &run.draw, unused_ns);
        }
        let overrun_ns = run.used_ns.saturating_sub(run.slice_ns);
        if overrun_ns > OVERRUN_GRACE_NS {
            self.figures[task.class.index()].overruns += 1;
            let penalty_ns = overrun_ns.saturating_mul(self.terms.penalty_percent) / 100;
            let penalty_ns = penalty_ns.div_ceil(PENALTY_UNIT_NS) * PENALTY_UNIT_NS;
            let most_ns = PENALTY_RUNS_MAX * self.terms.longest_ns;
            task.owed_ns = task.owed_ns.saturating_add(penalty_ns).min(most_ns);
        }
    }

    /// How many tasks wait, for whatever reason.
    #[must_use]
    pub fn tasks_waiting(&self) -> usize {
        let queues = self.queues.iter().chain(&self.barred);
        queues.map(VecDeque::len).sum()
    }

    /// Whether a task waits, for whatever reason.
    #[must_use]
    pub fn has_tasks_waiting(&self) -> bool {
        self.tasks_waiting() > 0
    }

    /// Lets time pass: shares lapse, cycles end, penalties are paid. A time before the last one counts as the
    /// last one.
    fn advance(&mut self, now: Duration) {
        let now_ns = self.now_ns.max(ns(now));
        while let Some(free_ns) = self.barred_until_ns().filter(|free_ns| *free_ns <= now_ns) {
            // How much lapses depends on how many tasks could run.
            self.pass_to(free_ns.max(self.now_ns));
            self.let_barred_go();
        }
        self.pass_to(now_ns);
    }

    /// When the next barred task has paid.
    fn barred_until_ns(&self) -> Option<u64> {
        let barred = self.barred.iter().flatten();
        barred.map(|id| self.tasks[id].barred_until_ns).min()
    }

    /// Tasks that have paid wait at their old places again.
    fn let_barred_go(&mut self) {
        for (queue, barred) in self.queues.iter_mut().zip(&mut self.barred) {
            let tasks = &self.tasks;
            let has_paid = |id: &TaskId| !tasks[id].is_barred(self.now_ns);
            let free: Vec<TaskId> = barred.iter().copied().filter(has_paid).collect();
            barred.retain(|id| !has_paid(id));
            for id in free {
                let at = queue.partition_point(|other| tasks[other].request < tasks[&id].request);
                queue.insert(at, id);
            }
        }
    }

    fn pass_to(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
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
            self.cycle += 1;
            let begin = WorkClass::ALL.map(|class| self.ledger.own_ns(class));
            if last_begin == Some(begin) {
                // Nothing happens in this cycle, so the next ones are the same.
                self.cycle += self.ledger.skip_cycles(self.now_ns);
            }
            last_begin = Some(begin);
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
}

fn task_of(tasks: &mut HashMap<TaskId, Task>, id: TaskId) -> &mut Task {
    tasks
        .get_mut(&id)
        .expect("a task that was added and not removed")
}
