// SPDX-License-Identifier: Apache-2.0
//! What a queue does while one of its chains waits for pages: pause, or go on; and which pages are
//! asked for with those of the chain that faulted.

mod support;

use pagetide_addr::{PAGE_BYTES, PageRequest, RequestKind, ResponseCode};
use pagetide_dpu::{DeviceState, OnFault, Writes};
use std::path::Path;
use support::*;
use vhost::VhostBackend;

/// Makes it sure that the engine has looked at every ring since this was called: a request of
/// another queue of the same engine, which was made available later, is done.
fn engine_has_looked(queue: &mut TestQueue, guest: &Guest, request: &BlkRequest) {
    for _ in 0..2 {
        queue.submit(guest, &request.parts(WRITE));
        queue.wait_used(guest);
    }
}

/// A device of two queues on one engine, and a request for the second to look by.
struct Fixture {
    rig: Rig,
    socket: std::path::PathBuf,
    guest: Guest,
    connection: Connection,
    witness: BlkRequest,
}

fn fixture(on_fault: OnFault) -> Fixture {
    let rig = Rig::new(1);
    let socket = rig.add_with("disk", 2, Writes::Taken, on_fault);
    let mut guest = Guest::new();
    let connection = Connection::open(&socket, &mut guest, 2, F_INDIRECT);
    let witness = BlkRequest::new(&mut guest, T_IN, 9, 512);
    guest.domain(&rig);
    Fixture {
        rig,
        socket,
        guest,
        connection,
        witness,
    }
}

impl Fixture {
    fn cold(&mut self, kind: u32, sector: u64) -> BlkRequest {
        let request = BlkRequest::new(&mut self.guest, kind, sector, 4096);
        // A page between any two, so that they are asked for one by one.
        self.guest.room(1);
        let domain = self.rig.domains.find(self.guest.file.key().unwrap());
        take_away(&domain.unwrap(), request.data, 1);
        request
    }

    fn submit(&mut self, request: &BlkRequest, data_flag: u16) -> u16 {
        self.connection.queues[0].submit(&self.guest, &request.parts(data_flag))
    }

    fn look(&mut self) {
        engine_has_looked(&mut self.connection.queues[1], &self.guest, &self.witness);
    }

    fn wait_used(&mut self) -> u16 {
        self.connection.queues[0].wait_used(&self.guest).0
    }

    fn sector(&self, number: u64) -> u8 {
        use std::os::unix::fs::FileExt;
        let image = std::fs::File::open(self.rig.dir.path().join("disk")).unwrap();
        let mut byte = [0];
        image.read_exact_at(&mut byte, number * 512 + 100).unwrap();
        byte[0]
    }

    fn demanded(&self) -> PageRequest {
        let request = self.rig.host.next_request();
        assert_eq!(request.kind, RequestKind::Demand);
        request
    }
}

fn write_of(f: &Fixture, request: &BlkRequest, byte: u8) {
    f.guest.put(request.data, &[byte; 4096]);
}

#[test]
fn flush_behind_a_parked_write_completes_out_of_order_and_says_nothing_of_it() {
    let mut f = fixture(OnFault::OutOfOrder);
    f.rig.host.hold();
    let write = f.cold(T_OUT, 16);
    write_of(&f, &write, 0x77);
    let flush = BlkRequest::new(&mut f.guest, T_FLUSH, 0, 0);
    let write_head = f.submit(&write, 0);
    f.demanded();
    let flush_head = f.submit(&flush, 0);
    assert_eq!(f.wait_used(), flush_head);
    assert_eq!((flush.status(&f.guest), write.status(&f.guest)), (0, 0xff));
    assert_eq!(f.sector(16), 0xa5, "the write has not begun");
    f.rig.host.answer(ResponseCode::Success, 1);
    assert_eq!(f.wait_used(), write_head);
    assert_eq!((write.status(&f.guest), f.sector(16)), (0, 0x77));
}

#[test]
fn flush_behind_a_parked_write_does_not_begin_in_a_paused_queue() {
    let mut f = fixture(OnFault::Pause);
    f.rig.host.hold();
    let write = f.cold(T_OUT, 16);
    write_of(&f, &write, 0x77);
    let flush = BlkRequest::new(&mut f.guest, T_FLUSH, 0, 0);
    let write_head = f.submit(&write, 0);
    f.demanded();
    f.submit(&flush, 0);
    f.look();
    let report = f.rig.report(&f.socket);
    assert_eq!((report.requests, report.inflight_requests), (2, 0));
    assert_eq!(f.connection.taken(0), [write_head], "the flush was taken");
    assert_eq!(flush.status(&f.guest), 0xff);
    f.rig.host.answer(ResponseCode::Success, 1);
    f.wait_used();
    f.wait_used();
    assert_eq!((write.status(&f.guest), flush.status(&f.guest)), (0, 0));
    assert_eq!(f.sector(16), 0x77);
}

