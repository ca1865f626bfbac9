// SPDX-License-Identifier: Apache-2.0
//! Which crate may use which: nothing depends upwards.
//!
//! ```text
//!                      pagetide: two programs
//!                 ┌───────────┴──────────┐
//!              daemon ◄───────┐         lab
//!     ┌──────────┼──────┬──── │ ─────────┴─────────┐
//!    dpu   vpri-function│     └ bench ──┐     conformance ─► dpu, vpri-function
//!     └────┬─────┘     vmm             sim
//!        vpri    swap   │    ats-pri    │      guestkit ─► guest
//!          │      │     │       │     trace    (the product's command line only)
//!          └───┬──┴─────┤     vpri      │
//!             gmem     sys              │
//!               └── addr ┴──────────────┘
//! ```
//! and `figures`, on `sim` and `chart`, below `lab`; `arrow`, on `sim`, and `figures` below `python`, a library on its own;
//! `report` below `daemon` and `lab`, `chart` below `bench` and `lab`, `random` below all that draws numbers, `capi` on `gmem` alone,
//! `vhost-backend`, on `sys`, below `dpu` and `vpri-function`, `access-log` below `daemon` and `trace`, `handover` below `daemon`,
//! `policy`, on `addr` and `random`, below `swap`, `vmm` and `sim`, `tiers`, on `sys`, below `swap`, and `frontend`,
//! on `sys`, below `bench` and `guestkit`. The table
//! names direct neighbours below; their own dependencies are allowed too. What the daemon reaches here is what a process has that runs as
//! root.

use std::collections::BTreeSet;

use serde_json::Value;

/// A crate and the crates directly below it. A new crate is one line.
const BELOW: [(&str, &[&str]); 33] = [
    ("pagetide-addr", &[]),
    ("pagetide-chart", &[]),
    ("pagetide-random", &[]),
    ("pagetide-handover", &["pagetide-random"]),
    ("pagetide-report", &[]),
    ("pagetide-sys", &["pagetide-addr"]),
    ("pagetide-gmem", &["pagetide-addr", "pagetide-random"]),
    ("pagetide-policy", &["pagetide-addr", "pagetide-random"]),
    ("pagetide-capi", &["pagetide-gmem"]),
    ("pagetide-tiers", &["pagetide-sys", "pagetide-random"]),
    (
        "pagetide-swap",
        &["pagetide-gmem", "pagetide-policy", "pagetide-tiers"],
    ),
    ("pagetide-vpri", &["pagetide-gmem", "pagetide-sys"]),
    ("pagetide-vhost-backend", &["pagetide-sys"]),
    ("pagetide-frontend", &["pagetide-sys"]),
    (
        "pagetide-vpri-function",
        &["pagetide-vpri", "pagetide-vhost-backend"],
    ),
    ("pagetide-dpu", &["pagetide-vpri", "pagetide-vhost-backend"]),
    (
        "pagetide-vmm",
        &["pagetide-gmem", "pagetide-sys", "pagetide-policy"],
    ),
    (
        "pagetide-daemon",
        &[
            "pagetide-access-log",
            "pagetide-dpu",
            "pagetide-handover",
            "pagetide-report",
            "pagetide-swap",
            "pagetide-vmm",
            "pagetide-vpri-function",
        ],
    ),
    ("pagetide-access-log", &["pagetide-addr"]),
    (
        "pagetide-trace",
        &["pagetide-access-log", "pagetide-random"],
    ),
    ("pagetide-sim", &["pagetide-trace", "pagetide-policy"]),
    ("pagetide-arrow", &["pagetide-sim"]),
    ("pagetide-figures", &["pagetide-sim", "pagetide-chart"]),
    ("pagetide-python", &["pagetide-arrow", "pagetide-figures"]),
    ("pagetide-ats-pri", &["pagetide-vpri"]),
    (
        "pagetide-conformance",
        &["pagetide-vpri-function", "pagetide-dpu"],
    ),
    (
        "pagetide-bench",
        &[
            "pagetide-ats-pri",
            "pagetide-chart",
            "pagetide-daemon",
            "pagetide-frontend",
            "pagetide-sim",
        ],
    ),
    (
        "pagetide-lab",
        &["pagetide-bench", "pagetide-conformance", "pagetide-figures"],
    ),
    ("pagetide", &["pagetide-daemon", "pagetide-lab"]),
    ("pagetide-guest", &[]),
    (
        "pagetide-guestkit",
        &["pagetide-frontend", "pagetide-guest", "pagetide-random"],
    ),
    ("pagetide-examples", &["pagetide-gmem", "pagetide-vpri"]),
    ("xtask", &[]),
];

