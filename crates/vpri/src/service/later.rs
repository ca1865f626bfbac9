// SPDX-License-Identifier: Apache-2.0
//! [`Later`]: duties of no tenant whose answer is delayed.
//!
//! A request for memory that belongs to no tenant needs no work, so no worker
//! has it. If its answer is to be delayed (fault injection), it waits here, in
//! one thread for all, which is started for the first one.

use super::{duty::Duty, unclaimed::Unclaimed};
use std::{
    cmp::Ordering,
    collections::BinaryHeap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

/// See the module.
#[derive(Default)]
pub(super) struct Later(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    waiting: BinaryHeap<Due>,
    is_running: bool,
    is_over: bool,
}

struct Due {
    at: Instant,
    duty: Duty,
}

impl Later {
    /// Answers the duty at `at` for a domain of no tenant; at once if no thread can be started for
    /// that.
    pub(super) fn answer_at(&self, at: Instant, duty: Duty, unclaimed: &Weak<Unclaimed>) {
        let mut state = self.0.lock();
        if !state.is_running && !state.is_over {
            let (shared, whose) = (Arc::clone(&self.0), Weak::clone(unclaimed));
            let thread = std::thread::Builder::new().name("pt-iopf-later".to_owned());
            match thread.spawn(move || shared.run(&whose)) {
                Ok(_detached) => state.is_running = true,
                Err(error) => {
                    tracing::warn!(%error, "the answer to a page request cannot be held back");
                    drop(state);
                    answer(unclaimed, duty);
                    return;
                }
            }
        }
        state.waiting.push(Due { at, duty });
        drop(state);
        self.0.wake.notify_one();
    }

    /// Ends it; returns the duties that are left.
    pub(super) fn end(&self) -> Vec<Duty> {
        let mut state = self.0.lock();
        state.is_over = true;
        let left = std::mem::take(&mut state.waiting);
        drop(state);
        self.0.wake.notify_one();
        left.into_iter().map(|due| due.duty).collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, unclaimed: &Weak<Unclaimed>) {
        let mut state = self.lock();
        while !state.is_over {
            let now = Instant::now();
            let wait = state.waiting.peek().map(|due| due.at - now);
            state = match wait {
                None => (self.wake.wait(state)).unwrap_or_else(PoisonError::into_inner),
                Some(wait) if !wait.is_zero() => {
                    let waited = self.wake.wait_timeout(state, wait);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Some(_past) => {
                    let due = state.waiting.pop();
                    drop(state);
                    if let Some(due) = due {
                        answer(unclaimed, due.duty);
                    }
                    self.lock()
                }
            };
        }
    }
}

fn answer(unclaimed: &Weak<Unclaimed>, duty: Duty) {
    match unclaimed.upgrade() {
        Some(unclaimed) => unclaimed.answer(duty),
        None => duty.abandon(),
    }
}

/// Reversed, since a heap yields the greatest: the earliest is the greatest.
impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.cmp(&self.at)
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Due {}
