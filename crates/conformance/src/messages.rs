// SPDX-License-Identifier: Apache-2.0
//! Checks of the configuration and of each message, valid and invalid.

use super::{Check, Checked, Ended, Tester, ensure, expect};
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FileRange, Marks, RequestId, ResponseCode, SECTION_PAGES,
    Tier,
};
use pagetide_vpri_function::{
    frontend::area::{Area, BOUNCE_BUFFERS},
    wire::{
        Answer, CONFIG_BYTES, Code, Config, Event, Farewell, HEADER_BYTES, Opcode, RANGE_BYTES,
        RANGES_MIN, Reply, SLOT_BYTES, STATUS_BYTES, feature,
    },
};
use vhost::vhost_user::{VhostUserFrontend, message::VhostUserConfigFlags};

/// Size in pages of the spaces under test: not whole sections.
const PAGES: u64 = 2 * SECTION_PAGES + 100;
/// Bits without a meaning in this version of VPRI, in vhost-user and in a ring.
const NO_FEATURE: u64 = 0x00ff_ff80;

/// The checks, in order.
pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "config/layout",
        demand: "64 bytes, of which the reserved ones are zero, the same each time they are read, whole or in parts",
        run: config_layout,
    },
    Check {
        name: "features/known",
        demand: "VIRTIO_F_VERSION_1, no bit without a meaning, and not NESTED",
        run: features_known,
    },
    Check {
        name: "message/reserved",
        demand: "a reserved field, flag or argument that is set is INVALID, and detail its offset",
        run: reserved_fields,
    },
    Check {
        name: "message/length",
        demand: "a message that is shorter or longer than its header says is INVALID",
        run: lengths,
    },
    Check {
        name: "message/unknown-opcode",
        demand: "an unknown operation is UNSUPPORTED",
        run: unknown_opcodes,
    },
    Check {
        name: "message/unknown-space",
        demand: "an operation on an unknown space is answered NO_SPACE",
        run: unknown_spaces,
    },
    Check {
        name: "message/ranges",
        demand: "no range, an empty one, one past the end or one that overflows is INVALID",
        run: bad_ranges,
    },
    Check {
        name: "message/ranges-max",
        demand: "ranges_max ranges are taken in one event, and one more is INVALID",
        run: most_ranges,
    },
    Check {
        name: "map/good",
        demand: "pages are mapped read-only and read-write, also those that are mapped already",
        run: map_good,
    },
    Check {
        name: "unmap/good",
        demand: "pages that no DMA touches are unmapped and protected, also those that are already",
        run: unmap_good,
    },
    Check {
        name: "invalidate/good",
        demand: "ranges, or the whole space, are answered OK when no DMA is under way",
        run: invalidate_good,
    },
    Check {
        name: "standing/good",
        demand: "memory that no device has brought has no standing pages: no mask bit, value 0",
        run: standing_good,
    },
    Check {
        name: "touched/good",
        demand: "with TOUCHED: memory that no device has brought was not touched; else UNSUPPORTED",
        run: touched_good,
    },
    Check {
        name: "section/border",
        demand: "a range of STANDING or TOUCHED that leaves its section is INVALID",
        run: section_border,
    },
    Check {
        name: "respond/unknown",
        demand: "an answer to a request that was not sent is INVALID, as are no answers",
        run: respond_unknown,
    },
    Check {
        name: "bounce/bounds",
        demand: "with OVERWRITE: an area in the function's memory is taken, one outside it refused",
        run: bounce_bounds,
    },
];

fn pages(start: u64, end: u64) -> FileRange {
    FileRange::new(FilePage(start), FilePage(end))
}

fn config_layout(tester: &mut Tester) -> Checked {
    let flags = VhostUserConfigFlags::empty();
    let frontend = tester.probe()?.frontend();
    let mut read = |offset: u32, size: u32| {
        let blank = vec![0; usize::try_from(size).unwrap_or(0)];
        let read = frontend.get_config(offset, size, flags, &blank);
        let read = read.map(|(_, bytes)| bytes);
        read.map_err(|error| Ended::Failed(format!("GET_CONFIG {offset}+{size}: {error}")))
    };
    let whole = read(0, 64)?;
    ensure(
        || whole == read_again(&mut read),
        || "it is not the same when read again".to_owned(),
    )?;
    ensure(
        || whole.len() == CONFIG_BYTES,
        || "it is not whole".to_owned(),
    )?;
    for (offset, size) in [(0_u32, 4_u32), (4, 2), (8, 4), (16, 8), (28, 36)] {
        let part = read(offset, size)?;
        let (from, to) = (offset as usize, (offset + size) as usize);
        ensure(
            || part == whole[from..to],
            || format!("{size} bytes at {offset} are not those of the whole"),
        )?;
    }
    let zero = |from: usize, to: usize| whole[from..to].iter().all(|byte| *byte == 0);
    ensure(
        || zero(6, 8) && zero(28, 64),
        || "a reserved byte is not zero".to_owned(),
    )?;
    let config = Config::decode(&whole).map_err(|error| Ended::Failed(error.to_string()))?;
    ensure(
        || config.ranges_max >= RANGES_MIN,
        || format!("ranges_max is {}, below {RANGES_MIN}", config.ranges_max),
    )?;
    ensure(
        || config.lease_wait_us <= 1_000_000,
        || {
            let wait = config.lease_wait_us;
            format!("lease_wait_us is {wait}: a host holds locks that long")
        },
    )
}

