// SPDX-License-Identifier: Apache-2.0
//! The path of a chain from the avail ring to the kernel, or to the parked chains.
//!
//! ```text
//!   pop ─► walk ─► frame ─► lease every page, all or none ─► read header ─► decide ─► start I/O
//!            │ │                    │
//!            │ └── table absent ────┴── some absent: release all, park, page requests
//!            └── part outside memory: answered with an error (RAM was unplugged, or the guest lies)
//! ```
//! A resumed chain starts again at *walk*. The guest may have changed it meanwhile; nothing from
//! the first walk is trusted later.

use super::{
    Device, Io,
    bounce::{Bounce, MayLand, Run},
    fair::{CHAIN_COST_BYTES, FAULT_COST_BYTES, Load, QUEUE_COST_BYTES, Verdict},
    finish::Answer,
    pages::{Located, Refused, absent_of, all_of, lease_all, locate, wanted_of},
    queue::{EngineQueue, PARKED_PER_DEVICE_MAX, PARKED_PER_QUEUE_MAX},
};
use crate::{
    blk::request::{EmptyHow, Frame, Status},
    chain::Buffers,
    memory::{DeviceMemory, LeaseSet, Span},
    parked::{Ended, PageDemand, ParkedChain, Purpose, QueueKey, Waiter},
    ring::Step,
    shared::{DeviceShared, StopReason, add},
    slo::course::RequestTimeline,
};
use pagetide_addr::Access;
use std::{io, rc::Rc, sync::atomic::Ordering, time::Instant};
use virtio_queue::QueueOwnedT;

/// Chains taken from one queue's ring at a time. Few, because each is begun, or waits for its first
/// step with its pages leased.
pub(super) const POP_BATCH: usize = 8;
/// A look-up that takes this long was interrupted: even with every cache line cold it takes far
/// less.
const LOOKUP_INTERRUPTED_NS: u64 = 5_000;
/// What an engine must know of a request when its I/O completes.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: QueueKey,
    pub head: u16,
    pub status: Span,
    pub leases: LeaseSet,
    pub step: Step,
    /// What the step counts as while the kernel has it.
    pub load: Load,
    pub kind: Kind,
    /// Bytes of data, for the used ring and the statistics.
    pub data_bytes: u32,
    pub sample: Sample,
    pub course: RequestTimeline,
    /// Direct I/O was refused once already.
    pub retried: bool,
    /// Absent pages of the request: the data read for them is in bounce buffers.
    pub bounced: Vec<Run>,
}

/// What kind of I/O is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Empty { how: EmptyHow, stage: EmptyStage },
}

/// Progress of emptying a range; file systems differ in the modes they support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EmptyStage {
    /// The mode that does it in one call.
    Direct,
    /// Zeroing is not supported: punch first,
    Punch,
    /// then allocate again.
    Allocate,
}

/// Whether the look-up of this request is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sample {
    No,
    Yes,
}

/// Where a chain comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin {
    /// From the avail ring or the in-flight region.
    Fresh(RequestTimeline),
    /// From the parked chains.
    Resumed {
        purpose: Purpose,
        since: Instant,
        course: RequestTimeline,
        ended: Ended,
    },
    /// Its transfer had arrived in a bounce buffer, but could not be delivered.
    Again(RequestTimeline),
}

impl Origin {
    /// The course of the chain so far.
    fn course(&self) -> RequestTimeline {
        match self {
            Self::Fresh(course) | Self::Again(course) | Self::Resumed { course, .. } => *course,
        }
    }
}

/// Nanoseconds of a duration that is not years.
pub(crate) fn nanos(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// How far the serving of a queue got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Served {
    /// Nothing to begin.
    Nothing,
    /// All work was begun, or the queue's share was spent.
    InPart,
    /// More work is left, and the tenant's credit of this turn is spent.
    Spent,
    /// More work is left, and the tenant's in-flight bound is reached.
    Full,
}

/// A chain whose pages are all leased.
pub(crate) struct Ready {
    pub head: u16,
    pub frame: Frame,
    pub leases: LeaseSet,
    pub sample: Sample,
    pub course: RequestTimeline,
    /// Set if it is a read of which part goes to bounce buffers.
    pub bounce: Option<Box<Bounce>>,
}

