// SPDX-License-Identifier: Apache-2.0
//! The turn of a queue with posted chains: what has arrived goes into them.
//!
//! ```text
//!   the kind decides ◄── look: walk the chain at first, lease all its pages ── the ring
//!     │ an order
//!     ├─ fill:      the kind writes into the chosen chains, which are leased ─► used ring
//!     ├─ report:    chains that were filled earlier ─────────────────────────► used ring
//!     ├─ give back: a chain that can take nothing, with length 0 ────────────► used ring
//!     └─ ask:       page requests, whose answer is told to the kind
//! ```
//! All leases end with the step. No chain is parked, so none of the limits on parked chains applies,
//! and no request times out: pages of posted chains are awaited as long as their queue runs, though a kind may do
//! without a chain meanwhile.
//!
//! A step costs its tenant the chains that were looked at, the bytes that were moved, and the passage through the
//! kernel if the link is there. Whoever posts chains that are never present pays for each look.

use super::{
    device::Device,
    fair::{CHAIN_COST_BYTES, FAULT_COST_BYTES, LOOK_COST_BYTES, QUEUE_COST_BYTES, Verdict},
    io::Io,
    posted::{Posted, View, wanted},
    queue::{EngineQueue, QueueState},
    submit::Served,
    wires::PartAnswer,
};
use crate::{
    kind::posted::{Answered, ChainNo, Need, PostedOrder, Report, Ring},
    memory::DeviceMemory,
    page_demand::{PageDemand, PartNo},
    parked::{Ended, ParkedChain, Purpose, Resumed, Waiter},
    shared::{StopReason, add, sub},
    slo::course::{Injected, RequestTimeline},
};
use pagetide_addr::Access;
use std::{rc::Rc, time::Instant};
use virtio_queue::QueueT;

