// SPDX-License-Identifier: Apache-2.0
//! Doing something on another thread and waiting for it: as deterministic as a call, but with what
//! each thread has of its own. Threads are kept, for a run needs them some hundred times.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

type Work = Box<dyn FnOnce() + Send>;

/// A thread that waits for work, and ends when this is dropped.
struct Worker {
    work: Sender<Work>,
    done: Receiver<thread::Result<()>>,
}

impl Worker {
    fn new() -> Self {
        let (work, to_do) = channel::<Work>();
        let (tell, done) = channel();
        thread::spawn(move || {
            for work in to_do {
                if tell.send(catch_unwind(AssertUnwindSafe(work))).is_err() {
                    return;
                }
            }
        });
        Self { work, done }
    }
}

/// Threads at rest.
#[derive(Default)]
pub struct Aside(Mutex<Vec<Worker>>);

impl Aside {
    /// Does `work` on a thread of its own; `Err` is what it panicked with. Whatever `work` owns is
    /// gone when this returns.
    pub fn perform(&self, work: impl FnOnce() + Send + 'static) -> thread::Result<()> {
        let resting = self.lock().pop();
        let worker = resting.unwrap_or_else(Worker::new);
        worker.work.send(Box::new(work)).expect("a worker waits");
        let done = worker.done.recv().expect("a worker answers");
        self.lock().push(worker);
        done
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Worker>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
