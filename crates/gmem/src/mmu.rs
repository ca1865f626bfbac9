// SPDX-License-Identifier: Apache-2.0
//! [`Mmu`]: what a device can do about its own translations.
//!
//! A vCPU cannot be given a physical address nor be forbidden to read a present
//! page: for it, installing and mapping are one act. So its MMU only ever
//! restricts to read-only, and *no access* is reached through
//! [`Place::discard`](crate::Place::discard).

use pagetide_addr::{Access, PageRange, PageSet, SectionNo};

/// What a device can do, fixed when it is attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmuLimits {
    /// Smallest unit of restriction, in pages.
    pub granularity_pages: u64,
    /// Strongest restriction the device can keep while a page is present.
    pub strongest: Restrict,
    /// Whether an access to an absent page waits for it, or fails.
    pub on_absent: OnAbsent,
}

/// What becomes of a device's access to an absent page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnAbsent {
    /// It waits and is repeated (a vCPU, a device with I/O page faults).
    Recovers,
    /// It fails: such a device gets wired mappings only.
    Fails,
}

/// How far a device's access is taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restrict {
    /// It may read, and faults when it writes.
    ReadOnly,
    /// It faults on every access.
    NoAccess,
}

/// What became of a restriction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Restricted {
    /// From now on no stronger access of this device can finish.
    Done,
    /// An access is under way that cannot be waited for now; some or all translations are
    /// restricted already, but the caller must not rely on it.
    Busy,
}

/// Why a device's MMU could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum MmuError {
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
    /// The kernel refused.
    #[error("{operation} failed: {source}")]
    Kernel {
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// The translations of one device of an address space.
///
/// All of it is derived state: it starts empty, may be dropped at any time and
/// is given again page by page by `grant`. Called under the section's lock.
pub trait Mmu: Send + Sync {
    /// What the device can do.
    fn limits(&self) -> MmuLimits;

    /// Pages of `section` that the device must keep (its rings): never restricted, never evicted.
    fn wired(&self, section: SectionNo) -> PageSet;

    /// Takes access to `pages` of `section` back; does not wait longer than some microseconds.
    ///
    /// # Errors
    /// [`MmuError`]; the caller must then treat the pages as not restricted.
    fn restrict(
        &self,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError>;

    /// Gives access to present pages (and releases whoever waits for that in the kernel).
    ///
    /// # Errors
    /// [`MmuError`].
    fn grant(&self, pages: PageRange, access: Access) -> Result<(), MmuError>;
}
