// SPDX-License-Identifier: Apache-2.0
//! A naive scheduler: lists and ticks of a microsecond, no queue and no closed form.

use super::super::{
    Basis, DEBT_CYCLES_MAX, FAULT_LULL_NS, FaultLoad, IdleTime, OVERRUN_GRACE_NS, PENALTY_RUNS_MAX,
    SLICE_NS_MIN, SchedulerSettings, WorkClass, YieldReason,
};

pub(super) const TICK_NS: i64 = 1_000;
const SLICE_MIN: i64 = SLICE_NS_MIN.cast_signed();

/// A run: where its time came from, by level, and what it has used.
#[derive(Clone, Debug)]
pub(super) struct ModelRun {
    pub(super) basis: Basis,
    pub(super) slice: i64,
    pub(super) used: i64,
    passed: [i64; 5],
    own: i64,
    cycle: i64,
    /// From then on it does not occupy a CPU.
    stale: i64,
    /// Order of grants.
    order: u64,
}

#[derive(Clone, Debug)]
pub(super) struct ModelTask {
    pub(super) class: WorkClass,
    /// The order of its request, if it waits.
    pub(super) waits: Option<u64>,
    pub(super) run: Option<ModelRun>,
    /// Tasks of one group make room for its faults.
    pub(super) group: usize,
    owed: i64,
    barred_until: i64,
    is_barred: bool,
    /// The order in which it was barred.
    bar: u64,
}

/// All of it is public to the tests, which also check its sums.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) settings: SchedulerSettings,
    pub(super) next: Option<SchedulerSettings>,
    pub(super) now: i64,
    start: i64,
    pub(super) cycle: i64,
    own: [i64; 5],
    passed: [i64; 5],
    fault_used: [i64; 2],
    fault_lapsed: [i64; 2],
    pub(super) under_way: u32,
    lull: i64,
    /// Faults that wait for room, by group.
    pub(super) short_of_room: Vec<u32>,
    pub(super) tasks: Vec<ModelTask>,
    orders: u64,
    /// In this cycle and by level: all that has lapsed, and what was drawn and not given back.
    pub(super) lapsed: [i64; 5],
    pub(super) drawn: [i64; 5],
    /// What the cycle began with, by level.
    pub(super) budget: [i64; 5],
}

fn shares(settings: &SchedulerSettings) -> [i64; 5] {
    let shares = settings.shares_permille;
    let work = [shares.reclaim, shares.scan, shares.background];
    let faults = [shares.vcpu_faults, shares.io_faults];
    [faults[0], faults[1], work[0], work[1], work[2]].map(i64::from)
}

fn level(class: WorkClass) -> usize {
    2 + class.index()
}

fn time(time: std::time::Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap()
}

impl Model {
    pub(super) fn new(settings: SchedulerSettings, classes: &[WorkClass]) -> Self {
        let task = |(at, class): (usize, &WorkClass)| ModelTask {
            class: *class,
            waits: None,
            run: None,
            group: super::group_of(at),
            owed: 0,
            barred_until: 0,
            is_barred: false,
            bar: 0,
        };
        let mut model = Self {
            settings,
            next: None,
            now: 0,
            start: 0,
            cycle: 0,
            own: [0; 5],
            passed: [0; 5],
            fault_used: [0; 2],
            fault_lapsed: [0; 2],
            under_way: 0,
            lull: 0,
            short_of_room: vec![0; classes.len()],
            tasks: classes.iter().enumerate().map(task).collect(),
            orders: 0,
            lapsed: [0; 5],
            drawn: [0; 5],
            budget: [0; 5],
        };
        model.open();
        model
    }

    fn cycle_ns(&self) -> i64 {
        self.settings.cycle_us.cast_signed() * 1000
    }

    fn longest(&self) -> i64 {
        self.settings.longest_run_us.cast_signed() * 1000
    }

    pub(super) fn cpus(&self) -> i64 {
        self.settings.cpus.len().try_into().unwrap()
    }

