// SPDX-License-Identifier: Apache-2.0
//! The service under test, tenants whose memory is all absent, and the DPU's end of their page fault
//! queue.
//!
//! Each request of a tenant is for its next page, and all of them are checked at the end. Beside the
//! injected wait, the worker has what every fault has: queue, gate, the page's word, room, the content from
//! zeros or by lz4, the write into the memory, grant, answer.

use crate::harness::{figures::to_f64, rounds::progress};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use pagetide_addr::{Access, PageNo, PageRequest, QueueId, RequestId, SECTION_PAGES};
use pagetide_sys::{clock::now_ns, cpu};
use pagetide_vpri::{
    DPU, DeviceEnd, DomainTable, Doorbell, FaultService, Handling, ServiceConfig, ServiceThread,
    TenantCpus, fault_queue,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::tenant_ram::{self, Filling, in_file};

/// Capacity of the queue: more than all tenants have outstanding.
const QUEUE_ENTRIES: usize = 4_096;
/// Most pages of a tenant, 512 MiB: faults beyond are of pages that are present by then.
const PAGES_MAX: u64 = 256 * SECTION_PAGES;
/// Priority of the device, which no thread of the host may delay.
const DEVICE_PRIORITY: u8 = 3;

pub(super) type Broken = Box<dyn std::error::Error + Send + Sync>;

/// A tenant to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct TenantPlan {
    /// CPU of its only vCPU.
    pub(super) cpu: usize,
    /// How many faults it will have.
    pub(super) faults: u64,
    /// What its pages hold.
    pub(super) filling: Filling,
}

/// A tenant.
struct Served {
    memory: tenant_ram::Tenant,
    pages: u64,
    /// Requests so far: the next one is for the page of this number.
    sent: AtomicU64,
    tenant: Arc<pagetide_vpri::Tenant>,
}

/// See the module.
pub(super) struct Rig {
    device: DeviceEnd,
    bell: Arc<Doorbell>,
    tenants: Vec<Served>,
    service: Arc<FaultService>,
    thread: ServiceThread,
}

impl Rig {
    /// The tenants of `plans`. The dispatcher runs where the calling thread may.
    pub(super) fn new(handling: Handling, plans: &[TenantPlan]) -> Result<Self, Broken> {
        let (bell, host_bell) = (Arc::new(Doorbell::new()?), Arc::new(Doorbell::new()?));
        let (device, host) = fault_queue(QUEUE_ENTRIES, Arc::clone(&bell), Arc::clone(&host_bell));
        let config = ServiceConfig {
            handling,
            ..ServiceConfig::default()
        };
        let service = FaultService::with(config, vec![host], host_bell);
        let table = DomainTable::new(1);
        let mut tenants = Vec::new();
        for plan in plans {
            let pages = plan.faults.clamp(1, PAGES_MAX);
            let mut memory = tenant_ram::Tenant::new(&table, pages, plan.filling)?;
            memory.evict_all()?;
            let (space, mmu) = (Arc::clone(&memory.space), Arc::clone(&memory.mmu));
            let tenant = service.add_tenant(space, mmu)?;
            tenant.set_cpus(TenantCpus::dedicated(&[plan.cpu]));
            tenants.push(Served {
                memory,
                pages,
                sent: AtomicU64::new(0),
                tenant,
            });
        }
        Ok(Self {
            device,
            bell,
            tenants,
            thread: service.start()?,
            service,
        })
    }

    /// Sends the next request of a tenant, which takes `hold_us` before its page is filled.
    pub(super) fn send(&self, id: u64, tenant: usize, hold_us: u32) -> Result<u64, Broken> {
        let served = &self.tenants[tenant];
        let page = PageNo(served.sent.fetch_add(1, Ordering::Relaxed) % served.pages);
        let sent_ns = now_ns();
        self.device.submit(PageRequest {
            vector: Some(0),
            sent_ns,
            hold_us,
            ..PageRequest::demand(
                RequestId(id),
                DPU,
                QueueId(0),
                served.memory.io.id(),
                in_file(page).single(),
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
        self.tenants[tenant].tenant.account().preempt.histogram_ns()
    }

    /// Time that the tenants' requests were handled, on average, wait included.
    pub(super) fn handling_mean(&self) -> Duration {
        let of_tenants = self.tenants.iter();
        let times = of_tenants.map(|served| served.tenant.account().handling.histogram_ns());
        let (mut sum_ns, mut count) = (0.0, 0_u64);
        for histogram in times {
            sum_ns += histogram.mean() * to_f64(histogram.len());
            count += histogram.len();
        }
        Duration::from_secs_f64(sum_ns / to_f64(count.max(1)) / 1e9)
    }

    /// Fails unless every page that was asked for is there, with its own content.
    pub(super) fn check_filled(&self) -> Result<(), Broken> {
        for served in &self.tenants {
            let asked_for = served.sent.load(Ordering::Relaxed).min(served.pages);
            for page in (0..asked_for).map(PageNo) {
                served.memory.check(page)?;
            }
        }
        Ok(())
    }

    pub(super) fn end(self) {
        for served in &self.tenants {
            self.service.remove_tenant(&served.tenant);
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
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyVcpu {
    pub(super) fn start(cpu: usize) -> Result<Self, Broken> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("vcpu".into())
            .spawn(move || {
                if let Err(error) = cpu::set_affinity(&[cpu]) {
                    progress("iopf-scale", format_args!("{error}"));
                }
                while !is_over.load(Ordering::Relaxed) {
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
        self.stop.store(true, Ordering::Relaxed);
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
