// SPDX-License-Identifier: Apache-2.0
//! Chains that wait for pages (VPRI 5.2): parked here, resumed by page responses.
//!
//! # Idea
//! Only the faulting *chain* waits here. The setting of its queue decides whether later chains of
//! the queue go on meanwhile ([`crate::OnFault`]).
//!
//! ```text
//!   park ──► unsent ──send──► waiting for n responses ──answer──► Resumed
//!              ▲  │                   │                            │
//!              └──┘ queue full:       └─ waited too long:          └► leases again;
//!                   stay, and pop        given up, Resumed            absent again: park
//!                   no more chains       as TimedOut
//! ```
//! A response says that the pages *were* brought in. They may have been evicted since, so the
//! resumed chain takes its leases again, and may park again. This is not an error.
//!
//! The rings of a starting queue wait in the same way ([`Waiter::Rings`]). Posted chains do not wait
//! here, but their kind is told when their pages were brought in ([`Waiter::Posted`]).
//!
//! # Requests without a waiter
//! *Prefaults* request pages of chains that have not begun. They are sent after all requests that
//! have a waiter, take at most [`PREFAULTS_PER_DEVICE_MAX`] of a device's share, are dropped if
//! they do not fit, and their answers are ignored.
//!
//! # Time-outs
//! A chain that has waited for its DMA longer than the time-out fails: by then its driver is better
//! served by an error than by silence. Time comes from outside ([`ParkedChains::tick`]) and stands
//! still while there is no host, and while this engine itself did not run. Rings, and a chain that
//! only waits to *report* its failure, have no time-out: there is nothing better to do with them.
//!
//! # Duties
//! Every request that was sent is answered exactly once, even if its chain is gone by then
//! ([`ParkedChains::abandon`], time-out). The answer is then dropped here. Until it comes, the request
//! counts against its device's share: the number that a host leaves unanswered must stay bounded.

use crate::{
    kind::posted::{ChainNo, Need},
    page_demand::{PageDemand, PartNo, covers, merge},
    slo::course::RequestTimeline,
};
use pagetide_addr::{
    DeviceId, PageRequest, PageResponse, QueueId, RequestId, RequestKind, ResponseCode,
};
use pagetide_sys::clock::now_ns;
use pagetide_vpri::{QueueFull, queue::HostPresence};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::{Duration, Instant},
};

/// Most page requests one chain has outstanding: one for each of the 126 data buffers of a Linux
/// request, and two for header and status, so that all are requested at once. A chain with more
/// absent runs requests the rest when these pages are present; they stay present because they were
/// just used.
pub const REQUESTS_PER_CHAIN_MAX: usize = 128;

/// Most page requests one device has outstanding on an engine. A guest whose faults are slow
/// because it is at its limit must not fill the queue that others need.
pub const REQUESTS_PER_DEVICE_MAX: usize = 128;

/// Page requests that one device sends before the next device's turn.
const REQUESTS_PER_ROUND: usize = 8;

/// A prefault is sent only while its device has fewer requests outstanding than this. The rest of
/// its share is for requests with a waiter.
pub const PREFAULTS_PER_DEVICE_MAX: usize = 64;

/// Most time between two ticks that counts. An engine ticks this often while anything waits. If a
/// tick comes later, the engine itself was kept from running (a stopped process, a starved
/// machine), and the host may have been, too.
pub const TICK_MAX: Duration = Duration::from_secs(1);

/// A queue of a device, as its engine knows it. The epoch distinguishes a queue from its
/// predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct QueueKey {
    pub device: usize,
    pub queue: u16,
    pub epoch: u32,
}

/// What waits for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// The chain with this head.
    Chain(u16),
    /// The queue's own rings.
    Rings,
    /// The kind of the device, which wants to know that the pages of a posted chain are there.
    Posted(ChainNo, Need),
    /// All memory is to be wired, and this is a part of it.
    Part(PartNo),
}

/// What a chain needs its pages for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To do its DMA.
    Dma,
    /// To write a bad status: its DMA has failed already.
    BadStatus,
}

/// The party on whose behalf pages are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asker {
    pub queue: QueueKey,
    pub device: DeviceId,
    /// Interrupt vector by which the driver is notified of the queue, if it wants interrupts.
    pub vector: Option<u16>,
}

