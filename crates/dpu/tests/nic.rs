// SPDX-License-Identifier: Apache-2.0
//! A network device sends: packets that wait for pages and keep their order, packets that are lost
//! alone, chains that no driver makes.

mod support;

use pagetide_addr::{QueueId, RequestKind, ResponseCode};
use pagetide_dpu::{
    Backing, DeviceState, DpuError, LinkConfig, NicConfig, RamPolicy, ReceiveConfig, SocketAccess,
};
use pagetide_random::SplitMix64;
use pagetide_vpri::LookUp;
use std::path::PathBuf;
use support::*;
use vhost::VhostBackend;
use vmm_sys_util::eventfd::EventFd;

/// `struct virtio_net_hdr` before a packet.
const HEADER: u32 = 12;
const F_MRG_RXBUF: u64 = 1 << 15;
const F_MQ: u64 = 1 << 22;

struct Fixture {
    rig: Rig,
    socket: PathBuf,
    guest: Guest,
    connection: Connection,
}

fn config(rig: &Rig, pairs: u16) -> NicConfig {
    NicConfig {
        socket: rig.dir.path().join("nic.sock"),
        pairs,
        link: LinkConfig::Null,
        receive: ReceiveConfig::default(),
        look_up: LookUp::On,
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    }
}

fn fixture(features: u64) -> Fixture {
    let rig = Rig::new(2);
    let config = config(&rig, 2);
    rig.dpu.add_nic(&config).unwrap();
    let mut guest = Guest::new();
    let connection = Connection::open_nic(&config.socket, &mut guest, 2, features | F_MQ);
    guest.domain(&rig);
    Fixture {
        rig,
        socket: config.socket,
        guest,
        connection,
    }
}

impl Fixture {
    /// A packet of `bytes` with a header of zeros; header and packet on pages of their own.
    fn packet(&mut self, bytes: u32) -> [(u64, u32, u16); 2] {
        let header = self.guest.room(u64::from(HEADER));
        let data = self.guest.room(u64::from(bytes));
        // A page between any two, so that they are asked for one by one.
        self.guest.room(1);
        [(header, HEADER, 0), (data, bytes, 0)]
    }

    /// The same, whose data is absent.
    fn cold(&mut self, bytes: u32) -> [(u64, u32, u16); 2] {
        let parts = self.packet(bytes);
        let domain = self.rig.domains.find(self.guest.file.key().unwrap());
        take_away(&domain.unwrap(), parts[1].0, u64::from(bytes));
        parts
    }

    fn submit(&mut self, queue: usize, parts: &[(u64, u32, u16)]) -> u16 {
        self.connection.queues[queue].submit(&self.guest, parts)
    }

    fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        self.connection.queues[queue].wait_used(&self.guest)
    }

    /// Sends a packet, and checks that the device is still there.
    fn send_one(&mut self, queue: usize) {
        let parts = self.packet(60);
        let head = self.submit(queue, &parts);
        assert_eq!(self.wait_used(queue), (head, 0));
        assert_eq!(self.state(), DeviceState::Connected);
    }

    fn state(&self) -> DeviceState {
        self.rig.report(&self.socket).state
    }
}

