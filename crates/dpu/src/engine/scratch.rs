// SPDX-License-Identifier: Apache-2.0
//! Objects that an engine reuses, so that a request costs no allocation.

use super::request::{Request, Sample};
use crate::{
    chain::Buffers,
    memory::{LeaseSet, Span},
    ring::Job,
    shared::{Counters, add},
};
use std::time::{Duration, Instant};

/// One in so many requests has its look-up timed. A prime, because requests come in batches of
/// powers of two, and the first of a batch finds cold caches.
const SAMPLE_EVERY: u32 = 61;
/// A look-up that takes this long was interrupted: even with every cache line cold it takes far
/// less.
const LOOKUP_INTERRUPTED_NS: u64 = 5_000;
/// Jobs kept for reuse.
const POOL_MAX: usize = 512;
/// Sets of leases kept for reuse.
const LEASES_MAX: usize = 64;

/// Reused buffers.
pub(crate) struct Scratch {
    pub buffers: Buffers,
    /// Spans of chosen chains.
    pub spans: Vec<Span>,
    /// Entries for the used ring.
    pub entries: Vec<(u16, u32)>,
    #[expect(
        clippy::vec_box,
        reason = "jobs go to the ring in their boxes: keeping the box spares the allocation"
    )]
    pub pool: Vec<Box<Job<Request>>>,
    /// Empty sets of leases.
    leases: Vec<LeaseSet>,
    until_sample: u32,
    /// Time taken by the clock read itself, to be subtracted.
    clock_ns: u64,
}

impl Scratch {
    pub fn new() -> Self {
        let clock_ns = (0..1000)
            .map(|_| nanos(Instant::now().elapsed()))
            .min()
            .unwrap_or(0);
        Self {
            buffers: Buffers::default(),
            spans: Vec::new(),
            entries: Vec::new(),
            pool: Vec::new(),
            leases: Vec::new(),
            until_sample: 0,
            clock_ns,
        }
    }

    /// Drops jobs that keep the memory of the device in `slot` mapped, because they were its last.
    /// Jobs of other tenants stay; those tenants would have to create all of them again.
    pub fn forget_memory(&mut self, slot: usize) {
        self.pool.retain(|job| job.request.key.device != slot);
    }

    /// Keeps a finished job for the next chain.
    pub fn keep(&mut self, job: Box<Job<Request>>) {
        if self.pool.len() < POOL_MAX {
            self.pool.push(job);
        }
    }

    /// Decides whether the next look-up is timed.
    pub fn sample(&mut self) -> Sample {
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY - 1;
            Sample::Yes
        } else {
            self.until_sample -= 1;
            Sample::No
        }
    }

    /// Adds one sample of the time spent on look-ups; `requests` is 1 for the half that counts the
    /// request. An interrupted sample says nothing about the look-up and is not counted.
    pub fn record_lookup(&self, counters: &Counters, began: Instant, requests: u64) {
        let ns = nanos(began.elapsed()).saturating_sub(self.clock_ns);
        if ns < LOOKUP_INTERRUPTED_NS {
            add(&counters.lookup_ns, ns);
            add(&counters.lookup_samples, requests);
        }
    }

    /// An empty set of leases.
    pub fn leases(&mut self) -> LeaseSet {
        if let Some(leases) = self.leases.pop() {
            return leases;
        }
        // The set of a pooled job has capacity already; only the first few must allocate.
        self.pool
            .last_mut()
            .map(|job| std::mem::take(&mut job.request.leases))
            .unwrap_or_default()
    }

    /// Keeps a set whose leases were released.
    pub fn keep_leases(&mut self, leases: LeaseSet) {
        if self.leases.len() < LEASES_MAX {
            self.leases.push(leases);
        }
    }
}

/// Nanoseconds of a duration that is not years.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
