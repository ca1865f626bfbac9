// SPDX-License-Identifier: Apache-2.0
//! The turn of a queue with posted chains: what has arrived goes into them.
//!
//! ```text
//!   the kind decides ◄── look: walk the chain, lease all its pages ── the ring
//!     │ an order
//!     ├─ fill:      the kind writes into the chosen chains, which are leased ─► used ring
//!     ├─ report:    chains that were filled earlier ─────────────────────────► used ring
//!     ├─ give back: a chain that can take nothing, with length 0 ────────────► used ring
//!     └─ ask:       page requests, whose answer is told to the kind
//! ```
//! All leases end with the step. No chain is parked, so none of the limits on parked chains applies,
//! and no request times out: pages of posted chains are awaited as long as their queue runs.
//!
//! A step costs its tenant the chains that were looked at, and the bytes that were moved. Whoever
//! posts chains that are never present pays for each look.

use super::{
    device::Device,
    fair::{CHAIN_COST_BYTES, FAULT_COST_BYTES, QUEUE_COST_BYTES, Verdict},
    io::Io,
    posted::{Posted, View, wanted},
    queue::{EngineQueue, QueueState},
    submit::Served,
};
use crate::{
    kind::posted::{Answered, ChainNo, Need, PostedOrder, Report, Ring},
    memory::DeviceMemory,
    parked::{Ended, ParkedChain, Purpose, Resumed, Waiter},
    shared::{StopReason, add, sub},
    slo::course::{Injected, RequestTimeline},
};
use pagetide_addr::Access;
use std::{rc::Rc, time::Instant};
use virtio_queue::QueueT;

impl Io {
    /// Serves a queue with posted chains until nothing arrives, or its share is spent.
    pub fn serve_posted(&mut self, device: &mut Device, queue: &mut EngineQueue) -> Served {
        let Some(memory) = device.memory.clone() else {
            return Served::Nothing;
        };
        if let Some(reason) = queue.lost(&memory) {
            device.shared.stop(reason);
        }
        if device.shared.is_stopped() {
            queue.tell_error();
            return Served::Nothing;
        }
        if !matches!(queue.state, QueueState::Running) {
            return Served::Nothing;
        }
        queue.credit.refill(QUEUE_COST_BYTES);
        if let Some(posted) = queue.posted.as_mut() {
            posted.saw_end = false;
        }
        if device.kind.has_arrivals(queue.key.queue) {
            self.reports.look_at_clock();
        }
        let mut served = Served::Nothing;
        loop {
            match self.fair.may_step(queue.key.device) {
                Verdict::Go if queue.credit.is_left() => {}
                Verdict::Go => return Served::InPart,
                Verdict::NextTurn => return Served::Spent,
                Verdict::Full => return Served::Full,
            }
            match self.arrive(device, queue, &memory) {
                Ok(PostedOrder::Nothing) => return served,
                Ok(_) => served = Served::InPart,
                Err(reason) => {
                    add(&self.reports.counters(&device.shared).malformed, 1);
                    device.shared.stop(reason);
                    queue.tell_error();
                    return served;
                }
            }
        }
    }

