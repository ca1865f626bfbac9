// SPDX-License-Identifier: Apache-2.0
//! One cell: a stand-in or a guest, a daemon, and slices in alternation. `bench overhead` is made of such cells,
//! too.

use crate::{
    blk::side::make_image,
    busy::{
        guest::{BATCH, BusyGuestOptions, Counted, Order, RamSize},
        kvm::{self, KvmGuest},
        pattern::Pattern,
        process::{BusyGuest, huge_bytes},
        ram::HugePages,
        stock::{self, Load, StockGuest, StockOptions},
    },
    daemon::{Daemon, directory_in},
    harness::{
        figures::{midpoint, thousandths, to_f64},
        ratios::{Overall, PairedRatios},
        rounds::{WarmUp, silent_rounds},
    },
    interrupt::Interrupted,
    options::{GivenSetting, flags},
};
use pagetide_addr::to_usize;
use pagetide_daemon::figure::LatencyUs;
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Wait after an attach, a detach or a squeeze, before a slice.
pub(crate) const SETTLE: Duration = Duration::from_secs(1);
/// Between two polls of a squeeze's progress.
const SQUEEZE_LOOK: Duration = Duration::from_millis(50);
/// Most RAM in huge pages of hugetlbfs, which take memory from everything else.
pub(super) const HUGETLB_BYTES_MAX: u64 = 1 << 30;
/// Least limit of a VM.
const LIMIT_BYTES_MIN: u64 = 16 << 20;

/// What is attached, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Free,
    Limited,
    Huge,
    Hugetlb,
    Kvm,
    Stock,
}

impl Kind {
    /// All.
    pub(super) const ALL: [Self; 6] = [
        Self::Free,
        Self::Limited,
        Self::Huge,
        Self::Hugetlb,
        Self::Kvm,
        Self::Stock,
    ];

    /// All works tried with this kind.
    pub(super) fn works(self) -> Vec<Work> {
        let vcpus: &[u32] = match self {
            Self::Free | Self::Limited | Self::Huge | Self::Hugetlb => &[1, 2],
            // The guest starts no other vCPU.
            Self::Kvm => &[1],
            Self::Stock => return Load::BUSY.map(Work::Load).to_vec(),
        };
        let hot = |hot_eighths| {
            let of = move |vcpus: &u32| Hot {
                hot_eighths,
                vcpus: *vcpus,
            };
            vcpus.iter().map(of)
        };
        [1, 7].into_iter().flat_map(hot).map(Work::Hot).collect()
    }

    /// Name of its ratio.
    pub(super) const fn ratio_name(self) -> &'static str {
        match self {
            Self::Free => "attached_over_free",
            Self::Limited => "limited_over_free",
            Self::Huge => "huge_over_free",
            Self::Hugetlb => "hugetlb_over_free",
            Self::Kvm => "kvm_over_free",
            Self::Stock => "stock_over_free",
        }
    }
}

/// The guest's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    Hot(Hot),
    Load(Load),
}

/// Touches a part of its RAM at random.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hot {
    pub hot_eighths: u32,
    pub vcpus: u32,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cell {
    pub kind: Kind,
    pub work: Work,
}

/// How much.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    pub ram_bytes: u64,
    pub pairs: u64,
    pub slice: Duration,
    pub settings: Vec<GivenSetting>,
}

/// A slice released and one attached.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(crate) struct Pair {
    pub released: Counted,
    pub attached: Counted,
    /// CPU time of the daemon over elapsed time, attached.
    pub daemon_cpu_share: f64,
    /// Share of the RAM mapped by huge pages after the attached slice.
    pub huge_share: f64,
    /// Pages evicted since the attach, after the attached slice.
    pub evicted_pages: u64,
    /// Faults since the attach, as the daemon saw them.
    pub fault_us: FaultTimes,
}

/// Percentiles of the time of a fault, in microseconds.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(crate) struct FaultTimes {
    pub p50: f64,
    pub p99: f64,
}

impl From<LatencyUs> for FaultTimes {
    fn from(all: LatencyUs) -> Self {
        Self {
            p50: all.p50,
            p99: all.p99,
        }
    }
}

/// What came of the pairs of a cell.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Summary {
    /// Of the pairs' ratios.
    pub median: f64,
    /// Their mean with its bounds; a single pair has none.
    pub bounds: Option<Overall>,
    /// All figures.
    pub figures: Value,
}

