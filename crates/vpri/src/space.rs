// SPDX-License-Identifier: Apache-2.0
//! I/O address spaces as the host sees them: one for each file of guest RAM (VPRI 5.1).
//!
//! The PA-bitmap of a space is kept by the device: in this process for a software
//! DPU that runs here ([`DmaDomain`](crate::DmaDomain)), behind the event queue
//! of a VPRI function for any other. The code that keeps the bitmap in step with
//! the page table is the same for both and knows them only by these traits.

use crate::DomainError;
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FilePageSet, FileRange, FileSection, Marks,
};
use std::{fmt::Debug, os::fd::BorrowedFd, sync::Arc};

/// The device did not do it: it is gone or does not answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the DPU does not tell which pages were touched: {0}")]
pub struct LookError(pub String);

/// An I/O address space: the pages of one file of guest RAM, and what devices may do with each.
pub trait IoSpace: Debug + Send + Sync {
    /// The id by which page requests name the space.
    fn id(&self) -> DomainId;

    /// The file.
    fn key(&self) -> FileKey;

    /// Length of the file, in bytes.
    fn len_bytes(&self) -> u64;

    /// Memory of this process that page attributes and leases take, in bytes.
    fn metadata_bytes(&self) -> u64 {
        0
    }

    /// Takes the space for a VM. This does not unmap anything yet.
    ///
    /// # Errors
    /// [`DomainError`]: another VM has it, or a device does not look pages up.
    fn attach(&self) -> Result<(), DomainError>;

    /// From now on, a process that does DMA through its own mapping notices an access to an absent
    /// page. To be called when no DMA is under way that began before the space was taken.
    ///
    /// # Errors
    /// [`DomainError::Device`].
    fn watch(&self) -> Result<(), DomainError>;

    /// Gives the space back: every page becomes read-write. All pages must be present, or the VM's
    /// memory must no longer have a userfaultfd.
    fn detach(&self);

    /// Unmaps every page but the standing ones. DMA that began before may still be under way: see
    /// [`Self::is_any_leased`].
    fn unmap_all(&self);

    /// True while DMA may be under way anywhere in the space.
    fn is_any_leased(&self) -> bool;

    /// Unmaps `pages` of `section`; true if no DMA touches them any more (R2, R3). False if a DMA
    /// still does, if a page is standing, or if the device cannot be asked.
    fn unmap(&self, section: FileSection, pages: &FilePageSet) -> bool;

    /// Like [`Self::unmap`], but reads stay allowed.
    fn forbid_writes(&self, section: FileSection, pages: &FilePageSet) -> bool;

    /// Allows `access` to `range` (to be called only for present pages, under the section's lock).
    fn grant(&self, range: FileRange, access: Access);

    /// Pages of `section` that the device keeps for long: the rings of its queues. They are never
    /// unmapped.
    fn standing_in(&self, section: FileSection) -> FilePageSet;

    /// Number of such pages in the space.
    fn standing_pages(&self) -> u64;

    /// Calls `visit` for each page of `pages` that DMA has touched since the marks were last
    /// cleared.
    ///
    /// # Errors
    /// [`LookError`].
    fn touched(
        &self,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), LookError>;
}

/// Where a host gets its I/O address spaces from.
pub trait IoSpaces: Send + Sync {
    /// The space of `file`, made if there is none. `key` and `bytes` are as `fstat` reports them.
    ///
    /// # Errors
    /// [`DomainError`].
    fn open(
        &self,
        file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<dyn IoSpace>, DomainError>;

    /// From now on, no device gets a space of this file: some of its pages are absent, and nothing
    /// can fill them.
    fn bar(&self, key: FileKey);

    /// Ends a space whose RAM is unplugged: all its pages are unmapped for good.
    fn retire(&self, space: &dyn IoSpace);

    /// Every file with content elsewhere is now known: devices may use all other memory.
    fn all_known(&self);

    /// Other processes that map guest RAM as devices of this host.
    fn processes(&self) -> Vec<u32>;

    /// Why no page may be taken from devices now, as a sentence: the device is not there, and DMA
    /// that it started last may still be under way.
    fn eviction_blocker(&self) -> Option<String>;
}
