// SPDX-License-Identifier: Apache-2.0
//! Layouts: golden bytes, round trips, and arbitrary bytes.

use super::*;
use pagetide_addr::{
    Access, DeviceId, DomainId, FileKey, FilePage, FilePageSet, FileRange, Marks, PageRequest,
    QueueId, RequestId, RequestKind, ResponseCode, SECTION_PAGES, Tier,
};
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    let words = bytes.chunks(8);
    let word = |word: &[u8]| word.iter().map(|byte| format!("{byte:02x}")).collect();
    words.map(word).collect::<Vec<String>>().join(" ")
}

fn range(first: u64, count: u64) -> FileRange {
    FileRange::new(FilePage(first), FilePage(first + count))
}

fn encoded(event: &Event<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    event.encode(&mut bytes);
    bytes
}

const NAME: FileKey = FileKey {
    dev: 0x0102,
    ino: 0x0304_0506,
};
const SPACE: DomainId = DomainId(0x0a0b_0c0d);

fn answer() -> Answer {
    Answer {
        id: RequestId(0x0007_0000_0000_0009),
        code: ResponseCode::ResponseFailure,
        tier: Tier::Compressed,
        installed: 5,
        waited_ns: 0x1234,
        handling_ns: 0x5678,
    }
}

/// An event of each operation with its bytes, in the order of the numbers.
fn golden_events() -> Vec<(Event<'static>, &'static str)> {
    let mut events = golden_events_of_attributes();
    events.extend(golden_events_of_pages());
    events.extend(golden_events_of_sessions());
    events
}

fn golden_events_of_attributes() -> Vec<(Event<'static>, &'static str)> {
    let space = SPACE;
    let ranges = vec![range(7, 2), range(0x300, 0x100)];
    vec![
        (
            Event::Create {
                name: NAME,
                page_count: 0x4_0000,
            },
            "0100000000000000 0100000000000000 0201000000000000 0605040300000000 \
             0000000000000000 0000040000000000",
        ),
        (
            Event::Destroy {
                space,
                farewell: Farewell::Retire,
            },
            "020002000d0c0b0a 0000000000000000 0000000000000000 0000000000000000",
        ),
        (
            Event::Map {
                space,
                access: Access::Write,
                ranges: ranges.clone().into(),
            },
            "030001000d0c0b0a 0200000000000000 0000000000000000 0000000000000000 \
             0700000000000000 0200000000000000 0003000000000000 0001000000000000",
        ),
        (
            Event::Unmap {
                space,
                ranges: vec![range(1, 1)].into(),
            },
            "040000000d0c0b0a 0100000000000000 0000000000000000 0000000000000000 \
             0100000000000000 0100000000000000",
        ),
        (
            Event::Protect {
                space,
                ranges: vec![range(1, 1)].into(),
            },
            "050000000d0c0b0a 0100000000000000 0000000000000000 0000000000000000 \
             0100000000000000 0100000000000000",
        ),
        (
            Event::Invalidate {
                space,
                ranges: Vec::new().into(),
            },
            "060000000d0c0b0a 0000000000000000 0000000000000000 0000000000000000",
        ),
    ]
}

fn golden_events_of_pages() -> Vec<(Event<'static>, &'static str)> {
    let space = SPACE;
    vec![
        (
            Event::UnmapAll { space },
            "070000000d0c0b0a 0000000000000000 0000000000000000 0000000000000000",
        ),
        (
            Event::Standing {
                space,
                pages: Some(range(512, 512)),
            },
            "080000000d0c0b0a 0100000000000000 0000000000000000 0000000000000000 \
             0002000000000000 0002000000000000",
        ),
        (
            Event::Touched {
                space,
                pages: range(3, 1),
                marks: Marks::Forget,
            },
            "090001000d0c0b0a 0100000000000000 0000000000000000 0000000000000000 \
             0300000000000000 0100000000000000",
        ),
        (
            Event::Respond {
                answers: vec![answer()].into(),
            },
            "0a00000000000000 0100000000000000 0000000000000000 0000000000000000 \
             0900000000000700 0f00020000000000 0500000000000000 3412000000000000 \
             7856000000000000",
        ),
    ]
}

fn golden_events_of_sessions() -> Vec<(Event<'static>, &'static str)> {
    vec![
        (
            Event::Begin,
            "0b00000000000000 0000000000000000 0000000000000000 0000000000000000",
        ),
        (
            Event::Ready,
            "0c00000000000000 0000000000000000 0000000000000000 0000000000000000",
        ),
        (
            Event::Bar { name: NAME },
            "0d00000000000000 0000000000000000 0201000000000000 0605040300000000",
        ),
        (
            Event::Bounce {
                address: 0x10_0000,
                slots: 64,
            },
            "0e00000000000000 0000000000000000 0000100000000000 4000000000000000",
        ),
    ]
}

