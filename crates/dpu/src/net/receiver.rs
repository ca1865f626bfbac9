// SPDX-License-Identifier: Apache-2.0
//! The receiving queue of a pair: its link's packets, its policy, its part of the store.
//!
//! ```text
//!   link ── receive ──► staged ──┬─ fill ─────────────────────────────► posted chains
//!                                ├─ store ──► store ── fill, later ───►
//!                                └─ drop, and count
//! ```
//! One packet at most is *staged*: received and not decided. It stays there while the driver has
//! posted too little for it, and no other is taken from the link meanwhile: what the link loses then
//! is lost for want of buffers, not to a fault.

use super::{
    device::{Nic, count_up},
    handed::HandedPacket,
    header::{HEADER_BYTES, LEGACY_HEADER_BYTES},
    link::{Link, Readable, Received},
    nic,
    packet::{HEADER_LEN, PacketBuffer},
    policy::{Arrival, Left, Loss, Merging, Order, PacketId, Policy},
    store::Store,
};
use crate::{
    kind::posted::{Answered, ChainNo, PostedOrder, Ring},
    memory::{DeviceMemory, Span},
};
use std::{collections::VecDeque, sync::Arc};

/// Where `num_buffers` is in a header.
const NUM_BUFFERS: std::ops::Range<usize> = 10..12;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Receiver {
    nic: Arc<Nic>,
    policy: Policy,
    store: Store,
    /// Bytes of the header that the driver expects.
    header_bytes: usize,
    staged: PacketBuffer,
    stage: Stage,
    filling: Filling,
    /// What is stored and not taken out.
    stored: u64,
    /// Packets that another process has left: they come before all of the link.
    handed: VecDeque<HandedPacket>,
    pair: u16,
    /// The time of this step.
    now_ns: u64,
}

/// Whether a packet is staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Empty,
    Full,
}

/// The packet of the last order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Filling {
    Staged,
    Stored(PacketId),
}

impl Receiver {
    /// The receiver of a pair whose queue starts, for a driver that has accepted `features`.
    pub fn new(nic: &Arc<Nic>, pair: u16, features: u64) -> Self {
        let config = nic.receive();
        let merging = match features & nic::F_MRG_RXBUF {
            0 => Merging::Single,
            _ => Merging::Mergeable,
        };
        Self {
            nic: nic.clone(),
            policy: Policy::new(&config, merging),
            store: Store::new(nic.store().clone()),
            header_bytes: nic::header_bytes(features) as usize,
            staged: PacketBuffer::new(),
            stage: Stage::Empty,
            filling: Filling::Staged,
            stored: 0,
            handed: nic.take_handed(pair),
            pair,
            now_ns: 0,
        }
    }

    /// True if a packet waits to be decided about.
    pub fn has_staged(&self) -> bool {
        self.stage == Stage::Full || !self.handed.is_empty()
    }

    /// Decides what is done next.
    pub fn next(
        &mut self,
        link: &mut Link,
        readable: &mut Readable,
        ring: &mut impl Ring,
    ) -> PostedOrder {
        self.now_ns = ring.now_ns();
        let staged = usize::from(self.stage == Stage::Full);
        let unreported = self.policy.backlog() + ring.unreported();
        link.set_in_hand(staged + unreported + self.handed.len());
        if let Some(order) = self.policy.next(ring) {
            return self.carry_out(order);
        }
        if self.stage == Stage::Empty
            && let Some(packet) = self.handed.pop_front()
        {
            self.staged.set_whole(&packet);
            self.stage = Stage::Full;
        }
        if self.stage == Stage::Empty {
            if *readable == Readable::No && link.readiness().is_some() {
                return PostedOrder::Nothing;
            }
            match link.receive(&mut self.staged) {
                Received::Packet => self.stage = Stage::Full,
                // A step of its own, so that nobody has the engine go on with such packets alone.
                Received::Dropped => return PostedOrder::Done,
                Received::Nothing => {
                    *readable = Readable::No;
                    return PostedOrder::Nothing;
                }
            }
        }
        self.decide(ring)
    }

    fn carry_out(&mut self, order: Order) -> PostedOrder {
        match order {
            Order::Ask(chain, need) => PostedOrder::Ask(chain, need),
            Order::Wire(chain) => PostedOrder::Wire(chain),
            Order::GiveBack(chain) => {
                count_up(&self.nic.counters.returned_buffers, 1);
                PostedOrder::GiveBack(chain)
            }
            Order::Fill(packet, report) => {
                self.filling = Filling::Stored(packet);
                PostedOrder::Fill(report)
            }
            Order::Report => PostedOrder::Report,
            Order::Forget(packet, loss) => {
                if self.store.take(packet).is_some() {
                    self.stored -= 1;
                }
                self.count_loss(loss);
                PostedOrder::Done
            }
        }
    }

    /// Decides about the staged packet.
    fn decide(&mut self, ring: &mut impl Ring) -> PostedOrder {
        let bytes = self.header_bytes + self.staged.packet_bytes();
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let arrival = self.policy.arrive(bytes, ring);
        match arrival {
            Arrival::Keep => return PostedOrder::Nothing,
            Arrival::Fill(report) => {
                self.filling = Filling::Staged;
                // It is in the buffer until it is filled, which is next.
                self.stage = Stage::Empty;
                return PostedOrder::Fill(report);
            }
            Arrival::Drop(loss) => self.count_loss(loss),
            Arrival::Store => match self.store.put(self.staged.whole(), self.now_ns) {
                Some(packet) => {
                    self.stored += 1;
                    self.policy.stored(packet, bytes);
                }
                None => {
                    self.policy.refused();
                    self.count_loss(Loss::Fault);
                }
            },
        }
        self.stage = Stage::Empty;
        PostedOrder::Done
    }

