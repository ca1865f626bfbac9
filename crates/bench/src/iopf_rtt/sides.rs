// SPDX-License-Identifier: Apache-2.0
//! The ways of a device's page request: each has a tenant, a device, and a fault handler.
//!
//! A device is the bench's own thread, which represents hardware: it keeps its CPU while it waits, so that
//! the way of the request is measured and not how a device sleeps.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use pagetide_addr::{
    Access, DeviceId, DomainId, FilePage, PageNo, PageRequest, PageResponse, QueueId, RequestId,
    ResponseCode,
};
use pagetide_ats_pri::{
    DeviceConfig, DeviceModel, InterruptThread, Iommu, IommuConfig, Polling, PriSource, RequesterId,
};
use pagetide_gmem::{Fault, FaultOutcome};
use pagetide_sys::{
    clock::now_ns,
    cpu::{self, Urgency},
    mapping::SharedMapping,
};
use pagetide_vpri::{
    DPU, DeviceEnd, DomainTable, Doorbell, EnginePort, FaultAssist, FaultService, FaultSource,
    HostEnd, IdleEngines, LookUp, RamWindow, ServiceConfig, ServiceThread, TenantCpus, fault_queue,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::PAGES;
use crate::tenant_ram::{Filling, Tenant, failed, in_file, stamp};

/// Longest wait for an answer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// One crossing of PCIe in the model of ATS and PRI: VPRI 2.1 gives both directions of a translation
/// request as about a microsecond.
pub(super) const CROSSING: Duration = Duration::from_nanos(500);

/// The parts of one round trip, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Split {
    /// From the device's detection that the page is absent until its handling begins.
    pub(super) pre_ns: u64,
    /// Handling.
    pub(super) handling_ns: u64,
    /// From there until the device may touch the page.
    pub(super) post_ns: u64,
}

impl Split {
    pub(super) fn total_ns(&self) -> u64 {
        self.pre_ns + self.handling_ns + self.post_ns
    }
}

/// A way to be measured.
pub(super) trait Side {
    /// The tenant whose pages are hidden or evicted.
    fn tenant(&mut self) -> &mut Tenant;

    /// A DMA to `page`, which is absent.
    fn fault(&mut self, page: PageNo) -> Result<Split, String>;
}

/// Whether the page has the expected content.
pub(super) fn check(memory: &SharedMapping, page: PageNo) -> Result<(), String> {
    let words = memory.atomic_u64s(page.byte_offset(), 1);
    match words.and_then(|words| words.first()) {
        Some(word) if word.load(Ordering::Relaxed) == stamp(page) => Ok(()),
        _ => Err(format!("{page} has lost its content")),
    }
}

fn check_window(window: &RamWindow, page: PageNo) -> Result<(), String> {
    let mut word = [0; 8];
    match window.copy_from(page.byte_offset(), &mut word) {
        Ok(()) if u64::from_ne_bytes(word) == stamp(page) => Ok(()),
        _ => Err(format!("{page} has lost its content")),
    }
}

/// The service of one tenant, whose vCPUs are on one CPU.
pub(super) struct Served {
    service: Arc<FaultService>,
    thread: Option<ServiceThread>,
}

impl Served {
    pub(super) fn new(
        tenant: &Tenant,
        hosts: Vec<HostEnd>,
        source: Option<Arc<dyn FaultSource>>,
        bell: Arc<Doorbell>,
        cpu: usize,
        idle_engines: IdleEngines,
    ) -> Result<Self, String> {
        let wrong = failed("the fault service");
        let config = ServiceConfig {
            idle_engines,
            ..ServiceConfig::default()
        };
        let service = FaultService::with(config, hosts, bell);
        let taken = service.add_tenant(Arc::clone(&tenant.space), Arc::clone(&tenant.mmu));
        taken
            .map_err(|e| wrong(&e))?
            .set_cpus(TenantCpus::dedicated(&[cpu]));
        if let Some(source) = source {
            service.add_source(source);
        }
        let thread = service.start().map_err(|e| wrong(&e))?;
        Ok(Self {
            service,
            thread: Some(thread),
        })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop();
        }
    }
}

