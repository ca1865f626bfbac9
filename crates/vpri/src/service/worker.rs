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

use super::{
    duty::now_ns,
    serve::serve,
    unclaimed::Unclaimed,
    urgency::Preempt,
    work_queue::{Job, Queue},
    worker_place::{Home, WorkerPlace},
};
use std::{
    io,
    sync::{Arc, Weak},
    thread::JoinHandle,
    time::Duration,
};

/// A worker that is idle for this long ends.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(10);

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
