// SPDX-License-Identifier: Apache-2.0
//! The scheduler against a naive one over seeded sequences of events, and what it promises.

mod model;

use super::*;
use model::{Model, TICK_NS};
use pagetide_random::SplitMix64;

/// Ticks after which a simulated task looks at its time again, at most.
const STEP_TICKS_MAX: u64 = 60;
/// The longest runs that are tried.
const RUN_US_MAX: u64 = 900;
const KNOWN: [usize; 4] = [0, 1, 2, 3];
/// Whose tasks they are, where that does not matter.
const VM: GroupId = GroupId(1);

fn time(ns: i64) -> Duration {
    Duration::from_nanos(ns.try_into().unwrap())
}

/// The first task of each class is of one VM, and so on.
fn group_of(task: usize) -> usize {
    task / WorkClass::ALL.len()
}

fn small(cpus: usize) -> SchedulerSettings {
    SchedulerSettings {
        cycle_us: 5_000,
        longest_run_us: 400,
        ..SchedulerSettings::on(KNOWN[..cpus].to_vec())
    }
}

/// How the tasks and faults of a simulation behave.
#[derive(Clone, Copy)]
struct Habits {
    /// One run in so many exceeds its slice by far.
    overrun_one_in: u64,
    /// A task rests for up to so many ticks after a run; 0 to ask again at once.
    rest_ticks_max: u64,
    /// A fault, or a change of faults, every so many ticks; 0 for never.
    fault_ticks: u64,
    /// Each such time, one in so many that a fault begins to wait for room; 0 for never.
    waits_one_in: u64,
}

/// Whether a run ends when it must.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Manner {
    Obeys,
    Overruns,
}

/// What a simulated task does next, and when.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Next {
    Wants(i64),
    Waits,
    /// Looks at its time; has not reported the CPU time since.
    Looks {
        at: i64,
        since: i64,
        manner: Manner,
    },
}

/// Tasks that run as permitted, under virtual time; each step is compared with the model's.
struct Simulation {
    scheduler: TaskScheduler,
    model: Model,
    random: SplitMix64,
    habits: Habits,
    ids: Vec<TaskId>,
    next: Vec<Next>,
    /// Ticks for which the model would have granted a run.
    patience: i64,
    /// CPU time used in this cycle by class, without that of idle and inherited runs.
    used: [i64; 3],
    /// Overruns in this cycle, by class.
    overrun: [i64; 3],
    /// Share used in each cycle that has ended, by class.
    history: Vec<[i64; 3]>,
}

impl Simulation {
    fn new(settings: SchedulerSettings, classes: &[WorkClass], habits: Habits, seed: u64) -> Self {
        let mut scheduler = TaskScheduler::new(settings.clone(), &KNOWN, Duration::ZERO).unwrap();
        Self {
            ids: classes
                .iter()
                .enumerate()
                .map(|(at, class)| scheduler.add(*class, GroupId(group_of(at) as u64)).unwrap())
                .collect(),
            scheduler,
            model: Model::new(settings, classes),
            random: SplitMix64::new(seed),
            habits,
            next: vec![Next::Wants(TICK_NS); classes.len()],
            patience: 0,
            used: [0; 3],
            overrun: [0; 3],
            history: Vec::new(),
        }
    }

    fn now(&self) -> Duration {
        time(self.model.now)
    }

    fn ticks(&mut self, ticks: u64) -> i64 {
        TICK_NS * (1 + self.random.below(ticks).cast_signed())
    }

    fn run_until(&mut self, end_us: i64) {
        while self.model.now < end_us * TICK_NS {
            let cycle = self.model.cycle;
            let before = [self.model.budget, self.model.lapsed, self.model.drawn];
            self.model.tick();
            for (at, next) in self.next.iter().enumerate() {
                if let (Next::Looks { .. }, Some(run)) = (next, &self.model.tasks[at].run) {
                    let class = self.model.tasks[at].class.index();
                    self.used[class] += if run.basis == Basis::Entitled {
                        TICK_NS
                    } else {
                        0
                    };
                }
            }
            if self.model.cycle != cycle {
                self.check_cycle(before);
            }
            if self.events() {
                self.dispatch();
            } else if self.model.next().is_some() && !self.model.is_short_of_tasks() {
                // Nobody looks at once when a burst is over, or when enough is passed down.
                self.patience += TICK_NS;
                let both = (&self.model, &self.scheduler);
                assert!(
                    self.patience <= LOOK_NS_MAX.cast_signed() + TICK_NS,
                    "{both:?}"
                );
            }
        }
    }

