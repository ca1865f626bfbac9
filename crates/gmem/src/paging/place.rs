// SPDX-License-Identifier: Apache-2.0
//! [`Place`]: where pages of an address space can be present.

use pagetide_addr::{PageNo, PageRange, SectionNo};

/// Result of installing a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Installed {
    /// Everyone sees the given content from now on.
    Installed,
    /// The page was already present; nothing was written. (`EEXIST`)
    AlreadyThere,
}

/// What a place can make present or absent at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Granule {
    /// A page.
    Page,
    /// A section, whole: memory on hugetlbfs, which the kernel never splits. See [`super::whole`].
    Section,
}

/// Why a place failed.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The owner of the memory is gone; no page of it matters any more.
    #[error("the VM's memory is gone (its process ended)")]
    Gone,
    /// The kernel has no free page of this size now. What is evicted elsewhere may free one.
    #[error("no huge page is free for pages {start}..{end}")]
    NoPageFree {
        /// First page.
        start: PageNo,
        /// Page after the last.
        end: PageNo,
    },
    /// The kernel refused.
    #[error("{operation} of pages {start}..{end} failed: {source}")]
    Kernel {
        /// Operation that failed.
        operation: &'static str,
        /// First page.
        start: PageNo,
        /// Page after the last.
        end: PageNo,
        /// The kernel's error.
        source: std::io::Error,
    },
}

/// One backing of an address space: a VM's memfds, a GPU's memory.
///
/// Only [`PagedMemory`](crate) calls `install` and `discard`, always under the section's lock.
pub trait Place: Send + Sync {
    /// What can be installed and discarded in `section`. It stays the same while the section has pages.
    fn granule(&self, section: SectionNo) -> Granule {
        let _any = section;
        Granule::Page
    }

    /// Makes `page` present with `content`, whole and at once, for everyone who maps it, and
    /// releases its waiters in the kernel.
    ///
    /// # Errors
    /// [`PlaceError`]; the page is then unchanged.
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError>;

    /// Like [`Place::install`] with a page of zeros.
    ///
    /// # Errors
    /// As [`Place::install`].
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError>;

    /// Installs adjacent pages in one go; `content` is `pages.bytes()` long. Stops at the first
    /// page that is already present; returns how many pages from the start of `pages` were
    /// installed before it.
    ///
    /// # Errors
    /// As [`Place::install`], if not even the first could be installed; [`PlaceError::NoPageFree`] only of a
    /// section that goes whole.
    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError>;

    /// Reads present pages without making absent ones present (those read as zeros);
    /// `into` is `pages.bytes()` long.
    ///
    /// # Errors
    /// [`PlaceError`].
    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError>;

    /// Makes the pages absent for everyone; their content is gone.
    ///
    /// # Errors
    /// [`PlaceError`]; some of the pages may be absent then.
    fn discard(&self, pages: PageRange) -> Result<(), PlaceError>;

    /// True if the page is present, whether or not any process has it mapped.
    ///
    /// # Errors
    /// [`PlaceError`].
    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError>;

    /// The runs of present pages within `pages`, ascending.
    ///
    /// # Errors
    /// [`PlaceError`].
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError>;

    /// Wakes kernel waiters on `pages`, without installing anything.
    ///
    /// # Errors
    /// [`PlaceError`].
    fn wake(&self, pages: PageRange) -> Result<(), PlaceError>;

    /// Makes every access to `page` fail from now on: its content is lost.
    ///
    /// # Errors
    /// [`PlaceError`], including that the kernel does not support it.
    fn poison(&self, page: PageNo) -> Result<(), PlaceError>;
}