impl Io {
    /// Begins work of a queue until the share of the queue or of its tenant is spent.
    pub fn serve_queue(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
    ) -> io::Result<Served> {
        let slot = queue.key.device;
        let mut served = Served::Nothing;
        if let Some(memory) = &device.memory
            && let Some(reason) = queue.lost(memory)
        {
            device.shared.stop(reason);
        }
        if device.shared.is_stopped() {
            queue.tell_error();
        }
        queue.credit.refill(QUEUE_COST_BYTES);
        loop {
            let steps_wait = !queue.steps.is_empty();
            if !steps_wait && !self.may_begin_chains(device, queue) {
                return Ok(served);
            }
            let (step, chain) = (self.fair.may_step(slot), self.fair.may_take(slot));
            let verdict = if steps_wait { step } else { chain };
            if verdict != Verdict::Go || !queue.credit.is_left() {
                if !self.has_work(device, queue) {
                    return Ok(served);
                }
                return Ok(match verdict {
                    Verdict::Go => Served::InPart,
                    Verdict::NextTurn => Served::Spent,
                    Verdict::Full => Served::Full,
                });
            }
            // Steps and chains alternate: a small request does not wait until all of a large one is
            // done.
            let chains_first = queue.stepped_last && chain == Verdict::Go;
            if (!steps_wait || chains_first) && self.take_chains(device, queue)? > 0 {
                queue.stepped_last = false;
            } else if let Some(job) = queue.steps.pop_front() {
                queue.stepped_last = true;
                self.start_step(device, queue, job)?;
            } else {
                return Ok(served);
            }
            served = Served::InPart;
        }
    }

    /// True if the queue itself allows chains to begin.
    fn may_begin_chains(&self, device: &Device, queue: &EngineQueue) -> bool {
        !queue.resumed.is_empty() || (queue.may_begin() && self.may_park(&device.shared))
    }

    /// True if the queue has something that it would begin if allowed.
    pub fn has_work(&self, device: &Device, queue: &EngineQueue) -> bool {
        if !queue.steps.is_empty() || !queue.resumed.is_empty() {
            return true;
        }
        if device.shared.is_stopped() || !self.may_begin_chains(device, queue) {
            return false;
        }
        let memory = device.memory.as_ref();
        // A broken ring is reported when a chain is taken from it.
        !queue.resubmit.is_empty()
            || memory.is_some_and(|memory| queue.waiting(memory).is_none_or(|n| n > 0))
    }

    /// Takes some chains from a queue and returns how many: first those whose pages have arrived,
    /// then those that a predecessor left, then new ones.
    fn take_chains(&mut self, device: &mut Device, queue: &mut EngineQueue) -> io::Result<usize> {
        let slot = queue.key.device;
        if let Some(resumed) = queue.resumed.pop_front() {
            self.look_at_clock();
            self.charge(slot, queue, CHAIN_COST_BYTES);
            self.serve_resumed(device, queue, &resumed)?;
            return Ok(1);
        }
        let memory = device.memory.clone();
        let Some(memory) = memory.filter(|_| !device.shared.is_stopped()) else {
            return Ok(0);
        };
        let taken = match self.resubmit_next(device, queue) {
            Some(head) => {
                self.look_at_clock();
                self.charge(slot, queue, CHAIN_COST_BYTES);
                let origin = Origin::Fresh(RequestTimeline::popped(self.now_ns));
                self.serve(device, queue, head, origin)?;
                1
            }
            None => self.pop_batch(device, queue, &memory)?,
        };
        if taken > 0 {
            self.has_news(device, slot);
        }
        Ok(taken)
    }

    /// Charges a tenant, and its queue, for something the tenant began.
    pub fn charge(&mut self, slot: usize, queue: &mut EngineQueue, cost_bytes: u64) {
        queue.credit.spend(cost_bytes);
        self.fair.charge(slot, cost_bytes);
    }

