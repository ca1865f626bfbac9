// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench net-pps`: packets a second of our network device beside DPDK's vhost library.
//!
//! Debian's testpmd is the front end of both (`net_virtio_user`, without huge pages), and the peer's back end
//! (`net_vhost`). Back ends are on one CPU and front ends on another, and take turns in slices: all but one
//! pair stand still.
//!
//! ```text
//!   cell = (transmit | receive | loop) × (64 | 1518 bytes);  round = ours, ours without look-ups, theirs, in turn
//!   ratio of a round = our packets a second / theirs;  of a cell = geometric mean over its rounds
//! ```
//! Packets go to and come from nowhere: the peer makes and frees them, and ours has a link that counts
//! (transmit), a source (receive), and one that gives back what was sent (loop). DPDK's threads poll without
//! end, so its CPU time is not compared. `rss_over_dpdk` is resident memory of the processes, in which the
//! front end's memory counts as far as each has touched it.
//!
//! Without look-ups, the engine does not ask whether pages are present (VPRI 7.2).

pub mod backend;
mod side;
mod testpmd;

use super::{
    SizeOptions,
    blk::process::SideCpus,
    harness::{
        figures::mean,
        ratios::{PairedRatios, overall},
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, progress, silent_rounds},
    },
};
use serde_json::json;
use side::{Side, Whose};
use std::{path::Path, time::Duration};

const NAME: &str = "net-pps";
/// Alternations of each cell.
const ROUNDS: usize = 9;
/// Length of a slice.
const SLICE_MS: u64 = 500;
/// Lengths of packets.
const BYTES: [u16; 2] = [64, 1518];

/// Where packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    Transmit,
    Receive,
    Loop,
}

impl Traffic {
    const ALL: [Self; 3] = [Self::Transmit, Self::Receive, Self::Loop];

    fn name(self) -> &'static str {
        match self {
            Self::Transmit => "transmit",
            Self::Receive => "receive",
            Self::Loop => "loop",
        }
    }
}

/// Packets a second of each side, by round.
#[derive(Debug, Default)]
struct Cell {
    name: String,
    ours: Vec<f64>,
    without_look_up: Vec<f64>,
    theirs: Vec<f64>,
    /// Of ours and theirs, at the end.
    rss_bytes: (u64, u64),
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let dir = tempfile::Builder::new()
        .prefix("pagetide-bench-net-")
        .tempdir()
        .map_err(failed)?;
    let cpus = SideCpus::choose();
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("backend_cpu".into(), cpus.backend.into());
    figures.insert("frontend_cpu".into(), cpus.frontend.into());
    figures.insert("slice_ms".into(), SLICE_MS.into());
    // The front end of either is testpmd: without it there is nothing to compare, nor any figure.
    if let Err(why) = testpmd_runs(dir.path(), cpus) {
        progress(NAME, format_args!("no peer and no front end: {why}"));
        report.peers.insert("dpdk".into(), why.into());
        return Ok(without_figures(report));
    }
    let mut cells = Vec::new();
    for traffic in Traffic::ALL {
        for bytes in BYTES {
            let name = format!("{}_{bytes}", traffic.name());
            if !sizes.includes(&name) {
                continue;
            }
            let rounds = sizes.pairs(ROUNDS);
            cells.push(measure(dir.path(), (traffic, bytes), rounds, cpus).map_err(failed)?);
        }
    }
    describe(&mut report, &cells);
    Ok(report)
}

/// Whether testpmd runs here at all: as a back end, for which it needs least.
fn testpmd_runs(dir: &Path, cpus: SideCpus) -> Result<(), String> {
    let options = testpmd::TestpmdOptions {
        vdev: format!(
            "net_vhost0,iface={},queues=1",
            dir.join("trial.sock").display()
        ),
        forward: testpmd::Forward::RxOnly,
        bytes: 64,
        cpu: cpus.backend,
        name: "trial",
    };
    testpmd::Testpmd::start(dir, &options).map(|_| ())
}

/// Every ratio that there would be is null.
fn without_figures(mut report: BenchReport) -> BenchReport {
    for name in RATIOS {
        report.ratios.insert(name.into(), json!(null));
    }
    report
}

const RATIOS: [&str; 3] = [
    "ours_over_dpdk_min",
    "lookup_on_over_off_low95",
    "rss_over_dpdk",
];

