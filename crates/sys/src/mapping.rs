// SPDX-License-Identifier: Apache-2.0
//! [`SharedMapping`]: our own shared mapping of a file in memory.
//!
//! Two kinds of files are mapped: the metadata pool, and the file behind a VM's RAM (the *alias*).
//! In both cases other parties write concurrently: the guest, a device, a successor of this
//! process. So this type never gives out references to plain bytes, only atomics, copies, and raw
//! pointers for the kernel.
//!
//! Touching a hole of the file allocates a page of zeros, and touching bytes past its end raises
//! `SIGBUS`. Code that maps guest RAM must first know that a page is present, and maps the file
//! *guarded* ([`crate::sigbus`]), because the file's length is not under our control. Code that
//! maps a pool has allocated it first.
#![expect(
    unsafe_code,
    reason = "mmap, and access to the memory it returns, have no safe form"
)]

use crate::{process::read_memory, sigbus::Guard, to_usize};
use pagetide_addr::{Hva, PAGE_BYTES};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Why a mapping could not be created or used.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The kernel refused.
    #[error("{operation} of {len_bytes} bytes failed: {source}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// Bytes concerned.
        len_bytes: u64,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The requested bytes are not all in the mapping.
    #[error("bytes {offset}..+{len_bytes} lie outside the mapping of {mapped_bytes} bytes")]
    OutOfBounds {
        /// First byte requested.
        offset: u64,
        /// Number of bytes requested.
        len_bytes: u64,
        /// Length of the mapping.
        mapped_bytes: u64,
    },
}

/// Part of a file to be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePart {
    /// First byte; a multiple of `page_bytes`.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Page size of the file's mappings.
    pub page_bytes: u64,
}

/// Part of a file mapped shared, readable and writable; not inherited by children.
#[derive(Debug)]
pub struct SharedMapping {
    base: NonNull<u8>,
    len_bytes: u64,
    /// Whole pages of the file, so no less than `len_bytes`.
    mapped_bytes: u64,
    /// The guard must be removed before the mapping.
    guard: Option<Guard>,
}