/// A descriptor chain (or a ring) that waits for pages.
#[must_use = "a parked chain must be put among the parked, or its guest waits for ever"]
#[derive(Debug)]
pub(crate) struct ParkedChain {
    pub asker: Asker,
    pub waiter: Waiter,
    pub wanted: Vec<PageDemand>,
    pub purpose: Purpose,
    /// When it was first parked.
    pub since: Instant,
    pub course: RequestTimeline,
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The pages were brought in.
    Present,
    /// A request was answered with an error.
    Lost,
    /// The host did not answer in time.
    TimedOut,
}

/// A chain whose wait is over.
#[must_use = "a resumed chain must be tried again, or its guest waits for ever"]
#[derive(Debug)]
pub(crate) struct Resumed {
    pub queue: QueueKey,
    pub waiter: Waiter,
    pub purpose: Purpose,
    pub since: Instant,
    pub course: RequestTimeline,
    pub ended: Ended,
}

#[derive(Debug)]
struct Slot {
    chain: ParkedChain,
    outstanding: usize,
    failed: bool,
    deadline: Option<Deadline>,
}

/// The requests of one device.
#[derive(Debug, Default)]
struct Asking {
    outstanding: usize,
    /// Slots with unsent requests.
    unsent: VecDeque<usize>,
}

/// When a chain times out, by the clock of [`ParkedChains::tick`]; the number distinguishes equal
/// times.
type Deadline = (Duration, u64);

/// Everything that waits on one engine.
#[derive(Debug)]
pub(crate) struct ParkedChains {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// The device that sent the request, and the slot that waits for it; `None` if that slot is
    /// gone or never existed.
    waiting: HashMap<RequestId, (DeviceId, Option<usize>)>,
    by_device: HashMap<DeviceId, Asking>,
    /// Devices with unsent requests, in the order of their turns.
    unsent: VecDeque<DeviceId>,
    /// Most outstanding requests of all devices together.
    capacity: usize,
    /// Prefaults to be sent or dropped at the next [`Self::send`].
    ahead: Vec<(Asker, PageDemand)>,
    /// The queue was full at the last attempt.
    full: bool,
    next_id: u64,
    timeout: Option<Duration>,
    deadlines: BTreeMap<Deadline, usize>,
    next_deadline: u64,
    /// Time that chains have waited while a host was there.
    waited: Duration,
    looked: Option<Instant>,
}

