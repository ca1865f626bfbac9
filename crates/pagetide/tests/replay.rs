// SPDX-License-Identifier: Apache-2.0
//! `pagetide replay` as a person meets it: what it prints and how it ends.

mod program;

use std::fmt::Write as _;
use std::path::Path;

use pagetide_access_log::{AccessLogMeta, AccessLogWriter, AccessRecord, LoggedDevice, Service};
use pagetide_addr::{Access, DeviceId, DomainId};
use serde_json::Value;

/// Runs `pagetide replay` in `dir`: status, stdout, stderr.
fn replay(dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    program::pagetide(dir, &[&["replay"], arguments].concat())
}

fn report(dir: &Path, arguments: &[&str]) -> Value {
    program::report(dir, &[&["replay"], arguments, &["--json"]].concat())
}

/// A log of a VM of 128 MiB whose NIC uses two sections each five minutes and whose disk uses eight
/// sections of 30 in turn every 20 s.
fn access_log(path: &Path) {
    let mut meta = AccessLogMeta::new("web", 128 << 20, 1);
    for (id, name, service) in [(1, "nic", Service::Network), (2, "disk", Service::Block)] {
        meta.enter(LoggedDevice {
            id: DeviceId(id),
            name: name.to_owned(),
            service,
        });
    }
    let record = |seconds: u64, device: u32, section: u64, service| AccessRecord {
        time_ns: 5_000_000_000 + seconds * 1_000_000_000,
        device: DeviceId(device),
        space: DomainId(0),
        address: section << 21,
        len_bytes: 4096,
        access: Access::Write,
        service,
    };
    let mut records = Vec::new();
    for round in 0..180_u64 {
        let at = round * 20;
        if round % 15 == 0 {
            records.extend((0..2).map(|section| record(at, 1, section, Service::Network)));
        }
        let disk = (0..8).map(|i| record(at, 2, 2 + (round * 8 + i) % 30, Service::Block));
        records.extend(disk);
    }
    let mut writer = AccessLogWriter::create(path, meta).unwrap();
    writer.append(&records).unwrap();
    writer.finish().unwrap();
}

/// A disk that is read everywhere, each block three times, in the text of MQSim: 60 s, 2,000 blocks of
/// 4 KiB.
fn block_trace() -> String {
    let mut text = String::new();
    for at in 0..6000_u64 {
        let block = at / 3 * 7919 % 2000;
        writeln!(text, "{} 0 {} 8 1", at * 10_000_000, block * 8).unwrap();
    }
    text
}

#[test]
fn policies_on_an_access_log_are_beside_each_other_and_protection_takes_faults_of_the_nic_away() {
    let dir = tempfile::tempdir().unwrap();
    access_log(&dir.path().join("a.parquet"));
    let made = report(dir.path(), &["a.parquet", "--overcommit", "0.2"]);
    let names: Vec<_> = made["policies"].as_array().unwrap().iter().collect();
    let names: Vec<_> = names
        .iter()
        .map(|p| p["policy"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["none", "lru", "adp"]);
    assert_eq!(made["vms"][0]["kind"], "access-log");
    assert_eq!(made["vms"][0]["span_seconds"], 3580.0);
    let service = |policy: usize, service: &str| {
        let services = made["policies"][policy]["services"].as_array().unwrap();
        let named = |s: &&Value| s["service"] == service;
        services.iter().find(named).unwrap().clone()
    };
    let faults = |policy| service(policy, "network")["faults"].as_u64().unwrap();
    assert!(faults(0) > 15, "{made}");
    assert!(faults(1) <= faults(0) / 4, "{made}");
    assert_eq!(service(0, "network")["reduction"], 0.0);
    assert!(service(1, "network")["rpr"].as_f64().unwrap() > 1.0);
    assert_eq!(service(0, "block")["touches"], 1440);
    let quick = "adp:promote-after=15s,scan-every=5s,demote-after=5s";
    let quick = report(dir.path(), &["a.parquet", "--policy", quick]);
    let nic = &quick["policies"][1]["services"][1];
    assert!(nic["faults"].as_u64().unwrap() <= faults(0) / 4, "{nic}");
    let again = report(
        dir.path(),
        &["a.parquet", "--overcommit", "0.2", "--jobs", "1"],
    );
    assert_eq!(made, again, "the number of threads changes nothing");
}

#[test]
fn block_trace_goes_through_a_page_cache_or_past_it_and_the_report_says_so() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t"), block_trace()).unwrap();
    let small = ["--section", "64K", "--policy", "lru:share=0.2"];
    let cached = report(
        dir.path(),
        &[&["t", "--time-scale", "60"], &small[..]].concat(),
    );
    assert_eq!(cached["vms"][0]["kind"], "page-cache");
    assert_eq!(cached["vms"][0]["footprint_bytes"], 2000 * 4096);
    assert_eq!(cached["time_scale"], 60.0);
    assert_eq!(cached["policies"].as_array().unwrap().len(), 2);
    let block = &cached["policies"][0]["services"][0];
    assert!(block["faults"].as_u64().unwrap() > 0, "{cached}");
    let (status, text, _) = replay(
        dir.path(),
        &[
            "t",
            "--time-scale",
            "60",
            "--section",
            "64K",
            "--policy",
            "lru",
        ],
    );
    assert_eq!(status, Some(0));
    for told in [
        "mqsim through a modelled page cache of",
        "times of the traces are stretched by 60",
        "The paper, on its own VMs",
        "RPR",
    ] {
        assert!(text.contains(told), "no '{told}' in\n{text}");
    }
    let aged = [
        "t",
        "--time-scale",
        "60",
        "--runs",
        "64K",
        "--read-again",
        "--nic",
        "1M",
    ];
    let aged = report(dir.path(), &[&aged[..], &small].concat());
    assert_eq!(aged["vms"][0]["guest"]["reads"], "read-again");
    assert_eq!(aged["policies"][0]["services"][1]["service"], "network");
    let touches = |report: &Value| report["policies"][0]["services"][0]["touches"].as_u64();
    assert!(touches(&aged) > touches(&cached), "{aged}");
    let direct = ["t", "--direct=1M", "--vm-memory", "16M"];
    let direct = report(dir.path(), &[&direct[..], &small].concat());
    assert_eq!(direct["vms"][0]["kind"], "direct");
    assert_eq!(
        direct["policies"][0]["services"][0]["footprint_share"],
        1.0 / 16.0
    );
}

