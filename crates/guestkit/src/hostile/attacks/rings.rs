// SPDX-License-Identifier: Apache-2.0
//! Rings that make no sense, and rings and requests that change while they are read.

use std::os::fd::AsFd;

use super::super::changing::Restless;
use super::super::front::{
    DATA, Descriptor, Front, GPA, INDIRECT, Io, NEXT, RAM_BYTES, SLOT_BYTES, SLOTS, Setup, T_IN,
    T_OUT, TABLE, VA, WRITE, chain_bytes, data_of, header_of,
};
use super::super::peer::Failure;
use super::super::wire::{self, F_EVENT_IDX, F_INDIRECT, Message, Region, RingAddresses, request};
use super::super::{Attack, Held, Seen, Target, seen};

const STOPPED: [Seen; 1] = [Seen::Stopped];
const SERVED: [Seen; 1] = [Seen::Served];
const EITHER: [Seen; 2] = [Seen::Served, Seen::Stopped];
const ANY: [Seen; 4] = [Seen::Served, Seen::Refused, Seen::HungUp, Seen::Stopped];
/// Requests of an attack by a thread.
const ROUNDS: u16 = 60;

type Part = (u64, u32, u16);

fn header() -> Part {
    (GPA + header_of(0), 16, 0)
}

fn status() -> Part {
    (GPA + header_of(0) + 16, 1, WRITE)
}

fn data(bytes: u32) -> Part {
    (GPA + DATA, bytes, WRITE)
}

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    for (name, expected, parts) in chains() {
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
    all.extend(flips());
    all.extend(changes_of_memory());
    all
}

fn chains() -> Vec<(&'static str, &'static [Seen], Vec<Part>)> {
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
            "data-of-4-gib",
            &STOPPED,
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
        // Longer than the ring: the device may take it or not.
        ("1024", &EITHER, (of(1024 * 16), pieces(1022, 512))),
        (
            "1023-to-64-mib",
            &SERVED,
            (of(1023 * 16), pieces(1021, 65_536)),
        ),
        (
            "1024-beyond-64-mib",
            &STOPPED,
            (of(1024 * 16), pieces(1022, 131_072)),
        ),
        ("1025", &STOPPED, (of(1025 * 16), pieces(1022, 512))),
        ("no-bytes", &STOPPED, (of(0), good())),
        ("half-a-descriptor", &STOPPED, (of(8), good())),
        ("17-bytes", &STOPPED, (of(17), good())),
        ("4-gib", &STOPPED, (of(u32::MAX & !15), good())),
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
            raw(t, (GPA + DATA, 16, NEXT, 0))
        }),
        Attack::new("chain-that-loops-empty", &STOPPED, |t| {
            raw(t, (GPA + DATA, 0, NEXT, 0))
        }),
        Attack::new("chain-next-beyond", &STOPPED, |t| {
            raw(t, (GPA + DATA, 16, NEXT, 128))
        }),
        Attack::new("chain-unknown-flags", &ANY, |t| {
            raw(t, (GPA + DATA, 16, 0xfff8, 0))
        }),
        Attack::new("table-without-the-feature", &STOPPED, |t| {
            raw(t, (GPA + DATA, 48, TABLE, 0))
        }),
        Attack::new("one-head-many-times", &EITHER, one_head),
        Attack::new("event-index-noise", &SERVED, event_noise),
        Attack::new("ring-in-two-regions", &ANY, two_regions),
    ]
}

fn start(target: &Target, features: u64) -> Result<Front, Failure> {
    let mut setup = Setup::new()?;
    setup.features = features;
    let mut front = setup.start(&target.socket)?;
    front.do_io(0, Io::of_slot(0, T_IN, 0, 4096))?;
    Ok(front)
}

/// Offers what begins at descriptor 0.
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
    // What is unaligned or in part outside is where it says, as far as that is in memory.
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

fn raw(target: &Target, (gpa, len, flags, next): (u64, u32, u16, u16)) -> Result<Held, Failure> {
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
    let outcome =
        (0..ROUNDS).try_for_each(|n| front.do_io(0, Io::of_slot(0, T_IN, u64::from(n), 4096)));
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
    // Where it cannot be written by us, there is nothing to offer.
    let in_ram = |at: u64| at < RAM_BYTES - 4096;
    if !(in_ram(places.descriptors) && in_ram(places.avail) && in_ram(places.used)) {
        front.kick()?;
        return Ok(Held::nothing(Seen::Served).and(front));
    }
    front.post(0, Io::of_slot(0, T_IN, 0, 4096))?;
    front.kick()?;
    let outcome = match front.wait_within(std::time::Duration::from_millis(300)) {
        // A ring over itself may look like anything.
        Err(Failure::Silent { .. }) => Seen::Served,
        other => seen(other)?,
    };
    Ok(Held::nothing(outcome).and(front))
}

