// SPDX-License-Identifier: Apache-2.0
//! A disk on one engine: what its requests do, step by step.

use super::{
    disk::Disk,
    request::{
        EmptyHow, Header, Limits, RangeKind, Status, Work, decide, range_work, read_range,
        write_serial, write_status,
    },
};
use crate::{
    kind::work::{Acted, Aim, Chain, Data, Decided, Lane, Next, Outcome, Task},
    memory::{DeviceMemory, OutsideMemory, Span},
    ring::{Dma, FILES_PER_DEVICE, FileSlot, Operation, Step},
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

/// Where a disk's image is among the ring's files.
#[derive(Debug, Clone, Copy)]
struct DiskFiles {
    direct: Option<FileSlot>,
    buffered: FileSlot,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct DiskOnEngine {
    disk: Arc<Disk>,
    files: DiskFiles,
    size: SeenSize,
}

/// Size of the image as last seen by this engine.
#[derive(Debug, Clone, Copy, Default)]
struct SeenSize {
    /// Time of the batch in which it was checked: one check serves everything that is taken
    /// together.
    seen_ns: u64,
    bytes: u64,
}

/// What must be known of a request when a step of it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskFlight {
    kind: IoKind,
    /// Direct I/O was refused once already.
    retried: bool,
}

/// What kind of I/O is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IoKind {
    Read,
    Write,
    Flush,
    Empty { how: EmptyHow, stage: EmptyStage },
}

/// Progress of emptying a range; file systems differ in the modes they support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EmptyStage {
    /// The mode that does it in one call.
    Direct,
    /// Zeroing is not supported: punch first,
    Punch,
    /// then allocate again.
    Allocate,
}

