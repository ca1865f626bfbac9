// SPDX-License-Identifier: Apache-2.0
//! The program itself: what it prints and how it ends.

mod bounded;
mod fake;

use std::path::Path;
use std::process::{Command, Output};

use bounded::{Said, run_until};
use fake::{BROKEN_PID, NO_VMM_PID, Server};
use serde_json::Value;

fn pagetide(api: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(arguments)
        .env("PAGETIDE_API", api)
        .current_dir("/tmp")
        .output()
        .unwrap()
}

fn told(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn clients_print_what_the_daemon_answers() {
    let server = Server::start();
    let run = |arguments: &[&str]| told(&pagetide(&server.socket, arguments));
    let (status, out, err) = run(&[
        "attach", "--pid", "4711", "--name", "web", "--limit", "256M", "--json",
    ]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    let vm: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&vm["name"], &vm["limit_bytes"]),
        (&"web".into(), &(256_u64 << 20).into())
    );

    let (status, out, _) = run(&["vm", "list"]);
    assert_eq!(status, Some(0));
    assert_eq!(
        out,
        "NAME  PID   STATE     RAM      RESIDENT   LIMIT      STORED  FAULTS  IOPFS\n\
         web   4711  attached  1.0 GiB  300.0 MiB  256.0 MiB  0 B     0       0\n"
    );
    let (_, out, _) = run(&["vm", "limit", "web", "none", "--json"]);
    assert_eq!(
        serde_json::from_str::<Value>(&out).unwrap()["limit_bytes"],
        Value::Null
    );
    let (status, out, _) = run(&["vm", "show", "web"]);
    let told = |line: &str| {
        line.split_once("  ")
            .map(|(name, value)| (name, value.trim()))
            == Some(("sections", "set cold, sections 3"))
    };
    assert_eq!((status, out.lines().any(told)), (Some(0), true), "{out}");
    let (status, out, _) = run(&["vm", "reclaim", "web", "--bytes", "1M", "--json"]);
    assert_eq!(status, Some(0));
    assert_eq!(
        serde_json::from_str::<Value>(&out).unwrap()["asked_bytes"],
        1 << 20
    );
    let (status, out, _) = run(&["vm", "detach", "web"]);
    assert_eq!(
        (status, out.starts_with("web: detached from process 4711")),
        (Some(0), true),
        "{out}"
    );
}

#[test]
fn budget_and_shares_are_set_shown_and_refused() {
    let server = Server::start();
    let run = |arguments: &[&str]| told(&pagetide(&server.socket, arguments));
    let json = |arguments: &[&str]| {
        let (status, out, err) = run(arguments);
        assert_eq!((status, err.as_str()), (Some(0), ""), "{arguments:?}");
        serde_json::from_str::<Value>(&out).unwrap()
    };
    let vm = json(&[
        "attach", "--pid", "4711", "--name", "web", "--weight", "50", "--floor", "64M", "--json",
    ]);
    assert_eq!(vm["name"], "web");
    let (status, out, _) = run(&["host", "budget"]);
    assert_eq!(status, Some(0));
    assert!(out.contains("budget  off"), "{out}");
    assert_eq!(run(&["host", "budget", "--low", "3%"]).0, Some(2));
    let host = json(&[
        "host", "budget", "2G", "--min", "0.5%", "--high", "64M", "--json",
    ]);
    assert_eq!(host["budget_bytes"], 2u64 << 30);
    let (status, _, err) = run(&["host", "budget", "5G"]);
    assert_eq!((status, err.lines().count()), (Some(2), 1), "{err}");
    let (status, _, err) = run(&["host", "budget", "off", "--low", "3%"]);
    assert_eq!((status, err.lines().count()), (Some(2), 1), "{err}");
    assert_eq!(
        json(&["host", "show", "--json"])["budget_bytes"],
        2u64 << 30
    );
    let set = [
        "vm",
        "set",
        "web",
        "--weight",
        "200",
        "--floor",
        "1G",
        "--ceiling",
        "4G",
        "--json",
    ];
    let vm = json(&set);
    assert_eq!(
        (&vm["weight"], &vm["floor_bytes"], &vm["limit_bytes"]),
        (&200.into(), &(1u64 << 30).into(), &(4u64 << 30).into())
    );
    assert_eq!(run(&["vm", "set", "web", "--weight", "0"]).0, Some(2));
    let vm = json(&["vm", "set", "web", "--ceiling", "none", "--json"]);
    assert_eq!(
        (&vm["limit_bytes"], &vm["weight"]),
        (&Value::Null, &200.into())
    );
    let off = json(&["host", "budget", "off", "--json"]);
    assert_eq!(off["budget_bytes"], Value::Null);
}

