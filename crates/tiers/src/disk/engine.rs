// SPDX-License-Identifier: Apache-2.0
//! The thread of a disk tier: orders in, transfers to the ring, answers out.
//!
//! # A request
//! ```text
//!   order ──► open, waits for an entry ──► in the ring ──► done: told, closed
//!                        │                      │
//!                        └─ a write is overdue: told 'slow' ─► its transfer ends some day: closed
//!                        └─ a read is overdue: the tier is slow; told when it is done,
//!                             or 'gone', once the tier is gone or nobody can believe in the disk any more
//! ```
//! A page on a disk that is merely slow is nowhere else, so its read is not given up: the answer serves the
//! fault, however late. A batch is in the pool still, so its write is told at its deadline. What was told
//! stays *open*, and counts, until the kernel is done with its memory and its sectors. A read that was told
//! and is asked for again is not begun twice: whoever asks gets the answer of the first.
//!
//! So a disk that never answers holds a bounded number of buffers, and no
//! sector is used again that a late write may still hit: the room of a batch that failed is freed when its
//! transfer is done, and a segment is given back when no write to it is open.
//!
//! Reads go before writes, and writes take only [`WRITES_AT_ONCE`] of the ring's entries: a fault does not
//! wait behind an eviction.
//!
//! # Polling
//! To wake the thread takes some microseconds, of the fifty to hundred that a read from an NVMe disk takes. A
//! VM that touches one stored page after the other asks for the next one right after the answer. So the
//! thread looks for an order for 30 µs before it sleeps, if the last one came as fast as that, and stops
//! looking once none does (as KVM does with halted vCPUs).
//!
//! A transfer that moved less than asked is continued behind what it moved.
//!
//! # A panic
//! of this thread, or of a duty that it tells, ends the tier: it counts as gone, and whoever waits, or asks
//! later, is told so. Its duties are told one by one, so that one that panics does not cost the others.

use super::io::{Geometry, Io, Tag};
use super::panics::{drop_alone, panic_text};
use super::request::{
    Bounds, FULL, LOST, OpenRead, OpenWrite, Outcome, Polling, Start, Tagged, is_one_of,
};
use super::shared::{ReadOrder, Shared, WriteOrder, Wrote};
use crate::batch::SECTOR_BYTES;
use crate::extent::{SEGMENT_BYTES, SegmentNo};
use crate::health::{Standing, Symptom};
use crate::{Place, ReadDone, Room, TierError, TierKind, VmId, WriteDone};
use pagetide_sys::file_ring::{Buffer, Completed, NotStarted, Operation, Transfer};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of the ring.
pub(super) const ENTRIES: u16 = 64;
/// Entries that writes and punches may take.
pub(super) const WRITES_AT_ONCE: usize = 4;
/// How long the thread sleeps if nothing is to be done; anything wakes it.
const IDLE: Duration = Duration::from_secs(3600);

/// See the module documentation.
pub(super) struct Engine<I> {
    io: I,
    pub(super) shared: Arc<Shared>,
    geometry: Geometry,
    pub(super) bounds: Bounds,
    reads: HashMap<u64, OpenRead>,
    writes: HashMap<u64, OpenWrite>,
    /// Reads that were told before they were done, by what they read.
    given_up: HashMap<Place, u64>,
    /// When requests that were not told yet are overdue.
    deadlines: BTreeSet<(Instant, Tagged)>,
    /// Reads that are overdue and not told.
    late: BTreeSet<u64>,
    next_key: u64,
    waiting_reads: VecDeque<Transfer<Tag>>,
    waiting_writes: VecDeque<Transfer<Tag>>,
    punches: Vec<SegmentNo>,
    /// Writes and punches in the ring.
    writes_in_ring: usize,
    /// When the probe under way began, and what it wrote.
    pub(super) probe: Option<(Instant, u8)>,
    pub(super) probes: u8,
}

