// SPDX-License-Identifier: Apache-2.0
//! Rings, requests and memory that change while the device reads them.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::super::changing::Restless;
use super::super::front::{
    DATA, Front, GPA, INDIRECT, Io, RAM_BYTES, SLOT_BYTES, SLOTS, T_IN, T_OUT, TABLE, VA,
    chain_bytes, header_of,
};
use super::super::peer::{Failure, PATIENCE};
use super::super::wire::{self, F_INDIRECT, Message, Region, request};
use super::super::{Attack, Held, Seen, Target, seen};
use super::rings::{data, header, start, status};

const SERVED: [Seen; 1] = [Seen::Served];
const EITHER: [Seen; 2] = [Seen::Served, Seen::Stopped];
const ANY: [Seen; 4] = [Seen::Served, Seen::Refused, Seen::HungUp, Seen::Stopped];
/// Requests of an attack by a thread.
const ROUNDS: u16 = 60;

/// Where a request's descriptors are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Ring,
    Table,
}

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = flips();
    all.extend(changes_of_memory());
    all
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
        let place = if at >= INDIRECT {
            Place::Table
        } else {
            Place::Ring
        };
        Attack::new(format!("changing-{name}"), &EITHER, move |target| {
            let mut front = start(target, F_INDIRECT)?;
            let restless = Restless::flip(&front.ram, at, values.clone())?;
            let outcome = under_change(&mut front, place);
            let seen = seen(outcome)?;
            Ok(Held::nothing(seen).and(restless).and(front))
        })
    };
    flips.into_iter().map(as_attack).collect()
}

/// Requests with no predictable outcome; the device may stop, or wait for the next kick.
fn under_change(front: &mut Front, place: Place) -> Result<(), Failure> {
    for round in 0..ROUNDS {
        if place == Place::Table {
            front.head(0, T_IN, 0)?;
            let parts = [header(), data(4096), status()];
            front.ram.put(INDIRECT, &chain_bytes(&parts))?;
            front.describe_chain(&[(GPA + INDIRECT, 48, TABLE)])?;
            front.offer(0)?;
        } else {
            front.post(0, Io::of_slot(0, T_IN, u64::from(round), 4096))?;
        }
        front.kick()?;
        match front.wait_within(Duration::from_millis(5)) {
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
                // Else its ring is no longer in memory.
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
    // The previous connection may still exist for a moment.
    let deadline = Instant::now() + PATIENCE;
    let mut front = loop {
        match Front::start(&target.socket) {
            Err(Failure::HungUp { .. }) if Instant::now() < deadline => {}
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
    let seen = seen(front.check(64, &[9; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}
