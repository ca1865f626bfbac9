// SPDX-License-Identifier: Apache-2.0
//! `bench fault`: how long it takes to get an evicted page back.
//!
//! One guest (a stand-in, see [`guest`]) is measured in rounds. Each round runs all of these phases in
//! turn, on the same pages with the same content:
//!
//! | phase | fetches each page in random order | served by |
//! |---|---|---|
//! | zram | its vCPU | the kernel: swap on zram, lz4, page-cluster 0 |
//! | cpu | its vCPU | `pagetide run --neighbours 0`: fault reader, lz4 tier, each page by its own fault |
//! | random | its vCPU | `pagetide run`: the same, with readahead |
//! | device | a virtio queue, a 4 KiB read into the page | `pagetide run`: software DPU, I/O page fault |
//! | device, present | the same on present pages that no device has used since the fill | the same without a fault |
//! | device, again | the same once more | the same, without a first DMA |
//! | sequential | its vCPU, in order | both; `pagetide run` with and without readahead |
//! | zipf | its vCPU, few pages most often | both |
//!
//! `retouch_…_over_zram` compares the total times until the vCPU has all of its evicted working set again,
//! including touches of pages already filled.
//!
//! Eviction uses the commands of a user (`vm reclaim`; `MADV_PAGEOUT` for the peer), and a phase begins
//! only when all pages are absent. The daemon is attached only for its own phases: swap and Pagetide
//! exclude each other.
//!
//! `device_us` is a percentile of the faulting requests, less the *median* of those to present pages that
//! the device has used before. So a fault includes the mapping of the page in the device's process at its
//! first DMA; the ratios `device_over_zram_first_dma_…` exclude that. `cpu_us` and `zram_us` are total
//! times, as a vCPU sees them, and `uffd_round_trip_us` is the floor of `cpu_us` here: a fault answered at
//! once with a constant page. The vCPU stays on one CPU, as vCPUs mostly do, and the engine on another
//! (where there are two), as a DPU's do; the product chooses where the fault reader runs.
//!
//! The device's image is one hole: the cost of storage is the same with and without a fault, but its
//! variance would hide the fault's.

pub mod content;
pub(super) mod floor;
pub mod guest;
pub(super) mod process;
pub(super) mod touch;

use self::{
    content::{Content, Kind},
    guest::{Direction, Order},
    process::{Guest, add_blk, evict_all, remove_blk},
    touch::{Part, Pattern},
};
use super::{
    daemon::{Daemon, directory_in},
    harness::{
        figures::{rounded, to_f64},
        latencies::LatenciesByRound,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{Round, WarmUp, rounds},
    },
    interrupt::Interrupted,
    kernel_swap::{Compressor, KernelSwap},
};
use pagetide_addr::{PAGE_BYTES, to_usize};
use serde_json::{Map, json};
use std::path::{Path, PathBuf};

const NAME: &str = "fault";

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultBenchOptions {
    /// Rounds of all phases.
    pub rounds: u64,
    /// Pages of the guest; each phase fetches each once. At least 4,096, as a VM's RAM has.
    pub pages: u64,
}

impl FaultBenchOptions {
    /// With this many rounds, or as many as give meaningful figures.
    #[must_use]
    pub fn of_rounds(rounds: Option<u64>) -> Self {
        let default = Self::default();
        Self {
            rounds: rounds.unwrap_or(default.rounds),
            ..default
        }
    }
}

