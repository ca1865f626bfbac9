// SPDX-License-Identifier: Apache-2.0
//! Each parameter acts: a change of it alone changes a run, in the direction
//! that it must. Traces are a few packets made for the purpose.

use pagetide_addr::Iova;
use pagetide_sim::config::{
    CacheConfig, Completion, Config, Flavour, HistoryLength, PartitionBy, Predictor,
    PrefetchTrigger, PtbUnit, Replacement, WalkCost,
};
use pagetide_sim::{NextUses, Outcome, TraceInput, run};
use pagetide_trace::{Event, EventKind, Events, IommuDomain, PageSize, SourceId};

const MIB_2: u64 = 1 << 21;

/// Page `page` (of 2 MiB) of tenant `tenant`.
fn request(tenant: u32, page: u64) -> Event {
    Event::translate(
        SourceId(16 + 8 * tenant),
        IommuDomain(tenant),
        Iova(page * MIB_2),
        Some(PageSize::SIZE_2M),
    )
}

/// `rounds` rounds of a packet (ring, data, mailbox) of each of `tenants`.
fn rounds(rounds: u64, tenants: u32) -> Vec<Event> {
    let mut events = Vec::new();
    for round in 0..rounds {
        for tenant in 0..tenants {
            events.push(request(tenant, 420));
            events.push(request(tenant, 1504 + round / 64 % 32));
            events.push(request(tenant, 2039));
        }
    }
    events
}

fn outcome(config: &Config, events: &[Event]) -> Outcome {
    let next_uses = NextUses::of(&mut Events(events)).unwrap();
    let input = TraceInput {
        events: &mut Events(events),
        next_uses: Some(&next_uses),
    };
    run(config, input).unwrap()
}

/// HyperTRIO of table IV with `change`.
fn hypertrio(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config::hypertrio(Flavour::Paper);
    change(&mut config);
    config
}

fn base(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config::base(Flavour::Paper);
    change(&mut config);
    config
}

/// Elapsed time of base with `change`, on many tenants that miss.
fn elapsed(change: impl FnOnce(&mut Config)) -> u64 {
    outcome(&base(change), &rounds(40, 64)).elapsed_ns
}

#[test]
fn one_request_with_empty_caches_takes_context_read_two_crossings_and_a_full_walk() {
    for (guest, host, accesses) in [(4, 4, 24), (5, 5, 35), (4, 0, 4)] {
        let mut config = base(|c| c.link.requests_per_packet = 1);
        config.walk.guest_levels = guest;
        config.walk.host_levels = host;
        let outcome = outcome(&config, &[request(0, 1)]);
        assert_eq!(outcome.walk_accesses, accesses);
        assert_eq!(
            outcome.latency.max_ns,
            (2 * 450 + 2 * 50) + 2 * 450 + accesses * 50
        );
    }
}

#[test]
fn one_request_that_hits_takes_context_and_devtlb_hit_times() {
    let config = base(|c| c.link.requests_per_packet = 1);
    let outcome = outcome(&config, &[request(0, 1), request(0, 1)]);
    let first_ns = 1000 + 900 + 1200;
    assert_eq!(outcome.latency.p50_ns, 1 + 2);
    assert_eq!(outcome.latency.max_ns, first_ns);
}

#[test]
fn longer_latency_of_any_kind_takes_longer() {
    let changes: [fn(&mut Config); 6] = [
        |c| c.latency.pcie_ns = 600,
        |c| c.latency.dram_ns = 80,
        |c| c.latency.context_hit_ns = 100,
        |c| c.latency.context_accesses = 30,
        |c| c.latency.walk_cache_hit_ns = 100,
        |c| c.walk.host_levels = 5,
    ];
    // A level 3 cache that hits, so that each of these has its part.
    let with = |change: fn(&mut Config)| {
        elapsed(|config| {
            config.link.gbps = 10_000;
            config.l3 = CacheConfig::new(1024, 1024, Replacement::Lru);
            change(config);
        })
    };
    let before = with(|_| ());
    for (number, change) in changes.into_iter().enumerate() {
        assert!(with(change) > before, "change {number}");
    }
}

