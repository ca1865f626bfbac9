// SPDX-License-Identifier: Apache-2.0
//! Chains that wait for pages (VPRI 5.2): parked here, resumed by page responses.
//!
//! # Idea
//! VPRI pauses a whole queue on a fault, because a NIC's receive ring must be
//! filled in order. Block requests have no order among one another (virtio 1.2,
//! 5.2.6: a driver that wants one waits for the first), so only the faulting
//! *chain* waits, and later chains of its queue go on.
//!
//! ```text
//!   park ──► unsent ──send──► waiting for n responses ──answer──► Resumed
//!              ▲  │                                                  │
//!              └──┘ queue full: stay, and pop no more chains         └► leases again;
//!                                                                       absent again: park
//! ```
//! A response says that the pages *were* brought; an eviction may have come
//! between, so the resumed chain takes its leases again, and may park again.
//! That is no error.
//!
//! The rings of a queue that is starting wait in the same way ([`Waiter::Rings`]).
//!
//! # Duties
//! Every request that was sent is answered exactly once, even if its chain is
//! gone by then ([`ParkedChains::abandon`]): the answer to a chain that is gone
//! is dropped here.

use pagetide_addr::{
    Access, DeviceId, DomainId, PageRange, PageRequest, PageResponse, QueueId, RequestId,
    ResponseCode,
};
use pagetide_vpri::QueueFull;
use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

/// Most page requests one chain has outstanding. A chain with more absent runs asks for the rest
/// when these are there; they stay there because they were just used.
pub const REQUESTS_PER_CHAIN_MAX: usize = 64;

/// Most page requests one device has outstanding on an engine: a guest whose faults are slow, because
/// it is at its limit, must not fill the queue that others need.
pub const REQUESTS_PER_DEVICE_MAX: usize = 128;

/// A queue of a device, as its engine knows it. The epoch tells a queue from its predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct QueueKey {
    pub device: usize,
    pub queue: u16,
    pub epoch: u32,
}

/// Who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// The chain with this head.
    Chain(u16),
    /// The queue's own rings.
    Rings,
}

/// What a chain wants its pages for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To do its DMA.
    Dma,
    /// To write a bad status: its DMA has failed already.
    BadStatus,
}

/// Pages that are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub domain: DomainId,
    pub pages: PageRange,
    pub access: Access,
}

/// A descriptor chain (or a ring) that waits for pages.
#[must_use = "a parked chain must be put among the parked, or its guest waits for ever"]
#[derive(Debug)]
pub(crate) struct ParkedChain {
    pub queue: QueueKey,
    pub device: DeviceId,
    pub waiter: Waiter,
    pub wanted: Vec<Wanted>,
    pub purpose: Purpose,
    /// When it was first parked.
    pub since: Instant,
}

/// A chain whose page requests have all been answered.
#[must_use = "a resumed chain must be tried again, or its guest waits for ever"]
#[derive(Debug)]
pub(crate) struct Resumed {
    pub queue: QueueKey,
    pub waiter: Waiter,
    pub purpose: Purpose,
    pub since: Instant,
    /// A request was answered by other than success: the DMA fails.
    pub failed: bool,
}

#[derive(Debug)]
struct Slot {
    chain: ParkedChain,
    outstanding: usize,
    failed: bool,
}

/// All that waits on one engine.
#[derive(Debug)]
pub(crate) struct ParkedChains {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Whose request it is and which slot waits for it; `None` if that is gone.
    waiting: HashMap<RequestId, (DeviceId, Option<usize>)>,
    by_device: HashMap<DeviceId, usize>,
    unsent: VecDeque<usize>,
    /// The queue took no more when it was last tried.
    full: bool,
    next_id: u64,
}

