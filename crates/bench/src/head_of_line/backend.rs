// SPDX-License-Identifier: Apache-2.0
//! The back end of `bench head-of-line`: one engine, two disks, and a slow tier.
//!
//! It prints `ready`, then reads lines of JSON: a `FileKey` names the memory whose pages will be absent;
//! `"absent"` and `"present"` make them so; `"report"` requests a [`TierReport`]. The end of input ends it.
//!
//! Where A's absent pages come from is told in [`tier`](super::tier). The disks are served by our engine in this
//! process, or by qemu-storage-daemon in one that this process starts and ends.

use super::{
    frontend::Pages,
    tier::{MemoryName, ServedTier, StockTier, Tier, TouchedTier},
};
use crate::harness::rounds::progress;
use clap::ValueEnum;
use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, DpuError, OnFault, SocketAccess, Writes};
use pagetide_sys::cpu;
use pagetide_vpri::{DomainTable, Doorbell, FaultAssist, FaultService, LookUp};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead as _, Write as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

/// How an engine handles an absent page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FaultMode {
    /// Looks the page up before DMA, and parks the chain.
    Park,
    /// Touches it, and waits.
    Touch,
    /// The same, but it is qemu-storage-daemon.
    Stock,
}

impl FaultMode {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Park => "park",
            Self::Touch => "touch",
            Self::Stock => "stock",
        }
    }
}

/// Where and what to serve.
#[derive(Debug, Clone, clap::Args)]
pub struct BackendOptions {
    /// Socket of A's disk
    #[arg(long)]
    pub socket_a: PathBuf,
    /// Socket of B's disk
    #[arg(long)]
    pub socket_b: PathBuf,
    /// A's image
    #[arg(long)]
    pub image_a: PathBuf,
    /// B's image
    #[arg(long)]
    pub image_b: PathBuf,
    /// Directory for the engine's lock
    #[arg(long)]
    pub state_dir: PathBuf,
    /// CPU of the engine
    #[arg(long)]
    pub engine_cpu: usize,
    /// CPU of all else
    #[arg(long)]
    pub tier_cpu: usize,
    /// Time that a page takes, in microseconds
    #[arg(long)]
    pub hold_us: u64,
    /// What the engine does about an absent page
    #[arg(long, value_enum)]
    pub mode: FaultMode,
}

/// The tier's work since the last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierReport {
    /// Pages that were waited for.
    pub waited_for: u64,
}

/// A line of the input.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum Order {
    /// The memory with these identity numbers is A's.
    Memory(MemoryName),
    /// The required state of its pages.
    Pages(Pages),
    /// Report.
    Word(Word),
}

/// The only word that is no state of pages.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Word {
    Report,
}

