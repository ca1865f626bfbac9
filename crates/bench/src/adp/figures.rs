// SPDX-License-Identifier: Apache-2.0
//! The report of `bench adp`.

use super::{AdpBenchOptions, Load, Outcome};
use crate::harness::report::BenchReport;
use pagetide_policy::protect::PolicyChoice;
use pagetide_sim::replay::{Service, ServiceSummary, VmAccount};
use pagetide_trace::{DeviceAnalysis, ServiceAnalysis};
use serde_json::{Map, Value, json};

/// The direction in which a figure is worse.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Worse {
    Less,
    More,
}

/// The figures of one policy: name, and direction.
const FIGURES: [(&str, Worse); 7] = [
    ("nic_reduction", Worse::Less),
    ("block_reduction", Worse::Less),
    ("vm_pinned_share", Worse::More),
    ("nic_pinned_share", Worse::More),
    ("block_pinned_share", Worse::More),
    ("rpr_nic", Worse::Less),
    ("rpr_block", Worse::Less),
];

/// The guests' DMA, beside the paper's.
pub(super) fn guests(
    report: &mut BenchReport,
    options: &AdpBenchOptions,
    devices: &[(Load, DeviceAnalysis)],
) {
    let of = |load: Load| {
        devices
            .iter()
            .filter(move |(of, _)| *of == load)
            .map(|(_, d)| d)
    };
    let mut figures = Map::new();
    figures.insert("guests".into(), options.guests.len().into());
    let disks = ServiceAnalysis::of(Service::Block, of(Load::Storage));
    figures.insert("storage_guests_block".into(), figures_of(&disks));
    let disks = ServiceAnalysis::of(Service::Block, of(Load::Network));
    figures.insert("network_guests_block".into(), figures_of(&disks));
    let nics = ServiceAnalysis::of(Service::Network, devices.iter().map(|(_, device)| device));
    figures.insert("nic".into(), figures_of(&nics));
    report.figures.insert("generator".into(), figures.into());
}

fn figures_of(service: &ServiceAnalysis) -> Value {
    let locality = &service.locality;
    json!({
        "devices": service.devices,
        "footprint_share": service.footprint_share,
        "sections_under_10_share": locality.sections_under_10_share,
        "sections_over_2_share": locality.sections_over_2_share,
        "faults_under_10_share": locality.faults_under_10_share,
        "faults_under_50_share": locality.faults_under_50_share,
        "simulated_faults": locality.simulated_faults,
    })
}

/// The results of each policy.
pub(super) fn policies(report: &mut BenchReport, outcomes: &[Outcome]) {
    for name in PolicyChoice::NAMES {
        let own = || {
            outcomes
                .iter()
                .filter(|outcome| outcome.policy.name() == name)
        };
        let mut figures = Map::new();
        for (figure, worse) in FIGURES {
            let each = own().filter_map(|outcome| number_of(outcome, figure));
            let worst = match worse {
                Worse::Less => each.reduce(f64::min),
                Worse::More => each.reduce(f64::max),
            };
            figures.insert(figure.into(), worst.into());
        }
        for outcome in own() {
            let key = format!("overcommit_{:.0}", outcome.overcommit * 100.0);
            figures.insert(key, details(outcome));
        }
        report.figures.insert(name.into(), figures.into());
    }
    for service in ["nic", "block"] {
        let figure = format!("rpr_{service}");
        let ratio = worst_ratio(outcomes, &figure);
        report
            .ratios
            .insert(format!("{figure}_adp_over_lru"), ratio.into());
    }
}

/// The least ratio over all overcommits; none if the simple LRU saved nothing at one of them, since a ratio
/// to that is meaningless.
fn worst_ratio(outcomes: &[Outcome], figure: &str) -> Option<f64> {
    let of = |name: &str, overcommit: f64| {
        let same = |outcome: &&Outcome| {
            outcome.policy.name() == name && outcome.overcommit.total_cmp(&overcommit).is_eq()
        };
        number_of(outcomes.iter().find(same)?, figure)
    };
    let mut worst: Option<f64> = None;
    for outcome in outcomes
        .iter()
        .filter(|outcome| outcome.policy.name() == "lru")
    {
        let lru = of("lru", outcome.overcommit).filter(|lru| *lru > 0.0)?;
        let ratio = of("adp", outcome.overcommit)? / lru;
        worst = Some(worst.map_or(ratio, |worst| worst.min(ratio)));
    }
    worst
}

