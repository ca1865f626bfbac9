// SPDX-License-Identifier: Apache-2.0
//! Flavour *paper* once more, as simply as it can be said: time goes by one
//! nanosecond after the other, and at each everything that might happen is
//! looked for in vectors. Shares nothing with the real model but the
//! configuration, the events and the shape of what comes out.

use pagetide_sim::config::{
    CacheConfig, Completion, Config, FaultDiscipline, HostPage, Predictor, PrefetchTrigger,
    PtbUnit, WalkConfig, WalkCost,
};
use pagetide_sim::{AllCounts, CacheCounts, FaultOutcome, Step, StepRecord};
use pagetide_trace::{Event, EventKind};

use crate::cache::{Cache, Key};
use crate::faults::{Faults, Stage, summary};

/// A page as a tenant asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    pub iova: u64,
    pub domain: u32,
    pub source: u32,
    pub tenant: u32,
    /// 1: 4 KiB, 2: 2 MiB, 3: 1 GiB.
    pub level: u32,
}

impl Page {
    /// The aligned span of `1 << shift` bytes around the address.
    fn span(&self, shift: u32) -> Key {
        (self.domain, self.iova & !((1 << shift) - 1))
    }

    pub fn key(&self) -> Key {
        self.span(level_shift(self.level))
    }
}

fn level_shift(level: u32) -> u32 {
    [12, 21, 30, 39][level as usize - 1]
}

/// How a request comes to the device.
#[derive(Clone, Copy, PartialEq)]
pub enum Attempt {
    First,
    /// After it waited behind another.
    Behind,
    /// After it waited for its page.
    Again,
}

#[derive(Clone, Copy)]
pub struct Request {
    pub page: Page,
    next_use: u64,
    packet: usize,
    prefetch: bool,
    /// An invalidation met it on its way back.
    void: bool,
    /// Its walk found no page.
    absent: bool,
    pub attempt: Attempt,
    /// The agent knows its address space.
    identified: bool,
    /// Levels of the guest's table that its walk reads.
    reads: (u32, u32),
    issued: u64,
    refused: u64,
}

/// A stage's queue, in order of arrival.
struct Queue(Completion, Vec<(u64, Request)>);

impl Queue {
    fn take(&mut self, now: u64) -> Option<Request> {
        let ready = (0..self.1.len()).filter(|at| self.1[*at].0 <= now);
        let at = match self.0 {
            Completion::OutOfOrder => ready.min_by_key(|at| self.1[*at].0)?,
            Completion::InOrder => ready.min().filter(|at| *at == 0)?,
        };
        Some(self.1.remove(at).1)
    }
}

/// What came out.
#[derive(Default, Debug, PartialEq)]
pub struct Result {
    pub faults: Option<FaultOutcome>,
    pub elapsed_ns: u64,
    pub ended: u64,
    pub packets: u64,
    pub dropped: u64,
    pub walks: u64,
    pub accesses: u64,
    pub invalidations: u64,
    pub sent: u64,
    pub filled: u64,
    pub caches: AllCounts,
    /// Slots of each of several devices that were lost, and that were idle.
    pub devices: Vec<(u64, u64)>,
    /// Source, requests, hits in the DevTLB, hits in the buffer; by first request.
    pub tenants: Vec<(u32, u64, u64, u64)>,
    pub steps: Vec<(u64, Step, u32, u64)>,
}

pub fn step(record: &StepRecord) -> (u64, Step, u32, u64) {
    (record.time_ns, record.step, record.source, record.iova)
}

/// One device.
struct Device {
    /// The link's next slot.
    slot: u64,
    /// The trace has more for it.
    more: bool,
    /// What was read for it: events, and the index of each request among all.
    ahead: Vec<(usize, Event)>,
    /// When the next packet was first refused.
    tried: Option<u64>,
    to_device: Queue,
    back: Queue,
    context: Cache,
    devtlb: Cache,
    buffer: Cache,
    sources_seen: Vec<u32>,
    successors: Vec<(u32, u32)>,
    dropped: u64,
    idle: u64,
}

pub struct Model<'a> {
    config: &'a Config,
    events: &'a [Event],
    /// Index of the next event.
    at: usize,
    /// Requests read.
    read: usize,
    now: u64,
    /// Requests that each packet waits for, and its device.
    packets: Vec<(u32, usize)>,
    devices: Vec<Device>,
    agent: Queue,
    walking: Queue,
    /// Walks that no walker is free for, in order of arrival, with their times.
    unwalked: Vec<(u64, Request)>,
    iotlb: Cache,
    levels: [Cache; 4],
    nested: Cache,
    pasids: Cache,
    domains: Vec<u32>,
    histories: Vec<Vec<Page>>,
    faults: Faults,
    result: Result,
}