/// Why the back end ended.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The DPU.
    #[error(transparent)]
    Dpu(#[from] DpuError),
    /// Its lines, or a thread.
    #[error("the bench's lines: {0}")]
    Lines(#[from] io::Error),
    /// An invalid line.
    #[error("the bench's lines: {0}")]
    Json(#[from] serde_json::Error),
    /// The CPU.
    #[error(transparent)]
    Cpu(#[from] cpu::CpuError),
    /// The tier.
    #[error("the tier: {0}")]
    Tier(String),
}

/// Serves until the end of input.
///
/// # Errors
/// [`BackendError`].
pub fn serve(options: &BackendOptions) -> Result<(), BackendError> {
    match options.mode {
        FaultMode::Stock => {
            let stock = Stock::start(options)?;
            cpu::set_affinity(&[options.tier_cpu])?;
            obey(
                Tier::Stock(StockTier::new(stock.pid(), options.hold())),
                || drop(stock),
            )
        }
        FaultMode::Park | FaultMode::Touch => serve_here(options),
    }
}

/// Our engine.
fn serve_here(options: &BackendOptions) -> Result<(), BackendError> {
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new()?);
    let mut config = DpuConfig::new(options.state_dir.clone());
    config.cpus = vec![options.engine_cpu];
    let (dpu, ends) = Dpu::start(&config, domains.clone(), &bell)?;
    for (socket, image) in [
        (&options.socket_a, &options.image_a),
        (&options.socket_b, &options.image_b),
    ] {
        dpu.add_blk(BlkConfig {
            socket: socket.clone(),
            image: image.clone(),
            queue_count: 1,
            writes: Writes::Refused,
            look_up: match options.mode {
                FaultMode::Park => LookUp::On,
                FaultMode::Touch | FaultMode::Stock => LookUp::Off,
            },
            serial: "bench".into(),
            // Through the page cache, which holds the image.
            direct_io: DirectIo::Off,
            on_fault: OnFault::OutOfOrder,
            ram: pagetide_dpu::RamPolicy::default(),
            image_use: crate::blk::side::SHARED_IMAGE,
            access: SocketAccess::default(),
        })?;
    }
    cpu::set_affinity(&[options.tier_cpu])?;
    let tier = match options.mode {
        FaultMode::Park => {
            let service = FaultService::new(ends, bell);
            let assist: Arc<dyn FaultAssist> = Arc::clone(&service) as _;
            dpu.set_assist(&assist)?;
            let (cpu, hold) = (options.tier_cpu, options.hold());
            let tier = ServedTier::new(service, domains, hold, cpu);
            Tier::Served(Box::new(tier.map_err(BackendError::Tier)?))
        }
        FaultMode::Touch | FaultMode::Stock => {
            Tier::Touched(TouchedTier::new(domains, options.hold()))
        }
    };
    obey(tier, || dpu.shut_down())
}

/// Does what the lines of the input say, and `end` after the last.
fn obey(mut tier: Tier, end: impl FnOnce()) -> Result<(), BackendError> {
    say(&"ready")?;
    for line in io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Order::Memory(name) => say(&told(tier.take(name)))?,
            Order::Pages(pages) => say(&told(tier.set(pages)))?,
            Order::Word(Word::Report) => say(&TierReport {
                waited_for: tier.take_waited_for(),
            })?,
        }
    }
    // Every request that waits must have its page before the engines end.
    end();
    tier.stop();
    Ok(())
}

/// False, with a message, for a failure.
fn told(done: Result<(), String>) -> bool {
    if let Err(reason) = &done {
        progress("head-of-line", reason);
    }
    done.is_ok()
}

impl BackendOptions {
    fn hold(&self) -> Duration {
        Duration::from_micros(self.hold_us)
    }
}

/// qemu-storage-daemon with both disks on one thread; it ends when this is dropped.
struct Stock(Child);

impl Stock {
    fn start(options: &BackendOptions) -> Result<Self, BackendError> {
        let mut command = Command::new("taskset");
        command.args(["-c", &options.engine_cpu.to_string(), "qemu-storage-daemon"]);
        command.args(["--object", "iothread,id=engine"]);
        for (name, socket, image) in [
            ("a", &options.socket_a, &options.image_a),
            ("b", &options.socket_b, &options.image_b),
        ] {
            // As ours, it reads through the page cache, which holds the image.
            let blockdev = format!(
                "driver=file,node-name={name},filename={},aio=io_uring,read-only=on",
                image.display()
            );
            let export = format!(
                "type=vhost-user-blk,id=e{name},addr.type=unix,addr.path={},node-name={name},iothread=engine,num-queues=1",
                socket.display()
            );
            command.args(["--blockdev", &blockdev, "--export", &export]);
        }
        // Its messages are for people; lines are ours.
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        Ok(Self(child))
    }

    /// `taskset` has become it.
    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            progress("head-of-line", format_args!("ending the peer: {error}"));
        }
    }
}

fn say<T: Serialize>(answer: &T) -> Result<(), BackendError> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, answer)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_told_apart() {
        let order = |line| serde_json::from_str::<Order>(line).unwrap();
        let memory = order(r#"{"dev":1,"ino":2,"pid":3,"descriptor":4}"#);
        assert!(matches!(
            memory,
            Order::Memory(MemoryName { dev: 1, ino: 2, .. })
        ));
        assert!(matches!(order("\"absent\""), Order::Pages(Pages::Absent)));
        assert!(matches!(order("\"report\""), Order::Word(Word::Report)));
        assert!(serde_json::from_str::<Order>("\"nonsense\"").is_err());
    }
}
