// SPDX-License-Identifier: Apache-2.0
//! A fault, how it ends, and what is counted of faults and evictions.

use pagetide_addr::{Access, DeviceId, PageRange};
use std::sync::atomic::AtomicU64 as Count;

/// Why a fault could not be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultOutcome {
    /// All pages were made present; the next access may find one evicted again, and fault again.
    Present,
    /// The pages are not all part of the address space, or not for this device and access.
    OutOfRange,
    /// The content of one of them is lost, or cannot be installed (no memory, a device that failed).
    Lost,
    /// The memory itself is gone: the VM ended.
    Gone,
}

/// A page fault of a device or vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Who faulted.
    pub device: DeviceId,
    /// Pages wanted.
    pub pages: PageRange,
    /// Access wanted.
    pub access: Access,
}

/// Counts of what befell an address space since it was made in this process.
#[derive(Debug, Default)]
pub struct MemoryCounters {
    /// Pages that a fault made present from stored content, zeros included.
    pub filled_pages: Count,
    /// Absent pages that a device had written whole, made present with its bytes: what was stored of
    /// them was dropped without being brought back.
    pub overwritten_pages: Count,
    /// Pages brought along with a faulting neighbour.
    pub readahead_pages: Count,
    /// Faults that joined a fill under way.
    pub joined_faults: Count,
    /// Faults on pages that were present: protected, granted late, or woken needlessly.
    pub present_faults: Count,
    /// Pages taken out of an eviction round because somebody needed them.
    pub cancelled_pages: Count,
    /// Pages the guest had given up, found by a fault or a round.
    pub discarded_pages: Count,
    /// Pages evicted.
    pub evicted_pages: Count,
    /// Pages whose content was lost.
    pub poisoned_pages: Count,
}
