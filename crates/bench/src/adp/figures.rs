// SPDX-License-Identifier: Apache-2.0
//! The report of `bench adp`.

use super::{ARMS, AdpBenchOptions, Load, MODES, Outcome, sensitivity::Point};
use crate::harness::{figures::thousandths, report::BenchReport};
use pagetide_sim::{
    fleet::{ColdShares, GuestStatistics},
    replay::{DeviceAccount, Division, DmaTouches, Service, ServiceSummary, VmAccount},
};
use pagetide_trace::{FootprintShares, ServiceAnalysis};
use serde_json::{Map, Value, json};

/// The direction in which a figure is worse.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Worse {
    Less,
    More,
}

/// The figures of one arm: name, and direction.
const FIGURES: [(&str, Worse); 7] = [
    ("nic_reduction", Worse::Less),
    ("block_reduction", Worse::Less),
    ("vm_pinned_share", Worse::More),
    ("nic_pinned_share", Worse::More),
    ("block_pinned_share", Worse::More),
    ("rpr_nic", Worse::Less),
    ("rpr_block", Worse::Less),
];
/// Shares of cold memory in the paper, after the times of [`ColdShares`].
const PAPER_COLD: [f64; ColdShares::AFTER_S.len()] = [0.45, 0.42, 0.39];

/// What the guests do, beside what the paper says.
pub(super) fn guests(report: &mut BenchReport, guests: &[(Load, GuestStatistics)]) {
    let of = |load: Load| {
        let of_load = guests.iter().filter(move |(of, _)| *of == load);
        of_load.flat_map(|(_, guest)| &guest.dma.devices)
    };
    let mut figures = Map::new();
    figures.insert("guests".into(), guests.len().into());
    let both = |made: Value, paper: Value| json!({"made": made, "paper": paper});
    for (at, (after_s, paper)) in ColdShares::AFTER_S.iter().zip(PAPER_COLD).enumerate() {
        let sum: f64 = guests.iter().map(|(_, guest)| guest.cold.0[at]).sum();
        let made = thousandths(sum / guests.len().max(1) as f64);
        figures.insert(
            format!("cold_share_after_{after_s}s"),
            both(made, paper.into()),
        );
    }
    let disks = ServiceAnalysis::of(Service::Block, of(Load::Storage));
    let locality = &disks.locality;
    for (name, made, paper) in [
        (
            "footprint_share",
            disks.footprint_share.map(|share| share.mean),
            0.28,
        ),
        (
            "sections_under_10_share",
            locality.sections_under_10_share,
            0.873,
        ),
        (
            "sections_over_2_share",
            locality.sections_over_2_share,
            0.703,
        ),
        (
            "faults_under_10_share",
            locality.faults_under_10_share,
            0.943,
        ),
        ("faults_under_50_share", locality.faults_under_50_share, 1.0),
    ] {
        let made = made.map_or(Value::Null, thousandths);
        figures.insert(format!("block_{name}"), both(made, paper.into()));
    }
    let of_network = ServiceAnalysis::of(Service::Block, of(Load::Network));
    let made = of_network
        .footprint_share
        .map_or(Value::Null, |share| thousandths(share.mean));
    figures.insert(
        "network_guests_block_footprint_share".into(),
        both(made, Value::Null),
    );
    let faults = disks.locality.simulated_faults;
    figures.insert("block_simulated_faults".into(), faults.into());
    let all = guests.iter().flat_map(|(_, guest)| &guest.dma.devices);
    nics(&mut figures, &ServiceAnalysis::of(Service::Network, all));
    report.figures.insert("generator".into(), figures.into());
}

/// The guests' NICs.
fn nics(figures: &mut Map<String, Value>, nics: &ServiceAnalysis) {
    let share = |of: fn(&FootprintShares) -> f64| {
        let share = nics.footprint_share.as_ref();
        share.map_or(Value::Null, |share| thousandths(of(share)))
    };
    for (name, made, paper) in [
        ("nic_footprint_share", share(|share| share.mean), 0.03),
        ("nic_footprint_share_max", share(|share| share.max), 0.05),
    ] {
        figures.insert(name.into(), json!({"made": made, "paper": paper}));
    }
    let faults = nics.locality.simulated_faults;
    figures.insert("nic_simulated_faults".into(), faults.into());
}