#[test]
fn short_walk_is_quicker_than_24_accesses() {
    assert!(elapsed(|c| c.walk.cost = WalkCost::Short) < elapsed(|_| ()));
}

#[test]
fn large_pages_shorten_the_walk_if_told_so() {
    assert!(elapsed(|c| c.walk.large_pages_shorten = true) < elapsed(|_| ()));
}

#[test]
fn iotlb_and_every_level_of_walk_cache_save_accesses() {
    let none = |c: &mut Config| {
        c.l2 = CacheConfig::OFF;
        c.l3 = CacheConfig::OFF;
    };
    let large = CacheConfig::new(4096, 4096, Replacement::Lru);
    let accesses = |change: &dyn Fn(&mut Config)| {
        let mut config = base(none);
        change(&mut config);
        let mut events = rounds(40, 64);
        for event in &mut events {
            event.page_size = Some(PageSize::SIZE_4K);
        }
        outcome(&config, &events).walk_accesses
    };
    let without = accesses(&|_| ());
    let by_level = [
        accesses(&|c| c.iotlb = large.clone()),
        accesses(&|c| c.l1 = large.clone()),
        accesses(&|c| c.l2 = large.clone()),
        accesses(&|c| c.l3 = large.clone()),
        accesses(&|c| c.l4 = large.clone()),
    ];
    assert_eq!(by_level[0], by_level[1]);
    assert!(by_level[1] < by_level[2], "{by_level:?}");
    assert!(by_level[2] < by_level[3], "{by_level:?}");
    assert!(by_level[3] < by_level[4], "{by_level:?}");
    assert!(by_level[4] < without, "{by_level:?}, {without}");
}

#[test]
fn link_that_is_slower_or_has_smaller_packets_bounds_the_rate() {
    let events = rounds(60, 1).repeat(50);
    let rate = |config: &Config| outcome(config, &events).gbps;
    let full = rate(&base(|_| ()));
    let slow = rate(&base(|c| c.link.gbps = 40));
    let small = rate(&base(|c| c.link.packet_bytes = 64));
    assert!((180.0..=200.0).contains(&full), "{full}");
    assert!((39.0..=40.0).contains(&slow), "{slow}");
    assert!(small < full / 2.0, "{small}");
}

#[test]
fn ptb_of_packets_holds_as_many_packets_as_entries() {
    let events = rounds(40, 64);
    let config = |unit, entries| {
        base(|c| {
            c.ptb.unit = unit;
            c.ptb.entries = entries;
            // All requests take the same time.
            c.context_cache = CacheConfig::OFF;
            c.devtlb = CacheConfig::OFF;
            c.l2 = CacheConfig::OFF;
            c.l3 = CacheConfig::OFF;
        })
    };
    let time = |unit, entries| outcome(&config(unit, entries), &events).elapsed_ns;
    // One entry: a packet at a time, whatever the entry is called.
    assert_eq!(time(PtbUnit::Requests, 1), time(PtbUnit::Packets, 1));
    // The check is made once a packet: 8 requests let a third packet in.
    assert_eq!(time(PtbUnit::Requests, 8), time(PtbUnit::Packets, 3));
    assert!(time(PtbUnit::Packets, 8) < time(PtbUnit::Requests, 8));
}

#[test]
fn ptb_that_is_full_turns_packets_away_until_there_is_room() {
    let events = rounds(10, 64);
    let one = outcome(&base(|_| ()), &events);
    let many = outcome(&base(|c| c.ptb.entries = 10_000), &events);
    assert!(one.dropped_slots > 0);
    assert_eq!(many.dropped_slots, 0);
    assert_eq!(one.packets, many.packets);
}

#[test]
fn in_order_completion_holds_hits_up_behind_misses() {
    let events = rounds(40, 64);
    let config = |completion| {
        hypertrio(|c| {
            c.prefetch.enabled = false;
            c.context_cache = CacheConfig::new(8, 8, Replacement::Lru);
            c.completion = completion;
        })
    };
    let in_order = outcome(&config(Completion::InOrder), &events)
        .latency
        .mean_ns;
    let out_of_order = outcome(&config(Completion::OutOfOrder), &events)
        .latency
        .mean_ns;
    assert!(in_order > out_of_order, "{in_order} {out_of_order}");
}

