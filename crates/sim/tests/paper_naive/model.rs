// SPDX-License-Identifier: Apache-2.0
//! Flavour *paper* once more, as simply as it can be said: time goes by one
//! nanosecond after the other, and at each everything that might happen is
//! looked for in vectors. Shares nothing with the real model but the
//! configuration, the events and the shape of what comes out.

use pagetide_sim::config::{
    Completion, Config, FaultDiscipline, HostPage, Predictor, PrefetchTrigger, PtbUnit, WalkConfig,
    WalkCost,
};
use pagetide_sim::{AllCounts, FaultOutcome, Step, StepRecord};
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
    pub dropped: u64,
    pub walks: u64,
    pub accesses: u64,
    pub invalidations: u64,
    pub sent: u64,
    pub filled: u64,
    pub caches: AllCounts,
    /// Source, requests, hits in the DevTLB, hits in the buffer; by first request.
    pub tenants: Vec<(u32, u64, u64, u64)>,
    pub steps: Vec<(u64, Step, u32, u64)>,
}

pub fn step(record: &StepRecord) -> (u64, Step, u32, u64) {
    (record.time_ns, record.step, record.source, record.iova)
}

pub struct Model<'a> {
    config: &'a Config,
    events: &'a [Event],
    /// Index of the next event.
    at: usize,
    /// Requests taken.
    taken: usize,
    now: u64,
    /// Requests that each packet waits for.
    packets: Vec<u32>,
    device: Queue,
    agent: Queue,
    walking: Queue,
    /// Walks that no walker is free for, in order of arrival, with their times.
    unwalked: Vec<(u64, Request)>,
    back: Queue,
    context: Cache,
    devtlb: Cache,
    buffer: Cache,
    iotlb: Cache,
    levels: [Cache; 4],
    domains: Vec<u32>,
    histories: Vec<Vec<Page>>,
    sources_seen: Vec<u32>,
    successors: Vec<(u32, u32)>,
    faults: Faults,
    /// When the next packet was first refused.
    tried: Option<u64>,
    result: Result,
}

impl<'a> Model<'a> {
    pub fn new(config: &'a Config, events: &'a [Event]) -> Self {
        let queue = || Queue(config.completion, Vec::new());
        let cache = |cache, shift| Cache::new(cache, shift, config.seed);
        Self {
            config,
            events,
            at: 0,
            taken: 0,
            now: 0,
            packets: Vec::new(),
            device: queue(),
            agent: queue(),
            walking: queue(),
            unwalked: Vec::new(),
            back: queue(),
            context: Cache::of_contexts(&config.context_cache, config.seed),
            devtlb: cache(&config.devtlb, 21),
            buffer: cache(&config.prefetch.buffer(), 21),
            iotlb: cache(&config.iotlb, 21),
            levels: [
                cache(&config.l1, 12),
                cache(&config.l2, 21),
                cache(&config.l3, 30),
                cache(&config.l4, 39),
            ],
            domains: Vec::new(),
            histories: Vec::new(),
            sources_seen: Vec::new(),
            successors: Vec::new(),
            faults: Faults::new(&config.faults, config.latency.pcie_ns, config.seed),
            tried: None,
            result: Result::default(),
        }
    }

    /// Entries of the PTB in use.
    fn in_use(&self) -> u32 {
        match self.config.ptb.unit {
            PtbUnit::Requests => self.packets.iter().sum(),
            PtbUnit::Packets => {
                u32::try_from(self.packets.iter().filter(|waits| **waits > 0).count()).unwrap()
            }
        }
    }

    pub fn run(mut self) -> Result {
        let link = &self.config.link;
        let mut slot = 0;
        let mut more = true;
        loop {
            if slot * link.packet_bytes * 8 / link.gbps == self.now && more {
                slot += 1;
                if self.in_use() >= self.config.ptb.entries || self.faults.refuses() {
                    self.result.dropped += 1;
                    self.tried.get_or_insert(self.now);
                } else {
                    more = self.packet();
                    if !more && self.in_use() == 0 && self.faults.parked() == 0 {
                        break;
                    }
                }
            }
            self.stages();
            self.faults.memory.nanosecond_passes();
            self.now += 1;
            if !more && self.in_use() == 0 && self.faults.parked() == 0 {
                break;
            }
        }
        self.result.elapsed_ns = self.now;
        self.result.faults = self.fault_outcome();
        self.result.caches = AllCounts {
            context_cache: self.context.counts,
            devtlb: self.devtlb.counts,
            prefetch_buffer: self.buffer.counts,
            iotlb: self.iotlb.counts,
            l1: self.levels[0].counts,
            l2: self.levels[1].counts,
            l3: self.levels[2].counts,
            l4: self.levels[3].counts,
        };
        self.result
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
        while self.faults.engine.is_none()
            && let Some(request) = self.device.take(self.now)
        {
            self.at_device(request);
        }
        while let Some(request) = self.agent.take(self.now) {
            self.at_agent(request);
        }
        while let Some(request) = self.walking.take(self.now) {
            self.walked(request);
        }
        while let Some(request) = self.back.take(self.now) {
            self.returned(request);
        }
    }

