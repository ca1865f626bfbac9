// SPDX-License-Identifier: Apache-2.0
//! *Out of order* (VPRI 8): a packet goes into the next posted buffers that are present.
//!
//! ```text
//!   recv(packet):
//!     if nothing is stored and enough posted buffers are present: fill the first of them, report them
//!     else if the store has room: store the packet
//!     else: drop it
//!   pages arrive, or buffers are posted:
//!     while something is stored and enough posted buffers are present: fill them with the oldest
//! ```
//! No packet waits and none is copied twice while some buffer is present. A driver may get its
//! buffers back in any order (virtio 1.2, 2.7.8), unless `VIRTIO_F_IN_ORDER` was accepted, which is
//! not offered.
//!
//! A buffer whose pages do not come is passed over, [`ROUNDS_MAX`] times round the ring; then it goes back empty.
//!
//! # Finding the next present buffer
//! Each chain is looked at once when it is next. If it is absent, its pages are requested, and the
//! answer puts it among the *back* ones, which are used before all later chains. So a packet costs a
//! look at the chains that it gets, however many others are absent.

use super::{
    Answered, Arrival, ChainNo, Chains, Left, Look, Loss, Merging, Need, Order, PacketId, Report,
    Ring,
};
use std::collections::{BTreeSet, VecDeque};

/// Lengths of the ring that are used before a chain whose pages do not come is given up.
const ROUNDS_MAX: u64 = 16;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct OutOfOrder {
    chains: Chains,
    stored: VecDeque<(PacketId, u32)>,
    /// Chains before the cursor that were absent, and whose pages have come.
    back: BTreeSet<ChainNo>,
}

/// What a packet would get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Enough; it is chosen.
    Enough,
    /// Not enough that is present now.
    Absent,
    /// All that is posted is present, and not enough.
    Short,
    /// It fits into nothing that is posted.
    TooLong,
}

impl OutOfOrder {
    pub fn new(chains: Chains) -> Self {
        Self {
            chains,
            stored: VecDeque::new(),
            back: BTreeSet::new(),
        }
    }

    pub fn chains(&self) -> &Chains {
        &self.chains
    }

    pub fn chains_mut(&mut self) -> &mut Chains {
        &mut self.chains
    }

    pub fn arrive(&mut self, bytes: u32, ring: &mut impl Ring) -> Arrival {
        if !self.stored.is_empty() {
            return Arrival::Store;
        }
        match self.find(bytes, ring) {
            Found::Enough => {
                self.use_found();
                Arrival::Fill(Report::Now)
            }
            Found::Absent => Arrival::Store,
            Found::Short => Arrival::Keep,
            Found::TooLong => Arrival::Drop(Loss::TooLong),
        }
    }

    pub fn stored(&mut self, packet: PacketId, bytes: u32) {
        self.stored.push_back((packet, bytes));
    }

    pub fn backlog(&self) -> usize {
        self.stored.len()
    }

    /// See [`super::Policy::stop`].
    pub fn stop(&mut self) -> Option<Left> {
        let (packet, _) = self.stored.pop_front()?;
        Some(Left::Stored(packet))
    }

    pub fn next(&mut self, ring: &mut impl Ring) -> Option<Order> {
        if let Some(order) = self.chains.orders.pop_front() {
            return Some(order);
        }
        if let Some((packet, bytes)) = self.stored.front().copied() {
            match self.find(bytes, ring) {
                Found::Enough => {
                    self.use_found();
                    self.stored.pop_front();
                    return Some(Order::Fill(packet, Report::Now));
                }
                Found::TooLong => {
                    self.stored.pop_front();
                    return Some(Order::Forget(packet, Loss::TooLong));
                }
                Found::Absent | Found::Short => {}
            }
        }
        if self.chains.orders.is_empty() {
            self.give_up_oldest(ring);
            self.chains.look_ahead(ring);
        }
        self.chains.orders.pop_front()
    }

    pub fn answered(&mut self, chain: ChainNo, answer: Answered) {
        if !self.chains.take_answer(chain) {
            return;
        }
        match answer {
            Answered::Lost => self.chains.give_back(chain),
            Answered::Present if chain < self.chains.cursor => {
                self.back.insert(chain);
            }
            // Its turn comes.
            Answered::Present => {}
        }
    }