impl ParkedChains {
    /// Nothing parked yet, for engine number `engine` (so that ids of two engines never collide). A
    /// chain times out after `timeout`; `None` means never.
    pub fn new(engine: usize, timeout: Option<Duration>) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            waiting: HashMap::new(),
            by_device: HashMap::new(),
            unsent: VecDeque::new(),
            capacity: usize::MAX,
            ahead: Vec::new(),
            full: false,
            next_id: (engine as u64) << 48,
            timeout,
            deadlines: BTreeMap::new(),
            next_deadline: 0,
            waited: Duration::ZERO,
            looked: None,
        }
    }

    /// Sets the number of requests that may be outstanding.
    pub fn with_capacity(mut self, capacity: usize) -> Self {
        self.capacity = capacity;
        self
    }

    /// Parks a chain; [`Self::send`] sends its requests. Returns their number. Adjacent pages of
    /// the chain are merged.
    pub fn park(&mut self, mut chain: ParkedChain) -> usize {
        merge(&mut chain.wanted);
        chain.wanted.truncate(REQUESTS_PER_CHAIN_MAX);
        debug_assert!(!chain.wanted.is_empty(), "parked for nothing");
        let requests = chain.wanted.len();
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        let device = chain.asker.device;
        let deadline = self.deadline_of(&chain);
        if let Some(deadline) = deadline {
            if self.deadlines.is_empty() {
                // No ticks came while nothing waited.
                self.looked = None;
            }
            self.deadlines.insert(deadline, index);
        }
        self.slots[index] = Some(Slot {
            chain,
            outstanding: 0,
            failed: false,
            deadline,
        });
        let asking = self.by_device.entry(device).or_default();
        if asking.unsent.is_empty() {
            self.unsent.push_back(device);
        }
        asking.unsent.push_back(index);
        requests
    }

    fn deadline_of(&mut self, chain: &ParkedChain) -> Option<Deadline> {
        let timeout = self.timeout?;
        if chain.purpose != Purpose::Dma || !matches!(chain.waiter, Waiter::Chain(_)) {
            return None;
        }
        self.next_deadline += 1;
        Some((self.waited + timeout, self.next_deadline))
    }

    /// Requests pages that nothing waits for yet, except pages that a chain of that queue is about
    /// to request itself.
    pub fn ask_ahead(&mut self, asker: Asker, mut wanted: Vec<PageDemand>) {
        merge(&mut wanted);
        let (slots, its) = (&self.slots, self.by_device.get(&asker.device));
        let asked = |next: &PageDemand| {
            let unsent = its.into_iter().flat_map(|asking| &asking.unsent);
            unsent
                .filter_map(|index| slots[*index].as_ref())
                .filter(|slot| slot.chain.asker.queue == asker.queue)
                .flat_map(|slot| &slot.chain.wanted)
                .any(|other| covers(other, next))
        };
        let news = wanted.iter().filter(|next| !asked(next));
        let room = PREFAULTS_PER_DEVICE_MAX;
        self.ahead
            .extend(news.take(room).map(|wanted| (asker, *wanted)));
    }

    /// Sends unsent requests, as far as the queue takes them and no device exceeds its share;
    /// returns how many were sent.
    pub fn send(&mut self, mut submit: impl FnMut(PageRequest) -> Result<(), QueueFull>) -> usize {
        let mut sent = 0;
        self.full = false;
        let now_ns = now_ns();
        // Repeats the turns until one of them sends nothing.
        let mut silent = 0;
        while silent < self.unsent.len() {
            let Some(device) = self.unsent.pop_front() else {
                break;
            };
            let count = self.send_of(device, now_ns, &mut submit);
            sent += count;
            silent = if count == 0 { silent + 1 } else { 0 };
            let its = self.by_device.get(&device);
            let left = its.is_some_and(|asking| !asking.unsent.is_empty());
            match (left, self.full) {
                // It is the first to send when there is room.
                (true, true) => {
                    self.unsent.push_front(device);
                    break;
                }
                (true, false) => self.unsent.push_back(device),
                (false, _) => {}
            }
        }
        sent + self.send_ahead(now_ns, &mut submit)
    }

    /// Sends some requests of one device, fewer if the queue is full or the device has its share.
    fn send_of(
        &mut self,
        device: DeviceId,
        now_ns: u64,
        submit: &mut impl FnMut(PageRequest) -> Result<(), QueueFull>,
    ) -> usize {
        let Some(asking) = self.by_device.get_mut(&device) else {
            return 0;
        };
        let mut sent = 0;
        while let Some(index) = asking.unsent.front().copied()
            && sent < REQUESTS_PER_ROUND
        {
            let slot = self.slots[index].as_mut();
            let wanted = slot.and_then(|slot| Some((slot.chain.wanted.last().copied()?, slot)));
            let Some((wanted, slot)) = wanted else {
                asking.unsent.pop_front();
                continue;
            };
            if asking.outstanding >= share(self.capacity, self.waiting.len()) {
                break;
            }
            let id = RequestId(self.next_id);
            let request = PageRequest {
                kind: kind_for(slot.chain.waiter, &wanted),
                ..request(id, slot.chain.asker, &wanted, now_ns)
            };
            if submit(request).is_err() {
                self.full = true;
                break;
            }
            slot.chain.wanted.pop();
            slot.outstanding += 1;
            asking.outstanding += 1;
            self.waiting.insert(id, (device, Some(index)));
            self.next_id += 1;
            sent += 1;
            if slot.chain.wanted.is_empty() {
                asking.unsent.pop_front();
            }
        }
        sent
    }

    /// Sends the prefaults that fit and drops the others. Their chains will request the pages
    /// themselves.
    fn send_ahead(
        &mut self,
        now_ns: u64,
        submit: &mut impl FnMut(PageRequest) -> Result<(), QueueFull>,
    ) -> usize {
        let mut sent = 0;
        for (asker, wanted) in self.ahead.drain(..) {
            let asking = self.by_device.entry(asker.device).or_default();
            let most = share(self.capacity, self.waiting.len()).min(PREFAULTS_PER_DEVICE_MAX);
            if self.full || asking.outstanding >= most {
                continue;
            }
            let id = RequestId(self.next_id);
            let request = PageRequest {
                kind: RequestKind::Prefault,
                ..request(id, asker, &wanted, now_ns)
            };
            // A queue without room for a prefault may still have room for requests with a waiter.
            if submit(request).is_err() {
                continue;
            }
            asking.outstanding += 1;
            self.waiting.insert(id, (asker.device, None));
            self.next_id += 1;
            sent += 1;
        }
        sent
    }

    /// True if there are unsent requests.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || !self.ahead.is_empty()
    }

    /// True if the queue was full: no more chains may be popped, of any device.
    pub fn is_queue_full(&self) -> bool {
        self.full
    }

    /// Takes a response; returns the chain if it was the chain's last one.
    pub fn answer(&mut self, response: PageResponse) -> Option<Resumed> {
        let (device, waiter) = self.waiting.remove(&response.id)?;
        if let Some(asking) = self.by_device.get_mut(&device) {
            asking.outstanding -= 1;
            if asking.outstanding == 0 && asking.unsent.is_empty() {
                self.by_device.remove(&device);
            }
        }
        // There is room again, for at least one request.
        self.full = false;
        let index = waiter?;
        let slot = self.slots[index].as_mut()?;
        slot.outstanding -= 1;
        slot.chain.course.answered(&response);
        slot.failed |= response.code != ResponseCode::Success;
        if slot.outstanding > 0 || !slot.chain.wanted.is_empty() {
            return None;
        }
        let slot = self.slots[index].take()?;
        self.free.push(index);
        if let Some(deadline) = slot.deadline {
            self.deadlines.remove(&deadline);
        }
        let ended = if slot.failed {
            Ended::Lost
        } else {
            Ended::Present
        };
        Some(slot.resumed(ended))
    }

    /// True if some chain can time out.
    pub fn has_deadline(&self) -> bool {
        !self.deadlines.is_empty()
    }

    /// Counts the time since the last tick as waiting time, if there is a host.
    pub fn tick(&mut self, now: Instant, host: HostPresence) {
        let last = self.looked.replace(now).unwrap_or(now);
        if host == HostPresence::Here {
            self.waited += now.saturating_duration_since(last).min(TICK_MAX);
        }
    }

    /// How long the engine may sleep without a tick.
    pub fn next_look(&self) -> Option<Duration> {
        let ((deadline, _), _) = self.deadlines.first_key_value()?;
        Some(deadline.saturating_sub(self.waited).min(TICK_MAX))
    }

    /// Returns a chain that has timed out. Its requests stay outstanding until they are answered.
    pub fn give_up(&mut self) -> Option<Resumed> {
        let ((deadline, _), index) = self.deadlines.first_key_value()?;
        if *deadline > self.waited {
            return None;
        }
        let index = *index;
        let slot = self.forget(|at, _| at == index).pop()?;
        Some(slot.resumed(Ended::TimedOut))
    }

    /// Gives up all chains of `queue` and returns them, those that have waited longest first. Their
    /// requests stay outstanding until they are answered.
    pub fn give_up_all_of(&mut self, queue: QueueKey) -> Vec<Resumed> {
        let is_its_chain = |slot: &Slot| {
            slot.chain.asker.queue == queue && matches!(slot.chain.waiter, Waiter::Chain(_))
        };
        let gone = self.forget(|_, slot| is_its_chain(slot)).into_iter();
        let given_up = gone.map(|slot| slot.resumed(Ended::TimedOut));
        let mut given_up: Vec<Resumed> = given_up.collect();
        given_up.sort_by_key(|resumed| resumed.since);
        given_up
    }

    /// Removes slots; the responses to their requests will be dropped.
    fn forget(&mut self, mut which: impl FnMut(usize, &Slot) -> bool) -> Vec<Slot> {
        let mut gone = Vec::new();
        for (index, place) in self.slots.iter_mut().enumerate() {
            if let Some(slot) = place.take_if(|slot| which(index, slot)) {
                if let Some(deadline) = slot.deadline {
                    self.deadlines.remove(&deadline);
                }
                self.free.push(index);
                gone.push(slot);
            }
        }
        if gone.is_empty() {
            return gone;
        }
        let slots = &self.slots;
        let is_gone = |index: usize| slots[index].is_none();
        for (_, waiter) in self.waiting.values_mut() {
            if waiter.is_some_and(is_gone) {
                *waiter = None;
            }
        }
        for slot in &gone {
            let device = slot.chain.asker.device;
            if let Some(asking) = self.by_device.get_mut(&device) {
                asking.unsent.retain(|index| !is_gone(*index));
                if asking.unsent.is_empty() && asking.outstanding == 0 {
                    self.by_device.remove(&device);
                }
            }
        }
        let asks = |device: &DeviceId| {
            let its = self.by_device.get(device);
            its.is_some_and(|asking| !asking.unsent.is_empty())
        };
        self.unsent.retain(asks);
        if self.unsent.is_empty() {
            // Nothing waits for room any more.
            self.full = false;
        }
        gone
    }

    /// The number of chains of `queue` that injected faults have parked.
    pub fn held_of(&self, queue: QueueKey) -> u32 {
        let its = (self.slots.iter().flatten()).filter(|slot| slot.chain.asker.queue == queue);
        its.map(|slot| u32::from(slot.chain.course.is_held())).sum()
    }

    /// Forgets what waits for `queue`; returns the number of chains. They stay in the in-flight
    /// region, from which a successor takes them.
    pub fn abandon(&mut self, queue: QueueKey) -> usize {
        let gone = self.forget(|_, slot| slot.chain.asker.queue == queue);
        let is_chain = |slot: &&Slot| matches!(slot.chain.waiter, Waiter::Chain(_));
        let gone = gone.iter().filter(is_chain).count();
        self.ahead.retain(|(asker, _)| asker.queue != queue);
        gone
    }

    /// Requests sent but not answered.
    #[cfg(test)]
    pub fn outstanding(&self) -> usize {
        self.waiting.len()
    }
}

