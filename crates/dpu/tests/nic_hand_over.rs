// SPDX-License-Identifier: Apache-2.0
//! Network devices that one DPU parks and another goes on with, while packets come.

mod support;

use pagetide_dpu::{
    Dpu, DpuConfig, LinkConfig, NicConfig, OnReceiveFault, ParkedDevice, Prefault, RamPolicy,
    ReceiveConfig, SocketAccess,
};
use pagetide_sys::net::{namespace, packet::PacketSocket};
use pagetide_vpri::{DomainTable, Doorbell, HostEnd, LookUp};
use std::{collections::HashMap, path::Path, process::Command, sync::Arc, time::Duration};
use support::*;

const HEADER: u32 = 12;
const BUFFER: u32 = 2048;
const F_MRG_RXBUF: u64 = 1 << 15;
const F_MQ: u64 = 1 << 22;

/// A DPU that comes after another one in the same directory.
struct Next {
    dpu: Dpu,
    /// Nobody asks at them: no page is absent.
    _ends: Vec<HostEnd>,
}

impl Next {
    fn after(dir: &Path) -> Self {
        let bell = Arc::new(Doorbell::new().unwrap());
        let config = DpuConfig::new(dir.to_owned());
        let domains = Arc::new(DomainTable::new(config.engine_count));
        let (dpu, ends) = Dpu::start(&config, domains, &bell).unwrap();
        Self { dpu, _ends: ends }
    }

    /// A process that goes on with what another one has parked.
    fn hold(dir: &Path, parked: Vec<ParkedDevice>, config: &NicConfig) -> Self {
        let next = Self::after(dir);
        for device in parked {
            let mut device = Some(device);
            next.dpu.add_parked_nic(config, &mut device).unwrap();
            assert!(device.is_none());
        }
        next
    }

    fn park(self) -> Vec<ParkedDevice> {
        self.dpu.hush(Duration::from_secs(20)).unwrap();
        self.dpu.park()
    }
}

fn config(rig: &Rig, link: LinkConfig, pairs: u16, on_fault: OnReceiveFault) -> NicConfig {
    NicConfig {
        socket: rig.dir.path().join("nic.sock"),
        pairs,
        link,
        receive: ReceiveConfig {
            on_fault,
            prefault: Prefault::Off,
            ..ReceiveConfig::default()
        },
        look_up: LookUp::On,
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    }
}

/// A driver that knows which buffers the device has.
struct Driver {
    guest: Guest,
    connection: Connection,
    posted: HashMap<(usize, u16), u64>,
}

impl Driver {
    fn connect(config: &NicConfig) -> Self {
        let mut guest = Guest::new();
        let features = F_MRG_RXBUF | F_MQ | F_EVENT_IDX;
        let pairs = usize::from(config.pairs);
        let connection = Connection::open_nic(&config.socket, &mut guest, pairs, features);
        Self {
            guest,
            connection,
            posted: HashMap::new(),
        }
    }

    fn post(&mut self, pair: usize, at: u64) {
        let queue = &mut self.connection.queues[2 * pair];
        let head = queue.submit(&self.guest, &[(at, BUFFER, WRITE)]);
        self.posted.insert((pair, head), at);
    }

    fn send(&mut self, pair: usize, frame: &[u8]) {
        let at = self.guest.room(4096);
        let packet = [&[0; HEADER as usize][..], frame].concat();
        self.guest.put(at, &packet);
        let bytes = u32::try_from(packet.len()).unwrap();
        let queue = &mut self.connection.queues[2 * pair + 1];
        let head = queue.submit(&self.guest, &[(at, bytes, 0)]);
        assert_eq!(queue.wait_used(&self.guest), (head, 0));
    }

    /// The next packet on a pair, if there is one. It is in one buffer, which is posted again.
    fn poll(&mut self, pair: usize) -> Option<Vec<u8>> {
        let queue = &mut self.connection.queues[2 * pair];
        let (head, bytes) = queue.poll_used(&self.guest)?;
        let at = self.posted.remove(&(pair, head));
        let at = at.expect("a buffer that the device had");
        assert!(bytes > HEADER, "a buffer came back with {bytes} bytes");
        let whole = self.guest.get(at, bytes as usize);
        assert_eq!(whole[10..12], [1, 0]);
        self.post(pair, at);
        Some(whole[HEADER as usize..].to_vec())
    }

    fn next(&mut self, pair: usize) -> Vec<u8> {
        let mut packet = None;
        eventually("a packet", || {
            packet = self.poll(pair);
            packet.is_some()
        });
        packet.unwrap()
    }
}

