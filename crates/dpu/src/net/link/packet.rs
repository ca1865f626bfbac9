// SPDX-License-Identifier: Apache-2.0
//! An interface of the host: what comes in there, the device receives, and what the device sends
//! goes out there.
//!
//! All pairs share one socket. The first pair that receives reads it, and puts packets of other
//! pairs into their queues, as the [`FlowTable`] says:
//!
//! ```text
//!   socket ─► reader (first pair that receives) ─► its own packets
//!                 └─ steer ─► queue of pair n ─► eventfd that its engine polls
//! ```
//! So a flow is received where it was sent last, which the kernel's own spreading of packets over
//! sockets (`PACKET_FANOUT`) cannot do without a program of ours in the kernel, and its packets keep
//! their order. The price is that one engine reads for all.
//!
//! Packets are read one by one into a buffer of ours. A ring that the kernel fills (`TPACKET_V3`)
//! saves the call for each packet, not the copy, and shows a packet only when its block is full or
//! the block's timer, of at least a millisecond, has run out. It would also be memory that is never
//! evicted, of a block of 64 KiB and more for each packet that is to be segmented.

use super::{
    keeper::{Interface, Keeper, Port, ReadySet, Receives, ready_sets},
    state::{LinkError, LinkState, Offloads, Received, Sent, count, is_gone, kernel},
};
use crate::net::{
    flow::{flow_of, flow_of_bytes},
    handed::ParkedNic,
    header::{NetHeader, Undone},
    packet::{HEADER_LEN, Outgoing, PacketBuffer},
    segment::{Cut, Segments},
    steer::FlowTable,
};
use pagetide_sys::net::packet::PacketSocket;
use rustix::event::{EventfdFlags, eventfd};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
};

/// Packets that the reader takes at most in a row for other pairs: its own engine has other tenants.
const READ_MAX: usize = 64;
/// Most packets that wait for the engine of a pair: as many as the longest ring holds.
const QUEUE_PACKETS_MAX: usize = 1024;
/// Most bytes of them.
const QUEUE_BYTES_MAX: usize = 4 << 20;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Packet {
    pair: u16,
    port: Port<PacketInterface>,
    state: Arc<LinkState>,
    offloads: Offloads,
    copy: PacketBuffer,
    segments: Segments,
}

/// An interface, by name, and what its pairs share.
#[derive(Debug)]
pub(crate) struct PacketInterface {
    name: String,
    /// Number of the interface that was opened last.
    index: AtomicU32,
    flows: FlowTable,
    /// Bit n: pair n receives.
    receiving: AtomicU32,
    queues: Box<[Queue]>,
    /// By pair.
    ready: Box<[ReadySet]>,
}

/// What control threads need of an interface.
pub(crate) type PacketKeeper = Keeper<PacketInterface>;

/// Packets that wait for the engine of a pair.
#[derive(Debug)]
struct Queue {
    /// Readable while there may be packets.
    filled: OwnedFd,
    /// Packets in it, so that nobody need lock it to see that it is empty.
    count: AtomicUsize,
    /// Packets that its engine has taken and has not reported to the driver. Only that engine writes it.
    in_hand: AtomicUsize,
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    packets: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Queue {
    fn new() -> io::Result<Self> {
        Ok(Self {
            filled: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            count: AtomicUsize::new(0),
            in_hand: AtomicUsize::new(0),
            inside: Mutex::default(),
        })
    }

    fn is_empty(&self) -> bool {
        // Pairs with the Release in `put`.
        self.count.load(Ordering::Acquire) == 0
    }

    /// True if nothing of the pair is between the socket and its driver.
    fn is_idle(&self) -> bool {
        // In this order: a packet that has left the queue is in hand since before that.
        self.is_empty() && self.in_hand.load(Ordering::Acquire) == 0
    }

    /// False if it has no room.
    fn put(&self, packet: &[u8]) -> bool {
        let mut inside = self.lock();
        let is_full = inside.packets.len() == QUEUE_PACKETS_MAX
            || inside.bytes + packet.len() > QUEUE_BYTES_MAX;
        if is_full {
            return false;
        }
        inside.bytes += packet.len();
        inside.packets.push_back(packet.into());
        self.count.store(inside.packets.len(), Ordering::Release);
        if inside.packets.len() == 1 {
            self.call();
        }
        true
    }

    /// Has the engine of the pair look for packets.
    fn call(&self) {
        if let Err(error) = rustix::io::write(&self.filled, &1_u64.to_ne_bytes()) {
            // The count is full, so it is readable anyway.
            tracing::debug!(%error, "an eventfd is not written");
        }
    }

    fn take(&self, into: &mut PacketBuffer) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut inside = self.lock();
        let Some(packet) = inside.packets.pop_front() else {
            return false;
        };
        inside.bytes -= packet.len();
        self.count.store(inside.packets.len(), Ordering::Release);
        if inside.packets.is_empty() {
            self.hang_up();
        }
        drop(inside);
        into.whole_mut()[..packet.len()].copy_from_slice(&packet);
        into.set_packet_bytes(packet.len() - HEADER_LEN);
        true
    }

