// SPDX-License-Identifier: Apache-2.0
//! [`WordArray`]: where page words lie.
//!
//! A table may have room for many more pages than there are: memory is added to
//! a VM and taken from it while it runs. So words get memory section by section,
//! before they are first touched ([`WordArray::make_room`]), and a section that
//! never got any costs nothing. Once a section has room it keeps it: somebody
//! may be looking at its words without a lock.

use super::word::{PageState, PageWord};
use crate::sync::AtomicU64;
use pagetide_addr::{PageNo, PageRange, SECTION_PAGES, SectionNo, to_usize};
use std::sync::OnceLock;

/// Words of an address space, one a page.
pub trait WordArray: Send + Sync {
    /// Number of pages that have words from the beginning: all of them where memory never grows.
    fn page_count(&self) -> u64;

    /// Number of pages there can ever be words for.
    fn capacity_pages(&self) -> u64 {
        self.page_count()
    }

    /// The cell of a page's word.
    ///
    /// # Panics
    /// If `page` is past the capacity, or (perhaps) if its section has no room.
    fn cell(&self, page: PageNo) -> &AtomicU64;

    /// Gives the words of all sections that `pages` touches memory. Those of a section that had none
    /// are [`PageState::Unallocated`] then; others stay as they are. A death on the way leaves each
    /// section with all its words or without room.
    ///
    /// # Errors
    /// [`NoRoom`]; some of the sections may have room then.
    fn make_room(&self, _pages: PageRange) -> Result<(), NoRoom> {
        Ok(())
    }

    /// The sections that have room, in ascending order: for opening what a dead process left.
    ///
    /// # Errors
    /// [`NoRoom`]: it cannot be told.
    fn sections_with_room(&self) -> Result<Vec<SectionNo>, NoRoom> {
        Ok((0..SectionNo::count_for(self.page_count()))
            .map(SectionNo)
            .collect())
    }
}

/// Why page words have no memory.
#[derive(Debug, thiserror::Error)]
#[error("the words of pages {start}..{end} cannot be given memory: {source}")]
pub struct NoRoom {
    /// First page.
    pub start: PageNo,
    /// Page after the last.
    pub end: PageNo,
    /// What the system says.
    pub source: std::io::Error,
}

/// Words of one chunk: 256 MiB of pages.
const CHUNK_PAGES: u64 = 128 * SECTION_PAGES;

/// Words in the process' own memory: for tests, and for spaces that need not outlive it.
#[derive(Debug)]
pub struct VolatileWords {
    page_count: u64,
    capacity_pages: u64,
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl VolatileWords {
    /// `page_count` words, all `word`, and never more.
    #[must_use]
    pub fn new(page_count: u64, word: PageWord) -> Self {
        let words = Self {
            page_count,
            ..Self::with_capacity(page_count)
        };
        for chunk in 0..words.chunks.len() {
            words.make_chunk(chunk, word);
        }
        words
    }

    /// Room for `capacity_pages` words, none of which takes up memory yet.
    #[must_use]
    pub fn with_capacity(capacity_pages: u64) -> Self {
        let chunks = capacity_pages.div_ceil(CHUNK_PAGES);
        Self {
            page_count: 0,
            capacity_pages,
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
        }
    }

    fn make_chunk(&self, number: usize, word: PageWord) {
        let first = number as u64 * CHUNK_PAGES;
        let len = CHUNK_PAGES.min(self.capacity_pages - first);
        let make = || (0..len).map(|_| AtomicU64::new(word.bits())).collect();
        self.chunks[number].get_or_init(make);
    }
}

impl WordArray for VolatileWords {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn capacity_pages(&self) -> u64 {
        self.capacity_pages
    }

    fn cell(&self, page: PageNo) -> &AtomicU64 {
        let chunk = self.chunks[to_usize(page.0 / CHUNK_PAGES)].get();
        match chunk {
            Some(words) => &words[to_usize(page.0 % CHUNK_PAGES)],
            None => panic!("{page} has no word yet"),
        }
    }

    fn make_room(&self, pages: PageRange) -> Result<(), NoRoom> {
        let end = pages.end.0.min(self.capacity_pages).div_ceil(CHUNK_PAGES);
        for chunk in pages.start.0 / CHUNK_PAGES..end {
            self.make_chunk(to_usize(chunk), PageWord::new(PageState::Unallocated));
        }
        Ok(())
    }

    /// A new process has none of them.
    fn sections_with_room(&self) -> Result<Vec<SectionNo>, NoRoom> {
        Ok(Vec::new())
    }
}
