// SPDX-License-Identifier: Apache-2.0
//! The access log queue of one connection: records taken, checked, and translated (VPRI 5.3).
//!
//! # Credits
//! A buffer in the queue permits the device to write 128 records. It goes back to the
//! device only when its records were taken: a reader that takes a few at a time makes
//! the device drop the others, and pays only for those it takes. No thread is
//! called; the reader polls.
//!
//! # What is not trusted
//! A device may write anything. A length that is not a whole number of records ends the
//! connection, for then the queue itself is broken. Records that are invalid, or name a
//! space that was never declared to the device, are counted and dropped; times, addresses
//! and device numbers are for the taker to check.

use super::line::{Gone, Line};
use crate::frontend::{
    area::{Area, BASE, LOG_BUFFER_BYTES, LOG_BUFFERS},
    event::{event, ring_event},
    ring::{Descriptor, Ring, RingError, WRITE},
};
use crate::wire::{LogEntry, LogRecord, RECORD_BYTES};
use pagetide_addr::DomainId;
use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Length of a buffer, as in a descriptor.
#[expect(clippy::cast_possible_truncation, reason = "a constant of 4096")]
const BUFFER_LEN: u32 = LOG_BUFFER_BYTES as u32;

/// What happens to incoming records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taking {
    /// They are taken, and the device gets credits for more.
    Wanted,
    /// They date from a time when no records were wanted, and are dropped, together with their
    /// credits.
    Stale,
}

#[derive(Debug)]
struct State {
    ring: Ring,
    /// Buffers that the device does not have.
    free: Vec<u16>,
    bytes: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct LogQueue {
    area: Arc<Area>,
    line: Arc<Line>,
    kick: OwnedFd,
    call: OwnedFd,
    state: Mutex<State>,
}

impl LogQueue {
    /// The queue on `ring`, which is empty and stays so until records are wanted.
    pub(crate) fn new(ring: Ring, area: Arc<Area>, line: Arc<Line>) -> io::Result<Self> {
        (0..LOG_BUFFERS)
            .try_for_each(|buffer| {
                let descriptor = Descriptor {
                    address: BASE + Area::log_at(buffer),
                    len: BUFFER_LEN,
                    flags: WRITE,
                    next: 0,
                };
                ring.describe(buffer, descriptor)
            })
            .and_then(|()| ring.disarm())
            .map_err(io::Error::other)?;
        Ok(Self {
            area,
            line,
            kick: event()?,
            call: event()?,
            state: Mutex::new(State {
                ring,
                free: (0..LOG_BUFFERS).collect(),
                bytes: Vec::new(),
            }),
        })
    }

    /// The eventfd that wakes the device.
    pub(crate) fn kick(&self) -> &OwnedFd {
        &self.kick
    }

    /// The eventfd by which the device could wake a thread; none waits on it.
    pub(crate) fn call(&self) -> &OwnedFd {
        &self.call
    }

    /// Appends about `most` records, each with the host's number of its space from `spaces`, and
    /// gives the device credits for as many.
    pub(crate) fn take(
        &self,
        taking: Taking,
        most: usize,
        spaces: &HashMap<DomainId, DomainId>,
        into: &mut Vec<LogRecord>,
    ) -> Result<(), Gone> {
        self.line.check()?;
        let mut state = self.lock();
        let before = into.len();
        while into.len() - before < most {
            let Some(used) = state.ring.take().map_err(|error| self.broken(&error))? else {
                break;
            };
            state.free.push(used.head);
            let len = usize::try_from(used.len).unwrap_or(usize::MAX);
            if !len.is_multiple_of(RECORD_BYTES) {
                let why = format!("it wrote {len} bytes of access records of {RECORD_BYTES}");
                self.line.break_off(&why);
                return Err(Gone);
            }
            if taking == Taking::Stale {
                continue;
            }
            // What the device writes from here on is not read.
            state.bytes.resize(len, 0);
            let bytes = &mut state.bytes;
            let copied = (self.area.memory()).copy_from(Area::log_at(used.head), bytes);
            debug_assert!(copied.is_ok(), "records lie in the area");
            for entry in bytes.chunks_exact(RECORD_BYTES) {
                self.take_entry(entry, spaces, into);
            }
        }
        match taking {
            Taking::Wanted => self.give_credits(&mut state),
            Taking::Stale => Ok(()),
        }
    }

    fn take_entry(
        &self,
        bytes: &[u8],
        spaces: &HashMap<DomainId, DomainId>,
        into: &mut Vec<LogRecord>,
    ) {
        let counts = self.line.counts();
        match LogEntry::decode(bytes) {
            Ok(LogEntry::Access(record)) => match spaces.get(&record.space) {
                Some(ours) => into.push(LogRecord {
                    space: *ours,
                    ..record
                }),
                // Memory that is no space of ours may be logged, too.
                None => counts.foreign_records.add(),
            },
            Ok(LogEntry::Lost { records, .. }) => counts.lost_records.add_many(records),
            Err(error) => {
                counts.malformed_records.add();
                counts.complain(&format_args!(
                    "a record of the access log is malformed: {error}"
                ));
            }
        }
    }

    fn give_credits(&self, state: &mut State) -> Result<(), Gone> {
        if state.free.is_empty() {
            return Ok(());
        }
        while let Some(buffer) = state.free.pop() {
            let published = state.ring.publish(buffer, BUFFER_LEN);
            published.map_err(|error| self.broken(&error))?;
        }
        if state.ring.show().map_err(|error| self.broken(&error))? {
            ring_event(&self.kick);
        }
        Ok(())
    }

