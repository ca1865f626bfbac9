// SPDX-License-Identifier: Apache-2.0
//! Threads that obey the scheduler, in real time.

use super::{
    group::WorkGroup,
    turns::{Turn, Turns},
    weakness::{BACKGROUND_NICENESS, RECLAIM_NICENESS},
    *,
};
use pagetide_policy::scheduler::{Basis, CYCLE_US_MAX, IdleTime, YieldReason};
use pagetide_sys::cpu;
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
            TaskScheduler::has_tasks_waiting,
            "work waits while a fault is under way",
        );
        drop(fault);
    }
    let last = scheduler.fault(FaultClass::Vcpu);
    wait_until(
        &scheduler,
        TaskScheduler::has_tasks_waiting,
        "the last run yields",
    );
    stopper.stop();
    thread.join().unwrap();
    drop(last);
    let yielded = told
        .try_iter()
        .filter(|(_, reason)| *reason == YieldReason::Fault);
    assert!(yielded.count() > 10);
}

/// A thread that waits for a turn of reclaim of `group`, and tells what came of it.
fn reclaimer(
    scheduler: &HostScheduler,
    group: &WorkGroup,
    waiting: usize,
) -> (std::thread::JoinHandle<Turns>, Receiver<Turn>) {
    let reclaim = group.turns(WorkClass::Reclaim).unwrap();
    let (tell, told) = channel();
    let thread = std::thread::spawn(move || {
        tell.send(reclaim.step(None)).unwrap();
        reclaim.end();
        reclaim
    });
    let wait = |machine: &TaskScheduler| machine.tasks_waiting() == waiting;
    wait_until(scheduler, wait, "it waits");
    (thread, told)
}

#[test]
fn a_fault_that_sleeps_for_room_gets_its_own_vms_reclaim_at_once_and_no_others() {
    let scheduler = scheduler(long_cycle());
    let other_fault = scheduler.fault(FaultClass::Io);
    let groups = [(); 2].map(|()| WorkGroup::new(&scheduler));
    let (others, told_other) = reclaimer(&scheduler, &groups[0], 1);
    let (own, told) = reclaimer(&scheduler, &groups[1], 2);
    groups[1].fault_begins(FaultClass::Vcpu);
    let turn = groups[1].wait_for_room(|| told.recv_timeout(PATIENCE));
    assert_eq!(turn, Ok(Turn::Granted));
    drop(own.join().unwrap());
    groups[1].fault_ends();
    assert_eq!(scheduler.figures(WorkClass::Reclaim).runs, 1);
    assert!(scheduler.figures(WorkClass::Reclaim).inherited > Duration::ZERO);
    drop(other_fault);
    assert_eq!(told_other.recv_timeout(PATIENCE), Ok(Turn::Granted));
    drop(others.join().unwrap());
}

#[test]
fn one_of_the_waiting_threads_looks_at_the_time_and_hands_over_when_it_leaves() {
    let scheduler = scheduler(long_cycle());
    let fault = scheduler.fault(FaultClass::Vcpu);
    let mut workers: Vec<_> = WorkClass::ALL
        .into_iter()
        .map(|class| {
            let task = scheduler.task(class).unwrap();
            let (id, stopper) = (task.id(), task.stopper());
            (id, stopper, begin(task))
        })
        .collect();
    let all_wait = |machine: &TaskScheduler| machine.tasks_waiting() == 3;
    wait_until(&scheduler, all_wait, "all of them wait");
    let leader = || {
        let started = Instant::now();
        loop {
            if let Some(timer) = &scheduler.lock().timer {
                return timer.leader;
            }
            assert!(started.elapsed() < PATIENCE, "nobody looks at the time");
        }
    };
    while workers.len() > 1 {
        let first = leader();
        let at = workers.iter().position(|(id, ..)| *id == first).unwrap();
        let (_, stopper, thread) = workers.swap_remove(at);
        stopper.stop();
        assert!(!thread.join().unwrap());
        assert_ne!(leader(), first);
    }
    // The last one would wait for ever if nobody looked.
    drop(fault);
    let (_, _, thread) = workers.pop().unwrap();
    assert!(thread.join().unwrap());
    assert!(scheduler.lock().timer.is_none());
}

