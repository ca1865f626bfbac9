// SPDX-License-Identifier: Apache-2.0
//! Opening traces by content, counting them, and turning one format into another.

use std::fs;
use std::path::{Path, PathBuf};

use pagetide_addr::Iova;
use pagetide_trace::{
    Distinct, Event, EventKind, EventSink, Events, FormatChoice, HypersioWriter, IommuDomain,
    PageSize, ParquetWriter, RequestsPerSource, SourceId, TraceFormat, TraceMeta, convert, detect,
    info, open, open_trace,
};

const QEMU_LOG: &str = "\
894@1795307720.527040:vtd_inv_desc_cc_global context invalidate globally
894@1795307720.527108:vtd_inv_desc_iotlb_global iotlb invalidate global
879@1795307721.509660:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x8 high 0x302 low 0x1162001 gen 0 -> gen 2
879@1795307721.509678:vtd_iotlb_page_update IOTLB page update sid 0x8 iova 0xfffff002 slpte 0x1d5ac003 domain 0x3
879@1795307721.509685:vtd_dmar_translate dev 00:01.00 iova 0xfffff000 -> gpa 0x1d5ac000 mask 0xfff
879@1795307721.509690:vtd_iotlb_page_hit IOTLB page hit sid 0x8 iova 0xfffff002 slpte 0x1d5ac003 domain 0x3
894@1795307721.526288:vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x3 addr 0xffffa000 mask 0x0
";
const HYPERSIO_LOG: &str = "vtd_iotlb_page_hit IOTLB page hit sid 0x10 iova 0x1000 pmask 0xfffffffffffff000 slpte 0x1 domain 0x1\n";

fn request(source: u32, iova: u64, size: PageSize) -> Event {
    Event::translate(
        SourceId(source),
        IommuDomain(source),
        Iova(iova),
        Some(size),
    )
}

fn requests() -> Vec<Event> {
    vec![
        request(1, 0x1000, PageSize::SIZE_4K),
        request(2, 0x20_0000, PageSize::SIZE_2M),
        request(1, 0x1fff, PageSize::SIZE_4K),
    ]
}

/// One file of each format, of a name that says nothing or the wrong thing.
fn one_of_each(dir: &Path) -> [(PathBuf, TraceFormat); 4] {
    let path = |name: &str| dir.join(name);
    let writer = ParquetWriter::create(&path("a.log"), &TraceMeta::default()).unwrap();
    convert(&mut Events(&requests()), Box::new(writer)).unwrap();
    let writer = HypersioWriter::create(&path("b_iotlb_trace.bin")).unwrap();
    convert(&mut Events(&requests()), Box::new(writer)).unwrap();
    fs::rename(path("b_iotlb_trace.bin"), path("b.parquet")).unwrap();
    fs::write(path("c.parquet"), HYPERSIO_LOG).unwrap();
    fs::write(path("d.bin"), QEMU_LOG).unwrap();
    [
        (path("a.log"), TraceFormat::Parquet),
        (path("b.parquet"), TraceFormat::HypersioBinary),
        (path("c.parquet"), TraceFormat::HypersioLog),
        (path("d.bin"), TraceFormat::QemuLog),
    ]
}

fn read(path: &Path, choice: FormatChoice) -> Vec<Event> {
    let mut source = open(path, choice).unwrap();
    let mut events = Vec::new();
    while source.next_batch(&mut events).unwrap() != 0 {}
    events
}

#[test]
fn format_is_detected_whatever_the_name() {
    let dir = tempfile::tempdir().unwrap();
    for (path, format) in one_of_each(dir.path()) {
        assert_eq!(detect(&path).unwrap(), format);
        assert_eq!(
            open_trace(&path, FormatChoice::Detect).unwrap().format,
            format
        );
        let detected = read(&path, FormatChoice::Detect);
        assert_eq!(detected, read(&path, FormatChoice::Is(format)));
        assert!(!detected.is_empty());
    }
}

