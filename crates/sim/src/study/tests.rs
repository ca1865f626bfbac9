// SPDX-License-Identifier: Apache-2.0
//! Studies against naive products, sweeps against kills.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Value, json};

use super::expand::expand;
use super::*;
use crate::config::{Config, Flavour, Replacement};
use crate::stop::Stop;

/// Eight points over two small traces.
const SMALL: &str = r#"
preset = ["base", "hypertrio"]
flavour = "hypersio"
[devtlb]
entries = [64, 128]
[[trace]]
tenants = [2, 3]
packets = 40
input.synthetic.workload = "iperf3"
"#;

fn study(text: &str) -> Result<Study, StudyError> {
    Draft::parse(text, Path::new(""))?.study()
}

fn small() -> Study {
    study(SMALL).unwrap()
}

fn refusal(text: &str) -> String {
    study(text).unwrap_err().to_string()
}

fn options(out: PathBuf, jobs: usize) -> SweepOptions {
    SweepOptions {
        out: Some(out),
        jobs: NonZeroUsize::new(jobs).unwrap(),
        build: Build {
            pagetide_version: "1.2.3".into(),
            git_commit: Some("abc".into()),
            program_sha256: "def".into(),
        },
        host: "here".into(),
        stop: Stop::default(),
    }
}

fn run(study: &Study, options: &SweepOptions) -> Sweep {
    sweep(study, options, &|_| {}).unwrap()
}

/// Rows without what differs from run to run.
fn results(sweep: &Sweep) -> Vec<(PointId, serde_json::Map<String, Value>)> {
    let rows = sweep.rows.iter();
    rows.map(|row| (row.id.clone(), row.run.figures.clone()))
        .collect()
}

#[test]
fn study_is_the_product_of_its_lists_in_declared_order() {
    let study = small();
    let mut naive = Vec::new();
    for tenants in [2, 3] {
        for preset in [Preset::Base, Preset::Hypertrio] {
            for entries in [64, 128] {
                naive.push((tenants, preset, entries));
            }
        }
    }
    let ours: Vec<_> = study
        .points
        .iter()
        .map(|point| {
            let Trace::Made(spec) = &study.traces[point.trace] else {
                panic!("the trace is made");
            };
            (spec.tenants, point.preset, point.config.devtlb.entries)
        })
        .collect();
    assert_eq!(ours, naive);
    for point in &study.points {
        let mut expected = point.preset.config(Flavour::Hypersio);
        expected.devtlb.entries = point.config.devtlb.entries;
        assert_eq!(point.config, expected);
    }
}

#[test]
fn layout_of_the_file_changes_no_point() {
    let other = study(
        r#"
devtlb.entries = [64, 128]
trace = [{ input = { synthetic = { workload = "iperf3" } }, packets = 40, tenants = [2, 3], seed = 1 }]
flavour = "hypersio"
preset = ["base", "hypertrio"]
"#,
    )
    .unwrap();
    assert_eq!(other.points, small().points);
    assert_eq!(other.traces, small().traces);
}

#[test]
fn expansion_of_nested_tables_equals_a_naive_product() {
    let Value::Object(table) = json!({"a": [1, 2, 3], "b": {"c": ["x", "y"], "l": [5]}, "d": 0})
    else {
        unreachable!()
    };
    let all: Vec<Value> = expand(table, &["b.l"], 100)
        .unwrap()
        .into_iter()
        .map(Value::Object)
        .collect();
    let mut naive = Vec::new();
    for a in [1, 2, 3] {
        for c in ["x", "y"] {
            naive.push(json!({"a": a, "b": {"c": c, "l": [5]}, "d": 0}));
        }
    }
    assert_eq!(all, naive);
}

