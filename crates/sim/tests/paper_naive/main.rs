// SPDX-License-Identifier: Apache-2.0
//! Flavour *paper* against a naive model, step by step, on random traces and
//! configurations: the main proof of the pipeline and of its caches.

mod cache;
mod faults;
mod model;

use pagetide_addr::Iova;
use pagetide_sim::config::{
    Absent, CacheConfig, Completion, Config, DevicesConfig, FaultConfig, FaultDiscipline, Flavour,
    Handlers, HostPage, LatencyConfig, LinkConfig, OnFault, PartitionBy, PasidConfig, Predictor,
    PrefetchConfig, PrefetchTrigger, PtbConfig, PtbUnit, Replacement, WalkConfig, WalkCost,
};
use pagetide_sim::{NextUses, ServiceSamples, ServiceTime, TraceInput, run_told};
use pagetide_trace::{Event, EventKind, Events, IommuDomain, PageSize, SourceId};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::ValueTree as _;

fn cache() -> impl Strategy<Value = CacheConfig> {
    let shapes = [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 1),
        (4, 2),
        (8, 2),
        (16, 4),
        (9, 9),
    ];
    let rules = [
        PartitionBy::SourceBits,
        PartitionBy::DomainBits,
        PartitionBy::FullMatch,
    ];
    let policies = [Replacement::Lru, Replacement::Lfu, Replacement::Oracle];
    (
        select(shapes.to_vec()),
        0..3_u32,
        select(rules.to_vec()),
        (1..3_u32, 0..6_u32),
        select(policies.to_vec()),
    )
        .prop_map(
            |((entries, ways), bits, rule, (sources, low_bit), replacement)| {
                let sets = u32::checked_div(entries, ways).unwrap_or(1);
                let mut cache = CacheConfig::new(entries, ways, replacement)
                    .partitioned((1 << bits).min(sets))
                    .by(rule);
                cache.sources_per_partition = sources;
                cache.source_low_bit = low_bit;
                cache
            },
        )
}

/// One device in half of the runs.
fn devices() -> impl Strategy<Value = DevicesConfig> {
    (select(vec![1, 1, 1, 2, 3, 4]), 0..6_u32, 1..4_u32).prop_map(
        |(count, source_low_bit, ahead_packets)| DevicesConfig {
            count,
            source_low_bit,
            ahead_packets,
        },
    )
}

fn pasid() -> impl Strategy<Value = PasidConfig> {
    (any::<bool>(), 0..5_u64).prop_map(|(enabled, table_accesses)| PasidConfig {
        enabled,
        table_accesses,
    })
}

/// A cache that the oracle knows nothing about, off in some of the runs.
fn cache_of_tables() -> impl Strategy<Value = CacheConfig> {
    cache().prop_map(|mut cache| {
        if cache.replacement == Replacement::Oracle {
            cache.replacement = Replacement::Lru;
        }
        cache
    })
}

fn context_cache() -> impl Strategy<Value = CacheConfig> {
    let policies = vec![Replacement::Lru, Replacement::Lfu];
    (0..5_u32, select(policies))
        .prop_map(|(entries, policy)| CacheConfig::new(entries, entries, policy))
}

fn prefetch() -> impl Strategy<Value = PrefetchConfig> {
    (
        any::<bool>(),
        0..5_u32,
        1..4_u32,
        1..8_u32,
        select(vec![
            PrefetchTrigger::BufferMiss,
            PrefetchTrigger::EveryRequest,
        ]),
        select(vec![Predictor::Latest, Predictor::FirstSeen]),
    )
        .prop_map(|(enabled, buffer, pages, length, trigger, predictor)| {
            let mut prefetch = Config::base(Flavour::Paper).prefetch;
            prefetch.enabled = enabled;
            prefetch.buffer_entries = buffer;
            prefetch.pages_per_tenant = pages;
            prefetch.history_length = length;
            prefetch.trigger = trigger;
            prefetch.predictor = predictor;
            prefetch
        })
}

