// SPDX-License-Identifier: Apache-2.0
//! Two devices that are linked to each other, guest to guest.
//!
//! The first device that names a pair makes it, the second one takes its other end, and a third is
//! refused. The two may be on different engines, and have different numbers of queue pairs:
//!
//! ```text
//!   device A, engine 0                bounded lanes                  device B, engine 1
//!   pair 0 ── send ──┐                                        ┌─► lane 0 ── receive ── pair 0
//!   pair 1 ── send ──┴── which lane? the flow's, else a hash ─┴─► lane 1 ── receive ── pair 1
//! ```
//! A *lane* is what one queue pair receives. A packet goes to the lane of the pair on which the other
//! side last sent a packet of the same flow (virtio 1.2, 5.1.6.5.6), else to one by a hash of its
//! flow. So packets of a flow are in one lane, in order, unless the other guest moves the flow. A
//! driver may use fewer pairs than there are: where the lane's does not receive, the first one that
//! does gets the packet.
//!
//! A packet is copied twice: into the lane while it is leased by the sender, and out of it under the
//! leases of the receiver, whose buffers only its own engine knows.
//!
//! A lane has room for [`LANE_PACKETS`] packets and [`LANE_BYTES`]; what does not fit is dropped and
//! counted, as on a wire. So is what is sent while there is no other device, or none of its pairs
//! receives.

use super::state::{LinkError, LinkState, Offloads, Received, Sent, count};
use crate::net::{
    flow::{FLOWS, flow_of},
    header::{NetHeader, Undone},
    packet::{HEADER_LEN, Outgoing, PacketBuffer},
    segment::{Cut, Segments},
};
use pagetide_vpri::{Doorbell, handoff::Handoff};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicU8, AtomicU16, AtomicUsize, Ordering},
    },
};

/// Packets in a lane: as many as the longest ring holds.
const LANE_PACKETS: usize = 1024;
/// Bytes in a lane.
const LANE_BYTES: usize = 4 << 20;
/// Said of an end without another.
const ALONE: &str = "no other device has this pair yet";

/// How a device has come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begun {
    /// By a command, or after a death.
    Anew,
    /// Another process has handed it over: its pairs receive, as far as anybody knows.
    Handed,
}

/// The pairs of a DPU, by name.
#[derive(Debug, Default)]
pub(crate) struct Pairs(Mutex<HashMap<String, Weak<Cable>>>);

impl Pairs {
    /// The ends of all queue pairs of a device that names this pair.
    ///
    /// # Errors
    /// [`LinkError::PairTaken`].
    pub fn join(&self, name: &str, pairs: u16, begun: Begun) -> Result<Joined, LinkError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, cable| cable.strong_count() > 0);
        let cable = known.get(name).and_then(Weak::upgrade).unwrap_or_else(|| {
            let cable = Arc::new(Cable::default());
            known.insert(name.to_owned(), Arc::downgrade(&cable));
            cable
        });
        let plug = Plug::take_free(&cable, pairs, begun);
        let plug = Arc::new(plug.ok_or_else(|| LinkError::PairTaken(name.to_owned()))?);
        let ends = (0..pairs).map(|pair| PairEnd::new(&plug, pair));
        Ok(Joined {
            ends: ends.collect(),
            keeper: PairKeeper(Arc::downgrade(&plug)),
        })
    }
}

/// A device's side of a pair.
#[derive(Debug)]
pub(crate) struct Joined {
    /// Of each queue pair.
    pub ends: Vec<PairEnd>,
    pub keeper: PairKeeper,
}

/// What control threads need of a device's side.
#[derive(Debug)]
pub(crate) struct PairKeeper(Weak<Plug>);

impl PairKeeper {
    /// Nothing more will be said of pairs that were handed over and are not used.
    pub fn settle(&self) {
        let plug = self.0.upgrade();
        let lanes = plug.iter().flat_map(|plug| plug.lanes.iter());
        lanes.for_each(Lane::settle);
    }
}

/// What the queue pair of a lane does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Awaits {
    /// It does not receive.
    Nothing,
    /// It receives as far as anybody knows: another process has left it, or is about to go on with it.
    AsBefore,
    /// It receives.
    Packets,
}

/// Packets for one queue pair.
#[derive(Debug)]
struct Lane {
    packets: Handoff<Box<[u8]>>,
    bytes: AtomicUsize,
    /// One of [`Awaits`].
    awaits: AtomicU8,
    /// Wakes the engine that receives.
    bell: Mutex<Option<Arc<Doorbell>>>,
}

impl Lane {
    fn new(begun: Begun) -> Self {
        let awaits = match begun {
            Begun::Anew => Awaits::Nothing,
            Begun::Handed => Awaits::AsBefore,
        };
        Self {
            packets: Handoff::new(LANE_PACKETS),
            bytes: AtomicUsize::new(0),
            awaits: AtomicU8::new(awaits as u8),
            bell: Mutex::new(None),
        }
    }

