// SPDX-License-Identifier: Apache-2.0
//! [`Tenant`]: a VM whose devices may fault, with its workers: the bottom half of a fault (VPRI 6.1), each with
//! a queue of its own.
//!
//! In the paper the scheduler forces the chosen CPU out of its guest by an
//! interrupt, and that CPU then runs the fault's bottom half. Here a worker is
//! bound to that CPU and *preempts*: its scheduling class goes before vCPU
//! threads, so waking it takes the place of that interrupt.
//!
//! # A thread that preempts must not wait
//! A real-time thread that yields in a loop keeps all ordinary threads off its
//! CPU, including the one it waits for. So a worker is in that class only while
//! it serves without waiting (64 pages at most, and it waits only for locks that
//! are held for some instructions). Work that has to wait it does in the ordinary
//! class, though with the lowest niceness, and it preempts again for the
//! next request. The one remaining loop, on a userfaultfd whose address space is
//! changing, sleeps between its tries.
//!
//! # Life
//! A worker of a CPU ends when it has been idle for a while; its queue then
//! refuses, and a new one is made. It leaves nothing behind: a duty that a
//! panic leaves in its queue is dropped and so answered.

use super::{
    account::Account,
    duty::Duty,
    pause::Waited,
    placement::{BusyTimes, CpuLoad, TenantCpus},
    unclaimed::Unclaimed,
    urgency::Preempt,
    vm::TenantVm,
    worker_place::{Home, WorkerPlace},
};
use crate::mmu::DmaMmu;
use pagetide_addr::SectionNo;
use pagetide_gmem::AddressSpace;
use pagetide_sys::clock::now_ns;
use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Most CPUs of one tenant that have a worker of their own; requests placed on a further CPU are
/// served by the tenant's worker that may run on any of them. Otherwise a large VM would have
/// thousands of idle threads.
const WORKERS_MAX: usize = 64;

/// A worker that is idle for this long ends.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(10);

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

/// The order in which a queue is processed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// In order of arrival.
    Arrival,
    /// Requests that no DMA waits for come last.
    DemandsFirst,
}

/// Requests that wait for one worker. Only the sources limit its length: they bound the number of
/// outstanding requests.
pub(super) struct Queue {
    order: Order,
    state: Mutex<QueueState>,
    wake: Condvar,
    /// Put in, and not finished.
    load: AtomicUsize,
}

#[derive(Default)]
struct QueueState {
    first: VecDeque<Job>,
    last: VecDeque<Job>,
    is_sleeping: bool,
    is_closed: bool,
}

/// A duty in a queue.
pub(super) struct Job {
    pub(super) duty: Duty,
    /// When it was put in, if the worker was asleep then.
    pub(super) handed_ns: Option<u64>,
}

impl Queue {
    pub(super) fn new(order: Order) -> Arc<Self> {
        Arc::new(Self {
            order,
            state: Mutex::default(),
            wake: Condvar::new(),
            load: AtomicUsize::new(0),
        })
    }

