// SPDX-License-Identifier: Apache-2.0
//! A network device on interfaces of a real kernel, in a network of the test's own.

mod support;

use pagetide_dpu::{
    DpuError, LinkConfig, LinkError, NicConfig, NicReport, RamPolicy, ReceiveConfig, SocketAccess,
};
use pagetide_sys::net::{
    namespace,
    packet::{PacketSocket, ROOM_BYTES},
};
use pagetide_vpri::LookUp;
use std::{path::PathBuf, process::Command};
use support::*;

const HEADER: u32 = 12;
const F_MQ: u64 = 1 << 22;

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

struct Fixture {
    rig: Rig,
    socket: PathBuf,
    guest: Guest,
    connection: Connection,
}

fn config(rig: &Rig, name: &str, pairs: u16, link: LinkConfig) -> NicConfig {
    NicConfig {
        socket: rig.dir.path().join(name),
        link,
        receive: ReceiveConfig::default(),
        pairs,
        look_up: LookUp::On,
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    }
}

fn tap() -> LinkConfig {
    LinkConfig::Tap { name: "t0".into() }
}

impl Fixture {
    fn new(link: LinkConfig) -> Self {
        let rig = Rig::new(2);
        let config = config(&rig, "nic.sock", 2, link);
        rig.dpu.add_nic(&config).unwrap();
        let mut guest = Guest::new();
        let connection = Connection::open_nic(&config.socket, &mut guest, 2, F_MQ);
        guest.domain(&rig);
        Self {
            rig,
            socket: config.socket,
            guest,
            connection,
        }
    }

    /// Sends a packet of a protocol that nobody answers, with a mark, on a pair.
    fn send(&mut self, pair: usize, bytes: u32, mark: u8) {
        let header = self.guest.room(u64::from(HEADER));
        let data = self.guest.room(u64::from(bytes));
        self.guest.put(data, &frame(bytes, mark));
        let parts = [(header, HEADER, 0), (data, bytes, 0)];
        let queue = &mut self.connection.queues[2 * pair + 1];
        let head = queue.submit(&self.guest, &parts);
        assert_eq!(queue.wait_used(&self.guest), (head, 0));
    }

    fn nic(&self) -> NicReport {
        self.rig.report(&self.socket).backing.nic().unwrap().clone()
    }

    fn error(&self) -> Option<String> {
        self.rig.report(&self.socket).backing_error
    }
}

fn frame(bytes: u32, mark: u8) -> Vec<u8> {
    let mut frame = vec![mark; bytes as usize];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, mark]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

fn receives(host: &PacketSocket, bytes: u32, mark: u8) {
    let mut buffer = vec![0; 70_000];
    eventually("the packet comes", || {
        match host.receive(&mut buffer).unwrap() {
            Some(got) => buffer[ROOM_BYTES..ROOM_BYTES + got] == frame(bytes, mark),
            None => false,
        }
    });
}

#[test]
fn packets_of_all_pairs_come_out_of_a_tap_and_another_device_does_not_get_it() {
    in_network(|| {
        assert!(ip("link set t0 mtu 9000") && ip("link set t0 up"));
        let mut f = Fixture::new(tap());
        let host = PacketSocket::open("t0").unwrap();
        for (pair, bytes, mark) in [(0, 60, 1), (1, 1514, 2), (0, 9014, 3), (1, 9014, 4)] {
            f.send(pair, bytes, mark);
            receives(&host, bytes, mark);
        }
        let nic = f.nic();
        assert_eq!((nic.sent_packets, nic.send_drops), (4, 0));
        assert_eq!((nic.link.to_string().as_str(), nic.pairs), ("tap t0", 2));
        let other = config(&f.rig, "other.sock", 1, tap());
        let refused = f.rig.dpu.add_nic(&other);
        assert!(matches!(refused, Err(DpuError::Link(LinkError::Tap(_)))));
        let id = f.rig.report(&f.socket).id;
        f.rig.dpu.remove(id).unwrap();
        f.rig.dpu.add_nic(&other).unwrap();
    });
}