impl<'a> Model<'a> {
    pub fn new(config: &'a Config, events: &'a [Event]) -> Self {
        let queue = || Queue(config.completion, Vec::new());
        let cache = |cache: &CacheConfig, shift| Cache::new(cache, shift, config.seed);
        let device = || Device {
            slot: 0,
            more: true,
            ahead: Vec::new(),
            tried: None,
            to_device: queue(),
            back: queue(),
            context: Cache::of_contexts(&config.context_cache, config.seed),
            devtlb: cache(&config.devtlb, 21),
            buffer: cache(&config.prefetch.buffer(), 21),
            sources_seen: Vec::new(),
            successors: Vec::new(),
            dropped: 0,
            idle: 0,
        };
        Self {
            config,
            events,
            at: 0,
            read: 0,
            now: 0,
            packets: Vec::new(),
            devices: (0..config.devices.count).map(|_| device()).collect(),
            agent: queue(),
            walking: queue(),
            unwalked: Vec::new(),
            iotlb: cache(&config.iotlb, 21),
            levels: [
                cache(&config.l1, 12),
                cache(&config.l2, 21),
                cache(&config.l3, 30),
                cache(&config.l4, 39),
            ],
            nested: cache(&config.nested_tlb, host_shift(&config.walk)),
            pasids: cache(&config.pasid_cache, 12),
            domains: Vec::new(),
            histories: Vec::new(),
            faults: Faults::new(config),
            result: Result::default(),
        }
    }

    /// Entries of a device's PTB in use.
    fn in_use(&self, device: usize) -> u32 {
        let waits = self.packets.iter().filter(|packet| packet.1 == device);
        match self.config.ptb.unit {
            PtbUnit::Requests => waits.map(|packet| packet.0).sum(),
            PtbUnit::Packets => u32::try_from(waits.filter(|packet| packet.0 > 0).count()).unwrap(),
        }
    }

    /// The device of a source.
    fn device_of(&self, source: u32) -> usize {
        let devices = &self.config.devices;
        ((source >> devices.source_low_bit) % devices.count) as usize
    }

    /// Of an event that the device `reader` has read, the last of the trace so far.
    fn device_of_event(&self, reader: usize, event: &Event) -> usize {
        let before = &self.events[..self.at - 1];
        let mut asked = before
            .iter()
            .filter(|other| other.kind == EventKind::Translate && other.domain == event.domain);
        match event.kind {
            EventKind::Translate
            | EventKind::InvalidateSource
            | EventKind::Join
            | EventKind::Leave => self.device_of(event.source.0),
            EventKind::InvalidateAll | EventKind::InvalidateContexts => reader,
            _ => asked
                .next_back()
                .map_or(reader, |other| self.device_of(other.source.0)),
        }
    }

    fn is_over(&self) -> bool {
        let idle = |at: usize| !self.devices[at].more && self.in_use(at) == 0;
        (0..self.devices.len()).all(idle) && self.faults.parked() == 0
    }

    pub fn run(mut self) -> Result {
        let link = &self.config.link;
        loop {
            for at in 0..self.devices.len() {
                let device = &mut self.devices[at];
                if device.slot * link.packet_bytes * 8 / link.gbps != self.now || !device.more {
                    continue;
                }
                device.slot += 1;
                if self.in_use(at) >= self.config.ptb.entries || self.faults.refuses(at) {
                    self.devices[at].dropped += 1;
                    self.devices[at].tried.get_or_insert(self.now);
                } else if self.reads_on(at) {
                    self.devices[at].more = self.packet(at);
                } else {
                    self.devices[at].idle += 1;
                    // No packet was waiting.
                    self.devices[at].tried = None;
                    self.leading(at);
                }
            }
            if self.is_over() {
                break;
            }
            self.stages();
            self.faults.memory.nanosecond_passes();
            self.now += 1;
            if self.is_over() {
                break;
            }
        }
        self.result.elapsed_ns = self.now;
        self.result.dropped = self.devices.iter().map(|device| device.dropped).sum();
        self.result.faults = self.fault_outcome();
        if self.devices.len() > 1 {
            self.result.devices = self.devices.iter().map(|d| (d.dropped, d.idle)).collect();
        }
        let sum = |of: fn(&Device) -> CacheCounts| {
            let mut sum = CacheCounts::default();
            for device in &self.devices {
                let counts = of(device);
                sum.lookups += counts.lookups;
                sum.hits += counts.hits;
                sum.insertions += counts.insertions;
                sum.evictions += counts.evictions;
                sum.invalidated += counts.invalidated;
            }
            sum
        };
        self.result.caches = AllCounts {
            context_cache: sum(|device| device.context.counts),
            devtlb: sum(|device| device.devtlb.counts),
            prefetch_buffer: sum(|device| device.buffer.counts),
            iotlb: self.iotlb.counts,
            l1: self.levels[0].counts,
            l2: self.levels[1].counts,
            l3: self.levels[2].counts,
            l4: self.levels[3].counts,
            nested_tlb: self.nested.counts,
            pasid_cache: self.pasids.counts,
        };
        self.result
    }