#[test]
fn file_of_the_wrong_format_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    for (path, format) in one_of_each(dir.path()) {
        for other in TraceFormat::ALL
            .into_iter()
            .filter(|other| *other != format)
        {
            let outcome = open(&path, FormatChoice::Is(other)).and_then(|mut source| {
                let mut events = Vec::new();
                while source.next_batch(&mut events)? != 0 {}
                Ok(events)
            });
            let error = outcome.expect_err(other.name());
            let name = path.display().to_string();
            assert!(error.to_string().starts_with(&name), "{error}");
        }
    }
}

#[test]
fn file_of_no_format_or_no_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    assert!(detect(&path).is_err());
    assert!(detect(dir.path()).is_err());
    fs::write(&path, "time,source,iova\n").unwrap();
    let text = detect(&path).unwrap_err().to_string();
    assert!(text.contains("no trace format that is known"), "{text}");
}

#[test]
fn info_counts_requests_pages_and_sources() {
    let dir = tempfile::tempdir().unwrap();
    let [(path, _), ..] = one_of_each(dir.path());
    let found = info(&path, FormatChoice::Detect).unwrap();
    assert_eq!(found.format, TraceFormat::Parquet);
    assert_eq!(found.events, 3);
    assert_eq!(found.kinds, [("translate", 3)].into());
    assert_eq!(found.sources, Distinct::Exactly(2));
    assert_eq!(found.domains, Distinct::Exactly(2));
    assert_eq!(found.distinct_pages, Distinct::Exactly(2));
    assert_eq!(found.page_sizes.by_bytes, [(4096, 2), (2 << 20, 1)].into());
    assert_eq!(found.page_sizes.unknown, 0);
    assert_eq!(found.time_span_ns, None);
    assert_eq!(
        found.requests_per_source,
        Some(RequestsPerSource { min: 1, max: 2 })
    );
    assert_eq!(found.requests_per_packet, 3);
}

#[test]
fn info_of_a_log_counts_each_kind_and_the_time_it_spans() {
    let dir = tempfile::tempdir().unwrap();
    let [.., (path, _)] = one_of_each(dir.path());
    let found = info(&path, FormatChoice::Detect).unwrap();
    let kinds = [
        ("invalidate-all", 1),
        ("invalidate-contexts", 1),
        ("invalidate-pages", 1),
        ("join", 1),
        ("translate", 2),
    ];
    assert_eq!(found.kinds, kinds.into());
    assert_eq!(found.time_span_ns, Some((0, 999_248_000)));
}

#[test]
fn log_converted_to_parquet_has_the_same_events() {
    let dir = tempfile::tempdir().unwrap();
    let [.., (log, _)] = one_of_each(dir.path());
    let path = dir.path().join("e");
    let writer = ParquetWriter::create(&path, &TraceMeta::default()).unwrap();
    let mut source = open(&log, FormatChoice::Detect).unwrap();
    assert_eq!(convert(&mut *source, Box::new(writer)).unwrap(), 6);
    assert_eq!(
        read(&path, FormatChoice::Detect),
        read(&log, FormatChoice::Detect)
    );
}

#[test]
fn conversion_that_fails_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x_iotlb_trace.bin");
    let events = [Event {
        kind: EventKind::Leave,
        ..Event::default()
    }];
    let writer: Box<dyn EventSink> = Box::new(HypersioWriter::create(&path).unwrap());
    assert!(convert(&mut Events(&events), writer).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn pipe_is_refused_without_waiting_for_its_other_end() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let error = detect(&pipe).unwrap_err().to_string();
    assert!(error.contains("copy it into a file first"), "{error}");
}

#[test]
fn file_that_is_not_there_is_told_with_its_name_and_what_to_do() {
    let error = detect(Path::new("absent/trace")).unwrap_err().to_string();
    assert!(error.starts_with("absent/trace: "), "{error}");
    assert!(error.contains("; check the name"), "{error}");
}
