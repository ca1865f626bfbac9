// SPDX-License-Identifier: Apache-2.0
//! A network device receives into buffers that are out: every policy, with every packet numbered.

mod support;

use pagetide_addr::{Access, FilePage, RequestKind, ResponseCode};
use pagetide_dpu::{
    Backing, DeviceState, LinkConfig, NicConfig, NicReport, OnReceiveFault, Prefault, RamPolicy,
    ReceiveConfig, SocketAccess, Wiring,
};
use pagetide_random::SplitMix64;
use pagetide_sys::clock::now_ns;
use pagetide_vpri::{DmaDomain, LookUp};
use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};
use support::*;
use vhost::VhostBackend;

/// `struct virtio_net_hdr` before a packet.
const HEADER: u32 = 12;
const F_MRG_RXBUF: u64 = 1 << 15;
const F_MQ: u64 = 1 << 22;
/// The queues of the first pair.
const RX: usize = 0;
const TX: usize = 1;

const ALL: [OnReceiveFault; 4] = [
    OnReceiveFault::Drop,
    OnReceiveFault::Pause,
    OnReceiveFault::BackupRing,
    OnReceiveFault::OutOfOrder,
];

struct Fixture {
    rig: Rig,
    socket: PathBuf,
    guest: Guest,
    connection: Connection,
    domain: Arc<DmaDomain>,
    /// Where a packet that is sent lies.
    sending: u64,
    /// Posted buffers by head.
    posted: HashMap<u16, (u64, u32)>,
}

fn config(rig: &Rig, receive: ReceiveConfig) -> NicConfig {
    NicConfig {
        socket: rig.dir.path().join("nic.sock"),
        pairs: 1,
        link: LinkConfig::Loop,
        receive,
        look_up: LookUp::On,
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    }
}

fn receive(on_fault: OnReceiveFault, prefault: Prefault) -> ReceiveConfig {
    ReceiveConfig {
        on_fault,
        prefault,
        ..ReceiveConfig::default()
    }
}

fn fixture_of(rig: Rig, receive: ReceiveConfig, features: u64) -> Fixture {
    connected(rig, receive, features, Guest::new())
}

/// All memory is absent before the device comes.
fn fixture_of_cold(rig: Rig, receive: ReceiveConfig, features: u64) -> Fixture {
    let guest = Guest::new();
    let domain = guest.early_domain(&rig);
    take_away(&domain, 0, RAM_BYTES);
    connected(rig, receive, features, guest)
}

fn connected(rig: Rig, receive: ReceiveConfig, features: u64, guest: Guest) -> Fixture {
    let config = config(&rig, receive);
    rig.dpu.add_nic(&config).unwrap();
    connected_again(rig, config.socket, features, guest)
}

/// The same to a device that is there.
fn connected_again(rig: Rig, socket: PathBuf, features: u64, mut guest: Guest) -> Fixture {
    let connection = Connection::open_nic(&socket, &mut guest, 1, features | F_MQ);
    let domain = guest.domain(&rig);
    let sending = guest.room(2048);
    Fixture {
        rig,
        socket,
        guest,
        connection,
        domain,
        sending,
        posted: HashMap::new(),
    }
}

fn fixture(on_fault: OnReceiveFault) -> Fixture {
    fixture_of(Rig::new(1), receive(on_fault, Prefault::Off), F_MRG_RXBUF)
}

