// SPDX-License-Identifier: Apache-2.0
//! What one process hands another of a network device besides its front end: descriptors of its
//! links, and the packets that have left the kernel and are not in a buffer that was reported.
//!
//! ```text
//!   per pair, oldest first:  those that wait for buffers, or are filled and not reported
//!                            the one that is staged
//!                            those that wait in the link, as far as that is memory of ours
//!   in the kernel:           the queue of a TAP or a socket: it stays, with its descriptor
//! ```
//! The next process takes these packets before any of its link, so each queue's order is kept.
//!
//! Packets pass as bytes of a file:
//!
//! ```text
//!   pair (2) │ length (4) │ header and packet │ pair …            little-endian
//! ```

use super::{
    link::{config::LinkConfig, state::LinkError},
    packet::{HEADER_LEN, PACKET_LEN_MAX},
};
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::fd::OwnedFd,
};

/// A packet of ours, with its header.
pub(crate) type HandedPacket = Box<[u8]>;

/// What a network device leaves to another process.
#[derive(Debug, Default)]
pub struct ParkedNic {
    /// What its link has open: each queue of a TAP, or a packet socket. Empty if the interface is lost, or the link
    /// has none.
    pub descriptors: Vec<OwnedFd>,
    /// Number of the host's interface that they are of; 0 without one.
    pub interface: u32,
    /// Packets for the guest, of each queue pair oldest first.
    pub packets: Vec<(u16, Box<[u8]>)>,
}

impl ParkedNic {
    /// A copy, with descriptors of its own.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let descriptors = self.descriptors.iter().map(OwnedFd::try_clone);
        Ok(Self {
            descriptors: descriptors.collect::<io::Result<_>>()?,
            interface: self.interface,
            packets: self.packets.clone(),
        })
    }

    /// A copy for the device of that link.
    pub(crate) fn copy_for(&self, link: &LinkConfig) -> Result<Self, LinkError> {
        self.try_clone().map_err(|source| LinkError::Kernel {
            name: link.to_string(),
            source,
        })
    }

    /// Copies of its descriptors, for the link to the interface of that name.
    pub(crate) fn copies(&self, name: &str) -> Result<Vec<OwnedFd>, LinkError> {
        let copies = self.descriptors.iter().map(OwnedFd::try_clone);
        copies
            .collect::<io::Result<_>>()
            .map_err(|source| LinkError::Kernel {
                name: name.to_owned(),
                source,
            })
    }

    /// Writes the packets.
    ///
    /// # Errors
    /// Those of `into`.
    pub fn write_packets(&self, into: &mut impl Write) -> io::Result<()> {
        for (pair, packet) in &self.packets {
            let bytes = u32::try_from(packet.len()).map_err(io::Error::other)?;
            into.write_all(&pair.to_le_bytes())?;
            into.write_all(&bytes.to_le_bytes())?;
            into.write_all(packet)?;
        }
        Ok(())
    }

    /// Reads packets that were written so.
    ///
    /// # Errors
    /// Those of `from`, and what is no such list.
    pub fn read_packets(from: &mut impl Read) -> io::Result<Vec<(u16, Box<[u8]>)>> {
        let mut packets = Vec::new();
        let mut head = [0; 6];
        while read_all(from, &mut head)? {
            let pair = u16::from_le_bytes([head[0], head[1]]);
            let bytes = u32::from_le_bytes([head[2], head[3], head[4], head[5]]) as usize;
            if !(HEADER_LEN..=HEADER_LEN + PACKET_LEN_MAX).contains(&bytes) {
                return Err(io::Error::other(format!("a packet of {bytes} bytes")));
            }
            let mut packet = vec![0; bytes].into_boxed_slice();
            from.read_exact(&mut packet)?;
            packets.push((pair, packet));
        }
        Ok(packets)
    }
}

/// Fills `into`; false if there is nothing more.
fn read_all(from: &mut impl Read, into: &mut [u8]) -> io::Result<bool> {
    let first = loop {
        match from.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if first == 0 {
        return Ok(false);
    }
    from.read_exact(&mut into[first..])?;
    Ok(true)
}

/// Packets of each pair, oldest first.
#[derive(Debug, Default)]
pub(crate) struct ByPair(Vec<VecDeque<HandedPacket>>);

impl ByPair {
    /// Sorts packets for a device of so many pairs; those of others are dropped.
    pub fn new(pairs: u16, packets: Vec<(u16, HandedPacket)>) -> Self {
        let mut sorted = Self((0..pairs).map(|_| VecDeque::new()).collect());
        for (pair, packet) in packets {
            if let Some(its) = sorted.0.get_mut(usize::from(pair)) {
                its.push_back(packet);
            }
        }
        sorted
    }

    /// Takes those of a pair.
    pub fn take(&mut self, pair: u16) -> VecDeque<HandedPacket> {
        let its = self.0.get_mut(usize::from(pair));
        its.map(std::mem::take).unwrap_or_default()
    }

    /// Adds some of a pair behind those that it has.
    pub fn add(&mut self, pair: u16, packets: impl IntoIterator<Item = HandedPacket>) {
        if let Some(its) = self.0.get_mut(usize::from(pair)) {
            its.extend(packets);
        }
    }

    /// All of them.
    pub fn take_all(&mut self) -> Vec<(u16, HandedPacket)> {
        let each = (0..).zip(&mut self.0);
        each.flat_map(|(pair, its)| its.drain(..).map(move |packet| (pair, packet)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    #[test]
    fn packets_come_back_from_their_bytes_in_order_and_nothing_else_does() {
        for seed in 0..200 {
            let mut random = SplitMix64::new(seed);
            let packets: Vec<(u16, HandedPacket)> = (0..random.below(20))
                .map(|_| {
                    let bytes = HEADER_LEN as u64 + random.below(3000);
                    let packet = (0..bytes)
                        .map(|_| u8::try_from(random.below(256)).unwrap())
                        .collect();
                    (u16::try_from(random.below(4)).unwrap(), packet)
                })
                .collect();
            let parked = ParkedNic {
                packets: packets.clone(),
                ..ParkedNic::default()
            };
            let mut bytes = Vec::new();
            parked.write_packets(&mut bytes).unwrap();
            let again = ParkedNic::read_packets(&mut bytes.as_slice()).unwrap();
            assert_eq!(again, packets);
            let mut sorted = ByPair::new(4, again);
            for pair in 0..4 {
                let wanted = packets.iter().filter(|(its, _)| *its == pair);
                let wanted: Vec<_> = wanted.map(|(_, packet)| packet.clone()).collect();
                assert_eq!(Vec::from(sorted.take(pair)), wanted);
            }
            if !bytes.is_empty() {
                let cut = usize::try_from(1 + random.below(bytes.len() as u64 - 1)).unwrap();
                let short = ParkedNic::read_packets(&mut &bytes[..cut]);
                assert!(short.is_err() || short.unwrap().len() < packets.len());
            }
        }
        for bytes in [0_u32, 11, u32::MAX] {
            let mut head = vec![0; 2];
            head.extend(bytes.to_le_bytes());
            assert!(ParkedNic::read_packets(&mut head.as_slice()).is_err());
        }
    }
}
