// SPDX-License-Identifier: Apache-2.0
//! RAM of a VMM that is this process.

use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use std::os::fd::AsFd as _;

const PAGE_BYTES: u64 = 4096;

/// A file of RAM, mapped shared, whose pages have the content that their number says.
pub struct Ram {
    mapping: SharedMapping,
    /// A VMM keeps it open.
    _file: GuestFile,
    pages: u64,
    content: fn(u64) -> Vec<u8>,
}

impl Ram {
    pub fn filled(bytes: u64, content: fn(u64) -> Vec<u8>) -> Self {
        let file = GuestFile::new_memfd("ram", bytes).unwrap();
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

    /// Touches every page, and compares every byte.
    pub fn verify(&self) {
        let mut found = vec![0; 4096];
        for page in 0..self.pages {
            self.mapping
                .copy_from(page * PAGE_BYTES, &mut found)
                .unwrap();
            assert!(found == (self.content)(page), "page {page}");
        }
    }
}
