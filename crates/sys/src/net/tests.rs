// SPDX-License-Identifier: Apache-2.0
//! TAPs and packet sockets of a real kernel, in a network of the test's own.

use super::{
    PARTS_MAX, interface, namespace,
    packet::{self, PacketError, PacketSocket},
    tap::{self, Receiving, TapError, TapOffloads, TapQueue},
};
use crate::lent::LentMemory;
use std::{
    os::fd::AsFd,
    process::Command,
    time::{Duration, Instant},
};
use vm_memory::VolatileSlice;

/// Runs `test` in a network of its own, in which `setup` was done; skips loudly where that cannot be.
fn in_network(setup: &[&str], test: impl FnOnce() + Send + 'static) {
    let setup: Vec<String> = setup.iter().map(|line| (*line).to_owned()).collect();
    let thread = std::thread::spawn(move || {
        if crate::emulated::skip() {
            return;
        }
        if let Err(error) = namespace::enter_new() {
            eprintln!("SKIPPED: a network namespace needs root: {error}");
            return;
        }
        for line in &setup {
            let done = Command::new("ip").args(line.split(' ')).status();
            if !done.is_ok_and(|status| status.success()) {
                eprintln!("SKIPPED: `ip {line}` does not work here");
                return;
            }
        }
        test();
    });
    thread.join().unwrap();
}

fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

/// An Ethernet packet of a protocol that nobody answers.
fn frame(bytes: usize, mark: u8) -> Vec<u8> {
    let mut frame = vec![mark; bytes];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, mark]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// A packet in guest memory, in so many parts.
fn parts_of<'a>(memory: &'a mut LentMemory, frame: &[u8], count: usize) -> Vec<VolatileSlice<'a>> {
    let bytes = memory.bytes_mut(0, frame.len() as u64).unwrap();
    bytes.copy_from_slice(frame);
    let each = frame.len().div_ceil(count);
    bytes.chunks_mut(each).map(VolatileSlice::from).collect()
}

fn receive_marked(socket: &PacketSocket, mark: u8) -> Vec<u8> {
    let mut buffer = vec![0; 70_000];
    eventually("a packet comes", || {
        let bytes = socket.receive(&mut buffer).unwrap()?;
        let packet = &buffer[packet::ROOM_BYTES..packet::ROOM_BYTES + bytes];
        (packet[11] == mark).then(|| packet.to_vec())
    })
}

#[test]
fn what_cannot_be_opened_says_why() {
    let setup = [
        "tuntap add dev one mode tap",
        "tuntap add dev many mode tap multi_queue",
        "tuntap add dev tun0 mode tun",
    ];
    in_network(&setup, || {
        assert!(matches!(
            tap::open_queues("none", 1),
            Err(TapError::Missing(_))
        ));
        for name in ["lo", "tun0"] {
            assert!(
                matches!(tap::open_queues(name, 1), Err(TapError::NotATap { .. })),
                "{name}"
            );
        }
        let error = tap::open_queues("one", 2).unwrap_err();
        assert!(matches!(error, TapError::OneQueue { queues: 2, .. }));
        assert_eq!(interface::look_up("none").unwrap(), None);
        for (name, queues) in [("one", 1), ("many", 3)] {
            let (held, index) = tap::open_queues(name, queues).unwrap();
            assert_eq!(interface::look_up(name).unwrap().unwrap().index, index);
            assert!(
                matches!(tap::open_queues(name, 1), Err(TapError::Busy(_))),
                "{name}"
            );
            // A queue that receives nothing is still ours.
            held[0].set_receiving(Receiving::No).unwrap();
            assert!(
                matches!(tap::open_queues(name, 1), Err(TapError::Busy(_))),
                "{name}"
            );
            drop(held);
            drop(tap::open_queues(name, 1).unwrap());
        }
        assert!(matches!(
            PacketSocket::open("none"),
            Err(PacketError::Missing(_))
        ));
    });
}

