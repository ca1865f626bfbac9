// SPDX-License-Identifier: Apache-2.0
//! [`AccessLog`]: carries which memory DMA touches from the engines to a reader (VPRI 5.3).
//!
//! ```text
//!   engine 0 ── pen ──► ring ─┐
//!   engine 1 ── pen ──► ring ─┼─► taker: the function's thread, or the host's of this process
//!   engine 2 ── pen ──► ring ─┘
//! ```
//! # What it costs
//! An engine whose log is off pays one relaxed load a transfer. One whose log is on
//! writes a record, four words, into a ring of its own: no lock, no wait, no cache line
//! that another engine writes. It reads the taker's position only when the ring seems
//! full. A record wakes no thread; takers poll.
//!
//! # Credits
//! The free slots of a ring are the engine's credits. A taker returns them by taking
//! records, as many a second as it likes, and so decides how much CPU time the log may
//! cost it. An engine without a credit drops the record and counts it; it never waits.
//!
//! # Order
//! Records of one engine stay in order. Those of several are taken engine by engine, so
//! they are only roughly in order of time.
//!
//! The pen writes a slot, then the tail (release). The taker reads the tail (acquire) and
//! the slot, then gives the slot back through the head (release), which the pen reads
//! (acquire) before it writes the slot again. Slots are atomic words, so even a mistake
//! here could only tear a record.

use crate::record::{LogRecord, WORDS};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Records of one engine that may wait: 256 KiB of them.
pub const RECORDS_MAX: usize = 8192;
const MASK: u64 = RECORDS_MAX as u64 - 1;
const _: () = assert!(RECORDS_MAX.is_power_of_two());

/// Whether records of accesses are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logging {
    /// From now on.
    On,
    /// No longer; waiting records are dropped uncounted, since no taker wants them.
    Off,
}

/// Where a host gets records of accesses from: engines of its own process, or a VPRI function.
pub trait AccessSource: Send + Sync {
    /// Sets whether records are wanted. At first they are not.
    fn want(&self, wanted: Logging);

    /// Appends new records, about `most` at most; the rest is taken next time. One taker at a time.
    fn take(&self, most: usize, into: &mut Vec<LogRecord>);

    /// Records lost since the start because they were not taken in time.
    fn lost(&self) -> u64;

    /// Changes whenever the source restarts or ends: devices of earlier records no longer exist then,
    /// and their numbers may be reused.
    fn epoch(&self) -> u64 {
        0
    }
}

/// Whether a record found room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logged {
    /// It was kept.
    Kept,
    /// It was dropped and counted.
    Lost,
}

/// A word on cache lines of its own: two, since they are fetched in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Apart(AtomicU64);

/// The ring of one engine.
#[derive(Debug)]
struct Ring {
    slots: Box<[[AtomicU64; WORDS]]>,
    /// Next slot that the engine writes; only the pen stores it.
    tail: Apart,
    /// Next slot that is taken; only the taker stores it.
    head: Apart,
    lost: Apart,
    has_pen: AtomicBool,
}

impl Default for Ring {
    fn default() -> Self {
        Self {
            slots: (0..RECORDS_MAX).map(|_| Default::default()).collect(),
            tail: Apart::default(),
            head: Apart::default(),
            lost: Apart::default(),
            has_pen: AtomicBool::new(false),
        }
    }
}

impl Ring {
    fn slot(&self, position: u64) -> Option<&[AtomicU64; WORDS]> {
        self.slots
            .get(usize::try_from(position & MASK).unwrap_or(0))
    }

    fn take(&self, most: usize, visit: &mut dyn FnMut(LogRecord)) -> usize {
        let head = self.head.0.load(Ordering::Relaxed);
        // Pairs with the store of the pen: slots up to here are written.
        let waiting = self.tail.0.load(Ordering::Acquire).wrapping_sub(head);
        let count = waiting.min(most as u64);
        for position in head..head.wrapping_add(count) {
            let words = self.slot(position).map(load).unwrap_or_default();
            visit(LogRecord::from_words(words));
        }
        // Pairs with the load of the pen: the slots may be written again.
        let next = head.wrapping_add(count);
        self.head.0.store(next, Ordering::Release);
        usize::try_from(count).unwrap_or(usize::MAX)
    }
}

fn load(slot: &[AtomicU64; WORDS]) -> [u64; WORDS] {
    std::array::from_fn(|at| slot[at].load(Ordering::Relaxed))
}

/// See the module.
#[derive(Debug)]
pub struct AccessLog {
    is_on: AtomicBool,
    rings: Box<[Ring]>,
    /// Dropped by a taker that had nowhere to put them.
    dropped: AtomicU64,
    /// The engine whose records are taken first next time; held by the taker.
    turn: Mutex<usize>,
}