    fn bell(&self) -> MutexGuard<'_, Option<Arc<Doorbell>>> {
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Relaxed: a packet that is sent while a pair starts or stops may go either way.
    fn receives(&self) -> bool {
        self.awaits.load(Ordering::Relaxed) != Awaits::Nothing as u8
    }

    fn set(&self, awaits: Awaits) {
        self.awaits.store(awaits as u8, Ordering::Relaxed);
    }

    /// Nothing more will be said of what was handed over.
    fn settle(&self) {
        let (before, after) = (Awaits::AsBefore as u8, Awaits::Nothing as u8);
        // It fails if something was said meanwhile, which holds.
        let _said =
            self.awaits
                .compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn push(&self, packet: &Outgoing<'_>) -> Sent {
        let bytes = HEADER_LEN + packet.bytes();
        // Others may send at the same time: the room is taken before it is used.
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > LANE_BYTES {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Sent::Dropped;
        }
        let mut copy = vec![0; bytes].into_boxed_slice();
        copy[..HEADER_LEN].copy_from_slice(packet.header());
        packet.copy_to(&mut copy[HEADER_LEN..]);
        if self.packets.push(copy).is_err() {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Sent::Dropped;
        }
        if let Some(bell) = &*self.bell() {
            bell.ring();
        }
        Sent::Gone
    }

    fn pop(&self) -> Option<Box<[u8]>> {
        let packet = self.packets.pop()?;
        self.bytes.fetch_sub(packet.len(), Ordering::Relaxed);
        Some(packet)
    }
}

/// One side of a pair.
#[derive(Debug, Default)]
struct Side {
    /// What its device receives; `None` while there is no device.
    lanes: RwLock<Option<Arc<[Lane]>>>,
    /// One more than the queue pair on which its device last sent a packet of a flow.
    sent_on: Flows,
}

#[derive(Debug)]
struct Flows(Box<[AtomicU16]>);

impl Default for Flows {
    fn default() -> Self {
        Self((0..FLOWS).map(|_| AtomicU16::new(0)).collect())
    }
}

impl Side {
    fn lanes(&self) -> Option<Arc<[Lane]>> {
        let lanes = self.lanes.read();
        lanes.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_lanes(&self, lanes: Option<Arc<[Lane]>>) {
        *self.lanes.write().unwrap_or_else(PoisonError::into_inner) = lanes;
    }

    /// The lane of a packet of that flow; none if no pair receives.
    fn lane_of<'a>(&self, lanes: &'a [Lane], flow: usize) -> Option<&'a Lane> {
        let learned = self.sent_on.0[flow].load(Ordering::Relaxed);
        let its = match usize::from(learned).checked_sub(1) {
            Some(pair) if pair < lanes.len() => pair,
            _ => flow % lanes.len().max(1),
        };
        let its = lanes.get(its).filter(|lane| lane.receives());
        its.or_else(|| lanes.iter().find(|lane| lane.receives()))
    }
}

/// What two devices share.
#[derive(Debug, Default)]
pub(crate) struct Cable {
    sides: [Side; 2],
    joining: Mutex<()>,
}

/// The place of a device on one side. The side is free again when it is dropped.
#[derive(Debug)]
struct Plug {
    cable: Arc<Cable>,
    side: usize,
    lanes: Arc<[Lane]>,
}

impl Plug {
    fn take_free(cable: &Arc<Cable>, pairs: u16, begun: Begun) -> Option<Self> {
        let _joining = cable.joining.lock().unwrap_or_else(PoisonError::into_inner);
        let side = cable.sides.iter().position(|side| side.lanes().is_none())?;
        let lanes: Arc<[Lane]> = (0..pairs).map(|_| Lane::new(begun)).collect();
        cable.sides[side].set_lanes(Some(lanes.clone()));
        Some(Self {
            cable: cable.clone(),
            side,
            lanes,
        })
    }

    fn own(&self) -> &Side {
        &self.cable.sides[self.side]
    }

    fn other(&self) -> &Side {
        &self.cable.sides[1 - self.side]
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        self.own().set_lanes(None);
        for flow in &self.own().sent_on.0 {
            flow.store(0, Ordering::Relaxed);
        }
    }
}

/// The end of one queue pair.
#[derive(Debug)]
pub(crate) struct PairEnd {
    state: Arc<LinkState>,
    plug: Arc<Plug>,
    pair: u16,
    offloads: Offloads,
    segments: Segments,
}

