// SPDX-License-Identifier: Apache-2.0
//! Guest RAM that disappears or comes back empty while the device works on it.
//!
//! The memfd cannot be sealed. Each part of the ring in turn is placed where the file is truncated,
//! so that a back end which touches it through a mapping gets SIGBUS.

use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};

use super::super::changing::Restless;
use super::super::front::{
    DATA, Front, GPA, INDIRECT, Io, RAM_BYTES, Ram, SLOT_BYTES, SLOTS, Setup, T_IN, T_OUT, TABLE,
    WRITE, chain_bytes, data_of, header_of,
};
use super::super::peer::{Failure, failed};
use super::super::wire::{F_INDIRECT, RingAddresses};
use super::super::{Attack, Held, Seen, Target, seen};

/// Where the file is truncated: the last page goes.
const LAST_PAGE: u64 = RAM_BYTES - 4096;
/// Longest wait for a device that may or may not notice.
const SHORT: Duration = Duration::from_secs(2);

/// The content of the page that goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    Descriptors,
    Avail,
    Used,
    Header,
    Data,
    Status,
    Table,
    All,
}

/// When it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Idle,
    InFlight,
}

const GONE: [(Gone, &str); 8] = [
    (Gone::Descriptors, "descriptors"),
    (Gone::Avail, "avail-ring"),
    (Gone::Used, "used-ring"),
    (Gone::Header, "header"),
    (Gone::Data, "data"),
    (Gone::Status, "status"),
    (Gone::Table, "indirect-table"),
    (Gone::All, "everything"),
];

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    for (gone, name) in GONE {
        for (when, how) in [(When::Idle, "idle"), (When::InFlight, "in-flight")] {
            // A copy by the kernel fails with an error, which becomes the request's status.
            let expected = [Seen::Stopped, Seen::Served];
            let expected = match (gone, when) {
                (Gone::Data | Gone::Header | Gone::Status, _) | (_, When::InFlight) => {
                    &expected[..]
                }
                _ => &expected[..1],
            };
            let name = format!("shrink-{name}-{how}");
            all.push(Attack::new(name, expected, move |target| {
                shrink(target, gone, when)
            }));
        }
    }
    let any = [Seen::Stopped, Seen::Served];
    all.extend([
        Attack::new("shrink-and-grow-over-and-over", &any, shrink_and_grow),
        Attack::new("punch-over-and-over", &any, punch),
        Attack::new(
            "shrink-before-the-ring-starts",
            &[Seen::Stopped, Seen::HungUp, Seen::Refused],
            before_start,
        ),
    ]);
    all
}

fn start(target: &Target, gone: Gone) -> Result<Front, Failure> {
    let mut setup = Setup::with(Ram::unsealable(RAM_BYTES)?)?;
    setup.features = F_INDIRECT;
    let places: &mut RingAddresses = &mut setup.places;
    match gone {
        Gone::Descriptors => places.descriptors = LAST_PAGE,
        Gone::Avail => places.avail = LAST_PAGE,
        Gone::Used => places.used = LAST_PAGE,
        _ => {}
    }
    let mut front = setup.start(&target.socket)?;
    front.do_io(0, Io::of_slot(0, T_IN, 0, 4096))?;
    Ok(front)
}

/// Makes a request of the kind in a slot available.
fn post(front: &mut Front, slot: u16, gone: Gone) -> Result<(), Failure> {
    describe(front, slot, gone)?;
    front.offer(3 * slot)
}

/// Puts a request of the kind into a slot, part of it into the last page.
fn describe(front: &Front, slot: u16, gone: Gone) -> Result<(), Failure> {
    let last = GPA + LAST_PAGE;
    let header = if gone == Gone::Header {
        last
    } else {
        GPA + header_of(slot)
    };
    let status = if gone == Gone::Status {
        last
    } else {
        GPA + header_of(slot) + 16
    };
    let data = if gone == Gone::Data {
        last
    } else {
        GPA + data_of(slot)
    };
    front.head(slot, T_IN, u64::from(slot) * 8)?;
    let parts = [(header, 16, 0), (data, 4096, WRITE), (status, 1, WRITE)];
    if gone == Gone::Table {
        front.ram.put(LAST_PAGE, &chain_bytes(&parts))?;
        front.ram.put(
            front.places.descriptors + 48 * u64::from(slot),
            &chain_bytes(&[(last, 48, TABLE)]),
        )?;
        return Ok(());
    }
    for (index, (gpa, len, flags)) in (3 * slot..).zip(parts) {
        let flags = if index == 3 * slot + 2 {
            flags
        } else {
            flags | 1
        };
        let next = index + 1;
        front.describe(
            index,
            super::super::front::Descriptor {
                gpa,
                len,
                flags,
                next,
            },
        )?;
    }
    Ok(())
}

