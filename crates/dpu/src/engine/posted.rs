// SPDX-License-Identifier: Apache-2.0
//! The posted chains of a queue: buffers that a driver makes available for what may come.
//!
//! ```text
//!   avail ring:   … used │ first ──────────────── read ──────────── end
//!                        │ known here: used, filled │  not looked at │
//!                        │ or neither               │                │
//! ```
//! A chain is read from the ring when its kind first looks at it. From then on its head is kept here
//! until the chain is used, since chains may be used in any order. What a successor must know of that
//! is in a record ([`super::held`]); when the queue stops, all of it goes back to the driver.

use super::{
    blank::{NEAR_PARTS_MAX, wanted_of_posted},
    held::Held,
    pages::wanted_of,
    queue::EngineQueue,
    wires::PostedWires,
};
use crate::{
    chain::{Buffers, Length, WalkError, walk},
    inject::Injector,
    kind::{
        posted::{ChainNo, Look, Ring},
        work::Keeping,
    },
    memory::{DeviceMemory, LeaseSet, Span},
    page_demand::PageDemand,
    shared::StopReason,
};
use pagetide_addr::Access;
use std::{collections::VecDeque, rc::Rc};
use virtio_queue::QueueT;

/// What is known of a chain that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    Unused { head: u16 },
    Filled { head: u16, bytes: u32 },
    Used,
}

/// The chains of a queue that were read.
#[derive(Debug, Default)]
pub(crate) struct Posted {
    first: u64,
    read: VecDeque<Read>,
    /// The end of the ring was seen in the last turn: the driver is to kick when it posts more.
    pub saw_end: bool,
    /// What is wired for them.
    pub wires: PostedWires,
    /// Fault injection: a page of this chain is to be treated as absent once.
    pub held: Option<(ChainNo, PageDemand)>,
    /// What a successor must know of them.
    pub record: Option<Held>,
}

impl Drop for Posted {
    fn drop(&mut self) {
        // Only after the engine's ring failed is anything left.
        self.wires.unwire_all();
    }
}

impl Posted {
    /// Nothing read yet.
    pub fn new(keeping: Keeping) -> Self {
        Self {
            wires: PostedWires::new(keeping),
            first: 0,
            read: VecDeque::new(),
            saw_end: false,
            held: None,
            record: None,
        }
    }

    /// Goes on with the chains of these heads, which a predecessor has read and not used.
    pub fn resume(&mut self, record: Held, heads: &[u16]) {
        self.record = Some(record);
        let unused = |head: &u16| Read::Unused { head: *head };
        self.read.extend(heads.iter().map(unused));
    }

    fn at(&self, chain: ChainNo) -> Option<Read> {
        match usize::try_from(chain.0.checked_sub(self.first)?) {
            Ok(at) => self.read.get(at).copied(),
            Err(_) => None,
        }
    }

    fn set(&mut self, chain: ChainNo, to: Read) {
        if to == Read::Used {
            self.wires.used(chain.0);
        }
        let at = chain.0.checked_sub(self.first);
        let at = at.and_then(|at| usize::try_from(at).ok());
        if let Some(place) = at.and_then(|at| self.read.get_mut(at)) {
            *place = to;
        }
        while self.read.front() == Some(&Read::Used) {
            self.read.pop_front();
            self.first += 1;
        }
    }

    /// A chain has got so many bytes, and is reported later.
    pub fn set_filled(&mut self, chain: ChainNo, bytes: u32) {
        if let Some(Read::Unused { head }) = self.at(chain) {
            self.set(chain, Read::Filled { head, bytes });
        }
    }

    /// A chain is used: its head, and the bytes that it got if it was filled.
    pub fn take(&mut self, chain: ChainNo) -> Option<(u16, u32)> {
        let taken = match self.at(chain)? {
            Read::Unused { head } => (head, 0),
            Read::Filled { head, bytes } => (head, bytes),
            Read::Used => return None,
        };
        if let Some(record) = &mut self.record {
            record.uses(chain.0, taken.0);
        }
        self.set(chain, Read::Used);
        Some(taken)
    }

