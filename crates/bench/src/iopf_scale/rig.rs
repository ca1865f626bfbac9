// SPDX-License-Identifier: Apache-2.0
//! The service under test, tenants whose memory is all present, and the DPU's end of their page fault
//! queue.
//!
//! The fault's work is the injected wait; the rest is common to every fault: queue, dispatcher, worker,
//! gate, check of the page, grant, answer.

use crate::harness::rounds::progress;
use std::{
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use pagetide_addr::{
    Access, FilePage, PAGE_BYTES, PageNo, PageRange, PageRequest, QueueId, RequestId,
    SECTION_PAGES, Va,
};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, Content, ContentStore, Device, Incidents, Installed,
    MemoryParts, Mode, PageTable, PagedMemory, Place, PlaceError, RegionRequest, StoreError,
    Unlimited, VolatileWords,
};
use pagetide_sys::{clock::now_ns, cpu, memory_file::GuestFile};
use pagetide_vpri::{
    DPU, DeviceEnd, DmaDomain, DmaMmu, DomainTable, Doorbell, FaultService, Handling, IoSpace,
    ServiceConfig, ServiceThread, Tenant, TenantCpus, fault_queue,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Capacity of the queue: more than all tenants have outstanding.
const QUEUE_ENTRIES: usize = 4_096;
/// Pages of a tenant: which of them faults makes no difference.
const PAGES: u64 = SECTION_PAGES;
/// Priority of the device, which no thread of the host may delay.
const DEVICE_PRIORITY: u8 = 3;

pub(super) type Broken = Box<dyn std::error::Error + Send + Sync>;

/// See the module.
pub(super) struct Rig {
    device: DeviceEnd,
    bell: Arc<Doorbell>,
    tenants: Vec<(Arc<DmaDomain>, Arc<Tenant>)>,
    service: Arc<FaultService>,
    thread: ServiceThread,
}

impl Rig {
    /// A tenant for each of `cpus`, which is the CPU of its only vCPU. The dispatcher runs where the
    /// calling thread may.
    pub(super) fn new(handling: Handling, cpus: &[usize]) -> Result<Self, Broken> {
        let (bell, host_bell) = (Arc::new(Doorbell::new()?), Arc::new(Doorbell::new()?));
        let (device, host) = fault_queue(QUEUE_ENTRIES, Arc::clone(&bell), Arc::clone(&host_bell));
        let config = ServiceConfig {
            handling,
            ..ServiceConfig::default()
        };
        let service = FaultService::with(config, vec![host], host_bell);
        let table = DomainTable::new(1);
        let mut tenants = Vec::new();
        for cpu in cpus {
            let (domain, space, mmu) = memory(&table)?;
            let tenant = service.add_tenant(space, mmu)?;
            tenant.set_cpus(TenantCpus::dedicated(&[*cpu]));
            tenants.push((domain, tenant));
        }
        Ok(Self {
            device,
            bell,
            tenants,
            thread: service.start()?,
            service,
        })
    }

    /// Sends one request of a tenant, held for `hold_us`.
    pub(super) fn send(&self, id: u64, tenant: usize, hold_us: u32) -> Result<u64, Broken> {
        let (domain, _) = &self.tenants[tenant];
        let page = FilePage(id % PAGES).single();
        let sent_ns = now_ns();
        self.device.submit(PageRequest {
            vector: Some(0),
            sent_ns,
            hold_us,
            ..PageRequest::demand(
                RequestId(id),
                DPU,
                QueueId(0),
                domain.id(),
                page,
                Access::Write,
            )
        })?;
        Ok(sent_ns)
    }

    /// Notifies the service of requests.
    pub(super) fn kick(&self) {
        self.device.kick();
    }

    /// Number of the next request that was answered.
    pub(super) fn answered(&self) -> Option<u64> {
        self.device.next().map(|response| response.id.0)
    }

    /// Sleeps until an answer comes, or at most `time`.
    pub(super) fn sleep(&self, time: Duration) -> Result<(), Broken> {
        self.bell.arm();
        if !self.device.has_response() {
            let time = Timespec::try_from(time)?;
            let mut polled = [PollFd::new(&self.bell, PollFlags::IN)];
            match poll(&mut polled, Some(&time)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.bell.disarm()?)
    }

    /// Time to preempt the CPU for a tenant's requests, in nanoseconds.
    pub(super) fn preempt_ns(&self, tenant: usize) -> hdrhistogram::Histogram<u64> {
        let (_, tenant) = &self.tenants[tenant];
        tenant.account().preempt.histogram_ns()
    }

    pub(super) fn end(self) {
        for (_, tenant) in &self.tenants {
            self.service.remove_tenant(tenant);
        }
        self.thread.stop();
    }
}

/// Runs `work` on a thread that acts as the device: on `cpus`, with priority over every other.
pub(super) fn as_device<R: Send>(cpus: &[usize], work: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            for done in [
                cpu::set_affinity(cpus).map_err(Broken::from),
                cpu::set_urgency(cpu::Urgency::Preempting(DEVICE_PRIORITY)).map_err(Broken::from),
            ] {
                if let Err(error) = done {
                    progress("iopf-scale", format_args!("{error}"));
                }
            }
            work()
        });
        match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// A vCPU that computes, on its own CPU, until it is dropped.
pub(super) struct BusyVcpu {
    stop: Arc<std::sync::atomic::AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyVcpu {
    pub(super) fn start(cpu: usize) -> Result<Self, Broken> {
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("vcpu".into())
            .spawn(move || {
                if let Err(error) = cpu::set_affinity(&[cpu]) {
                    progress("iopf-scale", format_args!("{error}"));
                }
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for BusyVcpu {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            progress("iopf-scale", "a vCPU ended by a panic");
        }
    }
}

/// Time until `at`.
pub(super) fn time_left(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now())
}

type Memory = (Arc<DmaDomain>, Arc<AddressSpace>, Arc<DmaMmu>);

/// Memory of a tenant, with its domain.
fn memory(table: &DomainTable) -> Result<Memory, Broken> {
    let bytes = PAGES * PAGE_BYTES;
    let file = GuestFile::new_memfd("iopf-scale", bytes)?;
    let domain = table.open(file.key()?, bytes)?;
    domain.attach()?;
    IoSpace::unmap_all(&*domain);
    let all = PageNo(0).run(PAGES);
    let memory = PagedMemory::new(MemoryParts {
        table: PageTable::growing(Box::new(VolatileWords::with_capacity(PAGES))),
        place: Arc::new(Resident),
        store: Arc::new(Resident),
        admission: Arc::new(Unlimited),
        incidents: Arc::new(Resident),
        neighbours_max: 0,
    });
    let mmu = Arc::new(DmaMmu::new([(
        Arc::clone(&domain) as Arc<dyn IoSpace>,
        all,
    )]));
    let space = AddressSpace::over(memory, Va(0), Va(bytes), AllocPolicy::default())?;
    let dpu = Device::with_id(DPU, Arc::clone(&mmu) as _);
    space.attach(&dpu, Mode::Coherent, Activation::Now)?;
    space.alloc(&RegionRequest::of_bytes(bytes))?;
    Ok((domain, space, mmu))
}

/// Memory whose pages are all present, always.
struct Resident;

impl Place for Resident {
    fn install(&self, _: PageNo, _: &[u8; 4096]) -> Result<Installed, PlaceError> {
        Ok(Installed::AlreadyThere)
    }
    fn install_zero(&self, _: PageNo) -> Result<Installed, PlaceError> {
        Ok(Installed::AlreadyThere)
    }
    fn install_run(&self, _: PageRange, _: &[u8]) -> Result<u64, PlaceError> {
        Ok(0)
    }
    fn read(&self, _: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        into.fill(0);
        Ok(())
    }
    fn discard(&self, _: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn is_present(&self, _: PageNo) -> Result<bool, PlaceError> {
        Ok(true)
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        Ok(vec![pages])
    }
    fn wake(&self, _: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, _: PageNo) -> Result<(), PlaceError> {
        Ok(())
    }
}

impl ContentStore for Resident {
    fn load(&self, _: PageNo, _: Content, into: &mut [u8; 4096]) -> Result<(), StoreError> {
        into.fill(0);
        Ok(())
    }
    fn free(&self, _: Content) {}
}

impl Incidents for Resident {
    fn foreign_page(&self, page: PageNo) {
        progress("iopf-scale", format_args!("a foreign page in {page}"));
    }
    fn poisoned(&self, page: PageNo, why: &StoreError) {
        progress("iopf-scale", format_args!("{page}: {why}"));
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        progress("iopf-scale", format_args!("{page}: {why}"));
    }
    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        progress("iopf-scale", format_args!("{page}: {why}"));
    }
}
