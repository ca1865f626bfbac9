// SPDX-License-Identifier: Apache-2.0
//! I/O page faults: chains park while their pages are absent, resume when they are there, and
//! nobody else waits.

mod support;

use pagetide_addr::{Access, PAGE_BYTES, ResponseCode};
use pagetide_dpu::{DeviceState, Writes};
use pagetide_random::SplitMix64;
use support::*;

#[test]
fn chain_on_absent_pages_parks_and_resumes_while_its_queue_goes_on() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let queue = &mut connection.queues[0];
    let cold = BlkRequest::new(&mut guest, T_IN, 40, 3 * 4096);
    let warm = BlkRequest::new(&mut guest, T_IN, 5, 512);
    let domain = guest.domain(&rig);
    take_away(&domain, cold.data, 3 * PAGE_BYTES);
    rig.host.hold();
    let cold_head = queue.submit(&guest, &cold.parts(WRITE));
    let asked = rig.host.next_request();
    assert_eq!(asked.pages.len(), 3, "neighbours are asked for at once");
    assert_eq!(asked.access, Access::Write);
    assert_eq!(asked.domain, domain.id());
    let warm_head = queue.submit(&guest, &warm.parts(WRITE));
    assert_eq!(queue.wait_used(&guest).0, warm_head);
    assert_eq!(guest.get(warm.data, 8), 5_u64.to_le_bytes());
    assert_eq!(rig.report(&socket).parked_chains, 1);
    assert_eq!(cold.status(&guest), 0xff);
    assert!(
        !domain.attributes().is_any_leased(),
        "a parked chain holds no lease"
    );
    rig.host.answer(ResponseCode::Success, 1);
    assert_eq!(queue.wait_used(&guest).0, cold_head);
    assert_eq!(guest.get(cold.data, 8), 40_u64.to_le_bytes());
    let report = rig.report(&socket);
    assert_eq!((report.parked_chains, report.iopfs), (0, 1));
    eventually("leases returned", || !domain.attributes().is_any_leased());
}

#[test]
fn header_status_and_table_may_be_absent_as_well() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_INDIRECT);
    let queue = &mut connection.queues[0];
    let table = guest.room(4096);
    let request = BlkRequest::new(&mut guest, T_IN, 11, 512);
    let domain = guest.domain(&rig);
    for at in [table, request.header, request.data, request.status] {
        take_away(&domain, at, 1);
    }
    queue.submit_indirect(&guest, table, &request.parts(WRITE));
    queue.wait_used(&guest);
    assert_eq!(request.status(&guest), 0);
    assert_eq!(guest.get(request.data, 8), 11_u64.to_le_bytes());
    // The table first, then the rest, of which three pages are neighbours.
    assert!(rig.report(&socket).iopfs >= 2);
}

#[test]
fn page_evicted_again_before_the_chain_resumes_is_asked_for_again() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 2, 512);
    let domain = guest.domain(&rig);
    take_away(&domain, request.data, 1);
    rig.host.hold();
    queue.submit(&guest, &request.parts(WRITE));
    rig.host.next_request();
    rig.forget_domains();
    // "Success" without a grant: as if it had been evicted at once.
    rig.host.answer(ResponseCode::Success, 1);
    rig.host.next_request();
    assert_eq!(rig.report(&socket).parked_chains, 1);
    guest.domain(&rig);
    rig.host.answer(ResponseCode::Success, 1);
    queue.wait_used(&guest);
    assert_eq!(request.status(&guest), 0);
    assert_eq!(rig.report(&socket).iopfs, 2);
}

#[test]
fn rings_on_absent_pages_are_asked_for_before_the_queue_starts() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let domain = guest.early_domain(&rig);
    let queue = TestQueue::new(&mut guest, 0);
    let request = BlkRequest::new(&mut guest, T_IN, 6, 512);
    take_away(&domain, queue.desc, PAGE_BYTES);
    take_away(&domain, queue.used, PAGE_BYTES);
    rig.host.hold();
    let mut connection = Connection::open_with(&socket, &guest, vec![queue], 0, None);
    let queue = &mut connection.queues[0];
    queue.submit(&guest, &request.parts(WRITE));
    let first = rig.host.next_request();
    let second = rig.host.next_request();
    assert_eq!(
        (first.access, second.access),
        (Access::Write, Access::Write)
    );
    assert_eq!(queue.poll_used(&guest), None);
    rig.host.answer(ResponseCode::Success, 2);
    queue.wait_used(&guest);
    assert_eq!(request.status(&guest), 0);
    assert_eq!(rig.report(&socket).wired_bytes, 3 * PAGE_BYTES);
}

