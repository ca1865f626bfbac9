// SPDX-License-Identifier: Apache-2.0
//! Benches of large VMs, at sizes that take seconds: what they measure needs the real program, for
//! they start it as a VMM and as a daemon.
//!
//! No figure is compared with a time: that depends on the machine. What is looked at is that all
//! figures are there, by the sizes that were asked for, and that the stand-in found every byte right,
//! without which a bench fails.

use serde_json::Value;
use std::process::{Command, Output};
use std::sync::{PoisonError, RwLock};

/// Held for writing while a bench has the kernel's swap on for its peer: RAM in reach of swap is refused to
/// all others.
static SWAP: RwLock<()> = RwLock::new(());

fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .arg("bench")
        .args(words)
        .output()
        .expect("the program starts")
}

/// The report of a bench, or `None` with the reason told where it cannot run.
fn report(words: &[&str]) -> Option<Value> {
    let _no_swap = SWAP.read().unwrap_or_else(PoisonError::into_inner);
    report_of(words)
}

/// The same of a bench that switches swap on.
fn report_with_swap(words: &[&str]) -> Option<Value> {
    let _swap = SWAP.write().unwrap_or_else(PoisonError::into_inner);
    report_of(words)
}

fn report_of(words: &[&str]) -> Option<Value> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return None;
    }
    let output = bench(words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    Some(serde_json::from_slice(&output.stdout).expect("one JSON object"))
}

fn number(report: &Value, path: &str) -> f64 {
    let value = report.pointer(path);
    value
        .and_then(Value::as_f64)
        .unwrap_or_else(|| panic!("{path} in {report}"))
}

#[test]
fn real_size_has_all_figures_of_each_size() {
    let words = ["real-size", "--ram", "32M,64M", "--pairs", "1", "--json"];
    let Some(report) = report(&words) else {
        return;
    };
    for size in ["mib_32", "mib_64"] {
        for name in [
            "attach_s",
            "attach_gap_ms",
            "detach_s",
            "squeeze_s",
            "evict_mib_per_s",
            "evict_cpu_us_per_page",
            "recover_s",
            "detach_half_s",
            "detach_half_mib_per_s",
            "daemon_mib_per_gib",
        ] {
            let value = number(&report, &format!("/figures/{name}/{size}"));
            assert!(value > 0.0, "{name} {size}: {report}");
        }
        for phase in ["attach", "scan", "squeeze", "detach"] {
            let path = format!("/figures/show_by_phase/{size}/{phase}/answers");
            assert!(number(&report, &path) > 0.0, "{path}");
        }
    }
    assert!(number(&report, "/ratios/attach_mib_64_over_mib_32") > 0.0);
    assert!(number(&report, "/figures/show_max_ms") > 0.0);
}

#[test]
fn crash_kills_daemon_and_dpu_process_and_nothing_is_wrong_or_lost() {
    // Both parts with stand-ins.
    let size = ["crash", "--only", "d", "--ram", "64M"];
    let Some(report) = report(&[&size[..], &["--kills", "24", "--seed", "3", "--json"]].concat())
    else {
        return;
    };
    for name in [
        "wrong_pages",
        "lost_pages",
        "wrong_blocks",
        "failed_requests",
    ] {
        assert_eq!(report["figures"][name], 0, "{name}: {report}");
    }
    assert_eq!(report["figures"]["seed"], 3);
    assert!(number(&report, "/figures/kills") >= 24.0);
    for name in ["stall_p99_us", "process_start_p50_us", "compared_blocks"] {
        assert!(
            number(&report, &format!("/figures/{name}")) > 0.0,
            "{report}"
        );
    }
    let acts = report["figures"]["by_act"].as_object().expect("acts");
    let of = |name: &str| -> u64 {
        let counts = acts.values().map(|act| act[name].as_u64().unwrap_or(0));
        counts.sum()
    };
    assert!(
        acts.len() >= 6 && of("under_way") > of("deaths") / 2,
        "{report}"
    );
}

