// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench schedule`: what background work does to the faults of vCPUs.
//!
//! Two dense stand-ins ([`super::busy`]), one vCPU each on CPUs of their own, use a hot piece of their RAM that
//! moves on through evicted memory: so each has some thousand faults a second, whatever the daemon does beside.
//! There is no readahead: each page is a fault. The stand-ins time each touch and tell of those that the kernel
//! counts as faults, so waiting for a thread of the daemon to get a CPU is part of it.
//!
//! | arm | limits | background work |
//! |---|---|---|
//! | none | none | none: no share for scans and the rest, and reclaim has nothing to do |
//! | background | half again the hot piece | both VMs are scanned, and evicted from as the piece moves on |
//! | capped | as background | small shares, no idle time, and nothing passed down |
//!
//! The first two alternate. All start alike: everything is evicted while the vCPUs pause, then they go on, and
//! the slice begins [`SETTLE`] later. The third shows that work at its maximum time is held back: what it used
//! of the CPUs beside its share. (What it used for a fault that waited for room counts as that fault's.) And in
//! both arms with work, tasks that used more than the maximum time of a run were granted nothing for so long.

use super::{
    busy::{
        guest::{BATCH, BusyGuestOptions, Order, RamSize},
        pattern::Pattern,
        process::BusyGuest,
        ram::HugePages,
    },
    daemon::{Daemon, directory_in},
    harness::{
        figures::{median, median_ratio, rounded, thousandths, to_f64},
        latencies::Latencies,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{WarmUp, progress, rounds},
    },
    interrupt::Interrupted,
    memory::{fitting, ram_key},
    options::{SizeOptions, flags},
};
use hyper::Method;
use pagetide_addr::to_usize;
use pagetide_daemon::{
    api::{AttachBody, LimitBody},
    client::vm_path,
    control::{ReclaimReport, VmReport},
    scheduler::{IdleTimeChoice, ScheduleChange, SchedulerClassReport, SchedulerReport, api::PATH},
};
use serde_json::{Map, Value, json};
use std::{path::Path, time::Duration};

const NAME: &str = "schedule";
/// Default RAM of each stand-in. A burst of faults (the pages of one section) then fits twice into the
/// headroom that reclaim keeps free; in a small VM each burst would use it up, and faults would make room
/// themselves.
const RAM_BYTES: u64 = 1 << 30;
/// Default number of alternations.
const PAIRS: u64 = 6;
/// Default length of a slice in seconds.
const SLICE_SECONDS: u64 = 6;
/// Time for a stand-in to bring its hot piece back before it is measured.
const SETTLE: Duration = Duration::from_secs(2);
/// Of the RAM, in thousandths.
const HOT_PERMILLE: u32 = 125;
/// Ten a second: 20 MiB, some 5,000 pages.
const SECTIONS_A_MINUTE: u32 = 600;
/// Evictions until little is left.
const RECLAIMS_MAX: u32 = 20;
const VMS: [&str; 2] = ["one", "two"];
const WORK: [&str; 3] = ["reclaim", "scan", "background"];

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arm {
    None,
    Background,
    Capped,
}

impl Arm {
    fn schedule(self) -> Option<ScheduleChange> {
        let shares = |reclaim, scan, background| ScheduleChange {
            idle_time: Some(IdleTimeChoice::Unused),
            vcpu_faults_permille: Some(0),
            io_faults_permille: Some(0),
            reclaim_permille: Some(reclaim),
            scan_permille: Some(scan),
            background_permille: Some(background),
            ..ScheduleChange::default()
        };
        match self {
            // Reclaim always has a share, but nothing to do without a limit.
            Self::None => Some(shares(1, 0, 0)),
            Self::Background => None,
            Self::Capped => Some(shares(10, 5, 5)),
        }
    }

    const fn has_limits(self) -> bool {
        matches!(self, Self::Background | Self::Capped)
    }
}

/// What came of a slice.
struct Slice {
    faults: Latencies,
    seconds: f64,
    vms: Vms,
    classes: Vec<(String, Used)>,
}

/// Of both VMs.
#[derive(Clone, Copy, Default)]
struct Vms {
    evicted_pages: u64,
    sampled_sections: u64,
    served_faults: u64,
    over_limit_fills: u64,
    directly_evicted_pages: u64,
}