/// Byte `at` of packet `number`.
fn byte_of(number: u32, at: usize) -> u8 {
    let mixed = (u64::from(number) << 16 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed.to_be_bytes()[0]
}

impl Fixture {
    /// Sends packet `number`, which comes back, and waits until it is gone.
    fn send(&mut self, number: u32, bytes: u32) {
        let mut packet = vec![0; HEADER as usize];
        packet.extend(number.to_le_bytes());
        packet.extend((4..bytes as usize).map(|at| byte_of(number, at)));
        self.guest.put(self.sending, &packet);
        let parts = [(self.sending, HEADER + bytes, 0)];
        let head = self.connection.queues[TX].submit(&self.guest, &parts);
        assert_eq!(self.connection.queues[TX].wait_used(&self.guest), (head, 0));
    }

    /// Posts a buffer at a page of its own.
    fn post(&mut self, bytes: u32) -> u64 {
        let at = self.guest.room(u64::from(bytes));
        self.post_at(at, bytes);
        at
    }

    fn post_at(&mut self, at: u64, bytes: u32) -> u16 {
        let parts = [(at, bytes, WRITE)];
        let head = self.connection.queues[RX].submit(&self.guest, &parts);
        self.posted.insert(head, (at, bytes));
        head
    }

    fn take_away(&self, at: u64, bytes: u32) {
        take_away(&self.domain, at, u64::from(bytes));
    }

    /// Room of which the pages are absent.
    fn cold(&mut self, bytes: u32) -> u64 {
        let at = self.guest.room(u64::from(bytes));
        self.take_away(at, bytes);
        at
    }

    fn is_there(&self, at: u64) -> bool {
        let bitmap = self.domain.attributes().bitmap();
        bitmap.allows(FilePage::containing(at).single(), Access::Write)
    }

    /// The next used buffer, if there is one: where it is, its length, and the bytes in it.
    fn used(&mut self) -> Option<(u64, u32, u32)> {
        let (head, got) = self.connection.queues[RX].poll_used(&self.guest)?;
        let (at, bytes) = self.posted.remove(&head).expect("it was posted");
        Some((at, bytes, got))
    }

    fn wait_used(&mut self) -> (u64, u32, u32) {
        let mut used = None;
        eventually("a used buffer", || {
            used = self.used();
            used.is_some()
        });
        used.unwrap()
    }

    /// The next packet: its number, and the buffers that it took. Its content is right.
    fn packet(&mut self) -> (u32, Vec<(u64, u32)>) {
        let (at, bytes, got) = self.wait_used();
        let mut whole = self.guest.get(at, got as usize);
        assert!(got >= HEADER, "a buffer came back with {got} bytes");
        let count = u16::from_le_bytes([whole[10], whole[11]]);
        let mut buffers = vec![(at, bytes)];
        for _ in 1..count {
            // They are there with the first one.
            let (at, bytes, got) = self.used().expect("all buffers of a packet at once");
            whole.extend(self.guest.get(at, got as usize));
            buffers.push((at, bytes));
        }
        let packet = &whole[HEADER as usize..];
        let number = u32::from_le_bytes(packet[..4].try_into().unwrap());
        let right = packet.iter().enumerate().skip(4);
        assert!(
            right
                .into_iter()
                .all(|(at, byte)| *byte == byte_of(number, at))
        );
        (number, buffers)
    }

    fn nic(&self) -> NicReport {
        match self.rig.report(&self.socket).backing {
            Backing::Nic(nic) => nic,
            Backing::Disk(_) => panic!("it is a network device"),
        }
    }

    fn state(&self) -> DeviceState {
        self.rig.report(&self.socket).state
    }
}

/// Sends many packets into rings whose buffers go away all the time.
fn squeeze(receive: ReceiveConfig, seed: u64) {
    let on_fault = receive.on_fault;
    let mut random = SplitMix64::new(seed);
    let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF | F_EVENT_IDX);
    for _ in 0..48 {
        let bytes = 256 + u32::try_from(random.below(1500)).unwrap();
        let at = f.post(bytes);
        if random.below(2) == 0 {
            f.take_away(at, bytes);
        }
    }
    let (mut sent, mut expected, mut seen) = (0, 0, 0);
    while sent < 400 || f.nic().fault_drops + seen < 400 {
        if sent < 400 && u64::from(sent) < seen + f.nic().fault_drops + 40 {
            let bytes = 60 + u32::try_from(random.below(1400)).unwrap();
            f.send(sent, bytes);
            sent += 1;
            continue;
        }
        if f.nic().fault_drops + seen == 400 {
            break;
        }
        let lost = f.nic().fault_drops;
        let mut has_come = false;
        eventually("a packet, or the loss of one", || {
            has_come = f.connection.queues[RX].has_used(&f.guest);
            has_come || f.nic().fault_drops > lost
        });
        if !has_come {
            continue;
        }
        let (number, buffers) = f.packet();
        match on_fault {
            OnReceiveFault::Drop => assert!(number >= expected),
            _ => assert_eq!(number, expected),
        }
        expected = number + 1;
        seen += 1;
        for (at, bytes) in buffers {
            if random.below(2) == 0 {
                f.take_away(at, bytes);
            }
            f.post_at(at, bytes);
        }
    }
    let nic = f.nic();
    assert_eq!(nic.sent_packets, 400);
    assert_eq!((nic.send_drops, nic.link_drops), (0, 0));
    assert_eq!((nic.unfit_drops, nic.returned_buffers), (0, 0));
    assert_eq!(nic.stored_bytes, 0);
    assert_eq!(nic.fault_drops + seen, 400);
    if on_fault == OnReceiveFault::Drop {
        assert_eq!(nic.stored_packets, 0);
    } else {
        assert_eq!(nic.fault_drops, 0);
    }
    let report = f.rig.report(&f.socket);
    assert!(report.iopfs + report.prefaults > 0, "no buffer was absent");
    assert_eq!((report.parked_chains, report.timed_out_requests), (0, 0));
    assert_eq!(report.state, DeviceState::Connected);
}

