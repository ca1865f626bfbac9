// SPDX-License-Identifier: Apache-2.0
//! Checks of sessions and spaces: how they begin, end, and outlive a driver.

use super::{Check, Checked, Ended, RETURN_LOOK, Tester, ensure};
use pagetide_addr::{Access, DomainId, FilePage};
use pagetide_vpri_function::wire::{Code, Event, Farewell};
use std::{io::Read, os::unix::net::UnixStream};

const PAGES: u64 = 1024;
/// Most spaces that are tried, whatever the device declares.
const SPACES_TRIED_MAX: u32 = 4096;

/// The checks, in order.
pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "session/begin-first",
        demand: "anything but BEGIN is INVALID from a driver that has not sent it",
        run: begin_first,
    },
    Check {
        name: "session/ready-once",
        demand: "READY is taken once after BEGIN, and BEGIN again at any time",
        run: ready_once,
    },
    Check {
        name: "session/one-driver",
        demand: "a second driver is turned away as long as the first is there",
        run: one_driver,
    },
    Check {
        name: "session/generation",
        demand: "the generation stays the same as long as the device was not started anew",
        run: generation,
    },
    Check {
        name: "space/numbers",
        demand: "two memories have two numbers; the same memory twice in a session is EXISTS",
        run: numbers,
    },
    Check {
        name: "space/release",
        demand: "a space that is released is no more, and its memory may have another",
        run: released,
    },
    Check {
        name: "space/retire",
        demand: "a space that is retired is no more, and its name may come again",
        run: retired,
    },
    Check {
        name: "space/farewell",
        demand: "DESTROY with neither or both farewells is INVALID and changes nothing",
        run: farewells,
    },
    Check {
        name: "space/taken-over",
        demand: "memory of an earlier session that is created again keeps its number",
        run: taken_over,
    },
    Check {
        name: "space/not-taken-over",
        demand: "a space of an earlier session is no space before it is created, and gone after READY",
        run: not_taken_over,
    },
    Check {
        name: "space/full",
        demand: "spaces_max spaces there can be; one more is FULL, and one fewer makes room",
        run: full,
    },
    Check {
        name: "bar/create",
        demand: "memory that is barred in a session is EXISTS to CREATE, and a space's to BAR",
        run: barred,
    },
    Check {
        name: "order/strict",
        demand: "events are done in their order, however many are given at a time",
        run: strict_order,
    },
];

fn begin_first(tester: &mut Tester) -> Checked {
    tester.reconnect()?;
    let name = tester.name();
    let events = [
        Event::Create {
            name,
            page_count: PAGES,
        },
        Event::Ready,
        Event::Bar { name },
        Event::UnmapAll { space: DomainId(0) },
    ];
    for event in events {
        tester.must(&event, Code::Invalid)?;
    }
    tester.must(&Event::Begin, Code::Ok).map(|_| ())
}

fn ready_once(tester: &mut Tester) -> Checked {
    tester.ready()?;
    tester.must(&Event::Ready, Code::Invalid)?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.ready()
}

fn one_driver(tester: &mut Tester) -> Checked {
    let failed = |error: std::io::Error| Ended::Failed(error.to_string());
    let mut second = UnixStream::connect(tester.socket()).map_err(failed)?;
    second
        .set_read_timeout(Some(super::probe::PATIENCE))
        .map_err(failed)?;
    let read = second.read(&mut [0]);
    let is_turned_away = match &read {
        Ok(bytes) => *bytes == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    ensure(
        || is_turned_away,
        || "a second connection was not hung up on".to_owned(),
    )?;
    // The first is not affected.
    tester.create(PAGES).map(|_| ())
}

fn generation(tester: &mut Tester) -> Checked {
    let before = tester.probe()?.config().generation;
    tester.reconnect()?;
    let after = tester.probe()?.config().generation;
    ensure(
        || before == after,
        || format!("it was {before} and is {after}, without a new start"),
    )
}

fn numbers(tester: &mut Tester) -> Checked {
    let name = tester.name();
    let one = tester.create_named(name, PAGES)?;
    let other = tester.create(PAGES)?;
    ensure(
        || one != other,
        || format!("two memories have the number {}", one.0),
    )?;
    let again = Event::Create {
        name,
        page_count: PAGES,
    };
    tester.must(&again, Code::Exists).map(|_| ())
}

fn destroy(space: DomainId, farewell: Farewell) -> Event<'static> {
    Event::Destroy { space, farewell }
}