#[test]
fn devtlb_with_partitions_keeps_tenants_apart_by_source_or_domain_bits() {
    let events = rounds(200, 8);
    let hits = |change: fn(&mut CacheConfig)| {
        let mut config = base(|c| c.devtlb = CacheConfig::new(32, 4, Replacement::Lru));
        change(&mut config.devtlb);
        outcome(&config, &events).caches.devtlb.hit_rate()
    };
    // Ring pages of all tenants meet in one set, data and mailbox pages in others.
    assert!(hits(|_| ()) < 0.01);
    assert!(hits(|c| c.partitions = 8) > 0.95);
    assert!(
        hits(|c| {
            c.partitions = 8;
            c.partition_by = PartitionBy::DomainBits;
        }) > 0.95
    );
}

#[test]
fn functions_numbered_one_by_one_have_partitions_of_their_own_from_the_lowest_source_bit_on() {
    let mut events = rounds(200, 8);
    for event in &mut events {
        event.source.0 = event.domain.0;
    }
    let hits = |source_low_bit| {
        let mut config =
            base(|c| c.devtlb = CacheConfig::new(32, 4, Replacement::Lru).partitioned(8));
        config.devtlb.source_low_bit = source_low_bit;
        outcome(&config, &events).caches.devtlb.hit_rate()
    };
    assert!(hits(0) > 0.95);
    // All eight are functions of one device, and so in one partition.
    assert!(hits(3) < 0.01);
    assert!(hits(31) < 0.01);
}

#[test]
fn devtlb_with_full_match_caches_for_tagged_sources_only() {
    let events = rounds(200, 8);
    let hits_of = |sources_per_partition| {
        let mut config = base(|c| {
            c.devtlb = CacheConfig::new(32, 8, Replacement::Lru)
                .partitioned(4)
                .by(PartitionBy::FullMatch);
        });
        config.devtlb.sources_per_partition = sources_per_partition;
        outcome(&config, &events)
            .tenants
            .iter()
            .map(|tenant| tenant.devtlb_hits > 500)
            .collect::<Vec<_>>()
    };
    let tagged = |count| (0..8).map(|tenant| tenant < count).collect::<Vec<_>>();
    assert_eq!(hits_of(1), tagged(4));
    assert_eq!(hits_of(2), tagged(8));
}

#[test]
fn replacement_policies_order_as_they_must_on_a_loop_that_does_not_fit() {
    let events: Vec<Event> = (0..6000).map(|n| request(0, n % 12)).collect();
    let hits = |replacement| {
        let config = base(|c| {
            c.link.requests_per_packet = 1;
            c.devtlb = CacheConfig::new(8, 8, replacement);
        });
        outcome(&config, &events).caches.devtlb.hits
    };
    let (lru, lfu, oracle) = (
        hits(Replacement::Lru),
        hits(Replacement::Lfu),
        hits(Replacement::Oracle),
    );
    assert_eq!(lru, 0);
    assert!(lru < lfu && lfu < oracle, "{lru} {lfu} {oracle}");
    // Belady on a loop of 12 over 8 ways keeps 7 of every 11.
    assert!((3750..=3850).contains(&oracle), "{oracle}");
}

#[test]
fn seed_breaks_ties_of_lfu_and_nothing_else() {
    let events: Vec<Event> = (0..3000).map(|n| request(0, n * n % 19)).collect();
    let result = |replacement, seed| {
        let mut config = base(|c| c.devtlb = CacheConfig::new(8, 8, replacement));
        config.context_cache.replacement = Replacement::Lru;
        (config.l2.replacement, config.l3.replacement) = (Replacement::Lru, Replacement::Lru);
        config.seed = seed;
        outcome(&config, &events)
    };
    assert_eq!(result(Replacement::Lru, 1), result(Replacement::Lru, 2));
    assert_eq!(result(Replacement::Lfu, 1), result(Replacement::Lfu, 1));
    assert_ne!(result(Replacement::Lfu, 1), result(Replacement::Lfu, 2));
}

