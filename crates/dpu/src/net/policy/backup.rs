// SPDX-License-Identifier: Apache-2.0
//! *Backup ring* ('Page Fault Support for Network Controllers', 5, figures 5 and 6): a packet whose
//! buffers are absent is stored; later packets go into their own buffers and are reported after it.
//!
//! ```text
//!   recv(packet):
//!     if nothing waits for buffers and the buffers at next are present:
//!       fill them; next += their number
//!       if no fault is pending: report them, else: remember that they are filled
//!     else if fewer packets than bm_size are pending and the store has room:
//!       store the packet; if there are buffers at next: they are its own, next += their number,
//!       else it waits for buffers
//!     else: drop it
//!   resolved(fault):  copy the packet into its buffers
//!     while the oldest pending packet is filled: report it
//! ```
//! `head` of the figure is the oldest pending packet, `head_offset` the number of pending ones, and
//! the queue of pending packets is its bitmap: one entry each, filled or not. There are three
//! differences:
//!
//! - *Room.* The printed test `tail - head - head_offset < size` is always true of a ring that is
//!   not overfull. Meant is, as the prose says, that the target index does not exceed the tail.
//! - *More packets than buffers.* As in the prose, packets may be stored for which nothing is posted
//!   yet. They get buffers, in order, as the driver posts some.
//! - *Lost pages.* A buffer whose content is lost goes back to the driver empty, and its packet gets
//!   the next buffers. It is still reported at its turn.
//!
//! What is pending is bounded twice: by [`PENDING_MAX`] packets of a queue, and by the bytes of the
//! store, which all queues of a device share.

