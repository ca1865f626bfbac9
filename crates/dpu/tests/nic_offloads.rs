// SPDX-License-Identifier: Apache-2.0
//! Checksums, segmentation of TCP and long frames, in both directions, on interfaces of a real kernel in a network of
//! the test's own: whoever can do them does, and the other side gets nothing that it has not accepted.

mod support;

use pagetide_dpu::{LinkConfig, NicConfig, RamPolicy, ReceiveConfig, SocketAccess};
use pagetide_sys::net::{
    namespace,
    packet::{PacketSocket, ROOM_BYTES},
};
use pagetide_vpri::LookUp;
use std::{collections::HashMap, process::Command};
use support::*;

const HEADER: usize = 12;
const BUFFER: u32 = 4096;
const F_GUEST_CSUM: u64 = 1 << 1;
const F_GUEST_TSO4: u64 = 1 << 7;
const F_CSUM: u64 = 1;
const F_HOST_TSO4: u64 = 1 << 11;
const F_MRG_RXBUF: u64 = 1 << 15;
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
/// Where TCP begins in the packets here.
const TCP_AT: usize = 14 + 20;
const HEADERS: usize = TCP_AT + 20;
const MSS: usize = 1400;

/// Runs `test` in a network of its own; skips loudly where that cannot be.
fn in_network(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        if let Err(error) = namespace::enter_new() {
            eprintln!("SKIPPED: a network namespace needs root: {error}");
            return;
        }
        if !ip("tuntap add dev t0 mode tap") {
            eprintln!("SKIPPED: a TAP cannot be made here");
            return;
        }
        assert!(ip("link set t0 mtu 9000") && ip("link set t0 up"));
        test();
    });
    thread.join().unwrap();
}

fn ip(line: &str) -> bool {
    let done = Command::new("ip").args(line.split(' ')).status();
    done.is_ok_and(|status| status.success())
}

struct Fixture {
    rig: Rig,
    config: NicConfig,
    guest: Guest,
    connection: Connection,
    posted: HashMap<u16, u64>,
}

impl Fixture {
    fn new(link: LinkConfig, features: u64) -> Self {
        let rig = Rig::new(1);
        let config = NicConfig {
            socket: rig.dir.path().join("nic.sock"),
            link,
            receive: ReceiveConfig::default(),
            pairs: 1,
            look_up: LookUp::On,
            ram: RamPolicy::default(),
            access: SocketAccess::default(),
        };
        rig.dpu.add_nic(&config).unwrap();
        let mut guest = Guest::new();
        let connection =
            Connection::open_nic(&config.socket, &mut guest, 1, features | F_MRG_RXBUF);
        guest.domain(&rig);
        let mut this = Self {
            rig,
            config,
            guest,
            connection,
            posted: HashMap::new(),
        };
        for _ in 0..QUEUE_SIZE {
            let at = this.guest.room(u64::from(BUFFER));
            this.post(at);
        }
        this
    }

    fn tap(features: u64) -> Self {
        Self::new(LinkConfig::Tap { name: "t0".into() }, features)
    }

    fn post(&mut self, at: u64) {
        let head = self.connection.queues[0].submit(&self.guest, &[(at, BUFFER, WRITE)]);
        self.posted.insert(head, at);
    }

    fn used(&mut self) -> Vec<u8> {
        let (head, bytes) = self.connection.queues[0].wait_used(&self.guest);
        let at = self.posted.remove(&head).expect("it was posted");
        let got = self.guest.get(at, bytes as usize);
        self.post(at);
        got
    }

    /// The next packet of the test, with its header; the kernel's own are skipped.
    fn packet(&mut self) -> Vec<u8> {
        loop {
            let mut whole = self.used();
            let buffers = u16::from_le_bytes([whole[10], whole[11]]);
            for _ in 1..buffers {
                let more = self.used();
                whole.extend(more);
            }
            if whole[HEADER + 6..HEADER + 12] == MAC {
                return whole;
            }
        }
    }

    fn send(&mut self, whole: &[u8]) {
        let at = self.guest.room(whole.len() as u64);
        self.guest.put(at, whole);
        let bytes = u32::try_from(whole.len()).unwrap();
        let queue = &mut self.connection.queues[1];
        let head = queue.submit(&self.guest, &[(at, bytes, 0)]);
        assert_eq!(queue.wait_used(&self.guest), (head, 0));
    }
}