/// VPRI within one process: an engine's queue, the service or the idle engine itself, a response.
pub(super) struct InProcess {
    _served: Served,
    assist: Arc<dyn FaultAssist>,
    tenant: Tenant,
    engine: Engine,
}

/// The device's side of VPRI: bitmap and queue.
pub(super) struct Engine {
    port: EnginePort,
    end: DeviceEnd,
    last_id: u64,
}

impl InProcess {
    pub(super) fn new(idle_engines: IdleEngines, cpu: usize) -> Result<Self, String> {
        let wrong = failed("the software DPU");
        let domains = DomainTable::new(1);
        let tenant = Tenant::new(&domains, PAGES, Filling::Programs)?;
        let window = domains
            .map_whole(std::os::fd::AsFd::as_fd(tenant.file()))
            .map_err(|e| wrong(&e))?;
        let port = EnginePort::new(window, 0, LookUp::On).map_err(|e| wrong(&e))?;
        let [engine_bell, host_bell] = [Doorbell::new(), Doorbell::new()];
        let engine_bell = Arc::new(engine_bell.map_err(|e| wrong(&e))?);
        let host_bell = Arc::new(host_bell.map_err(|e| wrong(&e))?);
        let (end, host) = fault_queue(64, engine_bell, Arc::clone(&host_bell));
        let served = Served::new(&tenant, vec![host], None, host_bell, cpu, idle_engines)?;
        Ok(Self {
            assist: Arc::clone(&served.service) as _,
            _served: served,
            tenant,
            engine: Engine::new(port, end),
        })
    }
}

impl Side for InProcess {
    fn tenant(&mut self) -> &mut Tenant {
        &mut self.tenant
    }

    fn fault(&mut self, page: PageNo) -> Result<Split, String> {
        let assist = &self.assist;
        let mut first = true;
        self.engine.fault(page, |end| {
            // Once: requests that the engine cannot serve itself go to the service.
            if std::mem::take(&mut first) && !assist.assist(0) {
                end.kick();
            }
        })
    }
}

impl Engine {
    pub(super) fn new(port: EnginePort, end: DeviceEnd) -> Self {
        Self {
            port,
            end,
            last_id: 0,
        }
    }

    /// Faults on `page`; calls `wait` after the request was queued, and then repeatedly.
    pub(super) fn fault(
        &mut self,
        page: PageNo,
        mut wait: impl FnMut(&DeviceEnd),
    ) -> Result<Split, String> {
        if let Some(lease) = self.port.lease(in_file(page).single(), Access::Write) {
            self.port.release(lease);
            return Err(format!("{page} is not absent"));
        }
        let absent_ns = now_ns();
        self.last_id += 1;
        let (id, domain) = (RequestId(self.last_id), self.port.domain().id());
        let request = demand(id, domain, page, absent_ns);
        self.end
            .submit(request)
            .map_err(|e| failed("a page request")(&e))?;
        let begun = Instant::now();
        let response = loop {
            wait(&self.end);
            if let Some(response) = self.end.next() {
                break response;
            }
            if begun.elapsed() > ANSWER_WAIT {
                return Err(format!("no response for {page}"));
            }
            std::hint::spin_loop();
        };
        if response.code != ResponseCode::Success {
            return Err(format!("{page} ended with {:?}", response.code));
        }
        let Some(lease) = self.port.lease(in_file(page).single(), Access::Write) else {
            return Err(format!("{page} is absent after its response"));
        };
        let total_ns = now_ns() - absent_ns;
        let checked = check_window(self.port.window(), page);
        self.port.release(lease);
        checked.map(|()| Split {
            pre_ns: response.waited_ns,
            handling_ns: response.handling_ns,
            post_ns: total_ns.saturating_sub(response.waited_ns + response.handling_ns),
        })
    }
}