    /// Reads the trace until there is a packet for the device, or the end; false if that would take it too far ahead
    /// of another device.
    fn reads_on(&mut self, at: usize) -> bool {
        let per_packet = self.config.link.requests_per_packet as usize;
        let most = self.config.devices.ahead_packets as usize;
        let requests = |device: &Device| {
            let ahead = device.ahead.iter();
            ahead
                .filter(|(_, e)| e.kind == EventKind::Translate)
                .count()
        };
        while requests(&self.devices[at]) < per_packet {
            // One alone has only itself to wait for.
            let full = |device: &Device| requests(device) / per_packet >= most;
            if self.devices.len() > 1 && self.devices.iter().any(full) {
                return false;
            }
            let Some(event) = self.events.get(self.at) else {
                break;
            };
            self.at += 1;
            let of = self.device_of_event(at, event);
            self.devices[of].ahead.push((self.read, *event));
            self.read += usize::from(event.kind == EventKind::Translate);
        }
        true
    }

    fn fault_outcome(&self) -> Option<FaultOutcome> {
        let faults = &self.faults;
        if faults.config.discipline == FaultDiscipline::Pinned && faults.config.tenants == 0 {
            return None;
        }
        let memory = &faults.memory;
        Some(FaultOutcome {
            waits: faults.waits,
            held_requests: faults.held,
            page_requests: faults.page_requests,
            page_requests_per_second: if self.now == 0 {
                0.0
            } else {
                (faults.page_requests * 1_000_000_000) as f64 / self.now as f64
            },
            page_ins: memory.page_ins,
            page_outs: memory.page_outs,
            parked_requests_most: faults.parked_most,
            resident_share: if memory.known_ns == 0 {
                1.0
            } else {
                memory.present_ns as f64 / memory.known_ns as f64
            },
            service: summary(&faults.service),
            faulting: summary(&faults.faulting),
            neighbours: summary(&faults.neighbours),
        })
    }

    fn stages(&mut self) {
        while let Some((key, stage)) = self.faults.due(self.now) {
            match stage {
                Stage::Arrived => self.faults.arrived(self.now, key),
                Stage::Handled => {
                    self.faults.handled(self.now, key);
                    self.result.steps.push((self.now, Step::PageIn, 0, key.1));
                    self.void_gone();
                }
                Stage::Answered => self.answered(key),
            }
        }
        for at in 0..self.devices.len() {
            while self.faults.engines[at].is_none()
                && let Some(request) = self.devices[at].to_device.take(self.now)
            {
                self.at_device(request);
            }
        }
        while let Some(request) = self.agent.take(self.now) {
            self.at_agent(request);
        }
        while let Some(request) = self.walking.take(self.now) {
            self.walked(request);
        }
        for at in 0..self.devices.len() {
            while let Some(request) = self.devices[at].back.take(self.now) {
                self.returned(request);
            }
        }
    }

    fn step(&mut self, step: Step, page: &Page) {
        self.result
            .steps
            .push((self.now, step, page.source, page.iova));
    }

    fn packet(&mut self, at: usize) -> bool {
        self.packets.push((0, at));
        for _ in 0..self.config.link.requests_per_packet {
            let Some((index, event)) = self.event(at) else {
                return false;
            };
            self.packets.last_mut().unwrap().0 += 1;
            self.issue(at, index, &event);
        }
        self.devices[at].tried = None;
        self.result.packets += 1;
        true
    }

    fn event(&mut self, at: usize) -> Option<(usize, Event)> {
        self.leading(at);
        let ahead = &mut self.devices[at].ahead;
        (!ahead.is_empty()).then(|| ahead.remove(0))
    }

