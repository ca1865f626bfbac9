// SPDX-License-Identifier: Apache-2.0
//! Which days are run, and how they went.

use super::super::{Bytes, Permille};
use std::time::Duration;

/// 24 hours.
pub(super) const DAY: Duration = Duration::from_secs(86_400);
/// A VM that lacks what is owed to it for so long is starved: a need is seen within a step, others give
/// within seconds, and a gain of 256 MiB/s fills the largest working set here within two minutes.
pub const STARVED_AFTER: Duration = Duration::from_secs(300);

/// Which days are run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recipe {
    /// Determines everything.
    pub seed: u64,
    /// Places for VMs on the host.
    pub vms: u32,
    /// Length.
    pub time: Duration,
    /// Time between two steps of the budget, and of the guests.
    pub step: Duration,
    /// The budget, as a share of the RAM of the first VMs.
    pub budget: Permille,
    /// What happens beside what guests do.
    pub events: Events,
}

impl Default for Recipe {
    /// A hundred days of fifty VMs.
    fn default() -> Self {
        Self {
            seed: 1,
            vms: 50,
            time: DAY * 100,
            step: Duration::from_secs(10),
            budget: Permille(667),
            events: Events::default(),
        }
    }
}

/// Mean times between events; `None`: never.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Events {
    /// A VM stays for about so long.
    pub stay: Option<Duration>,
    /// Between two starts of the daemon.
    pub restart: Option<Duration>,
    /// Between two changes of a VM's weight.
    pub reweigh: Option<Duration>,
}

impl Events {
    /// None at all.
    pub const NONE: Self = Self {
        stay: None,
        restart: None,
        reweigh: None,
    };
}

impl Default for Events {
    fn default() -> Self {
        Self {
            stay: Some(DAY * 10),
            restart: Some(DAY * 2),
            reweigh: Some(DAY / 2),
        }
    }
}

/// How the days went.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    /// Steps taken.
    pub steps: u64,
    /// The budget.
    pub budget: Bytes,
    /// VMs that came, and VMs whose floors did not fit when they came.
    pub came: u64,
    /// See `came`.
    pub refused: u64,
    /// Starts of the daemon after the first.
    pub restarts: u64,
    /// The most used at any moment beyond the budget.
    pub over_max: Bytes,
    /// The most beyond the budget and the fill under way at that moment.
    pub over_beyond_fill_max: Bytes,
    /// The most that targets and stored content ever came to.
    pub promised_max: Bytes,
    /// Steps that began with less than min free.
    pub below_min_steps: u64,
    /// Steps by [`Water`](super::super::Water), the lowest first.
    pub water_steps: Vec<u64>,
    /// Steps by the cold share of what all VMs have touched, in whole percents from 0 to 100.
    pub cold_steps: Vec<u64>,
    /// Steps at whose end a VM wanted more than it had, and could not have it though it had less than
    /// its floor; counted by VM.
    pub floors_short: u64,
    /// Evictions that took a VM from its floor or more to less.
    pub floors_broken: u64,
    /// How often a VM had, for [`STARVED_AFTER`], less than seven eighths of what it used, or of its
    /// share by weight if that is less, and no target that promised it.
    pub starved: u64,
    /// The longest time of that.
    pub starved_longest: Duration,
    /// By how much targets were lowered, all together.
    pub lowered: Bytes,
    /// Work done, over the work done if all memory were there.
    pub done: Permille,
    /// The same of the VM that fared worst, of those that were there for a day.
    pub done_worst: Permille,
    /// Work done with the budget split by weight among the VMs that are there, over the same.
    pub done_split: Permille,
    /// Bytes evicted.
    pub evicted: Bytes,
}