    /// The heads of all chains that were read and not used, which are used now.
    pub fn take_all(&mut self) -> Vec<u16> {
        let mut heads = Vec::new();
        for read in self.read.drain(..) {
            if let Read::Unused { head } | Read::Filled { head, .. } = read {
                heads.push(head);
                if let Some(record) = &mut self.record {
                    record.uses(self.first, head);
                }
            }
            self.first += 1;
        }
        heads
    }

    /// Records the chains that were passed over, before those are published that were taken.
    pub(super) fn record_passed(&mut self, descriptor: impl Fn(u16) -> [u8; 16]) {
        let Some(mut record) = self.record.take() else {
            return;
        };
        let unused = |number| match self.at(ChainNo(number))? {
            Read::Unused { head } | Read::Filled { head, .. } => Some(head),
            Read::Used => None,
        };
        record.record_passed(unused, descriptor);
        self.record = Some(record);
    }

    fn end(&self) -> u64 {
        self.first + self.read.len() as u64
    }
}

/// A chain that was looked at in this step.
#[derive(Debug)]
pub(crate) struct Seen {
    chain: ChainNo,
    look: Look,
    pub buffers: Buffers,
    /// Parts of its table that are absent.
    table: Vec<Span>,
    pub leases: LeaseSet,
}

/// Chains that were looked at, and objects to be used again.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    seen: Vec<Seen>,
    spare: Vec<Seen>,
}

impl Sight {
    /// The chain, if it was looked at.
    pub fn of(&self, chain: ChainNo) -> Option<&Seen> {
        // The chains of a packet are looked for in the order in which they were seen.
        self.seen.iter().find(|seen| seen.chain == chain)
    }

    /// Releases all leases.
    pub fn close(&mut self, memory: &DeviceMemory) {
        for mut seen in self.seen.drain(..) {
            seen.leases.release(memory);
            if self.spare.len() < 64 {
                self.spare.push(seen);
            }
        }
    }

    fn fresh(&mut self, chain: ChainNo) -> Seen {
        match self.spare.pop() {
            Some(mut seen) => {
                seen.chain = chain;
                seen.table.clear();
                seen
            }
            None => Seen {
                chain,
                look: Look::Unfit,
                buffers: Buffers::default(),
                table: Vec::new(),
                leases: LeaseSet::default(),
            },
        }
    }
}

/// Bytes that can be written into a chain.
fn room(buffers: &Buffers) -> u64 {
    buffers.writable.iter().map(|s| u64::from(s.len)).sum()
}

/// The posted chains of a queue, as a kind sees them in one step.
pub(crate) struct View<'a> {
    pub memory: &'a Rc<DeviceMemory>,
    pub queue: &'a mut EngineQueue,
    pub sight: &'a mut Sight,
    /// Bytes that a chain must have room for.
    pub least_bytes: u32,
    /// Chains that were looked at.
    pub looks: u64,
    /// Decides whether a present chain is to be treated as absent, if that may be due.
    pub injector: Option<&'a Injector>,
    pub now_ns: u64,
    /// Faults that were injected.
    pub injected: u64,
    /// Why the device must stop.
    pub broken: Option<StopReason>,
}

impl<'a> View<'a> {
    /// What a step of a queue sees, without injected faults.
    pub fn new(
        memory: &'a Rc<DeviceMemory>,
        queue: &'a mut EngineQueue,
        sight: &'a mut Sight,
    ) -> Self {
        Self {
            memory,
            least_bytes: queue.table.layout.header_bytes,
            queue,
            sight,
            looks: 0,
            injector: None,
            now_ns: 0,
            injected: 0,
            broken: None,
        }
    }