    /// What is before the device's next request takes effect.
    fn leading(&mut self, at: usize) {
        let is_other = |(_, event): &(usize, Event)| event.kind != EventKind::Translate;
        while self.devices[at].ahead.first().is_some_and(is_other) {
            let (_, event) = self.devices[at].ahead.remove(0);
            self.apply(&event);
        }
    }

    fn issue(&mut self, at: usize, index: usize, event: &Event) {
        let source = event.source.0;
        let tenants = &mut self.result.tenants;
        let tenant = tenants.iter().position(|tenant| tenant.0 == source);
        let tenant = tenant.unwrap_or_else(|| {
            tenants.push((source, 0, 0, 0));
            self.domains.push(0);
            self.histories.push(Vec::new());
            tenants.len() - 1
        });
        self.domains[tenant] = event.domain.0;
        let request = Request {
            page: page_of(event, u32::try_from(tenant).unwrap()),
            next_use: self.next_use(index, event),
            packet: self.packets.len() - 1,
            prefetch: false,
            void: false,
            absent: false,
            attempt: Attempt::First,
            identified: false,
            reads: (0, 0),
            issued: self.now,
            refused: self.now - self.devices[at].tried.unwrap_or(self.now),
        };
        let latency = &self.config.latency;
        let context = &mut self.devices[at].context;
        let known = context.exists() && {
            let page = context_page(request.page.tenant);
            context.look_up(&page, page.key(), 0)
        };
        if !context.exists() {
            context.counts.lookups += 1;
        }
        let wait = if known {
            latency.context_hit_ns
        } else {
            2 * latency.pcie_ns + latency.context_accesses * latency.dram_ns
        };
        let step = if known {
            Step::Issue
        } else {
            Step::ContextMiss
        };
        self.step(step, &request.page);
        let ready = self.now + wait;
        self.devices[at].to_device.1.push((ready, request));
    }

    /// Index, among the requests, of the next one for the same page.
    fn next_use(&self, index: usize, event: &Event) -> u64 {
        let key = page_of(event, 0).key();
        let requests = self
            .events
            .iter()
            .filter(|e| e.kind == EventKind::Translate);
        (0..)
            .zip(requests)
            .skip(index + 1)
            .find(|(_, later)| page_of(later, 0).key() == key)
            .map_or(u64::MAX, |(index, _)| index)
    }

    /// Whether a request goes on at the device.
    fn passes(&mut self, request: Request) -> bool {
        let page = request.page;
        let discipline = self.faults.discipline(page.tenant);
        if discipline == FaultDiscipline::Pinned {
            return true;
        }
        if request.attempt != Attempt::First {
            self.faults.queue(page.tenant).coming -= 1;
        }
        let first = request.attempt == Attempt::First;
        let behind = request.attempt == Attempt::Behind;
        let stops = (first && self.faults.is_paused(page.tenant))
            || (behind && self.faults.faulting_now(page.tenant) > 0);
        if stops {
            self.step(Step::Held, &page);
            self.faults.held += 1;
            let queue = &mut self.faults.queue(page.tenant).behind;
            queue.insert(if behind { 0 } else { queue.len() }, request);
            self.parked(&request);
            return false;
        }
        let present = (self.faults.memory).touch(page.key(), 1 << level_shift(page.level));
        self.void_gone();
        if !present && discipline != FaultDiscipline::AtsPri {
            self.fault(request);
            return false;
        }
        self.next_of_queue(self.device_of(page.source), page.tenant);
        true
    }

    /// The request has become one that is parked.
    fn parked(&mut self, request: &Request) {
        self.packets[request.packet].0 -= 1;
        self.faults.parked_most = self.faults.parked_most.max(self.faults.parked());
        self.resume(self.device_of(request.page.source));
    }

    fn fault(&mut self, mut request: Request) {
        request.void = false;
        request.absent = false;
        request.identified = false;
        self.step(Step::Fault, &request.page);
        if request.attempt == Attempt::Again {
            self.faults.memory.release(request.page.key());
        }
        self.faults.ask(self.now, request);
        if self.faults.config.discipline == FaultDiscipline::Touch {
            let at = self.device_of(request.page.source);
            self.faults.engines[at] = Some(request);
        } else {
            self.parked(&request);
        }
    }