    fn broken(&self, error: &RingError) -> Gone {
        let why = format!("the access log queue: {error}");
        self.line.break_off(&why);
        Gone
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::encode_record;
    use crate::{driver::counts::Counts, frontend::ring::Notify, wire::Service};
    use pagetide_addr::{Access, DeviceId};
    use std::os::unix::net::UnixStream;

    const OURS: DomainId = DomainId(70);

    /// A queue whose device is played by the test.
    struct Rig {
        queue: LogQueue,
        area: Arc<Area>,
        counts: Arc<Counts>,
        used: u16,
        _peer: UnixStream,
    }

    impl Rig {
        fn new() -> Self {
            let (stream, peer) = UnixStream::pair().unwrap();
            let counts = Arc::new(Counts::default());
            let line = Arc::new(Line::new(stream, Arc::clone(&counts)));
            let area = Arc::new(Area::new().unwrap());
            let ring = Ring::new(Arc::clone(area.memory()), Area::log_ring(), Notify::Flags);
            Self {
                queue: LogQueue::new(ring, Arc::clone(&area), line).unwrap(),
                area,
                counts,
                used: 0,
                _peer: peer,
            }
        }

        fn take(&self, most: usize) -> Result<Vec<LogRecord>, Gone> {
            let mut records = Vec::new();
            let spaces = HashMap::from([(DomainId(7), OURS)]);
            self.queue
                .take(Taking::Wanted, most, &spaces, &mut records)?;
            Ok(records)
        }

        /// Buffers that the device was shown.
        fn credits(&self) -> u16 {
            let mut index = [0; 2];
            let at = Area::log_ring().available + 2;
            self.area.memory().copy_from(at, &mut index).unwrap();
            u16::from_le_bytes(index) - self.used
        }

        fn put(&self, at: u64, bytes: &[u8]) {
            self.area.memory().copy_to(at, bytes).unwrap();
        }

        /// The device writes `entries` into the buffer that it was given first.
        fn write(&mut self, entries: &[[u8; RECORD_BYTES]], len: u32) {
            let place = Area::log_ring();
            let slot = u64::from(self.used % place.size);
            let mut head = [0; 2];
            let memory = self.area.memory();
            memory
                .copy_from(place.available + 4 + 2 * slot, &mut head)
                .unwrap();
            let head = u16::from_le_bytes(head);
            self.put(Area::log_at(head), &entries.concat());
            let element = [u32::from(head).to_le_bytes(), len.to_le_bytes()].concat();
            self.put(place.used + 4 + 8 * slot, &element);
            self.used = self.used.wrapping_add(1);
            self.put(place.used + 2, &self.used.to_le_bytes());
        }
    }

    fn record(space: u32, address: u64) -> LogRecord {
        LogRecord {
            time_ns: 5,
            device: DeviceId(1),
            space: DomainId(space),
            address,
            len_bytes: 4096,
            access: Access::Write,
            service: Service::Network,
        }
    }

    #[test]
    fn device_gets_credits_only_for_records_that_were_taken() {
        let mut rig = Rig::new();
        assert_eq!(rig.credits(), 0, "nobody wants records yet");
        assert_eq!(rig.take(1), Ok(vec![]));
        assert_eq!(rig.credits(), LOG_BUFFERS);
        for at in 0..3 {
            rig.write(&[encode_record(&record(7, at))], 32);
        }
        assert_eq!(rig.take(2).unwrap().len(), 2);
        assert_eq!(rig.credits(), LOG_BUFFERS - 1, "one waits to be taken");
        let last = rig.take(2).unwrap();
        assert_eq!((last[0].address, last[0].space), (2, OURS));
        assert_eq!(rig.credits(), LOG_BUFFERS);
    }

    #[test]
    fn records_that_make_no_sense_are_counted_and_the_others_taken() {
        let mut rig = Rig::new();
        assert_eq!(rig.take(1), Ok(vec![]));
        let mut wrong = encode_record(&record(7, 1));
        wrong[28] = 9;
        let entries = [
            wrong,
            encode_record(&record(8, 2)),
            LogEntry::Lost {
                time_ns: 0,
                records: 12,
            }
            .encode(),
            encode_record(&record(7, 3)),
        ];
        rig.write(&entries, 128);
        assert_eq!(rig.take(100).unwrap().len(), 1);
        let counts = rig.counts.look();
        assert_eq!(counts.malformed_records, 1);
        assert_eq!(counts.foreign_records, 1);
        assert_eq!(counts.lost_records, 12);
        assert_eq!(counts.broken_off, 0);
    }

    #[test]
    fn length_that_is_no_whole_number_of_records_ends_the_connection() {
        for len in [1, 33, 4095] {
            let mut rig = Rig::new();
            assert_eq!(rig.take(1), Ok(vec![]));
            rig.write(&[encode_record(&record(7, 1))], len);
            assert_eq!(rig.take(1), Err(Gone));
            assert_eq!(rig.counts.look().broken_off, 1);
        }
    }

    #[test]
    fn records_of_a_time_when_nobody_wanted_them_are_dropped() {
        let mut rig = Rig::new();
        assert_eq!(rig.take(1), Ok(vec![]));
        rig.write(&[encode_record(&record(7, 1))], 32);
        let mut records = Vec::new();
        rig.queue
            .take(Taking::Stale, usize::MAX, &HashMap::new(), &mut records)
            .unwrap();
        assert_eq!(records, []);
        rig.write(&[encode_record(&record(7, 2))], 32);
        assert_eq!(rig.take(9).unwrap().len(), 1);
    }
}
