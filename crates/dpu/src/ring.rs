// SPDX-License-Identifier: Apache-2.0
//! An engine's io_uring: the only place where the kernel gets pointers into guest memory.
//!
//! # Idea
//! Submitting to a ring is unsafe because the kernel uses the memory after the call. So the ring
//! *owns* each transfer until its completion is taken: a [`Dma`] holds the vectors, and the guest
//! memory (a mapping that lives as long as the `Rc`) and bounce buffers (likewise) that they point
//! to. No outside code can free any of these while the kernel works on it, and dropping the ring
//! waits.
//!
//! Whether the *pages* are present is a separate matter: the lease ensures it. The caller keeps the
//! lease in the same job and releases it on completion.
//!
//! # The lock (when a successor may recover)
//! I/O submitted by a killed process still completes later. Slot 0 of the ring's file table is a
//! lock file, flock'ed by us and open nowhere else. The table, and with it the lock, goes away only
//! when the ring's last request is done. A ring that is dropped waits for that and gives the lock up
//! itself; the kernel would do so only when it has taken the ring apart. See [`crate::lock`].
//!
//! # Kernel threads
//! Operations that would block (a flush, a write that needs a block of the file system) run on
//! kernel threads, at most [`KERNEL_THREADS`] for each ring. When all are busy, further operations
//! wait in one queue, whichever tenant they belong to. So engines bound how many operations that
//! are sure to block a tenant has there ([`crate::engine::fair`]).
//!
//! # One thread
//! `SINGLE_ISSUER` with `DEFER_TASKRUN`: completions are processed only when this thread enters the
//! kernel for them, never by an interrupt of its other work. `TASKRUN_FLAG` tells a polling engine
//! when there are any.
#![expect(
    unsafe_code,
    reason = "pushing to a submission queue is unsafe; see the header for why it is sound here"
)]

use crate::memory::{DeviceMemory, OutsideMemory, Span};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use libc::iovec;
use pagetide_addr::{Gpa, PAGE_BYTES};
use pagetide_vpri::BounceArea;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

/// Capacity of the file table: the lock and the files of each device.
pub(crate) const FILE_SLOTS: usize = 1 + FILES_PER_DEVICE * DEVICES_MAX as usize;
/// Files that a device may have in the table.
pub(crate) const FILES_PER_DEVICE: usize = 2;
/// Most devices of one DPU.
pub(crate) const DEVICES_MAX: u32 = 128;
/// Kernel threads for one ring's I/O on files and disks. The kernel's default is four for each CPU:
/// on a small machine one tenant alone can block more than that.
pub(crate) const KERNEL_THREADS: u32 = 64;
/// Longest vector that the kernel accepts (`UIO_MAXIOV`).
pub(crate) const VECTOR_MAX: usize = 1024;

const KIND_SHIFT: u32 = 56;
const KIND_JOB: u64 = 1;
const KIND_POLL: u64 = 2;
const KIND_IGNORED: u64 = 3;

/// A file in the ring's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileSlot(pub u32);

/// The slots for the files of the device in that slot of an engine.
pub(crate) fn device_files(device: usize) -> [FileSlot; FILES_PER_DEVICE] {
    let before = u32::try_from(device * FILES_PER_DEVICE).unwrap_or(u32::MAX / 2);
    [FileSlot(1 + before), FileSlot(2 + before)]
}

/// The operation on the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// Make written data durable.
    Sync,
    /// `fallocate` of bytes with a mode.
    Allocate { bytes: u64, mode: i32 },
}

/// Part of the memory of a transfer.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Guest memory.
    Guest(Span),
    /// Bounce buffers, from number `first` on.
    Slots {
        area: Arc<BounceArea>,
        first: u32,
        len: u32,
    },
}

/// Memory of a transfer, and its progress.
#[derive(Debug)]
pub(crate) struct Dma {
    memory: Rc<DeviceMemory>,
    /// Bounce areas that vectors point into.
    areas: Vec<Arc<BounceArea>>,
    vectors: Vec<iovec>,
    /// Vectors before this one are done.
    first: usize,
    left: u64,
    /// The part of the vectors for the next step, if it is not everything that is left.
    part: Vec<iovec>,
}

