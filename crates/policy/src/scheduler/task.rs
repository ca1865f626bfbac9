// SPDX-License-Identifier: Apache-2.0
//! Tasks, their runs, and what the scheduler says about them.

use super::{
    class::{FAULT_CLASSES, WORK_CLASSES, WorkClass},
    ledger::{Draw, Source},
};
use std::{sync::Arc, time::Duration};

/// Most tasks: a dozen for each of several hundred VMs. One more is refused.
pub const TASKS_MAX: usize = 4_096;

/// A task of a scheduler; never used again after [`TaskScheduler::remove`](super::TaskScheduler::remove).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TaskId(pub(super) u64);

/// Tasks that can make room for the same faults: those of one VM.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GroupId(pub u64);

/// One task more than [`TASKS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "there are {TASKS_MAX} background tasks already: detach a VM before another one is attached"
)]
pub struct TooManyTasks;

/// At whose expense a run is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Basis {
    /// The class's share, and what was passed down.
    Entitled,
    /// Nobody's: idle time.
    Idle,
    /// The vCPU faults', of which one waits for reclaim.
    Inherited,
}

/// Permission to run.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The task.
    pub task: TaskId,
    /// CPU time after which it must yield.
    pub slice: Duration,
    /// At whose expense.
    pub basis: Basis,
    /// Where it may run.
    pub cpus: Arc<[usize]>,
}

/// Why a running task must yield.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum YieldReason {
    /// Its slice is used up, or a whole cycle has passed since it began.
    SliceOver,
    /// A fault is under way, or was a moment ago.
    Fault,
    /// Its CPU is needed by an entitled task of a higher class, or by any if this run is on idle time.
    Outranked,
}

/// Faults since the last report.
#[derive(Clone, Copy, Default, Debug)]
pub struct FaultLoad {
    /// Under way now, without those that sleep.
    pub under_way: u32,
    /// When the last one ended, if there was one.
    pub last_end: Option<Duration>,
    /// CPU time used since the last report, by [`FaultClass`](super::FaultClass).
    pub used: [Duration; FAULT_CLASSES],
}

/// What a class has got, since the scheduler began.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ClassFigures {
    /// Runs granted.
    pub runs: u64,
    /// CPU time used of its share, and beyond slices.
    pub own: Duration,
    /// CPU time used of what was passed down.
    pub passed_down: Duration,
    /// Idle time used.
    pub idle: Duration,
    /// CPU time used with the priority of a fault.
    pub inherited: Duration,
    /// Runs that exceeded their slices by more than [`OVERRUN_GRACE_NS`](super::OVERRUN_GRACE_NS).
    pub overruns: u64,
    /// CPU time used beyond slices, in total.
    pub overrun: Duration,
    /// Time for which tasks were barred, in total, as penalties.
    pub withheld: Duration,
    /// Debt beyond [`DEBT_CYCLES_MAX`](super::DEBT_CYCLES_MAX).
    pub forgiven: Duration,
}

/// What a running task was granted, and has used.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) basis: Basis,
    pub(super) slice_ns: u64,
    pub(super) used_ns: u64,
    pub(super) draw: Draw,
    pub(super) cycle: u64,
    /// From this time on it does not occupy a CPU.
    pub(super) stale_ns: u64,
}

#[derive(Debug)]
pub(super) enum TaskState {
    Resting,
    Waiting,
    Running(Run),
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) class: WorkClass,
    pub(super) group: GroupId,
    pub(super) state: TaskState,
    /// Number of its last request.
    pub(super) request: u64,
    /// Penalties that it has not begun to pay.
    pub(super) owed_ns: u64,
    /// Until when it pays.
    pub(super) barred_until_ns: u64,
}

impl Task {
    /// Whether it pays a penalty at `now_ns`.
    pub(super) fn is_barred(&self, now_ns: u64) -> bool {
        now_ns < self.barred_until_ns
    }
}

/// A part of a cycle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Before the latest time at which the classes can still use what they have left of their shares.
    Open,
    /// From that time on.
    Last,
}

/// The order in which runs keep their CPUs; the lowest number last to yield.
pub(super) fn rank(class: WorkClass, basis: Basis, source: Source, phase: Phase) -> usize {
    match (basis, source, phase) {
        (Basis::Inherited, ..) => 0,
        (Basis::Entitled, Source::OwnAndPassed, Phase::Last) => WORK_CLASSES + class.index(),
        (Basis::Entitled, ..) => class.index(),
        (Basis::Idle, ..) => 2 * WORK_CLASSES + class.index(),
    }
}
