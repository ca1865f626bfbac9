// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench adp-live`: a squeezed guest with fio on its disk, with a DMA protector and without (VPRI
//! 7.3); with `--device net` one with bursts on its interface, without a protector, with a simple LRU, and with ours.
//!
//! The guest, and the daemon that squeezes it, are those of the project's own tests, and so is the program
//! that runs them: `adp-live`, of the crate `pagetide-guestkit`, which lies beside this one when both were
//! built. It warms a guest up until it is steady, sets the policy of the running VM to `none` and `adp` in
//! turns and reports each turn; this module combines the turns.
//!
//! ```text
//!   alternation = none adp, then adp none     ratio = adp / none of one alternation
//!   (net: none lru adp, then adp lru none)
//!   adp_over_none_X: their geometric mean     …_low95, …_high95: the bounds of its 95% interval
//! ```
//! The policy has its default times; `promote_after_ms` is where following the evictor has taken them.

use super::{
    SizeOptions,
    harness::{
        figures::{mean, thousandths},
        ratios::PairedRatios,
        report::{BenchError, BenchReport, failed, unable},
    },
    orders::kit_program,
};
use crate::options::LiveDevice;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

const NAME: &str = "adp-live";
/// The program that does it.
const PROGRAM: &str = "adp-live";
/// Its status where the machine lacks something, which its output names.
const UNABLE: i32 = 3;
/// The policy that the others are compared with.
const NONE: &str = "none";

/// One turn, as the program reports it: its policy, and figures by their names.
#[derive(Clone, Deserialize)]
struct Turn {
    policy: String,
    #[serde(flatten)]
    figures: BTreeMap<String, f64>,
}

/// The program's output: turns, and fields that are passed on.
#[derive(Deserialize)]
struct Found {
    turns: Vec<Turn>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let program = kit_program(PROGRAM).map_err(unable)?;
    let device = sizes.device.unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(["--device", device.name()]);
    for (flag, number) in [
        ("--alternations", sizes.pairs),
        ("--seconds", sizes.seconds),
        ("--settle", sizes.settle),
    ] {
        if let Some(number) = number {
            command.args([flag, &number.to_string()]);
        }
    }
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(failed)?;
    if output.status.code() == Some(UNABLE) {
        return Err(unable(String::from_utf8_lossy(&output.stdout).trim()));
    }
    if !output.status.success() {
        return Err(failed(format!("{PROGRAM} ended with {}", output.status)));
    }
    let found: Found = serde_json::from_slice(&output.stdout).map_err(failed)?;
    let mut report = BenchReport::new(NAME);
    describe(found, &mut report);
    describe_peers(device, &mut report);
    Ok(report)
}

fn describe(found: Found, report: &mut BenchReport) {
    report.figures = found.others;
    let mut by_policy: BTreeMap<&str, Vec<&Turn>> = BTreeMap::new();
    for turn in &found.turns {
        by_policy.entry(&turn.policy).or_default().push(turn);
    }
    let of_none = by_policy.get(NONE).cloned().unwrap_or_default();
    for (policy, turns) in &by_policy {
        let names = turns.first().map(|turn| turn.figures.keys());
        for name in names.into_iter().flatten() {
            let value = mean(
                turns
                    .iter()
                    .filter_map(|turn| turn.figures.get(name))
                    .copied(),
            );
            let figures = report.figures.entry(*policy).or_insert_with(|| json!({}));
            figures[name] = thousandths(value);
            figures["turns"] = turns.len().into();
            if *policy != NONE
                && let Some([low, mean, high]) = ratio(turns, &of_none, name)
            {
                let name = format!("{policy}_over_{NONE}_{name}");
                report
                    .ratios
                    .insert(format!("{name}_low95"), thousandths(low));
                report
                    .ratios
                    .insert(format!("{name}_high95"), thousandths(high));
                report.ratios.insert(name, thousandths(mean));
            }
        }
    }
}

fn describe_peers(device: LiveDevice, report: &mut BenchReport) {
    let peers = &mut report.peers;
    match device {
        LiveDevice::Blk => {
            peers.insert(
                "paper_block_reduction".into(),
                json!({"least": 0.36, "most": 0.49}),
            );
            peers.insert("paper_production_block_reduction".into(), 0.51.into());
        }
        LiveDevice::Net => {
            let reduction = json!({"least": 0.95, "most": 0.97});
            peers.insert("paper_nic_reduction".into(), reduction);
        }
    }
    peers.insert("paper_vm_pinned_share".into(), 0.043.into());
}

/// Of the ratios of turn to turn: lower bound of the 95% interval, geometric mean, upper bound.
fn ratio(turns: &[&Turn], of_none: &[&Turn], name: &str) -> Option<[f64; 3]> {
    let read = |turn: &Turn| turn.figures.get(name).copied().unwrap_or(0.0);
    let pairs = turns.iter().zip(of_none);
    let ratios = PairedRatios::bounds(pairs.map(|(one, none)| read(one) / read(none)))?;
    Some([ratios.low95, ratios.mean, ratios.high95])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(turns: &[Value]) -> BenchReport {
        let found = json!({"accel": "kvm", "warm_up": {"is_steady": true}, "turns": turns});
        let mut report = BenchReport::new(NAME);
        describe(serde_json::from_value(found).unwrap(), &mut report);
        report
    }

    fn turn(policy: &str, iopfs: f64) -> Value {
        json!({"policy": policy, "iopfs_per_minute": iopfs, "resident_bytes": 5e8, "protected_sections": 0.0})
    }

    #[test]
    fn turns_are_put_together_by_policy_whatever_their_order() {
        let report = report(&[
            turn("none", 100.0),
            turn("adp", 50.0),
            turn("adp", 60.0),
            turn("none", 120.0),
        ]);
        let ratio = |name: &str| report.ratios[name].as_f64();
        assert_eq!(ratio("adp_over_none_iopfs_per_minute"), Some(0.5));
        assert_eq!(ratio("adp_over_none_resident_bytes"), Some(1.0));
        // Zero over zero is no ratio.
        let none = "adp_over_none_protected_sections";
        assert!(!report.ratios.contains_key(none));
        assert_eq!(report.figures["none"]["iopfs_per_minute"], json!(110.0));
        assert_eq!(report.figures["adp"]["turns"], json!(2));
        assert_eq!(report.figures["accel"], json!("kvm"));
    }

    #[test]
    fn bounds_of_a_ratio_lie_around_it_by_the_scatter_of_the_alternations() {
        let pairs = [(100.0, 50.0), (100.0, 70.0), (100.0, 60.0)];
        let turns = pairs.map(|(none, adp)| [turn("none", none), turn("adp", adp)]);
        let report = report(turns.as_flattened());
        let of = |end: &str| {
            let name = format!("adp_over_none_iopfs_per_minute{end}");
            report.ratios[&name].as_f64().unwrap()
        };
        assert!(of("_low95") < 0.5 && of("") > 0.55 && of("") < 0.65 && of("_high95") > 0.7);
        assert!((of("_low95") * of("_high95") - of("").powi(2)).abs() < 0.01);
    }
}