#[test]
fn packets_into_buffers_that_go_away_all_the_time_are_lost_by_drop_alone() {
    for (seed, on_fault) in (0..).zip(ALL) {
        for prefault in [Prefault::Off, Prefault::Posted] {
            squeeze(receive(on_fault, prefault), seed);
        }
    }
}

#[test]
fn one_absent_buffer_while_the_host_is_silent_does_what_the_policy_says() {
    // Packets that come before the answer, that are stored, that are lost.
    for (on_fault, before, stored, lost) in [
        (OnReceiveFault::Drop, 0, 0, 3),
        (OnReceiveFault::Pause, 0, 3, 0),
        (OnReceiveFault::BackupRing, 0, 1, 0),
        (OnReceiveFault::OutOfOrder, 3, 0, 0),
    ] {
        let mut f = fixture(on_fault);
        f.rig.host.hold();
        let cold = f.cold(2048);
        f.post_at(cold, 2048);
        for _ in 0..8 {
            f.post(2048);
        }
        for number in 0..3 {
            f.send(number, 100);
        }
        for number in 0..before {
            let (came, buffers) = f.packet();
            assert_eq!(came, number);
            assert_ne!(buffers[0].0, cold);
        }
        let request = f.rig.host.next_request();
        assert_eq!(request.pages.start, FilePage::containing(cold));
        eventually("all packets are received", || f.nic().received_packets == 3);
        // A packet behind them on the other queue: the engine has had its turn.
        eventually("what is stored is stored", || {
            f.nic().stored_packets == stored
        });
        eventually("what is lost is lost", || f.nic().fault_drops == lost);
        assert!(f.used().is_none(), "{on_fault:?}");
        f.rig.host.let_go();
        eventually("the page is back", || f.is_there(cold));
        let first = u32::try_from(lost).unwrap() + before;
        for number in first..3 {
            let (came, buffers) = f.packet();
            assert_eq!(came, number, "{on_fault:?}");
            // The first of them has waited for its own buffer.
            assert_eq!(buffers[0].0 == cold, number == first);
        }
        f.send(3, 100);
        assert_eq!(f.packet().0, 3);
        assert_eq!(f.nic().stored_bytes, 0);
    }
}

#[test]
fn buffer_whose_content_is_lost_goes_back_empty_and_its_packet_does_not() {
    for on_fault in [
        OnReceiveFault::Pause,
        OnReceiveFault::BackupRing,
        OnReceiveFault::OutOfOrder,
    ] {
        let mut f = fixture(on_fault);
        f.rig.host.hold();
        let cold = f.cold(2048);
        f.post_at(cold, 2048);
        let warm = f.post(2048);
        f.post(2048);
        f.send(0, 100);
        f.rig.host.next_request();
        f.rig.host.answer(ResponseCode::InvalidRequest, 1);
        let (mut empty, mut came) = (None, None);
        for _ in 0..2 {
            match f.wait_used() {
                (at, _, 0) => empty = Some(at),
                (at, _, bytes) => came = Some((at, bytes)),
            }
        }
        assert_eq!(empty, Some(cold), "{on_fault:?}");
        assert_eq!(came, Some((warm, HEADER + 100)), "{on_fault:?}");
        assert_eq!(f.nic().returned_buffers, 1);
        assert_eq!(f.state(), DeviceState::Connected);
        f.rig.host.let_go();
        f.send(1, 100);
        assert_eq!(f.packet().0, 1);
    }
}

#[test]
fn pages_of_posted_buffers_have_no_time_out() {
    let rig = Rig::with_timeout(1, Some(Duration::from_millis(50)));
    let receive = receive(OnReceiveFault::Pause, Prefault::Off);
    let mut f = fixture_of(rig, receive, F_MRG_RXBUF);
    f.rig.host.hold();
    let cold = f.cold(2048);
    f.post_at(cold, 2048);
    f.send(0, 100);
    f.rig.host.next_request();
    // A packet to be sent waits longer than is allowed, and began to wait later.
    let header = f.guest.room(u64::from(HEADER));
    let data = f.cold(100);
    let parts = [(header, HEADER, 0), (data, 100, 0)];
    f.connection.queues[TX].submit(&f.guest, &parts);
    f.connection.queues[TX].wait_used(&f.guest);
    let report = f.rig.report(&f.socket);
    assert_eq!((report.timed_out_requests, report.failed_requests), (1, 1));
    assert_eq!(f.nic().fault_drops, 0);
    f.rig.host.let_go();
    assert_eq!(f.packet().0, 0);
}

