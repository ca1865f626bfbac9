// SPDX-License-Identifier: Apache-2.0
//! What a network device is held to whatever its guest or its record says: functions from any bytes,
//! for tests and for the fuzz targets of `fuzz/`. Nothing of it is in a program.

use crate::{
    chain::{Buffers, Indirect, Table, walk},
    frame::frame,
    memory::{DeviceMemory, Span},
    net::{
        header::{LEGACY_HEADER_BYTES, NetHeader},
        nic::role_of,
        record::{HeldRecord, Left, Ring, Tie, Words, record_words},
    },
    ram::RamPolicy,
    regions::{Region, RegionTable},
};
use pagetide_addr::{FrontendVa, Gpa, PAGE_BYTES};
use pagetide_sys::memory_file::GuestFile;
use pagetide_vhost_backend::RegionShape;
use pagetide_vpri::{DomainTable, LookUp};
use std::{cell::RefCell, os::fd::AsFd, rc::Rc};
use vm_memory::{Bytes as _, GuestAddress};

/// A `virtio_net_hdr` of a packet whose length follows in four bytes.
///
/// # Panics
/// A header was accepted that names bytes outside its packet.
pub fn net_header(bytes: &[u8]) {
    let mut bytes = Script(bytes);
    let header: [u8; LEGACY_HEADER_BYTES as usize] = bytes.array();
    let packet = u64::from(u32::from_le_bytes(bytes.array()));
    if NetHeader::parse(header).check(packet).is_err() {
        return;
    }
    let [flags, kind, h0, h1, g0, g1, s0, s1, o0, o1] = header;
    let field = |low, high| u64::from(u16::from_le_bytes([low, high]));
    assert!(
        (14..=65_553).contains(&packet),
        "a packet of {packet} bytes"
    );
    if flags & 1 != 0 {
        assert!(
            field(s0, s1) + field(o0, o1) + 2 <= packet,
            "the checksum's place"
        );
    }
    if kind != 0 {
        assert!(flags & 1 != 0 && field(g0, g1) > 0, "segments of nothing");
        assert!(field(h0, h1) <= packet, "headers beyond the packet");
    }
}

/// Where the memory of [`net_chain`] begins.
const BASE: u64 = 0x10_0000;
const PAGES: u64 = 16;
const TABLE_SIZE: u16 = 8;
/// Descriptors of an indirect table.
const INNER: u64 = 16;
const INNER_AT: u64 = BASE + PAGE_BYTES;

/// A chain of a queue that receives or sends, in a table of small numbers.
///
/// # Panics
/// A chain was accepted with bytes outside memory, or a lease is left.
pub fn net_chain(bytes: &[u8]) {
    let mut bytes = Script(bytes);
    let [how, head] = bytes.array();
    let (_file, memory) = memory();
    for (at, count) in [(BASE, u64::from(TABLE_SIZE)), (INNER_AT, INNER)] {
        for index in 0..count {
            let descriptor = bytes.descriptor();
            let place = GuestAddress(at + 16 * index);
            memory
                .write_slice(&descriptor, place)
                .expect("the tables are in memory");
        }
    }
    let table = Table {
        at: Gpa(BASE),
        size: TABLE_SIZE,
        indirect: match how & 1 {
            0 => Indirect::Negotiated,
            _ => Indirect::Absent,
        },
        // With and without the longer header.
        layout: role_of(u16::from(how >> 1 & 1), u64::from(how >> 2 & 1) << 32).layout,
    };
    let mut buffers = Buffers::default();
    if walk(&memory, table, u16::from(head), &mut buffers).is_ok() {
        if let Ok(frame) = frame(table.layout, &mut buffers) {
            assert_eq!(frame.header_bytes(), table.layout.header_bytes as usize);
        }
        let all = buffers.readable.iter().chain(&buffers.writable);
        for span in all {
            assert!(memory.slice(*span).is_ok(), "{span:?} is not in memory");
        }
    }
    let first = Span {
        port: 0,
        offset: 0,
        len: 1,
    };
    let domain = memory.port(first).domain();
    assert!(!domain.attributes().is_any_leased(), "a lease is left");
}

