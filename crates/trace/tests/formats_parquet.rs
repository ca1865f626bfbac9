// SPDX-License-Identifier: Apache-2.0
//! Parquet traces: what is written is read back, and what is broken is an error.

use std::path::Path;

use pagetide_access_log::{AccessLogMeta, AccessLogReader, AccessLogWriter, TraceError};
use pagetide_addr::Iova;
use pagetide_trace::{
    Event, EventKind, EventSink, EventSource, FormatChoice, IommuDomain, PageSize, ParquetReader,
    ParquetWriter, ROW_GROUP_EVENTS, SourceId, TraceAccess, TraceMeta, open_trace,
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
        EventKind::PageOut,
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

/// Traces that our writer would not write, made with the `parquet` crate itself.
#[test]
fn other_parquet_file_is_no_access_log_and_an_access_log_is_no_other_trace() {
    let dir = tempfile::tempdir().unwrap();
    let (log, trace) = (dir.path().join("log"), dir.path().join("trace"));
    let meta = AccessLogMeta::new("vm", 1 << 30, 0);
    AccessLogWriter::create(&log, meta)
        .unwrap()
        .finish()
        .unwrap();
    write(&trace, &[]).unwrap();
    let error = AccessLogReader::open(&trace).err().unwrap().to_string();
    assert!(error.contains("pagetide-trace"), "{error}");
    let error = open_trace(&log, FormatChoice::Detect).err().unwrap();
    assert!(error.to_string().contains("pagetide-access-log"), "{error}");
}

mod foreign {
    use std::sync::Arc;

    use parquet::data_type::{Int32Type, Int64Type};
    use parquet::file::metadata::KeyValue;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    const SCHEMA: [(&str, &str); 7] = [
        ("time_ns", "optional int64"),
        ("source", "required int32"),
        ("domain", "required int32"),
        ("iova", "required int64"),
        ("page_size_bytes", "optional int64"),
        ("access", "required int32"),
        ("kind", "required int32"),
    ];
    const META: [(&str, &str); 3] = [
        ("pagetide.format", "pagetide-trace"),
        ("pagetide.version", "1"),
        ("pagetide.requests_per_packet", "3"),
    ];

    /// Row 0 is sound; this is how row 1 differs.
    #[derive(Clone, Copy)]
    struct Row {
        time_ns: i64,
        source: Option<i32>,
        iova: i64,
        page_size_bytes: i64,
        access: i32,
        kind: i32,
    }

    const SOUND: Row = Row {
        time_ns: 5,
        source: Some(1),
        iova: 0x1000,
        page_size_bytes: 4096,
        access: 0,
        kind: 0,
    };

    /// Writes a sound row and `row`, with `schema` and `meta`, and reads them.
    fn read_back(
        schema: &[(&str, &str)],
        meta: &[(&str, &str)],
        row: Row,
    ) -> Result<Vec<Event>, TraceError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        let columns: String = schema
            .iter()
            .map(|(name, kind)| format!("{kind} {name};"))
            .collect();
        let message = parse_message_type(&format!("message any {{ {columns} }}")).unwrap();
        let pairs = meta
            .iter()
            .map(|(key, value)| KeyValue::new((*key).to_owned(), (*value).to_owned()))
            .collect();
        let properties = WriterProperties::builder()
            .set_key_value_metadata(Some(pairs))
            .build();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer =
            SerializedFileWriter::new(file, Arc::new(message), Arc::new(properties)).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let rows = [SOUND, row];
        for (name, kind) in schema {
            let mut column = group.next_column().unwrap().unwrap();
            let values: Vec<Option<i64>> = rows
                .iter()
                .map(|row| match *name {
                    "time_ns" => Some(row.time_ns),
                    "source" => row.source.map(i64::from),
                    "iova" => Some(row.iova),
                    "page_size_bytes" => Some(row.page_size_bytes),
                    "access" => Some(row.access.into()),
                    "kind" => Some(row.kind.into()),
                    _ => Some(1),
                })
                .collect();
            let levels: Vec<i16> = values.iter().map(|v| i16::from(v.is_some())).collect();
            let levels = kind.starts_with("optional").then_some(levels.as_slice());
            let present: Vec<i64> = values.iter().flatten().copied().collect();
            if kind.ends_with("int64") {
                column
                    .typed::<Int64Type>()
                    .write_batch(&present, levels, None)
                    .unwrap();
            } else {
                let present: Vec<i32> =
                    present.iter().map(|v| i32::try_from(*v).unwrap()).collect();
                column
                    .typed::<Int32Type>()
                    .write_batch(&present, levels, None)
                    .unwrap();
            }
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        read(&path)
    }

    fn with(name: &str, kind: &'static str) -> Vec<(&'static str, &'static str)> {
        let change = |(known, old)| (known, if known == name { kind } else { old });
        SCHEMA.map(change).to_vec()
    }

    #[test]
    fn value_out_of_range_names_its_record() {
        let cases = [
            (
                Row {
                    time_ns: 4,
                    ..SOUND
                },
                "time_ns is 4, before",
            ),
            (
                Row {
                    time_ns: -1,
                    ..SOUND
                },
                "below zero",
            ),
            (
                Row {
                    iova: 1 << 57,
                    ..SOUND
                },
                "more than 57 bits",
            ),
            (Row { iova: -1, ..SOUND }, "more than 57 bits"),
            (
                Row {
                    page_size_bytes: 5000,
                    ..SOUND
                },
                "page_size_bytes is 5000",
            ),
            (
                Row {
                    page_size_bytes: 0,
                    ..SOUND
                },
                "page_size_bytes is 0",
            ),
            (
                Row {
                    page_size_bytes: 8192,
                    ..SOUND
                },
                "4 KiB, 2 MiB or 1 GiB",
            ),
            (Row { access: 3, ..SOUND }, "access 3"),
            (Row { kind: 10, ..SOUND }, "kind 10"),
            (Row { kind: -1, ..SOUND }, "kind -1"),
        ];
        for (row, words) in cases {
            let error = read_back(&SCHEMA, &META, row).unwrap_err();
            assert!(
                matches!(error, TraceError::Record { record: 1, .. }),
                "{error}"
            );
            assert!(error.to_string().contains(words), "{error}");
        }
        let row = Row {
            source: None,
            ..SOUND
        };
        let error = read_back(&with("source", "optional int32"), &META, row).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("record 1: row group 0: column `source` is null"),
            "{error}"
        );
    }

    #[test]
    fn columns_in_another_order_nullable_or_added_are_read() {
        let mut schema = with("source", "optional int32");
        schema.reverse();
        schema.push(("note", "required int32"));
        let events = read_back(&schema, &META, SOUND).unwrap();
        assert_eq!(events, read_back(&SCHEMA, &META, SOUND).unwrap());
        assert_eq!(events.len(), 2);
    }

    #[test]
    fn missing_column_or_one_of_another_type_is_an_error_that_names_it() {
        for (name, kind) in SCHEMA {
            let fewer: Vec<_> = SCHEMA
                .into_iter()
                .filter(|column| column.0 != name)
                .collect();
            let error = read_back(&fewer, &META, SOUND).unwrap_err().to_string();
            assert!(error.contains(&format!("no column `{name}`")), "{error}");
            let other = if kind.ends_with("int64") {
                "required int32"
            } else {
                "required int64"
            };
            let error = read_back(&with(name, other), &META, SOUND).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains(&format!("column `{name}` is of type")),
                "{error}"
            );
        }
    }

    #[test]
    fn file_of_another_format_or_version_is_an_error_that_says_so() {
        let cases: [(&[(&str, &str)], &str); 4] = [
            (&[], "no pagetide.format"),
            (&[("pagetide.format", "other")], "is `other`"),
            (&[META[0], ("pagetide.version", "2")], "version `2`"),
            (
                &[META[0], META[1], ("pagetide.requests_per_packet", "0")],
                "above zero",
            ),
        ];
        for (meta, words) in cases {
            let error = read_back(&SCHEMA, meta, SOUND).unwrap_err();
            assert!(matches!(error, TraceError::File { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

/// The events of `tests/files/pyarrow-*.parquet`, which pyarrow 26 wrote.
fn events_of_pyarrow() -> Vec<Event> {
    (0..600u32)
        .map(|i| Event {
            time_ns: (i % 3 != 0).then_some(u64::from(i) * 61),
            source: SourceId(i % 7),
            domain: IommuDomain(i % 5),
            iova: Iova(u64::from(i % 11) << 21),
            page_size: (i % 4 != 0).then_some(PageSize::SIZE_2M),
            access: [TraceAccess::Unknown, TraceAccess::Read, TraceAccess::Write][i as usize % 3],
            kind: if i % 13 == 0 {
                EventKind::InvalidatePages
            } else {
                EventKind::Translate
            },
        })
        .collect()
}

fn pyarrow_file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/files/pyarrow-{name}.parquet"))
}

#[test]
fn files_that_pyarrow_wrote_are_read_whatever_their_compression() {
    for name in [
        "snappy",
        "snappy-v2",
        "zstd",
        "zstd-v2",
        "gzip",
        "lz4",
        "none",
    ] {
        let events = read(&pyarrow_file(name)).unwrap();
        assert!(events == events_of_pyarrow(), "{name}");
    }
}

#[test]
fn compression_that_is_not_read_is_named_with_its_column() {
    let error = read(&pyarrow_file("brotli")).unwrap_err().to_string();
    assert!(
        error.contains("column `time_ns`: it is compressed by BROTLI"),
        "{error}"
    );
}