#[test]
fn wrong_studies_are_refused_with_the_key_and_what_is_right() {
    let trace = IPERF3;
    for (text, parts) in [
        ("x = [".to_owned(), vec!["not TOML"]),
        (String::new(), vec!["trace: the study has no trace"]),
        (
            format!("devtlb.entry = 1\n{trace}"),
            vec!["devtlb", "`entry`", "`entries`"],
        ),
        (format!("tlb = 1\n{trace}"), vec!["`tlb`", "`devtlb`"]),
        (
            format!("devtlb.entries = \"x\"\n{trace}"),
            vec!["devtlb.entries:", "expected u32"],
        ),
        (
            format!("devtlb.entries = []\n{trace}"),
            vec!["devtlb.entries:", "empty"],
        ),
        (
            format!("devtlb.replacement = \"fifo\"\n{trace}"),
            vec!["devtlb.replacement:", "`lru`"],
        ),
        (
            format!("preset = \"best\"\n{trace}"),
            vec!["preset:", "`hypertrio`"],
        ),
        (format!("flavour = 3\n{trace}"), vec!["flavour:"]),
        (
            format!("ptb.entries = [1, 0]\n{trace}"),
            vec!["point 1 (ptb.entries=0)", "ptb.entries = 0"],
        ),
        (
            "[[trace]]\nfile = \"a\"\ntenants = 3".to_owned(),
            vec!["trace[0].tenants:", "'file'"],
        ),
        ("[[trace]]\nfile = 3".to_owned(), vec!["trace[0].file:"]),
        (
            "[[trace]]\ntenants = 0\npackets = 1\ninput.synthetic.workload = \"seq\"".to_owned(),
            vec!["trace[0]: tenants = 0"],
        ),
        (
            "[[trace]]\ntenants = 1".to_owned(),
            vec!["trace[0]: 'input' is missing: write", "workload ="],
        ),
        (
            "[[trace]]\ninput.synthetic.workload = \"seq\"".to_owned(),
            vec!["trace[0]: 'tenants' is missing"],
        ),
        (
            "[[trace]]\ntenants = 1\npackets = 1\ninput.synthetic.workload = \"x\"".to_owned(),
            vec!["trace[0].input.synthetic.workload:", "`iperf3`"],
        ),
        (
            "[[trace]]\ntenants = []".to_owned(),
            vec!["trace[0].tenants:", "empty"],
        ),
        ("trace = 3".to_owned(), vec!["trace:"]),
        ("trace = [3]".to_owned(), vec!["trace[0]:", "[[trace]]"]),
    ] {
        assert_refused(&text, &parts);
    }
}

/// A trace of one packet.
const IPERF3: &str = "[[trace]]\ntenants = 1\npackets = 1\ninput.synthetic.workload = \"iperf3\"\n";

fn assert_refused(text: &str, parts: &[&str]) {
    let told = refusal(text);
    for part in parts {
        assert!(told.contains(part), "no '{part}' in '{told}' for\n{text}");
    }
}

#[test]
fn settings_that_nothing_heeds_are_refused_with_the_key() {
    let trace = IPERF3;
    for (text, parts) in [
        (
            format!("link.requests_per_packet = [3, 1]\n{trace}"),
            vec!["link.requests_per_packet: 1 a packet", "made with 3"],
        ),
        (
            format!("context_cache.ways = 8\n{trace}"),
            vec!["context_cache.ways = 8: the context cache is fully associative"],
        ),
        (
            format!("flavour = [\"paper\", \"hypersio\"]\nl1.entries = 8\nl1.ways = 8\n{trace}"),
            vec!["point 1 (flavour=hypersio): l1.entries: flavour hypersio"],
        ),
    ] {
        assert_refused(&text, &parts);
    }
}

#[test]
fn refusal_of_the_only_point_begins_with_the_parameter() {
    let told = refusal(
        "ptb.entries = 0\n[[trace]]\ntenants = 1\npackets = 1\ninput.synthetic.workload = \"seq\"",
    );
    assert!(told.starts_with("ptb.entries = 0: "), "{told}");
}

#[test]
fn study_that_is_no_toml_is_refused_with_the_name_of_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wrong.toml");
    std::fs::write(&path, "x = [").unwrap();
    let told = Draft::read(&path).unwrap_err().to_string();
    assert!(told.contains("wrong.toml: the file is not TOML"), "{told}");
}

#[test]
fn context_cache_of_another_size_stays_fully_associative_without_being_told() {
    let mut draft = Draft::parse(SMALL, Path::new("")).unwrap();
    draft.set("context_cache.entries=32").unwrap();
    for point in draft.study().unwrap().points {
        let cache = point.config.context_cache;
        assert_eq!((cache.entries, cache.ways), (32, 32));
    }
}

/// A trace of `requests` requests of one tenant in a Parquet file, `per_packet` a packet.
fn parquet_trace(path: &Path, requests: u64, per_packet: u32) {
    use pagetide_trace::{Event, EventSink as _, IommuDomain, ParquetWriter, SourceId, TraceMeta};
    let meta = TraceMeta {
        requests_per_packet: per_packet.try_into().unwrap(),
        ..TraceMeta::default()
    };
    let mut writer = ParquetWriter::create(path, &meta).unwrap();
    for n in 0..requests {
        let iova = pagetide_addr::Iova(n << 12);
        let event = Event::translate(SourceId(8), IommuDomain(1), iova, None);
        writer.write(&[event]).unwrap();
    }
    Box::new(writer).finish().unwrap();
}