    /// A class was granted at most its share and what was passed down. It used at most that, what was left
    /// of runs that began before the cycle, and what its tasks took beyond their slices.
    fn check_cycle(&mut self, [budget, lapsed, drawn]: [[i64; 5]; 3]) {
        for class in WorkClass::ALL {
            let (at, level) = (class.index(), 2 + class.index());
            let passed: i64 = lapsed[..level].iter().sum();
            let most = budget[level].max(0) + passed;
            assert!(drawn[level] <= most, "{class:?} {} {most}", drawn[level]);
            let tasks = self
                .model
                .tasks
                .iter()
                .filter(|task| task.class == class)
                .count();
            let from_before = RUN_US_MAX.cast_signed() * TICK_NS * i64::try_from(tasks).unwrap();
            let most = most + from_before + self.overrun[at];
            assert!(self.used[at] <= most, "{class:?} {} {most}", self.used[at]);
        }
        self.history.push(self.used);
        (self.used, self.overrun) = ([0; 3], [0; 3]);
    }

    /// Everything that happens at this tick; whether anything did.
    fn events(&mut self) -> bool {
        let mut any = self.faults();
        any |= self.settings();
        for at in 0..self.ids.len() {
            any |= self.task(at);
        }
        any
    }

    fn faults(&mut self) -> bool {
        let ticks = self.habits.fault_ticks;
        if ticks == 0 || self.random.below(ticks) > 0 {
            return false;
        }
        let is_busy = self.random.below(2) == 0;
        let waits = self.habits.waits_one_in;
        let load = FaultLoad {
            under_way: if is_busy {
                1 + self.model.under_way.min(3)
            } else {
                0
            },
            last_end: (self.model.under_way > 0).then(|| self.now()),
            used: [(); 2].map(|()| time(self.random.below(50).cast_signed() * TICK_NS)),
        };
        self.model.report_faults(&load);
        self.scheduler.report_faults(self.now(), &load);
        let group = self.random.index(self.model.tasks.len());
        let (now, id) = (self.now(), GroupId(group as u64));
        if self.model.short_of_room[group] > 0 {
            self.model.short_of_room[group] -= 1;
            self.scheduler.room_found(now, id);
        } else if waits > 0 && self.random.below(waits) == 0 {
            self.model.short_of_room[group] += 1 + u32::from(is_busy);
            (0..=u32::from(is_busy)).for_each(|_| self.scheduler.room_wanted(now, id));
        }
        true
    }

    /// Now and then, new settings.
    fn settings(&mut self) -> bool {
        if self.habits.overrun_one_in == 0 || self.random.below(9_000) > 0 {
            return false;
        }
        let mut settings = small(1 + self.random.index(4));
        settings.cycle_us = 1_000 * (1 + self.random.below(8));
        settings.longest_run_us = 100 + self.random.below(RUN_US_MAX - 99);
        settings.penalty_percent = [0, 50, 100, 300][self.random.index(4)];
        settings.idle_time = [IdleTime::Lent, IdleTime::Unused][self.random.index(2)];
        let mut share = || u32::try_from(self.random.below(200)).unwrap();
        let mut shares = Shares {
            vcpu_faults: share(),
            io_faults: share(),
            reclaim: 0,
            scan: share(),
            background: share(),
        };
        // More than its tasks can use, at times.
        let rest = 1_000 - shares.levels().iter().sum::<u64>();
        shares.reclaim = 1 + u32::try_from(self.random.below(rest)).unwrap();
        settings.shares_permille = shares;
        self.scheduler
            .change(self.now(), settings.clone(), &KNOWN)
            .unwrap();
        self.model.next = Some(settings);
        true
    }

    fn task(&mut self, at: usize) -> bool {
        let now = self.model.now;
        match self.next[at] {
            Next::Wants(when) if when <= now => {
                self.model.want(at);
                self.scheduler.want(time(now), self.ids[at]);
                self.next[at] = Next::Waits;
                true
            }
            Next::Waits => self.is_time_to_look(),
            Next::Looks {
                at: when,
                since,
                manner,
            } if when <= now => {
                self.look(at, now - since, manner);
                true
            }
            _ => false,
        }
    }