impl Default for FaultBenchOptions {
    /// 49,152 faults of each kind.
    fn default() -> Self {
        Self {
            rounds: 6,
            pages: 8192,
        }
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &FaultBenchOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let mut bench = Bench::prepare(*options).map_err(unable)?;
    for round in rounds(NAME, to_usize(options.rounds), WarmUp::None) {
        bench.round(round, &interrupted).map_err(failed)?;
    }
    bench.verify().map_err(failed)?;
    Ok(bench.report())
}

/// All latencies.
#[derive(Default)]
struct Measured {
    cpu: LatenciesByRound,
    random: LatenciesByRound,
    device: LatenciesByRound,
    device_present: LatenciesByRound,
    device_again: LatenciesByRound,
    zram: LatenciesByRound,
    copy: LatenciesByRound,
    round_trip: LatenciesByRound,
    sequential: LatenciesByRound,
    sequential_alone: LatenciesByRound,
    faults: u64,
    reader_cpu_us: f64,
    daemon_cpu_ns: u64,
    zram_sequential: LatenciesByRound,
    zipf: LatenciesByRound,
    zram_zipf: LatenciesByRound,
    device_faults: u64,
    device_cpu_ns: u64,
    sequential_faults: u64,
    zram_left_pages: u64,
}

/// The resources of a run. Fields are dropped in this order: nothing is removed while it is in use.
struct Bench {
    daemon: Daemon,
    daemon_alone: Daemon,
    guest: Guest,
    zram: Result<KernelSwap, String>,
    socket: PathBuf,
    image: PathBuf,
    cpu: usize,
    engine_cpu: usize,
    lz4_ratio: f64,
    options: FaultBenchOptions,
    measured: Measured,
    _dirs: [tempfile::TempDir; 2],
}

/// One phase, given a seed.
type Phase = fn(&mut Bench, u64) -> Result<(), String>;

impl Bench {
    fn prepare(options: FaultBenchOptions) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let content = Content::of_this_program()?;
        let image = on_disk.path().join("image");
        std::fs::File::create(&image)
            .and_then(|file| file.set_len(options.pages * PAGE_BYTES))
            .map_err(|error| format!("{}: {error}", image.display()))?;
        let cpus = pagetide_sys::cpu::affinity().map_err(|error| error.to_string())?;
        let cpu = cpus.last().copied().unwrap_or(0);
        let engine_cpu = cpus.first().copied().unwrap_or(0);
        let engine_cpus = engine_cpu.to_string();
        let settings = ["--engine-cpus", &engine_cpus];
        let alone = [&settings[..], &["--neighbours", "0"]].concat();
        let dir = |name| in_memory.path().join(name);
        Ok(Self {
            daemon: Daemon::start(&dir("daemon"), &settings)?,
            daemon_alone: Daemon::start(&dir("alone"), &alone)?,
            guest: Guest::start(on_disk.path(), Kind::Program, options.pages, cpu)?,
            zram: KernelSwap::on_zram(2 * options.pages * PAGE_BYTES, Compressor::Lz4),
            socket: dir("blk.sock"),
            image,
            cpu,
            engine_cpu,
            lz4_ratio: content.lz4_ratio(),
            options,
            measured: Measured::default(),
            _dirs: [in_memory, on_disk],
        })
    }

    fn round(&mut self, round: Round, interrupted: &Interrupted) -> Result<(), String> {
        let seed = round.seed() * 10;
        let phases: [Phase; 4] = [
            Self::zram_phase,
            Self::product_phases,
            Self::alone_phase,
            Self::floor_phase,
        ];
        for phase in phases {
            interrupted.check()?;
            phase(self, seed)?;
        }
        Ok(())
    }

    fn zram_phase(&mut self, seed: u64) -> Result<(), String> {
        if let Some(took) = self.touch_on_zram(Pattern::Random, seed)? {
            self.measured.zram.add(took);
        }
        if let Some(took) = self.touch_on_zram(Pattern::Sequential, seed)? {
            self.measured.zram_sequential.add(took);
        }
        if let Some(took) = self.touch_on_zram(Pattern::Zipf, seed)? {
            self.measured.zram_zipf.add(took);
        }
        Ok(())
    }

    fn touch_on_zram(&mut self, pattern: Pattern, seed: u64) -> Result<Option<Vec<u32>>, String> {
        let pages = self.options.pages;
        let Ok(zram) = &mut self.zram else {
            return Ok(None);
        };
        let order = Order::touch_all(pattern, seed);
        let (took, left) = zram.paged_out(&mut self.guest, pages, |guest, out| {
            Ok((guest.time(&order)?, out.left_pages))
        })?;
        self.measured.zram_left_pages += left;
        Ok(Some(took))
    }