fn demand(id: RequestId, domain: DomainId, page: PageNo, sent_ns: u64) -> PageRequest {
    PageRequest {
        sent_ns,
        ..PageRequest::demand(
            id,
            DeviceId(2),
            QueueId(0),
            domain,
            in_file(page).single(),
            Access::Write,
        )
    }
}

/// The handler of the groups that the IOMMU's interrupt thread has received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Bottom {
    /// The service.
    Service,
    /// A work queue as in Linux: a thread of the ordinary class, on any CPU.
    WorkQueue,
}

/// ATS and PRI by the model.
pub(super) struct AtsPri {
    _interrupts: InterruptThread,
    _bottom: Handlers,
    told: Arc<TimedPriSource>,
    tenant: Tenant,
    device: DeviceModel,
}

/// Kept until the side is dropped.
#[expect(dead_code, reason = "dropped, and so ended, with the side")]
enum Handlers {
    Service(Served),
    WorkQueue(WorkQueue),
}

/// The source of the model. A page group response has only a code, so the times of the handling are
/// recorded where it is sent.
struct TimedPriSource {
    source: Arc<PriSource>,
    waited_ns: AtomicU64,
    handling_ns: AtomicU64,
}

impl FaultSource for TimedPriSource {
    fn next(&self) -> Option<PageRequest> {
        self.source.next()
    }

    fn arm(&self) -> bool {
        self.source.arm()
    }

    fn respond(&self, response: PageResponse) {
        self.waited_ns.store(response.waited_ns, Ordering::Relaxed);
        self.handling_ns
            .store(response.handling_ns, Ordering::Relaxed);
        self.source.respond(response);
    }
}

impl AtsPri {
    pub(super) fn new(bottom: Bottom, cpu: usize) -> Result<Self, String> {
        let wrong = failed("the model of ATS and PRI");
        let iommu = Iommu::new(IommuConfig {
            crossing: CROSSING,
            ..IommuConfig::default()
        });
        let iommu = iommu.map_err(|e| wrong(&e))?;
        let tenant = Tenant::new(&*iommu, PAGES, Filling::Programs)?;
        let bytes = tenant.io.len_bytes();
        let file = std::os::fd::AsFd::as_fd(tenant.file());
        let space = iommu.open_space(file, tenant.io.key(), bytes);
        let config = DeviceConfig {
            polling: Polling::Spin,
            answer_wait: ANSWER_WAIT,
            ..DeviceConfig::new(RequesterId(0x100))
        };
        let space = space.map_err(|e| wrong(&e))?;
        let device = DeviceModel::new(&iommu, &space, config).map_err(|e| wrong(&e))?;
        let bell = Arc::new(Doorbell::new().map_err(|e| wrong(&e))?);
        let source = PriSource::new(iommu, Arc::clone(&bell));
        let interrupts = source
            .start(vec![cpu], Urgency::Preempting(50))
            .map_err(|e| wrong(&e))?;
        let told = Arc::new(TimedPriSource {
            source,
            waited_ns: AtomicU64::new(0),
            handling_ns: AtomicU64::new(0),
        });
        let bottom = match bottom {
            Bottom::Service => {
                let source = Arc::clone(&told) as Arc<dyn FaultSource>;
                Handlers::Service(Served::new(
                    &tenant,
                    vec![],
                    Some(source),
                    bell,
                    cpu,
                    IdleEngines::Serve,
                )?)
            }
            Bottom::WorkQueue => {
                Handlers::WorkQueue(WorkQueue::start(Arc::clone(&told), bell, &tenant)?)
            }
        };
        Ok(Self {
            _interrupts: interrupts,
            _bottom: bottom,
            told,
            tenant,
            device,
        })
    }
}

impl Side for AtsPri {
    fn tenant(&mut self) -> &mut Tenant {
        &mut self.tenant
    }