impl AccessLog {
    /// A log for `engine_count` engines, which is off.
    #[must_use]
    pub fn new(engine_count: usize) -> Self {
        Self {
            is_on: AtomicBool::new(false),
            rings: (0..engine_count).map(|_| Ring::default()).collect(),
            dropped: AtomicU64::new(0),
            turn: Mutex::new(0),
        }
    }

    /// The pen of engine number `engine`; `None` if there is no such engine, or if its pen has been
    /// taken.
    #[must_use]
    pub fn pen(self: &Arc<Self>, engine: usize) -> Option<AccessPen> {
        let ring = self.rings.get(engine)?;
        // Acquire: an earlier pen's writes come before those of this one.
        if ring.has_pen.swap(true, Ordering::Acquire) {
            return None;
        }
        Some(AccessPen {
            tail: ring.tail.0.load(Ordering::Relaxed),
            head_seen: ring.head.0.load(Ordering::Acquire),
            log: Arc::clone(self),
            engine,
        })
    }

    /// True while records are wanted: check before making one.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// True if a record waits.
    #[must_use]
    pub fn has_any(&self) -> bool {
        let has = |ring: &Ring| {
            ring.tail.0.load(Ordering::Acquire) != ring.head.0.load(Ordering::Relaxed)
        };
        self.rings.iter().any(has)
    }

    /// Records lost since the start.
    #[must_use]
    pub fn lost(&self) -> u64 {
        let of_rings = self
            .rings
            .iter()
            .map(|ring| ring.lost.0.load(Ordering::Relaxed));
        of_rings.sum::<u64>() + self.dropped.load(Ordering::Relaxed)
    }

    /// Calls `visit` for at most `most` records, and returns their credits. Each engine gets an equal
    /// share, so a busy one does not crowd out the others; unused shares go to engines that have
    /// more.
    pub fn visit(&self, most: usize, visit: &mut dyn FnMut(LogRecord)) {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let engines = self.rings.len();
        if engines == 0 {
            return;
        }
        let (mut left, share) = (most, most.div_ceil(engines));
        for at in 0..engines {
            let ring = &self.rings[(*turn + at) % engines];
            left -= ring.take(share.min(left), visit);
        }
        for at in 0..engines {
            let ring = &self.rings[(*turn + at) % engines];
            left -= ring.take(left, visit);
        }
        *turn = (*turn + 1) % engines;
    }

    /// Records are wanted from now on. Records from an engine that had not yet seen that the log was
    /// off are dropped.
    pub fn turn_on(&self) {
        if !self.is_on() {
            self.visit(usize::MAX / 2, &mut |_| ());
            self.is_on.store(true, Ordering::Relaxed);
        }
    }

    /// Records are no longer wanted. Waiting ones are dropped, uncounted.
    pub fn turn_off(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        self.visit(usize::MAX / 2, &mut |_| ());
    }

    /// Drops waiting records for which there is no room: they count as lost, as if the engines had
    /// had no credit.
    pub fn drop_waiting(&self) {
        let mut dropped = 0;
        self.visit(usize::MAX / 2, &mut |_| dropped += 1);
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
    }
}

impl AccessSource for AccessLog {
    fn want(&self, wanted: Logging) {
        match wanted {
            Logging::On => self.turn_on(),
            Logging::Off => self.turn_off(),
        }
    }

    fn take(&self, most: usize, into: &mut Vec<LogRecord>) {
        self.visit(most, &mut |record| into.push(record));
    }

    fn lost(&self) -> u64 {
        Self::lost(self)
    }
}

/// An engine's end of the log.
#[derive(Debug)]
pub struct AccessPen {
    log: Arc<AccessLog>,
    engine: usize,
    tail: u64,
    /// The taker's position when it was last read.
    head_seen: u64,
}

impl AccessPen {
    /// True while records are wanted.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.log.is_on()
    }

    /// Writes a record, if there is a credit for it.
    #[inline]
    pub fn record(&mut self, record: &LogRecord) -> Logged {
        let Some(ring) = self.log.rings.get(self.engine) else {
            return Logged::Lost;
        };
        if self.tail.wrapping_sub(self.head_seen) >= RECORDS_MAX as u64 {
            self.head_seen = ring.head.0.load(Ordering::Acquire);
        }
        let slot = ring.slot(self.tail);
        let (Some(slot), true) = (
            slot,
            self.tail.wrapping_sub(self.head_seen) < RECORDS_MAX as u64,
        ) else {
            let lost = ring.lost.0.load(Ordering::Relaxed).wrapping_add(1);
            ring.lost.0.store(lost, Ordering::Relaxed);
            return Logged::Lost;
        };
        for (word, value) in slot.iter().zip(record.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        // Pairs with the load of the taker.
        ring.tail.0.store(self.tail, Ordering::Release);
        Logged::Kept
    }
}