    fn able(task: &ModelTask) -> bool {
        task.waits.is_some() && !task.is_barred
    }

    fn demand(&self, class: WorkClass) -> i64 {
        let counts =
            |task: &&ModelTask| task.class == class && (task.run.is_some() || Self::able(task));
        self.tasks.iter().filter(counts).count().try_into().unwrap()
    }

    fn open(&mut self) {
        let demand = WorkClass::ALL.map(|class| self.demand(class));
        if let Some(settings) = self.next.take() {
            self.settings = settings;
        }
        self.start = self.now;
        self.cycle += 1;
        self.passed = [0; 5];
        self.lapsed = [0; 5];
        self.drawn = [0; 5];
        (self.fault_used, self.fault_lapsed) = ([0; 2], [0; 2]);
        let shares = shares(&self.settings);
        for level in 0..5 {
            let share = self.cycle_ns() * self.cpus() * shares[level] / 1000;
            if level < 2 {
                self.budget[level] = share;
                continue;
            }
            let cap = DEBT_CYCLES_MAX.cast_signed() * share.max(self.longest());
            let carried = match self.own[level] {
                debt if debt < 0 => debt.max(-cap),
                rest if demand[level - 2] > 0 => rest.min(SLICE_MIN),
                _ => 0,
            };
            self.own[level] = share + carried;
            self.budget[level] = self.own[level];
        }
    }

    /// A microsecond passes.
    pub(super) fn tick(&mut self) {
        self.now += TICK_NS;
        let shares = shares(&self.settings);
        let accrues = shares.map(|share| share * self.cpus() * TICK_NS / 1000);
        for (fault, accrues) in accrues[..2].iter().enumerate() {
            let accrued = (self.now - self.start) / TICK_NS * accrues;
            let lapsed = (accrued - self.fault_used[fault] - self.fault_lapsed[fault]).max(0);
            self.fault_lapsed[fault] += lapsed;
            self.passed[fault] += lapsed;
            self.lapsed[fault] += lapsed;
        }
        for class in WorkClass::ALL {
            let at = level(class);
            let unused = (accrues[at] - self.demand(class) * TICK_NS).max(0);
            let lapsed = unused.min(self.own[at].max(0));
            self.own[at] -= lapsed;
            self.passed[at] += lapsed;
            self.lapsed[at] += lapsed;
        }
        if self.now == self.start + self.cycle_ns() {
            self.open();
        }
        for task in &mut self.tasks {
            task.is_barred &= self.now < task.barred_until;
        }
    }

    pub(super) fn report_faults(&mut self, load: &FaultLoad) {
        self.under_way = load.under_way;
        if let Some(end) = load.last_end {
            self.lull = self.lull.max(time(end) + FAULT_LULL_NS.cast_signed());
        }
        for (sum, used) in self.fault_used.iter_mut().zip(load.used) {
            *sum += time(used);
        }
    }

    pub(super) fn want(&mut self, task: usize) {
        self.orders += 1;
        let task = &mut self.tasks[task];
        task.waits = Some(self.orders);
        task.is_barred = self.now < task.barred_until;
        task.bar = self.orders;
    }

    pub(super) fn ran(&mut self, task: usize, used: i64) {
        let task = &mut self.tasks[task];
        let run = task.run.as_mut().unwrap();
        let beyond = |used: i64| (used - run.slice).max(0);
        let overrun = beyond(run.used + used) - beyond(run.used);
        run.used += used;
        match run.basis {
            Basis::Inherited => self.fault_used[0] += used,
            Basis::Entitled | Basis::Idle => self.own[level(task.class)] -= overrun,
        }
    }

