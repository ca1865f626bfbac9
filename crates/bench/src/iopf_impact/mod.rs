// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench iopf-impact`: the effect of faults on the throughput and the tail of a disk (VPRI 3.2
//! and 3.3, figures 4 and 6, block half).
//!
//! ```text
//!   client ──rings──► engine ──image in memory──► client      closed loop of random reads
//!                       │ injected: 0, 1, 2 or 10 a second
//!                       └► page request ──► the host's service, which holds it for 1 to 20 ms ──► resumed
//! ```
//! All is in this process: the engine on one CPU, the polling client on another, and the service on any (it
//! sleeps while it holds). Two devices serve the same image, one that *pauses* its queue on a fault (as
//! VPRI does) and one that continues *out of order*.
//!
//! The paper does not give the depth of its queue. Here it is 32, less for large blocks, so that at most 8
//! MiB are in flight: 8 for 1 MiB, 4 for 2 MiB.
//!
//! The grid is 1, 2 and 10 faults a second by 1, 5 and 20 ms at 4 KiB and 2 MiB, and at the other sizes by
//! 5 ms; with `--full` all sizes have all of it. Cells of 5 ms have no time in their names.
//!
//! A round is all sizes, both devices, each without faults and with those of the grid, in slices of one
//! length and in alternating order. Ratios are over the same device's slice of the same round without faults,
//! and the median of the rounds; latencies are of all rounds together. p99.99 is null unless each slice holds
//! [`REQUESTS_OF_P9999`] requests, ten beyond it. The bench ends with the cost of the account of service
//! levels: reads of 4 KiB with and without it, in turn.
//!
//! *Weak points.* The peer is our own engine that pauses its queue, not the paper's device. The image is in
//! memory, so a request takes microseconds and a fault looks larger than beside a disk's own time. Network
//! devices have a bench of their own.

mod load;

use super::harness::{
    figures::{median, median_ratio, rounded},
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, rounds, silent_rounds},
};
use crate::SizeOptions;
use load::{Client, Disk, Slice, depth};
use pagetide_addr::DeviceId;
use pagetide_dpu::{
    Accounting, BlkConfig, DirectIo, Dpu, DpuConfig, OnFault, SocketAccess, Writes,
    inject::Injection,
};
use pagetide_vpri::{DomainTable, Doorbell, FaultAssist, FaultService, LookUp, ServiceThread};
use serde_json::{Map, Value, json};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

const NAME: &str = "iopf-impact";
/// Bytes of the image, all in memory.
const IMAGE_BYTES: u64 = 64 << 20;
/// Modes by their names in the report.
const MODES: [(&str, OnFault); 2] = [
    ("pause", OnFault::Pause),
    ("out_of_order", OnFault::OutOfOrder),
];
/// Faults a second, by their names in the report.
const RATES: [(&str, f64); 3] = [("1_per_s", 1.0), ("2_per_s", 2.0), ("10_per_s", 10.0)];
/// How long the host holds a fault, in milliseconds.
const HOLDS_MS: [u64; 3] = [1, HOLD_MS, 20];
/// The one that all sizes have.
const HOLD_MS: u64 = 5;
/// Sizes that have the whole grid in any case.
const WHOLE_GRID: [u64; 2] = [4 << 10, 2 << 20];
/// Least number of requests in a slice that has a p99.99: ten are beyond it.
const REQUESTS_OF_P9999: u64 = 100_000;
/// Injected faults may go on for so long after the end of a slice; they are stopped there.
const INJECTED_OVER_S: u64 = 60;
/// Longest injection, which no slice exceeds.
const INJECTED_S_MAX: u64 = *pagetide_dpu::inject::SECONDS.end();

/// Which cells of the grid are measured at sizes other than 4 KiB and 2 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Grid {
    /// Those of 5 ms.
    #[default]
    Cross,
    /// All.
    Full,
}

/// Faults of a cell.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Faults {
    name: &'static str,
    per_second: f64,
    hold_ms: u64,
}

impl Faults {
    /// The cells of a size.
    fn of(block: u64, grid: Grid) -> Vec<Self> {
        let whole = grid == Grid::Full || WHOLE_GRID.contains(&block);
        let holds = HOLDS_MS.into_iter().filter(|&ms| whole || ms == HOLD_MS);
        let with = |hold_ms| {
            RATES.map(|(name, per_second)| Self {
                name,
                per_second,
                hold_ms,
            })
        };
        holds.flat_map(with).collect()
    }

    /// Its name in the report.
    fn name(self) -> String {
        match self.hold_ms {
            HOLD_MS => self.name.to_owned(),
            ms => format!("{}_{ms}ms", self.name),
        }
    }
}

