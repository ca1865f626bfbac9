// SPDX-License-Identifier: Apache-2.0
//! I/O page faults: a device finds memory absent, the host brings it in, and requests wait (VPRI 2.1, 3.2, 5.2,
//! 6.1).
//!
//! ```text
//!   device                      PCIe      host
//!   look-up: absent ─► park ─► request ─► (pre) ─► handler ─► present ─► (post) ─┐
//!      ▲                 │                          one, or one a CPU            │
//!      └── entry of PTB ◄┴────────────── answer ◄── PCIe ◄───────────────────────┘
//! ```
//! | discipline | look-up | what a fault costs beside the handling |
//! |---|---|---|
//! | *pinned* | none | there is none |
//! | *vpri* | bitmap in the device, at each DMA, while the translation is under way | a crossing each way |
//! | *ats-pri* | the translation: at the end of its walk the page is absent | the walk and its two crossings; a crossing each way; the whole translation again |
//! | *touch* | the engine touches the page | the engine, and so every tenant, stands still |
//!
//! # Parking
//! A request that waits for a page gives its entry of the PTB back and is *parked*. With *pause* what comes
//! after it from the same source is parked behind it, in order, and let through one by one when its page is
//! there; with *out-of-order* it overtakes. Parked requests are limited (the receive cache that all queues
//! share): at the limit the device takes no packet from the link, whosever it is. A parked request that may go
//! on waits for an entry of the PTB, before any packet of the link.
//!
//! Each of several devices parks its own requests.
//!
//! # Page requests
//! There is one for each absent page, whoever waits for it. So many may be outstanding
//! ([`FaultConfig::queue_entries`], a queue that all devices share); further ones wait in the device. A handler serves in order of arrival,
//! one at a time; its times are constant, or drawn from samples. When the handling ends, the page is present,
//! and others may use it before the one that asked knows.
//!
//! # Pages that go
//! Bringing one in may take another away ([`memory`]). Its translations are voided everywhere at that instant,
//! as by an invalidation, and those on their way are not kept: the host clears the bitmap or the table first,
//! and waits for DMA under way. It takes no time of the device.
//!
//! A prefetch for an absent page asks nobody for it; its translation is dropped.

pub(crate) mod memory;
pub(crate) mod samples;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use pagetide_random::SplitMix64;
use rustc_hash::FxHashMap;

use crate::config::{Config, FaultConfig, FaultDiscipline, Handlers, OnFault};
use crate::latency::Latencies;
use crate::outcome::{FaultOutcome, ratio};
use crate::request::Tag;
use memory::Memory;
pub use samples::{
    FAULT_NS_MAX, SamplesError, ServiceSamples, ServiceTime, parse_samples, read_samples,
};

/// Stream of random numbers for times; victims have the seed itself.
const TIMES_STREAM: u64 = 1;

/// What happens to a page request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Stage {
    /// It reaches its handler.
    Arrived,
    /// Its handling ends.
    Handled,
    /// The device has the answer.
    Answered,
}

/// A page that is asked for.
#[derive(Debug)]
struct PageRequest {
    /// Who faulted first.
    tenant: u32,
    since_ns: u64,
    time: ServiceTime,
    /// Requests that wait, by slot.
    waiters: Vec<u32>,
}

/// The queue of a source.
#[derive(Debug, Default)]
pub(crate) struct SourceQueue {
    /// Its requests that wait for a page.
    pub(crate) faulting: u32,
    /// Its requests that may go on and have not been looked up yet.
    pub(crate) coming: u32,
    /// Its requests that wait behind those.
    pub(crate) behind: VecDeque<u32>,
}

impl SourceQueue {
    /// True if a new request has to wait.
    pub(crate) fn is_paused(&self) -> bool {
        self.faulting > 0 || self.coming > 0 || !self.behind.is_empty()
    }
}

/// Parked requests of a device.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    /// Those that may go on.
    pub(crate) resuming: VecDeque<u32>,
    parked: u32,
    /// The request that the engine stands still for (*touch*).
    pub(crate) engine: Option<u32>,
}

/// Page requests, handlers and parked requests.
#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) config: FaultConfig,
    pcie_ns: u64,
    pub(crate) memory: Memory,
    random: SplitMix64,
    asked: FxHashMap<Tag, PageRequest>,
    /// Pages to be asked for when there is room.
    unsent: VecDeque<Tag>,
    outstanding: u32,
    /// By time, then by number.
    events: BinaryHeap<Reverse<(u64, u64, Tag, Stage)>>,
    numbered: u64,
    /// When each handler has done what it has.
    busy_until_ns: Vec<u64>,
    queues: Vec<SourceQueue>,
    /// What each device has parked.
    pub(crate) devices: Vec<Parking>,
    parked: u32,
    /// How long the packet of the request in each slot was refused.
    refused_ns: Vec<u64>,
    counts: Counts,
    service: Latencies,
    faulting: Latencies,
    neighbours: Latencies,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    waits: u64,
    held: u64,
    page_requests: u64,
    parked_most: u32,
}