impl Slot {
    fn resumed(self, ended: Ended) -> Resumed {
        Resumed {
            queue: self.chain.asker.queue,
            waiter: self.chain.waiter,
            purpose: self.chain.purpose,
            since: self.chain.since,
            course: self.chain.course,
            ended,
        }
    }
}

/// Requests that one device may have outstanding while `outstanding` are outstanding in all: at
/// most as many as are free then (a dynamic threshold: Choudhury and Hahne, INFOCOM 1996). So
/// however many devices fault at a time, a device that begins to fault finds room.
fn share(capacity: usize, outstanding: usize) -> usize {
    let free = capacity.saturating_sub(outstanding);
    free.clamp(1, REQUESTS_PER_DEVICE_MAX)
}

fn request(id: RequestId, asker: Asker, wanted: &PageDemand, now_ns: u64) -> PageRequest {
    let (device, queue) = (asker.device, QueueId(asker.queue.queue));
    let (domain, pages, access) = (wanted.domain, wanted.pages, wanted.access);
    PageRequest {
        vector: asker.vector,
        sent_ns: match wanted.posted_ns {
            0 => now_ns,
            posted_ns => posted_ns,
        },
        hold_us: wanted.hold_us,
        ..PageRequest::demand(id, device, queue, domain, pages, access)
    }
}