/// A thread that begins one run; whether it got it.
fn begin(mut task: WorkTask) -> std::thread::JoinHandle<bool> {
    std::thread::spawn(move || task.begin().is_some())
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
    wait_until(
        &scheduler,
        TaskScheduler::has_tasks_waiting,
        "the task waits",
    );
    stopper.stop();
    thread.join().unwrap();
    drop(fault);
    stopper.stop();
    assert_eq!(scheduler.figures(WorkClass::Scan).runs, 0);
    assert!(scheduler.lock().seats.is_empty());
}

#[test]
fn a_thread_has_the_priority_of_its_class_on_its_cpus_during_a_run_and_is_ordinary_after() {
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
    // A real-time thread has no niceness; `/proc` shows its priority beside.
    for (class, policy, niceness) in [
        (WorkClass::Reclaim, 1, None),
        (WorkClass::Scan, 5, None),
        (
            WorkClass::Background,
            0,
            Some(i32::from(BACKGROUND_NICENESS)),
        ),
    ] {
        let ((got, nice), after, task) = placed(class);
        assert_eq!(got, policy, "{class:?}");
        assert!(
            niceness.is_none_or(|niceness| nice == niceness),
            "{class:?} {nice}"
        );
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
        // Some faults at a time.
        let faults = [(); 3].map(|()| scheduler.fault(FaultClass::Vcpu));
        let (_, told, _) = &workers[round % workers.len()];
        while told.try_recv().is_ok() {}
        // A scan may have to wait for a CPU that nothing else on this host wants.
        told.recv_timeout(10 * PATIENCE).unwrap();
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

/// A hundredth of a second in a cycle for scans, as little for reclaim, and nothing besides.
fn little_work() -> SchedulerSettings {
    let mut settings = long_cycle();
    settings.idle_time = IdleTime::Unused;
    let shares = &mut settings.shares_permille;
    (shares.vcpu_faults, shares.io_faults) = (0, 0);
    (shares.reclaim, shares.scan, shares.background) = (1, 1, 0);
    settings
}

/// Uses CPU time.
fn use_time(time: Duration) {
    let until = cpu::thread_time() + time;
    while cpu::thread_time() < until {
        std::hint::black_box((0..1_000_u64).sum::<u64>());
    }
}

#[test]
fn work_at_its_maximum_time_is_held_back_until_the_scheduler_has_more_for_it() {
    let known = cpu::affinity().unwrap();
    let scheduler = scheduler(long_cycle());
    let group = WorkGroup::new(&scheduler);
    let scan = group.turns(WorkClass::Scan).unwrap();
    assert_eq!(scan.step(None), Turn::Granted);
    // From the next cycle on, which is further away than this test waits.
    scheduler.change(little_work(), &known).unwrap();
    while scan.may_stay() {
        use_time(Duration::from_micros(50));
    }
    let used = || scheduler.figures(WorkClass::Scan);
    scan.end();
    let slice = Duration::from_micros(long_cycle().longest_run_us);
    let total = |figures: ClassFigures| figures.own + figures.passed_down + figures.idle;
    assert!(total(used()) >= slice, "{:?}", used());
    drop(scan);

    let scheduler = self::scheduler(little_work());
    let scan = WorkGroup::new(&scheduler).turns(WorkClass::Scan).unwrap();
    let share = Duration::from_micros(CYCLE_US_MAX / 1_000);
    // Weak work gets little of a CPU that others use, too; and the next cycle is ten seconds away.
    let by = Instant::now() + 300 * share;
    while scan.step(Some(by)) == Turn::Granted {
        use_time(Duration::from_micros(50));
    }
    assert!(!scan.may_stay());
    let figures = scheduler.figures(WorkClass::Scan);
    assert!(figures.own - figures.overrun <= share, "{figures:?}");
    assert_eq!(figures.idle, Duration::ZERO);
    let held = scheduler.held(WorkClass::Scan);
    assert!(held.runs > 0 && held.time > Duration::ZERO, "{held:?}");
}

#[test]
fn other_work_of_a_vm_stands_back_while_its_reclaim_is_needed() {
    let scheduler = scheduler(long_cycle());
    let (group, other) = (WorkGroup::new(&scheduler), WorkGroup::new(&scheduler));
    let [reclaim, scan] =
        [WorkClass::Reclaim, WorkClass::Scan].map(|class| group.turns(class).unwrap());
    let of_other = other.turns(WorkClass::Scan).unwrap();
    assert_eq!(scan.step(None), Turn::Granted);
    let within = policy_and_niceness();
    group.hurry();
    // The thread is made ordinary at once, and the run ends with its next step.
    if scheduler.weakness() == Weakness::Full {
        assert_eq!((within.0, policy_and_niceness()), (5, (0, 0)));
    }
    assert!(!scan.may_stay());
    assert_eq!(scan.step(None), Turn::Late);
    assert_eq!(reclaim.step(None), Turn::Granted);
    reclaim.end();
    assert_eq!(of_other.step(None), Turn::Granted);
    of_other.end();
    group.calm();
    assert_eq!(scan.step(None), Turn::Granted);
}

#[test]
fn who_waits_for_a_run_is_woken_when_reclaim_is_needed_and_when_the_vm_leaves() {
    let scheduler = scheduler(little_work());
    let _fault = scheduler.fault(FaultClass::Io);
    let group = WorkGroup::new(&scheduler);
    let waiting = |class| {
        let turns = group.turns(class).unwrap();
        let (tell, told) = channel();
        let thread = std::thread::spawn(move || {
            tell.send(turns.step(None)).unwrap();
            turns
        });
        wait_until(&scheduler, TaskScheduler::has_tasks_waiting, "it waits");
        (thread, told)
    };
    let (scan, told) = waiting(WorkClass::Scan);
    group.hurry();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Turn::Late));
    drop(scan.join().unwrap());
    let (reclaim, told) = waiting(WorkClass::Reclaim);
    group.stop();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Turn::Stopped));
    let reclaim = reclaim.join().unwrap();
    assert_eq!(reclaim.step(None), Turn::Stopped);
    group.go_on();
    let by = Instant::now() + Duration::from_millis(1);
    assert_eq!(reclaim.step(Some(by)), Turn::Late);
}

