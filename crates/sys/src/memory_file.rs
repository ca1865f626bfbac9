// SPDX-License-Identifier: Apache-2.0
//! [`GuestFile`]: a file in memory, shared by everything that maps it.
//!
//! A page of guest RAM is *present* if its file holds it, whichever process maps it; absent pages
//! are holes. `SEEK_DATA` is the only reliable test (pagemap reports mappings, and `mincore` does
//! not report pages in swap); [`crate::presence`] describes how part of a file is queried. `pread`
//! of a hole reads zeros and allocates nothing; a write, or a touch through a mapping, allocates.

use crate::pauses::Pauses;
use crate::presence::Presence;
use pagetide_addr::{FileKey, PAGE_BYTES};
use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// File system type of tmpfs (and so of memfds), as reported by `statfs`.
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// File system type of hugetlbfs, and so of memfds of huge pages.
const HUGETLBFS_MAGIC: i128 = 0x9584_58f6;

/// Longest pause between two attempts to take a lock that is waited for.
const LOCK_POLL: Duration = Duration::from_millis(2);

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The kernel refused.
    #[error("{operation} at byte {offset}, {len_bytes} bytes, failed: {source}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len_bytes: u64,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The file system has no room left.
    #[error("no room left for {len_bytes} bytes at byte {offset}: make the file system larger")]
    NoSpace {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// The file is shorter than it should be.
    #[error("the file ends within the {len_bytes} bytes at {offset}")]
    Short {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
}

/// Whether to wait for a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockWait {
    /// Until the holder releases it or dies.
    Wait,
    /// Do not wait.
    Try,
}

/// Result of a lock attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Locked {
    /// It is ours until every descriptor of this open file is closed.
    Ours,
    /// Another open file holds it.
    HeldByAnother,
}

/// An open file in memory: a memfd, or a file on tmpfs.
#[derive(Debug)]
pub struct GuestFile {
    file: OwnedFd,
    /// Created on first use.
    presence: RwLock<Option<Arc<Presence>>>,
    /// Bytes of a page, once they were asked for.
    page_bytes: OnceLock<u64>,
}

impl From<OwnedFd> for GuestFile {
    fn from(file: OwnedFd) -> Self {
        Self {
            file,
            presence: RwLock::new(None),
            page_bytes: OnceLock::new(),
        }
    }
}

