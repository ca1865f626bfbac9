// SPDX-License-Identifier: Apache-2.0
//! The pipeline: device, PCIe, translation agent and memory as a discrete-event simulation (HyperTRIO III
//! and IV-C, figure 3).
//!
//! ```text
//!   link ─► PTB ─► context ─► device ───────── hit ─────────┐
//!            ▲     cache      DevTLB                        ▼
//!            │                buffer ─ PCIe ─► agent ─► return: fill, end
//!            │                  │               │  ▲        │
//!            │                  └─ prefetch ────┘  walk     │
//!            └──────────────── entry free again ────────────┘
//! ```
//! Four queues hold requests under way: to the *device* (the context entry is being read), to the *agent*,
//! to the end of a *walk*, and back (*return*). Within a nanosecond the link comes first, then the host's
//! answers to page faults ([`fault`]), then the queues in that order. Time is a whole number and always jumps to the next event.
//!
//! A request is a slot of a table from its entry to its end; queues hold slots. [`input`] is the trace,
//! [`change`] what its other events do, [`account`] the end.

mod account;
mod change;
mod fault;
mod guess;
mod input;
mod own;
mod walkers;

use std::collections::VecDeque;

use pagetide_trace::{BATCH_EVENTS, EventKind, EventSource, PageSize};

use crate::cache::Cache;
use crate::config::{Config, FaultDiscipline, PtbUnit};
use crate::context::ContextCache;
use crate::error::SimError;
use crate::faults::Faults;
use crate::flavour::{Answer, Flavour, StageQueue as _, TranslationAgent as _};
use crate::host::Host;
use crate::latency::Latencies;
use crate::link::Link;
use crate::next_use::NextUses;
use crate::observe::{Moment, Observer, Step};
use crate::outcome::{Outcome, PrefetchCounts};
use crate::policy::prefetch::AnyPrefetcher;
use crate::prefetch::PrefetchUnit;
use crate::request::{Answered, Attempt, DOMAINS_MAX, NEVER, Origin, Page, Request, Tag};
use crate::table::Table;
use crate::tenants::Tenants;
use fault::Passage;
use input::Input;
pub(crate) use own::{give, no_part};

/// Address bits of a DevTLB's set begin here, as pages of 2 MiB are the common ones.
const DEVTLB_SHIFT: u32 = 21;

/// A page whose size the trace does not record counts as 4 KiB.
const UNKNOWN_PAGE: PageSize = PageSize::SIZE_4K;

/// The model, one run of it.
pub(crate) struct Machine<'a, F: Flavour, O> {
    config: &'a Config,
    observer: O,
    link: Link,
    input: Input<'a>,
    /// Entries of the PTB in use.
    pending: u32,
    /// When the next packet is admitted; `u64::MAX` while the PTB has no room.
    admits_ns: u64,
    /// When the next packet was first tried.
    tried_ns: u64,
    /// No further packet is admitted.
    trace_ended: bool,
    requests: Table<Request>,
    /// Requests that each packet in flight still waits for (PTB by packets only).
    packets: Table<Packet>,
    to_device: F::Queue,
    to_agent: F::Queue,
    walking: F::Queue,
    /// Walks that wait for a walker, with the time that each will take; only with a limited number of walkers.
    waiting_walks: VecDeque<(u32, u64)>,
    /// Walkers at work, likewise.
    walkers_busy: u32,
    returning: F::Queue,
    context_cache: ContextCache,
    devtlb: Option<Cache>,
    buffer: Option<Cache>,
    agent: F::Agent,
    prefetch: Option<AnyPrefetcher<F::Predictor>>,
    /// What the prefetch unit sends at a request; empty between requests.
    guesses: Vec<Page>,
    /// A guess that no request can be for.
    bad_guess: Option<Page>,
    /// Some policy is the caller's own.
    has_own: bool,
    /// I/O page faults, if there may be any.
    faults: Option<Box<Faults>>,
    /// Time of the look-up before each DMA.
    lookup_ns: u64,
    /// The host that writes the history-length register, if it is not fixed.
    host: Option<Host>,
    tenants: Tenants,
    latencies: Latencies,
    tally: Tally,
}