fn read_again(read: &mut impl FnMut(u32, u32) -> Result<Vec<u8>, Ended>) -> Vec<u8> {
    read(0, 64).unwrap_or_default()
}

fn features_known(tester: &mut Tester) -> Checked {
    let offered = tester.probe()?.offered();
    ensure(
        || offered & 1 << 32 != 0,
        || "VIRTIO_F_VERSION_1 is not offered".to_owned(),
    )?;
    ensure(
        || offered & feature::NESTED == 0,
        || "NESTED is offered, which this version specifies but does not have".to_owned(),
    )?;
    let unknown = offered & NO_FEATURE;
    ensure(|| unknown == 0, || format!("unknown bits: {unknown:#x}"))
}

/// A valid message of each operation, all on space `space`.
fn samples(space: DomainId, name: FileKey) -> Vec<Event<'static>> {
    let ranges = vec![pages(3, 5), pages(600, 601)];
    vec![
        Event::Create {
            name,
            page_count: PAGES,
        },
        Event::Map {
            space,
            access: Access::Write,
            ranges: ranges.clone().into(),
        },
        Event::Unmap {
            space,
            ranges: ranges.clone().into(),
        },
        Event::Protect {
            space,
            ranges: ranges.clone().into(),
        },
        Event::Invalidate {
            space,
            ranges: ranges.into(),
        },
        Event::UnmapAll { space },
        Event::Standing {
            space,
            pages: Some(pages(0, 1)),
        },
        Event::Touched {
            space,
            pages: pages(0, 1),
            marks: Marks::Keep,
        },
        Event::Respond {
            answers: vec![answer(RequestId(1))].into(),
        },
        Event::Begin,
        Event::Ready,
        Event::Bar { name },
        Event::Destroy {
            space,
            farewell: Farewell::Release,
        },
    ]
}

fn answer(id: RequestId) -> Answer {
    Answer {
        id,
        code: ResponseCode::Success,
        tier: Tier::Present,
        installed: 0,
        waited_ns: 0,
        handling_ns: 0,
    }
}

fn encoded(event: &Event<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    event.encode(&mut bytes);
    bytes
}

/// Sends `bytes`, which must be refused with `code`.
fn refused(tester: &mut Tester, bytes: &[u8], code: Code, what: &str) -> Result<u32, Ended> {
    let reply = tester.probe()?.say(bytes, STATUS_BYTES)?;
    let reply = Reply::decode(&reply).map_err(|error| Ended::Failed(format!("{what}: {error}")))?;
    expect(reply, code, what).map(|reply| reply.status.detail)
}

/// Sends `bytes`, whose first invalid field is at `at`.
fn refused_at(tester: &mut Tester, bytes: &[u8], at: u32, what: &str) -> Checked {
    let detail = refused(tester, bytes, Code::Invalid, what)?;
    ensure(
        || detail == at,
        || format!("{what}: detail is {detail}, and the field is at {at}"),
    )
}

fn reserved_fields(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let name = tester.name();
    for event in samples(space, name) {
        let opcode = event.opcode();
        for (at, field, what) in [
            (3, 2, "an unknown flag"),
            (12, 12, "the reserved word"),
            (15, 12, "its end"),
        ] {
            let mut bytes = encoded(&event);
            if let Some(byte) = bytes.get_mut(at) {
                *byte |= 0x80;
            }
            let what = format!("{opcode:?} with {what} set");
            refused_at(tester, &bytes, field, &what)?;
        }
        if !matches!(opcode, Opcode::Create | Opcode::Bar | Opcode::Bounce) {
            let mut bytes = encoded(&event);
            if let Some(byte) = bytes.get_mut(16) {
                *byte = 1;
            }
            let what = format!("{opcode:?} with an argument");
            refused_at(tester, &bytes, 16, &what)?;
        }
    }
    Ok(())
}

