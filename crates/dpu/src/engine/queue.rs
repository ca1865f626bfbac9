// SPDX-License-Identifier: Apache-2.0
//! A queue on its engine.
//!
//! ```text
//!            all ring pages wired                 stop asked for
//!  Starting ─────────────────────► Running ────────────────────────► Stopping ──► gone
//!     │  ▲                                                              ▲   once nothing
//!     ▼  │ page responses                                               │   is under way
//!   waiting for ring pages ─────────────────────────────────────────────┘
//! ```
//! The rings of a running queue are *wired*: the engine reads them in each turn and the guest
//! writes them at any time, so their pages must stay present. Wiring needs the pages present, so a
//! queue starts with page requests for the absent ones.
//!
//! # On a fault
//! A chain whose pages are absent is parked. The device's setting decides what its queue does
//! meanwhile:
//!
//! | | [`OnFault::Pause`] (VPRI 5.2) | [`OnFault::OutOfOrder`] (VPRI's future work) |
//! |---|---|---|
//! | later chains of the queue | are not begun, nor even taken from the ring, until the parked one has its pages or has failed | go on |
//! | chains begun before | complete | complete |
//! | other queues, other devices | go on | go on |
//! | order in which chains of a queue *begin* | the ring's | the ring's, but for those that fault |
//! | order in the used ring | as the disk completes them | as the disk completes them |
//!
//! Neither mode orders *completions*: the disk completes two requests that are both under way in
//! any order, as virtio-blk allows (virtio 1.2, 5.2.6.2: a driver that needs one request done
//! before the next waits for it). So two outstanding writes to one sector may land in either order
//! in both modes, and a flush makes durable what was *completed* before the flush was made
//! available. With pause, a flush never begins before a write that precedes it in the ring has
//! begun. Out of order, a flush may complete while that write is parked and says nothing about it.
//! This is correct: the write has not been completed.
//!
//! A chain that has failed and only waits for the page of its answer does not pause its queue:
//! its DMA will not be done.

use super::{
    call::{Calls, Signal},
    command::{QueueSetup, RecordSetup, StopHow, answer},
    fair::Credit,
    held::Held,
    posted::Posted,
    request::Request,
};
use crate::{
    chain::Table,
    inflight::InflightQueue,
    kind::work::{Chains, Completes},
    memory::{DeviceMemory, Span},
    parked::{Asker, Purpose, QueueKey, Resumed},
    ring::Job,
    shared::{Counters, DeviceShared, OnFault, StopReason, add, sub},
    slo::course::RequestTimeline,
};
use pagetide_addr::{FileRange, Gpa};
use pagetide_sys::signal::EventSignal;
use pagetide_vpri::DmaDomain;
use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering, mpsc::Sender},
};
use virtio_queue::{Queue, QueueT};