/// Requests of a packet that have not ended.
#[derive(Clone, Copy, Debug, Default)]
struct Packet {
    /// Those that need its entry of the PTB.
    active: u32,
    /// Those that are parked.
    parked: u32,
}

/// Counts of the whole run.
#[derive(Debug, Default)]
struct Tally {
    issued: u64,
    ended: u64,
    dropped_slots: u64,
    invalidations: u64,
    walks: u64,
    walk_accesses: u64,
    prefetch: PrefetchCounts,
}

impl<'a, F: Flavour, O: Observer> Machine<'a, F, O> {
    /// A model with empty caches.
    pub(crate) fn new(
        config: &'a Config,
        source: &'a mut dyn EventSource,
        next_uses: Option<&'a NextUses>,
        observer: O,
    ) -> Self {
        let queue = || F::Queue::new(config.completion);
        let prefetch = &config.prefetch;
        let ties = F::ties(config);
        Self {
            config,
            observer,
            link: F::link(config),
            input: Input {
                source,
                next_uses,
                batch: Vec::with_capacity(BATCH_EVENTS),
                at: 0,
                ended: false,
            },
            pending: 0,
            admits_ns: 0,
            tried_ns: 0,
            trace_ended: false,
            requests: Table::default(),
            packets: Table::default(),
            to_device: queue(),
            to_agent: queue(),
            walking: queue(),
            waiting_walks: VecDeque::new(),
            walkers_busy: 0,
            returning: queue(),
            context_cache: ContextCache::new(&config.context_cache, &ties),
            devtlb: Cache::new(&config.devtlb, DEVTLB_SHIFT, &ties),
            buffer: Cache::new(&prefetch.buffer(), DEVTLB_SHIFT, &ties)
                .filter(|_| prefetch.enabled),
            agent: F::Agent::new(config, &ties),
            prefetch: prefetch
                .enabled
                .then(|| AnyPrefetcher::BuiltIn(PrefetchUnit::new(prefetch))),
            guesses: Vec::new(),
            bad_guess: None,
            has_own: false,
            faults: Faults::new(config).filter(|_| F::HAS_FAULTS),
            lookup_ns: match config.faults.discipline {
                FaultDiscipline::Vpri => config.faults.lookup_ns,
                _ => 0,
            },
            host: Host::new(config),
            tenants: Tenants::default(),
            latencies: Latencies::default(),
            tally: Tally::default(),
        }
    }

    /// Runs the whole trace.
    ///
    /// # Errors
    /// If the trace is broken or exceeds the model's limits.
    pub(crate) fn run(mut self) -> Result<Outcome, SimError> {
        // The earliest time not handled yet.
        let mut floor_ns = 0;
        loop {
            let now_ns = self.next_ready_ns().max(floor_ns).min(self.admits_ns);
            if self.admits_ns == now_ns && !self.admit_packet(now_ns)? {
                return self.drain(now_ns);
            }
            self.serve(now_ns)?;
            floor_ns = now_ns + 1;
        }
    }

    /// Completes the requests that are pending at the end of the trace.
    fn drain(mut self, mut floor_ns: u64) -> Result<Outcome, SimError> {
        self.trace_ended = true;
        if self.is_busy() {
            self.serve(floor_ns)?;
            floor_ns += 1;
        }
        while self.is_busy() {
            let now_ns = self.next_ready_ns().max(floor_ns);
            self.serve(now_ns)?;
            floor_ns = now_ns + 1;
        }
        if self.has_own {
            self.check_own()?;
        }
        Ok(self.outcome(floor_ns))
    }

    /// True while a request of the trace has not ended.
    fn is_busy(&self) -> bool {
        self.pending > 0 || self.faults.as_ref().is_some_and(|f| f.parked() > 0)
    }

    #[inline(always)]
    fn next_ready_ns(&self) -> u64 {
        let device = if self.engine_stands() {
            u64::MAX
        } else {
            self.to_device.next_key()
        };
        let first = device.min(self.to_agent.next_key());
        let second = self.walking.next_key().min(self.returning.next_key());
        let ready_ns = F::Queue::ready_ns(first.min(second));
        match &self.faults {
            Some(faults) if F::HAS_FAULTS => ready_ns.min(faults.next_ns()),
            _ => ready_ns,
        }
    }