#[test]
fn packet_is_as_large_as_its_trace_tells_and_a_study_may_not_contradict() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ones.parquet");
    parquet_trace(&path, 12, 1);
    let file = format!("[[trace]]\nfile = \"{}\"", path.display());
    let told = study(&file).unwrap();
    assert_eq!(told.points[0].config.link.requests_per_packet, 1);
    let outcome = Traces::of(&told).unwrap().run(&told.points[0]).unwrap();
    assert_eq!((outcome.requests, outcome.packets), (12, 12));
    study(&format!("link.requests_per_packet = 1\n{file}")).unwrap();
    let told = refusal(&format!("link.requests_per_packet = 3\n{file}"));
    assert!(told.contains("3 a packet, but trace[0] was made with 1"));
}

#[test]
fn packet_of_a_trace_that_does_not_tell_it_is_as_large_as_the_study_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.bin");
    std::fs::write(&path, [0; 48]).unwrap();
    let file = format!("[[trace]]\nfile = \"{}\"", path.display());
    let of = |text: &str| {
        study(text).unwrap().points[0]
            .config
            .link
            .requests_per_packet
    };
    assert_eq!(of(&file), 3);
    assert_eq!(of(&format!("link.requests_per_packet = 2\n{file}")), 2);
}

#[test]
fn recorded_recipe_tells_the_size_of_its_packets() {
    let study = study(
        "[[trace]]\ntenants = 1\ninput.recorded = { logs = [\"a.log\"], requests_per_packet = 2 }",
    )
    .unwrap();
    assert_eq!(study.points[0].config.link.requests_per_packet, 2);
}

#[test]
fn results_without_a_place_or_in_the_place_of_an_input_are_refused_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("study.toml"), SMALL).unwrap();
    std::fs::hard_link(at("study.toml"), at("same")).unwrap();
    std::os::unix::fs::symlink(at("study.toml"), at("link")).unwrap();
    let study = Draft::read(&at("study.toml")).unwrap().study().unwrap();
    for (out, reason) in [
        (at("study.toml"), "is read by this command"),
        (at("same"), "is read by this command"),
        (at("link"), "is read by this command"),
        (at("no/out"), "its directory is not there"),
        (dir.path().to_owned(), "is a directory"),
        (PathBuf::from("/"), "is no name of a file"),
    ] {
        let ran = AtomicUsize::new(0);
        let error = sweep(&study, &options(out, 1), &|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.is_wrong_use());
        assert_eq!(ran.into_inner(), 0);
    }
    assert_eq!(std::fs::read_to_string(at("study.toml")).unwrap(), SMALL);
}

