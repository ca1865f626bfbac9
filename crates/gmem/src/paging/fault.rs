// SPDX-License-Identifier: Apache-2.0
//! A fault, its outcome, and the counters of faults and evictions.

use pagetide_addr::{Access, DeviceId, PageRange};
use std::sync::atomic::AtomicU64 as Count;

/// How a fault ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultOutcome {
    /// All pages were made present; one may be evicted again before the next access, which then
    /// faults.
    Present,
    /// Not all pages are in the address space, or they are not for this device and access.
    OutOfRange,
    /// The content of a page is lost, or it cannot be installed (no memory, a device that failed).
    Lost,
    /// The memory itself is gone: the VM ended.
    Gone,
}

/// A page fault of a device or vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Id of the faulting device.
    pub device: DeviceId,
    /// Pages wanted.
    pub pages: PageRange,
    /// Access wanted.
    pub access: Access,
}

/// Counters of an address space since it was made in this process.
#[derive(Debug, Default)]
pub struct MemoryCounters {
    /// Pages that a fault made present from stored content, zeros included.
    pub filled_pages: Count,
    /// Those among them whose content was not at hand.
    pub slowly_filled_pages: Count,
    /// Loads of content not at hand that have failed, damaged content included.
    pub failed_loads: Count,
    /// Stored pages whose content was moved to another place of the store.
    pub relocated_pages: Count,
    /// Absent pages that a device had written whole, made present with its bytes: their stored
    /// content was dropped without being loaded.
    pub overwritten_pages: Count,
    /// Absent pages that lay wholly in buffers posted to a device, made present as zeros: their stored content was
    /// dropped without being loaded.
    pub blanked_pages: Count,
    /// Pages read ahead with a page that faulted.
    pub readahead_pages: Count,
    /// Pages swapped in that no fault had led to.
    pub swapped_in_ahead_pages: Count,
    /// Faults that joined a fill under way.
    pub joined_faults: Count,
    /// Faults on pages that were present: protected, granted late, or woken needlessly.
    pub present_faults: Count,
    /// Pages taken out of an eviction round because they were needed.
    pub cancelled_pages: Count,
    /// Pages that the guest had discarded, found by a fault or a round.
    pub discarded_pages: Count,
    /// Pages evicted.
    pub evicted_pages: Count,
    /// Pages whose content was lost.
    pub poisoned_pages: Count,
    /// Times that a fill found no huge page free, and waited.
    pub waits_for_huge_page: Count,
}