fn latency() -> impl Strategy<Value = LatencyConfig> {
    proptest::array::uniform8(0..5_u64).prop_map(|n| LatencyConfig {
        pcie_ns: n[0] * 3,
        dram_ns: n[1],
        devtlb_hit_ns: n[2],
        prefetch_hit_ns: n[3],
        context_hit_ns: n[4],
        walk_cache_hit_ns: n[5],
        context_accesses: n[6],
        history_accesses: n[7],
    })
}

fn walk() -> impl Strategy<Value = WalkConfig> {
    let costs = vec![WalkCost::Nested, WalkCost::Short];
    let pages = vec![HostPage::Size4K, HostPage::Size2M, HostPage::Size1G];
    (
        select(costs),
        (3..6_u32, 0..6_u32),
        any::<bool>(),
        select(pages),
        0..5_u32,
    )
        .prop_map(
            |(cost, (guest_levels, host_levels), large_pages_shorten, page, walkers)| WalkConfig {
                cost,
                guest_levels,
                host_levels,
                host_page: match host_levels {
                    0..3 => HostPage::Size4K,
                    _ => page,
                },
                walkers,
                large_pages_shorten,
            },
        )
}

fn link() -> impl Strategy<Value = LinkConfig> {
    (100..513_u64, 1..5_u32).prop_map(|(gbps, requests_per_packet)| LinkConfig {
        gbps,
        packet_bytes: 64,
        requests_per_packet,
    })
}

fn config() -> impl Strategy<Value = Config> {
    let device = (
        link(),
        1..10_u32,
        select(vec![PtbUnit::Requests, PtbUnit::Packets]),
        select(vec![Completion::OutOfOrder, Completion::InOrder]),
        0..1000_u64,
    );
    let caches = (cache(), cache(), cache(), cache(), cache(), cache());
    let beyond = (devices(), cache_of_tables(), pasid(), cache_of_tables());
    (
        device,
        (context_cache(), caches),
        walk(),
        prefetch(),
        latency(),
        beyond,
    )
        .prop_map(|(device, caches, walk, prefetch, latency, beyond)| {
            let (link, entries, unit, completion, seed) = device;
            let (context_cache, (devtlb, iotlb, l1, l2, l3, l4)) = caches;
            let (devices, nested_tlb, pasid, pasid_cache) = beyond;
            Config {
                flavour: Flavour::Paper,
                seed,
                link,
                devices,
                ptb: PtbConfig { entries, unit },
                completion,
                context_cache,
                devtlb,
                iotlb,
                l1,
                l2,
                l3,
                l4,
                nested_tlb,
                pasid,
                pasid_cache,
                walk,
                prefetch,
                latency,
                faults: FaultConfig::default(),
            }
        })
}

/// Every discipline, with queues and parking so small that they fill.
fn faults() -> impl Strategy<Value = FaultConfig> {
    let disciplines = vec![
        FaultDiscipline::Pinned,
        FaultDiscipline::Vpri,
        FaultDiscipline::AtsPri,
        FaultDiscipline::Touch,
    ];
    let what = (
        select(disciplines),
        select(vec![OnFault::Pause, OnFault::OutOfOrder]),
        select(vec![Absent::Share, Absent::Lru, Absent::Events]),
        select(vec![0, 10_000, 200_000, 1_000_000]),
        (1..8_u32, 0..4_u32),
    );
    let how = (
        (1..4_u32, 1..6_u32),
        select(vec![Handlers::Serialized, Handlers::Affined]),
        1..4_u32,
        proptest::collection::vec(service_time(), 0..3),
        (service_time(), 0..9_u64),
    );
    (what, how).prop_map(|(what, how)| {
        let (discipline, on_fault, absent, absent_ppm, (limit_pages, tenants)) = what;
        let ((queue_entries, parked_requests), handlers, cpus, times, (time, lookup_ns)) = how;
        FaultConfig {
            discipline,
            on_fault,
            absent,
            absent_ppm,
            limit_pages,
            tenants,
            lookup_ns,
            queue_entries,
            parked_requests,
            handlers,
            cpus,
            pre_ns: time.pre_ns,
            handling_ns: time.handling_ns,
            post_ns: time.post_ns,
            times: ServiceSamples::new(times),
            ..FaultConfig::default()
        }
    })
}