#[test]
fn trace_file_is_not_replaced_by_results() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    parquet_trace(&path, 3, 3);
    let study = study(&format!("[[trace]]\nfile = \"{}\"", path.display())).unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = sweep(&study, &options(path.clone(), 1), &|_| {}).unwrap_err();
    assert!(matches!(error, StudyError::Output { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn study_larger_than_the_limit_is_refused_before_it_is_multiplied_out() {
    let list: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
    let list = list.join(",");
    let told = refusal(&format!(
        "seed = [{list}]\nlatency.pcie_ns = [{list}]\nlatency.dram_ns = [{list}]\n[[trace]]\nfile = \"a\""
    ));
    assert!(told.contains("65536"), "{told}");
}

#[test]
fn assignments_are_values_of_toml_or_else_words() {
    let mut draft = Draft::parse(SMALL, Path::new("")).unwrap();
    for assignment in [
        "preset=base",
        "flavour = paper",
        "devtlb.entries=16",
        "devtlb.replacement=\"lru\"",
        "prefetch.enabled=true",
        "seed=[7, 8]",
        "trace.x=1",
    ] {
        let refused = draft.set(assignment).is_err();
        assert_eq!(refused, assignment.starts_with("trace"), "{assignment}");
    }
    draft.replace_traces(&["some.bin"]);
    let study = draft.study().unwrap();
    let config = &study.points[1].config;
    assert_eq!((study.points.len(), config.seed), (2, 8));
    assert_eq!(config.devtlb.replacement, Replacement::Lru);
    assert!(config.prefetch.enabled);
    assert!(matches!(&study.traces[..], [Trace::File(path)] if path.is_absolute()));
    for wrong in ["devtlb", "=3", "a..b=1"] {
        assert!(draft.set(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn weights_of_tenants_are_a_list_by_nature_and_lists_of_them_an_axis() {
    let of = |weights: &str| {
        study(&format!(
            "[[trace]]\ntenants = 2\npackets = 9\nweights = {weights}\ninput.synthetic.workload = \"seq\""
        ))
        .unwrap()
        .points
        .len()
    };
    assert_eq!((of("[1, 4]"), of("[[1, 4], [1, 8]]"), of("[]")), (1, 2, 1));
}

#[test]
fn labels_name_what_varies_and_nothing_else() {
    let labels = small().labels();
    assert_eq!(labels[0], "preset=base devtlb.entries=64 trace.tenants=2");
    assert_eq!(
        labels[7],
        "preset=hypertrio devtlb.entries=128 trace.tenants=3"
    );
    let one = study("[[trace]]\nfile = \"a\"").unwrap();
    assert_eq!(one.labels(), [""]);
}

#[test]
fn identity_of_a_point_is_what_it_was_and_differs_by_every_parameter() {
    let config = json!({"b": 1, "a": {"d": [1, {"z": 0, "y": 0}], "c": 0.1}});
    assert_eq!(
        identity::canonical(&config).to_string(),
        r#"{"a":{"c":0.1,"d":[1,{"y":0,"z":0}]},"b":1}"#
    );
    let golden = identity::hash(&config);
    assert_eq!(golden.0, "a9d1c85120417a60ec5f60f8a4cd6231");
    let trace = TraceIdentity(json!({"sha256": "00", "bytes": 48}));
    let base = Config::base(Flavour::Hypersio);
    let mut ids = HashSet::from([trace.point(&base)]);
    let mut leaves = Vec::new();
    columns::flatten("", '.', &columns::json(&base), &mut leaves);
    for (name, value) in &leaves {
        let Value::Number(number) = value else {
            continue;
        };
        let mut changed = columns::json(&base);
        let pointer = format!("/{}", name.replace('.', "/"));
        *changed.pointer_mut(&pointer).unwrap() = (number.as_u64().unwrap() + 1).into();
        let changed: Config = serde_json::from_value(changed).unwrap();
        assert!(ids.insert(trace.point(&changed)), "{name}");
    }
    assert!(ids.len() > 40);
    let other = TraceIdentity(json!({"sha256": "01", "bytes": 48}));
    assert!(ids.insert(other.point(&base)));
}

#[test]
fn samples_of_page_faults_are_read_beside_the_study_and_part_of_its_identity() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rtt.json");
    let text = "[[trace]]\nfile = \"a\"\n[faults]\ndiscipline = \"vpri\"\nabsent_ppm = 10\n\
                samples = \"rtt.json\"\nsamples_of = \"a\"";
    let read = || Draft::parse(text, dir.path()).and_then(|draft| draft.study());
    let error = read().unwrap_err();
    assert!(
        error.is_wrong_use() && error.to_string().contains("rtt.json"),
        "{error}"
    );
    std::fs::write(&file, r#"{"samples": {"a": [[1, 2, 3], [4, 5]]}}"#).unwrap();
    let error = read().unwrap_err();
    assert!(
        error.is_wrong_use() && error.to_string().contains("samples.a[1]"),
        "{error}"
    );
    std::fs::write(&file, r#"{"samples": {"a": [[1, 2, 3]]}}"#).unwrap();
    let first = read().unwrap().points.swap_remove(0).config;
    assert_eq!(first.faults.times.all()[0].handling_ns, 2);
    std::fs::write(&file, r#"{"samples": {"a": [[1, 2, 4]]}}"#).unwrap();
    let second = read().unwrap().points.swap_remove(0).config;
    let trace = TraceIdentity(json!({}));
    assert_ne!(trace.point(&first), trace.point(&second));
}

#[test]
fn page_faults_that_no_run_can_have_are_refused() {
    for (settings, told) in [
        (
            "discipline = \"vpri\"\nabsent = \"lru\"",
            "limit of 1 at least",
        ),
        ("cpus = 0", "faults.cpus"),
        ("queue_entries = 0", "faults.queue_entries"),
        ("parked_requests = 0", "faults.parked_requests"),
        ("absent_ppm = 1000001", "faults.absent_ppm"),
        ("handling_ns = 10000000001", "faults.handling_ns"),
        ("lookup_ns = 1000001", "faults.lookup_ns"),
        ("nothing = 1", "nothing"),
    ] {
        let text = format!("[[trace]]\nfile = \"a\"\n[faults]\n{settings}");
        let error = study(&text).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
    }
    let text = "flavour = \"hypersio\"\n[[trace]]\nfile = \"a\"\n[faults]\ndiscipline = \"touch\"";
    let error = study(text).unwrap_err().to_string();
    assert!(error.contains("faults.discipline"), "{error}");
}

#[test]
fn trace_file_is_known_by_content_and_not_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let id = |name: &str, content: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let study = study(&format!("[[trace]]\nfile = \"{}\"", path.display())).unwrap();
        Traces::of(&study).unwrap().id(&study.points[0])
    };
    let first = id("a", "abc");
    assert_eq!(first, id("b", "abc"));
    assert_ne!(first, id("a", "abd"));
    assert_eq!(first.0.len(), 32);
}

#[test]
fn threads_and_repetition_change_no_result() {
    let dir = tempfile::tempdir().unwrap();
    let study = small();
    let one = run(&study, &options(dir.path().join("one"), 1));
    let two = run(&study, &options(dir.path().join("two"), 2));
    let many = run(&study, &options(dir.path().join("many"), 16));
    assert_eq!(results(&one), results(&two));
    assert_eq!(results(&one), results(&many));
    assert_eq!((one.summary.run, one.summary.kept), (8, 0));
    let again = run(&study, &options(dir.path().join("one"), 2));
    assert_eq!((again.summary.run, again.summary.kept), (0, 8));
    assert_eq!(results(&one), results(&again));
}

#[test]
fn rows_without_an_output_are_the_same_and_the_ledger_goes_on_with_what_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let study = small();
    let mut options = options(dir.path().join("out"), 2);
    let written = run(&study, &options);
    let out = options.out.take();
    let only_returned = run(&study, &options);
    assert_eq!(results(&only_returned), results(&written));
    assert_eq!(only_returned.summary.journal, None);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    // Somebody else runs the points, in any order, and stops in between.
    let text = SMALL.replace("[64, 128]", "[128, 256]");
    let study = self::study(&text).unwrap();
    let traces = Traces::of(&study).unwrap();
    let begin = || Ledger::open(&study, &traces, &options.build, out.as_deref()).unwrap();
    let mut ledger = begin();
    assert_eq!(ledger.open_points(), [1, 3, 5, 7]);
    let point = |number: usize| {
        let point = &study.points[number];
        run_point(&traces, point, &options.build, "there")
            .unwrap()
            .0
    };
    ledger.keep(5, point(5)).unwrap();
    drop(ledger);
    let mut ledger = begin();
    assert_eq!(ledger.open_points(), [1, 3, 7]);
    for number in [7, 1, 3] {
        ledger.keep(number, point(number)).unwrap();
    }
    let rows = ledger.close(&study, &traces).unwrap();
    let expected = run(&study, &options);
    let figures = |rows: &[SweepRow]| -> Vec<_> {
        let rows = rows.iter();
        rows.map(|row| (row.id.clone(), row.run.figures.clone()))
            .collect()
    };
    assert_eq!(figures(&rows), figures(&expected.rows));
}

#[test]
fn trace_in_memory_gives_what_its_recipe_gives_and_is_identified_by_its_events() {
    let made = small();
    let mut events = Vec::new();
    let traces = Traces::of(&made).unwrap();
    let mut source = traces.open(0).unwrap();
    while source.next_batch(&mut events).unwrap() > 0 {}
    let meta = pagetide_trace::TraceMeta::default();
    let memory = MemoryTrace::new(events.clone(), meta.clone());
    let mut draft = Draft::parse(SMALL, Path::new("")).unwrap();
    draft.give_traces(vec![made.traces[0].clone(), Trace::Memory(memory.clone())]);
    let study = draft.study().unwrap();
    let traces = Traces::of(&study).unwrap();
    let half = study.points.len() / 2;
    for (one, other) in study.points[..half].iter().zip(&study.points[half..]) {
        assert_eq!(traces.run(one).unwrap(), traces.run(other).unwrap());
        assert_ne!(traces.id(one), traces.id(other));
    }
    events[0].iova.0 ^= 1 << 40;
    assert_ne!(MemoryTrace::new(events, meta), memory);
    let cells = cells(
        &study,
        &traces,
        half,
        &SweepRow {
            id: traces.id(&study.points[half]),
            run: run_point(
                &traces,
                &study.points[half],
                &options(PathBuf::new(), 1).build,
                "",
            )
            .unwrap()
            .0,
        },
    );
    let hash = Value::from(memory.sha256());
    assert!(cells.contains(&("trace_events_sha256".to_owned(), hash)));
}

#[test]
fn sweep_that_is_stopped_ends_with_an_error_and_keeps_what_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path().join("out"), 1);
    let stop = options.stop.clone();
    let error = sweep(&small(), &options, &|at| {
        if at.done == 3 {
            stop.set();
        }
    })
    .unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error}");
    let options = self::options(dir.path().join("out"), 1);
    assert_eq!(run(&small(), &options).summary.kept, 3);
}

#[test]
fn sweep_killed_at_any_byte_of_its_journal_goes_on_and_ends_with_the_same_rows() {
    // Each cut syncs its files; in memory that takes no time.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let dir = dir.unwrap();
    let text = SMALL.replace("[2, 3]", "2");
    let study = study(&text.replace("[64, 128]", "64")).unwrap();
    let options = options(dir.path().join("out"), 1);
    let whole = run(&study, &options);
    let journal = whole.summary.journal.clone().unwrap();
    let text = std::fs::read(&journal).unwrap();
    let lines = text.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!(lines, 2);
    for cut in (0..=text.len()).rev() {
        std::fs::write(&journal, &text[..cut]).unwrap();
        let again = run(&study, &options);
        let kept = text[..cut].iter().filter(|byte| **byte == b'\n').count();
        assert_eq!((again.summary.kept, again.summary.run), (kept, 2 - kept));
        assert_eq!(results(&again), results(&whole));
        // The removed part stays removed.
        let written = std::fs::read(&journal).unwrap();
        assert_eq!(written.iter().filter(|byte| **byte == b'\n').count(), 2);
    }
}

#[test]
fn changed_study_runs_what_is_new_and_another_build_runs_all() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path().join("out"), 2);
    run(&small(), &options);
    let more = study(&SMALL.replace("[64, 128]", "[128, 256]")).unwrap();
    let swept = run(&more, &options);
    assert_eq!((swept.summary.run, swept.summary.kept), (4, 4));
    // A different build of the same commit.
    options.build.program_sha256 = "0".into();
    assert_eq!(run(&more, &options).summary.run, 8);
    options.build.git_commit = None;
    assert_eq!(run(&more, &options).summary.run, 8);
}

#[test]
fn journal_that_is_not_ours_or_in_use_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path().join("out"), 1);
    let journal = dir.path().join("out.journal");
    for foreign in ["my diary", "{}\n", "{\"journal\":9}\n{\"journal\":9}\n"] {
        std::fs::write(&journal, foreign).unwrap();
        let error = sweep(&small(), &options, &|_| {}).unwrap_err();
        assert!(matches!(error, StudyError::Journal { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(&journal).unwrap(), foreign);
    }
    std::fs::remove_file(&journal).unwrap();
    let held = journal::Journal::open(&journal, &options.build).unwrap();
    let error = sweep(&small(), &options, &|_| {}).unwrap_err();
    assert!(error.to_string().contains("another sweep"), "{error}");
    drop(held);
}

#[test]
fn broken_trace_ends_the_sweep_and_what_was_finished_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.bin");
    // A whole record of the authors' format, and half of one.
    let mut bytes = [0_u8; 72];
    bytes[0] = 1;
    bytes[16..24].copy_from_slice(&(!0xfff_u64).to_le_bytes());
    bytes[24] = 1;
    std::fs::write(&broken, bytes).unwrap();
    let text = format!("{SMALL}\n[[trace]]\nfile = \"{}\"", broken.display());
    let study = study(&text).unwrap();
    let options = options(dir.path().join("out"), 1);
    for _ in 0..2 {
        let error = sweep(&study, &options, &|_| {}).unwrap_err();
        assert!(
            error.to_string().contains("broken.bin, record 1"),
            "{error}"
        );
        assert!(error.is_wrong_use());
        assert!(!options.out.as_ref().unwrap().exists());
    }
    let kept = run(&small(), &options).summary.kept;
    assert_eq!(kept, 8);
}