#[test]
fn packets_of_all_pairs_are_sent_and_posted_buffers_stay_in_their_rings() {
    let mut f = fixture(F_INDIRECT | F_MRG_RXBUF);
    for queue in [0, 2] {
        for _ in 0..8 {
            let buffer = f.guest.room(2048);
            f.submit(queue, &[(buffer, 2048, WRITE)]);
        }
    }
    let table = f.guest.room(64);
    for queue in [1, 3] {
        let parts = f.packet(1514);
        let head = f.submit(queue, &parts);
        assert_eq!(f.wait_used(queue), (head, 0));
        let parts = f.packet(60);
        let head = f.connection.queues[queue].submit_indirect(&f.guest, table, &parts);
        assert_eq!(f.wait_used(queue), (head, 0));
    }
    let report = f.rig.report(&f.socket);
    assert_eq!((report.requests, report.failed_requests), (4, 0));
    assert_eq!((report.written_bytes, report.read_bytes), (2 * 1574, 0));
    assert!(matches!(&report.backing, Backing::Nic(nic) if nic.pairs == 2));
    assert_eq!((report.backing.kind(), report.serial()), ("net", None));
    // What was posted stays in the ring until there is a packet, and goes back empty at the end.
    for queue in [0, 2] {
        assert!(f.connection.queues[queue].poll_used(&f.guest).is_none());
        let base = f.connection.frontend.get_vring_base(queue).unwrap();
        let mut back = 0;
        while let Some((_, bytes)) = f.connection.queues[queue].poll_used(&f.guest) {
            assert_eq!(bytes, 0);
            back += 1;
        }
        assert_eq!(base, back);
    }
    assert_eq!(f.connection.frontend.get_vring_base(1).unwrap(), 2);
}

#[test]
fn packet_whose_page_is_absent_pauses_its_queue_alone_and_names_its_pair() {
    let mut f = fixture(F_EVENT_IDX);
    f.rig.host.hold();
    let cold = f.cold(1514);
    let first = f.submit(3, &cold);
    let request = f.rig.host.next_request();
    assert_eq!(request.kind, RequestKind::Demand);
    assert_eq!((request.queue, request.vector), (QueueId(3), Some(1)));
    // Those behind it wait in the ring; the other pair goes on.
    let warm = f.packet(60);
    let second = f.submit(3, &warm);
    for _ in 0..3 {
        f.send_one(1);
    }
    assert!(f.connection.queues[3].poll_used(&f.guest).is_none());
    f.rig.host.let_go();
    assert_eq!(f.wait_used(3), (first, 0));
    assert_eq!(f.wait_used(3), (second, 0));
    let report = f.rig.report(&f.socket);
    assert_eq!((report.failed_requests, report.timed_out_requests), (0, 0));
}

#[test]
fn packets_of_a_batch_are_done_up_to_the_cold_one_and_those_behind_it_stay_in_the_ring() {
    const COLD: usize = 5;
    let mut f = fixture(F_EVENT_IDX);
    f.rig.host.hold();
    let packets: Vec<_> = (0..10)
        .map(|number| match number {
            COLD => f.cold(1514),
            _ => f.packet(60),
        })
        .collect();
    // The engine is told of all of them at once.
    let silent = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let kick = std::mem::replace(&mut f.connection.queues[1].kick, silent);
    let heads: Vec<u16> = packets.iter().map(|parts| f.submit(1, parts)).collect();
    f.connection.queues[1].kick = kick;
    f.connection.queues[1].kick.write(1).unwrap();
    f.rig.host.next_request();
    for head in &heads[..COLD] {
        assert_eq!(f.wait_used(1), (*head, 0));
    }
    assert!(f.connection.queues[1].poll_used(&f.guest).is_none());
    f.rig.host.let_go();
    for head in &heads[COLD..] {
        assert_eq!(f.wait_used(1), (*head, 0));
    }
    let report = f.rig.report(&f.socket);
    assert_eq!((report.requests, report.failed_requests), (10, 0));
}

#[test]
fn packets_before_a_broken_chain_of_a_batch_are_shown_and_the_device_stops() {
    let mut f = fixture(0);
    let packets: Vec<_> = (0..6).map(|_| f.packet(60)).collect();
    let silent = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let queue = &mut f.connection.queues[1];
    let kick = std::mem::replace(&mut queue.kick, silent);
    let heads: Vec<u16> = (packets.iter().enumerate())
        .map(|(number, parts)| {
            let head = queue.submit(&f.guest, parts);
            if number == 3 {
                // The chain goes round.
                let next = f.guest.get(queue.desc + 16 * u64::from(head) + 14, 2);
                let next = u16::from_le_bytes([next[0], next[1]]);
                let second = queue.desc + 16 * u64::from(next);
                f.guest.put(second + 12, &NEXT.to_le_bytes());
                f.guest.put(second + 14, &head.to_le_bytes());
            }
            head
        })
        .collect();
    queue.kick = kick;
    queue.kick.write(1).unwrap();
    for head in &heads[..3] {
        assert_eq!(f.wait_used(1), (*head, 0));
    }
    eventually("the device stops", || f.state() == DeviceState::Stopped);
    assert!(f.connection.queues[1].poll_used(&f.guest).is_none());
}

