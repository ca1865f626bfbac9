// SPDX-License-Identifier: Apache-2.0
//! `pagetide trace` as a person meets it: what it writes and how it ends.

mod program;

use std::path::Path;
use std::process::Command;

use program::{pagetide, report};
use serde_json::{Value, json};

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
    std::fs::write(
        dir.path().join("wrong.toml"),
        "tenants = 3\ntenant = 3\ninput.synthetic.workload = \"seq\"\n",
    )
    .unwrap();
    std::fs::write(dir.path().join("no-toml.toml"), "x = [").unwrap();
    std::fs::write(dir.path().join("empty.toml"), "").unwrap();
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
        (with(&["--init-frac", "nan"]), "from 0 to 1"),
        (with(&["--init-frac", "-1"]), "from 0 to 1"),
        (with(&["--set", "tenants=524288"]), "between 1 and 524287"),
        (with(&["--set", "input.synthetic.rings=1"]), "`rings`"),
        (with(&["--to", "hypersio-binary"]), "iotlb_trace.bin"),
        (with(&["--to", "hypersio-log"]), "hypersio-binary"),
        (vec!["trace", "build", "wrong.toml", "out"], "`tenant`"),
        (vec!["trace", "build", "absent.toml", "out"], "absent.toml"),
        (
            vec!["trace", "build", "no-toml.toml", "out"],
            "no-toml.toml",
        ),
        (
            vec!["trace", "build", "empty.toml", "out"],
            "is missing: write",
        ),
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
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
}

#[test]
fn impossible_recordings_and_what_is_none_end_with_status_2() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        std::fs::write(dir.path().join(name).join("collection.json"), text).unwrap();
    };
    std::fs::create_dir(dir.path().join("none")).unwrap();
    write("words", "seventeen");
    write("fields", "{\"device\": \"vmxnet3\"}");
    let collection = |logs: &str| {
        format!(
            "{{\"device\": \"vmxnet3\", \"workload\": \"iperf3\", \"mode\": \"strict\", \"seconds\": 1, \
             \"kernel\": \"6\", \"qemu_version\": \"7\", \"logs\": [{logs}]}}"
        )
    };
    write("no-logs", &collection(""));
    write("log-gone", &collection("\"vtd.log\""));
    write("log-broken", &collection("\"vtd.log\""));
    let broken = "1@1.0:vtd_iotlb_page_hit IOTLB page hit sid 0x8 iova\n";
    std::fs::write(dir.path().join("log-broken/vtd.log"), broken).unwrap();
    let collect = ["trace", "collect", "--out", "words"];
    let with = |more: &[&'static str]| [&collect[..], more].concat();
    let study = |dir: &'static str| vec!["sim", "study", "recorded", "--traces", dir];
    for (arguments, told) in [
        (vec!["trace", "collect"], "--out"),
        (with(&[]), "words: it is not empty"),
        (with(&["--device", "rtl8139"]), "vmxnet3, e1000e"),
        (with(&["--workload", "fio"]), "--device nvme"),
        (with(&["--device", "nvme"]), "--device nvme --workload fio"),
        (with(&["--mode", "eager"]), "strict, lazy"),
        (with(&["--nics", "0"]), "--nics"),
        (with(&["--seconds", "601"]), "--seconds"),
        (
            with(&[
                "--device",
                "nvme",
                "--workload",
                "fio",
                "--mode",
                "passthrough",
            ]),
            "is for NICs",
        ),
        (study("gone"), "gone: "),
        (study("none"), "no collection.json"),
        (study("words"), "words/collection.json: "),
        (study("fields"), "missing field `workload`"),
        (study("no-logs"), "no log"),
        (study("log-gone"), "log-gone/vtd.log: "),
        (study("log-broken"), "log-broken/vtd.log, record 1: "),
    ] {
        let (status, out, err) = pagetide(dir.path(), &arguments);
        assert_eq!(
            (status, out.as_str()),
            (Some(2), ""),
            "{arguments:?}: {err}"
        );
        assert!(err.contains(told), "{arguments:?}: no '{told}' in {err}");
    }
}

/// Everything in `dir` by name: what kind it is and how long.
fn census(dir: &Path) -> Vec<(std::ffi::OsString, std::fs::FileType, u64)> {
    let mut census: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let about = std::fs::symlink_metadata(entry.path()).unwrap();
            (entry.file_name(), about.file_type(), about.len())
        })
        .collect();
    census.sort_by(|a, b| a.0.cmp(&b.0));
    census
}

