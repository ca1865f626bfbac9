// SPDX-License-Identifier: Apache-2.0
//! What trackers need to know about devices, and how they fail.

use crate::Refusal;
use crate::layout::MapsChange;
use pagetide_addr::{FileKey, FilePage, FileRange, Marks};
use pagetide_sys::pagemap::PagemapError;
use pagetide_sys::process::ProcessError;
use pagetide_sys::ptrace::PtraceError;
use std::io;

/// Why accesses could not be determined.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// A page table could not be read.
    #[error(transparent)]
    Pagemap(#[from] PagemapError),
    /// The VMM's pages could not be unmapped.
    #[error("unmapping the VMM's pages (are they locked?): {0}")]
    Unmap(#[from] ProcessError),
    /// A thread of the VMM could not unmap them.
    #[error("having the VMM unmap its pages: {0}")]
    Inside(#[from] PtraceError),
    /// Its RAM mappings could not be read.
    #[error(transparent)]
    Look(#[from] Refusal),
    /// Its RAM mappings have changed.
    #[error("the VMM's RAM has changed: {0}")]
    Changed(MapsChange),
    /// The mounts could not be read.
    #[error("looking for file systems that never swap: {0}")]
    Mounts(#[from] io::Error),
    /// Whether memory is in large folios could not be determined.
    #[error("looking for memory in large pages: {0}")]
    Large(#[source] io::Error),
    /// The kernel's idle bitmap could not be read or set.
    #[error("asking the kernel which pages are idle: {0}")]
    Idle(#[source] io::Error),
    /// The devices could not be queried.
    #[error("asking the devices what they touched: {0}")]
    Devices(String),
}

/// Access to the devices' records of pages touched by their DMA.
pub trait DmaLook: Send + Sync {
    /// Calls `visit` for each page of `pages` (numbered within `file`) that DMA has touched since
    /// the marks were cleared.
    ///
    /// # Errors
    /// An error message.
    fn touched(
        &self,
        file: FileKey,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), String>;
}

/// For a VM without devices.
#[derive(Clone, Copy, Debug)]
pub struct NoDma;

impl DmaLook for NoDma {
    fn touched(
        &self,
        _file: FileKey,
        _pages: FileRange,
        _marks: Marks,
        _visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), String> {
        Ok(())
    }
}
