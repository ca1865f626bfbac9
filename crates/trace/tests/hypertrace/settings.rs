// SPDX-License-Identifier: Apache-2.0
//! Settings: ids, endings, orders, weights, joins and leaves, and what is refused.

use std::collections::BTreeSet;

use pagetide_access_log::TraceError;
use pagetide_trace::{
    End, Event, EventKind, FormatChoice, HyperSpec, HyperTrace, HypersioWriter, Input, Lengths,
    Membership, Order, RecordedInput, SourceId, SourceRule, TenantShape, TraceAccess, TraceParams,
    Workload, build, open,
};

use crate::support::{all, packet_tenants, requests, spec, try_all};

#[test]
fn source_ids_of_1_to_5000_tenants_are_unique_and_fit_in_16_bits() {
    let rule = SourceRule::default();
    let mut seen = BTreeSet::new();
    for tenant in 0..5000 {
        let SourceId(id) = rule.source(tenant).unwrap();
        assert!(id <= 0xffff);
        assert!(seen.insert(id), "tenant {tenant}");
    }
    for tenants in [1, 2, 1024, 5000] {
        assert!(spec(Workload::Seq, tenants, 1).look_at_settings().is_ok());
    }
}

#[test]
fn trace_of_5000_tenants_has_5000_sources_and_domains_in_order() {
    let events = all(&spec(Workload::Iperf3, 5000, 5000));
    let mut sources = BTreeSet::new();
    for (tenant, packet) in events.chunks(3).enumerate() {
        assert_eq!(packet[0].domain.0 as usize, tenant);
        assert!(packet.iter().all(|e| e.source == packet[0].source));
        assert!(sources.insert(packet[0].source));
    }
}

#[test]
fn authors_rule_with_24_devices_a_log_collides_as_theirs_does() {
    let distinct = |devices_per_log, tenants| {
        let rule = SourceRule::Log { devices_per_log };
        let ids: BTreeSet<_> = (0..tenants).map(|t| rule.source(t).unwrap()).collect();
        ids.len()
    };
    assert_eq!(distinct(24, 37), 29);
    assert_eq!(distinct(24, 1024), 688);
    assert_eq!(distinct(12, 1024), 1024);
    assert_eq!(distinct(16, 1024), 1024);
}

fn uneven(end: End, order: Order) -> HyperSpec {
    let mut spec = HyperSpec::synthetic(TenantShape::default(), 4);
    spec.lengths = Some(Lengths {
        min_packets: 10,
        max_packets: 30,
    });
    spec.end = end;
    spec.order = order;
    spec.burst_packets = 3;
    spec
}

fn counts(spec: &HyperSpec) -> Vec<usize> {
    let tenants = packet_tenants(&all(spec));
    (0..spec.tenants)
        .map(|t| tenants.iter().filter(|x| **x == t).count())
        .collect()
}

#[test]
fn lengths_between_two_figures_reach_both() {
    let mut lengths = counts(&uneven(End::AllRunOut, Order::Rr));
    lengths.sort_unstable();
    assert_eq!((lengths[0], lengths[3]), (10, 30));
}

#[test]
fn rr_ends_when_the_first_tenant_has_its_turn_and_nothing_left() {
    let lengths = counts(&uneven(End::AllRunOut, Order::Rr));
    let shortest = lengths.iter().position(|n| *n == 10).unwrap();
    // 10 packets in turns of 3: found empty within its fourth turn.
    let expected: Vec<_> = lengths
        .iter()
        .enumerate()
        .map(|(t, n)| if t <= shortest { 12.min(*n) } else { 9 })
        .collect();
    assert_eq!(counts(&uneven(End::FirstRunsOut, Order::Rr)), expected);
}

#[test]
fn rr_that_finishes_its_round_gives_the_others_their_turn() {
    let lengths = counts(&uneven(End::AllRunOut, Order::Rr));
    let expected: Vec<_> = lengths.iter().map(|n| 12.min(*n)).collect();
    assert_eq!(counts(&uneven(End::RoundFinished, Order::Rr)), expected);
}