fn kind_for(waiter: Waiter, wanted: &PageDemand) -> RequestKind {
    match (waiter, wanted.posted_ns) {
        (Waiter::Posted(_, Need::Ahead), 0) => RequestKind::Prefault,
        (Waiter::Posted(_, Need::Ahead), _) => RequestKind::BlankAhead,
        (Waiter::Posted(_, Need::Now), 1..) => RequestKind::Blank,
        (Waiter::Chain(_) | Waiter::Rings | Waiter::Part(_) | Waiter::Posted(..), _) => {
            RequestKind::Demand
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{Access, DomainId, FilePage, FileRange};

    fn key(queue: u16) -> QueueKey {
        QueueKey {
            device: 0,
            queue,
            epoch: 1,
        }
    }

    fn wanted(start: u64, end: u64, access: Access) -> PageDemand {
        PageDemand {
            domain: DomainId(0),
            pages: FileRange::new(FilePage(start), FilePage(end)),
            access,
            hold_us: 0,
            posted_ns: 0,
        }
    }

    fn asker(queue: u16) -> Asker {
        Asker {
            queue: key(queue),
            device: DeviceId(1),
            vector: None,
        }
    }

    fn chain(queue: u16, head: u16, wanted: Vec<PageDemand>) -> ParkedChain {
        ParkedChain {
            asker: asker(queue),
            waiter: Waiter::Chain(head),
            wanted,
            purpose: Purpose::Dma,
            since: Instant::now(),
            course: RequestTimeline::default(),
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
        let mut parked = ParkedChains::new(0, None);
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
        let mut parked = ParkedChains::new(3, None);
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
        assert_eq!(resumed.ended, Ended::Lost);
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
        let mut parked = ParkedChains::new(0, None);
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
        let mut parked = ParkedChains::new(0, None);
        let runs =
            |from: u64| (0..64).map(move |i| wanted(from + 3 * i, from + 3 * i + 1, Access::Read));
        for head in 0..4 {
            parked.park(chain(0, head, runs(1000 * u64::from(head)).collect()));
        }
        let greedy = send_all(&mut parked);
        assert_eq!(greedy.len(), REQUESTS_PER_DEVICE_MAX);
        assert!(parked.has_unsent() && !parked.is_queue_full());
        let mut other = chain(1, 9, vec![wanted(7, 8, Access::Read)]);
        other.asker.device = DeviceId(2);
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
        let mut parked = ParkedChains::new(0, None);
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
        let mut parked = ParkedChains::new(0, None);
        let runs = (0..500).map(|i| wanted(3 * i, 3 * i + 1, Access::Read));
        parked.park(chain(0, 1, runs.collect()));
        assert_eq!(send_all(&mut parked).len(), REQUESTS_PER_CHAIN_MAX);
    }

    const LIMIT: Duration = Duration::from_millis(2500);

    fn patient() -> (ParkedChains, Instant) {
        let parked = ParkedChains::new(0, Some(LIMIT));
        (parked, Instant::now())
    }

    /// Ticks `steps` times, a second apart.
    fn pass(parked: &mut ParkedChains, now: &mut Instant, steps: u32, host: HostPresence) {
        for _ in 0..steps {
            *now += Duration::from_secs(1);
            parked.tick(*now, host);
        }
    }

    #[test]
    fn chain_unanswered_for_the_limit_is_given_up_and_its_late_response_dropped() {
        let (mut parked, mut now) = patient();
        parked.park(chain(0, 4, vec![wanted(1, 2, Access::Read)]));
        parked.tick(now, HostPresence::Here);
        let sent = send_all(&mut parked);
        pass(&mut parked, &mut now, 2, HostPresence::Here);
        assert!(parked.give_up().is_none(), "too early");
        assert_eq!(parked.next_look(), Some(Duration::from_millis(500)));
        pass(&mut parked, &mut now, 1, HostPresence::Here);
        let given_up = parked.give_up().unwrap();
        assert_eq!(given_up.ended, Ended::TimedOut);
        assert_eq!(given_up.waiter, Waiter::Chain(4));
        assert!(parked.give_up().is_none() && !parked.has_deadline());
        assert_eq!(parked.outstanding(), 1, "it may still be answered");
        // Its slot is reused; the late answer must not reach the new chain.
        parked.park(chain(0, 5, vec![wanted(7, 8, Access::Read)]));
        let next = send_all(&mut parked);
        assert!(
            parked
                .answer(response(&sent[0], ResponseCode::Success))
                .is_none()
        );
        let answered = parked.answer(response(&next[0], ResponseCode::Success));
        assert_eq!(answered.unwrap().waiter, Waiter::Chain(5));
        assert_eq!(parked.outstanding(), 0);
        assert!(!parked.has_deadline());
    }

    #[test]
    fn patience_stands_still_without_a_host_and_while_nobody_looked() {
        let (mut parked, mut now) = patient();
        parked.park(chain(0, 4, vec![wanted(1, 2, Access::Read)]));
        parked.tick(now, HostPresence::Here);
        pass(&mut parked, &mut now, 100, HostPresence::Away);
        assert!(parked.give_up().is_none());
        now += Duration::from_secs(3600);
        parked.tick(now, HostPresence::Here);
        assert!(parked.give_up().is_none(), "the engine itself did not run");
        pass(&mut parked, &mut now, 2, HostPresence::Here);
        assert!(parked.give_up().is_some());
    }

    #[test]
    fn chain_that_waits_to_report_its_failure_and_rings_are_never_given_up() {
        let (mut parked, mut now) = patient();
        let mut failed = chain(0, 4, vec![wanted(1, 2, Access::Write)]);
        failed.purpose = Purpose::BadStatus;
        parked.park(failed);
        let mut rings = chain(1, 0, vec![wanted(3, 4, Access::Write)]);
        rings.waiter = Waiter::Rings;
        parked.park(rings);
        pass(&mut parked, &mut now, 10, HostPresence::Here);
        assert!(parked.give_up().is_none());
        assert_eq!(parked.next_look(), None, "nothing to wake up for");
    }

    #[test]
    fn chain_that_could_not_even_ask_is_given_up_and_holds_nobody_back() {
        let (mut parked, mut now) = patient();
        parked.park(chain(0, 4, vec![wanted(1, 2, Access::Read)]));
        parked.tick(now, HostPresence::Here);
        parked.send(|_| Err(QueueFull(1)));
        assert!(parked.is_queue_full());
        pass(&mut parked, &mut now, 3, HostPresence::Here);
        assert!(parked.give_up().is_some());
        assert!(!parked.is_queue_full() && !parked.has_unsent());
        assert_eq!(parked.outstanding(), 0);
    }

    #[test]
    fn requests_given_up_count_against_their_share_until_they_are_answered() {
        let (mut parked, mut now) = patient();
        let runs =
            (0..REQUESTS_PER_DEVICE_MAX as u64).map(|i| wanted(3 * i, 3 * i + 1, Access::Read));
        parked.park(chain(0, 1, runs.collect()));
        parked.tick(now, HostPresence::Here);
        let sent = send_all(&mut parked);
        assert_eq!(sent.len(), REQUESTS_PER_DEVICE_MAX);
        pass(&mut parked, &mut now, 3, HostPresence::Here);
        assert!(parked.give_up().is_some());
        parked.park(chain(0, 2, vec![wanted(9000, 9001, Access::Read)]));
        assert_eq!(send_all(&mut parked).len(), 0);
        assert!(
            parked
                .answer(response(&sent[0], ResponseCode::Success))
                .is_none()
        );
        assert_eq!(send_all(&mut parked).len(), 1);
    }

    #[test]
    fn prefaults_go_after_those_who_wait_and_are_forgotten_when_answered() {
        let mut parked = ParkedChains::new(0, None);
        parked.park(chain(0, 1, vec![wanted(1, 3, Access::Write)]));
        let ahead = vec![
            wanted(2, 3, Access::Read),
            wanted(5, 6, Access::Read),
            wanted(6, 7, Access::Read),
        ];
        parked.ask_ahead(asker(0), ahead);
        let sent = send_all(&mut parked);
        let shape: Vec<_> = sent
            .iter()
            .map(|r| (r.kind, r.pages.start.0, r.pages.end.0))
            .collect();
        let (demand, prefault) = (RequestKind::Demand, RequestKind::Prefault);
        assert_eq!(shape, [(demand, 1, 3), (prefault, 5, 7)]);
        for code in [ResponseCode::Success, ResponseCode::ResponseFailure] {
            assert!(parked.answer(response(&sent[1], code)).is_none());
        }
        assert!(
            parked
                .answer(response(&sent[0], ResponseCode::Success))
                .is_some()
        );
        assert_eq!(parked.outstanding(), 0);
    }

    #[test]
    fn prefaults_leave_half_of_the_share_and_a_full_queue_to_those_who_wait() {
        let mut parked = ParkedChains::new(0, None);
        let runs = |from: u64| {
            let run = move |i: u64| wanted(from + 3 * i, from + 3 * i + 1, Access::Read);
            (0..200).map(run).collect::<Vec<_>>()
        };
        parked.ask_ahead(asker(0), runs(0));
        assert_eq!(send_all(&mut parked).len(), PREFAULTS_PER_DEVICE_MAX);
        parked.ask_ahead(asker(0), runs(1000));
        assert_eq!(send_all(&mut parked).len(), 0);
        assert!(!parked.has_unsent(), "dropped, not kept");
        parked.park(chain(0, 1, runs(2000)));
        let rest = REQUESTS_PER_DEVICE_MAX - PREFAULTS_PER_DEVICE_MAX;
        assert_eq!(send_all(&mut parked).len(), rest);
        let mut other = asker(1);
        other.device = DeviceId(2);
        parked.ask_ahead(other, runs(3000));
        parked.send(|_| Err(QueueFull(1)));
        assert!(parked.ahead.is_empty());
    }

    #[test]
    fn request_says_when_it_was_sent_and_which_interrupt_its_queue_has() {
        let mut parked = ParkedChains::new(0, None);
        let mut with = chain(7, 1, vec![wanted(1, 2, Access::Read)]);
        with.asker.vector = Some(7);
        let before = now_ns();
        parked.park(with);
        let sent = send_all(&mut parked);
        assert_eq!(sent[0].vector, Some(7));
        assert!((before..=now_ns()).contains(&sent[0].sent_ns));
    }
}