impl PairEnd {
    fn new(plug: &Arc<Plug>, pair: u16) -> Self {
        let state = Arc::new(LinkState::default());
        if plug.other().lanes().is_none() {
            state.set_error(Some(ALONE.to_owned()));
        }
        Self {
            state,
            plug: plug.clone(),
            pair,
            offloads: Offloads::default(),
            segments: Segments::default(),
        }
    }

    pub fn state(&self) -> &Arc<LinkState> {
        &self.state
    }

    fn lane(&self) -> &Lane {
        &self.plug.lanes[usize::from(self.pair)]
    }

    pub fn attach(&self, bell: &Arc<Doorbell>) {
        *self.lane().bell() = Some(bell.clone());
    }

    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.offloads = offloads;
    }

    pub fn begin(&self) {
        self.lane().set(Awaits::Packets);
    }

    pub fn end(&self) {
        self.lane().set(Awaits::Nothing);
    }

    pub fn leave(&self) {
        self.lane().set(Awaits::AsBefore);
    }

    pub fn clear(&mut self) -> u64 {
        let mut lost = u64::from(!self.segments.is_empty());
        self.segments = Segments::default();
        // No more than the lane takes: others may go on sending.
        while lost <= LANE_PACKETS as u64 && self.lane().pop().is_some() {
            lost += 1;
        }
        lost
    }

    pub fn send(&mut self, packet: &Outgoing<'_>) -> Sent {
        let other = self.plug.other();
        let sent = match other.lanes() {
            None => Sent::Dropped,
            Some(lanes) => {
                let flow = flow_of(packet);
                let own = &self.plug.own().sent_on.0[flow];
                own.store(self.pair + 1, Ordering::Relaxed);
                let lane = other.lane_of(&lanes, flow);
                lane.map_or(Sent::Dropped, |lane| lane.push(packet))
            }
        };
        match sent {
            Sent::Gone => {
                if self.state.sent.load(Ordering::Relaxed) == 0 {
                    self.state.set_error(None);
                }
                count(&self.state.sent, 1);
            }
            Sent::Dropped => count(&self.state.send_drops, 1),
        }
        sent
    }

    pub fn receive(&mut self, into: &mut PacketBuffer) -> Received {
        if self.take_segment(into) {
            return Received::Packet;
        }
        let Some(packet) = self.lane().pop() else {
            return Received::Nothing;
        };
        into.whole_mut()[..packet.len()].copy_from_slice(&packet);
        into.set_packet_bytes(packet.len() - HEADER_LEN);
        if self.state.received.load(Ordering::Relaxed) == 0 {
            self.state.set_error(None);
        }
        match NetHeader::for_receiver(into, self.offloads) {
            Undone::Accepted => {
                count(&self.state.received, 1);
                return Received::Packet;
            }
            Undone::Refused if self.segments.cut(into) == Cut::Done => {
                if self.take_segment(into) {
                    return Received::Packet;
                }
            }
            Undone::Refused => count(&self.state.receive_drops, 1),
        }
        Received::Dropped
    }

    /// The next segment of a packet that the driver does not take whole.
    fn take_segment(&mut self, into: &mut PacketBuffer) -> bool {
        let is_there = self.segments.take(into)
            && NetHeader::for_receiver(into, self.offloads) == Undone::Accepted;
        count(&self.state.received, u64::from(is_there));
        is_there
    }

    pub fn is_ready(&self) -> bool {
        !self.lane().packets.is_empty() || !self.segments.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        memory::{DeviceMemory, tests::Ram},
        regions::RegionTable,
    };
    use pagetide_addr::Gpa;
    use pagetide_vpri::LookUp;
    use vm_memory::{Bytes, GuestAddress};

    const BASE: u64 = 0x10_0000;

    #[test]
    fn two_devices_find_each_other_a_third_is_refused_and_a_freed_side_is_taken_again() {
        let pairs = Pairs::default();
        let join = |name, count| pairs.join(name, count, Begun::Anew);
        let a = join("p", 2).unwrap();
        assert!(a.ends[0].state.error().is_some());
        let b = join("p", 1).unwrap();
        assert!(b.ends[0].state.error().is_none());
        assert!(matches!(join("p", 1), Err(LinkError::PairTaken(_))));
        assert!(join("other", 1).is_ok());
        // A keeper does not keep the side.
        let keeper = a.keeper;
        drop(a.ends);
        let c = join("p", 4).unwrap();
        assert_eq!(c.ends.len(), 4);
        drop((b, c));
        assert_eq!(join("p", 1).unwrap().ends.len(), 1);
        keeper.settle();
    }

    /// Two devices with memory to send from.
    struct Rig {
        memory: DeviceMemory,
        a: Vec<PairEnd>,
        b: Vec<PairEnd>,
        keeper: PairKeeper,
    }

    /// As many pairs on each side.
    fn rig(a: u16, b: u16, begun: Begun) -> Rig {
        let ram = Ram::new(4);
        let mut table = RegionTable::default();
        table.add(ram.region(BASE, 4, 0)).unwrap();
        let pairs = Pairs::default();
        let a = pairs.join("p", a, begun).unwrap();
        let b = pairs.join("p", b, begun).unwrap();
        Rig {
            memory: table.for_engine(0, LookUp::On).unwrap(),
            a: a.ends,
            b: b.ends,
            keeper: b.keeper,
        }
    }

    impl Rig {
        fn begin_all(&self) {
            for end in self.a.iter().chain(&self.b) {
                end.begin();
            }
        }

        /// Sends from the first pair of A.
        fn send(&mut self, bytes: &[u8]) -> Sent {
            send(&self.memory, &mut self.a[0], bytes)
        }

        /// Pairs of B that have something.
        fn ready(&self) -> Vec<bool> {
            self.b.iter().map(PairEnd::is_ready).collect()
        }
    }

    fn send(memory: &DeviceMemory, end: &mut PairEnd, bytes: &[u8]) -> Sent {
        memory.write_slice(bytes, GuestAddress(BASE)).unwrap();
        let mut spans = Vec::new();
        memory.spans(Gpa(BASE), 60, &mut spans).unwrap();
        end.send(&Outgoing::new(&[0; HEADER_LEN], memory, &spans).unwrap())
    }

    /// From one port to the other, as UDP over IPv4.
    fn packet(from: u8, to: u8) -> Vec<u8> {
        let mut bytes = vec![0; 60];
        bytes[12] = 8;
        bytes[14] = 0x45;
        bytes[23] = 17;
        (bytes[29], bytes[33]) = (from, to);
        (bytes[35], bytes[37]) = (from, to);
        bytes
    }

    #[test]
    fn packets_of_a_flow_go_to_the_pair_on_which_the_other_side_sends_it() {
        let mut rig = rig(1, 4, Begun::Anew);
        rig.begin_all();
        let mut buffer = PacketBuffer::new();
        for pair in 0..4_u8 {
            let end = &mut rig.b[usize::from(pair)];
            assert_eq!(send(&rig.memory, end, &packet(10 + pair, 80)), Sent::Gone);
            assert_eq!(rig.a[0].receive(&mut buffer), Received::Packet);
        }
        for pair in 0..4_u8 {
            let bytes = packet(80, 10 + pair);
            assert_eq!(rig.send(&bytes), Sent::Gone);
            let ready = rig.ready();
            assert!(ready[usize::from(pair)], "{ready:?}");
            let end = &mut rig.b[usize::from(pair)];
            assert_eq!(end.receive(&mut buffer), Received::Packet);
            assert_eq!(buffer.packet(), bytes);
        }
        // A lane that is full drops.
        let bytes = packet(80, 10);
        let sent = (0..2 * LANE_PACKETS).filter(|_| rig.send(&bytes) == Sent::Gone);
        assert_eq!(sent.count(), LANE_PACKETS);
    }

    #[test]
    fn pairs_that_the_other_driver_does_not_use_get_nothing() {
        let mut rig = rig(1, 4, Begun::Anew);
        assert_eq!(rig.send(&packet(80, 1)), Sent::Dropped);
        rig.b[2].begin();
        for port in 0..64 {
            assert_eq!(rig.send(&packet(80, port)), Sent::Gone);
        }
        assert_eq!(rig.ready(), [false, false, true, false]);
        // Flows that it once sent elsewhere, too.
        rig.b[3].begin();
        assert_eq!(
            send(&rig.memory, &mut rig.b[3], &packet(9, 80)),
            Sent::Dropped
        );
        rig.b[3].end();
        assert_eq!(rig.send(&packet(80, 9)), Sent::Gone);
        assert_eq!(rig.ready(), [false, false, true, false]);
    }

    #[test]
    fn pairs_that_were_handed_over_receive_until_all_is_said() {
        let mut rig = rig(1, 2, Begun::Handed);
        for port in 0..64 {
            assert_eq!(rig.send(&packet(80, port)), Sent::Gone);
        }
        assert_eq!(rig.ready(), [true, true]);
        rig.b[0].begin();
        rig.keeper.settle();
        let receives = |rig: &Rig| [0, 1].map(|pair| rig.b[pair].lane().receives());
        assert_eq!(receives(&rig), [true, false]);
        // What came before it began is for it.
        assert_eq!(rig.ready(), [true, true]);
        // Another process may give it back.
        rig.b[0].leave();
        assert_eq!(receives(&rig), [true, false]);
        let lost: u64 = rig.b.iter_mut().map(PairEnd::clear).sum();
        assert_eq!((lost, rig.ready()), (64, vec![false; 2]));
    }
}
