// SPDX-License-Identifier: Apache-2.0
//! Options of benches: how much is measured, for those whose full size takes hours or a large machine.

use super::memory::RAM_BYTES_MIN;
use crate::name::BenchName;
use clap::{Args, ValueEnum};
use pagetide_report::size::ByteSize;
use std::{path::PathBuf, str::FromStr, time::Duration};

/// Longest slice or search: an hour.
const SECONDS_MAX: u64 = 3600;
/// More alternations than anybody waits for.
const ROUNDS_MAX: u64 = 10_000;
/// A day of them.
const KILLS_MAX: u64 = 100_000;
/// Ten years.
const DAYS_MAX: u64 = 3650;
/// VMs that one budget may have.
const BUDGET_VMS_MAX: usize = pagetide_policy::budget::VMS_MAX;
/// VMs of a fleet: what remains of one takes some hundred bytes.
const VMS_MAX: i64 = 1_000_000;

/// How large and how long. Each option names the benches that take it; others refuse it.
#[derive(Args, Clone, PartialEq, Eq, Default, Debug)]
pub struct SizeOptions {
    /// RAM of the stand-ins, such as 1G,4G,16G (real-size) or 2G (crash, guest-cost, tracker, pool, upgrade), of each
    /// VM (burst, overcommit, schedule)
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',')]
    pub ram: Vec<ByteSize>,
    /// Alternations of each cell (burst: 3, guest-cost: 30, overhead: 20, schedule: 6), rounds (overcommit: 4,
    /// real-size: 3, fault: 6, fault-parallel: 8, remote: 4, swap: 6, iopf-impact: 1, net-pps: 9, single-fault: 20,
    /// neighbour: 10, cold-ring: 3, rnpf-rate: 6, pinning: 6, nic-impact: 3, net-guest: 4, memory-move: 2, adp-live:
    /// 8, head-of-line: 5, of isolation iopf-scale: 5)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ROUNDS_MAX))]
    pub pairs: Option<u64>,
    /// Length of a slice (burst: 10 after the burst, guest-cost, overhead: 5, overcommit: 8, schedule: 6, iopf-scale:
    /// 30, iopf-impact: 20, adp-live: 90, rnpf-rate: 2, nic-impact: 10, net-guest: 5, memory-move: 20,
    /// head-of-line: 4), longest search for cold pages (tracker: 300)
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub seconds: Option<u64>,
    /// Only cells or loads whose names contain this (guest-cost, overhead, tracker; overcommit: four-vms, two-vms,
    /// four-guests; swap: zero, same, lz4, paper, zstd, disk, remote, paper_in_tiers, retouch, swap-out, programs;
    /// upgrade: stand-ins, network-guest, real-guests; crash: daemon, dpu, guest; net-pps: transmit, receive, loop, _64, _1518;
    /// cold-ring: drop, pause, backup_ring, out_of_order, _16, _64, _256, _1024, guest; memory-move: table-5, fig-7;
    /// nic-impact: redis, memcached, udp, drop, out_of_order)
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Setting of the daemon, as in its file; may be given again
    #[arg(long = "setting", value_name = "NAME=VALUE")]
    pub settings: Vec<GivenSetting>,
    /// Seconds with demands that change, after the bursts (burst: 300; Taiji's Fig 15 has 3600)
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub online: Option<u64>,
    /// Days of virtual time (budget: 100)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=DAYS_MAX))]
    pub days: Option<u64>,
    /// VMs at a time (budget: 50), or VMs (iopf-daily: 5000)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=VMS_MAX))]
    pub vms: Option<u32>,
    /// Seeds, from 1 on (budget: 2, adp: 5, iopf-daily: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ROUNDS_MAX))]
    pub seeds: Option<u64>,
    /// Upgrades of each part, and at most so many of the twenty broken ones (upgrade: 100)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ROUNDS_MAX))]
    pub upgrades: Option<u64>,
    /// Processes to kill (crash: 1000)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=KILLS_MAX))]
    pub kills: Option<u64>,
    /// Seed of what is killed when (crash: 1)
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Draw pictures of what happened as SVG files in this directory (burst, adp, iopf-daily)
    #[arg(long, value_name = "DIR")]
    pub plots: Option<PathBuf>,
    /// The whole grid at all sizes (iopf-impact)
    #[arg(long)]
    pub full: bool,
    /// The authors' simulator, a build of HyperSIO's `hypersio-perf`, as a peer (sim)
    #[arg(long, value_name = "PROGRAM")]
    pub hypersio: Option<PathBuf>,
    /// A recorded log, such as `pagetide trace collect` makes, whose invalidations are to be measured (sim)
    #[arg(long, value_name = "LOG")]
    pub recorded: Option<PathBuf>,
    /// What of the guest does DMA (adp-live)
    #[arg(long, value_enum)]
    pub device: Option<LiveDevice>,
    /// Seconds of a turn before it is measured (adp-live: 60)
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub settle: Option<u64>,
    /// Setting of the peer's daemon, whose refaults are compared (tracker); may be given again
    #[arg(long = "peer-setting", value_name = "NAME=VALUE")]
    pub peer_settings: Vec<GivenSetting>,
}

