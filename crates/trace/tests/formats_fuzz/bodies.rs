// SPDX-License-Identifier: Apache-2.0
//! What every reader is held to, whatever the bytes: no panic, no event that is
//! outside what an event may be, an error that names the file, and an end.

use std::io::{Cursor, Write};
use std::path::Path;
use std::time::Duration;

use pagetide_addr::{Iova, SectionNo};

use pagetide_access_log::{AccessLog, TraceError};
use pagetide_trace::{
    Analysis, AnalysisParams, BATCH_EVENTS, BlockFormat, BlockOptions, BlockTrace, DmaRecord,
    Event, EventKind, EventSource, FormatChoice, GuestMaps, HypersioLogReader, HypersioReader,
    IOVA_BITS, LogSources, MapChange, ParquetReader, QemuDmaReader, QemuLogReader, SectionTouch,
    TracepointReader, info, open_trace,
};

const NAME: &str = "a_trace";

/// The authors' binary trace: also every record is an event, or the first that is none is named.
pub fn hypersio_binary(bytes: &[u8]) {
    let (events, error) = drain(&mut HypersioReader::new(Path::new(NAME), bytes));
    match error {
        None => assert_eq!(events * 48, bytes.len()),
        Some(TraceError::Record { record, .. }) => assert_eq!(record, events as u64),
        Some(other) => panic!("{other}"),
    }
}

/// The text log of the authors' patched QEMU.
pub fn hypersio_log(bytes: &[u8]) {
    for sources in [LogSources::All, LogSources::Devices(2)] {
        let mut reader = HypersioLogReader::new(Path::new(NAME), bytes, sources);
        drain(&mut reader);
    }
}

/// The log of stock QEMU's emulated VT-d, read both as a trace and for a comparison: the same requests.
pub fn qemu_log(bytes: &[u8]) {
    let mut reader = QemuLogReader::new(Path::new(NAME), bytes);
    let mut requests = 0;
    let mut batch = Vec::new();
    while let Ok(1..) = reader.next_batch(&mut batch) {
        requests += batch
            .drain(..)
            .filter(|event| event.kind == EventKind::Translate)
            .count();
    }
    let compared = QemuDmaReader::new(Path::new(NAME), bytes)
        .map_while(|record| record.map_err(named).ok())
        .filter(|record| matches!(record, DmaRecord::Request { .. }))
        .count();
    assert_eq!(requests, compared);
    drain(&mut QemuLogReader::new(Path::new(NAME), bytes));
}

/// The records of Linux' tracepoints about its I/O page tables: whole pages below the limit of addresses, which
/// lead where their mapping says.
pub fn tracepoints(bytes: &[u8]) {
    let mut changes = Vec::new();
    for change in TracepointReader::new(Path::new(NAME), bytes) {
        let Ok(change) = change.map_err(named) else {
            break;
        };
        let (iova, size) = match change {
            MapChange::Map { iova, bytes, .. } | MapChange::Unmap { iova, bytes } => (iova, bytes),
        };
        assert!(size > 0 && (iova.0 | size) % 4096 == 0, "{change:?}");
        assert!(iova.0.checked_add(size).unwrap() <= 1 << IOVA_BITS);
        changes.push(change);
    }
    let maps = GuestMaps::collect(changes.iter().copied().map(Ok)).unwrap();
    assert_eq!(maps.maps() + maps.unmaps(), changes.len() as u64);
    for change in changes {
        if let MapChange::Map {
            iova,
            physical,
            bytes,
        } = change
        {
            assert!(maps.led_to(Iova(iova.0 + bytes - 1), physical + bytes - 1));
        }
    }
}

/// A trace in Parquet.
pub fn parquet(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Ok(mut reader) = ParquetReader::open(path).map_err(named) {
            drain(&mut reader);
        }
    });
}

/// A file of any format: opened, read, counted.
pub fn open(bytes: &[u8]) {
    with_file(bytes, |path| {
        let error = match open_trace(path, FormatChoice::Detect).map_err(named) {
            Ok(mut trace) => drain(&mut *trace.source).1,
            Err(error) => Some(error),
        };
        let counted = info(path, FormatChoice::Detect);
        assert_eq!(counted.is_err(), error.is_some());
    });
}

