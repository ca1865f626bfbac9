// SPDX-License-Identifier: Apache-2.0
//! The header before each packet (`struct virtio_net_hdr`, virtio 1.2, 5.1.6), as a driver fills it
//! for a packet to be sent.
//!
//! A driver may leave checksums and segmentation to the device. Whoever does them later (a TAP, a
//! peer's driver) trusts offsets and sizes of this header, so all of it is checked here, against the
//! length of the packet.

use super::{link::state::Offloads, packet::PacketBuffer};

/// Bytes of a header with `num_buffers`, which every driver of virtio 1.0 or later uses.
pub(crate) const HEADER_BYTES: u32 = 12;
/// Bytes of one without: a legacy driver that has not negotiated mergeable buffers.
pub(crate) const LEGACY_HEADER_BYTES: u32 = 10;
/// Bytes of an Ethernet header: no packet is shorter.
const ETHERNET_BYTES: u64 = 14;
/// Bytes of a VLAN tag.
const VLAN_BYTES: u64 = 4;
/// Longest packet, segmented later or not: the most that an IP header can describe. A link may
/// take less.
pub(crate) const PACKET_BYTES_MAX: u64 = 65_535 + ETHERNET_BYTES + VLAN_BYTES;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`
const FLAG_NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
/// `VIRTIO_NET_HDR_GSO_ECN`
const GSO_ECN: u8 = 0x80;

/// Why a packet is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unsendable {
    #[error("a packet of {0} bytes has no Ethernet header")]
    Runt(u64),
    #[error("a packet has {0} bytes; at most {PACKET_BYTES_MAX} are sent")]
    TooLong(u64),
    #[error("a packet is to be segmented in way {0}, which was not offered")]
    Segmentation(u8),
    #[error("a packet is to be segmented, without a checksum or into segments of no bytes")]
    SegmentsOfNothing,
    #[error("the headers of a packet have {headers} of its {bytes} bytes")]
    Headers { headers: u16, bytes: u64 },
    #[error("the checksum of a packet of {bytes} bytes is to be put at {at}")]
    Checksum { at: u32, bytes: u64 },
}

/// See the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NetHeader {
    flags: u8,
    gso_kind: u8,
    header_bytes: u16,
    gso_bytes: u16,
    checksum_start: u16,
    checksum_offset: u16,
}

impl NetHeader {
    /// Reads its fields. (`num_buffers` follows in a longer header; a driver leaves it 0.)
    pub fn parse(bytes: [u8; LEGACY_HEADER_BYTES as usize]) -> Self {
        let [flags, gso_kind, h0, h1, g0, g1, s0, s1, o0, o1] = bytes;
        Self {
            flags,
            gso_kind,
            header_bytes: u16::from_le_bytes([h0, h1]),
            gso_bytes: u16::from_le_bytes([g0, g1]),
            checksum_start: u16::from_le_bytes([s0, s1]),
            checksum_offset: u16::from_le_bytes([o0, o1]),
        }
    }

    /// Bytes of a segment, if it is to be segmented.
    pub fn gso_bytes(self) -> u16 {
        self.gso_bytes
    }

    /// Where its checksum begins, if that is to be computed: at the header of its transport.
    pub fn checksum_start(self) -> u16 {
        self.checksum_start
    }

    /// Checks it against a packet of `bytes`.
    ///
    /// # Errors
    /// [`Unsendable`].
    pub fn check(self, bytes: u64) -> Result<(), Unsendable> {
        if bytes < ETHERNET_BYTES {
            return Err(Unsendable::Runt(bytes));
        }
        let needs_checksum = self.flags & FLAG_NEEDS_CSUM != 0;
        match self.gso_kind & !GSO_ECN {
            GSO_NONE if self.gso_kind == GSO_NONE => {}
            GSO_TCPV4 | GSO_TCPV6 => {}
            _ => return Err(Unsendable::Segmentation(self.gso_kind)),
        }
        if bytes > PACKET_BYTES_MAX {
            return Err(Unsendable::TooLong(bytes));
        }
        if self.gso_kind != GSO_NONE {
            // 5.1.6.2: both must be set with it.
            if !needs_checksum || self.gso_bytes == 0 {
                return Err(Unsendable::SegmentsOfNothing);
            }
            let headers = self.header_bytes;
            if u64::from(headers) > bytes {
                return Err(Unsendable::Headers { headers, bytes });
            }
        }
        if needs_checksum {
            let at = u32::from(self.checksum_start) + u32::from(self.checksum_offset);
            if u64::from(at) + 2 > bytes {
                return Err(Unsendable::Checksum { at, bytes });
            }
        }
        Ok(())
    }
}

/// Whether a driver takes a packet as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undone {
    /// Yes, perhaps with its checksum computed now.
    Accepted,
    /// No: it would have to be segmented.
    Refused,
}

impl NetHeader {
    /// Makes a packet that another driver has sent ready for one that takes only `offloads` undone.
    /// The header was checked against its packet. Segmentation is not done here: see
    /// [`Segments`](super::segment::Segments).
    pub fn for_receiver(packet: &mut PacketBuffer, offloads: Offloads) -> Undone {
        let mut header = [0; LEGACY_HEADER_BYTES as usize];
        header.copy_from_slice(&packet.whole()[..LEGACY_HEADER_BYTES as usize]);
        let header = Self::parse(header);
        let is_taken = match header.gso_kind & !GSO_ECN {
            GSO_NONE => true,
            GSO_TCPV4 => offloads.has_tso4(),
            GSO_TCPV6 => offloads.has_tso6(),
            _ => false,
        };
        let has_ecn = header.gso_kind & GSO_ECN != 0;
        if !is_taken || (has_ecn && !offloads.has_ecn()) {
            return Undone::Refused;
        }
        if header.flags & FLAG_NEEDS_CSUM != 0 && !offloads.has_checksum() {
            let bytes = packet.packet_bytes();
            let data = &mut packet.room_mut()[..bytes];
            fill_checksum(data, header.checksum_start, header.checksum_offset);
            packet.header_mut().fill(0);
        }
        Undone::Accepted
    }
}

/// Computes the checksum of a packet from byte `start` on and puts it `offset` bytes behind that.
/// What is there already is the sum of the pseudo header (virtio 1.2, 5.1.6.2).
fn fill_checksum(packet: &mut [u8], start: u16, offset: u16) {
    let start = usize::from(start);
    let Some(summed) = packet.get(start..) else {
        return;
    };
    let mut sum = 0_u64;
    for pair in summed.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u64::from(u16::from_be_bytes([pair[0], low]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let folded = u16::try_from(sum).unwrap_or(u16::MAX);
    // A sum of 0 means 'no checksum' to UDP; its other form is as good for TCP.
    let checksum = match !folded {
        0 => u16::MAX,
        other => other,
    };
    let at = start + usize::from(offset);
    if let Some(place) = packet.get_mut(at..at + 2) {
        place.copy_from_slice(&checksum.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    const PLAIN: NetHeader = NetHeader {
        flags: 0,
        gso_kind: GSO_NONE,
        header_bytes: 0,
        gso_bytes: 0,
        checksum_start: 0,
        checksum_offset: 0,
    };
    /// As Linux sends TCP over IPv4.
    const TCP: NetHeader = NetHeader {
        flags: FLAG_NEEDS_CSUM,
        gso_kind: GSO_TCPV4,
        header_bytes: 54,
        gso_bytes: 1448,
        checksum_start: 34,
        checksum_offset: 16,
    };

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let bytes = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0];
        assert_eq!(NetHeader::parse(bytes), TCP);
    }

    #[test]
    fn packets_of_all_lengths_that_are_offered_are_sent() {
        for bytes in [14, 60, 1514, 9018, PACKET_BYTES_MAX] {
            assert_eq!(PLAIN.check(bytes), Ok(()));
        }
        for bytes in [54, 1514, 65_549, PACKET_BYTES_MAX] {
            assert_eq!(TCP.check(bytes), Ok(()));
            let ecn = NetHeader {
                gso_kind: GSO_TCPV6 | GSO_ECN,
                ..TCP
            };
            assert_eq!(ecn.check(bytes), Ok(()));
        }
    }

    #[test]
    fn lies_are_told_apart() {
        let plain = |bytes| PLAIN.check(bytes);
        assert_eq!(plain(13), Err(Unsendable::Runt(13)));
        assert_eq!(plain(0), Err(Unsendable::Runt(0)));
        let too_long = PACKET_BYTES_MAX + 1;
        assert_eq!(plain(too_long), Err(Unsendable::TooLong(too_long)));
        assert_eq!(TCP.check(too_long), Err(Unsendable::TooLong(too_long)));
        // UDP fragmentation, which is not offered; ECN of nothing; a number that means nothing.
        for gso_kind in [3, 5, GSO_ECN, 0x7f] {
            let header = NetHeader { gso_kind, ..TCP };
            let refused = Err(Unsendable::Segmentation(gso_kind));
            assert_eq!(header.check(1514), refused);
        }
        for header in [
            NetHeader { flags: 0, ..TCP },
            NetHeader {
                gso_bytes: 0,
                ..TCP
            },
        ] {
            assert_eq!(header.check(1514), Err(Unsendable::SegmentsOfNothing));
        }
        let header = NetHeader {
            header_bytes: 1515,
            ..TCP
        };
        assert!(matches!(
            header.check(1514),
            Err(Unsendable::Headers { .. })
        ));
        let at = |checksum_start, checksum_offset| NetHeader {
            flags: FLAG_NEEDS_CSUM,
            checksum_start,
            checksum_offset,
            ..PLAIN
        };
        assert_eq!(at(50, 8).check(60), Ok(()));
        for header in [at(50, 9), at(u16::MAX, u16::MAX), at(0, 59)] {
            let refused = header.check(60);
            assert!(matches!(refused, Err(Unsendable::Checksum { .. })));
        }
    }

    #[test]
    fn whatever_is_accepted_names_only_bytes_of_the_packet() {
        let mut random = SplitMix64::new(19);
        for _ in 0..100_000 {
            let mut bytes = [0; LEGACY_HEADER_BYTES as usize];
            for byte in &mut bytes {
                // Small numbers often, so that some headers are accepted.
                *byte = u8::try_from(random.below(256)).unwrap() >> random.below(8);
            }
            let header = NetHeader::parse(bytes);
            let packet = random.below(70_000);
            if header.check(packet).is_ok() {
                assert!((14..=PACKET_BYTES_MAX).contains(&packet));
                if header.flags & FLAG_NEEDS_CSUM != 0 {
                    let end =
                        u64::from(header.checksum_start) + u64::from(header.checksum_offset) + 2;
                    assert!(end <= packet);
                }
            }
        }
    }
}
