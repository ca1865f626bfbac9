// SPDX-License-Identifier: Apache-2.0
//! Segmentation of TCP, for a driver that does not take packets that are still to be segmented.
//!
//! A TAP is told what its driver takes, and the kernel does the rest. A packet socket, and another
//! device's driver, send what they like.
//!
//! ```text
//!   Ethernet │ IP │ TCP │ payload ………………………………………………      one packet, with a size of segments
//!   Ethernet │ IP' │ TCP' │ payload …                         each with its own length, number and
//!   Ethernet │ IP'' │ TCP'' │ …… payload …                    checksum
//! ```
//! Each segment's checksum is left to be computed, with the sum of its pseudo header in place, as in
//! any packet of a driver; [`NetHeader::for_receiver`] computes it if the next driver wants that.

use super::{
    header::{HEADER_BYTES, LEGACY_HEADER_BYTES, NetHeader},
    packet::{HEADER_LEN, PacketBuffer},
};
use std::collections::VecDeque;

/// Most segments of a packet: of the least segments that every host takes (RFC 9293, 3.7.1: 536 bytes) the longest
/// packet has 123. A driver that asks for shorter ones would have another guest's device do far more work.
const SEGMENTS_MAX: usize = 128;
/// Most bytes of IPv6 extension headers. They are repeated in each segment, so longer ones would make much of little.
const EXTENSIONS_MAX: usize = 256;
/// Bytes of a TCP header without options.
const TCP_BYTES: usize = 20;
/// Where its checksum is.
const TCP_CHECKSUM: u16 = 16;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;
const TCP: u8 = 6;
const NEEDS_CSUM: u8 = 1;

/// Segments that have not been received yet.
#[derive(Debug, Default)]
pub(crate) struct Segments(VecDeque<Box<[u8]>>);

/// What became of a packet that is to be segmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Its segments are there to be taken.
    Done,
    /// It is no TCP that can be segmented.
    Impossible,
}

impl Segments {
    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the next one; false if there is none.
    pub fn take(&mut self, into: &mut PacketBuffer) -> bool {
        let next = self.0.pop_front();
        if let Some(segment) = &next {
            into.set_whole(segment);
        }
        next.is_some()
    }

    /// Cuts a packet whose header was checked. All earlier segments were taken.
    pub fn cut(&mut self, packet: &PacketBuffer) -> Cut {
        match segments_of(packet.whole()) {
            Some(segments) => {
                self.0 = segments;
                Cut::Done
            }
            None => Cut::Impossible,
        }
    }
}

/// Where the headers of a packet are.
struct Places {
    ip: usize,
    version: Version,
    tcp: usize,
    payload: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    Ip4,
    Ip6,
}

fn places(header: NetHeader, packet: &[u8]) -> Option<Places> {
    let (kind, ip) = match packet.get(12..14)? {
        [0x81, 0] => (packet.get(16..18)?, 18),
        kind => (kind, 14),
    };
    let version = match kind {
        [8, 0] => Version::Ip4,
        [0x86, 0xdd] => Version::Ip6,
        _ => return None,
    };
    let tcp = usize::from(header.checksum_start());
    let ip_bytes = tcp.checked_sub(ip)?;
    let is_tcp = match version {
        Version::Ip4 => {
            let said = usize::from(packet.get(ip)? & 15) * 4;
            packet.get(ip + 9) == Some(&TCP) && said >= 20 && ip_bytes == said
        }
        // Extension headers, if there are any, are the same in each segment.
        Version::Ip6 => (40..=40 + EXTENSIONS_MAX).contains(&ip_bytes),
    };
    let tcp_bytes = usize::from(packet.get(tcp + 12)? >> 4) * 4;
    let payload = tcp + tcp_bytes;
    let is_sound = is_tcp && tcp_bytes >= TCP_BYTES && payload <= packet.len();
    is_sound.then_some(Places {
        ip,
        version,
        tcp,
        payload,
    })
}

