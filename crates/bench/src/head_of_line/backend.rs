// SPDX-License-Identifier: Apache-2.0
//! The back end of `bench head-of-line`: one engine, two disks, and a slow tier.
//!
//! It prints `ready`, then reads lines of JSON: a [`FileKey`] names the memory whose pages will be absent;
//! `"absent"` and `"present"` make them so; `"report"` requests a [`TierReport`]. The end of input ends it.
//!
//! The tier is a thread that sleeps for the time of a page. It supplies one page after the other, which is
//! enough: the next fault comes long after. It has priority over the client on their CPU: the client polls
//! for B's answers, which a touching engine cannot give before the tier has run.

use super::frontend::Pages;
use crate::harness::rounds::progress;
use clap::ValueEnum;
use pagetide_addr::{FileKey, FilePage, PAGE_BYTES, PageResponse, ResponseCode};
use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, DpuError, OnFault, SocketAccess, Writes};
use pagetide_sys::{
    cpu::{self, Urgency},
    uffd::{FillOutcome, Userfaultfd, Watch, page_of},
};
use pagetide_vpri::{DmaDomain, DomainTable, Doorbell, HostEnd, LookUp};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead as _, Write as _},
    os::fd::AsFd as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Real-time priority of the tier: above the client's.
const PRIORITY: u8 = 20;

/// How an engine handles an absent page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FaultMode {
    /// Looks the page up before DMA, and parks the chain.
    Park,
    /// Touches it, and waits.
    Touch,
}

impl FaultMode {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Park => "park",
            Self::Touch => "touch",
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

/// Names a memory file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryName {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
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
}

/// Serves until the end of input.
///
/// # Errors
/// [`BackendError`].
pub fn serve(options: &BackendOptions) -> Result<(), BackendError> {
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
                FaultMode::Touch => LookUp::Off,
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
    let mut tier = Tier {
        domains,
        mode: options.mode,
        hold: Duration::from_micros(options.hold_us),
        waited_for: Arc::default(),
        // Of the one engine; the rest is the queue of alias faults.
        end: ends.into_iter().next(),
        bell,
        memory: None,
    };
    say(&"ready")?;
    for line in io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Order::Memory(name) => {
                let taken = tier.take(name);
                if let Err(reason) = &taken {
                    progress("head-of-line", reason);
                }
                say(&taken.is_ok())?;
            }
            Order::Pages(pages) => {
                tier.set(pages);
                say(&true)?;
            }
            Order::Word(Word::Report) => say(&TierReport {
                waited_for: tier.waited_for.swap(0, Ordering::Relaxed),
            })?,
        }
    }
    dpu.shut_down();
    Ok(())
}

fn say<T: Serialize>(answer: &T) -> Result<(), BackendError> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, answer)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// Where A's absent pages are.
struct Tier {
    domains: Arc<DomainTable>,
    mode: FaultMode,
    hold: Duration,
    waited_for: Arc<AtomicU64>,
    end: Option<HostEnd>,
    bell: Arc<Doorbell>,
    memory: Option<Arc<DmaDomain>>,
}

impl Tier {
    /// Starts to serve A's memory.
    fn take(&mut self, name: MemoryName) -> Result<(), String> {
        let key = FileKey {
            dev: name.dev,
            ino: name.ino,
        };
        let domain = self.domains.find(key);
        let domain = domain.ok_or("no disk has that memory")?;
        let (hold, waited_for) = (self.hold, self.waited_for.clone());
        let serve: Box<dyn FnOnce() + Send> = match self.mode {
            FaultMode::Park => {
                let end = self.end.take().ok_or("the memory is known already")?;
                let (domain, bell) = (domain.clone(), self.bell.clone());
                Box::new(move || bring_parked(&end, &bell, &domain, hold, &waited_for))
            }
            FaultMode::Touch => {
                let userfaultfd = watch(&domain)?;
                Box::new(move || bring_touched(&userfaultfd, hold, &waited_for))
            }
        };
        // It ends with the process.
        let thread = std::thread::Builder::new().name("tier".into());
        let spawned = thread.spawn(move || {
            if let Err(error) = cpu::set_urgency(Urgency::Preempting(PRIORITY)) {
                progress(
                    "head-of-line",
                    format_args!("the tier has no priority: {error}"),
                );
            }
            serve();
        });
        spawned.map_err(|error| error.to_string())?;
        self.memory = Some(domain);
        Ok(())
    }

