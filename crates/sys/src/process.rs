// SPDX-License-Identifier: Apache-2.0
//! [`ProcessFd`]: another process, by a descriptor that can never refer to a different one.
#![expect(unsafe_code, reason = "process_madvise and kcmp have no safe wrapper")]

use pagetide_addr::Hva;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Most ranges of one `process_madvise` (`UIO_MAXIOV`).
const RANGES_PER_CALL: usize = 1024;
/// `kcmp`: do two processes share one address space?
const KCMP_VM: libc::c_long = 1;

/// Why an operation on another process failed.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is no such process (any more).
    #[error("there is no process {pid}")]
    NoSuchProcess {
        /// Its pid.
        pid: u32,
    },
    /// We are not allowed to.
    #[error("{operation} on process {pid} is not permitted: run as root, or with CAP_SYS_PTRACE")]
    NotPermitted {
        /// The operation that failed.
        operation: &'static str,
        /// Its pid.
        pid: u32,
    },
    /// The kernel refused.
    #[error("{operation} on process {pid} failed: {source}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// Its pid.
        pid: u32,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// Result of merging small pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Merge {
    /// One huge page exists, and is mapped as such where it was mapped before.
    Done,
    /// One huge page exists, if the kernel could create one here at all, but not mapped by one
    /// translation. The kernel reports this for memory under a userfaultfd's write protection.
    NotMapped,
    /// A page was missing or in use, or no memory is available.
    NotNow,
}

/// A process held by a pidfd: its pid may be reused, the descriptor cannot refer to another
/// process.
#[derive(Debug)]
pub struct ProcessFd {
    pid: Pid,
    fd: OwnedFd,
}

impl AsFd for ProcessFd {
    /// Readable when the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ProcessFd {
    /// Opens process `pid`.
    ///
    /// # Errors
    /// [`ProcessError`].
    pub fn open(pid: u32) -> Result<Self, ProcessError> {
        let id = to_pid(pid).ok_or(ProcessError::NoSuchProcess { pid })?;
        let fd = rustix::process::pidfd_open(id, PidfdFlags::empty())
            .map_err(|e| explain("pidfd_open", pid, e.into()))?;
        Ok(Self { pid: id, fd })
    }

    /// Duplicates the descriptor; unlike [`ProcessFd::open`] it cannot find another process.
    ///
    /// # Errors
    /// [`ProcessError::Kernel`] if this process has no descriptors left.
    pub fn try_clone(&self) -> Result<Self, ProcessError> {
        let fd = self.fd.try_clone();
        Ok(Self {
            pid: self.pid,
            fd: fd.map_err(|e| explain("duplicating the pidfd", self.pid(), e))?,
        })
    }

    /// Sends a signal to this process, and never to one that got its pid later.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchProcess`] once it has ended, [`ProcessError::NotPermitted`].
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        rustix::process::pidfd_send_signal(&self.fd, signal)
            .map_err(|e| explain("sending a signal", self.pid(), e.into()))
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// Duplicates descriptor `number` of the process into ours.
    ///
    /// # Errors
    /// [`ProcessError`]; `EBADF` if the process has no such descriptor.
    pub fn take_descriptor(&self, number: i32) -> Result<OwnedFd, ProcessError> {
        rustix::process::pidfd_getfd(&self.fd, number, PidfdGetfdFlags::empty())
            .map_err(|e| explain("pidfd_getfd", self.pid(), e.into()))
    }

