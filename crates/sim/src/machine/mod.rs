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
//! A request is a slot of a table from its entry to its end; queues hold slots. [`input`] is the trace, [`admit`]
//! how its packets enter, [`change`] what its other events do, [`account`] the end. There may be several devices
//! ([`device`]): each has its own link and queues, which come in the order of the devices' numbers.

mod account;
mod admit;
mod change;
mod device;
mod fault;
mod guess;
mod input;
mod own;
mod pasid;
mod walkers;

use std::collections::VecDeque;

use pagetide_trace::{EventSource, PageSize};

use crate::cache::Cache;
use crate::config::{Config, FaultDiscipline, PtbUnit};
use crate::error::SimError;
use crate::faults::Faults;
use crate::flavour::{Answer, Flavour, StageQueue as _, TranslationAgent as _};
use crate::latency::Latencies;
use crate::next_use::NextUses;
use crate::observe::{Moment, Observer, Step};
use crate::outcome::{Outcome, PrefetchCounts};
use crate::request::{Answered, Attempt, NEVER, Origin, Page, Request, Tag};
use crate::table::Table;
use crate::tenants::Tenants;
pub(crate) use device::{DeviceSet, ManyDevices, OneDevice};
use fault::Passage;
use input::Input;
pub(crate) use own::{give, no_part};
use pasid::Pasids;

/// A page whose size the trace does not record counts as 4 KiB.
const UNKNOWN_PAGE: PageSize = PageSize::SIZE_4K;