impl AsFd for GuestFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl GuestFile {
    /// Creates a memfd of `len_bytes` that is all hole.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new_memfd(name: &str, len_bytes: u64) -> Result<Self, FileError> {
        let failed = |operation| {
            move |source: Errno| FileError::Kernel {
                operation,
                offset: 0,
                len_bytes,
                source: source.into(),
            }
        };
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&file, len_bytes).map_err(failed("ftruncate"))?;
        Ok(Self::from(file))
    }

    /// The file's identity on this host.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn key(&self) -> Result<FileKey, FileError> {
        let stat = self.stat()?;
        Ok(FileKey {
            dev: stat.st_dev,
            ino: stat.st_ino,
        })
    }

    /// Length in bytes, holes included.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn len_bytes(&self) -> Result<u64, FileError> {
        Ok(self.stat()?.st_size.cast_unsigned())
    }

    /// Bytes of memory that the file occupies.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn allocated_bytes(&self) -> Result<u64, FileError> {
        Ok(self.stat()?.st_blocks.cast_unsigned() * 512)
    }

    /// True if the file is on tmpfs, as memfds are.
    ///
    /// # Errors
    /// The error of `fstatfs`.
    pub fn is_tmpfs(&self) -> Result<bool, FileError> {
        let stat = rustix::fs::fstatfs(&self.file).map_err(kernel("fstatfs", 0, 0))?;
        Ok(i128::from(stat.f_type) == TMPFS_MAGIC)
    }

    /// Creates a memfd of `len_bytes` in huge pages of 2 MiB that is all hole. Nothing is reserved for it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new_huge_memfd(name: &str, len_bytes: u64) -> Result<Self, FileError> {
        use rustix::fs::MemfdFlags;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = rustix::fs::memfd_create(name, flags);
        let file = file.map_err(kernel("memfd_create", 0, len_bytes))?;
        rustix::fs::ftruncate(&file, len_bytes).map_err(kernel("ftruncate", 0, len_bytes))?;
        Ok(Self::from(file))
    }

    /// Bytes of the pages that the file consists of: those of a huge page on hugetlbfs.
    ///
    /// # Errors
    /// The error of `fstatfs`.
    pub fn page_bytes(&self) -> Result<u64, FileError> {
        if let Some(known) = self.page_bytes.get() {
            return Ok(*known);
        }
        let stat = rustix::fs::fstatfs(&self.file).map_err(kernel("fstatfs", 0, 0))?;
        let bytes = match i128::from(stat.f_type) {
            HUGETLBFS_MAGIC => u64::try_from(stat.f_bsize).unwrap_or(PAGE_BYTES),
            _ => PAGE_BYTES,
        };
        Ok(*self.page_bytes.get_or_init(|| bytes))
    }

    /// Reads `into.len()` bytes at `offset`; holes read as zeros and stay holes.
    ///
    /// # Errors
    /// [`FileError::Short`] past the end, or the error of `pread`.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), FileError> {
        let len_bytes = into.len() as u64;
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.file, &mut into[done..], offset + done as u64) {
                Ok(0) => return Err(FileError::Short { offset, len_bytes }),
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(e) => return Err(kernel("pread", offset, len_bytes)(e)),
            }
        }
        Ok(())
    }

    /// Writes `from` at `offset`, which allocates holes. Never use it for guest RAM under a
    /// userfaultfd: pages are installed there.
    ///
    /// # Errors
    /// [`FileError::NoSpace`], or the error of `pwrite`.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), FileError> {
        let len_bytes = from.len() as u64;
        let mut done = 0;
        while done < from.len() {
            match rustix::io::pwrite(&self.file, &from[done..], offset + done as u64) {
                Ok(0) => return Err(FileError::Short { offset, len_bytes }),
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC) => return Err(FileError::NoSpace { offset, len_bytes }),
                Err(e) => return Err(kernel("pwrite", offset, len_bytes)(e)),
            }
        }
        Ok(())
    }

    /// Makes the bytes a hole, for every process that maps them; the length stays.
    ///
    /// # Errors
    /// The error of `fallocate`.
    pub fn punch(&self, offset: u64, len_bytes: u64) -> Result<(), FileError> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        retry(|| rustix::fs::fallocate(&self.file, how, offset, len_bytes)).map_err(kernel(
            "fallocate(PUNCH_HOLE)",
            offset,
            len_bytes,
        ))
    }

    /// Allocates memory for the bytes, so that a touch through a mapping cannot fail for lack of
    /// it; extends the file if needed. Existing content stays. Until the pages are touched, they
    /// still count as a hole for [`GuestFile::is_data`].
    ///
    /// # Errors
    /// [`FileError::NoSpace`], or the error of `fallocate`.
    pub fn allocate(&self, offset: u64, len_bytes: u64) -> Result<(), FileError> {
        match retry(|| {
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, len_bytes)
        }) {
            Err(Errno::NOSPC | Errno::NOMEM) => Err(FileError::NoSpace { offset, len_bytes }),
            other => other.map_err(kernel("fallocate", offset, len_bytes)),
        }
    }

    /// True if the byte at `offset` is in memory, not in a hole.
    ///
    /// # Errors
    /// The error of `lseek`.
    pub fn is_data(&self, offset: u64) -> Result<bool, FileError> {
        let page_bytes = self.page_bytes()?;
        if page_bytes > PAGE_BYTES {
            // hugetlbfs knows no SEEK_DATA: all of a file is data to it.
            let page = offset - offset % page_bytes;
            return Ok(!self.present_runs(page, page_bytes)?.is_empty());
        }
        Ok(self.next_data(offset)? == Some(offset))
    }

    /// Maximal runs `(offset, bytes)` of pages that are in memory within
    /// `offset .. offset + len_bytes`, both multiples of a page; ascending. The cost depends only on
    /// that part, not on the rest of the file.
    ///
    /// # Errors
    /// The error of `lseek`.
    pub fn present_runs(&self, offset: u64, len_bytes: u64) -> Result<Vec<(u64, u64)>, FileError> {
        self.presence()?.runs(self, offset, len_bytes)
    }

    fn presence(&self) -> Result<Arc<Presence>, FileError> {
        let known = self.presence.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(presence) = known.as_ref() {
            return Ok(Arc::clone(presence));
        }
        drop(known);
        let made = Arc::new(Presence::of(self)?);
        let mut known = (self.presence.write()).unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(known.get_or_insert(made)))
    }

    /// Unmaps what was mapped of the file for [`Self::present_runs`], which maps it again.
    pub fn unmap(&self) {
        let mut known = (self.presence.write()).unwrap_or_else(PoisonError::into_inner);
        *known = None;
    }

    /// Maximal runs `(offset, bytes)` of data within `offset .. offset + len_bytes`, ascending. The
    /// last seek goes to the next hole *behind* the part, so use this for a whole file: part by
    /// part, it costs the square of the present data ([`Self::present_runs`] does not).
    ///
    /// # Errors
    /// The error of `lseek`.
    pub fn data_runs(&self, offset: u64, len_bytes: u64) -> Result<Vec<(u64, u64)>, FileError> {
        if self.page_bytes()? > PAGE_BYTES {
            return self.present_runs(offset, len_bytes);
        }
        let end = offset.saturating_add(len_bytes);
        let mut runs = Vec::new();
        let mut from = offset;
        while from < end {
            let Some(start) = self.next_data(from)?.filter(|start| *start < end) else {
                break;
            };
            // A hole may have been punched since; then the run ends at its start.
            let hole = match rustix::fs::seek(&self.file, SeekFrom::Hole(start)) {
                Ok(hole) => hole.min(end),
                Err(Errno::NXIO) => break,
                Err(e) => return Err(kernel("lseek(SEEK_HOLE)", start, len_bytes)(e)),
            };
            if hole > start {
                runs.push((start, hole - start));
            }
            from = hole.max(start + 1);
        }
        Ok(runs)
    }

    /// Takes an exclusive `flock` on the open file.
    ///
    /// # Errors
    /// The error of `flock`, other than that the lock is held.
    pub fn lock_exclusive(&self, wait: LockWait) -> Result<Locked, FileError> {
        let operation = match wait {
            LockWait::Wait => FlockOperation::LockExclusive,
            LockWait::Try => FlockOperation::NonBlockingLockExclusive,
        };
        match retry(|| rustix::fs::flock(&self.file, operation)) {
            Ok(()) => Ok(Locked::Ours),
            Err(Errno::WOULDBLOCK) => Ok(Locked::HeldByAnother),
            Err(e) => Err(kernel("flock", 0, 0)(e)),
        }
    }

    /// As [`Self::lock_exclusive`], but waits no longer than `limit`: for a lock that the kernel releases in
    /// the background, when the last I/O of a ring is done.
    ///
    /// # Errors
    /// The error of `flock`, other than that the lock is held.
    pub fn lock_exclusive_within(&self, limit: Duration) -> Result<Locked, FileError> {
        let began = Instant::now();
        let mut pauses = Pauses::up_to(LOCK_POLL);
        loop {
            match self.lock_exclusive(LockWait::Try)? {
                Locked::HeldByAnother if began.elapsed() < limit => pauses.pause(),
                locked => return Ok(locked),
            }
        }
    }

    fn stat(&self) -> Result<rustix::fs::Stat, FileError> {
        rustix::fs::fstat(&self.file).map_err(kernel("fstat", 0, 0))
    }

    pub(crate) fn next_data(&self, offset: u64) -> Result<Option<u64>, FileError> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NXIO) => Ok(None),
            Err(e) => Err(kernel("lseek(SEEK_DATA)", offset, 0)(e)),
        }
    }
}

