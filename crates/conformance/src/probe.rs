// SPDX-License-Identifier: Apache-2.0
//! [`Probe`]: a driver's connection that can also send what no driver should.
//!
//! It has one thread and does one thing at a time. A check decides the layout of
//! its messages: any number of descriptors, with any content.

use super::{Checked, Ended, ensure};
use pagetide_addr::{Access, PageRequest, RequestKind};
use pagetide_sys::clock::now_ns;
use pagetide_vpri_function::{
    frontend::{
        area::{Area, BASE, EVENT_DESCRIPTORS, FAULT_BUFFERS, MESSAGE_ROOM},
        connect::{ConnectError, agree, bounded, notify_of, start_queue},
        event::{event, ring_event},
        ring::{Descriptor, NEXT, Ring, RingError, Used, WRITE},
    },
    wire::{
        self, Code, Config, EVENT_QUEUE, Event, FAULT_QUEUE, LOG_QUEUE, LogEntry, RECORD_BYTES,
        REQUEST_BYTES, Reply, feature,
    },
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};
use vhost::{VhostBackend, vhost_user::Frontend};

/// How long the device may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Descriptors reserved for each chain.
pub(crate) const CHAIN_ROOM: u16 = 8;
/// Features that the tester uses.
const WANTED: u64 = feature::OVERWRITE
    | feature::INJECT
    | feature::TOUCHED
    | 1 << 29
    | feature::ACCESS_LOG
    | feature::LOG_LOSSES
    | feature::BLANK;

/// A buffer of a chain: offset in the area, length, and whether the device writes it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// The device reads it.
    Read(u64, u32),
    /// The device writes it.
    Write(u64, u32),
}

/// See the module.
pub(crate) struct Probe {
    offered: u64,
    config: Config,
    stream: UnixStream,
    area: Area,
    events: Ring,
    faults: Ring,
    log: Ring,
    kicks: [OwnedFd; 3],
    calls: [OwnedFd; 3],
    frontend: Frontend,
}

impl Probe {
    /// Connects, with every buffer for page requests in its queue.
    pub(crate) fn open(socket: &Path) -> Result<Self, ConnectError> {
        let stream = UnixStream::connect(socket).map_err(|source| ConnectError::Socket {
            path: socket.to_owned(),
            source,
        })?;
        let (closing, watched) = (stream.try_clone()?, stream.try_clone()?);
        bounded(&closing, || false, || Self::agreed(stream, watched))
    }

    fn agreed(stream: UnixStream, watched: UnixStream) -> Result<Self, ConnectError> {
        let (mut frontend, features, config) = agree(stream, WANTED)?;
        let failed = |message| move |source| ConnectError::Message { message, source };
        let offered = frontend.get_features().map_err(failed("GET_FEATURES"))?;
        let area = Area::new()?;
        frontend
            .set_mem_table(&[area.region()])
            .map_err(failed("SET_MEM_TABLE"))?;
        let notify = notify_of(features);
        let events = Ring::new(area.memory().clone(), Area::event_ring(), notify);
        let faults = Ring::new(area.memory().clone(), Area::fault_ring(), notify);
        let log = Ring::new(area.memory().clone(), Area::log_ring(), notify);
        let fds = || Ok::<_, ConnectError>([event()?, event()?, event()?]);
        let (kicks, calls) = (fds()?, fds()?);
        let errors = event()?;
        let places = [
            (EVENT_QUEUE, Area::event_ring()),
            (FAULT_QUEUE, Area::fault_ring()),
            (LOG_QUEUE, Area::log_ring()),
        ];
        let queues = match offered & feature::ACCESS_LOG {
            0 => 2,
            _ => places.len(),
        };
        let fds = calls.iter().zip(&kicks);
        for ((index, place), (call, kick)) in places.into_iter().take(queues).zip(fds) {
            let fds = [call.as_fd(), errors.as_fd(), kick.as_fd()];
            start_queue(&mut frontend, index, place, fds)?;
        }
        Ok(Self {
            offered,
            config,
            stream: watched,
            area,
            events,
            faults,
            log,
            kicks,
            calls,
            frontend,
        })
    }

