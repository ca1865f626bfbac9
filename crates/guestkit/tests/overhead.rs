// SPDX-License-Identifier: Apache-2.0
//! `bench overhead` as its users run it, with the shortest slices: a stock guest with a disk of ours runs a
//! load, attached and released. No ratio is compared with a bound: one pair shows nothing.

use pagetide_guestkit::product::Product;
use pagetide_guestkit::programs::of_load;
use serde_json::Value;
use std::process::Command;

use pagetide_guest::loads::Load;

#[test]
fn overhead_compares_fio_on_our_disk_attached_with_released_and_evicts_nothing() {
    let Some(binary) = Product::to_take_over() else {
        return;
    };
    for program in of_load(Load::Fio) {
        if let Err(error) = program.additions() {
            eprintln!("SKIPPED: {error}");
            return;
        }
    }
    let size = ["--pairs", "2", "--seconds", "1", "--only", "fio", "--json"];
    let output = Command::new(binary)
        .args(["bench", "overhead"])
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
    assert!(number("/ratios/fio") > 0.0);
    assert!((number("/ratios/min") - number("/ratios/fio")).abs() < 1e-9);
    assert!(number("/figures/fio/free_ops_per_s") > 0.0);
    assert!((number("/figures/fio/pairs") - 2.0).abs() < 1e-9);
    assert_eq!(report["ratios"].get("redis"), None, "{report}");
}
