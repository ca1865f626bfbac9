// SPDX-License-Identifier: Apache-2.0
//! The I/O page fault service: the host's side of the page fault queues (VPRI 6, 6.1).
//!
//! ```text
//!   engines ══ page requests ══► dispatcher ── content at hand, room under the limit ──► response
//!                                    │
//!                                    └─ must wait ──► worker of that tenant ───────────► response
//! ```
//! One dispatcher takes requests of all engines. It never waits for anything:
//! what cannot be served at once (the tenant is at its limit, another thread is
//! filling the page) goes to a worker that belongs to the tenant alone, so that
//! no tenant waits for another's memory. Before it serves, it moves to the CPUs
//! of the tenant that faulted: the work of a fault is paid by who caused it
//! (VPRI 6.1). An engine that has nothing else to do serves its own requests by
//! [`FaultAssist`], which spares both wake-ups.
//!
//! Every request is answered exactly once, also when its tenant is gone, or the
//! RAM it asks for: a request for a domain that is retired is refused.

use crate::{
    mmu::DmaMmu,
    queue::{Doorbell, FaultAssist, HostEnd},
    space::IoSpace,
};
use pagetide_addr::{DeviceId, DomainId, PageRequest, PageResponse, RequestKind, ResponseCode};
use pagetide_gmem::{AddressSpace, Fault, FaultOutcome};
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

/// Id of the software DPU in every address space.
pub const DPU: DeviceId = DeviceId(1);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Closed,
}

/// A VM whose devices may fault.
pub struct Tenant {
    space: Arc<AddressSpace>,
    mmu: Arc<DmaMmu>,
    cpus: Mutex<Vec<usize>>,
    requests: AtomicU64,
    slips: AtomicU64,
    /// Held shared while a request is served; closed for good when the tenant leaves.
    gate: RwLock<Gate>,
    slow: mpsc::Sender<(PageRequest, HostEnd)>,
}

impl Tenant {
    /// Page requests served so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Slips of the DPU so far: it touched a page that was absent. Without a balloon or free page
    /// reporting in the guest each one is a bug.
    #[must_use]
    pub fn slips(&self) -> u64 {
        self.slips.load(Ordering::Relaxed)
    }

    fn count(&self, request: &PageRequest) {
        let counter = match request.kind {
            RequestKind::Slip => &self.slips,
            _ => &self.requests,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Says which CPUs the tenant's vCPUs run on; empty if nobody knows.
    pub fn set_cpus(&self, cpus: Vec<usize>) {
        *self.cpus.lock().unwrap_or_else(PoisonError::into_inner) = cpus;
    }

    fn cpus(&self) -> Vec<usize> {
        self.cpus
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn fault(&self, request: &PageRequest) -> Option<Fault> {
        let pages = self.mmu.in_space(request.domain, request.pages)?;
        Some(Fault {
            device: DPU,
            pages,
            access: request.access,
        })
    }
}

/// See the module.
pub struct FaultService {
    hosts: Vec<HostEnd>,
    bell: Arc<Doorbell>,
    tenants: RwLock<HashMap<DomainId, Arc<Tenant>>>,
    /// Requests for domains whose VM is just being attached.
    held: Mutex<HashMap<DomainId, Vec<(PageRequest, HostEnd)>>>,
    /// Domains whose RAM is unplugged, as long as a device knows them.
    retired: Mutex<HashMap<DomainId, Weak<dyn IoSpace>>>,
    stopped: AtomicBool,
}

/// The dispatcher's thread; joined by [`ServiceThread::stop`].
pub struct ServiceThread {
    service: Arc<FaultService>,
    thread: JoinHandle<()>,
}

impl FaultService {
    /// A service for the queues of all engines, which ring `bell`.
    #[must_use]
    pub fn new(hosts: Vec<HostEnd>, bell: Arc<Doorbell>) -> Arc<Self> {
        Arc::new(Self {
            hosts,
            bell,
            tenants: RwLock::default(),
            held: Mutex::default(),
            retired: Mutex::default(),
            stopped: AtomicBool::new(false),
        })
    }

    /// Starts the dispatcher.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(self: &Arc<Self>) -> io::Result<ServiceThread> {
        let service = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("pt-iopf".into())
            .spawn(move || service.dispatch())?;
        Ok(ServiceThread {
            service: Arc::clone(self),
            thread,
        })
    }

    /// Takes a VM in: page requests for its domains are served from now on.
    ///
    /// # Errors
    /// When no thread can be had for its worker.
    pub fn add_tenant(
        &self,
        space: Arc<AddressSpace>,
        mmu: Arc<DmaMmu>,
    ) -> io::Result<Arc<Tenant>> {
        let (slow, waiting) = mpsc::channel();
        let tenant = Arc::new(Tenant {
            space,
            mmu,
            cpus: Mutex::default(),
            requests: AtomicU64::new(0),
            slips: AtomicU64::new(0),
            gate: RwLock::new(Gate::Open),
            slow,
        });
        let weak = Arc::downgrade(&tenant);
        std::thread::Builder::new()
            .name("pt-iopf-slow".into())
            .spawn(move || {
                // Ends when the tenant, and with it the sender, is gone.
                while let Ok((request, host)) = waiting.recv() {
                    match weak.upgrade() {
                        Some(tenant) => serve_waiting(&tenant, request, host),
                        None => respond(&host, &request, FaultOutcome::Gone),
                    }
                }
            })?;
        self.serve_domains(&tenant, &tenant.mmu.domains());
        Ok(tenant)
    }

    /// Page requests for these domains are requests of `tenant` from now on, those held too.
    pub fn serve_domains(&self, tenant: &Arc<Tenant>, domains: &[Arc<dyn IoSpace>]) {
        {
            let mut tenants = self.tenants.write().unwrap_or_else(PoisonError::into_inner);
            for domain in domains {
                tenants.insert(domain.id(), Arc::clone(tenant));
            }
        }
        for (request, host) in self.take_held(domains) {
            tenant.count(&request);
            self.hand_over(tenant, &host, &request);
        }
    }

    /// Page requests for these domains wait from now on, until they are [served](Self::serve_domains),
    /// [released](Self::release) or [refused](Self::refuse): their VM is being attached, or has got
    /// more RAM.
    pub fn hold(&self, domains: &[Arc<dyn IoSpace>]) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for domain in domains {
            held.entry(domain.id()).or_default();
        }
    }

    /// Undoes [`Self::hold`]: the attach failed, and the domains are read-write again.
    pub fn release(&self, domains: &[Arc<dyn IoSpace>]) {
        for (request, host) in self.take_held(domains) {
            respond(&host, &request, FaultOutcome::Present);
        }
    }

    /// Page requests for `domain` are refused from now on: its RAM is unplugged. Its pages must be
    /// out of its tenant's [`DmaMmu`] already.
    pub fn refuse(&self, domain: &Arc<dyn IoSpace>) {
        {
            let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
            retired.retain(|_, known| known.strong_count() > 0);
            retired.insert(domain.id(), Arc::downgrade(domain));
        }
        let mut tenants = self.tenants.write().unwrap_or_else(PoisonError::into_inner);
        tenants.remove(&domain.id());
        drop(tenants);
        for (request, host) in self.take_held(std::slice::from_ref(domain)) {
            respond(&host, &request, FaultOutcome::OutOfRange);
        }
    }

    fn take_held(&self, domains: &[Arc<dyn IoSpace>]) -> Vec<(PageRequest, HostEnd)> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        domains
            .iter()
            .filter_map(|domain| held.remove(&domain.id()))
            .flatten()
            .collect()
    }

