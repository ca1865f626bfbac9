// SPDX-License-Identifier: Apache-2.0
//! Tenants from logs: taken apart, renumbered, in any number.

use std::path::{Path, PathBuf};

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;
use pagetide_trace::{
    End, Event, EventKind, EventSource, Events, HyperSpec, HyperTrace, Input, IommuDomain, Lengths,
    Order, PageSize, RecordedInput, Recordings, Reuse, SourceId, TraceAccess,
};

use crate::support::{all, spec, try_all};

fn request(source: u32, domain: u32, iova: u64) -> Event {
    let size = Some(PageSize::SIZE_2M);
    Event::translate(SourceId(source), IommuDomain(domain), Iova(iova), size)
}

fn event(kind: EventKind, source: u32, domain: u32) -> Event {
    Event {
        kind,
        ..request(source, domain, 0)
    }
}

fn recorded(tenants: u32, per_packet: u32, reuse: Reuse) -> HyperSpec {
    let input = RecordedInput {
        logs: Vec::new(),
        requests_per_packet: per_packet,
        reuse,
        skip_percent: 0,
    };
    HyperSpec::new(Input::Recorded(input), tenants)
}

fn constructed(spec: &HyperSpec, logs: &[&[Event]]) -> Vec<Event> {
    let mut recordings = Recordings::new().unwrap();
    for log in logs {
        recordings.add(&mut Events(log)).unwrap();
    }
    try_all(&mut HyperTrace::recorded(spec, &recordings).unwrap()).unwrap()
}

/// (kind, domain, address) of each event.
fn brief(events: &[Event]) -> Vec<(EventKind, u32, u64)> {
    let brief = |e: &Event| (e.kind, e.domain.0, e.iova.0);
    events.iter().map(brief).collect()
}

#[test]
fn sources_of_several_logs_with_the_same_ids_are_different_tenants() {
    let log = [
        request(16, 5, 1),
        request(24, 6, 2),
        request(16, 5, 3),
        request(24, 6, 4),
    ];
    let trace = constructed(&recorded(4, 1, Reuse::Never), &[&log, &log]);
    let ids: Vec<_> = trace[..4]
        .iter()
        .map(|e| (e.source.0, e.domain.0))
        .collect();
    assert_eq!(ids, [(16, 0), (24, 1), (32, 2), (40, 3)]);
    let iovas: Vec<_> = trace.iter().map(|e| e.iova.0).collect();
    assert_eq!(iovas, [1, 2, 1, 2, 3, 4, 3, 4]);
}

#[test]
fn start_of_each_source_is_left_out_by_its_share_of_requests() {
    let mut log = Vec::new();
    for n in 0..400 {
        log.push(request(16, 5, n));
        log.push(event(EventKind::InvalidateDomain, 16, 5));
        if n < 100 {
            log.push(request(24, 6, 1000 + n));
        }
    }
    let mut spec = recorded(4, 1, Reuse::Wrap);
    spec.end = End::AllRunOut;
    let Input::Recorded(input) = &mut spec.input else {
        unreachable!();
    };
    input.skip_percent = 75;
    let trace = constructed(&spec, &[&log]);
    for tenant in 0..4 {
        let iovas: Vec<u64> = trace
            .iter()
            .filter(|e| e.domain.0 == tenant && e.kind == EventKind::Translate)
            .map(|e| e.iova.0)
            .collect();
        let expected: Vec<u64> = match tenant % 2 {
            0 => (300..400).collect(),
            _ => (1075..1100).collect(),
        };
        assert_eq!(iovas, expected, "tenant {tenant}");
    }
    let voids = trace.iter().filter(|e| e.domain.0 == 0);
    let voids = voids.filter(|e| e.kind != EventKind::Translate);
    assert_eq!(voids.count(), 100);
}

#[test]
fn more_tenants_than_sources_are_refused_unless_reuse_is_asked_for() {
    let log = [request(16, 5, 1), request(24, 6, 2)];
    let mut recordings = Recordings::new().unwrap();
    recordings.add(&mut Events(&log)).unwrap();
    let error = HyperTrace::recorded(&recorded(3, 1, Reuse::Never), &recordings).unwrap_err();
    assert!(
        error.to_string().contains("3 tenants of 2 recorded"),
        "{error}"
    );
    let trace = constructed(&recorded(3, 1, Reuse::Wrap), &[&log]);
    let brief: Vec<_> = trace.iter().map(|e| (e.domain.0, e.iova.0)).collect();
    assert_eq!(brief, [(0, 1), (1, 2), (2, 1)]);
}