impl Pair {
    /// Attached over released.
    pub(crate) fn ratio(&self) -> f64 {
        self.attached.mops_per_s() / self.released.mops_per_s()
    }
}

impl Counted {
    fn mops_per_s(&self) -> f64 {
        to_f64(self.operations) * 1e3 / to_f64(self.ns)
    }

    fn faults_per_s(&self) -> f64 {
        to_f64(self.faults) * 1e9 / to_f64(self.ns)
    }

    fn gap_ms(&self) -> f64 {
        to_f64(self.longest_gap_ns) / 1e6
    }
}

impl Summary {
    pub(crate) fn of(pairs: &[Pair]) -> Self {
        let ratios = || pairs.iter().map(Pair::ratio);
        let (median, bounds) = (midpoint(ratios()), PairedRatios::bounds(ratios()));
        let of = |read: fn(&Pair) -> f64| thousandths(midpoint(pairs.iter().map(read)));
        let bound = |read: fn(Overall) -> f64| {
            bounds.map_or(Value::Null, |bounds| thousandths(read(bounds)))
        };
        let all: Vec<_> = ratios().map(thousandths).collect();
        let figures = json!({
            "pairs": pairs.len(),
            "ratios": all,
            "median": thousandths(median),
            "mean": bound(|bounds| bounds.mean),
            "low95": bound(|bounds| bounds.low95),
            "free_mops_per_s": of(|pair| pair.released.mops_per_s()),
            "attached_mops_per_s": of(|pair| pair.attached.mops_per_s()),
            "free_ops_per_s": of(|pair| pair.released.mops_per_s() * 1e6),
            "free_faults_per_s": of(|pair| pair.released.faults_per_s()),
            "attached_faults_per_s": of(|pair| pair.attached.faults_per_s()),
            "free_gap_ms": of(|pair| pair.released.gap_ms()),
            "attached_gap_ms": of(|pair| pair.attached.gap_ms()),
            "attached_fault_p50_us": of(|pair| pair.fault_us.p50),
            "attached_fault_p99_us": of(|pair| pair.fault_us.p99),
            "evicted_pages": of(|pair| to_f64(pair.evicted_pages)),
            "daemon_cpu_share": of(|pair| pair.daemon_cpu_share),
            "attached_huge_share": of(|pair| pair.huge_share),
        });
        Self {
            median,
            bounds,
            figures,
        }
    }
}

impl Cell {
    /// Its name in the report.
    pub(super) fn name(&self) -> String {
        let kind = match self.kind {
            Kind::Free => "free",
            Kind::Limited => "limited",
            Kind::Huge => "huge",
            Kind::Hugetlb => "hugetlb",
            Kind::Kvm => "kvm",
            Kind::Stock => "stock",
        };
        match self.work {
            Work::Hot(Hot { hot_eighths, vcpus }) => {
                format!("{kind}_hot_{hot_eighths}_8_vcpus_{vcpus}")
            }
            Work::Load(load) => format!("{kind}_{}", load.name().replace('-', "_")),
        }
    }

    fn limit_bytes(&self, ram_bytes: u64) -> Option<u64> {
        match (self.kind, self.work) {
            (Kind::Free | Kind::Kvm | Kind::Stock, _) | (Kind::Limited, Work::Load(_)) => None,
            (Kind::Hugetlb, Work::Load(_)) => None,
            (Kind::Limited | Kind::Hugetlb, Work::Hot(hot)) => {
                let hot_bytes = ram_bytes / 8 * u64::from(hot.hot_eighths);
                let above = hot_bytes + hot_bytes / 50 * 3 + (4 << 20);
                Some(above.clamp(LIMIT_BYTES_MIN, ram_bytes))
            }
            (Kind::Huge, _) => Some(ram_bytes),
        }
    }

    fn guest_options(&self, hot: Hot, ram_bytes: u64) -> BusyGuestOptions {
        BusyGuestOptions {
            ram_mib: ram_bytes >> 20,
            size: RamSize::Exact,
            vcpus: hot.vcpus,
            first_cpu: 0,
            disk: None,
            batch: BATCH,
            rest_us: 0,
            time_faults: false,
            pattern: Pattern::Part {
                hot_permille: hot.hot_eighths * 125,
            },
            huge_pages: match self.kind {
                Kind::Huge => HugePages::Advised,
                Kind::Hugetlb => HugePages::Hugetlb,
                Kind::Free | Kind::Limited | Kind::Kvm | Kind::Stock => HugePages::NotAdvised,
            },
        }
    }

