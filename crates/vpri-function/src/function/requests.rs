// SPDX-License-Identifier: Apache-2.0
//! Page requests that wait for an answer: each gets exactly one, from whichever driver there is by
//! then.
//!
//! ```text
//!   taken ──► Unsent ──next_unsent──► Sent ──RESPOND──► answered
//!               ▲                      │
//!               └── the driver went ───┘
//! ```
//! A driver may only answer requests that were sent to *it*. Requests that an
//! earlier driver left unanswered are sent again, under the same id.

use pagetide_addr::{PageRequest, RequestId};
use std::collections::{HashMap, VecDeque};

/// Where a request came from: the position of its queue among those of the function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SourceNo(pub usize);

/// Whether the current driver has a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Unsent,
    Sent,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    request: PageRequest,
    source: SourceNo,
    stage: Stage,
}

/// All requests that were taken and are not answered.
#[derive(Debug, Default)]
pub(super) struct Requests {
    asked: HashMap<RequestId, Asked>,
    /// Requests to send, in order of arrival. Some may have been answered meanwhile.
    unsent: VecDeque<RequestId>,
}

/// There is already a request with that id: a bug of the device.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Duplicate;

impl Requests {
    /// Number of unanswered requests.
    pub fn len(&self) -> usize {
        self.asked.len()
    }

    /// Takes a request that was sent to the driver at once.
    pub fn add_sent(&mut self, source: SourceNo, request: PageRequest) -> Result<(), Duplicate> {
        self.add(source, request, Stage::Sent)
    }

    /// Takes a request that waits until [`Self::send_again`] releases it.
    pub fn add_held(&mut self, source: SourceNo, request: PageRequest) -> Result<(), Duplicate> {
        self.add(source, request, Stage::Unsent)
    }

    fn add(
        &mut self,
        source: SourceNo,
        request: PageRequest,
        stage: Stage,
    ) -> Result<(), Duplicate> {
        let asked = Asked {
            request,
            source,
            stage,
        };
        match self.asked.entry(request.id) {
            std::collections::hash_map::Entry::Occupied(_) => Err(Duplicate),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(asked);
                Ok(())
            }
        }
    }

    /// The driver has gone: it answers no more requests.
    pub fn forget_driver(&mut self) {
        self.unsent.clear();
        for asked in self.asked.values_mut() {
            asked.stage = Stage::Unsent;
        }
    }

    /// Every request that the driver does not have, oldest id first.
    pub fn unsent(&self) -> Vec<(SourceNo, PageRequest)> {
        let mut unsent: Vec<_> = self
            .asked
            .values()
            .filter(|asked| asked.stage == Stage::Unsent)
            .map(|asked| (asked.source, asked.request))
            .collect();
        unsent.sort_by_key(|(_, request)| request.id);
        unsent
    }

    /// Queues a request that the driver does not have for sending.
    pub fn send_again(&mut self, id: RequestId) {
        self.unsent.push_back(id);
    }

    /// True if [`Self::next_unsent`] may return one.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// The next request to send to the driver; it counts as sent.
    pub fn next_unsent(&mut self) -> Option<PageRequest> {
        while let Some(id) = self.unsent.pop_front() {
            if let Some(asked) = self.asked.get_mut(&id)
                && asked.stage == Stage::Unsent
            {
                asked.stage = Stage::Sent;
                return Some(asked.request);
            }
        }
        None
    }

    /// The request `id`, which the driver has answered; `None` if it does not have it.
    pub fn answer(&mut self, id: RequestId) -> Option<(SourceNo, PageRequest)> {
        let sent = self.asked.get(&id)?.stage == Stage::Sent;
        sent.then(|| self.drop_request(id))?
    }

    /// Removes the request `id`, whether or not the driver has it.
    pub fn drop_request(&mut self, id: RequestId) -> Option<(SourceNo, PageRequest)> {
        let asked = self.asked.remove(&id)?;
        Some((asked.source, asked.request))
    }
}