    fn is_time_to_look(&self) -> bool {
        let until = self.scheduler.wait_until();
        until.is_none_or(|until| self.now() >= until)
    }

    /// A running task looks at its time.
    fn look(&mut self, at: usize, used: i64, manner: Manner) {
        let (now, id) = (self.now(), self.ids[at]);
        let expected = self.model.must_yield(at);
        let must = self.scheduler.must_yield(now, id);
        assert_eq!(must, expected, "at {now:?}");
        let run = self.model.tasks[at].run.clone().unwrap();
        if run.basis != Basis::Inherited {
            let beyond = |used: i64| (used - run.slice).max(0);
            let class = self.model.tasks[at].class.index();
            self.overrun[class] += beyond(run.used + used) - beyond(run.used);
        }
        let is_over = must.is_some() || run.used + used >= run.slice;
        let since = self.model.now;
        if !is_over || manner == Manner::Overruns {
            self.scheduler.ran(now, id, time(used));
            self.model.ran(at, used);
            let at_next = since + self.ticks(STEP_TICKS_MAX);
            let manner = match self.random.below(30) {
                0 => Manner::Obeys,
                _ => manner,
            };
            self.next[at] = Next::Looks {
                at: at_next,
                since,
                manner,
            };
            return;
        }
        self.scheduler.ended(now, id, time(used));
        self.model.ended(at, used);
        let rest = self.habits.rest_ticks_max;
        let rests = if rest == 0 { 0 } else { self.ticks(rest) };
        self.next[at] = Next::Wants(since + rests);
        // It asks in the same instant, before another one can be granted its time.
        if rest == 0 {
            self.task(at);
        }
    }

    fn dispatch(&mut self) {
        self.patience = 0;
        let now = self.model.now;
        let grants = self.scheduler.dispatch(time(now));
        for grant in &grants {
            let next = self
                .model
                .next_paid()
                .expect("the model grants nothing more");
            let (at, basis, _) = next;
            let slice = self.model.grant(next);
            let granted = (grant.task, grant.basis, grant.slice);
            assert_eq!(granted, (self.ids[at], basis, time(slice)), "at {now}");
            assert_eq!(*grant.cpus, *self.model.settings.cpus);
            let one_in = self.habits.overrun_one_in;
            let overruns = one_in > 0 && self.random.below(one_in) == 0;
            let manner = if overruns {
                Manner::Overruns
            } else {
                Manner::Obeys
            };
            let at_next = now + self.ticks(STEP_TICKS_MAX);
            self.next[at] = Next::Looks {
                at: at_next,
                since: now,
                manner,
            };
        }
        assert_eq!(self.model.next_paid(), None, "left waiting at {now}");
        assert_eq!(*self.scheduler.settings(), self.model.settings);
    }
}

fn classes(each: usize) -> Vec<WorkClass> {
    WorkClass::ALL.repeat(each)
}

#[test]
fn scheduler_grants_and_recalls_what_a_naive_one_does() {
    for seed in 0..16 {
        let habits = Habits {
            overrun_one_in: 40,
            rest_ticks_max: [0, 300, 4_000][usize::try_from(seed % 3).unwrap()],
            fault_ticks: [0, 20, 150, 900][usize::try_from(seed % 4).unwrap()],
            waits_one_in: 12,
        };
        let tasks = classes(1 + usize::try_from(seed % 3).unwrap());
        let cpus = 1 + usize::try_from(seed % 4).unwrap();
        let mut simulation = Simulation::new(small(cpus), &tasks, habits, seed);
        simulation.run_until(100_000);
        assert!(simulation.history.len() >= 12);
    }
}

#[test]
fn every_class_gets_its_share_of_every_cycle_whatever_the_faults_do() {
    for (fault_ticks, cpus) in [(0, 1), (0, 2), (3, 1), (40, 1), (40, 2), (400, 3)] {
        let habits = Habits {
            overrun_one_in: 0,
            rest_ticks_max: 0,
            fault_ticks,
            waits_one_in: 0,
        };
        let settings = small(cpus);
        let mut simulation = Simulation::new(settings.clone(), &classes(cpus), habits, 7);
        simulation.run_until(100_000);
        let capacity = settings.cycle_us.cast_signed() * 1_000 * simulation.model.cpus();
        for class in WorkClass::ALL {
            let at = class.index();
            let share = i64::from([250, 100, 50][at]) * capacity / 1_000;
            let used: Vec<i64> = simulation.history.iter().map(|used| used[at]).collect();
            let mean = used.iter().sum::<i64>() / i64::try_from(used.len()).unwrap();
            // What a run gives back after the end of its cycle is lost, and so is what is less than a slice.
            let lost = 200_000 * simulation.model.cpus();
            assert!(
                mean >= share - lost,
                "{class:?} got {mean} of {share} on average"
            );
            // A run may slip into the next cycle.
            let starved = used.windows(2).position(|cycles| cycles == [0, 0]);
            assert_eq!(starved, None, "{class:?}");
        }
    }
}

