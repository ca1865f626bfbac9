// SPDX-License-Identifier: Apache-2.0
//! Files of the authors' simulator: binary traces both ways, text logs.

use std::collections::HashMap;
use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;
use pagetide_trace::{
    Event, EventKind, EventSink, EventSource, HypersioLogReader, HypersioReader, HypersioWriter,
    IommuDomain, LogSources, PageSize, SourceId,
};
use proptest::prelude::*;

fn read_all(source: &mut dyn EventSource) -> (Vec<Event>, Option<TraceError>) {
    let mut events = Vec::new();
    loop {
        match source.next_batch(&mut events) {
            Ok(0) => return (events, None),
            Ok(_) => {}
            Err(error) => return (events, Some(error)),
        }
    }
}

fn binary(bytes: &[u8]) -> (Vec<Event>, Option<TraceError>) {
    read_all(&mut HypersioReader::new(Path::new("a_trace"), bytes))
}

fn log(text: &str, sources: LogSources) -> (Vec<Event>, Option<TraceError>) {
    read_all(&mut HypersioLogReader::new(
        Path::new("a_log"),
        text.as_bytes(),
        sources,
    ))
}

fn request(source: u32, domain: u32, iova: u64, size: PageSize) -> Event {
    Event::translate(
        SourceId(source),
        IommuDomain(domain),
        Iova(iova),
        Some(size),
    )
}

/// A record as the format's description has it, made apart from the writer.
fn record(sid: u16, did: u16, iova: u64, mask: u64, level: u64, next: u64) -> Vec<u8> {
    let mut bytes = 1u32.to_le_bytes().to_vec();
    bytes.extend(sid.to_le_bytes());
    bytes.extend(did.to_le_bytes());
    for field in [iova, mask, level, 0, next] {
        bytes.extend(field.to_le_bytes());
    }
    bytes
}

const MASK_4K: u64 = 0xffff_ffff_ffff_f000;
const MASK_2M: u64 = 0xffff_ffff_ffe0_0000;
const NEVER: u64 = u64::MAX;

fn write(dir: &Path, events: &[Event]) -> Result<Vec<u8>, TraceError> {
    let path = dir.join("a_tnt_2_rr3_iotlb_trace.bin");
    let mut writer = Box::new(HypersioWriter::create(&path)?);
    writer.write(events)?;
    writer.finish()?;
    Ok(std::fs::read(&path).unwrap())
}

#[test]
fn record_is_read_as_a_request() {
    let bytes = [
        record(0x10, 3, 0x3480_0123, MASK_2M, 2, 0),
        record(0x18, 4, 0xfee0_0000, MASK_4K, 1, NEVER),
    ]
    .concat();
    let (events, error) = binary(&bytes);
    assert!(error.is_none());
    assert_eq!(
        events,
        [
            request(0x10, 3, 0x3480_0123, PageSize::SIZE_2M),
            request(0x18, 4, 0xfee0_0000, PageSize::SIZE_4K),
        ]
    );
}

#[test]
fn file_cut_short_at_any_byte_names_the_record() {
    let whole = record(0x10, 0, 0x1000, MASK_4K, 1, NEVER).repeat(3);
    for length in 0..whole.len() {
        let (events, error) = binary(&whole[..length]);
        assert_eq!(events.len(), length / 48);
        match error {
            None => assert_eq!(length % 48, 0),
            Some(TraceError::Record { record, .. }) => assert_eq!(record, length as u64 / 48),
            Some(other) => panic!("{other}"),
        }
    }
}