    /// Serves what is ready in every stage.
    #[inline(always)]
    fn serve(&mut self, now_ns: u64) -> Result<(), SimError> {
        if F::HAS_FAULTS && self.faults.is_some() {
            self.serve_faults(now_ns);
        }
        while !self.engine_stands()
            && let Some(slot) = self.to_device.pop_ready(now_ns)
        {
            self.at_device(now_ns, slot);
            self.requests.check()?;
            if F::ONE_A_NANOSECOND {
                break;
            }
        }
        while let Some(slot) = self.to_agent.pop_ready(now_ns) {
            self.at_agent(now_ns, slot)?;
            if F::ONE_A_NANOSECOND {
                break;
            }
        }
        while let Some(slot) = self.walking.pop_ready(now_ns) {
            self.walk_ends(now_ns, slot);
            if F::ONE_A_NANOSECOND {
                break;
            }
        }
        while let Some(slot) = self.returning.pop_ready(now_ns) {
            self.back_at_device(now_ns, slot);
            if F::ONE_A_NANOSECOND {
                break;
            }
        }
        Ok(())
    }

    /// Frees an entry of the PTB. If that makes room, the link slots that passed meanwhile were lost, and
    /// the next one is used.
    #[inline(always)]
    fn free_entry(&mut self, now_ns: u64) {
        self.pending -= 1;
        if F::HAS_FAULTS && self.faults.is_some() {
            self.resume(now_ns);
            return;
        }
        if self.pending + 1 == self.config.ptb.entries && !self.trace_ended {
            self.tally.dropped_slots += self.link.skip_to(now_ns);
            self.admits_ns = self.link.next_ns();
        }
    }

    /// True if the device takes a packet.
    #[inline(always)]
    fn has_room(&self) -> bool {
        let parking = !F::HAS_FAULTS || self.faults.as_ref().is_none_or(|f| f.has_room());
        parking && self.pending < self.config.ptb.entries
    }

    /// Admits the next packet of the trace; false if there is none left. An incomplete last packet is
    /// admitted all the same.
    #[inline]
    fn admit_packet(&mut self, now_ns: u64) -> Result<bool, SimError> {
        self.requests.check()?;
        if self.has_own {
            self.check_own()?;
        }
        self.link.take();
        let waited_ns = now_ns - std::mem::replace(&mut self.tried_ns, self.link.next_ns());
        let mut first_tenant = 0;
        let by_packets = self.config.ptb.unit == PtbUnit::Packets;
        let mut packet = u32::MAX;
        let mut is_whole = true;
        for nth in 0..self.config.link.requests_per_packet {
            if !self.goes_to_translation(now_ns)? {
                is_whole = false;
                break;
            }
            if by_packets {
                if nth == 0 {
                    packet = self.packets.take();
                    *self.packets.get_mut(packet) = Packet::default();
                    self.pending += 1;
                }
                self.packets.get_mut(packet).active += 1;
            } else {
                self.pending += 1;
            }
            let tenant = self.issue(now_ns, waited_ns, packet)?;
            first_tenant = if nth == 0 { tenant } else { first_tenant };
        }
        if is_whole {
            self.tenants.tally(first_tenant).packets += 1;
        }
        self.admits_ns = if is_whole && self.has_room() {
            self.link.next_ns()
        } else {
            u64::MAX
        };
        Ok(is_whole)
    }

    /// Advances to the next translation request, if there is one; the events before it take effect.
    #[inline(always)]
    fn goes_to_translation(&mut self, now_ns: u64) -> Result<bool, SimError> {
        loop {
            let Some(event) = self.input.peek()? else {
                return Ok(false);
            };
            if event.kind == EventKind::Translate {
                return Ok(true);
            }
            let event = *event;
            self.input.at += 1;
            self.apply(now_ns, &event);
        }
    }