    /// Features that the device offers.
    pub(crate) fn offered(&self) -> u64 {
        self.offered
    }

    /// Its limits.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The vhost-user connection.
    pub(crate) fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }
}

/// Events.
impl Probe {
    /// Sends `event` as a correct driver does.
    pub(crate) fn call(&mut self, event: &Event<'_>) -> Result<Reply, Ended> {
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        let what = format!("{:?}", event.opcode());
        let reply = self.say(&bytes, event.reply_bytes())?;
        Reply::decode(&reply).map_err(|error| Ended::Failed(format!("{what}: {error}")))
    }

    /// Sends any bytes, with room for a reply of `room`; returns what the device has written.
    pub(crate) fn say(&mut self, bytes: &[u8], room: usize) -> Result<Vec<u8>, Ended> {
        let slot = self.free_slot()?;
        let parts = self.lay_out(slot, bytes, room)?;
        let head = self.submit(slot, &parts)?;
        let used = self.wait_used()?;
        ensure(
            || used.head == head,
            || format!("chain {head} was given, chain {} came back", used.head),
        )?;
        Ok(self.written(slot, used.len))
    }

    /// Sends all of `events` at once; returns how each ended.
    pub(crate) fn call_all(&mut self, events: &[Event<'_>]) -> Result<Vec<Code>, Ended> {
        let mut heads = Vec::new();
        for event in events {
            let slot = self.free_slot()?;
            let mut bytes = Vec::new();
            event.encode(&mut bytes);
            let parts = self.lay_out(slot, &bytes, event.reply_bytes())?;
            heads.push((slot, self.publish(slot, &parts)?, Code::Unsupported));
        }
        self.show()?;
        for _ in events {
            let used = self.wait_used()?;
            let it = heads.iter_mut().find(|(_, head, _)| *head == used.head);
            let Some((slot, _, code)) = it else {
                return Err(Ended::Failed("a chain came back twice".to_owned()));
            };
            let reply = Reply::decode(&self.written(*slot, used.len));
            let reply = reply.map_err(|error| Ended::Failed(error.to_string()))?;
            *code = reply.status.code;
        }
        Ok(heads.into_iter().map(|(_, _, code)| code).collect())
    }

    /// A group of [`CHAIN_ROOM`] descriptors that are not out.
    pub(crate) fn free_slot(&self) -> Result<u16, Ended> {
        let is_free = |slot: &u16| !self.events.is_out(slot * CHAIN_ROOM);
        let free = (0..EVENT_DESCRIPTORS / CHAIN_ROOM).find(is_free);
        free.ok_or_else(|| Ended::Failed("it keeps every chain that it is given".to_owned()))
    }

    /// Writes a message into the buffers of `slot`; returns the parts of a valid chain.
    pub(crate) fn lay_out(&self, slot: u16, bytes: &[u8], room: usize) -> Result<[Part; 2], Ended> {
        let length = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let message_at = if u64::from(length(bytes.len())) <= MESSAGE_ROOM {
            Area::message_at(slot)
        } else {
            // Room that no content is written to.
            Area::bounce_address() - BASE
        };
        self.put(message_at, bytes)?;
        self.put(Area::reply_at(slot), &[0xff; 96])?;
        Ok([
            Part::Read(message_at, length(bytes.len())),
            Part::Write(Area::reply_at(slot), length(room)),
        ])
    }

    /// Writes into the shared memory.
    pub(crate) fn put(&self, at: u64, bytes: &[u8]) -> Result<(), Ended> {
        let copied = self.area.memory().copy_to(at, bytes);
        copied.map_err(|error| Ended::Failed(error.to_string()))
    }

    /// Puts a chain of descriptors of `slot` into the event queue, and kicks; returns its head.
    pub(crate) fn submit(&mut self, slot: u16, parts: &[Part]) -> Result<u16, Ended> {
        let head = self.publish(slot, parts)?;
        self.show()?;
        Ok(head)
    }

    /// Like [`Self::submit`], but does not show it to the device.
    fn publish(&mut self, slot: u16, parts: &[Part]) -> Result<u16, Ended> {
        let first = slot * CHAIN_ROOM;
        let mut room = 0_u32;
        for (index, part) in (first..).zip(parts) {
            let (at, len, flags) = match *part {
                Part::Read(at, len) => (at, len, 0),
                Part::Write(at, len) => (at, len, WRITE),
            };
            if flags == WRITE {
                room = room.saturating_add(len);
            }
            let is_last = usize::from(index - first) + 1 == parts.len();
            let descriptor = Descriptor {
                address: BASE.wrapping_add(at),
                len,
                flags: if is_last { flags } else { flags | NEXT },
                next: if is_last { 0 } else { index + 1 },
            };
            self.events.describe(index, descriptor).map_err(broken)?;
        }
        self.events.publish(first, room).map_err(broken)?;
        Ok(first)
    }

    /// Writes one descriptor of the event queue unchanged.
    pub(crate) fn describe(&self, index: u16, descriptor: Descriptor) -> Result<(), Ended> {
        self.events.describe(index, descriptor).map_err(broken)
    }

    /// Puts any head, valid or not, into the event queue, and kicks.
    pub(crate) fn submit_raw(&mut self, head: u16) -> Result<(), Ended> {
        self.events.publish_raw(head).map_err(broken)?;
        self.show()
    }

    /// Kicks the device for its event queue, even if it is empty.
    pub(crate) fn kick(&self) {
        ring_event(&self.kicks[0]);
    }

    fn show(&mut self) -> Result<(), Ended> {
        if self.events.show().map_err(broken)? {
            ring_event(&self.kicks[0]);
        }
        Ok(())
    }

    /// The next chain that comes back from the event queue.
    pub(crate) fn wait_used(&mut self) -> Result<Used, Ended> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(used) = self.events.take().map_err(broken)? {
                return Ok(used);
            }
            let is_there = self.events.arm().map_err(broken)?;
            if !is_there {
                self.sleep(0, deadline)?;
            }
        }
    }

    /// What the device has written into the reply of `slot`.
    pub(crate) fn written(&self, slot: u16, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0).min(96)];
        let copied = self
            .area
            .memory()
            .copy_from(Area::reply_at(slot), &mut bytes);
        debug_assert!(copied.is_ok(), "replies lie in the area");
        bytes
    }

    /// Sleeps until queue `queue` calls.
    fn sleep(&self, queue: usize, deadline: Instant) -> Result<(), Ended> {
        let left = deadline.saturating_duration_since(Instant::now());
        ensure(
            || !left.is_zero(),
            || format!("no answer within {} s", PATIENCE.as_secs()),
        )?;
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let Some(call) = self.calls.get(queue) else {
            return Ok(());
        };
        let mut polled = [
            PollFd::new(call, PollFlags::IN),
            PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::RDHUP),
        ];
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Ended::Failed(error.to_string())),
        }
        ensure(
            || polled[1].revents().is_empty(),
            || "it hung up instead of an answer".to_owned(),
        )?;
        match rustix::io::read(call, &mut [0; 8]) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(Ended::Failed(error.to_string())),
        }
    }
}