#[test]
fn invalidations_ride_before_the_tenants_next_request() {
    let log = [
        request(1, 10, 0x1000),
        request(2, 20, 0x2000),
        event(EventKind::InvalidateDomain, 0, 20),
        request(1, 10, 0x3000),
        request(2, 20, 0x4000),
    ];
    let trace = constructed(&recorded(2, 1, Reuse::Never), &[&log]);
    let (request, void) = (EventKind::Translate, EventKind::InvalidateDomain);
    assert_eq!(
        brief(&trace),
        [
            (request, 0, 0x1000),
            (request, 1, 0x2000),
            (request, 0, 0x3000),
            (void, 1, 0),
            (request, 1, 0x4000),
        ]
    );
}

#[test]
fn pages_that_were_paged_out_are_so_before_the_tenants_next_request() {
    let paged_out = |domain| Event {
        iova: Iova(0x4000),
        page_size: PageSize::from_bytes(0x2000),
        ..event(EventKind::PageOut, 0, domain)
    };
    let log = [
        // Also before anybody has asked for the domain.
        paged_out(10),
        request(1, 10, 0x1000),
        paged_out(10),
        paged_out(11),
        request(1, 10, 0x2000),
        request(1, 10, 0x3000),
    ];
    let trace = constructed(&recorded(1, 1, Reuse::Never), &[&log]);
    let (request, out) = (EventKind::Translate, EventKind::PageOut);
    assert_eq!(
        brief(&trace),
        [
            (out, 0, 0x4000),
            (request, 0, 0x1000),
            (out, 0, 0x4000),
            (request, 0, 0x2000),
            (request, 0, 0x3000),
        ]
    );
    assert_eq!(trace[2].page_size, PageSize::from_bytes(0x2000));
}

#[test]
fn global_invalidations_reach_the_tenants_of_their_log_alone() {
    let flushed = [
        request(1, 10, 1),
        event(EventKind::InvalidateAll, 0, 0),
        event(EventKind::InvalidateContexts, 0, 0),
        request(1, 10, 2),
    ];
    let quiet = [request(1, 10, 3), request(1, 10, 4)];
    let trace = constructed(&recorded(2, 1, Reuse::Never), &[&flushed, &quiet]);
    let request = EventKind::Translate;
    assert_eq!(
        brief(&trace),
        [
            (request, 0, 1),
            (request, 1, 3),
            (EventKind::InvalidateDomain, 0, 0),
            (EventKind::InvalidateContextsOfDomain, 0, 0),
            (request, 0, 2),
            (request, 1, 4),
        ]
    );
}

#[test]
fn further_domains_of_a_source_have_numbers_behind_all_tenants() {
    // Source 1 is handed from domain 10 to domain 11; source 2 was in domain 10 too.
    let log = [
        request(1, 10, 1),
        request(2, 10, 2),
        event(EventKind::InvalidateSource, 1, 10),
        request(1, 11, 3),
        request(2, 10, 4),
    ];
    let trace = constructed(&recorded(2, 1, Reuse::Never), &[&log]);
    let domains: Vec<_> = trace.iter().map(|e| (e.source.0, e.domain.0)).collect();
    assert_eq!(domains, [(16, 0), (24, 1), (16, 0), (16, 2), (24, 1)]);
}

#[test]
fn every_field_of_a_request_survives_but_ids_and_times() {
    let mut log = Vec::new();
    let accesses = [TraceAccess::Unknown, TraceAccess::Read, TraceAccess::Write];
    let sizes = [None, Some(PageSize::SIZE_4K), PageSize::from_shift(57)];
    for (i, (access, page_size)) in accesses.into_iter().zip(sizes).enumerate() {
        log.push(Event {
            time_ns: Some(i as u64),
            access,
            page_size,
            ..request(16, 0, (1 << 57) - 1 - i as u64)
        });
    }
    let mut expected = log.clone();
    let mut spec = recorded(1, 3, Reuse::Never);
    spec.order = Order::Time;
    assert_eq!(constructed(&spec, &[&log]), expected);
    spec.order = Order::Rr;
    for event in &mut expected {
        event.time_ns = None;
    }
    assert_eq!(constructed(&spec, &[&log]), expected);
}

#[test]
fn log_ordered_by_time_comes_out_as_it_was() {
    let mut log = Vec::new();
    for i in 0..1000_u32 {
        log.push(Event {
            time_ns: Some(u64::from(i) * 10),
            ..request(16 + 8 * (i * i % 7), i * i % 7, u64::from(i))
        });
    }
    let mut spec = recorded(4, 1, Reuse::Never);
    spec.order = Order::Time;
    spec.end = pagetide_trace::End::AllRunOut;
    let trace = constructed(&spec, &[&log]);
    let order = |events: &[Event]| events.iter().map(|e| e.iova.0).collect::<Vec<_>>();
    assert_eq!(order(&trace), order(&log));
}

