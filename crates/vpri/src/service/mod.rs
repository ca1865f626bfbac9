// SPDX-License-Identifier: Apache-2.0
//! The I/O page fault service: the host's side of page fault queues (VPRI 6, 6.1).
//!
//! ```text
//!   sources                        top half              bottom halves
//!   engine's queue  ═╗                                ┌─► worker of tenant A on CPU 4 ─► response
//!   VPRI function   ═╬═ requests ═► dispatcher ── placement ─► worker of A on CPU 5
//!   IOMMU's PRQ     ═╝                │               └─► worker of tenant B on CPU 9
//!                                     └─ nobody's: answered, held, or refused
//! ```
//! It knows a [`FaultSource`] and nothing of what is behind it; sources come and
//! go. The **dispatcher** is the interrupt's half: it takes requests of all
//! sources, some of each in turn, and hands each to a worker. It never waits and
//! never fills. **Workers** are the bottom half ([`worker`]): one for each tenant
//! and CPU, made when first needed, on the CPU that [`placement`] chooses. So the
//! work of a fault is paid by who caused it; a fault that waits (for the limit,
//! for another filler, for an injected delay) keeps only faults of its own tenant
//! on that CPU waiting; and several faults of a tenant go on at a time, in no
//! certain order. How many may wait is bounded by the sources, each of which has
//! room for so many and so many a device.
//!
//! An engine that has nothing else to do serves its own requests by
//! [`FaultAssist`], which spares both wake-ups; what must wait it hands to a
//! worker likewise. It serves few pages a call, for its devices stand still
//! meanwhile; what is over is the workers'.
//!
//! In the mode [`Handling::Serialized`], for comparison, there is one worker for
//! all, as with one interrupt vector and one work queue (VPRI 3.2): it serves in
//! the order of arrival, on whatever CPU, and waits where a fault waits.
//!
//! Every request is answered exactly once, also when its tenant is gone, or the
//! RAM it asks for: a [`duty`] cannot be forgotten. A request for a domain that is
//! retired is refused; one for a domain of no tenant is a success (it is
//! read-write), unless a VM is just being made of it: then it is held.
//!
//! # Locks
//! `sources`, shared, over one pass of the dispatcher; `tenants`, `held` and
//! `retired` for a look each, `held` before `retired`; a tenant's gate, shared,
//! over one request. [`FaultSource::respond`] may be called under any of the first
//! and the last, and must not call the service.

mod account;
mod dispatch;
mod duty;
mod later;
mod placement;
mod serve;
mod tenant;
#[cfg(test)]
mod tests;
mod worker;

pub use account::{Account, Latencies};
pub use dispatch::{FaultSourceId, ServiceThread};
pub use placement::{CpuLoad, TenantCpus, VcpuPlace};
pub use tenant::{DPU, Tenant};

use self::{
    duty::Duty,
    later::Later,
    placement::BusyTimes,
    tenant::{Pause, Waited, WorkerSeed},
    worker::{Order, Queue},
};
use crate::{
    mmu::DmaMmu,
    queue::{Doorbell, FaultAssist, HostEnd},
    source::FaultSource,
    space::IoSpace,
};
use pagetide_addr::{DomainId, RequestKind};
use pagetide_gmem::{AddressSpace, FaultOutcome};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64},
    },
    time::{Duration, Instant},
};

/// By whom faults are handled.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Handling {
    /// By workers on the CPUs of the tenant that faulted.
    #[default]
    Affined,
    /// By one worker for all, in the order of arrival.
    Serialized,
}

/// Before whom dispatcher and workers go on the CPUs they share with vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Preempt {
    /// At once before every ordinary thread (`SCHED_FIFO`, the lowest priorities); where that is not
    /// allowed, as [`Self::Nice`].
    #[default]
    Fifo,
    /// As ordinary threads with niceness -20, where allowed.
    Nice,
    /// Nobody.
    Off,
}