#[test]
fn a_class_that_overruns_all_the_time_gets_its_share_in_the_long_run() {
    let mut settings = small(1);
    settings.idle_time = IdleTime::Unused;
    settings.penalty_percent = 0;
    settings.shares_permille = Shares {
        vcpu_faults: 0,
        io_faults: 0,
        reclaim: 100,
        scan: 0,
        background: 0,
    };
    let mut scheduler = TaskScheduler::new(settings, &KNOWN, Duration::ZERO).unwrap();
    let task = scheduler.add(WorkClass::Reclaim, VM).unwrap();
    let (mut now, step, mut used) = (Duration::ZERO, Duration::from_millis(3), Duration::ZERO);
    let end = Duration::from_secs(10);
    while now < end {
        scheduler.want(now, task);
        while scheduler.dispatch(now).is_empty() {
            let next = scheduler.wait_until().unwrap();
            assert!(next > now);
            now = next;
        }
        // Granted 400 us at most.
        now += step;
        used += step;
        scheduler.ended(now, task, step);
    }
    let share = end / 10;
    assert!(
        used >= share - step && used <= share + 2 * step,
        "{used:?} of {share:?}"
    );
    assert_eq!(
        scheduler.figures(WorkClass::Reclaim).forgiven,
        Duration::ZERO
    );
}

#[test]
fn a_task_beyond_its_time_is_held_back_and_one_that_obeys_is_not() {
    let mut settings = small(2);
    settings.penalty_percent = 200;
    let mut scheduler = TaskScheduler::new(settings, &KNOWN, Duration::ZERO).unwrap();
    let rude = scheduler.add(WorkClass::Scan, VM).unwrap();
    let good = scheduler.add(WorkClass::Scan, VM).unwrap();
    let us = Duration::from_micros;
    scheduler.want(us(0), rude);
    assert_eq!(scheduler.dispatch(us(0)).len(), 1);
    // 600 us too long, so it is barred for 1200 us, from its next turn on.
    scheduler.ended(us(1_000), rude, us(1_000));
    scheduler.want(us(1_500), rude);
    scheduler.want(us(1_500), good);
    let grants = scheduler.dispatch(us(1_500));
    let granted: Vec<_> = grants
        .iter()
        .map(|grant| (grant.task, grant.slice))
        .collect();
    assert_eq!(granted, [(good, us(400))]);
    assert!(scheduler.wait_until().unwrap() <= us(2_700));
    assert!(scheduler.dispatch(us(2_699)).is_empty());
    let grants = scheduler.dispatch(us(2_700));
    let granted: Vec<_> = grants
        .iter()
        .map(|grant| (grant.task, grant.slice))
        .collect();
    assert_eq!(granted, [(rude, us(400))]);
    scheduler.ended(us(3_100), rude, us(400));
    scheduler.want(us(3_100), rude);
    assert_eq!(scheduler.dispatch(us(3_100)).len(), 1, "it has paid");
    let figures = scheduler.figures(WorkClass::Scan);
    assert_eq!(
        (figures.overruns, figures.overrun, figures.withheld),
        (1, us(600), us(1_200))
    );
}

