// SPDX-License-Identifier: Apache-2.0
//! [`Tenant`]: a VM whose devices may fault, with its CPUs, its workers and its account.

use super::{
    FaultService, Preempt,
    account::Account,
    duty::Duty,
    placement::{BusyTimes, CpuLoad, TenantCpus},
    worker::{self, Home, Order, Patience, Queue},
};
use crate::mmu::DmaMmu;
use arc_swap::{ArcSwap, Guard};
use crossbeam_queue::ArrayQueue;
use pagetide_addr::{DeviceId, PageRange, PageRequest, RequestKind, SectionNo, Tier};
use pagetide_gmem::{AddressSpace, Fault};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// Id of the software DPU in every address space.
pub const DPU: DeviceId = DeviceId(1);

/// Most CPUs of one tenant that have a worker of their own; requests placed on a further CPU are
/// served by the tenant's worker that may run on any of them. Otherwise a large VM would have
/// thousands of idle threads.
const WORKERS_MAX: usize = 64;

/// Most sections that devices found absent and that are not read yet. The reader comes far more
/// often than so many faults can be served.
const NEWS_MAX: usize = 4096;
/// Most sections reported of one page request; a device may ask for a terabyte.
const SECTIONS_A_FAULT: usize = 8;

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waited {
    /// The time has passed.
    Enough,
    /// The wait was ended early.
    CutShort,
}

/// A wait that can be ended early, for good.
#[derive(Default)]
pub(super) struct Pause {
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Pause {
    /// Waits for `time`, or until [`Self::end`].
    pub(super) fn wait(&self, time: Duration) -> Waited {
        if time.is_zero() {
            return Waited::Enough;
        }
        let is_over = self.lock();
        let waited = (self.ended).wait_timeout_while(is_over, time, |is_over| !*is_over);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            Waited::Enough
        } else {
            Waited::CutShort
        }
    }

    /// Ends this wait and all later ones.
    pub(super) fn end(&self) {
        *self.lock() = true;
        self.ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Closed,
}

/// Held while a request of the tenant is served.
pub(super) struct Inside<'a>(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, Gate>);

/// A VM whose devices may fault.
pub struct Tenant {
    pub(super) space: Arc<AddressSpace>,
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) account: Account,
    cpus: ArcSwap<TenantCpus>,
    busy: Arc<BusyTimes>,
    /// Grows with each fault of a polled queue.
    turn: AtomicUsize,
    workers: Mutex<Workers>,
    /// Held shared while a request is served; closed for good when the tenant leaves.
    gate: RwLock<Gate>,
    leaving: Pause,
    /// Demands and overwrites whose pages were absent; see [`Self::absent_faults`].
    absent_faults: AtomicU64,
    /// Their sections.
    absent_sections: ArrayQueue<SectionNo>,
}

/// The workers of a tenant, each by its queue.
#[derive(Default)]
struct Workers {
    by_cpu: HashMap<usize, Arc<Queue>>,
    /// The queue of the worker that is bound to no CPU, which always exists.
    any: Option<Arc<Queue>>,
    is_closed: bool,
}

/// What a worker needs to start.
#[derive(Clone)]
pub(super) struct WorkerSeed {
    pub(super) service: Weak<FaultService>,
    pub(super) preempt: Preempt,
}

impl Tenant {
    pub(super) fn new(space: Arc<AddressSpace>, mmu: Arc<DmaMmu>, busy: &Arc<BusyTimes>) -> Self {
        Self {
            space,
            mmu,
            account: Account::default(),
            cpus: ArcSwap::default(),
            busy: Arc::clone(busy),
            turn: AtomicUsize::new(0),
            workers: Mutex::default(),
            gate: RwLock::new(Gate::Open),
            leaving: Pause::default(),
            absent_faults: AtomicU64::new(0),
            absent_sections: ArrayQueue::new(NEWS_MAX),
        }
    }