fn segments_of(whole: &[u8]) -> Option<VecDeque<Box<[u8]>>> {
    let (fields, packet) = whole.split_at_checked(HEADER_LEN)?;
    let mut parsed = [0; LEGACY_HEADER_BYTES as usize];
    parsed.copy_from_slice(&fields[..LEGACY_HEADER_BYTES as usize]);
    let header = NetHeader::parse(parsed);
    let at = places(header, packet)?;
    let (headers, payload) = packet.split_at(at.payload);
    let segment_bytes = usize::from(header.gso_bytes()).max(1);
    let count = payload.len().div_ceil(segment_bytes);
    if count == 0 || count > SEGMENTS_MAX {
        return None;
    }
    let cut = payload.chunks(segment_bytes).enumerate();
    let segments = cut.map(|(number, part)| {
        let last = number + 1 == count;
        let mut segment = Vec::with_capacity(HEADER_LEN + headers.len() + part.len());
        segment.extend([0; HEADER_BYTES as usize]);
        segment.extend(headers);
        segment.extend(part);
        let (fields, packet) = segment.split_at_mut(HEADER_LEN);
        fields[0] = NEEDS_CSUM;
        fields[6..8].copy_from_slice(&header.checksum_start().to_le_bytes());
        fields[8..10].copy_from_slice(&TCP_CHECKSUM.to_le_bytes());
        set_ip(packet, &at, number);
        set_tcp(packet, &at, number, (number * segment_bytes, last));
        segment.into_boxed_slice()
    });
    Some(segments.collect())
}

fn low(number: usize) -> u16 {
    u16::try_from(number & 0xffff).unwrap_or(0)
}