#[test]
fn packet_whose_page_is_lost_is_lost_alone() {
    let mut f = fixture(0);
    f.rig.host.hold();
    let cold = f.cold(1514);
    let head = f.submit(1, &cold);
    f.rig.host.next_request();
    f.rig.host.answer(ResponseCode::InvalidRequest, 1);
    assert_eq!(f.wait_used(1), (head, 0));
    assert_eq!(f.rig.report(&f.socket).failed_requests, 1);
    f.rig.host.let_go();
    f.send_one(1);
}

#[test]
fn queue_that_stops_while_the_host_is_held_gives_its_packets_back() {
    let mut f = fixture(0);
    f.rig.host.hold();
    let cold = f.cold(1514);
    f.submit(1, &cold);
    f.rig.host.next_request();
    let (queues, _) = f.connection.hang_up();
    drop(queues);
    let report = || f.rig.report(&f.socket);
    eventually("the device has no front end", || {
        report().state == DeviceState::Listening && report().parked_chains == 0
    });
    assert_eq!(report().wired_bytes, 0);
    f.rig.host.let_go();
}

#[test]
fn packets_that_lie_are_refused_and_the_device_goes_on() {
    let mut f = fixture(0);
    let put = |f: &mut Fixture, parts: &[(u64, u32, u16)], header: &[u8]| {
        f.guest.put(parts[0].0, header);
        let head = f.submit(1, parts);
        assert_eq!(f.wait_used(1), (head, 0));
    };
    let parts = f.packet(60);
    let mut refused = 0;
    for header in [
        // A checksum beyond the packet; segments without a checksum, of no bytes, of a kind that
        // does not exist; headers that are longer than the packet.
        [1, 0, 0, 0, 0, 0, 59, 0, 0, 0, 0, 0],
        [0, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0],
        [1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0],
        [1, 9, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0],
        [1, 1, 61, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0],
    ] {
        put(&mut f, &parts, &header);
        refused += 1;
        assert_eq!(
            f.rig.report(&f.socket).failed_requests,
            refused,
            "{header:?}"
        );
    }
    // A runt, one that is too long, one without any data, one with a buffer to be written.
    for bytes in [13, 65_554] {
        let parts = f.packet(bytes);
        put(&mut f, &parts, &[0; 12]);
    }
    let parts = f.packet(60);
    put(&mut f, &parts[..1], &[0; 12]);
    let written = [parts[0], parts[1], (parts[1].0, 8, WRITE)];
    put(&mut f, &written, &[0; 12]);
    // One that is not in guest memory, at its end or before.
    for at in [1, 2] {
        let mut parts = [parts[0], parts[1], parts[1]];
        parts[at].0 = RAM_BYTES;
        put(&mut f, &parts, &[0; 12]);
    }
    let report = f.rig.report(&f.socket);
    assert_eq!(report.failed_requests, refused + 6);
    assert_eq!((report.outside_requests, report.written_bytes), (2, 0));
    f.send_one(1);
}