#[test]
fn output_that_is_no_file_is_refused_with_status_2_and_stays_what_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    for pipe in ["pipe", "b_params.json"] {
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join(pipe), mode).unwrap();
    }
    std::os::unix::fs::symlink("pipe", dir.path().join("link")).unwrap();
    std::fs::create_dir(dir.path().join("directory")).unwrap();
    let before = census(dir.path());
    for (out, told) in [
        ("pipe", "pipe: is a pipe"),
        ("link", "link: is a pipe"),
        ("directory", "is a directory"),
        ("absent/out", "make it first"),
        ("b_iotlb_trace.bin", "b_params.json: is a pipe"),
    ] {
        let make = ["trace", "make", out, "--tenants", "2", "--packets", "9"];
        let (status, _, err) = pagetide(dir.path(), &make);
        assert_eq!(status, Some(2), "{out}: {err}");
        assert!(err.contains(told), "{out}: no '{told}' in {err}");
    }
    assert_eq!(census(dir.path()), before);
}

#[test]
fn input_that_is_a_pipe_is_refused_with_status_2_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("pipe"), mode).unwrap();
    std::fs::write(
        dir.path().join("logs.toml"),
        "tenants = 2\n[input.recorded]\nlogs = [\"pipe\"]\n",
    )
    .unwrap();
    for arguments in [
        &["trace", "info", "pipe"][..],
        &["trace", "convert", "pipe", "out"],
        &["trace", "build", "logs.toml", "out"],
        &["sim", "run", "--trace", "pipe"],
    ] {
        let (status, _, err) = pagetide(dir.path(), arguments);
        assert_eq!(status, Some(2), "{arguments:?}: {err}");
        assert!(err.contains("copy it into a file first"), "{err}");
    }
}

#[test]
fn what_a_trace_cannot_be_made_of_is_told_with_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("none.toml"),
        "tenants = 2\n[input.recorded]\nlogs = []\n",
    )
    .unwrap();
    let unmapped = [
        "trace",
        "make",
        "x_iotlb_trace.bin",
        "--tenants",
        "2",
        "--packets",
        "9000",
        "--uses",
        "9",
        "--unmap",
        "when-left",
    ];
    for (arguments, told) in [
        (&unmapped[..], "no word for invalidate-pages: write parquet"),
        (
            &["trace", "build", "none.toml", "out"],
            "name logs with requests",
        ),
        (&["trace", "info", "absent"], "check the name"),
    ] {
        let (status, _, err) = pagetide(dir.path(), arguments);
        assert_eq!(status, Some(2), "{arguments:?}: {err}");
        assert!(err.contains(told), "no '{told}' in {err}");
    }
    assert_eq!(census(dir.path()).len(), 1);
}

/// A device writes a page to a section of 2 MiB; device 1 is a NIC.
fn dma(seconds: u64, device: u32, space: u32, section: u64) -> pagetide_access_log::AccessRecord {
    use pagetide_access_log::{AccessRecord, Service};
    use pagetide_addr::{Access, DeviceId, DomainId};
    AccessRecord {
        time_ns: seconds * 1_000_000_000,
        device: DeviceId(device),
        space: DomainId(space),
        address: section << 21,
        len_bytes: 4096,
        access: Access::Write,
        service: if device == 1 {
            Service::Network
        } else {
            Service::Block
        },
    }
}

/// An access log of a VM of 64 MiB: a NIC that keeps to 2 sections, a disk that
/// comes back to some of its 8 after longer.
fn access_log(path: &Path) {
    use pagetide_access_log::{AccessLogMeta, AccessLogWriter, LoggedDevice, Service};
    use pagetide_addr::DeviceId;
    let mut meta = AccessLogMeta::new("web", 64 << 20, 1);
    for (id, name, service) in [(1, "nic", Service::Network), (2, "disk", Service::Block)] {
        meta.enter(LoggedDevice {
            id: DeviceId(id),
            name: name.to_owned(),
            service,
        });
    }
    meta.lost_records = 5;
    let record = |seconds, device, section| dma(seconds, device, 0, section);
    let mut records: Vec<_> = (0..1200).map(|at| record(at, 1, at % 2)).collect();
    records.extend((0..8).map(|at| record(at * 10, 2, 10 + at)));
    records.extend((0..4).map(|at| record(1000 + at, 2, 10 + at)));
    let mut writer = AccessLogWriter::create(path, meta).unwrap();
    writer.append(&records).unwrap();
    writer.finish().unwrap();
}

