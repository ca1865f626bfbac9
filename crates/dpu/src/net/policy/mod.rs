// SPDX-License-Identifier: Apache-2.0
//! What becomes of a packet whose buffers are absent: the policies, as machines without I/O and
//! clock.
//!
//! # Terms
//! A driver *posts* chains, which have numbers here in the order in which it posts them
//! ([`ChainNo`]). A chain that is given to a packet, or goes back to the driver empty, is *used*.
//! With mergeable buffers a packet takes as many chains as it needs. A packet is *stored* when it
//! waits for chains in the device's store.
//!
//! # A machine
//! ```text
//!              a packet has arrived
//!   arrive ◄───────────────────────── caller        fill | store | drop | keep
//!   next   ───────────────────────► caller          request these pages; fill these chains with a
//!                                                   stored packet; report; give back
//!   answered, stored, refused ◄────── caller        what became of that
//! ```
//! A machine sees chains through [`Ring`]: whether one is posted, how many bytes fit, and whether
//! all its pages are present *now*. The caller leases what it shows as present, until the machine
//! has decided. Machines of all policies keep the order of packets: in each queue packets are
//! reported to the driver as they have arrived, except for those that are dropped, and each of
//! those is counted.
//!
//! | | absent buffer | packets behind it |
//! |---|---|---|
//! | [`drop`](drop::DropPolicy) | the packet is lost, its pages are requested | likewise |
//! | [`pause`](pause::Pause) | the packet is stored | are stored, too |
//! | [`backup ring`](backup::BackupRing) | stored | go into their buffers if present, and are reported after it |
//! | [`out of order`](out_of_order::OutOfOrder) | the packet goes into the next present buffers; if there are none it is stored | likewise |
//!
//! A packet for which the driver has posted nothing has met no fault: it is *kept*, and no more are
//! taken from the link, which has room of its own.

pub(crate) mod backup;
pub(crate) mod drop;
mod front;
#[cfg(test)]
mod model;
pub(crate) mod out_of_order;
pub(crate) mod pause;

use super::config::{OnReceiveFault, Prefault, ReceiveConfig, Wiring};
pub(crate) use crate::kind::posted::{Answered, ChainNo, Look, Need, Report, Ring};
use std::{
    cmp::Ordering,
    collections::{BTreeSet, VecDeque},
};

/// Number of a stored packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PacketId(pub u32);

/// Most chains of a queue whose pages are requested at a time, those included that were used meanwhile. Half of what a
/// device may have outstanding on an engine, so that the queue that sends finds room.
pub(crate) const ASKED_MAX: usize = 64;
/// Most posted chains whose pages are requested ahead. They are used next, and pages that come much
/// earlier may be evicted again.
pub(crate) const AHEAD_MAX: u64 = 32;
/// Chains looked at for that purpose at a time.
const AHEAD_STEP: u64 = 8;

/// What becomes of a packet that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// It goes into the [`chosen`](Policy::chosen) chains.
    Fill(Report),
    /// It is stored: [`Policy::stored`] or [`Policy::refused`] is next.
    Store,
    /// It is lost.
    Drop(Loss),
    /// Nothing yet: it is offered again when more is posted.
    Keep,
}

/// Why a packet is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Its pages were absent.
    Fault,
    /// It is longer than what the driver has posted can take.
    TooLong,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Request the absent pages of this chain; [`Policy::answered`] follows.
    Ask(ChainNo, Need),
    /// Wire the pages of this chain, which was looked at in this call, until it is used.
    Wire(ChainNo),
    /// This chain goes back to the driver, empty.
    GiveBack(ChainNo),
    /// The [`chosen`](Policy::chosen) chains get this stored packet, which leaves the store.
    Fill(PacketId, Report),
    /// The [`chosen`](Policy::chosen) chains, filled before, are reported.
    Report,
    /// This stored packet is lost.
    Forget(PacketId, Loss),
}

/// A packet that a queue that stops has not reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// It is in the store.
    Stored(PacketId),
    /// It is in its chains.
    Filled,
}

/// How many chains a packet may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merging {
    /// `VIRTIO_NET_F_MRG_RXBUF` was accepted.
    Mergeable,
    /// One.
    Single,
}

/// A receiving queue's machine.
#[derive(Debug)]
pub(crate) enum Policy {
    Drop(drop::DropPolicy),
    Pause(pause::Pause),
    Backup(backup::BackupRing),
    OutOfOrder(out_of_order::OutOfOrder),
}

macro_rules! each {
    ($self:ident, $machine:ident => $do:expr) => {
        match $self {
            Policy::Drop($machine) => $do,
            Policy::Pause($machine) => $do,
            Policy::Backup($machine) => $do,
            Policy::OutOfOrder($machine) => $do,
        }
    };
}