    /// True once the process has ended.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn has_ended(&self) -> Result<bool, ProcessError> {
        self.ends_within(Duration::ZERO)
    }

    /// Waits at most `time` for its end. True if it has ended.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn ends_within(&self, time: Duration) -> Result<bool, ProcessError> {
        let failed = |source| explain("poll of the pidfd", self.pid(), source);
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.try_into().map_err(std::io::Error::other);
            let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&left.map_err(failed)?)) {
                Ok(_) => return Ok(!polled[0].revents().is_empty()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    /// Advises the kernel to page out the ranges `(start, bytes)` (`MADV_PAGEOUT`): the pages leave
    /// every page table and, if there is no swap for them, stay in their file. Returns the bytes
    /// advised.
    ///
    /// # Errors
    /// [`ProcessError`]; ranges before the one that failed have been advised.
    pub fn page_out(&self, ranges: &[(Hva, u64)]) -> Result<u64, ProcessError> {
        let mut advised = 0_u64;
        let mut vectors: Vec<libc::iovec> = ranges
            .iter()
            .map(|(start, bytes)| libc::iovec {
                // An address of the other process: only a number for the kernel, not a pointer
                // here.
                iov_base: std::ptr::without_provenance_mut(crate::to_usize(start.0)),
                iov_len: crate::to_usize(*bytes),
            })
            .collect();
        let mut next = 0;
        while next < vectors.len() {
            let until = (next + RANGES_PER_CALL).min(vectors.len());
            let done = self.advise_once(&vectors[next..until])?;
            advised += done as u64;
            let mut left = done;
            while next < until && left >= vectors[next].iov_len {
                left -= vectors[next].iov_len;
                next += 1;
            }
            if next < until && left > 0 {
                let vector = &mut vectors[next];
                vector.iov_base = std::ptr::without_provenance_mut(vector.iov_base.addr() + left);
                vector.iov_len -= left;
            }
        }
        Ok(advised)
    }

    /// Makes the kernel merge the 2 MiB of shared memory at `start`, all of which is in its file,
    /// into one huge page (`MADV_COLLAPSE`, Linux 6.1). The content stays.
    ///
    /// # Errors
    /// [`ProcessError`], for anything that [`Merge`] does not name.
    pub fn merge(&self, start: Hva, len_bytes: u64) -> Result<Merge, ProcessError> {
        let vector = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(crate::to_usize(start.0)),
            iov_len: crate::to_usize(len_bytes),
        };
        if self.advise(&[vector], libc::MADV_COLLAPSE) >= 0 {
            return Ok(Merge::Done);
        }
        let source = std::io::Error::last_os_error();
        match source.raw_os_error() {
            Some(libc::EINVAL) => Ok(Merge::NotMapped),
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => Ok(Merge::NotNow),
            _ => Err(explain("process_madvise(COLLAPSE)", self.pid(), source)),
        }
    }

    fn advise(&self, vectors: &[libc::iovec], advice: i32) -> libc::c_long {
        // SAFETY: the vectors are a live slice and only read; their addresses belong to the
        // other process, and neither PAGEOUT nor COLLAPSE changes content there.
        unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                self.fd.as_raw_fd(),
                vectors.as_ptr(),
                vectors.len(),
                advice,
                0,
            )
        }
    }

    fn advise_once(&self, vectors: &[libc::iovec]) -> Result<usize, ProcessError> {
        let done = self.advise(vectors, libc::MADV_PAGEOUT);
        match usize::try_from(done) {
            Ok(0) if !vectors.is_empty() => Err(ProcessError::Kernel {
                operation: "process_madvise(PAGEOUT)",
                pid: self.pid(),
                source: std::io::Error::other("nothing was advised"),
            }),
            Ok(done) => Ok(done),
            Err(_) => Err(explain(
                "process_madvise(PAGEOUT)",
                self.pid(),
                std::io::Error::last_os_error(),
            )),
        }
    }
}

/// Copies memory of process `pid` at `at` into `into`, by the kernel: pages that are absent there are had as if the
/// process itself read them.
///
/// # Errors
/// The kernel's error: `EFAULT` if a page cannot be had, also after a part was copied.
pub fn read_memory(pid: u32, at: Hva, into: &mut [u8]) -> std::io::Result<()> {
    let local = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(crate::to_usize(at.0)),
        iov_len: into.len(),
    };
    let pid = i32::try_from(pid).map_err(|_| std::io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: the kernel writes to `into` alone, which is exclusively ours for the call; the other range is an
    // address in that process, of which it only reads, and where there is nothing it returns an error.
    let copied =
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(copied) {
        Ok(count) if count == into.len() => Ok(()),
        // Part of it was there.
        Ok(_) => Err(std::io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(std::io::Error::last_os_error()),
    }
}

/// True if both processes run in one address space (`vfork`, QEMU's `-async-teardown`).
///
/// # Errors
/// [`ProcessError`], naming the first of the two.
pub fn same_address_space(one: u32, other: u32) -> Result<bool, ProcessError> {
    // SAFETY: kcmp with KCMP_VM takes plain numbers and touches no memory of ours.
    let order = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            libc::c_long::from(one),
            libc::c_long::from(other),
            KCMP_VM,
            0,
            0,
        )
    };
    if order < 0 {
        return Err(explain("kcmp", other, std::io::Error::last_os_error()));
    }
    Ok(order == 0)
}

