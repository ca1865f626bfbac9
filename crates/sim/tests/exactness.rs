// SPDX-License-Identifier: Apache-2.0
//! A run is a function of configuration and trace, and loses nothing: the same
//! answer from any thread and in any order of runs, requests and bytes conserved
//! for random configurations and traces, and a defined answer at every edge.

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;
use pagetide_sim::config::{
    CacheConfig, Completion, Config, Flavour, HistoryLength, PartitionBy, Predictor,
    PrefetchTrigger, PtbUnit, Replacement, WalkCost,
};
use pagetide_sim::{
    CacheCounts, DOMAINS_MAX, NextUses, Outcome, SimError, Step, TraceInput, run, run_told,
};
use pagetide_trace::{
    Event, EventKind, EventSource, Events, HyperSpec, HyperTrace, IOVA_BITS, IommuDomain, Order,
    PageSize, SourceId, TenantShape, Workload,
};
use proptest::prelude::*;
use proptest::sample::select;
use sha2::{Digest, Sha256};

const KIB_4: PageSize = PageSize::SIZE_4K;
const MIB_2: PageSize = PageSize::SIZE_2M;
const GIB_1: PageSize = PageSize::SIZE_1G;

fn outcome(config: &Config, events: &[Event]) -> Result<Outcome, SimError> {
    let next_uses = NextUses::of(&mut Events(events))?;
    let input = TraceInput {
        events: &mut Events(events),
        next_uses: Some(&next_uses),
    };
    run(config, input)
}

/// 2,000 packets of `tenants` tenants.
fn hyper_trace(workload: Workload, tenants: u32, order: Order) -> Vec<Event> {
    let mut spec = HyperSpec::synthetic(TenantShape::of(workload), tenants);
    spec.order = order;
    spec.packets = Some(2000);
    spec.seed = 11;
    let mut trace = HyperTrace::synthetic(&spec).unwrap();
    let mut events = Vec::new();
    while trace.next_batch(&mut events).unwrap() > 0 {}
    events
}

/// Six configurations that have every part of the model in one or the other.
fn six_runs() -> Vec<(Config, Vec<Event>)> {
    let mut program_base = Config::base(Flavour::Hypersio);
    program_base.devtlb.replacement = Replacement::Lfu;
    let mut program_seeded = Config::hypertrio(Flavour::Hypersio);
    program_seeded.seed = 5;
    program_seeded.context_cache = CacheConfig::new(24, 24, Replacement::Lfu);
    let mut program_in_order = Config::hypertrio(Flavour::Hypersio);
    program_in_order.completion = Completion::InOrder;
    program_in_order.devtlb.replacement = Replacement::Oracle;
    let paper_base = Config::base(Flavour::Paper);
    let mut paper_host = Config::hypertrio(Flavour::Paper);
    paper_host.prefetch.register = HistoryLength::Host;
    let mut paper_full = Config::hypertrio(Flavour::Paper);
    paper_full.seed = 9;
    paper_full.ptb.unit = PtbUnit::Packets;
    paper_full.iotlb = CacheConfig::new(256, 4, Replacement::Lru);
    paper_full.l1 = CacheConfig::new(64, 8, Replacement::Lfu);
    paper_full.l4 = CacheConfig::new(16, 16, Replacement::Oracle);
    paper_full.devtlb = CacheConfig::new(64, 4, Replacement::Lfu)
        .partitioned(4)
        .by(PartitionBy::FullMatch);
    vec![
        (program_base, hyper_trace(Workload::Iperf3, 16, Order::Rr)),
        (
            program_seeded,
            hyper_trace(Workload::Websearch, 64, Order::Rr),
        ),
        (
            program_in_order,
            hyper_trace(Workload::Mediastream, 40, Order::Rand),
        ),
        (paper_base, hyper_trace(Workload::Iperf3, 8, Order::Rr)),
        (
            paper_host,
            hyper_trace(Workload::Mediastream, 48, Order::Rr),
        ),
        (paper_full, hyper_trace(Workload::Websearch, 6, Order::Rand)),
    ]
}