impl<I: Io> Engine<I> {
    pub fn new(io: I, shared: Arc<Shared>, geometry: Geometry, bounds: Bounds) -> Self {
        Self {
            io,
            shared,
            geometry,
            bounds,
            reads: HashMap::new(),
            writes: HashMap::new(),
            given_up: HashMap::new(),
            deadlines: BTreeSet::new(),
            late: BTreeSet::new(),
            next_key: 0,
            waiting_reads: VecDeque::new(),
            waiting_writes: VecDeque::new(),
            punches: Vec::new(),
            writes_in_ring: 0,
            probe: None,
            probes: 0,
        }
    }

    /// Serves until the tier ends, the ring fails, or something panics. Whoever still waits is told that the
    /// tier is gone.
    pub fn run(mut self) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        if let Err(panic) = served {
            let why = panic_text(&*panic);
            tracing::error!(
                why,
                "the thread of the disk tier panicked; the tier has ended"
            );
            let lost = Symptom::Lost(format!("its thread panicked: {why}"));
            self.shared.note(lost, Instant::now());
        }
        let reads = self.reads.drain().filter_map(|(_, read)| read.done);
        let reads: Vec<ReadDone> = reads.collect();
        let writes = self.writes.drain().filter_map(|(_, write)| write.done);
        let writes: Vec<WriteDone> = writes.collect();
        self.shared.end_orders();
        reads.into_iter().for_each(drop_alone);
        writes.into_iter().for_each(drop_alone);
    }

    fn serve(&mut self) {
        let mut polling = Polling::default();
        while !self.shared.inbox().over {
            let limit = self.turn(Instant::now());
            let is_idle = self.reads.is_empty() && self.writes.is_empty();
            if is_idle && polling.poll(&self.shared) {
                continue;
            }
            let slept = Instant::now();
            // What was started is submitted, whether the thread sleeps or has orders already.
            let waited = match self.shared.fall_asleep() {
                true => self.io.wait(limit),
                false => self.io.wait(Duration::ZERO),
            };
            if is_idle {
                polling.slept(slept.elapsed());
            }
            if let Err(error) = waited {
                tracing::error!(%error, "the ring of the disk tier failed; the tier has ended");
                let lost = Symptom::Lost(format!("its io_uring failed: {error}"));
                self.shared.note(lost, Instant::now());
                return;
            }
        }
    }

    /// Does all that can be done now. Returns how long to wait for more.
    pub fn turn(&mut self, now: Instant) -> Duration {
        while let Some(completed) = self.io.next_done() {
            self.complete(completed, now);
        }
        self.take_orders();
        self.tell_overdue(now);
        self.tell_late_if_gone(now);
        self.start_waiting(now);
        self.probe_if_due(now);
        let next = (self.deadlines.first())
            .map(|(deadline, _)| *deadline)
            .into_iter()
            .chain(
                (self.probe.is_none())
                    .then(|| self.shared.probe_due())
                    .flatten(),
            )
            .min();
        next.map_or(IDLE, |next| next.saturating_duration_since(now))
    }

    fn take_orders(&mut self) {
        let (reads, writes, punches) = self.shared.take_orders();
        self.punches.extend(punches);
        for order in reads {
            self.open_read(order);
        }
        for order in writes {
            self.open_write(order);
        }
    }

    fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn open_read(&mut self, order: ReadOrder) {
        let deadline = order.began + self.bounds.read;
        if let Some(key) = self.given_up.remove(&order.place)
            && let Some(read) = self.reads.get_mut(&key)
        {
            // A version is used once, so what is read there is what the new order wants.
            debug_assert!(read.done.is_none());
            (read.done, read.began) = (Some(order.done), order.began);
            self.deadlines.insert((deadline, Tagged::Read(key)));
            self.shared.inbox().open_reads -= 1;
            return;
        }
        let key = self.key();
        self.deadlines.insert((deadline, Tagged::Read(key)));
        let part = 0..order.buffer.len();
        self.waiting_reads.push_back(Transfer {
            operation: Operation::Read,
            offset: order.offset,
            buffer: order.buffer,
            part,
            tag: Tag::Read(key),
        });
        self.reads.insert(
            key,
            OpenRead {
                done: Some(order.done),
                place: order.place,
                page: order.page,
                began: order.began,
            },
        );
    }

    fn open_write(&mut self, order: WriteOrder) {
        let key = self.key();
        let deadline = order.began + self.bounds.write;
        self.deadlines.insert((deadline, Tagged::Write(key)));
        let bytes = order.buffer.len();
        self.waiting_writes.push_back(Transfer {
            operation: Operation::Write,
            offset: order.room.start.byte_offset(),
            buffer: order.buffer,
            part: 0..bytes,
            tag: Tag::Write(key),
        });
        self.writes.insert(
            key,
            OpenWrite {
                done: Some(order.done),
                vm: order.vm,
                room: order.room,
                wrote: Wrote {
                    pages: order.pages,
                    bytes,
                },
                began: order.began,
            },
        );
    }

    fn start_waiting(&mut self, now: Instant) {
        while let Some(transfer) = self.waiting_reads.pop_front() {
            if let Start::NoEntry(transfer) = self.start(transfer, now) {
                self.waiting_reads.push_front(transfer);
                return;
            }
        }
        while self.writes_in_ring < WRITES_AT_ONCE {
            let Some(transfer) = self.waiting_writes.pop_front() else {
                break;
            };
            match self.start(transfer, now) {
                Start::InRing => self.writes_in_ring += 1,
                Start::Abandoned => {}
                Start::NoEntry(transfer) => {
                    self.waiting_writes.push_front(transfer);
                    return;
                }
            }
        }
        self.give_back_segments(now);
    }

    /// Gives a transfer to the ring, unless its request was told meanwhile: then that is closed.
    pub(super) fn start(&mut self, transfer: Transfer<Tag>, now: Instant) -> Start {
        match transfer.tag {
            Tag::Read(key) if self.reads.get(&key).is_none_or(|read| read.done.is_none()) => {
                self.close_read(key, Outcome::Abandoned, now);
                return Start::Abandoned;
            }
            Tag::Write(key)
                if self
                    .writes
                    .get(&key)
                    .is_none_or(|write| write.done.is_none()) =>
            {
                self.close_write(key, Outcome::Abandoned, now);
                return Start::Abandoned;
            }
            _ => {}
        }
        match self.io.start(transfer) {
            Ok(()) => Start::InRing,
            Err(NotStarted::NoEntry(transfer)) => Start::NoEntry(transfer),
            Err(NotStarted::BadPart(_)) => unreachable!("a part is made with its buffer"),
        }
    }

    /// Gives back segments to which no write is open.
    fn give_back_segments(&mut self, now: Instant) {
        let mut later = Vec::new();
        for segment in std::mem::take(&mut self.punches) {
            let first = segment.start().0;
            let part = first..first + SEGMENT_BYTES / SECTOR_BYTES as u64;
            let is_written = (self.writes.values()).any(|write| part.contains(&write.room.start.0));
            if is_written || self.writes_in_ring >= WRITES_AT_ONCE {
                later.push(segment);
            } else if !self.geometry.discard.is_punch() || segment.0 >= self.geometry.segments {
                // One beyond the end of the disk was held before the disk was known.
                self.end_transit(segment);
            } else {
                let punch = Transfer {
                    operation: Operation::Punch {
                        bytes: SEGMENT_BYTES,
                    },
                    offset: segment.start().byte_offset(),
                    buffer: Buffer::default(),
                    part: 0..0,
                    tag: Tag::Punch(segment),
                };
                match self.start(punch, now) {
                    Start::InRing => self.writes_in_ring += 1,
                    _ => later.push(segment),
                }
            }
        }
        self.punches = later;
    }

    fn end_transit(&mut self, segment: SegmentNo) {
        self.shared.sectors().end_transit(segment);
        self.shared.note_freed(SEGMENT_BYTES);
    }

    fn tell_overdue(&mut self, now: Instant) {
        while let Some(&(deadline, request)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            self.deadlines.remove(&(deadline, request));
            match request {
                Tagged::Read(key) => {
                    self.shared.note_overdue();
                    self.slow(self.bounds.read, now);
                    if let Some(read) = self.reads.get(&key) {
                        let lost = read.began + self.bounds.lost;
                        self.deadlines.insert((lost, Tagged::Late(key)));
                        self.late.insert(key);
                    }
                }
                Tagged::Late(key) => {
                    let bound_s = self.bounds.lost.as_secs_f64();
                    let lost = format!("it has not answered a read for {bound_s} s");
                    self.shared.note(Symptom::Lost(lost), now);
                    self.give_up(key, now);
                }
                Tagged::Write(key) => {
                    self.shared.note_overdue();
                    let slow = self.slow(self.bounds.write, now);
                    if let Some(write) = self.writes.get_mut(&key) {
                        let (wrote, began) = (write.wrote, write.began);
                        let done = write.done.take();
                        self.tell_write(done, Err(slow), wrote, now - began);
                    }
                }
            }
        }
    }

    /// What is late on a disk that is gone is not waited for.
    fn tell_late_if_gone(&mut self, now: Instant) {
        if self.late.is_empty() || !self.is_gone(now) {
            return;
        }
        for key in std::mem::take(&mut self.late) {
            self.give_up(key, now);
        }
    }

    fn is_gone(&self, now: Instant) -> bool {
        matches!(self.shared.health(now).standing, Standing::Gone { .. })
    }

    /// Tells a read that the tier is gone.
    fn give_up(&mut self, key: u64, now: Instant) {
        self.late.remove(&key);
        let reason = match self.shared.health(now).standing {
            Standing::Gone { reason } => reason,
            _ => "it does not answer".to_owned(),
        };
        let Some(read) = self.reads.get_mut(&key) else {
            return;
        };
        let (place, began, done) = (read.place, read.began, read.done.take());
        self.deadlines
            .remove(&(began + self.bounds.lost, Tagged::Late(key)));
        self.given_up.insert(place, key);
        let kind = TierKind::Disk;
        self.tell_read(done, Err(TierError::Gone { kind, reason }), now - began);
    }

    fn slow(&self, bound: Duration, now: Instant) -> TierError {
        let bound_ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
        self.shared.note(Symptom::Overdue(bound_ms), now);
        TierError::Slow {
            kind: TierKind::Disk,
            bound_ms,
        }
    }

    fn tell_read(
        &self,
        done: Option<ReadDone>,
        result: Result<Vec<u8>, TierError>,
        took: Duration,
    ) {
        if let Some(done) = done {
            self.shared.note_read(&result, took);
            done.tell(result);
        }
    }

    fn tell_write(
        &self,
        done: Option<WriteDone>,
        result: Result<(), TierError>,
        wrote: Wrote,
        took: Duration,
    ) {
        if let Some(done) = done {
            self.shared.note_write(&result, wrote, took);
            done.tell(result);
        }
    }

    fn complete(&mut self, completed: Completed<Tag>, now: Instant) {
        let tag = completed.transfer.tag;
        if matches!(tag, Tag::Write(_) | Tag::Punch(_)) {
            self.writes_in_ring -= 1;
        }
        match tag {
            Tag::Punch(segment) => {
                if let Err(error) = completed.result {
                    tracing::warn!(%error, "space of the disk tier could not be given back");
                }
                self.end_transit(segment);
            }
            Tag::Read(key) => match self.outcome(completed) {
                Outcome::Continued => {}
                outcome => self.close_read(key, outcome, now),
            },
            Tag::Write(key) => match self.outcome(completed) {
                Outcome::Continued => {}
                outcome => self.close_write(key, outcome, now),
            },
            Tag::ProbeWrite | Tag::ProbeRead => self.probe_went_on(completed, now),
        }
    }

    /// How a transfer ended; if it moved a part only, the rest of it waits for an entry.
    fn outcome(&mut self, completed: Completed<Tag>) -> Outcome {
        let Completed {
            mut transfer,
            result,
        } = completed;
        let moved = match result {
            Ok(moved) => moved,
            Err(error) => return Outcome::Failed(error),
        };
        if moved >= transfer.part.len() {
            return Outcome::Whole(transfer.buffer);
        }
        // Direct I/O goes on at a block only.
        let blocks = moved - moved % self.geometry.block.bytes();
        if moved == 0 {
            return Outcome::End;
        }
        if blocks == 0 {
            return Outcome::Failed(io::ErrorKind::WriteZero.into());
        }
        transfer.part.start += blocks;
        transfer.offset += blocks as u64;
        match transfer.operation {
            Operation::Read => self.waiting_reads.push_front(transfer),
            _ => self.waiting_writes.push_front(transfer),
        }
        Outcome::Continued
    }

    fn close_read(&mut self, key: u64, outcome: Outcome, now: Instant) {
        let Some(read) = self.reads.remove(&key) else {
            return;
        };
        self.deadlines
            .remove(&(read.began + self.bounds.read, Tagged::Read(key)));
        self.deadlines
            .remove(&(read.began + self.bounds.lost, Tagged::Late(key)));
        self.late.remove(&key);
        if read.done.is_none() {
            self.given_up.remove(&read.place);
        }
        self.shared.inbox().open_reads -= 1;
        let result = match outcome {
            Outcome::Whole(buffer) => match buffer.get(read.page) {
                Some(page) => Ok(page.to_vec()),
                None => Err(TierError::NotThere(TierKind::Disk)),
            },
            Outcome::End => Err(TierError::NotThere(TierKind::Disk)),
            Outcome::Failed(error) => Err(self.read_error(&error, now)),
            Outcome::Abandoned | Outcome::Continued => Err(Shared::ended()),
        };
        self.tell_read(read.done, result, now - read.began);
    }

    fn read_error(&self, error: &io::Error, now: Instant) -> TierError {
        let kind = TierKind::Disk;
        if is_one_of(error, &LOST) {
            self.shared.note(Symptom::Lost(error.to_string()), now);
        }
        match self.shared.health(now).standing {
            Standing::Gone { reason } => TierError::Gone { kind, reason },
            _ => TierError::Io {
                kind,
                operation: "a read",
                reason: error.to_string(),
            },
        }
    }

    fn close_write(&mut self, key: u64, outcome: Outcome, now: Instant) {
        let Some(write) = self.writes.remove(&key) else {
            return;
        };
        self.deadlines
            .remove(&(write.began + self.bounds.write, Tagged::Write(key)));
        self.shared.inbox().open_writes -= 1;
        let result = match outcome {
            Outcome::Whole(_) => {
                self.shared.note(Symptom::Written, now);
                Ok(())
            }
            Outcome::Failed(error) => Err(self.write_error(&error, now)),
            Outcome::End => Err(self.write_error(&io::ErrorKind::WriteZero.into(), now)),
            Outcome::Abandoned | Outcome::Continued => Err(Shared::ended()),
        };
        if result.is_err() || write.done.is_none() {
            self.free_room(write.vm, write.room);
        }
        self.tell_write(write.done, result, write.wrote, now - write.began);
    }

    fn write_error(&self, error: &io::Error, now: Instant) -> TierError {
        let kind = TierKind::Disk;
        if is_one_of(error, &FULL) {
            self.shared.note_full(now);
            return TierError::Full(kind);
        }
        let symptom = match is_one_of(error, &LOST) {
            true => Symptom::Lost(error.to_string()),
            false => Symptom::WriteFailed(error.to_string()),
        };
        self.shared.note(symptom, now);
        match self.shared.health(now).standing {
            Standing::Gone { reason } => TierError::Gone { kind, reason },
            _ => TierError::Io {
                kind,
                operation: "a write",
                reason: error.to_string(),
            },
        }
    }

    /// The room of a batch that was not written. Its VM may have ended meanwhile, and its segments with it.
    fn free_room(&mut self, vm: VmId, room: Room) {
        if let Ok(emptied) = self.shared.free(vm, room.start, room.sectors) {
            self.punches.extend(emptied);
        }
    }
}