fn ended(tester: &mut Tester, farewell: Farewell) -> Checked {
    let name = tester.name();
    let space = tester.create_named(name, PAGES)?;
    tester.must(&destroy(space, farewell), Code::Ok)?;
    tester.must(&destroy(space, farewell), Code::NoSpace)?;
    tester.must(&Event::UnmapAll { space }, Code::NoSpace)?;
    let again = tester.create_named(name, PAGES)?;
    tester
        .must(&Event::UnmapAll { space: again }, Code::Ok)
        .map(|_| ())
}

fn released(tester: &mut Tester) -> Checked {
    ended(tester, Farewell::Release)
}

fn retired(tester: &mut Tester) -> Checked {
    ended(tester, Farewell::Retire)
}

fn farewells(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    for flags in [0_u8, 3, 4] {
        let mut bytes = Vec::new();
        destroy(space, Farewell::Release).encode(&mut bytes);
        bytes[2] = flags;
        let reply = tester
            .probe()?
            .say(&bytes, pagetide_vpri_function::wire::STATUS_BYTES)?;
        let reply = pagetide_vpri_function::wire::Reply::decode(&reply);
        let reply = reply.map_err(|error| Ended::Failed(error.to_string()))?;
        super::expect(reply, Code::Invalid, &format!("DESTROY with flags {flags}"))?;
    }
    tester
        .must(&Event::UnmapAll { space }, Code::Ok)
        .map(|_| ())
}

fn taken_over(tester: &mut Tester) -> Checked {
    let name = tester.name();
    let first = tester.create_named(name, PAGES)?;
    tester.ready()?;
    tester.must(&Event::Begin, Code::Ok)?;
    let second = tester.create_named(name, PAGES)?;
    ensure(
        || first == second,
        || "it has another number after BEGIN".to_owned(),
    )?;
    tester.reconnect()?;
    tester.must(&Event::Begin, Code::Ok)?;
    let third = tester.create_named(name, PAGES)?;
    ensure(
        || first == third,
        || "it has another number after a reconnect".to_owned(),
    )
}

fn not_taken_over(tester: &mut Tester) -> Checked {
    let name = tester.name();
    let space = tester.create_named(name, PAGES)?;
    tester.ready()?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.must(&Event::UnmapAll { space }, Code::NoSpace)?;
    tester.ready()?;
    tester.must(&Event::UnmapAll { space }, Code::NoSpace)?;
    // Its memory may get a space again.
    tester.create_named(name, PAGES).map(|_| ())
}

fn full(tester: &mut Tester) -> Checked {
    // This ends all earlier spaces.
    tester.ready()?;
    let most = tester.probe()?.config().spaces_max;
    if most > SPACES_TRIED_MAX {
        return Err(Ended::Skipped(format!(
            "there can be {most} spaces; more than {SPACES_TRIED_MAX} are not tried"
        )));
    }
    let mut spaces = Vec::new();
    for _ in 0..most {
        spaces.push(tester.create(1)?);
    }
    let name = tester.name();
    let event = Event::Create {
        name,
        page_count: 1,
    };
    tester.must(&event, Code::Full)?;
    for space in spaces.iter().take(1) {
        tester.must(&destroy(*space, Farewell::Release), Code::Ok)?;
    }
    tester.must(&event, Code::Ok).map(|_| ())
}

fn barred(tester: &mut Tester) -> Checked {
    let name = tester.name();
    tester.must(&Event::Bar { name }, Code::Ok)?;
    tester.must(&Event::Bar { name }, Code::Ok)?;
    let create = Event::Create {
        name,
        page_count: PAGES,
    };
    tester.must(&create, Code::Exists)?;
    let other = tester.name();
    tester.create_named(other, PAGES)?;
    tester.must(&Event::Bar { name: other }, Code::Exists)?;
    // Undo this for the next driver.
    tester.must(&Event::Begin, Code::Ok)?;
    tester.must(&create, Code::Ok).map(|_| ())
}

fn strict_order(tester: &mut Tester) -> Checked {
    let name = tester.name();
    for _ in 0..20 {
        let space = tester.create_named(name, PAGES)?;
        let map = Event::Map {
            space,
            access: Access::Write,
            ranges: vec![FilePage(0).run(PAGES)].into(),
        };
        let told = [
            map.clone(),
            Event::UnmapAll { space },
            map.clone(),
            destroy(space, Farewell::Release),
            map.clone(),
            Event::UnmapAll { space },
            map,
        ];
        let codes = tester.probe()?.call_all(&told)?;
        let (before, after) = codes.split_at(4);
        let in_order = || {
            before.iter().all(|code| *code == Code::Ok)
                && after.iter().all(|code| *code == Code::NoSpace)
        };
        ensure(in_order, || {
            format!("a space that is destroyed after three events and before three: {codes:?}")
        })?;
        // The memory may be released a little later.
        std::thread::sleep(RETURN_LOOK);
    }
    Ok(())
}