#[test]
fn rand_until_all_run_out_has_every_packet_and_until_the_first_has_fewer() {
    let whole = counts(&uneven(End::AllRunOut, Order::Rand));
    assert_eq!(whole, counts(&uneven(End::AllRunOut, Order::Rr)));
    let first = counts(&uneven(End::FirstRunsOut, Order::Rand));
    assert!(first.iter().zip(&whole).any(|(a, b)| a == b));
    assert!(first.iter().zip(&whole).all(|(a, b)| a <= b));
    assert!(first.iter().sum::<usize>() < whole.iter().sum());
}

#[test]
fn rr_bursts_are_whole_and_in_turn() {
    for burst in [1, 4] {
        let mut spec = spec(Workload::Seq, 6, 240);
        spec.burst_packets = burst;
        let tenants = packet_tenants(&all(&spec));
        for (turn, packets) in tenants.chunks(burst as usize).enumerate() {
            assert!(packets.iter().all(|t| *t as usize == turn % 6));
        }
    }
}

#[test]
fn rand_gives_every_tenant_about_its_share_in_whole_bursts() {
    let mut spec = spec(Workload::Seq, 10, 40_000);
    spec.order = Order::Rand;
    spec.burst_packets = 4;
    let tenants = packet_tenants(&all(&spec));
    assert!(tenants.chunks(4).all(|b| b.iter().all(|t| *t == b[0])));
    for n in counts(&spec) {
        assert!((3_500..4_500).contains(&n), "{n}");
    }
}

#[test]
fn low_weight_makes_a_low_bandwidth_tenant_in_both_orders() {
    let mut spec = spec(Workload::Seq, 4, 31_000);
    spec.weights = vec![1, 10, 10, 10];
    assert_eq!(counts(&spec), [1_000, 10_000, 10_000, 10_000]);
    spec.order = Order::Rand;
    let n = counts(&spec);
    assert!((850..1_150).contains(&n[0]), "{n:?}");
}

#[test]
fn announced_tenants_join_at_their_first_packet_and_leave_at_their_last() {
    let mut spec = uneven(End::AllRunOut, Order::Rand);
    spec.membership = Membership::Announced;
    let events = all(&spec);
    for tenant in 0..4 {
        let own: Vec<_> = events.iter().filter(|e| e.domain.0 == tenant).collect();
        let inner = &own[1..own.len() - 1];
        assert_eq!(own[0].kind, EventKind::Join);
        assert_eq!(own[own.len() - 1].kind, EventKind::Leave);
        assert!(inner.iter().all(|e| e.kind == EventKind::Translate));
        assert!(own.iter().all(|e| e.source == own[0].source));
    }
    let mut silent = spec.clone();
    silent.membership = Membership::Silent;
    assert_eq!(requests(&events), all(&silent));
}

#[test]
fn announced_tenants_that_the_end_cuts_off_leave_there() {
    let mut spec = spec(Workload::Iperf3, 3, 7);
    spec.membership = Membership::Announced;
    let events = all(&spec);
    let leaves: Vec<_> = events[events.len() - 3..]
        .iter()
        .map(|e| (e.kind, e.domain.0))
        .collect();
    let leave = EventKind::Leave;
    assert_eq!(leaves, [(leave, 0), (leave, 1), (leave, 2)]);
    assert_eq!(events.len(), 21 + 6);
}

/// The sentence that `change` is refused with.
fn refused(change: impl FnOnce(&mut HyperSpec)) -> String {
    let mut spec = spec(Workload::Iperf3, 4, 100);
    change(&mut spec);
    let never =
        &mut |_: &std::path::Path| unreachable!("no log is opened before settings are good");
    match HyperTrace::new(&spec, never) {
        Err(TraceError::Asked(sentence)) => sentence,
        other => panic!("{other:?}"),
    }
}

fn refused_shape(change: impl FnOnce(&mut TenantShape)) -> String {
    refused(|spec| {
        let mut shape = TenantShape::default();
        change(&mut shape);
        spec.input = Input::Synthetic(shape);
    })
}

/// Of no log.
fn recorded(requests_per_packet: u32, skip_percent: u32) -> Input {
    Input::Recorded(RecordedInput {
        logs: Vec::new(),
        requests_per_packet,
        reuse: Default::default(),
        skip_percent,
    })
}

