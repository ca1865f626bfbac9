// SPDX-License-Identifier: Apache-2.0
//! [`Sources`]: where page requests come from, and the doorbell that all of them ring.

use super::duty::Duty;
use crate::{queue::Doorbell, source::FaultSource};
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicU64, Ordering},
};

/// Most requests taken from one source before the others get their turn.
const TAKEN_IN_A_ROW: usize = 16;

/// Names a source of a service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultSourceId(u64);

/// See the module.
pub(super) struct Sources {
    bell: Arc<Doorbell>,
    list: RwLock<Vec<(FaultSourceId, Arc<dyn FaultSource>)>>,
    next: AtomicU64,
}

impl Sources {
    /// None yet; those to come ring `bell`.
    pub(super) fn new(bell: Arc<Doorbell>) -> Self {
        Self {
            bell,
            list: RwLock::default(),
            next: AtomicU64::new(0),
        }
    }

    /// See [`FaultService::add_source`](super::FaultService::add_source).
    pub(super) fn add(&self, source: Arc<dyn FaultSource>) -> FaultSourceId {
        let id = FaultSourceId(self.next.fetch_add(1, Ordering::Relaxed));
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        list.push((id, source));
        drop(list);
        // A sleeping dispatcher has not armed the new source.
        self.bell.ring_anyway();
        id
    }

    /// See [`FaultService::remove_source`](super::FaultService::remove_source).
    pub(super) fn remove(&self, id: FaultSourceId) {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let removed = list.iter().position(|(known, _)| *known == id);
        let removed = removed.map(|position| list.swap_remove(position));
        drop(list);
        drop(removed);
    }

    /// Takes some requests of each source; false if no source has one.
    pub(super) fn take_some_of_each(&self, take_in: impl Fn(Duty)) -> bool {
        let list = self.list.read().unwrap_or_else(PoisonError::into_inner);
        let mut taken = false;
        for (_, source) in list.iter() {
            let next = || source.next();
            for request in std::iter::from_fn(next).take(TAKEN_IN_A_ROW) {
                taken = true;
                take_in(Duty::new(request, source));
            }
        }
        taken
    }

    /// Sleeps until a source has a request, or the bell is rung; not at all if `is_over`.
    pub(super) fn sleep(&self, is_over: impl Fn() -> bool) {
        self.bell.arm();
        if !self.has_request() && !is_over() {
            let mut polled = [PollFd::new(&self.bell, PollFlags::IN)];
            // EINTR: the queues are checked again anyway.
            if let Err(error) = poll(&mut polled, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "the I/O page fault service cannot sleep");
            }
        }
        if let Err(error) = self.bell.disarm() {
            tracing::error!(%error, "the I/O page fault service's doorbell is broken");
        }
        let list = self.list.read().unwrap_or_else(PoisonError::into_inner);
        list.iter().for_each(|(_, source)| source.disarm());
    }

    /// Wakes the thread that sleeps.
    pub(super) fn wake(&self) {
        self.bell.ring_anyway();
    }

    fn has_request(&self) -> bool {
        let list = self.list.read().unwrap_or_else(PoisonError::into_inner);
        // Arm all sources, even if one already has a request.
        let with_request = list.iter().filter(|(_, source)| source.arm());
        with_request.count() > 0
    }
}
