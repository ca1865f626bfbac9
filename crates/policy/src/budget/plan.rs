// SPDX-License-Identifier: Apache-2.0
//! What is set: the budget, its watermarks, how fast memory moves, each VM's share; and why a
//! setting is refused.
//!
//! Everything here is plain data that can be stored. A plan is checked as a whole before any of it
//! takes effect, so a refused change has changed nothing.

use super::units::{Bytes, Permille, Rate, VmId, Weight};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};

/// VMs under one budget. A step costs some microseconds for each.
pub const VMS_MAX: usize = 4096;
/// The least floor: an instruction of a vCPU may need a handful of pages at once, a device's queue
/// its rings and a chain, and eviction works by sections.
pub const FLOOR_MIN: Bytes = Bytes::mib(16);
/// The high watermark is at most this much of the budget: what it keeps free is kept from the VMs.
pub const HIGH_MAX: Permille = Permille(500);

/// An amount as a share of the budget, or by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// Thousandths of the budget.
    Permille(Permille),
    /// Bytes, whatever the budget.
    Bytes(Bytes),
}

impl Mark {
    /// In bytes.
    #[must_use]
    pub fn of(self, budget: Bytes) -> Bytes {
        match self {
            Self::Permille(share) => share.of(budget),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// The watermarks: amounts of the budget that are free (Taiji 4.2.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Watermarks {
    /// Below it a fill first evicts, in the path of the fault.
    pub min: Mark,
    /// Below it memory is reclaimed, until `high`.
    pub low: Mark,
    /// From here on there is enough. Nothing is promised to VMs beyond it.
    pub high: Mark,
}

impl Default for Watermarks {
    fn default() -> Self {
        Self {
            min: Mark::Permille(Permille(10)),
            low: Mark::Permille(Permille(20)),
            high: Mark::Permille(Permille(40)),
        }
    }
}

/// How fast memory moves, and for what.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Tuning {
    /// Between low and high, cold memory of all VMs together is reclaimed at this pace; 0: not.
    pub pace: Rate,
    /// A VM that refaults gets memory no faster than this.
    pub gain: Rate,
    /// Memory is moved if the refaults that it ends would fill as much within this time.
    pub payback: Duration,
    /// A need that is no longer seen is held for this time, and for twice as long at most.
    pub hold: Duration,
    /// A VM that refaults more slowly than this is quiet.
    pub quiet: Rate,
    /// A VM shrinks after it has been quiet for so long.
    pub idle_after: Duration,
    /// From then on it takes so long to shrink from all its RAM to its floor.
    pub idle_shrink: Duration,
    /// A VM that stalls for more than this share of time (PSI) gives nothing before it must, and
    /// its refaults count for more.
    pub pressure_max: Permille,
    /// A VM's target is not lowered by less than this share of it, unless it has to be.
    pub deadband: Permille,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            pace: Rate(Bytes::mib(64)),
            gain: Rate(Bytes::mib(256)),
            payback: Duration::from_secs(60),
            hold: Duration::from_secs(3),
            quiet: Rate(Bytes(64 << 10)),
            idle_after: Duration::from_secs(60),
            idle_shrink: Duration::from_secs(300),
            pressure_max: Permille(1),
            deadband: Permille(16),
        }
    }
}

/// What is set for the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The most that all VMs may take: resident memory, stored content and metadata.
    pub budget: Bytes,
    /// See [`Watermarks`].
    pub watermarks: Watermarks,
    /// See [`Tuning`].
    pub tuning: Tuning,
}

impl Plan {
    /// `budget`, and the rest by default.
    #[must_use]
    pub fn new(budget: Bytes) -> Self {
        Self {
            budget,
            watermarks: Watermarks::default(),
            tuning: Tuning::default(),
        }
    }

    pub(super) fn marks(&self) -> Marks {
        Marks {
            budget: self.budget,
            min: self.watermarks.min.of(self.budget),
            low: self.watermarks.low.of(self.budget),
            high: self.watermarks.high.of(self.budget),
        }
    }
}

/// The watermarks in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    pub budget: Bytes,
    pub min: Bytes,
    pub low: Bytes,
    pub high: Bytes,
}

/// What is set for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmShare {
    /// Its share when all want more.
    pub weight: Weight,
    /// It may always have this much resident, or all its RAM if that is less.
    pub floor: Bytes,
    /// It never has more resident; `None`: all its RAM.
    pub ceiling: Option<Bytes>,
}

impl Default for VmShare {
    fn default() -> Self {
        Self {
            weight: Weight::default(),
            floor: FLOOR_MIN,
            ceiling: None,
        }
    }
}

impl VmShare {
    /// Whether it is possible by itself, for a VM of so much RAM.
    ///
    /// # Errors
    /// If floor, ceiling and RAM contradict each other.
    pub fn check(&self, vm: VmId, ram: Bytes) -> Result<(), BudgetError> {
        check_share(vm, self, ram)
    }
}

/// All that was set, to be stored and to go on with after a restart.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Saved {
    /// The host's.
    pub plan: Plan,
    /// Each VM's.
    pub vms: BTreeMap<VmId, VmShare>,
}

/// The host, as far as a budget can be too large for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemory {
    /// RAM of the host.
    pub ram: Bytes,
    /// The least limit of a memory cgroup that VMs or pools are charged to.
    pub cgroup_limit: Option<Bytes>,
}

