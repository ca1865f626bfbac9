// SPDX-License-Identifier: Apache-2.0
//! `pagetide sim` as a person meets it: what it prints and how it ends.

mod program;

use std::path::Path;

use program::{pagetide, report};
use serde_json::Value;

const STUDY: &str = r#"
preset = ["base", "hypertrio"]
flavour = "hypersio"
[[trace]]
tenants = 2
packets = 60
input.synthetic.workload = "iperf3"
"#;

fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("study.toml"), STUDY).unwrap();
    dir
}

#[test]
fn run_prints_one_object_with_configuration_figures_and_provenance() {
    let dir = place();
    let report = report(
        dir.path(),
        &[
            "sim",
            "run",
            "study.toml",
            "--preset",
            "base",
            "--set",
            "devtlb.entries=32",
            "--tenants",
            "--json",
        ],
    );
    assert_eq!(report["config"]["devtlb"]["entries"], 32);
    assert_eq!(report["config"]["flavour"], "hypersio");
    assert_eq!(report["trace"]["tenants"], 2);
    assert_eq!(report["figures"]["requests"], 180);
    assert_eq!(report["figures"]["tenants"].as_array().unwrap().len(), 2);
    assert_eq!(report["pagetide_version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["id"].as_str().unwrap().len(), 32);
    assert_eq!(report["program_sha256"].as_str().unwrap().len(), 64);
    let (status, text, _) = pagetide(
        dir.path(),
        &["sim", "run", "study.toml", "--preset", "base"],
    );
    assert_eq!(status, Some(0));
    assert!(
        text.contains("\ngoodput ") && text.contains("\ndevtlb "),
        "{text}"
    );
    assert!(
        !text.contains("SOURCE"),
        "tenants only when asked for: {text}"
    );
}

#[test]
fn events_of_a_run_are_lines_of_json_and_end_each_request_once() {
    let dir = place();
    let report = report(
        dir.path(),
        &[
            "sim",
            "run",
            "study.toml",
            "--preset",
            "base",
            "--events",
            "steps.jsonl",
            "--json",
        ],
    );
    let steps = std::fs::read_to_string(dir.path().join("steps.jsonl")).unwrap();
    let count = |names: &[&str]| {
        let steps = steps.lines().map(|line| {
            let step: Value = serde_json::from_str(line).unwrap();
            step["step"].as_str().unwrap().to_owned()
        });
        steps.filter(|step| names.contains(&step.as_str())).count()
    };
    // A request enters the device with its context entry known or not.
    assert_eq!(
        report["figures"]["requests"],
        count(&["issue", "context-miss"])
    );
    assert_eq!(report["figures"]["requests"], count(&["end"]));
}

#[test]
fn wrong_studies_and_broken_traces_end_with_status_2_and_say_what_is_right() {
    let dir = place();
    std::fs::write(dir.path().join("broken"), [7; 100]).unwrap();
    std::fs::write(dir.path().join("none.toml"), "preset = []").unwrap();
    for (arguments, told) in [
        (
            &["sim", "run", "study.toml"][..],
            "2 points, and 'sim run' runs one",
        ),
        (&["sim", "run"], "--trace"),
        (&["sim", "run", "absent.toml"], "absent.toml: No such file"),
        (&["sim", "run", "none.toml"], "[[trace]]"),
        (
            &["sim", "run", "--trace", "broken"],
            "broken: its content is of no trace format",
        ),
        (&["sim", "run", "--trace", "absent"], "absent: No such file"),
        (
            &["sim", "run", "study.toml", "--set", "devtlb.way=1"],
            "expected one of `entries`",
        ),
        (
            &["sim", "run", "study.toml", "--set", "ptb.entries=0"],
            "ptb.entries = 0",
        ),
        (
            &["sim", "run", "study.toml", "--preset", "best"],
            "`hypertrio`",
        ),
        (&["sim", "sweep", "study.toml"], "--out"),
        (
            &["sim", "sweep", "study.toml", "--out", "x", "--jobs", "0"],
            "--jobs",
        ),
        (
            &["sim", "verify", "--reference", "absent", "--traces", "."],
            "absent",
        ),
    ] {
        assert_refused(dir.path(), arguments, told);
    }
    assert!(!dir.path().join("x").exists());
}

/// Status 2, nothing on stdout, and `told` in what is said.
fn assert_refused(dir: &Path, arguments: &[&str], told: &str) {
    let (status, out, err) = pagetide(dir, arguments);
    assert_eq!(
        (status, out.as_str()),
        (Some(2), ""),
        "{arguments:?}: {err}"
    );
    assert!(err.contains(told), "no '{told}' in {err}");
}

#[test]
fn parameters_without_a_bound_or_an_effect_end_with_status_2() {
    let dir = place();
    for (arguments, told) in [
        (
            &[
                "sim",
                "run",
                "study.toml",
                "--set",
                "latency.pcie_ns=9000000000000000000",
            ][..],
            "latency.pcie_ns",
        ),
        (
            &[
                "sim",
                "run",
                "study.toml",
                "--set",
                "prefetch.pages_per_tenant=4294967295",
                "--preset",
                "hypertrio",
            ],
            "pagetide: prefetch.pages_per_tenant = 4294967295: at most 64",
        ),
        (
            &["sim", "run", "study.toml", "--set", "walk.guest_levels=5"],
            "flavour hypersio",
        ),
    ] {
        assert_refused(dir.path(), arguments, told);
    }
}

#[test]
fn sweep_writes_results_and_the_next_one_keeps_them() {
    let dir = place();
    let arguments = [
        "sim",
        "sweep",
        "study.toml",
        "--out",
        "out.parquet",
        "--jobs",
        "2",
    ];
    let (status, text, err) = pagetide(dir.path(), &arguments);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    assert!(text.contains("preset=hypertrio\n"), "{text}");
    assert!(text.contains("out.parquet: 2 points, 2 run now"), "{text}");
    let results = std::fs::read(dir.path().join("out.parquet")).unwrap();
    assert!(results.starts_with(b"PAR1") && results.ends_with(b"PAR1"));
    let again = report(dir.path(), &[&arguments[..], &["--json"]].concat());
    assert_eq!((&again["run"], &again["kept"]), (&0.into(), &2.into()));
}

#[test]
fn output_without_a_place_or_that_is_an_input_is_refused_with_status_2_and_left_alone() {
    let dir = place();
    for (command, option, out, told) in [
        (
            "sweep",
            "--out",
            "no/such/place",
            "its directory is not there",
        ),
        (
            "run",
            "--events",
            "no/such/place",
            "its directory is not there",
        ),
        ("sweep", "--out", ".", "is no name of a file"),
        ("sweep", "--out", "sub", "is a directory"),
        ("run", "--events", "sub", "is a directory"),
        ("sweep", "--out", "study.toml", "is read by this command"),
        ("run", "--events", "study.toml", "is read by this command"),
    ] {
        std::fs::create_dir_all(dir.path().join("sub")).unwrap();
        let arguments = [
            "sim",
            command,
            "study.toml",
            "--preset",
            "base",
            option,
            out,
        ];
        let (status, text, err) = pagetide(dir.path(), &arguments);
        assert_eq!((status, text.as_str()), (Some(2), ""), "{err}");
        assert!(err.contains(told), "no '{told}' in {err}");
    }
    let study = std::fs::read_to_string(dir.path().join("study.toml")).unwrap();
    assert_eq!(study, STUDY);
}

#[test]
fn events_do_not_replace_the_trace_that_is_read() {
    let dir = place();
    let trace = dir.path().join("a.bin");
    let bytes = [0; 48 * 3];
    std::fs::write(&trace, bytes).unwrap();
    let arguments = ["sim", "run", "--trace", "a.bin", "--events", "a.bin"];
    let (status, _, err) = pagetide(dir.path(), &arguments);
    assert_eq!(status, Some(2), "{err}");
    assert_eq!(std::fs::read(&trace).unwrap(), bytes);
}

#[test]
fn studies_of_the_examples_are_sound() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/studies");
    let mut points = Vec::new();
    for name in ["table4.toml", "devtlb.toml"] {
        let draft = pagetide_sim::study::Draft::read(&examples.join(name)).unwrap();
        points.push(draft.study().unwrap().points.len());
    }
    assert_eq!(points, [20, 162]);
    let recipe = pagetide_sim::study::Recipe::read(&examples.join("trace.toml")).unwrap();
    assert_eq!(recipe.spec().unwrap().tenants, 16);
}

#[test]
fn figures_are_drawn_into_one_page_with_data_beside_it() {
    let dir = place();
    let report = report(
        dir.path(),
        &[
            "sim",
            "figures",
            "--out",
            "drawn",
            "--packets",
            "30",
            "--only",
            "5,8b",
            "--json",
        ],
    );
    let figures = &report["figures"];
    assert_eq!(figures["drawn"], 2);
    // Figure 5 has a picture for each of four readings.
    assert_eq!(figures["pictures"], 5);
    assert_eq!(figures["points"], figures["points_run"]);
    assert!(figures["wall_seconds"].as_f64().unwrap() > 0.0);
    let paper = report["paper"].as_array().unwrap();
    assert_eq!(paper[0]["figure"], "5");
    assert_eq!(paper[0]["paper"], "99%");
    let drawn = dir.path().join("drawn");
    let page = std::fs::read_to_string(drawn.join("index.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 5);
    for file in ["figure-5.parquet", "figure-5.toml", "figure-8b.parquet"] {
        assert!(drawn.join(file).is_file(), "{file}");
    }
    let (status, _, error) = pagetide(
        dir.path(),
        &["sim", "figures", "--out", "drawn", "--only", "3"],
    );
    assert_eq!(status, Some(2));
    assert!(error.contains("there is no such figure"), "{error}");
}