    /// Issues the translation request at the input's position.
    #[inline(always)]
    fn issue(&mut self, now_ns: u64, waited_ns: u64, packet: u32) -> Result<u32, SimError> {
        let event = &self.input.batch[self.input.at];
        self.input.at += 1;
        let (source, domain) = (event.source.0, event.domain.0);
        if domain >= DOMAINS_MAX {
            return Err(too_large(self.tally.issued, domain));
        }
        let tenant = self.tenants.number(source);
        let tally = self.tenants.tally(tenant);
        tally.domain = domain;
        tally.waited_ns += waited_ns;
        let page = Page::of(event, tenant, UNKNOWN_PAGE);
        let slot = self.requests.take();
        *self.requests.get_mut(slot) = Request {
            page,
            next_use: match self.input.next_uses {
                Some(next_uses) => next_uses.after(self.tally.issued),
                None => NEVER,
            },
            issued_ns: now_ns,
            packet,
            origin: Origin::Demand,
            answer: Answered::No,
            attempt: Attempt::First,
        };
        if let Some(faults) = self.faults.as_mut().filter(|_| F::HAS_FAULTS) {
            faults.issued(slot, waited_ns);
        }
        self.tally.issued += 1;
        let latency = &self.config.latency;
        let (step, ready_ns) = if self.context_cache.look_up(tenant) {
            (Step::Issue, latency.context_hit_ns)
        } else {
            let read_ns = latency.context_accesses * latency.dram_ns;
            (Step::ContextMiss, 2 * latency.pcie_ns + read_ns)
        };
        let moment = Moment {
            waited_ns,
            ..Moment::of(now_ns, slot)
        };
        self.observer.step(moment, step, &page);
        self.to_device.push(now_ns + ready_ns, slot);
        Ok(tenant)
    }

    /// The device has the domain: looks up DevTLB and prefetch buffer, together.
    #[inline(always)]
    fn at_device(&mut self, now_ns: u64, slot: u32) {
        let request = *self.requests.get(slot);
        let page = &request.page;
        let tag = page.tag();
        self.context_cache.fill(page.tenant, page.source);
        let mut passage = Passage::Free;
        if F::HAS_FAULTS && self.faults.is_some() {
            passage = self.passage(now_ns, slot);
            if passage == Passage::Stopped {
                return;
            }
        }
        let in_devtlb = has(&mut self.devtlb, page, tag, request.next_use);
        let in_buffer = has(&mut self.buffer, page, tag, request.next_use);
        let latency = &self.config.latency;
        let tenant = self.tenants.tally(page.tenant);
        let step = if in_devtlb {
            tenant.devtlb_hits += 1;
            let takes_ns = latency.devtlb_hit_ns - F::HIT_ENDS_EARLY_NS;
            self.returning
                .push(now_ns + takes_ns.max(self.lookup_ns), slot);
            Step::DevTlbHit
        } else if in_buffer {
            tenant.prefetch_hits += 1;
            let takes_ns = latency.prefetch_hit_ns - F::HIT_ENDS_EARLY_NS;
            self.returning
                .push(now_ns + takes_ns.max(self.lookup_ns), slot);
            Step::BufferHit
        } else {
            let takes_ns = latency.pcie_ns.max(self.lookup_ns);
            self.to_agent.push(now_ns + takes_ns, slot);
            Step::Miss
        };
        if step != Step::Miss {
            self.requests.get_mut(slot).answer = Answered::Yes;
        } else if F::HAS_FAULTS && self.faults.is_some() {
            self.requests.get_mut(slot).answer = self.allowed(page.tenant);
        }
        self.observer.step(Moment::of(now_ns, slot), step, page);
        if passage == Passage::Free {
            self.guess(now_ns, page, step);
        }
    }