#[test]
fn absurd_settings_are_refused_with_a_sentence_that_names_them() {
    let cases = [
        (refused(|s| s.tenants = 0), "tenants = 0"),
        (refused(|s| s.tenants = u32::MAX), "tenants = 4294967295"),
        (refused(|s| s.burst_packets = 0), "burst_packets = 0"),
        (refused(|s| s.packets = Some(0)), "packets = 0"),
        (refused(|s| s.packets = None), "never run out"),
        (refused(|s| s.tenants = 9_000), "16 bits do not hold"),
        (refused(|s| s.weights = vec![1, 0]), "weights = 0"),
        (refused(|s| s.weights = vec![1; 5]), "5 weights for 4"),
        (refused(|s| s.order = Order::Time), "timing"),
        (
            refused(|s| {
                s.end = End::RoundFinished;
                s.order = Order::Rand;
            }),
            "has no rounds",
        ),
        (
            refused(|s| {
                s.lengths = Some(Lengths {
                    min_packets: 9,
                    max_packets: 3,
                });
            }),
            "above max_packets",
        ),
        (
            refused(|s| s.input = recorded(0, 0)),
            "requests_per_packet = 0",
        ),
        (
            refused(|s| s.input = recorded(3, 100)),
            "skip_percent = 100",
        ),
        (refused(|s| s.spaces = 0), "spaces = 0"),
        (
            refused(|s| {
                s.tenants = 1000;
                s.spaces = 1000;
            }),
            "are 1000000 domains",
        ),
        (refused(|s| s.input = recorded(3, 0)), "hold no request"),
    ];
    for (sentence, part) in cases {
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
}

#[test]
fn absurd_rules_for_ids_are_refused_with_a_sentence_that_names_them() {
    let cases = [
        (
            refused(|s| s.sources = SourceRule::Log { devices_per_log: 0 }),
            "devices_per_log = 0",
        ),
        (
            refused(|s| {
                s.sources = SourceRule::Unique {
                    first: 0,
                    step: 0,
                    id_bits: 16,
                };
            }),
            "step = 0",
        ),
        (
            refused(|s| {
                s.sources = SourceRule::Unique {
                    first: u32::MAX,
                    step: u32::MAX,
                    id_bits: 33,
                };
            }),
            "id_bits",
        ),
    ];
    for (sentence, part) in cases {
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
}

#[test]
fn absurd_recipes_are_refused_with_a_sentence_that_names_them() {
    let cases = [
        (refused_shape(|s| s.live_pages = Some(0)), "live_pages = 0"),
        (
            refused_shape(|s| s.live_pages = Some(33)),
            "live_pages = 33",
        ),
        (
            refused_shape(|s| s.run_packets = Some(0)),
            "run_packets = 0",
        ),
        (refused_shape(|s| s.uses_per_page = 0), "uses_per_page = 0"),
        (
            refused_shape(|s| s.ring.page_bytes = 5),
            "ring.page_bytes = 5",
        ),
        (refused_shape(|s| s.ring.iova = 1), "ring.iova = 0x1"),
        (refused_shape(|s| s.ring.iova = 0xbc00_0000), "overlap"),
        (refused_shape(|s| s.ring.iova = 1 << 57), "2^57"),
        (refused_shape(|s| s.ring.iova = !0 << 21), "2^57"),
        (refused_shape(|s| s.data.pages = Some(0)), "live_pages = 6"),
        (
            refused_shape(|s| s.data.pages = Some(u32::MAX)),
            "data.pages",
        ),
        (refused_shape(|s| s.data.pages = Some(2_000)), "data.iova"),
        (refused_shape(|s| s.init.share = -0.5), "init.share = -0.5"),
        (
            refused_shape(|s| s.init.share = f64::NAN),
            "init.share = NaN",
        ),
        (
            refused_shape(|s| {
                s.timing = Some(pagetide_trace::Timing {
                    packets_per_second: 0,
                    jitter_ns: 0,
                });
            }),
            "packets_per_second = 0",
        ),
    ];
    for (sentence, part) in cases {
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
}

#[test]
fn one_tenant_with_lengths_and_largest_figures_is_no_trouble() {
    let mut spec = spec(Workload::Iperf3, 1, 50);
    spec.lengths = Some(Lengths {
        min_packets: 1,
        max_packets: u64::MAX,
    });
    assert_eq!(all(&spec).len(), 3);
    let shape = TenantShape {
        uses_per_page: u32::MAX,
        run_packets: Some(u32::MAX),
        ..TenantShape::default()
    };
    spec.input = Input::Synthetic(shape);
    spec.lengths = None;
    assert_eq!(all(&spec).len(), 150);
}

#[test]
fn spec_from_toml_has_defaults_and_refuses_unknown_keys() {
    let text = r#"
        tenants = 64
        order = "rand"
        burst_packets = 4
        end = "all-run-out"
        weights = [1, 16]
        membership = "announced"

        [lengths]
        min_packets = 100
        max_packets = 200

        [sources.unique]
        step = 1

        [input.synthetic]
        workload = "websearch"
        live_pages = 20
        unmap = "when-left"
        ring = { iova = 0x10000000, page_bytes = 4096 }
    "#;
    let spec: HyperSpec = toml::from_str(text).unwrap();
    assert_eq!((spec.seed, spec.order), (1, Order::Rand));
    assert_eq!(spec.end, End::AllRunOut);
    assert_eq!(spec.sources.source(3), Some(SourceId(19)));
    let Input::Synthetic(shape) = spec.input else {
        panic!("{spec:?}");
    };
    assert_eq!(
        (shape.workload, shape.live_pages),
        (Workload::Websearch, Some(20))
    );
    assert_eq!(shape.uses_per_page, 1500);
    let meta = spec.meta().unwrap();
    assert_eq!(meta.requests_per_packet.get(), 3);
    let origin = meta.origin["hyper_trace"].clone();
    assert_eq!(serde_json::from_value::<HyperSpec>(origin).unwrap(), spec);
    let written = toml::to_string(&spec).unwrap();
    assert_eq!(toml::from_str::<HyperSpec>(&written).unwrap(), spec);

    let wrong = text.replace("live_pages", "living_pages");
    let error = toml::from_str::<HyperSpec>(&wrong).unwrap_err();
    assert!(error.to_string().contains("living_pages"), "{error}");
}

#[test]
fn build_writes_everything_once_and_tells_how_far_it_is() {
    struct Sink<'a>(&'a mut u64, &'a mut bool);
    impl pagetide_trace::EventSink for Sink<'_> {
        fn write(&mut self, events: &[pagetide_trace::Event]) -> Result<(), TraceError> {
            *self.0 += events.len() as u64;
            Ok(())
        }
        fn finish(self: Box<Self>) -> Result<(), TraceError> {
            *self.1 = true;
            Ok(())
        }
    }
    let mut spec = spec(Workload::Iperf3, 7, 10_000);
    spec.membership = Membership::Announced;
    let (mut events, mut finished, mut last) = (0, false, 0);
    let mut trace = HyperTrace::synthetic(&spec).unwrap();
    let sink = Box::new(Sink(&mut events, &mut finished));
    let built = build(&mut trace, sink, &mut |progress| {
        assert!(progress.packets >= last);
        assert_eq!(progress.packets_expected, Some(10_000));
        last = progress.packets;
    })
    .unwrap();
    assert_eq!((built.packets, last, built.tenants), (10_000, 10_000, 7));
    assert_eq!((built.requests, built.events), (30_000, 30_014));
    assert_eq!((events, finished), (30_014, true));
}

#[test]
fn trace_built_into_the_authors_format_reads_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("iperf3_tnt_9_rr3_iotlb_trace.bin");
    let spec = spec(Workload::Iperf3, 9, 2_000);
    let sink = Box::new(HypersioWriter::create(&path).unwrap());
    let mut trace = HyperTrace::synthetic(&spec).unwrap();
    build(&mut trace, sink, &mut |_| {}).unwrap();
    let mut source = open(&path, FormatChoice::Detect).unwrap();
    let mut expected = all(&spec);
    for event in &mut expected {
        // The format has no room for it.
        event.access = TraceAccess::Unknown;
    }
    assert_eq!(try_all(&mut *source).unwrap(), expected);
}

#[test]
fn params_of_a_spec_survive_their_file_and_match_their_row_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(Workload::Mediastream, 16, 100_000);
    spec.order = Order::Rand;
    spec.sources = SourceRule::Log {
        devices_per_log: 24,
    };
    let params = TraceParams::of(&spec).unwrap();
    assert_eq!(params.spec().unwrap(), spec);
    let trace = dir.path().join("media_tnt_16_rand3_iotlb_trace.bin");
    let path = TraceParams::path_beside(&trace).unwrap();
    assert_eq!(path, dir.path().join("media_tnt_16_rand3_params.json"));
    params.write(&path).unwrap();
    assert_eq!(TraceParams::read(&path).unwrap(), params);

    let row = |name: &str| params.column(name);
    let full: Vec<_> = TraceParams::COLUMNS.map(|c| (c, row(c).unwrap())).into();
    let matches = |row: &[(&str, String)]| {
        params.matches(|name| {
            row.iter()
                .find(|(c, _)| *c == name)
                .map(|(_, v)| v.as_str())
        })
    };
    assert!(matches(&full));
    for at in 0..full.len() {
        let mut other = full.clone();
        other[at].1 = "7".to_owned();
        assert!(!matches(&other), "{other:?}");
        other.remove(at);
        assert!(!matches(&other), "{other:?}");
    }
}

