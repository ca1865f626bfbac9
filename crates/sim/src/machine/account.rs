// SPDX-License-Identifier: Apache-2.0
//! The end of a run: the conservation check, and the sums.

use super::Machine;
use crate::cache::Cache;
use crate::flavour::{Flavour, TranslationAgent as _};
use crate::observe::Observer;
use crate::outcome::{AllCounts, Outcome, ratio};

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// The run's results.
    pub(super) fn outcome(mut self, elapsed_ns: u64) -> Outcome {
        let per_packet = u64::from(self.config.link.requests_per_packet);
        let packet_bytes = self.config.link.packet_bytes;
        let packets = self.tally.ended / per_packet;
        let bytes = packets * packet_bytes;
        // Conservation: each request ended once, and the rest are prefetches.
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
            faults: self
                .faults
                .as_mut()
                .map(|faults| faults.outcome(elapsed_ns)),
            fairness: self.tenants.fairness(),
            tenants: self.tenants.outcomes(elapsed_ns, packet_bytes),
        }
    }
}