fn kernel(operation: &'static str, offset: u64, len_bytes: u64) -> impl FnOnce(Errno) -> FileError {
    move |source| FileError::Kernel {
        operation,
        offset,
        len_bytes,
        source: source.into(),
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn a_punched_page_is_a_hole_reads_zeros_and_stays_a_hole() {
        let file = GuestFile::new_memfd("file", 64 * PAGE).unwrap();
        file.write_at(0, &vec![7; 8 * 4096]).unwrap();
        assert_eq!(file.allocated_bytes().unwrap(), 8 * PAGE);
        file.punch(2 * PAGE, 3 * PAGE).unwrap();
        assert!(file.is_data(PAGE).unwrap());
        assert!(!file.is_data(2 * PAGE).unwrap());
        let mut page = [1; 4096];
        file.read_at(3 * PAGE, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        assert!(!file.is_data(3 * PAGE).unwrap());
        assert_eq!(
            file.data_runs(0, 64 * PAGE).unwrap(),
            [(0, 2 * PAGE), (5 * PAGE, 3 * PAGE)]
        );
        assert_eq!(
            file.data_runs(PAGE, 5 * PAGE).unwrap(),
            [(PAGE, PAGE), (5 * PAGE, PAGE)]
        );
        assert_eq!(file.len_bytes().unwrap(), 64 * PAGE);
    }

    #[test]
    fn a_file_without_data_has_no_runs_and_reading_past_its_end_is_an_error() {
        let file = GuestFile::new_memfd("file", PAGE).unwrap();
        assert!(file.data_runs(0, PAGE).unwrap().is_empty());
        assert!(file.is_tmpfs().unwrap());
        assert!(matches!(
            file.read_at(PAGE - 1, &mut [0; 2]),
            Err(FileError::Short { .. })
        ));
    }

    #[test]
    fn a_lock_held_through_another_open_file_is_reported_and_falls_with_it() {
        let first = GuestFile::new_memfd("lock", PAGE).unwrap();
        let path = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&first.as_fd())
        );
        let second = GuestFile::from(OwnedFd::from(
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(path)
                .unwrap(),
        ));
        assert_eq!(first.key().unwrap(), second.key().unwrap());
        assert_eq!(first.lock_exclusive(LockWait::Wait).unwrap(), Locked::Ours);
        assert_eq!(
            second.lock_exclusive(LockWait::Try).unwrap(),
            Locked::HeldByAnother
        );
        drop(first);
        assert_eq!(second.lock_exclusive(LockWait::Try).unwrap(), Locked::Ours);
    }

    #[test]
    fn allocated_bytes_have_memory_and_keep_their_content() {
        let file = GuestFile::new_memfd("file", PAGE).unwrap();
        file.write_at(0, b"x").unwrap();
        file.allocate(0, 4 * PAGE).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 4 * PAGE);
        assert_eq!(file.allocated_bytes().unwrap(), 4 * PAGE);
        assert!(
            !file.is_data(3 * PAGE).unwrap(),
            "allocated, but nobody has touched it"
        );
        let mut byte = [0];
        file.read_at(0, &mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }
}
