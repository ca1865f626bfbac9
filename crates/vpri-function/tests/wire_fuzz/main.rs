// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets' functions over random bytes and damaged messages, with the stable compiler.

mod bodies;
#[path = "../../../trace/tests/formats_fuzz/seeds.rs"]
mod seeds;

use pagetide_addr::{
    Access, DeviceId, DomainId, FileKey, FilePage, PageRequest, PageResponse, QueueId, RequestId,
    ResponseCode,
};
use pagetide_vpri_function::wire::{
    Answer, CONFIG_BYTES, Config, Event, MASK_BYTES, RECORD_BYTES, Reply, STATUS_BYTES, Status,
    encode_request,
};
use proptest::{prelude::*, sample::Index};

fn request() -> PageRequest {
    let pages = FilePage(3).single();
    PageRequest::demand(
        RequestId(4),
        DeviceId(1),
        QueueId(2),
        DomainId(0),
        pages,
        Access::Write,
    )
}

fn events() -> Vec<Vec<u8>> {
    let space = DomainId(0);
    let ranges = || vec![FilePage(1).single(), FilePage(700).single()].into();
    let answer = Answer::from(&PageResponse::to(&request(), ResponseCode::Success));
    let name = FileKey { dev: 1, ino: 2 };
    let events = [
        Event::Create {
            name,
            page_count: 1000,
        },
        Event::Map {
            space,
            access: Access::Write,
            ranges: ranges(),
        },
        Event::Unmap {
            space,
            ranges: ranges(),
        },
        Event::Standing {
            space,
            pages: Some(FilePage(5).single()),
        },
        Event::Respond {
            answers: vec![answer; 2].into(),
        },
        Event::Begin,
        Event::Bar { name },
    ];
    let encoded = events.iter().map(|event| {
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        bytes
    });
    encoded.collect()
}

fn config() -> [u8; CONFIG_BYTES] {
    let config = Config {
        spaces_max: 1,
        requests_max: 1,
        ranges_max: 256,
        lease_wait_us: 0,
        generation: 0,
    };
    config.encode()
}

/// One of `good` with some bytes changed, or bytes of no meaning.
fn damaged(good: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..5);
    let cut = prop::option::weighted(0.2, any::<Index>());
    let of_good = (prop::sample::select(good), changes, cut);
    prop_oneof![
        3 => of_good.prop_map(|(mut bytes, changes, cut)| {
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            bytes
        }),
        1 => prop::collection::vec(any::<u8>(), 0..150),
    ]
}

/// What a device and its drivers may do, as numbers that [`bodies::session`] reads.
fn session() -> Vec<u8> {
    (0..400_u32)
        .map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[3])
        .collect()
}

#[test]
fn seeds_of_every_target_are_read() {
    let reply = Reply::from(Status::OK).encode();
    let targets: &[seeds::Target] = &[
        ("vpri_event", bodies::event, events()),
        (
            "vpri_request",
            bodies::request,
            vec![encode_request(&request()).to_vec()],
        ),
        (
            "vpri_reply",
            bodies::reply,
            vec![reply, vec![0; STATUS_BYTES + MASK_BYTES]],
        ),
        ("vpri_config", bodies::config, vec![config().to_vec()]),
        ("vpri_record", bodies::record, vec![vec![0; RECORD_BYTES]]),
        ("vpri_session", bodies::session, vec![session()]),
    ];
    seeds::check(targets);
}

proptest! {
    #[test]
    fn event_of_any_bytes_has_one_meaning_or_none(bytes in damaged(events())) {
        bodies::event(&bytes);
    }

    #[test]
    fn request_of_any_bytes_has_one_meaning_or_none(
        bytes in damaged(vec![encode_request(&request()).to_vec()])
    ) {
        bodies::request(&bytes);
    }

    #[test]
    fn reply_of_any_bytes_has_one_meaning_or_none(
        bytes in damaged(vec![
            Reply::from(Status::OK).encode(),
            vec![0; STATUS_BYTES + MASK_BYTES],
        ])
    ) {
        bodies::reply(&bytes);
    }

    #[test]
    fn configuration_and_record_of_any_bytes_have_one_meaning_or_none(
        bytes in damaged(vec![config().to_vec(), vec![0; RECORD_BYTES]])
    ) {
        bodies::config(&bytes);
        bodies::record(&bytes);
    }

    #[test]
    fn device_answers_each_request_once_whatever_it_is_told(
        bytes in prop::collection::vec(any::<u8>(), 0..600)
    ) {
        bodies::session(&bytes);
    }
}
