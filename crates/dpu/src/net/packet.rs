// SPDX-License-Identifier: Apache-2.0
//! Packets on their way between a guest and a link.
//!
//! A packet that a guest sends is leased guest memory ([`Outgoing`]): a link copies it, or gives it
//! to the kernel, before `send` returns. A packet that a link receives is read into a buffer of
//! ours ([`PacketBuffer`]), because no guest memory may be leased while a packet is awaited.
//!
//! Before each packet there is a header of [`HEADER_BYTES`], in both directions: it says what of
//! checksums and segmentation is left to be done.

use super::header::{HEADER_BYTES, PACKET_BYTES_MAX};
use crate::memory::{DeviceMemory, Span};
use vm_memory::VolatileSlice;

/// Bytes of a header, as a length.
pub(crate) const HEADER_LEN: usize = HEADER_BYTES as usize;
/// Longest packet, without its header.
#[expect(clippy::cast_possible_truncation, reason = "65,553")]
pub(crate) const PACKET_LEN_MAX: usize = PACKET_BYTES_MAX as usize;

/// A packet that a guest sends. All of it is leased.
#[derive(Clone, Copy)]
pub(crate) struct Outgoing<'a> {
    header: &'a [u8; HEADER_LEN],
    memory: &'a DeviceMemory,
    data: &'a [Span],
    bytes: usize,
}

impl<'a> Outgoing<'a> {
    /// The packet in `data`, with a header that was checked against its length.
    pub fn new(
        header: &'a [u8; HEADER_LEN],
        memory: &'a DeviceMemory,
        data: &'a [Span],
    ) -> Option<Self> {
        let bytes: usize = data.iter().map(|span| span.len as usize).sum();
        (bytes <= PACKET_LEN_MAX).then_some(Self {
            header,
            memory,
            data,
            bytes,
        })
    }

    /// Its header. `num_buffers` is what the driver wrote there, which means nothing.
    pub fn header(&self) -> &'a [u8; HEADER_LEN] {
        self.header
    }

    /// Its length without the header.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its parts, in order. They may change while they are read: the guest has them, too.
    pub fn parts(&self) -> impl Iterator<Item = VolatileSlice<'a>> + use<'a> {
        let memory = self.memory;
        let slice = move |span: &Span| memory.slice(*span).ok();
        self.data.iter().filter_map(slice)
    }

    /// Copies the packet, without its header, to the beginning of `into`, which must have room.
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        let mut done = 0;
        for part in self.parts() {
            done += part.copy_to(&mut into[done..]);
        }
        done
    }
}

/// A buffer of ours for one packet and its header.
#[derive(Debug)]
pub(crate) struct PacketBuffer {
    /// The header, and the packet right behind it.
    bytes: Box<[u8]>,
    packet_bytes: usize,
}

impl PacketBuffer {
    /// One with room for the longest packet, and no packet.
    pub fn new() -> Self {
        Self {
            bytes: vec![0; HEADER_LEN + PACKET_LEN_MAX].into(),
            packet_bytes: 0,
        }
    }

    /// Header and room for a packet, for one read of both. [`Self::set_packet_bytes`] is next.
    pub fn whole_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The header.
    pub fn header_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..HEADER_LEN]
    }

    /// Room for a packet.
    pub fn room_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER_LEN..]
    }

    /// Copies a packet of ours with its header.
    pub fn set_whole(&mut self, whole: &[u8]) {
        let bytes = whole.len().min(self.bytes.len());
        debug_assert!(bytes >= HEADER_LEN, "a packet without a header");
        self.bytes[..bytes].copy_from_slice(&whole[..bytes]);
        self.set_packet_bytes(bytes.saturating_sub(HEADER_LEN));
    }

    /// Copies a packet that a guest sends, and its header.
    pub fn copy_from(&mut self, packet: &Outgoing<'_>) {
        self.header_mut().copy_from_slice(packet.header());
        let bytes = packet.copy_to(self.room_mut());
        self.set_packet_bytes(bytes);
    }

    /// Sets the length of the packet in it.
    pub fn set_packet_bytes(&mut self, bytes: usize) {
        debug_assert!(bytes <= PACKET_LEN_MAX, "a packet of {bytes} bytes");
        self.packet_bytes = bytes.min(PACKET_LEN_MAX);
    }

    /// The length of the packet in it, without the header.
    pub fn packet_bytes(&self) -> usize {
        self.packet_bytes
    }

    /// Header and packet.
    pub fn whole(&self) -> &[u8] {
        &self.bytes[..HEADER_LEN + self.packet_bytes]
    }

    /// The packet.
    pub fn packet(&self) -> &[u8] {
        &self.bytes[HEADER_LEN..HEADER_LEN + self.packet_bytes]
    }
}

impl Default for PacketBuffer {
    fn default() -> Self {
        Self::new()
    }
}
