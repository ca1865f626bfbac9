// SPDX-License-Identifier: Apache-2.0
//! The report of `bench iopf-daily`.

use super::{ARMS, DeviceDay, FleetDays, IopfDailyOptions, NicCapacity, ProductionHost, VmDay};
use crate::harness::{
    figures::{at_permille, mean, rounded, thousandths, to_f64},
    report::BenchReport,
};
use pagetide_sim::{
    fleet::{ColdShares, GuestStatistics},
    replay::{FaultAges, Service},
};
use pagetide_trace::ServiceAnalysis;
use serde_json::{Map, Value, json};

/// Shares of cold memory in the paper, after the times of [`ColdShares`].
const PAPER_COLD: [f64; ColdShares::AFTER_S.len()] = [0.45, 0.42, 0.39];
/// Lines of the PA-bitmap that a section has: 512 pages of 2 bits.
const SECTION_LINES: f64 = 2.0;

/// A figure of one fleet.
type Figure = (&'static str, Option<f64>, fn(&[VmDay], &[VmDay]) -> f64);

/// Of the first VMs without a protector (Fig 7): name, the paper's, and ours.
const FIG_7: [Figure; 7] = [
    ("nic_faults_mean", Some(38.0), |none, _| mean_of(none, nic)),
    ("nic_faults_p99", Some(576.0), |none, _| p99_of(none, nic)),
    ("block_faults_mean", Some(66.0), |none, _| {
        mean_of(none, disk)
    }),
    ("block_faults_p99", Some(983.0), |none, _| {
        p99_of(none, disk)
    }),
    ("burst_share", Some(0.10), |none, _| burst_share(none)),
    ("burst_peak_p50", None, |none, _| peak(none, 500)),
    ("burst_peak_p99", None, |none, _| peak(none, 990)),
];
/// Of all VMs, `adp` against nothing (Fig 18).
const FIG_18: [Figure; 8] = [
    ("nic_reduction", Some(0.99), |none, adp| {
        reduction(none, adp, nic)
    }),
    ("block_reduction", Some(0.51), |none, adp| {
        reduction(none, adp, disk)
    }),
    ("vm_pinned_share", Some(0.052), |_, adp| pinned(adp)),
    ("nic_p99_reduction", None, |none, adp| {
        1.0 - p99_of(adp, nic) / p99_of(none, nic).max(1.0)
    }),
    ("block_p99_reduction", None, |none, adp| {
        1.0 - p99_of(adp, disk) / p99_of(none, disk).max(1.0)
    }),
    ("nic_faults_mean", None, |_, adp| mean_of(adp, nic)),
    ("block_faults_mean", None, |_, adp| mean_of(adp, disk)),
    ("burst_share", None, |_, adp| burst_share(adp)),
];

fn nic(vm: &VmDay) -> &DeviceDay {
    &vm.nic
}

fn disk(vm: &VmDay) -> &DeviceDay {
    &vm.disk
}

/// A device of a VM.
pub(super) type DeviceOf = fn(&VmDay) -> &DeviceDay;

fn mean_of(vms: &[VmDay], device: DeviceOf) -> f64 {
    mean(vms.iter().map(|vm| to_f64(device(vm).faults)))
}

fn permille_of(mut numbers: Vec<u64>, permille: usize) -> f64 {
    numbers.sort_unstable();
    at_permille(&numbers, permille).map_or(0.0, to_f64)
}

fn p99_of(vms: &[VmDay], device: DeviceOf) -> f64 {
    permille_of(vms.iter().map(|vm| device(vm).faults).collect(), 990)
}

fn burst_share(vms: &[VmDay]) -> f64 {
    mean(vms.iter().map(|vm| f64::from(vm.bursts.bursts > 0)))
}

/// Most faults in a second of the VMs that had a burst.
fn peak(vms: &[VmDay], permille: usize) -> f64 {
    let with = vms.iter().filter(|vm| vm.bursts.bursts > 0);
    permille_of(
        with.map(|vm| vm.bursts.most_in_a_second).collect(),
        permille,
    )
}

fn reduction(none: &[VmDay], adp: &[VmDay], device: DeviceOf) -> f64 {
    let sum = |vms: &[VmDay]| vms.iter().map(|vm| device(vm).faults).sum::<u64>();
    1.0 - to_f64(sum(adp)) / to_f64(sum(none).max(1))
}

fn pinned(vms: &[VmDay]) -> f64 {
    mean(vms.iter().map(|vm| vm.pinned_share))
}

/// What the VMs of the first hosts do, beside what the paper says.
pub(super) fn fleet(
    report: &mut BenchReport,
    hosts: &[ProductionHost],
    guests: &[Vec<GuestStatistics>],
) {
    let both = |made: Value, paper: f64| json!({"made": made, "paper": paper});
    let mut figures = Map::new();
    let all = || guests.iter().flatten();
    figures.insert("vms".into(), all().count().into());
    for (at, (after_s, paper)) in ColdShares::AFTER_S.iter().zip(PAPER_COLD).enumerate() {
        let made = mean(all().map(|guest| guest.cold.0[at]));
        let name = format!("cold_share_after_{after_s}s");
        figures.insert(name, both(thousandths(made), paper));
    }
    let is_cold =
        |host: &Vec<GuestStatistics>| mean(host.iter().map(|guest| guest.cold.0[0])) > 0.5;
    let cold_hosts = mean(guests.iter().map(|host| f64::from(is_cold(host))));
    figures.insert(
        "hosts_more_than_half_cold_share".into(),
        both(thousandths(cold_hosts), 0.3),
    );
    let devices = || all().flat_map(|guest| &guest.dma.devices);
    for (name, service) in [("nic", Service::Network), ("block", Service::Block)] {
        let share = ServiceAnalysis::of(service, devices()).footprint_share;
        let share = share.map_or(Value::Null, |share| thousandths(share.mean));
        figures.insert(format!("{name}_footprint_share_30min"), share);
    }
    let overcommit = mean(hosts.iter().map(|host| host.overcommit));
    figures.insert(
        "overcommit_mean".into(),
        both(thousandths(overcommit), 0.125),
    );
    report.figures.insert("fleet".into(), figures.into());
}

/// Mean, least and most over the seeds.
fn range(numbers: &[f64]) -> Value {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let all = mean(numbers.iter().copied());
    json!({"mean": rounded(all), "least": rounded(least), "most": rounded(most)})
}

/// Both figures over all seeds.
pub(super) fn days(report: &mut BenchReport, options: &IopfDailyOptions, seeds: &[FleetDays]) {
    let first = |vms: &[VmDay], count: usize| vms[..count.min(vms.len())].to_vec();
    let earlier: Vec<FleetDays> = seeds
        .iter()
        .map(|arms| arms.each_ref().map(|vms| first(vms, options.earlier_vms)))
        .collect();
    for (name, seeds, of) in [
        ("fig7", &earlier[..], &FIG_7[..]),
        ("fig18", seeds, &FIG_18[..]),
    ] {
        let mut figures = Map::new();
        let vms = seeds.first().map_or(0, |[none, _]| none.len());
        figures.insert("vms".into(), vms.into());
        for (figure, paper, ours) in of {
            let made: Vec<f64> = seeds.iter().map(|[none, adp]| ours(none, adp)).collect();
            let both = json!({"made": range(&made), "paper": paper});
            figures.insert((*figure).into(), both);
        }
        report.figures.insert(name.into(), figures.into());
    }
    for (arm, at) in ARMS.iter().zip(0..) {
        let all: Vec<&VmDay> = seeds.iter().flat_map(|arms| &arms[at]).collect();
        report.figures["fig18"][*arm] = causes(&all);
    }
    let fitted: Vec<String> = ["nic", "block"]
        .iter()
        .flat_map(|device| ["mean", "p99"].map(|of| format!("fig7.{device}_faults_{of}")))
        .collect();
    report.figures.insert("fitted".into(), json!(fitted));
    lines(report, seeds);
}

/// What is left of the faults, and of what kind it is.
fn causes(vms: &[&VmDay]) -> Value {
    let kind = |device: DeviceOf| {
        let sum = |of: fn(&DeviceDay) -> u64| vms.iter().map(|vm| of(device(vm))).sum::<u64>();
        let ages = vms.iter().fold(FaultAges::default(), |ages, vm| {
            ages.sum(device(vm).fault_ages)
        });
        json!({
            "faults": sum(|device| device.faults),
            "first_faults": sum(|device| device.first_faults),
            "fault_ages": ages,
            "dropped_sections": sum(|device| device.dropped_sections),
        })
    };
    let faults = |vm: &VmDay| to_f64(vm.nic.faults + vm.disk.faults);
    let all: f64 = vms.iter().map(|vm| faults(vm)).sum();
    let of = |is_working: bool| {
        let own = vms.iter().filter(move |vm| vm.is_working == is_working);
        let sum: f64 = own.map(|vm| faults(vm)).sum();
        sum / all.max(1.0)
    };
    let squeezed = |vm: &VmDay| f64::from(vm.absent_share > 0.2);
    json!({
        "nic": kind(nic),
        "block": kind(disk),
        "vm_pinned_share": rounded(mean(vms.iter().map(|vm| vm.pinned_share))),
        "working_vms_faults_share": rounded(of(true)),
        "squeezed_vms_share": rounded(mean(vms.iter().map(|vm| squeezed(vm)))),
        "cpu_faults_mean": rounded(mean(vms.iter().map(|vm| to_f64(vm.cpu_faults)))),
    })
}

/// Share of the lines of the PA-bitmap that look-ups touch in a minute (8: "under 5 %"), both lines of a
/// section being counted for any DMA to it: no fewer than are touched.
fn lines(report: &mut BenchReport, seeds: &[FleetDays]) {
    let of = |vm: &VmDay| {
        let sections = to_f64(vm.nic.minute_sections + vm.disk.minute_sections);
        let all = to_f64(vm.sections) * SECTION_LINES * vm.minutes;
        sections * SECTION_LINES / all.max(1.0)
    };
    let all = || seeds.iter().flat_map(|[none, _]| none);
    let mut shares: Vec<f64> = all().map(of).collect();
    shares.sort_by(f64::total_cmp);
    let working = mean(all().filter(|vm| vm.is_working).map(of));
    let figures = json!({
        "mean": rounded(mean(shares.iter().copied())),
        "mean_of_working_vms": rounded(working),
        "p99_of_vms": at_permille(&shares, 990).map(rounded),
        "paper_below": 0.05,
    });
    report
        .figures
        .insert("pa_bitmap_lines_touched_a_minute".into(), figures);
}

/// What disks of sleeping VMs that use less or more memory make of it.
pub(super) fn files(report: &mut BenchReport, fleets: &[(f64, FleetDays)]) {
    let one = |(share, [none, adp]): &(f64, FleetDays)| {
        json!({
            "files_share_max": share,
            "vms": none.len(),
            "block_faults_mean": rounded(mean_of(none, disk)),
            "block_reduction": rounded(reduction(none, adp, disk)),
            "nic_reduction": rounded(reduction(none, adp, nic)),
            "vm_pinned_share": rounded(pinned(adp)),
        })
    };
    let all = fleets.iter().map(one).collect();
    report.figures.insert("files".into(), all);
}

/// Sections that ADP held over an hour for one NIC, minute by minute (Fig 17).
pub(super) fn nic_capacity(nic: Option<&NicCapacity>) -> Value {
    let Some(nic) = nic else { return Value::Null };
    let active = nic.held.iter().map(|held| held.watched_sections);
    let inactive = nic.held.iter().map(|held| held.protected_sections);
    json!({
        "vm_sections": nic.vm_sections,
        "each_minute_active_sections": active.collect::<Vec<_>>(),
        "each_minute_inactive_sections": inactive.collect::<Vec<_>>(),
    })
}

/// See [`nic_capacity`].
pub(super) fn capacity(report: &mut BenchReport, nic: Option<&NicCapacity>) {
    report
        .figures
        .insert("adp_nic_capacity".into(), nic_capacity(nic));
}

/// The paper's figures (3.4, 7.4).
pub(super) fn paper(report: &mut BenchReport) {
    for (figure, paper, _) in FIG_7.iter().chain(&FIG_18[..3]) {
        if let Some(paper) = paper {
            report
                .peers
                .insert(format!("paper_{figure}"), (*paper).into());
        }
    }
}
