// SPDX-License-Identifier: Apache-2.0
//! A device's own packets, back to it: each to the pair that has sent it.

use super::state::{LinkState, Offloads, Received, Sent, count};
use crate::net::{
    header::{NetHeader, Undone},
    packet::{HEADER_LEN, Outgoing, PacketBuffer},
    segment::{Cut, Segments},
};
use std::{collections::VecDeque, sync::Arc};

/// Packets under way: as many as the longest ring holds.
const PACKETS_MAX: usize = 1024;
/// Bytes under way: one pair must not take the memory of the host.
const BYTES_MAX: usize = 4 << 20;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Loopback {
    state: Arc<LinkState>,
    offloads: Offloads,
    packets: VecDeque<Box<[u8]>>,
    bytes: usize,
    segments: Segments,
}

impl Loopback {
    /// An empty one.
    pub fn new() -> Self {
        Self {
            state: Arc::default(),
            offloads: Offloads::default(),
            packets: VecDeque::new(),
            bytes: 0,
            segments: Segments::default(),
        }
    }

    pub fn state(&self) -> &Arc<LinkState> {
        &self.state
    }

    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.offloads = offloads;
    }

    pub fn send(&mut self, packet: &Outgoing<'_>) -> Sent {
        let bytes = HEADER_LEN + packet.bytes();
        if self.packets.len() == PACKETS_MAX || self.bytes + bytes > BYTES_MAX {
            count(&self.state.send_drops, 1);
            return Sent::Dropped;
        }
        let mut copy = vec![0; bytes].into_boxed_slice();
        copy[..HEADER_LEN].copy_from_slice(packet.header());
        packet.copy_to(&mut copy[HEADER_LEN..]);
        self.bytes += bytes;
        self.packets.push_back(copy);
        count(&self.state.sent, 1);
        Sent::Gone
    }

    pub fn receive(&mut self, into: &mut PacketBuffer) -> Received {
        if self.take_segment(into) {
            return Received::Packet;
        }
        let Some(packet) = self.packets.pop_front() else {
            return Received::Nothing;
        };
        self.bytes -= packet.len();
        into.whole_mut()[..packet.len()].copy_from_slice(&packet);
        into.set_packet_bytes(packet.len() - HEADER_LEN);
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

    pub fn clear(&mut self) -> u64 {
        let lost = self.packets.len() as u64 + u64::from(!self.segments.is_empty());
        self.packets.clear();
        self.bytes = 0;
        self.segments = Segments::default();
        lost
    }

    /// The next segment of a packet that the driver does not take whole.
    fn take_segment(&mut self, into: &mut PacketBuffer) -> bool {
        let is_there = self.segments.take(into)
            && NetHeader::for_receiver(into, self.offloads) == Undone::Accepted;
        count(&self.state.received, u64::from(is_there));
        is_there
    }

    pub fn is_ready(&self) -> bool {
        !self.packets.is_empty() || !self.segments.is_empty()
    }
}