use super::{
    Answered, Arrival, ChainNo, Chains, Left, Loss, Order, PacketId, Report, Ring, front::Front,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most pending packets of a queue (`bm_size`): as many as the longest ring has buffers, and as many
/// without any.
pub(crate) const PENDING_MAX: usize = 2048;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct BackupRing {
    chains: Chains,
    /// Packets that are not reported, oldest first.
    pending: VecDeque<Pending>,
    /// Number of the first of them.
    first: u64,
    /// Numbers of those that are stored and have no buffers, oldest first.
    homeless: BTreeSet<u64>,
    /// The packets that reserved chains belong to.
    owners: BTreeMap<ChainNo, u64>,
    /// Numbers of those with an answer about their buffers.
    resolved: BTreeSet<u64>,
    /// Numbers of those whose buffers are to be requested when there is an answer to others.
    unasked: BTreeSet<u64>,
    /// The oldest one without buffers waits for an answer.
    waits: Waits,
    /// The chains of the packet that is to be stored.
    reserved: Vec<ChainNo>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waits {
    No,
    ForAnswer,
}

/// A packet that is not reported.
#[derive(Debug)]
struct Pending {
    state: State,
    chains: Vec<ChainNo>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It is in the store. Its buffers are absent, or it has none.
    Stored { packet: PacketId, bytes: u32 },
    /// It is in its buffers.
    Filled,
    /// It was lost.
    Gone,
}

impl BackupRing {
    pub fn new(chains: Chains) -> Self {
        Self {
            chains,
            pending: VecDeque::new(),
            first: 0,
            homeless: BTreeSet::new(),
            owners: BTreeMap::new(),
            resolved: BTreeSet::new(),
            unasked: BTreeSet::new(),
            waits: Waits::No,
            reserved: Vec::new(),
        }
    }

    pub fn chains(&self) -> &Chains {
        &self.chains
    }

    pub fn chains_mut(&mut self) -> &mut Chains {
        &mut self.chains
    }

    pub fn arrive(&mut self, bytes: u32, ring: &mut impl Ring) -> Arrival {
        self.reserved.clear();
        if self.pending.len() >= PENDING_MAX {
            return Arrival::Drop(Loss::Fault);
        }
        if !self.homeless.is_empty() {
            return Arrival::Store;
        }
        match self.chains.choose(bytes, ring) {
            Front::Present => Arrival::Fill(self.take_chosen()),
            Front::Absent => {
                self.reserved.clone_from(&self.chains.chosen);
                Arrival::Store
            }
            Front::Unknown => {
                self.waits = Waits::ForAnswer;
                Arrival::Store
            }
            Front::Short if self.pending.is_empty() => Arrival::Keep,
            Front::Short | Front::Later => Arrival::Store,
            Front::TooLong => Arrival::Drop(Loss::TooLong),
        }
    }

    /// The chosen chains get the newest packet.
    fn take_chosen(&mut self) -> Report {
        self.chains.use_chosen();
        if self.pending.is_empty() {
            return Report::Now;
        }
        self.pending.push_back(Pending {
            state: State::Filled,
            chains: self.chains.chosen.clone(),
        });
        Report::Later
    }

    pub fn stored(&mut self, packet: PacketId, bytes: u32) {
        let number = self.first + self.pending.len() as u64;
        let chains = std::mem::take(&mut self.reserved);
        if chains.is_empty() {
            self.homeless.insert(number);
        }
        self.reserve(number, &chains);
        let state = State::Stored { packet, bytes };
        self.pending.push_back(Pending { state, chains });
    }

    fn reserve(&mut self, number: u64, chains: &[ChainNo]) {
        for chain in chains {
            self.chains.reserve(*chain);
            self.owners.insert(*chain, number);
        }
    }

    /// A packet loses its buffers, which go back, and gets others.
    fn evict(&mut self, number: u64, chains: Vec<ChainNo>) {
        for chain in chains {
            self.owners.remove(&chain);
            self.chains.give_back(chain);
        }
        self.homeless.insert(number);
        // Perhaps fewer pages are requested now.
        self.look_anew();
    }

    fn look_anew(&mut self) {
        self.waits = Waits::No;
        self.resolved.append(&mut self.unasked);
    }

    pub fn refused(&mut self) {
        self.reserved.clear();
    }

    pub fn next(&mut self, ring: &mut impl Ring) -> Option<Order> {
        if let Some(order) = self.chains.orders.pop_front() {
            return Some(order);
        }
        if let Some(order) = self.report() {
            return Some(order);
        }
        while let Some(number) = self.resolved.pop_first() {
            if let Some(order) = self.resolve(number, ring) {
                return Some(order);
            }
        }
        while self.waits == Waits::No
            && let Some(number) = self.homeless.first().copied()
        {
            let order = self.find_home(number, ring);
            if order.is_some() || self.homeless.first() == Some(&number) {
                return order.or_else(|| self.chains.orders.pop_front());
            }
        }
        if self.chains.orders.is_empty() {
            self.chains.look_ahead(ring);
        }
        self.chains.orders.pop_front()
    }

    /// The oldest packet, if it is in its buffers.
    fn report(&mut self) -> Option<Order> {
        loop {
            match self.pending.front()?.state {
                State::Stored { .. } => return None,
                State::Gone => {
                    self.pending.pop_front();
                    self.first += 1;
                }
                State::Filled => {
                    let filled = self.pending.pop_front()?;
                    self.first += 1;
                    self.chains.chosen = filled.chains;
                    return Some(Order::Report);
                }
            }
        }
    }

    fn pending_mut(&mut self, number: u64) -> Option<&mut Pending> {
        match usize::try_from(number.checked_sub(self.first)?) {
            Ok(at) => self.pending.get_mut(at),
            Err(_) => None,
        }
    }

    /// Fills the buffers of a stored packet, if all of them are there now.
    fn resolve(&mut self, number: u64, ring: &mut impl Ring) -> Option<Order> {
        let pending = self.pending_mut(number)?;
        let State::Stored { packet, bytes } = pending.state else {
            return None;
        };
        if pending.chains.is_empty() {
            return None;
        }
        let chains = std::mem::take(&mut pending.chains);
        match self.chains.look_again(&chains, bytes, ring) {
            Front::Present => {
                for chain in &chains {
                    self.owners.remove(chain);
                    self.chains.set_used(*chain);
                }
                self.chains.chosen.clone_from(&chains);
                let pending = self.pending_mut(number)?;
                pending.state = State::Filled;
                pending.chains = chains;
                Some(Order::Fill(packet, Report::Later))
            }
            Front::Absent => {
                self.pending_mut(number)?.chains = chains;
                self.chains.orders.pop_front()
            }
            Front::Unknown => {
                self.pending_mut(number)?.chains = chains;
                self.unasked.insert(number);
                self.chains.orders.pop_front()
            }
            // The driver has changed them.
            Front::Short | Front::Later | Front::TooLong => {
                self.evict(number, chains);
                self.chains.orders.pop_front()
            }
        }
    }

    /// Finds buffers for a stored packet that has none.
    fn find_home(&mut self, number: u64, ring: &mut impl Ring) -> Option<Order> {
        let State::Stored { packet, bytes } = self.pending_mut(number)?.state else {
            self.homeless.remove(&number);
            return None;
        };
        match self.chains.choose(bytes, ring) {
            Front::Present => {
                self.homeless.remove(&number);
                self.chains.use_chosen();
                let chains = self.chains.chosen.clone();
                let pending = self.pending_mut(number)?;
                pending.state = State::Filled;
                pending.chains = chains;
                Some(Order::Fill(packet, Report::Later))
            }
            Front::Absent => {
                self.homeless.remove(&number);
                let chains = self.chains.chosen.clone();
                self.reserve(number, &chains);
                self.pending_mut(number)?.chains = chains;
                None
            }
            Front::Unknown => {
                self.waits = Waits::ForAnswer;
                None
            }
            Front::Short | Front::Later => None,
            Front::TooLong => {
                self.homeless.remove(&number);
                self.pending_mut(number)?.state = State::Gone;
                Some(Order::Forget(packet, Loss::TooLong))
            }
        }
    }

    pub fn answered(&mut self, chain: ChainNo, answer: Answered) {
        // Also if the chain is used by now: more pages may be requested.
        self.look_anew();
        if !self.chains.take_answer(chain) {
            return;
        }
        match (self.owners.get(&chain).copied(), answer) {
            (None, Answered::Present) => {}
            (None, Answered::Lost) => self.chains.give_back(chain),
            (Some(number), Answered::Present) => {
                self.resolved.insert(number);
            }
            (Some(number), Answered::Lost) => {
                let pending = self.pending_mut(number);
                let chains = pending.map(|pending| std::mem::take(&mut pending.chains));
                self.evict(number, chains.unwrap_or_default());
            }
        }
    }

    pub fn backlog(&self) -> usize {
        self.pending.len()
    }

    /// See [`super::Policy::stop`].
    pub fn stop(&mut self) -> Option<Left> {
        while let Some(pending) = self.pending.pop_front() {
            match pending.state {
                State::Filled => {
                    self.chains.chosen = pending.chains;
                    return Some(Left::Filled);
                }
                State::Stored { packet, .. } => return Some(Left::Stored(packet)),
                State::Gone => {}
            }
        }
        None
    }
}
