// SPDX-License-Identifier: Apache-2.0
//! Checks of the event queue as a queue: framing, full rings, malformed chains.
//!
//! A malformed chain comes back: with a status if there is room for one, otherwise
//! empty. A broken ring may end the connection, but the device must not crash, and
//! must still serve the next driver.

use super::{Check, Checked, Tester, ensure, expect, probe::Part};
use pagetide_addr::{FilePage, FileRange};
use pagetide_vpri_function::{
    frontend::{
        area::{Area, BASE, EVENT_DESCRIPTORS},
        ring::{Descriptor, NEXT, WRITE},
    },
    wire::{Code, Event, HEADER_BYTES, Reply, STATUS_BYTES},
};

const PAGES: u64 = 512;
/// Descriptors that no valid chain uses.
const SPARE: u16 = 40;

/// The checks, in order.
pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "queue/framing",
        demand: "a message and its reply may be cut into any number of descriptors",
        run: framing,
    },
    Check {
        name: "queue/full",
        demand: "as many events as the queue holds are answered, each once",
        run: full_queue,
    },
    Check {
        name: "queue/index-wrap",
        demand: "the queue goes on past the wrap of its 16-bit index",
        run: index_wrap,
    },
    Check {
        name: "chain/no-reply",
        demand: "a message without room for a status comes back empty, and the queue goes on",
        run: no_reply,
    },
    Check {
        name: "chain/no-message",
        demand: "a chain without a message is INVALID, and the queue goes on",
        run: no_message,
    },
    Check {
        name: "chain/order",
        demand: "a chain that is readable after its writable part comes back empty",
        run: readable_after_writable,
    },
    Check {
        name: "chain/short-mask",
        demand: "an event that asks for a mask without room for it is INVALID",
        run: short_mask,
    },
    Check {
        name: "chain/huge",
        demand: "a message far longer than any can be is INVALID",
        run: huge,
    },
    Check {
        name: "chain/nonsense",
        demand: "a chain that loops, lies outside memory or has no head harms no later driver",
        run: nonsense,
    },
    Check {
        name: "ring/nonsense",
        demand: "an available index that is too far on harms no later driver",
        run: available_index,
    },
];

fn unmap_event(tester: &mut Tester) -> Result<Vec<u8>, super::Ended> {
    let space = tester.create(PAGES)?;
    let event = Event::Unmap {
        space,
        ranges: vec![
            FileRange::new(FilePage(1), FilePage(5)),
            FilePage(9).single(),
        ]
        .into(),
    };
    let mut bytes = Vec::new();
    event.encode(&mut bytes);
    Ok(bytes)
}

fn framing(tester: &mut Tester) -> Checked {
    let bytes = unmap_event(tester)?;
    let len = u32::try_from(bytes.len()).unwrap_or(0);
    // Where the message is cut, and where its reply is cut.
    for (cuts, reply_cut) in [
        (vec![1], 1),
        (vec![32], 8),
        (vec![16, 33, 40], 15),
        (vec![8, 31], 2),
        (vec![len - 1], 9),
    ] {
        let probe = tester.probe()?;
        let slot = probe.free_slot()?;
        probe.lay_out(slot, &bytes, STATUS_BYTES)?;
        let (message_at, reply_at) = (Area::message_at(slot), Area::reply_at(slot));
        let mut parts = Vec::new();
        let mut from = 0;
        for to in cuts.iter().copied().chain([len]) {
            parts.push(Part::Read(message_at + u64::from(from), to - from));
            from = to;
        }
        parts.push(Part::Write(reply_at, reply_cut));
        parts.push(Part::Write(reply_at + u64::from(reply_cut), 16 - reply_cut));
        probe.submit(slot, &parts)?;
        let used = probe.wait_used()?;
        let written = probe.written(slot, used.len);
        let what = format!("a message cut at {cuts:?}");
        let reply = Reply::decode(&written);
        let reply = reply.map_err(|error| super::Ended::Failed(format!("{what}: {error}")))?;
        expect(reply, Code::Ok, &what)?;
    }
    Ok(())
}

fn full_queue(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let events: Vec<_> = (0..EVENT_DESCRIPTORS / super::probe::CHAIN_ROOM)
        .map(|number| Event::Unmap {
            space,
            ranges: vec![FilePage(u64::from(number)).single()].into(),
        })
        .collect();
    for _ in 0..8 {
        let codes = tester.probe()?.call_all(&events)?;
        ensure(
            || codes.iter().all(|code| *code == Code::Ok),
            || format!("unmaps given all at once: {codes:?}"),
        )?;
    }
    Ok(())
}

fn index_wrap(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let events = vec![Event::UnmapAll { space }; 16];
    for _ in 0..u32::from(u16::MAX) / 16 + 2 {
        let codes = tester.probe()?.call_all(&events)?;
        ensure(
            || codes.iter().all(|code| *code == Code::Ok),
            || format!("{codes:?}"),
        )?;
    }
    Ok(())
}

