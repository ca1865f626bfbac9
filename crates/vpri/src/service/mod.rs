// SPDX-License-Identifier: Apache-2.0
//! The I/O page fault service: the host's side of page fault queues (VPRI 6, 6.1).
//!
//! ```text
//!   sources                        top half              bottom halves
//!   engine's queue  ═╗                                ┌─► worker of tenant A on CPU 4 ─► response
//!   VPRI function   ═╬═ requests ═► dispatcher ── placement ─► worker of A on CPU 5
//!   IOMMU's PRQ     ═╝                │               └─► worker of tenant B on CPU 9
//!                                     └─ no tenant: answered, held, or refused
//! ```
//! The service knows only the [`FaultSource`] and nothing behind it; sources come
//! and go. The **dispatcher** is the top half: it takes requests from all
//! sources, some of each in turn, and hands each to a worker. It never waits and
//! never fills. **Workers** are the bottom half ([`workers`]): one for each tenant
//! and CPU, made when first needed, on the CPU that [`placement`] chooses. So the
//! tenant that caused a fault pays for its work; a fault that waits (for the
//! limit, for another filler, for an injected delay) delays only faults of its
//! own tenant on that CPU; and several faults of a tenant are served at a time,
//! in no fixed order. The sources bound how many requests may wait: each has a
//! limit in total and a limit for each device.
//!
//! An engine that has nothing else to do serves its own requests by
//! [`FaultAssist`], which saves both wake-ups; requests that must wait it hands
//! to a worker, too. It serves few pages a call, since its devices stand still
//! meanwhile, and leaves the rest to the workers. By [`IdleEngines::Leave`] it
//! serves none, so that the tenant pays for all.
//!
//! In the mode [`Handling::Serialized`], for comparison, there is one worker for
//! all, as with one interrupt vector and one work queue (VPRI 3.2): it serves in
//! order of arrival, on any CPU, and waits whenever a fault waits.
//!
//! Every request is answered exactly once, even if its tenant or the RAM that it
//! asks for is gone: a [`duty`] cannot be forgotten. A request for a retired
//! domain is refused. One for a domain of no tenant succeeds (the domain is
//! read-write), unless a VM that owns it is being attached: then the request is
//! held.
//!
//! # Locks
//! The list of [`sources`], shared, over one pass of the dispatcher; `tenants`, and
//! the tables of [`unclaimed`], for one look-up each; a tenant's gate,
//! shared, over one request. [`FaultSource::respond`] may be called under
//! that list or a gate, and must not call the service.

mod account;
mod duty;
mod later;
mod pause;
mod placement;
mod sources;
#[cfg(test)]
mod tests;
mod unclaimed;
mod urgency;
mod vm;
mod worker_place;
mod workers;

pub use account::{Account, Latencies};
pub use placement::{CpuLoad, TenantCpus, VcpuPlace};
pub use sources::FaultSourceId;
pub use urgency::Preempt;
pub use vm::DPU;
pub use workers::Tenant;

use self::{
    duty::Duty,
    later::Later,
    placement::BusyTimes,
    sources::Sources,
    unclaimed::Unclaimed,
    worker_place::Home,
    workers::{Order, Patience, Queue, WorkerSeed, start},
};
use crate::{
    mmu::DmaMmu,
    queue::{Doorbell, FaultAssist, HostEnd},
    source::FaultSource,
    space::IoSpace,
};
use pagetide_addr::DomainId;
use pagetide_gmem::{AddressSpace, FaultOutcome};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Which workers handle faults.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Handling {
    /// Workers on the CPUs of the tenant that faulted.
    #[default]
    Affined,
    /// One worker for all, in order of arrival.
    Serialized,
}

/// Who serves a fault whose engine has nothing else to do, and so who pays for it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum IdleEngines {
    /// The engine, on its own CPU, if nothing has to be waited for: both wake-ups are saved, and the
    /// engine's other devices stand still meanwhile.
    #[default]
    Serve,
    /// A worker on the CPUs of the tenant, as of any other fault (6.1): the engine only asks and goes on.
    Leave,
}

/// How a service works.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ServiceConfig {
    /// Which workers handle faults.
    pub handling: Handling,
    /// Who serves a fault whose engine is idle.
    pub idle_engines: IdleEngines,
    /// Which threads those preempt.
    pub preempt: Preempt,
}

/// Pages that an engine serves in one call of [`FaultAssist::assist`]; the first request may exceed
/// it.
const ASSIST_PAGES: u64 = 16;