    fn answered(&mut self, key: Key) {
        let mut waiters = self.faults.answered(self.now, key);
        for request in &mut waiters {
            request.attempt = Attempt::Again;
            self.faults.queue(request.page.tenant).coming += 1;
        }
        if self.faults.config.discipline == FaultDiscipline::Touch {
            for request in waiters {
                let at = self.device_of(request.page.source);
                self.faults.engines[at] = None;
                self.at_device(request);
            }
            return;
        }
        for request in &waiters {
            let at = self.device_of(request.page.source);
            self.faults.resuming[at].push(*request);
        }
        for at in 0..self.devices.len() {
            let mut devices = waiters.iter().map(|w| self.device_of(w.page.source));
            if devices.any(|of| of == at) {
                self.resume(at);
            }
        }
    }

    fn next_of_queue(&mut self, at: usize, tenant: u32) {
        let faulting = self.faults.faulting_now(tenant) > 0;
        let queue = self.faults.queue(tenant);
        if faulting || queue.coming > 0 || queue.behind.is_empty() {
            return;
        }
        let mut next = queue.behind.remove(0);
        next.attempt = Attempt::Behind;
        queue.coming += 1;
        self.faults.resuming[at].push(next);
        self.resume(at);
    }

    /// Parked requests of a device that may go on take free entries of its PTB.
    fn resume(&mut self, at: usize) {
        while let Some(next) = self.faults.resuming[at].first().copied() {
            let shares =
                self.config.ptb.unit == PtbUnit::Packets && self.packets[next.packet].0 > 0;
            if !shares && self.in_use(at) >= self.config.ptb.entries {
                break;
            }
            self.faults.resuming[at].remove(0);
            self.packets[next.packet].0 += 1;
            self.step(Step::Resume, &next.page);
            self.devices[at].to_device.1.push((self.now, next));
        }
    }

    fn void_gone(&mut self) {
        while !self.faults.memory.gone.is_empty() {
            let (key, bytes) = self.faults.memory.gone.remove(0);
            self.void_pages(key.0, key.1, bytes);
            self.result.steps.push((self.now, Step::PageOut, 0, key.1));
        }
    }

    /// Translations of absent memory are void, also those that requests have been promised.
    fn void_pages(&mut self, domain: u32, first: u64, bytes: u64) {
        let void =
            |key: Key, span: u64| key.0 == domain && key.1 < first + bytes && first < key.1 + span;
        let largest = |key: Key| {
            [1 << 30, 1 << 21, 1 << 12]
                .into_iter()
                .find(|s| key.1.is_multiple_of(*s))
        };
        for tlb in tlbs(&mut self.devices, &mut self.iotlb) {
            tlb.invalidate(|key| void(key, largest(key).unwrap()));
        }
        for (level, cache) in (1..).zip(&mut self.levels) {
            cache.invalidate(|key| void(key, 1 << level_shift(level)));
        }
        let host_bytes = 1 << host_shift(&self.config.walk);
        self.nested.invalidate(|key| void(key, host_bytes));
        for request in answered(&mut self.walking, &mut self.unwalked, &mut self.devices) {
            let page = request.page;
            request.void |= void(page.key(), 1 << level_shift(page.level));
        }
        for (_, request) in &mut self.agent.1 {
            let page = request.page;
            let promised = matches!(
                self.faults.discipline(page.tenant),
                FaultDiscipline::Vpri | FaultDiscipline::Touch
            );
            if promised && !request.prefetch {
                request.void |= void(page.key(), 1 << level_shift(page.level));
            }
        }
    }

    fn at_device(&mut self, request: Request) {
        let page = request.page;
        let at = self.device_of(page.source);
        let context = context_page(page.tenant);
        self.devices[at].context.fill(&context, context.key(), 0);
        if !self.passes(request) {
            return;
        }
        let lookup = match self.config.faults.discipline {
            FaultDiscipline::Vpri => self.config.faults.lookup_ns,
            _ => 0,
        };
        let device = &mut self.devices[at];
        let in_devtlb = device.devtlb.look_up(&page, page.key(), request.next_use);
        let in_buffer = self.config.prefetch.enabled
            && device.buffer.look_up(&page, page.key(), request.next_use);
        let latency = &self.config.latency;
        let tenant = &mut self.result.tenants[page.tenant as usize];
        let step = if in_devtlb {
            tenant.2 += 1;
            let ready = self.now + latency.devtlb_hit_ns.max(lookup);
            device.back.1.push((ready, request));
            Step::DevTlbHit
        } else if in_buffer {
            tenant.3 += 1;
            let ready = self.now + latency.prefetch_hit_ns.max(lookup);
            device.back.1.push((ready, request));
            Step::BufferHit
        } else {
            let wait = latency.pcie_ns.max(lookup);
            self.agent.1.push((self.now + wait, request));
            Step::Miss
        };
        self.step(step, &page);
        let learnt = request.attempt == Attempt::Again
            && self.faults.discipline(page.tenant) == FaultDiscipline::AtsPri;
        if self.config.prefetch.enabled && !learnt {
            self.prefetch(at, &page, step);
        }
    }