    pub(super) fn ended(&mut self, task: usize, used: i64) {
        self.ran(task, used);
        let run = self.tasks[task].run.take().unwrap();
        let class = self.tasks[task].class;
        if run.cycle == self.cycle && run.basis == Basis::Entitled {
            let mut unused = (run.slice - run.used).max(0);
            // The class's own time was used first.
            let mut back = |drawn: i64| {
                let part = unused.min(drawn);
                unused -= part;
                part
            };
            for at in 0..5 {
                let part = back(run.passed[at]);
                self.passed[at] += part;
                self.drawn[level(class)] -= part;
            }
            let own = back(run.own);
            self.own[level(class)] += own;
            self.drawn[level(class)] -= own;
        }
        let overrun = run.used - run.slice;
        if run.basis != Basis::Inherited && overrun > OVERRUN_GRACE_NS.cast_signed() {
            let penalty = overrun * i64::from(self.settings.penalty_percent) / 100;
            let penalty = (penalty + TICK_NS - 1) / TICK_NS * TICK_NS;
            let most = PENALTY_RUNS_MAX.cast_signed() * self.longest();
            let task = &mut self.tasks[task];
            task.owed = (task.owed + penalty).min(most);
        }
    }

    fn rank(&self, task: &ModelTask, run: &ModelRun) -> usize {
        let is_passed = run.passed.iter().sum::<i64>() > 0;
        match run.basis {
            Basis::Inherited => 0,
            Basis::Entitled if is_passed && self.is_last() => 3 + task.class.index(),
            Basis::Entitled => task.class.index(),
            Basis::Idle => 6 + task.class.index(),
        }
    }

    /// Ranks and orders of the runs that occupy a CPU.
    fn occupying(&self) -> Vec<(usize, u64)> {
        let runs = self
            .tasks
            .iter()
            .filter_map(|task| Some((task, task.run.as_ref()?)));
        let fresh = runs.filter(|(_, run)| self.now < run.stale);
        fresh
            .map(|(task, run)| (self.rank(task, run), run.order))
            .collect()
    }

    /// Whether work must wait because of faults.
    fn is_held(&self) -> bool {
        self.is_burst() && !self.is_last()
    }

    pub(super) fn is_burst(&self) -> bool {
        self.under_way > 0 || self.now < self.lull
    }

    fn inherits(&self, task: &ModelTask) -> bool {
        task.class == WorkClass::Reclaim && self.short_of_room[task.group] > 0
    }

    /// Whether the rest of the cycle just suffices for what is left of the shares.
    fn is_last(&self) -> bool {
        let mut work = Vec::new();
        for class in WorkClass::ALL
            .into_iter()
            .filter(|class| self.demand(*class) > 0)
        {
            let mut left = self.own[level(class)].max(0);
            for run in self
                .tasks
                .iter()
                .filter(|task| task.class == class)
                .filter_map(|t| t.run.as_ref())
            {
                left += (run.own - run.used).max(0);
            }
            work.push((left, self.demand(class).min(self.cpus())));
        }
        let remains = self.start + self.cycle_ns() - self.now;
        let all: i64 = work.iter().map(|(left, _)| left).sum();
        // Whether a nanosecond can pass and all of it still be used.
        let later = remains - 1;
        let fits =
            all <= later * self.cpus() && work.iter().all(|(left, most)| *left <= later * most);
        !fits
    }

    /// Whether a class has fewer tasks than could use its share. What is left of the share then lapses while
    /// they wait, and the last phase may end with no event; the next event notices.
    pub(super) fn is_short_of_tasks(&self) -> bool {
        let shares = shares(&self.settings);
        let demands = WorkClass::ALL.map(|class| (self.demand(class), shares[level(class)]));
        let mut wanting = demands.into_iter().filter(|(tasks, _)| *tasks > 0);
        wanting.any(|(tasks, share)| share * self.cpus() > tasks * 1000)
    }

    pub(super) fn must_yield(&self, task: usize) -> Option<YieldReason> {
        let task = &self.tasks[task];
        let run = task.run.as_ref().unwrap();
        if run.used >= run.slice || self.now >= run.stale {
            return Some(YieldReason::SliceOver);
        }
        if run.basis == Basis::Inherited || self.inherits(task) {
            return None;
        }
        if self.is_held() || (self.is_burst() && run.basis == Basis::Idle) {
            return Some(YieldReason::Fault);
        }
        let own = (self.rank(task, run), run.order);
        let ahead = self
            .occupying()
            .into_iter()
            .filter(|other| *other < own)
            .count();
        (ahead >= self.settings.cpus.len()).then_some(YieldReason::Outranked)
    }