fn measure(
    dir: &Path,
    what: (Traffic, u16),
    rounds: usize,
    cpus: SideCpus,
) -> Result<Cell, String> {
    let mut cell = Cell {
        name: format!("{}_{}", what.0.name(), what.1),
        ..Cell::default()
    };
    let of = |whose| Side::start(dir, whose, what, cpus);
    let mut sides = [
        of(Whose::Ours)?,
        of(Whose::WithoutLookUp)?,
        of(Whose::Dpdk)?,
    ];
    for round in silent_rounds(rounds, WarmUp::First) {
        let mut pps = [0.0; 3];
        for side in round.rotated(3) {
            pps[side] = sides[side].pps(Duration::from_millis(SLICE_MS))?;
        }
        if round.counts {
            let [ours, without_look_up, theirs] = pps;
            cell.ours.push(ours);
            cell.without_look_up.push(without_look_up);
            cell.theirs.push(theirs);
        }
    }
    let [ours, _, theirs] = &sides;
    cell.rss_bytes = (ours.back_rss_bytes()?, theirs.back_rss_bytes()?);
    let of = |pps: &[f64]| mean(pps.iter().copied());
    progress(
        NAME,
        format_args!(
            "{}: ours {:.0} packets a second, {:.0} without look-ups, DPDK {:.0}",
            cell.name,
            of(&cell.ours),
            of(&cell.without_look_up),
            of(&cell.theirs)
        ),
    );
    Ok(cell)
}

fn ratios(over: &[f64], under: &[f64]) -> Option<PairedRatios> {
    PairedRatios::new(over.iter().zip(under).map(|(over, under)| over / under))
}

fn describe(report: &mut BenchReport, cells: &[Cell]) {
    let of = |pps: &[f64]| mean(pps.iter().copied()).round();
    let (mut worst, mut rss) = (f64::INFINITY, 0.0_f64);
    let mut look_ups = Vec::new();
    for cell in cells {
        let (ours, theirs) = cell.rss_bytes;
        report.figures.insert(
            cell.name.clone(),
            json!({
                "pps": of(&cell.ours),
                "without_look_up_pps": of(&cell.without_look_up),
                "rss_bytes": ours,
                "rounds": cell.ours.len(),
            }),
        );
        report.peers.insert(
            format!("dpdk_{}", cell.name),
            json!({ "pps": of(&cell.theirs), "rss_bytes": theirs }),
        );
        if let Some(ratio) = ratios(&cell.ours, &cell.theirs) {
            worst = worst.min(ratio.mean());
            let name = format!("ours_over_dpdk_{}", cell.name);
            report.ratios.insert(name, ratio.mean().into());
        }
        look_ups.extend(ratios(&cell.ours, &cell.without_look_up));
        #[expect(clippy::cast_precision_loss, reason = "a ratio of memory")]
        let ratio = ours as f64 / theirs as f64;
        rss = rss.max(ratio);
    }
    if cells.is_empty() {
        return;
    }
    let ratios = &mut report.ratios;
    ratios.insert("ours_over_dpdk_min".into(), worst.into());
    if let Some(look_ups) = overall(&look_ups) {
        ratios.insert("lookup_on_over_off".into(), look_ups.mean.into());
        ratios.insert("lookup_on_over_off_low95".into(), look_ups.low95.into());
    }
    ratios.insert("rss_over_dpdk".into(), rss.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_cell_decides_and_look_ups_have_a_bound() {
        let cell = |name: &str, theirs: f64| Cell {
            name: name.into(),
            ours: vec![1e6, 1.1e6, 1e6],
            without_look_up: vec![1e6, 1.2e6, 1e6],
            theirs: vec![theirs; 3],
            rss_bytes: (10, 40),
        };
        let mut report = BenchReport::new(NAME);
        describe(&mut report, &[cell("a", 1e6), cell("b", 2e6)]);
        let ratio = |name: &str| report.ratios[name].as_f64().unwrap();
        assert!(ratio("ours_over_dpdk_a") > 1.0);
        assert!((0.5..0.55).contains(&ratio("ours_over_dpdk_min")));
        assert!(ratio("lookup_on_over_off_low95") < ratio("lookup_on_over_off"));
        assert!((ratio("rss_over_dpdk") - 0.25).abs() < 1e-9);
    }

    #[test]
    fn without_testpmd_every_ratio_is_null() {
        let report = without_figures(BenchReport::new(NAME));
        assert!(RATIOS.iter().all(|name| report.ratios[*name].is_null()));
    }
}
