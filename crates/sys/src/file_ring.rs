// SPDX-License-Identifier: Apache-2.0
//! [`FileRing`]: an io_uring for one file, which owns what the kernel works on.
//!
//! # Idea
//! Submitting to a ring is unsafe because the kernel uses the memory after the call. So a [`Transfer`] gives
//! its [`Buffer`] to the ring, and gets it back with its completion. Nothing outside can free or read it
//! meanwhile. Dropping the ring waits for the last completion; if that takes longer than [`DRAIN_TIME`], as
//! on a disk that never answers, the buffers are leaked: they are the kernel's for good.
//!
//! # The lock (when a successor may write)
//! I/O submitted by a killed process still completes later. The ring has its file in its file table, and an
//! `flock` belongs to the open file, not to the process. So if the file is locked before it is given to the
//! ring, the lock outlives the process until the last transfer is done: a successor that has the lock can
//! be sure that nothing of its predecessor is still written. No other descriptor of the open file may be
//! kept by another process.
//!
//! # One thread
//! `SINGLE_ISSUER` with `DEFER_TASKRUN`: the thread that creates the ring uses it, and completions are
//! processed when it waits. Others wake it by a [`RingWaker`], an eventfd that the ring polls.
#![expect(
    unsafe_code,
    reason = "pushing to a submission queue is unsafe; see the header for why it is sound here"
)]

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::{
    io,
    ops::{Deref, DerefMut, Range},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// Alignment of buffers: the largest that direct I/O asks for on a file system or disk with blocks of at most
/// this size.
pub const BUFFER_ALIGN: usize = 4096;
/// How long a ring that is dropped waits for its last transfers.
pub const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Kernel threads for operations that would block: all transfers of a ring are of one file, so more of them
/// would wait for one another.
const KERNEL_THREADS: u32 = 16;
/// The one file in the table.
const FILE: types::Fixed = types::Fixed(0);
/// `user_data` of the poll of the eventfd; transfers have the index of their slot.
const WAKE: u64 = u64::MAX;

/// Memory for direct I/O: aligned to [`BUFFER_ALIGN`], and long enough for whole blocks.
#[derive(Debug, Default)]
pub struct Buffer {
    /// Never grows, so its memory stays where it is.
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` bytes of zeros.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let memory = vec![0; len + BUFFER_ALIGN];
        let start = memory.as_ptr().align_offset(BUFFER_ALIGN);
        Self { memory, start, len }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// What to do with the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// File to buffer.
    Read,
    /// Buffer to file.
    Write,
    /// Give these bytes of the file back to its file system; no buffer is used.
    Punch {
        /// How many, from the transfer's offset on.
        bytes: u64,
    },
}

/// One operation, with the memory that it works on.
#[derive(Debug)]
pub struct Transfer<T> {
    /// What to do.
    pub operation: Operation,
    /// Where in the file.
    pub offset: u64,
    /// The memory.
    pub buffer: Buffer,
    /// The part of it.
    pub part: Range<usize>,
    /// What the caller must know when it is done.
    pub tag: T,
}

/// A transfer that is done.
#[derive(Debug)]
pub struct Completed<T> {
    /// The transfer.
    pub transfer: Transfer<T>,
    /// Bytes moved, which may be fewer than asked for.
    pub result: io::Result<usize>,
}

/// A transfer that was not started.
#[derive(Debug, thiserror::Error)]
pub enum NotStarted<T> {
    /// As many as the ring has entries are under way.
    #[error("all entries of the ring are in use")]
    NoEntry(Transfer<T>),
    /// Its part is not within its buffer, or too long for one operation.
    #[error("the part of the buffer is not within it")]
    BadPart(Transfer<T>),
}

/// Wakes the thread that waits for a ring.
#[derive(Debug, Clone)]
pub struct RingWaker(Arc<OwnedFd>);

impl RingWaker {
    /// Wakes it, or lets its next wait return at once.
    pub fn wake(&self) {
        // The eventfd is ours alone and never blocks; a full counter wakes as well as one more.
        if let Err(error) = rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
            debug_assert_eq!(error, Errno::AGAIN);
        }
    }
}

/// See the module documentation.
pub struct FileRing<T> {
    ring: IoUring,
    wake: Arc<OwnedFd>,
    polled: bool,
    slots: Vec<Option<Box<Transfer<T>>>>,
    free: Vec<usize>,
}

impl<T> std::fmt::Debug for FileRing<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileRing")
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl<T> FileRing<T> {
    /// A ring for `file` with at most `entries` transfers at a time. Call this on the thread that uses it.
    ///
    /// # Errors
    /// The kernel's, if it has no io_uring or refuses one.
    pub fn new(entries: u16, file: OwnedFd) -> io::Result<Self> {
        let entries = u32::from(entries.max(1));
        // One entry more is for the poll.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_clamp()
            .dontfork()
            .build(entries + 1)?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        // The second value is for sockets and the like, which are not used here: 0 leaves it unchanged.
        let mut threads = [KERNEL_THREADS, 0];
        ring.submitter().register_iowq_max_workers(&mut threads)?;
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self {
            ring,
            wake: Arc::new(wake),
            polled: false,
            slots: (0..entries).map(|_| None).collect(),
            free: (0..entries as usize).rev().collect(),
        })
    }

    /// What wakes the thread that waits.
    #[must_use]
    pub fn waker(&self) -> RingWaker {
        RingWaker(Arc::clone(&self.wake))
    }

    /// Transfers under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Gives a transfer to the kernel, at the next [`Self::wait`].
    ///
    /// # Errors
    /// [`NotStarted`], with the transfer.
    pub fn start(&mut self, mut transfer: Transfer<T>) -> Result<(), NotStarted<T>> {
        let part = transfer.part.clone();
        let len = u32::try_from(part.len());
        let (Some(memory), Ok(len)) = (transfer.buffer.get_mut(part), len) else {
            return Err(NotStarted::BadPart(transfer));
        };
        let memory = memory.as_mut_ptr();
        let entry = match transfer.operation {
            Operation::Read => opcode::Read::new(FILE, memory, len)
                .offset(transfer.offset)
                .build(),
            Operation::Write => opcode::Write::new(FILE, memory, len)
                .offset(transfer.offset)
                .build(),
            Operation::Punch { bytes } => opcode::Fallocate::new(FILE, bytes)
                .offset(transfer.offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
        };
        let Some(index) = self.free.pop() else {
            return Err(NotStarted::NoEntry(transfer));
        };
        // The transfer is in its slot before its entry is in the queue.
        self.slots[index] = Some(Box::new(transfer));
        if self.push(&entry.user_data(index as u64)) {
            return Ok(());
        }
        self.free.push(index);
        match self.slots[index].take() {
            Some(transfer) => Err(NotStarted::NoEntry(*transfer)),
            None => unreachable!("it was just put there"),
        }
    }

    /// Puts an entry into the queue; false if there is no room.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: only `start` makes an entry with a pointer. It points into the buffer of a transfer that is
        // in `slots` by then, and stays there until its completion is taken: the buffer's memory is a `Vec`
        // that never grows, so it does not move with the transfer. If the completion does not come, `drop`
        // leaks it. The part was checked to be within the buffer. Other entries carry no pointers.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Submits what was started, and waits for a completion or a wake-up, no longer than `limit`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self, limit: Duration) -> io::Result<()> {
        if !self.polled {
            let events = u32::try_from(libc::POLLIN).unwrap_or_default();
            let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), events)
                .multi(true)
                .build()
                .user_data(WAKE);
            self.polled = self.push(&poll);
        }
        let timespec = types::Timespec::from(limit);
        let arguments = types::SubmitArgs::new().timespec(&timespec);
        match self.ring.submitter().submit_with_args(1, &arguments) {
            Ok(_) => Ok(()),
            // Over, or woken by a signal, or completions must be taken first.
            Err(error) if is_passing(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The next transfer that is done, if there is one.
    pub fn next_done(&mut self) -> Option<Completed<T>> {
        loop {
            let entry = self.ring.completion().next()?;
            if entry.user_data() == WAKE {
                self.polled = cqueue::more(entry.flags());
                self.forget_wakes();
                continue;
            }
            let index = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let Some(transfer) = self.slots.get_mut(index).and_then(Option::take) else {
                debug_assert!(false, "completion of an unknown transfer");
                continue;
            };
            self.free.push(index);
            let result = usize::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            return Some(Completed {
                transfer: *transfer,
                result,
            });
        }
    }

    fn forget_wakes(&self) {
        let mut count = [0; 8];
        if let Err(error) = rustix::io::read(self.wake.as_fd(), &mut count) {
            debug_assert_eq!(error, Errno::AGAIN);
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    let passing = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN];
    error
        .raw_os_error()
        .is_some_and(|number| passing.contains(&number))
}

impl<T> Drop for FileRing<T> {
    fn drop(&mut self) {
        let end = Instant::now() + DRAIN_TIME;
        while self.in_flight() > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.wait(left).is_err() {
                // The kernel may still write to them.
                self.slots.drain(..).for_each(std::mem::forget);
                return;
            }
            while self.next_done().is_some() {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::{GuestFile, LockWait, Locked};
    use std::os::unix::fs::FileExt;

    const SOON: Duration = Duration::from_secs(20);

    fn done<T>(ring: &mut FileRing<T>) -> Completed<T> {
        loop {
            if let Some(done) = ring.next_done() {
                return done;
            }
            ring.wait(SOON).unwrap();
        }
    }

    fn transfer(operation: Operation, offset: u64, fill: u8) -> Transfer<u8> {
        let mut buffer = Buffer::zeroed(8192);
        buffer.fill(fill);
        Transfer {
            operation,
            offset,
            buffer,
            part: 4096..8192,
            tag: fill,
        }
    }

    #[test]
    fn buffer_is_aligned_and_keeps_its_place_when_it_moves() {
        for len in [0, 1, 512, 4096, 2 << 20] {
            let buffer = Buffer::zeroed(len);
            let at = buffer.as_ptr();
            let moved = Box::new(buffer);
            assert_eq!((moved.len(), moved.as_ptr()), (len, at));
            assert_eq!(at.align_offset(BUFFER_ALIGN), 0);
        }
    }

    #[test]
    fn buffers_come_back_with_what_was_read_and_written() {
        if crate::emulated::skip() {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        let mut ring = FileRing::new(4, file.try_clone().unwrap().into()).unwrap();
        ring.start(transfer(Operation::Write, 4096, 7)).unwrap();
        let written = done(&mut ring);
        assert_eq!((written.result.unwrap(), written.transfer.tag), (4096, 7));
        let mut back = [0; 4096];
        file.read_exact_at(&mut back, 4096).unwrap();
        assert_eq!(back, [7; 4096]);
        ring.start(transfer(Operation::Read, 4096, 1)).unwrap();
        let read = done(&mut ring);
        assert_eq!(read.result.unwrap(), 4096);
        assert_eq!(read.transfer.buffer[4095..4098], [1, 7, 7]);
        ring.start(transfer(Operation::Read, 8192, 1)).unwrap();
        assert_eq!(done(&mut ring).result.unwrap(), 0, "past the end");
        ring.start(transfer(Operation::Punch { bytes: 4096 }, 4096, 2))
            .unwrap();
        // Not every file system has holes.
        if done(&mut ring).result.is_ok() {
            file.read_exact_at(&mut back, 4096).unwrap();
            assert_eq!(back, [0; 4096]);
        }
        assert_eq!(ring.in_flight(), 0);
    }

    #[test]
    fn error_of_the_kernel_comes_with_the_buffer() {
        if crate::emulated::skip() {
            return;
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut ring = FileRing::new(1, file.into()).unwrap();
        ring.start(transfer(Operation::Write, 0, 3)).unwrap();
        let failed = done(&mut ring);
        assert_eq!(failed.result.unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(failed.transfer.buffer.len(), 8192);
    }

    #[test]
    fn entries_are_bounded_and_bad_parts_refused() {
        if crate::emulated::skip() {
            return;
        }
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut ring = FileRing::new(2, reader).unwrap();
        let mut outside = transfer(Operation::Read, u64::MAX, 0);
        outside.part = 4096..8193;
        assert!(matches!(
            ring.start(outside),
            Err(NotStarted::BadPart(Transfer { tag: 0, .. }))
        ));
        for tag in 1..=2 {
            ring.start(transfer(Operation::Read, u64::MAX, tag))
                .unwrap();
        }
        assert!(matches!(
            ring.start(transfer(Operation::Read, u64::MAX, 3)),
            Err(NotStarted::NoEntry(Transfer { tag: 3, .. }))
        ));
        ring.wait(Duration::ZERO).unwrap();
        assert!(ring.next_done().is_none(), "the pipe is empty");
        assert_eq!(ring.in_flight(), 2);
        rustix::io::write(&writer, b"x").unwrap();
        assert_eq!(done(&mut ring).result.unwrap(), 1);
        drop(writer);
        assert_eq!(done(&mut ring).result.unwrap(), 0);
    }

    #[test]
    fn waker_ends_a_wait_each_time() {
        if crate::emulated::skip() {
            return;
        }
        let mut ring: FileRing<u8> =
            FileRing::new(1, tempfile::tempfile().unwrap().into()).unwrap();
        let waker = ring.waker();
        for _ in 0..3 {
            let thread = std::thread::spawn({
                let waker = waker.clone();
                move || waker.wake()
            });
            // Ends because of the wake: no transfer is under way.
            ring.wait(Duration::from_secs(3600)).unwrap();
            assert!(ring.next_done().is_none());
            thread.join().unwrap();
        }
    }

    #[test]
    fn lock_is_held_by_the_ring_alone_and_falls_with_it() {
        if crate::emulated::skip() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "").unwrap();
        let open = || GuestFile::from(OwnedFd::from(std::fs::File::open(&path).unwrap()));
        let file = std::fs::File::open(&path).unwrap();
        let lock = GuestFile::from(OwnedFd::from(file.try_clone().unwrap()));
        assert_eq!(lock.lock_exclusive(LockWait::Try).unwrap(), Locked::Ours);
        let ring: FileRing<u8> = FileRing::new(1, file.into()).unwrap();
        drop(lock);
        assert_eq!(
            open().lock_exclusive(LockWait::Try).unwrap(),
            Locked::HeldByAnother
        );
        drop(ring);
        assert_eq!(open().lock_exclusive(LockWait::Wait).unwrap(), Locked::Ours);
    }
}