    /// Takes and serves one batch of chains; returns how many.
    fn pop_batch(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> io::Result<usize> {
        let mut heads = std::mem::take(&mut self.scratch.heads);
        heads.clear();
        if let Err(reason) = self.pop_heads(device, queue, memory, &mut heads) {
            device.shared.stop(reason);
        }
        if !heads.is_empty() {
            self.look_at_clock();
            queue.kicks_in_vain = 0;
        }
        queue.looked_ahead = queue.looked_ahead.saturating_sub(heads.len());
        for head in &heads {
            if let Some(inflight) = &mut queue.inflight {
                inflight.fetched(*head);
            }
            self.charge(queue.key.device, queue, CHAIN_COST_BYTES);
            let origin = Origin::Fresh(queue.course_of_next(self.now_ns));
            self.serve(device, queue, *head, origin)?;
        }
        let popped = heads.len();
        self.scratch.heads = heads;
        Ok(popped)
    }

    /// True if a chain of the device could be parked.
    pub fn may_park(&self, device: &DeviceShared) -> bool {
        let parked = device.counters[self.index].parked.load(Ordering::Relaxed);
        !self.parked.is_queue_full() && parked < PARKED_PER_DEVICE_MAX as u64
    }

    fn resubmit_next(&self, device: &Device, queue: &mut EngineQueue) -> Option<u16> {
        let may = self.may_park(&device.shared)
            && !queue.is_paused()
            && queue.parked < PARKED_PER_QUEUE_MAX;
        if !may {
            return None;
        }
        queue.looked_ahead = queue.looked_ahead.saturating_sub(1);
        queue.resubmit.pop_front()
    }

    fn pop_heads(
        &self,
        device: &Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        heads: &mut Vec<u16>,
    ) -> Result<(), StopReason> {
        if !queue.may_pop() || !self.may_park(&device.shared) {
            return Ok(());
        }
        // Each chain may be parked, so there must be room for it.
        let room = queue
            .batch()
            .min(PARKED_PER_QUEUE_MAX - queue.parked)
            .min(usize::from(queue.table.size) - queue.in_flight - queue.parked);
        let chains = queue.queue.iter(&**memory);
        let chains = match chains {
            Ok(chains) => chains,
            Err(error) => return Err(queue.broken(&error)),
        };
        heads.extend(chains.take(room).map(|chain| chain.head_index()));
        Ok(())
    }

    /// Serves one chain as far as possible now.
    pub fn serve(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        head: u16,
        origin: Origin,
    ) -> io::Result<()> {
        let Some(memory) = device.memory.clone() else {
            return Ok(());
        };
        let served = match origin {
            Origin::Resumed {
                purpose: Purpose::BadStatus,
                ended: Ended::Lost,
                ..
            } => Err(StopReason::ContentLost {
                queue: queue.key.queue,
            }),
            Origin::Resumed {
                ended: Ended::Lost | Ended::TimedOut,
                ..
            }
            | Origin::Resumed {
                purpose: Purpose::BadStatus,
                ..
            } => self.fail_chain(device, queue, &memory, head, origin),
            _ => match self.prepare(device, queue, &memory, head, origin) {
                Ok(Outcome::Ready(ready)) => return self.begin(device, queue, &memory, ready),
                Ok(Outcome::Parked) => Ok(()),
                Ok(Outcome::Refused(why)) => {
                    let outside = &device.shared.counters[self.index].outside;
                    add(outside, u64::from(why == Refused::Outside));
                    self.fail_chain(device, queue, &memory, head, origin)
                }
                Err(reason) => Err(reason),
            },
        };
        if let Err(reason) = served {
            add(&device.shared.counters[self.index].malformed, 1);
            device.shared.stop(reason);
            queue.tell_error();
        }
        Ok(())
    }

    /// Finds the chain's buffers and leases them all, or parks it.
    fn prepare(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        head: u16,
        mut origin: Origin,
    ) -> Result<Outcome, StopReason> {
        let mut buffers = std::mem::take(&mut self.scratch.buffers);
        let outcome = self.prepare_with(device, queue, memory, (head, &mut origin), &mut buffers);
        self.scratch.buffers = buffers;
        match outcome? {
            Prepared::Ready(ready) => Ok(Outcome::Ready(ready)),
            Prepared::Absent(wanted) => {
                self.park(
                    device,
                    queue,
                    (memory, head),
                    wanted,
                    (Purpose::Dma, origin),
                );
                Ok(Outcome::Parked)
            }
            Prepared::Refused(why) => Ok(Outcome::Refused(why)),
        }
    }

    fn prepare_with(
        &mut self,
        device: &Device,
        queue: &EngineQueue,
        memory: &Rc<DeviceMemory>,
        (head, origin): (u16, &mut Origin),
        buffers: &mut Buffers,
    ) -> Result<Prepared, StopReason> {
        let frame = match locate(queue, memory, head, buffers)? {
            Located::Frame(frame) => frame,
            Located::TableAbsent(spans) => {
                return Ok(Prepared::Absent(wanted_of(memory, &spans, Access::Read)));
            }
            Located::Refused { why, .. } => return Ok(Prepared::Refused(why)),
        };
        let sample = self.scratch.sample();
        let began = (sample == Sample::Yes).then(Instant::now);
        let mut leases = self.scratch.leases();
        let all_there = lease_all(memory, &frame, buffers, &mut leases);
        if let Some(began) = began {
            self.record_lookup(device, began, 1);
        }
        let held = self.injected(device, memory, buffers, origin);
        if held.is_some() {
            origin.mark_injected();
        }
        if all_there && held.is_none() {
            return Ok(Prepared::Ready(Ready {
                head,
                frame,
                leases,
                sample,
                course: origin.course(),
                bounce: None,
            }));
        }
        leases.release(memory);
        // A chain that had arrived in a bounce buffer does not land again at once: progress comes
        // first.
        if !matches!(origin, Origin::Again(_)) && held.is_none() {
            match self.may_land(device, memory, &frame, buffers) {
                MayLand::No => {}
                MayLand::Later(first) => return Ok(Prepared::Absent(first)),
                MayLand::Now(leases, bounce) => {
                    let bounce = Some(bounce);
                    return Ok(Prepared::Ready(Ready {
                        head,
                        frame,
                        leases,
                        sample,
                        course: origin.course(),
                        bounce,
                    }));
                }
            }
        }
        let mut absent = absent_of(memory, &frame, buffers);
        absent.extend(held);
        if absent.is_empty() {
            // The pages came back between the two checks. Request them all the same: the answer
            // comes at once.
            absent = all_of(memory, &frame, buffers);
        }
        Ok(Prepared::Absent(absent))
    }

    /// Adds one sample of the time spent on look-ups; `requests` is 1 for the half that counts the
    /// request. An interrupted sample says nothing about the look-up and is not counted.
    pub fn record_lookup(&self, device: &Device, began: Instant, requests: u64) {
        let counters = &device.shared.counters[self.index];
        let ns = nanos(began.elapsed()).saturating_sub(self.scratch.clock_ns);
        if ns < LOOKUP_INTERRUPTED_NS {
            add(&counters.lookup_ns, ns);
            add(&counters.lookup_samples, requests);
        }
    }

    fn park(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        (memory, head): (&DeviceMemory, u16),
        wanted: Vec<PageDemand>,
        (purpose, origin): (Purpose, Origin),
    ) {
        let since = match origin {
            Origin::Fresh(_) | Origin::Again(_) => Instant::now(),
            Origin::Resumed { since, .. } => since,
        };
        let mut course = origin.course();
        course.park(self.now_ns);
        let requests = self.parked.park(ParkedChain {
            asker: queue.asker(&device.shared, memory),
            waiter: Waiter::Chain(head),
            wanted,
            purpose,
            since,
            course,
        });
        self.charge(queue.key.device, queue, requests as u64 * FAULT_COST_BYTES);
        queue.count_parked(purpose);
        queue.note_pause(memory, self.now_ns);
        self.tell_faults(device, queue, requests, &course);
        let counters = &device.shared.counters[self.index];
        add(&counters.iopfs, requests as u64);
        add(&counters.parked, 1);
    }

    /// Answers a chain whose DMA cannot be done; only its status byte is written.
    fn fail_chain(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        head: u16,
        origin: Origin,
    ) -> Result<(), StopReason> {
        let mut buffers = Buffers::default();
        let status = match locate(queue, memory, head, &mut buffers)? {
            Located::Frame(frame) => frame.status,
            Located::Refused { status, .. } => status,
            Located::TableAbsent(spans) => {
                // The descriptor table holds the address of the status.
                let wanted = wanted_of(memory, &spans, Access::Read);
                self.park(
                    device,
                    queue,
                    (memory, head),
                    wanted,
                    (Purpose::BadStatus, origin),
                );
                return Ok(());
            }
        };
        let mut leases = self.scratch.leases();
        if leases.take(memory, status, Access::Write) {
            let answer = Answer {
                head,
                at: status,
                status: Status::IoError,
                written: 1,
                moved: 0,
                course: origin.course(),
            };
            return self.complete(device, queue, memory, answer, leases);
        }
        let wanted = wanted_of(memory, &[status], Access::Write);
        self.park(
            device,
            queue,
            (memory, head),
            wanted,
            (Purpose::BadStatus, origin),
        );
        Ok(())
    }
}

enum Prepared {
    Ready(Ready),
    Absent(Vec<PageDemand>),
    Refused(Refused),
}

/// Result of preparing a chain.
#[expect(
    clippy::large_enum_variant,
    reason = "one a request, handed on at once: a box would cost more than the copy"
)]
enum Outcome {
    Ready(Ready),
    Parked,
    /// It is to be answered with an error.
    Refused(Refused),
}