#[test]
fn params_of_another_generator_are_read_with_keys_that_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x_params.json");
    let text = r#"{"burst": 1, "init_frac": 0.0015, "live": 0, "order": "rr", "run": 0, "seed": 1,
        "sids": "unique", "stagger": 1, "tenants": 4, "third": "mailbox", "total_pkts": 100000,
        "uses": 1500, "workload": "iperf3", "later": [1]}"#;
    std::fs::write(&path, text).unwrap();
    let params = TraceParams::read(&path).unwrap();
    assert_eq!(params.generator, None);
    let row = "iperf3,4,rr,1,100000,1,mailbox,unique,1500,1.5e-3,1,0,0";
    let row: Vec<_> = TraceParams::COLUMNS
        .into_iter()
        .zip(row.split(','))
        .collect();
    assert!(params.matches(|name| row.iter().find(|(c, _)| *c == name).map(|(_, v)| *v)));

    for broken in [
        "",
        "{}",
        "[1",
        &"x".repeat(70_000),
        &text.replace("\"seed\": 1,", ""),
    ] {
        std::fs::write(&path, broken).unwrap();
        let error = TraceParams::read(&path).unwrap_err().to_string();
        assert!(error.contains("x_params.json"), "{error}");
    }
}

#[test]
fn packets_of_a_tenant_use_its_address_spaces_in_turn() {
    let one = all(&spec(Workload::Iperf3, 4, 400));
    let mut asked = spec(Workload::Iperf3, 4, 400);
    asked.spaces = 3;
    let several = all(&asked);
    assert_eq!(one.len(), several.len());
    for (packet, (one, several)) in (0..).zip(one.chunks(3).zip(several.chunks(3))) {
        let (tenant, turn) = (packet % 4, packet / 4);
        for (one, several) in one.iter().zip(several) {
            assert_eq!(several.domain.0, turn % 3 * 4 + tenant);
            let in_one_space = Event {
                domain: one.domain,
                ..*several
            };
            assert_eq!(in_one_space, *one);
        }
    }
}

#[test]
fn params_of_a_spec_with_more_than_they_tell_do_not_exist() {
    let plain = spec(Workload::Iperf3, 4, 100);
    assert!(TraceParams::of(&plain).is_some());
    let mut weighted = plain.clone();
    weighted.weights = vec![1, 2];
    assert_eq!(TraceParams::of(&weighted), None);
    let mut elsewhere = plain;
    elsewhere.input = Input::Synthetic(TenantShape {
        mailbox: TenantShape::default().ring,
        ..TenantShape::default()
    });
    assert_eq!(TraceParams::of(&elsewhere), None);
}
