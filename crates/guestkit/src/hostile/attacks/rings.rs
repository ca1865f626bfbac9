// SPDX-License-Identifier: Apache-2.0
//! Invalid rings, and rings and requests that change while they are read.

use std::os::fd::AsFd;

use super::super::changing::Restless;
use super::super::front::{
    DATA, Descriptor, Front, GPA, INDIRECT, Io, NEXT, RAM_BYTES, Setup, T_IN, T_OUT, TABLE, VA,
    WRITE, chain_bytes, header_of,
};
use super::super::peer::Failure;
use super::super::wire::{self, F_EVENT_IDX, F_INDIRECT, Region, RingAddresses};
use super::super::{Attack, Held, Seen, Target, seen};

const STOPPED: [Seen; 1] = [Seen::Stopped];
const SERVED: [Seen; 1] = [Seen::Served];
const EITHER: [Seen; 2] = [Seen::Served, Seen::Stopped];
const ANY: [Seen; 4] = [Seen::Served, Seen::Refused, Seen::HungUp, Seen::Stopped];

/// A descriptor of a chain: guest-physical address, length, flags.
pub(super) type Part = (u64, u32, u16);

pub(super) fn header() -> Part {
    (GPA + header_of(0), 16, 0)
}

pub(super) fn status() -> Part {
    (GPA + header_of(0) + 16, 1, WRITE)
}

pub(super) fn data(bytes: u32) -> Part {
    (GPA + DATA, bytes, WRITE)
}

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    for (name, expected, parts) in misshapen_chains().into_iter().chain(misplaced_chains()) {
        all.push(Attack::new(format!("chain-{name}"), expected, move |t| {
            chain(t, &parts)
        }));
    }
    for (name, expected, table) in tables() {
        all.push(Attack::new(
            format!("table-of-{name}"),
            expected,
            move |t| indirect(t, &table),
        ));
    }
    for (name, places) in places() {
        all.push(Attack::new(format!("ring-{name}"), &ANY, move |t| {
            placed(t, places)
        }));
    }
    all.extend(single());
    all
}

type Chain = (&'static str, &'static [Seen], Vec<Part>);

