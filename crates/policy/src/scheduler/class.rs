// SPDX-License-Identifier: Apache-2.0
//! The classes of CPU work, in order of priority, and shares of CPU time by class.

use serde::{Deserialize, Serialize};

/// The whole, in the unit of shares.
pub(super) const WHOLE_PERMILLE: u64 = 1000;
/// Classes of faults.
pub(super) const FAULT_CLASSES: usize = 2;
/// Classes of work.
pub(super) const WORK_CLASSES: usize = 3;
/// All classes. A *level* is a class by its priority: faults have levels 0 and 1, work has 2 to 4.
pub(super) const LEVELS: usize = FAULT_CLASSES + WORK_CLASSES;

/// Faults, which are never held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultClass {
    /// Of vCPUs, and of other threads of a VMM.
    Vcpu,
    /// Of devices.
    Io,
}

impl FaultClass {
    /// All, the highest priority first.
    pub const ALL: [Self; FAULT_CLASSES] = [Self::Vcpu, Self::Io];

    pub(super) const fn level(self) -> usize {
        self as usize
    }
}

/// Work that asks for its turn.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkClass {
    /// Reclaim below the low watermark, and what a client asked for.
    Reclaim,
    /// Sampling, and moving sections among the sets.
    Scan,
    /// Everything else: reclaim above the low watermark, swap-in that nobody waits for, tidying.
    Background,
}

impl WorkClass {
    /// All, the highest priority first.
    pub const ALL: [Self; WORK_CLASSES] = [Self::Reclaim, Self::Scan, Self::Background];

    /// Position in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    pub(super) const fn level(self) -> usize {
        FAULT_CLASSES + self.index()
    }
}

/// Each class's share of the CPU time of a cycle, in thousandths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shares {
    /// Faults of vCPUs: never held back; what they leave of their share is passed down.
    pub vcpu_faults: u32,
    /// Faults of devices: the same.
    pub io_faults: u32,
    /// [`WorkClass::Reclaim`].
    pub reclaim: u32,
    /// [`WorkClass::Scan`].
    pub scan: u32,
    /// [`WorkClass::Background`].
    pub background: u32,
}

impl Shares {
    /// By level.
    pub(super) fn levels(self) -> [u64; LEVELS] {
        let Self {
            vcpu_faults,
            io_faults,
            reclaim,
            scan,
            background,
        } = self;
        [vcpu_faults, io_faults, reclaim, scan, background].map(u64::from)
    }
}

impl Default for Shares {
    /// Faults keep most of the time in reserve; a scan must not fall behind while reclaim is busy.
    fn default() -> Self {
        Self {
            vcpu_faults: 400,
            io_faults: 200,
            reclaim: 250,
            scan: 100,
            background: 50,
        }
    }
}