    fn prefetch(&mut self, at: usize, page: &Page, step: Step) {
        let prefetch = &self.config.prefetch;
        self.histories[page.tenant as usize].push(*page);
        let device = &mut self.devices[at];
        let successor = device.successors.iter().find(|pair| pair.0 == page.tenant);
        let successor = successor.map(|pair| pair.1);
        // Whoever was seen `history_length` requests ago learns its successor.
        device.sources_seen.push(page.tenant);
        let seen = device.sources_seen.len() - 1;
        if let Some(before) = seen.checked_sub(prefetch.history_length as usize) {
            let before = device.sources_seen[before];
            match device.successors.iter_mut().find(|pair| pair.0 == before) {
                None => device.successors.push((before, page.tenant)),
                Some(pair) if prefetch.predictor == Predictor::Latest => pair.1 = page.tenant,
                Some(_) => (),
            }
        }
        let fires = prefetch.trigger == PrefetchTrigger::EveryRequest || step == Step::Miss;
        let Some(successor) = successor.filter(|_| fires) else {
            return;
        };
        let history = &self.histories[successor as usize];
        let depth = prefetch.pages_per_tenant as usize;
        let latency = &self.config.latency;
        let arrives = self.now + latency.pcie_ns + latency.history_accesses * latency.dram_ns;
        let last: Vec<Page> = history.iter().rev().take(depth).rev().copied().collect();
        for page in last {
            self.result.sent += 1;
            self.step(Step::Prefetch, &page);
            let request = Request {
                page,
                next_use: u64::MAX,
                packet: 0,
                prefetch: true,
                void: false,
                absent: false,
                attempt: Attempt::First,
                identified: false,
                reads: (0, 0),
                issued: self.now,
                refused: 0,
            };
            self.agent.1.push((arrives, request));
        }
    }

    fn at_agent(&mut self, mut request: Request) {
        let page = request.page;
        if self.config.pasid.enabled {
            let space = space_page(&page);
            if request.identified {
                self.pasids.fill(&space, space.key(), 0);
            } else {
                request.identified = true;
                if !self.pasids.look_up(&space, space.key(), 0) {
                    self.step(Step::PasidMiss, &page);
                    let read = self.config.pasid.table_accesses * self.config.latency.dram_ns;
                    self.agent.1.push((self.now + read, request));
                    return;
                }
            }
        }
        let latency = &self.config.latency;
        let in_iotlb = self.iotlb.look_up(&page, page.key(), request.next_use);
        let mut hits = Vec::new();
        for level in page.level..=4.min(self.config.walk.guest_levels) {
            let cache = &mut self.levels[level as usize - 1];
            if cache.look_up(&page, page.span(level_shift(level)), request.next_use) {
                hits.push(level);
            }
        }
        let lowest = hits.first().copied();
        if in_iotlb || lowest == Some(page.level) {
            let after = latency.walk_cache_hit_ns + latency.pcie_ns;
            self.step(Step::AgentHit, &page);
            self.goes_back(after, request);
            return;
        }
        let walk = &self.config.walk;
        let mut accesses = walk_accesses(walk, page.level, lowest);
        let mut nested_hits = 0;
        if walk.cost == WalkCost::Nested && walk.host_levels > 0 {
            let last = if walk.large_pages_shorten {
                page.level
            } else {
                1
            };
            request.reads = (lowest.unwrap_or(walk.guest_levels + 1) - 1, last);
            for place in host_places(walk, &page, request.reads) {
                if self.nested.look_up(&place.0, place.1, 0) {
                    accesses -= u64::from(host_levels(walk));
                    nested_hits += 1;
                }
            }
        }
        let mut after = accesses * latency.dram_ns;
        if lowest.is_some() {
            after += latency.walk_cache_hit_ns;
        }
        after += nested_hits * latency.walk_cache_hit_ns;
        self.result.walks += 1;
        self.result.accesses += accesses;
        self.step(Step::Walk, &page);
        self.unwalked.push((after, request));
        self.begin_walks();
    }

    /// Free walkers begin what came first.
    fn begin_walks(&mut self) {
        let walkers = match self.config.walk.walkers {
            0 => usize::MAX,
            some => some as usize,
        };
        while !self.unwalked.is_empty() && self.walking.1.len() < walkers {
            let (after, request) = self.unwalked.remove(0);
            self.walking.1.push((self.now + after, request));
        }
    }

