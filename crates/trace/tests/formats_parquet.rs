// SPDX-License-Identifier: Apache-2.0
//! Parquet traces: what is written is read back, and what is broken is an error.

use std::path::Path;

use pagetide_addr::Iova;
use pagetide_trace::{
    Event, EventKind, EventSink, EventSource, IommuDomain, PageSize, ParquetReader, ParquetWriter,
    ROW_GROUP_EVENTS, SourceId, TraceAccess, TraceError, TraceMeta,
};
use proptest::prelude::*;

fn event() -> impl Strategy<Value = Event> {
    let kind = prop::sample::select(vec![
        EventKind::Translate,
        EventKind::InvalidatePages,
        EventKind::InvalidateDomain,
        EventKind::InvalidateAll,
        EventKind::InvalidateSource,
        EventKind::InvalidateContextsOfDomain,
        EventKind::InvalidateContexts,
        EventKind::Join,
        EventKind::Leave,
    ]);
    let access = prop::sample::select(vec![
        TraceAccess::Unknown,
        TraceAccess::Read,
        TraceAccess::Write,
    ]);
    let size = prop::option::of(prop::sample::select(vec![
        PageSize::SIZE_4K,
        PageSize::SIZE_2M,
        PageSize::SIZE_1G,
    ]));
    (
        any::<u32>(),
        any::<u32>(),
        0..1u64 << 57,
        size,
        access,
        kind,
    )
        .prop_map(|(source, domain, iova, page_size, access, kind)| Event {
            time_ns: None,
            source: SourceId(source),
            domain: IommuDomain(domain),
            iova: Iova(iova),
            page_size,
            access,
            kind,
        })
}

/// Events, some of them with times, which do not run backwards.
fn events() -> impl Strategy<Value = Vec<Event>> {
    prop::collection::vec((event(), prop::option::of(0..1000u64)), 0..300).prop_map(|pairs| {
        let mut now = 0;
        pairs
            .into_iter()
            .map(|(mut event, step)| {
                event.time_ns = step.map(|step| {
                    now += step;
                    now
                });
                event
            })
            .collect()
    })
}

fn write(path: &Path, events: &[Event]) -> Result<(), TraceError> {
    let mut writer = Box::new(ParquetWriter::create(path, &TraceMeta::default())?);
    writer.write(events)?;
    writer.finish()
}

fn read(path: &Path) -> Result<Vec<Event>, TraceError> {
    let mut reader = ParquetReader::open(path)?;
    let mut events = Vec::new();
    while reader.next_batch(&mut events)? != 0 {}
    Ok(events)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn events_written_are_read_back(events in events()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        write(&path, &events).unwrap();
        prop_assert_eq!(read(&path).unwrap(), events);
    }

    #[test]
    fn flipped_bits_are_an_error_or_other_events_and_never_a_panic(
        events in events(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8u32), 1..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        write(&path, &events).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        for (index, bit) in flips {
            let at = index.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Err(error) = read(&path) {
            prop_assert!(error.to_string().contains("t.parquet"), "{}", error);
        }
    }
}

#[test]
fn several_row_groups_are_read_back_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    let events: Vec<Event> = (0..ROW_GROUP_EVENTS as u64 * 2 + 77)
        .map(|i| {
            let mut event = Event::translate(
                SourceId(u32::try_from(i % 1024).unwrap()),
                IommuDomain(u32::try_from(i % 1024).unwrap()),
                Iova((i * 7919 % 4096) << 21),
                Some(PageSize::SIZE_2M),
            );
            event.time_ns = Some(i * 61);
            event
        })
        .collect();
    write(&path, &events).unwrap();
    assert!(read(&path).unwrap() == events);
}

#[test]
fn file_cut_short_at_any_byte_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    let page = Event::translate(
        SourceId(1),
        IommuDomain(1),
        Iova(0x1000),
        Some(PageSize::SIZE_4K),
    );
    write(&path, &[page; 9]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(read(&path).is_err(), "{length} of {} bytes", bytes.len());
    }
}

#[test]
fn writer_dropped_before_its_end_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    let mut writer = ParquetWriter::create(&path, &TraceMeta::default()).unwrap();
    writer.write(&[Event::default()]).unwrap();
    drop(writer);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn metadata_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    let meta = TraceMeta {
        requests_per_packet: 5.try_into().unwrap(),
        origin: serde_json::json!({"recipe": "iperf3", "seed": 7}),
    };
    let writer = Box::new(ParquetWriter::create(&path, &meta).unwrap());
    writer.finish().unwrap();
    let reader = ParquetReader::open(&path).unwrap();
    assert_eq!(reader.meta(), &meta);
    assert_eq!(reader.events(), 0);
}

#[test]
fn time_that_runs_backwards_is_refused_with_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.parquet");
    let at = |time| Event {
        time_ns: Some(time),
        ..Event::default()
    };
    let error = write(&path, &[at(5), at(9), at(8)]).unwrap_err();
    assert!(
        matches!(error, TraceError::Record { record: 2, .. }),
        "{error}"
    );
}
