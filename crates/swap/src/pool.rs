// SPDX-License-Identifier: Apache-2.0
//! The metadata pool: all that must outlive the daemon of a VM's pages, in one file.
//!
//! ```text
//!   0        ┌ header ───────────────────────────────────────────────┐
//!            │ cell 0  magic     3 page count     6 content room      │ 8-byte cells,
//!            │      1  version   4 words at       7 CRC seed          │ native byte order
//!            │      2  sizes     5 content at     8 limit  9 restarts │
//!            │     14  capacity  16… slow tiers   32… counters        │
//!   4 KiB    │ identity of the VM, JSON, twice (see `pool/identity`)  │
//!   64 KiB   ├ page words, 8 bytes each, for the whole capacity ──────┤
//!            │ (a hole where no page was ever allocated)              │
//!   …        ├ content, in chunks of 64 KiB ──────────────────────────┤
//!            │ (a hole until a chunk is first used)                   │
//!   …        ├ table of extents of tiers outside memory ──────────────┤
//!            │ (a hole from the last that was used, see `pool/slow`)  │
//!            └────────────────────────────────────────────────────────┘
//! ```
//! A VM's memory may grow, so there are words and content room for many more
//! pages than it has ([`capacity_for`]): a pool for 1 TiB is a file, and a
//! mapping, of 1.1 TiB, of which only what is used takes up memory.
//!
//! The file is on tmpfs with mode 0600: it holds guest memory, and it must survive the daemon but
//! not the host. A write through a mapping to a full tmpfs kills the process by SIGBUS, so every
//! part gets its memory by `fallocate` before it is first touched; only there can "no space"
//! happen, as an error.
//!
//! The process that uses the pool holds its `flock`. The file is created under another name and
//! renamed when complete. All positions are indices: nothing in it is an address of this process. A
//! newer version may use cells that are 0 here, and finds all parts by the sizes in the header.
//!
//! What all pools of a daemon may take together is capped ([`PoolCap`]). Their pages are kept out of
//! swap where that is permitted: a fault that waits for a page waits for the pool.

mod charge;
mod error;
mod file;
mod format;
mod identity;
mod slow;
mod within;
mod words;

pub use charge::{CAP_BYTES_MIN, CapReached, LeftPool, PoolCap, bytes_at};
pub use error::{ExtentError, PoolError};
pub use file::version_at;
pub use format::{Counter, PAGES_MAX, Phase, VERSION, capacity_for};
pub use within::TmpfsRoom;
pub use words::PoolWords;

use crate::slots::CHUNK_BYTES;
use charge::Charge;
use file::{at, keep_as, map, open_locked, remove_quietly};
use format::{Cell, FIRST_COUNTER, HEADER_BYTES, HEADER_CELLS, MAGIC, NO_LIMIT};
use pagetide_addr::{PAGE_BYTES, SECTION_PAGES};
use pagetide_sys::{
    mapping::{MappingError, SharedMapping},
    memory_file::{FileError, GuestFile},
};
use rustix::fs::OFlags;
use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// Ending of a pool's file name.
pub const POOL_SUFFIX: &str = "pool";

/// Pages that a new pool has words for, and pages it has room for.
#[derive(Clone, Copy)]
struct Extent {
    page_count: u64,
    capacity_pages: u64,
}

/// An open pool, locked by this process.
#[derive(Debug)]
pub struct Pool {
    path: PathBuf,
    file: GuestFile,
    mapping: SharedMapping,
    page_count: u64,
    capacity_pages: u64,
    words_at: u64,
    content_at: u64,
    content_bytes: u64,
    /// Sections whose words got memory when the pool was created; 0 in a pool that was opened.
    sections_made_with: u64,
    charge: Charge,
    /// Held while the identity is replaced or words get memory.
    changing: Mutex<()>,
}

impl Pool {
    /// Creates the pool of a VM of `page_count` pages at `path`, with room for [`capacity_for`] that
    /// many; its words are all 0 (the caller must set them before any are read). `seed` should be
    /// random.
    ///
    /// # Errors
    /// [`PoolError`]; nothing is left behind.
    pub fn create(
        path: &Path,
        page_count: u64,
        seed: u32,
        identity: &[u8],
    ) -> Result<Self, PoolError> {
        if page_count == 0 {
            return Err(PoolError::TooLarge(page_count));
        }
        let capacity_pages = capacity_for(page_count);
        let extent = Extent {
            page_count,
            capacity_pages,
        };
        Self::create_with(path, extent, seed, identity)
    }

