// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench burst`: a tenant's working set doubles within a moment, after Taiji 5.3.1 and Fig 14.
//!
//! Two dense stand-ins ([`super::busy`]), one vCPU each, have 1 GiB of RAM each and less memory than that:
//! the budget holds the working sets as they are after the burst, and about a third of one RAM beside them.
//!
//! ```text
//!   steady     ▓▓▓▓▓▓░░░░░░░░░░┄┄┄┄┄┄┄┄      ▓ working set, used without rest
//!   bursting   ▓▓▓▓▓▓┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄      ░ present and cold     ┄ evicted
//!                    │burst
//!              ▓▓▓▓▓▓▓▓▓▓▓▓┄┄┄┄┄┄┄┄┄┄┄┄      the new half was evicted: each page of it faults
//! ```
//! What is cold in the steady VM fills the budget up to its watermarks. So the burst takes free memory below
//! low, reclaim begins, and the memory comes from the other VM.
//!
//! | arm | memory | served by |
//! |---|---|---|
//! | ours | the budget | `pagetide run`, default settings |
//! | zram | a memory cgroup; it and what zram holds are within the same budget | the kernel: swap on zram, lz4, page-cluster 0 |
//!
//! The arms take turns on the same stand-ins; swap is on in the second only. Before them each round measures,
//! with all memory present, what the tenant does with the larger working set (throughput is *recovered* at 95 %
//! of that for half a second, so that caches which hold less of a larger set count for nobody), and the bare
//! round trip of a userfaultfd.
//!
//! Free memory is what the budget leaves of the blocks of RAM files and pools, looked at from outside every
//! hundredth of a second. Times of faults are the vCPU's own (*whole*) and the daemon's, from reading the message
//! to the page being there (*served*), from its metrics. `--plots DIR` draws the last round, and writes its data.

mod online;
mod outside;
mod plots;
mod report;
mod seen;
mod served;
mod slice;

use self::{
    online::{Demand, REST_US, TURN},
    outside::{Look, Outside},
    report::{Measured, Sizes, describe},
    seen::{Asked, Seen},
    served::Served,
    slice::{BURSTING, Reference, STEADY, Slice},
};
use super::{
    busy::{
        guest::{BATCH, BusyGuestOptions, Order, RamSize},
        pattern::Pattern,
        process::BusyGuest,
        ram::HugePages,
    },
    cgroup::{Group, bytes_in},
    daemon::{Daemon, directory_in},
    fault::floor,
    harness::{
        figures::to_f64,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{Round, WarmUp, progress, rounds},
    },
    interrupt::Interrupted,
    kernel_swap::{Compressor, KernelSwap},
    memory::{fitting, ram_key},
    options::{SizeOptions, flags},
};
use hyper::Method;
use pagetide_addr::to_usize;
use pagetide_daemon::{
    api::AttachBody,
    budget::{BudgetBody, HostReport},
    client::vm_path,
    control::{ReclaimReport, VmReport},
    scheduler::{SchedulerReport, api::PATH as SCHEDULER},
};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