impl Policy {
    /// The machine of a queue that starts.
    pub fn new(config: &ReceiveConfig, merging: Merging) -> Self {
        let chains = Chains::new(config, merging);
        match config.on_fault {
            OnReceiveFault::Drop => Self::Drop(drop::DropPolicy::new(chains)),
            OnReceiveFault::Pause => Self::Pause(pause::Pause::new(chains)),
            OnReceiveFault::BackupRing => Self::Backup(backup::BackupRing::new(chains)),
            OnReceiveFault::OutOfOrder => Self::OutOfOrder(out_of_order::OutOfOrder::new(chains)),
        }
    }

    /// Decides about a packet of `bytes`, with its header, that has arrived after all others.
    pub fn arrive(&mut self, bytes: u32, ring: &mut impl Ring) -> Arrival {
        each!(self, machine => machine.arrive(bytes, ring))
    }

    /// The packet that was to be stored is.
    pub fn stored(&mut self, packet: PacketId, bytes: u32) {
        match self {
            Self::Drop(_) => debug_assert!(false, "drop stores nothing"),
            Self::Pause(machine) => machine.stored(packet, bytes),
            Self::Backup(machine) => machine.stored(packet, bytes),
            Self::OutOfOrder(machine) => machine.stored(packet, bytes),
        }
    }

    /// There was no room for it: it is lost.
    pub fn refused(&mut self) {
        match self {
            Self::Backup(machine) => machine.refused(),
            Self::Drop(_) | Self::Pause(_) | Self::OutOfOrder(_) => {}
        }
    }

    /// What is to be done next, if anything.
    pub fn next(&mut self, ring: &mut impl Ring) -> Option<Order> {
        // The floor comes first: what is wired now is not absent when a packet comes.
        if let Some(chain) = each!(self, machine => machine.chains_mut().wire_next(ring)) {
            return Some(Order::Wire(chain));
        }
        each!(self, machine => machine.next(ring))
    }

    /// Packets that have arrived, and are neither reported nor lost.
    pub fn backlog(&self) -> usize {
        match self {
            Self::Drop(_) => 0,
            Self::Pause(machine) => machine.backlog(),
            Self::Backup(machine) => machine.backlog(),
            Self::OutOfOrder(machine) => machine.backlog(),
        }
    }

    /// The pages of a chain were requested, and that was the answer.
    pub fn answered(&mut self, chain: ChainNo, answer: Answered) {
        each!(self, machine => machine.chains_mut().wire_again(chain));
        each!(self, machine => machine.answered(chain, answer));
    }

    /// The chains that an order or an arrival is about, in the order in which they are used.
    pub fn chosen(&self) -> &[ChainNo] {
        each!(self, machine => &machine.chains().chosen)
    }

    /// The queue stops: the next packet that is not reported, oldest first. One that is filled is in its
    /// [`chosen`](Self::chosen) chains.
    pub fn stop(&mut self) -> Option<Left> {
        match self {
            Self::Backup(machine) => machine.stop(),
            Self::Pause(machine) => machine.stop(),
            Self::OutOfOrder(machine) => machine.stop(),
            Self::Drop(_) => None,
        }
    }
}

/// What all machines know of posted chains.
#[derive(Debug)]
pub(crate) struct Chains {
    merging: Merging,
    prefault: Prefault,
    /// So many of the next chains are to be wired.
    floor: u64,
    /// Chains before it were looked at for that.
    floored: ChainNo,
    /// Those that were absent then, and may be there now.
    late: BTreeSet<ChainNo>,
    /// The first chain that is free.
    next: ChainNo,
    /// Of *out of order*: chains before it are used, absent and requested, or have come back.
    cursor: ChainNo,
    /// Chains after it that are not: used, or reserved for a stored packet.
    taken: BTreeSet<ChainNo>,
    /// Chains whose pages were requested.
    asked: BTreeSet<ChainNo>,
    /// Chains that were used since. Their answers mean nothing, but their requests are outstanding until then.
    void: BTreeSet<ChainNo>,
    /// Chains before it were looked at ahead.
    ahead: ChainNo,
    orders: VecDeque<Order>,
    chosen: Vec<ChainNo>,
}

impl Chains {
    fn new(config: &ReceiveConfig, merging: Merging) -> Self {
        let floor = match config.wiring {
            // There is no need, if all memory is wired.
            Wiring::None | Wiring::Static => 0,
            Wiring::Floor { buffers } => u64::from(buffers),
            // A ring has no more.
            Wiring::Fine | Wiring::Coarse { .. } => u64::from(u16::MAX),
        };
        Self {
            merging,
            prefault: config.prefault,
            floor,
            floored: ChainNo(0),
            late: BTreeSet::new(),
            next: ChainNo(0),
            cursor: ChainNo(0),
            taken: BTreeSet::new(),
            asked: BTreeSet::new(),
            void: BTreeSet::new(),
            ahead: ChainNo(0),
            orders: VecDeque::new(),
            chosen: Vec::new(),
        }
    }