/// Hits in the buffer, and prefetches sent, of HyperTRIO with `change`: tenants
/// in turn, and 16 packets between a tenant and the one predicted for it.
fn prefetched(change: impl FnOnce(&mut Config)) -> (u64, u64) {
    let config = hypertrio(|c| {
        c.devtlb = CacheConfig::OFF;
        c.walk.cost = WalkCost::Short;
        change(c);
    });
    let outcome = outcome(&config, &rounds(60, 64));
    (outcome.caches.prefetch_buffer.hits, outcome.prefetch.sent)
}

#[test]
fn prefetch_buffer_and_pages_and_length_decide_what_the_buffer_supplies() {
    let (hits, sent) = prefetched(|_| ());
    assert!(hits > 1000, "{hits}");
    assert_eq!(prefetched(|c| c.prefetch.enabled = false), (0, 0));
    assert_eq!(prefetched(|c| c.prefetch.buffer_entries = 0).0, 0);
    // Two pages of one tenant do not stay until they are asked for.
    assert!(prefetched(|c| c.prefetch.buffer_entries = 1).0 < hits / 4);
    assert!(prefetched(|c| c.prefetch.pages_per_tenant = 1).1 < sent);
    // For the next packet, it is too late.
    assert!(prefetched(|c| c.prefetch.history_length = 3).0 < hits / 4);
    assert!(prefetched(|c| c.latency.history_accesses = 100).0 < hits / 4);
}

#[test]
fn prefetch_on_every_request_sends_more_than_on_a_miss() {
    let on_miss = prefetched(|_| ()).1;
    let on_every = prefetched(|c| c.prefetch.trigger = PrefetchTrigger::EveryRequest).1;
    assert!(on_every > on_miss, "{on_every} {on_miss}");
}

/// 64 tenants in turn; after half the rounds every fourth has left.
fn with_leavers() -> (Vec<Event>, usize) {
    let mut events = rounds(60, 64);
    let half = events.len();
    events.extend(
        rounds(120, 64)
            .into_iter()
            .filter(|event| event.source.0 / 8 % 4 != 1),
    );
    (events, half)
}

#[test]
fn prefetching_keeps_working_after_tenants_leave_with_the_latest_successor() {
    let (events, half) = with_leavers();
    let hits_after = |predictor| {
        let config = hypertrio(|c| {
            c.devtlb = CacheConfig::OFF;
            c.walk.cost = WalkCost::Short;
            // Time and room enough, so that the predictor alone decides.
            c.link.gbps = 50;
            c.prefetch.history_length = 18;
            c.prefetch.buffer_entries = 64;
            c.prefetch.predictor = predictor;
        });
        let hits = |events| outcome(&config, events).caches.prefetch_buffer.hits;
        let before = hits(&events[..half]);
        let after = hits(&events) - before;
        // By request: the second part is longer.
        let (before_requests, after_requests) = (half as u64, (events.len() - half) as u64);
        after * before_requests * 100 / (before * after_requests)
    };
    let latest = hits_after(Predictor::Latest);
    let first_seen = hits_after(Predictor::FirstSeen);
    assert!(latest >= 90, "{latest}% of the hits before");
    // A prediction for a tenant that has left is lost, for ever.
    assert!(first_seen <= 75, "{first_seen}% of the hits before");
}

/// HyperTRIO whose host writes the register.
fn hosted() -> Config {
    hypertrio(|c| {
        c.walk.cost = WalkCost::Short;
        c.prefetch.register = HistoryLength::Host;
        c.prefetch.history_length = 7;
    })
}

#[test]
fn register_is_written_by_the_host_and_stays_as_configured_without_it() {
    let events = rounds(60, 64);
    let fixed = hypertrio(|c| c.prefetch.history_length = 7);
    assert_eq!(outcome(&fixed, &events).prefetch.register_writes, 0);
    assert!(outcome(&hosted(), &events).prefetch.register_writes >= 1);
}

#[test]
fn prefetching_with_a_host_keeps_working_after_tenants_leave() {
    let (events, half) = with_leavers();
    let before = outcome(&hosted(), &events[..half]).prefetch.register_writes;
    let after = outcome(&hosted(), &events);
    assert!(after.prefetch.register_writes > before);
    assert!(after.caches.prefetch_buffer.hits > events.len() as u64 / 10);
}

