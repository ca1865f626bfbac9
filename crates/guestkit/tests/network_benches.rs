// SPDX-License-Identifier: Apache-2.0
//! Benches of a stock guest's network, as their users run them, with the shortest slices. No ratio is compared with a
//! bound: one pair shows nothing.

use pagetide_guestkit::network::Server;
use pagetide_guestkit::product::Product;
use serde_json::Value;
use std::process::Command;

/// The report of a bench, or `None` with the reason told where it cannot run.
fn report(servers: &[Server], words: &[&str]) -> Option<Value> {
    report_of(servers, &[words, &["--pairs", "1", "--json"]].concat())
}

fn report_of(servers: &[Server], words: &[&str]) -> Option<Value> {
    let binary = Product::to_take_over()?;
    for program in servers.iter().filter_map(|server| server.program()) {
        if let Err(error) = program.additions() {
            eprintln!("SKIPPED: {error}");
            return None;
        }
    }
    let mut command = Command::new(binary);
    command.arg("bench").args(words);
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("cannot run here") {
        eprintln!("SKIPPED: {said}");
        return None;
    }
    assert!(output.status.success(), "{said}");
    Some(serde_json::from_slice(&output.stdout).expect("one JSON object"))
}

fn number(report: &Value, path: &str) -> f64 {
    let value = report.pointer(path).and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("{path} in {report}"))
}

#[test]
fn nic_impact_injects_faults_under_redis_and_loses_nothing_out_of_order() {
    let words = ["nic-impact", "--seconds", "2", "--only", "redis"];
    let Some(report) = report(&[Server::Redis], &words) else {
        return;
    };
    for policy in ["drop", "out_of_order"] {
        for rate in [1, 2, 10] {
            let ratio = format!("/ratios/{policy}_redis_{rate}_over_quiet");
            assert!(number(&report, &ratio) > 0.0);
        }
        let injected = format!("/figures/{policy}_redis/10_per_s/injected");
        assert!(number(&report, &injected) > 0.0, "{report}");
    }
    let lost = "/figures/out_of_order_redis/10_per_s/lost_packets";
    assert!(number(&report, lost) < 0.5, "{report}");
}

#[test]
fn cold_ring_resumes_a_stock_guest_that_was_evicted_and_loses_nothing() {
    let words = ["cold-ring", "--only", "out_of_order_guest_256"];
    let Some(report) = report(&[Server::MEMCACHED], &words) else {
        return;
    };
    assert!(number(&report, "/ratios/out_of_order_recovery_over_wired_ring") > 0.0);
    let lost = "/figures/out_of_order_guest_lost_packets";
    assert!(number(&report, lost) < 0.5, "{report}");
    for side in ["evicted", "evicted_but_for_its_ring"] {
        let cell = format!("/figures/out_of_order_guest_256/{side}");
        assert!(number(&report, &format!("{cell}/operations")) > 0.0);
        assert!(number(&report, &format!("{cell}/warm_per_s")) > 0.0);
    }
}

#[test]
fn net_guest_compares_iperf3_with_qemus_own_interface() {
    let Some(report) = report(&[Server::Iperf3], &["net-guest", "--seconds", "1"]) else {
        return;
    };
    for side in ["figures", "peers/qemu"] {
        for way in ["to_guest", "from_guest"] {
            let path = format!("/{side}/{way}/gbit_per_s");
            assert!(number(&report, &path) > 0.0, "{path}: {report}");
        }
    }
    assert!(number(&report, "/ratios/ours_over_qemu_gbits") > 0.0);
    assert!(report["ratios"]["ours_over_vhost_net_gbits"].is_null());
}

#[test]
fn upgrade_under_iperf3_and_pings_loses_no_packet() {
    let words = [
        "upgrade",
        "--only",
        "network-guest",
        "--upgrades",
        "2",
        "--json",
    ];
    let Some(report) = report_of(&[Server::Iperf3], &words) else {
        return;
    };
    let network = "/figures/network_guest";
    assert!((number(&report, &format!("{network}/upgrades")) - 2.0).abs() < 0.1);
    // On a busy machine an emulated guest may be too late for its own socket.
    let of = |name: &str| number(&report, &format!("{network}/{name}"));
    let lost = of("lost_datagrams") / of("datagrams");
    assert!(lost < 0.02, "{report}");
    for lost in [
        "datagrams_out_of_order",
        "lost_to_faults",
        "failed_requests",
        "lossy_thousands_of_pings",
    ] {
        let lost = format!("{network}/{lost}");
        assert!(number(&report, &lost) < 0.5, "{lost}: {report}");
    }
}