impl ParkedChains {
    /// None yet, for engine number `engine` (so that ids of two engines never meet).
    pub fn new(engine: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            waiting: HashMap::new(),
            by_device: HashMap::new(),
            unsent: VecDeque::new(),
            full: false,
            next_id: (engine as u64) << 48,
        }
    }

    /// Takes a chain; [`Self::send`] sends its requests, of which the number is returned. Its
    /// neighbouring pages are merged.
    pub fn park(&mut self, mut chain: ParkedChain) -> usize {
        merge(&mut chain.wanted);
        chain.wanted.truncate(REQUESTS_PER_CHAIN_MAX);
        debug_assert!(!chain.wanted.is_empty(), "parked for nothing");
        let requests = chain.wanted.len();
        let slot = Slot {
            chain,
            outstanding: 0,
            failed: false,
        };
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        self.slots[index] = Some(slot);
        self.unsent.push_back(index);
        requests
    }

    /// Sends what has not been sent, as far as the queue takes it and no device has more than its
    /// share; how many were sent.
    pub fn send(&mut self, mut submit: impl FnMut(PageRequest) -> Result<(), QueueFull>) -> usize {
        let mut sent = 0;
        self.full = false;
        for _ in 0..self.unsent.len() {
            let Some(index) = self.unsent.pop_front() else {
                break;
            };
            sent += self.send_of(index, &mut submit);
            let left = self.slots[index]
                .as_ref()
                .is_some_and(|slot| !slot.chain.wanted.is_empty());
            if left && self.full {
                self.unsent.push_front(index);
                break;
            }
            if left {
                self.unsent.push_back(index);
            }
        }
        sent
    }

    /// Sends requests of one chain until the queue is full, or its device has its share.
    fn send_of(
        &mut self,
        index: usize,
        submit: &mut impl FnMut(PageRequest) -> Result<(), QueueFull>,
    ) -> usize {
        let Some(slot) = self.slots[index].as_mut() else {
            return 0;
        };
        let device = slot.chain.device;
        let outstanding = self.by_device.entry(device).or_insert(0);
        let mut sent = 0;
        while let Some(wanted) = slot.chain.wanted.last() {
            if *outstanding >= REQUESTS_PER_DEVICE_MAX {
                break;
            }
            let id = RequestId(self.next_id);
            let queue = QueueId(slot.chain.queue.queue);
            let request = PageRequest::demand(
                id,
                (device, queue),
                wanted.domain,
                wanted.pages,
                wanted.access,
            );
            if submit(request).is_err() {
                self.full = true;
                break;
            }
            slot.chain.wanted.pop();
            slot.outstanding += 1;
            *outstanding += 1;
            self.waiting.insert(id, (device, Some(index)));
            self.next_id += 1;
            sent += 1;
        }
        sent
    }

    /// True if there is something to send.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// True if the queue took no more: no more chains may be popped, of whatever device.
    pub fn is_queue_full(&self) -> bool {
        self.full
    }

    /// Takes a response; gives back the chain for which it was the last.
    pub fn answer(&mut self, response: PageResponse) -> Option<Resumed> {
        let (device, waiter) = self.waiting.remove(&response.id)?;
        if let Some(outstanding) = self.by_device.get_mut(&device) {
            *outstanding -= 1;
            if *outstanding == 0 {
                self.by_device.remove(&device);
            }
        }
        // There is room again, for one at least.
        self.full = false;
        let index = waiter?;
        let slot = self.slots[index].as_mut()?;
        slot.outstanding -= 1;
        slot.failed |= response.code != ResponseCode::Success;
        if slot.outstanding > 0 || !slot.chain.wanted.is_empty() {
            return None;
        }
        let slot = self.slots[index].take()?;
        self.free.push(index);
        Some(Resumed {
            queue: slot.chain.queue,
            waiter: slot.chain.waiter,
            purpose: slot.chain.purpose,
            since: slot.chain.since,
            failed: slot.failed,
        })
    }

    /// Forgets what waits for `queue`; how many chains that were. They stay in the in-flight
    /// region, from which a successor takes them.
    pub fn abandon(&mut self, queue: QueueKey) -> usize {
        let mut gone = 0;
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.as_ref().is_some_and(|s| s.chain.queue == queue) {
                gone += usize::from(
                    slot.take()
                        .is_some_and(|s| matches!(s.chain.waiter, Waiter::Chain(_))),
                );
                self.unsent.retain(|unsent| *unsent != index);
                self.free.push(index);
                for (_, waiter) in self.waiting.values_mut() {
                    if *waiter == Some(index) {
                        *waiter = None;
                    }
                }
            }
        }
        gone
    }

    /// Requests sent and not answered.
    #[cfg(test)]
    pub fn outstanding(&self) -> usize {
        self.waiting.len()
    }
}