/// A frame of a protocol that nobody answers, with a number.
fn frame(number: u32) -> Vec<u8> {
    let bytes = 60 + number as usize * 37 % 1400;
    let byte = |at: usize| u8::try_from((number as usize * 7 + at) % 256).unwrap();
    let mut frame: Vec<u8> = (0..bytes).map(byte).collect();
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame[14..18].copy_from_slice(&number.to_le_bytes());
    frame
}

fn number_of(packet: &[u8]) -> u32 {
    u32::from_le_bytes(packet[14..18].try_into().unwrap())
}

#[test]
fn packets_that_wait_for_buffers_or_are_not_reported_reach_the_guest_in_order_after_a_hand_over() {
    for on_fault in [
        OnReceiveFault::Pause,
        OnReceiveFault::BackupRing,
        OnReceiveFault::OutOfOrder,
    ] {
        let rig = Rig::new(1);
        let config = config(&rig, LinkConfig::Loop, 1, on_fault);
        rig.dpu.add_nic(&config).unwrap();
        let mut driver = Driver::connect(&config);
        let domain = driver.guest.domain(&rig);
        // Of six buffers the first is out, and all are if nothing else would hold a packet back.
        rig.host.hold();
        for at in 0..6 {
            let buffer = driver.guest.room(u64::from(BUFFER));
            if at == 0 || on_fault == OnReceiveFault::OutOfOrder {
                take_away(&domain, buffer, u64::from(BUFFER));
            }
            driver.post(0, buffer);
        }
        for number in 0..9 {
            driver.send(0, &frame(number));
        }
        eventually("all are taken from the link", || {
            let nic = rig.report(&config.socket);
            nic.backing.nic().unwrap().received_packets >= 6
        });
        assert_eq!(driver.poll(0), None, "{on_fault:?}");
        assert_eq!(rig.dpu.unrecorded(), None);
        rig.dpu.hush(Duration::from_secs(20)).unwrap();
        let mut parked = rig.dpu.park();
        for round in 0..3 {
            let next = Next::hold(rig.dir.path(), parked, &config);
            if round == 0 {
                // Nothing is received before it is certain that no other process goes on.
                driver.send(0, &frame(9));
                assert_eq!(driver.poll(0), None);
            } else {
                driver.send(0, &frame(9 * round + 9));
            }
            next.dpu.admit();
            for number in 9 * round..9 * round + 9 {
                let packet = driver.next(0);
                assert_eq!((number_of(&packet), &packet), (number, &frame(number)));
            }
            for number in 9 * round + 10..9 * round + 18 {
                driver.send(0, &frame(number));
            }
            parked = next.park();
        }
        assert_eq!(parked.len(), 1);
    }
}

#[test]
fn packets_between_two_guests_arrive_in_order_over_a_hand_over_of_both() {
    let rig = Rig::new(1);
    let link = LinkConfig::Pair { name: "p".into() };
    let configs = ["a.sock", "b.sock"].map(|name| NicConfig {
        socket: rig.dir.path().join(name),
        ..config(&rig, link.clone(), 2, OnReceiveFault::OutOfOrder)
    });
    let mut drivers = Vec::new();
    for config in &configs {
        rig.dpu.add_nic(config).unwrap();
        let driver = Driver::connect(config);
        driver.guest.domain(&rig);
        drivers.push(driver);
    }
    let mut b = drivers.pop().unwrap();
    let mut a = drivers.pop().unwrap();
    // A flow stays in the lane of the pair on which it is sent, here the second one.
    b.send(1, &frame(99));
    for number in 0..6 {
        a.send(1, &frame(number));
    }
    rig.dpu.hush(Duration::from_secs(20)).unwrap();
    let parked = rig.dpu.park();
    let next = Next::after(rig.dir.path());
    for (device, config) in parked.into_iter().zip(&configs) {
        next.dpu.add_parked_nic(config, &mut Some(device)).unwrap();
    }
    // Of the sender nothing is held back.
    a.send(1, &frame(6));
    next.dpu.admit();
    a.send(1, &frame(7));
    for pair in [0, 1].into_iter().cycle().take(16) {
        let buffer = b.guest.room(u64::from(BUFFER));
        b.post(pair, buffer);
    }
    let mut got = Vec::new();
    eventually("all have come", || {
        got.extend([0, 1].into_iter().filter_map(|pair| b.poll(pair)));
        got.len() == 8
    });
    let numbers: Vec<u32> = got.iter().map(|packet| number_of(packet)).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7]);
}

/// Runs `test` in a network of its own; skips loudly where that cannot be.
fn in_network(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        if let Err(error) = namespace::enter_new() {
            eprintln!("SKIPPED: a network namespace needs root: {error}");
            return;
        }
        if !ip("tuntap add dev t0 mode tap multi_queue") {
            eprintln!("SKIPPED: a TAP cannot be made here");
            return;
        }
        test();
    });
    thread.join().unwrap();
}