/// `pid` as rustix's type; `None` for 0 and for numbers no process can have.
pub(crate) fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).map_or(None, Pid::from_raw)
}

fn explain(operation: &'static str, pid: u32, source: std::io::Error) -> ProcessError {
    match source.raw_os_error() {
        Some(libc::ESRCH) => ProcessError::NoSuchProcess { pid },
        Some(libc::EPERM | libc::EACCES) => ProcessError::NotPermitted { operation, pid },
        _ => ProcessError::Kernel {
            operation,
            pid,
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMapping;
    use crate::memory_file::GuestFile;
    use crate::pagemap::Pagemap;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_alive_until_it_ends_and_then_its_pid_is_nobody() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let process = ProcessFd::open(child.id()).unwrap();
        assert!(!process.has_ended().unwrap());
        assert!(!same_address_space(child.id(), std::process::id()).unwrap());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(process.has_ended().unwrap());
        assert!(matches!(
            ProcessFd::open(child.id()),
            Err(ProcessError::NoSuchProcess { .. })
        ));
    }

    #[test]
    fn a_signal_through_a_cloned_descriptor_reaches_the_process_until_it_has_ended() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessFd::open(child.id()).unwrap();
        let again = process.try_clone().unwrap();
        assert_eq!(again.pid(), process.pid());
        drop(process);
        again.signal(Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(again.has_ended().unwrap());
        assert!(matches!(
            again.signal(Signal::KILL),
            Err(ProcessError::NoSuchProcess { .. })
        ));
    }

    #[test]
    fn a_process_shares_its_address_space_with_itself() {
        let own = std::process::id();
        assert!(same_address_space(own, own).unwrap());
        assert!(ProcessFd::open(0).is_err());
    }

    #[test]
    fn a_descriptor_taken_from_a_child_is_the_same_file() {
        if crate::emulated::skip() {
            return;
        }
        let file = GuestFile::new_memfd("stdin", 4096).unwrap();
        let copy = file.as_fd().try_clone_to_owned().unwrap();
        // `sleep` keeps its standard input open and does not read it.
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdin(Stdio::from(copy))
            .spawn()
            .unwrap();
        let process = ProcessFd::open(child.id()).unwrap();
        let taken = GuestFile::from(process.take_descriptor(0).unwrap());
        assert_eq!(taken.key().unwrap(), file.key().unwrap());
        assert!(process.take_descriptor(999).is_err());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn pages_paged_out_where_no_swap_is_leave_the_page_table_and_keep_their_content() {
        if crate::emulated::skip() {
            return;
        }
        let swaps = std::fs::read_to_string("/proc/swaps").unwrap();
        if swaps.lines().count() > 1 {
            eprintln!("SKIPPED: this machine has swap, page-out would use it");
            return;
        }
        const BYTES: u64 = 4 << 20;
        let file = GuestFile::new_memfd("out", BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), BYTES).unwrap();
        mapping
            .copy_to(0, &vec![9; crate::to_usize(BYTES)])
            .unwrap();
        let map = Pagemap::of_self().unwrap();
        let base = Hva(mapping.address() as u64);
        assert_eq!(map.count_present(base, 1024).unwrap(), 1024);
        let own = ProcessFd::open(std::process::id()).unwrap();
        let halves = [(base, BYTES / 2), (Hva(base.0 + BYTES / 2), BYTES / 2)];
        assert_eq!(own.page_out(&halves).unwrap(), BYTES);
        // Some pages stay in per-CPU batches.
        assert!(map.count_present(base, 1024).unwrap() < 256);
        assert_eq!(file.allocated_bytes().unwrap(), BYTES);
        let mut last = [0];
        mapping.copy_from(BYTES - 1, &mut last).unwrap();
        assert_eq!(last, [9]);
    }
}