fn lengths(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let name = tester.name();
    for event in samples(space, name) {
        let opcode = event.opcode();
        let bytes = encoded(&event);
        let what = format!("{opcode:?} with a byte too many");
        let longer = [&bytes[..], &[0]].concat();
        refused(tester, &longer, Code::Invalid, &what)?;
        for len in [1, HEADER_BYTES - 1, bytes.len() - 1] {
            let what = format!("{opcode:?} of {len} bytes instead of {}", bytes.len());
            let shorter = bytes.get(..len).unwrap_or(&bytes);
            refused(tester, shorter, Code::Invalid, &what)?;
        }
        let mut count = bytes.clone();
        if let Some(field) = count.get_mut(8..12) {
            field.copy_from_slice(&u32::MAX.to_le_bytes());
        }
        let what = format!("{opcode:?} that says to have 2^32 - 1 elements");
        refused(tester, &count, Code::Invalid, &what)?;
    }
    Ok(())
}

fn unknown_opcodes(tester: &mut Tester) -> Checked {
    for number in [0_u16, 15, 16, 255, 0x8001, u16::MAX] {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&number.to_le_bytes());
        let what = format!("operation {number}");
        refused(tester, &bytes, Code::Unsupported, &what)?;
    }
    Ok(())
}

fn unknown_spaces(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let name = tester.name();
    for number in [space.0 ^ 0x4000_0000, u32::MAX] {
        for event in samples(DomainId(number), name) {
            let of_a_space = !matches!(
                event.opcode(),
                Opcode::Create | Opcode::Respond | Opcode::Begin | Opcode::Ready | Opcode::Bar
            );
            if of_a_space {
                let reply = tester.probe()?.call(&event)?;
                let what = format!("{:?} of space {number}", event.opcode());
                if event.opcode() == Opcode::Touched && reply.status.code == Code::Unsupported {
                    continue;
                }
                expect(reply, Code::NoSpace, &what)?;
            }
        }
    }
    Ok(())
}

fn bad_ranges(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let range = |first: u64, count: u64| [first.to_le_bytes(), count.to_le_bytes()].concat();
    let bad = [
        (range(5, 0), "an empty range"),
        (range(PAGES, 1), "a range past the end"),
        (range(PAGES - 1, 2), "a range over the end"),
        (range(u64::MAX, 2), "a range that overflows"),
        (range(1, u64::MAX), "a range of 2^64 - 1 pages"),
    ];
    let name = tester.name();
    for event in samples(space, name) {
        let opcode = event.opcode();
        let of_ranges = [
            Opcode::Map,
            Opcode::Unmap,
            Opcode::Protect,
            Opcode::Invalidate,
        ];
        if !of_ranges.contains(&opcode) {
            continue;
        }
        let good = encoded(&event);
        for (bad, what) in &bad {
            // As the second, so that a device which works on the first at once is found.
            let mut bytes = good.clone();
            bytes.truncate(HEADER_BYTES + RANGE_BYTES);
            bytes.extend(bad);
            let what = format!("{opcode:?} of {what}");
            refused(tester, &bytes, Code::Invalid, &what)?;
        }
        if opcode != Opcode::Invalidate {
            let mut none = good[..HEADER_BYTES].to_vec();
            none[8..12].fill(0);
            let what = format!("{opcode:?} of no range");
            refused(tester, &none, Code::Invalid, &what)?;
        }
    }
    let mut create = encoded(&Event::Create {
        name,
        page_count: PAGES,
    });
    create[HEADER_BYTES] = 1;
    refused(tester, &create, Code::Invalid, "CREATE from page 1 on")?;
    create[HEADER_BYTES] = 0;
    create[HEADER_BYTES + 8..].fill(0);
    refused(tester, &create, Code::Invalid, "CREATE of no pages")?;
    create[HEADER_BYTES + 8..].fill(0xff);
    refused(tester, &create, Code::Invalid, "CREATE of 2^64 - 1 pages").map(|_| ())
}

fn most_ranges(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let most = tester.probe()?.config().ranges_max;
    let ranges = |count: u32| -> Vec<FileRange> {
        let single = |number: u32| {
            let page = 2 * (u64::from(number) % (PAGES / 2));
            FilePage(page).single()
        };
        (0..count).map(single).collect()
    };
    let unmap = |count: u32| Event::Unmap {
        space,
        ranges: ranges(count).into(),
    };
    tester.must(&unmap(RANGES_MIN), Code::Ok)?;
    let too_long = u64::from(most) * 16 > BOUNCE_BUFFERS * SLOT_BYTES / 2;
    if too_long {
        return Err(Ended::Skipped(format!("{most} ranges are too many to try")));
    }
    tester.must(&unmap(most), Code::Ok)?;
    tester.must(&unmap(most + 1), Code::Invalid).map(|_| ())
}