    /// Creates a pool at `path` with room for `capacity_pages` and no words: a page gets its word
    /// when it is allocated. `seed` should be random.
    ///
    /// # Errors
    /// [`PoolError`]; nothing is left behind.
    pub fn create_empty(
        path: &Path,
        capacity_pages: u64,
        seed: u32,
        identity: &[u8],
    ) -> Result<Self, PoolError> {
        let extent = Extent {
            page_count: 0,
            capacity_pages,
        };
        Self::create_with(path, extent, seed, identity)
    }

    fn create_with(
        path: &Path,
        extent: Extent,
        seed: u32,
        identity: &[u8],
    ) -> Result<Self, PoolError> {
        // Memory for words is allocated by whole sections.
        let capacity_pages = extent.capacity_pages.next_multiple_of(SECTION_PAGES);
        if extent.page_count > capacity_pages || !(1..=PAGES_MAX).contains(&capacity_pages) {
            return Err(PoolError::TooLarge(extent.page_count.max(capacity_pages)));
        }
        let extent = Extent {
            capacity_pages,
            ..extent
        };
        let unfinished = path.with_extension("new");
        let made = Self::build(&unfinished, extent).and_then(|pool| {
            pool.cell(Cell::Seed)
                .store(u64::from(seed), Ordering::Relaxed);
            pool.set_identity(identity)?;
            pool.cell(Cell::Magic).store(MAGIC, Ordering::Release);
            keep_as(&unfinished, path)?;
            Ok(Self {
                path: path.to_owned(),
                ..pool
            })
        });
        if made.is_err() {
            remove_quietly(&unfinished);
        }
        made
    }

    fn build(path: &Path, extent: Extent) -> Result<Self, PoolError> {
        remove_quietly(path);
        let file = open_locked(path, OFlags::CREATE | OFlags::EXCL)?;
        if !file.is_tmpfs().map_err(|source| PoolError::File {
            path: path.to_owned(),
            source,
        })? {
            return Err(PoolError::NotTmpfs(path.to_owned()));
        }
        let Extent {
            page_count,
            capacity_pages,
        } = extent;
        let words_at = HEADER_BYTES;
        let content_at = (words_at + capacity_pages * 8).next_multiple_of(CHUNK_BYTES);
        // Every page uncompressed in slots of 65 units, 15 to a chunk, and a chunk for each slot size.
        let content_bytes = (capacity_pages.div_ceil(15) + 128) * CHUNK_BYTES;
        let content_end = content_at + content_bytes;
        let (extents_at, extent_capacity, length) =
            slow::lay_out(path, &file, content_end, capacity_pages)?;
        let failed = |source| PoolError::File {
            path: path.to_owned(),
            source,
        };
        let words_end = words_at + page_count.next_multiple_of(SECTION_PAGES) * 8;
        file.allocate(0, words_end).map_err(failed)?;
        let allocated_bytes = file.allocated_bytes().map_err(failed)?;
        let mapping = map(path, &file, length)?;
        let pool = Self {
            path: path.to_owned(),
            file,
            mapping,
            page_count,
            capacity_pages,
            words_at,
            content_at,
            content_bytes,
            sections_made_with: page_count.div_ceil(SECTION_PAGES),
            charge: Charge::existing(&PoolCap::new(None), allocated_bytes),
            changing: Mutex::new(()),
        };
        pool.mark_words_past_the_last_page();
        for (cell, value) in [
            (Cell::Version, VERSION),
            (Cell::HeaderBytes, HEADER_BYTES),
            (Cell::PageCount, page_count),
            (Cell::WordsAt, words_at),
            (Cell::ContentAt, content_at),
            (Cell::ContentBytes, content_bytes),
            (Cell::CapacityPages, capacity_pages),
            (Cell::Limit, NO_LIMIT),
        ] {
            pool.cell(cell).store(value, Ordering::Relaxed);
        }
        pool.begin_slow(extents_at, extent_capacity)?;
        Ok(pool)
    }