    /// Sets A's pages in the bitmap. The client controls the file's content, which is all that an engine
    /// without look-ups sees.
    fn set(&self, pages: Pages) {
        let Some(domain) = &self.memory else {
            return;
        };
        let page_count = domain.len_bytes() / PAGE_BYTES;
        let all = FilePage(0).run(page_count);
        match (self.mode, pages) {
            (FaultMode::Touch, _) => {}
            (FaultMode::Park, Pages::Present) => domain.attributes().grant_all(),
            (FaultMode::Park, Pages::Absent) => {
                // Nothing is under way between two runs.
                let busy = domain.attributes().unmap_ranges(&[all]);
                debug_assert!(busy.is_empty());
            }
        }
    }
}

fn bring_parked(
    end: &HostEnd,
    bell: &Doorbell,
    domain: &DmaDomain,
    hold: Duration,
    waited_for: &AtomicU64,
) {
    loop {
        while let Some(request) = end.next() {
            std::thread::sleep(hold);
            domain.attributes().grant(request.pages, request.access);
            waited_for.fetch_add(request.pages.len(), Ordering::Relaxed);
            end.respond(PageResponse::to(&request, ResponseCode::Success));
        }
        bell.arm();
        if !end.has_request()
            && let Err(error) = poll(&mut [PollFd::new(bell, PollFlags::IN)], None)
        {
            progress(
                "head-of-line",
                format_args!("waiting for page requests: {error}"),
            );
            return;
        }
        if let Err(error) = bell.disarm() {
            progress("head-of-line", format_args!("the doorbell: {error}"));
            return;
        }
    }
}

fn watch(domain: &DmaDomain) -> Result<Userfaultfd, String> {
    let userfaultfd = Userfaultfd::create_here().map_err(|error| error.to_string())?;
    let api = userfaultfd.api(pagetide_sys::uffd::Features::WANTED);
    api.map_err(|error| error.to_string())?;
    let windows = domain.windows();
    if windows.is_empty() {
        return Err("no disk maps that memory".to_owned());
    }
    for window in windows {
        let bytes = window.len_bytes().next_multiple_of(PAGE_BYTES);
        let registered = userfaultfd.register(window.address(), bytes, Watch::Missing);
        registered.map_err(|error| error.to_string())?;
    }
    Ok(userfaultfd)
}

fn bring_touched(userfaultfd: &Userfaultfd, hold: Duration, waited_for: &AtomicU64) {
    let mut faults = Vec::new();
    loop {
        let mut polled = [PollFd::from_borrowed_fd(userfaultfd.as_fd(), PollFlags::IN)];
        if let Err(error) = poll(&mut polled, None) {
            progress(
                "head-of-line",
                format_args!("waiting for touched pages: {error}"),
            );
            return;
        }
        if let Err(error) = userfaultfd.read_faults(&mut faults) {
            progress(
                "head-of-line",
                format_args!("reading touched pages: {error}"),
            );
            return;
        }
        for fault in &faults {
            std::thread::sleep(hold);
            waited_for.fetch_add(1, Ordering::Relaxed);
            let at = page_of(fault.address);
            match userfaultfd.zeropage(at, PAGE_BYTES) {
                Ok(FillOutcome::Filled { .. }) => {}
                Ok(_) => {
                    if let Err(error) = userfaultfd.wake(at, PAGE_BYTES) {
                        progress("head-of-line", format_args!("waking the engine: {error}"));
                    }
                }
                Err(error) => progress("head-of-line", format_args!("bringing a page: {error}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_told_apart() {
        let order = |line| serde_json::from_str::<Order>(line).unwrap();
        let memory = order(r#"{"dev":1,"ino":2}"#);
        assert!(matches!(
            memory,
            Order::Memory(MemoryName { dev: 1, ino: 2 })
        ));
        assert!(matches!(order("\"absent\""), Order::Pages(Pages::Absent)));
        assert!(matches!(order("\"report\""), Order::Word(Word::Report)));
        assert!(serde_json::from_str::<Order>("\"nonsense\"").is_err());
    }
}