const NAME: &str = "burst";
const RAM_BYTES: u64 = 1 << 30;
const PAIRS: u64 = 3;
/// Seconds that are looked at after the burst.
const SLICE_SECONDS: u64 = 10;
/// Length of what comes after the bursts; the paper's is an hour.
const ONLINE_SECONDS: u64 = 300;
/// Of the RAM, in thousandths: the working set of each tenant, and that of the one that bursts afterwards.
const HOT_PERMILLE: u32 = 250;
const BURST_PERMILLE: u32 = 500;
/// Present of both VMs under the budget, in thousandths of one RAM, while its high watermark is free: three
/// quarters are working sets once the burst is over.
const RESIDENT_PERMILLE: u64 = 1100;
/// Names of the tenants.
const VMS: [&str; 2] = ["steady", "bursting"];
/// Time for a stand-in to bring its working set back, and to warm up.
const SETTLE: Duration = Duration::from_secs(2);
/// Longest time until memory is as the watermarks want it.
const LEVEL_WAIT: Duration = Duration::from_secs(30);
/// It is if it has changed by less than this part of the budget in [`SETTLE`].
const LEVEL_PART: u64 = 500;
/// Looked at before the burst.
const BEFORE: Duration = Duration::from_secs(2);
/// Time between two samples of throughput; the daemon is asked at every other one.
const SAMPLE: Duration = Duration::from_millis(100);
/// Throughput with all memory present is measured for so long.
const REFERENCE: Duration = Duration::from_secs(2);
/// Evictions until little is left.
const RECLAIMS_MAX: u32 = 20;
/// Pages of a measurement of the bare userfaultfd.
const FLOOR_PAGES: u64 = 4096;
/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arm {
    Ours,
    Zram,
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
    let mut measured = Vec::new();
    for round in rounds(NAME, to_usize(options.pairs.unwrap_or(PAIRS)), WarmUp::None) {
        interrupted.check().map_err(failed)?;
        measured.push(bench.round(round, &interrupted).map_err(failed)?);
    }
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("ram".into(), json!(ram_key(bench.ram_bytes)));
    figures.insert("smaller".into(), json!(smaller));
    describe(&bench.sizes, &measured, &mut report);
    if let Some(reason) = bench.group.as_ref().err().or(bench.no_zram.as_ref()) {
        report.peers.insert("zram".into(), json!(reason));
    }
    let length = Duration::from_secs(options.online.unwrap_or(ONLINE_SECONDS));
    let online = bench.online(length, &interrupted).map_err(failed)?;
    if let Some(last) = measured.last() {
        let figures = online::describe(&bench.sizes, last, &online);
        report.figures.insert("online".into(), figures);
        if let Some(dir) = &options.plots {
            let files = plots::draw(dir, &bench.sizes, last, &online).map_err(failed)?;
            report.figures.insert("plots".into(), json!(files));
        }
    }
    bench.end().map_err(failed)?;
    Ok(report)
}

/// The resources of a run, dropped in this order: the daemon detaches before the guests end, and these before
/// their cgroup is removed.
struct Bench {
    daemon: Daemon,
    guests: Vec<BusyGuest>,
    outside: Outside,
    group: Result<Group, String>,
    no_zram: Option<String>,
    ram_bytes: u64,
    sizes: Sizes,
    slice: Duration,
    _dirs: [tempfile::TempDir; 2],
}

