// SPDX-License-Identifier: Apache-2.0
//! Live upgrades of a daemon while network devices of its send and receive all the time, by front ends of our own:
//! every packet comes once, whole, and in order, also those that wait for their buffers at that moment.

mod upgrading;

use pagetide_frontend::nic::{Merging, NET_HEADER_BYTES, NIC_RINGS_BYTES, Nic, Way};
use pagetide_sys::mapping::SharedMapping;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::Value;
use std::{
    os::fd::AsFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};
use upgrading::{Daemon, PATIENCE, Programs};

const RING: u16 = 128;
const RAM_BYTES: u64 = 4 << 20;
/// Packets on their way: fewer than any queue holds, so that none is lost for want of room.
const WINDOW: u64 = 64;
const SLOT_BYTES: u64 = 2048;
const UPGRADES: usize = 4;

/// A guest that sends packets to itself.
struct Guest {
    nic: Nic,
    ram: Arc<SharedMapping>,
    receive_at: u64,
    send_at: u64,
    sent: u64,
    free_slots: Vec<u64>,
    received: u64,
    returned_empty: u64,
}

/// What a guest has done, for the thread that upgrades.
#[derive(Default)]
struct Tally {
    ends: AtomicBool,
    received: AtomicU64,
}

struct Ending<'a>(&'a [Tally]);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0
            .iter()
            .for_each(|tally| tally.ends.store(true, Relaxed));
    }
}

fn packet(number: u64) -> Vec<u8> {
    let bytes = 60 + usize::try_from(number * 131 % 1400).unwrap();
    let byte = |at: usize| u8::try_from((number * 13 + at as u64) % 251).unwrap();
    let mut packet: Vec<u8> = (0..bytes).map(byte).collect();
    packet[14..22].copy_from_slice(&number.to_le_bytes());
    packet
}

impl Guest {
    fn connect(socket: &std::path::Path) -> Self {
        let file = memfd_create("nic-guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, RAM_BYTES).unwrap();
        let ram = Arc::new(SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap());
        let parts = (Arc::clone(&ram), file);
        let mut nic = Nic::new(parts, 0, RING, Merging::Mergeable, socket).unwrap();
        nic.connect().unwrap();
        let receive_at = NIC_RINGS_BYTES;
        let send_at = receive_at + u64::from(RING) * SLOT_BYTES;
        let mut guest = Self {
            nic,
            ram,
            receive_at,
            send_at,
            sent: 0,
            free_slots: (0..u64::from(RING)).collect(),
            received: 0,
            returned_empty: 0,
        };
        for slot in 0..u64::from(RING) {
            guest.post(guest.receive_at + slot * SLOT_BYTES);
        }
        guest.nic.kick(Way::Receive).unwrap();
        guest
    }

    fn post(&mut self, at: u64) {
        let bytes = u32::try_from(SLOT_BYTES).unwrap();
        assert!(self.nic.give(Way::Receive, at, bytes).unwrap());
    }

    fn send_some(&mut self) {
        let mut any = false;
        while self.sent < self.received + WINDOW
            && let Some(slot) = self.free_slots.pop()
        {
            let at = self.send_at + slot * SLOT_BYTES;
            let whole = [vec![0; NET_HEADER_BYTES as usize], packet(self.sent)].concat();
            self.ram.copy_to(at, &whole).unwrap();
            let bytes = u32::try_from(whole.len()).unwrap();
            assert!(self.nic.give(Way::Send, at, bytes).unwrap());
            self.sent += 1;
            any = true;
        }
        if any {
            self.nic.kick(Way::Send).unwrap();
        }
    }

    fn take_all(&mut self) {
        while let Some(sent) = self.nic.take(Way::Send).unwrap() {
            self.free_slots.push((sent.at - self.send_at) / SLOT_BYTES);
        }
        let mut any = false;
        while let Some(buffer) = self.nic.take(Way::Receive).unwrap() {
            if buffer.written == 0 {
                self.returned_empty += 1;
            } else {
                let mut whole = vec![0; buffer.written as usize];
                self.ram.copy_from(buffer.at, &mut whole).unwrap();
                assert_eq!(whole[10..12], [1, 0], "buffers of packet {}", self.received);
                let (wanted, found) = (packet(self.received), &whole[NET_HEADER_BYTES as usize..]);
                let number = u64::from_le_bytes(found[14..22].try_into().unwrap());
                assert_eq!(number, self.received, "the next packet");
                assert!(found == wanted, "packet {number}");
                self.received += 1;
            }
            self.post(buffer.at);
            any = true;
        }
        if any {
            self.nic.kick(Way::Receive).unwrap();
        }
    }

    /// Sends and receives until it is to end, and then until everything has come.
    fn run(mut self, tally: &Tally) -> Self {
        let mut last = (Instant::now(), 0);
        while !tally.ends.load(Relaxed) || self.received < self.sent {
            assert!(!self.nic.has_hung_up(), "the front end was hung up on");
            if !tally.ends.load(Relaxed) {
                self.send_some();
            }
            self.take_all();
            tally.received.store(self.received, Relaxed);
            if self.received > last.1 {
                last = (Instant::now(), self.received);
            }
            let missing = self.sent - self.received;
            assert!(last.0.elapsed() < PATIENCE, "{missing} packets do not come");
            std::thread::yield_now();
        }
        self
    }
}

fn is_skipped() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: a daemon needs root");
    }
    !is_root
}