    fn count_loss(&self, loss: Loss) {
        let counters = &self.nic.counters;
        match loss {
            Loss::Fault => {
                count_up(&counters.fault_drops, 1);
                self.nic.account(self.pair).lost();
            }
            Loss::TooLong => count_up(&counters.unfit_drops, 1),
        }
    }

    /// The chains of the last order.
    pub fn chosen(&self) -> &[ChainNo] {
        self.policy.chosen()
    }

    /// Writes the packet of the last order into so many chains, which are leased; returns how many
    /// bytes.
    pub fn fill(&mut self, memory: &DeviceMemory, into: &[Span], chains: usize) -> u32 {
        let taken;
        let whole = match self.filling {
            Filling::Staged => self.staged.whole(),
            Filling::Stored(packet) => {
                if let Some(since_ns) = self.store.since_ns(packet) {
                    let waited_ns = self.now_ns.saturating_sub(since_ns);
                    self.nic.account(self.pair).waited(waited_ns);
                }
                taken = self.store.take(packet).unwrap_or_default();
                self.stored = self.stored.saturating_sub(1);
                &taken
            }
        };
        let Some((header, packet)) = whole.split_at_checked(HEADER_LEN) else {
            debug_assert!(false, "a packet without a header was chosen");
            return 0;
        };
        let mut first = [0; HEADER_LEN];
        first.copy_from_slice(header);
        let count = u16::try_from(chains).unwrap_or(u16::MAX);
        first[NUM_BUFFERS].copy_from_slice(&count.to_le_bytes());
        let mut writer = Writer {
            memory,
            spans: into.iter(),
            now: None,
            written: 0,
        };
        writer.write(&first[..self.header_bytes]);
        writer.write(packet);
        writer.written
    }

    /// Since when the packet of the last order has been in the store, if it is there.
    pub fn waits_since(&self) -> Option<u64> {
        match self.filling {
            Filling::Staged => None,
            Filling::Stored(packet) => self.store.since_ns(packet),
        }
    }

    /// See [`Policy::answered`].
    pub fn answered(&mut self, chain: ChainNo, answer: Answered) {
        self.policy.answered(chain, answer);
    }

    /// See [`Policy::stop`].
    pub fn stopping(&mut self) -> PostedOrder {
        loop {
            match self.policy.stop() {
                Some(Left::Filled) => return PostedOrder::Report,
                // It is lost.
                Some(Left::Stored(_)) => {}
                None => return PostedOrder::Nothing,
            }
        }
    }

    /// Another process goes on with the queue: gives it the next packets up to one that is filled and not reported.
    pub fn leaving(&mut self) -> PostedOrder {
        let mut packets = Vec::new();
        let order = loop {
            match self.policy.stop() {
                Some(Left::Stored(packet)) => {
                    if let Some(packet) = self.store.take(packet) {
                        self.stored = self.stored.saturating_sub(1);
                        packets.push(packet);
                    }
                }
                Some(Left::Filled) => break PostedOrder::ReadBack,
                None => break PostedOrder::Nothing,
            }
        };
        self.nic.leave(self.pair, packets);
        order
    }

    /// A packet that was filled and not reported, with the header that its driver expects.
    pub fn read_back(&mut self, bytes: &[u8]) {
        let Some((header, packet)) = bytes.split_at_checked(self.header_bytes) else {
            return;
        };
        let mut whole = vec![0; HEADER_LEN + packet.len()];
        whole[..header.len()].copy_from_slice(header);
        whole[HEADER_LEN..].copy_from_slice(packet);
        self.nic.leave(self.pair, vec![whole.into()]);
    }

    /// The same for what has not been decided about, and for what waits in the link.
    pub fn left(&mut self, link: &mut Link) {
        let mut packets = Vec::new();
        if std::mem::replace(&mut self.stage, Stage::Empty) == Stage::Full {
            packets.push(self.staged.whole().into());
        }
        packets.extend(self.handed.drain(..));
        loop {
            match link.take_out(&mut self.staged) {
                Received::Packet => packets.push(self.staged.whole().into()),
                Received::Dropped => {}
                Received::Nothing => break,
            }
        }
        self.nic.leave(self.pair, packets);
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let staged = u64::from(self.stage == Stage::Full) + self.handed.len() as u64;
        self.nic.count_stop_drops(self.stored + staged);
    }
}

const _: () = assert!(HEADER_BYTES as usize == HEADER_LEN && LEGACY_HEADER_BYTES < HEADER_BYTES);

/// Writes into leased spans, one after the other.
struct Writer<'a> {
    memory: &'a DeviceMemory,
    spans: std::slice::Iter<'a, Span>,
    /// What is left of the span that is being written.
    now: Option<Span>,
    written: u32,
}

impl Writer<'_> {
    fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let span = self.now.take().or_else(|| self.spans.next().copied());
            let Some(mut span) = span else {
                debug_assert!(false, "a packet is longer than the chains chosen for it");
                return;
            };
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(span.len);
            let (now, later) = bytes.split_at(len as usize);
            match self.memory.slice(Span { len, ..span }) {
                Ok(slice) => slice.copy_from(now),
                // Spans come from this very memory, so this is a bug of ours.
                Err(error) => debug_assert!(false, "{error}"),
            }
            self.written += len;
            bytes = later;
            span.offset += u64::from(len);
            span.len -= len;
            self.now = (span.len > 0).then_some(span);
        }
    }
}