/// Runs tasks of one class that want to run all the time, on one CPU, each with steps of so many microseconds;
/// returns the CPU time that each got, the time that passed, and the class's figures.
fn race(penalty_percent: u32, steps_us: &[u64]) -> (Vec<Duration>, Duration, ClassFigures) {
    let mut settings = small(1);
    settings.penalty_percent = penalty_percent;
    let mut scheduler = TaskScheduler::new(settings, &KNOWN, Duration::ZERO).unwrap();
    let add = |_: &u64| scheduler.add(WorkClass::Reclaim, VM).unwrap();
    let ids: Vec<_> = steps_us.iter().map(add).collect();
    let mut used = vec![Duration::ZERO; ids.len()];
    let mut now = Duration::ZERO;
    ids.iter().for_each(|id| scheduler.want(now, *id));
    loop {
        let Some(grant) = scheduler.dispatch(now).pop() else {
            now = scheduler.wait_until().unwrap();
            continue;
        };
        let at = ids.iter().position(|id| *id == grant.task).unwrap();
        let step = Duration::from_micros(steps_us[at]);
        let mut run = Duration::ZERO;
        while run < grant.slice {
            run += step;
        }
        now += run;
        used[at] += run;
        scheduler.ended(now, grant.task, run);
        if now > Duration::from_secs(2) {
            return (used, now, scheduler.figures(WorkClass::Reclaim));
        }
        scheduler.want(now, grant.task);
    }
}

#[test]
fn a_penalty_costs_a_task_as_much_time_as_it_says() {
    for percent in [0, 10, 100, 400] {
        // 700 us where 400 are allowed.
        let (used, passed, figures) = race(percent, &[350]);
        assert!(figures.runs > 500 && figures.overruns * 10 > figures.runs * 9);
        // Overruns within the grace cost nothing, and the last one has not been paid for.
        let penalty = (figures.overrun * percent / 100).as_secs_f64();
        let withheld = figures.withheld.as_secs_f64();
        let told = format!("{percent} %: {figures:?}");
        assert!(
            withheld <= 1.01 * penalty && withheld >= 0.9 * penalty,
            "{told}"
        );
        // The CPU is idle while the only task is barred, and at no other time.
        assert_eq!(passed, used[0] + figures.withheld, "{percent} %");
    }
}

#[test]
fn what_a_barred_task_does_not_get_goes_to_others() {
    let (used, passed, figures) = race(400, &[350, 50]);
    assert_eq!(used[0] + used[1], passed);
    assert!(figures.withheld > Duration::ZERO);
    // Runs of 700 and 400 us by turns, but the first one is barred for three of the other's runs.
    let share = used[0].as_secs_f64() / passed.as_secs_f64();
    assert!(share > 0.2 && share < 0.4, "{share}");
    let (used, passed, _) = race(0, &[350, 50]);
    assert_eq!(used[0] + used[1], passed);
    assert!(used[0] > used[1]);
}

#[test]
fn work_goes_on_after_a_lull_and_not_between_two_faults_of_a_burst() {
    let mut settings = small(2);
    settings.cycle_us = 100_000;
    let mut scheduler = TaskScheduler::new(settings, &KNOWN, Duration::ZERO).unwrap();
    let [first, second] = [(); 2].map(|()| scheduler.add(WorkClass::Background, VM).unwrap());
    let us = Duration::from_micros;
    scheduler.want(us(0), first);
    assert_eq!(scheduler.dispatch(us(0)).len(), 1);
    let fault = |under_way, last_end| FaultLoad {
        under_way,
        last_end,
        ..FaultLoad::default()
    };
    for fault_us in [100, 150, 200] {
        scheduler.report_faults(us(fault_us), &fault(1, None));
        let must = scheduler.must_yield(us(fault_us), first);
        assert_eq!(must, Some(YieldReason::Fault));
        let end = us(fault_us + 20);
        scheduler.report_faults(end, &fault(0, Some(end)));
        let must = scheduler.must_yield(end + us(5), first);
        assert_eq!(must, Some(YieldReason::Fault), "between two of them, too");
    }
    scheduler.ended(us(230), first, us(230));
    scheduler.want(us(230), first);
    scheduler.want(us(230), second);
    let lull = us(220) + Duration::from_nanos(FAULT_LULL_NS);
    assert!(scheduler.dispatch(us(230)).is_empty());
    // Whoever waits looks soon in a short burst, and less often in a long one.
    let until = scheduler.wait_until().unwrap();
    assert_eq!(until, us(230) + Duration::from_nanos(FAULT_LULL_NS));
    assert!(scheduler.dispatch(lull - us(1)).is_empty());
    assert_eq!(scheduler.dispatch(lull).len(), 2);
    scheduler.ended(lull, second, us(0));
    scheduler.want(lull, second);
    let mut now = lull;
    for _ in 0..50 {
        scheduler.report_faults(now, &fault(1, None));
        now += us(500);
    }
    assert!(scheduler.dispatch(now).is_empty());
    let until = scheduler.wait_until().unwrap();
    assert_eq!(until, now + Duration::from_nanos(LOOK_NS_MAX));
}