    fn is_taken(&self, chain: ChainNo) -> bool {
        chain < self.next || (!self.taken.is_empty() && self.taken.contains(&chain))
    }

    fn is_asked(&self, chain: ChainNo) -> bool {
        !self.asked.is_empty() && self.asked.contains(&chain)
    }

    fn may_ask(&self) -> bool {
        self.asked.len() + self.void.len() < ASKED_MAX
    }

    /// Orders that the pages of a chain be requested, unless they were already; false if as many
    /// are requested as may be at a time.
    fn ask(&mut self, chain: ChainNo, need: Need) -> bool {
        if self.is_asked(chain) {
            return true;
        }
        let may = self.may_ask();
        if may {
            self.asked.insert(chain);
            self.orders.push_back(Order::Ask(chain, need));
        }
        may
    }

    /// Takes an answer; false if it means nothing any more, because the chain went back.
    fn take_answer(&mut self, chain: ChainNo) -> bool {
        let is_asked = self.asked.remove(&chain);
        if !is_asked {
            self.void.remove(&chain);
        }
        is_asked
    }

    /// The first chain that a packet may be put into before others have come back.
    fn begin(&self) -> ChainNo {
        self.next.max(self.cursor)
    }

    /// No other packet gets this chain.
    fn reserve(&mut self, chain: ChainNo) {
        // Mostly in order, and then nothing is to be remembered.
        match chain.cmp(&self.next) {
            Ordering::Less => return,
            Ordering::Equal => self.next = chain.next(),
            Ordering::Greater => {
                self.taken.insert(chain);
            }
        }
        while !self.taken.is_empty() && self.taken.remove(&self.next) {
            self.next = self.next.next();
        }
    }

    /// A chain is used. The answer to a request of its pages will mean nothing.
    fn set_used(&mut self, chain: ChainNo) {
        if !self.asked.is_empty() && self.asked.remove(&chain) {
            self.void.insert(chain);
        }
        self.reserve(chain);
    }

    /// The chosen chains are used.
    fn use_chosen(&mut self) {
        for at in 0..self.chosen.len() {
            self.set_used(self.chosen[at]);
        }
    }

    /// Orders that a chain go back.
    fn give_back(&mut self, chain: ChainNo) {
        self.set_used(chain);
        self.orders.push_back(Order::GiveBack(chain));
    }

    /// The next chain that is to be wired, and is present. Absent ones are requested.
    fn wire_next(&mut self, ring: &mut impl Ring) -> Option<ChainNo> {
        if self.floor == 0 {
            return None;
        }
        while let Some(chain) = self.late.first().copied() {
            let is_taken = self.is_taken(chain);
            if !is_taken && ring.look(chain) == Look::Later {
                return None;
            }
            self.late.remove(&chain);
            if !is_taken && self.is_wirable(chain, ring) {
                return Some(chain);
            }
        }
        let begin = self.begin();
        self.floored = self.floored.max(begin);
        for _ in 0..AHEAD_STEP {
            let chain = self.floored;
            if chain.0 >= begin.0 + self.floor {
                return None;
            }
            if self.is_taken(chain) || self.is_asked(chain) {
                self.floored = chain.next();
                continue;
            }
            if !self.may_ask() || matches!(ring.look(chain), Look::Unposted | Look::Later) {
                return None;
            }
            self.floored = chain.next();
            if self.is_wirable(chain, ring) {
                return Some(chain);
            }
        }
        None
    }

    fn is_wirable(&mut self, chain: ChainNo, ring: &mut impl Ring) -> bool {
        match ring.look(chain) {
            Look::Present { .. } => true,
            Look::Absent { .. } | Look::Unknown => {
                self.ask(chain, Need::Ahead);
                false
            }
            // A packet will find out.
            Look::Unfit | Look::Unposted | Look::Later => false,
        }
    }

    /// The pages of a chain were answered: it may be wired now.
    fn wire_again(&mut self, chain: ChainNo) {
        if self.floor > 0 && chain < self.floored && !self.is_taken(chain) {
            self.late.insert(chain);
        }
    }

    /// Looks at chains that are used soon, and orders absent pages of theirs.
    fn look_ahead(&mut self, ring: &mut impl Ring) {
        if self.prefault == Prefault::Off {
            return;
        }
        let begin = self.begin();
        self.ahead = self.ahead.max(begin);
        let end = ChainNo((self.ahead.0 + AHEAD_STEP).min(begin.0 + AHEAD_MAX));
        while self.ahead < end && self.may_ask() {
            let chain = self.ahead;
            if !self.is_taken(chain) && !self.is_asked(chain) {
                match ring.look(chain) {
                    Look::Unposted | Look::Later => return,
                    Look::Absent { .. } | Look::Unknown => {
                        self.ask(chain, Need::Ahead);
                    }
                    Look::Present { .. } => {}
                    Look::Unfit => self.give_back(chain),
                }
            }
            self.ahead = chain.next();
        }
    }
}
