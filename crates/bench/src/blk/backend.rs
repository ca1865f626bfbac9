// SPDX-License-Identifier: Apache-2.0
//! Our back end as a separate process: the DPU, one device, nothing else.
//!
//! It reads lines on its input: `report` prints a [`BackendReport`] as one line, `log-on` and `log-off`
//! switch the access log with a DMA protector on and off and print one, too; the end of input ends it. The
//! log is off by default.

use super::frontend::SPREAD_BYTES;
use pagetide_addr::{PAGE_BYTES, PageNo, PageRange, SECTION_PAGES};
use pagetide_daemon::{
    control::ControlError,
    protection::{
        feed::{Feed, FeedConfig},
        vm::VmProtection,
    },
};
use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, DpuError, OnFault, SocketAccess, Writes};
use pagetide_policy::protect::{PolicyChoice, adp::AdpParams};
use pagetide_vpri::{AccessLog, Delay, DmaMmu, DomainTable, Doorbell, IoSpace, LookUp};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead as _, Write as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

/// The report of our back end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BackendReport {
    /// Requests completed.
    pub requests: u64,
    /// Requests that ended in an error.
    pub failed_requests: u64,
    /// Time of page look-ups in the requests that the engine sampled.
    pub lookup_sampled_ns: u64,
    /// Requests it sampled.
    pub lookup_samples: u64,
    /// How often the engine slept.
    pub engine_sleeps: u64,
    /// Accesses recorded in the access log.
    pub logged_accesses: u64,
    /// Accesses lost to it.
    pub lost_accesses: u64,
    /// Accesses that reached the policy.
    pub heard_accesses: u64,
    /// Accesses to memory that the policy does not have.
    pub foreign_accesses: u64,
    /// Sections that the policy tracks.
    pub tracked_sections: u64,
    /// Those of them that it protects.
    pub protected_sections: u64,
    /// Memory that the policy uses.
    pub policy_bytes: u64,
}

/// Whether the log is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogSwitch {
    /// Accesses are logged, and a policy receives them.
    On,
    /// They are not.
    Off,
}

impl LogSwitch {
    /// The line that sets it.
    #[must_use]
    pub const fn line(self) -> &'static str {
        match self {
            Self::On => "log-on",
            Self::Off => "log-off",
        }
    }
}

/// The access log of this process, and the policy that receives it.
struct Listener {
    feed: Feed,
    protection: Arc<VmProtection>,
    mmu: Arc<DmaMmu>,
    domains: Arc<DomainTable>,
}

impl Listener {
    /// Starts switched off.
    fn start(dpu: &Dpu, domains: &Arc<DomainTable>) -> Result<Self, BackendError> {
        let log = Arc::new(AccessLog::new(1));
        dpu.set_access_log(&log)?;
        let config = FeedConfig { rate: RATE };
        let feed = Feed::start(log, &config)?;
        let mmu = Arc::new(DmaMmu::new([]));
        let adp = PolicyChoice::Adp(AdpParams::default());
        let protection = VmProtection::new(&adp, Arc::clone(&mmu), Vec::new(), None);
        Ok(Self {
            feed,
            protection: Arc::new(protection),
            mmu,
            domains: Arc::clone(domains),
        })
    }

    /// The policy keeps its state while it is off, so that it need not learn anew each time.
    fn switch(&self, switch: LogSwitch) {
        self.follow_memory();
        self.feed.remove(&self.protection);
        if switch == LogSwitch::On {
            self.feed.add("bench", &self.protection);
        }
    }

    /// Memory that the front end has mapped since belongs to the VM, which has [`VM_PAGES`] in total: the
    /// policy tracks a share of that.
    fn follow_memory(&self) {
        let known = self.mmu.domains();
        let mut first = 0;
        for domain in self.domains.all() {
            let count = domain.len_bytes().div_ceil(PAGE_BYTES);
            let pages = PageRange::new(PageNo(first), PageNo(first + count));
            if !known.iter().any(|it| it.id() == domain.id()) {
                self.mmu.add(&(domain as Arc<dyn IoSpace>), pages);
            }
            first = pages.end.0.next_multiple_of(SECTION_PAGES);
        }
        let all = PageNo(0).run(VM_PAGES);
        self.protection.ram_changed(vec![all]);
    }
}

/// Pages of the VM: 8 GiB, twice the spread of the buffers. So these are more than `adp` tracks of it (30 %
/// and 5 %): both its blocks are full, and it adds, protects and drops sections all the time.
const VM_PAGES: u64 = 2 * SPREAD_BYTES / PAGE_BYTES;
/// Records a second: the daemon's default limit.
const RATE: u32 = 100_000;

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
    /// Queues of the device.
    pub queue_count: u16,
    /// Whether and how the engine looks pages up.
    pub look_up: LookUp,
}

/// Whether the engine looks pages up before each DMA, as on the command line.
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
    /// Its access log.
    #[error(transparent)]
    Control(#[from] ControlError),
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
    // No VM is attached, so no page is ever absent and these ends need no service.
    let (dpu, _host_ends) = Dpu::start(&config, Arc::clone(&domains), &bell)?;
    let listener = Listener::start(&dpu, &domains)?;
    dpu.add_blk(BlkConfig {
        socket: options.socket,
        image: options.image,
        queue_count: options.queue_count,
        writes: Writes::Taken,
        look_up: options.look_up,
        serial: "bench".into(),
        direct_io: DirectIo::On,
        on_fault: OnFault::default(),
        ram: pagetide_dpu::RamPolicy::default(),
        image_use: crate::blk::side::SHARED_IMAGE,
        access: SocketAccess::default(),
    })?;
    for line in std::io::stdin().lock().lines() {
        let told = match line?.trim() {
            "report" => report(&dpu, &listener),
            line => {
                let switches = [LogSwitch::On, LogSwitch::Off];
                let Some(switch) = switches.into_iter().find(|it| it.line() == line) else {
                    continue;
                };
                listener.switch(switch);
                report(&dpu, &listener)
            }
        };
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &told)?;
        writeln!(out)?;
        out.flush()?;
    }
    dpu.shut_down();
    Ok(())
}

fn report(dpu: &Dpu, listener: &Listener) -> BackendReport {
    let devices = dpu.devices();
    let device = devices.first();
    let heard = listener.protection.report();
    let policies = || heard.devices.iter().map(|device| device.policy);
    BackendReport {
        requests: device.map_or(0, |d| d.requests),
        failed_requests: device.map_or(0, |d| d.failed_requests),
        lookup_sampled_ns: device.map_or(0, |d| d.lookup_sampled_ns),
        lookup_samples: device.map_or(0, |d| d.lookup_samples),
        engine_sleeps: dpu.engine_sleeps(),
        logged_accesses: device.map_or(0, |d| d.logged_accesses),
        lost_accesses: device.map_or(0, |d| d.lost_accesses),
        heard_accesses: heard.taken_records,
        foreign_accesses: listener.feed.foreign_records(),
        tracked_sections: policies().map(|policy| policy.tracked_sections).sum(),
        protected_sections: heard.protected_sections,
        policy_bytes: policies().map(|policy| policy.bytes).sum(),
    }
}