/// How a service works.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ServiceConfig {
    /// By whom faults are handled.
    pub handling: Handling,
    /// Before whom those go.
    pub preempt: Preempt,
}

/// Pages that an engine serves in one call of [`FaultAssist::assist`]; the first request goes beyond
/// it if it is larger.
const ASSIST_PAGES: u64 = 16;

/// See the module.
pub struct FaultService {
    config: ServiceConfig,
    me: Weak<FaultService>,
    bell: Arc<Doorbell>,
    sources: RwLock<Vec<(FaultSourceId, Arc<dyn FaultSource>)>>,
    /// Those of engines that may serve their requests themselves, by the number of the engine.
    engines: Vec<Arc<dyn FaultSource>>,
    next_source: AtomicU64,
    tenants: RwLock<HashMap<DomainId, Arc<Tenant>>>,
    /// Requests for domains whose VM is just being attached.
    held: Mutex<HashMap<DomainId, Vec<Duty>>>,
    /// Domains whose RAM is unplugged, as long as a device knows them.
    retired: Mutex<HashMap<DomainId, Weak<dyn IoSpace>>>,
    /// Of the one worker of the serialized mode.
    serial: Arc<Queue>,
    later: Later,
    busy: Arc<BusyTimes>,
    ending: Pause,
    stopped: AtomicBool,
}

impl FaultService {
    /// A service as by default for the queues of all engines, which ring `bell`.
    #[must_use]
    pub fn new(hosts: Vec<HostEnd>, bell: Arc<Doorbell>) -> Arc<Self> {
        Self::with(ServiceConfig::default(), hosts, bell)
    }

