// SPDX-License-Identifier: Apache-2.0
//! Reading a trace whole, and a hash that says whether it is still the same.

use pagetide_access_log::TraceError;
use pagetide_trace::{Event, EventKind, EventSource, HyperSpec, HyperTrace, TenantShape, Workload};

/// All of `source`.
pub fn try_all(source: &mut dyn EventSource) -> Result<Vec<Event>, TraceError> {
    let mut events = Vec::new();
    while source.next_batch(&mut events)? > 0 {}
    Ok(events)
}

/// All of the trace of `spec`, whose tenants are synthetic.
pub fn all(spec: &HyperSpec) -> Vec<Event> {
    try_all(&mut HyperTrace::synthetic(spec).unwrap()).unwrap()
}

/// `tenants` tenants of `workload`, RR1, `packets` packets in all.
pub fn spec(workload: Workload, tenants: u32, packets: u64) -> HyperSpec {
    HyperSpec {
        packets: Some(packets),
        ..HyperSpec::synthetic(TenantShape::of(workload), tenants)
    }
}

/// The requests among `events`.
pub fn requests(events: &[Event]) -> Vec<Event> {
    let mut events = events.to_vec();
    events.retain(|e| e.kind == EventKind::Translate);
    events
}

/// The tenant of each packet of a trace of requests alone, three a packet.
pub fn packet_tenants(events: &[Event]) -> Vec<u32> {
    events.chunks(3).map(|packet| packet[0].domain.0).collect()
}

/// FNV-1a over every field of every event.
pub fn hash(events: &[Event]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |word: u64| {
        for byte in word.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for e in events {
        eat(e.time_ns.map_or(u64::MAX, |t| t));
        eat(u64::from(e.source.0) << 32 | u64::from(e.domain.0));
        eat(e.iova.0);
        eat(e.page_size.map_or(0, |s| u64::from(s.shift())));
        eat(e.access as u64);
        eat(e.kind as u64);
    }
    hash
}