#[test]
fn access_log_is_analyzed_by_device_and_drawn() {
    let dir = tempfile::tempdir().unwrap();
    access_log(&dir.path().join("a.parquet"));
    let arguments = ["trace", "analyze", "a.parquet", "--json", "--plots", "p"];
    let made = report(dir.path(), &arguments);
    let trace = &made["traces"][0];
    assert_eq!(trace["name"], "web");
    assert_eq!(trace["addresses"], "memory");
    assert_eq!(trace["memory_bytes"], 64 << 20);
    assert_eq!(trace["lost_records"], 5);
    assert_eq!(trace["span_seconds"], 1199.0);
    let [nic, disk] = [&trace["devices"][0], &trace["devices"][1]];
    assert_eq!(nic["name"], "nic");
    assert_eq!(nic["footprint_share"], 2.0 / 32.0);
    assert_eq!(nic["simulated_faults"], 0);
    assert_eq!(disk["footprint_bytes"], 16 << 20);
    assert_eq!(disk["simulated_faults"], 4);
    assert_eq!(disk["faults_under_10_share"], 1.0);
    assert_eq!(disk["footprint_points_sections"][0], 6);
    let plots = made["plots"].as_array().unwrap();
    assert_eq!(plots.len(), 4);
    for plot in plots {
        let svg = std::fs::read_to_string(dir.path().join(plot.as_str().unwrap())).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }

    let early = [
        "trace",
        "analyze",
        "a.parquet",
        "--json",
        "--until",
        "1000s",
    ];
    let early = report(dir.path(), &early);
    assert_eq!(early["traces"][0]["devices"][1]["simulated_faults"], 0);
    let (status, text, _) = pagetide(dir.path(), &["trace", "analyze", "a.parquet"]);
    assert_eq!(status, Some(0));
    assert!(
        text.contains("5 accesses were lost") && text.contains("25.0%"),
        "{text}"
    );
}

#[test]
fn block_trace_is_analyzed_as_what_it_is_and_refused_when_broken() {
    let dir = tempfile::tempdir().unwrap();
    let lines: String = (0..40)
        .map(|at| {
            format!(
                "{} {} {} 8 1\n",
                at * 100_000_000_000u64,
                at % 2,
                at % 8 * 4096
            )
        })
        .collect();
    std::fs::write(dir.path().join("t"), &lines).unwrap();
    std::fs::write(dir.path().join("cut"), &lines[..lines.len() - 4]).unwrap();
    std::fs::write(
        dir.path().join("ids"),
        (0..900u32).flat_map(u32::to_be_bytes).collect::<Vec<_>>(),
    )
    .unwrap();
    let made = report(dir.path(), &["trace", "analyze", "t", "t", "--json"]);
    assert_eq!(made["traces"][0]["addresses"], "disk");
    assert_eq!(made["traces"][0]["about"]["format"], "mqsim");
    assert_eq!(made["traces"][0]["devices"][1]["name"], "disk 1");
    assert_eq!(made["traces"][0]["services"][0]["simulated_faults"], 32);
    assert_eq!(made["services"][0]["simulated_faults"], 64, "of both");
    let (_, text, _) = pagetide(dir.path(), &["trace", "analyze", "t"]);
    assert!(text.contains("Addresses are disk addresses"), "{text}");
    let cached = ["trace", "analyze", "t", "--page-cache=64M", "--json"];
    let cached = report(dir.path(), &cached);
    let drawn = [
        "trace", "analyze", "t", "t", "--memory", "1G", "--plots", "p", "--json",
    ];
    let drawn = report(dir.path(), &drawn);
    assert_eq!(drawn["plots"].as_array().unwrap().len(), 7);
    let svg = std::fs::read_to_string(dir.path().join("p/footprints.svg")).unwrap();
    assert_eq!(svg.matches("<circle").count(), 4);
    assert_eq!(cached["traces"][0]["addresses"], "page-cache");
    let timed = [
        "trace",
        "analyze",
        "ids",
        "--request-interval",
        "1s",
        "--json",
    ];
    let timed = report(dir.path(), &timed);
    assert_eq!(timed["traces"][0]["about"]["byte_order"], "big-end");
    assert_eq!(timed["traces"][0]["span_seconds"], 899.0);
    for (arguments, told) in [
        (&["cut"][..], "cut, record 40: it has no sectors"),
        (&["ids"], "have no times"),
        (&["absent"], "check the name"),
        (&["t", "--format", "msr"], "`msr` is no format"),
        (&["t", "--format", "hp-srt"], "no header"),
        (&["t", "--interval", "5"], "such as 300s"),
        (&["t", "--section", "1K"], "at least"),
    ] {
        let arguments = [&["trace", "analyze"], arguments].concat();
        let (status, _, err) = pagetide(dir.path(), &arguments);
        assert_eq!(status, Some(2), "{err}");
        assert!(err.contains(told), "{err}");
    }
}

