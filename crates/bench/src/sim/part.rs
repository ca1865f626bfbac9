// SPDX-License-Identifier: Apache-2.0
//! One run of `bench sim`, in its own process.

use std::path::{Path, PathBuf};
use std::time::Instant;

use pagetide_sim::config::Flavour;
use pagetide_sim::{Config, SimError, TraceInput};
use pagetide_sys::cpu::process_time;
use pagetide_trace::{FormatChoice, open};
use serde::{Deserialize, Serialize};

/// The figures that a run reports to its bench.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunFigures {
    /// Translation requests of the trace.
    pub requests: u64,
    /// Time for all of it, opening the trace included.
    pub seconds: f64,
    /// CPU time of the same.
    pub cpu_seconds: f64,
    /// Time that the model took by its own clock.
    pub elapsed_ns: u64,
    /// Bandwidth that the model found.
    pub gbps: f64,
    /// Most memory that the process had resident.
    pub peak_memory_bytes: u64,
}

impl RunFigures {
    /// Requests a second.
    #[must_use]
    pub fn requests_per_second(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let requests = self.requests as f64;
        requests / self.seconds
    }

    /// Requests a second of CPU time.
    #[must_use]
    pub fn requests_per_cpu_second(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let requests = self.requests as f64;
        requests / self.cpu_seconds
    }
}

/// Where the trace of `tenants` tenants is.
#[must_use]
pub fn trace_path(directory: &Path, tenants: u32) -> PathBuf {
    directory.join(format!("{}_iotlb_trace.bin", trace_prefix(tenants)))
}

/// The trace's name, with which the names of its files begin.
#[must_use]
pub fn trace_prefix(tenants: u32) -> String {
    format!("iperf3_tnt_{tenants}_rr3")
}

/// Runs `preset` over `trace`.
///
/// # Errors
/// If the trace cannot be read or the system does not report the memory used.
pub fn run(preset: &str, trace: &Path) -> Result<RunFigures, String> {
    let config = match preset {
        "base" => Config::base(Flavour::Hypersio),
        "paper" => Config::hypertrio(Flavour::Paper),
        _ => Config::hypertrio(Flavour::Hypersio),
    };
    let tell = |error: SimError| error.to_string();
    let (begin, cpu) = (Instant::now(), process_time());
    let mut events = open(trace, FormatChoice::Detect).map_err(|error| error.to_string())?;
    let input = TraceInput {
        events: &mut *events,
        next_uses: None,
    };
    let outcome = pagetide_sim::run(&config, input).map_err(tell)?;
    let seconds = begin.elapsed().as_secs_f64();
    let cpu = process_time().saturating_sub(cpu);
    Ok(RunFigures {
        requests: outcome.requests,
        seconds,
        cpu_seconds: cpu.as_secs_f64(),
        elapsed_ns: outcome.elapsed_ns,
        gbps: outcome.gbps,
        peak_memory_bytes: peak_memory_bytes()?,
    })
}

fn peak_memory_bytes() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.parse::<u64>().ok())
        .ok_or("/proc/self/status has no VmHWM")?;
    Ok(kib * 1024)
}
