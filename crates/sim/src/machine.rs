// SPDX-License-Identifier: Apache-2.0
//! The pipeline: device, PCIe, translation agent and memory as a run of
//! discrete events (HyperTRIO III and IV-C, figure 3).
//!
//! ```text
//!   link ─► PTB ─► context ─► device ───────── hit ─────────┐
//!            ▲     cache      DevTLB                        ▼
//!            │                buffer ─ PCIe ─► agent ─► return: fill, end
//!            │                  │               │  ▲        │
//!            │                  └─ prefetch ────┘  walk     │
//!            └──────────────── entry free again ────────────┘
//! ```
//! Four queues hold what is on its way: to the *device* (the context entry is
//! being read), to the *agent*, to the end of a *walk*, and back (*return*).
//! Within a nanosecond the link comes first, then the queues in that order.
//! Time is a whole number and only ever jumps to the next thing that happens.
//!
//! A request is a slot of a table from its entry to its end; queues hold slots.

use pagetide_trace::{BATCH_EVENTS, Event, EventKind, EventSource, PageSize};

use crate::cache::Cache;
use crate::config::{Config, PtbUnit};
use crate::context::ContextCache;
use crate::error::SimError;
use crate::flavour::{
    Answer, Flavour, SourcePredictor as _, StageQueue as _, TranslationAgent as _, VoidSpan,
};
use crate::host::Host;
use crate::latency::Latencies;
use crate::link::Link;
use crate::next_use::NextUses;
use crate::observe::{Observer, Step};
use crate::outcome::{AllCounts, Outcome, PrefetchCounts, ratio};
use crate::prefetch::PrefetchUnit;
use crate::request::{DOMAINS_MAX, NEVER, Origin, Page, Request, widest_page};
use crate::table::Table;
use crate::tenants::Tenants;

/// Address bits of a DevTLB's set begin here, as pages of 2 MiB are the common ones.
const DEVTLB_SHIFT: u32 = 21;

/// A page whose size the trace does not tell is taken for one of 4 KiB.
const UNKNOWN_PAGE: PageSize = PageSize::SIZE_4K;

/// The model, one run of it.
pub(crate) struct Machine<'a, F: Flavour, O> {
    config: &'a Config,
    observer: O,
    link: Link,
    input: Input<'a>,
    /// Entries of the PTB in use.
    pending: u32,
    requests: Table<Request>,
    /// Requests that each packet in flight still waits for (PTB by packets only).
    packets: Table<u32>,
    to_device: F::Queue,
    to_agent: F::Queue,
    walking: F::Queue,
    returning: F::Queue,
    context_cache: ContextCache,
    devtlb: Option<Cache>,
    buffer: Option<Cache>,
    agent: F::Agent,
    prefetch: Option<PrefetchUnit<F::Predictor>>,
    /// Who writes the history-length register, if it is not fixed.
    host: Option<Host>,
    tenants: Tenants,
    latencies: Latencies,
    tally: Tally,
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

/// The trace as the model eats it.
struct Input<'a> {
    source: &'a mut dyn EventSource,
    next_uses: Option<&'a NextUses>,
    batch: Vec<Event>,
    at: usize,
    ended: bool,
}

