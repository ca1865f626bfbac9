// SPDX-License-Identifier: Apache-2.0
//! RAM of a VMM that is this process.

use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use std::os::fd::AsFd as _;

const PAGE_BYTES: u64 = 4096;

/// A file of RAM, mapped shared, whose pages have the content that their number says.
pub struct Ram {
    pub mapping: SharedMapping,
    /// A VMM keeps it open.
    _file: GuestFile,
    pages: u64,
    content: fn(u64) -> Vec<u8>,
}

impl Ram {
    pub fn filled(bytes: u64, content: fn(u64) -> Vec<u8>) -> Self {
        let file = GuestFile::new_memfd("ram", bytes).unwrap();
        Self::filled_in(file, bytes, content)
    }

    /// The same in this file.
    pub fn filled_in(file: GuestFile, bytes: u64, content: fn(u64) -> Vec<u8>) -> Self {
        let mapping = SharedMapping::new(file.as_fd(), bytes).unwrap();
        let pages = bytes / PAGE_BYTES;
        for page in 0..pages {
            mapping.copy_to(page * PAGE_BYTES, &content(page)).unwrap();
        }
        Self {
            mapping,
            _file: file,
            pages,
            content,
        }
    }

    /// Touches a page, and compares its bytes.
    pub fn touch(&self, page: u64) {
        let mut found = vec![0; 4096];
        let at = page * PAGE_BYTES;
        self.mapping.copy_from(at, &mut found).unwrap();
        assert!(found == (self.content)(page), "page {page}");
    }

    /// All of them.
    pub fn verify(&self) {
        (0..self.pages).for_each(|page| self.touch(page));
    }
}