#[test]
fn record_that_contradicts_itself_is_refused_after_those_before_it() {
    let good = record(0x10, 0, 0x1000, MASK_4K, 1, NEVER);
    let mut wrong_type = good.clone();
    wrong_type[0] = 2;
    let cases = [
        (wrong_type, "type is 2"),
        (record(0, 0, 0, MASK_4K, 0, 0), "level is 0"),
        (record(0, 0, 0, MASK_4K, 4, 0), "level is 4"),
        (
            record(0, 0, 0, MASK_4K, 2, 0),
            "does not agree with level 2",
        ),
        (record(0, 0, 1 << 57, MASK_4K, 1, 0), "more than 57 bits"),
    ];
    for (bad, words) in cases {
        let (events, error) = binary(&[good.clone(), bad, good.clone()].concat());
        assert_eq!(events.len(), 1);
        let text = error.unwrap().to_string();
        assert!(text.starts_with("a_trace, record 1: "), "{text}");
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn writer_links_each_request_with_the_next_for_its_page() {
    let dir = tempfile::tempdir().unwrap();
    let events = [
        request(16, 0, 0x20_0000, PageSize::SIZE_2M),
        request(24, 1, 0x20_0000, PageSize::SIZE_2M),
        request(16, 0, 0x20_1000, PageSize::SIZE_2M),
        request(16, 0, 0x1000, PageSize::SIZE_4K),
        request(24, 1, 0x2f_ffff, PageSize::SIZE_2M),
    ];
    let bytes = write(dir.path(), &events).unwrap();
    let expected = [
        record(16, 0, 0x20_0000, MASK_2M, 2, 2),
        record(24, 1, 0x20_0000, MASK_2M, 2, 4),
        record(16, 0, 0x20_1000, MASK_2M, 2, NEVER),
        record(16, 0, 0x1000, MASK_4K, 1, NEVER),
        record(24, 1, 0x2f_ffff, MASK_2M, 2, NEVER),
    ];
    assert_eq!(bytes, expected.concat());
    let contexts = std::fs::read(dir.path().join("a_tnt_2_rr3_cc_data.bin")).unwrap();
    assert_eq!(contexts.len(), 2 * 20);
    assert_eq!(contexts[20..23], [24, 0, 0]);
    assert_eq!(contexts[23], 1);
    let tables = std::fs::metadata(dir.path().join("a_tnt_2_rr3_slpt_data.bin")).unwrap();
    assert_eq!(tables.len(), 0);
}

#[test]
fn event_that_the_format_cannot_say_is_refused_with_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let good = request(16, 0, 0, PageSize::SIZE_4K);
    let invalidation = Event {
        kind: EventKind::InvalidateAll,
        ..good
    };
    let sizeless = Event {
        page_size: None,
        ..good
    };
    for bad in [
        invalidation,
        sizeless,
        request(1 << 16, 0, 0, PageSize::SIZE_4K),
        request(0, 1 << 16, 0, PageSize::SIZE_4K),
    ] {
        let error = write(dir.path(), &[good, bad]).unwrap_err();
        assert!(
            matches!(error, TraceError::Record { record: 1, .. }),
            "{error}"
        );
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn event_that_the_format_cannot_say_is_named_as_in_files_and_with_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, word) in [
        (EventKind::InvalidatePages, "invalidate-pages"),
        (EventKind::Leave, "leave"),
    ] {
        let event = Event {
            kind,
            ..Event::default()
        };
        let error = write(dir.path(), &[event]).unwrap_err().to_string();
        let told = error.contains(word) && error.contains("write parquet");
        assert!(told, "{error}");
    }
}

#[test]
fn writer_with_a_pipe_in_the_place_of_a_file_beside_is_refused_at_once() {
    for beside in ["x_cc_data.bin", "x_slpt_data.bin"] {
        let dir = tempfile::tempdir().unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join(beside), mode).unwrap();
        let error = HypersioWriter::create(&dir.path().join("x_iotlb_trace.bin")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(beside) && error.contains("pipe"), "{error}");
    }
}

#[test]
fn writer_of_another_name_is_refused() {
    assert!(HypersioWriter::create(Path::new("trace.bin")).is_err());
}

const LOG: &str = "\
qemu-system-x86_64: warning: something else
1234@1590000000.000000:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x10 high 0x101 low 0x1001 gen 0 -> gen 1
1234@1590000000.000000:vtd_slpte_fetch SLPTE fetch: high 0x101 low 0x1001 iova 0x34800000 level 0x4 addr 0x40000000 slpte 0x1
1234@1590000000.000000:vtd_iotlb_page_update IOTLB page update sid 0x10 iova 0x34800040 slpte 0x100000083 level 0x2 domain 0x1
1234@1590000000.000000:vtd_iotlb_page_hit IOTLB page hit sid 0x10 iova 0xfee00000 pmask 0xfffffffffffff000 slpte 0x2 domain 0x1
1234@1590000000.000000:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x10 high 0x101 low 0x1001 gen 1 -> gen 2
1234@1590000000.000000:vtd_iotlb_page_hit IOTLB page hit sid 0x28 iova 0x0 pmask 0xfffffffffffff000 slpte 0x2 domain 0x9
";