fn device<'a>(list: &'a Value, socket: &str) -> &'a Value {
    let devices = list["devices"].as_array().unwrap();
    devices
        .iter()
        .find(|device| device["socket"] == socket)
        .unwrap()
}

#[test]
fn every_packet_comes_once_and_in_order_over_upgrades_also_while_pages_are_awaited() {
    if is_skipped() {
        return;
    }
    let programs = Programs::new();
    let names = ["pagetide-0", "pagetide-1"].map(|name| programs.pagetide(name));
    let daemon = Daemon::start(&names[0], &["--engines", "2"], None);
    let sockets: Vec<PathBuf> = ["pause", "backup-ring", "out-of-order"]
        .into_iter()
        .map(|policy| {
            let socket = programs.dir().join(policy);
            let at = socket.to_str().unwrap();
            let net = ["dpu", "net", "--socket", at, "--loop", "--json"];
            daemon.json(&[&net[..], &["--on-receive-fault", policy]].concat());
            socket
        })
        .collect();
    let guests: Vec<Guest> = sockets.iter().map(|at| Guest::connect(at)).collect();
    let tallies: Vec<Tally> = guests.iter().map(|_| Tally::default()).collect();
    let all_go_on = || {
        let before: Vec<u64> = tallies
            .iter()
            .map(|its| its.received.load(Relaxed))
            .collect();
        let begun = Instant::now();
        while (tallies.iter().zip(&before)).any(|(its, had)| its.received.load(Relaxed) < had + 300)
        {
            assert!(begun.elapsed() < PATIENCE, "packets do not come");
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let _ending = Ending(&tallies);
        let running: Vec<_> = guests
            .into_iter()
            .zip(&tallies)
            .map(|(guest, tally)| scope.spawn(move || guest.run(tally)))
            .collect();
        for upgrade in 1..=UPGRADES {
            all_go_on();
            for socket in &sockets {
                let at = socket.to_str().unwrap();
                let faults = ["--rate", "200", "--latency", "20ms", "--json"];
                let inject = ["iopf", "inject", "--device", at];
                daemon.json(&[&inject[..], &faults].concat());
            }
            all_go_on();
            let report = daemon.upgrade(&names[upgrade % 2]);
            assert_eq!(report["state"], "done", "{report}\n{}", daemon.log());
        }
        all_go_on();
        let list = daemon.json(&["dpu", "list", "--json"]);
        for socket in &sockets {
            let device = device(&list, socket.to_str().unwrap());
            assert_eq!(device["state"], "connected", "{device}");
            for lost in ["fault_dropped_packets", "send_dropped_packets"] {
                assert_eq!(device[lost], 0, "{lost}: {device}");
            }
        }
        tallies.iter().for_each(|its| its.ends.store(true, Relaxed));
        for (guest, socket) in running.into_iter().zip(&sockets) {
            let guest = guest.join().unwrap();
            assert_eq!(guest.received, guest.sent, "{}", socket.display());
            // No buffer need come back empty: the next process finds them in the record.
            assert_eq!(guest.returned_empty, 0, "{}", socket.display());
        }
    });
}