fn misshapen_chains() -> Vec<Chain> {
    vec![
        ("without-status", &STOPPED, vec![header()]),
        ("without-header", &STOPPED, vec![status()]),
        (
            "of-short-header",
            &STOPPED,
            vec![(GPA + header_of(0), 15, 0), status()],
        ),
        (
            "of-empty-header",
            &EITHER,
            vec![(GPA + header_of(0), 0, 0), header(), data(512), status()],
        ),
        (
            "of-empty-data",
            &SERVED,
            vec![header(), data(0), data(512), status()],
        ),
        ("of-empty-status", &STOPPED, vec![header(), (GPA, 0, WRITE)]),
        ("of-all-empty", &STOPPED, vec![(GPA, 0, 0), (GPA, 0, WRITE)]),
        (
            "readable-after-writable",
            &STOPPED,
            vec![header(), data(512), (GPA + DATA, 512, 0), status()],
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn misplaced_chains() -> Vec<Chain> {
    let outside = GPA + 2 * RAM_BYTES;
    let pieces = |count: u32, bytes: u32| -> Vec<Part> {
        let data = (0..count).map(|_| data(bytes));
        [header()]
            .into_iter()
            .chain(data)
            .chain([status()])
            .collect()
    };
    vec![
        (
            "data-outside",
            &SERVED,
            vec![header(), (outside, 4096, WRITE), status()],
        ),
        (
            "data-across-the-end",
            &SERVED,
            vec![header(), (GPA + RAM_BYTES - 512, 4096, WRITE), status()],
        ),
        (
            "data-that-wraps",
            &SERVED,
            vec![header(), (u64::MAX - 511, 4096, WRITE), status()],
        ),
        (
            // More than a request may have: it fails, and the device continues.
            "data-of-4-gib",
            &SERVED,
            vec![header(), (GPA, u32::MAX, WRITE), status()],
        ),
        (
            "header-outside",
            &EITHER,
            vec![(outside, 16, 0), data(512), status()],
        ),
        (
            "status-outside",
            &STOPPED,
            vec![header(), data(512), (outside, 1, WRITE)],
        ),
        ("of-100-overlapping-parts", &SERVED, pieces(100, 65_536)),
        (
            "data-over-the-descriptors",
            &EITHER,
            vec![header(), (GPA, 4096, WRITE), status()],
        ),
        (
            "data-over-the-avail-ring",
            &EITHER,
            vec![header(), (GPA + 0x1000, 4096, WRITE), status()],
        ),
        (
            "data-over-the-used-ring",
            &EITHER,
            vec![header(), (GPA + 0x2000, 4096, WRITE), status()],
        ),
        (
            "data-over-its-header",
            &EITHER,
            vec![header(), (GPA + 0x4000, 4096, WRITE), status()],
        ),
        (
            "status-over-the-used-index",
            &EITHER,
            vec![header(), data(512), (GPA + 0x2002, 1, WRITE)],
        ),
        (
            "data-not-in-sectors",
            &SERVED,
            vec![header(), data(511), status()],
        ),
    ]
}

/// Tables of indirect descriptors: what points to them, and their content.
type Table = (Part, Vec<Part>);

fn tables() -> Vec<(&'static str, &'static [Seen], Table)> {
    let at = GPA + INDIRECT;
    let of = |bytes| (at, bytes, TABLE);
    let pieces = |count: u32, bytes: u32| -> Vec<Part> {
        let data = (0..count).map(|_| data(bytes));
        [header()]
            .into_iter()
            .chain(data)
            .chain([status()])
            .collect()
    };
    let good = || vec![header(), data(4096), status()];
    vec![
        ("three", &SERVED, (of(48), good())),
        ("1023", &SERVED, (of(1023 * 16), pieces(1021, 512))),
        // As long as the largest ring.
        ("1024", &SERVED, (of(1024 * 16), pieces(1022, 512))),
        (
            "1023-to-64-mib",
            &SERVED,
            (of(1023 * 16), pieces(1021, 65_536)),
        ),
        (
            "1024-beyond-64-mib",
            &SERVED,
            (of(1024 * 16), pieces(1022, 131_072)),
        ),
        ("1025", &STOPPED, (of(1025 * 16), pieces(1022, 512))),
        ("no-bytes", &STOPPED, (of(0), good())),
        ("half-a-descriptor", &STOPPED, (of(8), good())),
        ("17-bytes", &STOPPED, (of(17), good())),
        ("4-gib", &STOPPED, (of(!15), good())),
        ("another-table", &STOPPED, (of(48), vec![(at, 48, TABLE)])),
        ("itself", &STOPPED, (of(16), vec![of(16)])),
        (
            "outside",
            &STOPPED,
            ((GPA + 2 * RAM_BYTES, 48, TABLE), good()),
        ),
        ("wrapping", &STOPPED, ((u64::MAX - 15, 48, TABLE), good())),
        (
            "across-the-end",
            &STOPPED,
            ((GPA + RAM_BYTES - 16, 48, TABLE), good()),
        ),
        ("unaligned", &EITHER, ((at + 1, 48, TABLE), good())),
        ("with-successor", &STOPPED, ((at, 48, TABLE | NEXT), good())),
        ("writable", &EITHER, ((at, 48, TABLE | WRITE), good())),
    ]
}

fn places() -> Vec<(&'static str, RingAddresses)> {
    let usual = RingAddresses {
        descriptors: 0,
        avail: 0x1000,
        used: 0x2000,
    };
    let one = |descriptors, avail, used| RingAddresses {
        descriptors,
        avail,
        used,
    };
    vec![
        ("descriptors-unaligned", one(8, 0x1000, 0x2000)),
        ("avail-unaligned", one(0, 0x1001, 0x2000)),
        ("used-unaligned", one(0, 0x1000, 0x2002)),
        ("used-at-odd-address", one(0, 0x1000, 0x2001)),
        ("all-in-one-place", one(0, 0, 0)),
        ("used-over-descriptors", one(0, 0x1000, 0)),
        ("used-over-avail", one(0, 0x1000, 0x1000)),
        ("all-on-one-page", one(0, 0x800, 0xa00)),
        ("across-the-end", one(RAM_BYTES - 16, 0x1000, 0x2000)),
        ("outside", one(2 * RAM_BYTES, 0x1000, 0x2000)),
        (
            "before-memory",
            RingAddresses {
                used: 0_u64.wrapping_sub(4096),
                ..usual
            },
        ),
        (
            "at-the-end-of-addresses",
            RingAddresses {
                avail: (u64::MAX - 63).wrapping_sub(VA),
                ..usual
            },
        ),
        (
            "at-zero",
            RingAddresses {
                used: 0_u64.wrapping_sub(VA),
                ..usual
            },
        ),
    ]
}

fn single() -> Vec<Attack> {
    vec![
        Attack::new("avail-index-far-ahead", &STOPPED, |t| jump(t, 1000)),
        Attack::new("avail-index-just-too-far", &STOPPED, |t| jump(t, 129)),
        Attack::new("avail-index-back", &STOPPED, |t| jump(t, u16::MAX)),
        Attack::new("avail-index-half-way-round", &STOPPED, |t| jump(t, 1 << 15)),
        Attack::new("avail-head-beyond", &STOPPED, |t| head(t, 128)),
        Attack::new("avail-head-highest", &STOPPED, |t| head(t, u16::MAX)),
        Attack::new("chain-that-loops", &STOPPED, |t| {
            raw(t, GPA + DATA, 16, NEXT, 0)
        }),
        Attack::new("chain-that-loops-empty", &STOPPED, |t| {
            raw(t, GPA + DATA, 0, NEXT, 0)
        }),
        Attack::new("chain-next-beyond", &STOPPED, |t| {
            raw(t, GPA + DATA, 16, NEXT, 128)
        }),
        Attack::new("chain-unknown-flags", &ANY, |t| {
            raw(t, GPA + DATA, 16, 0xfff8, 0)
        }),
        Attack::new("table-without-the-feature", &STOPPED, |t| {
            raw(t, GPA + DATA, 48, TABLE, 0)
        }),
        Attack::new("one-head-many-times", &EITHER, one_head),
        Attack::new("event-index-noise", &SERVED, event_noise),
        Attack::new("ring-in-two-regions", &ANY, two_regions),
    ]
}

/// A front end that has been served once.
pub(super) fn start(target: &Target, features: u64) -> Result<Front, Failure> {
    let mut setup = Setup::new()?;
    setup.features = features;
    let mut front = setup.start(&target.socket)?;
    front.do_io(0, Io::of_slot(0, T_IN, 0, 4096))?;
    Ok(front)
}

/// Offers the chain that begins at descriptor 0.
fn offered(mut front: Front) -> Result<Held, Failure> {
    front.offer(0)?;
    front.kick()?;
    let seen = seen(front.wait())?;
    Ok(Held::nothing(seen).and(front))
}

fn chain(target: &Target, parts: &[Part]) -> Result<Held, Failure> {
    let front = start(target, 0)?;
    front.head(0, T_IN, 0)?;
    front.describe_chain(parts)?;
    offered(front)
}

fn indirect(target: &Target, (pointer, parts): &Table) -> Result<Held, Failure> {
    let front = start(target, F_INDIRECT)?;
    front.head(0, T_IN, 0)?;
    // A table that is unaligned or partly outside is put where the pointer says, as far as that is
    // in memory.
    let at = pointer.0.wrapping_sub(GPA);
    let bytes = chain_bytes(parts);
    if at < RAM_BYTES - bytes.len() as u64 {
        front.ram.put(at, &bytes)?;
    }
    let (gpa, len, flags) = *pointer;
    let next = 1;
    front.describe(
        0,
        Descriptor {
            gpa,
            len,
            flags,
            next,
        },
    )?;
    offered(front)
}

fn raw(target: &Target, gpa: u64, len: u32, flags: u16, next: u16) -> Result<Held, Failure> {
    let front = start(target, 0)?;
    front.describe(
        0,
        Descriptor {
            gpa,
            len,
            flags,
            next,
        },
    )?;
    offered(front)
}

fn jump(target: &Target, by: u16) -> Result<Held, Failure> {
    let front = start(target, 0)?;
    front.set_avail(front.offered().wrapping_add(by))?;
    front.kick()?;
    let outcome =
        match super::super::peer::is_ready(front.error.as_fd(), super::super::peer::PATIENCE) {
            true => Seen::Stopped,
            false => Seen::Served,
        };
    Ok(Held::nothing(outcome).and(front))
}

fn head(target: &Target, head: u16) -> Result<Held, Failure> {
    let mut front = start(target, 0)?;
    front.offer(head)?;
    front.kick()?;
    let seen = seen(front.wait())?;
    Ok(Held::nothing(seen).and(front))
}

/// The same chain is made available as often as the ring is long.
fn one_head(target: &Target) -> Result<Held, Failure> {
    let mut front = start(target, 0)?;
    front.post(0, Io::of_slot(0, T_OUT, 0, 4096))?;
    for _ in 0..126 {
        front.offer(0)?;
    }
    front.kick()?;
    let seen = seen(front.wait())?;
    Ok(Held::nothing(seen).and(front))
}

fn event_noise(target: &Target) -> Result<Held, Failure> {
    let mut front = start(target, F_EVENT_IDX)?;
    let at = front.places.avail + 4 + 2 * 128;
    let values = (0..7_u16)
        .map(|n| Vec::from((n * 9362).to_le_bytes()))
        .collect();
    let noise = Restless::flip(&front.ram, at, values)?;
    let outcome = (0..64).try_for_each(|n| front.do_io(0, Io::of_slot(0, T_IN, n, 4096)));
    let seen = seen(outcome)?;
    Ok(Held::nothing(seen).and(noise).and(front))
}

fn placed(target: &Target, places: RingAddresses) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.places = places;
    let mut front = match setup.start(&target.socket) {
        Ok(front) => front,
        Err(failure) => return Ok(Held::nothing(seen(Err::<(), _>(failure))?)),
    };
    // Where this side cannot write it, there is nothing to offer.
    let in_ram = |at: u64| at < RAM_BYTES - 4096;
    if !(in_ram(places.descriptors) && in_ram(places.avail) && in_ram(places.used)) {
        front.kick()?;
        return Ok(Held::nothing(Seen::Served).and(front));
    }
    front.post(0, Io::of_slot(0, T_IN, 0, 4096))?;
    front.kick()?;
    let outcome = match front.wait_within(std::time::Duration::from_millis(300)) {
        // A ring that overlaps itself may have any content.
        Err(Failure::Silent { .. }) => Seen::Served,
        other => seen(other)?,
    };
    Ok(Held::nothing(outcome).and(front))
}

fn two_regions(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    // The used ring spans both halves.
    setup.places.used = RAM_BYTES / 2 - 64;
    let peer = super::super::peer::Peer::connect(&target.socket)?;
    super::super::front::greet(&peer, 0)?;
    let low = Region {
        bytes: RAM_BYTES / 2,
        ..setup.region()
    };
    let high = Region {
        gpa: GPA + RAM_BYTES / 2,
        va: VA + RAM_BYTES / 2,
        offset: RAM_BYTES / 2,
        ..low
    };
    let fd = setup.ram.file().as_fd();
    peer.tell(wire::mem_table(2, &[low, high]), &[fd, fd])?;
    match setup.start_ring(peer) {
        Ok(front) => {
            front.kick()?;
            Ok(Held::nothing(Seen::Served).and(front))
        }
        Err(failure) => Ok(Held::nothing(seen(Err::<(), _>(failure))?)),
    }
}