/// A crate of the workspace and those of the workspace it depends on.
#[derive(Debug, PartialEq, Eq)]
pub struct Member {
    name: String,
    uses: Vec<String>,
}

/// The workspace in the output of `cargo metadata`.
pub fn workspace(metadata: &Value) -> Vec<Member> {
    let Some(packages) = metadata["packages"].as_array() else {
        return Vec::new();
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    packages
        .iter()
        .filter(|package| package["source"].is_null())
        .map(|package| Member {
            name: text(&package["name"]),
            uses: package["dependencies"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|dependency| !dependency["path"].is_null())
                .map(|dependency| text(&dependency["name"]))
                .collect(),
        })
        .collect()
}

/// A finding for each use that the table does not allow.
pub fn check(members: &[Member]) -> Vec<String> {
    let mut findings = Vec::new();
    for Member { name, uses } in members {
        let Some(allowed) = reach(name) else {
            findings.push(format!(
                "crate {name} is not in the table of crates/xtask/src/edges.rs"
            ));
            continue;
        };
        for used in uses {
            if !allowed.contains(used.as_str()) {
                findings.push(format!(
                    "crate {name} may not use {used}: nothing depends upwards"
                ));
            }
        }
    }
    findings
}

/// All crates that `name` may use; `None` if it is not in the table.
fn reach(name: &str) -> Option<BTreeSet<&'static str>> {
    let below = |name: &str| {
        BELOW
            .iter()
            .find(|(row, _)| *row == name)
            .map(|(_, below)| *below)
    };
    let mut waiting = below(name)?.to_vec();
    let mut allowed = BTreeSet::new();
    while let Some(next) = waiting.pop() {
        if allowed.insert(next) {
            waiting.extend(below(next).unwrap_or_default());
        }
    }
    Some(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, uses: &[&str]) -> Member {
        Member {
            name: name.to_owned(),
            uses: uses.iter().map(|&used| used.to_owned()).collect(),
        }
    }

    #[test]
    fn use_of_a_crate_far_below_is_allowed() {
        let dpu = member("pagetide-dpu", &["pagetide-addr", "pagetide-gmem"]);
        assert_eq!(check(&[dpu]), Vec::<String>::new());
    }

    #[test]
    fn upward_and_sideways_uses_are_findings() {
        assert_eq!(
            check(&[member("pagetide-gmem", &["pagetide-sys"])]).len(),
            1
        );
        assert_eq!(
            check(&[member("pagetide-swap", &["pagetide-vpri"])]).len(),
            1
        );
        assert_eq!(check(&[member("pagetide-addr", &["pagetide"])]).len(), 1);
    }

    #[test]
    fn crate_without_a_row_is_a_finding() {
        assert_eq!(check(&[member("pagetide-util", &[])]).len(), 1);
    }

    #[test]
    fn table_has_no_circle() {
        for (name, _) in BELOW {
            assert!(!reach(name).expect("it has a row").contains(name), "{name}");
        }
    }

    #[test]
    fn workspace_is_read_from_metadata_without_foreign_crates() {
        let metadata = serde_json::json!({"packages": [
            {"name": "a", "source": null, "dependencies": [
                {"name": "b", "path": "/b"}, {"name": "serde"},
            ]},
            {"name": "serde", "source": "registry", "dependencies": []},
        ]});
        assert_eq!(workspace(&metadata), [member("a", &["b"])]);
    }
}
