// SPDX-License-Identifier: Apache-2.0
//! I/O page faults of the naive model: which pages are present, in vectors that are searched from the front,
//! and what is known of page requests, handlers and parked requests.

use pagetide_random::SplitMix64;
use pagetide_sim::config::{Absent, Config, FaultConfig, FaultDiscipline, Handlers, OnFault};
use pagetide_sim::{LatencySummary, ServiceTime};

use crate::cache::Key;
use crate::model::Request;

struct Known {
    key: Key,
    bytes: u64,
    present: bool,
    held: u32,
    last_use: u64,
}

/// Pages, in the order in which they became known.
pub struct Memory {
    config: FaultConfig,
    random: SplitMix64,
    known: Vec<Known>,
    /// Present pages, with *share* only; the last one takes the place of one that goes.
    order: Vec<Key>,
    clock: u64,
    /// Pages that went, not voided yet.
    pub gone: Vec<(Key, u64)>,
    pub page_ins: u64,
    pub page_outs: u64,
    /// Sums over the nanoseconds.
    pub present_ns: u64,
    pub known_ns: u64,
}

impl Memory {
    pub fn new(config: &FaultConfig, seed: u64) -> Self {
        Self {
            config: config.clone(),
            random: SplitMix64::new(seed),
            known: Vec::new(),
            order: Vec::new(),
            clock: 0,
            gone: Vec::new(),
            page_ins: 0,
            page_outs: 0,
            present_ns: 0,
            known_ns: 0,
        }
    }

    pub fn nanosecond_passes(&mut self) {
        self.present_ns += self.count();
        self.known_ns += self.known.len() as u64;
    }

    fn count(&self) -> u64 {
        self.known.iter().filter(|page| page.present).count() as u64
    }

    fn find(&mut self, key: Key) -> Option<&mut Known> {
        self.known.iter_mut().find(|page| page.key == key)
    }

    pub fn touch(&mut self, key: Key, bytes: u64) -> bool {
        self.clock += 1;
        let clock = self.clock;
        if let Some(page) = self.find(key) {
            if page.present {
                page.last_use = clock;
            }
            return page.present;
        }
        let draws = self.config.absent == Absent::Share;
        let present = !(draws && self.random.below(1_000_000) < self.config.absent_ppm.into());
        self.add(key, bytes);
        if present {
            self.comes(key);
            self.shrink(key);
        }
        present
    }

    fn add(&mut self, key: Key, bytes: u64) {
        self.known.push(Known {
            key,
            bytes,
            present: false,
            held: 0,
            last_use: 0,
        });
    }

    pub fn is_present(&self, key: Key) -> bool {
        let page = self.known.iter().find(|page| page.key == key);
        page.is_none_or(|page| page.present)
    }

    pub fn page_in(&mut self, key: Key) {
        let page = self.find(key).unwrap();
        page.held += 1;
        if !page.present {
            self.page_ins += 1;
            self.comes(key);
            self.shrink(key);
        }
    }

    pub fn hold(&mut self, key: Key) {
        self.find(key).unwrap().held += 1;
    }

    pub fn release(&mut self, key: Key) {
        self.find(key).unwrap().held -= 1;
    }

    /// A page-out event for `bytes` bytes from `first` on.
    pub fn page_out(&mut self, domain: u32, first: u64, bytes: u64) -> bool {
        let met = |page: &Known| {
            let (start, end) = (page.key.1, page.key.1 + page.bytes);
            page.key.0 == domain && start < first + bytes && first < end
        };
        let keys: Vec<Key> = self
            .known
            .iter()
            .filter(|page| met(page))
            .map(|page| page.key)
            .collect();
        if keys.is_empty() && [1 << 12, 1 << 21, 1 << 30].contains(&bytes) {
            self.add((domain, first), bytes);
        }
        let mut some = false;
        for key in keys {
            if self.is_present(key) {
                self.goes(key);
                some = true;
            }
        }
        some
    }

    fn comes(&mut self, key: Key) {
        self.clock += 1;
        let clock = self.clock;
        let page = self.find(key).unwrap();
        page.present = true;
        page.last_use = clock;
        self.order.push(key);
    }

    fn goes(&mut self, key: Key) {
        self.page_outs += 1;
        self.find(key).unwrap().present = false;
        let place = self.order.iter().position(|other| *other == key).unwrap();
        self.order.swap_remove(place);
    }