#[test]
fn full_store_drops_and_counts_and_is_never_above_its_bound() {
    for on_fault in [
        OnReceiveFault::Pause,
        OnReceiveFault::BackupRing,
        OnReceiveFault::OutOfOrder,
    ] {
        let receive = ReceiveConfig {
            store_bytes: 128 << 10,
            ..receive(on_fault, Prefault::Off)
        };
        let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF);
        f.rig.host.hold();
        for _ in 0..60 {
            let cold = f.cold(2048);
            f.post_at(cold, 2048);
        }
        for number in 0..200 {
            f.send(number, 1400);
        }
        eventually("all are received", || {
            let nic = f.nic();
            nic.stored_packets + nic.fault_drops == 200
        });
        let nic = f.nic();
        // 12 bytes of header, and what a stored packet costs besides.
        assert_eq!(nic.stored_packets, (128 << 10) / (1400 + 12 + 64));
        assert!(nic.stored_peak_bytes <= 128 << 10 && nic.stored_bytes == nic.stored_peak_bytes);
        f.rig.host.let_go();
        for number in 0..60 {
            assert_eq!(f.packet().0, number, "{on_fault:?}");
        }
        // More are stored than there were buffers.
        for number in 60..u32::try_from(nic.stored_packets).unwrap() {
            f.post(2048);
            assert_eq!(f.packet().0, number, "{on_fault:?}");
        }
        assert_eq!(f.nic().stored_bytes, 0);
    }
}

#[test]
fn queue_that_stops_gives_back_all_that_it_has_read() {
    for on_fault in ALL {
        let mut f = fixture(on_fault);
        f.rig.host.hold();
        for at in 0..8 {
            match at % 2 {
                0 => {
                    let cold = f.cold(2048);
                    f.post_at(cold, 2048);
                }
                _ => {
                    f.post(2048);
                }
            }
        }
        for number in 0..3 {
            f.send(number, 100);
        }
        eventually("all are received", || f.nic().received_packets == 3);
        f.rig.host.next_request();
        let base = f.connection.frontend.get_vring_base(RX).unwrap();
        let (mut used, mut numbers) = (0, Vec::new());
        while let Some((at, _, got)) = f.used() {
            used += 1;
            if got > 0 {
                let at = at + u64::from(HEADER);
                numbers.push(f.guest.get(at, 4)[0]);
            }
        }
        // What is left in the ring is what was not read.
        assert_eq!(base, used, "{on_fault:?}");
        assert!(numbers.is_sorted());
        let nic = f.nic();
        let lost = nic.stop_drops + nic.fault_drops;
        assert_eq!(lost + numbers.len() as u64, 3, "{on_fault:?}");
        assert_eq!(nic.stored_bytes, 0);
        let report = f.rig.report(&f.socket);
        assert_eq!(report.parked_chains, 0);
        f.rig.host.let_go();
    }
}

#[test]
fn buffers_that_take_no_packet_go_back_empty() {
    let mut f = fixture(OnReceiveFault::OutOfOrder);
    let room = f.guest.room(4096);
    // To be read; shorter than a header; partly to be read; outside of memory.
    let parts: [&[(u64, u32, u16)]; 4] = [
        &[(room, 2048, 0)],
        &[(room, 11, WRITE)],
        &[(room, 16, 0), (room, 2048, WRITE)],
        &[(RAM_BYTES, 2048, WRITE)],
    ];
    for parts in parts {
        let head = f.connection.queues[RX].submit(&f.guest, parts);
        f.posted.insert(head, (parts[0].0, parts[0].1));
    }
    f.send(0, 100);
    for _ in 0..4 {
        assert_eq!(f.wait_used().2, 0);
    }
    assert_eq!(f.nic().returned_buffers, 4);
    f.post(2048);
    assert_eq!(f.packet().0, 0);
    assert_eq!(f.state(), DeviceState::Connected);
}

#[test]
fn buffers_may_be_on_one_page_and_as_small_as_a_header() {
    for on_fault in ALL {
        let mut f = fixture(on_fault);
        let page = f.guest.room(4096);
        f.guest.room(1);
        for at in 0..60 {
            f.post_at(page + 64 * at, 40);
        }
        f.send(0, 1400);
        let (number, buffers) = f.packet();
        assert_eq!((number, buffers.len()), (0, 1412_usize.div_ceil(40)));
        // What the driver will never have room for is lost, and counted.
        for (at, bytes) in buffers {
            f.post_at(at, bytes);
        }
        assert_eq!(f.nic().unfit_drops, 0);
    }
}