/// Ratio and eviction ages of each VM of the first seed, without a protector, in the paper's mode.
pub(super) fn vms(report: &mut BenchReport, options: &AdpBenchOptions, outcomes: &[Outcome]) {
    let guests = options.fleets.first().map_or(&[][..], Vec::as_slice);
    let mut figures = Map::new();
    for overcommit in &options.overcommits {
        let same = |outcome: &&Outcome| {
            outcome.mode == MODES[0]
                && outcome.arm == ARMS[0].0
                && outcome.overcommit.total_cmp(overcommit).is_eq()
        };
        let Some(none) = outcomes.iter().find(same) else {
            continue;
        };
        let vms = guests.iter().zip(&none.accounts).map(|(guest, vm)| {
            let [p10, p50, p90] = [100, 500, 900].map(|at| vm.eviction_ages.quantile_s(at));
            json!({
                "load": match guest.load {
                    Load::Network => "network",
                    Load::Storage => "storage",
                },
                "sections": vm.sections,
                "taken_share": thousandths(share(vm, vm.absent.mean_sections(vm.time))),
                "evicted_sections": vm.evicted_sections,
                "eviction_age_p10_s": p10,
                "eviction_age_p50_s": p50,
                "eviction_age_p90_s": p90,
                "block_faults": vm.faults(Service::Block),
                "nic_faults": vm.faults(Service::Network),
                "cpu_faults": vm.cpu_faults,
            })
        });
        figures.insert(key(*overcommit), vms.collect());
    }
    report.figures.insert("vms".into(), figures.into());
}

fn share(vm: &VmAccount, sections: f64) -> f64 {
    sections / (vm.sections.max(1) as f64)
}

fn key(overcommit: f64) -> String {
    format!("overcommit_{:.0}", overcommit * 100.0)
}

/// The results of each arm.
pub(super) fn arms(report: &mut BenchReport, options: &AdpBenchOptions, outcomes: &[Outcome]) {
    let mut seen = Map::new();
    for (arm, _) in ARMS {
        for mode in MODES {
            let figures = arm_figures(options, outcomes, mode, arm);
            match mode {
                DmaTouches::Unseen => report.figures.insert(arm.into(), figures),
                DmaTouches::Seen => seen.insert(arm.into(), figures),
            };
        }
    }
    report.figures.insert("dma_seen".into(), seen.into());
    for service in ["nic", "block"] {
        let figure = format!("rpr_{service}");
        let ratio = worst_ratio(&report.figures, options, &figure);
        let ratio = ratio.map_or(Value::Null, thousandths);
        report
            .ratios
            .insert(format!("{figure}_adp_over_lru"), ratio);
    }
}

fn arm_figures(
    options: &AdpBenchOptions,
    outcomes: &[Outcome],
    mode: DmaTouches,
    arm: &str,
) -> Value {
    let mut figures = Map::new();
    for overcommit in &options.overcommits {
        let own: Vec<&Outcome> = outcomes
            .iter()
            .filter(|outcome| {
                outcome.mode == mode
                    && outcome.arm == arm
                    && outcome.overcommit.total_cmp(overcommit).is_eq()
            })
            .collect();
        figures.insert(key(*overcommit), details(&own));
    }
    for (figure, worse) in FIGURES {
        let means = options
            .overcommits
            .iter()
            .filter_map(|overcommit| figures[&key(*overcommit)][figure]["mean"].as_f64());
        let worst = match worse {
            Worse::Less => means.reduce(f64::min),
            Worse::More => means.reduce(f64::max),
        };
        figures.insert(figure.into(), worst.into());
    }
    figures.into()
}