impl Bench {
    fn prepare(ram_bytes: u64, options: &SizeOptions) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let start = || {
            (0..VMS.len())
                .map(|number| start_guest(on_disk.path(), ram_bytes, number))
                .collect::<Result<Vec<_>, _>>()
        };
        let group = Group::create();
        let guests = match &group {
            Ok(group) => group.within(start)?,
            Err(_) => start()?,
        };
        let lock = in_memory.path().join("budget.lock");
        let settings = [
            vec![format!("--budget-lock={}", lock.display())],
            flags(&options.settings),
        ]
        .concat();
        let state_dir = in_memory.path().join("daemon");
        let daemon = Daemon::start_for(&state_dir, &settings, 2 * ram_bytes)?;
        let pids: Vec<u32> = guests.iter().map(BusyGuest::pid).collect();
        let mut bench = Self {
            outside: Outside::of(&pids, &state_dir)?,
            daemon,
            guests,
            group,
            no_zram: None,
            ram_bytes,
            sizes: Sizes {
                budget_bytes: 0,
                min_bytes: 0,
                low_bytes: 0,
                high_bytes: 0,
                stored_share: 0.0,
            },
            slice: options.time(SLICE_SECONDS),
            _dirs: [in_memory, on_disk],
        };
        bench.sizes = bench.measure_sizes()?;
        Ok(bench)
    }

    /// The budget that holds [`RESIDENT_PERMILLE`], by what the content takes once it is all evicted.
    fn measure_sizes(&mut self) -> Result<Sizes, String> {
        progress(NAME, "measuring what the content takes");
        self.attach()?;
        self.each_guest(&Order::Pause)?;
        self.evict_all()?;
        let (ram, pools) = (2 * self.ram_bytes, self.outside.pool_bytes()?);
        let resident = self.ram_bytes * RESIDENT_PERMILLE / 1000;
        let stored = pools * (ram - resident) / ram;
        let host: HostReport = self.daemon.send_by(
            Method::PUT,
            "/v1/host/budget",
            &BudgetBody {
                budget_bytes: Some(resident + stored),
                ..BudgetBody::default()
            },
        )?;
        // All of that is to be had while the high watermark is free.
        let high = host.high_bytes.unwrap_or(0);
        let host = self.set_budget(resident + stored + high)?;
        let sizes = Sizes {
            budget_bytes: host.budget_bytes.unwrap_or(0),
            min_bytes: host.min_bytes.unwrap_or(0),
            low_bytes: host.low_bytes.unwrap_or(0),
            high_bytes: host.high_bytes.unwrap_or(0),
            stored_share: to_f64(pools) / to_f64(ram),
        };
        self.release()?;
        Ok(sizes)
    }

    fn set_budget(&self, budget_bytes: u64) -> Result<HostReport, String> {
        let body = BudgetBody {
            budget_bytes: Some(budget_bytes),
            ..BudgetBody::default()
        };
        self.daemon.send_by(Method::PUT, "/v1/host/budget", &body)
    }

    fn round(&mut self, round: Round, interrupted: &Interrupted) -> Result<Measured, String> {
        let reference = self.reference()?;
        let (mut ours, mut zram) = (None, None);
        for arm in round.turns([Arm::Ours, Arm::Zram]) {
            interrupted.check()?;
            match arm {
                Arm::Ours => ours = Some(self.ours()?),
                Arm::Zram => zram = self.on_zram()?,
            }
        }
        Ok(Measured {
            reference,
            ours: ours.ok_or("a round has no arm of ours")?,
            zram,
        })
    }

    /// With all memory present and nobody else at work.
    fn reference(&mut self) -> Result<Reference, String> {
        self.each_guest(&Order::Pause)?;
        let cpus = pagetide_sys::cpu::affinity().map_err(|error| error.to_string())?;
        let cpu = cpus.last().copied().unwrap_or(0);
        let (copies, round_trips) = floor::measure(FLOOR_PAGES, cpu)?;
        self.resize(BURST_PERMILLE)?;
        self.each_guest(&Order::Resume)?;
        std::thread::sleep(SETTLE);
        self.rates()?;
        std::thread::sleep(REFERENCE);
        let [steady, bursting] = self.rates()?;
        self.resize(HOT_PERMILLE)?;
        Ok(Reference {
            bursting,
            steady,
            copies: copies.into_iter().collect(),
            round_trips: round_trips.into_iter().collect(),
        })
    }

    /// Both under the budget, in the state before a burst.
    fn begin_ours(&mut self) -> Result<(), String> {
        self.attach()?;
        self.each_guest(&Order::Pause)?;
        self.evict_all()?;
        self.set_budget(self.sizes.budget_bytes)?;
        self.fill_up(|outside| outside.used_bytes())
    }

    fn ours(&mut self) -> Result<Slice, String> {
        self.begin_ours()?;
        let outside = self.outside.clone();
        let slice = self.burst(Arm::Ours, move || outside.used_bytes())?;
        self.resize(HOT_PERMILLE)?;
        self.release()?;
        Ok(slice)
    }

    /// Both under the budget for so long, with demands that change ([`online`]).
    fn online(&mut self, length: Duration, interrupted: &Interrupted) -> Result<Slice, String> {
        progress(NAME, format_args!("{} s online", length.as_secs()));
        self.begin_ours()?;
        self.each_guest(&Order::Rest { us: REST_US })?;
        let outside = self.outside.clone();
        let (mut seen, mut faults) = (Seen::default(), Vec::new());
        let mut demands = [STEADY, BURSTING].map(|tenant| Demand::of(tenant, HOT_PERMILLE));
        self.guests[BURSTING].faults()?;
        let served = self.served(Arm::Ours)?;
        self.rates()?;
        let look = Look::begin(move || outside.used_bytes());
        let begun = Instant::now();
        while begun.elapsed() < length {
            interrupted.check()?;
            for (guest, demand) in self.guests.iter_mut().zip(&mut demands) {
                let hot_permille = demand.next_permille();
                guest.obey(&Order::Resize { hot_permille })?;
            }
            let end = (Instant::now() + TURN).min(begun + length);
            self.watch(Arm::Ours, end, &mut seen)?;
            faults.extend(self.guests[BURSTING].faults()?);
        }
        let served = self.served(Arm::Ours)?.since(&served);
        // What follows is not under the budget any more.
        let used = look.end()?;
        self.each_guest(&Order::Rest { us: 0 })?;
        self.each_guest(&Order::Resize {
            hot_permille: HOT_PERMILLE,
        })?;
        self.release()?;
        Ok(seen.slice(begun, used, faults.into_iter().collect(), served))
    }

    fn on_zram(&mut self) -> Result<Option<Slice>, String> {
        let Ok(group) = &self.group else {
            return Ok(None);
        };
        let both = 2 * self.ram_bytes;
        let mut zram = match KernelSwap::on_zram(2 * both, Compressor::Lz4) {
            Ok(zram) => zram,
            Err(reason) => {
                self.no_zram = Some(reason);
                return Ok(None);
            }
        };
        // What the stand-ins have beside their RAM is charged, too.
        let beside = group.charged_bytes()?.saturating_sub(both);
        zram.switch_on()?;
        let zram = Arc::new(zram);
        let charged = group.charged_file();
        let held = Arc::clone(&zram);
        let used = move || Ok((bytes_in(&charged)? + held.memory_bytes()?).saturating_sub(beside));
        self.each_guest(&Order::Pause)?;
        let group = self.group.as_ref().map_err(String::clone)?;
        group.shrink_to(beside + both / 16)?;
        let resident = group.charged_bytes()?.saturating_sub(beside);
        let stored = zram.memory_bytes()?;
        let limit = limit_within(self.sizes.budget_bytes, both, resident, stored);
        group.limit(limit + beside)?;
        let look = used.clone();
        self.fill_up(|_| used())?;
        let slice = self.burst(Arm::Zram, look)?;
        self.resize(HOT_PERMILLE)?;
        let group = self.group.as_ref().map_err(String::clone)?;
        group.lift()?;
        // It is switched off, and everything read back.
        drop((used, zram));
        Ok(Some(slice))
    }

    /// From everything evicted to the state before the burst: both working sets are back, and what is cold of the
    /// steady VM takes what is left.
    fn fill_up(
        &mut self,
        used_bytes: impl Fn(&Outside) -> Result<u64, String>,
    ) -> Result<(), String> {
        self.each_guest(&Order::Resume)?;
        std::thread::sleep(SETTLE);
        self.guests[STEADY].obey(&Order::TouchAll)?;
        let begun = Instant::now();
        let mut before = used_bytes(&self.outside)?;
        while begun.elapsed() < LEVEL_WAIT {
            std::thread::sleep(SETTLE);
            let now = used_bytes(&self.outside)?;
            if now.abs_diff(before) <= self.sizes.budget_bytes / LEVEL_PART {
                break;
            }
            before = now;
        }
        Ok(())
    }

    /// Looks at both tenants from [`BEFORE`] the burst to the end of the slice.
    fn burst(
        &mut self,
        arm: Arm,
        used_bytes: impl Fn() -> Result<u64, String> + Send + 'static,
    ) -> Result<Slice, String> {
        let look = Look::begin(used_bytes);
        let mut seen = Seen::default();
        let begun = Instant::now();
        self.rates()?;
        self.watch(arm, begun + BEFORE, &mut seen)?;
        self.guests[BURSTING].faults()?;
        let served = self.served(arm)?;
        let burst = Instant::now();
        self.resize(BURST_PERMILLE)?;
        self.watch(arm, burst + self.slice, &mut seen)?;
        let faults = self.guests[BURSTING].faults()?.into_iter().collect();
        let served = self.served(arm)?.since(&served);
        Ok(seen.slice(burst, look.end()?, faults, served))
    }

    /// Samples until `end`.
    fn watch(&mut self, arm: Arm, end: Instant, seen: &mut Seen) -> Result<(), String> {
        let mut from = Instant::now();
        while from < end {
            std::thread::sleep(SAMPLE);
            let [steady, bursting] = self.rates()?;
            let to = Instant::now();
            seen.rates.push((from, to, [steady, bursting]));
            from = to;
            if arm == Arm::Ours && seen.rates.len().is_multiple_of(2) {
                seen.told.push(self.ask()?);
            }
        }
        Ok(())
    }

    fn ask(&self) -> Result<Asked, String> {
        let vm = |name: &str| self.daemon.ask(Method::GET, &vm_path(name));
        let scheduler: SchedulerReport = self.daemon.ask(Method::GET, SCHEDULER)?;
        Ok(Asked {
            vms: [vm(VMS[STEADY])?, vm(VMS[BURSTING])?],
            classes: scheduler.classes,
            at: Instant::now(),
        })
    }

    fn served(&self, arm: Arm) -> Result<Served, String> {
        match arm {
            Arm::Ours => Served::of(&self.daemon.metrics()?, VMS[BURSTING]),
            Arm::Zram => Ok(Served::default()),
        }
    }

    /// Pages a second of each tenant since the last call.
    fn rates(&mut self) -> Result<[f64; 2], String> {
        let mut rates = [0.0; 2];
        for (guest, rate) in self.guests.iter_mut().zip(&mut rates) {
            let counted = guest.count()?;
            *rate = to_f64(counted.operations) * 1e9 / to_f64(counted.ns.max(1));
        }
        Ok(rates)
    }

    fn resize(&mut self, hot_permille: u32) -> Result<(), String> {
        let order = Order::Resize { hot_permille };
        self.guests[BURSTING].obey(&order).map(|_time| ())
    }

    fn each_guest(&mut self, order: &Order) -> Result<(), String> {
        let mut guests = self.guests.iter_mut();
        guests.try_for_each(|guest| guest.obey(order).map(|_time| ()))
    }

    fn attach(&self) -> Result<(), String> {
        for (name, guest) in VMS.iter().zip(&self.guests) {
            let body = AttachBody {
                pid: guest.pid(),
                name: Some((*name).to_owned()),
                limit_bytes: None,
                weight: None,
                floor_bytes: None,
            };
            let vm: VmReport = self.daemon.send("/v1/vms", &body)?;
            if let Some(blocker) = vm.eviction_blockers.first() {
                return Err(format!("nothing of {name} can be evicted: {blocker}"));
            }
        }
        Ok(())
    }

    fn evict_all(&self) -> Result<(), String> {
        for name in VMS {
            let path = vm_path(name) + "/reclaim";
            let few = |report: &ReclaimReport| report.resident_bytes < self.ram_bytes / 64;
            let mut last = ReclaimReport::default();
            for _ in 0..RECLAIMS_MAX {
                last = self.daemon.send(&path, &json!({}))?;
                if few(&last) {
                    break;
                }
            }
            if !few(&last) {
                return Err(self.daemon.with_log(format!(
                    "{} of {name} is still present after {RECLAIMS_MAX} reclaims{}",
                    last.resident_bytes,
                    last.stayed_text()
                )));
            }
        }
        Ok(())
    }

    /// Lifts the budget and lets go of both.
    fn release(&self) -> Result<(), String> {
        let _host: HostReport = self.daemon.ask(Method::DELETE, "/v1/host/budget")?;
        for name in VMS {
            let _gone: Value = self.daemon.ask(Method::DELETE, &vm_path(name))?;
        }
        Ok(())
    }

    /// Compares every byte.
    fn end(mut self) -> Result<(), String> {
        self.each_guest(&Order::Pause)?;
        self.each_guest(&Order::VerifyAll)
    }
}