#[test]
fn paths_of_devices_are_made_absolute_by_the_client() {
    let server = Server::start();
    let run = |arguments: &[&str]| told(&pagetide(&server.socket, arguments));
    let (status, out, err) = run(&[
        "dpu",
        "blk",
        "--socket",
        "a b.sock",
        "--image",
        "i.raw",
        "--queues",
        "2",
        "--read-only",
        "--no-lookup",
        "--serial",
        "s1",
        "--json",
    ]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    let device: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(device["socket"], "/tmp/a b.sock");
    assert_eq!(device["image"], "/tmp/i.raw");
    assert_eq!(device["queues"], 2);
    assert_eq!(
        (&device["read_only"], &device["lookup"]),
        (&true.into(), &false.into())
    );
    let (status, out, _) = run(&["dpu", "remove", "--socket", "a b.sock"]);
    assert_eq!(
        (status, out.as_str()),
        (Some(0), "/tmp/a b.sock: removed\n")
    );
    let (_, out, _) = run(&["dpu", "list", "--json"]);
    assert_eq!(
        serde_json::from_str::<Value>(&out).unwrap()["devices"],
        serde_json::json!([])
    );
}

#[test]
fn network_device_is_asked_for_with_one_link_and_nothing_else_is_understood() {
    let server = Server::start();
    let run = |arguments: &[&str]| told(&pagetide(&server.socket, arguments));
    let net = ["dpu", "net", "--socket", "n.sock"];
    let with = |more: &[&str]| run(&[&net[..], more].concat());
    let (status, out, err) = with(&["--tap", "tap0", "--queues", "4", "--json"]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    let device: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(device["socket"], "/tmp/n.sock");
    assert_eq!(
        (&device["kind"], &device["link"]),
        (&"net".into(), &"tap tap0".into())
    );
    assert_eq!(device["queues"], 4);
    let (_, out, _) = run(&["dpu", "list"]);
    assert!(
        out.lines()
            .any(|line| line.contains("net") && line.contains("tap tap0")),
        "{out}"
    );
    for wrong in [
        &[][..],
        &["--null", "--tap", "tap0"],
        &["--tap", ""],
        &["--tap", "a/b"],
        &["--tap", "a-name-that-is-too-long"],
        &["--packet", "a b"],
        &["--pair", ""],
        &["--loop", "--null"],
        &["--null", "--wire", "stat"],
        &["--null", "--wire", "coarse:0"],
        &["--null", "--wire", "floor:0"],
        &["--null", "--on-receive-fault", "maybe"],
        &["--null", "--backup-bytes", "x"],
        &["--null", "--queues", "0"],
        &["--null", "--queues", "33"],
        &["--null", "--image", "i.raw"],
    ] {
        let (status, out, err) = with(wrong);
        assert_eq!((status, out.as_str()), (Some(2), ""), "{wrong:?}");
        assert!(err.starts_with("error: "), "{wrong:?}: {err}");
    }
}

#[test]
fn accounts_and_injections_are_asked_for_by_a_device_s_socket_or_serial() {
    let server = Server::start();
    let run = |arguments: &[&str]| told(&pagetide(&server.socket, arguments));
    let blk = ["dpu", "blk", "--socket", "/tmp/i.sock", "--image", "i.raw"];
    assert_eq!(run(&blk).0, Some(0));
    let (status, out, err) = run(&["dpu", "slo", "--device", "/tmp/i.sock"]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    assert!(out.starts_with("/tmp/i.sock (serial -)"), "{out}");
    let (_, out, _) = run(&["dpu", "slo", "--json"]);
    let list: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(list["devices"][0]["windows"][0]["p999_us"], 88.5);
    let inject = ["iopf", "inject", "--device", "/tmp/i.sock", "--rate", "2"];
    let with = |more: &[&str]| run(&[&inject[..], more].concat());
    let (status, out, _) = with(&["--latency", "5ms", "--burst", "3", "--json"]);
    assert_eq!(status, Some(0));
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&report["burst"], &report["seconds"]),
        (&3.into(), &10.into())
    );
    let (status, out, _) = with(&["--latency", "5ms", "--wait"]);
    assert_eq!(status, Some(0));
    assert!(
        out.contains("7 injected so far; 7 of them went on"),
        "{out}"
    );
    for command in ["show", "stop"] {
        let (status, _, _) = run(&["iopf", command, "--device", "/tmp/i.sock"]);
        assert_eq!(status, Some(0));
    }
    for wrong in [
        vec!["--latency", "5 fortnights"],
        vec!["--latency", "5ms", "--rate", "0"],
        vec!["--latency", "5ms", "--rate=-1"],
        vec!["--latency", "5ms", "--device", "serial-9"],
    ] {
        let mut arguments = vec!["iopf", "inject"];
        if !wrong.contains(&"--device") {
            arguments.extend(["--device", "/tmp/i.sock"]);
        }
        if !wrong.iter().any(|word| word.starts_with("--rate")) {
            arguments.extend(["--rate", "1"]);
        }
        arguments.extend(&wrong);
        let (status, out, err) = run(&arguments);
        assert_eq!((status, out.as_str()), (Some(2), ""), "{wrong:?}: {err}");
        assert!(!err.is_empty(), "{wrong:?}");
    }
}

#[test]
fn refusal_ends_with_2_and_failure_with_1_each_with_one_sentence() {
    let server = Server::start();
    let (no_vmm, broken) = (NO_VMM_PID.to_string(), BROKEN_PID.to_string());
    for (arguments, status, sentence) in [
        (
            vec!["attach", "--pid", &no_vmm],
            2,
            "pagetide: process 1 is no VMM\n",
        ),
        (
            vec!["attach", "--pid", &broken],
            1,
            "pagetide: ptrace broke\n",
        ),
        (
            vec!["vm", "show", "x"],
            2,
            "pagetide: there is no VM 'x': see `pagetide vm list`\n",
        ),
        (
            vec!["dpu", "remove", "--socket", "/x"],
            2,
            "pagetide: no device listens on /x\n",
        ),
    ] {
        let (code, out, err) = told(&pagetide(&server.socket, &arguments));
        assert_eq!(
            (code, out.as_str(), err.as_str()),
            (Some(status), "", sentence)
        );
    }
    let (code, _, err) = told(&pagetide(&server.socket, &["vm", "show", "a/b"]));
    assert_eq!(
        (code, err.contains("cannot name a VM")),
        (Some(2), true),
        "{err}"
    );
}

#[test]
fn client_without_a_daemon_says_how_to_get_one() {
    let (code, _, err) = told(&pagetide(Path::new("/nowhere/api.sock"), &["vm", "list"]));
    assert_eq!(code, Some(1));
    assert!(
        err.contains("/nowhere/api.sock") && err.contains("pagetide run"),
        "{err}"
    );
}

#[test]
fn run_prints_settings_with_flags_over_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("p.toml");
    std::fs::write(&config, "engines = 2\nlog = \"json\"\n").unwrap();
    let config = config.to_str().unwrap();
    let arguments = [
        "run",
        "--config",
        config,
        "--engines",
        "3",
        "--print-settings",
    ];
    let (code, out, err) = told(&pagetide(Path::new("/x"), &arguments));
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let printed: toml::Table = out.parse().unwrap();
    assert_eq!(printed["engines"].as_integer(), Some(3));
    assert_eq!(printed["log"].as_str(), Some("json"));
}