    fn fault(&mut self, page: PageNo) -> Result<Split, String> {
        let mut checked = Ok(());
        let touch = &mut |touched: FilePage, memory: &SharedMapping| {
            debug_assert_eq!(touched, in_file(page));
            checked = check(memory, page);
        };
        let report = self
            .device
            .dma(in_file(page).single(), Access::Write, touch);
        let report = report.map_err(|e| failed("a DMA")(&e))?;
        checked?;
        let (Some(absent), Some(resumed)) = (report.absent_at, report.resumed_at) else {
            return Err(format!("{page} is not absent"));
        };
        let total_ns = resumed.duration_since(absent).as_nanos();
        let total_ns = u64::try_from(total_ns).unwrap_or(u64::MAX);
        let pre_ns = self.told.waited_ns.load(Ordering::Relaxed);
        let handling_ns = self.told.handling_ns.load(Ordering::Relaxed);
        Ok(Split {
            pre_ns,
            handling_ns,
            post_ns: total_ns.saturating_sub(pre_ns + handling_ns),
        })
    }
}

/// See [`Bottom::WorkQueue`].
struct WorkQueue {
    stop: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

impl WorkQueue {
    fn start(
        source: Arc<TimedPriSource>,
        bell: Arc<Doorbell>,
        tenant: &Tenant,
    ) -> Result<Self, String> {
        let stop: Arc<AtomicBool> = Arc::default();
        let (told, its_bell) = (Arc::clone(&stop), Arc::clone(&bell));
        let (space, mmu) = (Arc::clone(&tenant.space), Arc::clone(&tenant.mmu));
        let thread = std::thread::Builder::new()
            .name("iopf".into())
            .spawn(move || {
                while !told.load(Ordering::Acquire) {
                    while let Some(request) = source.next() {
                        let began_ns = now_ns();
                        let source = Arc::clone(&source);
                        let reply =
                            move |outcome| source.respond(answer(&request, began_ns, outcome));
                        match mmu.in_space(request.domain, request.pages) {
                            None => reply(FaultOutcome::OutOfRange),
                            Some(pages) => {
                                let (device, access) = (DPU, request.access);
                                let fault = Fault {
                                    device,
                                    pages,
                                    access,
                                };
                                Tenant::fault(&space, &fault, reply);
                            }
                        }
                    }
                    sleep(&its_bell, &|| source.arm() || told.load(Ordering::Acquire));
                }
            });
        Ok(Self {
            stop,
            bell,
            thread: Some(thread.map_err(|e| failed("a thread")(&e))?),
        })
    }
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring_anyway();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the work queue of a bench has panicked");
        }
    }
}

fn answer(request: &PageRequest, began_ns: u64, outcome: FaultOutcome) -> PageResponse {
    let code = match outcome {
        FaultOutcome::Present => ResponseCode::Success,
        FaultOutcome::OutOfRange => ResponseCode::InvalidRequest,
        FaultOutcome::Lost | FaultOutcome::Gone => ResponseCode::ResponseFailure,
    };
    PageResponse {
        waited_ns: began_ns.saturating_sub(request.sent_ns),
        handling_ns: now_ns().saturating_sub(began_ns),
        ..PageResponse::to(request, code)
    }
}

/// Sleeps until `bell` rings, unless there is work; at most a second.
pub(super) fn sleep(bell: &Doorbell, is_something: &dyn Fn() -> bool) {
    bell.arm();
    if !is_something() {
        let second = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let polled = poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&second));
        if let Err(error) = polled
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "a thread of a bench cannot sleep");
        }
    }
    if let Err(error) = bell.disarm() {
        tracing::error!(%error, "a doorbell of a bench is broken");
    }
}

/// CPUs of the bench: the device's, and that of host and tenant.
pub(super) fn cpus() -> Result<(usize, usize), String> {
    let cpus = cpu::affinity().map_err(|e| failed("the CPUs")(&e))?;
    match (cpus.first(), cpus.last()) {
        (Some(device), Some(host)) if device != host => Ok((*device, *host)),
        _ => Err("it needs two CPUs: one stands for the device, one is the tenant's".into()),
    }
}
