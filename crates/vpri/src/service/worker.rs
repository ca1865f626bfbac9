// SPDX-License-Identifier: Apache-2.0
//! Workers: the bottom half of a fault (VPRI 6.1), each with a queue of its own.
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

use super::{FaultService, Preempt, Tenant, duty::Duty, serve, tenant::WorkerSeed};
use pagetide_addr::RequestKind;
use pagetide_sys::clock::now_ns;
use pagetide_sys::cpu::{self, Urgency};
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

/// A worker that is idle for this long ends.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(10);
/// Priority of workers: the lowest that preempts ordinary threads.
const WORKER_PRIORITY: u8 = 1;
/// Priority of the dispatcher: an interrupt goes before the work that it starts.
const DISPATCHER_PRIORITY: u8 = 2;

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
    duty: Duty,
    /// When it was put in, if the worker was asleep then.
    handed_ns: Option<u64>,
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
        let is_last = self.order == Order::DemandsFirst
            && matches!(duty.request().kind, RequestKind::Prefault);
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

    fn done(&self) {
        self.load.fetch_sub(1, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a worker runs.
pub(super) enum Home {
    /// On this CPU.
    Cpu(usize),
    /// On any CPU of the tenant, as they are now; anywhere as long as they are not known.
    Tenant(Weak<Tenant>),
    /// Anywhere.
    Anywhere,
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
    let (queue, WorkerSeed { service, preempt }) = (Arc::clone(queue), seed.clone());
    let patience = (patience == Patience::Short).then_some(IDLE_MAX);
    std::thread::Builder::new().name(name).spawn(move || {
        let end = QueueEnd(queue);
        let mut worker_place = WorkerPlace::new(home, preempt);
        while let Some(job) = end.0.next(patience) {
            work(&service, job, &mut worker_place);
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

fn work(service: &Weak<FaultService>, job: Job, worker_place: &mut WorkerPlace) {
    worker_place.stand();
    let Job { duty, handed_ns } = job;
    if let (Some(handed_ns), Some(tenant)) = (handed_ns, duty.tenant()) {
        let took_ns = now_ns().saturating_sub(handed_ns);
        tenant.account.preempt.record_ns(took_ns);
    }
    match service.upgrade() {
        Some(service) => serve::serve(&service, duty, worker_place),
        None => duty.abandon(),
    }
}

/// Where a worker runs now, and which threads it preempts.
pub(super) struct WorkerPlace {
    home: Home,
    preempt: Preempt,
    cpus: Vec<usize>,
    is_urgent: bool,
}

impl WorkerPlace {
    fn new(home: Home, preempt: Preempt) -> Self {
        let mut worker_place = Self {
            home,
            preempt,
            cpus: Vec::new(),
            is_urgent: false,
        };
        if let Home::Cpu(cpu) = worker_place.home {
            worker_place.move_to(vec![cpu]);
        }
        worker_place
    }

    /// Moves to its CPUs and becomes urgent there. Where no tenant's CPUs are known it stays
    /// ordinary: it could preempt any VM.
    fn stand(&mut self) {
        if let Home::Tenant(tenant) = &self.home
            && let Some(tenant) = tenant.upgrade()
        {
            self.move_to(tenant.cpus().own().to_vec());
        }
        if self.cpus.is_empty() {
            self.be_ordinary();
        } else {
            self.be_urgent();
        }
    }

    /// Runs work that may wait, in the ordinary class (see the module).
    pub(super) fn in_ordinary_class<R>(&self, work: impl FnOnce() -> R) -> R {
        if !self.is_urgent || self.preempt != Preempt::Fifo {
            return work();
        }
        Preempt::Nice.take(WORKER_PRIORITY);
        let done = work();
        Preempt::Fifo.take(WORKER_PRIORITY);
        done
    }

    fn be_urgent(&mut self) {
        if !self.is_urgent {
            self.preempt.take(WORKER_PRIORITY);
            self.is_urgent = true;
        }
    }

    fn be_ordinary(&mut self) {
        if self.is_urgent {
            if let Err(error) = cpu::set_urgency(Urgency::Ordinary) {
                tracing::error!(%error, "a worker of the fault service cannot be made ordinary");
            }
            self.is_urgent = false;
        }
    }

    /// A failure to move costs only speed: the CPU has gone, or is not ours to use.
    fn move_to(&mut self, cpus: Vec<usize>) {
        if cpus.is_empty() || self.cpus == cpus {
            return;
        }
        if let Err(error) = cpu::set_affinity(&cpus) {
            tracing::debug!(%error, ?cpus, "a worker of the fault service stays where it is");
        }
        self.cpus = cpus;
    }
}

impl Preempt {
    /// Makes this thread the dispatcher.
    pub(super) fn take_dispatcher(self) {
        self.take(DISPATCHER_PRIORITY);
    }

    /// Makes this thread as urgent as configured and allowed.
    fn take(self, priority: u8) {
        let tries: &[Urgency] = match self {
            Self::Fifo => &[Urgency::Preempting(priority), Urgency::Eager],
            Self::Nice => &[Urgency::Eager],
            Self::Off => &[],
        };
        for urgency in tries {
            match cpu::set_urgency(*urgency) {
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%error, ?urgency, "a thread of the fault service may not be this urgent");
                }
            }
        }
    }
}