#[test]
fn request_that_the_model_cannot_take_is_told_with_its_point() {
    let dir = tempfile::tempdir().unwrap();
    // The authors' program never ends on a 1 GiB page that hits its L2 cache.
    let study = study(
        r#"
flavour = ["paper", "hypersio"]
devtlb.entries = 0
[[trace]]
tenants = 1
packets = 400
input.synthetic.data = { iova = 0x1_0000_0000, pages = 8, page_bytes = 1073741824 }
input.synthetic.init.pages = 0
"#,
    )
    .unwrap();
    let error = sweep(&study, &options(dir.path().join("out"), 1), &|_| {}).unwrap_err();
    let told = error.to_string();
    assert!(told.starts_with("point 1 (flavour=hypersio): "), "{told}");
    assert!(error.is_wrong_use());
}

#[test]
fn progress_counts_every_point_once() {
    let dir = tempfile::tempdir().unwrap();
    let calls = AtomicUsize::new(0);
    let most = AtomicUsize::new(0);
    sweep(&small(), &options(dir.path().join("out"), 2), &|progress| {
        calls.fetch_add(1, Ordering::Relaxed);
        most.fetch_max(progress.done, Ordering::Relaxed);
        assert_eq!(progress.points, 8);
    })
    .unwrap();
    assert_eq!(
        (calls.into_inner(), most.into_inner()),
        (9, 8),
        "the beginning, and each point"
    );
}