/// The trace once, an invalidation of `kind`, and the trace again.
fn twice_with(kind: EventKind) -> Outcome {
    let large = CacheConfig::new(64, 64, Replacement::Lru);
    let config = hypertrio(|c| {
        c.link.requests_per_packet = 1;
        c.prefetch.history_length = 1;
        for cache in [
            &mut c.devtlb,
            &mut c.iotlb,
            &mut c.l1,
            &mut c.l2,
            &mut c.l3,
            &mut c.l4,
        ] {
            *cache = large.clone();
        }
    });
    let mut page = request(0, 7);
    page.page_size = Some(PageSize::SIZE_4K);
    let mut other = request(1, 7);
    other.page_size = Some(PageSize::SIZE_4K);
    // Enough requests that the first have come back when the event takes effect.
    let once: Vec<Event> = [page, other].into_iter().cycle().take(400).collect();
    let event = Event { kind, ..page };
    let events = [once.as_slice(), &[event], once.as_slice()].concat();
    outcome(&config, &events)
}

#[test]
fn invalidation_of_any_kind_removes_entries_from_every_cache() {
    // How many of the two tenants it is about.
    let kinds = [
        (EventKind::InvalidatePages, 1),
        (EventKind::InvalidateDomain, 1),
        (EventKind::InvalidateAll, 2),
        (EventKind::InvalidateSource, 1),
        (EventKind::InvalidateContextsOfDomain, 1),
        (EventKind::InvalidateContexts, 2),
    ];
    for (kind, tenants) in kinds {
        let outcome = twice_with(kind);
        assert_eq!(outcome.invalidations, 1, "{kind:?}");
        let caches = outcome.caches;
        for cache in [
            caches.devtlb,
            caches.iotlb,
            caches.l1,
            caches.l2,
            caches.l3,
            caches.l4,
        ] {
            assert_eq!(cache.invalidated, tenants, "{kind:?}");
        }
        assert!(caches.prefetch_buffer.invalidated > 0, "{kind:?}");
        let about_contexts = !matches!(
            kind,
            EventKind::InvalidatePages | EventKind::InvalidateDomain | EventKind::InvalidateAll
        );
        let contexts = if about_contexts { tenants } else { 0 };
        assert_eq!(caches.context_cache.invalidated, contexts, "{kind:?}");
    }
}

/// Tenants that miss, a hundred of them.
fn crowd() -> Vec<Event> {
    rounds(40, 100)
}

#[test]
fn two_devices_get_nearly_twice_as_much_through_and_share_the_walkers() {
    let gbps = |devices, walkers| {
        let config = hypertrio(|c| {
            c.devices.count = devices;
            c.walk.walkers = walkers;
            c.prefetch.enabled = false;
        });
        outcome(&config, &crowd()).gbps
    };
    assert!(gbps(2, 0) > 1.8 * gbps(1, 0));
    // Two walkers are too few for two devices, whose packets take some of their translations from caches.
    assert!(gbps(2, 2) < 1.5 * gbps(1, 2));
}

#[test]
fn each_device_has_the_packets_of_its_sources() {
    let config = hypertrio(|c| c.devices.count = 3);
    let outcome = outcome(&config, &rounds(40, 9));
    assert_eq!(outcome.packets, 360);
    assert_eq!(outcome.devices.len(), 3);
    for device in &outcome.devices {
        assert_eq!((device.tenants, device.packets), (3, 120));
        assert!(device.link_share > 0.0 && device.link_share <= 1.0);
    }
    let sum: f64 = outcome.devices.iter().map(|device| device.gbps).sum();
    assert!((sum - outcome.gbps).abs() < 1e-9);
    assert!((outcome.link_share * 600.0 - outcome.gbps).abs() < 1e-9);
}

#[test]
fn device_far_ahead_in_the_trace_has_idle_slots_until_the_other_catches_up() {
    let (one, other): (Vec<_>, Vec<_>) = rounds(300, 2)
        .into_iter()
        .partition(|event| event.source.0 == 16);
    let events = [one, other].concat();
    let idle = |ahead_packets| {
        let config = base(|c| {
            c.devices.count = 2;
            c.devices.ahead_packets = ahead_packets;
        });
        let outcome = outcome(&config, &events);
        outcome.devices.iter().map(|d| d.idle_slots).sum::<u64>()
    };
    assert!(idle(10) > 100);
    assert_eq!(idle(1000), 0);
}