/// Submits `parts`, and checks that the queue goes on: the next event is answered.
fn survives(tester: &mut Tester, parts: &[Part], end: BadEnd) -> Checked {
    let space = tester.create(PAGES)?;
    let probe = tester.probe()?;
    let slot = probe.free_slot()?;
    probe.lay_out(SPARE, &[0; HEADER_BYTES], STATUS_BYTES)?;
    let bad = probe.submit(slot, parts)?;
    let slot = probe.free_slot()?;
    let mut bytes = Vec::new();
    Event::UnmapAll { space }.encode(&mut bytes);
    let good_parts = probe.lay_out(slot, &bytes, STATUS_BYTES)?;
    let good = probe.submit(slot, &good_parts)?;
    let used = probe.wait_used()?;
    ensure(
        || used.head == bad,
        || "it does not come back before the event after it".to_owned(),
    )?;
    let failed =
        |error: pagetide_vpri_function::wire::WireError| super::Ended::Failed(error.to_string());
    match end {
        BadEnd::Empty => ensure(
            || used.len == 0,
            || format!("it comes back with {} bytes, and not empty", used.len),
        )?,
        BadEnd::Invalid => {
            let reply = Reply::decode(&probe.written(SPARE, used.len)).map_err(failed)?;
            expect(reply, Code::Invalid, "it")?;
        }
    }
    let used = probe.wait_used()?;
    ensure(
        || used.head == good,
        || "an unknown chain came back".to_owned(),
    )?;
    let reply = Reply::decode(&probe.written(slot, used.len)).map_err(failed)?;
    expect(reply, Code::Ok, "the event after it").map(|_| ())
}

/// How a malformed chain comes back.
#[derive(Clone, Copy)]
enum BadEnd {
    /// With nothing written.
    Empty,
    /// With a status.
    Invalid,
}

fn no_reply(tester: &mut Tester) -> Checked {
    let len = u32::try_from(HEADER_BYTES).unwrap_or(0);
    let message = Part::Read(Area::message_at(SPARE), len);
    survives(tester, &[message], BadEnd::Empty)?;
    for room in [1, 15] {
        let reply = Part::Write(Area::reply_at(SPARE), room);
        survives(tester, &[message, reply], BadEnd::Empty)?;
    }
    Ok(())
}

fn no_message(tester: &mut Tester) -> Checked {
    let reply = Part::Write(Area::reply_at(SPARE), 16);
    survives(tester, &[reply], BadEnd::Invalid)
}

fn readable_after_writable(tester: &mut Tester) -> Checked {
    let len = u32::try_from(HEADER_BYTES).unwrap_or(0);
    let message = Part::Read(Area::message_at(SPARE), len);
    let reply = Part::Write(Area::reply_at(SPARE), 16);
    survives(tester, &[reply, message], BadEnd::Empty)
}

fn huge(tester: &mut Tester) -> Checked {
    // A buffer as long as the memory, many times over.
    let whole = u32::try_from(Area::bounce_address() - BASE).unwrap_or(0);
    let part = Part::Read(0, whole);
    let reply = Part::Write(Area::reply_at(SPARE), 16);
    let parts = [part, part, part, part, part, part, part, reply];
    survives(tester, &parts, BadEnd::Invalid)
}

fn short_mask(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let pages = Some(FilePage(3).single());
    let mut bytes = Vec::new();
    Event::Standing { space, pages }.encode(&mut bytes);
    for room in [16, 79] {
        let reply = tester.probe()?.say(&bytes, room)?;
        let reply = Reply::decode(&reply);
        let reply = reply.map_err(|error| super::Ended::Failed(error.to_string()))?;
        expect(reply, Code::Invalid, "STANDING without room for its mask")?;
    }
    Ok(())
}

/// Submits descriptors that form no chain, and checks that the device serves the next driver.
fn outlives(tester: &mut Tester, descriptors: &[Descriptor], head: u16) -> Checked {
    tester.reconnect()?;
    tester.must(&Event::Begin, Code::Ok)?;
    let probe = tester.probe()?;
    for (index, descriptor) in (0..).zip(descriptors) {
        probe.describe(index, *descriptor)?;
    }
    probe.submit_raw(head)?;
    tester.reconnect()?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.create(PAGES).map(|_| ())
}

fn nonsense(tester: &mut Tester) -> Checked {
    let at = |address, len, flags, next| Descriptor {
        address,
        len,
        flags,
        next,
    };
    let indirect = 4;
    let cases = [
        (at(BASE, 16, NEXT, 0), 0),
        (at(BASE, 16, NEXT, 999), 0),
        (at(BASE, 16, 0, 0), 999),
        (at(0, 16, 0, 0), 0),
        (at(u64::MAX - 7, 16, 0, 0), 0),
        (at(BASE, u32::MAX, 0, 0), 0),
        (at(BASE, u32::MAX, WRITE, 0), 0),
        (at(BASE, 16, indirect, 0), 0),
        (at(BASE, 17, indirect, 0), 0),
        (at(u64::MAX, u32::MAX, u16::MAX, u16::MAX), 0),
    ];
    for (descriptor, head) in cases {
        outlives(tester, &[descriptor], head)?;
    }
    Ok(())
}

fn available_index(tester: &mut Tester) -> Checked {
    for index in [1_u16, EVENT_DESCRIPTORS + 1, 0x8000, u16::MAX] {
        tester.reconnect()?;
        tester.must(&Event::Begin, Code::Ok)?;
        let probe = tester.probe()?;
        probe.describe(
            0,
            Descriptor {
                address: BASE,
                len: 16,
                flags: 0,
                next: 0,
            },
        )?;
        let at = Area::event_ring().available + 2;
        let is_one_more = 1_u16.wrapping_add(index);
        probe.put(at, &is_one_more.to_le_bytes())?;
        probe.kick();
    }
    tester.reconnect()?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.create(PAGES).map(|_| ())
}
