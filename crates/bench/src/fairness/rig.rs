// SPDX-License-Identifier: Apache-2.0
//! Two engines on one CPU, their disks, and a host that answers page requests at once.

use crate::harness::rounds::progress;
use pagetide_addr::{PageResponse, ResponseCode};
use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, DpuError, OnFault, Writes};
use pagetide_vpri::{DmaDomain, DomainTable, Doorbell, HostEnd, LookUp};
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

/// Bytes of each image: fits into any page cache, and a large read covers it.
pub(super) const IMAGE_BYTES: u64 = 64 << 20;
/// Queues of the hostile tenant's disk.
pub(super) const HOSTILE_QUEUES: u16 = 4;

/// CPUs of the parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct TenantCpus {
    pub engines: usize,
    pub clients: usize,
}

impl TenantCpus {
    /// The last CPU for engines and the one before it for clients; the same if there is one.
    pub fn choose(cpus: &[usize]) -> Self {
        let engines = cpus.last().copied().unwrap_or(0);
        let clients = cpus.iter().rev().nth(1).copied().unwrap_or(engines);
        Self { engines, clients }
    }
}

/// Why there is no rig.
#[derive(Debug, thiserror::Error)]
pub(super) enum RigError {
    #[error(transparent)]
    Dpu(#[from] DpuError),
    #[error("images, doorbells or threads: {0}")]
    Io(#[from] io::Error),
}

/// One engine and its host.
struct Side {
    dpu: Dpu,
    host: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
}

/// Both engines.
pub(super) struct Rig {
    sides: [Side; 2],
    /// Memory of which pages come and go.
    pub faulting: Arc<Faulting>,
    pub domains: Arc<DomainTable>,
    dir: tempfile::TempDir,
}

impl Rig {
    pub fn start(at: TenantCpus) -> Result<Self, RigError> {
        let dir = tempfile::Builder::new()
            .prefix("pagetide-bench-fairness-")
            .tempdir()?;
        let faulting = Arc::default();
        let domains = Arc::new(DomainTable::new(1));
        let sides = [
            Side::start(&dir.path().join("one"), at, &domains, &faulting)?,
            Side::start(
                &dir.path().join("two"),
                at,
                &Arc::new(DomainTable::new(1)),
                &faulting,
            )?,
        ];
        let rig = Self {
            sides,
            faulting,
            domains,
            dir,
        };
        rig.sides[0].add(&rig.hostile(), HOSTILE_QUEUES)?;
        rig.sides[0].add(&rig.steady_beside(), 1)?;
        rig.sides[1].add(&rig.steady_apart(), 1)?;
        Ok(rig)
    }

    /// Socket of the hostile tenant's disk.
    pub fn hostile(&self) -> PathBuf {
        self.dir.path().join("hostile")
    }

    /// Socket of the steady tenant's disk on the same engine.
    pub fn steady_beside(&self) -> PathBuf {
        self.dir.path().join("beside")
    }

    /// The same on a separate engine.
    pub fn steady_apart(&self) -> PathBuf {
        self.dir.path().join("apart")
    }
}

/// The memory whose pages are evicted all the time, once it is known.
pub type Faulting = Mutex<Option<Arc<DmaDomain>>>;

impl Side {
    fn start(
        state_dir: &Path,
        at: TenantCpus,
        domains: &Arc<DomainTable>,
        faulting: &Arc<Faulting>,
    ) -> Result<Self, RigError> {
        std::fs::create_dir(state_dir)?;
        let bell = Arc::new(Doorbell::new()?);
        let mut config = DpuConfig::new(state_dir.to_owned());
        config.cpus = vec![at.engines];
        let (dpu, ends) = Dpu::start(&config, Arc::clone(domains), &bell)?;
        let stop = Arc::new(AtomicBool::new(false));
        let host = {
            let (bell, stop, faulting) = (bell.clone(), stop.clone(), Arc::clone(faulting));
            let thread = std::thread::Builder::new().name("host".into());
            thread.spawn(move || answer(&ends, &bell, &stop, &faulting))?
        };
        Ok(Self {
            dpu,
            host: Some(host),
            stop,
            bell,
        })
    }

    fn add(&self, socket: &Path, queue_count: u16) -> Result<(), RigError> {
        let image = socket.with_extension("image");
        let mut file = std::fs::File::create(&image)?;
        let block = vec![0x5a_u8; 1 << 20];
        for _ in 0..IMAGE_BYTES >> 20 {
            file.write_all(&block)?;
        }
        // Nothing must be written back during the measurement.
        file.sync_all()?;
        self.dpu.add_blk(BlkConfig {
            socket: socket.to_owned(),
            image,
            queue_count,
            writes: Writes::Taken,
            look_up: LookUp::On,
            serial: "bench".into(),
            // Through the page cache, which holds the image.
            direct_io: DirectIo::Off,
            on_fault: OnFault::OutOfOrder,
            ram: pagetide_dpu::RamPolicy::default(),
            image_use: crate::blk::side::SHARED_IMAGE,
            access: pagetide_dpu::SocketAccess::default(),
        })?;
        Ok(())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.dpu.shut_down();
        self.stop.store(true, Ordering::SeqCst);
        self.bell.ring_anyway();
        if let Some(host) = self.host.take()
            && host.join().is_err()
        {
            progress("fairness", "the host's thread panicked");
        }
    }
}

/// Grants all requests at once.
fn answer(ends: &[HostEnd], bell: &Doorbell, stop: &AtomicBool, faulting: &Faulting) {
    while !stop.load(Ordering::SeqCst) {
        for end in ends {
            while let Some(request) = end.next() {
                let memory = faulting.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(domain) = memory.as_ref().filter(|d| d.id() == request.domain) {
                    domain.attributes().grant(request.pages, request.access);
                }
                drop(memory);
                end.respond(PageResponse::to(&request, ResponseCode::Success));
            }
        }
        bell.arm();
        let waited = match ends.iter().any(HostEnd::has_request) {
            true => Ok(0),
            false => poll(&mut [PollFd::new(bell, PollFlags::IN)], None),
        };
        if waited.is_err() || bell.disarm().is_err() {
            progress("fairness", "waiting for page requests failed");
            return;
        }
    }
}