#[test]
fn packet_longer_than_all_that_can_be_posted_is_lost_alone() {
    let mut f = fixture(OnReceiveFault::OutOfOrder);
    let page = f.guest.room(4096);
    for at in 0..u64::from(QUEUE_SIZE) {
        f.post_at(page + 16 * at, 16);
    }
    f.send(0, 1400);
    eventually("it is lost", || f.nic().unfit_drops == 1);
    f.send(1, 100);
    assert_eq!(f.packet().0, 1);
}

#[test]
fn driver_without_mergeable_buffers_gets_a_packet_in_one() {
    let rig = Rig::new(1);
    let receive = receive(OnReceiveFault::BackupRing, Prefault::Posted);
    let mut f = fixture_of(rig, receive, 0);
    for _ in 0..4 {
        f.post(1526);
    }
    f.send(0, 1515);
    eventually("it is lost", || f.nic().unfit_drops == 1);
    f.send(1, 1514);
    assert_eq!(f.packet().0, 1);
}

#[test]
fn chain_that_cannot_be_read_stops_its_device_alone() {
    for on_fault in ALL {
        let mut f = fixture(on_fault);
        let disk = f.rig.add("disk", 1, pagetide_dpu::Writes::Taken);
        let at = f.guest.room(64);
        // Its own successor.
        let queue = &mut f.connection.queues[RX];
        queue.descriptor(&f.guest, 0, 0, (GPA + at, 64, WRITE | NEXT, 0));
        queue.publish(&f.guest, 0);
        f.send(0, 100);
        eventually("the device stops", || f.state() == DeviceState::Stopped);
        assert_eq!(f.rig.report(&disk).state, DeviceState::Listening);
        let id = f.rig.report(&f.socket).id;
        f.rig.dpu.remove(id).unwrap();
    }
}

#[test]
fn random_posted_chains_at_worst_stop_the_device() {
    let mut random = SplitMix64::new(2019);
    for round in 0..40 {
        let on_fault = ALL[round % 4];
        let receive = receive(on_fault, Prefault::Posted);
        let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF | F_INDIRECT);
        let at = f.guest.room(16 << 10);
        if random.below(2) == 0 {
            f.take_away(at, 8 << 10);
        }
        for index in 0..QUEUE_SIZE {
            let address = match random.below(8) {
                0 => random.next_u64(),
                _ => GPA + at + random.below(16 << 10),
            };
            let len = u32::try_from(random.below(2000)).unwrap();
            let flags = match random.below(4) {
                0 => u16::try_from(random.below(8)).unwrap(),
                _ => WRITE,
            };
            let next = u16::try_from(random.below(u64::from(QUEUE_SIZE) + 2)).unwrap();
            let fields = (address, len, flags, next);
            f.connection.queues[RX].descriptor(&f.guest, 0, index, fields);
        }
        for head in 0..QUEUE_SIZE {
            f.connection.queues[RX].publish(&f.guest, head);
        }
        for number in 0..8 {
            if f.state() == DeviceState::Stopped {
                break;
            }
            let parts = [(f.sending, HEADER + 100, 0)];
            f.guest.put(f.sending, &[0; 12]);
            f.connection.queues[TX].submit(&f.guest, &parts);
            eventually("it is sent, or the device has stopped", || {
                f.state() == DeviceState::Stopped
                    || f.rig.report(&f.socket).written_bytes == 100 * (number + 1)
            });
        }
        let id = f.rig.report(&f.socket).id;
        f.rig.dpu.remove(id).unwrap();
        assert!(f.rig.dpu.devices().is_empty());
    }
}

#[test]
fn packets_of_a_source_come_as_long_as_there_are_buffers() {
    let rig = Rig::new(1);
    let config = NicConfig {
        link: LinkConfig::Source { bytes: 64 },
        ..config(&rig, ReceiveConfig::default())
    };
    rig.dpu.add_nic(&config).unwrap();
    let mut guest = Guest::new();
    let mut connection = Connection::open_nic(&config.socket, &mut guest, 1, F_MRG_RXBUF);
    guest.domain(&rig);
    let room: Vec<u64> = (0..8).map(|_| guest.room(128)).collect();
    let mut next = 0_u64;
    for _ in 0..20 {
        for at in &room {
            connection.queues[RX].submit(&guest, &[(*at, 128, WRITE)]);
        }
        for at in &room {
            assert_eq!(connection.queues[RX].wait_used(&guest).1, 76);
            // The chains are used in their order, since all are present.
            assert_eq!(guest.get(*at + 26, 8), next.to_le_bytes());
            next += 1;
        }
    }
    // With nothing posted the engine sleeps.
    eventually("the engine sleeps", || rig.dpu.engine_sleeps() > 0);
}

