// SPDX-License-Identifier: Apache-2.0
//! `bench sim`: translation requests a second that the performance model processes on one core, reading the
//! trace included, prefetches not counted.
//!
//! Flavour hypersio, table IV of HyperTRIO, iperf3 in round robin. Each run is a separate process with its
//! own peak memory, and the numbers of tenants and both configurations take turns, so that a slow minute of
//! the machine affects all of them.

pub mod part;

use std::path::Path;
use std::process::Command;

use pagetide_trace::{HyperSpec, HyperTrace, HypersioWriter, TenantShape, Workload, build};
use serde_json::{Map, json};

use super::harness::{
    figures::median,
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, rounds},
};
use part::RunFigures;

const NAME: &str = "sim";
/// Numbers of tenants; the first is also the base of the memory comparison.
const TENANTS: [u32; 6] = [4, 16, 64, 256, 1024, 4096];
/// Packets of each trace: 1.2 million requests, half a second's work.
const PACKETS: u64 = 400_000;
/// Times that everything is run.
const ROUNDS: usize = 5;
/// Configurations of table IV.
const CONFIGS: [&str; 2] = ["hypertrio", "base"];

/// Runs the bench.
pub fn run() -> Result<BenchReport, BenchError> {
    let directory = tempfile::tempdir().map_err(failed)?;
    for tenants in TENANTS {
        progress(NAME, format_args!("making the trace of {tenants} tenants"));
        write_trace(directory.path(), tenants)?;
    }
    let mut runs: Vec<(&str, u32, RunFigures)> = Vec::new();
    for _round in rounds(NAME, ROUNDS, WarmUp::None) {
        for tenants in TENANTS {
            for config in CONFIGS {
                let figures = run_apart(directory.path(), config, tenants)?;
                runs.push((config, tenants, figures));
            }
        }
    }
    Ok(report(&runs))
}

fn report(runs: &[(&str, u32, RunFigures)]) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let of = |config: &str, tenants: u32| -> Vec<RunFigures> {
        runs.iter()
            .filter(|(c, t, _)| *c == config && *t == tenants)
            .map(|(_, _, figures)| *figures)
            .collect()
    };
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
        "the authors' program is not in the packages that this project installs, so it is not \
         run here; on the machine of docs/results.md it made 0.48 million requests a second of \
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

/// Runs one configuration in its own process.
fn run_apart(directory: &Path, config: &str, tenants: u32) -> Result<RunFigures, BenchError> {
    let program = std::env::current_exe().map_err(failed)?;
    let output = Command::new(program)
        .args(["bench-part", "sim-run", "--preset", config, "--trace"])
        .arg(part::trace_path(directory, tenants))
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).map_err(failed)
}