/// Every figure of a run in sixteen hexadecimal digits.
fn digest(outcome: &Outcome) -> String {
    let figures = serde_json::to_vec(outcome).unwrap();
    Sha256::digest(figures)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A change of the model that is meant to change answers changes these; so does a
/// new figure of `Outcome`, but then the elapsed times stay.
#[test]
fn six_configurations_have_the_answers_that_they_had() {
    let answers: Vec<(u64, String)> = six_runs()
        .iter()
        .map(|(config, events)| outcome(config, events).unwrap())
        .map(|outcome| (outcome.elapsed_ns, digest(&outcome)))
        .collect();
    let golden = [
        (1_798_280, "73da3302d2c51184"),
        (288_590, "4c34f7680b4311e5"),
        (134_656, "85120ad923bbf4e9"),
        (974_852, "350da1ff9371c2fd"),
        (135_946, "ac597f5b493804da"),
        (125_377, "5af8b93d7987d7db"),
    ];
    let answers: Vec<(u64, &str)> = answers.iter().map(|(ns, hex)| (*ns, &**hex)).collect();
    assert_eq!(answers, golden);
}

#[test]
fn order_of_runs_and_number_of_threads_change_no_answer() {
    let runs = six_runs();
    let answer = |at: usize| outcome(&runs[at].0, &runs[at].1).unwrap();
    let in_order: Vec<Outcome> = (0..runs.len()).map(answer).collect();
    for at in (0..runs.len()).rev() {
        assert_eq!(answer(at), in_order[at]);
    }
    for threads in [2, 6, 13] {
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..threads)
                .map(|thread| scope.spawn(move || (thread % 6, answer(thread % 6))))
                .collect();
            for thread in running {
                let (at, outcome) = thread.join().unwrap();
                assert_eq!(outcome, in_order[at]);
            }
        });
    }
}