#[test]
fn results_hold_every_parameter_the_provenance_and_every_figure() {
    let dir = tempfile::tempdir().unwrap();
    let study = small();
    let options = options(dir.path().join("out.parquet"), 2);
    let swept = run(&study, &options);
    let file = std::fs::File::open(options.out.as_ref().unwrap()).unwrap();
    let reader = SerializedFileReader::new(file).unwrap();
    let metadata = reader.metadata().file_metadata();
    let pairs = metadata.key_value_metadata().unwrap();
    let format = pairs.iter().find(|pair| pair.key == "pagetide.format");
    assert_eq!(format.unwrap().value.as_deref(), Some(RESULTS_FORMAT));
    let rows: Vec<_> = reader
        .get_row_iter(None)
        .unwrap()
        .map(|row| row.unwrap().into_columns())
        .collect();
    assert_eq!(rows.len(), study.points.len());
    for (number, row) in rows.iter().enumerate() {
        let names: HashSet<&str> = row.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), row.len(), "a name is there once");
        let cell = |name: &str| &row.iter().find(|(n, _)| n == name).expect(name).1;
        let point = &study.points[number];
        assert_eq!(cell("point"), &Field::ULong(number as u64));
        assert_eq!(cell("id"), &Field::Str(swept.rows[number].id.0.clone()));
        let mut leaves = Vec::new();
        columns::flatten("config", '_', &columns::json(&point.config), &mut leaves);
        leaves.extend(swept.rows[number].run.figures.clone());
        for (name, value) in leaves {
            let expected = match &value {
                Value::Bool(truth) => Field::Bool(*truth),
                Value::String(text) => Field::Str(text.clone()),
                number if number.is_u64() => Field::ULong(number.as_u64().unwrap()),
                number => Field::Double(number.as_f64().unwrap()),
            };
            assert_eq!(cell(&name), &expected, "{name}");
        }
        for name in [
            "trace_tenants",
            "trace_recipe",
            "trace_input_synthetic_ring_iova",
            "wall_seconds",
        ] {
            assert_ne!(cell(name), &Field::Null);
        }
        assert_eq!(cell("host"), &Field::Str("here".into()));
        assert_eq!(cell("git_commit"), &Field::Str("abc".into()));
        assert!(matches!(cell("started_at"), Field::TimestampMillis(_)));
    }
}

