// SPDX-License-Identifier: Apache-2.0
//! Counts of a stretch of time; tallies of consecutive stretches add up.

use super::{bins::Throughput, histogram::LatencyCounts, slow::CAUSES};

/// See the module documentation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    pub latency: LatencyCounts,
    pub worst_ns: u64,
    pub bytes: u64,
    /// Page requests.
    pub faults: u64,
    pub injected: u64,
    /// Most page requests within a second.
    pub fault_peak: u32,
    pub bursts: u32,
    /// Bins with demand.
    pub demand_bins: u32,
    pub least_requests: Option<u32>,
    pub least_bytes: Option<u64>,
    /// Slow requests by the index of their cause.
    pub slow: [u32; CAUSES],
}

impl Tally {
    /// Adds a bin with demand.
    pub fn bin(&mut self, done: Throughput) {
        self.demand_bins = self.demand_bins.saturating_add(1);
        self.least_requests = least(self.least_requests, Some(done.requests));
        self.least_bytes = least(self.least_bytes, Some(done.bytes));
    }

    /// Adds the counts of another stretch.
    pub fn add(&mut self, other: &Self) {
        self.latency.add(&other.latency);
        self.worst_ns = self.worst_ns.max(other.worst_ns);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.faults += other.faults;
        self.injected += other.injected;
        self.fault_peak = self.fault_peak.max(other.fault_peak);
        self.bursts = self.bursts.saturating_add(other.bursts);
        self.demand_bins = self.demand_bins.saturating_add(other.demand_bins);
        self.least_requests = least(self.least_requests, other.least_requests);
        self.least_bytes = least(self.least_bytes, other.least_bytes);
        for (mine, theirs) in self.slow.iter_mut().zip(other.slow) {
            *mine = mine.saturating_add(theirs);
        }
    }
}

/// The smaller of the values that exist.
fn least<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
