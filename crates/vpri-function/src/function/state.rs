// SPDX-License-Identifier: Apache-2.0
//! [`State`]: the state that the function's thread and assisting engines share, under one lock.
//!
//! The thread works on the queues; an engine that has faulted may put its own page
//! requests into the page fault queue, if the lock is free. A thread that holds a
//! lease never waits for the lock: an INVALIDATE waits for leases with the lock
//! held.

use super::{
    core::{DeviceSide, FunctionCore, Phase},
    memory::{BounceRange, FunctionMemory},
    requests::SourceNo,
    rings::{Broken, Chain, EventIndex, Vring},
};
use crate::wire::{
    ANSWER_BYTES, Code, EVENT_QUEUE, Event, FAULT_QUEUE, HEADER_BYTES, LOG_QUEUE, LogEntry,
    LogRecord, QUEUE_COUNT, RECORD_BYTES, REQUEST_BYTES, encode_record, encode_request, feature,
};
use pagetide_addr::{PageRequest, PageResponse, RequestKind};
use pagetide_sys::clock::now_ns;
use pagetide_vhost_backend::{RingSettings, Runs};
use pagetide_vpri::{
    access_log::AccessLog,
    bounce::BounceArea,
    queue::{HostEnd, HostPresence},
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

/// Messages handled in one turn, so that page requests get their turn, too.
const EVENTS_A_TURN: usize = 64;
/// Chains without room for a message that are returned in one turn of a queue: a driver that posts
/// nothing else must not hold up the thread of the turn, which may be an engine.
const USELESS_A_TURN: usize = 16;
/// Most records of one chain: 128 KiB.
const RECORDS_A_CHAIN: usize = 4096;

/// A driver that gives no buffer for this long no longer wants the log: engines then stop logging.
const LOG_PATIENCE: Duration = Duration::from_secs(1);

/// Errors on the queues, and drivers that were turned away, since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QueueFigures {
    /// Chains of the event queue without room for a status: their messages were dropped.
    pub dropped_events: u64,
    /// Chains of the page fault and the access log queue that had no room for a message.
    pub useless_chains: u64,
    /// Drivers that were disconnected because a ring was broken, or one of their messages was
    /// refused.
    pub drivers_hung_up_on: u64,
    /// Drivers that connected while another was there.
    pub drivers_turned_away: u64,
    /// Drivers so far.
    pub drivers: u64,
}

/// VIRTIO_F_EVENT_IDX.
pub(super) const F_EVENT_INDEX: u64 = 1 << 29;

/// Queues of page requests.
#[derive(Debug)]
pub(super) struct PageRequestSources {
    pub hosts: Vec<HostEnd>,
    /// The first this many hosts are engines.
    pub engine_count: usize,
}

/// The engines, and their bounce buffers.
#[derive(Debug)]
pub(super) struct Outside {
    pub hosts: Vec<HostEnd>,
    /// The first this many hosts are engines, which may use bounce buffers.
    pub engine_count: usize,
    pub memory: FunctionMemory,
    /// Number of the area's first slot, and how many slots it has.
    bounce: Option<(u32, u32)>,
    /// A slot's number is never used again.
    next_slot: u32,
}

impl Outside {
    fn give_bounce(&self, areas: &[Arc<BounceArea>]) {
        for (index, host) in self.hosts.iter().take(self.engine_count).enumerate() {
            host.set_bounce(areas.get(index).cloned());
        }
    }

    /// The request as a driver that has agreed on `features` knows it: it counts slots from the beginning of the
    /// area, and may not know requests that do without content.
    fn as_sent(&self, mut request: PageRequest, features: u64) -> PageRequest {
        if features & feature::BLANK == 0 {
            request.kind = request.kind.with_content();
        }
        if let (RequestKind::Overwrite { slot }, Some((first, _))) = (request.kind, self.bounce) {
            let slot = slot.saturating_sub(first);
            request.kind = RequestKind::Overwrite { slot };
        }
        request
    }
}