    fn step(&mut self, step: Step, page: &Page) {
        self.result
            .steps
            .push((self.now, step, page.source, page.iova));
    }

    fn packet(&mut self) -> bool {
        self.packets.push(0);
        for _ in 0..self.config.link.requests_per_packet {
            let Some(event) = self.event() else {
                return false;
            };
            *self.packets.last_mut().unwrap() += 1;
            self.issue(&event);
        }
        self.tried = None;
        true
    }

    fn event(&mut self) -> Option<Event> {
        while let Some(event) = self.events.get(self.at) {
            self.at += 1;
            if event.kind == EventKind::Translate {
                return Some(*event);
            }
            self.apply(event);
        }
        None
    }

    fn issue(&mut self, event: &Event) {
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
            next_use: self.next_use(event),
            packet: self.packets.len() - 1,
            prefetch: false,
            void: false,
            absent: false,
            attempt: Attempt::First,
            issued: self.now,
            refused: self.now - self.tried.unwrap_or(self.now),
        };
        self.taken += 1;
        let latency = &self.config.latency;
        let known = self.context.exists() && {
            let page = context_page(request.page.tenant);
            self.context.look_up(&page, page.key(), 0)
        };
        if !self.context.exists() {
            self.context.counts.lookups += 1;
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
        self.device.1.push((self.now + wait, request));
    }

    /// Index, among the requests, of the next one for the same page.
    fn next_use(&self, event: &Event) -> u64 {
        let key = page_of(event, 0).key();
        let requests = self
            .events
            .iter()
            .filter(|e| e.kind == EventKind::Translate);
        (0..)
            .zip(requests)
            .skip(self.taken + 1)
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
        self.next_of_queue(page.tenant);
        true
    }

    /// The request has become one that is parked.
    fn parked(&mut self, request: &Request) {
        self.packets[request.packet] -= 1;
        self.faults.parked_most = self.faults.parked_most.max(self.faults.parked());
        self.resume();
    }

    fn fault(&mut self, mut request: Request) {
        request.void = false;
        request.absent = false;
        self.step(Step::Fault, &request.page);
        if request.attempt == Attempt::Again {
            self.faults.memory.release(request.page.key());
        }
        self.faults.ask(self.now, request);
        if self.faults.config.discipline == FaultDiscipline::Touch {
            self.faults.engine = Some(request);
        } else {
            self.parked(&request);
        }
    }

    fn answered(&mut self, key: Key) {
        let engine = self.faults.engine.take().is_some();
        let mut waiters = self.faults.answered(self.now, key);
        for request in &mut waiters {
            request.attempt = Attempt::Again;
            self.faults.queue(request.page.tenant).coming += 1;
        }
        if engine {
            self.at_device(waiters[0]);
        } else {
            self.faults.resuming.append(&mut waiters);
            self.resume();
        }
    }

    fn next_of_queue(&mut self, tenant: u32) {
        let faulting = self.faults.faulting_now(tenant) > 0;
        let queue = self.faults.queue(tenant);
        if faulting || queue.coming > 0 || queue.behind.is_empty() {
            return;
        }
        let mut next = queue.behind.remove(0);
        next.attempt = Attempt::Behind;
        queue.coming += 1;
        self.faults.resuming.push(next);
        self.resume();
    }