/// The extent of a measurement.
#[derive(Debug, Clone)]
pub struct IopfImpactOptions {
    /// Rounds of all.
    pub rounds: usize,
    /// Block sizes.
    pub blocks: Vec<u64>,
    /// Length of each slice.
    pub slice: Duration,
    /// Which cells there are.
    pub grid: Grid,
    /// Pairs of slices with and without the account.
    pub account_pairs: usize,
}

impl Default for IopfImpactOptions {
    /// Some 25 minutes.
    fn default() -> Self {
        Self {
            rounds: 1,
            blocks: [4, 16, 64, 256, 1024, 2048].map(|kib| kib << 10).into(),
            slice: Duration::from_secs(20),
            grid: Grid::Cross,
            account_pairs: 15,
        }
    }
}

impl IopfImpactOptions {
    /// As asked for on the command line.
    #[must_use]
    pub fn of(sizes: &SizeOptions) -> Self {
        let usual = Self::default();
        Self {
            rounds: sizes.pairs(usual.rounds),
            slice: sizes.time(usual.slice.as_secs()),
            grid: if sizes.full { Grid::Full } else { Grid::Cross },
            ..usual
        }
    }
}

/// Engine, devices and service.
struct Rig {
    // Dropped in this order: engines first, so that every request gets its response.
    dpu: Dpu,
    service: Option<ServiceThread>,
    sockets: Vec<(PathBuf, DeviceId)>,
    client_cpu: usize,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn start() -> Result<Self, BenchError> {
        let dir = tempfile::Builder::new()
            .prefix("pagetide-bench-impact-")
            .tempdir_in("/dev/shm")
            .map_err(failed)?;
        let image = dir.path().join("image");
        // Written, since reads of a hole come from one page that is in every cache.
        let written: Vec<u8> = (0_u8..251).cycle().take(1 << 20).collect();
        std::fs::write(
            &image,
            written.repeat(usize::try_from(IMAGE_BYTES >> 20).unwrap_or(1)),
        )
        .map_err(failed)?;
        let cpus = pagetide_sys::cpu::affinity().map_err(failed)?;
        let engine_cpu = cpus.last().copied().unwrap_or(0);
        let client_cpu = cpus.first().copied().unwrap_or(engine_cpu);
        let mut config = DpuConfig::new(dir.path().to_owned());
        config.cpus = vec![engine_cpu];
        let bell = Arc::new(Doorbell::new().map_err(failed)?);
        let domains = Arc::new(DomainTable::new(1));
        let (dpu, hosts) = Dpu::start(&config, domains, &bell).map_err(failed)?;
        let service = FaultService::new(hosts, bell);
        let assist: Arc<dyn FaultAssist> = Arc::clone(&service) as _;
        dpu.set_assist(&assist).map_err(failed)?;
        let service = Some(service.start().map_err(failed)?);
        let mut rig = Self {
            dpu,
            service,
            sockets: Vec::new(),
            client_cpu,
            _dir: dir,
        };
        for (name, on_fault) in MODES {
            rig.add(name, &image, on_fault)?;
        }
        Ok(rig)
    }

    fn add(&mut self, name: &str, image: &Path, on_fault: OnFault) -> Result<(), BenchError> {
        let socket = image.with_file_name(name);
        let id = self.dpu.add_blk(BlkConfig {
            socket: socket.clone(),
            image: image.to_owned(),
            queue_count: 1,
            writes: Writes::Refused,
            look_up: LookUp::On,
            serial: name.to_owned(),
            direct_io: DirectIo::Off,
            on_fault,
            ram: pagetide_dpu::RamPolicy::default(),
            image_use: crate::blk::side::SHARED_IMAGE,
            access: SocketAccess::default(),
        });
        self.sockets.push((socket, id.map_err(failed)?));
        Ok(())
    }

    /// A slice of the load, at a rate of injected faults.
    fn slice(
        &self,
        client: &mut Client<'_>,
        id: DeviceId,
        block_bytes: u64,
        faults: Option<Faults>,
        time: Duration,
    ) -> Result<Slice, BenchError> {
        if let Some(faults) = faults {
            let injection = Injection {
                rate: faults.per_second,
                latency: Duration::from_millis(faults.hold_ms),
                burst: 1,
                seconds: (time.as_secs() + INJECTED_OVER_S).min(INJECTED_S_MAX),
            };
            self.dpu.inject(id, injection).map_err(failed)?;
        }
        let slice = client.run(block_bytes, time).map_err(failed);
        self.dpu.stop_injection(id).map_err(failed)?;
        slice
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.dpu.shut_down();
        if let Some(service) = self.service.take() {
            service.stop();
        }
    }
}

/// All slices of a size, a mode and a rate.
#[derive(Debug, Default)]
struct Cell {
    slices: Vec<Slice>,
}

impl Cell {
    fn whole(&self) -> Slice {
        self.slices.iter().fold(Slice::new(), |mut whole, slice| {
            whole.add(slice);
            whole
        })
    }