#[test]
fn later_write_to_the_same_sector_is_overwritten_by_a_parked_one_only_out_of_order() {
    let mut f = fixture(OnFault::OutOfOrder);
    f.rig.host.hold();
    let early = f.cold(T_OUT, 24);
    let late = BlkRequest::new(&mut f.guest, T_OUT, 24, 4096);
    write_of(&f, &early, 1);
    write_of(&f, &late, 2);
    f.submit(&early, 0);
    f.demanded();
    let late_head = f.submit(&late, 0);
    assert_eq!(f.wait_used(), late_head);
    assert_eq!(f.sector(24), 2);
    f.rig.host.answer(ResponseCode::Success, 1);
    f.wait_used();
    assert_eq!(f.sector(24), 1, "begun later, done later");
}

#[test]
fn later_write_to_the_same_sector_waits_for_a_parked_one_in_a_paused_queue() {
    let mut f = fixture(OnFault::Pause);
    f.rig.host.hold();
    let early = f.cold(T_OUT, 24);
    let late = BlkRequest::new(&mut f.guest, T_OUT, 24, 4096);
    write_of(&f, &early, 1);
    write_of(&f, &late, 2);
    f.submit(&early, 0);
    f.demanded();
    f.submit(&late, 0);
    f.look();
    assert_eq!(f.sector(24), 0xa5, "neither has begun");
    f.rig.host.answer(ResponseCode::Success, 1);
    f.wait_used();
    f.wait_used();
    // Both were under way together, which leaves the order to the disk.
    assert!([1, 2].contains(&f.sector(24)));
}

#[test]
fn chains_behind_a_parked_one_are_begun_in_ring_order_and_none_is_lost() {
    let mut f = fixture(OnFault::Pause);
    f.rig.host.hold();
    let requests: Vec<BlkRequest> = (0..12)
        .map(|i| match i % 3 {
            0 => f.cold(T_IN, 8 * i),
            _ => BlkRequest::new(&mut f.guest, T_IN, 8 * i, 4096),
        })
        .collect();
    let heads: Vec<u16> = requests.iter().map(|r| f.submit(r, WRITE)).collect();
    f.demanded();
    f.look();
    assert_eq!(f.connection.taken(0), [heads[0]]);
    f.rig.host.let_go();
    let mut done: Vec<u16> = heads.iter().map(|_| f.wait_used()).collect();
    done.sort_unstable();
    let mut expected = heads.clone();
    expected.sort_unstable();
    assert_eq!(done, expected);
    for (sector, request) in (0..).step_by(8).zip(&requests) {
        let sector: u64 = sector;
        assert_eq!(request.status(&f.guest), 0);
        assert_eq!(f.guest.get(request.data, 8), sector.to_le_bytes());
    }
    assert_eq!(f.rig.report(&f.socket).parked_chains, 0);
}

#[test]
fn cold_chains_behind_a_parked_one_are_asked_for_with_it_in_a_paused_queue() {
    let mut f = fixture(OnFault::Pause);
    f.rig.host.hold();
    let requests: Vec<BlkRequest> = (0..20).map(|i| f.cold(T_IN, 8 * i)).collect();
    for request in &requests {
        f.submit(request, WRITE);
    }
    let page = |request: &BlkRequest| request.data / PAGE_BYTES;
    assert_eq!(f.demanded().pages.start.0, page(&requests[0]));
    let mut ahead: Vec<PageRequest> = (0..16).map(|_| f.rig.host.next_request()).collect();
    assert!(ahead.iter().all(|r| r.kind == RequestKind::Prefault));
    ahead.sort_by_key(|r| r.pages.start);
    let asked: Vec<u64> = ahead.iter().map(|r| r.pages.start.0).collect();
    let next: Vec<u64> = requests[1..17].iter().map(page).collect();
    assert_eq!(asked, next);
    f.look();
    assert_eq!(
        f.rig.host.request_at_hand(),
        None,
        "16 chains ahead and no more"
    );
    assert_eq!(f.connection.taken(0).len(), 1, "looked at, not taken");
    f.rig.host.let_go();
    for _ in &requests {
        f.wait_used();
    }
    assert!(requests.iter().all(|r| r.status(&f.guest) == 0));
    let report = f.rig.report(&f.socket);
    assert!(report.prefaults >= 16, "{report:?}");
}