    /// Drops all of them; returns how many.
    fn clear(&self) -> u64 {
        let mut inside = self.lock();
        let lost = inside.packets.len() as u64;
        inside.packets.clear();
        inside.bytes = 0;
        self.count.store(0, Ordering::Release);
        self.hang_up();
        lost
    }

    /// Nobody need look.
    fn hang_up(&self) {
        let mut calls = [0_u8; 8];
        if let Err(error) = rustix::io::read(&self.filled, &mut calls) {
            // Nobody has called since.
            tracing::trace!(%error, "an eventfd is not read");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PacketInterface {
    /// The pair that reads the socket.
    fn reader(&self) -> Option<u16> {
        let receiving = self.receiving.load(Ordering::Relaxed);
        (receiving != 0).then(|| u16::try_from(receiving.trailing_zeros()).unwrap_or(0))
    }

    fn receives(&self, pair: u16) -> bool {
        self.receiving.load(Ordering::Relaxed) & (1 << pair) != 0
    }

    /// The pair for a packet that came.
    fn steer(&self, packet: &[u8], reader: u16) -> u16 {
        let pair = (self.flows).steer(flow_of_bytes(packet), |pair| {
            self.queues[usize::from(pair)].is_idle()
        });
        // A driver that uses fewer pairs than there are: those that it does not use get nothing.
        if self.receives(pair) { pair } else { reader }
    }
}

impl Interface for PacketInterface {
    type Part = PacketSocket;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self) -> Result<Vec<PacketSocket>, LinkError> {
        let socket = PacketSocket::open(&self.name)?;
        self.index.store(socket.index(), Ordering::Relaxed);
        Ok(vec![socket])
    }

    fn is_gone(&self) -> bool {
        is_gone(&self.name, self.index.load(Ordering::Relaxed))
    }

    fn index(&self) -> u32 {
        self.index.load(Ordering::Relaxed)
    }

    fn copy(socket: &PacketSocket) -> io::Result<OwnedFd> {
        socket.as_fd().try_clone_to_owned()
    }

    fn apply(&self, sockets: &[Arc<PacketSocket>], receiving: &[Receives]) -> io::Result<()> {
        let bits = (receiving.iter().zip(0..))
            .filter(|(receiving, _)| receiving.offloads().is_some())
            .fold(0, |bits, (_, pair)| bits | 1 << pair);
        self.receiving.store(bits, Ordering::Relaxed);
        let reader = self.reader().map(usize::from);
        for (pair, ready) in self.ready.iter().enumerate() {
            ready.add(&self.queues[pair].filled)?;
            for socket in sockets {
                match Some(pair) == reader {
                    true => ready.add(&**socket)?,
                    false => ready.remove(&**socket)?,
                }
            }
        }
        Ok(())
    }
}

impl Packet {
    /// Opens an interface for a device of so many pairs, or goes on with what another process has opened.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn open(
        name: &str,
        pairs: u16,
        handed: Option<&ParkedNic>,
    ) -> Result<(Vec<Self>, Arc<PacketKeeper>), LinkError> {
        let queues = (0..pairs).map(|_| Queue::new()).collect::<io::Result<_>>();
        let interface = PacketInterface {
            name: name.to_owned(),
            index: AtomicU32::new(handed.map_or(0, |handed| handed.interface)),
            flows: FlowTable::new(pairs),
            receiving: AtomicU32::new(0),
            queues: queues.map_err(|source| kernel(name, source))?,
            ready: ready_sets(name, pairs)?,
        };
        let states: Vec<Arc<LinkState>> = (0..pairs).map(|_| Arc::default()).collect();
        let first = states.first().cloned().unwrap_or_default();
        let keeper = match handed {
            None => Keeper::open(interface, pairs, first)?,
            Some(handed) => {
                let index = handed.interface;
                let sockets = handed.copies(name)?.into_iter();
                let sockets = sockets.map(|fd| PacketSocket::handed(fd, index));
                Keeper::adopt(interface, sockets.collect(), pairs, first)?
            }
        };
        let links = (0..pairs).zip(states).map(|(pair, state)| Self {
            pair,
            port: Port::new(&keeper, 0),
            state,
            offloads: Offloads::default(),
            copy: PacketBuffer::new(),
            segments: Segments::default(),
        });
        Ok((links.collect(), keeper))
    }

    pub fn state(&self) -> &Arc<LinkState> {
        &self.state
    }

    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.offloads = offloads;
    }

    pub fn send(&mut self, packet: &Outgoing<'_>) -> Sent {
        self.learn(packet);
        let Some(socket) = self.port.part() else {
            count(&self.state.send_drops, 1);
            return Sent::Dropped;
        };
        let [header @ .., _, _] = packet.header();
        let sent = match socket.send(header, packet.parts()) {
            Err(error)
                if error.kind() == io::ErrorKind::InvalidInput
                    && error.raw_os_error().is_none() =>
            {
                self.copy.copy_from(packet);
                socket.send_whole(header, self.copy.packet())
            }
            sent => sent,
        };
        match sent {
            Ok(()) => {
                count(&self.state.sent, 1);
                Sent::Gone
            }
            Err(error) => {
                self.see(&error);
                count(&self.state.send_drops, 1);
                Sent::Dropped
            }
        }
    }