impl Dma {
    /// A transfer without memory yet.
    pub fn new(memory: Rc<DeviceMemory>) -> Self {
        Self {
            memory,
            areas: Vec::new(),
            vectors: Vec::new(),
            first: 0,
            left: 0,
            part: Vec::new(),
        }
    }

    /// Restarts with `spans` of `memory`.
    pub fn aim(&mut self, memory: &Rc<DeviceMemory>, spans: &[Span]) -> Result<(), OutsideMemory> {
        self.begin(memory);
        for span in spans {
            self.add_span(*span)?;
        }
        Ok(())
    }

    /// Restarts with guest memory and bounce buffers, in order.
    pub fn aim_apart(
        &mut self,
        memory: &Rc<DeviceMemory>,
        pieces: &[Piece],
    ) -> Result<(), OutsideMemory> {
        self.begin(memory);
        for piece in pieces {
            match piece {
                Piece::Guest(span) => self.add_span(*span)?,
                Piece::Slots { area, first, len } => self.add_slots(area, *first, *len)?,
            }
        }
        Ok(())
    }

    fn begin(&mut self, memory: &Rc<DeviceMemory>) {
        if !Rc::ptr_eq(&self.memory, memory) {
            self.memory = memory.clone();
        }
        self.areas.clear();
        self.vectors.clear();
        self.part.clear();
        self.first = 0;
        self.left = 0;
    }

    fn add_span(&mut self, span: Span) -> Result<(), OutsideMemory> {
        let slice = self.memory.slice(span)?;
        self.vectors.push(iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        });
        self.left += u64::from(span.len);
        Ok(())
    }

    fn add_slots(
        &mut self,
        area: &Arc<BounceArea>,
        first: u32,
        len: u32,
    ) -> Result<(), OutsideMemory> {
        let bytes = u64::from(len);
        let slice = (area.bytes(first, bytes.div_ceil(PAGE_BYTES)))
            .and_then(|slots| slots.subslice(0, len as usize).ok())
            .ok_or(OutsideMemory {
                gpa: Gpa(u64::from(first) * PAGE_BYTES),
                bytes,
            })?;
        self.vectors.push(iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        });
        self.left += bytes;
        if !self.areas.iter().any(|known| Arc::ptr_eq(known, area)) {
            self.areas.push(area.clone());
        }
        Ok(())
    }

    /// The memory it works on.
    pub fn memory(&self) -> &Rc<DeviceMemory> {
        &self.memory
    }

    /// Bytes still to be moved.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Limits the next step to `bytes_max` of what is left; returns the most it will move.
    pub fn cut(&mut self, bytes_max: u64) -> u64 {
        self.part.clear();
        if self.left <= bytes_max {
            return self.left;
        }
        let mut room = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        for vector in &self.vectors[self.first..] {
            if room == 0 || self.part.len() == VECTOR_MAX {
                break;
            }
            let len = vector.iov_len.min(room);
            self.part.push(iovec {
                iov_len: len,
                ..*vector
            });
            room -= len;
        }
        bytes_max - room as u64
    }

    /// The memory of the next step.
    fn next_part(&self) -> &[iovec] {
        match self.part.is_empty() {
            true => &self.vectors[self.first..],
            false => &self.part,
        }
    }

    /// Marks `bytes` more as done.
    pub fn advance(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.left, "the kernel moved more than requested");
        self.left -= bytes.min(self.left);
        self.part.clear();
        let mut bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        while let Some(vector) = self.vectors.get_mut(self.first) {
            if bytes < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(bytes);
                vector.iov_len -= bytes;
                return;
            }
            bytes -= vector.iov_len;
            self.first += 1;
        }
    }

    /// True if direct I/O accepts this memory: address and length of each part are multiples of
    /// `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.vectors[self.first..]
            .iter()
            .all(|v| v.iov_base.addr().is_multiple_of(align) && v.iov_len.is_multiple_of(align))
    }
}

/// A transfer, with what its engine must know when it completes.
#[derive(Debug)]
pub(crate) struct Job<R> {
    pub dma: Dma,
    pub request: R,
}

/// The next operation of a job, and its place in the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub file: FileSlot,
    pub operation: Operation,
    pub offset: u64,
}