    /// A service for the queues of all engines (perhaps none), which ring `bell`.
    #[must_use]
    pub fn with(config: ServiceConfig, hosts: Vec<HostEnd>, bell: Arc<Doorbell>) -> Arc<Self> {
        let engines: Vec<Arc<dyn FaultSource>> =
            hosts.into_iter().map(|host| Arc::new(host) as _).collect();
        let service = Arc::new_cyclic(|me| Self {
            config,
            me: Weak::clone(me),
            bell,
            sources: RwLock::default(),
            engines,
            next_source: AtomicU64::new(0),
            tenants: RwLock::default(),
            held: Mutex::default(),
            retired: Mutex::default(),
            serial: Queue::new(Order::Arrival),
            later: Later::default(),
            busy: Arc::default(),
            ending: Pause::default(),
            stopped: AtomicBool::new(false),
        });
        for engine in &service.engines {
            service.add_source(Arc::clone(engine));
        }
        service
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
        let tenant = Arc::new(Tenant::new(space, mmu, &self.busy));
        if self.config.handling == Handling::Affined {
            tenant.start_worker(&self.seed())?;
        }
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
        for mut duty in self.take_held(domains) {
            duty.open_for(tenant);
            self.hand_over(tenant, duty);
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

    /// Like [`Self::hold`], of domains of a tenant: they are nobody's from now on, because their RAM
    /// was plugged out and in again. A request of them that is being served by then goes on.
    pub fn withhold(&self, domains: &[Arc<dyn IoSpace>]) {
        self.hold(domains);
        self.disown(domains);
    }

    /// Undoes [`Self::hold`]: those held are answered, for the domains are read-write again. A domain
    /// that is a tenant's stays that: one that was held in vain, by an attach of a VM that has it
    /// already.
    pub fn release(&self, domains: &[Arc<dyn IoSpace>]) {
        for duty in self.take_held(domains) {
            duty.answer(FaultOutcome::Present);
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
        self.disown(std::slice::from_ref(domain));
        for duty in self.take_held(std::slice::from_ref(domain)) {
            duty.answer(FaultOutcome::OutOfRange);
        }
    }

    fn disown(&self, domains: &[Arc<dyn IoSpace>]) {
        let mut tenants = self.tenants.write().unwrap_or_else(PoisonError::into_inner);
        let removed: Vec<_> = domains
            .iter()
            .filter_map(|domain| tenants.remove(&domain.id()))
            .collect();
        drop(tenants);
        // Perhaps the last of a tenant, which ends with workers of its own.
        drop(removed);
    }

    fn take_held(&self, domains: &[Arc<dyn IoSpace>]) -> Vec<Duty> {
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
        tenant.leave();
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

    /// A request that was just taken, of whoever it is.
    fn take_in(&self, mut duty: Duty) {
        match self.tenant(duty.request().domain) {
            Some(tenant) => {
                duty.open_for(&tenant);
                self.hand_over(&tenant, duty);
            }
            None if self.config.handling == Handling::Serialized => self.hand_to_all(duty),
            None => match duty.request().hold_us {
                0 => self.answer_for_nobody(duty),
                hold_us => {
                    duty.begin();
                    let at = Instant::now() + Duration::from_micros(hold_us.into());
                    self.later.answer_at(at, duty, &self.me);
                }
            },
        }
    }

    fn hand_over(&self, tenant: &Tenant, duty: Duty) {
        if self.config.handling == Handling::Serialized {
            self.hand_to_all(duty);
        } else if let Err(duty) = tenant.hand_over(duty, &self.seed()) {
            self.answer_for_nobody(duty);
        }
    }

    fn hand_to_all(&self, duty: Duty) {
        if let Err(duty) = self.serial.push(duty) {
            duty.abandon();
        }
    }

    fn seed(&self) -> WorkerSeed {
        WorkerSeed {
            service: Weak::clone(&self.me),
            preempt: self.config.preempt,
        }
    }

    /// Waits for so long, unless the service ends.
    fn wait(&self, time: Duration) -> Waited {
        self.ending.wait(time)
    }

    /// The domain belongs to no VM: one is being attached, or everything is read-write there, or its
    /// RAM is gone.
    fn answer_for_nobody(&self, mut duty: Duty) {
        let domain = duty.request().domain;
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let is_retired = retired.contains_key(&domain);
        drop(retired);
        if is_retired {
            duty.answer(FaultOutcome::OutOfRange);
            return;
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = held.get_mut(&domain) {
            duty.disown();
            waiting.push(duty);
            return;
        }
        drop(held);
        duty.answer(FaultOutcome::Present);
    }

    /// An engine serves this itself, if it need not wait.
    fn assist_with(&self, mut duty: Duty) {
        let Some(tenant) = self.tenant(duty.request().domain) else {
            self.take_in(duty);
            return;
        };
        duty.open_for(&tenant);
        let request = duty.request();
        let wants_worker = request.hold_us > 0 || request.kind == RequestKind::Prefault;
        let duty = match tenant.try_enter() {
            Some(_inside) if !wants_worker => match serve::serve_at_once(&tenant, duty) {
                Ok(()) => return,
                Err(mut duty) => {
                    duty.put_off();
                    duty
                }
            },
            _ => duty,
        };
        self.hand_over(&tenant, duty);
    }
}

impl FaultAssist for FaultService {
    /// In the serialized mode nobody but the one worker serves.
    fn assist(&self, engine: usize) -> bool {
        if self.config.handling == Handling::Serialized {
            return false;
        }
        let Some(source) = self.engines.get(engine) else {
            return true;
        };
        let mut pages = 0_u64;
        while pages < ASSIST_PAGES {
            let Some(request) = source.next() else {
                return true;
            };
            let of_all = pages.saturating_add(request.pages.len());
            let duty = Duty::new(request, source);
            if pages > 0 && of_all > ASSIST_PAGES {
                self.take_in(duty);
                break;
            }
            self.assist_with(duty);
            pages = of_all;
        }
        // Perhaps nothing is left; then the engine kicks for nothing, and nobody wakes.
        false
    }
}

impl Drop for FaultService {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        let held = held.drain().flat_map(|(_, duties)| duties);
        held.for_each(Duty::abandon);
        self.later.end().into_iter().for_each(Duty::abandon);
        self.serial.close();
        self.serial.take_all().into_iter().for_each(Duty::abandon);
    }
}
