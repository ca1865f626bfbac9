// SPDX-License-Identifier: Apache-2.0
//! [`PoolWords`]: the page words of a pool.
//!
//! The words of one section fill one page of the file, and memory is allocated by such pages. A
//! page is written whole, by one write, before it is first read through the mapping: so whenever
//! its writer dies it holds nothing, which is how a hole reads, or 512 valid words; and a full
//! tmpfs makes that write fail instead of raising a signal later on.

use super::Pool;
use crate::room::Room;
use pagetide_addr::{PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo};
use pagetide_gmem::{NoRoom, PageState, PageWord, WordArray};
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
pub struct PoolWords {
    pool: Arc<Pool>,
    room: Arc<Room>,
}

impl PoolWords {
    /// The words of `pool`.
    #[must_use]
    pub fn of(pool: Arc<Pool>) -> Self {
        Self {
            pool,
            room: Arc::new(Room::unlimited()),
        }
    }

    /// From now on memory for more words is taken from `room`.
    #[must_use]
    pub fn within(self, room: Arc<Room>) -> Self {
        Self { room, ..self }
    }
}

impl WordArray for PoolWords {
    fn page_count(&self) -> u64 {
        self.pool.page_count
    }

    fn capacity_pages(&self) -> u64 {
        self.pool.capacity_pages
    }

    fn cell(&self, page: PageNo) -> &AtomicU64 {
        self.pool.word_cell(page)
    }

    fn make_room(&self, pages: PageRange) -> Result<(), NoRoom> {
        let pool = &self.pool;
        let _changing = (pool.changing.lock()).unwrap_or_else(PoisonError::into_inner);
        let failed = |error| no_room(pages, error);
        let mut missing = Vec::new();
        for section in pages.sections() {
            if !pool.has_words(section).map_err(failed)? {
                missing.push(section);
            }
        }
        let is_charged = |section: &&SectionNo| pool.was_made_with(**section);
        let charged = missing.iter().filter(is_charged).count();
        let bytes = (missing.len() - charged) as u64 * PAGE_BYTES;
        if bytes > 0 {
            self.room
                .take_once(bytes)
                .map_err(|shortage| over_quota(pages, shortage))?;
            pool.take_for_words(bytes)
                .map_err(|reached| over_quota(pages, reached))?;
        }
        pool.begin_words(&missing).map_err(|error| {
            pool.give_back(bytes);
            failed(error)
        })
    }

    /// Sections whose words are all unallocated lose their memory here.
    fn sections_with_room(&self) -> Result<Vec<SectionNo>, NoRoom> {
        let pages = PageNo(0).run(self.pool.capacity_pages);
        self.pool
            .sections_in_use()
            .map_err(|error| no_room(pages, error))
    }
}