    /// Remembers where the flow of a packet is sent.
    fn learn(&self, packet: &Outgoing<'_>) {
        let interface = self.port.keeper().interface();
        if interface.queues.len() > 1 {
            interface.flows.sent(flow_of(packet), self.pair);
        }
    }

    pub fn receive(&mut self, into: &mut PacketBuffer) -> Received {
        self.receive_from(into, Self::next_packet)
    }

    /// Receives what has left the socket already, and nothing else.
    pub fn receive_own(&mut self, into: &mut PacketBuffer) -> Received {
        self.receive_from(into, |link, into| match link.own_queue().take(into) {
            true => Received::Packet,
            false => Received::Nothing,
        })
    }

    fn receive_from(
        &mut self,
        into: &mut PacketBuffer,
        mut next: impl FnMut(&mut Self, &mut PacketBuffer) -> Received,
    ) -> Received {
        if !self.segments.take(into) {
            if next(self, into) == Received::Nothing {
                return Received::Nothing;
            }
            if NetHeader::for_receiver(into, self.offloads) == Undone::Accepted {
                count(&self.state.received, 1);
                return Received::Packet;
            }
            if self.segments.cut(into) == Cut::Impossible || !self.segments.take(into) {
                count(&self.state.receive_drops, 1);
                return Received::Dropped;
            }
        }
        match NetHeader::for_receiver(into, self.offloads) {
            Undone::Accepted => {
                count(&self.state.received, 1);
                Received::Packet
            }
            Undone::Refused => {
                count(&self.state.receive_drops, 1);
                Received::Dropped
            }
        }
    }

    fn next_packet(&mut self, into: &mut PacketBuffer) -> Received {
        // Set before the packet leaves the queue, so that nobody sees the pair without any.
        let before = self.own_queue().in_hand.swap(1, Ordering::AcqRel);
        if self.own_queue().take(into) {
            return Received::Packet;
        }
        self.own_queue().in_hand.store(before, Ordering::Release);
        let received = self.read(into);
        if received == Received::Packet {
            // It was steered by this thread, and so is the next one.
            self.own_queue()
                .in_hand
                .store(before + 1, Ordering::Release);
        }
        received
    }

    /// Drops what has left the socket. What is in it is the interface's, and nobody's yet.
    pub fn clear(&mut self) -> u64 {
        let lost = u64::from(!self.segments.is_empty());
        self.segments = Segments::default();
        lost + self.own_queue().clear()
    }

    /// So many packets were received and are not reported to the driver: their flows stay on this pair.
    pub fn set_in_hand(&self, packets: usize) {
        let packets = packets + usize::from(!self.segments.is_empty());
        self.own_queue().in_hand.store(packets, Ordering::Release);
    }

    /// Reads the socket, if that is for this pair to do, until there is a packet for it.
    fn read(&mut self, into: &mut PacketBuffer) -> Received {
        let keeper = Arc::clone(self.port.keeper());
        let interface = keeper.interface();
        if interface.reader() != Some(self.pair) {
            return Received::Nothing;
        }
        for _ in 0..READ_MAX {
            let Some(socket) = self.port.part() else {
                return Received::Nothing;
            };
            match socket.receive(into.whole_mut()) {
                Ok(Some(bytes)) => into.set_packet_bytes(bytes),
                Ok(None) => return Received::Nothing,
                Err(error) => {
                    // It took a packet with it that the kernel cannot describe, or tells once that the interface is
                    // down. What is behind it nobody tells again.
                    if !self.see(&error) {
                        count(&self.state.receive_drops, 1);
                    }
                    continue;
                }
            }
            if !has_sound_header(into) {
                count(&self.state.receive_drops, 1);
                continue;
            }
            let pair = interface.steer(into.packet(), self.pair);
            if pair == self.pair {
                return Received::Packet;
            }
            if !interface.queues[usize::from(pair)].put(into.whole()) {
                count(&self.state.receive_drops, 1);
            }
        }
        // There may be more, of which nobody tells again.
        self.own_queue().call();
        Received::Nothing
    }

    /// Looks at an error of the socket, which is true if the interface is down. That is told once, and when it is up
    /// again the socket goes on by itself.
    fn see(&self, error: &io::Error) -> bool {
        let is_down = matches!(
            error.raw_os_error(),
            Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV)
        );
        if is_down {
            self.port.suspect();
        }
        is_down
    }

    fn own_queue(&self) -> &Queue {
        &self.port.keeper().interface().queues[usize::from(self.pair)]
    }

    pub fn readiness(&self) -> Option<BorrowedFd<'_>> {
        let sets = &self.port.keeper().interface().ready;
        sets.get(usize::from(self.pair)).map(AsFd::as_fd)
    }
}

/// Whether the kernel's header fits the packet behind it.
fn has_sound_header(packet: &PacketBuffer) -> bool {
    let fields: [u8; 10] = packet.whole()[..10].try_into().unwrap_or_default();
    NetHeader::parse(fields)
        .check(packet.packet_bytes() as u64)
        .is_ok()
}
