// SPDX-License-Identifier: Apache-2.0
//! *Drop*: a packet whose next buffers are absent is lost.
//!
//! ```text
//!   recv(packet):
//!     if the next posted buffers are present: fill them, report them
//!     else: request their pages; drop the packet
//! ```
//! So it is with a NIC that can tell a page fault and do nothing about it ('Page Fault Support for
//! Network Controllers', 5: 'dropping'). A ring that is cold entirely loses a packet for each of its
//! buffers, and TCP takes that for congestion. It is here to be compared with.

use super::{Answered, Arrival, ChainNo, Chains, Loss, Order, Report, Ring, front::Front};

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct DropPolicy {
    chains: Chains,
}

impl DropPolicy {
    pub fn new(chains: Chains) -> Self {
        Self { chains }
    }

    pub fn chains(&self) -> &Chains {
        &self.chains
    }

    pub fn chains_mut(&mut self) -> &mut Chains {
        &mut self.chains
    }

    pub fn arrive(&mut self, bytes: u32, ring: &mut impl Ring) -> Arrival {
        match self.chains.choose(bytes, ring) {
            Front::Present => {
                self.chains.use_chosen();
                Arrival::Fill(Report::Now)
            }
            Front::Absent | Front::Unknown | Front::Later => Arrival::Drop(Loss::Fault),
            Front::Short => Arrival::Keep,
            Front::TooLong => Arrival::Drop(Loss::TooLong),
        }
    }

    pub fn next(&mut self, ring: &mut impl Ring) -> Option<Order> {
        if self.chains.orders.is_empty() {
            self.chains.look_ahead(ring);
        }
        self.chains.orders.pop_front()
    }

    pub fn answered(&mut self, chain: ChainNo, answer: Answered) {
        if self.chains.take_answer(chain) && answer == Answered::Lost {
            self.chains.give_back(chain);
        }
    }
}