#[test]
fn budget_runs_the_same_days_again_by_the_same_seeds_and_keeps_what_it_promises() {
    let words = [
        "budget", "--days", "8", "--vms", "6", "--seeds", "2", "--json",
    ];
    // No VM is started, so it needs no root.
    let run = || -> Value {
        let output = bench(&words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        serde_json::from_slice(&output.stdout).expect("one JSON object")
    };
    let report = run();
    assert_eq!(report, run());
    for name in ["over_beyond_fills_max_bytes", "floors_broken"] {
        assert_eq!(report["figures"][name], 0, "{name}: {report}");
    }
    for name in ["vms_that_came", "restarts", "evicted_over_budget"] {
        assert!(
            number(&report, &format!("/figures/{name}")) > 0.0,
            "{report}"
        );
    }
    for change in ["demand", "weight", "join", "leave"] {
        let path = format!("/figures/fair_after_s/{change}");
        assert!(number(&report, &path) > 0.0, "{report}");
    }
    assert!(number(&report, "/ratios/done_over_split") > 0.0);
}

#[test]
fn burst_tells_memory_recovery_and_faults_and_draws_them() {
    let dir = tempfile::tempdir().unwrap();
    let plots = dir.path().join("plots");
    let words = [
        "burst",
        "--ram",
        "128M",
        "--pairs",
        "1",
        "--seconds",
        "2",
        "--online",
        // Demands change after five seconds, and again after ten.
        "12",
        "--plots",
        plots.to_str().unwrap(),
        "--json",
    ];
    let Some(report) = report_with_swap(&words) else {
        return;
    };
    for name in [
        "budget_bytes",
        "recovery_s",
        "after_share",
        "served_faults",
        "whole_faults",
        "uffd_round_trip_us",
        "hot_bursting_sections_after",
    ] {
        let value = number(&report, &format!("/figures/{name}"));
        assert!(value > 0.0, "{name}: {report}");
    }
    for name in [
        "served_within_10us_share",
        "whole_within_share",
        "cold_least_share",
    ] {
        let share = number(&report, &format!("/figures/{name}"));
        assert!((0.0..=1.0).contains(&share), "{name}: {report}");
    }
    assert!(number(&report, "/figures/online/served_faults") > 0.0);
    let drawn = std::fs::read_to_string(plots.join("burst-throughput.svg")).unwrap();
    assert!(drawn.contains("<svg") && drawn.contains("bursting"));
    if report["peers"]["zram"].is_string() {
        eprintln!("SKIPPED: {}", report["peers"]["zram"]);
        return;
    }
    assert!(number(&report, "/peers/zram/recovery_s") >= 0.0);
}

#[test]
fn guest_cost_compares_attached_with_released() {
    let size = [
        "guest-cost",
        "--ram",
        "64M",
        "--pairs",
        "2",
        "--seconds",
        "1",
    ];
    let words = [&size[..], &["--only", "d_hot_7_8_vcpus_1", "--json"]].concat();
    let Some(report) = report(&words) else {
        return;
    };
    let cell = "/figures/limited_hot_7_8_vcpus_1";
    assert_eq!(number(&report, &format!("{cell}/pairs")), 2.0);
    assert!(number(&report, &format!("{cell}/attached_mops_per_s")) > 0.0);
    let mean = number(&report, &format!("{cell}/mean"));
    let low95 = number(&report, "/ratios/limited_over_free_low95");
    assert!(low95 <= mean, "{report}");
    assert_eq!(report["ratios"]["attached_over_free_low95"], Value::Null);
}

#[test]
fn schedule_compares_faults_beside_background_work_with_faults_without() {
    let size = [
        "schedule",
        "--ram",
        "128M",
        "--pairs",
        "1",
        "--seconds",
        "1",
        "--json",
    ];
    let Some(report) = report(&size) else {
        return;
    };
    for arm in ["none", "background", "capped"] {
        let faults = number(&report, &format!("/figures/{arm}/timed_faults_per_s"));
        assert!(faults > 0.0, "{arm}: {report}");
    }
    let evicted = |arm: &str| number(&report, &format!("/figures/{arm}/evicted_pages_per_s"));
    assert!(
        evicted("background") > 0.0 && evicted("none") == 0.0,
        "{report}"
    );
    assert!(number(&report, "/ratios/fault_p99_background_over_none") > 0.0);
    let held = number(&report, "/figures/capped/reclaim/held_runs_per_s");
    assert!(held > 0.0, "{report}");
}

#[test]
fn overcommit_compares_the_budget_with_all_memory_and_with_a_static_split() {
    let size = [
        "overcommit",
        "--ram",
        "64M",
        "--pairs",
        "1",
        "--seconds",
        "1",
        // Four real guests take minutes: a test of the kit has them.
        "--only",
        "vms",
        "--json",
    ];
    let Some(report) = report_with_swap(&size) else {
        return;
    };
    for arm in ["all_memory", "pagetide"] {
        let requests = number(&report, &format!("/figures/{arm}/requests_per_s"));
        assert!(requests > 0.0, "{arm}: {report}");
    }
    let (demand, budget) = (
        number(&report, "/figures/demand_bytes"),
        number(&report, "/figures/budget_bytes"),
    );
    assert!((demand / budget - 1.5).abs() < 1e-6, "{report}");
    let evicted = number(&report, "/figures/pagetide/evicted_mib");
    let over_mib = (demand - budget) / f64::from(1 << 20);
    assert!(evicted > over_mib, "what is over is away: {report}");
    for ratio in ["throughput_over_all_memory", "p99_over_all_memory"] {
        assert!(number(&report, &format!("/ratios/{ratio}")) > 0.0);
    }
    assert!(number(&report, "/ratios/hits_over_split") > 0.0);
    assert!(number(&report, "/figures/split/faults_per_s") > 0.0);
    if report["peers"]["zram"].is_string() {
        eprintln!("SKIPPED: {}", report["peers"]["zram"]);
        return;
    }
    assert!(number(&report, "/ratios/throughput_over_zram") > 0.0);
    let of = |name: &str| number(&report, &format!("/peers/zram/{name}"));
    let taken_mib = of("resident_mib") + of("stored_mib");
    let budget_mib = budget / f64::from(1 << 20);
    assert!(
        taken_mib < 1.1 * budget_mib,
        "zram pays for what it stores: {report}"
    );
}

#[test]
fn tracker_knows_what_is_cold_and_what_came_of_it() {
    let size = ["tracker", "--ram", "64M", "--seconds", "5"];
    let words = [&size[..], &["--only", "section_50", "--json"]].concat();
    let Some(report) = report(&words) else {
        return;
    };
    let row = "/figures/rows/section_50";
    assert_eq!(number(&report, &format!("{row}/cold_sections")), 16.0);
    assert!(
        number(&report, &format!("{row}/evicted_pages")) > 0.0,
        "{report}"
    );
    let share = number(&report, "/figures/cold_found_share");
    assert!((0.0..=1.0).contains(&share), "{report}");
    assert!(report["peers"]["full_unmapping"].is_string());
}

#[test]
fn fault_and_fault_parallel_have_their_ratios() {
    let Some(fault) = report_with_swap(&["fault", "--pairs", "1", "--json"]) else {
        return;
    };
    assert!(number(&fault, "/figures/cpu_us/p90") > 0.0);
    let Some(parallel) = report_with_swap(&["fault-parallel", "--pairs", "1", "--json"]) else {
        return;
    };
    for threads in [1, 2, 4, 8] {
        for side in ["ours", "quiet", "held"] {
            let path = format!("/figures/threads_{threads}/{side}/pages_per_s");
            assert!(number(&parallel, &path) > 0.0, "{path}");
        }
    }
    assert!(number(&parallel, "/ratios/p99_beside_held_over_quiet") > 0.0);
    if fault["peers"]["zram_us"].is_string() {
        eprintln!("SKIPPED: {}", fault["peers"]["zram_us"]);
        return;
    }
    for ratio in ["retouch_sequential", "retouch_zipf", "retouch_random"] {
        assert!(number(&fault, &format!("/ratios/{ratio}_over_zram")) > 0.0);
    }
    assert!(number(&parallel, "/ratios/rate_over_zram_8") > 0.0);
}

#[test]
fn options_that_mean_nothing_are_wrong_use() {
    for words in [
        &["fault", "--ram", "1G"][..],
        &["tracker", "--pairs", "3"],
        &["burst", "--days", "3"],
        &["budget", "--online", "3"],
        &["budget", "--vms", "0"],
        &["real-size", "--ram", "16M"],
        &["guest-cost", "--ram", "1G,2G"],
        &["guest-cost", "--setting", "dma-protector"],
        &["overhead", "--ram", "1G"],
    ] {
        let output = bench(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn pool_tells_what_each_moment_takes_and_finds_every_byte_right() {
    // The kernel's readahead is off for the peer meanwhile.
    let Some(report) = report_with_swap(&["pool", "--ram", "32M", "--json"]) else {
        return;
    };
    for moment in ["mixed", "churned", "shrunk"] {
        let of = |name: &str| number(&report, &format!("/figures/{moment}/{name}"));
        assert!(of("stored_bytes") > 0.0 && of("fragmented_bytes") > 0.0);
        assert!(of("metadata_bytes") >= 65_536.0, "{report}");
        assert!(of("freed_over_spent") > 0.0, "{report}");
    }
    assert!((number(&report, "/figures/mixed/evicted_bytes") - f64::from(32 << 20)).abs() < 1.0);
    assert!((0.7..0.85).contains(&number(&report, "/figures/mixed/zero_share")));
    assert!((0.4..0.55).contains(&number(&report, "/figures/mixed/compression_ratio")));
    assert!(
        number(&report, "/figures/metadata_share") > 0.002,
        "{report}"
    );
}
