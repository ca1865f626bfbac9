// SPDX-License-Identifier: Apache-2.0
//! What the callers of a disk tier and its thread share: sectors, orders that wait, the record.
//!
//! Three locks, none of which is held while another is taken or a duty is told; but for those of the sectors and of
//! the record, which [`super::space`] takes under its own.

use super::identity::Identity;
use super::io::Geometry;
use super::panics::drop_alone;
use crate::batch::SECTOR_BYTES;
use crate::extent::{SectorError, Sectors, SegmentNo};
use crate::figures::Latencies;
use crate::health::{Health, Pulse, Standing, Symptom};
use crate::{Place, ReadDone, Room, SectorNo, TierError, TierFigures, TierKind, VmId, WriteDone};
use pagetide_sys::file_ring::{Buffer, RingWaker};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Reads that may be open at a time: each is a fault that waits, or readahead.
pub(super) const READS_MAX: usize = 1024;
/// Batches that may be open at a time: each is up to 2 MiB of memory.
pub(super) const WRITES_MAX: usize = 16;
/// A disk that was full is tried again when so much was freed ...
const FREED_ENOUGH_BYTES: u64 = 1 << 20;
/// ... or after this time, as others may have freed space of the same file system.
const FULL_TIME: Duration = Duration::from_secs(10);

/// A page to be read.
#[derive(Debug)]
pub(super) struct ReadOrder {
    pub place: Place,
    /// Offset of the first whole block.
    pub offset: u64,
    /// Memory for whole blocks.
    pub buffer: Buffer,
    /// The page within it.
    pub page: Range<usize>,
    pub done: ReadDone,
    pub began: Instant,
}

/// A batch to be written.
#[derive(Debug)]
pub(super) struct WriteOrder {
    /// Its pages, in whole blocks.
    pub buffer: Buffer,
    pub vm: VmId,
    pub room: Room,
    pub pages: usize,
    pub done: WriteDone,
    pub began: Instant,
}

/// Orders that the thread has not taken yet, and how many are open.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub reads: VecDeque<ReadOrder>,
    pub writes: VecDeque<WriteOrder>,
    /// Segments in transit, bounded by those of the disk.
    pub punches: VecDeque<SegmentNo>,
    /// Taken or not, and not done.
    pub open_reads: usize,
    pub open_writes: usize,
    /// The tier ends, or has ended.
    pub over: bool,
    /// The thread sleeps, or is about to: whoever adds an order must wake it.
    pub asleep: bool,
}

impl Inbox {
    fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.punches.is_empty()
    }
}

/// When a disk was full, and what was freed since.
#[derive(Debug, Clone, Copy)]
struct Full {
    since: Instant,
    freed_bytes: u64,
}

/// Health and figures.
#[derive(Debug)]
struct Record {
    pulse: Pulse,
    /// A segment is being allocated for longer than a write may take.
    space_is_late: bool,
    full: Option<Full>,
    figures: TierFigures,
    reads: Latencies,
    writes: Latencies,
}

/// See the module documentation.
pub(super) struct Shared {
    /// Known once the disk is open.
    pub geometry: OnceLock<Geometry>,
    /// Which file or device it is, once it is open.
    pub identity: OnceLock<Identity>,
    /// Wakes the thread, once there is a ring.
    pub waker: OnceLock<RingWaker>,
    sectors: Mutex<Sectors>,
    inbox: Mutex<Inbox>,
    /// Notified of the end.
    ended: Condvar,
    /// Set when there are orders: what the thread looks at while it polls.
    has_orders: AtomicBool,
    record: Mutex<Record>,
}

