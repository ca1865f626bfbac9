// SPDX-License-Identifier: Apache-2.0
//! `bench sim`: translation requests a second that the performance model processes on one core, reading the
//! trace included, prefetches not counted.
//!
//! Flavour hypersio, table IV of HyperTRIO, iperf3 in round robin. Each run is a separate process with its
//! own peak memory, and the numbers of tenants and both configurations take turns, so that a slow minute of
//! the machine affects all of them.
//!
//! With the authors' program ([`hypersio`]) as a peer, its runs are among the turns, and flavour *paper* beside
//! *hypersio*: the model that people use, over the authors' answer to the same question. With a recorded log, what its
//! invalidations cost is told ([`recorded`]).

mod hypersio;
pub mod part;
mod recorded;

use std::path::Path;
use std::process::Command;

use pagetide_trace::{HyperSpec, HyperTrace, HypersioWriter, TenantShape, Workload, build};
use serde_json::{Map, json};

use super::harness::{
    figures::{median, thousandths, to_f64},
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, rounds},
};
use hypersio::{PeerRun, Program};
use part::RunFigures;

const NAME: &str = "sim";
/// Numbers of tenants; the first is also the base of the memory comparison.
const TENANTS: [u32; 6] = [4, 16, 64, 256, 1024, 4096];
/// Packets of each trace: 1.2 million requests, half a second's work.
const PACKETS: u64 = 400_000;
/// Times that everything is run.
const ROUNDS: usize = 5;
/// Times with the authors' program, which is slow.
const ROUNDS_WITH_PEER: usize = 3;
/// Configurations of table IV.
const CONFIGS: [&str; 2] = ["hypertrio", "base"];
/// *hypertrio* in flavour *paper*.
const PAPER: &str = "paper";