impl DeviceSide for Outside {
    fn respond(&mut self, source: SourceNo, response: PageResponse) {
        if let Some(host) = self.hosts.get(source.0) {
            host.respond(response);
        }
    }

    fn land(&mut self, area: Option<(u64, u64)>) -> Result<(), Code> {
        let Some((address, slots)) = area else {
            self.bounce = None;
            self.give_bounce(&[]);
            return Ok(());
        };
        let first = self.next_slot;
        let engines = u32::try_from(self.engine_count).unwrap_or(u32::MAX);
        let areas = self
            .memory
            .bounce(BounceRange { address, slots }, first, engines);
        let areas = areas.map_err(|error| {
            tracing::warn!(%error, "refusing the driver's bounce area");
            Code::Invalid
        })?;
        let count = u32::try_from(slots).unwrap_or(u32::MAX);
        self.next_slot = first.checked_add(count).ok_or(Code::Full)?;
        self.bounce = Some((first, count));
        self.give_bounce(&areas);
        Ok(())
    }

    fn is_bounce(&self, slot: u32, count: u64) -> bool {
        self.bounce.is_some_and(|(first, slots)| {
            let nth = slot.checked_sub(first);
            nth.is_some_and(|nth| u64::from(nth) + count <= u64::from(slots))
        })
    }
}

/// Records for the access log queue.
#[derive(Debug, Default)]
struct Records {
    /// Records of one chain; kept to reuse its memory.
    waiting: Vec<LogRecord>,
    /// Losses that were reported to a driver, or that do not concern it.
    told_lost: u64,
    /// Since when there is no buffer.
    starving: Option<Instant>,
}

/// The state, for the function's thread and the engines.
#[derive(Clone, Debug)]
pub(super) struct SharedState(Arc<Mutex<State>>);

impl SharedState {
    pub fn new(state: State) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if another thread has it locked.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.0.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    pub core: FunctionCore,
    pub outside: Outside,
    pub vrings: [Vring; QUEUE_COUNT as usize],
    pub features: u64,
    pub log: Arc<AccessLog>,
    records: Records,
    pub figures: QueueFigures,
    /// The presence that the engines were told last.
    presence: HostPresence,
}

impl State {
    pub fn new(core: FunctionCore, sources: PageRequestSources, log: Arc<AccessLog>) -> Self {
        let PageRequestSources {
            hosts,
            engine_count,
        } = sources;
        for host in &hosts {
            host.set_host(HostPresence::Away);
        }
        Self {
            core,
            outside: Outside {
                hosts,
                engine_count,
                memory: FunctionMemory::default(),
                bounce: None,
                next_slot: 0,
            },
            vrings: Default::default(),
            features: 0,
            log,
            records: Records::default(),
            figures: QueueFigures::default(),
            presence: HostPresence::Away,
        }
    }

    /// The driver has gone, or stops its queues.
    pub fn hang_up(&mut self) {
        self.core.hang_up(&mut self.outside);
        self.follow_phase();
    }

    /// The connection has ended: no memory of the driver is touched any more.
    pub fn forget_driver(&mut self) {
        self.hang_up();
        self.vrings = Default::default();
        self.outside.memory = FunctionMemory::default();
        self.features = 0;
    }

    /// Starts a queue, if its ring is in memory.
    pub fn start(&mut self, queue: u16, settings: &RingSettings) -> Result<Runs, Broken> {
        let event_index = self.event_index();
        match self.vrings.get_mut(usize::from(queue)) {
            Some(vring) => vring.start(settings, &self.outside.memory, event_index),
            None => Ok(Runs::No),
        }
    }

    fn event_index(&self) -> EventIndex {
        if self.features & F_EVENT_INDEX == 0 {
            EventIndex::Absent
        } else {
            EventIndex::Negotiated
        }
    }

