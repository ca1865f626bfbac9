// SPDX-License-Identifier: Apache-2.0
//! [`FaultServers`]: the threads that serve a VM's faults beside its reader.
//!
//! The reader never waits. It serves faults that need no wait itself, and passes on two kinds:
//!
//! ```text
//!            ┌─ at hand ──────────► served here
//!   reader ──┤                       ▲
//!            ├─ many at a time ──► shared ◄── servers that are idle, and the reader when it is through
//!            └─ would wait ──────► waiting ◄── servers only
//! ```
//! Two more tasks belong to no fault that waits: readahead of the pages needed next, and room for further
//! faults when little is left ([`FaultSink::make_room`]). An idle server does them, since the vCPU just
//! served mostly runs on the reader's CPU. A server that has served a fault itself makes room after it,
//! when the vCPU runs again.
//!
//! *Shared* faults may be taken by any thread, so none of them ever queues behind one that waits: the
//! reader takes those that no server has. *Waiting* ones (no room under the limit, a section whose
//! lock is held, content that is not at hand) go to the servers, each of which waits for one at a
//! time. As many servers as there are CPUs are enough: a fault that waits for room makes room.
//!
//! Servers run where the vCPUs may run ([`ServerCpus`]): those CPUs belong to the tenant that pays
//! for the VM.

use crate::reader::{FaultSink, VcpuFault};
use pagetide_addr::PageRange;
use pagetide_sys::cpu;
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most faults that wait for a server at a time. Each thread of a VMM waits in one fault, and may be woken
/// and fault once more; beyond this limit the reader serves faults itself, and waits.
pub const WAITING_MAX: usize = 4096;
/// One server is woken per this many faults that arrive together: waking one costs as much as
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

    /// Moves this thread to these CPUs, if they have changed since `seen`.
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

/// The tasks passed on.
#[derive(Debug, Default)]
struct Faults {
    shared: VecDeque<VcpuFault>,
    waiting: VecDeque<VcpuFault>,
    /// Pages to be read ahead.
    along: VecDeque<PageRange>,
    /// Room is to be made.
    room_wanted: bool,
    idle: usize,
    /// Message of a panic.
    failure: Option<String>,
    is_over: bool,
}

#[derive(Debug, Default)]
struct Queue {
    faults: Mutex<Faults>,
    come: Condvar,
    taken: AtomicU64,
}

/// The running servers; dropping it ends them once all tasks passed on are done.
#[derive(Debug)]
pub(crate) struct FaultServers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

/// A task for a server.
enum Task {
    Fault(VcpuFault),
    BringAlong(PageRange),
    MakeRoom,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Message of a panic.
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

    /// Faults served by threads other than the reader so far.
    pub(crate) fn taken(&self) -> u64 {
        self.queue.taken.load(Ordering::Relaxed)
    }

    /// Message of a server's panic, if there was one.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.queue.faults).failure.clone()
    }

    /// Passes on faults that any thread may serve, including this one: see [`Self::take_back`].
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

    /// Passes on a fault that waits; `None` if a server will serve it.
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

impl FaultServers {
    /// Passes on pages to be read ahead; `None` if an idle server will do it.
    pub(crate) fn bring_along(&self, pages: PageRange) -> Option<PageRange> {
        let mut queue = lock(&self.queue.faults);
        if queue.idle <= queue.along.len() {
            return Some(pages);
        }
        queue.along.push_back(pages);
        drop(queue);
        self.queue.come.notify_one();
        None
    }

    /// An idle server, if there is one, makes room. Else a server that is busy with a fault does so after it.
    pub(crate) fn make_room(&self) {
        let mut queue = lock(&self.queue.faults);
        if queue.room_wanted || queue.idle <= queue.along.len() {
            return;
        }
        queue.room_wanted = true;
        drop(queue);
        self.queue.come.notify_one();
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
    /// Runs until the end. A panic leaves its message in the queue: an unserved fault would be a vCPU
    /// that hangs without any report.
    fn run(&self) -> Result<(), ()> {
        let mut placed = 0;
        while let Some(task) = self.next() {
            self.cpus.follow(&mut placed);
            // After a panic, both are used only to report it.
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
                return Some(Task::Fault(fault));
            }
            if let Some(fault) = faults.waiting.pop_front() {
                return Some(Task::Fault(fault));
            }
            if let Some(pages) = faults.along.pop_front() {
                return Some(Task::BringAlong(pages));
            }
            if std::mem::take(&mut faults.room_wanted) {
                return Some(Task::MakeRoom);
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
        let along = match task {
            Task::Fault(fault) => {
                self.queue.taken.fetch_add(1, Ordering::Relaxed);
                self.sink.fault(fault);
                self.sink.served(fault)
            }
            Task::BringAlong(pages) => Some(pages),
            Task::MakeRoom => None,
        };
        if let Some(pages) = along {
            self.sink.bring_along(pages);
        }
        if self.sink.is_short_of_room() {
            self.sink.make_room();
        }
    }
}
