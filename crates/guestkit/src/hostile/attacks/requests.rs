// SPDX-License-Identifier: Apache-2.0
//! Requests for what does not exist, or for far too much.

use std::time::{Duration, Instant};

use super::super::front::{
    DATA, Front, GPA, Io, SLOT_BYTES, SLOTS, Setup, T_FLUSH, T_IN, T_OUT, WRITE, data_of, header_of,
};
use super::super::peer::{Failure, wrong};
use super::super::scene::DISK_BYTES;
use super::super::{Attack, Held, Seen, Target, seen};

const SERVED: [Seen; 1] = [Seen::Served];
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const SECTORS: u64 = DISK_BYTES / 512;
/// How long a flood goes on.
const FLOOD: Duration = Duration::from_millis(150);

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    for (name, status, io) in single() {
        all.push(Attack::new(format!("request-{name}"), &SERVED, move |t| {
            answered(t, io, status)
        }));
    }
    for (name, kind, status, range) in ranges() {
        all.push(Attack::new(format!("range-{name}"), &SERVED, move |t| {
            ranged(t, kind, &range, status)
        }));
    }
    all.push(Attack::new("request-of-every-type", &SERVED, every_type));
    all.push(
        Attack::new("request-to-write-what-is-read-only", &SERVED, |t| {
            answered(t, Io::of_slot(0, T_OUT, 0, 4096), IO_ERROR)
        })
        .on_device_with(&["--read-only"]),
    );
    for (name, kind, len) in [
        ("flushes", T_FLUSH, 0),
        ("large-reads", T_IN, SLOT_BYTES),
        ("large-writes", T_OUT, SLOT_BYTES),
        ("small-reads", T_IN, 512),
        ("serials", T_GET_ID, 20),
    ] {
        all.push(Attack::new(format!("flood-of-{name}"), &SERVED, move |t| {
            flood(t, kind, len)
        }));
    }
    all
}

fn single() -> Vec<(&'static str, u8, Io)> {
    let io = |kind, sector, len| Io::of_slot(0, kind, sector, len);
    vec![
        ("last-sector", OK, io(T_IN, SECTORS - 1, 512)),
        ("beyond-the-end", IO_ERROR, io(T_IN, SECTORS, 512)),
        ("across-the-end", IO_ERROR, io(T_IN, SECTORS - 1, 1024)),
        (
            "write-across-the-end",
            IO_ERROR,
            io(T_OUT, SECTORS - 1, 1024),
        ),
        ("sector-highest", IO_ERROR, io(T_IN, u64::MAX, 512)),
        ("sector-whose-byte-wraps", IO_ERROR, io(T_OUT, 1 << 55, 512)),
        (
            "sector-whose-byte-wraps-to-0",
            IO_ERROR,
            io(T_OUT, (1 << 55) * 2, 512),
        ),
        ("not-in-sectors", IO_ERROR, io(T_OUT, 0, 513)),
        (
            "serial-into-too-little",
            IO_ERROR,
            Io {
                kind: T_GET_ID,
                ..io(T_OUT, 0, 19)
            },
        ),
        ("type-highest", UNSUPPORTED, io(u32::MAX, 0, 512)),
    ]
}

fn ranges() -> Vec<(&'static str, u32, u8, Vec<u8>)> {
    let range = |sector: u64, count: u32, flags: u32| {
        let mut bytes = Vec::from(sector.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes
    };
    let two = [range(0, 1, 0), range(8, 1, 0)].concat();
    let mut all = Vec::new();
    for (kind, names) in [
        (
            T_DISCARD,
            [
                "discard-beyond",
                "discard-wrapping",
                "discard-of-all-ones",
                "discard-empty",
            ],
        ),
        (
            T_WRITE_ZEROES,
            [
                "zeroes-beyond",
                "zeroes-wrapping",
                "zeroes-of-all-ones",
                "zeroes-empty",
            ],
        ),
    ] {
        let of = [
            (IO_ERROR, range(SECTORS - 1, 2, 0)),
            (IO_ERROR, range(u64::MAX - 1, 4, 0)),
            (UNSUPPORTED, range(u64::MAX, u32::MAX, u32::MAX)),
            (IO_ERROR, range(0, 0, 0)),
        ];
        for (name, (status, bytes)) in names.into_iter().zip(of) {
            all.push((name, kind, status, bytes));
        }
    }
    all.push(("discard-of-two", T_DISCARD, UNSUPPORTED, two.clone()));
    all.push(("zeroes-of-two", T_WRITE_ZEROES, UNSUPPORTED, two));
    all.push(("discard-with-unmap", T_DISCARD, UNSUPPORTED, range(0, 8, 1)));
    all.push(("discard-short", T_DISCARD, UNSUPPORTED, vec![0; 15]));
    all.push(("discard-without-range", T_DISCARD, UNSUPPORTED, Vec::new()));
    all.push(("zeroes-that-are-right", T_WRITE_ZEROES, OK, range(0, 8, 0)));
    all
}

/// Does one request and expects this status; then the device has to work as before.
fn answered(target: &Target, io: Io, status: u8) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    with_status(front, status, |front| front.request(0, io))
}

fn with_status(
    mut front: Front,
    expected: u8,
    ask: impl FnOnce(&mut Front) -> Result<u8, Failure>,
) -> Result<Held, Failure> {
    let status = ask(&mut front)?;
    if status != expected {
        let what = format!("its status is {status}, not {expected}");
        return Err(wrong("a request", what));
    }
    let seen = seen(front.request(1, Io::of_slot(1, T_IN, 0, 4096)))?;
    Ok(Held::nothing(seen).and(front))
}

fn ranged(target: &Target, kind: u32, range: &[u8], status: u8) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    with_status(front, status, |front| {
        front.ram.put(DATA, range)?;
        front.head(0, kind, 0)?;
        let len = u32::try_from(range.len()).unwrap_or(0);
        front.describe_chain(&[
            (GPA + header_of(0), 16, 0),
            (GPA + DATA, len, 0),
            (GPA + header_of(0) + 16, 1, WRITE),
        ])?;
        front.offer(0)?;
        front.kick()?;
        front.wait()?;
        front.status(0)
    })
}

fn every_type(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for kind in (0..64).chain((6..32).map(|bit| 1 << bit)) {
        let io = Io {
            kind,
            ..Io::of_slot(0, T_IN, 8, 512)
        };
        front.request(0, io)?;
    }
    let seen = seen(front.check(64, &[7; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

/// As many requests at once as the ring has room for, over and over for a while.
fn flood(target: &Target, kind: u32, len: u32) -> Result<Held, Failure> {
    let mut front = Setup::new()?.start(&target.socket)?;
    let until = Instant::now() + FLOOD;
    while Instant::now() < until {
        for slot in 0..SLOTS {
            let mut io = Io::of_slot(slot, kind, 128 * u64::from(slot), len);
            io.gpa = GPA + data_of(slot);
            front.post(slot, io)?;
        }
        front.kick()?;
        front.wait()?;
    }
    let seen = seen(front.check(64, &[7; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}
