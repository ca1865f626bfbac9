// SPDX-License-Identifier: Apache-2.0
//! [`WordArray`]: where page words lie.
//!
//! A table may have room for many more pages than there are: memory is added to a VM and taken from
//! it while it runs. So words get memory section by section, before they are first touched
//! ([`WordArray::make_room`]), and a section that never got any costs nothing. A section keeps its
//! room: another thread may be reading its words without a lock.

use super::word::{PageState, PageWord};
use crate::sync::AtomicU64;
use pagetide_addr::{PageNo, PageRange, SECTION_PAGES, SectionNo, to_usize};
use std::sync::OnceLock;

/// The words of an address space, one per page.
pub trait WordArray: Send + Sync {
    /// Number of pages that have words from the beginning: all of them, if memory never grows.
    fn page_count(&self) -> u64;

    /// Most pages that can ever have words.
    fn capacity_pages(&self) -> u64 {
        self.page_count()
    }

    /// The cell of a page's word.
    ///
    /// # Panics
    /// If `page` is past the capacity, or (possibly) if its section has no room.
    fn cell(&self, page: PageNo) -> &AtomicU64;

    /// Gives the words of all sections that `pages` touches memory. In a section that had none they
    /// are then [`PageState::Unallocated`]; other words stay as they are. If the process dies on
    /// the way, each section has either all its words or no room.
    ///
    /// # Errors
    /// [`NoRoom`]; some of the sections may have room then.
    fn make_room(&self, _pages: PageRange) -> Result<(), NoRoom> {
        Ok(())
    }

    /// The sections that have room, in ascending order: for opening what a dead process left.
    ///
    /// # Errors
    /// [`NoRoom`]: they cannot be determined.
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
    /// The system's error.
    pub source: std::io::Error,
}

/// Pages of one chunk of words: 256 MiB.
const CHUNK_PAGES: u64 = 128 * SECTION_PAGES;

/// Words in the process' own memory: for tests, and for spaces that need not outlive it.
#[derive(Debug)]
pub struct VolatileWords {
    page_count: u64,
    capacity_pages: u64,
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl VolatileWords {
    /// `page_count` words, all equal to `word`, and never more.
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

    /// Room for `capacity_pages` words, none of which uses memory yet.
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

    /// A new process has none.
    fn sections_with_room(&self) -> Result<Vec<SectionNo>, NoRoom> {
        Ok(Vec::new())
    }
}