fn shrink(target: &Target, gone: Gone, when: When) -> Result<Held, Failure> {
    let mut front = start(target, gone)?;
    let to = if gone == Gone::All { 0 } else { LAST_PAGE };
    match when {
        // The posted request lies before the cut, or goes with it.
        When::Idle if gone == Gone::All => front.ram.resize(to)?,
        // A polling device could otherwise serve it before the cut.
        When::Idle if matches!(gone, Gone::Descriptors | Gone::Table) => {
            describe(&front, 1, gone)?;
            front.ram.resize(to)?;
            front.offer(3)?;
        }
        When::Idle => {
            post(&mut front, 1, gone)?;
            front.ram.resize(to)?;
        }
        When::InFlight => {
            for slot in 1..SLOTS {
                if gone == Gone::All {
                    let len = SLOT_BYTES;
                    front.post(slot, Io::of_slot(slot, T_OUT, 128 * u64::from(slot), len))?;
                } else {
                    post(&mut front, slot, gone)?;
                }
            }
            front.kick()?;
            front.ram.resize(to)?;
        }
    }
    front.kick()?;
    let mut outcome = front.wait_within(SHORT);
    if outcome.is_ok() && when == When::Idle && matches!(gone, Gone::Avail | Gone::Used | Gone::All)
    {
        // It was served before the cut; the missing part is only read after a kick.
        front.kick()?;
        outcome = Err(Failure::Silent {
            step: "the look after a kick".to_owned(),
            waited: SHORT,
        });
    }
    Ok(Held::nothing(judge(&front, outcome)?).and(front))
}

/// Where this side cannot read the ring past the file's end, the device's error descriptor decides.
fn judge(front: &Front, outcome: Result<(), Failure>) -> Result<Seen, Failure> {
    match outcome {
        Err(Failure::Kernel { .. } | Failure::Silent { .. }) => {
            let told = super::super::peer::is_ready(
                std::os::fd::AsFd::as_fd(&front.error),
                super::super::peer::PATIENCE,
            );
            match told {
                true => Ok(Seen::Stopped),
                false if front.peer.has_hung_up() => Ok(Seen::HungUp),
                // It has not accessed that part since.
                false => Ok(Seen::Served),
            }
        }
        other => seen(other),
    }
}

/// Reads and writes while `turn` goes on, for some hundred requests or until the device stops.
fn under_io(
    target: &Target,
    turn: impl Fn(&Ram) -> Result<(), Failure> + Send + 'static,
) -> Result<Held, Failure> {
    let mut front = start(target, Gone::All)?;
    let ram = front.ram.clone();
    let restless = Restless::start(move |_| turn(&ram))?;
    let mut outcome = Ok(());
    for round in 0..40 {
        for slot in 0..4 {
            let kind = if (round + slot) % 2 == 0 { T_IN } else { T_OUT };
            // A write into a truncated file makes it longer again.
            front.post(slot, Io::of_slot(slot, kind, 64 * u64::from(slot), 16384))?;
        }
        front.kick()?;
        outcome = front.wait_within(Duration::from_millis(50));
        if matches!(
            outcome,
            Err(Failure::Stopped { .. } | Failure::HungUp { .. })
        ) {
            break;
        }
    }
    drop(restless);
    front.ram.resize(RAM_BYTES)?;
    let seen = judge(&front, outcome)?;
    Ok(Held::nothing(seen).and(front))
}

fn shrink_and_grow(target: &Target) -> Result<Held, Failure> {
    under_io(target, |ram| {
        ram.resize(0)?;
        ram.resize(RAM_BYTES)
    })
}

fn punch(target: &Target) -> Result<Held, Failure> {
    under_io(target, |ram| {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (at, bytes) in [(0, INDIRECT), (DATA, RAM_BYTES - DATA)] {
            fallocate(ram.file(), how, at, bytes).map_err(failed("fallocate"))?;
        }
        Ok(())
    })
}

/// The regions are sent, the file is truncated, and then the ring is set up.
fn before_start(target: &Target) -> Result<Held, Failure> {
    use super::super::front::greet;
    use super::super::peer::Peer;
    use super::super::wire;
    use std::os::fd::AsFd as _;
    let ram = Ram::unsealable(RAM_BYTES)?;
    let setup = Setup::with(ram.clone())?;
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let table = wire::mem_table(1, &[setup.region()]);
    peer.tell(table, &[ram.file().as_fd()])?;
    ram.resize(0)?;
    match setup.start_ring(peer) {
        Ok(front) => {
            front.kick()?;
            let seen = judge(&front, front.wait_within(SHORT))?;
            Ok(Held::nothing(seen).and(front))
        }
        Err(failure) => Ok(Held::nothing(seen(Err::<(), _>(failure))?)),
    }
}