#[test]
fn what_waits_for_a_front_end_that_goes_is_lost_and_not_given_to_the_next_one() {
    let mut f = fixture(OnReceiveFault::OutOfOrder);
    // Nothing is posted: they wait in the link, but for one that was taken from it.
    for number in 0..8 {
        f.send(number, 100);
    }
    let _rings = f.connection.hang_up();
    let (rig, socket) = (f.rig, f.socket);
    eventually("the front end has gone", || {
        rig.report(&socket).state == DeviceState::Listening
    });
    let mut f = connected_again(rig, socket, F_MRG_RXBUF, Guest::new());
    for number in 100..104 {
        f.post(2048);
        f.send(number, 100);
    }
    for number in 100..104 {
        assert_eq!(f.packet().0, number);
    }
    assert_eq!(f.nic().stop_drops, 8);
}

#[test]
fn guests_of_a_pair_on_two_engines_send_to_each_other_in_order() {
    let rig = Rig::new(2);
    let mut sides = Vec::new();
    for name in ["a", "b"] {
        let config = NicConfig {
            socket: rig.dir.path().join(name),
            link: LinkConfig::Pair { name: "p".into() },
            ..config(&rig, ReceiveConfig::default())
        };
        rig.dpu.add_nic(&config).unwrap();
        let mut guest = Guest::new();
        let connection = Connection::open_nic(&config.socket, &mut guest, 1, F_MRG_RXBUF);
        let domain = guest.domain(&rig);
        sides.push((guest, connection, domain));
    }
    let third = NicConfig {
        socket: rig.dir.path().join("c"),
        link: LinkConfig::Pair { name: "p".into() },
        ..config(&rig, ReceiveConfig::default())
    };
    assert!(rig.dpu.add_nic(&third).is_err());
    for (from, to) in [(0, 1), (1, 0)] {
        let sending = sides[from].0.room(2048);
        let posted: Vec<u64> = (0..32).map(|_| sides[to].0.room(2048)).collect();
        for round in 0..3_u8 {
            for (at, room) in posted.iter().enumerate() {
                let (guest, connection, domain) = &mut sides[to];
                // Half of them are out.
                if at % 2 == 0 {
                    take_away(domain, *room, 2048);
                }
                connection.queues[RX].submit(guest, &[(*room, 2048, WRITE)]);
            }
            for number in 0..32_u8 {
                let (guest, connection, _) = &mut sides[from];
                guest.put(sending, &[0; HEADER as usize]);
                guest.put(sending + u64::from(HEADER), &[round ^ 0x55, number]);
                connection.queues[TX].submit(guest, &[(sending, HEADER + 64, 0)]);
                connection.queues[TX].wait_used(guest);
            }
            let (guest, connection, _) = &mut sides[to];
            let mut heads = HashMap::new();
            for number in 0..32_u8 {
                let (head, len) = connection.queues[RX].wait_used(guest);
                assert_eq!(len, HEADER + 64);
                assert!(heads.insert(head, number).is_none());
                let at = connection.queues[RX].address_of(guest, head) - GPA;
                let start = guest.get(at + u64::from(HEADER), 2);
                assert_eq!(start, [round ^ 0x55, number]);
            }
        }
    }
    for device in rig.dpu.devices() {
        let Backing::Nic(nic) = &device.backing else {
            panic!("only network devices were added");
        };
        assert_eq!((nic.sent_packets, nic.received_packets), (96, 96));
        assert_eq!((nic.send_drops, nic.link_drops, nic.fault_drops), (0, 0, 0));
        assert_eq!(device.backing_error, None);
    }
}

