// SPDX-License-Identifier: Apache-2.0
//! The paper's findings as checks (HyperTRIO V), under flavour *paper*.
//!
//! The paper leaves three questions open that affect its figures, so each finding is tried under every
//! relevant *setting* of them:
//!
//! | question | one reading | the other |
//! |---|---|---|
//! | what a walk costs | table II: 24 accesses | the authors' program: one or two |
//! | what a PTB entry holds | 'in-flight translations' (III): a request | 'a packet allocates an entry' (III): a packet |
//! | where a packet's notification goes (IV-C) | its own mailbox page | into the ring's page |
//!
//! A check is the paper's sentence with a stated tolerance; a finding that meets it under no setting is
//! *not reproduced*, with the cause. The traces are synthetic tenants after IV-D, [`PACKETS`](lab::PACKETS)
//! packets each: long enough that the first misses of every tenant are below 1% of its requests.

mod checks;
mod lab;
mod report;
mod setting;

pub use report::{Finding, FindingCounts, FindingsReport, Observation, Verdict};

use crate::error::SimError;
use lab::Lab;

/// Makes all runs, on all cores, and judges. `progress` receives, from any thread, how many runs are done,
/// and of how many.
///
/// # Errors
/// If a run fails, which would be a bug of the program.
pub fn run(progress: &(dyn Fn(u64, u64) + Sync)) -> Result<FindingsReport, SimError> {
    let mut lab = Lab::new();
    // The result is discarded: this pass only records requests.
    for statement in checks::ALL {
        drop((statement.look)(&mut lab));
    }
    lab.run_wanted(progress)?;
    let findings = checks::ALL
        .iter()
        .map(|statement| {
            lab.forget_needs();
            let observations = (statement.look)(&mut lab);
            let mut finding = Finding::of(statement, observations);
            (finding.runs, finding.traces) = lab.needs();
            finding
        })
        .collect();
    let counts = FindingCounts {
        runs: lab.runs(),
        requests: lab.requests(),
        packets_per_run: lab::PACKETS,
        ..FindingCounts::default()
    };
    Ok(FindingsReport::of(findings, counts))
}
