// SPDX-License-Identifier: Apache-2.0
//! [`FaultServers`]: the threads that serve a VM's faults beside its reader.
//!
//! The reader never waits. What is at hand it serves itself; two kinds of faults it gives away:
//!
//! ```text
//!            ┌─ at hand ──────────► served here
//!   reader ──┤                       ▲
//!            ├─ many at a time ──► shared ◄── servers that are idle, and the reader when it is through
//!            └─ would wait ──────► waiting ◄── servers only
//! ```
//! *Shared* faults may be taken by anybody, so none of them ever stands behind one that waits: the
//! reader takes what no server has. *Waiting* ones (no room under the limit, a section whose lock is
//! held, content that is not at hand) go to the servers, each of which waits for one at a time.
//! As many servers as there are CPUs to wait with are enough: a fault that waits for room makes room.
//!
//! Servers run where the vCPUs may run ([`ServerCpus`]), which belong to whoever pays for the VM.

use crate::reader::{FaultSink, VcpuFault};
use pagetide_sys::cpu;
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most faults that wait for a server at a time. Each thread of a VMM waits in one fault, and may be woken
/// and fault once more; beyond this the reader serves them itself, and waits.
pub const WAITING_MAX: usize = 4096;
/// Of faults that come together, one server is woken for so many: waking one costs as much as
/// serving some.
const FAULTS_PER_WAKE: usize = 4;

/// Where a VM's servers may run.
#[derive(Debug, Default)]
pub struct ServerCpus {
    cpus: Mutex<Vec<usize>>,
    version: AtomicU64,
}

impl ServerCpus {
    /// From now on servers run on `cpus`; anywhere if there are none.
    pub fn set(&self, cpus: &[usize]) {
        let mut now = lock(&self.cpus);
        if *now != cpus {
            cpus.clone_into(&mut now);
            self.version.fetch_add(1, Ordering::Release);
        }
    }

    /// Has this thread run there, if that has changed since `seen`.
    fn follow(&self, seen: &mut u64) {
        let version = self.version.load(Ordering::Acquire);
        if version == *seen {
            return;
        }
        *seen = version;
        let cpus = lock(&self.cpus).clone();
        if cpus.is_empty() {
            return;
        }
        if let Err(error) = cpu::set_affinity(&cpus) {
            tracing::warn!(?cpus, %error, "a server of faults cannot run on the VM's CPUs");
        }
    }
}

/// What is handed on.
#[derive(Debug, Default)]
struct Faults {
    shared: VecDeque<VcpuFault>,
    waiting: VecDeque<VcpuFault>,
    idle: usize,
    /// What a panic said.
    failure: Option<String>,
    is_over: bool,
}

#[derive(Debug, Default)]
struct Queue {
    faults: Mutex<Faults>,
    come: Condvar,
    taken: AtomicU64,
}

/// The running servers; dropping it ends them, when all that was handed on is served.
#[derive(Debug)]
pub(crate) struct FaultServers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

/// A fault and how it is to be served.
enum Task {
    Shared(VcpuFault),
    Waiting(VcpuFault),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a panic said.
pub(crate) fn words_of(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "without words".to_owned()
    }
}

impl FaultServers {
    /// Starts `count` of them for the VMM `pid`. `failed` is called once if one of them panics.
    pub(crate) fn start(
        count: usize,
        pid: u32,
        sink: &Arc<dyn FaultSink>,
        cpus: &Arc<ServerCpus>,
        failed: impl Fn() + Clone + Send + 'static,
    ) -> std::io::Result<Self> {
        let mut servers = Self {
            queue: Arc::default(),
            threads: Vec::new(),
        };
        for number in 0..count {
            let server = Server {
                queue: Arc::clone(&servers.queue),
                sink: Arc::clone(sink),
                cpus: Arc::clone(cpus),
            };
            let failed = failed.clone();
            let thread = std::thread::Builder::new().name(format!("serve-{pid}-{number}"));
            let run = move || {
                if server.run().is_err() {
                    failed();
                }
            };
            servers.threads.push(thread.spawn(run)?);
        }
        Ok(servers)
    }

    /// Faults that were served by others than the reader so far.
    pub(crate) fn taken(&self) -> u64 {
        self.queue.taken.load(Ordering::Relaxed)
    }

    /// What the panic of a server said, if there was one.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.queue.faults).failure.clone()
    }

    /// Hands on faults that anybody may serve, this thread too: see [`Self::take_back`].
    pub(crate) fn share(&self, faults: &[VcpuFault]) {
        let mut queue = lock(&self.queue.faults);
        let wakes = (faults.len() / FAULTS_PER_WAKE).min(queue.idle);
        queue.shared.extend(faults);
        drop(queue);
        for _ in 0..wakes {
            self.queue.come.notify_one();
        }
    }

    /// One of the faults that were shared, if no server has taken it.
    pub(crate) fn take_back(&self) -> Option<VcpuFault> {
        lock(&self.queue.faults).shared.pop_front()
    }

    /// Hands on a fault that waits; `None` if a server will serve it.
    pub(crate) fn hand_on(&self, fault: VcpuFault) -> Option<VcpuFault> {
        let mut queue = lock(&self.queue.faults);
        if queue.waiting.len() >= WAITING_MAX || queue.failure.is_some() {
            return Some(fault);
        }
        queue.waiting.push_back(fault);
        drop(queue);
        self.queue.come.notify_one();
        None
    }
}

impl Drop for FaultServers {
    fn drop(&mut self) {
        lock(&self.queue.faults).is_over = true;
        self.queue.come.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a server of faults has panicked");
            }
        }
    }
}

struct Server {
    queue: Arc<Queue>,
    sink: Arc<dyn FaultSink>,
    cpus: Arc<ServerCpus>,
}

impl Server {
    /// Until the end. A panic leaves what it said in the queue: a fault that nobody serves would be a
    /// vCPU that hangs with nobody told.
    fn run(&self) -> Result<(), ()> {
        let mut placed = 0;
        while let Some(task) = self.next() {
            self.cpus.follow(&mut placed);
            // Neither is used after a panic but to say that there was one.
            let served = catch_unwind(AssertUnwindSafe(|| self.serve(task)));
            if let Err(panic) = served {
                lock(&self.queue.faults).failure = Some(words_of(panic.as_ref()));
                return Err(());
            }
        }
        Ok(())
    }

    /// Shared ones first: they take microseconds.
    fn next(&self) -> Option<Task> {
        let mut faults = lock(&self.queue.faults);
        loop {
            if let Some(fault) = faults.shared.pop_front() {
                return Some(Task::Shared(fault));
            }
            if let Some(fault) = faults.waiting.pop_front() {
                return Some(Task::Waiting(fault));
            }
            if faults.is_over {
                return None;
            }
            faults.idle += 1;
            let woken = self.queue.come.wait(faults);
            faults = woken.unwrap_or_else(PoisonError::into_inner);
            faults.idle -= 1;
        }
    }

    fn serve(&self, task: Task) {
        self.queue.taken.fetch_add(1, Ordering::Relaxed);
        let fault = match task {
            Task::Shared(fault) | Task::Waiting(fault) => fault,
        };
        self.sink.fault(fault);
        self.sink.served(fault);
    }
}
