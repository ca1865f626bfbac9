// SPDX-License-Identifier: Apache-2.0
//! [`ReclaimRequests`]: requests to evict a number of pages now, on their way to the reclaim thread.

use super::lock::lock;
use pagetide_swap::reclaim::{Reclaimed, Stayed};
use std::{
    collections::VecDeque,
    sync::{Mutex, mpsc},
};

/// A request to evict a number of pages now, regardless of the limit.
pub(super) struct ReclaimRequest {
    pub(super) pages: u64,
    pub(super) done: mpsc::Sender<Answer>,
}

/// What became of a request.
pub(super) struct Answer {
    pub(super) done: Reclaimed,
    /// What is in memory, if less was evicted than was asked for.
    pub(super) stayed: Option<Stayed>,
}

/// Requests that wait for the reclaim thread, as long as it runs.
#[derive(Default)]
pub(super) struct ReclaimRequests(Mutex<RequestList>);

#[derive(Default)]
struct RequestList {
    waiting: VecDeque<ReclaimRequest>,
    closed: bool,
}

impl ReclaimRequests {
    /// Queues a request for the reclaim thread; drops it unanswered if that thread has ended.
    pub(super) fn push(&self, request: ReclaimRequest) {
        let mut list = lock(&self.0);
        if !list.closed {
            list.waiting.push_back(request);
        }
    }

    /// Undoes [`Self::close`].
    pub(super) fn open(&self) {
        lock(&self.0).closed = false;
    }

    /// The oldest request.
    pub(super) fn pop(&self) -> Option<ReclaimRequest> {
        lock(&self.0).waiting.pop_front()
    }

    /// From now on no thread takes requests; callers that wait for an answer get an error.
    pub(super) fn close(&self) {
        let mut list = lock(&self.0);
        list.closed = true;
        list.waiting.clear();
    }
}
