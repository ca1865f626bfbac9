// SPDX-License-Identifier: Apache-2.0
//! The constructor against one that holds everything in memory and does the obvious.

use pagetide_addr::Iova;
use pagetide_trace::{
    End, Event, EventKind, Events, HyperSpec, HyperTrace, Input, IommuDomain, Membership, Order,
    PageSize, RecordedInput, Recordings, Reuse, SourceId,
};
use proptest::prelude::*;

use crate::support::try_all;

/// A log of some sources, source `s` for domain `100 + s`, with invalidations among the requests.
fn log(steps: &[(u8, u8)]) -> Vec<Event> {
    let mut events = Vec::new();
    for (i, &(source, what)) in steps.iter().enumerate() {
        let mut event = Event::translate(
            SourceId(u32::from(source)),
            IommuDomain(100 + u32::from(source)),
            Iova((i as u64) << 12),
            Some(PageSize::SIZE_4K),
        );
        event.kind = match what {
            0 => EventKind::InvalidatePages,
            1 => EventKind::InvalidateDomain,
            2 => EventKind::InvalidateAll,
            _ => EventKind::Translate,
        };
        events.push(event);
    }
    events
}

/// Each tenant's packets, as the constructor should take them from `log`.
fn naive_packets(log: &[Event], per_packet: usize) -> Vec<Vec<Vec<Event>>> {
    let mut sources: Vec<SourceId> = Vec::new();
    let mut streams: Vec<Vec<Event>> = Vec::new();
    for event in log {
        let at = sources.iter().position(|s| *s == event.source);
        match (event.kind, at) {
            (EventKind::Translate, None) => {
                sources.push(event.source);
                streams.push(vec![*event]);
            }
            (EventKind::InvalidateAll, _) => {
                for stream in &mut streams {
                    let kind = EventKind::InvalidateDomain;
                    stream.push(Event { kind, ..*event });
                }
            }
            (_, Some(at)) => streams[at].push(*event),
            (_, None) => {}
        }
    }
    let renumbered = |(tenant, stream): (u32, Vec<Event>)| {
        let mut packets = Vec::new();
        let (mut packet, mut requests) = (Vec::new(), 0);
        for event in stream {
            packet.push(Event {
                source: SourceId(16 + 8 * tenant),
                domain: IommuDomain(tenant),
                ..event
            });
            requests += usize::from(event.kind == EventKind::Translate);
            if requests == per_packet {
                packets.push(std::mem::take(&mut packet));
                requests = 0;
            }
        }
        packets
    };
    (0..).zip(streams).map(renumbered).collect()
}

/// RR, the obvious way.
fn naive_rr(packets: &[Vec<Vec<Event>>], burst: usize, end: End) -> Vec<Event> {
    let mut next = vec![0; packets.len()];
    let mut gone = vec![false; packets.len()];
    let mut trace = Vec::new();
    loop {
        let mut last_round = false;
        for tenant in 0..packets.len() {
            for _ in 0..burst {
                if gone[tenant] {
                    break;
                }
                match packets[tenant].get(next[tenant]) {
                    Some(packet) => trace.extend_from_slice(packet),
                    None if end == End::FirstRunsOut => return trace,
                    None if end == End::RoundFinished => {
                        last_round = true;
                        break;
                    }
                    None => gone[tenant] = true,
                }
                next[tenant] += 1;
            }
        }
        if last_round || gone.iter().all(|g| *g) {
            return trace;
        }
    }
}

fn spec_for(packets: &[Vec<Vec<Event>>], per_packet: u32) -> HyperSpec {
    let input = RecordedInput {
        logs: Vec::new(),
        requests_per_packet: per_packet,
        reuse: Reuse::Never,
        skip_percent: 0,
    };
    HyperSpec::new(
        Input::Recorded(input),
        u32::try_from(packets.len()).unwrap(),
    )
}

fn steps() -> impl Strategy<Value = Vec<(u8, u8)>> {
    proptest::collection::vec((0_u8..5, 0_u8..12), 0..3000)
}

fn ends() -> impl Strategy<Value = End> {
    prop_oneof![
        Just(End::FirstRunsOut),
        Just(End::RoundFinished),
        Just(End::AllRunOut)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rr_of_any_log_is_the_naive_rr(
        steps in steps(), per_packet in 1_u32..4, burst in 1_u32..6, end in ends(),
    ) {
        let log = log(&steps);
        let packets = naive_packets(&log, per_packet as usize);
        prop_assume!(!packets.is_empty());
        let mut recordings = Recordings::new().unwrap();
        recordings.add(&mut Events(&log)).unwrap();
        let mut spec = spec_for(&packets, per_packet);
        spec.burst_packets = burst;
        spec.end = end;
        let trace = try_all(&mut HyperTrace::recorded(&spec, &recordings).unwrap()).unwrap();
        prop_assert_eq!(trace, naive_rr(&packets, burst as usize, end));
    }

    #[test]
    fn rand_of_any_log_keeps_each_tenants_order_and_loses_nothing(
        steps in steps(), per_packet in 1_u32..4, burst in 1_u32..6, seed: u64, weighted: bool,
    ) {
        let log = log(&steps);
        let packets = naive_packets(&log, per_packet as usize);
        prop_assume!(!packets.is_empty());
        let mut recordings = Recordings::new().unwrap();
        recordings.add(&mut Events(&log)).unwrap();
        let mut spec = spec_for(&packets, per_packet);
        spec.order = Order::Rand;
        spec.burst_packets = burst;
        spec.seed = seed;
        if weighted {
            spec.weights = vec![7];
            if packets.len() > 1 {
                spec.weights.push(2);
            }
        }
        let first = try_all(&mut HyperTrace::recorded(&spec, &recordings).unwrap()).unwrap();
        spec.end = End::AllRunOut;
        spec.membership = Membership::Announced;
        let all = try_all(&mut HyperTrace::recorded(&spec, &recordings).unwrap()).unwrap();
        for (tenant, own) in (0..).zip(&packets) {
            let own = own.concat();
            let of = |trace: &[Event]| -> Vec<Event> {
                let passage = |e: &&Event| matches!(e.kind, EventKind::Join | EventKind::Leave);
                let theirs = trace.iter().filter(|e| e.domain.0 == tenant);
                theirs.filter(|e| !passage(e)).copied().collect()
            };
            prop_assert!(own.starts_with(&of(&first)));
            prop_assert_eq!(of(&all), own);
        }
    }
}
