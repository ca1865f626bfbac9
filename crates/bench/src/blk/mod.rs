// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench blk`: 4 KiB I/O of our vhost-user-blk beside `qemu-storage-daemon`'s.
//!
//! Both back ends serve the same image, directly (O_DIRECT) and through io_uring, each in its own process
//! on the same CPU; the same front end (the crate virtio-driver, which sleeps on the call descriptor like a
//! guest that is interrupted) drives one of them at a time from another CPU. They take turns, several
//! within each pair and each first as often as the other, so that drift and disturbances affect both.
//!
//! ```text
//!   cell = (read | write) × (1 | 32 deep);  pair = slices of ours and of theirs: O T T O O T T O
//!   ratio of a pair = our IOPS / their IOPS;  of a cell = geometric mean over its pairs
//! ```
//! CPU time is the back end process' own, all threads, by `schedstat`. Our engine measures the time of page
//! look-ups in one request of 61. Its share of the CPU time is reported over all requests of the run, and
//! for the cell with the largest share.

pub mod backend;
pub mod frontend;
pub mod process;
pub mod side;

use super::harness::{
    figures::{mean, to_f64},
    ratios::{PairedRatios, overall},
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, silent_rounds},
};
use frontend::{Buffers, Direction, Run};
use process::SideCpus;
use serde_json::{Value, json};
use side::{Sample, Side, Slice, make_image};
use std::time::Duration;

const NAME: &str = "blk";
/// Pairs of runs in each cell.
const PAIRS: usize = 21;
/// Slices of each side in a pair; even, so that each side is first as often as the other.
const SLICES: u32 = 4;
/// Length of a slice.
const SLICE_TIME: Duration = Duration::from_millis(100);
/// Cells.
const CELLS: [(Direction, u16); 4] = [
    (Direction::Read, 1),
    (Direction::Read, 32),
    (Direction::Write, 1),
    (Direction::Write, 32),
];

/// All pairs of a cell.
#[derive(Debug)]
struct Cell {
    name: String,
    ours: Vec<Sample>,
    theirs: Vec<Sample>,
    lookup_ns: f64,
}