/// What of a guest does DMA.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum)]
pub enum LiveDevice {
    /// Its disk.
    #[default]
    Blk,
    /// Its network interface.
    Net,
}

impl LiveDevice {
    /// As it is written.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Blk => "blk",
            Self::Net => "net",
        }
    }
}

/// A setting for a daemon that a bench starts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GivenSetting {
    name: String,
    value: String,
}

impl FromStr for GivenSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() && !name.starts_with('-') => Ok(Self {
                name: name.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err(format!("'{text}' is not NAME=VALUE")),
        }
    }
}

/// The settings as flags of `pagetide run`.
pub(super) fn flags(settings: &[GivenSetting]) -> Vec<String> {
    let flag = |setting: &GivenSetting| format!("--{}={}", setting.name, setting.value);
    settings.iter().map(flag).collect()
}

impl SizeOptions {
    /// Fails with a sentence if the bench `name` has no use for one that was given.
    ///
    /// # Errors
    /// The sentence.
    pub fn check(&self, name: BenchName) -> Result<(), String> {
        let given = [
            ("--ram", !self.ram.is_empty()),
            ("--setting", !self.settings.is_empty()),
            ("--pairs", self.pairs.is_some()),
            ("--upgrades", self.upgrades.is_some()),
            ("--kills", self.kills.is_some()),
            ("--seed", self.seed.is_some()),
            ("--seconds", self.seconds.is_some()),
            ("--online", self.online.is_some()),
            ("--days", self.days.is_some()),
            ("--vms", self.vms.is_some()),
            ("--seeds", self.seeds.is_some()),
            ("--plots", self.plots.is_some()),
            ("--only", self.only.is_some()),
            ("--full", self.full),
            ("--hypersio", self.hypersio.is_some()),
            ("--recorded", self.recorded.is_some()),
            ("--peer-setting", !self.peer_settings.is_empty()),
            ("--device", self.device.is_some()),
            ("--settle", self.settle.is_some()),
        ];
        for (flag, is_given) in given {
            if is_given && !has_use_for(name, flag) {
                return Err(format!("bench {name} has no {flag}"));
            }
        }
        let too_many = |vms| usize::try_from(vms).is_ok_and(|vms: usize| vms > BUDGET_VMS_MAX);
        if let Some(vms) = self
            .vms
            .filter(|vms| name == BenchName::Budget && too_many(*vms))
        {
            return Err(format!(
                "a budget has at most {BUDGET_VMS_MAX} VMs, and not {vms}"
            ));
        }
        if !is_sized(name) || name == BenchName::RealSize || self.ram.len() < 2 {
            let least = ByteSize(RAM_BYTES_MIN);
            return match self.ram.iter().find(|ram| ram.0 < RAM_BYTES_MIN) {
                Some(ram) => Err(format!(
                    "{ram} is less than {least}, of which half is the least limit of a VM"
                )),
                None => Ok(()),
            };
        }
        Err(format!("bench {name} takes one size of RAM"))
    }

    /// The one size of RAM, or `default_bytes`.
    pub(super) fn ram_bytes(&self, default_bytes: u64) -> u64 {
        self.ram.first().map_or(default_bytes, |ram| ram.0)
    }

    /// The time given, or so many seconds.
    pub(super) fn time(&self, default_seconds: u64) -> Duration {
        Duration::from_secs(self.seconds.unwrap_or(default_seconds))
    }

    /// The alternations given, or so many.
    pub(super) fn pairs(&self, default_pairs: usize) -> usize {
        let given = self.pairs.and_then(|pairs| usize::try_from(pairs).ok());
        given.unwrap_or(default_pairs)
    }

    /// True if the cell `name` is to be measured.
    pub(super) fn includes(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|text| name.contains(text))
    }
}

/// Benches of VMs whose RAM is a matter of choice, and that measure without alternations.
fn is_plain(name: BenchName) -> bool {
    use BenchName::{Crash, Pool, Tracker, Upgrade};
    matches!(name, Tracker | Pool | Upgrade | Crash)
}