/// Page requests.
impl Probe {
    /// Gives the device `count` buffers for page requests, starting with number `first`.
    pub(crate) fn give_buffers(&mut self, first: u16, count: u16) -> Result<(), Ended> {
        let len = u32::try_from(REQUEST_BYTES).unwrap_or(u32::MAX);
        for buffer in first..first + count.min(FAULT_BUFFERS) {
            let descriptor = Descriptor {
                address: BASE + Area::request_at(buffer),
                len,
                flags: WRITE,
                next: 0,
            };
            self.faults.describe(buffer, descriptor).map_err(broken)?;
            self.faults.publish(buffer, len).map_err(broken)?;
        }
        if self.faults.show().map_err(broken)? {
            ring_event(&self.kicks[1]);
        }
        Ok(())
    }

    /// The next page request, if there is one.
    pub(crate) fn request(&mut self) -> Result<Option<PageRequest>, Ended> {
        let Some(used) = self.faults.take().map_err(broken)? else {
            return Ok(None);
        };
        let mut bytes = [0; REQUEST_BYTES];
        let at = Area::request_at(used.head);
        let copied = self.area.memory().copy_from(at, &mut bytes);
        copied.map_err(|error| Ended::Failed(error.to_string()))?;
        ensure(
            || usize::try_from(used.len) == Ok(REQUEST_BYTES),
            || format!("a page request of {} bytes", used.len),
        )?;
        ensure(
            || bytes[22..24] == [0; 2] && bytes[56..] == [0; 8],
            || "a page request with reserved fields that are not zero".to_owned(),
        )?;
        let request = wire::decode_request(&bytes);
        let request = request.map_err(|error| Ended::Failed(format!("a page request: {error}")))?;
        self.must_be_agreed(&request)?;
        self.give_buffers(used.head, 1)?;
        Ok(Some(request))
    }

