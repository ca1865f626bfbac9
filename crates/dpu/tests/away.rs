// SPDX-License-Identifier: Apache-2.0
//! Queues that are stopped while no host is there: no front end waits for it, and no chain is lost.

mod support;

use pagetide_addr::PAGE_BYTES;
use pagetide_dpu::{OnFault, Writes};
use pagetide_vpri::queue::HostPresence;
use support::*;
use vhost::{VhostBackend, vhost_user::VhostUserFrontend};

const ON_FAULT: [OnFault; 2] = [OnFault::Pause, OnFault::OutOfOrder];

/// A disk with a cold read in its queue that was asked for in vain, and a warm one behind it.
struct Fixture {
    rig: Rig,
    guest: Guest,
    socket: std::path::PathBuf,
    connection: Connection,
    cold: BlkRequest,
    warm: BlkRequest,
    cold_head: u16,
    on_fault: OnFault,
}

type Open = fn(&std::path::Path, &mut Guest, usize, u64) -> Connection;

/// With a host that is `presence`, and never answers.
fn fixture(on_fault: OnFault, open: Open, presence: HostPresence) -> Fixture {
    let rig = Rig::new(1);
    let socket = rig.add_with("disk", 1, Writes::Taken, on_fault);
    let mut guest = Guest::new();
    let mut connection = open(&socket, &mut guest, 1, F_INDIRECT);
    let cold = BlkRequest::new(&mut guest, T_IN, 40, 4096);
    let warm = BlkRequest::new(&mut guest, T_IN, 5, 512);
    take_away(&guest.domain(&rig), cold.data, 1);
    rig.host.hold();
    rig.host.ends[0].set_host(presence);
    let queue = &mut connection.queues[0];
    let cold_head = queue.submit(&guest, &cold.parts(WRITE));
    rig.host.next_request();
    queue.submit(&guest, &warm.parts(WRITE));
    if on_fault == OnFault::OutOfOrder {
        queue.wait_used(&guest);
    }
    Fixture {
        rig,
        guest,
        socket,
        connection,
        cold,
        warm,
        cold_head,
        on_fault,
    }
}

impl Fixture {
    /// Chains that the device has taken from the ring.
    fn taken_from_ring(&self) -> u32 {
        match self.on_fault {
            OnFault::Pause => 1,
            OnFault::OutOfOrder => 2,
        }
    }

    fn host_comes(&self) {
        self.rig.host.let_go();
        self.rig.host.ends[0].set_host(HostPresence::Here);
    }

    fn finish(&mut self) {
        let queue = &mut self.connection.queues[0];
        while queue.next_used != queue.next_avail {
            queue.wait_used(&self.guest);
        }
        let statuses = [&self.cold, &self.warm].map(|request| request.status(&self.guest));
        assert_eq!(statuses, [0, 0]);
        let read = self.guest.get(self.cold.data, 8);
        assert_eq!(read, 40_u64.to_le_bytes());
        let report = self.rig.report(&self.socket);
        assert_eq!((report.parked_chains, report.failed_requests), (0, 0));
    }
}

/// Stops the queue by its base, which must not take for ever.
fn stop(connection: Connection) -> (Connection, u32) {
    in_time("the queue stops", move || {
        let base = connection.frontend.get_vring_base(0).unwrap();
        (connection, base)
    })
}

#[test]
fn parked_chain_of_a_queue_stopped_while_the_host_is_away_is_done_after_its_restart() {
    for on_fault in ON_FAULT {
        let mut f = fixture(on_fault, Connection::open, HostPresence::Away);
        let base;
        (f.connection, base) = stop(f.connection);
        assert_eq!(base, f.taken_from_ring());
        assert_eq!(f.connection.taken(0), [f.cold_head]);
        assert_eq!(f.rig.report(&f.socket).parked_chains, 0);
        f.connection.start_queues();
        f.host_comes();
        f.finish();
    }
}

#[test]
fn host_that_goes_in_the_middle_of_a_stop_is_not_waited_for() {
    for on_fault in ON_FAULT {
        let mut f = fixture(on_fault, Connection::open, HostPresence::Here);
        let (sleeps, connection) = (f.rig.dpu.engine_sleeps(), f.connection);
        let stopping = std::thread::spawn(move || {
            let base = connection.frontend.get_vring_base(0).unwrap();
            (connection, base)
        });
        eventually("the engine waits", || f.rig.dpu.engine_sleeps() > sleeps);
        assert!(!stopping.is_finished(), "the chain is parked");
        f.rig.host.ends[0].set_host(HostPresence::Away);
        eventually("the queue stops", || stopping.is_finished());
        (f.connection, _) = stopping.join().unwrap();
        assert_eq!(f.connection.taken(0), [f.cold_head]);
        f.connection.start_queues();
        f.host_comes();
        f.finish();
    }
}

#[test]
fn memory_that_changes_and_a_ring_that_is_disabled_wait_for_no_host_that_is_away() {
    let mut f = fixture(OnFault::OutOfOrder, Connection::open, HostPresence::Away);
    let (mut connection, regions) = (f.connection, [region(&f.guest)]);
    f.connection = in_time("the messages are answered", move || {
        connection.frontend.set_mem_table(&regions).unwrap();
        connection.frontend.set_vring_enable(0, false).unwrap();
        connection.frontend.set_vring_enable(0, true).unwrap();
        connection
    });
    f.host_comes();
    f.finish();
}

#[test]
fn parked_chain_that_nobody_tracks_fails_when_its_queue_is_stopped_while_the_host_is_away() {
    for on_fault in ON_FAULT {
        let mut f = fixture(on_fault, Connection::open_untracked, HostPresence::Away);
        let base;
        (f.connection, base) = stop(f.connection);
        assert_eq!(base, f.taken_from_ring());
        let queue = &mut f.connection.queues[0];
        assert_eq!(queue.wait_used(&f.guest).0, f.cold_head);
        assert_eq!(f.cold.status(&f.guest), S_IOERR);
        assert!(queue.call.read().is_ok(), "its driver is told");
        let report = f.rig.report(&f.socket);
        assert_eq!((report.parked_chains, report.failed_requests), (0, 1));
        f.connection.start_queues();
        if on_fault == OnFault::Pause {
            f.connection.queues[0].wait_used(&f.guest);
        }
        assert_eq!(f.warm.status(&f.guest), 0);
    }
}

#[test]
fn untracked_chain_whose_failure_cannot_be_told_holds_up_no_stop() {
    let mut f = fixture(
        OnFault::OutOfOrder,
        Connection::open_untracked,
        HostPresence::Away,
    );
    let mute = BlkRequest::new(&mut f.guest, T_IN, 48, 4096);
    let domain = f.guest.domain(&f.rig);
    take_away(&domain, mute.data, PAGE_BYTES);
    take_away(&domain, mute.status, 1);
    f.connection.queues[0].submit(&f.guest, &mute.parts(WRITE));
    f.rig.host.next_request();
    (f.connection, _) = stop(f.connection);
    let queue = &mut f.connection.queues[0];
    assert_eq!(queue.wait_used(&f.guest).0, f.cold_head);
    assert_eq!(queue.poll_used(&f.guest), None);
    assert_eq!(mute.status(&f.guest), 0xff);
}
