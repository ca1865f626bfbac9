// SPDX-License-Identifier: Apache-2.0
//! What is where in the header of a pool. All numbers are on disk.

/// Version of the format.
pub const VERSION: u64 = 1;
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PAGETIDE");
pub(super) const HEADER_BYTES: u64 = 64 << 10;
pub(super) const HEADER_CELLS: usize = 512;
/// Most pages of a VM: 16 TiB.
pub const PAGES_MAX: u64 = 1 << 32;
/// Fewest pages there is room for: 1 TiB.
const CAPACITY_PAGES_MIN: u64 = 1 << 28;
/// Extents that a pool has a table for, for each section that it has room for.
pub(super) const EXTENTS_PER_SECTION: u64 = 4;
pub(super) const NO_LIMIT: u64 = u64::MAX;

/// Cells of the header. Numbers are on disk.
#[derive(Clone, Copy)]
pub(super) enum Cell {
    Magic = 0,
    Version = 1,
    HeaderBytes = 2,
    PageCount = 3,
    WordsAt = 4,
    ContentAt = 5,
    ContentBytes = 6,
    Seed = 7,
    Limit = 8,
    Restarts = 9,
    Identity = 10,
    UserfaultfdNumber = 11,
    Phase = 12,
    PauseUs = 13,
    /// 0 in a pool from before memory could grow: the capacity then is the page count.
    CapacityPages = 14,
    /// The most bytes that the pool has taken.
    PeakBytes = 15,
    /// These are 0 in a pool from before there were tiers outside memory (see `pool/slow.rs`).
    Key0 = 16,
    Key1 = 17,
    Key2 = 18,
    Key3 = 19,
    /// The last version that was reserved.
    SlowVersion = 20,
    ExtentsAt = 21,
    ExtentCapacity = 22,
    /// Bytes of the table that have memory.
    ExtentBytes = 23,
    /// What the VM is called in such tiers.
    SlowVm0 = 24,
    SlowVm1 = 25,
    /// The disk that its pages have gone to; 0 before the first.
    Disk0 = 26,
    Disk1 = 27,
}
pub(super) const FIRST_COUNTER: usize = 32;

/// How far the attach or detach of a VM has come. Numbers are on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Words are not set yet and nothing was evicted: a successor releases the VM.
    Attaching,
    /// Words are valid.
    Attached,
    /// All content is back in its place: a successor releases the VM.
    LettingGo,
}

/// Counters that continue where a dead daemon left them. Numbers are on disk: add at the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(
    missing_docs,
    reason = "each counts what its name says, since the VM was attached"
)]
pub enum Counter {
    EvictedPages,
    VcpuFaults,
    DeviceFaults,
    AliasFaults,
    DiscardedPages,
    OverLimitFills,
    CancelledPages,
    NeighbourPages,
    PoisonedPages,
    FilledPages,
    JoinedFaults,
    SwappedInAheadPages,
    DemotedPages,
    DemotionSavedBytes,
    SunkPages,
}

/// Pages a pool should have room for, given how many a VM has now: four times as many, and at least
/// 1 TiB.
#[must_use]
pub fn capacity_for(page_count: u64) -> u64 {
    let capacity = page_count.saturating_mul(4).max(CAPACITY_PAGES_MIN);
    capacity.min(PAGES_MAX)
}