/// See the module.
pub struct FaultService {
    config: ServiceConfig,
    sources: Sources,
    /// Sources of engines that may serve their own requests, by engine number.
    engines: Vec<Arc<dyn FaultSource>>,
    tenants: RwLock<HashMap<DomainId, Arc<Tenant>>>,
    unclaimed: Arc<Unclaimed>,
    /// The queue of the one worker of the serialized mode.
    serial: Arc<Queue>,
    later: Later,
    busy: Arc<BusyTimes>,
    stopped: AtomicBool,
}

impl FaultService {
    /// A service with default settings for the queues of all engines, which ring `bell`.
    #[must_use]
    pub fn new(hosts: Vec<HostEnd>, bell: Arc<Doorbell>) -> Arc<Self> {
        Self::with(ServiceConfig::default(), hosts, bell)
    }

    /// A service for the queues of all engines (perhaps none), which ring `bell`.
    #[must_use]
    pub fn with(config: ServiceConfig, hosts: Vec<HostEnd>, bell: Arc<Doorbell>) -> Arc<Self> {
        let engines: Vec<Arc<dyn FaultSource>> =
            hosts.into_iter().map(|host| Arc::new(host) as _).collect();
        let service = Arc::new(Self {
            config,
            sources: Sources::new(bell),
            engines,
            tenants: RwLock::default(),
            unclaimed: Arc::default(),
            serial: Queue::new(Order::Arrival),
            later: Later::default(),
            busy: Arc::default(),
            stopped: AtomicBool::new(false),
        });
        for engine in &service.engines {
            service.add_source(Arc::clone(engine));
        }
        service
    }

