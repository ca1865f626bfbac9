// SPDX-License-Identifier: Apache-2.0
//! [`PoolWords`]: the page words of a pool.
//!
//! The words of one section fill one page of the file, and that page is what
//! gets memory. It is written whole, by one write, before it is first looked at
//! through the mapping: so whenever its writer dies it holds nothing, which is
//! how a hole reads, or 512 words that make sense; and a tmpfs that is full is
//! an error of that write and no signal later on.

use super::Pool;
use pagetide_addr::{PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo};
use pagetide_gmem::{NoRoom, PageWord, State, WordArray};
use pagetide_sys::memory_file::FileError;
use std::sync::{
    Arc, PoisonError,
    atomic::{AtomicU64, Ordering},
};

const SECTION_WORDS_BYTES: usize = 4096;
const _: () = assert!(SECTION_WORDS_BYTES as u64 == SECTION_PAGES * 8);
const _: () = assert!(SECTION_WORDS_BYTES as u64 == PAGE_BYTES);

/// The page words of a pool.
#[derive(Debug, Clone)]
pub struct PoolWords(pub Arc<Pool>);

impl WordArray for PoolWords {
    fn page_count(&self) -> u64 {
        self.0.page_count
    }

    fn capacity_pages(&self) -> u64 {
        self.0.capacity_pages
    }

    fn cell(&self, page: PageNo) -> &AtomicU64 {
        self.0.word_cell(page)
    }

    fn make_room(&self, pages: PageRange) -> Result<(), NoRoom> {
        let _changing = (self.0.changing.lock()).unwrap_or_else(PoisonError::into_inner);
        let word = PageWord::new(State::Unallocated).bits();
        let fresh = word.to_ne_bytes().repeat(SECTION_WORDS_BYTES / 8);
        for section in pages.sections() {
            let has_room = self.0.has_words(section);
            let made = has_room.and_then(|has_room| {
                if has_room {
                    Ok(())
                } else {
                    self.0.file.write_at(self.0.words_of(section), &fresh)
                }
            });
            made.map_err(|error| no_room(pages, error))?;
        }
        Ok(())
    }

    /// Sections whose words are all unallocated give their memory back here.
    fn sections_with_room(&self) -> Result<Vec<SectionNo>, NoRoom> {
        let pages = PageRange::new(PageNo(0), PageNo(self.0.capacity_pages));
        self.0
            .sections_in_use()
            .map_err(|error| no_room(pages, error))
    }
}

fn no_room(pages: PageRange, error: FileError) -> NoRoom {
    let source = match error {
        FileError::NoSpace { .. } => std::io::Error::new(std::io::ErrorKind::StorageFull, error),
        other => std::io::Error::other(other),
    };
    NoRoom {
        start: pages.start,
        end: pages.end,
        source,
    }
}

impl Pool {
    fn word_cell(&self, page: PageNo) -> &AtomicU64 {
        assert!(
            page.0 < self.capacity_pages,
            "{page} is past the end of the pool"
        );
        match self.mapping.atomic_u64s(self.words_at + page.0 * 8, 1) {
            Some([cell]) => cell,
            _ => unreachable!("sizes were checked when the pool was opened"),
        }
    }

    fn words_of(&self, section: SectionNo) -> u64 {
        self.words_at + section.0 * PAGE_BYTES
    }

    /// The last section of a pool that is made with words may not be whole.
    pub(super) fn mark_words_past_the_last_page(&self) {
        let unallocated = PageWord::new(State::Unallocated).bits();
        for page in self.page_count..self.page_count.next_multiple_of(SECTION_PAGES) {
            self.word_cell(PageNo(page))
                .store(unallocated, Ordering::Relaxed);
        }
    }

    fn has_words(&self, section: SectionNo) -> Result<bool, FileError> {
        let mut words = [0; SECTION_WORDS_BYTES];
        self.file.read_at(self.words_of(section), &mut words)?;
        Ok(words != [0; SECTION_WORDS_BYTES])
    }