#[test]
fn events_without_times_ordered_by_time_are_refused() {
    let mut recordings = Recordings::new().unwrap();
    recordings.add(&mut Events(&[request(16, 0, 0)])).unwrap();
    let mut spec = recorded(1, 1, Reuse::Never);
    spec.order = Order::Time;
    let error = HyperTrace::recorded(&spec, &recordings).unwrap_err();
    assert!(error.to_string().contains("without a time"), "{error}");
}

#[test]
fn recorded_tenants_are_cut_to_the_lengths_asked_for() {
    let log: Vec<_> = (0..900)
        .map(|i| request(i % 3, i % 3, u64::from(i)))
        .collect();
    let mut spec = recorded(3, 3, Reuse::Never);
    spec.end = pagetide_trace::End::AllRunOut;
    assert_eq!(constructed(&spec, &[&log]).len(), 900);
    spec.lengths = Some(Lengths {
        min_packets: 20,
        max_packets: 50,
    });
    let trace = constructed(&spec, &[&log]);
    let mut counts = [0; 3];
    for event in &trace {
        counts[event.domain.0 as usize] += 1;
    }
    assert_eq!(counts.iter().min(), Some(&60));
    assert_eq!(counts.iter().max(), Some(&150));
}

#[test]
fn synthetic_trace_taken_as_a_log_is_made_again() {
    let made = all(&spec(pagetide_trace::Workload::Iperf3, 30, 30_000));
    assert_eq!(constructed(&recorded(30, 3, Reuse::Never), &[&made]), made);
}

#[test]
fn log_of_global_invalidations_for_thousands_of_sources_is_refused() {
    let mut log: Vec<_> = (0..10_000).map(|i| request(i, i, 0)).collect();
    log.resize(20_000, event(EventKind::InvalidateAll, 0, 0));
    let mut recordings = Recordings::new().unwrap();
    let error = recordings.add(&mut Events(&log)).unwrap_err();
    assert!(
        error.to_string().contains("too many invalidations"),
        "{error}"
    );
    assert!(recordings.sources().is_empty());
}

#[test]
fn source_with_too_many_domains_is_refused() {
    let log: Vec<_> = (0..65).map(|domain| request(16, domain, 0)).collect();
    let mut recordings = Recordings::new().unwrap();
    let error = recordings.add(&mut Events(&log)).unwrap_err();
    assert!(
        error.to_string().contains("more than 64 domains"),
        "{error}"
    );
}

/// Gives some events and then breaks.
struct Broken(Vec<Event>);

impl EventSource for Broken {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if self.0.is_empty() {
            return Err(TraceError::Record {
                path: PathBuf::from("a.log"),
                record: 1,
                reason: "torn".to_owned(),
            });
        }
        batch.append(&mut self.0);
        Ok(batch.len())
    }
}

#[test]
fn broken_log_gives_its_own_error_and_leaves_earlier_logs_whole() {
    let log = [request(16, 0, 7)];
    let mut recordings = Recordings::new().unwrap();
    recordings.add(&mut Events(&log)).unwrap();
    let error = recordings.add(&mut Broken(log.to_vec())).unwrap_err();
    assert_eq!(error.to_string(), "a.log, record 1: torn");
    assert_eq!(recordings.sources().len(), 1);
    recordings.add(&mut Events(&log)).unwrap();
    let spec = recorded(2, 1, Reuse::Never);
    let trace = try_all(&mut HyperTrace::recorded(&spec, &recordings).unwrap()).unwrap();
    assert_eq!(trace.len(), 2);
}

#[test]
fn logs_named_in_the_settings_are_opened_in_order() {
    let mut spec = recorded(2, 1, Reuse::Never);
    let Input::Recorded(input) = &mut spec.input else {
        unreachable!();
    };
    input.logs = vec![PathBuf::from("a"), PathBuf::from("b")];
    let (a, b) = ([request(16, 0, 0xa)], [request(16, 0, 0xb)]);
    let mut open = |path: &Path| -> Result<Box<dyn EventSource>, TraceError> {
        let log: &'static [Event] = Vec::leak(if path == Path::new("a") {
            a.to_vec()
        } else {
            b.to_vec()
        });
        Ok(Box::new(Events(log)))
    };
    let trace = try_all(&mut HyperTrace::new(&spec, &mut open).unwrap()).unwrap();
    let iovas: Vec<_> = trace.iter().map(|e| e.iova.0).collect();
    assert_eq!(iovas, [0xa, 0xb]);
}