#[test]
fn event_of_each_operation_has_its_golden_bytes() {
    let events = golden_events();
    for (event, golden) in &events {
        assert_eq!(hex(&encoded(event)), *golden, "{event:?}");
        assert_eq!(Event::decode(&encoded(event)).as_ref(), Ok(event));
    }
    let opcodes: Vec<Opcode> = events.iter().map(|(event, _)| event.opcode()).collect();
    assert_eq!(opcodes, Opcode::ALL);
}

#[test]
fn page_request_has_its_golden_bytes() {
    let mut request = PageRequest {
        id: RequestId(0x0001_0000_0000_0002),
        device: DeviceId(3),
        queue: QueueId(4),
        domain: DomainId(5),
        pages: range(0x600, 7),
        access: Access::Write,
        kind: RequestKind::Overwrite { slot: 8 },
        vector: Some(9),
        sent_ns: 0x0a0b,
        hold_us: 12,
    };
    assert_eq!(
        hex(&encode_request(&request)),
        "0200000000000100 0300000004000900 0500000001020000 0006000000000000 \
         0700000000000000 0b0a000000000000 0c00000008000000 0000000000000000"
    );
    request.vector = None;
    request.kind = RequestKind::AliasFault;
    request.access = Access::Read;
    assert_eq!(
        hex(&encode_request(&request)),
        "0200000000000100 030000000400ffff 0500000000030000 0006000000000000 \
         0700000000000000 0b0a000000000000 0c00000000000000 0000000000000000"
    );
}

#[test]
fn record_of_the_access_log_has_its_golden_bytes() {
    let record = LogRecord {
        time_ns: 0x0102,
        device: DeviceId(3),
        space: DomainId(4),
        address: 0x0506,
        len_bytes: 0x1000,
        access: Access::Write,
        service: Service::Network,
    };
    let bytes = encode_record(&record);
    assert_eq!(
        hex(&bytes),
        "0201000000000000 0300000004000000 0605000000000000 0010000001010000"
    );
    assert_eq!(decode_record(&bytes), Ok(record));
    assert!(decode_record(&bytes[..31]).is_err());
    assert_eq!(LogEntry::decode(&bytes), Ok(LogEntry::Access(record)));
}

#[test]
fn entry_that_tells_of_losses_has_its_golden_bytes_and_is_no_access() {
    let entry = LogEntry::Lost {
        time_ns: 0x0102,
        records: 0x0304,
    };
    let bytes = entry.encode();
    assert_eq!(
        hex(&bytes),
        "0201000000000000 0000000000000000 0403000000000000 0000000000ff0000"
    );
    assert_eq!(LogEntry::decode(&bytes), Ok(entry));
    assert!(decode_record(&bytes).is_err());
    assert!(LogEntry::decode(&bytes[..31]).is_err());
}

#[test]
fn configuration_has_its_golden_bytes_and_another_magic_or_version_is_refused() {
    let config = Config {
        spaces_max: 1,
        requests_max: 2,
        ranges_max: 256,
        lease_wait_us: 4,
        generation: 5,
    };
    let bytes = config.encode();
    assert_eq!(
        hex(&bytes),
        "5650524901000000 0100000002000000 0001000004000000 0500000000000000 \
         0000000000000000 0000000000000000 0000000000000000 0000000000000000"
    );
    assert_eq!(Config::decode(&bytes), Ok(config));
    for (at, value) in [(0, 1), (4, 2), (17, 0)] {
        let mut other = bytes;
        other[at] = value;
        assert!(Config::decode(&other).is_err(), "byte {at}");
    }
}

#[test]
fn reply_has_its_golden_bytes_with_and_without_a_mask() {
    let status = Status {
        code: Code::Busy,
        detail: 2,
        value: 3,
    };
    let bytes = Reply::from(status).encode();
    assert_eq!(hex(&bytes), "0100000002000000 0300000000000000");
    assert_eq!(Reply::decode(&bytes), Ok(status.into()));
    let mut mask = FilePageSet::EMPTY;
    mask.insert(FilePage(0));
    mask.insert(FilePage(9));
    mask.insert(FilePage(511));
    let reply = Reply {
        status: Status::OK,
        mask: Some(mask),
    };
    let bytes = reply.encode();
    assert_eq!((bytes[16], bytes[17], bytes[79]), (1, 2, 0x80));
    assert_eq!(Reply::decode(&bytes), Ok(reply));
    assert!(Reply::decode(&bytes[..20]).is_err());
    assert!(Reply::decode(&[9; 16]).is_err(), "no such code");
}