#[test]
fn header_that_is_cut_anywhere_is_read_whole() {
    let mut f = fixture(0);
    let parts = f.packet(60);
    for cut in 1..HEADER {
        let at = parts[0].0;
        let rest = HEADER - cut;
        let head = f.submit(1, &[(at, cut, 0), (at + u64::from(cut), rest, 0), parts[1]]);
        assert_eq!(f.wait_used(1), (head, 0));
    }
    // Header and packet in one buffer.
    let together = f.guest.room(72);
    let head = f.submit(1, &[(together, 72, 0)]);
    assert_eq!(f.wait_used(1), (head, 0));
    let report = f.rig.report(&f.socket);
    assert_eq!((report.requests, report.failed_requests), (12, 0));
    assert_eq!(report.written_bytes, 12 * 60);
}

#[test]
fn chains_that_cannot_be_read_stop_their_device_alone() {
    type Break = fn(&Fixture, u64);
    let broken: [Break; 3] = [
        // A header that is too short.
        |f, at| f.connection.queues[1].descriptor(&f.guest, 0, 0, (GPA + at, 11, 0, 0)),
        // A chain that is its own successor.
        |f, at| f.connection.queues[1].descriptor(&f.guest, 0, 0, (GPA + at, 12, NEXT, 0)),
        // A successor beyond the table.
        |f, at| f.connection.queues[1].descriptor(&f.guest, 0, 0, (GPA + at, 12, NEXT, 999)),
    ];
    for make in broken {
        let mut f = fixture(0);
        let disk = f.rig.add("disk", 1, pagetide_dpu::Writes::Taken);
        let at = f.guest.room(64);
        make(&f, at);
        f.connection.queues[1].publish(&f.guest, 0);
        eventually("the device stops", || f.state() == DeviceState::Stopped);
        let report = f.rig.report(&f.socket);
        assert!(report.stopped_because.is_some());
        assert_eq!(report.malformed_requests, 1);
        assert_eq!(f.rig.report(&disk).state, DeviceState::Listening);
    }
}

#[test]
fn random_descriptors_at_worst_stop_the_device() {
    let mut random = SplitMix64::new(1019);
    let mut stopped = 0;
    for _ in 0..40 {
        let mut f = fixture(F_INDIRECT);
        let at = f.guest.room(16 << 10);
        for index in 0..QUEUE_SIZE {
            let address = match random.below(8) {
                0 => random.next_u64(),
                _ => GPA + at + random.below(16 << 10),
            };
            let len = u32::try_from(random.below(2000)).unwrap();
            // Rarely indirect or writable, so that chains of some length are common.
            let bits = random.below(256) >> random.below(8);
            let flags = u16::try_from(bits & 7).unwrap();
            let next = u16::try_from(random.below(u64::from(QUEUE_SIZE) + 2)).unwrap();
            let fields = (address, len, flags, next);
            f.connection.queues[1].descriptor(&f.guest, 0, index, fields);
        }
        let mut answered = 0;
        for head in 0..16 {
            f.connection.queues[1].publish(&f.guest, head);
            eventually("an answer, or the end of the device", || {
                answered += u32::from(f.connection.queues[1].poll_used(&f.guest).is_some());
                answered > u32::from(head) || f.state() == DeviceState::Stopped
            });
        }
        stopped += u32::from(f.state() == DeviceState::Stopped);
        let report = f.rig.report(&f.socket);
        assert_eq!((report.parked_chains, report.read_bytes), (0, 0));
        // It can be removed, whatever it has seen.
        f.rig.dpu.remove(report.id).unwrap();
        assert!(f.rig.dpu.devices().is_empty());
    }
    assert!(stopped > 0, "no chain was so broken");
}

#[test]
fn device_without_pairs_or_with_too_many_is_refused() {
    let rig = Rig::new(1);
    for pairs in [0, 33, u16::MAX] {
        let refused = rig.dpu.add_nic(&config(&rig, pairs));
        assert!(matches!(refused, Err(DpuError::Setting { .. })));
    }
    rig.dpu.add_nic(&config(&rig, 32)).unwrap();
    let report = rig.dpu.devices().pop().unwrap();
    assert_eq!(
        (report.queue_count, report.state),
        (64, DeviceState::Listening)
    );
}