fn service_time() -> impl Strategy<Value = ServiceTime> {
    (0..12_u64, 0..40_u64, 0..12_u64).prop_map(|(pre_ns, handling_ns, post_ns)| ServiceTime {
        pre_ns,
        handling_ns,
        post_ns,
    })
}

/// Addresses that lie near enough to one another to meet at every level.
fn iova() -> impl Strategy<Value = u64> {
    (0..3_u64, 0..2_u64, 0..5_u64, 0..3_u64)
        .prop_map(|(l4, l3, l2, l1)| l4 << 39 | l3 << 30 | l2 << 21 | l1 << 12 | 0x10)
}

fn is_about_a_source(kind: EventKind) -> bool {
    matches!(
        kind,
        EventKind::Translate | EventKind::InvalidateSource | EventKind::Join | EventKind::Leave
    )
}

fn event() -> impl Strategy<Value = Event> {
    let sizes = vec![
        None,
        Some(PageSize::SIZE_4K),
        Some(PageSize::SIZE_2M),
        Some(PageSize::SIZE_2M),
        Some(PageSize::SIZE_1G),
    ];
    let others = vec![
        EventKind::InvalidatePages,
        EventKind::InvalidatePages,
        EventKind::InvalidatePages,
        EventKind::InvalidateDomain,
        EventKind::InvalidateAll,
        EventKind::InvalidateSource,
        EventKind::InvalidateContextsOfDomain,
        EventKind::InvalidateContexts,
        EventKind::Join,
        EventKind::Leave,
        EventKind::PageOut,
        EventKind::PageOut,
        EventKind::PageOut,
    ];
    let sources = vec![16, 17, 24, 32, 40, 48, 1 << 20];
    let kind = prop_oneof![20 => Just(EventKind::Translate), 1 => select(others)];
    let what = (select(sources), 0..8_u32, iova(), select(sizes), kind);
    (what, any::<bool>()).prop_map(|((source, domain, iova, size, kind), names_source)| {
        // Most sources have a domain of their own, and some share one.
        let domain = if domain < 6 { source % 7 } else { domain };
        let mut event = Event::translate(SourceId(source), IommuDomain(domain), Iova(iova), size);
        event.kind = kind;
        // Logs name no source where the event is not about one; made traces do.
        if !names_source && !is_about_a_source(kind) {
            event.source = SourceId(0);
        }
        event
    })
}

/// A few events, many times over: caches are of use only if pages come again.
fn trace() -> impl Strategy<Value = Vec<Event>> {
    proptest::collection::vec(event(), 1..24)
        .prop_flat_map(|pool| proptest::collection::vec(select(pool), 0..160))
}

/// The same, with page-outs of what is used in it.
fn trace_with_page_outs() -> impl Strategy<Value = Vec<Event>> {
    let places = proptest::collection::vec(any::<Index>(), 0..24);
    (trace(), places).prop_map(|(mut events, places)| {
        for place in places {
            if !events.is_empty() {
                let at = place.index(events.len());
                let mut event = events[at];
                event.kind = EventKind::PageOut;
                events.insert(at, event);
            }
        }
        events
    })
}

#[test]
fn random_runs_have_what_the_paper_has_not() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut several, mut idle, mut nested, mut spaces) = (0, 0, 0, 0);
    for _run in 0..500 {
        let (config, events) = (config(), trace()).new_tree(&mut runner).unwrap().current();
        let result = real(&config, &events);
        several += usize::from(result.devices.len() > 1);
        idle += result.devices.iter().map(|device| device.1).sum::<u64>();
        nested += result.caches.nested_tlb.hits;
        spaces += result.caches.pasid_cache.hits;
    }
    assert!(several > 150, "{several} runs of several devices");
    assert!(idle > 500, "{idle} idle slots");
    assert!(nested > 500, "{nested} hits in nested TLBs");
    assert!(spaces > 500, "{spaces} hits in PASID caches");
}