fn memory() -> (GuestFile, DeviceMemory) {
    let bytes = PAGES * PAGE_BYTES;
    let file = GuestFile::new_memfd("hostile", bytes).expect("a memfd");
    let domains = DomainTable::new(1);
    let shape = RegionShape {
        gpa: Gpa(BASE),
        bytes,
        frontend: FrontendVa(BASE),
        file_offset: 0,
    };
    let region =
        Region::map(shape, file.as_fd(), &RamPolicy::default(), &domains).expect("a region");
    let mut table = RegionTable::default();
    table.add(region).expect("the only region");
    let memory = table.for_engine(0, LookUp::On).expect("memory");
    (file, memory)
}

/// A record of a receive ring, and that ring, after any events and any damage.
///
/// # Panics
/// What is found is of no ring, or not the same when it is asked for again.
pub fn held_record(bytes: &[u8]) {
    let mut bytes = Script(bytes);
    let tie = Tie {
        dev: 1,
        ino: 2,
        descriptors: 0x1000,
        avail: 0x2000,
        used: 0x3000,
        queue: 0,
        size: RING_SIZE,
    };
    let words = Cells::default();
    let mut ring = SmallRing::default();
    let begin = u16::from_le_bytes(bytes.array());
    (ring.avail_index, ring.used_index) = (begin, begin);
    let Ok(mut record) = HeldRecord::begin(words.clone(), &tie, begin) else {
        panic!("there are enough words");
    };
    let mut next = begin;
    let mut held = Vec::new();
    while let Some(what) = bytes.next() {
        let (kind, with) = (what & 7, what >> 3);
        let waiting = ring.avail_index.wrapping_sub(next);
        match kind {
            0 | 1 => ring.post(u16::from(with)),
            2 if waiting > 0 => {
                let head = ring.avail_head(next) % RING_SIZE;
                record.hold(head, next, &ring.descriptor(head));
                held.push(head);
                next = next.wrapping_add(1);
            }
            3 if waiting > 0 => {
                ring.give_back(ring.avail_head(next));
                next = next.wrapping_add(1);
                record.settle([], ring.used_index);
            }
            4 if !held.is_empty() => {
                let head = held.remove(usize::from(with) % held.len());
                ring.give_back(head);
                // Death may come before the second.
                if with & 1 == 0 {
                    record.settle([head], ring.used_index);
                }
            }
            5 => words.damage(bytes.array(), u64::from_le_bytes(bytes.array())),
            6 => ring.damage(with, u16::from_le_bytes(bytes.array())),
            _ => {}
        }
    }
    drop(record);
    match HeldRecord::take_over(words.clone(), &tie, &ring) {
        Ok((_, left)) => {
            check_left(&left);
            let again = HeldRecord::take_over(words, &tie, &ring);
            assert_eq!(again.ok().map(|(_, left)| left), Some(left), "asked twice");
        }
        Err((words, _)) => {
            let begun = HeldRecord::begin(words.clone(), &tie, ring.used_index);
            assert!(begun.is_ok());
            let none = Left {
                held: Vec::new(),
                next_avail: ring.used_index,
            };
            if ring.avail_index.wrapping_sub(ring.used_index) <= RING_SIZE {
                let found = HeldRecord::take_over(words, &tie, &ring);
                assert_eq!(found.ok().map(|(_, left)| left), Some(none), "begun anew");
            }
        }
    }
}

fn check_left(left: &Left) {
    let mut seen = [false; RING_SIZE as usize];
    for head in &left.held {
        let seen = &mut seen[usize::from(*head)];
        assert!(!*seen, "{head} twice");
        *seen = true;
    }
}

const RING_SIZE: u16 = 8;

#[derive(Clone)]
struct Cells(Rc<RefCell<Vec<u64>>>);

impl Default for Cells {
    fn default() -> Self {
        Self(Rc::new(RefCell::new(vec![0; record_words(RING_SIZE)])))
    }
}

impl Cells {
    fn damage(&self, [at]: [u8; 1], with: u64) {
        let mut words = self.0.borrow_mut();
        let at = usize::from(at) % words.len();
        words[at] ^= with;
    }
}

impl Words for Cells {
    fn count(&self) -> usize {
        self.0.borrow().len()
    }

    fn load(&self, at: usize) -> u64 {
        self.0.borrow()[at]
    }

    fn store(&self, at: usize, word: u64) {
        self.0.borrow_mut()[at] = word;
    }
}

#[derive(Default)]
struct SmallRing {
    avail: [u16; RING_SIZE as usize],
    avail_index: u16,
    used: [u32; RING_SIZE as usize],
    used_index: u16,
    addresses: [u64; RING_SIZE as usize],
}