    /// True if each slice has requests enough for a p99.99.
    fn has_p9999(&self) -> bool {
        let mut slices = self.slices.iter();
        slices.all(|slice| slice.latency_ns.len() >= REQUESTS_OF_P9999)
    }
}

/// Cells of a size and a mode.
#[derive(Debug, Default)]
struct Row {
    quiet: Cell,
    faulted: Vec<Cell>,
}

impl Row {
    /// Cell 0 is the one without faults.
    fn cell(&mut self, number: usize) -> &mut Cell {
        match number.checked_sub(1) {
            None => &mut self.quiet,
            Some(number) => {
                if self.faulted.len() <= number {
                    self.faulted.resize_with(number + 1, Cell::default);
                }
                &mut self.faulted[number]
            }
        }
    }

    /// Median over the rounds of a figure with faults over the same without.
    fn ratio(&self, faulted: &Cell, figure: impl Fn(&Slice) -> f64) -> f64 {
        median_ratio(&faulted.slices, &self.quiet.slices, figure)
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &IopfImpactOptions) -> Result<BenchReport, BenchError> {
    let rig = Rig::start()?;
    let cpus = pagetide_sys::cpu::affinity().map_err(failed)?;
    pagetide_sys::cpu::set_affinity(&[rig.client_cpu]).map_err(failed)?;
    let measured = measure(&rig, options);
    pagetide_sys::cpu::set_affinity(&cpus).map_err(failed)?;
    let (rows, account) = measured?;
    let mut report = BenchReport::new(NAME);
    for (block, row) in options.blocks.iter().zip(&rows) {
        describe(&mut report, *block, &Faults::of(*block, options.grid), row);
    }
    describe_rest(&mut report, options, &account);
    Ok(report)
}

/// Rows by block size and mode, and ratios of throughput with the account over that without.
type Measured = (Vec<[Row; MODES.len()]>, Vec<f64>);

fn measure(rig: &Rig, options: &IopfImpactOptions) -> Result<Measured, BenchError> {
    let mut disks = Vec::new();
    for (socket, _) in &rig.sockets {
        disks.push(Disk::connect(socket).map_err(failed)?);
    }
    let mut clients = Vec::new();
    for (disk, (_, id)) in disks.iter_mut().zip(&rig.sockets) {
        clients.push((disk.client().map_err(failed)?, *id));
    }
    let mut rows: Vec<[Row; MODES.len()]> = Vec::new();
    rows.resize_with(options.blocks.len(), Default::default);
    for round in rounds(NAME, options.rounds, WarmUp::None) {
        for (block, row) in options.blocks.iter().zip(&mut rows) {
            let faults = Faults::of(*block, options.grid);
            progress(NAME, format_args!("blocks of {}", size_name(*block)));
            for ((client, id), row) in clients.iter_mut().zip(row) {
                for at in round.rotated(faults.len() + 1) {
                    let injected = at.checked_sub(1).map(|at| faults[at]);
                    let slice = rig.slice(client, *id, *block, injected, options.slice)?;
                    row.cell(at).slices.push(slice);
                }
            }
        }
    }
    let account = match clients.last_mut() {
        Some((client, id)) => cost_of_account(rig, client, *id, options)?,
        None => Vec::new(),
    };
    Ok((rows, account))
}

fn cost_of_account(
    rig: &Rig,
    client: &mut Client<'_>,
    id: DeviceId,
    options: &IopfImpactOptions,
) -> Result<Vec<f64>, BenchError> {
    let slice = options.slice.min(Duration::from_millis(100));
    let mut ratios = Vec::new();
    for pair in silent_rounds(options.account_pairs, WarmUp::None) {
        let mut iops = [0.0; 2];
        for turn in 0..4 {
            let on = (turn / 2 + turn + pair.number) % 2;
            let accounting = [Accounting::Off, Accounting::On][on];
            rig.dpu.set_accounting(id, accounting).map_err(failed)?;
            iops[on] += client.run(4096, slice).map_err(failed)?.iops();
        }
        ratios.push(iops[1] / iops[0]);
    }
    rig.dpu.set_accounting(id, Accounting::On).map_err(failed)?;
    Ok(ratios)
}

fn size_name(block: u64) -> String {
    match block >> 20 {
        0 => format!("{}k", block >> 10),
        mib => format!("{mib}m"),
    }
}

fn describe(report: &mut BenchReport, block: u64, faults: &[Faults], row: &[Row; MODES.len()]) {
    let size = size_name(block);
    let mut figures = Map::new();
    figures.insert("depth".into(), depth(block).into());
    for ((mode, _), row) in MODES.iter().zip(row) {
        figures.insert(format!("{mode}_quiet"), cell_figures(&row.quiet, block));
        for (faults, cell) in faults.iter().zip(&row.faulted) {
            let cell_name = format!("{mode}_{}", faults.name());
            let p9999 = row.ratio(cell, |slice| slice.quantile_us(0.9999));
            let has_p9999 = cell.has_p9999() && row.quiet.has_p9999();
            let ratios = [
                ("throughput", Some(row.ratio(cell, Slice::iops))),
                (
                    "p999",
                    Some(row.ratio(cell, |slice| slice.quantile_us(0.999))),
                ),
                ("p9999", has_p9999.then_some(p9999)),
            ];
            for (figure, ratio) in ratios {
                let name = format!("{size}_{cell_name}_{figure}_over_quiet");
                report.ratios.insert(name, ratio.map(rounded).into());
            }
            figures.insert(cell_name, cell_figures(cell, block));
        }
    }
    report.figures.insert(size, figures.into());
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a block is far below 2^53 bytes"
)]
fn cell_figures(cell: &Cell, block: u64) -> Value {
    let whole = cell.whole();
    let p9999_us = cell.has_p9999().then(|| rounded(whole.quantile_us(0.9999)));
    json!({
        "iops": whole.iops().round(),
        "mib_per_s": (whole.iops() * block as f64 / f64::from(1 << 20)).round(),
        "p999_us": rounded(whole.quantile_us(0.999)),
        "p9999_us": p9999_us,
        "requests": whole.latency_ns.len(),
    })
}