/// Joins runs of one domain that touch or overlap; the stronger access wins.
fn merge(wanted: &mut Vec<Wanted>) {
    wanted.sort_by_key(|w| (w.domain, w.pages.start));
    wanted.dedup_by(|next, last| {
        let joins = last.domain == next.domain && next.pages.start <= last.pages.end;
        if joins {
            last.pages.end = last.pages.end.max(next.pages.end);
            if next.access == Access::Write {
                last.access = Access::Write;
            }
        }
        joins
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PageNo;

    fn key(queue: u16) -> QueueKey {
        QueueKey {
            device: 0,
            queue,
            epoch: 1,
        }
    }

    fn wanted(start: u64, end: u64, access: Access) -> Wanted {
        Wanted {
            domain: DomainId(0),
            pages: PageRange::new(PageNo(start), PageNo(end)),
            access,
        }
    }

    fn chain(queue: u16, head: u16, wanted: Vec<Wanted>) -> ParkedChain {
        ParkedChain {
            queue: key(queue),
            device: DeviceId(1),
            waiter: Waiter::Chain(head),
            wanted,
            purpose: Purpose::Dma,
            since: Instant::now(),
        }
    }

    fn response(request: &PageRequest, code: ResponseCode) -> PageResponse {
        PageResponse::to(request, code)
    }

    fn send_all(parked: &mut ParkedChains) -> Vec<PageRequest> {
        let mut sent = Vec::new();
        parked.send(|r| {
            sent.push(r);
            Ok(())
        });
        sent
    }

    #[test]
    fn neighbouring_pages_are_asked_for_at_once_with_the_stronger_access() {
        let mut parked = ParkedChains::new(0);
        parked.park(chain(
            0,
            5,
            vec![
                wanted(9, 10, Access::Read),
                wanted(3, 5, Access::Read),
                wanted(5, 6, Access::Write),
                wanted(4, 5, Access::Read),
            ],
        ));
        let mut sent = send_all(&mut parked);
        sent.sort_by_key(|r| r.pages.start);
        let shape: Vec<_> = sent
            .iter()
            .map(|r| (r.pages.start.0, r.pages.end.0, r.access))
            .collect();
        assert_eq!(shape, [(3, 6, Access::Write), (9, 10, Access::Read)]);
    }

    #[test]
    fn chain_resumes_at_its_last_response_and_remembers_a_failure() {
        let mut parked = ParkedChains::new(3);
        parked.park(chain(
            0,
            5,
            vec![wanted(1, 2, Access::Read), wanted(8, 9, Access::Read)],
        ));
        let sent = send_all(&mut parked);
        assert!(sent.iter().all(|r| r.id.0 >> 48 == 3));
        assert!(
            parked
                .answer(response(&sent[0], ResponseCode::ResponseFailure))
                .is_none()
        );
        let resumed = parked
            .answer(response(&sent[1], ResponseCode::Success))
            .unwrap();
        assert!(resumed.failed);
        assert_eq!(resumed.waiter, Waiter::Chain(5));
        assert!(
            parked
                .answer(response(&sent[1], ResponseCode::Success))
                .is_none(),
            "answered twice"
        );
    }

    #[test]
    fn full_queue_leaves_requests_unsent_until_there_is_room() {
        let mut parked = ParkedChains::new(0);
        parked.park(chain(
            0,
            1,
            vec![wanted(1, 2, Access::Read), wanted(8, 9, Access::Read)],
        ));
        let mut taken = Vec::new();
        let sent = parked.send(|r| {
            if taken.is_empty() {
                taken.push(r);
                Ok(())
            } else {
                Err(QueueFull(1))
            }
        });
        assert_eq!(sent, 1);
        assert!(parked.has_unsent() && parked.is_queue_full());
        assert!(
            parked
                .answer(response(&taken[0], ResponseCode::Success))
                .is_none(),
            "its other request has not even been sent"
        );
        let rest = send_all(&mut parked);
        assert!(!parked.has_unsent());
        assert!(
            parked
                .answer(response(&rest[0], ResponseCode::Success))
                .is_some()
        );
        assert_eq!(parked.outstanding(), 0);
    }

    #[test]
    fn device_at_its_share_leaves_the_queue_to_others() {
        let mut parked = ParkedChains::new(0);
        let runs =
            |from: u64| (0..64).map(move |i| wanted(from + 3 * i, from + 3 * i + 1, Access::Read));
        for head in 0..4 {
            parked.park(chain(0, head, runs(1000 * u64::from(head)).collect()));
        }
        let greedy = send_all(&mut parked);
        assert_eq!(greedy.len(), REQUESTS_PER_DEVICE_MAX);
        assert!(parked.has_unsent() && !parked.is_queue_full());
        let other = ParkedChain {
            device: DeviceId(2),
            ..chain(1, 9, vec![wanted(7, 8, Access::Read)])
        };
        parked.park(other);
        assert_eq!(send_all(&mut parked).len(), 1);
        assert!(
            parked
                .answer(response(&greedy[0], ResponseCode::Success))
                .is_none()
        );
        assert_eq!(
            send_all(&mut parked).len(),
            1,
            "one answered, one more sent"
        );
    }

    #[test]
    fn responses_to_abandoned_chains_are_dropped_and_others_unhurt() {
        let mut parked = ParkedChains::new(0);
        parked.park(chain(0, 1, vec![wanted(1, 2, Access::Read)]));
        parked.park(chain(1, 2, vec![wanted(1, 2, Access::Read)]));
        let sent = send_all(&mut parked);
        assert_eq!(parked.abandon(key(0)), 1);
        parked.park(chain(2, 3, vec![wanted(4, 5, Access::Read)]));
        assert!(
            parked
                .answer(response(&sent[0], ResponseCode::Success))
                .is_none()
        );
        let other = parked
            .answer(response(&sent[1], ResponseCode::Success))
            .unwrap();
        assert_eq!(other.queue, key(1));
    }

    #[test]
    fn chain_with_very_many_runs_asks_for_no_more_than_the_limit() {
        let mut parked = ParkedChains::new(0);
        let runs = (0..500).map(|i| wanted(3 * i, 3 * i + 1, Access::Read));
        parked.park(chain(0, 1, runs.collect()));
        assert_eq!(send_all(&mut parked).len(), REQUESTS_PER_CHAIN_MAX);
    }
}