/// A file of an access log: what is read from it can be analyzed, for its times
/// never run backwards.
pub fn access_log(bytes: &[u8]) {
    with_file(bytes, |path| {
        let Ok(mut log) = AccessLog::open(&[path.to_owned()]).map_err(named) else {
            return;
        };
        let mut analysis = Analysis::new(AnalysisParams::default());
        let mut records = 0;
        for record in log.by_ref() {
            let Ok(record) = record.map_err(named) else {
                break;
            };
            records += 1;
            assert!(
                record
                    .address
                    .checked_add(record.len_bytes.into())
                    .is_some()
            );
            let told = analysis.touch_in(
                record.space,
                SectionTouch {
                    at: Duration::from_nanos(record.time_ns),
                    device: record.device,
                    service: record.service,
                    section: SectionNo(record.address >> 21),
                },
            );
            assert!(told.is_ok(), "{told:?}");
        }
        assert!(log.next().is_none(), "nothing comes after the end");
        let report = analysis.finish();
        let counted: u64 = report
            .devices
            .iter()
            .map(|device| device.locality.accesses)
            .sum();
        assert_eq!(counted, records);
    });
}

/// A block trace of a format that is told by its content, then of each format.
pub fn block(bytes: &[u8]) {
    let formats = BlockFormat::ALL.map(Some);
    for format in [None].into_iter().chain(formats) {
        let options = BlockOptions {
            format,
            interval: Some(Duration::from_millis(1)),
            ..BlockOptions::default()
        };
        let input = Cursor::new(bytes.to_vec());
        let Ok(mut trace) = BlockTrace::new(Path::new(NAME), input, &options).map_err(named) else {
            continue;
        };
        let mut last_ns = None;
        for request in trace.by_ref() {
            let Ok(request) = request.map_err(named) else {
                break;
            };
            assert!(
                request
                    .offset_bytes
                    .checked_add(request.len_bytes.into())
                    .is_some()
            );
            assert!(request.time_ns >= last_ns, "{request:?}");
            assert!(last_ns.is_some() || request.time_ns == Some(0));
            last_ns = request.time_ns;
        }
        assert!(trace.next().is_none(), "nothing comes after the end");
        assert!(trace.requests() <= bytes.len() as u64);
    }
}

fn with_file(bytes: &[u8], use_it: impl FnOnce(&Path)) {
    let mut file = tempfile::Builder::new()
        .prefix(NAME)
        .tempfile()
        .expect("a temporary file");
    file.write_all(bytes).expect("room for a temporary file");
    use_it(file.path());
}

/// Reads to the end or the first error; events read, and the error.
fn drain(source: &mut dyn EventSource) -> (usize, Option<TraceError>) {
    let mut batch = Vec::new();
    let mut events = 0;
    let mut last_ns = 0;
    loop {
        batch.clear();
        let outcome = source.next_batch(&mut batch);
        for event in &batch {
            check(event, &mut last_ns);
        }
        events += batch.len();
        match outcome {
            Ok(count) => {
                assert_eq!(count, batch.len());
                assert!(count <= BATCH_EVENTS);
                if count == 0 {
                    return (events, None);
                }
            }
            Err(error) => {
                assert!(batch.is_empty(), "events before the break come before it");
                assert_eq!(source.next_batch(&mut batch).ok(), Some(0));
                return (events, Some(named(error)));
            }
        }
    }
}

/// What an event promises.
fn check(event: &Event, last_ns: &mut u64) {
    assert_eq!(event.iova.0 >> IOVA_BITS, 0, "{event:?}");
    if event.kind == EventKind::Translate
        && let Some(size) = event.page_size
    {
        assert!(size.level().is_some(), "{event:?}");
    }
    if let Some(time) = event.time_ns {
        assert!(time >= *last_ns, "{event:?}");
        *last_ns = time;
    }
}

/// The error, if it names its file.
fn named(error: TraceError) -> TraceError {
    assert!(error.to_string().contains(NAME), "{error}");
    error
}