#[test]
fn event_with_a_reserved_field_set_or_a_byte_too_many_is_refused() {
    for (event, _) in golden_events() {
        let bytes = encoded(&event);
        let mut reserved = bytes.clone();
        reserved[12] = 1;
        assert_eq!(Event::decode(&reserved).unwrap_err().at(), 12, "{event:?}");
        let mut flags = bytes.clone();
        flags[3] = 0x80;
        assert_eq!(Event::decode(&flags).unwrap_err().at(), 2, "{event:?}");
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Event::decode(&longer).is_err(), "{event:?}");
        assert!(
            Event::decode(&bytes[..bytes.len() - 1]).is_err(),
            "{event:?}"
        );
    }
}

#[test]
fn operation_that_is_none_is_unsupported_and_not_invalid() {
    for number in [0_u16, 15, 0xffff] {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&number.to_le_bytes());
        let error = Event::decode(&bytes).unwrap_err();
        assert_eq!(error.status().code, Code::Unsupported, "{number}");
    }
    let error = Event::decode(&[]).unwrap_err();
    assert_eq!(error.status().code, Code::Invalid);
}

#[test]
fn destroy_without_or_with_both_farewells_is_refused() {
    for flags in [0, 3] {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[0] = 2;
        bytes[2] = flags;
        let at = Event::decode(&bytes).map_err(|error| error.at());
        assert_eq!(at, Err(2), "flags {flags}");
    }
}

#[test]
fn range_that_is_empty_overflows_or_leaves_its_section_is_refused() {
    let standing = |first: u64, count: u64| {
        let mut bytes = encoded(&Event::Standing {
            space: SPACE,
            pages: Some(range(0, 1)),
        });
        bytes[32..40].copy_from_slice(&first.to_le_bytes());
        bytes[40..48].copy_from_slice(&count.to_le_bytes());
        Event::decode(&bytes).is_ok()
    };
    assert!(standing(0, 512) && standing(1023, 1));
    assert!(!standing(0, 513) && !standing(1023, 2) && !standing(5, 0));
    assert!(!standing(u64::MAX, 2) && !standing(1, u64::MAX) && !standing(PAGES_MAX, 1));
}

#[test]
fn create_that_does_not_begin_at_page_0_is_refused() {
    let mut bytes = encoded(&golden_events()[0].0);
    bytes[32] = 1;
    assert_eq!(Event::decode(&bytes).unwrap_err().at(), 32);
}

fn any_range() -> impl Strategy<Value = FileRange> {
    (0..PAGES_MAX / 2, 1..PAGES_MAX / 2).prop_map(|(first, count)| range(first, count))
}

fn any_range_in_section() -> impl Strategy<Value = FileRange> {
    (0..PAGES_MAX / SECTION_PAGES, 0..SECTION_PAGES)
        .prop_flat_map(|(section, first)| (Just((section, first)), 1..=SECTION_PAGES - first))
        .prop_map(|((section, first), count)| range(section * SECTION_PAGES + first, count))
}

fn any_ranges(least: usize) -> impl Strategy<Value = Vec<FileRange>> {
    prop::collection::vec(any_range(), least..20)
}

fn any_name() -> impl Strategy<Value = FileKey> {
    any::<(u64, u64)>().prop_map(|(dev, ino)| FileKey { dev, ino })
}

fn any_access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Read), Just(Access::Write)]
}

fn any_answer() -> impl Strategy<Value = Answer> {
    let code = prop_oneof![
        Just(ResponseCode::Success),
        Just(ResponseCode::InvalidRequest),
        Just(ResponseCode::ResponseFailure),
    ];
    let tier = prop_oneof![
        Just(Tier::Present),
        Just(Tier::Zero),
        Just(Tier::Compressed),
        Just(Tier::Uncompressed),
        Just(Tier::Disk),
        Just(Tier::Remote),
        Just(Tier::Unknown),
    ];
    let numbers = any::<(u64, u64, u64, u64)>();
    (code, tier, numbers).prop_map(
        |(code, tier, (id, installed, waited_ns, handling_ns))| Answer {
            id: RequestId(id),
            code,
            tier,
            installed,
            waited_ns,
            handling_ns,
        },
    )
}