fn number_of(outcome: &Outcome, figure: &str) -> Option<f64> {
    let of = |service| outcome.summary.service(service);
    let figures =
        |service| of(service).map(|s: &ServiceSummary| (s.reduction, s.pinned_share, s.rpr));
    let (nic, block) = (figures(Service::Network), figures(Service::Block));
    match figure {
        "nic_reduction" => nic?.0,
        "block_reduction" => block?.0,
        "vm_pinned_share" => Some(outcome.summary.vm_pinned_share),
        "nic_pinned_share" => Some(nic?.1),
        "block_pinned_share" => Some(block?.1),
        "rpr_nic" => nic?.2,
        "rpr_block" => block?.2,
        _ => None,
    }
}

fn details(outcome: &Outcome) -> Value {
    let mut details = Map::new();
    for (figure, _) in FIGURES {
        details.insert(figure.into(), number_of(outcome, figure).into());
    }
    let summary = &outcome.summary;
    let faults = |service| summary.service(service).map(|s| s.faults);
    for (name, count) in [
        ("nic_faults", faults(Service::Network)),
        ("block_faults", faults(Service::Block)),
        ("cpu_faults", Some(summary.cpu_faults)),
        ("evicted_sections", Some(summary.evicted_sections)),
        (
            "evicted_protected_sections",
            Some(summary.evicted_protected),
        ),
        ("bring_backs", Some(summary.bring_backs)),
        ("wasted_bring_backs", Some(summary.wasted_bring_backs)),
    ] {
        details.insert(name.into(), count.into());
    }
    let most = summary.service(Service::Block).map(|s| s.pinned_max_share);
    details.insert("block_pinned_max_share".into(), most.into());
    let ages = summary.service(Service::Block).map(|s| s.fault_ages);
    details.insert("block_fault_ages".into(), json!(ages));
    let brought_back = summary.vm_brought_back_share;
    details.insert("vm_brought_back_share".into(), brought_back.into());
    details.insert(
        "policy_bytes_per_tracked_section".into(),
        bytes_per_section(&outcome.accounts).into(),
    );
    details.into()
}

/// Most memory of policies over the most sections that they tracked.
fn bytes_per_section(accounts: &[VmAccount]) -> Option<f64> {
    let devices = || accounts.iter().flat_map(|vm| &vm.devices);
    let tracked = |device: &pagetide_sim::replay::DeviceAccount| {
        let held = device.capacity.iter();
        held.map(|held| held.watched_sections + held.protected_sections)
            .max()
    };
    let bytes: u64 = devices().map(|device| device.policy_bytes_max).sum();
    let sections: u64 = devices().filter_map(tracked).sum();
    (sections > 0).then(|| bytes as f64 / sections as f64)
}

/// Sections that ADP held over time for the NIC of the first guest (Fig 17), one sample a minute.
pub(super) fn capacity(report: &mut BenchReport, outcomes: &[Outcome]) {
    let adp = outcomes
        .iter()
        .rev()
        .find(|outcome| outcome.policy.name() == "adp");
    let vm = adp.and_then(|adp| adp.accounts.first());
    let nic = vm.and_then(|vm| vm.devices.iter().find(|d| d.service == Service::Network));
    let (Some(adp), Some(vm), Some(nic)) = (adp, vm, nic) else {
        return;
    };
    let active: Vec<u64> = nic.capacity.iter().map(|c| c.watched_sections).collect();
    let inactive: Vec<u64> = nic.capacity.iter().map(|c| c.protected_sections).collect();
    let figures = json!({
        "overcommit": adp.overcommit,
        "vm_sections": vm.sections,
        "footprint_sections": nic.footprint_sections,
        "each_minute_active_sections": active,
        "each_minute_inactive_sections": inactive,
    });
    report.figures.insert("adp_nic_capacity".into(), figures);
}

/// The paper's figures (4.2, 7.3).
#[expect(clippy::approx_constant, reason = "6.28 is what the paper measured")]
pub(super) fn paper(report: &mut BenchReport) {
    for (name, figure) in [
        ("paper_block_footprint_share", 0.28),
        ("paper_block_sections_under_10_share", 0.873),
        ("paper_block_faults_under_10_share", 0.943),
        ("paper_block_sections_over_2_share", 0.703),
        ("paper_nic_footprint_share", 0.03),
        ("paper_adp_nic_reduction", 0.95),
        ("paper_adp_block_reduction", 0.36),
        ("paper_adp_vm_pinned_share", 0.043),
        ("paper_lru_block_reduction", 0.12),
        ("paper_lru_vm_pinned_share", 0.12),
        ("paper_rpr_nic_adp_over_lru", 6.28),
        ("paper_rpr_block_adp_over_lru", 10.56),
    ] {
        report.peers.insert(name.into(), figure.into());
    }
}