#[test]
fn what_a_class_got_between_two_bursts_is_not_guaranteed_once_more() {
    let mut settings = small(1);
    settings.idle_time = IdleTime::Unused;
    let mut scheduler = TaskScheduler::new(settings, &KNOWN, Duration::ZERO).unwrap();
    let task = scheduler.add(WorkClass::Reclaim, VM).unwrap();
    let us = Duration::from_micros;
    let mut now = us(0);
    // Its share is a quarter of 5 ms.
    while now < us(1_300) {
        scheduler.want(now, task);
        let slice = scheduler.dispatch(now)[0].slice;
        now += slice;
        scheduler.ended(now, task, slice);
    }
    let load = FaultLoad {
        under_way: 1,
        ..FaultLoad::default()
    };
    scheduler.report_faults(now, &load);
    scheduler.want(now, task);
    while now < us(4_900) {
        assert!(scheduler.dispatch(now).is_empty(), "{now:?}");
        now += us(100);
    }
    // The next cycle's share is.
    assert_eq!(scheduler.dispatch(us(5_000 + 3_750)).len(), 1);
}

#[test]
fn a_fault_that_waits_for_room_gets_its_own_vms_reclaim_past_faults_debt_and_penalty() {
    let mut scheduler = TaskScheduler::new(small(1), &KNOWN, Duration::ZERO).unwrap();
    let [reclaim, scan] =
        [WorkClass::Reclaim, WorkClass::Scan].map(|class| scheduler.add(class, VM).unwrap());
    let others = scheduler.add(WorkClass::Reclaim, GroupId(2)).unwrap();
    let us = Duration::from_micros;
    scheduler.want(us(0), reclaim);
    assert_eq!(scheduler.dispatch(us(0)).len(), 1);
    // More than it can have in many cycles.
    scheduler.ended(us(100), reclaim, us(20_000));
    scheduler.want(us(100), scan);
    scheduler.want(us(100), reclaim);
    assert_eq!(scheduler.dispatch(us(100))[0].task, scan);
    scheduler.want(us(120), others);
    assert!(scheduler.dispatch(us(120)).is_empty());
    let load = FaultLoad {
        under_way: 1,
        ..FaultLoad::default()
    };
    scheduler.report_faults(us(150), &load);
    assert_eq!(
        scheduler.must_yield(us(150), scan),
        Some(YieldReason::Fault)
    );
    assert!(scheduler.dispatch(us(150)).is_empty());
    // Two faults wait, the first no longer than until 200.
    scheduler.room_wanted(us(160), VM);
    scheduler.room_wanted(us(160), VM);
    let grants = scheduler.dispatch(us(160));
    let granted: Vec<_> = grants
        .iter()
        .map(|grant| (grant.task, grant.basis))
        .collect();
    assert_eq!(granted, [(reclaim, Basis::Inherited)]);
    scheduler.room_found(us(200), VM);
    assert_eq!(scheduler.must_yield(us(210), reclaim), None);
    let before = scheduler.figures(WorkClass::Reclaim);
    scheduler.ended(us(400), reclaim, us(240));
    let after = scheduler.figures(WorkClass::Reclaim);
    assert_eq!(after.inherited, us(240));
    assert_eq!((after.own, after.overruns), (before.own, before.overruns));
    scheduler.want(us(400), reclaim);
    assert_eq!(scheduler.dispatch(us(400)).len(), 1, "one still waits");
    scheduler.ended(us(410), reclaim, us(10));
    scheduler.room_found(us(420), VM);
    scheduler.want(us(420), reclaim);
    assert!(scheduler.dispatch(us(420)).is_empty());
}