#[test]
fn trace_from_a_pipe_is_refused_whole_and_nothing_of_it_is_analyzed() {
    let dir = tempfile::tempdir().unwrap();
    for more in [&[][..], &["--format", "mqsim"], &["--page-cache=64M"]] {
        let (input, mut output) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut output, b"0 0 0 8 1\n1 0 8 8 1\n").unwrap();
        drop(output);
        let ended = Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(["trace", "analyze", "/dev/stdin"])
            .args(more)
            .current_dir(dir.path())
            .stdin(input)
            .output()
            .unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{more:?}: {err}");
        assert!(err.contains("/dev/stdin: is a pipe or a device"), "{err}");
    }
}

#[test]
fn log_of_more_files_than_a_process_may_have_open_is_analyzed() {
    use pagetide_access_log::{AccessLogMeta, AccessLogWriter};
    let dir = tempfile::tempdir().unwrap();
    for sequence in 1..=80 {
        let meta = AccessLogMeta {
            sequence,
            ..AccessLogMeta::new("web", 64 << 20, 1)
        };
        let path = dir.path().join(format!("web-{sequence:06}.parquet"));
        let mut writer = AccessLogWriter::create(&path, meta).unwrap();
        writer.append(&[dma(u64::from(sequence), 1, 0, 0)]).unwrap();
        writer.finish().unwrap();
    }
    let shell = r#"ulimit -n 40; exec "$0" trace analyze --json *.parquet"#;
    let ended = Command::new("sh")
        .args(["-c", shell, env!("CARGO_BIN_EXE_pagetide")])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(0), "{err}");
    let made: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(made["traces"][0]["services"][0]["accesses"], 80);
}

#[test]
fn sections_of_two_spaces_are_told_apart_in_a_log() {
    use pagetide_access_log::{AccessLogMeta, AccessLogWriter};
    let dir = tempfile::tempdir().unwrap();
    let meta = AccessLogMeta::new("web", 64 << 20, 1);
    let mut writer = AccessLogWriter::create(&dir.path().join("a"), meta).unwrap();
    let records = [dma(0, 1, 0, 5), dma(1, 1, 7, 5), dma(400, 1, 7, 5)];
    writer.append(&records).unwrap();
    writer.finish().unwrap();
    let made = report(dir.path(), &["trace", "analyze", "a", "--json"]);
    let nic = &made["traces"][0]["devices"][0];
    assert_eq!(nic["footprint_bytes"], 4 << 20);
    assert_eq!(nic["simulated_faults"], 1);
}

#[test]
fn window_counts_from_the_first_record_though_no_device_sees_it_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let second = 1_000_000_000u64;
    let lines = |first: &str| {
        let rest = [(60, 8), (60, 16), (120, 24)];
        let rest = rest.map(|(at, sector)| format!("{} 0 {sector} 8 1\n", at * second));
        format!("{first}\n{}", rest.concat())
    };
    // A write stays in the page cache for 30 s; a request of no sectors does nothing.
    std::fs::write(dir.path().join("write"), lines("0 0 0 8 0")).unwrap();
    std::fs::write(dir.path().join("nothing"), lines("0 0 0 0 1")).unwrap();
    for (file, more) in [
        ("write", "--page-cache=64M"),
        ("nothing", "--page-cache=64M"),
        ("nothing", "--json"),
    ] {
        let mut arguments = vec!["trace", "analyze", file, "--from", "50s"];
        arguments.extend(["--until", "110s", "--json", more]);
        arguments.dedup();
        let made = report(dir.path(), &arguments);
        let accesses = &made["traces"][0]["services"][0]["accesses"];
        assert_eq!(accesses, 2, "{file} {more}");
    }
}