#[test]
fn figures_survive_the_journal_to_the_last_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let build = options(PathBuf::new(), 1).build;
    let mut run = Run {
        build: build.clone(),
        host: String::new(),
        started_unix_ms: 1,
        wall_seconds: 0.1 + 0.2,
        figures: serde_json::Map::new(),
    };
    for n in 1..500_u32 {
        let value = f64::from(n).sqrt() / 7.0;
        run.figures.insert(n.to_string(), value.into());
    }
    let id = PointId("x".into());
    let (mut journal, _) = journal::Journal::open(&path, &build).unwrap();
    journal.add(&id, &run).unwrap();
    drop(journal);
    let (_, finished) = journal::Journal::open(&path, &build).unwrap();
    assert_eq!(finished[&id], run);
}

/// Two variants of five points each, of which some are impossible.
const VARIANTS: &str = r#"
preset = "hypertrio"
skip_impossible = true
devtlb.entries = [32, 64]
[[variant]]
name = "small buffer"
ptb.entries = 8
prefetch.enabled = false
[[variant]]
name = "partitions"
devtlb.partitions = [4, 8]
[[trace]]
tenants = 2
packets = 40
input.synthetic.workload = "iperf3"
"#;

#[test]
fn variant_is_the_study_with_its_own_settings_and_impossible_points_are_left_out() {
    let study = study(VARIANTS).unwrap();
    let got: Vec<_> = study
        .points
        .iter()
        .map(|point| {
            let config = &point.config;
            (
                point.variant.as_deref().unwrap(),
                config.devtlb.entries,
                config.devtlb.partitions,
                config.ptb.entries,
                config.prefetch.enabled,
            )
        })
        .collect();
    // 32 entries of 8 ways are 4 sets, which 8 partitions cannot share.
    let expected = [
        ("small buffer", 64, 8, 8, false),
        ("partitions", 32, 4, 32, true),
        ("partitions", 64, 4, 32, true),
        ("partitions", 64, 8, 32, true),
    ];
    assert_eq!(got, expected);
    assert_eq!(study.skipped, 2);
    assert_eq!(
        study.labels(),
        [
            "variant=small buffer devtlb.entries=64 devtlb.partitions=8",
            "variant=partitions devtlb.entries=32 devtlb.partitions=4",
            "variant=partitions devtlb.entries=64 devtlb.partitions=4",
            "variant=partitions devtlb.entries=64 devtlb.partitions=8",
        ]
    );
    let told = refusal(&VARIANTS.replace("skip_impossible = true\n", ""));
    assert!(told.starts_with("point 0 (variant=small buffer"), "{told}");
    let told = refusal(&VARIANTS.replace("[32, 64]", "24"));
    assert!(told.contains("devtlb"), "nothing is left: {told}");
}