/// Why a setting was refused. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[expect(
    missing_docs,
    reason = "each variant's sentence says what it is, and names its fields"
)]
pub enum BudgetError {
    #[error(
        "the budget of {budget} is more than the host's memory of {ram}; \
         leave some of that to the host itself"
    )]
    BudgetAboveHost { budget: Bytes, ram: Bytes },
    #[error(
        "the budget of {budget} is more than the limit of {limit} of a memory cgroup that VMs or \
         pools are charged to; raise that limit or lower the budget"
    )]
    BudgetAboveCgroup { budget: Bytes, limit: Bytes },
    #[error(
        "the budget of {budget} is too small: the floors of its {vms} VMs add up to {floors}, and \
         {min} is kept free for fills; lower floors, detach a VM or raise the budget"
    )]
    BudgetBelowFloors {
        budget: Bytes,
        vms: usize,
        floors: Bytes,
        min: Bytes,
    },
    #[error("the floor of {vm}, {floor}, is more than its RAM of {ram}; lower the floor")]
    FloorAboveRam { vm: VmId, floor: Bytes, ram: Bytes },
    #[error(
        "the floor of {vm}, {floor}, is less than {least}, the least a VM can run with; raise it",
        least = FLOOR_MIN
    )]
    FloorTooLow { vm: VmId, floor: Bytes },
    #[error(
        "the ceiling of {vm}, {ceiling}, is less than its floor of {floor}; raise the one or lower \
         the other"
    )]
    CeilingBelowFloor {
        vm: VmId,
        ceiling: Bytes,
        floor: Bytes,
    },
    #[error(
        "the watermarks are out of order: min {min}, low {low}, high {high}; \
         each must be more than the one before"
    )]
    WatermarksOutOfOrder { min: Bytes, low: Bytes, high: Bytes },
    #[error(
        "the high watermark of {high} is more than half the budget of {budget}; \
         that memory would be of no use to any VM, so lower it"
    )]
    HighTooHigh { high: Bytes, budget: Bytes },
    #[error("{name} must be more than 0")]
    Zero { name: &'static str },
    #[error("there are {max} VMs under the budget already, the most possible; detach one", max = VMS_MAX)]
    TooManyVms,
    #[error("{vm} is under the budget already")]
    VmTwice { vm: VmId },
    #[error("{vm} is not under the budget")]
    NoSuchVm { vm: VmId },
}

impl BudgetError {
    /// The VM that it is about, if it is about one.
    #[must_use]
    pub fn vm(&self) -> Option<VmId> {
        match self {
            Self::FloorAboveRam { vm, .. }
            | Self::FloorTooLow { vm, .. }
            | Self::CeilingBelowFloor { vm, .. }
            | Self::VmTwice { vm }
            | Self::NoSuchVm { vm } => Some(*vm),
            Self::BudgetAboveHost { .. }
            | Self::BudgetAboveCgroup { .. }
            | Self::BudgetBelowFloors { .. }
            | Self::WatermarksOutOfOrder { .. }
            | Self::HighTooHigh { .. }
            | Self::Zero { .. }
            | Self::TooManyVms => None,
        }
    }
}

/// Checks the host's settings by themselves.
pub(super) fn check_plan(plan: &Plan, host: &HostMemory) -> Result<(), BudgetError> {
    let Marks {
        budget,
        min,
        low,
        high,
    } = plan.marks();
    if budget > host.ram {
        let ram = host.ram;
        return Err(BudgetError::BudgetAboveHost { budget, ram });
    }
    if let Some(limit) = host.cgroup_limit.filter(|limit| budget > *limit) {
        return Err(BudgetError::BudgetAboveCgroup { budget, limit });
    }
    if !(Bytes::ZERO < min && min < low && low < high) {
        return Err(BudgetError::WatermarksOutOfOrder { min, low, high });
    }
    if high > HIGH_MAX.of(budget) {
        return Err(BudgetError::HighTooHigh { high, budget });
    }
    let tuning = &plan.tuning;
    let zero = [
        ("the gain", tuning.gain.0 == Bytes::ZERO),
        ("the payback time", tuning.payback.is_zero()),
        ("the time a need is held", tuning.hold.is_zero()),
        ("the time to shrink", tuning.idle_shrink.is_zero()),
        ("the largest pressure", tuning.pressure_max.0 == 0),
    ];
    match zero.into_iter().find(|(_, is_zero)| *is_zero) {
        Some((name, _)) => Err(BudgetError::Zero { name }),
        None => Ok(()),
    }
}

/// Checks a VM's share by itself.
pub(super) fn check_share(vm: VmId, share: &VmShare, ram: Bytes) -> Result<(), BudgetError> {
    let floor = share.floor;
    if floor > ram {
        return Err(BudgetError::FloorAboveRam { vm, floor, ram });
    }
    if floor < FLOOR_MIN.min(ram) {
        return Err(BudgetError::FloorTooLow { vm, floor });
    }
    match share.ceiling.filter(|ceiling| *ceiling < floor) {
        Some(ceiling) => Err(BudgetError::CeilingBelowFloor { vm, ceiling, floor }),
        None => Ok(()),
    }
}

/// Checks that the floors of all VMs fit into the budget.
pub(super) fn check_floors(
    plan: &Plan,
    floors: impl Iterator<Item = Bytes> + Clone,
) -> Result<(), BudgetError> {
    let marks = plan.marks();
    let sum: Bytes = floors.clone().sum();
    if sum <= marks.budget.less(marks.min) {
        return Ok(());
    }
    Err(BudgetError::BudgetBelowFloors {
        budget: marks.budget,
        vms: floors.count(),
        floors: sum,
        min: marks.min,
    })
}