#[test]
fn who_waits_for_room_gets_reclaim_though_nothing_else_is_granted() {
    let scheduler = scheduler(little_work());
    let other_fault = scheduler.fault(FaultClass::Io);
    let group = WorkGroup::new(&scheduler);
    for is_fault in [true, false] {
        let (thread, told) = reclaimer(&scheduler, &group, 1);
        if is_fault {
            group.fault_begins(FaultClass::Vcpu);
        }
        let turn = group.wait_for_room(|| told.recv_timeout(PATIENCE));
        assert_eq!(turn, Ok(Turn::Granted));
        if is_fault {
            group.fault_ends();
        }
        drop(thread.join().unwrap());
    }
    drop(other_fault);
    assert_eq!(scheduler.faults(FaultClass::Vcpu).faults, 1);
    assert_eq!(scheduler.under_way.load(SeqCst), 0);
    // An end without a beginning, as when a VM's work is set up while a fault is served.
    group.fault_ends();
    assert_eq!(scheduler.under_way.load(SeqCst), 0);
}

#[test]
fn what_is_done_aside_is_not_at_the_expense_of_the_run_and_parts_that_hold_locks_are_less_weak() {
    let scheduler = scheduler(long_cycle());
    let scan = WorkGroup::new(&scheduler).turns(WorkClass::Scan).unwrap();
    assert_eq!(scan.step(None), Turn::Granted);
    let slice = Duration::from_micros(long_cycle().longest_run_us);
    let aside = scan.aside(|| {
        use_time(2 * slice);
        policy_and_niceness()
    });
    assert!(scan.may_stay());
    let firm = scan.firmly(policy_and_niceness);
    let weak = policy_and_niceness();
    if scheduler.weakness() == Weakness::Full {
        let reclaim = i32::from(RECLAIM_NICENESS);
        assert_eq!((aside, firm, weak.0), ((0, reclaim), (0, reclaim), 5));
    }
    scan.end();
    assert!(scheduler.figures(WorkClass::Scan).overruns == 0);
    // Without a run it is just done.
    assert_eq!(scan.aside(|| 7), 7);
}