#[test]
fn setting_of_the_command_line_holds_in_every_variant() {
    let mut draft = Draft::parse(VARIANTS, Path::new("")).unwrap();
    draft.set("ptb.entries=5").unwrap();
    draft.set("devtlb.partitions=2").unwrap();
    let study = draft.study().unwrap();
    assert!(
        study
            .points
            .iter()
            .all(|point| point.config.ptb.entries == 5)
    );
    assert_eq!((study.points.len(), study.skipped), (4, 0));
    draft.set("variant=1").unwrap_err();
}

#[test]
fn variants_without_name_or_of_something_else_are_refused() {
    for (text, told) in [
        ("variant = 3", "[[variant]]"),
        ("variant = []", "[[variant]]"),
        ("variant = [1]", "variant[0]: a variant is a table"),
        ("[[variant]]\nptb.entries = 3", "variant[0].name"),
        ("[[variant]]\nname = \"\"", "variant[0].name"),
        (
            "[[variant]]\nname = \"a\"\n[[variant]]\nname = \"a\"",
            "variant[1].name: there is another variant 'a'",
        ),
        (
            "[[variant]]\nname = \"a\"\ntrace = []",
            "variant[0].trace: this belongs to the study",
        ),
        ("[[variant]]\nname = \"a\"\nnothing = 1", "nothing"),
        (
            "skip_impossible = 7\n[[variant]]\nname = \"a\"",
            "skip_impossible",
        ),
    ] {
        let refused = refusal(&format!("{text}\n[[trace]]\nfile = \"a\""));
        assert!(refused.contains(told), "{refused}");
    }
}

#[test]
fn results_of_variants_have_their_names_and_equal_points_are_run_once() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("{VARIANTS}\n[[variant]]\nname = \"again\"\ndevtlb.partitions = 8");
    // The tables of a study may be in any order.
    let study = study(&text).unwrap();
    let options = options(dir.path().join("out.parquet"), 2);
    let swept = run(&study, &options);
    let summary = &swept.summary;
    assert_eq!((summary.points, summary.run, summary.skipped), (5, 4, 3));
    let file = std::fs::File::open(options.out.as_ref().unwrap()).unwrap();
    let names: Vec<String> = SerializedFileReader::new(file)
        .unwrap()
        .get_row_iter(None)
        .unwrap()
        .map(|row| {
            let columns = row.unwrap().into_columns();
            let (_, field) = columns
                .into_iter()
                .find(|(name, _)| name == "variant")
                .unwrap();
            field.to_string()
        })
        .collect();
    assert!(names[4].contains("again"), "{names:?}");
}