#[test]
fn new_settings_wait_for_the_cycle_and_wrong_ones_change_nothing() {
    let mut scheduler = TaskScheduler::new(small(1), &KNOWN, Duration::ZERO).unwrap();
    let task = scheduler.add(WorkClass::Scan, VM).unwrap();
    let us = Duration::from_micros;
    let wrong = SchedulerSettings {
        cycle_us: 0,
        ..small(1)
    };
    assert!(scheduler.change(us(0), wrong, &KNOWN).is_err());
    assert_eq!(*scheduler.next_settings(), small(1));
    let mut next = small(3);
    next.longest_run_us = 150;
    scheduler.change(us(0), next.clone(), &KNOWN).unwrap();
    for (at, slice, cpus) in [(4_000, 400, 1), (5_000, 150, 3)] {
        scheduler.want(us(at), task);
        let grants = scheduler.dispatch(us(at));
        assert_eq!((grants[0].slice, grants[0].cpus.len()), (us(slice), cpus));
        scheduler.ended(us(at + 20), task, us(20));
    }
    assert_eq!(*scheduler.settings(), next);
    // Two CPUs fewer: the grant of the cycle under way still has three.
    scheduler.change(us(5_100), small(1), &KNOWN[..1]).unwrap();
    assert_eq!(scheduler.settings().cpus.len(), 3);
}

#[test]
fn a_run_that_is_not_reported_loses_its_cpu_after_a_cycle() {
    let mut scheduler = TaskScheduler::new(small(1), &KNOWN, Duration::ZERO).unwrap();
    let [stuck, other] = [(); 2].map(|()| scheduler.add(WorkClass::Scan, VM).unwrap());
    scheduler.want(Duration::ZERO, stuck);
    scheduler.want(Duration::ZERO, other);
    assert_eq!(scheduler.dispatch(Duration::ZERO)[0].task, stuck);
    let mut until = scheduler.wait_until().unwrap();
    let granted = loop {
        match scheduler.dispatch(until).first() {
            Some(grant) => break grant.task,
            None => until = scheduler.wait_until().unwrap(),
        }
    };
    assert_eq!((granted, until), (other, Duration::from_micros(5_000)));
    assert_eq!(
        scheduler.must_yield(until, stuck),
        Some(YieldReason::SliceOver)
    );
}

#[test]
fn long_silence_costs_no_more_than_a_short_one_and_pays_debts() {
    let mut settings = small(1);
    settings.penalty_percent = 0;
    let mut scheduler = TaskScheduler::new(settings, &KNOWN, Duration::ZERO).unwrap();
    let task = scheduler.add(WorkClass::Reclaim, VM).unwrap();
    scheduler.want(Duration::ZERO, task);
    assert_eq!(scheduler.dispatch(Duration::ZERO).len(), 1);
    scheduler.ended(Duration::from_secs(60), task, Duration::from_secs(60));
    // A time that goes back counts as the last one.
    scheduler.report_faults(Duration::ZERO, &FaultLoad::default());
    let end = Duration::MAX;
    scheduler.want(end, task);
    let grants = scheduler.dispatch(end);
    assert_eq!(grants[0].slice, Duration::from_micros(400));
    let forgiven = scheduler.figures(WorkClass::Reclaim).forgiven;
    assert!(forgiven > Duration::from_secs(59), "{forgiven:?}");
}

#[test]
fn settings_survive_as_text_and_unknown_fields_are_refused() {
    let settings = small(2);
    let text = toml::to_string(&settings).unwrap();
    assert!(text.contains("idle_time = \"lent\""), "{text}");
    assert!(
        text.contains("[shares_permille]\nvcpu_faults = 400"),
        "{text}"
    );
    assert_eq!(
        toml::from_str::<SchedulerSettings>(&text).unwrap(),
        settings
    );
    let edits = [
        ("cycle_us", "cycle"),
        ("io_faults", "io"),
        ("lent", "given"),
        ("= 400", "= -1"),
    ];
    for (part, other) in edits {
        let wrong = text.replacen(part, other, 1);
        assert!(
            toml::from_str::<SchedulerSettings>(&wrong).is_err(),
            "{wrong}"
        );
    }
}

#[test]
fn one_task_more_than_allowed_is_refused_and_a_removed_one_makes_room() {
    let mut scheduler = TaskScheduler::new(small(1), &KNOWN, Duration::ZERO).unwrap();
    let first = scheduler.add(WorkClass::Scan, VM).unwrap();
    for _ in 1..TASKS_MAX {
        scheduler.add(WorkClass::Background, VM).unwrap();
    }
    assert_eq!(scheduler.add(WorkClass::Scan, VM), Err(TooManyTasks));
    scheduler.want(Duration::ZERO, first);
    assert!(scheduler.has_tasks_waiting());
    scheduler.remove(Duration::ZERO, first);
    assert!(!scheduler.has_tasks_waiting() && scheduler.wait_until().is_none());
    assert!(scheduler.add(WorkClass::Scan, VM).is_ok());
}
