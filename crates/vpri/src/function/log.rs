// SPDX-License-Identifier: Apache-2.0
//! [`AccessLog`]: DMA accesses on their way to the access log queue (VPRI 5.3).
//!
//! Engines record, the function's thread carries away. A driver that wants no log costs
//! an engine one relaxed load; one that takes it too slowly loses records, which are
//! counted: no engine ever waits.

use crate::{queue::Doorbell, wire::LogRecord};
use crossbeam_queue::ArrayQueue;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Records that may wait: 256 KiB.
const RECORDS_MAX: usize = 8192;
/// The function's thread is woken when so many wait; fewer wait for its next look.
const RECORDS_WAKE: usize = RECORDS_MAX / 4;

/// See the module.
#[derive(Debug)]
pub struct AccessLog {
    is_on: AtomicBool,
    waiting: ArrayQueue<LogRecord>,
    dropped: AtomicU64,
    bell: Arc<Doorbell>,
}

impl AccessLog {
    /// A log that is off; `bell` wakes who carries records away.
    #[must_use]
    pub fn new(bell: Arc<Doorbell>) -> Self {
        Self {
            is_on: AtomicBool::new(false),
            waiting: ArrayQueue::new(RECORDS_MAX),
            dropped: AtomicU64::new(0),
            bell,
        }
    }

    /// True while a driver wants records: look before making one.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Records what `record` makes, if anybody wants it.
    #[inline]
    pub fn record(&self, record: impl FnOnce() -> LogRecord) {
        if self.is_on() {
            self.push(record());
        }
    }

    /// Records lost since the start.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn push(&self, record: LogRecord) {
        if self.waiting.push(record).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        } else if self.waiting.len() == RECORDS_WAKE {
            self.bell.ring();
        }
    }

    /// Records are wanted from now on.
    pub(super) fn turn_on(&self) {
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Records are wanted no more. What waits is dropped, uncounted: nobody asked for it.
    pub(super) fn turn_off(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        while self.waiting.pop().is_some() {}
    }

    pub(super) fn next(&self) -> Option<LogRecord> {
        self.waiting.pop()
    }

    pub(super) fn has_any(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Nobody takes what waits: as if the device had had no room for it at the time.
    pub(super) fn drop_waiting(&self) {
        let dropped = std::iter::from_fn(|| self.waiting.pop()).count() as u64;
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Service;
    use pagetide_addr::{Access, DeviceId, DomainId};

    fn record(address: u64) -> LogRecord {
        LogRecord {
            time_ns: 0,
            device: DeviceId(1),
            space: DomainId(0),
            address,
            len_bytes: 512,
            access: Access::Read,
            service: Service::Block,
        }
    }

    #[test]
    fn log_that_is_off_makes_no_record_and_one_that_overflows_counts_what_it_lost() {
        let log = AccessLog::new(Arc::new(Doorbell::new().unwrap()));
        log.record(|| unreachable!("nobody wants it"));
        log.turn_on();
        for address in 0..RECORDS_MAX as u64 + 3 {
            log.record(|| record(address));
        }
        assert_eq!(log.dropped(), 3);
        assert_eq!(log.next(), Some(record(0)), "the oldest stay");
        log.drop_waiting();
        assert_eq!(log.dropped(), 3 + RECORDS_MAX as u64 - 1);
        log.record(|| record(1));
        log.turn_off();
        assert!(!log.has_any());
    }
}
