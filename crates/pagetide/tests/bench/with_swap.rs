// SPDX-License-Identifier: Apache-2.0
//! Benches that switch the kernel's swap on for their peer, or change its settings. RAM in reach of swap is refused,
//! so no VM of this machine can be attached meanwhile: these run by themselves, one after the other (scripts/test).

use super::{SWAP, number, report_of};
use serde_json::Value;
use std::sync::PoisonError;

/// The report of a bench that switches swap on, or `None` with the reason told where it cannot run.
fn report(words: &[&str]) -> Option<Value> {
    let _swap = SWAP.write().unwrap_or_else(PoisonError::into_inner);
    report_of(words)
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
    let Some(report) = report(&words) else {
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
    let Some(report) = report(&size) else {
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
fn fault_and_fault_parallel_have_their_ratios() {
    let Some(fault) = report(&["fault", "--pairs", "1", "--json"]) else {
        return;
    };
    assert!(number(&fault, "/figures/cpu_us/p90") > 0.0);
    let Some(parallel) = report(&["fault-parallel", "--pairs", "1", "--json"]) else {
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
fn pool_tells_what_each_moment_takes_and_finds_every_byte_right() {
    // The kernel's readahead is off for the peer meanwhile.
    let Some(report) = report(&["pool", "--ram", "32M", "--json"]) else {
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

#[test]
fn swap_compares_a_tier_with_the_kernels_swap_and_says_what_it_has_not_measured() {
    let words = ["swap", "--pairs", "1", "--only", "disk", "--json"];
    let Some(report) = report(&words) else {
        return;
    };
    let of = |name: &str| number(&report, &format!("/figures/tiers/disk/{name}"));
    for name in [
        "cpu_us/p50",
        "device_whole_us/p50",
        "move_cpu_us_per_page",
        "disk_bytes_per_page",
    ] {
        assert!(of(name) > 0.0, "{name}: {report}");
    }
    assert!(number(&report, "/figures/uffd_round_trip_us/p50") > 0.0);
    assert_eq!(report["ratios"]["retouch_zipf_over_zram"], Value::Null);
    assert_eq!(report["ratios"]["cpu_over_zram_p90"], Value::Null);
    let file = &report["peers"]["kernel_swap_in_file"];
    if file.is_string() {
        eprintln!("SKIPPED: {file}");
        return;
    }
    let ratio = |name: &str| number(&report, &format!("/ratios/{name}"));
    let whole = ratio("disk_in_whole_p50_over_kernel_swap");
    assert!(ratio("disk_in_p50_over_kernel_swap") < whole, "{report}");
}