/// An event of the ring.
#[derive(Debug)]
pub(crate) enum Event<R> {
    /// A step is done, with the kernel's result: a count, or a negated error number.
    Done(Box<Job<R>>, i32),
    /// A polled descriptor is readable; it must be polled again if `over`.
    Readable { token: u32, over: bool },
}

/// The ring of one engine.
pub(crate) struct IoRing<R> {
    ring: IoUring,
    jobs: Vec<Option<Box<Job<R>>>>,
    free: Vec<usize>,
    in_flight: usize,
}

impl<R> IoRing<R> {
    /// Creates a ring with room for `entries` submissions at a time. It holds `lock` as long as any
    /// of its I/O is under way. Call this on the thread that uses the ring.
    pub fn new(entries: u32, lock: OwnedFd) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_clamp()
            .setup_cqsize(entries.saturating_mul(4))
            .dontfork()
            .build(entries)?;
        let mut files = vec![-1; FILE_SLOTS];
        files[0] = lock.as_raw_fd();
        ring.submitter().register_files(&files)?;
        // The second value is for sockets and the like, which are not used here: 0 leaves it
        // unchanged.
        let mut threads = [KERNEL_THREADS, 0];
        ring.submitter().register_iowq_max_workers(&mut threads)?;
        // From here on, only the table holds it.
        drop(lock);
        Ok(Self {
            ring,
            jobs: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
        })
    }

    /// Puts `file` into the table.
    pub fn set_file(&mut self, slot: FileSlot, file: BorrowedFd<'_>) -> io::Result<()> {
        self.update_file(slot, file.as_raw_fd())
    }

    /// Removes a file from the table. No job may use it.
    pub fn clear_file(&mut self, slot: FileSlot) -> io::Result<()> {
        self.update_file(slot, -1)
    }

    fn update_file(&mut self, slot: FileSlot, fd: i32) -> io::Result<()> {
        debug_assert!(slot.0 > 0, "slot 0 is the lock");
        self.ring
            .submitter()
            .register_files_update(slot.0, &[fd])
            .map(|_| ())
    }

    /// Jobs under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Gives a job's next step to the kernel (at the next [`Self::submit`]).
    pub fn start(&mut self, job: Box<Job<R>>, step: Step) -> io::Result<()> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() - 1
        });
        let entry = entry(&job.dma, step).user_data(KIND_JOB << KIND_SHIFT | index as u64);
        self.jobs[index] = Some(job);
        self.in_flight += 1;
        // The job is in `jobs` before its entry is in the queue.
        self.push(&entry)
    }

    /// Polls `fd`; each time it becomes readable, [`Event::Readable`] reports `token`.
    pub fn poll(&mut self, fd: BorrowedFd<'_>, token: u32) -> io::Result<()> {
        let events = libc::POLLIN as u32;
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), events)
            .multi(true)
            .build()
            .user_data(KIND_POLL << KIND_SHIFT | u64::from(token));
        self.push(&entry)
    }

    /// Stops a poll.
    ///
    /// Uses `ASYNC_CANCEL`: `POLL_REMOVE` fails (`EALREADY`) on a poll whose event is being
    /// reported just now. With a descriptor that is written in a loop this is always so, and the
    /// poll would never end.
    pub fn stop_poll(&mut self, token: u32) -> io::Result<()> {
        let target = KIND_POLL << KIND_SHIFT | u64::from(token);
        let entry = opcode::AsyncCancel::new(target)
            .build()
            .user_data(KIND_IGNORED << KIND_SHIFT);
        self.push(&entry)
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.submit()?;
        }
        // SAFETY: only `start` creates an entry with memory: its pointers come from a `Dma` that
        // `jobs` owns until the completion is taken; the vectors' buffers do not move with its box;
        // the mappings they point into live as long as the `Rc` and the areas in it. Other entries
        // carry no pointers. If the queue has no room, the push returns `PushError`.
        unsafe { self.ring.submission().push(entry) }.map_err(io::Error::other)
    }

    /// Submits started steps to the kernel, and lets it process completions.
    pub fn submit(&mut self) -> io::Result<()> {
        retry(|| self.ring.submit())
    }

    /// Steps that were started but not submitted.
    pub fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// True if [`Self::submit`] would have an effect.
    pub fn wants_submit(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.taskrun()
    }

    /// As [`Self::submit`], then sleeps until there is an event.
    pub fn submit_and_sleep(&mut self) -> io::Result<()> {
        retry(|| self.ring.submit_and_wait(1))
    }

    /// As [`Self::submit_and_sleep`], but no longer than `limit`.
    pub fn submit_and_doze(&mut self, limit: Duration) -> io::Result<()> {
        let limit = types::Timespec::from(limit);
        let arguments = types::SubmitArgs::new().timespec(&limit);
        let slept = retry(|| self.ring.submitter().submit_with_args(1, &arguments));
        match slept {
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            slept => slept,
        }
    }

    /// The next event, if one is there.
    pub fn next(&mut self) -> Option<Event<R>> {
        loop {
            let entry = self.ring.completion().next()?;
            let data = entry.user_data();
            let low = data & ((1 << KIND_SHIFT) - 1);
            match data >> KIND_SHIFT {
                KIND_JOB => {
                    let index = usize::try_from(low).unwrap_or(usize::MAX);
                    let Some(job) = self.jobs.get_mut(index).and_then(Option::take) else {
                        debug_assert!(false, "completion of an unknown job");
                        continue;
                    };
                    self.free.push(index);
                    self.in_flight -= 1;
                    return Some(Event::Done(job, entry.result()));
                }
                KIND_POLL => {
                    return Some(Event::Readable {
                        token: u32::try_from(low).unwrap_or(u32::MAX),
                        over: !cqueue::more(entry.flags()),
                    });
                }
                _ => {}
            }
        }
    }
}