/// All whose VMs' RAM is a matter of choice.
fn is_sized(name: BenchName) -> bool {
    use BenchName::{Burst, GuestCost, Overcommit, RealSize, Schedule};
    is_plain(name) || matches!(name, GuestCost | Overcommit | Schedule | Burst | RealSize)
}

/// Benches of network devices.
fn is_of_networks(name: BenchName) -> bool {
    use BenchName::{
        ColdRing, MemoryMove, Neighbour, NetGuest, NetPps, NicImpact, Pinning, RnpfRate,
        SingleFault,
    };
    matches!(
        name,
        NetPps
            | ColdRing
            | SingleFault
            | Neighbour
            | RnpfRate
            | Pinning
            | NicImpact
            | NetGuest
            | MemoryMove
    )
}

/// True if bench `name` has use for an option.
fn has_use_for(name: BenchName, flag: &str) -> bool {
    use BenchName::{
        Adp, AdpLive, Budget, Burst, ColdRing, Crash, Fault, FaultParallel, GuestCost, HeadOfLine,
        IopfDaily, IopfImpact, IopfScale, MemoryMove, NetGuest, NetPps, NicImpact, Overcommit,
        Overhead, Remote, RnpfRate, Schedule, Sim, Swap, Tracker, Upgrade,
    };
    match flag {
        "--ram" => is_sized(name) || name == Swap,
        "--setting" => is_sized(name) && name != Upgrade || name == Overhead,
        "--pairs" => {
            let faults = matches!(
                name,
                Fault | FaultParallel | Remote | HeadOfLine | IopfImpact | IopfScale
            );
            let is_alternated = is_sized(name) && !is_plain(name) || is_of_networks(name);
            faults || is_alternated || matches!(name, Overhead | Swap | AdpLive)
        }
        "--upgrades" => name == Upgrade,
        "--kills" | "--seed" => name == Crash,
        "--seconds" => matches!(
            name,
            Tracker
                | GuestCost
                | Overhead
                | Overcommit
                | Schedule
                | Burst
                | HeadOfLine
                | IopfImpact
                | IopfScale
                | AdpLive
                | RnpfRate
                | NicImpact
                | NetGuest
                | MemoryMove
        ),
        "--online" => name == Burst,
        "--days" => name == Budget,
        "--vms" => matches!(name, Budget | IopfDaily),
        "--seeds" => matches!(name, Budget | Adp | IopfDaily),
        "--plots" => matches!(name, Burst | Adp | IopfDaily),
        "--only" => matches!(
            name,
            Tracker
                | GuestCost
                | Overhead
                | Overcommit
                | Swap
                | Upgrade
                | Crash
                | NetPps
                | ColdRing
                | NicImpact
                | MemoryMove
        ),
        "--device" | "--settle" => name == AdpLive,
        "--full" => name == IopfImpact,
        "--hypersio" | "--recorded" => name == Sim,
        "--peer-setting" => name == Tracker,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_a_bench_has_not_are_refused() {
        let options = SizeOptions {
            pairs: Some(3),
            ..SizeOptions::default()
        };
        assert_eq!(options.check(BenchName::GuestCost), Ok(()));
        assert_eq!(options.check(BenchName::RealSize), Ok(()));
        let error = options.check(BenchName::Tracker).unwrap_err();
        assert_eq!(error, "bench tracker has no --pairs");
        assert_eq!(options.check(BenchName::Fault), Ok(()));
        options.check(BenchName::Blk).unwrap_err();
        options.check(BenchName::Pool).unwrap_err();
        let none = SizeOptions::default();
        assert_eq!(none.check(BenchName::Fault), Ok(()));
    }

    #[test]
    fn sizes_are_for_one_bench_many_and_for_none_too_small() {
        let of = |sizes: &[u64]| SizeOptions {
            ram: sizes.iter().map(|mib| ByteSize(mib << 20)).collect(),
            ..SizeOptions::default()
        };
        assert_eq!(of(&[64, 128]).check(BenchName::RealSize), Ok(()));
        of(&[64, 128]).check(BenchName::Tracker).unwrap_err();
        of(&[64, 16]).check(BenchName::RealSize).unwrap_err();
        assert_eq!(of(&[64]).ram_bytes(1), 64 << 20);
    }

    #[test]
    fn settings_are_flags_of_the_daemon() {
        let settings = ["a-b=c=d", "e="].map(|text| text.parse().unwrap());
        assert_eq!(flags(&settings), ["--a-b=c=d", "--e="]);
        for wrong in ["", "a", "=b", "--a=b"] {
            wrong.parse::<GivenSetting>().unwrap_err();
        }
    }
}
