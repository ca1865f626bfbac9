// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench adp-live`: a squeezed guest's disk with a DMA protector and without (VPRI 7.3).
//!
//! The guest, and the daemon that squeezes it, are those of the project's own tests, and
//! so is the program that runs them: `adp-live`, of the crate `pagetide-guestkit`, which
//! lies beside this one when both were built. It sets the policy of one running VM to
//! `none` and `adp` in turns and tells what each turn was like; here the turns are put
//! together.
//!
//! ```text
//!   alternation = none adp, then adp none     ratio = adp / none, geometric mean over alternations
//! ```
//! The policy's times are divided by `times_divided_by`, since turns last minutes.

use super::{
    BenchError, BenchReport,
    blk::stats::{PairedRatios, mean},
};
use serde::Deserialize;
use serde_json::json;
use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

const NAME: &str = "adp-live";
/// The program that does it.
const PROGRAM: &str = "adp-live";

/// One turn, as the program tells it.
#[derive(Clone, Deserialize)]
struct Turn {
    policy: String,
    iopfs_per_minute: f64,
    iopfs_per_request: f64,
    blk_p999_us: f64,
    blk_p50_us: f64,
    blk_iops: f64,
    resident_bytes: f64,
    protected_sections: f64,
    vcpu_faults_per_minute: f64,
}

/// What the program tells.
#[derive(Deserialize)]
struct Found {
    accel: String,
    qemu_version: String,
    times_divided_by: u32,
    ram_bytes: u64,
    limit_bytes: u64,
    turns: Vec<Turn>,
    verified_bytes: u64,
}

/// A figure of a turn, by its name.
type Reading = (&'static str, fn(&Turn) -> f64);

const READINGS: [Reading; 8] = [
    ("iopfs_per_minute", |turn| turn.iopfs_per_minute),
    ("iopfs_per_request", |turn| turn.iopfs_per_request),
    ("blk_p999_us", |turn| turn.blk_p999_us),
    ("blk_p50_us", |turn| turn.blk_p50_us),
    ("blk_iops", |turn| turn.blk_iops),
    ("resident_bytes", |turn| turn.resident_bytes),
    ("protected_sections", |turn| turn.protected_sections),
    ("vcpu_faults_per_minute", |turn| turn.vcpu_faults_per_minute),
];

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run() -> Result<BenchReport, BenchError> {
    let program = program()?;
    let output = Command::new(&program)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        return Err(failed(format!("{PROGRAM} ended with {}", output.status)));
    }
    let found: Found = serde_json::from_slice(&output.stdout).map_err(failed)?;
    let mut report = BenchReport::new(NAME);
    describe(&found, &mut report);
    Ok(report)
}

fn program() -> Result<PathBuf, BenchError> {
    let own = std::env::current_exe().map_err(failed)?;
    let beside = own.with_file_name(PROGRAM);
    if beside.exists() {
        return Ok(beside);
    }
    Err(BenchError::Unable {
        name: NAME,
        reason: format!(
            "there is no {}; build it by `cargo build --release -p pagetide-guestkit`",
            beside.display()
        ),
    })
}

fn describe(found: &Found, report: &mut BenchReport) {
    let of = |policy: &'static str| {
        let turns = found.turns.iter();
        turns.filter(move |turn| turn.policy.split(':').next() == Some(policy))
    };
    let figures = &mut report.figures;
    figures.insert("guest_accel".into(), found.accel.clone().into());
    figures.insert("qemu_version".into(), found.qemu_version.clone().into());
    figures.insert("times_divided_by".into(), found.times_divided_by.into());
    figures.insert("ram_bytes".into(), found.ram_bytes.into());
    figures.insert("limit_bytes".into(), found.limit_bytes.into());
    figures.insert("verified_bytes".into(), found.verified_bytes.into());
    for policy in ["none", "adp"] {
        let mean_of = |(name, read): &Reading| {
            let value = mean(of(policy).map(read));
            ((*name).to_owned(), json!((value * 1e3).round() / 1e3))
        };
        let each = READINGS.iter().map(mean_of).collect();
        figures.insert(policy.into(), serde_json::Value::Object(each));
        figures.insert(format!("{policy}_turns"), of(policy).count().into());
    }
    for (name, read) in READINGS {
        let pairs = of("adp").zip(of("none"));
        let ratios = PairedRatios::new(pairs.map(|(adp, none)| read(adp) / read(none)));
        if let Some(ratios) = ratios {
            let value = (ratios.mean() * 1e3).round() / 1e3;
            let name = format!("adp_over_none_{name}");
            report.ratios.insert(name, value.into());
        }
    }
    let peers = &mut report.peers;
    peers.insert(
        "paper_block_reduction".into(),
        json!({"least": 0.36, "most": 0.49}),
    );
    peers.insert("paper_production_block_reduction".into(), 0.51.into());
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Failed {
        name: NAME,
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_put_together_by_policy_whatever_their_order() {
        let turn = |policy: &str, iopfs: f64| {
            json!({
                "policy": policy, "iopfs_per_minute": iopfs, "iopfs_per_request": 0.0,
                "blk_p999_us": 10.0,
                "blk_p50_us": 1.0, "blk_iops": 100.0, "resident_bytes": 5e8,
                "protected_sections": 0.0, "vcpu_faults_per_minute": 7.0,
            })
        };
        let adp = "adp:promote-after=6s";
        let turns = [
            turn("none", 100.0),
            turn(adp, 50.0),
            turn(adp, 60.0),
            turn("none", 120.0),
        ];
        let found = json!({
            "accel": "kvm", "qemu_version": "9", "times_divided_by": 30, "ram_bytes": 1,
            "limit_bytes": 1, "verified_bytes": 1, "turns": turns,
        });
        let found = serde_json::from_value(found).unwrap();
        let mut report = BenchReport::new(NAME);
        describe(&found, &mut report);
        let ratio = |name: &str| report.ratios[name].as_f64();
        assert_eq!(ratio("adp_over_none_iopfs_per_minute"), Some(0.5));
        assert_eq!(ratio("adp_over_none_resident_bytes"), Some(1.0));
        // Nothing over nothing is no ratio.
        assert!(
            !report
                .ratios
                .contains_key("adp_over_none_protected_sections")
        );
        assert_eq!(report.figures["none"]["iopfs_per_minute"], json!(110.0));
        assert_eq!(report.figures["adp_turns"], json!(2));
    }
}