/// Of one class.
#[derive(Clone, Copy, Default)]
struct Used {
    share: f64,
    runs: f64,
    entitled_seconds: f64,
    inherited_seconds: f64,
    held_runs: f64,
    held_seconds: f64,
    overruns: f64,
    overrun_seconds: f64,
    withheld_seconds: f64,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let wanted_bytes = 2 * options.ram_bytes(RAM_BYTES);
    let (both_bytes, smaller) = fitting(wanted_bytes).map_err(unable)?;
    let mut bench = Bench::prepare(both_bytes / 2, options).map_err(unable)?;
    let (mut none, mut background) = (Vec::new(), Vec::new());
    let pairs = to_usize(options.pairs.unwrap_or(PAIRS));
    for round in rounds(NAME, pairs, WarmUp::None) {
        for arm in round.turns([Arm::None, Arm::Background]) {
            interrupted.check().map_err(failed)?;
            let slice = bench.slice(arm).map_err(failed)?;
            match arm {
                Arm::None => none.push(slice),
                Arm::Background | Arm::Capped => background.push(slice),
            }
        }
    }
    progress(NAME, "small shares");
    let capped = bench.slice(Arm::Capped).map_err(failed)?;
    let ram_bytes = bench.ram_bytes;
    bench.end().map_err(failed)?;
    let mut report = BenchReport::new(NAME);
    report
        .figures
        .insert("ram".into(), json!(ram_key(ram_bytes)));
    report.figures.insert("smaller".into(), json!(smaller));
    describe(&none, &background, &capped, &mut report);
    Ok(report)
}

/// The resources of a run, dropped in this order: the daemon detaches before the guests end.
struct Bench {
    daemon: Daemon,
    guests: Vec<BusyGuest>,
    ram_bytes: u64,
    slice: Duration,
    _dirs: [tempfile::TempDir; 2],
}