    fn product_phases(&mut self, seed: u64) -> Result<(), String> {
        self.daemon.attach(self.guest.pid(), None)?;
        evict_all(&self.daemon, self.options.pages)?;
        let took = self.touch(Pattern::Random, seed)?;
        self.measured.random.add(took);
        self.device_phase(seed)?;
        let before = evict_all(&self.daemon, self.options.pages)?;
        let took = self.touch(Pattern::Sequential, seed)?;
        self.measured.sequential.add(took);
        self.measured.sequential_faults += self.daemon.vm()?.vcpu_faults - before.vcpu_faults;
        evict_all(&self.daemon, self.options.pages)?;
        let took = self.touch(Pattern::Zipf, seed)?;
        self.measured.zipf.add(took);
        self.daemon.detach().map(|_| ())
    }

    /// On the daemon without readahead: with it, a sample would often be of a page filled already.
    fn cpu_phase(&mut self, seed: u64) -> Result<(), String> {
        let before = evict_all(&self.daemon_alone, self.options.pages)?;
        let cpu_ns = self.daemon_alone.cpu_ns()?;
        let took = self.touch(Pattern::Random, seed + 1)?;
        let measured = &mut self.measured;
        measured.daemon_cpu_ns += self.daemon_alone.cpu_ns()? - cpu_ns;
        measured.cpu.add(took);
        let after = self.daemon_alone.vm()?;
        measured.faults += after.vcpu_faults - before.vcpu_faults;
        measured.reader_cpu_us += (after.reader_cpu_seconds - before.reader_cpu_seconds) * 1e6;
        Ok(())
    }

    /// Begins with all pages present and untouched by a device since the fill: a faulting request is the
    /// first to its page, too.
    fn device_phase(&mut self, seed: u64) -> Result<(), String> {
        add_blk(&self.daemon, &self.socket, &self.image)?;
        let mut present = self.read_by_device(&[seed + 2, seed + 3])?;
        let again = present.split_off(present.len() / 2);
        self.guest.have_done(&Order::Fill)?;
        let before = evict_all(&self.daemon, self.options.pages)?;
        let cpu_ns = self.daemon.cpu_ns()?;
        let absent = self.read_by_device(&[seed + 4])?;
        let measured = &mut self.measured;
        measured.device_cpu_ns += self.daemon.cpu_ns()? - cpu_ns;
        measured.device_faults += self.daemon.vm()?.iopfs - before.iopfs;
        measured.device.add(absent);
        measured.device_present.add(present);
        measured.device_again.add(again);
        remove_blk(&self.daemon, &self.socket)?;
        self.guest.have_done(&Order::Fill)
    }

    fn touch(&mut self, pattern: Pattern, seed: u64) -> Result<Vec<u32>, String> {
        self.guest.time(&Order::touch_all(pattern, seed))
    }

    fn read_by_device(&mut self, seeds: &[u64]) -> Result<Vec<u32>, String> {
        self.guest.time(&Order::ByDevice {
            direction: Direction::IntoMemory,
            part: Part::All,
            socket: self.socket.clone(),
            seeds: seeds.to_vec(),
        })
    }

    fn alone_phase(&mut self, seed: u64) -> Result<(), String> {
        self.daemon_alone.attach(self.guest.pid(), None)?;
        self.cpu_phase(seed)?;
        evict_all(&self.daemon_alone, self.options.pages)?;
        let took = self.touch(Pattern::Sequential, 0)?;
        self.measured.sequential_alone.add(took);
        self.daemon_alone.detach().map(|_| ())
    }

    fn floor_phase(&mut self, _seed: u64) -> Result<(), String> {
        let (copies, round_trips) = floor::measure(self.options.pages, self.cpu)?;
        self.measured.copy.add(copies);
        self.measured.round_trip.add(round_trips);
        Ok(())
    }

    fn verify(&mut self) -> Result<(), String> {
        self.guest.have_done(&Order::Verify)
    }