#[test]
fn log_gives_requests_and_sources_that_join() {
    let (events, error) = log(LOG, LogSources::All);
    assert!(error.is_none());
    let join = Event {
        kind: EventKind::Join,
        page_size: None,
        ..request(0x10, 1, 0, PageSize::SIZE_4K)
    };
    let hits = [
        request(0x10, 1, 0x3480_0040, PageSize::SIZE_2M),
        request(0x10, 1, 0xfee0_0000, PageSize::SIZE_4K),
    ];
    assert_eq!(
        events,
        [
            join,
            hits[0],
            hits[1],
            request(0x28, 9, 0, PageSize::SIZE_4K)
        ]
    );
    let (events, error) = log(LOG, LogSources::Devices(3));
    assert!(error.is_none());
    assert_eq!(events, [join, hits[0], hits[1]]);
}

#[test]
fn broken_log_line_is_named() {
    let cases = [
        ("sid 0x10 iova 0x0 slpte 0x1 domain 0x1", "`level`"),
        (
            "sid 0x10 iova 0x0 slpte 0x1 level 0x0 domain 0x1",
            "level is 0",
        ),
        (
            "sid 0x10000 iova 0x0 slpte 0x1 level 0x1 domain 0x1",
            "sid 0x10000",
        ),
        (
            "sid 0x10 iova 0x200000000000000 slpte 0x1 level 0x1 domain 0x1",
            "57 bits",
        ),
        (
            "sid 0x10 iova 0x11111111111111111 slpte 0x1 level 0x1 domain 0x1",
            "64 bits",
        ),
    ];
    for (fields, words) in cases {
        let text = format!("{LOG}vtd_iotlb_page_update IOTLB page update {fields}\n");
        let (events, error) = log(&text, LogSources::All);
        assert_eq!(events.len(), 4);
        let text = error.unwrap().to_string();
        assert!(text.starts_with("a_log, record 8: "), "{text}");
        assert!(text.contains(words), "{text}");
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let size = prop::sample::select(vec![
        PageSize::SIZE_4K,
        PageSize::SIZE_2M,
        PageSize::SIZE_1G,
    ]);
    let event = (0..4u32, 0..4u32, 0..64u64, size)
        .prop_map(|(source, domain, page, size)| request(source, domain, page << 19, size));
    prop::collection::vec(event, 0..200)
}

proptest! {
    #[test]
    fn requests_written_are_read_back_and_linked(events in events()) {
        let dir = tempfile::tempdir().unwrap();
        let bytes = write(dir.path(), &events).unwrap();
        let (read, error) = binary(&bytes);
        prop_assert!(error.is_none());
        prop_assert_eq!(&read, &events);
        let mut next_of = HashMap::new();
        for (index, event) in events.iter().enumerate().rev() {
            let mask = !(event.page_size.unwrap().bytes() - 1);
            let key = (event.iova.0 & mask, event.domain);
            let next = u64::from_le_bytes(bytes[index * 48 + 40..][..8].try_into().unwrap());
            prop_assert_eq!(next, next_of.insert(key, index as u64).unwrap_or(NEVER));
        }
    }

    #[test]
    fn any_bytes_are_events_or_an_error_with_its_record(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let (events, error) = binary(&bytes);
        if let Some(error) = error {
            let at = events.len() as u64;
            let named = matches!(error, TraceError::Record { record, .. } if record == at);
            prop_assert!(named, "{}", error);
        }
    }

    #[test]
    fn log_with_any_change_is_events_or_an_error_with_its_line(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut bytes = LOG.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let (events, error) = read_all(&mut HypersioLogReader::new(Path::new("a_log"), bytes.as_slice(), LogSources::All));
        prop_assert!(events.len() <= 5);
        if let Some(error) = error {
            let named = matches!(error, TraceError::Record { record: 1.., .. });
            prop_assert!(named, "{}", error);
        }
    }
}