#[test]
fn watching_a_run_changes_nothing_and_sees_every_request_once() {
    for (config, events) in six_runs() {
        let next_uses = NextUses::of(&mut Events(&events)).unwrap();
        let input = TraceInput {
            events: &mut Events(&events),
            next_uses: Some(&next_uses),
        };
        let (mut issued, mut ended, mut walked) = (0, 0, 0);
        let mut count = |record: pagetide_sim::StepRecord| match record.step {
            Step::Issue | Step::ContextMiss => issued += 1,
            Step::End => ended += 1,
            Step::Walk => walked += 1,
            _ => {}
        };
        let watched = run_told(&config, input, &mut count).unwrap();
        assert_eq!(watched, outcome(&config, &events).unwrap());
        assert_eq!((issued, ended), (watched.requests, watched.requests));
        assert_eq!(walked, watched.walks);
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    use EventKind::{
        InvalidateAll, InvalidateContexts, InvalidateContextsOfDomain, InvalidateDomain,
        InvalidatePages, InvalidateSource, Join, Leave, Translate,
    };
    let others = select(
        &[
            InvalidateAll,
            InvalidateContexts,
            InvalidateContextsOfDomain,
            InvalidateDomain,
            InvalidatePages,
            InvalidateSource,
            Join,
            Leave,
        ][..],
    );
    let kind = prop_oneof![20 => Just(Translate), 1 => others];
    let sources = select(&[16_u32, 24, 32, 33, 40, 48, 1 << 18, u32::MAX][..]);
    let size = prop_oneof![3 => Just(Some(KIB_4)), 6 => Just(Some(MIB_2)), 1 => Just(None)];
    (kind, sources, 0..5_u32, 0..24_u64, 0..4_u64, size).prop_map(
        |(kind, source, domain, page, small, page_size)| Event {
            source: SourceId(source),
            domain: IommuDomain(match domain {
                4 => DOMAINS_MAX - 1,
                domain => domain,
            }),
            iova: Iova(page << 21 | small << 12 | (page % 2) << 55),
            page_size,
            kind,
            ..Event::default()
        },
    )
}

fn any_cache() -> impl Strategy<Value = CacheConfig> {
    let ways = prop_oneof![1 => Just(0_u32), 4 => 1..=9_u32];
    let rules = &[
        PartitionBy::SourceBits,
        PartitionBy::FullMatch,
        PartitionBy::DomainBits,
    ];
    let policies = &[Replacement::Lru, Replacement::Lfu, Replacement::Oracle];
    (
        ways,
        0..4_u32,
        0..4_u32,
        1..3_u32,
        select(&rules[..]),
        select(&policies[..]),
    )
        .prop_map(|(ways, sets, partitions, sources, rule, policy)| {
            let mut cache = CacheConfig::new(ways << sets, ways, policy).by(rule);
            cache.partitions = 1 << partitions.min(sets);
            cache.sources_per_partition = sources;
            cache
        })
}

fn any_config() -> impl Strategy<Value = Config> {
    let flavour = select(&[Flavour::Paper, Flavour::Hypersio][..]);
    let caches = prop::collection::vec(any_cache(), 6);
    let contexts = (0..6_u32, select(&[Replacement::Lru, Replacement::Lfu][..]));
    let device = (
        1..40_u32,
        select(&[PtbUnit::Requests, PtbUnit::Packets][..]),
        select(&[Completion::OutOfOrder, Completion::InOrder][..]),
        select(&[1_u64, 100, 200, 400][..]),
        1..5_u32,
        select(&[64_u64, 1542, 9216][..]),
    );
    let walk = (
        select(&[WalkCost::Nested, WalkCost::Short][..]),
        3..=5_u32,
        0..=5_u32,
        any::<bool>(),
    );
    let prefetch = (
        any::<bool>(),
        0..6_u32,
        1..4_u32,
        1..20_u32,
        select(&[HistoryLength::Fixed, HistoryLength::Host][..]),
        select(&[PrefetchTrigger::BufferMiss, PrefetchTrigger::EveryRequest][..]),
        select(&[Predictor::Latest, Predictor::FirstSeen][..]),
    );
    (flavour, 0..3_u64, caches, contexts, device, walk, prefetch).prop_map(
        |(flavour, seed, mut caches, contexts, device, walk, prefetch)| {
            let mut config = Config::base(flavour);
            config.seed = seed;
            let mut cache = || caches.pop().unwrap_or(CacheConfig::OFF);
            (config.devtlb, config.iotlb) = (cache(), cache());
            (config.l1, config.l2, config.l3, config.l4) = (cache(), cache(), cache(), cache());
            config.context_cache = CacheConfig::new(contexts.0, contexts.0, contexts.1);
            (config.ptb.entries, config.ptb.unit, config.completion) =
                (device.0, device.1, device.2);
            (config.link.gbps, config.link.requests_per_packet) = (device.3, device.4);
            config.link.packet_bytes = device.5;
            (config.walk.cost, config.walk.guest_levels) = (walk.0, walk.1);
            (config.walk.host_levels, config.walk.large_pages_shorten) = (walk.2, walk.3);
            let unit = &mut config.prefetch;
            (unit.enabled, unit.buffer_entries) = (prefetch.0, prefetch.1);
            (unit.pages_per_tenant, unit.history_length) = (prefetch.2, prefetch.3);
            (unit.register, unit.trigger, unit.predictor) = (prefetch.4, prefetch.5, prefetch.6);
            config
        },
    )
}

/// What must hold of any run.
fn check_conservation(config: &Config, events: &[Event], outcome: &Outcome) {
    let is_request = |event: &&Event| event.kind == EventKind::Translate;
    let is_membership = |kind| matches!(kind, EventKind::Join | EventKind::Leave);
    let requests = events.iter().filter(is_request).count() as u64;
    let memberships = events
        .iter()
        .filter(|event| is_membership(event.kind))
        .count() as u64;
    let per_packet = u64::from(config.link.requests_per_packet);
    assert_eq!(outcome.requests, requests);
    assert_eq!(outcome.packets, requests / per_packet);
    assert_eq!(outcome.bytes, outcome.packets * config.link.packet_bytes);
    assert_eq!(
        outcome.invalidations,
        events.len() as u64 - requests - memberships
    );

    let sum = |figure: fn(&pagetide_sim::TenantOutcome) -> u64| {
        outcome.tenants.iter().map(figure).sum::<u64>()
    };
    let caches = &outcome.caches;
    assert_eq!(sum(|tenant| tenant.requests), requests);
    assert_eq!(sum(|tenant| tenant.devtlb_hits), caches.devtlb.hits);
    assert!(sum(|tenant| tenant.prefetch_hits) <= caches.prefetch_buffer.hits);
    assert!(sum(|tenant| tenant.packets) <= requests / per_packet);

    for counts in [
        caches.context_cache,
        caches.devtlb,
        caches.prefetch_buffer,
        caches.iotlb,
        caches.l1,
        caches.l2,
        caches.l3,
        caches.l4,
    ] {
        let CacheCounts {
            lookups,
            hits,
            insertions,
            evictions,
            invalidated,
        } = counts;
        assert!(hits <= lookups);
        assert!(evictions + invalidated <= insertions);
    }
    assert_eq!(caches.context_cache.lookups, requests);
    if config.devtlb.entries > 0 {
        assert_eq!(caches.devtlb.lookups, requests);
    }
    assert!(outcome.prefetch.filled <= outcome.prefetch.sent);
    assert!(outcome.walks <= requests + outcome.prefetch.sent);
    assert!(outcome.walk_accesses >= outcome.walks || config.walk.large_pages_shorten);

    // Packet n is issued at slot n or later, and each slot has its time.
    let packets = requests.div_ceil(per_packet);
    let slots = packets.saturating_sub(1) + outcome.dropped_slots;
    let bits = config.link.packet_bytes * 8;
    let least_ns = match config.flavour {
        Flavour::Hypersio => (packets.saturating_sub(1)) * (bits / config.link.gbps),
        Flavour::Paper => slots * bits / config.link.gbps,
    };
    assert!(outcome.elapsed_ns >= least_ns);
    let latency = &outcome.latency;
    assert!(latency.p50_ns <= latency.p90_ns && latency.p90_ns <= latency.p99_ns);
    assert!(latency.p99_ns <= latency.p999_ns && latency.p999_ns <= latency.max_ns);
    assert!(latency.max_ns <= outcome.elapsed_ns);
    assert!((0.0..=1.0).contains(&outcome.fairness));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_run_loses_no_request_byte_or_tenant(
        config in any_config(),
        events in prop::collection::vec(any_event(), 0..400),
    ) {
        let first = outcome(&config, &events).unwrap();
        check_conservation(&config, &events, &first);
        prop_assert_eq!(outcome(&config, &events).unwrap(), first);
    }
}

fn request(source: u32, domain: u32, iova: u64, size: PageSize) -> Event {
    Event::translate(
        SourceId(source),
        IommuDomain(domain),
        Iova(iova),
        Some(size),
    )
}

fn event(kind: EventKind, source: u32, domain: u32, iova: u64) -> Event {
    Event {
        kind,
        ..request(source, domain, iova, KIB_4)
    }
}

/// Base with one request a packet and one packet at a time.
fn one_at_a_time(flavour: Flavour) -> Config {
    let mut config = Config::base(flavour);
    config.link.requests_per_packet = 1;
    config
}

const FLAVOURS: [Flavour; 2] = [Flavour::Paper, Flavour::Hypersio];

#[test]
fn empty_trace_takes_no_time_and_has_no_figure_that_is_no_number() {
    for flavour in FLAVOURS {
        for config in [Config::base(flavour), Config::hypertrio(flavour)] {
            let outcome = outcome(&config, &[]).unwrap();
            let expected = Outcome {
                fairness: 1.0,
                ..Outcome::default()
            };
            assert_eq!(outcome, expected);
            assert!(!serde_json::to_string(&outcome).unwrap().contains("null"));
        }
    }
}

#[test]
fn trace_without_requests_applies_what_it_has_and_takes_no_time() {
    let events = [
        event(EventKind::InvalidateAll, 0, 0, 0),
        event(EventKind::Join, 16, 0, 0),
        event(EventKind::InvalidateDomain, 0, 7, 0),
        event(EventKind::Leave, 16, 0, 0),
    ];
    for flavour in FLAVOURS {
        let outcome = outcome(&Config::hypertrio(flavour), &events).unwrap();
        assert_eq!((outcome.elapsed_ns, outcome.invalidations), (0, 2));
        assert!(outcome.tenants.is_empty());
    }
}

#[test]
fn last_packet_that_is_not_whole_has_its_requests_ended_and_is_no_packet() {
    for flavour in FLAVOURS {
        for unit in [PtbUnit::Requests, PtbUnit::Packets] {
            let mut config = Config::hypertrio(flavour);
            config.ptb.unit = unit;
            for length in 1..8 {
                let pages = (0..length).map(|page| request(16, 0, page << 21, MIB_2));
                let outcome = outcome(&config, &pages.collect::<Vec<_>>()).unwrap();
                assert_eq!((outcome.requests, outcome.packets), (length, length / 3));
                assert_eq!(outcome.bytes, length / 3 * 1542);
            }
        }
    }
}

/// Hits in the DevTLB of three requests for one page with `between` before the third.
fn hits_with(flavour: Flavour, size: PageSize, between: Event) -> u64 {
    let page = || request(16, 1, 0x8000_0000, size);
    let events = [page(), page(), between, page()];
    outcome(&one_at_a_time(flavour), &events)
        .unwrap()
        .caches
        .devtlb
        .hits
}

#[test]
fn invalidation_that_meets_a_page_makes_it_miss_and_another_does_not() {
    use EventKind::{
        InvalidateAll, InvalidateContexts, InvalidateContextsOfDomain, InvalidateDomain,
        InvalidatePages, InvalidateSource,
    };
    let inside = 0x8000_0000 + (MIB_2.bytes() - 1);
    for flavour in FLAVOURS {
        for meeting in [
            event(InvalidateAll, 0, 0, 0),
            event(InvalidateDomain, 0, 1, 0),
            event(InvalidatePages, 0, 1, 0x8000_0000),
            event(InvalidatePages, 0, 1, inside),
            Event {
                page_size: PageSize::from_shift(40),
                ..event(InvalidatePages, 0, 1, 5)
            },
            event(InvalidateSource, 16, 1, 0),
            event(InvalidateContextsOfDomain, 0, 1, 0),
            event(InvalidateContexts, 0, 0, 0),
        ] {
            assert_eq!(hits_with(flavour, MIB_2, meeting), 1, "{meeting:?}");
        }
        for other in [
            event(InvalidateDomain, 0, 2, 0),
            event(InvalidatePages, 0, 2, 0x8000_0000),
            event(InvalidatePages, 0, 1, 0x8000_0000 + (1 << 30)),
            event(InvalidateSource, 24, 2, 0),
            event(InvalidateContextsOfDomain, 0, 2, 0),
            event(EventKind::Join, 16, 1, 0),
            event(EventKind::Leave, 16, 1, 0),
        ] {
            assert_eq!(hits_with(flavour, MIB_2, other), 2, "{other:?}");
        }
    }
}

#[test]
fn context_that_was_invalidated_is_read_again() {
    for flavour in FLAVOURS {
        for (kind, hits) in [
            (EventKind::InvalidateSource, 1),
            (EventKind::InvalidateContextsOfDomain, 1),
            (EventKind::InvalidateContexts, 1),
            (EventKind::InvalidateDomain, 2),
            (EventKind::InvalidateAll, 2),
        ] {
            let page = || request(16, 1, 0, MIB_2);
            let events = [page(), page(), event(kind, 16, 1, 0), page()];
            let outcome = outcome(&one_at_a_time(flavour), &events).unwrap();
            assert_eq!(outcome.caches.context_cache.hits, hits, "{kind:?}");
        }
    }
}

#[test]
fn answer_that_crosses_an_invalidation_is_not_kept() {
    for flavour in FLAVOURS {
        let mut config = Config::base(flavour);
        config.link.requests_per_packet = 1;
        config.ptb.entries = 2;
        config.devtlb = CacheConfig::new(1024, 1024, Replacement::Lru);
        let page = |number: u64| request(16, 1, number << 21, MIB_2);
        // Two fill the PTB. When the first has ended, the next packet is let in, and
        // with it comes the invalidation: the second is on its way back.
        let mut events = vec![
            page(100),
            page(0),
            event(EventKind::InvalidateDomain, 0, 1, 0),
        ];
        events.extend((1..60).map(page));
        events.push(page(0));
        let outcome = outcome(&config, &events).unwrap();
        assert_eq!(outcome.caches.devtlb.hits, 0, "{flavour:?}");
        assert_eq!(outcome.caches.devtlb.invalidated, 1, "{flavour:?}");
        assert_eq!(outcome.caches.devtlb.insertions, 61, "{flavour:?}");
    }
}

#[test]
fn fairness_falls_if_one_tenant_waits_longer_than_another() {
    for flavour in FLAVOURS {
        let mut config = Config::base(flavour);
        config.link.requests_per_packet = 1;
        config.ptb.entries = 64;
        let of = |tenant: u32, number: u64| request(16 + 8 * tenant, tenant, number << 21, MIB_2);
        let alike: Vec<Event> = (0..400).flat_map(|_| [of(0, 0), of(1, 0)]).collect();
        let one_roams: Vec<Event> = (0..400).flat_map(|n| [of(0, 0), of(1, n)]).collect();
        let fairness = |events: &[Event]| outcome(&config, events).unwrap().fairness;
        assert!(fairness(&alike) > 0.9, "{flavour:?}");
        assert!(fairness(&one_roams) < 0.7, "{flavour:?}");
    }
}

#[test]
fn refused_packets_wait_and_their_tenants_are_told() {
    let events = hyper_trace(Workload::Iperf3, 64, Order::Rr);
    for flavour in FLAVOURS {
        let waits = |config: &Config| {
            let outcome = outcome(config, &events).unwrap();
            let refused = outcome.tenants.iter().map(|tenant| tenant.mean_refused_ns);
            (outcome.dropped_slots, refused.sum::<f64>())
        };
        let (dropped, refused) = waits(&Config::base(flavour));
        assert!(dropped > 0 && refused > 0.0, "{flavour:?}");
        let mut roomy = Config::base(flavour);
        roomy.ptb.entries = 10_000;
        assert_eq!(waits(&roomy), (0, 0.0), "{flavour:?}");
    }
}

#[test]
fn joins_and_leaves_change_no_answer_where_the_register_is_fixed() {
    for (config, events) in six_runs() {
        if config.prefetch.register == HistoryLength::Host {
            continue;
        }
        let mut told = vec![event(EventKind::Join, 16, 0, 0)];
        for (number, one) in events.iter().enumerate() {
            if number % 100 == 0 {
                told.push(event(EventKind::Leave, one.source.0, one.domain.0, 0));
                told.push(event(EventKind::Join, one.source.0, one.domain.0, 0));
            }
            told.push(*one);
        }
        assert_eq!(
            outcome(&config, &told).unwrap(),
            outcome(&config, &events).unwrap()
        );
    }
}

#[test]
fn source_ids_of_32_bits_are_tenants_like_any_other() {
    // The low bits, which choose partitions by the paper, are kept.
    let near = hyper_trace(Workload::Websearch, 64, Order::Rr);
    let far: Vec<Event> = near
        .iter()
        .map(|event| Event {
            source: SourceId(event.source.0 | 0xfff0_0000),
            ..*event
        })
        .collect();
    for flavour in FLAVOURS {
        let config = Config::hypertrio(flavour);
        let mut far = outcome(&config, &far).unwrap();
        for tenant in &mut far.tenants {
            assert!(tenant.source >= 0xfff0_0000);
            tenant.source &= 0xf_ffff;
        }
        assert_eq!(far, outcome(&config, &near).unwrap());
    }
    let both = [
        request(u32::MAX, 0, 0, MIB_2),
        request(u32::MAX - 8, 0, 0, MIB_2),
    ];
    for flavour in FLAVOURS {
        let outcome = outcome(&one_at_a_time(flavour), &both).unwrap();
        let sources: Vec<u32> = outcome.tenants.iter().map(|tenant| tenant.source).collect();
        assert_eq!(sources, [u32::MAX, u32::MAX - 8]);
    }
}

#[test]
fn domains_up_to_the_limit_are_told_apart_and_the_next_is_refused_by_its_request() {
    let last = DOMAINS_MAX - 1;
    // The last page of the last domain, which comes nearest to the tag that no page has.
    let top = (1 << IOVA_BITS) - 1;
    let events = [
        request(16, last, top, KIB_4),
        request(16, last - 1, top, KIB_4),
        request(16, last, top, KIB_4),
        request(16, last - 1, top, KIB_4),
    ];
    for flavour in FLAVOURS {
        let outcome = outcome(&one_at_a_time(flavour), &events).unwrap();
        assert_eq!(outcome.caches.devtlb.hits, 2);
    }
    for domain in [DOMAINS_MAX, u32::MAX] {
        let events = [request(16, 0, 0, KIB_4), request(16, domain, 0, KIB_4)];
        for flavour in FLAVOURS {
            match outcome(&one_at_a_time(flavour), &events) {
                Err(SimError::Request { request: 1, reason }) => {
                    assert!(reason.contains(&domain.to_string()), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn gigabyte_page_that_the_program_loses_is_an_error_there_and_fine_by_the_paper() {
    // The second request misses in a DevTLB that is not there and hits the L2 cache.
    let events = [
        request(16, 0, 1 << 30, GIB_1),
        request(16, 0, 1 << 30, GIB_1),
    ];
    for flavour in FLAVOURS {
        let mut config = one_at_a_time(flavour);
        config.devtlb = CacheConfig::OFF;
        match (flavour, outcome(&config, &events)) {
            (Flavour::Paper, Ok(outcome)) => assert_eq!(outcome.requests, 2),
            (Flavour::Hypersio, Err(SimError::NeverEnds { iova })) => assert_eq!(iova, 1 << 30),
            (flavour, other) => panic!("{flavour:?}: {other:?}"),
        }
    }
}

#[test]
fn gigabyte_page_is_found_from_each_of_its_addresses_where_it_was_filled() {
    // Sets are chosen from bit 21 on: parts of the page are entries of their own.
    let at = |offset: u64| request(16, 0, (1 << 30) + offset, GIB_1);
    let events = [at(0), at(1), at(1 << 21), at((1 << 21) + 1), at(0)];
    let outcome = outcome(&one_at_a_time(Flavour::Paper), &events).unwrap();
    assert_eq!(outcome.caches.devtlb.hits, 3);
}

/// Hands out a few requests, and then an error.
struct Breaks(u32);

impl EventSource for Breaks {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if self.0 == 0 {
            return Err(TraceError::Asked("torn".to_owned()));
        }
        self.0 -= 1;
        batch.push(request(16, 0, u64::from(self.0) << 21, MIB_2));
        Ok(1)
    }
}

#[test]
fn trace_that_breaks_in_the_middle_is_an_error_and_no_short_answer() {
    for flavour in FLAVOURS {
        for before in 0..8 {
            let input = TraceInput {
                events: &mut Breaks(before),
                next_uses: None,
            };
            let error = run(&Config::hypertrio(flavour), input).unwrap_err();
            assert_eq!(error.to_string(), "torn");
        }
    }
}

#[test]
fn oracle_without_the_future_is_refused() {
    for flavour in FLAVOURS {
        let mut config = Config::base(flavour);
        config.devtlb.replacement = Replacement::Oracle;
        let input = TraceInput {
            events: &mut Events(&[]),
            next_uses: None,
        };
        let error = run(&config, input).unwrap_err().to_string();
        assert!(error.contains("future"), "{error}");
    }
}