fn describe_rest(report: &mut BenchReport, options: &IopfImpactOptions, account: &[f64]) {
    let figures = &mut report.figures;
    figures.insert("hold_us".into(), json!(HOLD_MS * 1000));
    figures.insert("slice_s".into(), json!(options.slice.as_secs_f64()));
    figures.insert("rounds".into(), options.rounds.into());
    figures.insert("account_pairs".into(), account.len().into());
    let on_over_off = median(account.iter().copied());
    report.ratios.insert(
        "account_on_over_off_iops".into(),
        rounded(on_over_off).into(),
    );
    let peers = &mut report.peers;
    for (name, said) in [
        (
            "paper_p999_over_quiet_10_per_s",
            "2 to 11 times, at all block sizes (pause; figure 6)",
        ),
        (
            "paper_p999_over_quiet_1_per_s",
            "to be seen at 2 MiB only (pause; figure 6)",
        ),
        (
            "paper_p9999_over_quiet",
            "to be seen at all block sizes and both rates (pause; figure 6)",
        ),
        (
            "paper_throughput",
            "falls linearly with the rate and the latency of faults (pause; 3.2, figure 4)",
        ),
    ] {
        peers.insert(name.into(), said.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grid_is_whole_at_the_smallest_and_the_largest_size_and_everywhere_if_asked_for() {
        let names = |block, grid| -> Vec<String> {
            Faults::of(block, grid)
                .into_iter()
                .map(Faults::name)
                .collect()
        };
        assert_eq!(
            names(64 << 10, Grid::Cross),
            ["1_per_s", "2_per_s", "10_per_s"]
        );
        let whole = names(4 << 10, Grid::Cross);
        assert_eq!(whole.len(), 9);
        assert!(whole.contains(&"10_per_s_20ms".to_owned()));
        assert_eq!(names(64 << 10, Grid::Full), whole);
        assert_eq!(names(2 << 20, Grid::Cross), whole);
    }

    #[test]
    fn report_of_a_tiny_run_has_every_cell_its_ratios_and_the_paper_beside() {
        let report = run(&IopfImpactOptions {
            rounds: 1,
            blocks: vec![4096, 2 << 20],
            slice: Duration::from_millis(30),
            grid: Grid::Cross,
            account_pairs: 1,
        })
        .unwrap();
        for size in ["4k", "2m"] {
            for mode in ["pause", "out_of_order"] {
                for rate in [
                    "quiet",
                    "1_per_s",
                    "10_per_s",
                    "2_per_s_1ms",
                    "10_per_s_20ms",
                ] {
                    let cell = &report.figures[size][format!("{mode}_{rate}")];
                    assert!(cell["requests"].as_u64() > Some(0), "{size} {mode} {rate}");
                    // Far from enough requests.
                    assert!(cell["p999_us"].is_number() && cell["p9999_us"].is_null());
                }
                let ratio = format!("{size}_{mode}_10_per_s_p999_over_quiet");
                assert!(report.ratios[&ratio].is_number(), "{ratio}");
                let ratio = format!("{size}_{mode}_1_per_s_20ms_p9999_over_quiet");
                assert!(report.ratios[&ratio].is_null(), "{ratio}");
            }
        }
        assert_eq!(report.figures["2m"]["depth"], 4);
        assert!(report.ratios["account_on_over_off_iops"].is_number());
        assert!(report.peers.keys().all(|name| name.starts_with("paper_")));
    }
}