    /// The head of a chain, which is read from the ring if it is the next one.
    fn head(&mut self, chain: ChainNo) -> Option<u16> {
        while self.queue.posted.as_ref()?.end() <= chain.0 {
            let next = self.queue.next_head(self.memory);
            let posted = self.queue.posted.as_mut()?;
            match next {
                Ok(Some(head)) => posted.read.push_back(Read::Unused { head }),
                Ok(None) => {
                    posted.saw_end = true;
                    return None;
                }
                Err(reason) => {
                    self.broken = Some(reason);
                    return None;
                }
            }
            self.queue.took_head();
            self.queue.kicks_in_vain = 0;
        }
        let posted = self.queue.posted.as_ref()?;
        match posted.at(chain)? {
            Read::Unused { head } => Some(head),
            Read::Filled { .. } | Read::Used => {
                debug_assert!(false, "{chain:?} was looked at after its use");
                None
            }
        }
    }

    /// The writable parts of a chain that is posted and not used, as far as they are known now.
    ///
    /// None of a chain of many parts: it would have to be walked for each chain beside it.
    pub(super) fn unused_parts(&mut self, chain: ChainNo) -> Vec<Span> {
        let Some(posted) = self.queue.posted.as_ref() else {
            return Vec::new();
        };
        let is_unused = match chain.0 < posted.end() {
            true => matches!(posted.at(chain), Some(Read::Unused { .. })),
            false => true,
        };
        let head = is_unused.then(|| self.head(chain)).flatten();
        self.looks += u64::from(head.is_some());
        let mut buffers = Buffers::default();
        match head.map(|head| walk(self.memory, self.queue.table, head, &mut buffers)) {
            Some(Ok(())) if buffers.writable.len() <= NEAR_PARTS_MAX => buffers.writable,
            Some(Ok(())) => Vec::new(),
            // If it is broken, that is reported when it is looked at for a packet.
            Some(Err(_)) | None => Vec::new(),
        }
    }

    /// True if a fault was injected into that chain, or is now.
    fn is_held(&mut self, seen: &Seen) -> bool {
        let Some(posted) = self.queue.posted.as_mut() else {
            return false;
        };
        if posted.held.is_none()
            && let Some(injector) = self.injector
            && let Some(span) = seen.buffers.writable.first()
            && let Some(hold) = injector.claim(self.now_ns)
        {
            self.injected += 1;
            let demand = PageDemand {
                domain: self.memory.port(*span).domain().id(),
                pages: span.pages().start.single(),
                access: Access::Write,
                hold_us: hold.hold_us,
                posted_ns: 0,
            };
            posted.held = Some((seen.chain, demand));
        }
        posted.held.is_some_and(|(chain, _)| chain == seen.chain)
    }

    fn examine(&mut self, head: u16, seen: &mut Seen) -> Look {
        let (memory, buffers) = (self.memory, &mut seen.buffers);
        match walk(memory, self.queue.table, head, buffers) {
            Ok(()) => {}
            Err(WalkError::TableAbsent(spans)) => {
                seen.table = spans;
                return Look::Unknown;
            }
            Err(WalkError::Broken(source)) => {
                self.broken = Some(StopReason::Chain {
                    queue: self.queue.key.queue,
                    head,
                    source,
                });
                return Look::Unposted;
            }
        }
        let room = room(buffers);
        let is_fit = buffers.outside.is_none()
            && buffers.length == Length::Served
            && buffers.readable.is_empty()
            && room >= u64::from(self.least_bytes);
        let Some(room) = u32::try_from(room).ok().filter(|_| is_fit) else {
            return Look::Unfit;
        };
        let leases = &mut seen.leases;
        let all_there =
            (buffers.writable.iter()).all(|span| leases.take(memory, *span, Access::Write));
        if !all_there {
            leases.release(memory);
            return Look::Absent { room };
        }
        Look::Present { room }
    }
}

impl Ring for View<'_> {
    fn look(&mut self, chain: ChainNo) -> Look {
        if self.broken.is_some() {
            return Look::Unposted;
        }
        if let Some(seen) = self.sight.of(chain) {
            return seen.look;
        }
        let Some(head) = self.head(chain) else {
            return Look::Unposted;
        };
        self.looks += 1;
        let mut seen = self.sight.fresh(chain);
        seen.look = self.examine(head, &mut seen);
        if let Look::Present { room } = seen.look
            && self.is_held(&seen)
        {
            seen.leases.release(self.memory);
            seen.look = Look::Absent { room };
        }
        let look = seen.look;
        self.sight.seen.push(seen);
        look
    }

    fn size(&self) -> u16 {
        self.queue.table.size
    }

    fn unreported(&self) -> usize {
        usize::from(self.queue.unpublished)
    }

    fn now_ns(&self) -> u64 {
        self.now_ns
    }
}