    /// Parked requests that may go on take free entries of the PTB.
    fn resume(&mut self) {
        while let Some(next) = self.faults.resuming.first().copied() {
            let shares = self.config.ptb.unit == PtbUnit::Packets && self.packets[next.packet] > 0;
            if !shares && self.in_use() >= self.config.ptb.entries {
                break;
            }
            self.faults.resuming.remove(0);
            self.packets[next.packet] += 1;
            self.step(Step::Resume, &next.page);
            self.device.1.push((self.now, next));
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
        for tlb in [&mut self.devtlb, &mut self.buffer, &mut self.iotlb] {
            tlb.invalidate(|key| void(key, largest(key).unwrap()));
        }
        for (level, cache) in (1..).zip(&mut self.levels) {
            cache.invalidate(|key| void(key, 1 << level_shift(level)));
        }
        for queue in [&mut self.walking.1, &mut self.unwalked, &mut self.back.1] {
            for (_, request) in queue {
                let page = request.page;
                request.void |= void(page.key(), 1 << level_shift(page.level));
            }
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
        let context = context_page(page.tenant);
        self.context.fill(&context, context.key(), 0);
        if !self.passes(request) {
            return;
        }
        let lookup = match self.config.faults.discipline {
            FaultDiscipline::Vpri => self.config.faults.lookup_ns,
            _ => 0,
        };
        let in_devtlb = self.devtlb.look_up(&page, page.key(), request.next_use);
        let in_buffer = self.config.prefetch.enabled
            && self.buffer.look_up(&page, page.key(), request.next_use);
        let latency = &self.config.latency;
        let tenant = &mut self.result.tenants[page.tenant as usize];
        let step = if in_devtlb {
            tenant.2 += 1;
            self.back
                .1
                .push((self.now + latency.devtlb_hit_ns.max(lookup), request));
            Step::DevTlbHit
        } else if in_buffer {
            tenant.3 += 1;
            self.back
                .1
                .push((self.now + latency.prefetch_hit_ns.max(lookup), request));
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
            self.prefetch(&page, step);
        }
    }

    fn prefetch(&mut self, page: &Page, step: Step) {
        let prefetch = &self.config.prefetch;
        self.histories[page.tenant as usize].push(*page);
        let successor = self.successors.iter().find(|pair| pair.0 == page.tenant);
        let successor = successor.map(|pair| pair.1);
        // Whoever was seen `history_length` requests ago learns its successor.
        self.sources_seen.push(page.tenant);
        let seen = self.sources_seen.len() - 1;
        if let Some(before) = seen.checked_sub(prefetch.history_length as usize) {
            let before = self.sources_seen[before];
            match self.successors.iter_mut().find(|pair| pair.0 == before) {
                None => self.successors.push((before, page.tenant)),
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
                issued: self.now,
                refused: 0,
            };
            self.agent.1.push((arrives, request));
        }
    }

    fn at_agent(&mut self, request: Request) {
        let page = request.page;
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
            self.back.1.push((self.now + after, request));
            return;
        }
        let accesses = walk_accesses(&self.config.walk, page.level, lowest);
        let mut after = accesses * latency.dram_ns;
        if lowest.is_some() {
            after += latency.walk_cache_hit_ns;
        }
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
        if request.void || request.absent {
            self.back
                .1
                .push((self.now + self.config.latency.pcie_ns, request));
            return;
        }
        self.iotlb.fill(&page, page.key(), request.next_use);
        for level in page.level..=4.min(self.config.walk.guest_levels) {
            let key = page.span(level_shift(level));
            self.levels[level as usize - 1].fill(&page, key, request.next_use);
        }
        let after = self.config.latency.pcie_ns;
        self.back.1.push((self.now + after, request));
    }

    fn returned(&mut self, request: Request) {
        let page = request.page;
        if request.absent && !request.prefetch {
            self.fault(request);
            return;
        }
        if request.prefetch {
            self.result.filled += 1;
            if !request.void && !request.absent {
                self.buffer.fill(&page, page.key(), u64::MAX);
            }
            self.step(Step::BufferFill, &page);
            return;
        }
        if !request.void {
            self.devtlb.fill(&page, page.key(), request.next_use);
        }
        self.step(Step::End, &page);
        self.result.ended += 1;
        self.result.tenants[page.tenant as usize].1 += 1;
        self.packets[request.packet] -= 1;
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
        self.resume();
    }

    fn apply(&mut self, event: &Event) {
        let (source, domain) = (event.source.0, event.domain.0);
        let tenants = &self.result.tenants;
        let domains = &self.domains;
        match event.kind {
            EventKind::InvalidateSource => self
                .context
                .invalidate(|key| tenants[key.0 as usize].0 == source),
            EventKind::InvalidateContextsOfDomain => self
                .context
                .invalidate(|key| domains[key.0 as usize] == domain),
            EventKind::InvalidateContexts => self.context.invalidate(|_| true),
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
        for tlb in [&mut self.devtlb, &mut self.buffer, &mut self.iotlb] {
            tlb.invalidate(|key| void(key, largest(key).unwrap()));
        }
        for (level, cache) in (1..).zip(&mut self.levels) {
            cache.invalidate(|key| void(key, 1 << level_shift(level)));
        }
        for queue in [&mut self.walking.1, &mut self.unwalked, &mut self.back.1] {
            for (_, request) in queue {
                let page = request.page;
                request.void |= void(page.key(), 1 << level_shift(page.level));
            }
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

fn walk_accesses(walk: &WalkConfig, page_level: u32, lowest: Option<u32>) -> u64 {
    if walk.cost == WalkCost::Short {
        return lowest.map_or(page_level, |hit| hit - page_level).into();
    }
    let last = if walk.large_pages_shorten {
        page_level
    } else {
        1
    };
    let host_levels = match walk.host_page {
        HostPage::Size4K => walk.host_levels,
        HostPage::Size2M => walk.host_levels - 1,
        HostPage::Size1G => walk.host_levels - 2,
    };
    let first = lowest.map_or(walk.guest_levels, |hit| hit - 1);
    let mut accesses = 0;
    for _level in last..=first {
        // The guest's entry lies at a guest-physical address.
        accesses += host_levels + 1;
    }
    u64::from(accesses + host_levels)
}
