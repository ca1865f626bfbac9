// SPDX-License-Identifier: Apache-2.0
//! What an engine uses again and again, so that a request costs no allocation.

use super::chain::{POP_BATCH, Request, Sample, nanos};
use crate::{chain::Buffers, memory::LeaseSet, ring::Job};
use std::time::Instant;

/// Every so many requests the time of the look-up is taken; a prime, for requests come in batches of
/// powers of two and a batch's first finds cold caches.
const SAMPLE_EVERY: u32 = 61;
/// Jobs kept for reuse.
const POOL_MAX: usize = 512;

/// Buffers used again and again.
pub(crate) struct Scratch {
    pub heads: Vec<u16>,
    pub buffers: Buffers,
    #[expect(
        clippy::vec_box,
        reason = "jobs go to the ring in their boxes: keeping the box spares the allocation"
    )]
    pub pool: Vec<Box<Job<Request>>>,
    until_sample: u32,
    /// What taking the time costs by itself, to be subtracted.
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

    /// Drops what keeps the memory of the device in `slot` mapped: jobs that were its last. Those of
    /// other tenants stay; they would have to make all of them anew.
    pub fn forget_memory(&mut self, slot: usize) {
        self.pool.retain(|job| job.request.key.device != slot);
    }

    /// Keeps a finished job for the next chain.
    pub fn keep(&mut self, job: Box<Job<Request>>) {
        if self.pool.len() < POOL_MAX {
            self.pool.push(job);
        }
    }

    /// Whether the next look-up is to be timed.
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
        // A pooled job's set has room already; the first few have to make it.
        self.pool
            .last_mut()
            .map(|job| std::mem::take(&mut job.request.leases))
            .unwrap_or_default()
    }
}