fn any_event() -> impl Strategy<Value = Event<'static>> {
    let space = || any::<u32>().prop_map(DomainId);
    let marks = prop_oneof![Just(Marks::Keep), Just(Marks::Forget)];
    let farewell = prop_oneof![Just(Farewell::Release), Just(Farewell::Retire)];
    prop_oneof![
        (any_name(), 1..=PAGES_MAX)
            .prop_map(|(name, page_count)| Event::Create { name, page_count }),
        (space(), farewell).prop_map(|(space, farewell)| Event::Destroy { space, farewell }),
        (space(), any_access(), any_ranges(1)).prop_map(|(space, access, ranges)| Event::Map {
            space,
            access,
            ranges: ranges.into()
        }),
        (space(), any_ranges(1)).prop_map(|(space, ranges)| Event::Unmap {
            space,
            ranges: ranges.into()
        }),
        (space(), any_ranges(1)).prop_map(|(space, ranges)| Event::Protect {
            space,
            ranges: ranges.into()
        }),
        (space(), any_ranges(0)).prop_map(|(space, ranges)| Event::Invalidate {
            space,
            ranges: ranges.into()
        }),
        space().prop_map(|space| Event::UnmapAll { space }),
        (space(), prop::option::of(any_range_in_section()))
            .prop_map(|(space, pages)| Event::Standing { space, pages }),
        (space(), any_range_in_section(), marks).prop_map(|(space, pages, marks)| Event::Touched {
            space,
            pages,
            marks
        }),
        prop::collection::vec(any_answer(), 1..20).prop_map(|answers| Event::Respond {
            answers: answers.into()
        }),
        Just(Event::Begin),
        Just(Event::Ready),
        any_name().prop_map(|name| Event::Bar { name }),
        any::<(u64, u64)>().prop_map(|(address, slots)| Event::Bounce { address, slots }),
    ]
}

fn any_request() -> impl Strategy<Value = PageRequest> {
    let kind = prop_oneof![
        Just(RequestKind::Demand),
        Just(RequestKind::Prefault),
        Just(RequestKind::Blank),
        Just(RequestKind::BlankAhead),
        any::<u32>().prop_map(|slot| RequestKind::Overwrite { slot }),
        Just(RequestKind::AliasFault),
    ];
    let from = any::<(u64, u32, u16, u32)>();
    let pages = (0..PAGES_MAX / 2, 1_u64..=64).prop_map(|(first, count)| range(first, count));
    let vector = prop::option::of(0_u16..0xffff);
    let times = any::<(u64, u32)>();
    (from, pages, any_access(), kind, vector, times).prop_map(
        |((id, device, queue, space), pages, access, kind, vector, (sent_ns, hold_us))| {
            PageRequest {
                id: RequestId(id),
                device: DeviceId(device),
                queue: QueueId(queue),
                domain: DomainId(space),
                pages,
                access,
                kind,
                vector,
                sent_ns,
                hold_us,
            }
        },
    )
}

/// Bytes of a valid event, some of them perhaps changed, or arbitrary bytes.
fn any_damaged() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let damaged = (
        any_event(),
        changes,
        any::<prop::sample::Index>(),
        any::<bool>(),
    );
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        damaged.prop_map(|(event, changes, cut, is_cut)| {
            let mut bytes = encoded(&event);
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if is_cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            bytes
        }),
    ]
}

proptest! {
    #[test]
    fn event_encoded_and_decoded_is_the_same(event in any_event()) {
        prop_assert_eq!(Event::decode(&encoded(&event)), Ok(event));
    }

    #[test]
    fn request_encoded_and_decoded_is_the_same(request in any_request()) {
        let bytes = encode_request(&request);
        prop_assert_eq!(decode_request(&bytes), Ok(request));
        prop_assert_eq!(request_id(&bytes), Some(request.id));
    }

    #[test]
    fn answer_goes_to_the_queue_it_is_given(answer in any_answer(), queue: u16) {
        let response = answer.to_queue(QueueId(queue));
        prop_assert_eq!(response.queue, QueueId(queue));
        prop_assert_eq!(Answer::from(&response), answer);
    }

    #[test]
    fn bytes_that_are_an_event_are_that_event_and_no_other(bytes in any_damaged()) {
        match Event::decode(&bytes) {
            // Except for the tier: all unknown numbers mean the same.
            Ok(event) => {
                let again = encoded(&event);
                prop_assert_eq!(again.len(), bytes.len());
                prop_assert_eq!(Event::decode(&again), Ok(event.clone()));
                if event.opcode() != Opcode::Respond {
                    prop_assert_eq!(again, bytes);
                }
            }
            Err(error) => prop_assert!(error.status().code != Code::Ok && !error.to_string().is_empty()),
        }
    }

    #[test]
    fn bytes_from_a_device_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        if let Ok(request) = decode_request(&bytes) {
            prop_assert!(!request.pages.is_empty() && request.pages.end.0 <= PAGES_MAX);
        }
        let masked = Reply::decode(&bytes).is_ok_and(|reply| reply.mask.is_some());
        prop_assert!(!masked || bytes.len() == STATUS_BYTES + MASK_BYTES);
        prop_assert!(Config::decode(&bytes).is_err());
        prop_assert!(decode_record(&bytes).is_err() || bytes.len() >= RECORD_BYTES);
    }
}