fn two_regions(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    // Half of the used ring is in the one, half in the other.
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

/// Where two values are written in turn, and the values.
type Flip = (&'static str, u64, Vec<Vec<u8>>);

fn flips() -> Vec<Attack> {
    let word32 = |values: &[u32]| values.iter().map(|v| Vec::from(v.to_le_bytes())).collect();
    let word64 = |values: &[u64]| values.iter().map(|v| Vec::from(v.to_le_bytes())).collect();
    let word16 = |values: &[u16]| values.iter().map(|v| Vec::from(v.to_le_bytes())).collect();
    let of_slot_0 = header_of(0);
    let flips: Vec<Flip> = vec![
        ("request-type", of_slot_0, word32(&[0, 1, 4, 8, 11, 13, 99])),
        ("sector", of_slot_0 + 8, word64(&[0, 1 << 60, 8, u64::MAX])),
        (
            "descriptor-address",
            16,
            word64(&[GPA + DATA, 0, GPA, u64::MAX]),
        ),
        ("descriptor-length", 24, word32(&[4096, u32::MAX, 0, 512])),
        ("descriptor-flags", 28, word16(&[3, 1, 4, 0, 7])),
        ("descriptor-next", 30, word16(&[2, 0, 500, 1])),
        ("avail-index", 0x1002, word16(&[0, 40, 999, 3])),
        ("avail-entries", 0x1004, word16(&[0, 999, 3, 65_535])),
        ("used-index", 0x2002, word16(&[0, 1, 77, 30_000])),
        ("used-flags", 0x2000, word16(&[0, 1, 0xffff])),
        ("avail-flags", 0x1000, word16(&[0, 1, 0xffff])),
        ("status", of_slot_0 + 16, vec![vec![0], vec![7], vec![0xff]]),
        (
            "table-length",
            INDIRECT + 8,
            word32(&[16, 0, u32::MAX, 1 << 20]),
        ),
        ("table-flags", INDIRECT + 28, word16(&[3, 4, 0, 7])),
        (
            "table-address",
            INDIRECT + 16,
            word64(&[GPA + DATA, 0, u64::MAX]),
        ),
    ];
    let as_attack = |(name, at, values): Flip| {
        let in_table = at >= INDIRECT;
        Attack::new(format!("changing-{name}"), &EITHER, move |target| {
            let mut front = start(target, F_INDIRECT)?;
            let restless = Restless::flip(&front.ram, at, values.clone())?;
            let outcome = under_change(&mut front, in_table);
            let seen = seen(outcome)?;
            Ok(Held::nothing(seen).and(restless).and(front))
        })
    };
    flips.into_iter().map(as_attack).collect()
}

/// Requests whose outcome is anybody's guess; the device may stop, or wait for the next kick.
fn under_change(front: &mut Front, in_table: bool) -> Result<(), Failure> {
    for round in 0..ROUNDS {
        if in_table {
            front.head(0, T_IN, 0)?;
            let parts = [header(), data(4096), status()];
            front.ram.put(INDIRECT, &chain_bytes(&parts))?;
            front.describe_chain(&[(GPA + INDIRECT, 48, TABLE)])?;
            front.offer(0)?;
        } else {
            front.post(0, Io::of_slot(0, T_IN, u64::from(round), 4096))?;
        }
        front.kick()?;
        match front.wait_within(std::time::Duration::from_millis(5)) {
            Ok(()) | Err(Failure::Silent { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

/// What happens to memory and rings while requests are in flight.
fn changes_of_memory() -> Vec<Attack> {
    let message = |name: &'static str, expected: &'static [Seen], message: fn() -> Message| {
        Attack::new(name, expected, move |target: &Target| {
            let mut front = flooded(target)?;
            let table = message();
            let has_memory = table.request == request::SET_MEM_TABLE && table.body.len() > 8;
            let fd = front.ram.file().as_fd();
            let fds = if has_memory { &[fd][..] } else { &[] };
            let outcome = front.peer.tell(table, fds);
            let seen = match seen(outcome)? {
                // Else its ring is in memory no more.
                Seen::Served if has_memory => seen(front.check(64, &[9; 4096]))?,
                other => other,
            };
            Ok(Held::nothing(seen).and(front))
        })
    };
    vec![
        message("mem-table-again-under-load", &ANY, || {
            wire::mem_table(1, &[all_of_it(GPA)])
        }),
        message("mem-table-elsewhere-under-load", &ANY, || {
            wire::mem_table(1, &[all_of_it(GPA + (1 << 40))])
        }),
        message("memory-removed-under-load", &ANY, || {
            wire::mem_region(request::REM_MEM_REG, &all_of_it(GPA))
        }),
        message(
            "memory-removed-that-is-not-there",
            &[Seen::Refused, Seen::HungUp],
            || wire::mem_region(request::REM_MEM_REG, &all_of_it(GPA + 4096)),
        ),
        Attack::new("holds-requests-in-flight", &SERVED, |target| {
            let front = flooded(target)?;
            Ok(Held::nothing(Seen::Served).and(front))
        }),
        Attack::new("leaves-with-requests-in-flight", &SERVED, |target| {
            for _ in 0..10 {
                drop(flooded(target)?);
            }
            Ok(Held::nothing(Seen::Served))
        }),
        Attack::new(
            "ring-stops-and-starts-under-load",
            &SERVED,
            stops_and_starts,
        ),
    ]
}

fn all_of_it(gpa: u64) -> Region {
    Region {
        gpa,
        bytes: RAM_BYTES,
        va: VA,
        offset: 0,
    }
}

fn flooded(target: &Target) -> Result<Front, Failure> {
    // The one before may be there still for a moment.
    let deadline = std::time::Instant::now() + super::super::peer::PATIENCE;
    let mut front = loop {
        match Front::start(&target.socket) {
            Err(Failure::HungUp { .. }) if std::time::Instant::now() < deadline => {}
            other => break other?,
        }
    };
    for slot in 0..SLOTS {
        let kind = if slot % 2 == 0 { T_OUT } else { T_IN };
        front.post(
            slot,
            Io::of_slot(slot, kind, 128 * u64::from(slot), SLOT_BYTES),
        )?;
    }
    front.kick()?;
    Ok(front)
}

fn stops_and_starts(target: &Target) -> Result<Held, Failure> {
    let mut front = flooded(target)?;
    for _ in 0..20 {
        for enable in [0, 1] {
            let message = Message::words32(request::SET_VRING_ENABLE, &[0, enable]);
            front.peer.tell(message, &[])?;
        }
    }
    front.wait()?;
    debug_assert!(data_of(0) >= DATA);
    let seen = seen(front.check(64, &[9; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}
