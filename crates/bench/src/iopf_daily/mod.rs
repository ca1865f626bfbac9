// SPDX-License-Identifier: Apache-2.0
//! `bench iopf-daily`: I/O page faults of devices over days of production, as in figures 7, 17 and 18 of VPRI.
//!
//! ```text
//!   5,000 made VMs on 250 hosts, each overcommitted by 10 to 15 %, for 24 virtual hours
//!       none    the first 800 of them are Fig 7: faults a day and device, VMs with a burst
//!       adp     against none: Fig 18; the NIC of a working VM over an hour: Fig 17
//! ```
//! The VMs have been running for weeks when their day begins: each section is as old as it is after long. The fleet
//! is [`pagetide_sim::fleet::Fleet`]: its documentation says what a VM does, and which of the paper's statements it
//! was fitted to. Those are no results, though the report has them beside the paper's; `figures.fitted` names them.
//! The evictor, the policies and the choice of victims are the product's own. The mode is the paper's: the scan sees
//! CPUs only.
//!
//! A host is replayed by one thread, under one arm after the other, and what remains of a VM is [`VmDay`]. So memory
//! is that of a few hosts, however many there are.
//!
//! What is saved of disks' faults depends on something that the paper does not state: how much memory the disks of
//! sleeping VMs use. `figures.files` has the result for where they use less.

mod figures;
mod plots;

use crate::{
    SizeOptions,
    harness::{
        report::{BenchError, BenchReport, failed},
        rounds::progress,
    },
};
use pagetide_policy::protect::PolicyChoice;
use pagetide_sim::{
    fleet::{Day, Fleet, GuestStatistics, Life, ProductionHost, production_statistics},
    replay::{Bursts, Capacity, DmaTouches, FaultAges, ReplayError, Service, VmAccount},
};
use std::{
    num::NonZeroUsize,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

const NAME: &str = "iopf-daily";
/// VMs of Fig 18, and of Fig 7.
const VMS: usize = 5_000;
const EARLIER_VMS: usize = 800;
/// A section left alone for so long is taken, as in `bench adp`.
const COLD_AFTER: Duration = Duration::from_secs(200);
/// Name of each arm, which is its policy. The first is what the other is compared with.
const ARMS: [&str; 2] = ["none", "adp"];
/// How often it is told how far a fleet is.
const TELL_EVERY: Duration = Duration::from_secs(20);
/// VMs for the statistics of the fleet, and for each other choice of [`Fleet::files_share`].
const SAMPLE_VMS: usize = 200;
/// How long DMA is observed for the statistics, as in 4.2.
const STATISTICS_S: u64 = 1_800;
const DAY_S: u64 = 24 * 3_600;

/// The parameters of the bench.
#[derive(Clone, PartialEq, Debug)]
pub struct IopfDailyOptions {
    /// The fleet.
    pub fleet: Fleet,
    /// Its random seeds, from 1 on.
    pub seeds: u64,
    /// VMs.
    pub vms: usize,
    /// How many of them are those of Fig 7.
    pub earlier_vms: usize,
    /// VMs of the fleets for other statistics.
    pub sample_vms: usize,
    /// Virtual seconds of a day.
    pub seconds: u64,
    /// Other choices of [`Fleet::files_share`].
    pub files_shares: Vec<f64>,
    /// Where pictures are drawn, if any are.
    pub plots: Option<PathBuf>,
}

impl IopfDailyOptions {
    /// The bench with what the command line asks for.
    #[must_use]
    pub fn of(sizes: &SizeOptions) -> Self {
        let vms = sizes.vms.and_then(|vms| usize::try_from(vms).ok());
        let vms = vms.unwrap_or(VMS);
        Self {
            fleet: Fleet::default(),
            seeds: sizes.seeds.unwrap_or(1),
            vms,
            earlier_vms: vms.min(EARLIER_VMS),
            sample_vms: vms.min(SAMPLE_VMS),
            seconds: DAY_S,
            files_shares: vec![0.1, 0.25, 0.5, 1.0],
            plots: sizes.plots.clone(),
        }
    }
}

/// The day of one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct DeviceDay {
    faults: u64,
    /// Of those, faults on sections that no device had touched before.
    first_faults: u64,
    fault_ages: FaultAges,
    /// Sections that it touched in each minute, added up.
    minute_sections: u64,
    dropped_sections: u64,
}

/// The day of one VM under one arm.
#[derive(Clone, PartialEq, Debug)]
struct VmDay {
    is_working: bool,
    sections: u64,
    nic: DeviceDay,
    disk: DeviceDay,
    bursts: Bursts,
    /// Shares of its memory, means over the day.
    absent_share: f64,
    pinned_share: f64,
    cpu_faults: u64,
    minutes: f64,
}

/// A fleet's days, VM by VM, an arm each.
type FleetDays = [Vec<VmDay>; ARMS.len()];