impl<R> Drop for IoRing<R> {
    fn drop(&mut self) {
        // The kernel still works on guest memory: wait for it, however long it takes.
        while self.in_flight > 0 {
            if let Err(error) = self.submit_and_sleep() {
                tracing::error!(%error, in_flight = self.in_flight, "waiting for the last I/O of a ring failed; leaking its memory");
                self.jobs.drain(..).for_each(std::mem::forget);
                return;
            }
            while self.next().is_some() {}
        }
        // The kernel takes a ring apart in the background, tens of milliseconds later. All I/O is done, so a
        // successor need not wait for that.
        if let Err(error) = self.ring.submitter().register_files_update(0, &[-1]) {
            tracing::debug!(%error, "a successor waits until the kernel has taken a ring apart");
        }
    }
}

fn entry(dma: &Dma, step: Step) -> squeue::Entry {
    let file = types::Fixed(step.file.0);
    let vectors = dma.next_part();
    let count = u32::try_from(vectors.len().min(VECTOR_MAX)).unwrap_or(0);
    let len = |vector: &iovec| u32::try_from(vector.iov_len).unwrap_or(u32::MAX);
    match (step.operation, vectors) {
        (Operation::Read, [one]) => opcode::Read::new(file, one.iov_base.cast(), len(one))
            .offset(step.offset)
            .build(),
        (Operation::Write, [one]) => opcode::Write::new(file, one.iov_base.cast(), len(one))
            .offset(step.offset)
            .build(),
        (Operation::Read, _) => opcode::Readv::new(file, vectors.as_ptr(), count)
            .offset(step.offset)
            .build(),
        (Operation::Write, _) => opcode::Writev::new(file, vectors.as_ptr(), count)
            .offset(step.offset)
            .build(),
        (Operation::Sync, _) => opcode::Fsync::new(file)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        (Operation::Allocate { bytes, mode }, _) => opcode::Fallocate::new(file, bytes)
            .offset(step.offset)
            .mode(mode)
            .build(),
    }
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    loop {
        match call() {
            Ok(_) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            // The completion queue is full of events that we have not taken yet: try later.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{memory::tests::Ram, regions::RegionTable};
    use pagetide_addr::Gpa;
    use pagetide_vpri::LookUp;
    use std::{
        fs::File,
        io::{Read, Seek, Write},
        os::fd::AsFd,
    };

    fn ring() -> IoRing<u32> {
        IoRing::new(8, File::open("/dev/null").unwrap().into()).unwrap()
    }

    #[test]
    fn vectored_transfer_goes_straight_to_and_from_guest_memory() {
        let ram = Ram::new(4);
        let mut table = RegionTable::default();
        table.add(ram.region(0, 4, 0)).unwrap();
        let memory = Rc::new(table.for_engine(0, LookUp::On).unwrap());
        let mut image = tempfile::tempfile().unwrap();
        image.write_all(&[5; 1024]).unwrap();
        let mut ring = ring();
        ring.set_file(FileSlot(1), image.as_fd()).unwrap();
        let mut spans = Vec::new();
        memory.spans(Gpa(0x1000), 512, &mut spans).unwrap();
        memory.spans(Gpa(0x3000), 512, &mut spans).unwrap();
        let mut dma = Dma::new(memory.clone());
        dma.aim(&memory, &spans).unwrap();
        let read = Step {
            file: FileSlot(1),
            operation: Operation::Read,
            offset: 0,
        };
        ring.start(Box::new(Job { dma, request: 9 }), read).unwrap();
        ring.submit_and_sleep().unwrap();
        let Some(Event::Done(mut job, 1024)) = ring.next() else {
            panic!("no completion");
        };
        assert_eq!(job.request, 9);
        let mut bytes = [0; 512];
        ram.file.read_at(0x3000, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 512]);
        ram.file.write_at(0x3000, &[6; 512]).unwrap();
        job.dma.aim(&memory, &spans).unwrap();
        job.dma.advance(600);
        assert_eq!(job.dma.left(), 424);
        let write = Step {
            operation: Operation::Write,
            offset: 600,
            ..read
        };
        ring.start(job, write).unwrap();
        ring.submit_and_sleep().unwrap();
        assert!(matches!(ring.next(), Some(Event::Done(_, 424))));
        image.rewind().unwrap();
        let mut all = Vec::new();
        image.read_to_end(&mut all).unwrap();
        assert_eq!(all[599..601], [5, 6]);
    }

    #[test]
    fn steps_cover_a_transfer_once_and_none_is_longer_than_asked_for() {
        let ram = Ram::new(64);
        let mut table = RegionTable::default();
        table.add(ram.region(0, 64, 0)).unwrap();
        let memory = Rc::new(table.for_engine(0, LookUp::On).unwrap());
        let lens = [1, 4095, 8192, 3, 70_000, 512, 512, 40_000];
        for step in [1, 511, 512, 4096, 5000, 65_536, 1 << 20] {
            let (mut spans, mut at) = (Vec::new(), 0);
            for len in lens {
                memory.spans(Gpa(at), len, &mut spans).unwrap();
                at += u64::from(len) + 100;
            }
            let mut dma = Dma::new(memory.clone());
            dma.aim(&memory, &spans).unwrap();
            let bytes = |vectors: &[iovec]| -> Vec<usize> {
                let each = |v: &iovec| v.iov_base.addr()..v.iov_base.addr() + v.iov_len;
                vectors.iter().flat_map(each).collect()
            };
            let whole = bytes(dma.next_part());
            let mut moved = Vec::new();
            while dma.left() > 0 {
                let most = dma.cut(step);
                let part = bytes(dma.next_part());
                assert_eq!(part.len() as u64, most);
                assert!(most <= step);
                // The kernel sometimes moves less.
                let done = if moved.len() % 2 == 0 {
                    most
                } else {
                    most.div_ceil(2)
                };
                moved.extend_from_slice(&part[..usize::try_from(done).unwrap()]);
                dma.advance(done);
            }
            assert!(moved == whole, "steps of {step}");
        }
    }

    #[test]
    fn eventfd_that_is_written_wakes_the_ring_each_time() {
        let mut ring = ring();
        let event = vmm_sys_util::eventfd::EventFd::new(libc::EFD_NONBLOCK).unwrap();
        // SAFETY: the eventfd outlives the borrow.
        let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
        ring.poll(fd, 77).unwrap();
        ring.submit().unwrap();
        for _ in 0..3 {
            event.write(1).unwrap();
            ring.submit_and_sleep().unwrap();
            assert!(matches!(
                ring.next(),
                Some(Event::Readable {
                    token: 77,
                    over: false
                })
            ));
        }
        ring.stop_poll(77).unwrap();
        ring.submit_and_sleep().unwrap();
    }
}