#[test]
fn floor_keeps_the_next_buffers_wired_and_lets_them_go_with_their_use() {
    let receive = ReceiveConfig {
        wiring: Wiring::Floor { buffers: 4 },
        ..receive(OnReceiveFault::Drop, Prefault::Off)
    };
    let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF);
    let rings = f.rig.report(&f.socket).wired_bytes;
    for _ in 0..12 {
        let cold = f.cold(2048);
        f.post_at(cold, 2048);
    }
    // The engine sees them at the latest when something wakes it.
    f.send(0, 100);
    eventually("the first packet is received or lost", || {
        f.rig.report(&f.socket).read_bytes > 0 || f.nic().fault_drops > 0
    });
    let lost = f.nic().fault_drops;
    if lost == 0 {
        assert_eq!(f.packet().0, 0);
    }
    let wired = |f: &Fixture| f.rig.report(&f.socket).wired_bytes - rings;
    eventually("four buffers are wired", || wired(&f) == 4 * 4096);
    // No more than are wired: the next one may be lost before its buffer is.
    for number in 1..5 {
        f.send(number, 100);
    }
    for number in 1..5 {
        assert_eq!(f.packet().0, number);
    }
    eventually("the next are wired", || wired(&f) == 4 * 4096);
    assert_eq!(f.nic().fault_drops, lost);
    f.connection.frontend.get_vring_base(RX).unwrap();
    f.connection.frontend.get_vring_base(TX).unwrap();
    assert_eq!(f.rig.report(&f.socket).wired_bytes, 0);
}

#[test]
fn ring_at_rest_after_a_stream_has_its_next_buffers_wired() {
    for wiring in [Wiring::Floor { buffers: 8 }, Wiring::Fine] {
        let receive = ReceiveConfig {
            wiring,
            ..receive(OnReceiveFault::OutOfOrder, Prefault::Off)
        };
        let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF);
        let rings = wired(&f);
        for _ in 0..32 {
            f.post(2048);
        }
        for number in 0..300 {
            f.send(number, 100);
            assert_eq!(f.packet().0, number);
            f.post(2048);
        }
        let buffers = if wiring == Wiring::Fine { 32 } else { 8 };
        eventually("they are wired", || wired(&f) == rings + buffers * 4096);
    }
}

fn wired(f: &Fixture) -> u64 {
    f.rig.report(&f.socket).wired_bytes
}

#[test]
fn pin_down_cache_keeps_used_buffers_wired_up_to_its_bound() {
    const BOUND: u64 = 64 << 10;
    let receive = ReceiveConfig {
        wiring: Wiring::Coarse { bytes: BOUND },
        ..receive(OnReceiveFault::OutOfOrder, Prefault::Off)
    };
    let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF);
    let rings = wired(&f);
    let first = f.guest.room(2048);
    f.post_at(first, 2048);
    f.send(0, 100);
    assert_eq!(f.packet().0, 0);
    eventually("it stays wired after its use", || wired(&f) == rings + 4096);
    // While it is wired, nobody takes it.
    assert!(
        !f.domain
            .attributes()
            .unmap_ranges(&[FilePage::containing(first).single()])
            .is_empty()
    );
    for number in 1..40 {
        f.post(2048);
        f.send(number, 100);
        assert_eq!(f.packet().0, number);
        assert!(wired(&f) <= rings + BOUND);
    }
    eventually("the bound is reached", || wired(&f) == rings + BOUND);
    // What was used least recently may go.
    assert!(
        f.domain
            .attributes()
            .unmap_ranges(&[FilePage::containing(first).single()])
            .is_empty()
    );
    f.connection.frontend.get_vring_base(RX).unwrap();
    f.connection.frontend.get_vring_base(TX).unwrap();
    assert_eq!(wired(&f), 0);
}

#[test]
fn static_wiring_brings_back_and_keeps_all_memory_of_the_guest() {
    let receive = ReceiveConfig {
        wiring: Wiring::Static,
        ..receive(OnReceiveFault::Drop, Prefault::Off)
    };
    let mut f = fixture_of_cold(Rig::new(1), receive, F_MRG_RXBUF);
    let all = RAM_BYTES;
    let domain = Arc::clone(&f.domain);
    eventually("all of it is wired", || {
        domain.attributes().wired_pages() * 4096 == all
    });
    let everything = FilePage(0).run(all / 4096);
    assert!(!f.domain.attributes().unmap_ranges(&[everything]).is_empty());
    f.domain.attributes().unmap_all();
    assert!(
        f.domain
            .attributes()
            .bitmap()
            .allows(everything, Access::Write)
    );
    // No packet meets a fault, and it stays so while the front end says anew what memory there is.
    for number in 0..40 {
        if number % 10 == 9 {
            let regions = [region(&f.guest)];
            f.connection.frontend.set_mem_table(&regions).unwrap();
            assert_eq!(domain.attributes().wired_pages() * 4096, all);
        }
        f.post(2048);
        f.send(number, 300);
        assert_eq!(f.packet().0, number);
        assert_eq!(domain.attributes().wired_pages() * 4096, all);
    }
    assert_eq!(f.nic().fault_drops, 0);
    f.connection.frontend.get_vring_base(RX).unwrap();
    f.connection.frontend.get_vring_base(TX).unwrap();
    eventually("all of it may go", || {
        domain.attributes().wired_pages() == 0
    });
    assert_eq!(wired(&f), 0);
}