/// Chains taken from one queue's ring at a time. Few, because each is begun, or waits for its first
/// step with its pages leased.
const POP_BATCH: usize = 8;
/// The same for chains that are completed at once, and hold no lease when the next one is taken. Usually the share of
/// the queue is spent before.
const POP_BATCH_AT_ONCE: usize = 32;
/// Most parked chains of one queue. At this many the queue takes no more, so that one guest with
/// cold memory cannot fill the page fault queue of its engine.
pub(crate) const PARKED_PER_QUEUE_MAX: usize = 64;
/// The same for all queues of a device on an engine.
pub(crate) const PARKED_PER_DEVICE_MAX: usize = 256;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT`
pub(super) const AVAIL_NO_INTERRUPT: u16 = 1;

/// State of a queue.
#[derive(Debug)]
pub(crate) enum QueueState {
    Starting,
    Running,
    Stopping { how: StopHow, reply: Sender<u16> },
}

/// The last pause of a queue, for the account: chains in the ring at that time have waited since.
#[derive(Debug, Default)]
struct Paused {
    since_ns: u64,
    /// Chains that were in the ring then and have not been taken.
    behind: u16,
}

/// A queue on its engine.
#[derive(Debug)]
pub(crate) struct EngineQueue {
    pub key: QueueKey,
    pub queue: Queue,
    pub table: Table,
    chains: Chains,
    completes: Completes,
    /// The chains that were read, if they are posted.
    pub posted: Option<Box<Posted>>,
    /// Their record, until the queue runs.
    record: Option<RecordSetup>,
    /// What the driver has accepted.
    pub features: u64,
    /// What has arrived for it is polled under this token.
    pub arrivals: Option<u32>,
    /// Interrupt vector by which the driver is told of its completions.
    vector: u16,
    pub state: QueueState,
    /// Token of the poll of `kick`.
    pub token: u32,
    pub polled: bool,
    /// Kicks since the last chain was taken from its ring.
    pub kicks_in_vain: u32,
    pub kick: Option<OwnedFd>,
    calls: Calls,
    error: Option<EventSignal>,
    pub inflight: Option<InflightQueue>,
    /// Chains left by a predecessor, to be done before new ones.
    pub resubmit: VecDeque<u16>,
    /// Parked chains whose requests are answered and that wait to begin; they count as parked.
    pub resumed: VecDeque<Resumed>,
    /// Transfers that wait for their next step; they count as in flight.
    pub steps: VecDeque<Box<Job<Request>>>,
    /// The last thing begun was a step.
    pub stepped_last: bool,
    /// What the queue may begin before the next queue of its tenant.
    pub credit: Credit,
    wired: Vec<(Arc<DmaDomain>, FileRange)>,
    pub in_flight: usize,
    pub parked: usize,
    /// Those parked chains whose DMA is still to be done.
    pub(super) faulting: usize,
    on_fault: OnFault,
    paused: Paused,
    /// Chains next to begin whose pages have been requested already.
    pub looked_ahead: usize,
    pub needs_call: bool,
    /// Chains up to this index of the avail ring are known to be there.
    pub(super) avail_end: u16,
    /// Entries of the used ring that its driver does not see yet.
    pub(super) unpublished: u16,
    /// Entries are published at the end of the queue's turn, all at once.
    pub(super) publishes_later: bool,
    /// Entries that were published since the driver was last called.
    pub(super) added: u16,
    base: u16,
    error_told: bool,
}

impl EngineQueue {
    /// A queue that is about to start.
    pub fn new(device: usize, token: u32, setup: QueueSetup) -> Self {
        Self {
            key: QueueKey {
                device,
                queue: setup.number,
                epoch: token,
            },
            table: Table {
                at: Gpa(setup.queue.desc_table()),
                size: setup.queue.size(),
                indirect: setup.indirect,
                layout: setup.role.layout,
            },
            chains: setup.role.chains,
            completes: setup.role.completes,
            posted: (setup.role.chains == Chains::Posted)
                .then(|| Box::new(Posted::new(setup.role.keeping))),
            record: setup.record,
            features: setup.features,
            arrivals: None,
            vector: setup.role.vector,
            queue: setup.queue,
            state: QueueState::Starting,
            token,
            polled: false,
            kicks_in_vain: 0,
            kick: setup.kick,
            calls: Calls::new(setup.call),
            error: setup.error,
            inflight: setup.inflight,
            resubmit: VecDeque::new(),
            resumed: VecDeque::new(),
            steps: VecDeque::new(),
            stepped_last: false,
            credit: Credit::default(),
            wired: Vec::new(),
            in_flight: 0,
            parked: 0,
            faulting: 0,
            on_fault: setup.on_fault,
            paused: Paused::default(),
            looked_ahead: 0,
            needs_call: false,
            avail_end: setup.next_avail,
            unpublished: 0,
            publishes_later: false,
            added: 0,
            base: setup.next_avail,
            error_told: false,
        }
    }

    /// True if chains may be taken from the queue.
    pub fn is_serving(&self) -> bool {
        !matches!(self.state, QueueState::Starting)
    }

    /// True from its start until it is to stop.
    pub fn is_running(&self) -> bool {
        matches!(self.state, QueueState::Running)
    }

    /// True if the avail ring may be read now.
    pub fn may_pop(&self) -> bool {
        matches!(self.state, QueueState::Running)
            && self.chains == Chains::Requests
            && self.resubmit.is_empty()
            && !self.is_paused()
            && self.parked < PARKED_PER_QUEUE_MAX
            && self.in_flight + self.parked < usize::from(self.table.size)
    }

    /// True if chains that are not parked may begin: new ones, or those that a predecessor left.
    pub fn may_begin(&self) -> bool {
        match self.resubmit.is_empty() {
            true => self.may_pop(),
            false => !self.is_paused() && self.parked < PARKED_PER_QUEUE_MAX,
        }
    }

    /// True if no chain may begin until a parked one is answered.
    pub fn is_paused(&self) -> bool {
        self.on_fault == OnFault::Pause && self.faulting > 0
    }

    /// Most chains that are taken from the ring at a time.
    pub fn batch(&self) -> usize {
        match self.completes {
            Completes::InAnyOrder => POP_BATCH,
            Completes::InRingOrder => POP_BATCH_AT_ONCE,
        }
    }

    /// True if its chains are completed as they are taken, and may be shown to the driver several at a time. Those of an
    /// in-flight region are shown one by one.
    pub(super) fn completes_at_once(&self) -> bool {
        self.completes == Completes::InRingOrder && self.inflight.is_none()
    }

    /// Counts a chain that was parked.
    pub fn count_parked(&mut self, purpose: Purpose) {
        self.parked += 1;
        self.faulting += usize::from(purpose == Purpose::Dma);
    }

    /// If the chain parked just now pauses the queue, remembers how many chains are behind it.
    pub fn note_pause(&mut self, memory: &DeviceMemory, now_ns: u64) {
        // A chain that parks once more starts no new pause for the chains already in the ring.
        if self.is_paused() && self.paused.behind == 0 {
            self.paused = Paused {
                since_ns: now_ns,
                behind: self.waiting(memory).unwrap_or(0),
            };
        }
    }

    /// The course of the chain that is taken from the ring now.
    pub fn course_of_next(&mut self, now_ns: u64) -> RequestTimeline {
        match self.paused.behind.checked_sub(1) {
            Some(behind) => {
                self.paused.behind = behind;
                RequestTimeline::popped_late(self.paused.since_ns, now_ns)
            }
            None => RequestTimeline::popped(now_ns),
        }
    }

    /// Number of chains in the ring; `None` if the ring is broken.
    pub fn waiting(&self, memory: &DeviceMemory) -> Option<u16> {
        let end = load_u16(memory, self.queue.avail_ring() + 2)?;
        // More than the ring holds: the driver is wrong, which is reported when a chain is taken.
        Some(end.wrapping_sub(self.queue.next_avail())).filter(|n| *n <= self.table.size)
    }

    /// Counts a parked chain that no longer waits.
    pub fn count_resumed(&mut self, purpose: Purpose) {
        self.parked -= 1;
        self.faulting -= usize::from(purpose == Purpose::Dma);
    }

    /// The party on whose behalf its chains request pages.
    pub fn asker(&self, device: &DeviceShared, memory: &DeviceMemory) -> Asker {
        Asker {
            queue: self.key,
            device: device.id,
            vector: self.wanted_vector(memory),
        }
    }

    /// The interrupt vector of this queue, if the driver wants an interrupt now. A hint: the rings
    /// may change concurrently. An unreadable ring is reported where it matters.
    fn wanted_vector(&self, memory: &DeviceMemory) -> Option<u16> {
        if !self.calls.are_possible() {
            return None;
        }
        let wanted = if !matches!(self.state, QueueState::Running) {
            true
        } else if self.queue.event_idx_enabled() {
            // The driver wants an interrupt for one of the next completions, not for one long past.
            let at = self.queue.avail_ring() + 4 + 2 * u64::from(self.table.size);
            let used_event = load_u16(memory, at)?;
            used_event.wrapping_sub(self.published()) < self.table.size
        } else {
            load_u16(memory, self.queue.avail_ring())? & AVAIL_NO_INTERRUPT == 0
        };
        wanted.then_some(self.vector)
    }

    /// The head of the chain that will be begun after `ahead` others, if it is known yet.
    pub fn upcoming(&self, memory: &DeviceMemory, ahead: usize) -> Option<u16> {
        if let Some(head) = self.resubmit.get(ahead) {
            return Some(*head);
        }
        let ahead = u16::try_from(ahead - self.resubmit.len()).unwrap_or(u16::MAX);
        if ahead >= self.waiting(memory)? {
            return None;
        }
        let slot = self.queue.next_avail().wrapping_add(ahead) % self.table.size.max(1);
        load_u16(memory, self.queue.avail_ring() + 4 + 2 * u64::from(slot))
    }

    /// True once `Io::begin_stop` was called.
    pub fn is_stopping(&self) -> bool {
        matches!(self.state, QueueState::Stopping { .. })
    }

    /// True if chains it has not begun stay in the in-flight region.
    pub fn is_abandoned(&self) -> bool {
        let how = StopHow::Abandon;
        matches!(&self.state, QueueState::Stopping { how: stop, .. } if *stop == how)
    }

    /// If it is stopping, unfinished chains now stay in the in-flight region.
    pub fn give_up_draining(&mut self) {
        if let QueueState::Stopping { how, .. } = &mut self.state {
            *how = StopHow::Abandon;
        }
    }

    /// True if nothing of it is under way and nothing must be done before it may stop.
    pub fn is_idle(&self) -> bool {
        let owes = match &self.state {
            QueueState::Stopping { how, .. } => *how == StopHow::Drain && !self.resubmit.is_empty(),
            _ => true,
        };
        self.in_flight == 0 && self.parked == 0 && !owes
    }

    /// Replaces the call descriptor and rings it once: a call may have gone to the old one.
    pub fn set_call(&mut self, call: Option<EventSignal>) {
        self.calls.go_to(call);
        self.needs_call |= self.calls.are_owed();
    }

    fn ring_call(&mut self) {
        self.calls.ring();
        self.needs_call |= self.calls.are_owed();
    }

    /// True if a call failed and must be retried.
    pub fn owes_call(&self) -> bool {
        self.calls.are_owed()
    }

    /// Signals to the front end that the device has stopped.
    pub fn tell_error(&mut self) {
        if self.error_told {
            return;
        }
        let told = self.error.as_mut().map_or(Ok(()), Signal::signal);
        if let Err(error) = &told {
            tracing::error!(%error, "cannot signal to a front end that its device has stopped");
        }
        self.error_told = told.is_ok();
    }

    /// Signals the call descriptor if the driver wants to know of the completions.
    pub fn call_if_wanted(&mut self, memory: &DeviceMemory) -> Result<(), StopReason> {
        self.needs_call = false;
        let wanted = self.wants_call(memory)?;
        if wanted || self.owes_call() {
            self.ring_call();
        }
        Ok(())
    }

    /// Enables kicks; true if chains are there already.
    pub fn ask_for_kicks(&mut self, memory: &DeviceMemory) -> Result<bool, StopReason> {
        self.queue
            .enable_notification(memory)
            .map_err(|e| self.broken(&e))
    }

    /// Disables kicks while the engine polls.
    pub fn ask_for_no_kicks(&mut self, memory: &DeviceMemory) -> Result<(), StopReason> {
        if !matches!(self.state, QueueState::Running) || self.queue.event_idx_enabled() {
            return Ok(());
        }
        self.queue
            .disable_notification(memory)
            .map_err(|e| self.broken(&e))
    }

    /// The reason why data read from `memory` or from the in-flight region must no longer be
    /// trusted, if there is one.
    pub fn lost(&self, memory: &DeviceMemory) -> Option<StopReason> {
        let inflight = self.inflight.as_ref();
        let record = self
            .posted
            .as_ref()
            .and_then(|posted| posted.record.as_ref());
        let is_lost = memory.is_lost()
            || inflight.is_some_and(InflightQueue::is_lost)
            || record.is_some_and(Held::is_lost);
        is_lost.then_some(StopReason::MemoryLost)
    }

    /// The stop reason for broken rings.
    pub fn broken(&self, error: &dyn std::fmt::Display) -> StopReason {
        StopReason::Ring {
            queue: self.key.queue,
            error: error.to_string(),
        }
    }

    fn ring_spans(&self, memory: &DeviceMemory) -> Result<Vec<Span>, StopReason> {
        let size = u32::from(self.table.size);
        let mut spans = Vec::new();
        for (at, bytes) in [
            (self.queue.desc_table(), 16 * size),
            (self.queue.avail_ring(), 6 + 2 * size),
            (self.queue.used_ring(), 6 + 8 * size),
        ] {
            memory
                .spans(Gpa(at), bytes, &mut spans)
                .map_err(|e| self.broken(&e))?;
        }
        Ok(spans)
    }

    /// Wires what is not wired yet; returns the spans whose pages are absent.
    pub(super) fn wire(
        &mut self,
        memory: &DeviceMemory,
        counters: &Counters,
    ) -> Result<Vec<Span>, StopReason> {
        let spans = self.ring_spans(memory)?;
        let mut absent = Vec::new();
        for span in spans {
            let domain = memory.port(span).domain();
            let pages = span.pages();
            let have = |(d, p): &(Arc<DmaDomain>, FileRange)| Arc::ptr_eq(d, domain) && *p == pages;
            if self.wired.iter().any(have) {
                continue;
            }
            if domain.attributes().wire(pages) {
                self.wired.push((domain.clone(), pages));
                add(&counters.wired_bytes, pages.bytes());
            } else {
                absent.push(span);
            }
        }
        Ok(absent)
    }

    /// Finds where to begin. The rings are wired.
    pub(super) fn open_rings(&mut self, memory: &DeviceMemory) -> Result<(), StopReason> {
        self.queue.set_ready(true);
        if !self.queue.is_valid(memory) {
            return Err(self.broken(&"the rings are not all in guest memory"));
        }
        let used = self
            .queue
            .used_idx(memory, Ordering::Acquire)
            .map_err(|e| self.broken(&e))?
            .0;
        self.queue.set_next_used(used);
        self.take_from(self.base);
        if let Some(reason) = self.lost(memory) {
            return Err(reason);
        }
        if let Some(inflight) = &mut self.inflight {
            let left = inflight.take_over(used);
            if !left.resubmit.is_empty() {
                tracing::info!(
                    queue = self.key.queue,
                    chains = left.resubmit.len(),
                    "resuming chains that were in flight"
                );
            }
            self.take_from(left.next_avail);
            self.resubmit = left.resubmit.into();
        }
        self.resume_posted(memory)?;
        self.state = QueueState::Running;
        self.ask_for_no_kicks(memory)?;
        // A predecessor may have completed chains and died before it signalled them.
        self.ring_call();
        Ok(())
    }

    /// Goes on with posted chains that a predecessor has held.
    fn resume_posted(&mut self, memory: &DeviceMemory) -> Result<(), StopReason> {
        let Some(setup) = self.record.take() else {
            return Ok(());
        };
        let taken = Held::take_over(setup, memory);
        let (record, left) = taken.map_err(|error| self.broken(&error))?;
        if !left.held.is_empty() {
            tracing::info!(
                queue = self.key.queue,
                buffers = left.held.len(),
                "resuming receive buffers that were held"
            );
        }
        self.take_from(left.next_avail);
        if let Some(posted) = self.posted.as_mut() {
            posted.resume(record, &left.held);
        }
        Ok(())
    }

    /// Unwires the rings and answers the stop request.
    pub fn end(&mut self, counters: &Counters) {
        // Whoever starts the queue next opens its record.
        self.record = None;
        self.posted = None;
        for (domain, pages) in self.wired.drain(..) {
            domain.attributes().unwire(pages);
            sub(&counters.wired_bytes, pages.bytes());
        }
        let next = match (self.queue.ready(), self.completes) {
            (false, _) => self.base,
            (true, Completes::InAnyOrder) => self.queue.next_avail(),
            // What was taken and is not done is begun again.
            (true, Completes::InRingOrder) => self.published(),
        };
        if let QueueState::Stopping { reply, .. } = &self.state {
            answer(reply, next);
        }
    }
}

/// Reads a 16-bit ring field; Acquire, so that earlier writes of the driver are visible.
fn load_u16(memory: &DeviceMemory, at: u64) -> Option<u16> {
    match memory.load_u16(at, Ordering::Acquire) {
        Ok(word) => Some(word),
        Err(error) => {
            tracing::debug!(%error, "a wired ring cannot be read");
            None
        }
    }
}