#[test]
fn nested_tlb_saves_accesses_and_larger_host_pages_need_less_of_it() {
    use pagetide_sim::config::HostPage;
    let accesses = |entries: u32, host_page| {
        let config = base(|c| {
            c.walk.host_page = host_page;
            // All tenants have their tables at the same addresses: each has sets of its own.
            let sets = (entries / 16).max(1);
            c.nested_tlb = CacheConfig::new(entries, 16, Replacement::Lru).partitioned(sets);
        });
        let outcome = outcome(&config, &crowd());
        outcome.walk_accesses as f64 / outcome.walks as f64
    };
    let [small, large] = [HostPage::Size4K, HostPage::Size1G];
    assert_eq!((accesses(0, small), accesses(0, large)), (24.0, 14.0));
    assert!(accesses(1024, small) < 12.0);
    assert!(accesses(4096, small) < 6.0);
    // Large pages of the host need fewer entries.
    assert!(accesses(1024, large) < 6.0);
}

#[test]
fn page_of_a_second_address_space_takes_the_read_of_its_table_entry() {
    let with = |table_accesses, entries| {
        let config = base(|c| {
            c.link.requests_per_packet = 1;
            c.pasid.enabled = table_accesses > 0;
            c.pasid.table_accesses = table_accesses;
            c.pasid_cache = CacheConfig::new(entries, entries, Replacement::Lru);
        });
        let mut second = request(0, 1);
        second.domain = IommuDomain(7);
        let mut third = second;
        third.iova = Iova(5 * MIB_2);
        let outcome = outcome(&config, &[request(0, 1), second, third]);
        let took_ns = (3.0 * outcome.latency.mean_ns).round();
        (took_ns, outcome.caches.pasid_cache.hits)
    };
    let (none, _) = with(0, 0);
    assert_eq!(with(2, 0), (none + 300.0, 0));
    assert_eq!(with(2, 16), (none + 200.0, 1));
}

#[test]
fn invalidated_context_takes_the_entries_of_its_address_spaces_with_it() {
    for (kind, gone) in [
        (EventKind::InvalidatePages, 0),
        (EventKind::InvalidateAll, 0),
        (EventKind::InvalidateSource, 1),
        (EventKind::InvalidateContextsOfDomain, 1),
        (EventKind::InvalidateContexts, 2),
    ] {
        let config = base(|c| {
            c.link.requests_per_packet = 1;
            c.pasid.enabled = true;
            c.pasid_cache = CacheConfig::new(16, 16, Replacement::Lru);
        });
        let event = Event {
            kind,
            ..request(0, 1)
        };
        // The third request comes after the first two have ended, as the PTB has one entry.
        let events = [request(0, 1), request(1, 1), event, request(2, 1)];
        let invalidated = outcome(&config, &events).caches.pasid_cache.invalidated;
        assert_eq!(invalidated, gone, "{kind:?}");
    }
}

#[test]
fn address_beyond_what_a_nested_tlb_tells_apart_is_an_error() {
    let config = base(|c| c.nested_tlb = CacheConfig::new(64, 8, Replacement::Lru));
    let mut far = request(0, 1);
    far.iova = Iova(1 << 56);
    let input = TraceInput {
        events: &mut Events(&[far]),
        next_uses: None,
    };
    let error = run(&config, input).unwrap_err().to_string();
    assert!(error.contains("with a nested TLB"), "{error}");
}

#[test]
fn same_seed_gives_the_same_outcome() {
    let events = rounds(40, 64);
    let config = hypertrio(|c| c.seed = 7);
    assert_eq!(outcome(&config, &events), outcome(&config, &events));
}

#[test]
fn impossible_walks_are_refused() {
    assert!(base(|c| c.walk.guest_levels = 2).check().is_err());
    assert!(base(|c| c.walk.guest_levels = 6).check().is_err());
    assert!(base(|c| c.walk.host_levels = 6).check().is_err());
}