    fn shrink(&mut self, keep: Key) {
        loop {
            let (known, count) = (self.known.len() as u64, self.count());
            let too_many = match self.config.absent {
                Absent::Share => {
                    known - count < known * u64::from(self.config.absent_ppm) / 1_000_000
                }
                Absent::Lru => count > self.config.limit_pages.into(),
                Absent::Events => false,
            };
            if !too_many {
                return;
            }
            let may_go = |key: &&Key| {
                let page = self.known.iter().find(|page| page.key == **key).unwrap();
                page.held == 0 && page.key != keep
            };
            let victim = match self.config.absent {
                Absent::Share if self.order.is_empty() => None,
                Absent::Share => {
                    let first = self.random.index(self.order.len());
                    let all = self.order.iter().cycle().skip(first).take(self.order.len());
                    all.clone().find(may_go).copied()
                }
                _ => {
                    let present = self.known.iter().filter(|page| page.present);
                    let free = present.filter(|page| may_go(&&page.key));
                    free.min_by_key(|page| page.last_use).map(|page| page.key)
                }
            };
            let Some(victim) = victim else {
                return;
            };
            let bytes = self.find(victim).unwrap().bytes;
            self.goes(victim);
            self.gone.push((victim, bytes));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Stage {
    Arrived,
    Handled,
    Answered,
}

/// A page that is asked for.
pub struct Asked {
    pub key: Key,
    pub tenant: u32,
    pub since: u64,
    pub sent: bool,
    pub time: ServiceTime,
    pub waiters: Vec<Request>,
}

/// A tenant's queue.
#[derive(Default)]
pub struct Queue {
    pub coming: u32,
    pub behind: Vec<Request>,
}

pub struct Faults {
    pub config: FaultConfig,
    pub pcie: u64,
    pub memory: Memory,
    times: SplitMix64,
    pub asked: Vec<Asked>,
    /// Time, number in the order of making, page, stage.
    pub events: Vec<(u64, u64, Key, Stage)>,
    numbered: u64,
    /// When each handler is free.
    handlers: Vec<u64>,
    pub queues: Vec<Queue>,
    /// Of each device.
    pub resuming: Vec<Vec<Request>>,
    /// Of each device.
    pub engines: Vec<Option<Request>>,
    devices: pagetide_sim::config::DevicesConfig,
    pub waits: u64,
    pub held: u64,
    pub page_requests: u64,
    pub parked_most: u32,
    pub service: Vec<u64>,
    pub faulting: Vec<u64>,
    pub neighbours: Vec<u64>,
}

impl Faults {
    pub fn new(whole: &Config) -> Self {
        let (config, pcie, seed) = (&whole.faults, whole.latency.pcie_ns, whole.seed);
        let devices = whole.devices.count as usize;
        let handlers = match config.handlers {
            Handlers::Serialized => 1,
            Handlers::Affined => config.cpus as usize,
        };
        Self {
            config: config.clone(),
            pcie,
            memory: Memory::new(config, seed),
            times: SplitMix64::stream(seed, 1),
            asked: Vec::new(),
            events: Vec::new(),
            numbered: 0,
            handlers: vec![0; handlers],
            queues: Vec::new(),
            resuming: vec![Vec::new(); devices],
            engines: vec![None; devices],
            devices: whole.devices.clone(),
            waits: 0,
            held: 0,
            page_requests: 0,
            parked_most: 0,
            service: Vec::new(),
            faulting: Vec::new(),
            neighbours: Vec::new(),
        }
    }

    pub fn among(&self, tenant: u32) -> bool {
        self.config.tenants == 0 || tenant < self.config.tenants
    }

    pub fn discipline(&self, tenant: u32) -> FaultDiscipline {
        if self.among(tenant) {
            self.config.discipline
        } else {
            FaultDiscipline::Pinned
        }
    }

    /// Requests of a tenant that wait for pages.
    pub fn faulting_now(&self, tenant: u32) -> usize {
        let waiters = self.asked.iter().flat_map(|asked| &asked.waiters);
        waiters
            .filter(|request| request.page.tenant == tenant)
            .count()
    }

    pub fn queue(&mut self, tenant: u32) -> &mut Queue {
        while self.queues.len() <= tenant as usize {
            self.queues.push(Queue::default());
        }
        &mut self.queues[tenant as usize]
    }

    pub fn is_paused(&mut self, tenant: u32) -> bool {
        let pauses = self.config.on_fault == OnFault::Pause
            && self.config.discipline != FaultDiscipline::Touch;
        let faulting = self.faulting_now(tenant) > 0;
        let queue = self.queue(tenant);
        pauses && (faulting || queue.coming > 0 || !queue.behind.is_empty())
    }

    /// Requests that are parked.
    pub fn parked(&self) -> u32 {
        (0..self.engines.len()).map(|at| self.parked_by(at)).sum()
    }

    /// Those of one device.
    fn parked_by(&self, at: usize) -> u32 {
        let devices = &self.devices;
        let is_of = |request: &&Request| {
            let number = (request.page.source >> devices.source_low_bit) % devices.count;
            number as usize == at
        };
        let waiting = match self.config.discipline {
            FaultDiscipline::Touch => 0,
            _ => {
                let waiters = self.asked.iter().flat_map(|asked| &asked.waiters);
                waiters.filter(is_of).count()
            }
        };
        let behind = self.queues.iter().flat_map(|queue| &queue.behind);
        let count = waiting + behind.filter(is_of).count() + self.resuming[at].len();
        u32::try_from(count).unwrap()
    }

    pub fn refuses(&self, at: usize) -> bool {
        !self.resuming[at].is_empty() || self.parked_by(at) >= self.config.parked_requests
    }

    pub fn ask(&mut self, now: u64, request: Request) {
        self.waits += 1;
        let key = request.page.key();
        if let Some(asked) = self.asked.iter_mut().find(|asked| asked.key == key) {
            asked.waiters.push(request);
            return;
        }
        self.asked.push(Asked {
            key,
            tenant: request.page.tenant,
            since: now,
            sent: false,
            time: ServiceTime::default(),
            waiters: vec![request],
        });
        self.send(now);
    }

    pub fn send(&mut self, now: u64) {
        loop {
            let sent = self.asked.iter().filter(|asked| asked.sent).count();
            let Some(next) = self.asked.iter_mut().find(|asked| !asked.sent) else {
                return;
            };
            if sent >= self.config.queue_entries as usize {
                return;
            }
            next.sent = true;
            let samples = self.config.times.all();
            next.time = if samples.is_empty() {
                ServiceTime {
                    pre_ns: self.config.pre_ns,
                    handling_ns: self.config.handling_ns,
                    post_ns: self.config.post_ns,
                }
            } else {
                samples[self.times.index(samples.len())]
            };
            self.page_requests += 1;
            let (key, time) = (next.key, next.time);
            if self.config.discipline == FaultDiscipline::Touch {
                self.at(now + time.pre_ns + time.handling_ns, key, Stage::Handled);
            } else {
                self.at(now + self.pcie + time.pre_ns, key, Stage::Arrived);
            }
        }
    }

    pub fn at(&mut self, time: u64, key: Key, stage: Stage) {
        self.events.push((time, self.numbered, key, stage));
        self.numbered += 1;
    }

    pub fn due(&mut self, now: u64) -> Option<(Key, Stage)> {
        let due = (0..self.events.len()).filter(|at| self.events[*at].0 <= now);
        let first = due.min_by_key(|at| (self.events[*at].0, self.events[*at].1))?;
        let (_, _, key, stage) = self.events.remove(first);
        Some((key, stage))
    }

    pub fn arrived(&mut self, now: u64, key: Key) {
        let asked = self.asked.iter().find(|asked| asked.key == key).unwrap();
        let handler = asked.tenant as usize % self.handlers.len();
        let begins = now.max(self.handlers[handler]);
        self.handlers[handler] = begins + asked.time.handling_ns;
        self.at(self.handlers[handler], key, Stage::Handled);
    }

    pub fn handled(&mut self, now: u64, key: Key) {
        self.memory.page_in(key);
        let asked = self.asked.iter().find(|asked| asked.key == key).unwrap();
        let crossing = match self.config.discipline {
            FaultDiscipline::Touch => 0,
            _ => self.pcie,
        };
        self.at(now + asked.time.post_ns + crossing, key, Stage::Answered);
    }

    pub fn answered(&mut self, now: u64, key: Key) -> Vec<Request> {
        let place = self
            .asked
            .iter()
            .position(|asked| asked.key == key)
            .unwrap();
        let asked = self.asked.remove(place);
        self.service.push(now - asked.since);
        for _waiter in &asked.waiters {
            self.memory.hold(key);
        }
        self.memory.release(key);
        self.send(now);
        asked.waiters
    }
}

/// Percentiles of times, from all of them in order.
pub fn summary(times: &[u64]) -> LatencySummary {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let Some(max_ns) = sorted.last().copied() else {
        return LatencySummary::default();
    };
    let at = |per_mille: usize| sorted[(sorted.len() * per_mille).div_ceil(1000).max(1) - 1];
    LatencySummary {
        mean_ns: sorted.iter().sum::<u64>() as f64 / sorted.len() as f64,
        p50_ns: at(500),
        p90_ns: at(900),
        p99_ns: at(990),
        p999_ns: at(999),
        max_ns,
    }
}