/// All runs of the bench.
#[derive(Default)]
struct Runs {
    ours: Vec<(&'static str, u32, RunFigures)>,
    theirs: Vec<(&'static str, u32, PeerRun)>,
}

/// Runs the bench, with the authors' program as a peer and a recorded log where they are given.
///
/// # Errors
/// [`BenchError`].
pub fn run(hypersio: Option<&Path>, log: Option<&Path>) -> Result<BenchReport, BenchError> {
    let home = tempfile::tempdir().map_err(failed)?;
    // First: it takes the shortest time, and a log may be broken.
    let cost = log
        .map(|log| recorded::measure(log, home.path()))
        .transpose()?;
    let peer = hypersio.map(|path| Program::new(path, home.path()));
    let peer = peer.transpose()?;
    let traces = match peer {
        Some(_) => hypersio::traces_of(home.path()),
        None => home.path().to_owned(),
    };
    for tenants in TENANTS {
        progress(NAME, format_args!("making the trace of {tenants} tenants"));
        write_trace(&traces, tenants)?;
        if let Some(peer) = &peer {
            peer.complete_trace(tenants)?;
        }
    }
    let count = if peer.is_some() {
        ROUNDS_WITH_PEER
    } else {
        ROUNDS
    };
    let mut runs = Runs::default();
    for _round in rounds(NAME, count, WarmUp::None) {
        for tenants in TENANTS {
            runs.turn(&traces, peer.as_ref(), tenants)?;
        }
    }
    let mut report = report(&runs.ours);
    if peer.is_some() {
        compare(&mut report, &runs);
    }
    if let Some(cost) = cost {
        cost.tell(&mut report);
    }
    Ok(report)
}

impl Runs {
    /// Everything once for `tenants`.
    fn turn(
        &mut self,
        traces: &Path,
        peer: Option<&Program>,
        tenants: u32,
    ) -> Result<(), BenchError> {
        for config in CONFIGS {
            let figures = run_apart(traces, config, tenants)?;
            self.ours.push((config, tenants, figures));
            if let Some(peer) = peer {
                progress(NAME, format_args!("HyperSIO, {config}, {tenants} tenants"));
                let run = peer.run(config, tenants)?;
                self.theirs.push((config, tenants, run));
            }
        }
        if peer.is_some() {
            let figures = run_apart(traces, PAPER, tenants)?;
            self.ours.push((PAPER, tenants, figures));
        }
        Ok(())
    }
}

/// Requests a second of CPU time over those of the authors' program: *paper* over its *hypertrio*.
fn compare(report: &mut BenchReport, runs: &Runs) {
    let mut ratios = Map::new();
    let (mut theirs_a_second, mut equal) = (Map::new(), true);
    for config in CONFIGS.into_iter().chain([PAPER]) {
        let peer = if config == PAPER { CONFIGS[0] } else { config };
        let (mut of_config, mut rates) = (Map::new(), Map::new());
        for tenants in TENANTS {
            let ours = runs_of(&runs.ours, config, tenants);
            let theirs = runs_of(&runs.theirs, peer, tenants);
            let pairs = || ours.iter().zip(&theirs);
            let faster = pairs().map(|(our, their)| their.cpu_seconds / our.cpu_seconds);
            let key = format!("tenants_{tenants}");
            of_config.insert(key.clone(), thousandths(median(faster)));
            let requests = pairs().map(|(our, their)| to_f64(our.requests) / their.cpu_seconds);
            rates.insert(key, median(requests).round().into());
            if config != PAPER {
                equal &= pairs().all(|(our, their)| our.elapsed_ns == their.elapsed_ns);
            }
        }
        ratios.insert(config.to_owned(), of_config.into());
        if config != PAPER {
            theirs_a_second.insert(config.to_owned(), rates.into());
        }
    }
    report
        .ratios
        .insert("requests_per_cpu_second".into(), ratios.into());
    report
        .figures
        .insert("equal_to_hypersio".into(), equal.into());
    let peer = json!({ "requests_per_cpu_second": theirs_a_second });
    report.peers.insert("hypersio".into(), peer);
}

/// The runs of one configuration with so many tenants, in order.
fn runs_of<T: Copy>(runs: &[(&str, u32, T)], config: &str, tenants: u32) -> Vec<T> {
    runs.iter()
        .filter(|(c, t, _)| *c == config && *t == tenants)
        .map(|(_, _, figures)| *figures)
        .collect()
}

fn report(runs: &[(&str, u32, RunFigures)]) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let of = |config: &str, tenants: u32| runs_of(runs, config, tenants);
    for config in CONFIGS {
        let (mut rates, mut slowest, mut bandwidth) = (Map::new(), Map::new(), Map::new());
        for tenants in TENANTS {
            let runs = of(config, tenants);
            let own = || runs.iter().map(RunFigures::requests_per_second);
            let key = format!("tenants_{tenants}");
            rates.insert(key.clone(), median(own()).round().into());
            slowest.insert(
                key.clone(),
                own().fold(f64::INFINITY, f64::min).round().into(),
            );
            bandwidth.insert(key, runs[0].gbps.into());
        }
        let name = |figure: &str| match config {
            "hypertrio" => figure.to_owned(),
            other => format!("{other}_{figure}"),
        };
        report
            .figures
            .insert(name("requests_per_second"), rates.into());
        report
            .figures
            .insert(name("requests_per_second_slowest_round"), slowest.into());
        report
            .figures
            .insert(name("modelled_gbps"), bandwidth.into());
    }
    let peak = |tenants: u32| {
        let peaks = of("hypertrio", tenants)
            .into_iter()
            .map(|run| run.peak_memory_bytes);
        peaks.min().unwrap_or(0)
    };
    let (few, many) = (TENANTS[0], TENANTS[TENANTS.len() - 1]);
    let more = peak(many).saturating_sub(peak(few));
    report.figures.insert(
        "peak_memory_bytes".into(),
        json!({
            format!("tenants_{few}"): peak(few),
            format!("tenants_{many}"): peak(many),
        }),
    );
    report.figures.insert(
        "memory_bytes_per_tenant".into(),
        (more / u64::from(many - few)).into(),
    );
    report.peers.insert(
        "hypersio".into(),
        "the authors' program is not in the packages that this project installs: --hypersio takes \
         the path of a build; on the machine of docs/results.md it made 0.48 million requests a second of \
         CPU time at 64 tenants and 0.11 million at 1,024"
            .into(),
    );
    report
}

/// Writes the trace of `tenants` tenants in the authors' format.
fn write_trace(directory: &Path, tenants: u32) -> Result<(), BenchError> {
    let mut spec = HyperSpec::synthetic(TenantShape::of(Workload::Iperf3), tenants);
    spec.packets = Some(PACKETS);
    let mut trace = HyperTrace::synthetic(&spec).map_err(failed)?;
    let sink = HypersioWriter::create(&part::trace_path(directory, tenants)).map_err(failed)?;
    build(&mut trace, Box::new(sink), &mut |_| {}).map_err(failed)?;
    Ok(())
}

/// Runs one configuration over the made trace of so many tenants.
fn run_apart(directory: &Path, config: &str, tenants: u32) -> Result<RunFigures, BenchError> {
    run_trace(&part::trace_path(directory, tenants), config)
}

/// Runs one configuration in its own process.
fn run_trace(trace: &Path, config: &str) -> Result<RunFigures, BenchError> {
    let program = std::env::current_exe().map_err(failed)?;
    let output = Command::new(program)
        .args(["bench-part", "sim-run", "--preset", config, "--trace"])
        .arg(trace)
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).map_err(failed)
}
