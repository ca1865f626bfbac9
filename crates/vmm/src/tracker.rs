// SPDX-License-Identifier: Apache-2.0
//! [`AccessTracker`]: which pages were touched lately, without help from guest or VMM.
//!
//! It is asked in two ways. A *sample* looks at a few pages of each section and costs the guest next to
//! nothing; it tells how hot a section is. A look at *whole* sections takes all their pages out of the
//! page tables, which costs a small fault for each that is in use, and is for those that are to be
//! evicted.
//!
//! [`UnmapAndLook`] is the one that works everywhere. Whole sections are always looked at in its way,
//! whichever tracker samples: what stands unmapped is what the rule on pins asks for.

mod huge;
pub mod idle;
mod ranges;
mod unmap;

pub use idle::IdlePages;
pub use unmap::{UnmapAndLook, refault_cost};

use crate::Refusal;
use crate::layout::MapsChange;
use pagetide_addr::{FileKey, FilePage, FileRange, Marks, PageSet, SectionNo};
use pagetide_sys::pagemap::PagemapError;
use pagetide_sys::process::ProcessError;
use pagetide_sys::ptrace::PtraceError;
use std::io;
use std::time::Duration;

/// Why accesses could not be told.
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
    /// Where its RAM is mapped could not be told.
    #[error(transparent)]
    Look(#[from] Refusal),
    /// Its RAM is mapped otherwise than it was.
    #[error("the VMM's RAM has changed: {0}")]
    Changed(MapsChange),
    /// What is mounted could not be told.
    #[error("looking for file systems that never swap: {0}")]
    Mounts(#[from] io::Error),
    /// Whether memory is in large folios could not be told.
    #[error("looking for memory in large pages: {0}")]
    Large(#[source] io::Error),
    /// The kernel's marks of idle pages could not be read or set.
    #[error("asking the kernel which pages are idle: {0}")]
    Idle(#[source] io::Error),
    /// The devices could not be asked.
    #[error("asking the devices what they touched: {0}")]
    Devices(String),
}

/// Pages of one section that were touched.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Touched {
    /// By vCPUs, or anything else in the VMM.
    pub cpu: PageSet,
    /// By devices of ours.
    pub dma: PageSet,
}

impl Touched {
    /// By anybody.
    #[must_use]
    pub fn by_anybody(&self) -> PageSet {
        let mut all = self.cpu;
        all.unite(&self.dma);
        all
    }
}

/// What is to be looked at in one section.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The section.
    pub section: SectionNo,
    /// Pages that are asked about.
    pub asked: PageSet,
    /// Pages that are to be asked about the next time: they are taken out of the page tables.
    pub next: PageSet,
}

/// What a sample brought.
#[derive(Clone, Default, Debug)]
pub struct Sampled {
    /// For each section: by CPUs, which of the pages that were asked about; by devices, which of all
    /// pages.
    pub touched: Vec<Touched>,
    /// Pages that were taken out of the page tables.
    pub unmapped_pages: u64,
    /// How long the VMM's address space was locked for that.
    pub unmapping: Duration,
}

/// Tells which pages were touched.
pub trait AccessTracker: Send + Sync {
    /// How it works, for the log.
    fn name(&self) -> &'static str;

    /// What was touched of the pages asked about, since they were chosen; and begins anew with others.
    ///
    /// # Errors
    /// [`TrackerError`]; some pages may have been taken out of the page tables.
    fn sample(&self, samples: &[Sample]) -> Result<Sampled, TrackerError>;

    /// For each of `sections`: what was touched since it was last asked about, and starts again.
    ///
    /// # Errors
    /// [`TrackerError`]; some sections may have started again.
    fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError>;

    /// The same for sections that are to be evicted, pages of which may be punched one by one
    /// afterwards, if [`AccessTracker::is_mapped`] does not name them.
    ///
    /// # Errors
    /// As there.
    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        self.look_many(sections)
    }

    /// [`AccessTracker::look_many`] for one section.
    ///
    /// # Errors
    /// As there.
    fn look(&self, section: SectionNo) -> Result<Touched, TrackerError> {
        let touched = self.look_many(&[section])?;
        Ok(touched.into_iter().next().unwrap_or_default())
    }

    /// Pages that may have been touched since the last look, which goes on; and such as must not go for
    /// another reason.
    ///
    /// # Errors
    /// [`TrackerError`].
    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError>;
}

/// What the devices know of the pages that their DMA touches.
pub trait DmaLook: Send + Sync {
    /// Calls `visit` for each page of `pages` (counted in `file`) that DMA has touched since the
    /// marks were forgotten.
    ///
    /// # Errors
    /// A sentence.
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