impl Bench {
    fn prepare(ram_bytes: u64, options: &SizeOptions) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let guest = |number| {
            let options = BusyGuestOptions {
                ram_mib: ram_bytes >> 20,
                size: RamSize::Exact,
                vcpus: 1,
                first_cpu: number,
                disk: None,
                batch: BATCH,
                rest_us: 0,
                time_faults: true,
                pattern: Pattern::Moving {
                    hot_permille: HOT_PERMILLE,
                    sections_a_minute: SECTIONS_A_MINUTE,
                },
                huge_pages: HugePages::NotAdvised,
            };
            BusyGuest::start(on_disk.path(), &options)
        };
        let guests = (0..VMS.len()).map(guest).collect::<Result<Vec<_>, _>>()?;
        let settings = [vec!["--neighbours=0".to_owned()], flags(&options.settings)].concat();
        let state_dir = in_memory.path().join("daemon");
        let daemon = Daemon::start_for(&state_dir, &settings, 2 * ram_bytes)?;
        for (name, guest) in VMS.iter().zip(&guests) {
            let body = AttachBody {
                pid: guest.pid(),
                name: Some((*name).to_owned()),
                limit_bytes: None,
                weight: None,
                floor_bytes: None,
            };
            let vm: VmReport = daemon.send("/v1/vms", &body)?;
            if let Some(blocker) = vm.eviction_blockers.first() {
                return Err(format!("nothing of {name} can be evicted: {blocker}"));
            }
        }
        Ok(Self {
            daemon,
            guests,
            ram_bytes,
            slice: options.time(SLICE_SECONDS),
            _dirs: [in_memory, on_disk],
        })
    }

    fn slice(&mut self, arm: Arm) -> Result<Slice, String> {
        self.begin_alike()?;
        if arm.has_limits() {
            let hot_bytes = self.ram_bytes * u64::from(HOT_PERMILLE) / 1000;
            self.set_limits(Some(hot_bytes * 3 / 2))?;
        }
        if let Some(change) = arm.schedule() {
            let _now: SchedulerReport = self.daemon.send_by(Method::PATCH, PATH, &change)?;
        }
        self.each_guest(&Order::Resume)?;
        std::thread::sleep(SETTLE);
        self.faults()?;
        let before = (self.vms()?, self.classes()?);
        let begun = std::time::Instant::now();
        std::thread::sleep(self.slice);
        let faults = self.faults()?;
        let seconds = begun.elapsed().as_secs_f64();
        let (vms, classes) = (self.vms()?, self.classes()?);
        self.daemon.ask::<SchedulerReport>(Method::DELETE, PATH)?;
        Ok(Slice {
            faults,
            seconds,
            vms: vms.since(before.0),
            classes: used_since(&before.1, &classes),
        })
    }

    /// With the scheduler as started, no limits, and everything evicted.
    fn begin_alike(&mut self) -> Result<(), String> {
        self.daemon.ask::<SchedulerReport>(Method::DELETE, PATH)?;
        self.set_limits(None)?;
        self.each_guest(&Order::Pause)?;
        for name in VMS {
            self.evict_all(name)?;
        }
        Ok(())
    }

    fn evict_all(&self, name: &str) -> Result<(), String> {
        let path = vm_path(name);
        let mut last = ReclaimReport::default();
        for _ in 0..RECLAIMS_MAX {
            let bytes = json!({});
            last = self.daemon.send(&(path.clone() + "/reclaim"), &bytes)?;
            if last.resident_bytes < self.ram_bytes / 64 {
                return Ok(());
            }
        }
        Err(self.daemon.with_log(format!(
            "{} of {name} is still present after {RECLAIMS_MAX} reclaims{}",
            last.resident_bytes,
            last.stayed_text()
        )))
    }

    fn set_limits(&self, limit_bytes: Option<u64>) -> Result<(), String> {
        let body = LimitBody { limit_bytes };
        VMS.iter().try_for_each(|name| {
            let set = self.daemon.send_by(Method::PATCH, &vm_path(name), &body);
            set.map(|_vm: VmReport| ())
        })
    }

    fn each_guest(&mut self, order: &Order) -> Result<(), String> {
        let mut guests = self.guests.iter_mut();
        guests.try_for_each(|guest| guest.obey(order).map(|_time| ()))
    }

    /// Times of the faults since the last call.
    fn faults(&mut self) -> Result<Latencies, String> {
        let mut all = Vec::new();
        for guest in &mut self.guests {
            all.extend(guest.faults()?);
        }
        Ok(all.into_iter().collect())
    }

    fn vms(&self) -> Result<Vms, String> {
        let mut sum = Vms::default();
        for name in VMS {
            let vm: VmReport = self.daemon.ask(Method::GET, &vm_path(name))?;
            sum.evicted_pages += vm.evicted_pages;
            sum.sampled_sections += vm.sampled_sections;
            sum.served_faults += vm.vcpu_faults;
            sum.over_limit_fills += vm.over_limit_fills;
            sum.directly_evicted_pages += vm.directly_evicted_pages;
        }
        Ok(sum)
    }

    fn classes(&self) -> Result<Vec<SchedulerClassReport>, String> {
        let report: SchedulerReport = self.daemon.ask(Method::GET, PATH)?;
        Ok(report.classes)
    }

    /// Compares every byte.
    fn end(mut self) -> Result<(), String> {
        for name in VMS {
            let _gone: Value = self.daemon.ask(Method::DELETE, &vm_path(name))?;
        }
        self.each_guest(&Order::Pause)?;
        self.each_guest(&Order::VerifyAll)
    }
}

impl Vms {
    fn since(self, before: Self) -> Self {
        Self {
            evicted_pages: self.evicted_pages - before.evicted_pages,
            sampled_sections: self.sampled_sections - before.sampled_sections,
            served_faults: self.served_faults - before.served_faults,
            over_limit_fills: self.over_limit_fills - before.over_limit_fills,
            directly_evicted_pages: self.directly_evicted_pages - before.directly_evicted_pages,
        }
    }
}

fn used_since(
    before: &[SchedulerClassReport],
    after: &[SchedulerClassReport],
) -> Vec<(String, Used)> {
    let entitled = |class: &SchedulerClassReport| {
        class.own_seconds + class.passed_down_seconds + class.idle_seconds
    };
    let pairs = before.iter().zip(after);
    let named = pairs.map(|(before, after)| {
        let used = Used {
            share: to_f64(after.share_permille) / 1e3,
            runs: to_f64(after.runs - before.runs),
            entitled_seconds: entitled(after) - entitled(before),
            inherited_seconds: after.inherited_seconds - before.inherited_seconds,
            held_runs: to_f64(after.held_runs - before.held_runs),
            held_seconds: after.held_seconds - before.held_seconds,
            overruns: to_f64(after.overruns - before.overruns),
            overrun_seconds: after.overrun_seconds - before.overrun_seconds,
            withheld_seconds: after.withheld_seconds - before.withheld_seconds,
        };
        (after.class.clone(), used)
    });
    named.collect()
}