#[test]
fn static_wiring_goes_without_a_page_that_cannot_be_had_and_no_other() {
    const ABSENT: u64 = 2 << 20;
    let receive = ReceiveConfig {
        wiring: Wiring::Static,
        ..receive(OnReceiveFault::Drop, Prefault::Off)
    };
    let rig = Rig::new(1);
    let guest = Guest::new();
    let domain = guest.early_domain(&rig);
    take_away(&domain, RAM_BYTES - ABSENT, ABSENT);
    rig.host.hold();
    let f = connected(rig, receive, F_MRG_RXBUF, guest);
    let lost = FilePage::containing(RAM_BYTES - ABSENT / 3);
    eventually("all but that page is wired", || {
        while let Some(request) = f.rig.host.request_at_hand() {
            let code = match request.pages.iter().any(|page| page == lost) {
                true => ResponseCode::InvalidRequest,
                false => ResponseCode::Success,
            };
            f.rig.host.answer(code, 1);
        }
        f.domain.attributes().wired_pages() * 4096 == RAM_BYTES - 4096
    });
    assert!(
        !f.domain
            .attributes()
            .bitmap()
            .allows(lost.single(), Access::Read)
    );
}

/// Two absent pages, and buffers in them; the requests for the first buffer, as kind and first page.
fn requests_for(buffers: &[(u64, u32)], pages: u64) -> Vec<(RequestKind, u64, u64)> {
    let mut f = fixture(OnReceiveFault::Pause);
    let at = f.cold(2 * 4096);
    f.rig.host.hold();
    let before = now_ns();
    for (offset, bytes) in buffers {
        f.post_at(at + offset, *bytes);
    }
    f.send(0, 1000);
    let mut requests = Vec::new();
    while requests.iter().map(|(_, _, pages)| pages).sum::<u64>() < pages {
        let request = f.rig.host.next_request();
        let is_blank = matches!(request.kind, RequestKind::Blank | RequestKind::BlankAhead);
        assert!(
            !is_blank || (before..=now_ns()).contains(&request.sent_ns),
            "{request:?}"
        );
        let first = request.pages.start.0 - FilePage::containing(at).0;
        requests.push((request.kind, first, request.pages.len()));
    }
    requests.sort_by_key(|(_, first, _)| *first);
    f.rig.host.let_go();
    assert_eq!(f.packet().0, 0);
    requests
}

#[test]
fn page_wholly_in_posted_buffers_is_asked_for_without_its_content_and_no_other_is() {
    use RequestKind::{Blank, Demand};
    // One buffer over both; all but the first bytes of it; two buffers that share a page.
    let whole = [(Blank, 0, 2)];
    assert_eq!(requests_for(&[(0, 8192)], 2), whole);
    let tail = [(Demand, 0, 1), (Blank, 1, 1)];
    assert_eq!(requests_for(&[(100, 8092)], 2), tail);
    let head = [(Blank, 0, 1), (Demand, 1, 1)];
    assert_eq!(requests_for(&[(0, 8191)], 2), head);
    let neighbours = [(0, 1500), (1500, 4000)];
    assert_eq!(requests_for(&neighbours[..2], 1), [(Blank, 0, 1)]);
    assert_eq!(requests_for(&neighbours[..1], 1), [(Demand, 0, 1)]);
}

#[test]
fn page_of_a_filled_buffer_is_not_given_up_by_the_buffer_beside_it() {
    // The second buffer is filled while the first waits for a page of its own; its page goes away again.
    let receive = receive(OnReceiveFault::BackupRing, Prefault::Off);
    let mut f = fixture_of(Rig::new(1), receive, F_MRG_RXBUF);
    let cold = f.cold(4096);
    let shared = f.guest.room(4096);
    f.post_at(cold, 2048);
    f.post_at(shared, 2048);
    f.post_at(shared + 2048, 2048);
    f.rig.host.hold();
    f.send(0, 1000);
    assert_eq!(
        f.rig.host.next_request().pages.start,
        FilePage::containing(cold)
    );
    f.send(1, 1000);
    eventually("it is filled", || f.rig.report(&f.socket).requests == 3);
    f.take_away(shared, 4096);
    f.send(2, 1000);
    let request = f.rig.host.next_request();
    assert_eq!(request.pages.start, FilePage::containing(shared));
    assert_eq!(
        request.kind,
        RequestKind::Demand,
        "packet 1 lies in that page"
    );
    f.rig.host.let_go();
    for number in 0..3 {
        assert_eq!(f.packet().0, number);
    }
}