    /// Puts a duty in, and wakes the worker; gives it back if the worker has ended.
    pub(super) fn push(&self, duty: Duty) -> Result<(), Duty> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(duty);
        }
        let handed_ns = state.is_sleeping.then(now_ns);
        let is_last = self.order == Order::DemandsFirst && duty.request().kind.is_ahead();
        let job = Job { duty, handed_ns };
        if is_last {
            state.last.push_back(job);
        } else {
            state.first.push_back(job);
        }
        // One push wakes it; further pushes before it runs need no system call.
        let was_sleeping = std::mem::take(&mut state.is_sleeping);
        self.load.fetch_add(1, Relaxed);
        drop(state);
        if was_sleeping {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Requests put in and not finished.
    pub(super) fn load(&self) -> usize {
        self.load.load(Relaxed)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Refuses from now on; the worker ends when the queue is empty.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.wake.notify_one();
    }

    /// The duties still in it, for which there is no worker.
    pub(super) fn take_all(&self) -> Vec<Duty> {
        let mut state = self.lock();
        let state = &mut *state;
        let jobs = state.first.drain(..).chain(state.last.drain(..));
        jobs.map(|job| job.duty).collect()
    }

    /// The next job; `None` if there will be none, at the latest after `patience`.
    pub(super) fn next(&self, patience: Option<Duration>) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.first.pop_front() {
                return Some(job);
            }
            if let Some(job) = state.last.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state.is_sleeping = true;
            let mut timed_out = false;
            state = match patience {
                None => (self.wake.wait(state)).unwrap_or_else(PoisonError::into_inner),
                Some(patience) => {
                    let waited = self.wake.wait_timeout(state, patience);
                    let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                    timed_out = waited.timed_out();
                    state
                }
            };
            state.is_sleeping = false;
            if timed_out && state.first.is_empty() && state.last.is_empty() {
                state.is_closed = true;
            }
        }
    }

    /// A job that was taken is finished.
    pub(super) fn done(&self) {
        self.load.fetch_sub(1, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a worker needs to start.
#[derive(Clone)]
pub(super) struct WorkerSeed {
    /// For requests of no tenant. A worker whose service is gone abandons what it has.
    pub(super) unclaimed: Weak<Unclaimed>,
    pub(super) preempt: Preempt,
}

/// How long a worker waits for work before it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    /// [`IDLE_MAX`].
    Short,
    /// Until its queue is closed.
    Endless,
}

/// Starts the worker of `queue`.
///
/// # Errors
/// If no thread can be started.
pub(super) fn start(
    queue: &Arc<Queue>,
    home: Home,
    patience: Patience,
    seed: &WorkerSeed,
) -> io::Result<JoinHandle<()>> {
    let name = match &home {
        Home::Cpu(cpu) => format!("pt-iopf-{cpu}"),
        Home::Tenant(_) => "pt-iopf-slow".to_owned(),
        Home::Anywhere => "pt-iopf-serial".to_owned(),
    };
    let (queue, WorkerSeed { unclaimed, preempt }) = (Arc::clone(queue), seed.clone());
    let patience = (patience == Patience::Short).then_some(IDLE_MAX);
    std::thread::Builder::new().name(name).spawn(move || {
        let end = QueueEnd(queue);
        let mut worker_place = WorkerPlace::new(home, preempt);
        while let Some(job) = end.0.next(patience) {
            work(&unclaimed, job, &mut worker_place);
            end.0.done();
        }
    })
}

/// Leaves nothing in the queue of a worker that has ended, even by a panic.
struct QueueEnd(Arc<Queue>);

impl Drop for QueueEnd {
    fn drop(&mut self) {
        self.0.close();
        drop(self.0.take_all());
    }
}

fn work(unclaimed: &Weak<Unclaimed>, job: Job, worker_place: &mut WorkerPlace) {
    worker_place.stand();
    let Job { duty, handed_ns } = job;
    if let (Some(handed_ns), Some(tenant)) = (handed_ns, duty.tenant()) {
        let took_ns = now_ns().saturating_sub(handed_ns);
        tenant.account.preempt.record_ns(took_ns);
    }
    match unclaimed.upgrade() {
        Some(unclaimed) => serve(&unclaimed, duty, worker_place),
        None => duty.abandon(),
    }
}

/// Serves on a worker: waits for whatever the request needs.
pub(super) fn serve(unclaimed: &Unclaimed, mut duty: Duty, worker_place: &mut WorkerPlace) {
    duty.begin();
    let hold = Duration::from_micros(duty.request().hold_us.into());
    let Some(tenant) = duty.tenant().map(Arc::clone) else {
        match unclaimed.wait(hold) {
            Waited::Enough => unclaimed.answer(duty),
            Waited::CutShort => duty.abandon(),
        }
        return;
    };
    let entered = match tenant.wait(hold) {
        Waited::Enough => tenant.enter(),
        Waited::CutShort => None,
    };
    let Some(_inside) = entered else {
        unclaimed.answer(duty);
        return;
    };
    if let Err(duty) = tenant.serve_at_once(duty) {
        worker_place.in_ordinary_class(|| tenant.serve_waiting(duty));
    }
}