    /// Takes a VM out. No request of it is being served when this returns; further ones are
    /// [held](Self::hold) until [`Self::release`].
    pub fn remove_tenant(&self, tenant: &Arc<Tenant>) {
        self.hold(&tenant.mmu.domains());
        *tenant.gate.write().unwrap_or_else(PoisonError::into_inner) = Gate::Closed;
        let mut tenants = self.tenants.write().unwrap_or_else(PoisonError::into_inner);
        tenants.retain(|_, known| !Arc::ptr_eq(known, tenant));
    }

    fn tenant(&self, domain: DomainId) -> Option<Arc<Tenant>> {
        self.tenants
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&domain)
            .cloned()
    }

    fn dispatch(&self) {
        let mut place = Vec::new();
        while !self.stopped.load(Ordering::Acquire) {
            let mut served = false;
            for host in &self.hosts {
                while let Some(request) = host.next() {
                    served = true;
                    let tenant = self.tenant(request.domain);
                    if let Some(tenant) = &tenant {
                        move_to(&mut place, tenant.cpus());
                    }
                    self.serve(host, &request, tenant);
                }
            }
            if !served {
                self.sleep();
            }
        }
    }

    fn sleep(&self) {
        self.bell.arm();
        let nothing =
            !self.hosts.iter().any(HostEnd::has_request) && !self.stopped.load(Ordering::Acquire);
        if nothing {
            let mut polled = [PollFd::new(&self.bell, PollFlags::IN)];
            // EINTR: the queues are looked at again anyway.
            if let Err(error) = poll(&mut polled, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "the I/O page fault service cannot sleep");
            }
        }
        if let Err(error) = self.bell.disarm() {
            tracing::error!(%error, "the I/O page fault service's doorbell is broken");
        }
    }

    /// Serves a request without waiting; what must wait goes to the tenant's worker.
    fn serve(&self, host: &HostEnd, request: &PageRequest, tenant: Option<Arc<Tenant>>) {
        let Some(tenant) = tenant else {
            self.respond_for_nobody(host, request);
            return;
        };
        let gate = tenant.gate.read().unwrap_or_else(PoisonError::into_inner);
        if *gate == Gate::Closed {
            self.respond_for_nobody(host, request);
            return;
        }
        let Some(fault) = tenant.fault(request) else {
            respond(host, request, FaultOutcome::OutOfRange);
            return;
        };
        tenant.count(request);
        match tenant.space.fault_without_waiting(&fault) {
            Some(outcome) => respond(host, request, outcome),
            None => self.hand_over(&tenant, host, request),
        }
    }

    fn hand_over(&self, tenant: &Tenant, host: &HostEnd, request: &PageRequest) {
        if tenant.slow.send((*request, host.clone())).is_err() {
            respond(host, request, FaultOutcome::Present);
        }
    }

    /// The domain belongs to no VM: one is being attached, or everything is read-write there, or its
    /// RAM is gone.
    fn respond_for_nobody(&self, host: &HostEnd, request: &PageRequest) {
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        if retired.contains_key(&request.domain) {
            respond(host, request, FaultOutcome::OutOfRange);
            return;
        }
        drop(retired);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = held.get_mut(&request.domain) {
            waiting.push((*request, host.clone()));
            return;
        }
        drop(held);
        respond(host, request, FaultOutcome::Present);
    }
}

