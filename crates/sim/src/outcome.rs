// SPDX-License-Identifier: Apache-2.0
//! Results of a run of the model.

use serde::Serialize;

/// Events of one cache. Hits are counted at the time of the look-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct CacheCounts {
    /// Look-ups.
    pub lookups: u64,
    /// Look-ups that hit.
    pub hits: u64,
    /// Entries inserted.
    pub insertions: u64,
    /// Entries evicted for another.
    pub evictions: u64,
    /// Entries dropped by an invalidation.
    pub invalidated: u64,
}

impl CacheCounts {
    /// Both together.
    #[must_use]
    pub(crate) const fn plus(self, other: Self) -> Self {
        Self {
            lookups: self.lookups + other.lookups,
            hits: self.hits + other.hits,
            insertions: self.insertions + other.insertions,
            evictions: self.evictions + other.evictions,
            invalidated: self.invalidated + other.invalidated,
        }
    }

    /// Hits of all look-ups; 0 if there were none.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hits, self.lookups)
    }
}

/// `part` of `whole`; 0 if `whole` is 0.
#[must_use]
pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let ratio = part as f64 / whole as f64;
    ratio
}

/// Times that a group of requests took, in nanoseconds; exact.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct LatencySummary {
    /// Mean.
    pub mean_ns: f64,
    /// Half took no longer.
    pub p50_ns: u64,
    /// 90% took no longer.
    pub p90_ns: u64,
    /// 99% took no longer.
    pub p99_ns: u64,
    /// 99.9% took no longer.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// Caches of a run; one that does not exist has no look-ups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct AllCounts {
    /// Context cache.
    pub context_cache: CacheCounts,
    /// The device's TLB.
    pub devtlb: CacheCounts,
    /// Prefetch buffer.
    pub prefetch_buffer: CacheCounts,
    /// The chipset's TLB.
    pub iotlb: CacheCounts,
    /// Page-walk cache, level 1.
    pub l1: CacheCounts,
    /// Page-walk cache, level 2.
    pub l2: CacheCounts,
    /// Page-walk cache, level 3.
    pub l3: CacheCounts,
    /// Page-walk cache, level 4.
    pub l4: CacheCounts,
    /// TLB of host translations that walks need.
    pub nested_tlb: CacheCounts,
    /// Cache of PASID-table entries.
    pub pasid_cache: CacheCounts,
}

/// Counts of the prefetch unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PrefetchCounts {
    /// Requests that it sent.
    pub sent: u64,
    /// Of these, ended before the run did.
    pub filled: u64,
    /// Times that the history-length register was written during the run.
    pub register_writes: u64,
}

/// I/O page faults of a run.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct FaultOutcome {
    /// Times that a request found its page absent.
    pub waits: u64,
    /// Times that a request had to wait behind such a one.
    pub held_requests: u64,
    /// Page requests, one for each absent page.
    pub page_requests: u64,
    /// The same in a second of simulated time.
    pub page_requests_per_second: f64,
    /// Pages that came in.
    pub page_ins: u64,
    /// Pages that went out.
    pub page_outs: u64,
    /// Most requests that were parked at a time.
    pub parked_requests_most: u32,
    /// Present pages of those known, in the mean over time.
    pub resident_share: f64,
    /// Time of a page request, from the fault until the device has the answer.
    pub service: LatencySummary,
    /// Time of the requests of tenants whose memory may be absent, from the first try of their packet to their
    /// end.
    pub faulting: LatencySummary,
    /// The same of the other tenants.
    pub neighbours: LatencySummary,
}

/// One tenant's share.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct TenantOutcome {
    /// Source id.
    pub source: u32,
    /// Requests that ended.
    pub requests: u64,
    /// Whole packets that ended; a packet of several sources counts for the first.
    pub packets: u64,
    /// Hits in the DevTLB.
    pub devtlb_hits: u64,
    /// Hits in the prefetch buffer that the DevTLB did not have.
    pub prefetch_hits: u64,
    /// Mean time of a request, from its packet's admission to its end.
    pub mean_latency_ns: f64,
    /// Mean time before that during which the packet of a request was refused.
    pub mean_refused_ns: f64,
    /// Goodput over the whole run, in gigabits a second.
    pub gbps: f64,
}

/// One of several devices.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct DeviceOutcome {
    /// Tenants.
    pub tenants: u32,
    /// Requests that ended.
    pub requests: u64,
    /// Whole packets that ended.
    pub packets: u64,
    /// Slots of its link in which the packet found no room.
    pub dropped_slots: u64,
    /// Slots of its link that were empty, as the trace could not be read further ahead.
    pub idle_slots: u64,
    /// Goodput over the whole run, in gigabits a second.
    pub gbps: f64,
    /// The same as a fraction of its link's rate.
    pub link_share: f64,
}

/// Results of a run.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Outcome {
    /// Simulated time.
    pub elapsed_ns: u64,
    /// Requests of the trace, all ended.
    pub requests: u64,
    /// Whole packets of the trace, all ended.
    pub packets: u64,
    /// Slots of the link in which the packet found no room and had to be sent again.
    pub dropped_slots: u64,
    /// Bytes of those packets.
    pub bytes: u64,
    /// Goodput, in gigabits a second.
    pub gbps: f64,
    /// Goodput as a fraction of the rate of all links together.
    pub link_share: f64,
    /// Invalidations applied.
    pub invalidations: u64,
    /// Page walks.
    pub walks: u64,
    /// Memory accesses of those walks.
    pub walk_accesses: u64,
    /// Counts of the caches.
    pub caches: AllCounts,
    /// Counts of the prefetch unit.
    pub prefetch: PrefetchCounts,
    /// Time from a request's entry to its end.
    pub latency: LatencySummary,
    /// I/O page faults, if they are part of the model's configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<FaultOutcome>,
    /// Jain's index over the tenants' mean times of a request, refusals included: 1 if all are served
    /// equally.
    pub fairness: f64,
    /// Devices, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceOutcome>,
    /// Tenants, in order of their first request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantOutcome>,
}