    /// A chain whose pages do not come goes back to the driver when the ring has gone round many times without it:
    /// whatever was used since is remembered until then.
    fn give_up_oldest(&mut self, ring: &impl Ring) {
        let oldest = self.chains.next;
        let passed = self.chains.cursor.0.saturating_sub(oldest.0);
        if passed > ROUNDS_MAX * u64::from(ring.size()) && self.chains.is_asked(oldest) {
            self.chains.give_back(oldest);
        }
    }

    /// Chooses the first present chains for a packet of `bytes`.
    fn find(&mut self, bytes: u32, ring: &mut impl Ring) -> Found {
        self.chains.chosen.clear();
        let orders = self.chains.orders.len();
        let mut left = bytes;
        let mut at = ChainNo(0);
        while let Some(chain) = self.back.range(at..).next().copied() {
            at = chain.next();
            // It was looked at ahead, or to be wired, and went back for that.
            if self.chains.is_taken(chain) {
                self.back.remove(&chain);
                continue;
            }
            match self.consider(chain, &mut left, ring) {
                Considered::Chosen => {}
                Considered::Done(found) => return found,
                // It is absent once more, or went back.
                Considered::Out => {
                    self.back.remove(&chain);
                }
                Considered::Later => return self.later(orders),
                Considered::End => break,
            }
        }
        let mut chain = self.chains.cursor;
        loop {
            if self.chains.is_taken(chain) || self.chains.is_asked(chain) {
                self.pass(chain);
                chain = chain.next();
                continue;
            }
            match self.consider(chain, &mut left, ring) {
                Considered::Chosen => {}
                Considered::Done(found) => return found,
                Considered::Out => self.pass(chain),
                Considered::Later => return self.later(orders),
                Considered::End => return self.at_end(ring),
            }
            chain = chain.next();
        }
    }

    /// The cursor passes a chain that is not to be looked at, if it has come to it.
    fn pass(&mut self, chain: ChainNo) {
        if chain == self.chains.cursor {
            self.chains.cursor = chain.next();
        }
    }

    fn consider(&mut self, chain: ChainNo, left: &mut u32, ring: &mut impl Ring) -> Considered {
        match ring.look(chain) {
            Look::Present { room } => {
                self.chains.chosen.push(chain);
                *left = left.saturating_sub(room);
                match (*left, self.chains.merging) {
                    (0, _) => Considered::Done(Found::Enough),
                    (_, Merging::Single) => Considered::Done(Found::TooLong),
                    _ => Considered::Chosen,
                }
            }
            Look::Absent { .. } | Look::Unknown => match self.chains.ask(chain, Need::Now) {
                true => Considered::Out,
                false => Considered::Later,
            },
            Look::Unfit => {
                self.chains.give_back(chain);
                Considered::Out
            }
            Look::Later => Considered::Later,
            Look::Unposted => Considered::End,
        }
    }

    /// No more chains can be considered now. `orders` is how many there were before.
    fn later(&self, orders: usize) -> Found {
        // Where all that a step may look at was chosen, it is not enough for this packet.
        match self.chains.orders.len() == orders && self.chains.may_ask() {
            true => Found::TooLong,
            false => Found::Absent,
        }
    }

    /// All chains were considered, and they are not enough.
    fn at_end(&self, ring: &impl Ring) -> Found {
        if !self.chains.asked.is_empty() {
            return Found::Absent;
        }
        match self.chains.chosen.len() >= usize::from(ring.size()) {
            true => Found::TooLong,
            false => Found::Short,
        }
    }

    /// The chosen chains are used.
    fn use_found(&mut self) {
        self.chains.use_chosen();
        for at in 0..self.chains.chosen.len() {
            let chain = self.chains.chosen[at];
            self.back.remove(&chain);
            self.pass(chain);
        }
    }
}

/// What a chain means for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Considered {
    /// It is part of what the packet gets.
    Chosen,
    /// That is decided.
    Done(Found),
    /// It is not to be considered again before it is answered.
    Out,
    /// It cannot be looked at, or its pages not be requested, now.
    Later,
    /// It does not exist yet.
    End,
}
