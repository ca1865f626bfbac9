// SPDX-License-Identifier: Apache-2.0
//! Messages that change memory and rings while requests are in flight.

use std::os::fd::AsFd;

use super::super::front::{
    DATA, Front, GPA, Io, RAM_BYTES, SLOT_BYTES, SLOTS, T_IN, T_OUT, VA, data_of,
};
use super::super::peer::Failure;
use super::super::wire::{self, Message, Region, request};
use super::super::{Attack, Held, Seen, Target, seen};

const SERVED: [Seen; 1] = [Seen::Served];
const ANY: [Seen; 4] = [Seen::Served, Seen::Refused, Seen::HungUp, Seen::Stopped];

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let message = |name: &'static str, expected: &'static [Seen], message: fn() -> Message| {
        Attack::new(name, expected, move |target: &Target| {
            let mut front = flooded(target)?;
            let table = message();
            let has_memory = table.request == request::SET_MEM_TABLE && table.body.len() > 8;
            let fd = front.ram.file().as_fd();
            let fds = if has_memory { &[fd][..] } else { &[] };
            let outcome = front.peer.tell(table, fds);
            let seen = match seen(outcome)? {
                Seen::Served => match front.check(64, &[9; 4096]) {
                    // Its ring is in memory no more.
                    Err(Failure::Silent { .. }) => Seen::Served,
                    other => seen(other)?,
                },
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