    /// The RAM, given how much fits.
    pub(super) fn ram_bytes(&self, fitting_bytes: u64) -> u64 {
        match self.kind {
            Kind::Free | Kind::Limited | Kind::Huge => fitting_bytes,
            Kind::Hugetlb => fitting_bytes.min(HUGETLB_BYTES_MAX),
            Kind::Kvm => fitting_bytes.min(kvm::RAM_BYTES_MAX),
            Kind::Stock => stock::RAM_BYTES,
        }
    }

    fn start_guest(
        &self,
        dir: &Path,
        fitting_bytes: u64,
        disk: Option<&Path>,
    ) -> Result<Guest, String> {
        let ram_bytes = self.ram_bytes(fitting_bytes);
        match self.work {
            Work::Load(load) => {
                let options = StockOptions {
                    dir,
                    ram_bytes,
                    disk,
                };
                StockGuest::start(options, load).map(Guest::Stock)
            }
            Work::Hot(hot) if self.kind == Kind::Kvm => {
                KvmGuest::start(dir, ram_bytes, hot.hot_eighths * 125).map(Guest::Kvm)
            }
            Work::Hot(hot) => {
                BusyGuest::start(dir, &self.guest_options(hot, ram_bytes)).map(Guest::StandIn)
            }
        }
    }
}

/// The guest that works and is attached.
enum Guest {
    StandIn(BusyGuest),
    Kvm(KvmGuest),
    Stock(StockGuest),
}

impl Guest {
    fn pid(&self) -> u32 {
        match self {
            Self::StandIn(guest) => guest.pid(),
            Self::Kvm(guest) => guest.pid(),
            Self::Stock(guest) => guest.pid(),
        }
    }

    /// The work of its vCPUs in `time` from now.
    fn count_for(&mut self, time: Duration) -> Result<Counted, String> {
        match self {
            Self::StandIn(guest) => {
                guest.count()?;
                std::thread::sleep(time);
                guest.count()
            }
            Self::Kvm(guest) => {
                guest.count()?;
                std::thread::sleep(time);
                guest.count()
            }
            Self::Stock(guest) => guest.count_for(time),
        }
    }

    fn verify_all(&mut self) -> Result<(), String> {
        match self {
            Self::StandIn(guest) => guest.obey(&Order::VerifyAll).map(|_time| ()),
            Self::Kvm(guest) => guest.verify_all(),
            // Its loads verify what they read, as far as they can.
            Self::Stock(_) => Ok(()),
        }
    }
}

/// Measures `cell`.
pub(crate) fn measure(
    cell: Cell,
    plan: &Plan,
    interrupted: &Interrupted,
) -> Result<Vec<Pair>, String> {
    let mut pairs = Vec::new();
    let mut rig = Rig::start(cell, plan)?;
    for round in silent_rounds(to_usize(plan.pairs), WarmUp::None) {
        interrupted.check()?;
        let sides = [Side::Released, Side::Attached];
        let turns = match cell.kind {
            Kind::Huge if round.number > 0 => {
                rig.bring(Side::Released)?;
                rig = rig.with_new_guest()?;
                sides
            }
            _ => round.turns(sides),
        };
        let mut pair = Pair::default();
        for side in turns {
            rig.bring(side)?;
            match side {
                Side::Released => pair.released = rig.guest.count_for(plan.slice)?,
                Side::Attached => rig.attached_slice(&mut pair)?,
            }
        }
        pairs.push(pair);
    }
    rig.bring(Side::Released)?;
    rig.guest.verify_all()?;
    Ok(pairs)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Released,
    Attached,
}

/// The resources of a cell. Fields are dropped in this order.
struct Rig<'a> {
    daemon: Daemon,
    guest: Guest,
    side: Side,
    cell: Cell,
    plan: &'a Plan,
    dirs: [TempDir; 2],
}