#[test]
fn tap_that_is_deleted_loses_packets_until_it_is_back() {
    in_network(|| {
        assert!(ip("link set t0 up"));
        let mut f = Fixture::new(tap());
        f.send(0, 60, 1);
        assert!(ip("link del t0"));
        // The loss is noticed with the next packet at the latest.
        f.send(1, 60, 2);
        eventually("the error is told", || {
            f.error().is_some_and(|error| error.contains("t0"))
        });
        f.send(0, 60, 3);
        assert!(f.nic().send_drops >= 2);
        assert!(ip("tuntap add dev t0 mode tap multi_queue") && ip("link set t0 up"));
        eventually("it is back", || f.error().is_none());
        let host = PacketSocket::open("t0").unwrap();
        for pair in [0, 1] {
            f.send(pair, 1514, 4 + u8::try_from(pair).unwrap());
            receives(&host, 1514, 4 + u8::try_from(pair).unwrap());
        }
    });
}

#[test]
fn packets_go_out_at_an_interface() {
    in_network(|| {
        assert!(ip("link add v0 type veth peer name v1"));
        assert!(ip("link set v0 up") && ip("link set v1 up"));
        let mut f = Fixture::new(LinkConfig::Packet { name: "v0".into() });
        let host = PacketSocket::open("v1").unwrap();
        for (pair, mark) in [(0, 1), (1, 2)] {
            f.send(pair, 1514, mark);
            receives(&host, 1514, mark);
        }
        assert_eq!(f.nic().sent_packets, 2);
        // Down, it loses packets; up again, it goes on by itself.
        assert!(ip("link set v0 down"));
        f.send(0, 60, 3);
        assert_eq!(f.nic().send_drops, 1);
        assert!(ip("link set v0 up"));
        eventually("packets go out again", || {
            let before = f.nic().sent_packets;
            f.send(0, 60, 4);
            f.nic().sent_packets > before
        });
    });
}

#[test]
fn link_that_is_not_there_is_refused_with_its_name() {
    in_network(|| {
        let rig = Rig::new(1);
        let named = |name: &str| name.to_owned();
        for link in [
            LinkConfig::Tap {
                name: named("none"),
            },
            LinkConfig::Packet {
                name: named("none"),
            },
        ] {
            let refused = rig
                .dpu
                .add_nic(&config(&rig, "a.sock", 1, link))
                .unwrap_err();
            assert!(refused.to_string().contains("none"), "{refused}");
        }
        let lo = LinkConfig::Tap { name: named("lo") };
        let refused = rig.dpu.add_nic(&config(&rig, "a.sock", 1, lo)).unwrap_err();
        assert!(refused.to_string().contains("lo is no TAP"), "{refused}");
        assert!(rig.dpu.devices().is_empty());
    });
}

#[test]
fn tap_that_is_full_loses_packets_that_are_not_ours_to_count_and_goes_on() {
    in_network(|| {
        assert!(ip("link set t0 up"));
        let mut f = Fixture::new(tap());
        let host = PacketSocket::open("t0").unwrap();
        // Nobody has posted a buffer: far more than any queue of the kernel's holds.
        let mut taken = 0;
        for number in 0..4000_u32 {
            let mut frame = frame(100, 9);
            frame[14..18].copy_from_slice(&number.to_le_bytes());
            match host.send_whole(&[0; 10], &frame) {
                Ok(()) => taken += 1,
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOBUFS)),
            }
        }
        assert!(taken > 100, "{taken}");
        let nic = f.nic();
        assert_eq!((nic.fault_drops, nic.stored_packets), (0, 0));
        let at = f.guest.room(2 * 4096);
        let mut last = None;
        for _ in 0..200 {
            // All are of one flow; which of the pairs it is on, the kernel has decided.
            let mut used = None;
            for pair in 0..2 {
                if f.connection.queues[2 * pair].next_avail
                    == f.connection.queues[2 * pair].next_used
                {
                    f.connection.queues[2 * pair]
                        .submit(&f.guest, &[(at + 4096 * pair as u64, 2048, WRITE)]);
                }
            }
            eventually("a frame", || {
                used = (0..2).find_map(|pair| {
                    f.connection.queues[2 * pair]
                        .poll_used(&f.guest)
                        .map(|used| (pair, used))
                });
                used.is_some()
            });
            let (pair, (_, bytes)) = used.unwrap();
            let whole = f.guest.get(at + 4096 * pair as u64, bytes as usize);
            if whole[24..26] != [0x88, 0xb5] {
                continue;
            }
            let number = u32::from_le_bytes(whole[26..30].try_into().unwrap());
            assert!(last < Some(number), "{last:?}, then {number}");
            last = Some(number);
        }
        assert!(last.is_some());
        f.send(0, 60, 1);
        assert_eq!(f.error(), None);
    });
}
