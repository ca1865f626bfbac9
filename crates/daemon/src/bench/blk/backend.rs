// SPDX-License-Identifier: Apache-2.0
//! Our back end as a process of its own: the DPU, one device, nothing else.
//!
//! It takes lines on its input: `report` prints a [`BackendReport`] as one line;
//! the end of input ends it.

use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, DpuError, OnFault, Writes};
use pagetide_vpri::{Delay, DomainTable, Doorbell, LookUp};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead as _, Write as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

/// What our back end says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BackendReport {
    /// Requests completed.
    pub requests: u64,
    /// Requests that ended in an error.
    pub failed_requests: u64,
    /// Time that looking up pages took in the requests the engine sampled.
    pub lookup_sampled_ns: u64,
    /// Requests it sampled.
    pub lookup_samples: u64,
    /// How often the engine slept.
    pub engine_sleeps: u64,
}

/// Where and what to serve.
#[derive(Debug, Clone)]
pub struct BackendOptions {
    /// Socket to listen on.
    pub socket: PathBuf,
    /// Image to serve.
    pub image: PathBuf,
    /// Directory for the engine's lock.
    pub state_dir: PathBuf,
    /// Longest time the engine polls before it sleeps.
    pub poll_max: Duration,
    /// Whether the engine looks pages up, and how.
    pub look_up: LookUp,
}

/// Whether the engine looks pages up before each DMA, as the command line says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LookUpMode {
    /// It does.
    On,
    /// It does not.
    Off,
}

impl LookUpMode {
    /// With look-ups that each take `extra` more.
    #[must_use]
    pub fn with_extra(self, extra: Duration) -> LookUp {
        match self {
            Self::Off => LookUp::Off,
            Self::On if extra.is_zero() => LookUp::On,
            Self::On => LookUp::Slowed(Delay::calibrated(extra)),
        }
    }
}

/// Why the back end ended.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The DPU.
    #[error(transparent)]
    Dpu(#[from] DpuError),
    /// Its lines.
    #[error("the bench's lines: {0}")]
    Lines(#[from] std::io::Error),
    /// Its report.
    #[error("the report: {0}")]
    Report(#[from] serde_json::Error),
}

/// Serves until the end of input.
///
/// # Errors
/// [`BackendError`].
pub fn serve(options: BackendOptions) -> Result<(), BackendError> {
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new()?);
    let mut config = DpuConfig::new(options.state_dir);
    config.poll_max = options.poll_max;
    // No VM is attached, so no page is ever absent and nobody need serve these ends.
    let (dpu, _host_ends) = Dpu::start(&config, domains, &bell)?;
    dpu.add_blk(BlkConfig {
        socket: options.socket,
        image: options.image,
        queue_count: 1,
        writes: Writes::Taken,
        look_up: options.look_up,
        serial: "bench".into(),
        direct_io: DirectIo::On,
        on_fault: OnFault::default(),
    })?;
    for line in std::io::stdin().lock().lines() {
        if line?.trim() == "report" {
            let mut out = std::io::stdout().lock();
            serde_json::to_writer(&mut out, &report(&dpu))?;
            writeln!(out)?;
            out.flush()?;
        }
    }
    dpu.shut_down();
    Ok(())
}

fn report(dpu: &Dpu) -> BackendReport {
    let devices = dpu.devices();
    let device = devices.first();
    BackendReport {
        requests: device.map_or(0, |d| d.requests),
        failed_requests: device.map_or(0, |d| d.failed_requests),
        lookup_sampled_ns: device.map_or(0, |d| d.lookup_sampled_ns),
        lookup_samples: device.map_or(0, |d| d.lookup_samples),
        engine_sleeps: dpu.engine_sleeps(),
    }
}
