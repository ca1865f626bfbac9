// SPDX-License-Identifier: Apache-2.0
//! [`Pagemap`]: which pages a process has in its page table at this moment.
//!
//! *Present* here means mapped by that process; a page may well be in its file
//! and in nobody's page table. The *swapped* bit (62) is also set by
//! userfaultfd's write-protect markers, so it says nothing about swap.

use pagetide_addr::{Hva, PAGE_BYTES, PAGE_SHIFT};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Entries read at a time: the kernel itself walks 2 MiB at a time.
const CHUNK_ENTRIES: usize = 512;
const ENTRY_BYTES: usize = 8;

/// Why a pagemap could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PagemapError {
    /// It could not be opened.
    #[error("cannot open {path}: {source} (root, or CAP_SYS_PTRACE, is needed)")]
    Open {
        /// Its path.
        path: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// It could not be read.
    #[error("reading the pagemap entries of {pages} pages at {address} failed: {source}")]
    Read {
        /// Address of the first page.
        address: Hva,
        /// Number of pages.
        pages: u64,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The process is gone.
    #[error("the process is gone")]
    Gone,
}

/// The page table of one process, opened once.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

/// What the page table says about one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagemapEntry(u64);

impl PagemapEntry {
    /// The process has the page mapped.
    #[must_use]
    pub const fn is_present(self) -> bool {
        self.0 >> 63 != 0
    }

    /// The page is write-protected by a userfaultfd, mapped or not.
    #[must_use]
    pub const fn is_write_protected(self) -> bool {
        self.0 >> 57 & 1 != 0
    }
}

impl Pagemap {
    /// Of process `pid`.
    ///
    /// # Errors
    /// [`PagemapError::Open`].
    pub fn of_process(pid: u32) -> Result<Self, PagemapError> {
        Self::open(format!("/proc/{pid}/pagemap"))
    }

    /// Of this process.
    ///
    /// # Errors
    /// [`PagemapError::Open`].
    pub fn of_self() -> Result<Self, PagemapError> {
        Self::open("/proc/self/pagemap".to_owned())
    }

    fn open(path: String) -> Result<Self, PagemapError> {
        match File::open(&path) {
            Ok(file) => Ok(Self { file }),
            Err(source) => Err(PagemapError::Open { path, source }),
        }
    }

    /// Calls `see(position, entry)` for each of `pages` pages from `start` on.
    ///
    /// # Errors
    /// [`PagemapError::Gone`] or [`PagemapError::Read`]; some pages may have been seen.
    pub fn visit(
        &self,
        start: Hva,
        pages: u64,
        mut see: impl FnMut(u64, PagemapEntry),
    ) -> Result<(), PagemapError> {
        let mut buffer = [0_u8; CHUNK_ENTRIES * ENTRY_BYTES];
        let mut done = 0;
        while done < pages {
            let count = crate::to_usize((pages - done).min(CHUNK_ENTRIES as u64));
            let wanted = &mut buffer[..count * ENTRY_BYTES];
            let at = (start.0 >> PAGE_SHIFT) + done;
            let got = match self.file.read_at(wanted, at * ENTRY_BYTES as u64) {
                // The file of a process whose memory is gone is empty.
                Ok(0) => return Err(PagemapError::Gone),
                Ok(got) => got,
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Err(PagemapError::Gone),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(source) => {
                    return Err(PagemapError::Read {
                        address: Hva(start.0 + done * PAGE_BYTES),
                        pages: pages - done,
                        source,
                    });
                }
            };
            for entry in wanted[..got].as_chunks::<ENTRY_BYTES>().0 {
                see(done, PagemapEntry(u64::from_ne_bytes(*entry)));
                done += 1;
            }
        }
        Ok(())
    }

    /// Number of the `pages` pages from `start` on that are mapped.
    ///
    /// # Errors
    /// As [`Pagemap::visit`].
    pub fn count_present(&self, start: Hva, pages: u64) -> Result<u64, PagemapError> {
        let mut count = 0;
        self.visit(start, pages, |_, entry| {
            count += u64::from(entry.is_present())
        })?;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMapping;
    use crate::memory_file::GuestFile;
    use std::os::fd::AsFd;

    #[test]
    fn pages_touched_through_a_mapping_are_present_until_their_translations_are_dropped() {
        const PAGES: u64 = 1200;
        let file = GuestFile::new_memfd("pagemap", PAGES * PAGE_BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), PAGES * PAGE_BYTES).unwrap();
        let map = Pagemap::of_self().unwrap();
        let base = Hva(mapping.address() as u64);
        assert_eq!(map.count_present(base, PAGES).unwrap(), 0);
        for page in [0, 511, 512, 1199] {
            mapping.copy_to(page * PAGE_BYTES, &[1]).unwrap();
        }
        let mut seen = Vec::new();
        map.visit(base, PAGES, |i, entry| {
            if entry.is_present() {
                seen.push(i);
            }
        })
        .unwrap();
        // Huge pages may have brought neighbours along; the touched ones must be there.
        for page in [0, 511, 512, 1199] {
            assert!(seen.contains(&page), "{page} in {seen:?}");
        }
        mapping.drop_translations(0, PAGES * PAGE_BYTES).unwrap();
        assert_eq!(map.count_present(base, PAGES).unwrap(), 0);
    }

    #[test]
    fn pagemap_of_a_process_that_does_not_exist_cannot_be_opened() {
        assert!(matches!(
            Pagemap::of_process(0x7fff_ffff),
            Err(PagemapError::Open { .. })
        ));
    }
}