impl DiskOnEngine {
    /// Puts the image into the table of the engine's ring, by `set`.
    pub fn open(
        disk: &Arc<Disk>,
        slots: [FileSlot; FILES_PER_DEVICE],
        mut set: impl FnMut(FileSlot, BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let [direct, buffered] = slots;
        let files = disk.image().files();
        let files = files.as_ref().ok_or(io::ErrorKind::NotFound)?;
        set(buffered, files.buffered.as_fd())?;
        if let Some(file) = &files.direct {
            set(direct, file.as_fd())?;
        }
        Ok(Self {
            disk: disk.clone(),
            files: DiskFiles {
                direct: files.direct.is_some().then_some(direct),
                buffered,
            },
            size: SeenSize::default(),
        })
    }

    /// The files that it has in the ring's table.
    pub fn files(&self) -> [Option<FileSlot>; FILES_PER_DEVICE] {
        [Some(self.files.buffered), self.files.direct]
    }

    /// See [`OnEngine::decide`](crate::kind::OnEngine::decide).
    pub fn decide(&mut self, now_ns: u64, chain: Chain<'_>) -> Decided<DiskFlight> {
        match self.task(now_ns, chain) {
            Ok(decided) => decided,
            Err(status) => Decided::Answer(outcome(status)),
        }
    }

    fn task(&mut self, now_ns: u64, chain: Chain<'_>) -> Result<Decided<DiskFlight>, Status> {
        let limits = self.disk.limits();
        let header = Header::read(chain.memory, chain.frame).map_err(|_| Status::IoError)?;
        let bytes = |spans: &[Span]| spans.iter().map(|s| u64::from(s.len)).sum::<u64>();
        let readable = bytes(&chain.buffers.readable);
        let writable = bytes(&chain.buffers.writable);
        match decide(limits, header, readable, writable) {
            Work::Read { .. } if writable == 0 => Err(Status::Ok),
            Work::Write { .. } if readable == 0 => Err(Status::Ok),
            Work::Read { offset } => Ok(self.io(IoKind::Read, Operation::Read, offset)),
            Work::Write { offset } => {
                self.check_end(now_ns, offset + readable)?;
                Ok(self.io(IoKind::Write, Operation::Write, offset))
            }
            Work::Flush => Ok(self.io(IoKind::Flush, Operation::Sync, 0)),
            Work::Serial => Ok(Decided::Act),
            Work::Range(kind) => self.empty(now_ns, limits, kind, chain),
            Work::Answer(status) => Err(status),
        }
    }

    fn empty(
        &mut self,
        now_ns: u64,
        limits: Limits,
        kind: RangeKind,
        chain: Chain<'_>,
    ) -> Result<Decided<DiskFlight>, Status> {
        let bytes = read_range(chain.memory, &chain.buffers.readable);
        let range = range_work(limits, kind, bytes.map_err(|_| Status::IoError)?)?;
        self.check_end(now_ns, range.offset + range.bytes)?;
        let stage = EmptyStage::Direct;
        let operation = Operation::Allocate {
            bytes: range.bytes,
            mode: empty_mode(range.how, stage),
        };
        let kind = IoKind::Empty {
            how: range.how,
            stage,
        };
        Ok(self.io(kind, operation, range.offset))
    }

    fn io(&self, kind: IoKind, operation: Operation, offset: u64) -> Decided<DiskFlight> {
        let (data, lane) = match kind {
            IoKind::Read => (Data::ToGuest, Lane::Transfers),
            IoKind::Write => (Data::FromGuest, Lane::Transfers),
            IoKind::Flush | IoKind::Empty { .. } => (Data::Unmoved, Lane::Slow),
        };
        Decided::Io(Task {
            data,
            lane,
            step: Step {
                file: self.files.buffered,
                operation,
                offset,
            },
            flight: DiskFlight {
                kind,
                retried: false,
            },
        })
    }

    /// Copies the serial number: nothing else is done without the kernel.
    pub fn act(&self, chain: Chain<'_>) -> Acted {
        let written = write_serial(chain.memory, &chain.buffers.writable, self.disk.serial());
        Acted {
            outcome: match written {
                Ok(()) => Outcome::Done,
                Err(_) => Outcome::Failed,
            },
            from_guest_bytes: 0,
        }
    }

    /// Writes the status byte.
    pub fn answer(memory: &DeviceMemory, at: Span, outcome: Outcome) -> Result<(), OutsideMemory> {
        write_status(memory, at, status(outcome))
    }

    /// The descriptor of the image that supports the next step of a transfer.
    pub fn aim(&self, flight: &DiskFlight, dma: &Dma, step: &Step) -> Aim {
        let image = self.disk.image();
        // Steps end at block boundaries of the disk, so that the next one can bypass the page
        // cache, too.
        let unit_bytes = u64::from(image.block_bytes);
        let file = match self.files.direct {
            Some(direct)
                if !flight.retried
                    && dma.is_aligned(image.memory_align.max(512))
                    && dma.left().is_multiple_of(unit_bytes)
                    && step.offset.is_multiple_of(unit_bytes) =>
            {
                direct
            }
            _ => self.files.buffered,
        };
        Aim { file, unit_bytes }
    }

    /// See [`OnEngine::next`](crate::kind::OnEngine::next).
    pub fn next(
        &mut self,
        now_ns: u64,
        flight: &mut DiskFlight,
        (dma, step): (&mut Dma, &mut Step),
        result: i32,
    ) -> Next {
        let next = self.after(flight, dma, step, result);
        if matches!(next, Next::Complete(_)) || self.rest_is_within(now_ns, flight, dma, step) {
            return next;
        }
        Next::Complete(Outcome::Failed)
    }

    /// Decides what follows a result, whatever the size of the image.
    fn after(&self, flight: &mut DiskFlight, dma: &mut Dma, step: &mut Step, result: i32) -> Next {
        let error = match u64::try_from(result) {
            Ok(count) => return self.after_success(flight, dma, step, count),
            Err(_) => -result,
        };
        match (flight.kind, error) {
            (_, libc::EINTR | libc::EAGAIN) => Next::Again,
            // The file system knows better than statx what direct I/O can take here.
            (IoKind::Read | IoKind::Write, libc::EINVAL) if !flight.retried => {
                flight.retried = true;
                step.file = self.files.buffered;
                Next::AtOnce
            }
            (
                IoKind::Empty {
                    how: EmptyHow::Zero,
                    stage: EmptyStage::Direct,
                },
                libc::EOPNOTSUPP,
            ) => {
                set_stage(flight, step, EmptyStage::Punch);
                Next::Again
            }
            (IoKind::Empty { .. }, libc::EOPNOTSUPP) => Next::Complete(Outcome::Unsupported),
            _ => Next::Complete(Outcome::Failed),
        }
    }

    fn after_success(
        &self,
        flight: &mut DiskFlight,
        dma: &mut Dma,
        step: &mut Step,
        count: u64,
    ) -> Next {
        match flight.kind {
            IoKind::Read | IoKind::Write if count == 0 => {
                // The image ends before the request does, which is reported where its size is
                // checked.
                self.disk.look_at_size();
                Next::Complete(Outcome::Failed)
            }
            IoKind::Read | IoKind::Write => {
                dma.advance(count);
                step.offset += count;
                if dma.left() > 0 {
                    Next::Again
                } else {
                    Next::Complete(Outcome::Done)
                }
            }
            IoKind::Empty {
                stage: EmptyStage::Punch,
                ..
            } => {
                set_stage(flight, step, EmptyStage::Allocate);
                Next::Again
            }
            IoKind::Flush | IoKind::Empty { .. } => Next::Complete(Outcome::Done),
        }
    }

    /// True if the rest of a request ends within the image, as it is in the batch of `now_ns`.
    fn rest_is_within(&mut self, now_ns: u64, flight: &DiskFlight, dma: &Dma, step: &Step) -> bool {
        let end = match (flight.kind, step.operation) {
            (IoKind::Write, _) => step.offset + dma.left(),
            (IoKind::Empty { .. }, Operation::Allocate { bytes, .. }) => step.offset + bytes,
            _ => return true,
        };
        self.reaches(now_ns, end)
    }

    /// Refuses what ends beyond the image's current size.
    fn check_end(&mut self, now_ns: u64, end: u64) -> Result<(), Status> {
        match self.reaches(now_ns, end) {
            true => Ok(()),
            false => Err(Status::IoError),
        }
    }

    /// True if the image has its first `end` bytes; [`super::image`] explains why it may not.
    fn reaches(&mut self, now_ns: u64, end: u64) -> bool {
        if self.size.seen_ns != now_ns {
            self.size = SeenSize {
                seen_ns: now_ns,
                bytes: self.disk.look_at_size(),
            };
        }
        end <= self.size.bytes
    }
}

/// The mode of `fallocate` for a stage.
fn empty_mode(how: EmptyHow, stage: EmptyStage) -> i32 {
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    match (how, stage) {
        (EmptyHow::Zero, EmptyStage::Direct) => {
            libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE
        }
        (_, EmptyStage::Direct | EmptyStage::Punch) => punch,
        (_, EmptyStage::Allocate) => libc::FALLOC_FL_KEEP_SIZE,
    }
}

fn set_stage(flight: &mut DiskFlight, step: &mut Step, stage: EmptyStage) {
    if let (IoKind::Empty { how, .. }, Operation::Allocate { bytes, .. }) =
        (flight.kind, step.operation)
    {
        flight.kind = IoKind::Empty { how, stage };
        step.operation = Operation::Allocate {
            bytes,
            mode: empty_mode(how, stage),
        };
    }
}

fn outcome(status: Status) -> Outcome {
    match status {
        Status::Ok => Outcome::Done,
        Status::IoError => Outcome::Failed,
        Status::Unsupported => Outcome::Unsupported,
    }
}

fn status(outcome: Outcome) -> Status {
    match outcome {
        Outcome::Done => Status::Ok,
        Outcome::Failed => Status::IoError,
        Outcome::Unsupported => Status::Unsupported,
    }
}