impl Faults {
    /// No fault yet; `None` if there can be none.
    pub(crate) fn new(config: &Config) -> Option<Box<Self>> {
        let faults = &config.faults;
        if faults.discipline == FaultDiscipline::Pinned && faults.tenants == 0 {
            return None;
        }
        let handlers = match faults.handlers {
            Handlers::Serialized => 1,
            Handlers::Affined => faults.cpus as usize,
        };
        Some(Box::new(Self {
            config: faults.clone(),
            pcie_ns: config.latency.pcie_ns,
            memory: Memory::new(faults, config.seed),
            random: SplitMix64::stream(config.seed, TIMES_STREAM),
            asked: FxHashMap::default(),
            unsent: VecDeque::new(),
            outstanding: 0,
            events: BinaryHeap::new(),
            numbered: 0,
            busy_until_ns: vec![0; handlers],
            queues: Vec::new(),
            devices: (0..config.devices.count)
                .map(|_| Parking::default())
                .collect(),
            parked: 0,
            refused_ns: Vec::new(),
            counts: Counts::default(),
            service: Latencies::default(),
            faulting: Latencies::default(),
            neighbours: Latencies::default(),
        }))
    }

    /// True if memory of `tenant` may be absent.
    #[inline]
    pub(crate) fn concerns(&self, tenant: u32) -> bool {
        self.config.discipline != FaultDiscipline::Pinned && self.is_among(tenant)
    }

    fn is_among(&self, tenant: u32) -> bool {
        self.config.tenants == 0 || tenant < self.config.tenants
    }

    /// True if a queue waits for its pages.
    pub(crate) fn pauses(&self) -> bool {
        self.config.on_fault == OnFault::Pause && self.config.discipline != FaultDiscipline::Touch
    }

    /// The queue of `tenant`.
    pub(crate) fn queue(&mut self, tenant: u32) -> &mut SourceQueue {
        let at = tenant as usize;
        if self.queues.len() <= at {
            self.queues.resize_with(at + 1, SourceQueue::default);
        }
        &mut self.queues[at]
    }

    /// Notes how long the packet of the request in `slot` was refused.
    pub(crate) fn issued(&mut self, slot: u32, refused_ns: u64) {
        let at = slot as usize;
        if self.refused_ns.len() <= at {
            self.refused_ns.resize(at + 1, 0);
        }
        self.refused_ns[at] = refused_ns;
    }

    /// The request in `slot`, of `tenant`, has ended after `took_ns`.
    pub(crate) fn ended(&mut self, slot: u32, tenant: u32, took_ns: u64) {
        let whole_ns = self.refused_ns[slot as usize] + took_ns;
        if self.is_among(tenant) {
            self.faulting.add(whole_ns);
        } else {
            self.neighbours.add(whole_ns);
        }
    }

    /// The request in `slot`, of `tenant`, waits for the page `tag`.
    pub(crate) fn ask(&mut self, now_ns: u64, slot: u32, tenant: u32, tag: Tag) {
        self.counts.waits += 1;
        self.queue(tenant).faulting += 1;
        if let Some(asked) = self.asked.get_mut(&tag) {
            asked.waiters.push(slot);
            return;
        }
        let asked = PageRequest {
            tenant,
            since_ns: now_ns,
            time: ServiceTime::default(),
            waiters: vec![slot],
        };
        self.asked.insert(tag, asked);
        self.unsent.push_back(tag);
        self.send(now_ns);
    }

    /// Sends page requests as long as there is room.
    fn send(&mut self, now_ns: u64) {
        while self.outstanding < self.config.queue_entries
            && let Some(tag) = self.unsent.pop_front()
        {
            self.outstanding += 1;
            self.counts.page_requests += 1;
            let time = self.draw();
            if let Some(asked) = self.asked.get_mut(&tag) {
                asked.time = time;
            }
            match self.config.discipline {
                // The engine handles its own fault.
                FaultDiscipline::Touch => {
                    self.schedule(now_ns + time.pre_ns + time.handling_ns, tag, Stage::Handled);
                }
                _ => self.schedule(now_ns + self.pcie_ns + time.pre_ns, tag, Stage::Arrived),
            }
        }
    }