    fn report(&self) -> BenchReport {
        let mut report = BenchReport::new(NAME);
        let measured = &self.measured;
        self.report_figures(&mut report.figures);
        match &self.zram {
            Ok(_) => {
                let peers = &mut report.peers;
                peers.insert("zram_us".into(), measured.zram.report(0.0));
                peers.insert(
                    "zram_p90_us_by_round".into(),
                    json!(measured.zram.us_by_round(900)),
                );
                peers.insert("zram_left_pages".into(), measured.zram_left_pages.into());
                self.report_ratios(&mut report.ratios);
            }
            Err(reason) => {
                report.peers.insert("zram_us".into(), json!(reason));
            }
        }
        report
    }

    fn report_figures(&self, figures: &mut Map<String, serde_json::Value>) {
        let measured = &self.measured;
        let again_us = measured.device_again.us(500);
        let mean = |samples: &LatenciesByRound| rounded(samples.mean_us());
        let each = |total: f64, count: u64| rounded(total / to_f64(count.max(1)));
        let values = [
            ("cpu_us", measured.cpu.report(0.0)),
            ("cpu_p90_us_by_round", json!(measured.cpu.us_by_round(900))),
            ("cpu_faults", measured.faults.into()),
            (
                "reader_cpu_us_per_fault",
                each(measured.reader_cpu_us, measured.faults).into(),
            ),
            (
                "service_cpu_us_per_fault",
                rounded(to_f64(measured.daemon_cpu_ns) / to_f64(measured.faults) / 1e3).into(),
            ),
            ("device_us", measured.device.report(again_us)),
            ("device_whole_us", measured.device.report(0.0)),
            ("device_present_us", measured.device_present.report(0.0)),
            ("device_again_us", measured.device_again.report(0.0)),
            ("device_faults", measured.device_faults.into()),
            (
                "service_cpu_us_per_device_fault",
                rounded(to_f64(measured.device_cpu_ns) / to_f64(measured.device_faults) / 1e3)
                    .into(),
            ),
            (
                "sequential_us_per_page",
                json!({
                    "with_neighbours": mean(&measured.sequential),
                    "without": mean(&measured.sequential_alone),
                }),
            ),
            (
                "sequential_faults_with_neighbours",
                measured.sequential_faults.into(),
            ),
            ("uffdio_copy_us", measured.copy.report(0.0)),
            ("uffd_round_trip_us", measured.round_trip.report(0.0)),
            ("lz4_ratio", rounded(self.lz4_ratio).into()),
            ("vcpu_cpu", self.cpu.into()),
            ("engine_cpu", self.engine_cpu.into()),
        ];
        for (name, value) in values {
            figures.insert(name.into(), value);
        }
    }

    fn report_ratios(&self, ratios: &mut Map<String, serde_json::Value>) {
        let measured = &self.measured;
        let present_us = measured.device_present.us(500);
        let again_us = measured.device_again.us(500);
        for (name, permille) in [("p50", 500), ("p90", 900), ("p99", 990)] {
            let zram_us = measured.zram.us(permille);
            let device = (measured.device.us(permille) - again_us) / zram_us;
            ratios.insert(format!("device_over_zram_{name}"), rounded(device).into());
            let first_dma = (measured.device.us(permille) - present_us) / zram_us;
            ratios.insert(
                format!("device_over_zram_first_dma_{name}"),
                rounded(first_dma).into(),
            );
            let floor = measured.round_trip.us(permille) / zram_us;
            ratios.insert(
                format!("uffd_round_trip_over_zram_{name}"),
                rounded(floor).into(),
            );
            let cpu = measured.cpu.us(permille) / zram_us;
            ratios.insert(format!("cpu_over_zram_{name}"), rounded(cpu).into());
        }
        for (name, ours, zram) in [
            (
                "sequential",
                &measured.sequential,
                &measured.zram_sequential,
            ),
            ("zipf", &measured.zipf, &measured.zram_zipf),
            ("random", &measured.random, &measured.zram),
        ] {
            let ratio = rounded(ours.whole_over(zram));
            ratios.insert(format!("retouch_{name}_over_zram"), ratio.into());
        }
    }
}
