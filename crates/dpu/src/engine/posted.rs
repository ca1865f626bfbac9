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
//!
//! A kind looks at a chain twice or more: ahead, so that absent pages come before a packet does, and when a packet is
//! there. Its descriptors are walked once, and only its pages are leased anew: a driver may not change what it has made
//! available (virtio 1.2, 2.7.13), and one that does it all the same gets its packet where the chain lay at first (and
//! may find zeros there: see [`super::blank`]). With other memory, chains are walked again.

use super::{
    blank::{NEAR_PARTS_MAX, wanted_of_posted},
    fair::{LOOK_COST_BYTES, PART_COST_BYTES},
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
    memory::{DeviceMemory, LeaseSet, MemoryId, Span},
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

/// Parts of a chain whose walk is kept until the chain is used; of a longer one it is kept for a step.
const KEPT_PARTS_MAX: usize = 32;
/// Leases for which there is room from one step to the next: as many as drivers need for a packet, and not as many as
/// a hostile one can.
const LEASES_KEPT_MAX: usize = 1024;
/// Objects kept for the next walk.
const SPARE_MAX: usize = 64;
/// What the looks of a step cost at most, but for the last one: more than the longest packet needs in the smallest
/// buffers that drivers post. A driver can post a thousand chains of a thousand descriptors each.
const LOOKS_COST_MAX_BYTES: u64 = 8 << 20;

/// A chain that was read.
#[derive(Debug)]
struct Place {
    read: Read,
    /// What was seen of it, while it is unused.
    seen: Option<Box<Seen>>,
}

impl Place {
    fn unused(head: u16) -> Self {
        Self {
            read: Read::Unused { head },
            seen: None,
        }
    }
}

/// The chains of a queue that were read.
#[derive(Debug, Default)]
pub(crate) struct Posted {
    first: u64,
    read: VecDeque<Place>,
    /// Pages of the chains that were looked at in this step and are present.
    leases: LeaseSet,
    /// Number of this step.
    step: u64,
    /// Chains of this step whose walk is not kept.
    long: Vec<ChainNo>,
    #[expect(clippy::vec_box, reason = "boxes move from here to places and back")]
    spare: Vec<Box<Seen>>,
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
        // Not by `..`: what is dropped by hand cannot be taken apart.
        let mut posted = Self::default();
        posted.wires = PostedWires::new(keeping);
        posted
    }

    /// Goes on with the chains of these heads, which a predecessor has read and not used.
    pub fn resume(&mut self, record: Held, heads: &[u16]) {
        self.record = Some(record);
        self.read
            .extend(heads.iter().map(|head| Place::unused(*head)));
    }

    fn place(&self, chain: ChainNo) -> Option<&Place> {
        self.read.get(index_of(self.first, chain))
    }

    fn place_mut(&mut self, chain: ChainNo) -> Option<&mut Place> {
        self.read.get_mut(index_of(self.first, chain))
    }

    fn at(&self, chain: ChainNo) -> Option<Read> {
        Some(self.place(chain)?.read)
    }

    fn set(&mut self, chain: ChainNo, to: Read) {
        if to == Read::Used {
            self.wires.used(chain.0);
        }
        if let Some(place) = self.place_mut(chain) {
            place.read = to;
            let seen = place.seen.take();
            self.keep_spare(seen);
        }
        while matches!(
            self.read.front(),
            Some(Place {
                read: Read::Used,
                ..
            })
        ) {
            self.read.pop_front();
            self.first += 1;
        }
    }

    fn keep_spare(&mut self, seen: Option<Box<Seen>>) {
        if let Some(seen) = seen
            && self.spare.len() < SPARE_MAX
            && seen.is_short()
        {
            self.spare.push(seen);
        }
    }

    /// The chain, if it was looked at in this step.
    pub fn seen(&self, chain: ChainNo) -> Option<&Seen> {
        let seen = self.place(chain)?.seen.as_deref();
        seen.filter(|seen| seen.step == self.step)
    }

    /// What is known of a chain that is looked at now; [`Self::put_seen`] puts it back.
    fn take_seen(&mut self, chain: ChainNo) -> Box<Seen> {
        let known = self
            .place_mut(chain)
            .and_then(|place| place.seen.take())
            .or_else(|| {
                let mut spare = self.spare.pop()?;
                spare.walked = Walked::Not;
                Some(spare)
            });
        known.unwrap_or_default()
    }

    fn put_seen(&mut self, chain: ChainNo, mut seen: Box<Seen>) {
        seen.step = self.step;
        if !seen.is_short() {
            self.long.push(chain);
        }
        if let Some(place) = self.place_mut(chain) {
            place.seen = Some(seen);
        }
    }

    /// Wires the pages of a chain that was looked at in this step, until it is used.
    pub fn wire(&mut self, memory: &DeviceMemory, chain: ChainNo) {
        let place = self.read.get(index_of(self.first, chain));
        let seen = place.and_then(|place| place.seen.as_deref());
        if let Some(seen) = seen.filter(|seen| seen.step == self.step) {
            self.wires.wire(memory, chain.0, &seen.buffers.writable);
        }
    }

    /// Ends the step: releases all leases.
    pub fn end_step(&mut self, memory: &DeviceMemory) {
        self.leases.release(memory);
        self.leases.shrink_to(LEASES_KEPT_MAX);
        self.step += 1;
        while let Some(chain) = self.long.pop() {
            if let Some(place) = self.place_mut(chain) {
                place.seen = None;
            }
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
        for place in self.read.drain(..) {
            if let Read::Unused { head } | Read::Filled { head, .. } = place.read {
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

/// Where a chain is among those from `first` on; far away for one before them.
fn index_of(first: u64, chain: ChainNo) -> usize {
    let at = chain.0.checked_sub(first);
    at.and_then(|at| usize::try_from(at).ok())
        .unwrap_or(usize::MAX)
}

/// What is known of the descriptors of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Walked {
    /// Nothing.
    #[default]
    Not,
    /// The buffers are those that they name in that memory; so many bytes fit, if a packet fits at all.
    In(MemoryId, Option<u32>),
}

/// A chain that was looked at.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The step that looked last, and what it has found.
    step: u64,
    look: Look,
    walked: Walked,
    pub buffers: Buffers,
    /// Parts of its table that are absent.
    table: Vec<Span>,
}

impl Seen {
    /// Whether it takes little memory.
    fn is_short(&self) -> bool {
        let parts = self.buffers.writable.capacity() + self.buffers.readable.capacity();
        parts <= KEPT_PARTS_MAX && self.table.capacity() <= KEPT_PARTS_MAX
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
    /// Bytes that a chain must have room for.
    pub least_bytes: u32,
    /// What the looks cost.
    pub cost_bytes: u64,
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
    pub fn new(memory: &'a Rc<DeviceMemory>, queue: &'a mut EngineQueue) -> Self {
        Self {
            memory,
            least_bytes: queue.table.layout.header_bytes,
            queue,
            cost_bytes: 0,
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
                Ok(Some(head)) => posted.read.push_back(Place::unused(head)),
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
        let mut buffers = Buffers::default();
        let walked = head.map(|head| walk(self.memory, self.queue.table, head, &mut buffers));
        if head.is_some() {
            self.cost_bytes += look_cost_bytes(&buffers);
        }
        match walked {
            Some(Ok(())) if buffers.writable.len() <= NEAR_PARTS_MAX => buffers.writable,
            Some(Ok(())) => Vec::new(),
            // If it is broken, that is reported when it is looked at for a packet.
            Some(Err(_)) | None => Vec::new(),
        }
    }

    /// True if a fault was injected into that chain, or is now.
    fn is_held(&mut self, chain: ChainNo, seen: &Seen) -> bool {
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
            posted.held = Some((chain, demand));
        }
        posted.held.is_some_and(|(held, _)| held == chain)
    }

    /// Finds the buffers of a chain, and leases its pages: all or none.
    fn examine(&mut self, head: u16, seen: &mut Seen) -> Look {
        let memory = self.memory;
        let room = match seen.walked {
            Walked::In(id, room) if id == memory.id() => room,
            Walked::In(..) | Walked::Not => match self.walk(head, seen) {
                Ok(room) => room,
                Err(look) => return look,
            },
        };
        let Some(room) = room else {
            return Look::Unfit;
        };
        let Some(posted) = self.queue.posted.as_mut() else {
            return Look::Unposted;
        };
        let before = posted.leases.len();
        let leases = &mut posted.leases;
        let mut spans = seen.buffers.writable.iter();
        if !spans.all(|span| leases.take(memory, *span, Access::Write)) {
            leases.release_from(memory, before);
            return Look::Absent { room };
        }
        Look::Present { room }
    }

    /// Walks the descriptors of a chain; returns the room in it, if a packet fits into it.
    fn walk(&mut self, head: u16, seen: &mut Seen) -> Result<Option<u32>, Look> {
        let (memory, buffers) = (self.memory, &mut seen.buffers);
        seen.walked = Walked::Not;
        seen.table.clear();
        match walk(memory, self.queue.table, head, buffers) {
            Ok(()) => {}
            Err(WalkError::TableAbsent(spans)) => {
                seen.table = spans;
                return Err(Look::Unknown);
            }
            Err(WalkError::Broken(source)) => {
                self.broken = Some(StopReason::Chain {
                    queue: self.queue.key.queue,
                    head,
                    source,
                });
                return Err(Look::Unposted);
            }
        }
        let room = room(buffers);
        let is_fit = buffers.outside.is_none()
            && buffers.length == Length::Served
            && buffers.readable.is_empty()
            && room >= u64::from(self.least_bytes);
        let room = u32::try_from(room).ok().filter(|_| is_fit);
        seen.walked = Walked::In(memory.id(), room);
        Ok(room)
    }
}

/// What a look at a chain costs its tenant.
fn look_cost_bytes(buffers: &Buffers) -> u64 {
    LOOK_COST_BYTES + buffers.parts() * PART_COST_BYTES
}

impl Ring for View<'_> {
    fn look(&mut self, chain: ChainNo) -> Look {
        if self.broken.is_some() {
            return Look::Unposted;
        }
        let posted = self.queue.posted.as_ref();
        if let Some(seen) = posted.and_then(|posted| posted.seen(chain)) {
            return seen.look;
        }
        if self.cost_bytes >= LOOKS_COST_MAX_BYTES {
            return Look::Later;
        }
        let Some(head) = self.head(chain) else {
            return Look::Unposted;
        };
        let Some(posted) = self.queue.posted.as_mut() else {
            return Look::Unposted;
        };
        let before = posted.leases.len();
        let mut seen = posted.take_seen(chain);
        seen.look = self.examine(head, &mut seen);
        self.cost_bytes += look_cost_bytes(&seen.buffers);
        let is_held = matches!(seen.look, Look::Present { .. }) && self.is_held(chain, &seen);
        let look = match seen.look {
            Look::Present { room } if is_held => Look::Absent { room },
            look => look,
        };
        seen.look = look;
        if let Some(posted) = self.queue.posted.as_mut() {
            if is_held {
                posted.leases.release_from(self.memory, before);
            }
            posted.put_seen(chain, seen);
        }
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
    let posted = view.queue.posted.as_ref();
    let Some(seen) = posted.and_then(|posted| posted.seen(chain)) else {
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
    use super::{
        super::rings::tests::{AVAIL, BASE, Fixture, Says, fixture_of},
        *,
    };
    use crate::kind::work::Chains;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;

    /// Posts a chain of `parts` descriptors from `head` on, each with so many bytes.
    fn describe(f: &Fixture, head: u16, parts: u16, bytes: u32) {
        for part in 0..parts {
            let flags = if part + 1 < parts {
                NEXT | WRITE
            } else {
                WRITE
            };
            let at = BASE + 16 * u64::from(head + part);
            f.memory.store_u64(at, BASE + 0x2800).unwrap();
            let next = head + part + 1;
            let rest = u64::from(bytes) | u64::from(flags) << 32 | u64::from(next) << 48;
            f.memory.store_u64(at + 8, rest).unwrap();
        }
    }

    fn look_once(f: &mut Fixture, memory: &Rc<DeviceMemory>, chain: ChainNo) -> Look {
        let mut view = View::new(memory, &mut f.queue);
        let look = view.look(chain);
        assert_eq!(view.look(chain), look);
        let posted = f.queue.posted.as_mut().unwrap();
        assert!(posted.seen(chain).is_some() && posted.leases.len() > 0);
        posted.end_step(memory);
        assert!(posted.seen(chain).is_none() && posted.leases.len() == 0);
        look
    }

    #[test]
    fn chain_is_walked_once_in_a_memory_unless_it_is_long() {
        let long = u16::try_from(KEPT_PARTS_MAX + 1).unwrap();
        let mut f = fixture_of(Chains::Posted, 0, &Says::ByFlag);
        for (chain, head, parts) in [(0, 3, 2), (1, 8, long)] {
            describe(&f, head, parts, 20);
            f.put(AVAIL + 4 + 2 * chain, head);
        }
        f.put(AVAIL + 2, 2);
        let room = |parts: u16, bytes: u32| Look::Present {
            room: u32::from(parts) * bytes,
        };
        let memory = Rc::new(f.other_memory());
        assert_eq!(look_once(&mut f, &memory, ChainNo(0)), room(2, 20));
        assert_eq!(look_once(&mut f, &memory, ChainNo(1)), room(long, 20));
        // No driver may do this.
        describe(&f, 3, 2, 30);
        describe(&f, 8, long, 30);
        assert_eq!(look_once(&mut f, &memory, ChainNo(0)), room(2, 20));
        assert_eq!(look_once(&mut f, &memory, ChainNo(1)), room(long, 30));
        let other = Rc::new(f.other_memory());
        assert_eq!(look_once(&mut f, &other, ChainNo(0)), room(2, 30));
        // What is used leaves room for the next one, of which nothing is known.
        let posted = f.queue.posted.as_mut().unwrap();
        assert_eq!(posted.take(ChainNo(0)), Some((3, 0)));
        assert_eq!(posted.spare.len(), 1);
        f.put(AVAIL + 4 + 2 * 2, 3);
        f.put(AVAIL + 2, 3);
        describe(&f, 3, 1, 40);
        assert_eq!(look_once(&mut f, &other, ChainNo(2)), room(1, 40));
    }

    #[test]
    fn step_that_has_looked_at_enough_looks_at_no_other_chain() {
        let mut f = fixture_of(Chains::Posted, 0, &Says::ByFlag);
        for (chain, head) in [(0, 3), (1, 8)] {
            describe(&f, head, 2, 20);
            f.put(AVAIL + 4 + 2 * chain, head);
        }
        f.put(AVAIL + 2, 2);
        let memory = Rc::new(f.other_memory());
        let mut view = View::new(&memory, &mut f.queue);
        let room = Look::Present { room: 40 };
        assert_eq!(view.look(ChainNo(0)), room);
        view.cost_bytes = LOOKS_COST_MAX_BYTES;
        assert_eq!(view.look(ChainNo(1)), Look::Later);
        assert_eq!(view.look(ChainNo(0)), room);
        let posted = f.queue.posted.as_mut().unwrap();
        posted.end_step(&memory);
        assert_eq!(look_once(&mut f, &memory, ChainNo(1)), room);
    }

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
                        posted.read.push_back(Place::unused(head));
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