/// The pages to be requested for a chain that was looked at after `posted_ns`.
pub(crate) fn wanted(view: &mut View<'_>, chain: ChainNo, posted_ns: u64) -> Vec<PageDemand> {
    let Some(seen) = view.sight.of(chain) else {
        return Vec::new();
    };
    if !seen.table.is_empty() {
        return wanted_of(view.memory, &seen.table, Access::Read);
    }
    let spans = seen.buffers.writable.clone();
    let memory = Rc::clone(view.memory);
    let unused_parts = |other| view.unused_parts(other);
    let wanted = wanted_of_posted(&memory, chain, &spans, posted_ns, unused_parts);
    match wanted.is_empty() {
        // They came back meanwhile. Request them all the same: the answer comes at once.
        true => wanted_of(view.memory, &spans, Access::Write),
        false => wanted,
    }
}

impl EngineQueue {
    /// What was written into chains that are filled and not reported; `None` if some of it is absent now.
    pub(super) fn read_back(&self, memory: &DeviceMemory, chains: &[ChainNo]) -> Option<Vec<u8>> {
        let posted = self.posted.as_ref().filter(|_| self.queue.ready())?;
        let mut whole = Vec::new();
        for chain in chains {
            let Read::Filled { head, bytes } = posted.at(*chain)? else {
                return None;
            };
            let mut buffers = Buffers::default();
            if walk(memory, self.table, head, &mut buffers).is_err() {
                return None;
            }
            let mut leases = LeaseSet::default();
            let spans = &buffers.writable;
            let are_there = (spans.iter()).all(|span| leases.take(memory, *span, Access::Read));
            let end = whole.len() + bytes as usize;
            if are_there {
                for slice in spans.iter().filter_map(|span| memory.slice(*span).ok()) {
                    let from = whole.len();
                    whole.resize(end.min(from + slice.len()), 0);
                    slice.copy_to(&mut whole[from..]);
                }
            }
            leases.release(memory);
            if whole.len() != end {
                return None;
            }
        }
        Some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    #[test]
    fn chains_are_kept_until_they_are_used_in_whatever_order_that_is() {
        for seed in 0..300 {
            let mut random = SplitMix64::new(seed);
            let mut posted = Posted::default();
            let mut model: BTreeMap<u64, (u16, u32)> = BTreeMap::new();
            let mut next = 0_u64;
            for _ in 0..300 {
                let some = model.keys().nth(usize::try_from(random.below(8)).unwrap());
                let some = some.copied();
                match (random.below(3), some) {
                    (0, _) => {
                        let head = u16::try_from(random.below(1024)).unwrap();
                        posted.read.push_back(Read::Unused { head });
                        model.insert(next, (head, 0));
                        next += 1;
                    }
                    (1, Some(chain)) if model[&chain].1 == 0 => {
                        posted.set_filled(ChainNo(chain), 77);
                        model.get_mut(&chain).unwrap().1 = 77;
                    }
                    (2, Some(chain)) => {
                        assert_eq!(posted.take(ChainNo(chain)), model.remove(&chain));
                        assert_eq!(posted.take(ChainNo(chain)), None);
                    }
                    _ => {}
                }
                assert_eq!(posted.end(), next);
                // Nothing is kept before the oldest one in use.
                let oldest = model.keys().next().copied().unwrap_or(next);
                assert_eq!(posted.first, oldest);
            }
            let left: Vec<u16> = model.values().map(|(head, _)| *head).collect();
            assert_eq!(posted.take_all(), left);
            assert_eq!(posted.end(), next);
        }
    }
}