    /// Call after a change of the driver's phase or of its queues.
    pub fn follow_phase(&mut self) {
        let is_ready = self.core.phase() == Phase::Ready;
        let presence = match is_ready {
            true => HostPresence::Here,
            false => HostPresence::Away,
        };
        if presence != self.presence {
            self.presence = presence;
            for host in &self.outside.hosts {
                host.set_host(presence);
            }
        }
        if self.log.is_on() && !self.may_log() {
            self.log.turn_off();
        }
    }

    /// True if there is a driver that could want the log; it is on once there are buffers for it.
    fn may_log(&self) -> bool {
        let wants_log = self.features & feature::ACCESS_LOG != 0;
        let has_queue = self.vrings[usize::from(LOG_QUEUE)].ring.is_some();
        wants_log && has_queue && self.core.phase() == Phase::Ready
    }

    /// Does pending work, up to a limit. True if there may be more.
    pub fn work(&mut self) -> Result<bool, Broken> {
        let more_events = self.take_events()?;
        let all = SourceNo(0)..SourceNo(self.outside.hosts.len());
        let more_faults = self.send_requests(all)?;
        let more_records = self.send_records()?;
        Ok(more_events || more_faults || more_records)
    }

    /// Asks to be woken; true if there is already work.
    pub fn arm(&mut self) -> Result<bool, Broken> {
        let memory = &self.outside.memory;
        if self.vrings[usize::from(EVENT_QUEUE)].arm(memory)? {
            return Ok(true);
        }
        let log_is_due = self.may_log() && !self.log.is_on();
        if log_is_due && self.vrings[usize::from(LOG_QUEUE)].arm(memory)? {
            return Ok(true);
        }
        let waits = self.outside.hosts.iter().any(HostEnd::has_request);
        let wants_chains = self.core.phase() == Phase::Ready && (waits || self.core.has_unsent());
        let faults = &mut self.vrings[usize::from(FAULT_QUEUE)];
        // Chains are needed only if there is something to put into them.
        Ok(if wants_chains {
            faults.arm(memory)?
        } else {
            false
        })
    }

    /// Asks not to be woken.
    pub fn disarm(&mut self) -> Result<(), Broken> {
        let memory = &self.outside.memory;
        [EVENT_QUEUE, FAULT_QUEUE, LOG_QUEUE]
            .iter()
            .try_for_each(|queue| self.vrings[usize::from(*queue)].disarm(memory))
    }

    fn take_events(&mut self) -> Result<bool, Broken> {
        for _ in 0..EVENTS_A_TURN {
            let taken = self.vrings[usize::from(EVENT_QUEUE)].take(&self.outside.memory)?;
            let Some(chain) = taken else {
                return Ok(false);
            };
            self.handle_event(chain)?;
        }
        Ok(true)
    }

    fn handle_event(&mut self, chain: Chain) -> Result<(), Broken> {
        let limit = HEADER_BYTES + self.core.limits().ranges_max as usize * ANSWER_BYTES;
        let memory = &self.outside.memory;
        let written = if chain.has_room_for_reply() {
            let message = chain.message(memory, limit).unwrap_or_default();
            let reply = match Event::decode(&message) {
                // A message is not started unless the chain has room for its full reply.
                Ok(event) if event.reply_bytes() <= chain.room() => {
                    self.core.event(&event, &mut self.outside)
                }
                Ok(_) => self.core.refuse(crate::wire::Status::of(Code::Invalid)),
                Err(error) => self.core.refuse(error.status()),
            };
            chain.write(&self.outside.memory, &reply.encode())
        } else {
            self.figures.dropped_events += 1;
            0
        };
        self.follow_phase();
        let memory = &self.outside.memory;
        self.vrings[usize::from(EVENT_QUEUE)].give_back(chain, written, memory)
    }