impl Shared {
    pub fn new(sectors: Sectors, limit_bytes: u64, now: Instant) -> Self {
        Self {
            geometry: OnceLock::new(),
            identity: OnceLock::new(),
            waker: OnceLock::new(),
            sectors: Mutex::new(sectors),
            inbox: Mutex::default(),
            ended: Condvar::new(),
            has_orders: AtomicBool::new(false),
            record: Mutex::new(Record {
                pulse: Pulse::new(now),
                space_is_late: false,
                full: None,
                figures: TierFigures {
                    limit_bytes,
                    ..TierFigures::default()
                },
                reads: Latencies::default(),
                writes: Latencies::default(),
            }),
        }
    }

    pub fn sectors(&self) -> MutexGuard<'_, Sectors> {
        self.sectors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the adding of an order, and wakes the thread if it sleeps.
    pub fn added(&self, mut inbox: MutexGuard<'_, Inbox>) {
        self.has_orders.store(true, Ordering::Release);
        let was_asleep = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        if let Some(waker) = self.waker.get().filter(|_| was_asleep) {
            waker.wake();
        }
    }

    /// Nothing is done any more: whoever has ordered something is told.
    pub fn end_orders(&self) {
        let mut inbox = self.inbox();
        inbox.over = true;
        let reads = std::mem::take(&mut inbox.reads);
        let writes = std::mem::take(&mut inbox.writes);
        drop(inbox);
        // Duties that are dropped tell their owners.
        reads.into_iter().for_each(|order| drop_alone(order.done));
        writes.into_iter().for_each(|order| drop_alone(order.done));
    }

    /// Segments that nobody has go back to the file system.
    pub fn give_back_segments(&self, segments: Vec<SegmentNo>) {
        if !segments.is_empty() {
            let mut inbox = self.inbox();
            inbox.punches.extend(segments);
            self.added(inbox);
        }
    }

    /// Takes all orders. The thread is awake.
    pub fn take_orders(
        &self,
    ) -> (
        VecDeque<ReadOrder>,
        VecDeque<WriteOrder>,
        VecDeque<SegmentNo>,
    ) {
        let mut inbox = self.inbox();
        inbox.asleep = false;
        self.has_orders.store(false, Ordering::Relaxed);
        (
            std::mem::take(&mut inbox.reads),
            std::mem::take(&mut inbox.writes),
            std::mem::take(&mut inbox.punches),
        )
    }