impl Cell {
    fn lookup_share(&self) -> f64 {
        self.lookup_ns / mean(self.ours.iter().map(|s| s.cpu_ns_per_io))
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run() -> Result<BenchReport, BenchError> {
    let dir = tempfile::Builder::new()
        .prefix("pagetide-bench-blk-")
        .tempdir()
        .map_err(failed)?;
    let image = make_image(dir.path())?;
    let placement = SideCpus::choose();
    progress(
        NAME,
        format_args!(
            "back ends on CPU {}, front end on CPU {}",
            placement.backend, placement.frontend
        ),
    );
    let mut report = BenchReport::new(NAME);
    let mut ours = Side::start_ours(dir.path(), &image, &[], placement).map_err(failed)?;
    let theirs = Side::start_peer(dir.path(), &image, placement);
    let mut theirs = match theirs {
        Ok(side) => Some(side),
        Err(error) => {
            report.peers.insert("qsd".into(), error.to_string().into());
            progress(NAME, format_args!("no peer: {error}"));
            None
        }
    };
    let mut cells = Vec::new();
    for (direction, depth) in CELLS {
        cells.push(measure(&mut ours, theirs.as_mut(), direction, depth)?);
    }
    describe(&mut report, &cells, placement);
    Ok(report)
}

fn measure(
    ours: &mut Side,
    mut theirs: Option<&mut Side>,
    direction: Direction,
    depth: u16,
) -> Result<Cell, BenchError> {
    let name = format!("{}_depth_{depth}", direction.name());
    let mut cell = Cell {
        name,
        ours: Vec::new(),
        theirs: Vec::new(),
        lookup_ns: 0.0,
    };
    let before = ours.backend.report().map_err(failed)?;
    for pair in silent_rounds(PAIRS, WarmUp::First) {
        let (mut our_slices, mut their_slices) = (Slice::default(), Slice::default());
        for slice in 0..SLICES {
            let run = Run {
                direction,
                depth,
                queues: 1,
                buffers: Buffers::Packed,
                time: SLICE_TIME,
                seed: pair.seed() << 8 | u64::from(slice) | 1 << 40,
            };
            let ours_first = slice % 2 == 0;
            if ours_first {
                our_slices.add(ours.slice(run).map_err(failed)?);
            }
            if let Some(theirs) = theirs.as_deref_mut() {
                their_slices.add(theirs.slice(run).map_err(failed)?);
            }
            if !ours_first {
                our_slices.add(ours.slice(run).map_err(failed)?);
            }
        }
        if !pair.counts {
            continue;
        }
        cell.ours.push(our_slices.sample());
        if theirs.is_some() {
            cell.theirs.push(their_slices.sample());
        }
    }
    let after = ours.backend.report().map_err(failed)?;
    let samples = after.lookup_samples - before.lookup_samples;
    cell.lookup_ns =
        to_f64(after.lookup_sampled_ns - before.lookup_sampled_ns) / to_f64(samples.max(1));
    progress(NAME, line(&cell));
    Ok(cell)
}

fn line(cell: &Cell) -> String {
    let side = |samples: &[Sample]| {
        let iops = mean(samples.iter().map(|s| s.iops));
        let cpu = mean(samples.iter().map(|s| s.cpu_ns_per_io));
        format!("{iops:.0} IOPS, {cpu:.0} ns CPU per I/O")
    };
    let ratio = ratios(cell).map_or(String::new(), |r| format!("; ratio {:.3}", r.mean()));
    format!(
        "{}: ours {}, {:.0} ns of look-ups; peer {}{ratio}",
        cell.name,
        side(&cell.ours),
        cell.lookup_ns,
        side(&cell.theirs)
    )
}

fn ratios(cell: &Cell) -> Option<PairedRatios> {
    let pairs = cell.ours.iter().zip(&cell.theirs);
    PairedRatios::new(pairs.map(|(o, t)| o.iops / t.iops))
}

fn describe(report: &mut BenchReport, cells: &[Cell], placement: SideCpus) {
    let side = |samples: &[Sample]| -> Value {
        json!({
            "iops": mean(samples.iter().map(|s| s.iops)),
            "cpu_ns_per_io": mean(samples.iter().map(|s| s.cpu_ns_per_io)),
            "pairs": samples.len(),
        })
    };
    for cell in cells {
        let mut ours = side(&cell.ours);
        ours["lookup_ns_per_request"] = cell.lookup_ns.into();
        report.figures.insert(cell.name.clone(), ours);
        if !cell.theirs.is_empty() {
            let name = format!("qsd_{}", cell.name);
            report.peers.insert(name, side(&cell.theirs));
        }
    }
    let figures = &mut report.figures;
    figures.insert("backend_cpu".into(), placement.backend.into());
    figures.insert("frontend_cpu".into(), placement.frontend.into());
    figures.insert("slice_ms".into(), json!(SLICE_TIME.as_millis()));
    figures.insert("slices_per_pair".into(), SLICES.into());
    let (mut lookup_ns, mut cpu_ns) = (0.0, 0.0);
    for cell in cells {
        let ios: f64 = cell.ours.iter().map(|s| s.ios).sum();
        lookup_ns += cell.lookup_ns * ios;
        cpu_ns += cell
            .ours
            .iter()
            .map(|s| s.cpu_ns_per_io * s.ios)
            .sum::<f64>();
    }
    let share = lookup_ns / cpu_ns;
    let most = cells.iter().map(Cell::lookup_share).fold(0.0, f64::max);
    for (name, share) in [
        ("lookup_share_of_cpu", share),
        ("lookup_share_of_cpu_max", most),
    ] {
        report.ratios.insert(name.into(), share.into());
    }
    let all: Vec<PairedRatios> = cells.iter().filter_map(ratios).collect();
    if let Some(overall) = overall(&all) {
        let ratios = &mut report.ratios;
        for (cell, ratio) in cells.iter().zip(&all) {
            let name = format!("ours_over_qsd_iops_{}", cell.name);
            ratios.insert(name, ratio.mean().into());
        }
        ratios.insert("ours_over_qsd_iops".into(), overall.mean.into());
        ratios.insert("ours_over_qsd_iops_low95".into(), overall.low95.into());
        let worst = all
            .iter()
            .map(PairedRatios::mean)
            .fold(f64::INFINITY, f64::min);
        ratios.insert("ours_over_qsd_iops_min".into(), worst.into());
        let cpu = cells.iter().map(|cell| {
            let of = |samples: &[Sample]| mean(samples.iter().map(|s| s.cpu_ns_per_io));
            of(&cell.ours) / of(&cell.theirs)
        });
        let cpu = cpu.map(f64::ln).sum::<f64>() / to_f64(cells.len() as u64);
        ratios.insert("ours_over_qsd_cpu_per_io".into(), cpu.exp().into());
    }
}