impl Slice {
    fn per_s(&self, count: u64) -> f64 {
        to_f64(count) / self.seconds
    }

    fn class(&self, name: &str) -> Used {
        let found = self.classes.iter().find(|(class, _)| class == name);
        found.map_or(Used::default(), |(_, used)| *used)
    }

    fn timed_faults_per_s(&self) -> f64 {
        self.per_s(self.faults.count() as u64)
    }
}

fn describe(none: &[Slice], background: &[Slice], capped: &Slice, report: &mut BenchReport) {
    let cpus = report.host.cpus;
    let capped_slices = std::slice::from_ref(capped);
    let arms = [
        ("none", none),
        ("background", background),
        ("capped", capped_slices),
    ];
    for (name, slices) in arms {
        report.figures.insert(name.into(), figures_of(slices, cpus));
    }
    for (name, permille) in [("p50", 500), ("p99", 990)] {
        let ratio = median_ratio(background, none, |slice| slice.faults.us(permille));
        let name = format!("fault_{name}_background_over_none");
        report.ratios.insert(name, rounded(ratio).into());
    }
    let all = median_ratio(background, none, Slice::timed_faults_per_s);
    let name = "faults_per_s_background_over_none";
    report.ratios.insert(name.into(), rounded(all).into());
    let (used, share) = WORK.iter().fold((0.0, 0.0), |(used, share), class| {
        let of = capped.class(class);
        (used + of.entitled_seconds, share + of.share)
    });
    let granted = share * capped.seconds * to_f64(cpus as u64);
    let ratio = rounded(used / granted);
    report
        .ratios
        .insert("capped_used_over_share".into(), ratio.into());
    let slices = || background.iter().chain([capped]);
    let sum = |figure: fn(&Used) -> f64| -> f64 {
        let of = |slice: &Slice| {
            WORK.iter()
                .map(|class| figure(&slice.class(class)))
                .sum::<f64>()
        };
        slices().map(of).sum()
    };
    let (withheld, overrun) = (
        sum(|used| used.withheld_seconds),
        sum(|used| used.overrun_seconds),
    );
    let ratio = rounded(withheld / overrun);
    report
        .ratios
        .insert("withheld_over_overrun".into(), ratio.into());
}

fn figures_of(slices: &[Slice], cpus: usize) -> Value {
    let of = |figure: &dyn Fn(&Slice) -> f64| thousandths(median(slices.iter().map(figure)));
    let mut figures = Map::new();
    let mut add = |name: &str, value| figures.insert(name.to_owned(), value);
    for (name, permille) in [
        ("p50_us", 500),
        ("p90_us", 900),
        ("p99_us", 990),
        ("p999_us", 999),
    ] {
        add(name, of(&|slice| slice.faults.us(permille)));
    }
    add("timed_faults_per_s", of(&Slice::timed_faults_per_s));
    let per_s = |count: fn(&Vms) -> u64| of(&|slice| slice.per_s(count(&slice.vms)));
    add("served_faults_per_s", per_s(|vms| vms.served_faults));
    add("evicted_pages_per_s", per_s(|vms| vms.evicted_pages));
    add(
        "directly_evicted_pages_per_s",
        per_s(|vms| vms.directly_evicted_pages),
    );
    add("scanned_sections_per_s", per_s(|vms| vms.sampled_sections));
    add("over_limit_fills_per_s", per_s(|vms| vms.over_limit_fills));
    let all = to_f64(cpus as u64);
    for class in WORK {
        let of_class =
            |figure: fn(&Used) -> f64| of(&|slice| figure(&slice.class(class)) / slice.seconds);
        let of_cpus = |figure: fn(&Used) -> f64| {
            of(&|slice| figure(&slice.class(class)) / slice.seconds / all)
        };
        let value = json!({
            "share": of(&|slice| slice.class(class).share),
            "used_share": of_cpus(|used| used.entitled_seconds),
            "inherited_share": of_cpus(|used| used.inherited_seconds),
            "runs_per_s": of_class(|used| used.runs),
            "held_runs_per_s": of_class(|used| used.held_runs),
            "held_s_per_s": of_class(|used| used.held_seconds),
            "overruns_per_s": of_class(|used| used.overruns),
            "overrun_ms_per_s": of_class(|used| used.overrun_seconds * 1e3),
            "withheld_ms_per_s": of_class(|used| used.withheld_seconds * 1e3),
        });
        add(class, value);
    }
    Value::Object(figures)
}