impl Input<'_> {
    /// The next event, without taking it.
    #[inline]
    fn peek(&mut self) -> Result<Option<&Event>, SimError> {
        if self.at == self.batch.len() && !self.ended {
            self.batch.clear();
            self.at = 0;
            self.ended = self.source.next_batch(&mut self.batch)? == 0;
        }
        Ok(self.batch.get(self.at))
    }
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
            link: Link::new(F::slot(config)),
            input: Input {
                source,
                next_uses,
                batch: Vec::with_capacity(BATCH_EVENTS),
                at: 0,
                ended: false,
            },
            pending: 0,
            requests: Table::default(),
            packets: Table::default(),
            to_device: queue(),
            to_agent: queue(),
            walking: queue(),
            returning: queue(),
            context_cache: ContextCache::new(&config.context_cache, &ties),
            devtlb: Cache::new(&config.devtlb, DEVTLB_SHIFT, &ties),
            buffer: Cache::new(&prefetch.buffer(), DEVTLB_SHIFT, &ties)
                .filter(|_| prefetch.enabled),
            agent: F::Agent::new(config, &ties),
            prefetch: prefetch.enabled.then(|| PrefetchUnit::new(prefetch)),
            host: Host::new(config),
            tenants: Tenants::default(),
            latencies: Latencies::default(),
            tally: Tally::default(),
        }
    }

    /// Runs the whole trace.
    ///
    /// # Errors
    /// If the trace is broken or asks for what the model cannot tell.
    pub(crate) fn run(mut self) -> Result<Outcome, SimError> {
        // The earliest time that has not been dealt with.
        let mut floor_ns = 0;
        let mut trace_ended = false;
        loop {
            let ready_ns = self.next_ready_ns().max(floor_ns);
            let room = self.pending < self.config.ptb.entries;
            if trace_ended && self.pending == 0 {
                break;
            }
            let now_ns = if room && !trace_ended {
                ready_ns.min(self.link.next_ns())
            } else {
                ready_ns
            };
            if !trace_ended {
                if room {
                    if self.link.next_ns() == now_ns {
                        self.link.take();
                        trace_ended = !self.admit_packet(now_ns)?;
                        if trace_ended && self.pending == 0 {
                            floor_ns = now_ns;
                            break;
                        }
                    }
                } else {
                    self.tally.dropped_slots += self.link.skip_to(now_ns);
                }
            }
            self.serve(now_ns)?;
            floor_ns = now_ns + 1;
        }
        Ok(self.outcome(floor_ns))
    }

    #[inline]
    fn next_ready_ns(&self) -> u64 {
        self.to_device
            .next_ready_ns()
            .min(self.to_agent.next_ready_ns())
            .min(self.walking.next_ready_ns())
            .min(self.returning.next_ready_ns())
    }

    /// Lets every stage serve what is ready.
    #[inline]
    fn serve(&mut self, now_ns: u64) -> Result<(), SimError> {
        while let Some(slot) = self.to_device.pop_ready(now_ns) {
            self.at_device(now_ns, slot);
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

    /// Takes the next packet of the trace in; false if there is none left.
    /// A last packet that is not whole is taken all the same.
    fn admit_packet(&mut self, now_ns: u64) -> Result<bool, SimError> {
        self.requests.check()?;
        let by_packets = self.config.ptb.unit == PtbUnit::Packets;
        let mut packet = u32::MAX;
        for nth in 0..self.config.link.requests_per_packet {
            let Some(event) = self.next_translation()? else {
                return Ok(false);
            };
            if by_packets {
                if nth == 0 {
                    packet = self.packets.insert(0);
                    self.pending += 1;
                }
                *self.packets.get_mut(packet) += 1;
            } else {
                self.pending += 1;
            }
            self.issue(now_ns, &event, packet)?;
        }
        Ok(true)
    }

    /// The next translation request; what stands before it in the trace takes effect.
    #[inline]
    fn next_translation(&mut self) -> Result<Option<Event>, SimError> {
        loop {
            let Some(event) = self.input.peek()?.copied() else {
                return Ok(None);
            };
            self.input.at += 1;
            if event.kind == EventKind::Translate {
                return Ok(Some(event));
            }
            self.apply(&event);
        }
    }

    #[inline]
    fn issue(&mut self, now_ns: u64, event: &Event, packet: u32) -> Result<(), SimError> {
        if event.domain.0 >= DOMAINS_MAX {
            return Err(SimError::Request {
                request: self.tally.issued,
                reason: format!(
                    "its domain is {}; the model tells domains below {DOMAINS_MAX} apart",
                    event.domain.0
                ),
            });
        }
        let tenant = self.tenants.number(event.source.0);
        self.tenants.tally(tenant).domain = event.domain.0;
        let request = Request {
            page: Page::of(event, tenant, UNKNOWN_PAGE),
            next_use: self
                .input
                .next_uses
                .map_or(NEVER, |next_uses| next_uses.after(self.tally.issued)),
            issued_ns: now_ns,
            packet,
            origin: Origin::Demand,
        };
        self.tally.issued += 1;
        let latency = &self.config.latency;
        let wait_ns = if self.context_cache.look_up(tenant) {
            latency.context_hit_ns
        } else {
            2 * latency.pcie_ns + latency.context_accesses * latency.dram_ns
        };
        self.observer.step(now_ns, Step::Issue, &request.page);
        let slot = self.requests.insert(request);
        self.to_device.push(now_ns + wait_ns, slot);
        Ok(())
    }

    /// The device knows the domain: DevTLB and prefetch buffer, together.
    #[inline]
    fn at_device(&mut self, now_ns: u64, slot: u32) {
        let request = *self.requests.get(slot);
        let page = &request.page;
        let tag = page.tag();
        self.context_cache.fill(page.tenant, page.source);
        let look = |cache: &mut Option<Cache>| {
            cache
                .as_mut()
                .is_some_and(|cache| cache.look_up(page, tag, request.next_use))
        };
        let in_devtlb = look(&mut self.devtlb);
        let in_buffer = look(&mut self.buffer);
        let latency = &self.config.latency;
        let tenant = self.tenants.tally(page.tenant);
        let step = if in_devtlb {
            tenant.devtlb_hits += 1;
            let ends_ns = now_ns + latency.devtlb_hit_ns - F::HIT_ENDS_EARLY_NS;
            self.returning.push(ends_ns, slot);
            Step::DevTlbHit
        } else if in_buffer {
            tenant.prefetch_hits += 1;
            let ends_ns = now_ns + latency.prefetch_hit_ns - F::HIT_ENDS_EARLY_NS;
            self.returning.push(ends_ns, slot);
            Step::BufferHit
        } else {
            self.to_agent.push(now_ns + latency.pcie_ns, slot);
            Step::Miss
        };
        self.observer.step(now_ns, step, page);
        self.guess(now_ns, page, step);
    }

    /// Lets the prefetch unit learn from a request and send its guesses.
    #[inline]
    fn guess(&mut self, now_ns: u64, page: &Page, step: Step) {
        let Some(unit) = &mut self.prefetch else {
            return;
        };
        unit.remember(page);
        if let Some(host) = &mut self.host
            && let Some(length) = host.requested(now_ns, page.tenant)
        {
            unit.predictor.set_length(length);
            self.tally.prefetch.register_writes += 1;
        }
        let Some(next) = unit.predictor.observe(page.tenant) else {
            return;
        };
        if !self.config.prefetch.trigger.fires(step) {
            return;
        }
        let pages = unit.history(next);
        let latency = &self.config.latency;
        let reaches_agent_ns =
            now_ns + latency.pcie_ns + latency.history_accesses * latency.dram_ns;
        for page in pages {
            self.observer.step(now_ns, Step::Prefetch, page);
            let slot = self.requests.insert(Request {
                page: *page,
                next_use: NEVER,
                issued_ns: now_ns,
                packet: u32::MAX,
                origin: Origin::Prefetch,
            });
            self.to_agent.push(reaches_agent_ns, slot);
            self.tally.prefetch.sent += 1;
        }
    }

    /// A request has crossed PCIe: the agent knows the translation or walks for it.
    #[inline]
    fn at_agent(&mut self, now_ns: u64, slot: u32) -> Result<(), SimError> {
        let request = self.requests.get(slot);
        match self.agent.look_up(request) {
            Answer::Lost => return Err(lost(&request.page)),
            Answer::Return { after_ns } => {
                self.observer.step(now_ns, Step::AgentHit, &request.page);
                self.returning.push(now_ns + after_ns, slot);
            }
            Answer::Walk { after_ns, accesses } => {
                self.observer.step(now_ns, Step::Walk, &request.page);
                self.tally.walks += 1;
                self.tally.walk_accesses += accesses;
                self.walking.push(now_ns + after_ns, slot);
            }
        }
        Ok(())
    }

    #[inline]
    fn walk_ends(&mut self, now_ns: u64, slot: u32) {
        self.agent.fill(self.requests.get(slot));
        self.returning
            .push(now_ns + self.config.latency.pcie_ns, slot);
    }

    /// The translation is at the device: a demand ends, a guess goes into the buffer.
    #[inline]
    fn back_at_device(&mut self, now_ns: u64, slot: u32) {
        let request = self.requests.remove(slot);
        let page = &request.page;
        let tag = page.tag();
        match request.origin {
            Origin::Prefetch => {
                self.tally.prefetch.filled += 1;
                if let Some(host) = &mut self.host {
                    host.prefetch_ended(now_ns - request.issued_ns);
                }
                if let Some(buffer) = &mut self.buffer {
                    buffer.fill(page, tag, NEVER);
                }
                self.observer.step(now_ns, Step::BufferFill, page);
            }
            Origin::Demand => {
                if let Some(devtlb) = &mut self.devtlb {
                    devtlb.fill(page, tag, request.next_use);
                }
                self.end(now_ns, &request);
            }
        }
    }

    #[inline]
    fn end(&mut self, now_ns: u64, request: &Request) {
        self.observer.step(now_ns, Step::End, &request.page);
        let took_ns = now_ns - request.issued_ns;
        self.latencies.add(took_ns);
        let tenant = self.tenants.tally(request.page.tenant);
        tenant.requests += 1;
        tenant.latency_ns += took_ns;
        self.tally.ended += 1;
        if self.config.ptb.unit == PtbUnit::Requests {
            self.pending -= 1;
            return;
        }
        let waiting = self.packets.get_mut(request.packet);
        *waiting -= 1;
        if *waiting == 0 {
            self.packets.remove(request.packet);
            self.pending -= 1;
        }
    }

    /// Lets an event that is no request take effect.
    #[cold]
    fn apply(&mut self, event: &Event) {
        let domain = event.domain.0;
        let source = event.source.0;
        let span = match event.kind {
            EventKind::Translate => return,
            EventKind::Join | EventKind::Leave => {
                self.tell_host(event);
                return;
            }
            EventKind::InvalidatePages => VoidSpan::Pages(Page::of(event, 0, PageSize::SIZE_4K)),
            EventKind::InvalidateDomain => VoidSpan::Domain(domain),
            EventKind::InvalidateAll => VoidSpan::All,
            EventKind::InvalidateSource => {
                let tallies = &self.tenants.tallies;
                self.context_cache
                    .invalidate(|tenant| tallies[tenant as usize].source == source);
                VoidSpan::Domain(domain)
            }
            EventKind::InvalidateContextsOfDomain => {
                let tallies = &self.tenants.tallies;
                self.context_cache
                    .invalidate(|tenant| tallies[tenant as usize].domain == domain);
                VoidSpan::Domain(domain)
            }
            EventKind::InvalidateContexts => {
                self.context_cache.invalidate(|_| true);
                VoidSpan::All
            }
        };
        self.tally.invalidations += 1;
        for cache in [&mut self.devtlb, &mut self.buffer].into_iter().flatten() {
            cache.invalidate(|tag| span.meets(tag, widest_page(tag)));
        }
        self.agent.invalidate(&span);
    }

    /// Tells the host, if there is one, that a tenant joins or leaves.
    fn tell_host(&mut self, event: &Event) {
        let Some(host) = &mut self.host else {
            return;
        };
        if event.kind == EventKind::Join {
            host.joined();
            return;
        }
        let sources = self.tenants.tallies.iter().map(|tally| tally.source);
        for (number, _) in (0..).zip(sources).filter(|(_, s)| *s == event.source.0) {
            host.left(number);
        }
    }

    fn outcome(self, elapsed_ns: u64) -> Outcome {
        let per_packet = u64::from(self.config.link.requests_per_packet);
        let packet_bytes = self.config.link.packet_bytes;
        let packets = self.tally.ended / per_packet;
        let bytes = packets * packet_bytes;
        // Conservation: each request ended once, and what is left is prefetches.
        assert_eq!(self.tally.issued, self.tally.ended, "requests were lost");
        let prefetches_left = self.tally.prefetch.sent - self.tally.prefetch.filled;
        assert_eq!(self.requests.len() as u64, prefetches_left);
        assert_eq!(self.packets.len(), 0, "packets were lost");
        let gbps = ratio(bytes * 8, elapsed_ns);
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let link_gbps = self.config.link.gbps as f64;
        let count = |cache: &Option<Cache>| cache.as_ref().map(Cache::counts).unwrap_or_default();
        let mut caches = AllCounts {
            context_cache: self.context_cache.counts(),
            devtlb: count(&self.devtlb),
            prefetch_buffer: count(&self.buffer),
            ..AllCounts::default()
        };
        self.agent.count(&mut caches);
        Outcome {
            elapsed_ns,
            requests: self.tally.ended,
            packets,
            dropped_slots: self.tally.dropped_slots,
            bytes,
            gbps,
            link_share: gbps / link_gbps,
            invalidations: self.tally.invalidations,
            walks: self.tally.walks,
            walk_accesses: self.tally.walk_accesses,
            caches,
            prefetch: self.tally.prefetch,
            latency: self.latencies.summary(),
            fairness: self.tenants.fairness(per_packet),
            tenants: self.tenants.outcomes(elapsed_ns, per_packet, packet_bytes),
        }
    }
}

/// The error of a request that the flavour's rules leave without an end.
#[cold]
fn lost(page: &Page) -> SimError {
    SimError::NeverEnds { iova: page.iova }
}