impl Drop for AccessPen {
    fn drop(&mut self) {
        if let Some(ring) = self.log.rings.get(self.engine) {
            ring.has_pen.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Service;
    use pagetide_addr::{Access, DeviceId, DomainId};

    fn record(address: u64) -> LogRecord {
        LogRecord {
            time_ns: address.wrapping_mul(3),
            device: DeviceId(1),
            space: DomainId(0),
            address,
            len_bytes: 512,
            access: Access::Read,
            service: Service::Block,
        }
    }

    fn taken(log: &AccessLog, most: usize) -> Vec<u64> {
        let mut records = Vec::new();
        log.take(most, &mut records);
        assert!(records.iter().all(|r| *r == record(r.address)), "torn");
        records.iter().map(|r| r.address).collect()
    }

    #[test]
    fn engine_without_credits_loses_the_newest_and_counts_them() {
        let log = Arc::new(AccessLog::new(1));
        let mut pen = log.pen(0).unwrap();
        log.want(Logging::On);
        let all = 0..RECORDS_MAX as u64 + 3;
        let kept = all.map(|at| pen.record(&record(at)));
        assert_eq!(kept.filter(|it| *it == Logged::Lost).count(), 3);
        assert_eq!(taken(&log, 2), [0, 1]);
        let more: Vec<_> = (0..3).map(|at| pen.record(&record(at))).collect();
        assert_eq!(more, [Logged::Kept, Logged::Kept, Logged::Lost]);
        assert_eq!(log.lost(), 4);
        log.drop_waiting();
        assert_eq!(log.lost(), 4 + RECORDS_MAX as u64);
        assert!(!log.has_any());
    }

    #[test]
    fn records_written_while_the_log_was_off_are_never_taken() {
        let log = Arc::new(AccessLog::new(2));
        let mut pen = log.pen(1).unwrap();
        assert!(!pen.is_on());
        // The pen had not yet seen that the log was off.
        assert_eq!(pen.record(&record(1)), Logged::Kept);
        log.want(Logging::On);
        assert_eq!(pen.record(&record(2)), Logged::Kept);
        assert_eq!(taken(&log, 9), [2]);
        assert_eq!(pen.record(&record(3)), Logged::Kept);
        log.want(Logging::Off);
        assert!(!log.has_any());
        assert_eq!(log.lost(), 0);
    }

    #[test]
    fn each_engine_has_one_pen_at_a_time() {
        let log = Arc::new(AccessLog::new(1));
        let mut pen = log.pen(0).unwrap();
        assert!(log.pen(0).is_none());
        assert!(log.pen(1).is_none());
        assert_eq!(pen.record(&record(7)), Logged::Kept);
        drop(pen);
        let mut next = log.pen(0).unwrap();
        assert_eq!(next.record(&record(8)), Logged::Kept);
        assert_eq!(taken(&log, 9), [7, 8]);
    }

    #[test]
    fn busy_engine_does_not_crowd_the_others_out() {
        let log = Arc::new(AccessLog::new(3));
        let mut pens: Vec<_> = (0..3).map(|engine| log.pen(engine).unwrap()).collect();
        for at in 0..100 {
            assert_eq!(pens[0].record(&record(at)), Logged::Kept);
        }
        assert_eq!(pens[2].record(&record(1000)), Logged::Kept);
        let first = taken(&log, 6);
        assert!(first.contains(&1000), "{first:?}");
        assert_eq!(first.len(), 6, "what the others did not use was lost");
        let mut rest = Vec::new();
        while log.has_any() {
            rest.extend(taken(&log, 6));
        }
        assert_eq!(first.len() + rest.len(), 101);
    }

    #[test]
    fn records_pass_whole_and_in_order_while_both_sides_are_at_work() {
        let log = Arc::new(AccessLog::new(1));
        let mut pen = log.pen(0).unwrap();
        let count = 40 * RECORDS_MAX as u64;
        let engine = std::thread::spawn(move || {
            let written = (0..count).filter(|at| pen.record(&record(*at)) == Logged::Kept);
            written.count()
        });
        let mut seen = Vec::new();
        while !engine.is_finished() || log.has_any() {
            seen.extend(taken(&log, 1000));
        }
        assert_eq!(seen.len(), engine.join().unwrap());
        assert_eq!(seen.len() as u64 + log.lost(), count);
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