#[test]
fn cold_chains_out_of_order_each_ask_for_themselves() {
    let mut f = fixture(OnFault::OutOfOrder);
    f.rig.host.hold();
    let requests: Vec<BlkRequest> = (0..20).map(|i| f.cold(T_IN, 8 * i)).collect();
    for request in &requests {
        f.submit(request, WRITE);
    }
    for _ in &requests {
        f.demanded();
    }
    assert_eq!(f.connection.taken(0).len(), 20);
    assert_eq!(f.rig.report(&f.socket).prefaults, 0);
    f.rig.host.let_go();
    for _ in &requests {
        f.wait_used();
    }
}

#[test]
fn prefault_that_fails_hurts_nobody() {
    let mut f = fixture(OnFault::Pause);
    f.rig.host.hold();
    let (one, two) = (f.cold(T_IN, 0), f.cold(T_IN, 8));
    f.submit(&one, WRITE);
    f.submit(&two, WRITE);
    f.demanded();
    assert_eq!(f.rig.host.next_request().kind, RequestKind::Prefault);
    f.rig.host.answer(ResponseCode::Success, 1);
    f.wait_used();
    // Its page is still away when its turn comes: now it asks for itself.
    let asked = f.demanded();
    assert_eq!(asked.pages.start.0, two.data / PAGE_BYTES);
    f.rig.host.answer(ResponseCode::ResponseFailure, 1);
    f.rig.host.answer(ResponseCode::Success, 1);
    f.wait_used();
    assert_eq!((one.status(&f.guest), two.status(&f.guest)), (0, 0));
    assert_eq!(f.rig.report(&f.socket).failed_requests, 0);
}

#[test]
fn nonsense_behind_a_parked_chain_is_told_when_its_turn_comes() {
    let mut f = fixture(OnFault::Pause);
    f.rig.host.hold();
    let cold = f.cold(T_IN, 0);
    f.submit(&cold, WRITE);
    f.demanded();
    f.connection.queues[0].publish(&f.guest, 9999);
    f.look();
    assert_eq!(f.rig.report(&f.socket).state, DeviceState::Connected);
    f.rig.host.answer(ResponseCode::Success, 1);
    eventually("the device stops", || {
        f.rig.report(&f.socket).state == DeviceState::Stopped
    });
}

/// Leaves `count` cold chains in a queue of a device that does `on_fault`, with its front end gone.
fn left_behind(f: &mut Fixture, count: u64) -> Vec<BlkRequest> {
    f.rig.host.hold();
    let requests: Vec<BlkRequest> = (0..count).map(|i| f.cold(T_IN, 8 * i)).collect();
    for request in &requests {
        f.submit(request, WRITE);
    }
    f.demanded();
    f.look();
    requests
}

fn come_back(rig: &Rig, socket: &Path, guest: &Guest, connection: Connection) -> Connection {
    let features = connection.features;
    let (queues, inflight) = connection.hang_up();
    rig.host.let_go();
    Connection::open_with(socket, guest, queues, features, inflight)
}

#[test]
fn paused_queue_whose_front_end_leaves_is_taken_up_without_loss() {
    let mut f = fixture(OnFault::Pause);
    let requests = left_behind(&mut f, 5);
    let mut back = come_back(&f.rig, &f.socket, &f.guest, f.connection);
    let done: Vec<u16> = requests
        .iter()
        .map(|_| back.queues[0].wait_used(&f.guest).0)
        .collect();
    let mut unique = done.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), 5, "{done:?}");
    assert!(requests.iter().all(|r| r.status(&f.guest) == 0));
}

#[test]
fn paused_queue_that_is_stopped_completes_what_it_took_and_goes_on_with_the_rest() {
    let mut f = fixture(OnFault::Pause);
    let domain = f.rig.domains.find(f.guest.file.key().unwrap()).unwrap();
    let requests: Vec<BlkRequest> = (0..6).map(|i| f.cold(T_IN, 8 * i)).collect();
    for _ in 0..20 {
        f.rig.host.hold();
        for (sector, request) in (0..).step_by(8).zip(&requests) {
            take_away(&domain, request.data, 1);
            request.aim(&f.guest, T_IN, sector);
            f.submit(request, WRITE);
        }
        eventually("one is parked", || {
            f.rig.report(&f.socket).parked_chains == 1
        });
        f.rig.host.let_go();
        let base = f.connection.frontend.get_vring_base(0).unwrap();
        assert_eq!(f.connection.taken(0), [0; 0], "taken and not completed");
        let queue = &mut f.connection.queues[0];
        while queue.poll_used(&f.guest).is_some() {}
        assert_eq!(base, u32::from(queue.next_used));
        f.connection.frontend.get_vring_base(1).unwrap();
        f.connection.start_queues();
        while f.connection.queues[0].next_used != f.connection.queues[0].next_avail {
            f.wait_used();
        }
        assert!(requests.iter().all(|r| r.status(&f.guest) == 0));
    }
}