#[test]
fn lost_page_fails_its_request_and_no_other() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let lost = BlkRequest::new(&mut guest, T_OUT, 1, 512);
    let good = BlkRequest::new(&mut guest, T_IN, 1, 512);
    let domain = guest.domain(&rig);
    take_away(&domain, lost.data, 1);
    rig.host.hold();
    queue.submit(&guest, &lost.parts(0));
    rig.host.next_request();
    rig.host.answer(ResponseCode::ResponseFailure, 1);
    queue.wait_used(&guest);
    assert_eq!(lost.status(&guest), 1);
    queue.submit(&guest, &good.parts(WRITE));
    queue.wait_used(&guest);
    assert_eq!(good.status(&guest), 0);
    assert_eq!(guest.get(good.data, 8), 1_u64.to_le_bytes());
    assert_eq!(rig.report(&socket).state, DeviceState::Connected);
}

#[test]
fn lost_status_page_stops_the_device_rather_than_leave_the_guest_guessing() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 1, 512);
    let domain = guest.domain(&rig);
    take_away(&domain, request.status, 1);
    rig.host.hold();
    queue.submit(&guest, &request.parts(WRITE));
    for _ in 0..2 {
        rig.host.next_request();
        rig.host.answer(ResponseCode::ResponseFailure, 1);
    }
    eventually("the device stops", || {
        rig.report(&socket).state == DeviceState::Stopped
    });
    let why = rig.report(&socket).stopped_because.unwrap();
    assert!(why.contains("lost"), "{why}");
    assert_eq!(queue.poll_used(&guest), None);
}

#[test]
fn device_of_another_guest_is_unhurt_while_one_is_parked_to_its_limit() {
    let rig = Rig::new(1);
    let (one, other) = (
        rig.add("one", 1, Writes::Taken),
        rig.add("other", 1, Writes::Taken),
    );
    let (mut cold, mut warm) = (Guest::new(), Guest::new());
    let mut to_one = Connection::open(&one, &mut cold, 1, 0);
    let mut to_other = Connection::open(&other, &mut warm, 1, 0);
    let requests: Vec<BlkRequest> = (0..20)
        .map(|i| BlkRequest::new(&mut cold, T_IN, i, 512))
        .collect();
    let domain = cold.domain(&rig);
    rig.host.hold();
    for request in &requests {
        take_away(&domain, request.data, 1);
    }
    for request in &requests {
        to_one.queues[0].submit(&cold, &request.parts(WRITE));
    }
    eventually("all parked", || rig.report(&one).parked_chains == 20);
    let request = BlkRequest::new(&mut warm, T_IN, 3, 512);
    for _ in 0..100 {
        to_other.queues[0].submit(&warm, &request.parts(WRITE));
        to_other.queues[0].wait_used(&warm);
    }
    assert_eq!(rig.report(&one).parked_chains, 20);
    rig.host.let_go();
    for _ in 0..20 {
        to_one.queues[0].wait_used(&cold);
    }
    let report = rig.report(&one);
    assert_eq!((report.parked_chains, report.iopfs), (0, 20));
}

#[test]
fn many_random_faults_on_many_chains_all_end_well() {
    let rig = Rig::new(2);
    let socket = rig.add("disk", 2, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 2, F_EVENT_IDX);
    let domain = guest.domain(&rig);
    let requests: Vec<BlkRequest> = (0..16)
        .map(|_| BlkRequest::new(&mut guest, T_IN, 0, 8192))
        .collect();
    let mut random = SplitMix64::new(11);
    for round in 0..60_u64 {
        for (i, request) in (0..).zip(&requests) {
            request.aim(&guest, T_IN, (round * 16 + i) % 512 * 8);
            let places = [
                request.header,
                request.data,
                request.data + 4096,
                request.status,
            ];
            for at in &places {
                if random.below(2) == 1 {
                    take_away(&domain, *at, 1);
                }
            }
            let queue = &mut connection.queues[usize::from(i % 2 == 1)];
            queue.submit(&guest, &request.parts(WRITE));
        }
        for queue in &mut connection.queues {
            for _ in 0..8 {
                queue.wait_used(&guest);
            }
        }
        for (i, request) in (0..).zip(&requests) {
            let sector: u64 = (round * 16 + i) % 512 * 8;
            assert_eq!(request.status(&guest), 0);
            assert_eq!(
                guest.get(request.data + 4096, 8),
                (sector + 8).to_le_bytes()
            );
        }
    }
    eventually("leases returned", || !domain.attributes().is_any_leased());
    assert!(rig.report(&socket).iopfs > 100);
}