#[test]
fn packets_cross_a_tap_both_ways_however_they_are_cut() {
    let setup = [
        "tuntap add dev t0 mode tap multi_queue",
        "link set t0 mtu 9000",
        "link set t0 up",
    ];
    in_network(&setup, || {
        let (queues, _) = tap::open_queues("t0", 2).unwrap();
        let host = PacketSocket::open("t0").unwrap();
        let mut memory = LentMemory::new("packet", 1 << 20).unwrap();
        for (mark, count) in [(1, 1), (2, 7), (3, PARTS_MAX)] {
            let sent = frame(9014, mark);
            let parts = parts_of(&mut memory, &sent, count);
            queues[usize::from(mark % 2)]
                .send(&[0; 12], parts.into_iter())
                .unwrap();
            assert_eq!(receive_marked(&host, mark), sent);
        }
        let parts = parts_of(&mut memory, &frame(20 * (PARTS_MAX + 1), 4), PARTS_MAX + 1);
        let error = queues[0].send(&[0; 12], parts.into_iter()).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        let whole = [&[0; 12][..], &frame(60, 5)].concat();
        queues[0].send_whole(&whole).unwrap();
        assert_eq!(receive_marked(&host, 5), frame(60, 5));

        // Only queues that receive are given packets.
        queues[0].set_receiving(Receiving::No).unwrap();
        for mark in 10..30 {
            host.send_whole(&[0; 10], &frame(1000, mark)).unwrap();
            let got = read_marked(&queues[1], mark);
            assert_eq!(got, frame(1000, mark));
        }
        queues[0].set_receiving(Receiving::Yes).unwrap();
        queues[0].set_offloads(TapOffloads::default()).unwrap();
    });
}

fn read_marked(queue: &TapQueue, mark: u8) -> Vec<u8> {
    let mut buffer = vec![0; 70_000];
    eventually("a packet comes", || {
        let bytes = queue.receive(&mut buffer).unwrap()?;
        let packet = &buffer[tap::HEADER_BYTES..bytes];
        (packet[11] == mark).then(|| packet.to_vec())
    })
}

#[test]
fn queue_of_a_tap_that_is_deleted_says_so() {
    let setup = ["tuntap add dev t0 mode tap multi_queue", "link set t0 up"];
    in_network(&setup, || {
        let (queues, index) = tap::open_queues("t0", 1).unwrap();
        let deleted = Command::new("ip")
            .args(["link", "del", "t0"])
            .status()
            .unwrap();
        assert!(deleted.success());
        let mut buffer = [0; 100];
        let error = queues[0].receive(&mut buffer).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
        let error = queues[0].send_whole(&buffer).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
        let again = ["tuntap", "add", "dev", "t0", "mode", "tap", "multi_queue"];
        assert!(Command::new("ip").args(again).status().unwrap().success());
        let (_queues, other) = tap::open_queues("t0", 1).unwrap();
        assert_ne!(other, index);
        assert!(queues[0].as_fd().try_clone_to_owned().is_ok());
    });
}

#[test]
fn packets_cross_a_pair_of_interfaces_and_tags_are_kept() {
    let setup = [
        "link add v0 type veth peer name v1",
        "link set v0 up",
        "link set v1 up",
    ];
    in_network(&setup, || {
        let one = PacketSocket::open("v0").unwrap();
        let other = PacketSocket::open("v1").unwrap();
        let mut memory = LentMemory::new("packet", 1 << 20).unwrap();
        for (mark, tagged) in [(1, false), (2, true)] {
            let mut sent = frame(1000, mark);
            if tagged {
                sent.splice(12..12, [0x81, 0, 0x20, 7]);
            }
            let parts = parts_of(&mut memory, &sent, 3);
            one.send(&[0; 10], parts.into_iter()).unwrap();
            assert_eq!(receive_marked(&other, mark), sent);
        }
        // It does not hear itself.
        let mut buffer = vec![0; 70_000];
        while let Some(bytes) = one.receive(&mut buffer).unwrap() {
            let packet = &buffer[packet::ROOM_BYTES..packet::ROOM_BYTES + bytes];
            assert!(!matches!(packet[11], 1 | 2));
        }
    });
}