    /// The tester agrees to whatever the device offers of these.
    fn offers(&self, feature: u64) -> bool {
        self.offered & WANTED & feature != 0
    }

    /// A request of a kind that was not agreed on, or that says what cannot be, is a fault of the device.
    fn must_be_agreed(&self, request: &PageRequest) -> Checked {
        match request.kind {
            RequestKind::Overwrite { .. } => ensure(
                || self.offers(feature::OVERWRITE),
                || "a page request of kind overwrite without OVERWRITE".to_owned(),
            ),
            RequestKind::Blank | RequestKind::BlankAhead => {
                ensure(
                    || self.offers(feature::BLANK),
                    || "a page request of kind blank without BLANK".to_owned(),
                )?;
                ensure(
                    || request.access == Access::Write,
                    || "a page request of kind blank for pages to be read".to_owned(),
                )?;
                ensure(
                    || (1..=now_ns()).contains(&request.sent_ns),
                    || {
                        format!(
                            "a page request of kind blank of {} ns by the host's clock: 0, or not come yet",
                            request.sent_ns
                        )
                    },
                )
            }
            RequestKind::Demand | RequestKind::Prefault | RequestKind::AliasFault => Ok(()),
        }
    }

    /// Waits for the next page request.
    pub(crate) fn wait_request(&mut self) -> Result<PageRequest, Ended> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(request) = self.request()? {
                return Ok(request);
            }
            if !self.faults.arm().map_err(broken)? {
                self.sleep(1, deadline)?;
            }
        }
    }
}

/// The access log.
impl Probe {
    /// Gives the device buffer number `buffer` of `bytes` bytes for records.
    pub(crate) fn give_log_buffer(&mut self, buffer: u16, bytes: usize) -> Result<(), Ended> {
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        let descriptor = Descriptor {
            address: BASE + Area::log_at(buffer),
            len,
            flags: WRITE,
            next: 0,
        };
        self.log.describe(buffer, descriptor).map_err(broken)?;
        self.log.publish(buffer, len).map_err(broken)?;
        if self.log.show().map_err(broken)? {
            ring_event(&self.kicks[2]);
        }
        Ok(())
    }

    /// What the device has written into the next returned buffer, if there is one.
    pub(crate) fn log_entries(&mut self) -> Result<Option<Vec<LogEntry>>, Ended> {
        let Some(used) = self.log.take().map_err(broken)? else {
            return Ok(None);
        };
        let mut bytes = vec![0; usize::try_from(used.len).unwrap_or(0)];
        let copied = (self.area.memory()).copy_from(Area::log_at(used.head), &mut bytes);
        copied.map_err(|error| Ended::Failed(error.to_string()))?;
        ensure(
            || bytes.len().is_multiple_of(RECORD_BYTES),
            || format!("{} bytes of records of {RECORD_BYTES}", used.len),
        )?;
        let entries = bytes.chunks_exact(RECORD_BYTES).map(|record| {
            let entry = LogEntry::decode(record);
            entry.map_err(|error| Ended::Failed(format!("a record of the access log: {error}")))
        });
        entries.collect::<Result<_, _>>().map(Some)
    }
}

fn broken(error: RingError) -> Ended {
    Ended::Failed(error.to_string())
}
