// SPDX-License-Identifier: Apache-2.0
//! The account of service levels and fault injection, on devices that work.

mod support;

use pagetide_addr::ResponseCode;
use pagetide_dpu::{
    DpuError, OnFault, SlowCause, Writes,
    inject::{Injection, InjectionError},
};
use std::time::Duration;
use support::*;

fn injection(rate: f64) -> Injection {
    Injection {
        rate,
        latency: Duration::from_micros(1500),
        burst: 1,
        seconds: 60,
    }
}

#[test]
fn account_counts_requests_bytes_and_faults_and_names_what_held_a_slow_one() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    let domain = guest.domain(&rig);
    for _ in 0..10 {
        queue.submit(&guest, &request.parts(WRITE));
        queue.wait_used(&guest);
    }
    take_away(&domain, request.header, 1);
    rig.host.hold();
    queue.submit(&guest, &request.parts(WRITE));
    rig.host.next_request();
    let id = rig.report(&socket).id;
    // Held for long enough to be slow, whatever else the machine does.
    let held = Duration::from_millis(100);
    let since = std::time::Instant::now();
    eventually("held", || since.elapsed() >= held);
    rig.host.answer(ResponseCode::Success, 1);
    queue.wait_used(&guest);
    let told = || rig.dpu.slo(id).unwrap();
    eventually("all is told", || told().day.requests == 11);
    let account = told();
    for window in [&account.minute, &account.hour, &account.day] {
        assert_eq!((window.requests, window.bytes), (11, 11 * 4096));
        assert_eq!((window.iopfs, window.injected_iopfs), (1, 0));
        assert!(window.worst >= held);
        assert!(window.p50 > Duration::ZERO && window.p50 <= window.worst);
    }
    // This host tells no times, so all of the parking is between response and resumption.
    let slow = account.slow.iter().find(|slow| slow.latency >= held);
    let slow = slow.expect("the request that was held");
    assert_eq!((slow.cause, slow.queue), (SlowCause::Resume, 0));
    assert!(slow.held >= held && slow.held <= slow.latency);
    assert!(!slow.injected);
}

#[test]
fn request_in_the_ring_of_a_paused_queue_counts_from_the_pause_and_says_so() {
    let rig = Rig::new(1);
    let socket = rig.add_with("disk", 1, Writes::Taken, OnFault::Pause);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let cold = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    let warm = BlkRequest::new(&mut guest, T_IN, 16, 4096);
    let domain = guest.domain(&rig);
    take_away(&domain, cold.data, 1);
    rig.host.hold();
    queue.submit(&guest, &cold.parts(WRITE));
    rig.host.next_request();
    queue.submit(&guest, &warm.parts(WRITE));
    // It parks once more, now with the other one behind it.
    rig.forget_domains();
    rig.host.answer(ResponseCode::Success, 1);
    rig.host.next_request();
    // Long beside what the disk may take on a busy host.
    let held = Duration::from_millis(100);
    let since = std::time::Instant::now();
    eventually("held", || since.elapsed() >= held);
    guest.domain(&rig);
    rig.host.answer(ResponseCode::Success, 1);
    queue.wait_used(&guest);
    queue.wait_used(&guest);
    let id = rig.report(&socket).id;
    let told = || rig.dpu.slo(id).unwrap();
    eventually("both are told", || told().day.requests == 2);
    let account = told();
    let behind = account.slow.iter().find(|s| s.cause == SlowCause::Behind);
    let behind = behind.unwrap();
    assert!(behind.held >= held && behind.held <= behind.latency);
}

#[test]
fn injected_fault_asks_the_host_for_a_present_page_with_its_hold() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_OUT, 8, 8192);
    let flush = BlkRequest::new(&mut guest, T_FLUSH, 0, 0);
    let domain = guest.domain(&rig);
    let id = rig.report(&socket).id;
    rig.dpu.inject(id, injection(1000.0)).unwrap();
    rig.host.hold();
    // Requests without data are never taken.
    for _ in 0..50 {
        queue.submit(&guest, &flush.parts(0));
        queue.wait_used(&guest);
    }
    let mut parked = false;
    while !parked {
        queue.submit(&guest, &request.parts(0));
        eventually("done or parked", || {
            parked = rig.report(&socket).parked_chains == 1;
            parked || queue.poll_used(&guest).is_some()
        });
    }
    let asked = rig.host.next_request();
    assert_eq!((asked.hold_us, asked.domain), (1500, domain.id()));
    assert_eq!(asked.pages.start.0, request.data / 4096, "first data page");
    assert_eq!(asked.pages.len(), 1);
    let before = rig.report(&socket).requests;
    rig.host.answer(ResponseCode::Success, 1);
    queue.wait_used(&guest);
    assert_eq!(request.status(&guest), 0);
    rig.dpu.stop_injection(id).unwrap();
    let report = rig.report(&socket);
    assert_eq!((report.requests, report.injected_iopfs), (before + 1, 1));
    assert_eq!(report.iopfs, 1, "it faults once and is done");
    let told = rig.dpu.injection(id).unwrap().unwrap();
    assert_eq!(
        (told.injected, told.resumed, told.left),
        (1, 1, Duration::ZERO)
    );
    assert!(told.parked_max > Duration::ZERO);
    eventually("told", || rig.dpu.slo(id).unwrap().hour.injected_iopfs == 1);
    rig.host.let_go();
    for _ in 0..50 {
        queue.submit(&guest, &request.parts(0));
        queue.wait_used(&guest);
    }
    assert_eq!(rig.report(&socket).injected_iopfs, 1, "it is over");
}

