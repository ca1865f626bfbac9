// SPDX-License-Identifier: Apache-2.0
//! Objects that an engine reuses, so that a request costs no allocation.

use super::chain::{POP_BATCH, Request, Sample, nanos};
use crate::{chain::Buffers, memory::LeaseSet, ring::Job};
use std::time::Instant;

/// One in so many requests has its look-up timed. A prime, because requests come in batches of
/// powers of two, and the first of a batch finds cold caches.
const SAMPLE_EVERY: u32 = 61;
/// Jobs kept for reuse.
const POOL_MAX: usize = 512;

/// Reused buffers.
pub(crate) struct Scratch {
    pub heads: Vec<u16>,
    pub buffers: Buffers,
    #[expect(
        clippy::vec_box,
        reason = "jobs go to the ring in their boxes: keeping the box spares the allocation"
    )]
    pub pool: Vec<Box<Job<Request>>>,
    until_sample: u32,
    /// Time taken by the clock read itself, to be subtracted.
    pub clock_ns: u64,
}

impl Scratch {
    pub fn new() -> Self {
        let clock_ns = (0..1000)
            .map(|_| nanos(Instant::now().elapsed()))
            .min()
            .unwrap_or(0);
        Self {
            heads: Vec::with_capacity(POP_BATCH),
            buffers: Buffers::default(),
            pool: Vec::new(),
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

    /// An empty set of leases.
    pub fn leases(&mut self) -> LeaseSet {
        // The set of a pooled job has capacity already; only the first few must allocate.
        self.pool
            .last_mut()
            .map(|job| std::mem::take(&mut job.request.leases))
            .unwrap_or_default()
    }
}