    /// A request has crossed PCIe: the agent has the translation or walks for it.
    #[inline(always)]
    fn at_agent(&mut self, now_ns: u64, slot: u32) -> Result<(), SimError> {
        let request = self.requests.get_mut(slot);
        if !F::HAS_FAULTS || request.answer != Answered::Void {
            request.answer = Answered::Yes;
        }
        match self.agent.look_up(request) {
            Answer::Lost => return Err(lost(&request.page)),
            Answer::Return { after_ns } => {
                self.observer
                    .step(Moment::of(now_ns, slot), Step::AgentHit, &request.page);
                self.returning.push(now_ns + after_ns, slot);
            }
            Answer::Walk { after_ns, accesses } => {
                self.observer
                    .step(Moment::of(now_ns, slot), Step::Walk, &request.page);
                self.tally.walks += 1;
                self.tally.walk_accesses += accesses;
                self.begin_walk(now_ns, slot, after_ns);
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn walk_ends(&mut self, now_ns: u64, slot: u32) {
        self.next_walk(now_ns);
        let request = self.requests.get(slot);
        if F::HAS_FAULTS && self.faults.is_some() && self.walk_finds_absent(request) {
            self.requests.get_mut(slot).answer = Answered::Absent;
        } else if request.answer != Answered::Void {
            self.agent.fill(request);
        }
        self.returning
            .push(now_ns + self.config.latency.pcie_ns, slot);
    }

    /// The translation is at the device: a demand ends, a guess goes into the buffer.
    #[inline(always)]
    fn back_at_device(&mut self, now_ns: u64, slot: u32) {
        let request = *self.requests.get(slot);
        let is_absent = F::HAS_FAULTS && request.answer == Answered::Absent;
        if is_absent && request.origin == Origin::Demand {
            self.fault(now_ns, slot);
            return;
        }
        self.requests.release(slot);
        let page = &request.page;
        let tag = page.tag();
        let is_kept = request.answer != Answered::Void && !is_absent;
        match request.origin {
            Origin::Prefetch => {
                self.tally.prefetch.filled += 1;
                if let Some(host) = &mut self.host {
                    host.prefetch_ended(now_ns - request.issued_ns);
                }
                if let Some(buffer) = &mut self.buffer
                    && is_kept
                {
                    buffer.fill(page, tag, NEVER);
                }
                self.observer
                    .step(Moment::of(now_ns, slot), Step::BufferFill, page);
            }
            Origin::Demand => {
                if let Some(devtlb) = &mut self.devtlb
                    && is_kept
                {
                    devtlb.fill(page, tag, request.next_use);
                }
                self.observer
                    .step(Moment::of(now_ns, slot), Step::End, page);
                self.end(now_ns, slot, &request);
            }
        }
    }

    #[inline(always)]
    fn end(&mut self, now_ns: u64, slot: u32, request: &Request) {
        let took_ns = now_ns - request.issued_ns;
        self.latencies.add(took_ns);
        if let Some(faults) = self.faults.as_mut().filter(|_| F::HAS_FAULTS) {
            faults.ended(slot, request.page.tenant, took_ns);
            if request.attempt == Attempt::Again {
                faults.memory.release(request.page.tag());
            }
        }
        let tenant = self.tenants.tally(request.page.tenant);
        tenant.requests += 1;
        tenant.latency_ns += took_ns;
        self.tally.ended += 1;
        if self.config.ptb.unit == PtbUnit::Requests {
            self.free_entry(now_ns);
            return;
        }
        let packet = self.packets.get_mut(request.packet);
        packet.active -= 1;
        if packet.active == 0 {
            if packet.parked == 0 {
                self.packets.release(request.packet);
            }
            self.free_entry(now_ns);
        }
    }
}

/// Looks for `tag` in a cache, if that exists.
#[inline(always)]
fn has(cache: &mut Option<Cache>, page: &Page, tag: Tag, next_use: u64) -> bool {
    match cache {
        Some(cache) => cache.look_up(page, tag, next_use),
        None => false,
    }
}

/// The error for a domain too large for tags.
#[cold]
fn too_large(request: u64, domain: u32) -> SimError {
    SimError::Request {
        request,
        reason: format!("its domain is {domain}; the model supports domains below {DOMAINS_MAX}"),
    }
}

/// The error for a request that never ends under the flavour's rules.
#[cold]
fn lost(page: &Page) -> SimError {
    SimError::NeverEnds { iova: page.iova }
}