#[test]
fn run_with_wrong_settings_ends_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("p.toml");
    std::fs::write(&config, "engine = 2\n").unwrap();
    let config = config.to_str().unwrap();
    let (code, _, err) = told(&pagetide(Path::new("/x"), &["run", "--config", config]));
    assert_eq!(
        (code, err.contains("unknown field `engine`")),
        (Some(2), true),
        "{err}"
    );
    let (code, _, err) = told(&pagetide(
        Path::new("/x"),
        &["run", "--state-dir", "/proc/1/fd"],
    ));
    assert_eq!(
        (code, err.contains("state directory")),
        (Some(2), true),
        "{err}"
    );
    let (code, _, err) = told(&pagetide(Path::new("/x"), &["run", "--log-filter", "=,="]));
    assert_eq!((code, err.contains("log-filter")), (Some(2), true), "{err}");
}

#[test]
fn openapi_is_printed_as_json() {
    let (code, out, _) = told(&pagetide(Path::new("/x"), &["openapi"]));
    assert_eq!(code, Some(0));
    assert!(serde_json::from_str::<Value>(&out).unwrap()["paths"].is_object());
}

/// `pagetide run` under limits on open files, soft and hard, until it says something of `words`.
fn run_with_files(soft: u32, hard: u32, words: [&str; 2]) -> Said {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    run_until(
        Command::new("sh")
            .args([
                "-c",
                "ulimit -Sn $1 && ulimit -Hn $2 && shift 2 && exec \"$@\"",
                "sh",
            ])
            .args([soft.to_string(), hard.to_string()])
            .arg(env!("CARGO_BIN_EXE_pagetide"))
            .args(["run", "--state-dir"])
            .arg(dir.path().join("state")),
        &words,
    )
}

#[test]
fn daemon_raises_its_limit_on_open_files_and_says_how_many_it_needs_if_it_may_not() {
    let words = [" ready", "files open"];
    let Said { log: told, ended } = run_with_files(256, 4096, words);
    if ended.is_some() && told.contains("io_uring") && !told.contains("Too many open files") {
        eprintln!("SKIPPED: {told}");
        return;
    }
    assert!(told.contains(" ready"), "{told}");
    let told = run_with_files(256, 300, words).log;
    assert!(told.contains("300") && told.contains("512"), "{told}");
    assert!(told.contains("LimitNOFILE"), "{told}");
}
