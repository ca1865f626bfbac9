// SPDX-License-Identifier: Apache-2.0
//! Benches of large VMs, at sizes that take seconds: what they measure needs the real program, for
//! they start it as a VMM and as a daemon.
//!
//! No figure is compared with a time: that depends on the machine. What is looked at is that all
//! figures are there, by the sizes that were asked for, and that the stand-in found every byte right,
//! without which a bench fails.

mod with_swap;

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
        acts.len() >= 6 && of("under_way") > of("deaths") / 3,
        "{report}"
    );
}

#[test]
fn pinning_measures_each_strategy_that_the_daemon_has_and_names_those_that_it_refuses() {
    let Some(report) = report(&["pinning", "--pairs", "1", "--json"]) else {
        return;
    };
    for name in ["none", "floor", "fine", "coarse", "static"] {
        let cell = &report["figures"][name];
        if let Some(reason) = cell["refused"].as_str() {
            assert!(["coarse", "static"].contains(&name), "{name}: {reason}");
            continue;
        }
        for figure in ["pps", "after_eviction_pps", "wired_bytes"] {
            assert!(
                cell[figure].as_f64() > Some(0.0),
                "{name} {figure}: {report}"
            );
        }
    }
    let of = |name: &str| {
        number(
            &report,
            &format!("/figures/{name}/neighbour_can_have_bytes"),
        )
    };
    assert!(of("none") > of("fine"), "{report}");
    let share = number(&report, "/figures/wired_share_of_ram");
    assert!(share > 0.0 && share < 0.1, "{report}");
}

/// Two alternations, so that pages are to be present after they were absent.
#[test]
fn head_of_line_makes_pages_absent_and_present_again_on_each_engine() {
    let words = ["head-of-line", "--pairs", "2", "--seconds", "1", "--json"];
    let Some(report) = report(&words) else {
        return;
    };
    for (side, ratio) in [("", "ours"), ("touching_", "touching"), ("stock_", "stock")] {
        // A userfaultfd cannot be made inside each.
        if report["peers"][ratio].is_string() {
            assert_ne!(ratio, "ours", "{report}");
            continue;
        }
        let of = |figures: &str| number(&report, &format!("/{figures}"));
        let at = match side {
            "" => "figures",
            _ => "peers",
        };
        assert!(
            of(&format!("{at}/{side}pages_waited_for")) > 0.0,
            "{report}"
        );
        for percentile in ["p99", "p999"] {
            let name = format!("ratios/{ratio}_{percentile}_over_quiet");
            assert!(of(&name) > 0.0, "{report}");
        }
    }
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
        &["upgrade", "--pairs", "3"],
        &["pool", "--upgrades", "3"],
    ] {
        let output = bench(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn upgrade_loses_nothing_and_the_old_program_goes_on_if_the_new_one_is_broken() {
    let size = ["upgrade", "--ram", "32M", "--upgrades", "3"];
    let words = [&size[..], &["--only", "stand-ins", "--json"]].concat();
    let Some(report) = report(&words) else {
        return;
    };
    let of = |name: &str| number(&report, &format!("/figures/{name}"));
    for name in ["upgrades", "broken_upgrades"] {
        assert!((of(name) - 3.0).abs() < 0.1, "{name}: {report}");
    }
    for name in ["failed_requests", "wrong_bytes", "broken_lost"] {
        assert_eq!(report["figures"][name], 0, "{name}: {report}");
    }
    for name in ["stall_max_us", "stand_ins/faults", "stand_ins/requests"] {
        assert!(of(name) > 0.0, "{name}: {report}");
    }
}