impl<'a> Rig<'a> {
    fn start(cell: Cell, plan: &'a Plan) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let state_dir = in_memory.path().join("daemon");
        let daemon = Daemon::start_for(&state_dir, &flags(&plan.settings), plan.ram_bytes)?;
        let disk = match cell.work {
            Work::Load(load) if load.needs_disk() => Some(serve_disk(&daemon, in_memory.path())?),
            Work::Load(_) | Work::Hot(_) => None,
        };
        let guest = cell.start_guest(on_disk.path(), plan.ram_bytes, disk.as_deref())?;
        let rig = Self {
            daemon,
            guest,
            side: Side::Released,
            cell,
            plan,
            dirs: [in_memory, on_disk],
        };
        std::thread::sleep(SETTLE);
        Ok(rig)
    }

    fn with_new_guest(mut self) -> Result<Self, String> {
        self.guest.verify_all()?;
        // There is memory for only one.
        drop(self.guest);
        let guest = self
            .cell
            .start_guest(self.dirs[1].path(), self.plan.ram_bytes, None)?;
        std::thread::sleep(SETTLE);
        Ok(Self { guest, ..self })
    }

    fn bring(&mut self, side: Side) -> Result<(), String> {
        if self.side == side {
            return Ok(());
        }
        match side {
            Side::Released => {
                self.daemon.detach()?;
            }
            Side::Attached => {
                let ram_bytes = self.cell.ram_bytes(self.plan.ram_bytes);
                let limit = self.cell.limit_bytes(ram_bytes);
                let vm = self.daemon.attach(self.guest.pid(), limit)?;
                if let Some(bar) = vm.eviction_blockers.first() {
                    return Err(format!("nothing of the guest can be evicted: {bar}"));
                }
                if let Some(limit) = limit {
                    self.wait_for(limit)?;
                }
            }
        }
        self.side = side;
        std::thread::sleep(SETTLE);
        Ok(())
    }

    fn wait_for(&self, limit_bytes: u64) -> Result<(), String> {
        let patience = Duration::from_secs(60 + (self.plan.ram_bytes >> 24));
        let begun = Instant::now();
        loop {
            let resident = self.daemon.vm()?.resident_bytes;
            if resident <= limit_bytes {
                return Ok(());
            }
            if begun.elapsed() > patience {
                return Err(self.daemon.with_log(format!(
                    "{resident} of {limit_bytes} bytes are resident {} s after the attach",
                    patience.as_secs()
                )));
            }
            std::thread::sleep(SQUEEZE_LOOK);
        }
    }

    fn attached_slice(&mut self, pair: &mut Pair) -> Result<(), String> {
        let (begun, cpu_ns) = (Instant::now(), self.daemon.cpu_ns()?);
        pair.attached = self.guest.count_for(self.plan.slice)?;
        let spent_ns = self.daemon.cpu_ns()?.saturating_sub(cpu_ns);
        pair.daemon_cpu_share = to_f64(spent_ns) / 1e9 / begun.elapsed().as_secs_f64();
        let ram_bytes = self.cell.ram_bytes(self.plan.ram_bytes);
        pair.huge_share = to_f64(huge_bytes(self.guest.pid())?) / to_f64(ram_bytes);
        let vm = self.daemon.vm()?;
        pair.evicted_pages = vm.evicted_pages;
        pair.fault_us = vm.vcpu_fault_us.into();
        Ok(())
    }
}

/// Has the daemon serve a disk whose image is in memory; its socket.
fn serve_disk(daemon: &Daemon, dir: &Path) -> Result<PathBuf, String> {
    let image = make_image(dir).map_err(|error| error.to_string())?;
    let socket = dir.join("disk.sock");
    let body = json!({"socket": socket, "image": image});
    let _device: Value = daemon.send("/v1/devices", &body)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_lies_just_above_the_hot_part() {
        let limit = |kind, hot_eighths| {
            let cell = Cell {
                kind,
                work: Work::Hot(Hot {
                    hot_eighths,
                    vcpus: 1,
                }),
            };
            cell.limit_bytes(1 << 30)
        };
        let mib = |bytes: Option<u64>| bytes.map(|bytes| bytes >> 20);
        assert_eq!(limit(Kind::Free, 7), None);
        assert_eq!(mib(limit(Kind::Limited, 1)), Some(139));
        assert_eq!(mib(limit(Kind::Limited, 7)), Some(953));
        assert_eq!(limit(Kind::Huge, 1), Some(1 << 30));
    }
}