fn real(config: &Config, events: &[Event]) -> model::Result {
    let next_uses = NextUses::of(&mut Events(events)).unwrap();
    let mut steps = Vec::new();
    let input = TraceInput {
        events: &mut Events(events),
        next_uses: Some(&next_uses),
    };
    let outcome = run_told(config, input, &mut |record| {
        steps.push(model::step(&record))
    })
    .unwrap();
    assert_eq!(outcome.bytes, outcome.packets * config.link.packet_bytes);
    let tenants = outcome.tenants.iter();
    model::Result {
        faults: outcome.faults,
        elapsed_ns: outcome.elapsed_ns,
        ended: outcome.requests,
        packets: outcome.packets,
        dropped: outcome.dropped_slots,
        walks: outcome.walks,
        accesses: outcome.walk_accesses,
        invalidations: outcome.invalidations,
        sent: outcome.prefetch.sent,
        filled: outcome.prefetch.filled,
        caches: outcome.caches,
        devices: outcome
            .devices
            .iter()
            .map(|device| (device.dropped_slots, device.idle_slots))
            .collect(),
        tenants: tenants
            .map(|t| (t.source, t.requests, t.devtlb_hits, t.prefetch_hits))
            .collect(),
        steps,
    }
}

#[test]
fn random_runs_have_every_kind_of_page_fault() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sums = std::collections::BTreeMap::new();
    let mut joins = std::collections::BTreeMap::new();
    for _run in 0..4_000 {
        let (mut config, faults, events) = (config(), faults(), trace_with_page_outs())
            .new_tree(&mut runner)
            .unwrap()
            .current();
        let kind = format!("{:?} {:?}", faults.discipline, faults.on_fault);
        let name = format!("{kind} {:?}", faults.absent);
        config.faults = faults;
        let Some(outcome) = real(&config, &events).faults else {
            continue;
        };
        let sum = sums.entry(name).or_insert([0; 3]);
        sum[0] += outcome.waits;
        sum[1] += outcome.held_requests;
        sum[2] += outcome.page_outs;
        // A device that waits where it touches waits for one page at a time; another one may join it.
        if config.devices.count == 1 {
            let joined = outcome.waits - outcome.page_requests;
            *joins.entry(kind).or_insert(0) += joined;
        }
    }
    assert_eq!(sums.len(), 4 * 2 * 3, "{sums:?}");
    for (name, [waits, held, page_outs]) in sums {
        let is_fault = !name.starts_with("Pinned");
        let is_touch = name.starts_with("Touch");
        assert_eq!(waits > 50, is_fault, "{name}: {waits} waits");
        let pauses = is_fault && !is_touch && name.contains("Pause");
        assert_eq!(held > 20, pauses, "{name}: {held} waited behind");
        assert_eq!(page_outs > 50, is_fault, "{name}: {page_outs} page-outs");
    }
    // Rare where a queue pauses, so these are not told apart by what is absent.
    for (kind, joined) in joins {
        let may_join = !kind.starts_with("Pinned") && !kind.starts_with("Touch");
        assert_eq!(joined > 0, may_join, "{kind}: {joined} joined");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn every_step_of_a_random_run_is_that_of_the_naive_model(
        config in config(),
        events in trace(),
    ) {
        prop_assert!(config.check().is_ok(), "{:?}", config.check());
        let naive = model::Model::new(&config, &events).run();
        let real = real(&config, &events);
        for (mine, its) in naive.steps.iter().zip(&real.steps) {
            prop_assert_eq!(mine, its, "naive left, real right");
        }
        prop_assert_eq!(naive, real);
    }

    #[test]
    fn every_step_of_a_random_run_with_page_faults_is_that_of_the_naive_model(
        mut config in config(),
        faults in faults(),
        events in trace_with_page_outs(),
    ) {
        config.faults = faults;
        prop_assert!(config.check().is_ok(), "{:?}", config.check());
        let naive = model::Model::new(&config, &events).run();
        let real = real(&config, &events);
        for (mine, its) in naive.steps.iter().zip(&real.steps) {
            prop_assert_eq!(mine, its, "naive left, real right");
        }
        prop_assert_eq!(naive, real);
    }
}
