// SPDX-License-Identifier: Apache-2.0
//! I/O address spaces as the host sees them: one for each file of guest RAM (VPRI 5.1).
//!
//! The PA-bitmap of a space lies with the device: in this process for a software
//! DPU that runs here ([`DmaDomain`](crate::DmaDomain)), behind the event queue
//! of a VPRI function for any other. What keeps the bitmap true to the page table
//! is the same for both and knows them by these traits alone.

use crate::DomainError;
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FilePageSet, FileRange, FileSection, Marks,
};
use std::{fmt::Debug, os::fd::BorrowedFd, sync::Arc};

/// The device did not do it: it is gone, or does not answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the DPU does not tell which pages were touched: {0}")]
pub struct LookError(pub String);

/// An I/O address space: the pages of one file of guest RAM, and what devices may do with each.
pub trait IoSpace: Debug + Send + Sync {
    /// By what page requests name it.
    fn id(&self) -> DomainId;

    /// The file.
    fn key(&self) -> FileKey;

    /// Length of the file, in bytes.
    fn len_bytes(&self) -> u64;

    /// Takes the space for a VM. Nothing is unmapped by it yet.
    ///
    /// # Errors
    /// [`DomainError`]: another VM has it, or a device does not look pages up.
    fn attach(&self) -> Result<(), DomainError>;

    /// From now on DMA into an absent page is noticed by whoever does it by a mapping of its own. To
    /// be called when no DMA is under way that began before the space was taken.
    ///
    /// # Errors
    /// [`DomainError::Device`].
    fn watch(&self) -> Result<(), DomainError>;

    /// Gives the space back: every page becomes read-write. All pages must be present, or the VM's
    /// memory be without userfaultfd again.
    fn detach(&self);

    /// Makes every page but the standing ones unmapped. DMA that began before may be under way:
    /// see [`Self::is_any_leased`].
    fn unmap_all(&self);

    /// True while DMA may be under way anywhere in the space.
    fn is_any_leased(&self) -> bool;

    /// Makes `pages` of `section` unmapped; true if no DMA touches them any more (R2, R3). False if
    /// some still does, if one is standing, or if the device cannot be asked.
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

    /// Calls `visit` for each page of `pages` that DMA has touched since the marks were forgotten.
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

/// Where a host has its I/O address spaces from.
pub trait IoSpaces: Send + Sync {
    /// The space of `file`, made if there is none. `key` and `bytes` are what `fstat` says of it.
    ///
    /// # Errors
    /// [`DomainError`].
    fn open(
        &self,
        file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<dyn IoSpace>, DomainError>;

    /// From now on nobody gets a space of this file: pages of it are away, and nobody brings them
    /// back.
    fn bar(&self, key: FileKey);

    /// Ends a space whose RAM is unplugged: all its pages are unmapped for good.
    fn retire(&self, space: &dyn IoSpace);

    /// Every file that has content elsewhere is known by now: devices may use all other memory.
    fn all_known(&self);

    /// Processes that map guest RAM as devices of this host, beside this one.
    fn processes(&self) -> Vec<u32>;

    /// Why no page may be taken from devices now, as a sentence: the device is not there, and DMA
    /// of its last moments may be under way.
    fn eviction_blocker(&self) -> Option<String>;
}