fn over_quota(pages: PageRange, why: impl std::error::Error + Send + Sync + 'static) -> NoRoom {
    NoRoom {
        start: pages.start,
        end: pages.end,
        source: std::io::Error::new(std::io::ErrorKind::QuotaExceeded, why),
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

    /// The last section of a pool that is created with words may be partial.
    pub(super) fn mark_words_past_the_last_page(&self) {
        let unallocated = PageWord::new(PageState::Unallocated).bits();
        for page in self.page_count..self.page_count.next_multiple_of(SECTION_PAGES) {
            self.word_cell(PageNo(page))
                .store(unallocated, Ordering::Relaxed);
        }
    }

    /// Gives sections without words fresh ones, all unallocated; either all of the sections get
    /// them, or none.
    fn begin_words(&self, sections: &[SectionNo]) -> Result<(), FileError> {
        let word = PageWord::new(PageState::Unallocated).bits();
        let fresh = word.to_ne_bytes().repeat(SECTION_WORDS_BYTES / 8);
        for (begun, section) in sections.iter().enumerate() {
            let Err(error) = self.file.write_at(self.words_of(*section), &fresh) else {
                continue;
            };
            let given = sections[..=begun].iter();
            for section in given.filter(|section| !self.was_made_with(**section)) {
                if let Err(error) = self.file.punch(self.words_of(*section), PAGE_BYTES) {
                    tracing::warn!(pool = %self.path.display(), %error, "unused page words keep their memory");
                }
            }
            return Err(error);
        }
        Ok(())
    }

    /// True if the section's words got memory when this process created the pool.
    fn was_made_with(&self, section: SectionNo) -> bool {
        section.0 < self.sections_made_with
    }

    fn has_words(&self, section: SectionNo) -> Result<bool, FileError> {
        let mut words = [0; SECTION_WORDS_BYTES];
        self.file.read_at(self.words_of(section), &mut words)?;
        Ok(words != [0; SECTION_WORDS_BYTES])
    }

    fn sections_in_use(&self) -> Result<Vec<SectionNo>, FileError> {
        let unallocated = PageWord::new(PageState::Unallocated).bits();
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
                    self.give_back(PAGE_BYTES);
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
        let words = PoolWords::of(Arc::clone(&pool));
        words
            .make_room(region(CAPACITY / SECTION_PAGES - 2, 1024))
            .unwrap();
        words.make_room(region(7, 1)).unwrap();
        assert_eq!(pool.allocated_bytes().unwrap(), empty + 3 * PAGE_BYTES);
        pool.allocate_chunk(pool.chunk_limit() - 1).unwrap();
        pool.release_chunks(0, pool.chunk_limit()).unwrap();
        assert_eq!(pool.allocated_bytes().unwrap(), empty + 3 * PAGE_BYTES);
        let last = words.cell(PageNo(CAPACITY - 1)).load(Ordering::Relaxed);
        assert_eq!(last, PageWord::new(PageState::Unallocated).bits());
    }

    /// Words of `path` in a group that has `free` bytes beyond its margin.
    fn words_within(path: &std::path::Path, free: u64) -> PoolWords {
        let level = crate::cgroup::Level {
            group: "/g".into(),
            file: "memory.max",
            limit_bytes: 64 << 20,
            charged_bytes: (48 << 20) - free,
            cache_bytes: 0,
        };
        let room = Room::with(Box::new(move || Ok(vec![level.clone()])));
        let pool = Pool::create(path, 1024, 0, b"").unwrap();
        PoolWords::of(Arc::new(pool)).within(Arc::new(room))
    }

    #[test]
    fn words_of_more_memory_are_refused_where_the_group_has_no_room_and_leave_nothing() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let words = words_within(&dir.path().join("vm.pool"), 2 * PAGE_BYTES);
        let before = words.pool.allocated_bytes().unwrap();
        // Words created with the pool are charged already.
        words.make_room(region(0, 1024)).unwrap();
        let refused = words.make_room(region(2, 1537)).unwrap_err();
        assert_eq!(refused.source.kind(), std::io::ErrorKind::QuotaExceeded);
        assert!(refused.to_string().contains("memory.max"), "{refused}");
        assert_eq!(words.pool.allocated_bytes().unwrap(), before);
        words.make_room(region(2, 1024)).unwrap();
        words.make_room(region(2, 1024)).unwrap();
        assert_eq!(
            words.pool.allocated_bytes().unwrap(),
            before + 2 * PAGE_BYTES
        );
    }

    #[test]
    fn room_made_again_leaves_words_as_they_are_and_a_successor_finds_what_is_used() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let present = PageWord::new(PageState::Present).bits();
        {
            let pool = Arc::new(Pool::create_empty(&path, CAPACITY, 0, b"").unwrap());
            let words = PoolWords::of(pool);
            words.make_room(region(3, 1024)).unwrap();
            words
                .cell(PageNo(4 * 512 + 9))
                .store(present, Ordering::Relaxed);
            words.make_room(region(2, 2048)).unwrap();
            let kept = words.cell(PageNo(4 * 512 + 9)).load(Ordering::Relaxed);
            assert_eq!(kept, present);
        }
        let pool = Arc::new(Pool::open(&path).unwrap());
        let table = PageTable::reopen(Box::new(PoolWords::of(Arc::clone(&pool)))).unwrap();
        let sections: Vec<_> = table.sections().collect();
        assert_eq!(sections, [SectionNo(4)]);
        assert_eq!(table.pages_of(SectionNo(4)), region(4, 10));
        assert_eq!(pool.allocated_bytes().unwrap(), (64 << 10) + PAGE_BYTES);
    }

    #[test]
    fn pool_made_with_words_is_found_whole_by_a_successor() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let present = PageWord::new(PageState::Present).bits();
        {
            let pool = Arc::new(Pool::create(&path, 1045, 0, b"").unwrap());
            let words = PoolWords::of(pool);
            for page in 0..1045 {
                words.cell(PageNo(page)).store(present, Ordering::Relaxed);
            }
        }
        let pool = Arc::new(Pool::open(&path).unwrap());
        let table = PageTable::reopen(Box::new(PoolWords::of(pool))).unwrap();
        assert_eq!(table.page_count(), 1045);
        assert_eq!(table.sections().count(), 3);
    }
}
