// SPDX-License-Identifier: Apache-2.0
//! *Pause*: a packet whose next buffers are absent waits, and so do all packets behind it.
//!
//! ```text
//!   recv(packet):
//!     if nothing is stored and the next posted buffers are present: fill them, report them
//!     else if the store has room: store the packet
//!     else: drop it
//!   pages arrive, or buffers are posted:
//!     while something is stored and the next posted buffers are present: fill them with the oldest
//! ```
//! That is what a device does whose queue stands still until the fault is resolved and whose
//! receive cache is shared by all queues (VPRI 3.2). One cold queue can use up the cache, and then
//! every queue that faults loses packets.

use super::{
    Answered, Arrival, ChainNo, Chains, Left, Loss, Order, PacketId, Report, Ring, front::Front,
};
use std::collections::VecDeque;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Pause {
    chains: Chains,
    stored: VecDeque<(PacketId, u32)>,
    /// The oldest stored packet waits for these pages, or for more to be posted.
    waits: Waits,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waits {
    /// For nothing that is known.
    No,
    /// For an answer.
    ForPages,
}

impl Pause {
    pub fn new(chains: Chains) -> Self {
        Self {
            chains,
            stored: VecDeque::new(),
            waits: Waits::No,
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
        match self.chains.choose(bytes, ring) {
            Front::Present => {
                self.chains.use_chosen();
                Arrival::Fill(Report::Now)
            }
            Front::Absent | Front::Unknown | Front::Later => Arrival::Store,
            Front::Short => Arrival::Keep,
            Front::TooLong => Arrival::Drop(Loss::TooLong),
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
        if self.waits == Waits::No
            && let Some((packet, bytes)) = self.stored.front().copied()
        {
            match self.chains.choose(bytes, ring) {
                Front::Present => {
                    self.chains.use_chosen();
                    self.stored.pop_front();
                    return Some(Order::Fill(packet, Report::Now));
                }
                Front::Absent | Front::Unknown => self.waits = Waits::ForPages,
                Front::TooLong => {
                    self.stored.pop_front();
                    return Some(Order::Forget(packet, Loss::TooLong));
                }
                Front::Short | Front::Later => {}
            }
        }
        if self.chains.orders.is_empty() {
            self.chains.look_ahead(ring);
        }
        self.chains.orders.pop_front()
    }

    pub fn answered(&mut self, chain: ChainNo, answer: Answered) {
        // Also if the chain is used by now: more pages may be requested.
        self.waits = Waits::No;
        if self.chains.take_answer(chain) && answer == Answered::Lost {
            self.chains.give_back(chain);
        }
    }
}