impl FaultAssist for FaultService {
    fn assist(&self, engine: usize) -> bool {
        let Some(host) = self.hosts.get(engine) else {
            return true;
        };
        while let Some(request) = host.next() {
            self.serve(host, &request, self.tenant(request.domain));
        }
        true
    }
}

impl ServiceThread {
    /// Ends the dispatcher. Requests that are still in the queues stay unanswered: stop the engines
    /// first.
    pub fn stop(self) {
        self.service.stopped.store(true, Ordering::Release);
        self.service.bell.ring_anyway();
        if self.thread.join().is_err() {
            tracing::error!("the I/O page fault service ended by a panic");
        }
    }
}

/// On the tenant's own worker: waits for whatever the fault needs.
fn serve_waiting(tenant: &Tenant, request: PageRequest, host: HostEnd) {
    let gate = tenant.gate.read().unwrap_or_else(PoisonError::into_inner);
    if *gate == Gate::Closed {
        respond(&host, &request, FaultOutcome::Present);
        return;
    }
    match tenant.fault(&request) {
        None => respond(&host, &request, FaultOutcome::OutOfRange),
        Some(fault) => {
            let reply = Box::new(move |outcome| respond(&host, &request, outcome));
            tenant.space.fault(&fault, Some(reply));
        }
    }
}

fn respond(host: &HostEnd, request: &PageRequest, outcome: FaultOutcome) {
    let code = match outcome {
        FaultOutcome::Present => ResponseCode::Success,
        FaultOutcome::OutOfRange => ResponseCode::InvalidRequest,
        FaultOutcome::Lost | FaultOutcome::Gone => ResponseCode::ResponseFailure,
    };
    host.respond(PageResponse::to(request, code));
}

/// Moves this thread to `cpus`, if it is not there already. That it cannot be moved costs speed only.
fn move_to(place: &mut Vec<usize>, cpus: Vec<usize>) {
    if cpus.is_empty() || *place == cpus {
        return;
    }
    if let Err(error) = pagetide_sys::cpu::set_affinity(&cpus) {
        tracing::debug!(%error, ?cpus, "the I/O page fault service stays where it is");
    }
    *place = cpus;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{domain::DomainTable, queue::fault_queue};
    use pagetide_addr::{Access, PAGE_BYTES, PageNo, QueueId, RequestId};
    use pagetide_sys::memory_file::GuestFile;
    use std::os::fd::AsFd;

    const FILE_BYTES: u64 = 4 * PAGE_BYTES;

    #[test]
    fn requests_for_a_retired_domain_are_refused_those_held_before_and_those_that_come_later() {
        let bell = || Arc::new(Doorbell::new().unwrap());
        let (device, host) = fault_queue(4, bell(), bell());
        let service = FaultService::new(vec![host], bell());
        let table = DomainTable::new(1);
        let file = GuestFile::new_memfd("retired", FILE_BYTES).unwrap();
        let open = || table.open(file.as_fd(), file.key().unwrap(), FILE_BYTES);
        let domain = open().unwrap();
        let ask = |id: u64| {
            let (from, page) = ((DPU, QueueId(0)), PageNo(0).single());
            let request = PageRequest::demand(RequestId(id), from, domain.id(), page, Access::Read);
            device.submit(request).unwrap();
            assert!(service.assist(0));
            device.next().map(|response| response.code)
        };
        assert_eq!(ask(1), Some(ResponseCode::Success), "nobody's: read-write");
        let space = Arc::clone(&domain) as Arc<dyn IoSpace>;
        service.hold(std::slice::from_ref(&space));
        assert_eq!(ask(2), None, "held");
        service.refuse(&space);
        table.retire(&domain);
        let refused = Some(ResponseCode::InvalidRequest);
        assert_eq!(device.next().map(|response| response.code), refused);
        assert_eq!(ask(3), refused);
        let bitmap = domain.attributes().bitmap();
        assert!(!bitmap.allows(PageNo(0).single(), Access::Read));
        // The file once more is another domain, and nothing of the old one's.
        let again = open().unwrap();
        assert_ne!(again.id(), domain.id());
        let bitmap = again.attributes().bitmap();
        assert!(bitmap.allows(PageNo(0).single(), Access::Write));
    }
}