    /// One step.
    fn arrive(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> Result<PostedOrder, StopReason> {
        let number = queue.key.queue;
        let mut sight = std::mem::take(&mut self.scratch.sight);
        let mut view = View::new(memory, queue, &mut sight);
        let injector = &device.shared.injector;
        view.injector = injector.may_be_due(self.reports.now_ns).then_some(injector);
        view.now_ns = self.reports.now_ns;
        let order = device.kind.arrive(number, &mut view);
        let (looks, injected, broken) = (view.looks, view.injected, view.broken.take());
        self.scratch.sight = sight;
        self.charge(queue, looks * CHAIN_COST_BYTES);
        let counters = self.reports.counters(&device.shared);
        add(&counters.injected_iopfs, injected);
        let done = match broken.or_else(|| queue.lost(memory)) {
            Some(reason) => Err(reason),
            None => self.obey_order(device, queue, memory, order),
        };
        self.scratch.sight.close(memory);
        if let Some(posted) = queue.posted.as_mut() {
            self.count_wired(device, posted);
        }
        done.map(|()| order)
    }

    fn obey_order(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        order: PostedOrder,
    ) -> Result<(), StopReason> {
        match order {
            PostedOrder::Nothing => {}
            PostedOrder::Done => self.charge(queue, CHAIN_COST_BYTES),
            PostedOrder::Ask(chain, need) => self.ask_for(device, queue, memory, (chain, need)),
            PostedOrder::Wire(chain) => self.wire_posted(device, queue, memory, chain),
            PostedOrder::GiveBack(chain) => {
                let taken = queue.posted.as_mut().and_then(|posted| posted.take(chain));
                queue.use_posted(memory, taken.as_slice())?;
                let counters = self.reports.counters(&device.shared);
                add(&counters.errors, 1);
            }
            PostedOrder::Fill(report) => self.fill(device, queue, memory, report)?,
            PostedOrder::Report => self.report_filled(device, queue, memory)?,
        }
        Ok(())
    }

    /// Has the chosen chains filled.
    fn fill(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        report: Report,
    ) -> Result<(), StopReason> {
        let number = queue.key.queue;
        let mut spans = std::mem::take(&mut self.scratch.spans);
        let mut entries = std::mem::take(&mut self.scratch.entries);
        spans.clear();
        entries.clear();
        let mut course = RequestTimeline::popped(self.reports.now_ns);
        course.submit(self.reports.now_ns);
        let mut rooms = 0;
        for chain in device.kind.chosen(number) {
            // Each was looked at in this step, and is leased.
            let seen = self.scratch.sight.of(*chain);
            debug_assert!(seen.is_some(), "{chain:?} was chosen and not looked at");
            let before = spans.len();
            spans.extend(seen.into_iter().flat_map(|seen| &seen.buffers.writable));
            let room: u64 = spans[before..].iter().map(|s| u64::from(s.len)).sum();
            entries.push((0, u32::try_from(room).unwrap_or(u32::MAX)));
            rooms += room;
        }
        let bytes = device.kind.fill(number, memory, &spans, entries.len());
        debug_assert!(
            u64::from(bytes) <= rooms,
            "more was written than there is room for"
        );
        // Before anything is reported that was perhaps read from lost memory.
        if let Some(reason) = queue.lost(memory) {
            return Err(reason);
        }
        self.reports
            .log_accesses(device, memory, &spans, Access::Write);
        let mut left = bytes;
        if let Some(posted) = queue.posted.as_mut() {
            for (chain, entry) in device.kind.chosen(number).iter().zip(&mut entries) {
                let its = entry.1.min(left);
                left -= its;
                match report {
                    Report::Now => *entry = (posted.take(*chain).map_or(0, |(head, _)| head), its),
                    Report::Later => posted.set_filled(*chain, its),
                }
            }
        }
        self.charge(queue, u64::from(bytes));
        let counters = self.reports.counters(&device.shared);
        add(&counters.requests, 1);
        add(&counters.read_bytes, u64::from(bytes));
        if report == Report::Now {
            queue.use_posted(memory, &entries)?;
        }
        let key = queue.key;
        self.reports.done(device, key, bytes, &course);
        self.scratch.spans = spans;
        self.scratch.entries = entries;
        Ok(())
    }

    /// Puts the chosen chains, which were filled earlier, into the used ring.
    fn report_filled(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
    ) -> Result<(), StopReason> {
        let mut entries = std::mem::take(&mut self.scratch.entries);
        entries.clear();
        if let Some(posted) = queue.posted.as_mut() {
            let chosen = device.kind.chosen(queue.key.queue).iter();
            entries.extend(chosen.filter_map(|chain| posted.take(*chain)));
        }
        let used = queue.use_posted(memory, &entries);
        self.scratch.entries = entries;
        used
    }

    /// Requests the absent pages of a chain.
    fn ask_for(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        (chain, need): (ChainNo, Need),
    ) {
        // Usually it was looked at in an earlier step: the order waited for its turn.
        let mut sight = std::mem::take(&mut self.scratch.sight);
        View::new(memory, queue, &mut sight).look(chain);
        let mut pages = match sight.of(chain) {
            Some(seen) => wanted(memory, seen),
            None => Vec::new(),
        };
        self.scratch.sight = sight;
        let mut course = RequestTimeline::popped(self.reports.now_ns);
        let held = queue.posted.as_mut().and_then(|posted| {
            let (_, demand) = posted.held.take_if(|(held, _)| *held == chain)?;
            Some(demand)
        });
        if let Some(demand) = held {
            pages = vec![demand];
            course.injected = Injected::Yes;
        }
        if pages.is_empty() {
            // The ring is broken, or the chain has no buffers any more: the next look says so.
            device
                .kind
                .answered(queue.key.queue, chain, Answered::Present);
            return;
        }
        course.park(self.reports.now_ns);
        let requests = self.parked.park(ParkedChain {
            asker: queue.asker(&device.shared, memory),
            waiter: Waiter::Posted(chain, need),
            wanted: pages,
            purpose: Purpose::Dma,
            since: Instant::now(),
            course,
        });
        self.charge(queue, requests as u64 * FAULT_COST_BYTES);
        if need == Need::Now {
            self.reports.faults(device, queue.key, requests, &course);
            let counters = self.reports.counters(&device.shared);
            add(&counters.iopfs, requests as u64);
        }
    }

    /// Wires the pages of a chain, which is leased, until it is used.
    fn wire_posted(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        chain: ChainNo,
    ) {
        let seen = self.scratch.sight.of(chain);
        if let (Some(seen), Some(posted)) = (seen, queue.posted.as_mut()) {
            posted.wire(memory, chain, &seen.buffers.writable);
            self.count_wired(device, posted);
        }
    }

    /// Counts what was wired, and what is no longer, since the last time.
    fn count_wired(&self, device: &Device, posted: &mut Posted) {
        let (more, less) = posted.take_wired_news();
        let counters = self.reports.counters(&device.shared);
        add(&counters.wired_bytes, more);
        sub(&counters.wired_bytes, less);
    }

    /// Tells a kind that the pages of a posted chain were answered.
    pub fn posted_answered(
        &mut self,
        device: &mut Device,
        resumed: &Resumed,
        (chain, need): (ChainNo, Need),
    ) {
        let key = resumed.queue;
        let queue = device.queues.get(usize::from(key.queue));
        let queue = queue.and_then(Option::as_ref);
        if queue.is_none_or(|queue| queue.key != key) {
            return;
        }
        let mut course = resumed.course;
        if course.is_held() {
            let parked_ns = course.resume(self.reports.now_ns);
            device.shared.injector.resumed(parked_ns);
        }
        let answer = match (resumed.ended, need) {
            (Ended::Present, _) => Answered::Present,
            // A host may refuse what nothing waits for.
            (_, Need::Ahead) => Answered::Present,
            (Ended::Lost | Ended::TimedOut, Need::Now) => Answered::Lost,
        };
        device.kind.answered(key.queue, chain, answer);
    }

    /// Gives back what a queue that ends has of its driver: first what was filled and is not
    /// reported, then all other chains that were read, empty.
    pub fn end_posted(&mut self, device: &mut Device, queue: &mut EngineQueue) {
        if queue.posted.is_none() {
            return;
        }
        let held = self.parked.held_of(queue.key);
        device.shared.injector.given_up(held);
        self.parked.abandon(queue.key);
        if let Err(reason) = self.give_back_all(device, queue) {
            device.shared.stop(reason);
            queue.tell_error();
        }
        if let Some(posted) = queue.posted.as_mut() {
            posted.unwire_all();
            self.count_wired(device, posted);
        }
        device.kind.stopped(queue.key.queue);
    }

    fn give_back_all(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
    ) -> Result<(), StopReason> {
        let Some(memory) = device.memory.clone() else {
            return Ok(());
        };
        if device.shared.is_stopped() || !queue.queue.ready() {
            return Ok(());
        }
        while device.kind.stopping(queue.key.queue) == PostedOrder::Report {
            self.report_filled(device, queue, &memory)?;
        }
        let posted = queue.posted.as_mut();
        let heads = posted.map(|posted| posted.take_all()).unwrap_or_default();
        let entries: Vec<(u16, u32)> = heads.into_iter().map(|head| (head, 0)).collect();
        if !entries.is_empty() {
            queue.use_posted(&memory, &entries)?;
        }
        if let Some(record) = queue
            .posted
            .as_mut()
            .and_then(|posted| posted.record.take())
        {
            record.end();
        }
        match queue.needs_call {
            true => queue.call_if_wanted(&memory),
            false => Ok(()),
        }
    }
}
