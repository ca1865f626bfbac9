// SPDX-License-Identifier: Apache-2.0
//! `pagetide trace collect`: a real guest behind an emulated IOMMU, whose log must agree with what its own kernel says
//! it mapped; and the study of what was recorded.

use std::path::Path;
use std::process::{Command, Output};

use pagetide_guestkit::image;
use pagetide_guestkit::product::Product;
use pagetide_guestkit::programs::IPERF3;
use pagetide_guestkit::qemu::Version;
use serde_json::Value;

/// The program of the lab where guests can be recorded; `None` where not, after printing why.
fn lab() -> Option<Command> {
    let missing = match (Version::installed(), IPERF3.additions()) {
        (Err(error), _) => Some(error.to_string()),
        (_, Err(error)) => Some(error.to_string()),
        _ => image::prepare().err().map(|error| error.to_string()),
    };
    if let Some(missing) = missing {
        eprintln!("SKIPPED: {missing}");
        return None;
    }
    match Product::lab_binary() {
        Ok(binary) => Some(Command::new(binary)),
        Err(error) => {
            eprintln!("SKIPPED: {error}: build it with `cargo build --release`");
            None
        }
    }
}

fn report(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    serde_json::from_slice(&output.stdout).expect("a report")
}

fn files_below(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("a directory");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

#[test]
fn log_of_two_nics_agrees_with_what_the_guest_mapped_and_feeds_the_model() {
    let Some(mut collect) = lab() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("strict");
    collect
        .args(["trace", "collect", "--device", "vmxnet3", "--nics", "2"])
        .args(["--workload", "iperf3", "--seconds", "2", "--json", "--out"])
        .arg(&out);
    let report_of_log = report(&collect.output().expect("the lab"));
    let (figures, ratios) = (&report_of_log["figures"], &report_of_log["ratios"]);
    assert_eq!(figures["sources"], 2, "{report_of_log}");
    assert_eq!(ratios["requests_in_guest_maps"], 1.0, "{report_of_log}");
    let unmapped = ratios["invalidations_in_guest_unmaps"].as_f64();
    assert!(unmapped.expect("a share") >= 0.99, "{report_of_log}");
    for name in [
        "requests",
        "invalidations_of_pages",
        "pages",
        "bytes_received",
    ] {
        assert!(
            figures[name].as_u64().expect("a count") > 100,
            "{name}: {report_of_log}"
        );
    }
    assert_eq!(
        files_below(&out),
        ["collection.json", "recipe.toml", "run-0"]
    );

    let Some(mut build) = lab() else { return };
    let trace = folder.path().join("two.parquet");
    build
        .args(["trace", "build", "--json"])
        .args([&out.join("recipe.toml"), &trace]);
    let built = report(&build.output().expect("the lab"));
    assert_eq!(built["tenants"], 2, "{built}");

    let Some(mut study) = lab() else { return };
    study
        .args(["sim", "study", "recorded", "--json", "--traces"])
        .arg(folder.path());
    let figures = report(&study.output().expect("the lab"))["figures"].take();
    for mode in ["strict", "made"] {
        for share in [
            "devtlb_hit_share",
            "base_link_share",
            "hypertrio_link_share",
        ] {
            let value = figures[mode][share]["tenants_64"].as_f64();
            assert!(value.expect("a share") > 0.0, "{mode} {share}: {figures}");
        }
    }
    assert!(
        figures["active_set"]["iperf3"].as_u64().expect("entries") > 1,
        "{figures}"
    );
}
