// SPDX-License-Identifier: Apache-2.0
//! `pagetide trace` as a person meets it: what it writes and how it ends.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

/// Runs the program in `dir`: status, stdout, stderr.
fn pagetide(dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(arguments)
        .current_dir(dir)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

fn report(dir: &Path, arguments: &[&str]) -> Value {
    let (status, out, err) = pagetide(dir, arguments);
    assert_eq!(status, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn made_trace_in_the_authors_format_has_its_figures_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let made = report(
        dir.path(),
        &[
            "trace",
            "make",
            "a_iotlb_trace.bin",
            "--tenants",
            "3",
            "--packets",
            "50",
            "--order",
            "rand",
            "--burst",
            "4",
            "--seed",
            "9",
            "--third",
            "ring",
            "--uses",
            "100",
            "--live",
            "5",
            "--run",
            "2",
            "--init-frac",
            "0.01",
            "--stagger",
            "none",
            "--sids",
            "log24",
            "--workload",
            "websearch",
            "--json",
        ],
    );
    assert_eq!(made["format"], "hypersio-binary");
    assert_eq!(made["params"], "a_params.json");
    assert_eq!(made["requests"], 150);
    let params = std::fs::read(dir.path().join("a_params.json")).unwrap();
    let params: Value = serde_json::from_slice(&params).unwrap();
    for (name, value) in [
        ("workload", json!("websearch")),
        ("tenants", json!(3)),
        ("order", json!("rand")),
        ("burst", json!(4)),
        ("total_pkts", json!(50)),
        ("seed", json!(9)),
        ("third", json!("ring")),
        ("sids", json!("log24")),
        ("uses", json!(100)),
        ("init_frac", json!(0.01)),
        ("stagger", json!(0)),
        ("run", json!(2)),
        ("live", json!(5)),
    ] {
        assert_eq!(params[name], value, "{name}");
    }
}

#[test]
fn converted_trace_has_the_same_events() {
    let dir = tempfile::tempdir().unwrap();
    let make = [
        "trace",
        "make",
        "a.parquet",
        "--tenants",
        "3",
        "--packets",
        "50",
    ];
    assert_eq!(pagetide(dir.path(), &make).0, Some(0));
    for to in ["b_iotlb_trace.bin", "c.parquet"] {
        let from = if to.starts_with('b') {
            "a.parquet"
        } else {
            "b_iotlb_trace.bin"
        };
        let converted = report(dir.path(), &["trace", "convert", from, to, "--json"]);
        assert_eq!(converted["events"], 150);
    }
    let mut told = ["a.parquet", "c.parquet"]
        .map(|file| report(dir.path(), &["trace", "info", file, "--json"]));
    assert_eq!(told[0]["origin"]["recipe"]["tenants"], 3);
    for info in &mut told {
        info["origin"] = Value::Null;
    }
    assert_eq!(told[0], told[1]);
    let (status, text, _) = pagetide(dir.path(), &["trace", "info", "b_iotlb_trace.bin"]);
    assert_eq!(status, Some(0));
    assert!(
        text.contains("format             hypersio-binary\n"),
        "{text}"
    );
}

#[test]
fn recipe_is_built_with_what_the_command_line_changes() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/studies/trace.toml");
    let recipe = recipe.to_str().unwrap();
    let built = report(
        dir.path(),
        &[
            "trace",
            "build",
            recipe,
            "a.parquet",
            "--set",
            "packets=100",
            "--set",
            "input.synthetic.ring.iova=0x34800000",
            "--json",
        ],
    );
    assert_eq!(
        (&built["tenants"], &built["packets"]),
        (&16.into(), &100.into())
    );
    // A log of our own making, recorded tenants from it.
    std::fs::write(
        dir.path().join("again.toml"),
        "tenants = 2\n[input.recorded]\nlogs = [\"a.parquet\"]\n",
    )
    .unwrap();
    let again = report(
        dir.path(),
        &["trace", "build", "again.toml", "b.parquet", "--json"],
    );
    assert_eq!(again["tenants"], 2);
}

#[test]
fn wrong_use_and_broken_traces_end_with_status_2_and_write_nothing() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("broken"), [7; 100]).unwrap();
    std::fs::write(dir.path().join("wrong.toml"), "tenant = 3").unwrap();
    let make = ["trace", "make", "out", "--tenants", "2", "--packets", "9"];
    let with = |more: &[&'static str]| [&make[..], more].concat();
    for (arguments, told) in [
        (vec!["trace", "make", "out"], "--tenants"),
        (vec!["trace", "make", "out", "--tenants", "2"], "--packets"),
        (
            vec!["trace", "make", "out", "--tenants", "0", "--packets", "9"],
            "tenants = 0",
        ),
        (with(&["--workload", "x"]), "`iperf3`"),
        (
            with(&["--order", "lifo"]),
            "order: unknown variant `lifo`, expected one of `rr`",
        ),
        (with(&["--sids", "some"]), "log24"),
        (with(&["--lengths", "9"]), "1000..4000"),
        (with(&["--set", "input.synthetic.rings=1"]), "`rings`"),
        (with(&["--to", "hypersio-binary"]), "iotlb_trace.bin"),
        (with(&["--to", "hypersio-log"]), "hypersio-binary"),
        (vec!["trace", "build", "wrong.toml", "out"], "`tenant`"),
        (vec!["trace", "build", "absent.toml", "out"], "absent.toml"),
        (
            vec!["trace", "convert", "broken", "out"],
            "broken: its content",
        ),
        (vec!["trace", "info", "broken"], "broken: its content"),
        (
            vec!["trace", "info", "broken", "--from", "hypersio-binary"],
            "broken, record 0",
        ),
        (vec!["trace", "info", "broken", "--from", "csv"], "parquet"),
    ] {
        let (status, out, err) = pagetide(dir.path(), &arguments);
        assert_eq!(
            (status, out.as_str()),
            (Some(2), ""),
            "{arguments:?}: {err}"
        );
        assert!(err.contains(told), "{arguments:?}: no '{told}' in {err}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}