    /// Statistics of its page requests.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Page requests so far, without [`Self::alias_faults`].
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.account.requests()
    }

    /// Alias faults of the DPU so far; see [`Account::alias_faults`].
    #[must_use]
    pub fn alias_faults(&self) -> u64 {
        self.account.alias_faults()
    }

    /// Sets which CPUs are the tenant's. This also measures how busy they are, so call it now and
    /// then, and not from a thread that is in a hurry.
    pub fn set_cpus(&self, cpus: TenantCpus) {
        self.cpus.store(Arc::new(cpus));
        self.busy.measure();
    }

    pub(super) fn cpus(&self) -> Guard<Arc<TenantCpus>> {
        self.cpus.load()
    }

    /// Starts the worker that always exists.
    pub(super) fn start_worker(self: &Arc<Self>, seed: &WorkerSeed) -> io::Result<()> {
        let queue = Queue::new(Order::DemandsFirst);
        let home = Home::Tenant(Arc::downgrade(self));
        worker::start(&queue, home, Patience::Endless, seed)?;
        self.lock_workers().any = Some(queue);
        Ok(())
    }

    /// Hands a duty to the worker that [`super::placement`] chooses; gives it back if the tenant has
    /// left.
    pub(super) fn hand_over(&self, duty: Duty, seed: &WorkerSeed) -> Result<(), Duty> {
        let cpus = self.cpus();
        let mut workers = self.lock_workers();
        if workers.is_closed {
            return Err(duty);
        }
        let vector = duty.request().vector;
        let turn = match vector {
            None => self.turn.fetch_add(1, Relaxed),
            Some(_) => 0,
        };
        let load = |cpu| CpuLoad {
            outstanding: workers.load_of(cpu),
            busy_tenths: self.busy.busy_tenths(cpu),
        };
        let cpu = cpus.choose(vector, load, turn);
        let of_cpu = cpu.and_then(|cpu| workers.on(cpu, seed));
        match of_cpu.or_else(|| workers.any.clone()) {
            Some(queue) => queue.push(duty),
            None => Err(duty),
        }
    }

    /// Enters to serve a request; `None` if the tenant has left.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        (*gate == Gate::Open).then_some(Inside(gate))
    }

    /// Like [`Self::enter`], but does not wait for a tenant that is leaving: `None` then, too.
    pub(super) fn try_enter(&self) -> Option<Inside<'_>> {
        let gate = match self.gate.try_read() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (*gate == Gate::Open).then_some(Inside(gate))
    }

    /// From now on no request enters; when this returns, none is inside.
    pub(super) fn leave(&self) {
        self.leaving.end();
        *self.gate.write().unwrap_or_else(PoisonError::into_inner) = Gate::Closed;
        self.lock_workers().close();
    }

    /// Waits for `time`, unless the tenant leaves.
    pub(super) fn wait(&self, time: Duration) -> Waited {
        self.leaving.wait(time)
    }

    pub(super) fn fault(&self, request: &PageRequest) -> Option<Fault> {
        let pages = self.mmu.in_space(request.domain, request.pages)?;
        Some(Fault {
            device: DPU,
            pages,
            access: request.access,
        })
    }

    /// I/O page faults so far on absent pages: requests for them for which a device's access waits. (A page
    /// request may also ask for a page that is present and lacks only its bit: each page's first DMA after an
    /// attach does. A prefault is a guess: nothing waits for it, and if it is dropped, the access to those
    /// pages makes a request of its own.)
    #[must_use]
    pub fn absent_faults(&self) -> u64 {
        self.absent_faults.load(Relaxed)
    }

    /// The section of such a fault that was not returned yet. If this is not called, the oldest are
    /// dropped.
    #[must_use]
    pub fn next_absent_section(&self) -> Option<SectionNo> {
        self.absent_sections.pop()
    }

    /// A request for pages of `tier` is about to be served.
    pub(super) fn note_fault(&self, request: &PageRequest, pages: PageRange, tier: Tier) {
        let waits = match request.kind {
            RequestKind::Demand | RequestKind::Overwrite { .. } => true,
            RequestKind::Prefault | RequestKind::AliasFault => false,
        };
        if tier == Tier::Present || !waits {
            return;
        }
        self.absent_faults.fetch_add(1, Relaxed);
        for section in pages.sections().take(SECTIONS_A_FAULT) {
            self.absent_sections.force_push(section);
        }
    }

    pub(super) fn tier_of(&self, pages: PageRange) -> Tier {
        let memory = self.space.memory();
        memory.map_or(Tier::Unknown, |memory| memory.tier_of(pages))
    }

    /// Requests that were put on a CPU and are not finished.
    #[cfg(test)]
    pub(super) fn load_of(&self, cpu: usize) -> usize {
        self.lock_workers().load_of(cpu)
    }

    #[cfg(test)]
    pub(super) fn wait_for_load_of(&self, cpu: usize, load: usize) {
        while self.load_of(cpu) != load {
            std::thread::yield_now();
        }
    }

    #[cfg(test)]
    pub(super) fn close_worker_of(&self, cpu: usize) {
        self.lock_workers().by_cpu[&cpu].close();
    }

    fn lock_workers(&self) -> MutexGuard<'_, Workers> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.lock_workers().close();
    }
}

impl Workers {
    fn load_of(&self, cpu: usize) -> usize {
        self.by_cpu.get(&cpu).map_or(0, |queue| queue.load())
    }

    /// The queue of the worker of `cpu`, which is started if there is none; `None` if it cannot be.
    fn on(&mut self, cpu: usize, seed: &WorkerSeed) -> Option<Arc<Queue>> {
        if let Some(queue) = self.by_cpu.get(&cpu)
            && !queue.is_closed()
        {
            return Some(Arc::clone(queue));
        }
        // Workers that ended because no work came make room.
        self.by_cpu.retain(|_, queue| !queue.is_closed());
        if self.by_cpu.len() >= WORKERS_MAX {
            return None;
        }
        let queue = Queue::new(Order::DemandsFirst);
        match worker::start(&queue, Home::Cpu(cpu), Patience::Short, seed) {
            Ok(_detached) => {
                self.by_cpu.insert(cpu, Arc::clone(&queue));
                Some(queue)
            }
            Err(error) => {
                tracing::warn!(%error, cpu, "no thread for page requests on this CPU");
                None
            }
        }
    }

    fn close(&mut self) {
        self.is_closed = true;
        for queue in self.by_cpu.values().chain(&self.any) {
            queue.close();
        }
    }
}