#[test]
fn injected_faults_that_are_held_keep_further_ones_away_until_they_go_on() {
    let rig = Rig::with_timeout(1, Some(Duration::from_secs(30)));
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let requests: Vec<BlkRequest> = (0..8)
        .map(|i| BlkRequest::new(&mut guest, T_IN, 8 * i, 4096))
        .collect();
    guest.domain(&rig);
    let id = rig.report(&socket).id;
    let slow = Injection {
        latency: Duration::from_secs(10),
        burst: 128,
        ..injection(10_000.0)
    };
    rig.dpu.inject(id, slow).unwrap();
    rig.host.hold();
    let told = || rig.dpu.injection(id).unwrap().unwrap();
    let injects_one_of_them = |guest: &Guest, queue: &mut TestQueue, before: u64| {
        // Until one is held, others may come before the injection is due.
        while told().injected == before {
            queue.submit(guest, &requests[0].parts(WRITE));
            eventually("done or held", || {
                told().injected > before || queue.poll_used(guest).is_some()
            });
        }
        for request in &requests[1..] {
            queue.submit(guest, &request.parts(WRITE));
        }
        for _ in &requests[1..] {
            queue.wait_used(guest);
        }
        assert_eq!(told().injected, before + 1);
        assert!(told().skipped > 0);
    };
    injects_one_of_them(&guest, &mut connection.queues[0], 0);
    rig.host.next_request();
    rig.host.answer(ResponseCode::Success, 1);
    connection.queues[0].wait_used(&guest);
    assert_eq!(told().resumed, 1);
    injects_one_of_them(&guest, &mut connection.queues[0], 1);
    // A front end that goes takes what is held with it.
    drop(connection);
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    injects_one_of_them(&guest, &mut connection.queues[0], 2);
    rig.host.let_go();
    connection.queues[0].wait_used(&guest);
    assert_eq!(told().resumed, 2);
}

#[test]
fn injected_fault_whose_time_is_up_is_not_told_as_resumed() {
    let rig = Rig::with_timeout(1, Some(Duration::from_millis(30)));
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    guest.domain(&rig);
    let id = rig.report(&socket).id;
    let refused = Injection {
        latency: Duration::from_millis(11),
        ..injection(1.0)
    };
    assert!(matches!(
        rig.dpu.inject(id, refused),
        Err(DpuError::Injection(InjectionError::LatencyOfTimeout { .. }))
    ));
    rig.dpu.inject(id, injection(1000.0)).unwrap();
    rig.host.hold();
    while rig.report(&socket).timed_out_requests == 0 {
        queue.submit(&guest, &request.parts(WRITE));
        queue.wait_used(&guest);
    }
    let told = rig.dpu.injection(id).unwrap().unwrap();
    assert_eq!((told.injected, told.resumed), (1, 0));
    assert_eq!(told.parked_max, Duration::ZERO);
    rig.host.let_go();
}

#[test]
fn injection_that_makes_no_sense_or_has_no_device_is_refused() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let id = rig.report(&socket).id;
    assert_eq!(rig.dpu.injection(id).unwrap(), None);
    let refused = rig.dpu.inject(id, injection(0.0));
    assert!(matches!(
        refused,
        Err(DpuError::Injection(InjectionError::Rate(_)))
    ));
    rig.dpu.remove(id).unwrap();
    assert!(matches!(
        rig.dpu.inject(id, injection(1.0)),
        Err(DpuError::NoSuchDevice(_))
    ));
    assert!(matches!(rig.dpu.slo(id), Err(DpuError::NoSuchDevice(_))));
}

#[test]
fn thousands_of_injected_faults_on_all_queues_all_end_well() {
    let rig = Rig::new(2);
    let socket = rig.add("disk", 2, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 2, F_EVENT_IDX);
    let requests: Vec<BlkRequest> = (0..16)
        .map(|i| BlkRequest::new(&mut guest, T_IN, 8 * i, 4096))
        .collect();
    guest.domain(&rig);
    let id = rig.report(&socket).id;
    let storm = Injection {
        burst: 128,
        ..injection(10_000.0)
    };
    rig.dpu.inject(id, storm).unwrap();
    for round in 0..200 {
        for (i, request) in requests.iter().enumerate() {
            guest.put(request.data, &[0xff; 8]);
            connection.queues[i % 2].submit(&guest, &request.parts(WRITE));
        }
        for i in 0..requests.len() {
            connection.queues[i % 2].wait_used(&guest);
        }
        for (i, request) in (0_u64..).zip(&requests) {
            assert_eq!(request.status(&guest), 0, "round {round}");
            assert_eq!(guest.get(request.data, 8), (8 * i).to_le_bytes());
        }
    }
    let told = rig.dpu.injection(id).unwrap().unwrap();
    assert!(told.injected > 1000, "{told:?}");
    assert_eq!(told.injected, told.resumed);
    assert_eq!(rig.report(&socket).injected_iopfs, told.injected);
    let account = || rig.dpu.slo(id).unwrap().day;
    eventually("all is told", || account().requests == 3200);
    assert_eq!(account().injected_iopfs, told.injected);
}