    /// Starts the dispatcher.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(self: &Arc<Self>) -> io::Result<ServiceThread> {
        let serial = match self.config.handling {
            Handling::Affined => None,
            Handling::Serialized => Some(start(
                &self.serial,
                Home::Anywhere,
                Patience::Endless,
                &self.seed(),
            )?),
        };
        let service = Arc::clone(self);
        let dispatcher = std::thread::Builder::new()
            .name("pt-iopf".into())
            .spawn(move || service.dispatch());
        let dispatcher = dispatcher.inspect_err(|_| self.serial.close())?;
        Ok(ServiceThread {
            service: Arc::clone(self),
            dispatcher,
            serial,
        })
    }

    fn dispatch(&self) {
        self.config.preempt.take_dispatcher();
        while !self.stopped.load(Ordering::Acquire) {
            if !self.sources.take_some_of_each(|duty| self.take_in(duty)) {
                let is_over = || self.stopped.load(Ordering::Acquire);
                self.sources.sleep(is_over);
            }
        }
    }

    /// Does what the dispatcher does, on the thread of a test.
    #[cfg(test)]
    fn take_in_all(&self) {
        while self.sources.take_some_of_each(|duty| self.take_in(duty)) {}
    }

    /// Adds a source, which rings the service's doorbell when it has a request.
    pub fn add_source(&self, source: Arc<dyn FaultSource>) -> FaultSourceId {
        self.sources.add(source)
    }

    /// Removes a source: when this returns, nothing more is taken from it. Requests already taken
    /// are still answered to it. Must not be called by a method of the source, nor with a lock held
    /// that those methods need.
    pub fn remove_source(&self, id: FaultSourceId) {
        self.sources.remove(id);
    }

    /// Adds a VM: page requests for its domains are served from now on.
    ///
    /// # Errors
    /// If no thread can be started for its worker.
    pub fn add_tenant(
        &self,
        space: Arc<AddressSpace>,
        mmu: Arc<DmaMmu>,
    ) -> io::Result<Arc<Tenant>> {
        let tenant = Arc::new(Tenant::new(space, mmu, &self.busy));
        if self.config.handling == Handling::Affined {
            tenant.start_worker(&self.seed())?;
        }
        self.serve_domains(&tenant, &tenant.vm().mmu.domains());
        Ok(tenant)
    }

    /// From now on, page requests for these domains, including held ones, belong to `tenant`.
    pub fn serve_domains(&self, tenant: &Arc<Tenant>, domains: &[Arc<dyn IoSpace>]) {
        {
            let mut tenants = self.tenants.write().unwrap_or_else(PoisonError::into_inner);
            for domain in domains {
                tenants.insert(domain.id(), Arc::clone(tenant));
            }
        }
        for mut duty in self.unclaimed.take_held(domains) {
            duty.open_for(tenant.vm());
            self.hand_over(tenant, duty);
        }
    }

    /// From now on, page requests for these domains wait until they are [served](Self::serve_domains),
    /// [released](Self::release) or [refused](Self::refuse): their VM is being attached, or has been
    /// given more RAM.
    pub fn hold(&self, domains: &[Arc<dyn IoSpace>]) {
        self.unclaimed.hold(domains);
    }

    /// Like [`Self::hold`], for domains of a tenant: they belong to no tenant from now on, because
    /// their RAM was unplugged and plugged in again. A request that is already being served goes on.
    pub fn withhold(&self, domains: &[Arc<dyn IoSpace>]) {
        self.hold(domains);
        self.disown(domains);
    }

    /// Reverts [`Self::hold`]: held requests are answered, since the domains are read-write again. A
    /// domain of a tenant stays with it: it was held in vain, by an attach of a VM that already has
    /// it.
    pub fn release(&self, domains: &[Arc<dyn IoSpace>]) {
        for duty in self.unclaimed.take_held(domains) {
            duty.answer(FaultOutcome::Present);
        }
    }

    /// From now on, page requests for `domain` are refused: its RAM is unplugged. Its pages must
    /// already be removed from its tenant's [`DmaMmu`].
    pub fn refuse(&self, domain: &Arc<dyn IoSpace>) {
        self.unclaimed.retire(domain);
        self.disown(std::slice::from_ref(domain));
        for duty in self.unclaimed.take_held(std::slice::from_ref(domain)) {
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
        // This may drop the last reference to a tenant, which ends together with its workers.
        drop(removed);
    }

    /// Removes a VM. When this returns, no request of it is being served; further ones are
    /// [held](Self::hold) until [`Self::release`].
    pub fn remove_tenant(&self, tenant: &Arc<Tenant>) {
        self.hold(&tenant.vm().mmu.domains());
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

    /// A request that was just taken, of any domain.
    fn take_in(&self, mut duty: Duty) {
        match self.tenant(duty.request().domain) {
            Some(tenant) => {
                duty.open_for(tenant.vm());
                self.hand_over(&tenant, duty);
            }
            None if self.config.handling == Handling::Serialized => self.hand_to_all(duty),
            None => match duty.request().hold_us {
                0 => self.unclaimed.answer(duty),
                hold_us => {
                    duty.begin();
                    let at = Instant::now() + Duration::from_micros(hold_us.into());
                    let unclaimed = Arc::downgrade(&self.unclaimed);
                    self.later.answer_at(at, duty, &unclaimed);
                }
            },
        }
    }

    fn hand_over(&self, tenant: &Tenant, duty: Duty) {
        if self.config.handling == Handling::Serialized {
            self.hand_to_all(duty);
        } else if let Err(duty) = tenant.hand_over(duty, &self.seed()) {
            self.unclaimed.answer(duty);
        }
    }

    fn hand_to_all(&self, duty: Duty) {
        if let Err(duty) = self.serial.push(duty) {
            duty.abandon();
        }
    }

    fn seed(&self) -> WorkerSeed {
        WorkerSeed {
            unclaimed: Arc::downgrade(&self.unclaimed),
            preempt: self.config.preempt,
        }
    }

    /// An engine serves this itself, if it need not wait.
    fn assist_with(&self, mut duty: Duty) {
        let Some(tenant) = self.tenant(duty.request().domain) else {
            self.take_in(duty);
            return;
        };
        duty.open_for(tenant.vm());
        let request = duty.request();
        let wants_worker = request.hold_us > 0 || request.kind.is_ahead();
        let duty = match tenant.vm().try_enter() {
            Some(_inside) if !wants_worker => match tenant.vm().serve_at_once(duty) {
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

/// The threads of a service; ended by [`ServiceThread::stop`].
pub struct ServiceThread {
    service: Arc<FaultService>,
    dispatcher: JoinHandle<()>,
    serial: Option<JoinHandle<()>>,
}

impl ServiceThread {
    /// Ends the dispatcher, and the one worker of the serialized mode. Requests still in the queues
    /// stay unanswered: stop the engines first.
    pub fn stop(self) {
        self.service.stopped.store(true, Ordering::Release);
        self.service.sources.wake();
        let mut panicked = self.dispatcher.join().is_err();
        self.service.unclaimed.end_waits();
        self.service.serial.close();
        if let Some(serial) = self.serial {
            panicked |= serial.join().is_err();
        }
        let later = self.service.later.end();
        later.into_iter().for_each(Duty::abandon);
        if panicked {
            tracing::error!("the I/O page fault service ended by a panic");
        }
    }
}

impl FaultAssist for FaultService {
    /// In the serialized mode only the one worker serves.
    fn assist(&self, engine: usize) -> bool {
        let is_left = self.config.idle_engines == IdleEngines::Leave;
        if is_left || self.config.handling == Handling::Serialized {
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
        // There may be nothing left; then the engine's kick wakes no thread.
        false
    }
}

impl Drop for FaultService {
    fn drop(&mut self) {
        self.later.end().into_iter().for_each(Duty::abandon);
        self.serial.close();
        self.serial.take_all().into_iter().for_each(Duty::abandon);
    }
}