fn ip(line: &str) -> bool {
    let done = Command::new("ip").args(line.split(' ')).status();
    done.is_ok_and(|status| status.success())
}

/// Sends frames into the interface `from` before, while and after the device of `link` changes hands, and has each
/// received once, in order.
fn no_frame_is_lost(link: &LinkConfig, from: &str) {
    const PAIRS: usize = 2;
    let rig = Rig::new(1);
    let config = config(&rig, link.clone(), 2, OnReceiveFault::OutOfOrder);
    rig.dpu.add_nic(&config).unwrap();
    let mut driver = Driver::connect(&config);
    driver.guest.domain(&rig);
    for pair in 0..PAIRS {
        for _ in 0..24 {
            let buffer = driver.guest.room(u64::from(BUFFER));
            driver.post(pair, buffer);
        }
    }
    let host = PacketSocket::open(from).unwrap();
    let mut sent = 0;
    let mut send = |count: u32| {
        for _ in 0..count {
            host.send_whole(&[0; 10], &frame(sent)).unwrap();
            sent += 1;
        }
        sent
    };
    let mut expected = 0;
    let mut receive = |driver: &mut Driver, up_to: u32| {
        // All are of one flow, which is on one pair.
        while expected < up_to {
            let mut packet = None;
            eventually("a frame", || {
                packet = (0..PAIRS).find_map(|pair| driver.poll(pair));
                packet.is_some()
            });
            let packet = packet.unwrap();
            if packet[12..14] != [0x88, 0xb5] {
                // The kernel's own, as that an interface is up.
                continue;
            }
            assert_eq!((number_of(&packet), &packet), (expected, &frame(expected)));
            expected += 1;
        }
    };
    let up_to = send(40);
    receive(&mut driver, up_to - 10);
    rig.dpu.hush(Duration::from_secs(20)).unwrap();
    send(30);
    let mut parked = rig.dpu.park();
    for _ in 0..4 {
        send(50);
        // Another process begins with it and gives up, so that it is for somebody else after all.
        let copies = parked.iter().map(copy_of).collect();
        drop(Next::hold(rig.dir.path(), copies, &config));
        send(10);
        let next = Next::hold(rig.dir.path(), parked, &config);
        let up_to = send(30);
        next.dpu.admit();
        receive(&mut driver, up_to);
        // And what the guest sends, goes out.
        driver.send(1, &frame(7));
        send(20);
        parked = next.park();
    }
    let next = Next::hold(rig.dir.path(), parked, &config);
    let up_to = send(1);
    next.dpu.admit();
    receive(&mut driver, up_to);
    let report = next.dpu.devices().remove(0);
    let nic = report.backing.nic().unwrap();
    assert_eq!((nic.link_drops, nic.fault_drops, nic.send_drops), (0, 0, 0));
    assert_eq!(report.backing_error, None);
}

#[test]
fn no_frame_of_a_tap_is_lost_while_its_device_changes_hands() {
    in_network(|| {
        assert!(ip("link set t0 up"));
        no_frame_is_lost(&LinkConfig::Tap { name: "t0".into() }, "t0");
    });
}

#[test]
fn no_frame_of_a_packet_socket_is_lost_while_its_device_changes_hands() {
    in_network(|| {
        assert!(ip("link add v0 type veth peer name v1"));
        assert!(ip("link set v0 up") && ip("link set v1 up"));
        no_frame_is_lost(&LinkConfig::Packet { name: "v0".into() }, "v1");
    });
}

#[test]
fn tap_that_was_deleted_meanwhile_is_opened_again_by_the_next_dpu() {
    in_network(|| {
        assert!(ip("link set t0 up"));
        let rig = Rig::new(1);
        let link = LinkConfig::Tap { name: "t0".into() };
        let config = config(&rig, link, 1, OnReceiveFault::OutOfOrder);
        rig.dpu.add_nic(&config).unwrap();
        let mut driver = Driver::connect(&config);
        driver.guest.domain(&rig);
        rig.dpu.hush(Duration::from_secs(20)).unwrap();
        let parked = rig.dpu.park();
        assert!(ip("link del t0"));
        let next = Next::hold(rig.dir.path(), parked, &config);
        next.dpu.admit();
        driver.send(0, &frame(0));
        let error = || next.dpu.devices().remove(0).backing_error;
        eventually("its loss is told", || {
            error().is_some_and(|error| error.contains("t0"))
        });
        assert!(ip("tuntap add dev t0 mode tap multi_queue") && ip("link set t0 up"));
        eventually("it is back", || error().is_none());
    });
}
