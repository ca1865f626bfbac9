// SPDX-License-Identifier: Apache-2.0
//! [`Mmu`]: what a device can do about its own translations.
//!
//! A driver implements these operations and no memory management (GMEM 3.1). A *page table* is made
//! by one device and may be used by several of the same format, so operations on translations name
//! the table, and invalidations go to each device that uses it:
//!
//! ```text
//!   coherent   device A ── table 1        shared   device A ──┬─ table 1
//!              device B ── table 2                 device B ──┘
//!              (each its own translations)         (one set of translations, two IOTLBs)
//! ```
//! A vCPU can neither be given a physical address nor be denied reads of a present page: for it,
//! installing and mapping are one act. So its MMU only ever restricts to read-only, and *no access*
//! is reached through [`Place::discard`](crate::Place::discard).
//!
//! All of it is derived state: it starts empty, may be dropped at any time and is granted again
//! page by page.

use pagetide_addr::{Access, Pa, PageRange, PageSet, SectionNo, Va};

/// Format of a page table; MMUs with the same format can use each other's tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TableFormat(pub u32);

/// A page table, as named by the MMU that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TableId(pub u64);

/// What a device can do, fixed when it is created.
#[doc(alias = "gm_dev_cap_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmuLimits {
    /// Strongest restriction the device can enforce while a page is present.
    pub strongest: Restrict,
    /// Whether an access to an absent page waits for it, or fails.
    pub on_absent: OnAbsent,
    /// Format of its page tables; `None` if no other MMU can use them.
    pub format: Option<TableFormat>,
    /// Page sizes it can map.
    pub page_sizes: PageSizes,
}

impl MmuLimits {
    /// Pages of 4 KiB, every restriction, faults that are repeated, tables of its own kind.
    pub const PAGED: Self = Self {
        strongest: Restrict::NoAccess,
        on_absent: OnAbsent::Recovers,
        format: None,
        page_sizes: PageSizes::SMALLEST,
    };
}

/// A set of page sizes: bit *n* stands for pages of 2^*n* bytes. 4 KiB is always among them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageSizes(u64);

impl PageSizes {
    /// 4 KiB only.
    pub const SMALLEST: Self = Self(pagetide_addr::PAGE_BYTES);

    /// The sizes whose bits are set, plus 4 KiB; bits below 4 KiB are ignored.
    #[must_use]
    pub const fn of_bits(bits: u64) -> Self {
        Self((bits & !(pagetide_addr::PAGE_BYTES - 1)) | pagetide_addr::PAGE_BYTES)
    }

    /// True if pages of `bytes` can be mapped.
    #[must_use]
    pub const fn contains(self, bytes: u64) -> bool {
        bytes.is_power_of_two() && self.0 & bytes != 0
    }
}

/// What happens to a device's access to an absent page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnAbsent {
    /// It waits and is repeated (a vCPU, a device with I/O page faults).
    Recovers,
    /// It fails: such a device gets wired mappings only.
    Fails,
}

/// How far a device's access is restricted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restrict {
    /// It may read, and faults when it writes.
    ReadOnly,
    /// It faults on every access.
    NoAccess,
}

/// Result of a restriction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Restricted {
    /// From now on, once its TLB is invalidated, no stronger access of this device can finish.
    Done,
    /// An access is under way that cannot be waited for now; some or all translations may already
    /// be restricted, but the caller must not rely on it.
    Busy,
}

/// The memory behind pages that are granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Each page's own place in the memory of the space: the device knows where that is.
    Home,
    /// Consecutive frames.
    Frames {
        /// Address of the first.
        first: Pa,
        /// Size of the pages to map them by, in bytes; addresses and frames are aligned to it.
        page_bytes: u64,
    },
}

/// A mapping that the CPU already has when it is attached (GMEM 4.1, `mmu_data`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Inherited {
    /// First address, page-aligned.
    pub start: Va,
    /// Length, in bytes.
    pub len_bytes: u64,
    /// Access it allows.
    pub access: Access,
    /// First of its frames, which are consecutive.
    pub frames: Pa,
}

/// Why an operation of a device's MMU failed.
#[derive(Debug, thiserror::Error)]
pub enum MmuError {
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
    /// The kernel refused.
    #[error("{operation} failed: {source}")]
    Kernel {
        /// Operation that failed.
        operation: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The driver refused, with a code of its own.
    #[error("the driver's {operation} failed with code {code}")]
    Driver {
        /// Operation that failed.
        operation: &'static str,
        /// The driver's code.
        code: i32,
    },
}

/// The translations of one device.
///
/// Called with locks of the address space held: an implementation must not call back into it.
#[doc(alias = "gm_mmu_t")]
pub trait Mmu: Send + Sync {
    /// The device's capabilities. Called once, when the device is created.
    fn limits(&self) -> MmuLimits;

    /// Makes an empty page table.
    ///
    /// # Errors
    /// [`MmuError`]: the attachment then fails.
    fn create_table(&self) -> Result<TableId, MmuError> {
        Ok(TableId(0))
    }

    /// Destroys a table that is no longer in use.
    fn destroy_table(&self, _table: TableId) {}

    /// From now on the device translates by `table`, with an empty TLB, and no access by another
    /// table is still under way. That other table was deactivated before, unless its space ended.
    ///
    /// # Errors
    /// [`MmuError`]; it then uses no table, as after [`Self::deactivate`].
    fn activate(&self, _table: TableId) -> Result<(), MmuError> {
        Ok(())
    }

    /// From now on the device uses no table: no access by `table` is still under way.
    ///
    /// # Errors
    /// [`MmuError`]; it then still translates by `table`.
    fn deactivate(&self, _table: TableId) -> Result<(), MmuError> {
        Ok(())
    }

    /// Pages of `section` that the device must keep (its rings): never restricted by an eviction.
    fn wired(&self, _section: SectionNo) -> PageSet {
        PageSet::EMPTY
    }

    /// Takes back access to `pages` of `section` in `table`; waits no longer than some
    /// microseconds. Cached TLB entries are dropped by the next [`Self::invalidate`].
    ///
    /// # Errors
    /// [`MmuError`]; the caller must then treat the pages as not restricted.
    fn restrict(
        &self,
        table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError>;

    /// Grants access to present pages (and releases kernel waiters for it). The new translation of
    /// a page replaces an existing one. No invalidation follows if that only allows more, so a
    /// device that faults must drop its TLB entries of the page before it retries.
    ///
    /// # Errors
    /// [`MmuError`]; some of the pages may be granted then.
    fn grant(
        &self,
        table: TableId,
        pages: PageRange,
        access: Access,
        backing: Backing,
    ) -> Result<(), MmuError>;

    /// Drops the device's cached translations of `table` for `ranges` (ascending, disjoint). When
    /// it returns, no access by a restricted translation is under way or can begin.
    ///
    /// # Errors
    /// [`MmuError`]; the caller must then treat the pages as not restricted.
    fn invalidate(&self, _table: TableId, _ranges: &[PageRange]) -> Result<(), MmuError> {
        Ok(())
    }

    /// The mappings that already exist when the device (the CPU) is attached; the space turns them
    /// into wired regions.
    ///
    /// # Errors
    /// [`MmuError`]: the attachment then fails.
    fn inherited(&self) -> Result<Vec<Inherited>, MmuError> {
        Ok(Vec::new())
    }
}