    /// The next run to grant, after those whose turn it was have begun to pay what they owe.
    pub(super) fn next_paid(&mut self) -> Option<(usize, Basis, i64)> {
        loop {
            let next = self.next()?;
            let task = &mut self.tasks[next.0];
            if next.1 == Basis::Inherited || task.owed == 0 {
                return Some(next);
            }
            task.barred_until = self.now + task.owed;
            self.orders += 1;
            (task.owed, task.is_barred, task.bar) = (0, true, self.orders);
        }
    }

    /// The next turn: the task, its basis, and what its class may use.
    pub(super) fn next(&self) -> Option<(usize, Basis, i64)> {
        let waiting = |class: WorkClass| {
            let tasks = self.tasks.iter().enumerate();
            let able = tasks.filter(|(_, task)| task.class == class && Self::able(task));
            able.min_by_key(|(_, task)| task.waits).map(|(at, _)| at)
        };
        let tasks = self.tasks.iter().enumerate();
        let asked = tasks.filter(|(_, task)| self.inherits(task) && task.waits.is_some());
        let first = asked.min_by_key(|(_, task)| match Self::able(task) {
            true => (false, task.waits),
            false => (true, Some(task.bar)),
        });
        if let Some((at, _)) = first {
            return Some((at, Basis::Inherited, 0));
        }
        if self.is_held() {
            return None;
        }
        let is_free = |own_rank| {
            let ahead = self
                .occupying()
                .into_iter()
                .filter(|(rank, _)| *rank <= own_rank);
            ahead.count() < self.settings.cpus.len()
        };
        for class in WorkClass::ALL {
            let own = self.own[level(class)];
            if self.is_last()
                && own >= SLICE_MIN
                && is_free(class.index())
                && let Some(at) = waiting(class)
            {
                return Some((at, Basis::Entitled, own));
            }
        }
        for class in WorkClass::ALL {
            let passed: i64 = self.passed[..level(class)].iter().sum();
            let all = self.own[level(class)] + passed;
            let own_rank = if self.is_last() { 3 } else { 0 } + class.index();
            if !self.is_burst()
                && all >= SLICE_MIN
                && is_free(own_rank)
                && let Some(at) = waiting(class)
            {
                return Some((at, Basis::Entitled, all));
            }
        }
        let is_lent = self.settings.idle_time == IdleTime::Lent && !self.is_burst();
        if is_lent && self.occupying().len() < self.settings.cpus.len() {
            let first = WorkClass::ALL.into_iter().find_map(waiting);
            return first.map(|at| (at, Basis::Idle, 0));
        }
        None
    }

    /// Grants a run; returns its slice.
    pub(super) fn grant(&mut self, (at, basis, available): (usize, Basis, i64)) -> i64 {
        let class = self.tasks[at].class;
        let longest = self.longest();
        let slice = match basis {
            Basis::Entitled => available.min(longest),
            Basis::Idle | Basis::Inherited => longest,
        };
        let (mut passed, mut own) = ([0; 5], 0);
        if basis == Basis::Entitled {
            own = slice.min(self.own[level(class)].max(0));
            let mut rest = slice - own;
            for from in (0..level(class)).rev() {
                passed[from] = rest.min(self.passed[from]);
                self.passed[from] -= passed[from];
                rest -= passed[from];
            }
            self.own[level(class)] -= own;
            self.drawn[level(class)] += slice;
        }
        self.orders += 1;
        let stale = self.now + self.cycle_ns();
        let task = &mut self.tasks[at];
        task.waits = None;
        task.run = Some(ModelRun {
            basis,
            slice,
            used: 0,
            passed,
            own,
            cycle: self.cycle,
            stale,
            order: self.orders,
        });
        slice
    }
}