fn map_good(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let everything = [pages(0, PAGES)];
    let some = [pages(0, 1), pages(511, 513), pages(PAGES - 1, PAGES)];
    for access in [Access::Read, Access::Write, Access::Read, Access::Write] {
        for ranges in [&some[..], &everything[..]] {
            let event = Event::Map {
                space,
                access,
                ranges: ranges.into(),
            };
            tester.must(&event, Code::Ok)?;
        }
    }
    Ok(())
}

fn unmap_good(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let map = Event::Map {
        space,
        access: Access::Write,
        ranges: vec![pages(0, PAGES)].into(),
    };
    tester.must(&map, Code::Ok)?;
    let ranges = [pages(10, 20), pages(500, 700), pages(PAGES - 1, PAGES)];
    let protect = Event::Protect {
        space,
        ranges: ranges.as_slice().into(),
    };
    let unmap = Event::Unmap {
        space,
        ranges: ranges.as_slice().into(),
    };
    for event in [&protect, &protect, &unmap, &unmap, &protect] {
        tester.must(event, Code::Ok)?;
    }
    tester.must(&Event::UnmapAll { space }, Code::Ok)?;
    tester.must(&unmap, Code::Ok).map(|_| ())
}

fn invalidate_good(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let whole = Event::Invalidate {
        space,
        ranges: Vec::new().into(),
    };
    let part = Event::Invalidate {
        space,
        ranges: vec![pages(1, 2), pages(512, PAGES)].into(),
    };
    tester.must(&part, Code::Ok)?;
    tester.must(&whole, Code::Ok).map(|_| ())
}

fn standing_good(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let count = Event::Standing { space, pages: None };
    let reply = tester.must(&count, Code::Ok)?;
    let value = reply.status.value;
    ensure(|| value == 0, || format!("{value} pages are standing"))?;
    for pages in [pages(0, 512), pages(512, 513), pages(1024, PAGES)] {
        let pages = Some(pages);
        let reply = tester.must(&Event::Standing { space, pages }, Code::Ok)?;
        let mask = reply.mask;
        ensure(
            || mask.is_some_and(|mask| mask.is_empty()),
            || "there is no mask, or one with a bit".to_owned(),
        )?;
    }
    Ok(())
}

fn touched_good(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    let has_it = tester.probe()?.offered() & feature::TOUCHED != 0;
    for (pages, marks) in [
        (pages(0, 512), Marks::Keep),
        (pages(512, 513), Marks::Forget),
        (pages(1024, PAGES), Marks::Forget),
    ] {
        let event = Event::Touched {
            space,
            pages,
            marks,
        };
        if !has_it {
            tester.must(&event, Code::Unsupported)?;
            continue;
        }
        let mask = tester.must(&event, Code::Ok)?.mask;
        ensure(
            || mask.is_some_and(|mask| mask.is_empty()),
            || "there is no mask, or one with a bit".to_owned(),
        )?;
    }
    Ok(())
}

fn section_border(tester: &mut Tester) -> Checked {
    let space = tester.create(PAGES)?;
    for pages in [pages(511, 513), pages(0, 513), pages(500, PAGES)] {
        let event = Event::Standing {
            space,
            pages: Some(pages),
        };
        tester.must(&event, Code::Invalid)?;
        let event = Event::Touched {
            space,
            pages,
            marks: Marks::Keep,
        };
        let code = tester.probe()?.call(&event)?.status.code;
        ensure(
            || code == Code::Invalid || code == Code::Unsupported,
            || format!("TOUCHED over a border was answered with {code:?}"),
        )?;
    }
    Ok(())
}

fn respond_unknown(tester: &mut Tester) -> Checked {
    tester.ready()?;
    for id in [0, 1, u64::MAX] {
        let event = Event::Respond {
            answers: vec![answer(RequestId(id))].into(),
        };
        tester.must(&event, Code::Invalid)?;
    }
    let mut none = encoded(&Event::Respond {
        answers: vec![answer(RequestId(1))].into(),
    });
    none.truncate(HEADER_BYTES);
    none[8..12].fill(0);
    refused(tester, &none, Code::Invalid, "RESPOND of no answer").map(|_| ())
}

fn bounce_bounds(tester: &mut Tester) -> Checked {
    tester.needs(feature::OVERWRITE, "OVERWRITE")?;
    let good = Event::Bounce {
        address: Area::bounce_address(),
        slots: BOUNCE_BUFFERS,
    };
    tester.must(&good, Code::Ok)?;
    for (address, slots) in [
        (Area::bounce_address(), BOUNCE_BUFFERS + 1),
        (Area::bounce_address(), u64::MAX),
        (0, 1),
        (u64::MAX - 4095, 1),
    ] {
        let event = Event::Bounce { address, slots };
        let code = tester.probe()?.call(&event)?.status.code;
        ensure(
            || code != Code::Ok,
            || format!("an area of {slots} slots at {address:#x}, outside the memory, was taken"),
        )?;
    }
    Ok(())
}