#[test]
fn limit_stands_for_an_overcommit_and_capacity_is_told_when_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    access_log(&dir.path().join("a.parquet"));
    let arguments = [
        "a.parquet",
        "--limit",
        "96M",
        "--policy",
        "adp",
        "--capacity-every",
        "60s",
    ];
    let made = report(dir.path(), &arguments);
    assert_eq!(made["limit_bytes"], 96 << 20);
    assert_eq!(made["policies"][0]["limit_share"], 0.75);
    let capacity = &made["policies"][1]["capacity"][0];
    assert_eq!(capacity["device"], 1);
    assert_eq!(capacity["at_seconds"][0], 60.0);
    let len = |name: &str| capacity[name].as_array().unwrap().len();
    assert_eq!(len("protected_sections"), len("at_seconds"));
}

#[test]
fn what_cannot_be_replayed_ends_with_status_2_and_names_the_record_or_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    access_log(&path.join("a.parquet"));
    let whole = std::fs::read(path.join("a.parquet")).unwrap();
    std::fs::write(path.join("cut.parquet"), &whole[..whole.len() / 2]).unwrap();
    let text = block_trace();
    std::fs::write(path.join("t"), &text).unwrap();
    std::fs::write(path.join("cut"), &text[..text.len() - 4]).unwrap();
    let ids: Vec<u8> = (0..900_u32).flat_map(u32::to_be_bytes).collect();
    std::fs::write(path.join("ids"), ids).unwrap();
    for (arguments, told) in [
        (&["cut"][..], "cut, record 6000"),
        (&["cut.parquet"], "cut off"),
        (&["ids"], "has no times"),
        (&["absent"], "check the name"),
        (&["t", "--policy", "fifo"], "there is no policy \"fifo\""),
        (&["t", "--policy", "adp:speed=1"], "no parameter \"speed\""),
        (&["t", "--policy", "lru:share=2"], "share"),
        (&["t", "--overcommit", "3"], "an overcommit of 3"),
        (&["t", "--section", "3000"], "power of two"),
        (&["t", "--time-scale", "0"], "stretched by 0"),
        (&["t", "--cpu-share", "7"], "is no share"),
        (
            &["t", "--page-cache", "2G", "--vm-memory", "1G"],
            "do not fit",
        ),
        (
            &["a.parquet", "--vm-memory", "16M"],
            "record 8 of the log of web",
        ),
        (
            &["t", "--direct", "--page-cache", "1M"],
            "cannot be used with",
        ),
        (&[], "<TRACE>"),
    ] {
        let (status, _, err) = replay(path, arguments);
        assert_eq!(status, Some(2), "{arguments:?}: {err}");
        assert!(err.contains(told), "{arguments:?}: {err}");
    }
}