    /// Sends the driver page requests of `sources`, as long as there are chains for them. True if
    /// the turn has ended at useless chains, so there may be more.
    pub fn send_requests(&mut self, sources: std::ops::Range<SourceNo>) -> Result<bool, Broken> {
        if self.core.phase() != Phase::Ready {
            return Ok(false);
        }
        let mut useless = 0;
        while useless < USELESS_A_TURN {
            let faults = &mut self.vrings[usize::from(FAULT_QUEUE)];
            let Some(chain) = faults.take(&self.outside.memory)? else {
                return Ok(false);
            };
            if chain.room() < REQUEST_BYTES {
                useless += 1;
                self.figures.useless_chains += 1;
                faults.give_back(chain, 0, &self.outside.memory)?;
                continue;
            }
            let Some(request) = self.next_request(&sources) else {
                self.vrings[usize::from(FAULT_QUEUE)].put_back(chain);
                return Ok(false);
            };
            let bytes = encode_request(&self.outside.as_sent(request, self.features));
            let memory = &self.outside.memory;
            let written = chain.write(memory, &bytes);
            self.vrings[usize::from(FAULT_QUEUE)].give_back(chain, written, memory)?;
        }
        Ok(true)
    }

    fn next_request(&mut self, sources: &std::ops::Range<SourceNo>) -> Option<PageRequest> {
        if let Some(request) = self.core.next_unsent() {
            return Some(request);
        }
        for source in sources.start.0..sources.end.0 {
            while self.core.has_room()
                && let Some(request) = self.outside.hosts.get(source).and_then(HostEnd::next)
            {
                let source = SourceNo(source);
                let sent = self.core.request(source, request, &mut self.outside);
                if sent.is_some() {
                    return sent;
                }
            }
        }
        None
    }

    /// Has engines log as long as the driver gives buffers.
    fn follow_buffers(&mut self) -> Result<(), Broken> {
        if !self.may_log() {
            return Ok(());
        }
        let vring = &self.vrings[usize::from(LOG_QUEUE)];
        if vring.has_chain(&self.outside.memory)? {
            self.records.starving = None;
            if !self.log.is_on() {
                self.records.told_lost = self.log.lost();
                self.log.turn_on();
            }
        } else if self.log.is_on() {
            let since = self.records.starving.get_or_insert_with(Instant::now);
            if since.elapsed() >= LOG_PATIENCE {
                self.log.turn_off();
            }
        }
        Ok(())
    }

    /// Sends the driver the records that wait. True if the turn has ended at useless chains.
    pub fn send_records(&mut self) -> Result<bool, Broken> {
        self.follow_buffers()?;
        let mut useless = 0;
        while self.log.has_any() || self.has_loss_to_tell() {
            if useless == USELESS_A_TURN {
                return Ok(true);
            }
            let vring = &mut self.vrings[usize::from(LOG_QUEUE)];
            let Some(chain) = vring.take(&self.outside.memory)? else {
                self.log.drop_waiting();
                break;
            };
            let room = (chain.room() / RECORD_BYTES).min(RECORDS_A_CHAIN);
            if room == 0 {
                useless += 1;
                self.figures.useless_chains += 1;
                vring.give_back(chain, 0, &self.outside.memory)?;
                continue;
            }
            let bytes = self.entries(room);
            let written = chain.write(&self.outside.memory, &bytes);
            let vring = &mut self.vrings[usize::from(LOG_QUEUE)];
            vring.give_back(chain, written, &self.outside.memory)?;
        }
        Ok(false)
    }

    fn has_loss_to_tell(&self) -> bool {
        let agreed = self.features & feature::LOG_LOSSES != 0;
        agreed && self.log.is_on() && self.log.lost() != self.records.told_lost
    }

    /// At most `room` entries, at least one if there is anything to report: losses first.
    fn entries(&mut self, room: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(room.min(RECORDS_A_CHAIN) * RECORD_BYTES);
        let mut room = room;
        if self.has_loss_to_tell() {
            let lost = self.log.lost();
            let entry = LogEntry::Lost {
                time_ns: now_ns(),
                records: lost - self.records.told_lost,
            };
            bytes.extend(entry.encode());
            self.records.told_lost = lost;
            room -= 1;
        }
        let waiting = &mut self.records.waiting;
        waiting.clear();
        self.log.visit(room, &mut |record| waiting.push(record));
        bytes.extend(waiting.iter().flat_map(encode_record));
        bytes
    }
}
