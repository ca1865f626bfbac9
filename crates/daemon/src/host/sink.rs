// SPDX-License-Identifier: Apache-2.0
//! Receivers of the reports of one VM's fault reader and address space: [`VmSink`] and [`VmIncidents`].

use super::janitor_bell::JanitorBell;
use pagetide_addr::{DeviceId, PageNo, PageRange};
use pagetide_gmem::{
    AddressSpace, Cause, Fault, Incidents, PlaceError, Readahead, StoreError, Wait,
};
use pagetide_swap::{Counter, Limit, Pool};
use pagetide_vmm::{
    process::{VmmIdentity, VmmProcess},
    reader::{FaultSink, ReaderError, Served, VcpuFault},
};
use pagetide_vpri::Latencies;
use rustix::process::Signal;
use std::{
    error::Error,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Serves the faults of one VM's vCPUs, on the reader's thread and its server threads.
pub(super) struct VmSink {
    pub(super) vmm: VmmIdentity,
    pub(super) space: Arc<AddressSpace>,
    pub(super) limit: Arc<Limit>,
    pub(super) pool: Arc<Pool>,
    pub(super) latencies: Arc<Latencies>,
    pub(super) janitor: JanitorBell,
}

/// Counts a fault and its latency, from when it was read until now.
fn count(latencies: &Latencies, pool: &Pool, fault: VcpuFault) {
    latencies.record(fault.read_at.elapsed());
    pool.counter(Counter::VcpuFaults)
        .fetch_add(1, Ordering::Relaxed);
}

fn of_vcpu(fault: VcpuFault) -> Cause<'static> {
    Cause::Fault(Fault {
        device: DeviceId::VCPUS,
        pages: fault.page.single(),
        access: fault.access,
    })
}

impl VmSink {
    /// Counts a fault whose page another request has installed or will install, or whose load has begun: when the page
    /// is there.
    fn count_when_there(&self, fault: VcpuFault) {
        match self.space.memory() {
            Some(memory) if memory.is_being_loaded(fault.page) => {
                let (latencies, pool) = (Arc::clone(&self.latencies), Arc::clone(&self.pool));
                let there = move |_| count(&latencies, &pool, fault);
                memory.tell_filled(fault.page, Box::new(there));
            }
            _ => count(&self.latencies, &self.pool, fault),
        }
    }
}

impl FaultSink for VmSink {
    fn fault_at_once(&self, fault: VcpuFault) -> Served {
        // Incidents report outcomes that matter; the vCPU sees the outcome when it retries.
        match self.space.fault(&of_vcpu(fault), Wait::Begin) {
            // Installed by this request: what most faults are.
            Some(served) if served.installed != 0 => {
                count(&self.latencies, &self.pool, fault);
                Served::Yes
            }
            Some(_nothing_installed) => {
                self.count_when_there(fault);
                Served::Yes
            }
            None => Served::WouldWait,
        }
    }

    fn fault(&self, fault: VcpuFault) {
        let (latencies, pool) = (Arc::clone(&self.latencies), Arc::clone(&self.pool));
        // Told when the page is there: the content may be on a disk, and this thread does not wait for that.
        let there = move |_| count(&latencies, &pool, fault);
        self.space
            .fault(&of_vcpu(fault), Wait::Reply(Box::new(there)));
    }

    fn served(&self, fault: VcpuFault) -> Option<PageRange> {
        let memory = self.space.memory()?;
        match memory.readahead_after(fault.page)? {
            Readahead::Around(pages) => Some(pages),
            at_once @ (Readahead::Next(_) | Readahead::SwapIn(_)) => {
                memory.fault(&Cause::Readahead(at_once), Wait::Never);
                None
            }
        }
    }

    fn bring_along(&self, pages: PageRange) {
        if let Some(memory) = self.space.memory() {
            let around = Cause::Readahead(Readahead::Around(pages));
            memory.fault(&around, Wait::Never);
        }
    }

    fn is_short_of_room(&self) -> bool {
        self.limit.is_short_of_room()
    }

    fn make_room(&self) {
        self.limit.make_room_ahead();
    }

    /// The janitor watches the process itself, independent of this reader.
    fn vmm_gone(&self) {
        tracing::debug!(pid = self.vmm.pid, "no fault comes any more");
    }

    fn reader_failed(&self, error: &ReaderError) {
        self.janitor.reader_failed(self.vmm, error.to_string());
    }
}

/// How many failures are logged individually before only every thousandth is.
const LOGGED_ONE_BY_ONE: u64 = 10;

/// Handles trouble with one VM's pages.
pub(super) struct VmIncidents {
    name: String,
    process: VmmProcess,
    failures: AtomicU64,
    stopped: Mutex<Option<String>>,
}

impl VmIncidents {
    pub(super) fn new(name: &str, process: VmmProcess) -> Self {
        Self {
            name: name.to_owned(),
            process,
            failures: AtomicU64::new(0),
            stopped: Mutex::new(None),
        }
    }

    /// Why the VM was stopped, if it was.
    pub(super) fn stopped(&self) -> Option<String> {
        self.stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Stops the VMM: a VM that stands still is better than one that reads wrong bytes.
    pub(super) fn stop_vm(&self, why: String) {
        tracing::error!(
            vm = self.name,
            pid = self.process.pid(),
            why,
            "stopping the VM (SIGSTOP)"
        );
        if let Err(error) = self.process.signal(Signal::STOP) {
            tracing::error!(vm = self.name, %error, "the VM could not be stopped");
        }
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }
}

impl Incidents for VmIncidents {
    fn foreign_page(&self, page: PageNo) {
        self.stop_vm(format!(
            "page {page} appeared though its content is stored: another process has written to the VM's RAM; \
             find it (grep the VM's memfd in /proc/*/maps), stop it, and restore the VM from its last good state"
        ));
    }

    fn poisoned(&self, page: PageNo, why: &StoreError) {
        tracing::error!(vm = self.name, %page, %why, "the page's content is lost; accesses to it fail from now on");
    }

    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        self.stop_vm(format!(
            "page {page} is lost, and accesses to it cannot be made to fail: {why}"
        ));
    }

    fn fill_failed(&self, page: PageNo, why: &dyn Error) {
        let before = self.failures.fetch_add(1, Ordering::Relaxed);
        if before < LOGGED_ONE_BY_ONE || before.is_multiple_of(1_000) {
            tracing::error!(vm = self.name, %page, %why, failures = before + 1, "a page could not be served");
        }
    }
}
