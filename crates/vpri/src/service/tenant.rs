// SPDX-License-Identifier: Apache-2.0
//! [`Tenant`]: a VM whose devices may fault, with the workers that serve it.

use super::{
    account::Account,
    duty::Duty,
    placement::{BusyTimes, CpuLoad, TenantCpus},
    vm::TenantVm,
    worker::{Order, Patience, Queue, WorkerSeed, start},
    worker_place::Home,
};
use crate::mmu::DmaMmu;
use pagetide_addr::SectionNo;
use pagetide_gmem::AddressSpace;
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// Most CPUs of one tenant that have a worker of their own; requests placed on a further CPU are
/// served by the tenant's worker that may run on any of them. Otherwise a large VM would have
/// thousands of idle threads.
const WORKERS_MAX: usize = 64;

/// A VM whose devices may fault.
pub struct Tenant {
    vm: Arc<TenantVm>,
    /// Grows with each fault of a polled queue.
    turn: AtomicUsize,
    workers: Mutex<Workers>,
}

/// The workers of a tenant, each by its queue.
#[derive(Default)]
struct Workers {
    by_cpu: HashMap<usize, Arc<Queue>>,
    /// The queue of the worker that is bound to no CPU, which always exists.
    any: Option<Arc<Queue>>,
    is_closed: bool,
}

impl Tenant {
    pub(super) fn new(space: Arc<AddressSpace>, mmu: Arc<DmaMmu>, busy: &Arc<BusyTimes>) -> Self {
        Self {
            vm: Arc::new(TenantVm::new(space, mmu, busy)),
            turn: AtomicUsize::new(0),
            workers: Mutex::default(),
        }
    }

    /// What its requests need.
    pub(super) fn vm(&self) -> &Arc<TenantVm> {
        &self.vm
    }

    /// Statistics of its page requests.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.vm.account
    }

    /// Page requests so far, without [`Self::alias_faults`].
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.vm.account.requests()
    }

    /// Alias faults of the DPU so far; see [`Account::alias_faults`].
    #[must_use]
    pub fn alias_faults(&self) -> u64 {
        self.vm.account.alias_faults()
    }

    /// Sets which CPUs are the tenant's. This also measures how busy they are, so call it now and
    /// then, and not from a thread that is in a hurry.
    pub fn set_cpus(&self, cpus: TenantCpus) {
        self.vm.set_cpus(cpus);
    }

    /// I/O page faults so far on absent pages: requests for them for which a device's access waits. (A page
    /// request may also ask for a page that is present and lacks only its bit: each page's first DMA after an
    /// attach does. A prefault is a guess: nothing waits for it, and if it is dropped, the access to those
    /// pages makes a request of its own.)
    #[must_use]
    pub fn absent_faults(&self) -> u64 {
        self.vm.absent_faults()
    }

    /// The section of such a fault that was not returned yet. If this is not called, the oldest are
    /// dropped.
    #[must_use]
    pub fn next_absent_section(&self) -> Option<SectionNo> {
        self.vm.next_absent_section()
    }

    /// Starts the worker that always exists.
    pub(super) fn start_worker(&self, seed: &WorkerSeed) -> io::Result<()> {
        let queue = Queue::new(Order::DemandsFirst);
        let home = Home::Tenant(Arc::downgrade(&self.vm));
        start(&queue, home, Patience::Endless, seed)?;
        self.lock_workers().any = Some(queue);
        Ok(())
    }

    /// Hands a duty to the worker that [`super::placement`] chooses; gives it back if the tenant has
    /// left.
    pub(super) fn hand_over(&self, duty: Duty, seed: &WorkerSeed) -> Result<(), Duty> {
        let cpus = self.vm.cpus();
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
            busy_tenths: self.vm.busy_tenths(cpu),
        };
        let cpu = cpus.choose(vector, load, turn);
        let of_cpu = cpu.and_then(|cpu| workers.on(cpu, seed));
        match of_cpu.or_else(|| workers.any.clone()) {
            Some(queue) => queue.push(duty),
            None => Err(duty),
        }
    }

    /// From now on no request enters; when this returns, none is inside.
    pub(super) fn leave(&self) {
        self.vm.leave();
        self.lock_workers().close();
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
        match start(&queue, Home::Cpu(cpu), Patience::Short, seed) {
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