/// The least ratio of means over all overcommits; none if the simple LRU saved nothing at one of them, since
/// a ratio to that is meaningless.
fn worst_ratio(
    figures: &Map<String, Value>,
    options: &AdpBenchOptions,
    figure: &str,
) -> Option<f64> {
    let mut worst = None;
    for overcommit in &options.overcommits {
        let of = |arm: &str| figures[arm][key(*overcommit)][figure]["mean"].as_f64();
        let ratio = of("adp")? / of("lru").filter(|lru| *lru > 0.0)?;
        worst = Some(worst.map_or(ratio, |worst: f64| worst.min(ratio)));
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

/// Mean, least and most of one number over the seeds.
fn range(numbers: impl Iterator<Item = f64>) -> Value {
    let numbers: Vec<f64> = numbers.collect();
    if numbers.is_empty() {
        return Value::Null;
    }
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    json!({"mean": mean, "least": least, "most": most})
}

/// A count that an outcome has.
type CountOf = fn(&Outcome) -> Option<u64>;

/// The outcomes of one arm at one overcommit, a seed each.
fn details(outcomes: &[&Outcome]) -> Value {
    let mut details = Map::new();
    for (figure, _) in FIGURES {
        let numbers = outcomes
            .iter()
            .filter_map(|outcome| number_of(outcome, figure));
        details.insert(figure.into(), range(numbers));
    }
    let faults = |outcome: &Outcome, service| outcome.summary.service(service).map(|s| s.faults);
    let counts: [(&str, CountOf); 3] = [
        ("cpu_faults", |outcome| Some(outcome.summary.cpu_faults)),
        ("evicted_sections", |outcome| {
            Some(outcome.summary.evicted_sections)
        }),
        ("evicted_protected_sections", |outcome| {
            Some(outcome.summary.evicted_protected)
        }),
    ];
    let mut insert = |name: &str, of: &dyn Fn(&Outcome) -> Option<u64>| {
        let numbers = outcomes.iter().filter_map(|outcome| of(outcome));
        details.insert(name.into(), range(numbers.map(|number| number as f64)));
    };
    insert("nic_faults", &|outcome| faults(outcome, Service::Network));
    insert("block_faults", &|outcome| faults(outcome, Service::Block));
    for (name, of) in counts {
        insert(name, &of);
    }
    let ages = outcomes
        .first()
        .and_then(|first| first.summary.service(Service::Block));
    details.insert(
        "block_fault_ages_of_first_seed".into(),
        json!(ages.map(|block| block.fault_ages)),
    );
    let bytes = outcomes
        .iter()
        .filter_map(|outcome| bytes_per_section(&outcome.accounts));
    details.insert("policy_bytes_per_tracked_section".into(), range(bytes));
    details.into()
}

/// Most memory of policies over the most sections that they tracked.
fn bytes_per_section(accounts: &[VmAccount]) -> Option<f64> {
    let devices = || accounts.iter().flat_map(|vm| &vm.devices);
    let tracked = |device: &DeviceAccount| {
        let held = device.capacity.iter();
        held.map(|held| held.watched_sections + held.protected_sections)
            .max()
    };
    let bytes: u64 = devices().map(|device| device.policy_bytes_max).sum();
    let sections: u64 = devices().filter_map(tracked).sum();
    (sections > 0).then(|| bytes as f64 / sections as f64)
}

/// The NIC of the first guest under `adp`, at the greatest overcommit, in the paper's mode.
pub(super) fn nic_of_first_guest(
    outcomes: &[Outcome],
) -> Option<(&Outcome, &VmAccount, &DeviceAccount)> {
    let wanted = |outcome: &&Outcome| outcome.arm == "adp" && outcome.mode == MODES[0];
    let adp = outcomes.iter().rev().find(wanted)?;
    let vm = adp.accounts.first()?;
    let nic = vm.devices.iter().find(|d| d.service == Service::Network)?;
    Some((adp, vm, nic))
}

/// Sections that ADP held over time for that NIC (Fig 17), one sample a minute.
pub(super) fn nic_capacity(outcomes: &[Outcome]) -> Value {
    let Some((adp, vm, nic)) = nic_of_first_guest(outcomes) else {
        return Value::Null;
    };
    let active: Vec<u64> = nic.capacity.iter().map(|c| c.watched_sections).collect();
    let inactive: Vec<u64> = nic.capacity.iter().map(|c| c.protected_sections).collect();
    json!({
        "overcommit": adp.overcommit,
        "vm_sections": vm.sections,
        "footprint_sections": nic.footprint_sections,
        "each_minute_active_sections": active,
        "each_minute_inactive_sections": inactive,
    })
}

/// See [`nic_capacity`].
pub(super) fn capacity(report: &mut BenchReport, outcomes: &[Outcome]) {
    let capacity = nic_capacity(outcomes);
    report.figures.insert("adp_nic_capacity".into(), capacity);
}

/// The points as they are reported.
pub(super) fn points(points: &[Point]) -> Value {
    let one = |point: &Point| {
        let mut figures = json!({
            "division": match point.division {
                Division::InTurn => "in_turn",
                Division::ByNeed => "by_need",
                Division::FirstFirst => "first_first",
            },
            "cold_after_s": point.cold_after.as_secs(),
            "other_periodic_share": point.periodic,
            "eviction_age_p50_s": point.eviction_age_s,
            "block_faults": point.block_faults,
        });
        for (arm, reduction, pinned) in &point.arms {
            figures[format!("{arm}_block_reduction")] = reduction.map_or(Value::Null, thousandths);
            figures[format!("{arm}_vm_pinned_share")] = thousandths(*pinned);
        }
        figures
    };
    points.iter().map(one).collect()
}

/// See [`points`].
pub(super) fn sensitivity(report: &mut BenchReport, of: &[Point]) {
    report.figures.insert("sensitivity".into(), points(of));
}

/// The paper's figures (4.2, 7.3).
#[expect(clippy::approx_constant, reason = "6.28 is what the paper measured")]
pub(super) fn paper(report: &mut BenchReport) {
    for (name, figure) in [
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