/// The model, one run of it.
pub(crate) struct Machine<'a, F: Flavour, O> {
    config: &'a Config,
    observer: O,
    input: Input<'a>,
    devices: F::Devices,
    requests: Table<Request>,
    /// Requests that each packet in flight still waits for (PTB by packets only).
    packets: Table<Packet>,
    to_agent: F::Queue,
    walking: F::Queue,
    /// Walks that wait for a walker, with the time that each will take; only with a limited number of walkers.
    waiting_walks: VecDeque<(u32, u64)>,
    /// Walkers at work, likewise.
    walkers_busy: u32,
    agent: F::Agent,
    /// Address spaces that the agent knows, if requests name them.
    pasids: Option<Pasids>,
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
    /// Addresses of requests are below.
    iova_end: u64,
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
        let ties = F::ties(config);
        let devices = F::Devices::new(config, &ties);
        Self {
            config,
            observer,
            input: Input::new(source, next_uses, devices.count()),
            devices,
            requests: Table::default(),
            packets: Table::default(),
            to_agent: queue(),
            walking: queue(),
            waiting_walks: VecDeque::new(),
            walkers_busy: 0,
            agent: F::Agent::new(config, &ties),
            pasids: Pasids::new(config, &ties),
            guesses: Vec::new(),
            bad_guess: None,
            has_own: false,
            faults: Faults::new(config).filter(|_| F::HAS_FAULTS),
            lookup_ns: match config.faults.discipline {
                FaultDiscipline::Vpri => config.faults.lookup_ns,
                _ => 0,
            },
            iova_end: admit::iova_end(config),
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
            let admits_ns = self.admits_ns();
            let now_ns = self.next_ready_ns().max(floor_ns).min(admits_ns);
            if admits_ns == now_ns && !self.admit(now_ns)? {
                return self.drain(now_ns);
            }
            self.serve(now_ns)?;
            floor_ns = now_ns + 1;
        }
    }

    /// Completes the requests that are pending at the end of the trace.
    fn drain(mut self, mut floor_ns: u64) -> Result<Outcome, SimError> {
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
        let mut devices = (0..self.devices.count()).map(|at| self.devices.get(at));
        devices.any(|device| device.pending > 0)
            || self.faults.as_ref().is_some_and(|f| f.parked() > 0)
    }

    #[inline(always)]
    fn next_ready_ns(&self) -> u64 {
        let mut first = self.to_agent.next_key().min(self.walking.next_key());
        for at in 0..self.devices.count() {
            let device = self.devices.get(at);
            first = first.min(device.returning.next_key());
            if !self.engine_stands(at) {
                first = first.min(device.to_device.next_key());
            }
        }
        let ready_ns = F::Queue::ready_ns(first);
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
        for at in 0..self.devices.count() {
            while !self.engine_stands(at)
                && let Some(slot) = self.devices.get_mut(at).to_device.pop_ready(now_ns)
            {
                self.at_device(now_ns, at, slot);
                self.requests.check()?;
                if F::ONE_A_NANOSECOND {
                    break;
                }
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
        for at in 0..self.devices.count() {
            while let Some(slot) = self.devices.get_mut(at).returning.pop_ready(now_ns) {
                self.back_at_device(now_ns, at, slot);
                if F::ONE_A_NANOSECOND {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Frees an entry of the PTB of device `at`. If that makes room, the link slots that passed meanwhile were
    /// lost, and the next one is used.
    #[inline(always)]
    fn free_entry(&mut self, now_ns: u64, at: usize) {
        let device = self.devices.get_mut(at);
        device.pending -= 1;
        if F::HAS_FAULTS && self.faults.is_some() {
            self.resume(now_ns, at);
            return;
        }
        if device.pending + 1 == self.config.ptb.entries && !device.trace_ended {
            device.skip_slots(now_ns);
        }
    }

    /// Row of `tenant` in the tables of its device.
    #[inline(always)]
    fn row(&self, tenant: u32) -> u32 {
        if F::Devices::MANY {
            self.tenants.row(tenant)
        } else {
            tenant
        }
    }

    /// The device has the domain: looks up DevTLB and prefetch buffer, together.
    #[inline(always)]
    fn at_device(&mut self, now_ns: u64, at: usize, slot: u32) {
        let request = *self.requests.get(slot);
        let page = &request.page;
        let tag = page.tag();
        let row = self.row(page.tenant);
        let device = self.devices.get_mut(at);
        device.context_cache.fill(row, page.source);
        let mut passage = Passage::Free;
        if F::HAS_FAULTS && self.faults.is_some() {
            passage = self.passage(now_ns, at, slot);
            if passage == Passage::Stopped {
                return;
            }
        }
        let device = self.devices.get_mut(at);
        let in_devtlb = has(&mut device.devtlb, page, tag, request.next_use);
        let in_buffer = has(&mut device.buffer, page, tag, request.next_use);
        let latency = &self.config.latency;
        let tenant = self.tenants.tally(page.tenant);
        let step = if in_devtlb {
            tenant.devtlb_hits += 1;
            let takes_ns = latency.devtlb_hit_ns - F::HIT_ENDS_EARLY_NS;
            device
                .returning
                .push(now_ns + takes_ns.max(self.lookup_ns), slot);
            Step::DevTlbHit
        } else if in_buffer {
            tenant.prefetch_hits += 1;
            let takes_ns = latency.prefetch_hit_ns - F::HIT_ENDS_EARLY_NS;
            device
                .returning
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
            self.guess(now_ns, at, page, row, step);
        }
    }

    /// A request has crossed PCIe: the agent has the translation or walks for it.
    #[inline(always)]
    fn at_agent(&mut self, now_ns: u64, slot: u32) -> Result<(), SimError> {
        if F::HAS_FAULTS && self.pasids.is_some() && self.waits_for_pasid(now_ns, slot) {
            return Ok(());
        }
        let request = self.requests.get_mut(slot);
        if !F::HAS_FAULTS || request.answer != Answered::Void {
            request.answer = Answered::Yes;
        }
        match self.agent.look_up(request) {
            Answer::Lost => return Err(lost(&request.page)),
            Answer::Return { after_ns } => {
                self.observer
                    .step(Moment::of(now_ns, slot), Step::AgentHit, &request.page);
                let at = self.devices.of(request.page.source);
                let device = self.devices.get_mut(at);
                device.returning.push(now_ns + after_ns, slot);
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
        let at = self.devices.of(request.page.source);
        if F::HAS_FAULTS && self.faults.is_some() && self.walk_finds_absent(request) {
            self.requests.get_mut(slot).answer = Answered::Absent;
        } else if request.answer != Answered::Void {
            self.agent.fill(request);
        }
        let back_ns = now_ns + self.config.latency.pcie_ns;
        self.devices.get_mut(at).returning.push(back_ns, slot);
    }

    /// The translation is at the device: a demand ends, a guess goes into the buffer.
    #[inline(always)]
    fn back_at_device(&mut self, now_ns: u64, at: usize, slot: u32) {
        let request = *self.requests.get(slot);
        let is_absent = F::HAS_FAULTS && request.answer == Answered::Absent;
        if is_absent && request.origin == Origin::Demand {
            self.fault(now_ns, at, slot);
            return;
        }
        self.requests.release(slot);
        let device = self.devices.get_mut(at);
        let page = &request.page;
        let tag = page.tag();
        let is_kept = request.answer != Answered::Void && !is_absent;
        match request.origin {
            Origin::Prefetch => {
                self.tally.prefetch.filled += 1;
                if let Some(host) = &mut device.host {
                    host.prefetch_ended(now_ns - request.issued_ns);
                }
                if let Some(buffer) = &mut device.buffer
                    && is_kept
                {
                    buffer.fill(page, tag, NEVER);
                }
                self.observer
                    .step(Moment::of(now_ns, slot), Step::BufferFill, page);
            }
            Origin::Demand => {
                if let Some(devtlb) = &mut device.devtlb
                    && is_kept
                {
                    devtlb.fill(page, tag, request.next_use);
                }
                self.observer
                    .step(Moment::of(now_ns, slot), Step::End, page);
                self.end(now_ns, at, slot, &request);
            }
        }
    }

    #[inline(always)]
    fn end(&mut self, now_ns: u64, at: usize, slot: u32, request: &Request) {
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
            self.free_entry(now_ns, at);
            return;
        }
        let packet = self.packets.get_mut(request.packet);
        packet.active -= 1;
        if packet.active == 0 {
            if packet.parked == 0 {
                self.packets.release(request.packet);
            }
            self.free_entry(now_ns, at);
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

/// The error for a request that never ends under the flavour's rules.
#[cold]
fn lost(page: &Page) -> SimError {
    SimError::NeverEnds { iova: page.iova }
}
