// SPDX-License-Identifier: Apache-2.0
//! The four real guests of `bench overcommit`, as its users run them, with the shortest slices. No ratio is
//! compared with a bound: one round shows nothing. Content is: each request, and at the end all data.

use std::process::Command;

use pagetide_guest::services::ServiceName;
use pagetide_guestkit::product::Product;
use pagetide_guestkit::programs::{REDIS_SERVER, SQLITE, compiler};
use serde_json::Value;

#[test]
fn four_guests_serve_the_same_under_a_budget_of_two_thirds_of_their_memory() {
    let Some(binary) = Product::to_take_over() else {
        return;
    };
    let programs = [REDIS_SERVER.additions(), SQLITE.additions(), compiler()];
    for program in programs {
        if let Err(error) = program {
            eprintln!("SKIPPED: {error}");
            return;
        }
    }
    let size = [
        "--pairs",
        "1",
        "--seconds",
        "2",
        "--only",
        "four-guests",
        "--json",
    ];
    let output = Command::new(binary)
        .args(["bench", "overcommit"])
        .args(size)
        .output()
        .expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let number = |path: &str| {
        let value = report.pointer(path).and_then(Value::as_f64);
        value.unwrap_or_else(|| panic!("{path} in {report}"))
    };
    for service in ServiceName::ALL.map(ServiceName::name) {
        for arm in ["all_memory", "pagetide"] {
            let served = number(&format!("/figures/guests/{arm}/{service}/requests_per_s"));
            assert!(served > 0.0, "{service}, {arm}: {report}");
        }
    }
    let over_mib = (number("/figures/guests_demand_bytes")
        - number("/figures/guests_budget_bytes"))
        / f64::from(1 << 20);
    let evicted_mib = number("/figures/guests/pagetide/evicted_mib");
    assert!(evicted_mib > over_mib, "what is over is away: {report}");
    assert!(number("/ratios/guests_throughput_over_all_memory") > 0.0);
    assert!(number("/ratios/guests_p99_over_all_memory") > 0.0);
    match report["peers"]["guests_zram"].as_str() {
        Some(reason) => eprintln!("SKIPPED: zram: {reason}"),
        None => assert!(number("/ratios/guests_throughput_over_zram") > 0.0),
    }
}