    fn walked(&mut self, mut request: Request) {
        self.begin_walks();
        let page = request.page;
        let discipline = self.faults.discipline(page.tenant);
        let asks = discipline == FaultDiscipline::AtsPri
            || request.prefetch && discipline != FaultDiscipline::Pinned;
        request.absent = asks && !request.void && !self.faults.memory.is_present(page.key());
        let pcie = self.config.latency.pcie_ns;
        if request.void || request.absent {
            self.goes_back(pcie, request);
            return;
        }
        self.iotlb.fill(&page, page.key(), request.next_use);
        for level in page.level..=4.min(self.config.walk.guest_levels) {
            let key = page.span(level_shift(level));
            self.levels[level as usize - 1].fill(&page, key, request.next_use);
        }
        let walk = &self.config.walk;
        if walk.cost == WalkCost::Nested && walk.host_levels > 0 {
            for place in host_places(walk, &page, request.reads) {
                self.nested.fill(&place.0, place.1, 0);
            }
        }
        self.goes_back(pcie, request);
    }

    fn goes_back(&mut self, after: u64, request: Request) {
        let at = self.device_of(request.page.source);
        self.devices[at].back.1.push((self.now + after, request));
    }

    fn returned(&mut self, request: Request) {
        let page = request.page;
        let at = self.device_of(page.source);
        if request.absent && !request.prefetch {
            self.fault(request);
            return;
        }
        if request.prefetch {
            self.result.filled += 1;
            if !request.void && !request.absent {
                self.devices[at].buffer.fill(&page, page.key(), u64::MAX);
            }
            self.step(Step::BufferFill, &page);
            return;
        }
        if !request.void {
            let devtlb = &mut self.devices[at].devtlb;
            devtlb.fill(&page, page.key(), request.next_use);
        }
        self.step(Step::End, &page);
        self.result.ended += 1;
        self.result.tenants[page.tenant as usize].1 += 1;
        self.packets[request.packet].0 -= 1;
        let whole = self.now - request.issued + request.refused;
        if self.faults.among(page.tenant) {
            self.faults.faulting.push(whole);
        } else {
            self.faults.neighbours.push(whole);
        }
        if request.attempt == Attempt::Again
            && self.faults.discipline(page.tenant) != FaultDiscipline::Pinned
        {
            self.faults.memory.release(page.key());
        }
        self.resume(at);
    }

    fn apply(&mut self, event: &Event) {
        let (source, domain) = (event.source.0, event.domain.0);
        let tenants = &self.result.tenants;
        let domains = &self.domains;
        let devices = &mut self.devices;
        match event.kind {
            EventKind::InvalidateSource => {
                for device in devices {
                    let context = &mut device.context;
                    context.invalidate(|key| tenants[key.0 as usize].0 == source);
                }
                self.pasids.invalidate(|key| source_of_space(key) == source);
            }
            EventKind::InvalidateContextsOfDomain => {
                for device in devices {
                    let context = &mut device.context;
                    context.invalidate(|key| domains[key.0 as usize] == domain);
                }
                self.pasids.invalidate(|key| key.0 == domain);
            }
            EventKind::InvalidateContexts => {
                for device in devices {
                    device.context.invalidate(|_| true);
                }
                self.pasids.invalidate(|_| true);
            }
            EventKind::Join | EventKind::Leave => return,
            EventKind::PageOut => {
                let bytes = event.page_size.map_or(4096, |size| size.bytes());
                let first = event.iova.0 / bytes * bytes;
                let can_go = self.faults.config.discipline != FaultDiscipline::Pinned;
                if can_go && self.faults.memory.page_out(domain, first, bytes) {
                    self.void_pages(domain, first, bytes);
                    self.step(Step::PageOut, &page_of(event, 0));
                }
                return;
            }
            _ => (),
        }
        self.result.invalidations += 1;
        let all = matches!(
            event.kind,
            EventKind::InvalidateAll | EventKind::InvalidateContexts
        );
        let pages = event.kind == EventKind::InvalidatePages;
        let bytes = event.page_size.map_or(4096, |size| size.bytes());
        let first = event.iova.0 / bytes * bytes;
        // A cached span [start, start + span) goes if it overlaps.
        let void = |key: Key, span: u64| {
            let overlaps = key.1 < first + bytes && first < key.1 + span;
            all || key.0 == domain && (!pages || overlaps)
        };
        // What a TLB does not know is how large its pages are.
        let largest = |key: Key| {
            [1 << 30, 1 << 21, 1 << 12]
                .into_iter()
                .find(|s| key.1.is_multiple_of(*s))
        };
        for tlb in tlbs(&mut self.devices, &mut self.iotlb) {
            tlb.invalidate(|key| void(key, largest(key).unwrap()));
        }
        for (level, cache) in (1..).zip(&mut self.levels) {
            cache.invalidate(|key| void(key, 1 << level_shift(level)));
        }
        if all {
            self.nested.invalidate(|_| true);
        }
        for request in answered(&mut self.walking, &mut self.unwalked, &mut self.devices) {
            let page = request.page;
            request.void |= void(page.key(), 1 << level_shift(page.level));
        }
        self.step(Step::Invalidate, &page_of(event, 0));
    }
}