/// Who sends packets of the test.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

fn sum(bytes: &[u8]) -> u32 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

/// The sum of the pseudo header of TCP of so many bytes.
fn pseudo(packet: &[u8], tcp_bytes: usize) -> u32 {
    sum(&packet[26..34]) + 6 + u32::try_from(tcp_bytes).unwrap()
}

/// TCP over IPv4 with that payload, whose checksum is left to others: the header for that, and the packet.
fn tcp(payload: &[u8]) -> ([u8; 10], Vec<u8>) {
    let mut packet = vec![0xff; 6];
    packet.extend(MAC);
    packet.extend([8, 0]);
    let bytes = u16::try_from(40 + payload.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x45, 0, bytes[0], bytes[1], 0, 1, 0, 0, 64, 6, 0, 0];
    ip.extend([10, 9, 9, 1, 10, 9, 9, 2]);
    let checksum = !u16::try_from(sum(&ip)).unwrap();
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(ip);
    let mut head = vec![
        0x12, 0x34, 0x56, 0x78, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x18, 1, 0,
    ];
    head.extend([0; 4]);
    packet.extend(head);
    packet.extend(payload);
    let started = pseudo(&packet, 20 + payload.len());
    let started = u16::try_from((started & 0xffff) + (started >> 16)).unwrap();
    packet[TCP_AT + 16..TCP_AT + 18].copy_from_slice(&started.to_be_bytes());
    let mut header = [0; 10];
    header[0] = NEEDS_CSUM;
    header[6..8].copy_from_slice(&u16::try_from(TCP_AT).unwrap().to_le_bytes());
    header[8..10].copy_from_slice(&16_u16.to_le_bytes());
    if payload.len() > MSS {
        header[1] = GSO_TCPV4;
        header[2..4].copy_from_slice(&u16::try_from(HEADERS).unwrap().to_le_bytes());
        header[4..6].copy_from_slice(&u16::try_from(MSS).unwrap().to_le_bytes());
    }
    (header, packet)
}

fn payload(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| u8::try_from(at * 31 % 253).unwrap())
        .collect()
}

/// Panics unless the checksum of a packet of TCP is right.
fn has_right_checksum(packet: &[u8]) {
    let bytes = usize::from(u16::from_be_bytes([packet[16], packet[17]])) - 20;
    let tcp = &packet[TCP_AT..TCP_AT + bytes];
    let all = pseudo(packet, bytes) + sum(tcp);
    assert_eq!((all & 0xffff) + (all >> 16), 0xffff);
    assert_eq!(sum(&packet[14..34]), 0xffff);
}

/// Packets of TCP that together have `expected`, each complete and right by itself.
fn segments(mut next: impl FnMut() -> Vec<u8>, expected: &[u8]) {
    let mut joined: Vec<u8> = Vec::new();
    while joined.len() < expected.len() {
        let packet = next();
        has_right_checksum(&packet);
        let sequence = u32::from_be_bytes(packet[TCP_AT + 4..TCP_AT + 8].try_into().unwrap());
        assert_eq!(sequence as usize, joined.len());
        let end = 14 + usize::from(u16::from_be_bytes([packet[16], packet[17]]));
        assert!(end - HEADERS <= MSS);
        joined.extend(&packet[HEADERS..end]);
    }
    assert!(joined == expected);
}

#[test]
fn driver_gets_checksums_and_segments_undone_exactly_if_it_has_accepted_them() {
    in_network(|| {
        let host = PacketSocket::open("t0").unwrap();
        for features in [0, F_GUEST_CSUM, F_GUEST_CSUM | F_GUEST_TSO4] {
            let mut f = Fixture::tap(features);
            for bytes in [100, 9 * MSS + 17] {
                let payload = payload(bytes);
                let (header, packet) = tcp(&payload);
                host.send_whole(&header, &packet).unwrap();
                let is_long = bytes > MSS;
                if features & F_GUEST_TSO4 != 0 || (!is_long && features & F_GUEST_CSUM != 0) {
                    let whole = f.packet();
                    assert_eq!(whole[0] & NEEDS_CSUM, NEEDS_CSUM, "{features:#x}");
                    assert_eq!(whole[1], if is_long { GSO_TCPV4 } else { 0 });
                    assert!(whole[HEADER..] == packet);
                } else {
                    let next = || {
                        let mut whole = f.packet();
                        assert_eq!(whole[1], 0, "{features:#x}");
                        if whole[0] & NEEDS_CSUM != 0 {
                            assert_ne!(features & F_GUEST_CSUM, 0);
                            complete(&mut whole[HEADER..]);
                        }
                        whole.split_off(HEADER)
                    };
                    segments(next, &payload);
                }
            }
            assert_eq!(f.rig.report(&f.config.socket).backing_error, None);
            drop(f);
        }
    });
}