/// What ADP held for one NIC (Fig 17).
struct NicCapacity {
    vm_sections: u64,
    held: Vec<Capacity>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError::Failed`] if the fleet cannot be replayed, or a picture cannot be drawn.
pub fn run(options: &IopfDailyOptions) -> Result<BenchReport, BenchError> {
    let mut report = BenchReport::new(NAME);
    let begun = Instant::now();
    progress(NAME, "the fleet's statistics");
    let hosts = options.fleet.hosts(1, options.vms);
    let guests = statistics(options, &hosts).map_err(failed)?;
    figures::fleet(&mut report, &hosts, &guests);
    let mut seeds = Vec::new();
    for seed in 1..=options.seeds {
        let hosts = options.fleet.hosts(seed, options.vms);
        seeds.push(replay(options, &hosts, &format!("seed {seed}"))?);
    }
    figures::days(&mut report, options, &seeds);
    let mut files = Vec::new();
    for share in &options.files_shares {
        let fleet = Fleet {
            files_share: *share,
            ..options.fleet
        };
        let hosts = fleet.hosts(1, options.sample_vms);
        let days = replay(options, &hosts, &format!("files of {share} of a round's"))?;
        files.push((*share, days));
    }
    figures::files(&mut report, &files);
    let nic = capacity(options, &hosts).map_err(failed)?;
    figures::capacity(&mut report, nic.as_ref());
    if let (Some(dir), Some(days)) = (&options.plots, seeds.first()) {
        let files = plots::draw(dir, options, days, nic.as_ref()).map_err(failed)?;
        report
            .figures
            .insert("plots".into(), serde_json::json!(files));
    }
    report
        .figures
        .insert("threads".into(), threads().get().into());
    let wall_s = begun.elapsed().as_secs_f64();
    report.figures.insert("wall_seconds".into(), wall_s.into());
    figures::paper(&mut report);
    Ok(report)
}

fn threads() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Does `work` for all `hosts`, on all CPUs, and tells how far it is. The results are in the order of the hosts.
fn on_all_cpus<T: Send>(
    hosts: &[ProductionHost],
    what: &str,
    work: impl Fn(&ProductionHost) -> Result<T, ReplayError> + Sync,
) -> Result<Vec<T>, ReplayError> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let told = Mutex::new(Instant::now());
    let one = || {
        loop {
            // Order among the threads does not matter.
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(host) = hosts.get(at) else { return };
            let result = work(host);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.push((at, result));
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.elapsed() >= TELL_EVERY {
                *told = Instant::now();
                let (done, all) = (results.len(), hosts.len());
                progress(NAME, format_args!("{what}: {done} of {all} hosts"));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads().get().min(hosts.len()) {
            scope.spawn(one);
        }
        one();
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// What the VMs of the first hosts do.
fn statistics(
    options: &IopfDailyOptions,
    hosts: &[ProductionHost],
) -> Result<Vec<Vec<GuestStatistics>>, ReplayError> {
    let mut vms = 0;
    let sample = hosts.iter().take_while(|host| {
        let is_wanted = vms < options.sample_vms;
        vms += host.guests.len();
        is_wanted
    });
    let sample = &hosts[..sample.count()];
    on_all_cpus(sample, "statistics", |host| {
        let one = |guest| production_statistics(guest, STATISTICS_S.min(options.seconds));
        host.guests.iter().map(one).collect()
    })
}

/// The days of all VMs.
fn replay(
    options: &IopfDailyOptions,
    hosts: &[ProductionHost],
    what: &str,
) -> Result<FleetDays, BenchError> {
    let vms: usize = hosts.iter().map(|host| host.guests.len()).sum();
    progress(NAME, format_args!("{what}: {vms} VMs"));
    let days = on_all_cpus(hosts, what, |host| host_days(options, host)).map_err(failed)?;
    let mut all = FleetDays::default();
    for host in days {
        for (all, of_host) in all.iter_mut().zip(host) {
            all.extend(of_host);
        }
    }
    Ok(all)
}

fn day(options: &IopfDailyOptions, arm: &str) -> Result<Day, ReplayError> {
    let policy: PolicyChoice = arm.parse().map_err(asked)?;
    Ok(Day {
        policy,
        dma: DmaTouches::Unseen,
        cold_after: COLD_AFTER,
        seconds: options.seconds,
        capacity_every: None,
    })
}

fn asked(error: impl std::fmt::Display) -> ReplayError {
    ReplayError::Asked(error.to_string())
}

fn host_days(options: &IopfDailyOptions, host: &ProductionHost) -> Result<FleetDays, ReplayError> {
    let mut days = FleetDays::default();
    for (arm, own) in ARMS.iter().zip(&mut days) {
        let accounts = host.run(&day(options, arm)?)?;
        let vms = host.guests.iter().zip(&accounts);
        own.extend(vms.map(|(guest, vm)| vm_day(guest.life, vm)));
    }
    Ok(days)
}

fn vm_day(life: Life, vm: &VmAccount) -> VmDay {
    let device = |service: Service| {
        let device = vm.devices.iter().find(|device| device.service == service);
        device.map_or_else(DeviceDay::default, |device| DeviceDay {
            faults: device.faults,
            first_faults: device.first_faults,
            fault_ages: device.fault_ages,
            minute_sections: device.minute_sections,
            dropped_sections: device.dropped_sections,
        })
    };
    let share = |sections: f64| sections / (vm.sections.max(1) as f64);
    VmDay {
        is_working: matches!(life, Life::Working(_)),
        sections: vm.sections,
        nic: device(Service::Network),
        disk: device(Service::Block),
        bursts: vm.bursts,
        absent_share: share(vm.absent.mean_sections(vm.time)),
        pinned_share: share(vm.protected.mean_sections(vm.time)),
        cpu_faults: vm.cpu_faults,
        minutes: vm.time.as_secs_f64() / 60.0,
    }
}

/// One hour of the first host that has a working VM, under `adp`: the NIC of its first such VM.
fn capacity(
    options: &IopfDailyOptions,
    hosts: &[ProductionHost],
) -> Result<Option<NicCapacity>, ReplayError> {
    let works = |life: &Life| matches!(life, Life::Working(_));
    for host in hosts {
        let Some(at) = host.guests.iter().position(|guest| works(&guest.life)) else {
            continue;
        };
        progress(NAME, "an hour of one NIC");
        let hour = Day {
            seconds: options.seconds.min(3_600),
            capacity_every: Some(Duration::from_secs(60)),
            ..day(options, ARMS[1])?
        };
        let accounts = host.run(&hour)?;
        let vm = &accounts[at];
        let nic = vm.devices.iter().find(|d| d.service == Service::Network);
        return Ok(nic.map(|nic| NicCapacity {
            vm_sections: vm.sections,
            held: nic.capacity.clone(),
        }));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sim::fleet::Wakings;
    use serde_json::Value;

    fn tiny() -> IopfDailyOptions {
        let often = Wakings {
            per_day: 120.0,
            seconds: 15.0,
            spread: 1.0,
        };
        IopfDailyOptions {
            fleet: Fleet {
                nic: often,
                disk: often,
                vm_sections: Some(1_024),
                ..Fleet::default()
            },
            seeds: 2,
            vms: 25,
            earlier_vms: 20,
            sample_vms: 20,
            seconds: 1_800,
            files_shares: vec![0.1, 1.0],
            plots: None,
        }
    }

    #[test]
    fn report_has_both_figures_beside_the_papers_and_adp_saves_faults_of_nics() {
        let report = run(&tiny()).expect("a tiny fleet");
        let earlier = &report.figures["fig7"];
        assert_eq!(earlier["vms"], Value::from(20));
        assert_eq!(earlier["nic_faults_mean"]["paper"], Value::from(38.0));
        assert!(earlier["nic_faults_mean"]["made"]["mean"].as_f64() > Some(0.0));
        let all = &report.figures["fig18"];
        assert_eq!(all["vms"], Value::from(25));
        // The disks of so small a fleet come to their memory seldom.
        assert!(all["block_reduction"]["made"]["mean"].as_f64() <= Some(1.0));
        let nic = &all["nic_reduction"]["made"];
        let [least, most] = ["least", "most"].map(|of| nic[of].as_f64());
        assert!(least > Some(0.0) && most <= Some(1.0), "{all}");
        let pinned = all["vm_pinned_share"]["made"]["mean"].as_f64();
        assert!(pinned > Some(0.0) && pinned < Some(0.2), "{all}");
        assert_eq!(all["none"]["vm_pinned_share"], Value::from(0.0));
        let files = report.figures["files"].as_array().map(Vec::len);
        assert_eq!(files, Some(2));
        let lines = &report.figures["pa_bitmap_lines_touched_a_minute"];
        assert!(lines["mean"].as_f64() > Some(0.0), "{lines}");
    }

    #[test]
    fn vms_are_the_same_however_many_threads_replay_them() {
        let options = tiny();
        let hosts = options.fleet.hosts(1, 25);
        let parallel = replay(&options, &hosts, "test").expect("a tiny fleet");
        let each = hosts.iter().map(|host| host_days(&options, host));
        let mut alone = FleetDays::default();
        for host in each {
            for (all, of_host) in alone.iter_mut().zip(host.expect("a tiny fleet")) {
                all.extend(of_host);
            }
        }
        assert_eq!(parallel, alone);
    }

    #[test]
    fn pictures_are_drawn_where_they_are_asked_for() {
        let dir = std::env::temp_dir().join(format!("pagetide-daily-{}", std::process::id()));
        let options = IopfDailyOptions {
            seeds: 1,
            files_shares: Vec::new(),
            plots: Some(dir.clone()),
            ..tiny()
        };
        let report = run(&options).expect("a tiny fleet");
        let files = report.figures["plots"].as_array().expect("a list");
        assert_eq!(files.len(), 4);
        for file in files {
            let text = std::fs::read_to_string(file.as_str().expect("a path"));
            let text = text.expect("it is there");
            assert!(text.contains("<svg") || text.starts_with('{'), "{file}");
        }
        std::fs::remove_dir_all(dir).expect("it was made");
    }
}