fn page_of(event: &Event, tenant: u32) -> Page {
    Page {
        iova: event.iova.0,
        domain: event.domain.0,
        source: event.source.0,
        tenant,
        level: event.page_size.map_or(1, |size| size.level().unwrap()),
    }
}

/// A tenant as the key of the context cache.
fn context_page(tenant: u32) -> Page {
    Page {
        iova: 0,
        domain: tenant,
        source: 0,
        tenant: 0,
        level: 1,
    }
}

/// Source and domain as a key: the domain's low 13 bits come first, from bit 12 on, then the source.
fn space_page(page: &Page) -> Page {
    Page {
        iova: (u64::from(page.source) * 8192 + u64::from(page.domain % 8192)) * 4096,
        level: 1,
        ..*page
    }
}

fn source_of_space(key: Key) -> u32 {
    u32::try_from(key.1 / 4096 / 8192).unwrap()
}

fn host_shift(walk: &WalkConfig) -> u32 {
    match walk.host_page {
        HostPage::Size4K => 12,
        HostPage::Size2M => 21,
        HostPage::Size1G => 30,
    }
}

/// The host's pages that a walk needs translations of, from the root's on, each with its key: those that hold
/// tables of these levels, and the page's own.
fn host_places(walk: &WalkConfig, page: &Page, (first, last): (u32, u32)) -> Vec<(Page, Key)> {
    let mut places = Vec::new();
    let mut place = |guest_physical: u64| {
        let bytes = 1 << host_shift(walk);
        let iova = guest_physical / bytes * bytes;
        places.push((Page { iova, ..*page }, (page.domain, iova)));
    };
    for level in (last..=first).rev() {
        // A table of level 1 maps 2 MiB, one of level 2 1 GiB, and so on.
        let index = page.iova >> (12 + 9 * level);
        place((1 << 56) + (u64::from(level) << 52) + index * 4096);
    }
    place(page.iova);
    places
}

/// Caches that do not know how large a page is.
fn tlbs<'a>(devices: &'a mut [Device], iotlb: &'a mut Cache) -> Vec<&'a mut Cache> {
    let mut tlbs = vec![iotlb];
    for device in devices {
        tlbs.extend([&mut device.devtlb, &mut device.buffer]);
    }
    tlbs
}

/// Requests that have their translation.
fn answered<'a>(
    walking: &'a mut Queue,
    unwalked: &'a mut [(u64, Request)],
    devices: &'a mut [Device],
) -> Vec<&'a mut Request> {
    let mut requests: Vec<_> = walking.1.iter_mut().chain(unwalked).collect();
    for device in devices {
        requests.extend(&mut device.back.1);
    }
    requests.into_iter().map(|(_, request)| request).collect()
}

fn host_levels(walk: &WalkConfig) -> u32 {
    match walk.host_page {
        HostPage::Size4K => walk.host_levels,
        HostPage::Size2M => walk.host_levels - 1,
        HostPage::Size1G => walk.host_levels - 2,
    }
}

fn walk_accesses(walk: &WalkConfig, page_level: u32, lowest: Option<u32>) -> u64 {
    if walk.cost == WalkCost::Short {
        return lowest.map_or(page_level, |hit| hit - page_level).into();
    }
    let last = if walk.large_pages_shorten {
        page_level
    } else {
        1
    };
    let host_levels = host_levels(walk);
    let first = lowest.map_or(walk.guest_levels, |hit| hit - 1);
    let mut accesses = 0;
    for _level in last..=first {
        // The guest's entry lies at a guest-physical address.
        accesses += host_levels + 1;
    }
    u64::from(accesses + host_levels)
}