impl SmallRing {
    /// Posts a buffer, even one that the driver does not have.
    fn post(&mut self, head: u16) {
        self.avail[usize::from(self.avail_index % RING_SIZE)] = head;
        self.addresses[usize::from(head % RING_SIZE)] += 1;
        self.avail_index = self.avail_index.wrapping_add(1);
    }

    fn give_back(&mut self, head: u16) {
        self.used[usize::from(self.used_index % RING_SIZE)] = u32::from(head);
        self.used_index = self.used_index.wrapping_add(1);
    }

    fn damage(&mut self, what: u8, with: u16) {
        let at = usize::from(what >> 2) % usize::from(RING_SIZE);
        match what & 3 {
            0 => self.avail_index ^= with,
            1 => self.used_index ^= with,
            2 => self.avail[at] ^= with,
            _ => self.used[at] ^= u32::from(with) << 9,
        }
    }
}

impl Ring for SmallRing {
    fn used_index(&self) -> u16 {
        self.used_index
    }

    fn used_head(&self, index: u16) -> u32 {
        self.used[usize::from(index % RING_SIZE)]
    }

    fn avail_index(&self) -> u16 {
        self.avail_index
    }

    fn avail_head(&self, index: u16) -> u16 {
        self.avail[usize::from(index % RING_SIZE)]
    }

    fn descriptor(&self, head: u16) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addresses[usize::from(head % RING_SIZE)].to_le_bytes());
        bytes
    }
}

/// Bytes that are read one after the other; zeros when there are none left.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.next().unwrap_or(0))
    }

    /// A descriptor, most often one of small numbers.
    fn descriptor(&mut self) -> [u8; 16] {
        let [low, high, len, how, next] = self.array();
        if how & 0x80 != 0 {
            return self.array();
        }
        let page = u64::from(u16::from_le_bytes([low, high]));
        // Some are before the memory, and some behind it.
        let address = BASE - PAGE_BYTES + (page << 1);
        let len = u32::from(len) << (how >> 3 & 15);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12] = how & 7;
        bytes[14] = next & 15;
        bytes
    }
}

#[cfg(test)]
#[path = "../../trace/tests/formats_fuzz/seeds.rs"]
mod seeds;

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    type Body = fn(&[u8]);

    /// What each target begins with.
    fn targets() -> Vec<(&'static str, Body, Vec<Vec<u8>>)> {
        let plain = [&[0; 10][..], &1514_u32.to_le_bytes()].concat();
        let tcp = [
            &[1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0][..],
            &65_000_u32.to_le_bytes(),
        ]
        .concat();
        // A buffer of a page; a chain of two; a table.
        let buffer = [0, 0x20, 128, 5 << 3 | 2, 0];
        let chain = [[0, 0x20, 12, 1, 1], [0, 0x28, 128, 3 << 3, 0]].concat();
        let inner = [0, 0x10, 32, 4, 0];
        let chains = [&[4, 0][..], &buffer].concat();
        let sent = [&[6, 0][..], &chain].concat();
        let indirect = [&[6, 0][..], &inner, &[0; 35], &chain].concat();
        let events: Vec<u8> = (0..200_u32)
            .map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[3])
            .collect();
        let held = [0, 8, 16, 2, 3, 2, 4, 0, 8, 3, 12];
        vec![
            ("net_header", net_header, vec![plain, tcp]),
            ("net_chain", net_chain, vec![chains, sent, indirect]),
            (
                "held_record",
                held_record,
                vec![[&[0xfe, 0xff][..], &held].concat(), events],
            ),
        ]
    }

    #[test]
    fn seeds_of_every_target_are_read() {
        super::seeds::check(&targets());
    }

    #[test]
    fn any_bytes_and_damaged_seeds_break_nothing() {
        let mut random = SplitMix64::new(19);
        let byte = |random: &mut SplitMix64| random.next_u64().to_le_bytes()[0];
        for (_, body, samples) in targets() {
            for _ in 0..1_000 {
                let mut bytes = match random.below(3) {
                    0 => (0..random.below(300)).map(|_| byte(&mut random)).collect(),
                    _ => samples[random.index(samples.len())].clone(),
                };
                for _ in 0..random.below(6) {
                    if bytes.is_empty() {
                        break;
                    }
                    let at = random.index(bytes.len());
                    bytes[at] = byte(&mut random);
                }
                body(&bytes);
            }
        }
    }
}