    /// Opens a pool that a dead daemon left.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        let file = open_locked(path, OFlags::empty())?;
        let failed = |source| PoolError::File {
            path: path.to_owned(),
            source,
        };
        let length = file.len_bytes().map_err(failed)?;
        let damaged = |why: String| PoolError::Damaged {
            path: path.to_owned(),
            why,
        };
        if length < HEADER_BYTES {
            return Err(damaged(format!(
                "it has {length} bytes, less than a header"
            )));
        }
        let mut header = vec![0; HEADER_CELLS * 8];
        file.read_at(0, &mut header).map_err(failed)?;
        let cell = |cell: Cell| {
            let at = cell as usize * 8;
            u64::from_ne_bytes(header[at..at + 8].try_into().unwrap_or_default())
        };
        if cell(Cell::Magic) != MAGIC {
            return Err(damaged("it does not begin like a pool".into()));
        }
        if cell(Cell::Version) != VERSION {
            let found = cell(Cell::Version);
            return Err(damaged(format!(
                "it has version {found}, and this program reads version {VERSION}"
            )));
        }
        let (page_count, words_at) = (cell(Cell::PageCount), cell(Cell::WordsAt));
        let (content_at, content_bytes) = (cell(Cell::ContentAt), cell(Cell::ContentBytes));
        let capacity_pages = match cell(Cell::CapacityPages) {
            0 => page_count,
            capacity => capacity,
        };
        if !is_whole(cell, capacity_pages, length) {
            return Err(damaged("its sizes contradict one another".into()));
        }
        let allocated_bytes = file.allocated_bytes().map_err(failed)?;
        let mapping = map(path, &file, length)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            mapping,
            page_count,
            capacity_pages,
            words_at,
            content_at,
            content_bytes,
            sections_made_with: 0,
            charge: Charge::existing(&PoolCap::new(None), allocated_bytes),
            changing: Mutex::new(()),
        })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of pages it had words for when it was created.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Number of pages it has room for.
    #[must_use]
    pub fn capacity_pages(&self) -> u64 {
        self.capacity_pages
    }

    /// Seed of its CRCs.
    #[must_use]
    pub fn seed(&self) -> crate::tier::Seed {
        let bits = self.cell(Cell::Seed).load(Ordering::Relaxed);
        crate::tier::Seed(u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0))
    }

    /// The VM's limit, in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<u64> {
        let limit = self.cell(Cell::Limit).load(Ordering::Relaxed);
        (limit != NO_LIMIT).then_some(limit)
    }

    /// Records the VM's limit.
    pub fn set_limit_bytes(&self, limit: Option<u64>) {
        self.cell(Cell::Limit)
            .store(limit.unwrap_or(NO_LIMIT), Ordering::Relaxed);
    }

    /// Number of the userfaultfd in the VMM, once it exists.
    #[must_use]
    pub fn userfaultfd_number(&self) -> Option<i32> {
        let stored = self.cell(Cell::UserfaultfdNumber).load(Ordering::Acquire);
        match i32::try_from(stored) {
            Ok(0) | Err(_) => None,
            Ok(stored) => Some(stored - 1),
        }
    }

    /// Records the number of the userfaultfd in the VMM, and how long the VMM was stopped for it.
    pub fn set_userfaultfd(&self, number: i32, pause_us: u64) {
        self.cell(Cell::PauseUs).store(pause_us, Ordering::Relaxed);
        let stored = u64::from(number.unsigned_abs()) + 1;
        self.cell(Cell::UserfaultfdNumber)
            .store(stored, Ordering::Release);
    }

    /// How long a thread of the VMM was stopped during the attach, in microseconds.
    #[must_use]
    pub fn pause_us(&self) -> u64 {
        self.cell(Cell::PauseUs).load(Ordering::Relaxed)
    }

    /// How far attach or detach have come.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.cell(Cell::Phase).load(Ordering::Acquire) {
            0 => Phase::Attaching,
            1 => Phase::Attached,
            _ => Phase::LettingGo,
        }
    }

    /// From now on the words are valid.
    pub fn set_attached(&self) {
        self.cell(Cell::Phase).store(1, Ordering::Release);
    }

    /// From now on no content is stored except zeros.
    pub fn set_letting_go(&self) {
        self.cell(Cell::Phase).store(2, Ordering::Release);
    }

    /// How often a successor took this pool over.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.cell(Cell::Restarts).load(Ordering::Relaxed)
    }

    /// Notes that a successor has taken the pool over.
    pub fn count_restart(&self) {
        self.cell(Cell::Restarts).fetch_add(1, Ordering::Relaxed);
    }

    /// A counter that outlives the daemon.
    #[must_use]
    pub fn counter(&self, counter: Counter) -> &AtomicU64 {
        &self.cells()[FIRST_COUNTER + counter as usize]
    }

    /// Bytes of memory the pool uses, all parts together.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn allocated_bytes(&self) -> Result<u64, FileError> {
        self.file.allocated_bytes()
    }

    /// Number of chunks of [`CHUNK_BYTES`] there is room for.
    #[must_use]
    pub fn chunk_limit(&self) -> u32 {
        u32::try_from(self.content_bytes / CHUNK_BYTES).unwrap_or(u32::MAX)
    }

    /// Allocates memory for a chunk.
    ///
    /// # Errors
    /// [`FileError::NoSpace`] when the tmpfs is full.
    pub fn allocate_chunk(&self, number: u32) -> Result<(), FileError> {
        self.file.allocate(
            self.content_at + u64::from(number) * CHUNK_BYTES,
            CHUNK_BYTES,
        )
    }

    /// Releases the memory of `count` chunks from `first` on; their content is lost.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn release_chunks(&self, first: u32, count: u32) -> Result<(), FileError> {
        let at = self.content_at + u64::from(first) * CHUNK_BYTES;
        self.file.punch(at, u64::from(count) * CHUNK_BYTES)
    }

    /// Writes content into a chunk that has memory.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`].
    pub fn write_content(&self, offset: u64, bytes: &[u8]) -> Result<(), MappingError> {
        self.mapping.copy_to(self.content_at + offset, bytes)
    }

    /// Reads content.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`].
    pub fn read_content(&self, offset: u64, into: &mut [u8]) -> Result<(), MappingError> {
        self.mapping.copy_from(self.content_at + offset, into)
    }

    /// Removes the file: the VM is gone, or no longer needs a pool.
    ///
    /// # Errors
    /// [`PoolError::Path`].
    pub fn remove(&self) -> Result<(), PoolError> {
        rustix::fs::unlink(&self.path).map_err(|source| at(&self.path, "unlink", source))
    }

    fn cells(&self) -> &[AtomicU64] {
        match self.mapping.atomic_u64s(0, HEADER_CELLS) {
            Some(cells) => cells,
            None => unreachable!("a pool has a header"),
        }
    }

    fn cell(&self, cell: Cell) -> &AtomicU64 {
        &self.cells()[cell as usize]
    }
}