fn start_guest(dir: &Path, ram_bytes: u64, number: usize) -> Result<BusyGuest, String> {
    let options = BusyGuestOptions {
        ram_mib: ram_bytes >> 20,
        size: RamSize::Exact,
        vcpus: 1,
        first_cpu: number,
        disk: None,
        batch: BATCH,
        rest_us: 0,
        // The other one need not know its own.
        time_faults: number == BURSTING,
        pattern: Pattern::Part {
            hot_permille: HOT_PERMILLE,
        },
        huge_pages: HugePages::NotAdvised,
    };
    BusyGuest::start(dir, &options)
}

/// The most that may be present of `ram`, if that and what is stored of the rest are to be within `budget`.
/// `stored` is what the part takes that is not `resident` now.
fn limit_within(budget: u64, ram: u64, resident: u64, stored: u64) -> u64 {
    let (budget, ram) = (to_f64(budget), to_f64(ram));
    let share = to_f64(stored) / (ram - to_f64(resident)).max(1.0);
    let limit = (budget - share * ram) / (1.0 - share).max(0.01);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between nothing and the RAM"
    )]
    let limit = limit.clamp(0.0, ram) as u64;
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_leaves_room_for_what_is_stored_of_the_rest() {
        // Half of what is evicted is stored: 1,000 of RAM in 800 are 600 present and 200 for 400.
        assert_eq!(limit_within(800, 1000, 100, 450), 600);
        assert_eq!(limit_within(2000, 1000, 0, 500), 1000);
        assert_eq!(limit_within(100, 1000, 0, 500), 0);
    }
}