    /// Waits for an order without sleeping. False if none came in this time.
    #[must_use]
    pub fn poll_orders(&self, limit: Duration) -> bool {
        let began = Instant::now();
        // Pairs with the store in `added`; the orders themselves are under the lock.
        while !self.has_orders.load(Ordering::Acquire) {
            if began.elapsed() >= limit {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Says that the thread sleeps from now on. False if there is something to do instead.
    #[must_use]
    pub fn fall_asleep(&self) -> bool {
        let mut inbox = self.inbox();
        inbox.asleep = inbox.is_empty() && !inbox.over;
        inbox.asleep
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn health(&self, now: Instant) -> Health {
        let record = self.record();
        let health = record.pulse.health();
        match record.full {
            Some(full) if health.standing == Standing::Working && full.lasts(now) => Health {
                standing: Standing::Full,
                since: full.since,
            },
            _ => health.clone(),
        }
    }

    pub fn note(&self, symptom: Symptom, now: Instant) {
        let mut record = self.record();
        let symptom = match symptom {
            // The next batch would wait all the same.
            Symptom::ProbeDone if record.space_is_late => {
                Symptom::ProbeFailed("space for it is still being allocated".to_owned())
            }
            symptom => symptom,
        };
        let changed = record.pulse.note(symptom, now).cloned();
        drop(record);
        if let Some(standing) = changed {
            tracing::warn!(?standing, "the disk tier stands otherwise");
        }
    }

    /// A segment is being allocated for longer than a write may take: from now on the tier is slow, until
    /// [`Self::space_is_not_late`] and probes after it.
    pub fn space_is_late(&self, bound_ms: u64, now: Instant) {
        self.record().space_is_late = true;
        self.note(Symptom::Overdue(bound_ms), now);
    }

    /// It was allocated, or refused.
    pub fn space_is_not_late(&self) {
        self.record().space_is_late = false;
    }

    pub fn probe_due(&self) -> Option<Instant> {
        self.record().pulse.probe_due()
    }

    /// There is no disk yet, for this reason.
    pub fn begin_gone(&self, reason: String, now: Instant) {
        self.record().pulse = Pulse::gone(reason, now);
    }

    /// The disk is there, and its thread has a ring.
    pub fn opened(&self, geometry: Geometry, waker: RingWaker, limit_bytes: u64) {
        self.record().figures.limit_bytes = limit_bytes;
        self.geometry.get_or_init(|| geometry);
        self.waker.get_or_init(|| waker);
    }

    /// The tier ends.
    pub fn end(&self) {
        let mut inbox = self.inbox();
        inbox.over = true;
        self.added(inbox);
        self.ended.notify_all();
    }

    /// Waits for the end of the tier; false if it has not come in this time.
    #[must_use]
    pub fn is_over_within(&self, limit: Duration) -> bool {
        let goes_on = |inbox: &mut Inbox| !inbox.over;
        let waited = (self.ended).wait_timeout_while(self.inbox(), limit, goes_on);
        let (inbox, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inbox.over
    }

    pub fn note_full(&self, now: Instant) {
        let mut record = self.record();
        if record.full.is_none_or(|full| !full.lasts(now)) {
            record.full = Some(Full {
                since: now,
                freed_bytes: 0,
            });
        }
    }

    /// Frees sectors of a page or a batch. Returns a segment that nobody needs any more.
    pub fn free(
        &self,
        vm: VmId,
        start: SectorNo,
        sectors: u16,
    ) -> Result<Option<SegmentNo>, SectorError> {
        let emptied = self.sectors().free(vm, start, sectors)?;
        self.note_freed(u64::from(sectors) * SECTOR_BYTES as u64);
        Ok(emptied)
    }

    pub fn note_freed(&self, bytes: u64) {
        if let Some(full) = &mut self.record().full {
            full.freed_bytes += bytes;
        }
    }

    pub fn note_refused(&self) {
        self.record().figures.refused += 1;
    }

    /// A read was answered, with so many bytes of a page or with an error.
    pub fn note_read(&self, result: &Result<Vec<u8>, TierError>, took: Duration) {
        let mut record = self.record();
        match result {
            Ok(page) => {
                record.figures.pages_read += 1;
                record.figures.read_bytes += page.len() as u64;
                record.reads.record(took);
            }
            Err(_) => record.figures.read_errors += 1,
        }
    }

    /// The write of a batch was answered.
    pub fn note_write(&self, result: &Result<(), TierError>, wrote: Wrote, took: Duration) {
        let mut record = self.record();
        match result {
            Ok(()) => {
                record.figures.batches_written += 1;
                record.figures.pages_written += wrote.pages as u64;
                record.figures.written_bytes += wrote.bytes as u64;
                record.writes.record(took);
            }
            Err(_) => record.figures.write_errors += 1,
        }
    }

    pub fn note_overdue(&self) {
        self.record().figures.overdue += 1;
    }

    pub fn figures(&self) -> TierFigures {
        let stored_bytes = self.sectors().used_bytes();
        let record = self.record();
        TierFigures {
            stored_bytes,
            read_latency: record.reads.latency(),
            write_latency: record.writes.latency(),
            ..record.figures
        }
    }

    /// Why no request is taken any more.
    pub fn ended() -> TierError {
        TierError::Gone {
            kind: TierKind::Disk,
            reason: "it has ended".to_owned(),
        }
    }
}

/// What a batch brought to the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wrote {
    pub pages: usize,
    pub bytes: usize,
}

impl Full {
    fn lasts(&self, now: Instant) -> bool {
        self.freed_bytes < FREED_ENOUGH_BYTES
            && now.saturating_duration_since(self.since) < FULL_TIME
    }
}