    fn draw(&mut self) -> ServiceTime {
        let samples = self.config.times.all();
        match samples.len() {
            0 => ServiceTime {
                pre_ns: self.config.pre_ns,
                handling_ns: self.config.handling_ns,
                post_ns: self.config.post_ns,
            },
            count => samples[self.random.index(count)],
        }
    }

    fn schedule(&mut self, at_ns: u64, tag: Tag, stage: Stage) {
        self.events
            .push(Reverse((at_ns, self.numbered, tag, stage)));
        self.numbered += 1;
    }

    /// When something happens next; `u64::MAX`: never.
    #[inline]
    pub(crate) fn next_ns(&self) -> u64 {
        self.events
            .peek()
            .map_or(u64::MAX, |Reverse((at_ns, ..))| *at_ns)
    }

    /// Takes what happens until `now_ns`.
    pub(crate) fn pop_due(&mut self, now_ns: u64) -> Option<(Tag, Stage)> {
        if self.next_ns() > now_ns {
            return None;
        }
        self.events
            .pop()
            .map(|Reverse((_, _, tag, stage))| (tag, stage))
    }

    /// The request for `tag` reaches its handler.
    pub(crate) fn arrived(&mut self, now_ns: u64, tag: Tag) {
        let asked = &self.asked[&tag];
        let handler = asked.tenant as usize % self.busy_until_ns.len();
        let busy_until_ns = &mut self.busy_until_ns[handler];
        *busy_until_ns = now_ns.max(*busy_until_ns) + asked.time.handling_ns;
        let done_ns = *busy_until_ns;
        self.schedule(done_ns, tag, Stage::Handled);
    }

    /// The handling of `tag` has ended: the page comes in.
    pub(crate) fn handled(&mut self, now_ns: u64, tag: Tag) {
        self.memory.page_in(tag, now_ns);
        let crossing_ns = match self.config.discipline {
            FaultDiscipline::Touch => 0,
            _ => self.pcie_ns,
        };
        let answered_ns = now_ns + self.asked[&tag].time.post_ns + crossing_ns;
        self.schedule(answered_ns, tag, Stage::Answered);
    }

    /// The device has the answer for `tag`: returns the requests that waited for it, in order, each of which
    /// holds the page now. Sends what waited for room.
    pub(crate) fn answered(&mut self, now_ns: u64, tag: Tag) -> Vec<u32> {
        self.outstanding -= 1;
        let waiters = match self.asked.remove(&tag) {
            Some(asked) => {
                self.service.add(now_ns - asked.since_ns);
                asked.waiters
            }
            None => Vec::new(),
        };
        for _waiter in &waiters {
            self.memory.hold(tag);
        }
        // That of the page-in.
        self.memory.release(tag);
        self.send(now_ns);
        waiters
    }

    /// A request of device `at` is parked.
    pub(crate) fn park(&mut self, at: usize) {
        self.devices[at].parked += 1;
        self.parked += 1;
        self.counts.parked_most = self.counts.parked_most.max(self.parked);
    }

    /// The first of the parked requests of device `at` that may go on does.
    pub(crate) fn unpark(&mut self, at: usize) {
        let device = &mut self.devices[at];
        device.resuming.pop_front();
        device.parked -= 1;
        self.parked -= 1;
    }

    /// A request waits behind another.
    pub(crate) fn held_back(&mut self) {
        self.counts.held += 1;
    }

    /// Requests that are parked, by all devices.
    pub(crate) fn parked(&self) -> u32 {
        self.parked
    }

    /// True if a packet may come from the link of device `at`, as far as parked requests are concerned.
    pub(crate) fn has_room(&self, at: usize) -> bool {
        let device = &self.devices[at];
        device.resuming.is_empty() && device.parked < self.config.parked_requests
    }

    /// The results.
    pub(crate) fn outcome(&mut self, elapsed_ns: u64) -> FaultOutcome {
        assert_eq!(self.parked, 0, "parked requests were lost");
        assert!(self.asked.is_empty(), "page requests were lost");
        let seconds_ns = 1_000_000_000;
        FaultOutcome {
            waits: self.counts.waits,
            held_requests: self.counts.held,
            page_requests: self.counts.page_requests,
            page_requests_per_second: ratio(self.counts.page_requests * seconds_ns, elapsed_ns),
            page_ins: self.memory.page_ins,
            page_outs: self.memory.page_outs,
            parked_requests_most: self.counts.parked_most,
            resident_share: self.memory.resident_share(elapsed_ns),
            service: self.service.summary(),
            faulting: self.faulting.summary(),
            neighbours: self.neighbours.summary(),
        }
    }
}