/// Parts of memory that are wired in a turn, if all of it is to be.
const PARTS_PER_TURN: usize = 16;

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
        queue.publish_later();
        let served = self.serve_arrivals(device, queue, &memory);
        match queue.publish_all(&memory) {
            Ok(()) => served,
            Err(reason) => {
                device.shared.stop(reason);
                queue.tell_error();
                Served::Nothing
            }
        }
    }

    fn serve_arrivals(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> Served {
        queue.credit.refill(QUEUE_COST_BYTES);
        if let Some(posted) = queue.posted.as_mut() {
            posted.saw_end = false;
        }
        if device.kind.has_arrivals(queue.key.queue) {
            self.reports.look_at_clock();
        }
        let mut served = self.wire_more(device, queue, memory);
        loop {
            match self.fair.may_step(queue.key.device) {
                Verdict::Go if queue.credit.is_left() => {}
                Verdict::Go => return Served::InPart,
                Verdict::NextTurn => return Served::Spent,
                Verdict::Full => return Served::Full,
            }
            match self.arrive(device, queue, memory) {
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
        let mut view = View::new(memory, queue);
        let injector = &device.shared.injector;
        view.injector = injector.may_be_due(self.reports.now_ns).then_some(injector);
        view.now_ns = self.reports.now_ns;
        let order = device.kind.arrive(number, &mut view);
        let (cost_bytes, injected, broken) = (view.cost_bytes, view.injected, view.broken.take());
        self.charge(queue, cost_bytes);
        let counters = self.reports.counters(&device.shared);
        add(&counters.injected_iopfs, injected);
        let done = match broken.or_else(|| queue.lost(memory)) {
            Some(reason) => Err(reason),
            None => self.obey_order(device, queue, memory, order),
        };
        if let Some(posted) = queue.posted.as_mut() {
            posted.end_step(memory);
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
                queue.put_used(memory, taken.as_slice())?;
                self.charge(queue, LOOK_COST_BYTES);
                let counters = self.reports.counters(&device.shared);
                add(&counters.errors, 1);
            }
            PostedOrder::Fill(report) => self.fill(device, queue, memory, report)?,
            PostedOrder::Report => self.report_filled(device, queue, memory)?,
            PostedOrder::ReadBack => {
                debug_assert!(false, "nobody goes on with a queue that runs");
            }
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
        let now_ns = self.reports.now_ns;
        let since_ns = device.kind.waits_since(number);
        let mut course = RequestTimeline::popped(since_ns.unwrap_or(now_ns).min(now_ns));
        if let Some(since_ns) = since_ns {
            course.park(since_ns.min(now_ns));
            course.resume(now_ns);
        }
        course.submit(now_ns);
        let mut rooms = 0;
        for chain in device.kind.chosen(number) {
            // Each was looked at in this step, and is leased.
            let seen = queue.posted.as_ref().and_then(|posted| posted.seen(*chain));
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
        let passage = match device.kind.enters_kernel(number) {
            true => CHAIN_COST_BYTES,
            false => 0,
        };
        self.charge(queue, passage + u64::from(bytes));
        let counters = self.reports.counters(&device.shared);
        add(&counters.requests, 1);
        add(&counters.read_bytes, u64::from(bytes));
        if report == Report::Now {
            queue.put_used(memory, &entries)?;
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
        let used = queue.put_used(memory, &entries);
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
        // Read before the ring is: see `blank`.
        let posted_ns = self.reports.now_ns;
        let mut view = View::new(memory, queue);
        view.look(chain);
        let mut pages = wanted(&mut view, chain, posted_ns);
        let cost_bytes = view.cost_bytes;
        self.charge(queue, cost_bytes);
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
        if let Some(posted) = queue.posted.as_mut() {
            posted.wire(memory, chain);
            self.count_wired(device, posted);
        }
    }

    /// Goes on to wire all memory, if that is to be.
    fn wire_more(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> Served {
        let posted = queue.posted.as_ref();
        if !posted.is_some_and(|posted| posted.wires.has_more(memory)) {
            return Served::Nothing;
        }
        let asker = queue.asker(&device.shared, memory);
        let Some(posted) = queue.posted.as_mut() else {
            return Served::Nothing;
        };
        let part = posted.wires.wire_more(memory, PARTS_PER_TURN);
        if let Some(part) = part {
            let wanted = PageDemand {
                domain: part.domain,
                pages: part.pages,
                access: Access::Write,
                hold_us: 0,
                posted_ns: 0,
            };
            let requests = self.parked.park(ParkedChain {
                asker,
                waiter: Waiter::Part(part.number),
                wanted: vec![wanted],
                purpose: Purpose::Dma,
                since: Instant::now(),
                course: RequestTimeline::default(),
            });
            let counters = self.reports.counters(&device.shared);
            add(&counters.prefaults, requests as u64);
        }
        self.count_wired(device, posted);
        self.charge(queue, PARTS_PER_TURN as u64 * CHAIN_COST_BYTES);
        Served::InPart
    }

    /// The pages of a part of memory that is to be wired were answered.
    pub fn part_answered(&mut self, device: &mut Device, resumed: &Resumed, part: PartNo) {
        let key = resumed.queue;
        let queue = device.queues.get_mut(usize::from(key.queue));
        let queue = queue.and_then(Option::as_mut);
        let Some(queue) = queue.filter(|queue| queue.key == key) else {
            return;
        };
        let answer = match resumed.ended {
            Ended::Present => PartAnswer::Present,
            Ended::Lost | Ended::TimedOut => PartAnswer::Lost,
        };
        if let Some(mut posted) = queue.posted.take() {
            posted.wires.part_answered(part, answer);
            self.count_wired(device, &mut posted);
            if let Some(Some(queue)) = device.queues.get_mut(usize::from(key.queue)) {
                queue.posted = Some(posted);
            }
        }
    }

    /// Counts what was wired, and what is no longer, since the last time.
    fn count_wired(&self, device: &Device, posted: &mut Posted) {
        let (more, less) = posted.wires.take_news();
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
        let ended = match device.kind.is_anothers() {
            true => self.leave_all(device, queue),
            false => self.give_back_all(device, queue),
        };
        if let Err(reason) = ended {
            device.shared.stop(reason);
            queue.tell_error();
        }
        if let Some(posted) = queue.posted.as_mut() {
            posted.wires.unwire_all();
            self.count_wired(device, posted);
        }
        device.kind.stopped(queue.key.queue);
    }

    /// Keeps for another process what a queue that ends has. Its chains stay as they are: that process finds them in
    /// the record, as after a death. What was filled and not reported would overtake what waits before it if it was
    /// reported now, so it goes along as well.
    fn leave_all(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
    ) -> Result<(), StopReason> {
        let number = queue.key.queue;
        while device.kind.leaving(number) == PostedOrder::ReadBack {
            let Some(memory) = device.memory.clone() else {
                continue;
            };
            let chosen = device.kind.chosen(number);
            match queue.read_back(&memory, chosen) {
                Some(bytes) => device.kind.read_back(number, &bytes),
                // Its pages were evicted meanwhile, and nobody brings them back now: it is late or early, not lost.
                None => self.report_filled(device, queue, &memory)?,
            }
        }
        if let Some(posted) = queue.posted.as_mut() {
            posted.record = None;
        }
        Ok(())
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
        // One that names no descriptor was only read ahead. The driver cannot want it back.
        let is_descriptor = |head: &u16| *head < queue.table.size;
        let heads = heads.into_iter().filter(is_descriptor);
        let entries: Vec<(u16, u32)> = heads.map(|head| (head, 0)).collect();
        if !entries.is_empty() {
            queue.put_used(&memory, &entries)?;
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