/// Its length, and of IPv4 its number and the header's own checksum.
fn set_ip(packet: &mut [u8], at: &Places, number: usize) {
    let bytes = packet.len() - at.ip;
    let ip = &mut packet[at.ip..];
    match at.version {
        Version::Ip4 => {
            ip[2..4].copy_from_slice(&low(bytes).to_be_bytes());
            let first = u16::from_be_bytes([ip[4], ip[5]]);
            let own = first.wrapping_add(low(number));
            ip[4..6].copy_from_slice(&own.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = !folded(sum_of(&ip[..at.tcp - at.ip]));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        Version::Ip6 => ip[4..6].copy_from_slice(&low(bytes - 40).to_be_bytes()),
    }
}

/// Its sequence number, its flags, and the sum of its pseudo header.
fn set_tcp(packet: &mut [u8], at: &Places, number: usize, (offset, last): (usize, bool)) {
    let bytes = packet.len() - at.tcp;
    let addresses = match at.version {
        Version::Ip4 => at.ip + 12..at.ip + 20,
        Version::Ip6 => at.ip + 8..at.ip + 40,
    };
    let pseudo = sum_of(&packet[addresses]) + u64::from(TCP) + bytes as u64;
    let tcp = &mut packet[at.tcp..];
    let first = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
    let offset = u32::try_from(offset).unwrap_or(u32::MAX);
    tcp[4..8].copy_from_slice(&first.wrapping_add(offset).to_be_bytes());
    if !last {
        tcp[13] &= !(FIN | PSH);
    }
    if number > 0 {
        tcp[13] &= !CWR;
    }
    tcp[16..18].copy_from_slice(&folded(pseudo).to_be_bytes());
}

fn sum_of(bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks(2);
    let word = |pair: &[u8]| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
    pairs.map(|pair| u64::from(word(pair))).sum()
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{header::Undone, link::Offloads};
    use pagetide_random::SplitMix64;

    /// A packet of TCP with that payload, to be cut into segments of so many bytes.
    fn packet(random: &mut SplitMix64, version: Version, payload: &[u8], gso: u16) -> PacketBuffer {
        let mut bytes = vec![2; 12];
        if random.below(2) == 0 {
            bytes.extend([0x81, 0, 0, 5]);
        }
        let ip = match version {
            Version::Ip4 => {
                bytes.extend([8, 0]);
                let options = 4 * usize::try_from(random.below(3)).unwrap();
                let mut ip = vec![0; 20 + options];
                ip[0] = 0x40 | u8::try_from(ip.len() / 4).unwrap();
                ip[4..6].copy_from_slice(&[0xff, 0xfe]);
                (ip[8], ip[9]) = (64, TCP);
                ip[12..20].copy_from_slice(&[10, 0, 0, 1, 192, 168, 255, 254]);
                ip
            }
            Version::Ip6 => {
                bytes.extend([0x86, 0xdd]);
                let mut ip = vec![0x60; 40];
                (ip[6], ip[7]) = (TCP, 64);
                ip
            }
        };
        bytes.extend(&ip);
        let start = u16::try_from(bytes.len()).unwrap();
        let words = 5 + u8::try_from(random.below(6)).unwrap();
        let mut tcp = vec![7; usize::from(words) * 4];
        tcp[4..8].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
        (tcp[12], tcp[13]) = (words << 4, FIN | PSH | CWR | 0x10);
        bytes.extend(&tcp);
        let headers = u16::try_from(bytes.len()).unwrap();
        bytes.extend(payload);
        let kind = match version {
            Version::Ip4 => 1,
            Version::Ip6 => 4,
        };
        let mut whole = vec![NEEDS_CSUM, kind];
        for field in [headers, gso, start, TCP_CHECKSUM, 0] {
            whole.extend(field.to_le_bytes());
        }
        let fields = NetHeader::parse(whole[..10].try_into().unwrap());
        assert_eq!(fields.check(bytes.len() as u64), Ok(()));
        whole.extend(bytes);
        let mut buffer = PacketBuffer::new();
        buffer.set_whole(&whole);
        buffer
    }

    #[test]
    fn segments_have_the_payload_in_order_and_each_is_right_by_itself() {
        for seed in 0..400 {
            let mut random = SplitMix64::new(seed);
            let version = match random.below(2) {
                0 => Version::Ip4,
                _ => Version::Ip6,
            };
            let bytes = 1 + usize::try_from(random.below(60_000)).unwrap();
            let payload: Vec<u8> = (0..bytes)
                .map(|_| u8::try_from(random.below(256)).unwrap())
                .collect();
            let gso = 536 + u16::try_from(random.below(9000)).unwrap();
            let long = packet(&mut random, version, &payload, gso);
            let mut segments = Segments::default();
            assert_eq!(segments.cut(&long), Cut::Done);
            let (mut joined, mut number) = (Vec::<u8>::new(), 0_usize);
            let mut buffer = PacketBuffer::new();
            while segments.take(&mut buffer) {
                // A driver that takes nothing undone gets it whole.
                let taken = NetHeader::for_receiver(&mut buffer, Offloads::default());
                assert_eq!(taken, Undone::Accepted);
                assert_eq!(buffer.whole()[..HEADER_LEN], [0; HEADER_LEN]);
                let packet = buffer.packet();
                let header = NetHeader::parse(long.whole()[..10].try_into().unwrap());
                let at = places(header, packet).unwrap();
                let ip = &packet[at.ip..];
                match version {
                    Version::Ip4 => {
                        assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len());
                        let id = 0xfffe_u16.wrapping_add(low(number));
                        assert_eq!(u16::from_be_bytes([ip[4], ip[5]]), id);
                        assert_eq!(folded(sum_of(&ip[..at.tcp - at.ip])), 0xffff);
                    }
                    Version::Ip6 => {
                        let told = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
                        assert_eq!(told, ip.len() - 40);
                    }
                }
                let tcp = &packet[at.tcp..];
                let addresses = match version {
                    Version::Ip4 => &ip[12..20],
                    Version::Ip6 => &ip[8..40],
                };
                let pseudo = sum_of(addresses) + u64::from(TCP) + tcp.len() as u64;
                assert_eq!(folded(pseudo + sum_of(tcp)), 0xffff, "seed {seed}");
                let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
                let offset = u32::try_from(joined.len()).unwrap();
                assert_eq!(sequence, 0xffff_ff00_u32.wrapping_add(offset));
                joined.extend(&packet[at.payload..]);
                let is_last = joined.len() == payload.len();
                assert_eq!(tcp[13] & (FIN | PSH) != 0, is_last);
                assert_eq!(tcp[13] & CWR != 0, number == 0);
                assert!(packet.len() - at.payload <= usize::from(gso));
                number += 1;
            }
            assert!(joined == payload, "seed {seed}");
            assert_eq!(number, bytes.div_ceil(usize::from(gso)));
        }
    }

    #[test]
    fn nothing_is_cut_that_is_no_tcp_or_into_more_segments_than_is_fair() {
        let mut random = SplitMix64::new(1);
        let mut segments = Segments::default();
        let long = packet(&mut random, Version::Ip4, &[1; 60_000], 100);
        assert_eq!(segments.cut(&long), Cut::Impossible);
        for _ in 0..20_000 {
            let mut lies = packet(&mut random, Version::Ip4, &[1; 3000], 1000);
            for _ in 0..1 + random.below(4) {
                let at = usize::try_from(random.below(60)).unwrap();
                lies.whole_mut()[at] = u8::try_from(random.below(256)).unwrap();
            }
            let fields = NetHeader::parse(lies.whole()[..10].try_into().unwrap());
            if fields.check(lies.packet_bytes() as u64).is_ok() {
                // Whatever it is, it does no harm, and nothing is invented.
                let cut = segments.cut(&lies);
                let mut buffer = PacketBuffer::new();
                while segments.take(&mut buffer) {
                    assert_eq!(cut, Cut::Done);
                    assert!(buffer.packet_bytes() <= lies.packet_bytes());
                }
            }
        }
    }
}
