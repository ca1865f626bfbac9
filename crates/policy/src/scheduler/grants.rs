// SPDX-License-Identifier: Apache-2.0
//! Which task runs next, and which has to yield.

use super::{
    FAULT_LULL_NS, LOOK_NS_MAX, TaskScheduler,
    class::WorkClass,
    ledger::{Draw, Source},
    settings::{IdleTime, SLICE_NS_MIN},
    task::{Basis, Grant, Phase, Run, Task, TaskId, TaskState, YieldReason, rank},
    task_of,
};
use std::{collections::VecDeque, sync::Arc, time::Duration};

/// A run that may be granted.
struct Next {
    task: TaskId,
    basis: Basis,
    /// What it draws from, if it is entitled.
    source: Source,
    slice_ns: u64,
}

impl TaskScheduler {
    /// The waiting tasks that run from now on. To be called after every event, and at the latest at
    /// [`Self::wait_until`].
    #[must_use = "a task that was granted a run counts as running"]
    pub fn dispatch(&mut self, now: Duration) -> Vec<Grant> {
        self.advance(now);
        let mut grants = Vec::new();
        while let Some(next) = self.next_run() {
            match next.basis != Basis::Inherited && self.tasks[&next.task].owed_ns > 0 {
                true => self.bar(next.task),
                false => grants.push(self.grant(&next)),
            }
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
        if run.basis == Basis::Inherited || self.inherits(task) {
            return None;
        }
        if self.is_burst() && (run.basis == Basis::Idle || self.is_held_by_faults()) {
            return Some(YieldReason::Fault);
        }
        let own_rank = rank(task.class, run.basis, run.draw.source(), self.phase());
        let own_at = self.running.iter().position(|running| *running == id)?;
        let ahead = self.occupied(|at, rank| (rank, at) < (own_rank, own_at));
        (ahead >= self.terms.cpu_count()).then_some(YieldReason::Outranked)
    }

    /// The latest time at which [`Self::dispatch`] must be called, if no event comes before; `None` if no task
    /// waits. Always later than the last event. The end of a fault is no event: whoever calls looks again in time.
    #[must_use]
    pub fn wait_until(&self) -> Option<Duration> {
        if !self.has_tasks_waiting() {
            return None;
        }
        let end_ns = self.ledger.end_ns();
        let granted_ns = match self.is_burst() {
            true => {
                let lasts_ns = self.now_ns - self.burst_ns;
                Some(self.now_ns + lasts_ns.clamp(FAULT_LULL_NS, LOOK_NS_MAX))
            }
            false => self.when_passed_ns(),
        };
        let stale_ns = self.runs().map(|(_, run)| run.stale_ns);
        let times = stale_ns
            .chain(granted_ns)
            .chain(self.barred_until_ns())
            .chain([self.latest_start_ns(), end_ns]);
        let next_ns = times.filter(|time| *time > self.now_ns).min();
        Some(Duration::from_nanos(next_ns.unwrap_or(end_ns)))
    }

    /// A task that waits, the most urgent class first.
    #[must_use]
    pub fn next_waiting(&self) -> Option<TaskId> {
        let queues = self.queues.iter().chain(&self.barred);
        queues.flatten().next().copied()
    }

    /// When enough will have been passed down to a class that waits for that, as far as can be told.
    fn when_passed_ns(&self) -> Option<u64> {
        let tasks = self.able_tasks();
        let waiting = WorkClass::ALL
            .into_iter()
            .filter(|class| !self.queues[class.index()].is_empty());
        let when_ns = waiting.filter_map(|class| self.ledger.when_ns(class, SLICE_NS_MIN, tasks));
        // The faults' time may accrue later than estimated: do not look more often than this.
        let often_ns = self.now_ns + SLICE_NS_MIN;
        when_ns.min().map(|when_ns| when_ns.max(often_ns))
    }

    /// Whether `task` runs, or would run, with the priority of a fault.
    fn inherits(&self, task: &Task) -> bool {
        task.class == WorkClass::Reclaim && self.short_of_room.contains_key(&task.group)
    }

    /// Whether faults are under way, or were a moment ago.
    pub(super) fn is_burst(&self) -> bool {
        self.under_way > 0 || self.now_ns < self.lull_ns
    }

    /// Whether faults hold back all work, also that with time of its own.
    fn is_held_by_faults(&self) -> bool {
        self.is_burst() && self.phase() == Phase::Open
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

    /// The next run to be granted.
    fn next_run(&self) -> Option<Next> {
        if let Some(next) = self.next_inherited() {
            return Some(next);
        }
        if self.is_held_by_faults() {
            return None;
        }
        let own = (self.phase() == Phase::Last).then_some(Source::Own);
        let passed = (!self.is_burst()).then_some(Source::OwnAndPassed);
        let sources = own.into_iter().chain(passed);
        let mut entitled = sources
            .flat_map(|source| WorkClass::ALL.map(|class| self.next_entitled(class, source)));
        entitled.find_map(|next| next).or_else(|| self.next_idle())
    }

    /// A task for which a fault waits, whether or not it is barred.
    fn next_inherited(&self) -> Option<Next> {
        if self.short_of_room.is_empty() {
            return None;
        }
        let at = WorkClass::Reclaim.index();
        let mut waiting = self.queues[at].iter().chain(&self.barred[at]);
        Some(Next {
            task: *waiting.find(|id| self.inherits(&self.tasks[*id]))?,
            basis: Basis::Inherited,
            source: Source::Own,
            slice_ns: self.terms.longest_ns,
        })
    }

    /// A task that is entitled to a run by time from `source`.
    fn next_entitled(&self, class: WorkClass, source: Source) -> Option<Next> {
        let task = *self.queues[class.index()].front()?;
        let available_ns = self.ledger.available_ns(class, source);
        let own_rank = rank(class, Basis::Entitled, source, self.phase());
        let occupied = self.occupied(|_, rank| rank <= own_rank);
        if available_ns < SLICE_NS_MIN || occupied >= self.terms.cpu_count() {
            return None;
        }
        Some(Next {
            task,
            basis: Basis::Entitled,
            source,
            slice_ns: available_ns.min(self.terms.longest_ns),
        })
    }

    /// The first task that wants an idle CPU, if there is one to lend.
    fn next_idle(&self) -> Option<Next> {
        let is_lent = self.terms.idle_time == IdleTime::Lent && !self.is_burst();
        if !is_lent || self.occupied(|_, _| true) >= self.terms.cpu_count() {
            return None;
        }
        Some(Next {
            task: *self.queues.iter().find_map(VecDeque::front)?,
            basis: Basis::Idle,
            source: Source::Own,
            slice_ns: self.terms.longest_ns,
        })
    }

    /// A waiting task that has its turn begins to pay what it owes instead.
    fn bar(&mut self, id: TaskId) {
        let task = task_of(&mut self.tasks, id);
        let owed_ns = std::mem::take(&mut task.owed_ns);
        task.barred_until_ns = self.now_ns.saturating_add(owed_ns);
        let at = task.class.index();
        self.figures[at].withheld += Duration::from_nanos(owed_ns);
        self.queues[at].retain(|waiting| *waiting != id);
        self.barred[at].push_back(id);
    }

    /// Makes a waiting task a running one.
    fn grant(&mut self, next: &Next) -> Grant {
        let (id, slice_ns) = (next.task, next.slice_ns);
        let task = task_of(&mut self.tasks, id);
        let class = task.class;
        for queues in [&mut self.queues, &mut self.barred] {
            queues[class.index()].retain(|waiting| *waiting != id);
        }
        task.state = TaskState::Running(Run {
            basis: next.basis,
            slice_ns,
            used_ns: 0,
            draw: match next.basis {
                Basis::Entitled => self.ledger.draw(class, next.source, slice_ns),
                Basis::Idle | Basis::Inherited => Draw::default(),
            },
            cycle: self.cycle,
            stale_ns: self.now_ns.saturating_add(self.terms.cycle_ns),
        });
        self.running.push(id);
        self.figures[class.index()].runs += 1;
        Grant {
            task: id,
            slice: Duration::from_nanos(slice_ns),
            basis: next.basis,
            cpus: Arc::clone(&self.terms.cpus),
        }
    }
}
