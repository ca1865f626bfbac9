// SPDX-License-Identifier: Apache-2.0
//! The end of a run: the conservation check, and the sums.

use super::{DeviceSet as _, Machine};
use crate::cache::Cache;
use crate::flavour::{Flavour, TranslationAgent as _};
use crate::observe::Observer;
use crate::outcome::{AllCounts, DeviceOutcome, Outcome, ratio};

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// The run's results.
    pub(super) fn outcome(mut self, elapsed_ns: u64) -> Outcome {
        let packet_bytes = self.config.link.packet_bytes;
        let packets = self.tenants.tallies.iter().map(|tally| tally.packets).sum();
        let bytes = packets * packet_bytes;
        // Conservation: each request ended once, and the rest are prefetches.
        assert_eq!(self.tally.issued, self.tally.ended, "requests were lost");
        let prefetches_left = self.tally.prefetch.sent - self.tally.prefetch.filled;
        assert_eq!(self.requests.len() as u64, prefetches_left);
        assert_eq!(self.packets.len(), 0, "packets were lost");
        let gbps = ratio(bytes * 8, elapsed_ns);
        let links_gbps = self.config.link.gbps * self.devices.count() as u64;
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let links_gbps = links_gbps as f64;
        let caches = self.caches();
        let devices = self.each_device(elapsed_ns);
        Outcome {
            elapsed_ns,
            requests: self.tally.ended,
            packets,
            dropped_slots: (0..self.devices.count())
                .map(|at| self.devices.get(at).dropped_slots)
                .sum(),
            bytes,
            gbps,
            link_share: gbps / links_gbps,
            invalidations: self.tally.invalidations,
            walks: self.tally.walks,
            walk_accesses: self.tally.walk_accesses,
            caches,
            prefetch: self.tally.prefetch,
            latency: self.latencies.summary(),
            faults: self
                .faults
                .as_mut()
                .map(|faults| faults.outcome(elapsed_ns)),
            devices,
            fairness: self.tenants.fairness(),
            tenants: self.tenants.outcomes(elapsed_ns, packet_bytes),
        }
    }
    /// Counts of all caches, those of all devices together.
    fn caches(&self) -> AllCounts {
        let count = |cache: &Option<Cache>| cache.as_ref().map(Cache::counts).unwrap_or_default();
        let mut caches = AllCounts::default();
        for at in 0..self.devices.count() {
            let device = self.devices.get(at);
            for (sum, of_device) in [
                (&mut caches.context_cache, device.context_cache.counts()),
                (&mut caches.devtlb, count(&device.devtlb)),
                (&mut caches.prefetch_buffer, count(&device.buffer)),
            ] {
                *sum = sum.plus(of_device);
            }
        }
        if let Some(pasids) = &self.pasids {
            caches.pasid_cache = pasids.counts();
        }
        self.agent.count(&mut caches);
        caches
    }

    /// What each of several devices did.
    fn each_device(&self, elapsed_ns: u64) -> Vec<DeviceOutcome> {
        let count = self.devices.count();
        if count == 1 {
            return Vec::new();
        }
        let mut outcomes: Vec<_> = (0..count)
            .map(|at| DeviceOutcome {
                dropped_slots: self.devices.get(at).dropped_slots,
                idle_slots: self.devices.get(at).idle_slots,
                ..DeviceOutcome::default()
            })
            .collect();
        for tally in &self.tenants.tallies {
            let outcome = &mut outcomes[self.devices.of(tally.source)];
            outcome.tenants += 1;
            outcome.requests += tally.requests;
            outcome.packets += tally.packets;
        }
        let link = &self.config.link;
        for outcome in &mut outcomes {
            let bits = outcome.packets * link.packet_bytes * 8;
            outcome.gbps = ratio(bits, elapsed_ns);
            outcome.link_share = ratio(bits, elapsed_ns * link.gbps);
        }
        outcomes
    }
}