#[test]
fn chains_taken_out_of_order_are_done_again_one_by_one_by_a_successor_that_pauses() {
    let mut f = fixture(OnFault::OutOfOrder);
    let pausing = f.rig.add_with("next", 2, Writes::Taken, OnFault::Pause);
    let requests = left_behind(&mut f, 6);
    let taken = f.connection.taken(0);
    assert_eq!(taken.len(), 6);
    // The first was heard of already. What is asked for from now on is the successor's.
    let asked = f.rig.report(&f.socket).iopfs;
    for _ in 1..asked {
        f.rig.host.next_request();
    }
    let features = f.connection.features;
    let (queues, inflight) = f.connection.hang_up();
    eventually("the device is left", || {
        f.rig.report(&f.socket).parked_chains == 0
    });
    let mut back = Connection::open_with(&pausing, &f.guest, queues, features, inflight);
    eventually("one is parked", || {
        f.rig.report(&pausing).parked_chains == 1
    });
    // What it found taken is looked ahead at like what is in the ring.
    let mut kinds: Vec<RequestKind> = (0..6).map(|_| f.rig.host.next_request().kind).collect();
    kinds.sort_by_key(|kind| *kind != RequestKind::Demand);
    assert_eq!(kinds[0], RequestKind::Demand);
    assert!(kinds[1..].iter().all(|k| *k == RequestKind::Prefault));
    f.rig.host.let_go();
    for _ in &requests {
        back.queues[0].wait_used(&f.guest);
    }
    assert!(requests.iter().all(|r| r.status(&f.guest) == 0));
}

#[test]
fn mebibyte_with_every_other_page_away_is_one_request() {
    let mut f = fixture(OnFault::OutOfOrder);
    let request = BlkRequest::new(&mut f.guest, T_IN, 0, 1 << 20);
    let domain = f.rig.domains.find(f.guest.file.key().unwrap()).unwrap();
    for page in (0..256).step_by(2) {
        take_away(&domain, request.data + page * PAGE_BYTES, 1);
    }
    f.submit(&request, WRITE);
    f.wait_used();
    assert_eq!(request.status(&f.guest), 0);
    assert_eq!(f.rig.report(&f.socket).iopfs, 1);
}

#[test]
fn most_scattered_request_of_a_driver_is_asked_for_at_once() {
    let mut f = fixture(OnFault::OutOfOrder);
    f.rig.host.hold();
    let domain = f.rig.domains.find(f.guest.file.key().unwrap()).unwrap();
    let request = BlkRequest::new(&mut f.guest, T_IN, 0, 512);
    // 126 segments, which is what the device offers, none next to another.
    let mut parts = vec![(request.header, 16, 0)];
    f.guest.room(1);
    for _ in 0..126 {
        parts.push((f.guest.room(PAGE_BYTES), 4096, WRITE));
        f.guest.room(1);
    }
    parts.push((request.status, 1, WRITE));
    let table = f.guest.room(PAGE_BYTES);
    for (at, _, _) in &parts {
        take_away(&domain, *at, 1);
    }
    f.connection.queues[0].submit_indirect(&f.guest, table, &parts);
    for _ in 0..parts.len() {
        f.demanded();
    }
    f.rig.host.let_go();
    f.wait_used();
    assert_eq!(request.status(&f.guest), 0);
}

#[test]
fn page_request_names_the_queue_as_its_interrupt_unless_the_driver_wants_none() {
    let mut f = fixture(OnFault::OutOfOrder);
    f.rig.host.hold();
    let (one, two) = (f.cold(T_IN, 0), f.cold(T_IN, 8));
    f.submit(&one, WRITE);
    let wanted = f.demanded();
    assert_eq!(wanted.vector, Some(0));
    assert!(wanted.sent_ns > 0);
    // VIRTQ_AVAIL_F_NO_INTERRUPT
    let avail = f.connection.queues[0].avail;
    f.guest.put(avail, &1_u16.to_le_bytes());
    f.submit(&two, WRITE);
    let silent = f.demanded();
    assert_eq!(silent.vector, None);
    assert!(silent.sent_ns >= wanted.sent_ns);
    f.rig.host.let_go();
    f.wait_used();
    f.wait_used();
}
