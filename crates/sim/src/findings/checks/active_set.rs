// SPDX-License-Identifier: Apache-2.0
//! Statements about fully associative DevTLBs (V-C).

use pagetide_trace::Workload;

use super::{Statement, WORKLOADS, observe, range, share};
use crate::config::{CacheConfig, Config, Replacement};
use crate::findings::lab::{Interleaving, Lab, Life, Trace};
use crate::findings::report::Observation;
use crate::findings::setting::Setting;

/// Sizes tried to find an active set: the paper's, and this many less and more.
const ENTRIES_AROUND: u32 = 4;
/// Entries that hold every page of a tenant.
const ENTRIES_FOR_ALL: u32 = 128;

/// An active set; each workload is a statement of its own.
const ACTIVE_SET: Statement = Statement {
    id: "",
    section: "V-C",
    claim: "the active translation set, the least entries of a fully associative DevTLB with \
            full utilization of the link for one tenant, is 8 for iperf3, 32 for mediastream \
            and 36 for websearch",
    expected: "the paper's number of entries, give or take one; full: within 0.1% of what 128 \
               entries reach; oracle, after the driver's start, pages unmapped when left. \
               (The synthetic tenants are made with 6, 30 and 34 live data pages, so this is \
               about model and traces, not about the workloads themselves)",
    cause: "",
    look: iperf3,
};

pub(super) const IPERF3: Statement = Statement {
    id: "active-set-iperf3",
    ..ACTIVE_SET
};

pub(super) const MEDIASTREAM: Statement = Statement {
    id: "active-set-mediastream",
    look: mediastream,
    ..ACTIVE_SET
};

pub(super) const WEBSEARCH: Statement = Statement {
    id: "active-set-websearch",
    look: websearch,
    ..ACTIVE_SET
};

fn iperf3(lab: &mut Lab) -> Vec<Observation> {
    observed(lab, Workload::Iperf3)
}

fn mediastream(lab: &mut Lab) -> Vec<Observation> {
    observed(lab, Workload::Mediastream)
}

fn websearch(lab: &mut Lab) -> Vec<Observation> {
    observed(lab, Workload::Websearch)
}

/// The paper's active set of a workload.
const fn entries_of(workload: Workload) -> u32 {
    match workload {
        Workload::Seq | Workload::Iperf3 => 8,
        Workload::Mediastream => 32,
        Workload::Websearch => 36,
    }
}

/// Base with a fully associative DevTLB of `entries` and the oracle.
fn associative(setting: Setting, entries: u32) -> Config {
    let mut config = setting.base();
    config.devtlb = CacheConfig::new(entries, entries, Replacement::Oracle);
    config
}

/// Least entries, of those around `paper`, with which one tenant reaches the
/// full use of the link.
fn active_set(lab: &mut Lab, setting: Setting, workload: Workload, paper: u32) -> Option<u32> {
    let mut trace = Trace::new(workload, Interleaving::Rr1, 1, setting.third);
    // This makes a page that is used again a miss at any size, and keeps the 70 pages of the start, which
    // no set of this size holds, from hiding what follows.
    trace.life = Life::Steady;
    let mut with = |entries| share(lab, &trace, &associative(setting, entries));
    let full = with(ENTRIES_FOR_ALL);
    let shares: Vec<(u32, f64)> = (paper - ENTRIES_AROUND..=paper + ENTRIES_AROUND)
        .map(|entries| (entries, with(entries)))
        .collect();
    let enough = shares.iter().find(|(_, share)| *share >= 0.999 * full);
    enough.map(|(entries, _)| *entries)
}

fn observed(lab: &mut Lab, workload: Workload) -> Vec<Observation> {
    let paper = entries_of(workload);
    observe(Setting::of_one_entry(), |setting| {
        let (least, most) = (paper - ENTRIES_AROUND, paper + ENTRIES_AROUND);
        match active_set(lab, setting, workload, paper) {
            Some(entries) if entries == least => (format!("{least} entries or fewer"), false),
            // Without its own mailbox a tenant needs one entry less.
            Some(entries) => (format!("{entries} entries"), entries.abs_diff(paper) <= 1),
            None => (format!("more than {most} entries"), false),
        }
    })
}

pub(super) const MORE_THAN_EIGHT_TENANTS: Statement = Statement {
    id: "associative-low-beyond-8-tenants",
    section: "V-C",
    claim: "with a fully associative DevTLB and the oracle, more than eight tenants produce low bandwidth utilization in \
            all benchmarks",
    expected: "a DevTLB of the workload's active set, RR1: less than half of the link at 16 and 32 tenants for every \
               workload",
    cause: "with the ring as third page a packet has two pages, so the present pages of 16 tenants are 32, \
            which nearly fit the 36 entries of websearch: the oracle keeps them, and 52 to 53% of the link \
            remain at 16 tenants, 2 to 3 points above the criterion",
    look: more_than_eight_tenants,
};

fn more_than_eight_tenants(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::of_one_entry(), |setting| {
        let mut shares = Vec::new();
        for workload in WORKLOADS {
            for tenants in [16, 32] {
                let trace = Trace::new(workload, Interleaving::Rr1, tenants, setting.third);
                shares.push(share(
                    lab,
                    &trace,
                    &associative(setting, entries_of(workload)),
                ));
            }
        }
        let (least, most) = range(&shares);
        (format!("{least:.1} to {most:.1}%"), most < 50.0)
    })
}