    fn sections_in_use(&self) -> Result<Vec<SectionNo>, FileError> {
        let unallocated = PageWord::new(State::Unallocated).bits();
        let unused = unallocated.to_ne_bytes().repeat(SECTION_WORDS_BYTES / 8);
        let mut in_use = Vec::new();
        let mut words = [0; SECTION_WORDS_BYTES];
        let len_bytes = self.capacity_pages * 8;
        for (at, bytes) in self.file.data_runs(self.words_at, len_bytes)? {
            let first = (at - self.words_at) / PAGE_BYTES;
            let end = (at + bytes - self.words_at).div_ceil(PAGE_BYTES);
            for section in (first..end).map(SectionNo) {
                let at = self.words_of(section);
                self.file.read_at(at, &mut words)?;
                if words[..] == unused {
                    self.file.punch(at, PAGE_BYTES)?;
                } else if words != [0; SECTION_WORDS_BYTES] {
                    in_use.push(section);
                }
            }
        }
        Ok(in_use)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_gmem::PageTable;

    const CAPACITY: u64 = 1 << 28;

    fn region(section: u64, pages: u64) -> PageRange {
        let start = section * SECTION_PAGES;
        PageRange::new(PageNo(start), PageNo(start + pages))
    }

    #[test]
    fn pool_for_a_tebibyte_takes_memory_for_the_words_it_was_asked_for_only() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let pool = Arc::new(Pool::create_empty(&path, CAPACITY, 0, b"").unwrap());
        let empty = pool.allocated_bytes().unwrap();
        assert!(empty <= 64 << 10, "{empty}");
        let words = PoolWords(Arc::clone(&pool));
        words
            .make_room(region(CAPACITY / SECTION_PAGES - 2, 1024))
            .unwrap();
        words.make_room(region(7, 1)).unwrap();
        assert_eq!(pool.allocated_bytes().unwrap(), empty + 3 * PAGE_BYTES);
        pool.allocate_chunk(pool.chunk_limit() - 1).unwrap();
        pool.release_chunks(0, pool.chunk_limit()).unwrap();
        assert_eq!(pool.allocated_bytes().unwrap(), empty + 3 * PAGE_BYTES);
        let last = words.cell(PageNo(CAPACITY - 1)).load(Ordering::Relaxed);
        assert_eq!(last, PageWord::new(State::Unallocated).bits());
    }

    #[test]
    fn room_made_again_leaves_words_as_they_are_and_a_successor_finds_what_is_used() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let present = PageWord::new(State::Present).bits();
        {
            let pool = Arc::new(Pool::create_empty(&path, CAPACITY, 0, b"").unwrap());
            let words = PoolWords(pool);
            words.make_room(region(3, 1024)).unwrap();
            words
                .cell(PageNo(4 * 512 + 9))
                .store(present, Ordering::Relaxed);
            words.make_room(region(2, 2048)).unwrap();
            let kept = words.cell(PageNo(4 * 512 + 9)).load(Ordering::Relaxed);
            assert_eq!(kept, present);
        }
        let pool = Arc::new(Pool::open(&path).unwrap());
        let table = PageTable::reopen(Box::new(PoolWords(Arc::clone(&pool)))).unwrap();
        let sections: Vec<_> = table.sections().collect();
        assert_eq!(sections, [SectionNo(4)]);
        assert_eq!(table.pages_of(SectionNo(4)), region(4, 10));
        assert_eq!(pool.allocated_bytes().unwrap(), (64 << 10) + PAGE_BYTES);
    }

    #[test]
    fn pool_made_with_words_is_found_whole_by_a_successor() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let present = PageWord::new(State::Present).bits();
        {
            let pool = Arc::new(Pool::create(&path, 1045, 0, b"").unwrap());
            let words = PoolWords(pool);
            for page in 0..1045 {
                words.cell(PageNo(page)).store(present, Ordering::Relaxed);
            }
        }
        let pool = Arc::new(Pool::open(&path).unwrap());
        let table = PageTable::reopen(Box::new(PoolWords(pool))).unwrap();
        assert_eq!(table.page_count(), 1045);
        assert_eq!(table.sections().count(), 3);
    }
}
