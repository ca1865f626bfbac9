// SPDX-License-Identifier: Apache-2.0
//! RAM of the guest, with the content of the bench.

use super::content::content;
use pagetide_addr::{PAGE_BYTES, PageNo, to_usize};
use pagetide_random::SplitMix64;
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use std::os::fd::AsFd as _;

const PAGE: usize = 4096;

/// See the module.
pub(super) struct Ram {
    mapping: SharedMapping,
    _file: GuestFile,
    /// The version of each page.
    versions: Vec<u32>,
    random: SplitMix64,
}

impl Ram {
    /// `bytes` of RAM with the content of the bench.
    pub(super) fn new(bytes: u64) -> Result<Self, String> {
        let wrong = |error: &dyn std::fmt::Display| format!("the RAM: {error}");
        let file = GuestFile::new_memfd("pagetide-bench-pool", bytes).map_err(|e| wrong(&e))?;
        let mapping = SharedMapping::new(file.as_fd(), bytes).map_err(|e| wrong(&e))?;
        let mut ram = Self {
            mapping,
            _file: file,
            versions: vec![0; to_usize(bytes / PAGE_BYTES)],
            random: SplitMix64::new(17),
        };
        for page in ram.pages() {
            ram.write(page)?;
        }
        Ok(ram)
    }

    fn pages(&self) -> impl Iterator<Item = PageNo> + use<> {
        (0..self.versions.len() as u64).map(PageNo)
    }

    fn write(&mut self, page: PageNo) -> Result<(), String> {
        let bytes = content(page, self.versions[page.index()]);
        let written = self.mapping.copy_to(page.byte_offset(), &bytes);
        written.map_err(|error| error.to_string())
    }

    fn read(&self, page: PageNo) -> Result<[u8; PAGE], String> {
        let mut bytes = [0; PAGE];
        let read = self.mapping.copy_from(page.byte_offset(), &mut bytes);
        read.map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// About one page in three, drawn at random, gets its next version.
    pub(super) fn rewrite_a_third(&mut self) -> Result<(), String> {
        for page in self.pages() {
            if self.random.below(3) == 0 {
                self.versions[page.index()] += 1;
                self.write(page)?;
            }
        }
        Ok(())
    }

    /// About every other page, drawn at random, is read.
    pub(super) fn read_half(&mut self) -> Result<(), String> {
        for page in self.pages() {
            if self.random.below(2) == 0 {
                self.check(page)?;
            }
        }
        Ok(())
    }

    /// Compares all pages.
    pub(super) fn verify(&self) -> Result<(), String> {
        self.pages().try_for_each(|page| self.check(page))
    }

    fn check(&self, page: PageNo) -> Result<(), String> {
        if self.read(page)? == content(page, self.versions[page.index()]) {
            Ok(())
        } else {
            Err(format!("{page} came back with other bytes"))
        }
    }
}