/// Computes a checksum that was left, as a driver does.
fn complete(packet: &mut [u8]) {
    let end = 14 + usize::from(u16::from_be_bytes([packet[16], packet[17]]));
    let checksum = !u16::try_from(sum(&packet[TCP_AT..end])).unwrap();
    packet[TCP_AT + 16..TCP_AT + 18].copy_from_slice(&checksum.to_be_bytes());
}

#[test]
fn what_a_driver_leaves_undone_reaches_the_host_whole() {
    in_network(|| {
        let host = PacketSocket::open("t0").unwrap();
        let mut f = Fixture::tap(F_CSUM | F_HOST_TSO4);
        for bytes in [100, 9 * MSS + 17, 64_000] {
            let payload = payload(bytes);
            let (header, packet) = tcp(&payload);
            f.send(&[&header[..], &[0; 2], &packet].concat());
            let mut buffer = vec![0; 70_000];
            let mut got = Vec::new();
            eventually("it comes", || {
                let Some(bytes) = host.receive(&mut buffer).unwrap() else {
                    return false;
                };
                got = buffer[..ROOM_BYTES + bytes].to_vec();
                got[ROOM_BYTES + 6..ROOM_BYTES + 12] == MAC
            });
            // The kernel has not touched it yet: what is left to do is told.
            assert_eq!((got[0] & NEEDS_CSUM, got[1]), (header[0], header[1]));
            assert!(got[ROOM_BYTES..] == packet);
        }
        let report = f.rig.report(&f.config.socket);
        let nic = report.backing.nic().unwrap();
        assert_eq!((nic.sent_packets, nic.send_drops), (3, 0));
    });
}

#[test]
fn frames_of_nine_thousand_bytes_pass_both_ways() {
    in_network(|| {
        let host = PacketSocket::open("t0").unwrap();
        let mut f = Fixture::tap(0);
        let mut frame = vec![0xff; 6];
        frame.extend(MAC);
        frame.extend([0x88, 0xb5]);
        frame.extend(payload(9000));
        for _ in 0..20 {
            host.send_whole(&[0; 10], &frame).unwrap();
            let whole = f.packet();
            assert_eq!(whole[10..12], [3, 0], "three buffers");
            assert!(whole[HEADER..] == frame);
            f.send(&[&[0; HEADER][..], &frame].concat());
            let mut buffer = vec![0; 70_000];
            eventually("it comes", || {
                let got = host.receive(&mut buffer).unwrap();
                got.is_some_and(|got| buffer[ROOM_BYTES..ROOM_BYTES + got] == frame)
            });
        }
    });
}

#[test]
fn packet_socket_cuts_long_packets_for_a_driver_that_does_not_take_them() {
    in_network(|| {
        assert!(ip("link add v0 type veth peer name v1"));
        assert!(ip("link set v0 up") && ip("link set v1 up"));
        let host = PacketSocket::open("v1").unwrap();
        for features in [0, F_GUEST_CSUM | F_GUEST_TSO4] {
            let mut f = Fixture::new(LinkConfig::Packet { name: "v0".into() }, features);
            let payload = payload(20 * MSS + 1);
            let (header, packet) = tcp(&payload);
            host.send_whole(&header, &packet).unwrap();
            if features == 0 {
                let next = || {
                    let mut whole = f.packet();
                    assert_eq!(whole[..10], [0; 10]);
                    whole.split_off(HEADER)
                };
                segments(next, &payload);
            } else {
                let whole = f.packet();
                assert_eq!(whole[1], GSO_TCPV4);
                assert!(whole[HEADER..] == packet);
            }
            let report = f.rig.report(&f.config.socket);
            assert_eq!(report.backing.nic().unwrap().link_drops, 0);
        }
    });
}
