// SPDX-License-Identifier: Apache-2.0
//! [`Queue`]: the duties that wait for one worker.

use super::duty::{Duty, now_ns};
use pagetide_addr::RequestKind;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

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

    /// A job that was taken is finished.
    pub(super) fn done(&self) {
        self.load.fetch_sub(1, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