// SAFETY: the memory is shared with other processes anyway; all access goes through atomics, copies
// that document their races, or raw pointers. Only `drop`, which has exclusive access, unmaps the
// mapping itself.
unsafe impl Send for SharedMapping {}
// SAFETY: as for `Send`; no method returns a reference to memory that is not atomic.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `len_bytes` of `file`.
    ///
    /// The file must not be truncated below that while it is mapped (`SIGBUS`).
    ///
    /// # Errors
    /// The errors of `mmap` and `madvise`.
    pub fn new(file: BorrowedFd<'_>, len_bytes: u64) -> Result<Self, MappingError> {
        let part = FilePart {
            offset: 0,
            bytes: len_bytes,
            page_bytes: PAGE_BYTES,
        };
        Self::map(file, part)
    }

    /// Maps `part` of `file`, whose owner may shorten it or leave it without memory: missing bytes
    /// then read as zeros, and [`Self::is_lost`] is true.
    ///
    /// # Errors
    /// The errors of `mmap`, `madvise` and `sigaction`.
    pub fn guarded(file: BorrowedFd<'_>, part: FilePart) -> Result<Self, MappingError> {
        let mut mapping = Self::map(file, part)?;
        let len = to_usize(mapping.mapped_bytes);
        // SAFETY: the range is the mapping just created, of which only atomics, copies and raw
        // pointers are given out; `drop` removes the guard before it unmaps.
        let guard = unsafe { Guard::new(mapping.address(), len) };
        mapping.guard = Some(guard.map_err(|source| MappingError::Kernel {
            operation: "sigaction",
            len_bytes: part.bytes,
            source,
        })?);
        Ok(mapping)
    }

    /// True if the file of a guarded mapping has lost part of it: data read since may be zeros that
    /// were never written. It stays true.
    #[inline]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    fn map(file: BorrowedFd<'_>, part: FilePart) -> Result<Self, MappingError> {
        let FilePart {
            offset,
            bytes: len_bytes,
            page_bytes,
        } = part;
        let failed = |operation, source: rustix::io::Errno| MappingError::Kernel {
            operation,
            len_bytes,
            source: source.into(),
        };
        let mapped_bytes = len_bytes
            .checked_next_multiple_of(page_bytes.max(PAGE_BYTES))
            .filter(|bytes| *bytes <= isize::MAX.cast_unsigned() as u64)
            .ok_or_else(|| failed("mmap", rustix::io::Errno::NOMEM))?;
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose free address space, so no
        // existing mapping is touched.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                to_usize(mapped_bytes),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset,
            )
        }
        .map_err(|e| failed("mmap", e))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| failed("mmap", rustix::io::Errno::NOMEM))?;
        let mapping = Self {
            base,
            len_bytes,
            mapped_bytes,
            guard: None,
        };
        // SAFETY: the range is the mapping just created; DONTFORK does not change its content.
        unsafe {
            rustix::mm::madvise(
                mapping.base.as_ptr().cast(),
                to_usize(mapped_bytes),
                Advice::LinuxDontFork,
            )
        }
        .map_err(|e| failed("madvise(DONTFORK)", e))?;
        Ok(mapping)
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Address of the first byte in this process, to be passed to the kernel.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Pointer to `len` bytes at `offset`, or `None` if not all of them are mapped.
    ///
    /// It is valid as long as the mapping lives; its target may change at any time.
    #[must_use]
    pub fn ptr_at(&self, offset: u64, len: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        if end > self.len_bytes {
            return None;
        }
        // SAFETY: offset <= len_bytes was just checked, so the sum stays in (or one past) the
        // one mapping that `base` points to.
        Some(unsafe { self.base.add(to_usize(offset)) })
    }

    /// `count` words at `offset`, or `None` if they are not all mapped or not aligned to 8 bytes.
    #[must_use]
    pub fn atomic_u64s(&self, offset: u64, count: usize) -> Option<&[AtomicU64]> {
        let len = (count as u64).checked_mul(8)?;
        let start = self.ptr_at(offset, len)?;
        if !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: in bounds by `ptr_at`; aligned because the mapping starts at a page and the
        // offset is a multiple of 8; any bits are a valid AtomicU64; the slice cannot outlive
        // `self`, which unmaps only in `drop`. All other access to these words within this process
        // is atomic.
        Some(unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>().as_ptr(), count) })
    }

    /// Copies `from` into the mapping at `offset`.
    ///
    /// Not atomic: a concurrent reader of the same bytes may see any mixture.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`].
    pub fn copy_to(&self, offset: u64, from: &[u8]) -> Result<(), MappingError> {
        let to = self.bounded(offset, from.len() as u64)?;
        // SAFETY: the destination is mapped for the whole length; `from` is a live slice of ours
        // and cannot overlap, since no slice of the mapping's bytes exists. Racing accesses come
        // from other processes, the kernel or other copies; the bytes are plain data.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies from the mapping at `offset` into `into`.
    ///
    /// Not atomic: bytes written concurrently may be any mixture.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`].
    pub fn copy_from(&self, offset: u64, into: &mut [u8]) -> Result<(), MappingError> {
        let from = self.bounded(offset, into.len() as u64)?;
        // SAFETY: as in `copy_to`, the other way round; `into` is exclusively ours.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies from the mapping at `offset` into `into` by the kernel: a page that is lost is an error here, and no
    /// `SIGBUS`.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`], or the kernel's error: `EFAULT` for a page that cannot be had.
    pub fn copy_from_by_kernel(&self, offset: u64, into: &mut [u8]) -> Result<(), MappingError> {
        let from = self.bounded(offset, into.len() as u64)?;
        let at = Hva(from.as_ptr().addr() as u64);
        read_memory(std::process::id(), at, into).map_err(|source| MappingError::Kernel {
            operation: "process_vm_readv",
            len_bytes: into.len() as u64,
            source,
        })
    }

    /// Drops this process's page table entries of the range; the content stays in the file.
    ///
    /// # Errors
    /// Out of bounds, or the error of `madvise` (`offset` must be a multiple of the page size).
    pub fn drop_translations(&self, offset: u64, len: u64) -> Result<(), MappingError> {
        let start = self.bounded(offset, len)?;
        // SAFETY: the range lies in our own *shared* mapping, where DONTNEED only drops page
        // table entries: the next access finds the same bytes in the file.
        unsafe { rustix::mm::madvise(start.as_ptr().cast(), to_usize(len), Advice::LinuxDontNeed) }
            .map_err(|source| MappingError::Kernel {
                operation: "madvise(DONTNEED)",
                len_bytes: len,
                source: source.into(),
            })
    }

    /// Requests huge pages. The kernel's `shmem_enabled` decides whether files in memory get them.
    ///
    /// # Errors
    /// The error of `madvise`: `EINVAL` from a kernel built without them.
    pub fn advise_huge_pages(&self) -> Result<(), MappingError> {
        let start = self.base.as_ptr().cast();
        // SAFETY: the range is the whole of our own mapping; the advice changes the pages that back
        // it, not their content.
        unsafe { rustix::mm::madvise(start, to_usize(self.mapped_bytes), Advice::LinuxHugepage) }
            .map_err(|source| MappingError::Kernel {
                operation: "madvise(HUGEPAGE)",
                len_bytes: self.len_bytes,
                source: source.into(),
            })
    }

    /// Keeps the mapping's pages out of swap, each from when it is first touched through this mapping
    /// until it is punched or this process ends. Allocates nothing.
    ///
    /// # Errors
    /// The error of `mlock2`: `EPERM` or `ENOMEM` without `CAP_IPC_LOCK`, since the length counts,
    /// holes included.
    pub fn keep_out_of_swap(&self) -> Result<(), MappingError> {
        let start = self.base.as_ptr().cast();
        let flags = rustix::mm::MlockFlags::ONFAULT;
        // SAFETY: the range is the whole of our own mapping; locking changes no content.
        unsafe { rustix::mm::mlock_with(start, to_usize(self.mapped_bytes), flags) }.map_err(
            |source| MappingError::Kernel {
                operation: "mlock2",
                len_bytes: self.len_bytes,
                source: source.into(),
            },
        )
    }

    fn bounded(&self, offset: u64, len: u64) -> Result<NonNull<u8>, MappingError> {
        self.ptr_at(offset, len).ok_or(MappingError::OutOfBounds {
            offset,
            len_bytes: len,
            mapped_bytes: self.len_bytes,
        })
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        drop(self.guard.take());
        // SAFETY: the range is exactly what `map` mapped, and `&mut self` proves that no borrow of
        // it is left. The caller is responsible for raw pointers given to the kernel (`ptr_at`).
        let unmapped =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), to_usize(self.mapped_bytes)) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::GuestFile;
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;

    #[test]
    fn bytes_copied_in_are_seen_through_the_file_and_survive_dropped_translations() {
        let file = GuestFile::new_memfd("mapping", 64 << 10).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 64 << 10).unwrap();
        mapping.copy_to(5000, b"tide").unwrap();
        mapping.drop_translations(0, 64 << 10).unwrap();
        let mut back = [0; 4];
        file.read_at(5000, &mut back).unwrap();
        assert_eq!(&back, b"tide");
        let mut again = [0; 4];
        mapping.copy_from(5000, &mut again).unwrap();
        assert_eq!(again, back);
    }

    #[test]
    fn page_that_cannot_be_had_is_an_error_of_the_kernels_copy() {
        let file = GuestFile::new_memfd("mapping", 8192).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 8192).unwrap();
        mapping.copy_to(100, b"tide").unwrap();
        let mut back = [0; 4];
        mapping.copy_from_by_kernel(100, &mut back).unwrap();
        assert_eq!(&back, b"tide");
        rustix::fs::ftruncate(file.as_fd(), 4096).unwrap();
        let beyond = mapping.copy_from_by_kernel(4096, &mut back).unwrap_err();
        assert!(
            matches!(&beyond, MappingError::Kernel { source, .. }
                if source.raw_os_error() == Some(libc::EFAULT)),
            "{beyond}"
        );
        assert!(mapping.copy_from_by_kernel(8190, &mut back).is_err());
    }

    #[test]
    fn bytes_outside_the_mapping_are_refused() {
        let file = GuestFile::new_memfd("mapping", 8192).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 8192).unwrap();
        assert!(mapping.ptr_at(8191, 1).is_some());
        assert!(mapping.ptr_at(8191, 2).is_none());
        assert!(mapping.ptr_at(u64::MAX, 2).is_none());
        assert!(mapping.atomic_u64s(4, 1).is_none(), "not aligned");
        assert!(mapping.atomic_u64s(0, 1025).is_none(), "too many");
        assert!(matches!(
            mapping.copy_to(8190, b"abc"),
            Err(MappingError::OutOfBounds { offset: 8190, .. })
        ));
    }

    fn part(offset: u64, bytes: u64) -> FilePart {
        FilePart {
            offset,
            bytes,
            page_bytes: PAGE_BYTES,
        }
    }

    #[test]
    fn part_of_a_file_is_that_part() {
        let file = GuestFile::new_memfd("mapping", 4 * PAGE_BYTES).unwrap();
        file.write_at(2 * PAGE_BYTES, b"tide").unwrap();
        let mapping =
            SharedMapping::guarded(file.as_fd(), part(2 * PAGE_BYTES, PAGE_BYTES)).unwrap();
        let mut bytes = [0; 4];
        mapping.copy_from(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"tide");
        assert!(mapping.ptr_at(PAGE_BYTES, 1).is_none());
        assert!(SharedMapping::guarded(file.as_fd(), part(1, PAGE_BYTES)).is_err());
        assert!(SharedMapping::guarded(file.as_fd(), part(0, u64::MAX - 1)).is_err());
    }

    #[test]
    fn file_cut_short_reads_as_zeros_and_is_lost_and_its_neighbours_are_not() {
        let file = GuestFile::new_memfd("mapping", 4 * PAGE_BYTES).unwrap();
        let other = GuestFile::new_memfd("other", PAGE_BYTES).unwrap();
        let before = SharedMapping::guarded(other.as_fd(), part(0, PAGE_BYTES)).unwrap();
        let mapping = SharedMapping::guarded(file.as_fd(), part(0, 4 * PAGE_BYTES)).unwrap();
        let after = SharedMapping::guarded(other.as_fd(), part(0, PAGE_BYTES)).unwrap();
        mapping.copy_to(0, &[7; 100]).unwrap();
        before.copy_to(0, &[8; 100]).unwrap();
        rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
        assert!(!mapping.is_lost());
        let mut bytes = [1; 100];
        mapping.copy_from(3 * PAGE_BYTES, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 100]);
        assert!(mapping.is_lost());
        mapping.copy_to(0, &[9; 100]).unwrap();
        after.copy_from(0, &mut bytes).unwrap();
        assert_eq!(bytes, [8; 100]);
        assert!(!before.is_lost() && !after.is_lost());
        drop(mapping);
        let again = SharedMapping::guarded(other.as_fd(), part(0, PAGE_BYTES)).unwrap();
        assert!(!again.is_lost(), "a list entry that is used again");
    }

    #[test]
    fn many_threads_lose_their_files_at_once() {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let file = GuestFile::new_memfd("mapping", PAGE_BYTES).unwrap();
                        let mapping =
                            SharedMapping::guarded(file.as_fd(), part(0, PAGE_BYTES)).unwrap();
                        mapping.copy_to(0, &[1]).unwrap();
                        rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
                        mapping.copy_to(0, &[1]).unwrap();
                        assert!(mapping.is_lost());
                    }
                });
            }
        });
    }

    /// Set for the child that must die.
    const UNGUARDED: &str = "PAGETIDE_TEST_UNGUARDED";

    #[test]
    fn memory_that_is_not_guarded_still_ends_the_process() {
        if crate::emulated::skip() {
            return;
        }
        if std::env::var_os(UNGUARDED).is_some() {
            let file = GuestFile::new_memfd("mapping", PAGE_BYTES).unwrap();
            let _guarded = SharedMapping::guarded(file.as_fd(), part(0, PAGE_BYTES)).unwrap();
            let mapping = SharedMapping::new(file.as_fd(), PAGE_BYTES).unwrap();
            rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
            mapping.copy_to(0, &[1]).unwrap();
            return;
        }
        let this = "mapping::tests::memory_that_is_not_guarded_still_ends_the_process";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", this])
            .env(UNGUARDED, "1")
            .output()
            .unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&child.status);
        assert_eq!(signal, Some(libc::SIGBUS), "{child:?}");
    }

    #[test]
    fn words_of_two_mappings_of_one_file_are_the_same_words() {
        let file = GuestFile::new_memfd("mapping", 4096).unwrap();
        let one = SharedMapping::new(file.as_fd(), 4096).unwrap();
        let other = SharedMapping::new(file.as_fd(), 4096).unwrap();
        one.atomic_u64s(8, 2).unwrap()[1].store(77, Ordering::Release);
        assert_eq!(
            other.atomic_u64s(16, 1).unwrap()[0].load(Ordering::Acquire),
            77
        );
    }
}
