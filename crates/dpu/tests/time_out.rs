// SPDX-License-Identifier: Apache-2.0
//! A host that does not answer: the request fails, its queue lives, and a late answer hurts nobody.

mod support;

use pagetide_addr::{PAGE_BYTES, ResponseCode};
use pagetide_dpu::{DeviceState, OnFault, Writes};
use pagetide_vpri::queue::HostPresence;
use std::time::Duration;
use support::*;

/// Short, so that tests do not wait; nothing is asserted about how long it takes.
const SHORT: Option<Duration> = Some(Duration::from_millis(5));

#[test]
fn request_nobody_answers_fails_and_its_queue_lives() {
    for on_fault in [OnFault::Pause, OnFault::OutOfOrder] {
        let rig = Rig::with_timeout(1, SHORT);
        let socket = rig.add_with("disk", 1, Writes::Taken, on_fault);
        let mut guest = Guest::new();
        let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
        let queue = &mut connection.queues[0];
        let cold = BlkRequest::new(&mut guest, T_IN, 40, 4096);
        let warm = BlkRequest::new(&mut guest, T_IN, 5, 512);
        let domain = guest.domain(&rig);
        take_away(&domain, cold.data, 1);
        rig.host.hold();
        queue.submit(&guest, &cold.parts(WRITE));
        queue.submit(&guest, &warm.parts(WRITE));
        queue.wait_used(&guest);
        queue.wait_used(&guest);
        assert_eq!((cold.status(&guest), warm.status(&guest)), (S_IOERR, 0));
        let report = rig.report(&socket);
        assert_eq!((report.timed_out_requests, report.failed_requests), (1, 1));
        assert_eq!(
            (report.parked_chains, report.state),
            (0, DeviceState::Connected)
        );
        // The late answer finds nobody; the page is there for whoever asks next.
        rig.host.let_go();
        eventually("the page is granted", || {
            queue.submit(&guest, &cold.parts(WRITE));
            queue.wait_used(&guest);
            cold.status(&guest) == 0
        });
        assert_eq!(guest.get(cold.data, 8), 40_u64.to_le_bytes());
        eventually("leases returned", || !domain.attributes().is_any_leased());
    }
}

#[test]
fn failed_request_without_its_status_page_waits_for_that_and_pauses_nobody() {
    let rig = Rig::with_timeout(1, SHORT);
    let socket = rig.add_with("disk", 1, Writes::Taken, OnFault::Pause);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_INDIRECT);
    let queue = &mut connection.queues[0];
    let table = guest.room(PAGE_BYTES);
    let cold = BlkRequest::new(&mut guest, T_OUT, 40, 4096);
    let warm = BlkRequest::new(&mut guest, T_IN, 5, 512);
    let domain = guest.domain(&rig);
    for at in [table, cold.data, cold.status] {
        take_away(&domain, at, 1);
    }
    rig.host.hold();
    let cold_head = queue.submit_indirect(&guest, table, &cold.parts(0));
    let warm_head = queue.submit(&guest, &warm.parts(WRITE));
    assert_eq!(queue.wait_used(&guest).0, warm_head);
    let report = rig.report(&socket);
    assert_eq!((report.timed_out_requests, report.parked_chains), (1, 1));
    // Whatever comes now, the write is not done: its driver may have given it up.
    rig.host.let_go();
    assert_eq!(queue.wait_used(&guest).0, cold_head);
    assert_eq!(cold.status(&guest), S_IOERR);
    assert_eq!(rig.report(&socket).written_bytes, 0);
    assert_eq!(rig.report(&socket).state, DeviceState::Connected);
}

#[test]
fn time_out_stands_still_until_there_is_a_host() {
    let rig = Rig::with_timeout(1, SHORT);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let queue = &mut connection.queues[0];
    let cold = BlkRequest::new(&mut guest, T_IN, 40, 4096);
    let warm = BlkRequest::new(&mut guest, T_IN, 5, 512);
    let domain = guest.domain(&rig);
    take_away(&domain, cold.data, 1);
    rig.host.hold();
    let end = &rig.host.ends[0];
    end.set_host(HostPresence::Away);
    let head = queue.submit(&guest, &cold.parts(WRITE));
    rig.host.next_request();
    // The engine goes to sleep and wakes many times over; no time passes for who is parked.
    for _ in 0..50 {
        let sleeps = rig.dpu.engine_sleeps();
        queue.submit(&guest, &warm.parts(WRITE));
        queue.wait_used(&guest);
        eventually("the engine sleeps", || rig.dpu.engine_sleeps() > sleeps);
    }
    assert_eq!(rig.report(&socket).timed_out_requests, 0);
    end.set_host(HostPresence::Here);
    assert_eq!(queue.wait_used(&guest).0, head);
    assert_eq!(cold.status(&guest), S_IOERR);
}

#[test]
fn many_requests_that_nobody_answers_leave_the_response_queue_room_for_late_answers() {
    let rig = Rig::with_timeout(1, SHORT);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let cold = BlkRequest::new(&mut guest, T_IN, 40, 4096);
    let domain = guest.domain(&rig);
    take_away(&domain, cold.data, 1);
    rig.host.hold();
    // More than a device may have outstanding: the rest cannot even be sent, and fails as well.
    for _ in 0..150 {
        queue.submit(&guest, &cold.parts(WRITE));
        queue.wait_used(&guest);
        assert_eq!(cold.status(&guest), S_IOERR);
    }
    assert_eq!(rig.report(&socket).timed_out_requests, 150);
    rig.host.answer(ResponseCode::Success, usize::MAX);
    rig.host.let_go();
    eventually("answers are taken and a request succeeds", || {
        queue.submit(&guest, &cold.parts(WRITE));
        queue.wait_used(&guest);
        cold.status(&guest) == 0
    });
}
