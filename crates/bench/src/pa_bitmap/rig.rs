// SPDX-License-Identifier: Apache-2.0
//! A file of guest RAM of 1 TiB, all of it a hole, with a bitmap that has all its words.

use pagetide_addr::{Access, FilePage, FileRange, PAGE_BYTES};
use pagetide_sys::memory_file::{FileError, GuestFile};
use pagetide_vpri::{DomainError, DomainTable, RamWindow};
use std::{os::fd::AsFd as _, sync::Arc};

use super::Random;

/// Why there is no such file.
#[derive(Debug, thiserror::Error)]
pub enum RigError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its domain.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// The space is too small for all parts of the bench.
    #[error("a space of 2^{0} pages is smaller than a GiB")]
    TooSmall(u32),
}

/// The file and its domain.
pub struct Rig {
    /// The whole file, as its only engine maps it.
    pub window: Arc<RamWindow>,
    /// log2 of its pages.
    pub pages_log2: u32,
}

impl Rig {
    /// A domain of 2 to the power of `pages_log2` pages. Their permissions change randomly from one word of
    /// the bitmap to the next, so that the processor cannot predict a look-up.
    ///
    /// # Errors
    /// [`RigError`].
    pub fn new(pages_log2: u32) -> Result<Self, RigError> {
        if pages_log2 < 18 {
            return Err(RigError::TooSmall(pages_log2));
        }
        let bytes = PAGE_BYTES << pages_log2;
        let file = GuestFile::new_memfd("bench-pa-bitmap", bytes)?;
        let window = DomainTable::new(1).map_whole(file.as_fd())?;
        let attributes = window.domain().attributes();
        attributes.unmap_all();
        let mut random = Random(1);
        for first in (0..1 << pages_log2).step_by(32) {
            let word = FileRange::new(FilePage(first), FilePage(first + 32));
            match random.next(0, 2) {
                0 => {}
                1 => attributes.grant(word, Access::Read),
                _ => attributes.grant(word, Access::Write),
            }
        }
        Ok(Self { window, pages_log2 })
    }
}