/// The header of a file of `length` bytes does not contradict itself.
fn is_whole(cell: impl Fn(Cell) -> u64, capacity_pages: u64, length: u64) -> bool {
    let (page_count, words_at) = (cell(Cell::PageCount), cell(Cell::WordsAt));
    let (content_at, content_bytes) = (cell(Cell::ContentAt), cell(Cell::ContentBytes));
    let table = [Cell::ExtentsAt, Cell::ExtentCapacity, Cell::ExtentBytes].map(&cell);
    page_count <= capacity_pages
        && (1..=PAGES_MAX).contains(&capacity_pages)
        && words_at >= HEADER_BYTES
        && words_at.is_multiple_of(PAGE_BYTES)
        && words_at
            .checked_add(capacity_pages * 8)
            .is_some_and(|end| end <= content_at)
        && content_at.is_multiple_of(PAGE_BYTES)
        && content_at
            .checked_add(content_bytes)
            .is_some_and(|end| end <= length)
        && slow::is_table_sound(table, length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PageNo;
    use pagetide_gmem::WordArray;
    use std::sync::Arc;

    /// Small enough for its file to be read whole.
    const SMALL: Extent = Extent {
        page_count: 10,
        capacity_pages: 512,
    };

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn pool_opened_again_tells_what_was_written() {
        let dir = directory();
        let path = dir.path().join("vm.pool");
        {
            let pool = Arc::new(Pool::create(&path, 1000, 7, b"{\"name\":\"a\"}").unwrap());
            pool.set_limit_bytes(Some(4 << 20));
            pool.counter(Counter::EvictedPages)
                .fetch_add(12, Ordering::Relaxed);
            PoolWords::of(pool.clone())
                .cell(PageNo(999))
                .store(77, Ordering::Relaxed);
            pool.allocate_chunk(3).unwrap();
            pool.write_content(3 * CHUNK_BYTES, b"bytes").unwrap();
        }
        let pool = Arc::new(Pool::open(&path).unwrap());
        assert_eq!(pool.identity().unwrap(), b"{\"name\":\"a\"}");
        assert_eq!(pool.limit_bytes(), Some(4 << 20));
        assert_eq!(
            pool.counter(Counter::EvictedPages).load(Ordering::Relaxed),
            12
        );
        assert_eq!(
            PoolWords::of(pool.clone())
                .cell(PageNo(999))
                .load(Ordering::Relaxed),
            77
        );
        let mut bytes = [0; 5];
        pool.read_content(3 * CHUNK_BYTES, &mut bytes).unwrap();
        assert_eq!(&bytes, b"bytes");
        assert_eq!(pool.seed(), crate::tier::Seed(7));
    }

    #[test]
    fn pool_that_is_there_is_never_replaced() {
        let dir = directory();
        let path = dir.path().join("vm.pool");
        drop(Pool::create(&path, 10, 3, b"first").unwrap());
        assert!(matches!(
            Pool::create(&path, 10, 4, b"second"),
            Err(PoolError::Exists(_))
        ));
        assert_eq!(Pool::open(&path).unwrap().identity().unwrap(), b"first");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn pool_in_use_is_refused_to_a_second_opener() {
        let dir = directory();
        let path = dir.path().join("vm.pool");
        let _pool = Pool::create(&path, 10, 0, b"").unwrap();
        assert!(matches!(Pool::open(&path), Err(PoolError::InUse(_))));
    }

    #[test]
    fn pool_takes_memory_for_header_and_words_only_until_chunks_are_used() {
        let dir = directory();
        let pool = Pool::create(&dir.path().join("vm.pool"), 1 << 18, 0, b"").unwrap();
        let before = pool.allocated_bytes().unwrap();
        assert!(before < 3 << 20, "{before}");
        pool.allocate_chunk(5).unwrap();
        assert_eq!(pool.allocated_bytes().unwrap(), before + CHUNK_BYTES);
        pool.release_chunks(5, 1).unwrap();
        assert_eq!(pool.allocated_bytes().unwrap(), before);
    }

    #[test]
    fn damaged_or_foreign_files_are_refused_with_a_reason() {
        let dir = directory();
        let path = dir.path().join("vm.pool");
        drop(Pool::create_with(&path, SMALL, 0, b"x").unwrap());
        let good = std::fs::read(&path).unwrap();
        let with = |cell: Cell, value: u64| {
            let mut bytes = good.clone();
            bytes[cell as usize * 8..][..8].copy_from_slice(&value.to_ne_bytes());
            bytes
        };
        let cases = [
            Vec::new(),
            vec![0; 200_000],
            with(Cell::Version, 99),
            with(Cell::PageCount, u64::MAX),
            with(Cell::WordsAt, u64::MAX - 7),
            with(Cell::ContentAt, 8),
            with(Cell::ContentBytes, u64::MAX),
            with(Cell::CapacityPages, 9),
            with(Cell::CapacityPages, u64::MAX / 16),
        ];
        for (number, bytes) in cases.into_iter().enumerate() {
            std::fs::write(&path, bytes).unwrap();
            assert!(
                matches!(Pool::open(&path), Err(PoolError::Damaged { .. })),
                "case {number}"
            );
        }
        for identity in [1 << 40, 61 << 10, 1 << 32 | 31 << 10] {
            std::fs::write(&path, with(Cell::Identity, identity)).unwrap();
            assert!(matches!(
                Pool::open(&path).unwrap().identity(),
                Err(PoolError::Damaged { .. })
            ));
        }
    }

    #[test]
    fn version_is_told_of_pools_of_whatever_version_in_use_or_not_and_of_nothing_else() {
        let dir = directory();
        let path = dir.path().join("vm.pool");
        let pool = Pool::create_with(&path, SMALL, 0, b"x").unwrap();
        assert_eq!(version_at(&path).unwrap(), Some(VERSION));
        pool.cell(Cell::Version).store(77, Ordering::Relaxed);
        assert_eq!(version_at(&path).unwrap(), Some(77));
        for foreign in [vec![0; 4096], vec![1; 3], Vec::new()] {
            std::fs::write(&path, foreign).unwrap();
            assert_eq!(version_at(&path).unwrap(), None);
        }
        let nowhere = version_at(&dir.path().join("none"));
        assert!(matches!(nowhere, Err(PoolError::Path { .. })));
    }

    #[test]
    fn pool_outside_tmpfs_is_refused_and_leaves_nothing() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("vm.pool");
        assert!(matches!(
            Pool::create(&path, 10, 0, b""),
            Err(PoolError::NotTmpfs(_))
        ));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
