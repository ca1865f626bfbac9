// SPDX-License-Identifier: Apache-2.0
//! Which packets belong to one flow.
//!
//! A flow is known by its addresses, its protocol and its ports, the same in both directions. Its
//! number is a hash of these, so two flows may have one number: then they share a queue, and nothing
//! else. A packet that is neither IPv4 nor IPv6 belongs to the flow of its Ethernet addresses.

use super::packet::Outgoing;

/// Numbers of flows; a power of two.
pub(crate) const FLOWS: usize = 1024;
/// Bytes of a packet that are looked at: Ethernet, a VLAN tag, IPv6, ports.
const LOOK_BYTES: usize = 14 + 4 + 40 + 4;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The flow of a packet that is sent.
pub(crate) fn flow_of(packet: &Outgoing<'_>) -> usize {
    let mut start = [0; LOOK_BYTES];
    let mut len = 0;
    for part in packet.parts() {
        if len == LOOK_BYTES {
            break;
        }
        len += part.copy_to(&mut start[len..]);
    }
    flow_of_bytes(&start[..len])
}

/// The flow of a packet that begins so.
pub(crate) fn flow_of_bytes(packet: &[u8]) -> usize {
    let mixed = key_of(packet).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    usize::try_from(mixed >> 32).unwrap_or(0) & (FLOWS - 1)
}

/// What packets of a flow have in common, the same in both directions.
fn key_of(packet: &[u8]) -> u64 {
    let (kind, at) = match packet.get(12..14) {
        Some([0x81, 0]) => (packet.get(16..18), 18),
        kind => (kind, 14),
    };
    let ip = packet.get(at..).unwrap_or_default();
    let found = match kind {
        Some([8, 0]) => of_ip4(ip),
        Some([0x86, 0xdd]) => of_ip6(ip),
        _ => None,
    };
    found.unwrap_or_else(|| sum(packet.get(..6)) ^ sum(packet.get(6..12)))
}

fn of_ip4(ip: &[u8]) -> Option<u64> {
    let header = usize::from(ip.first()? & 15) * 4;
    let protocol = *ip.get(9)?;
    let addresses = sum(ip.get(12..16)) ^ sum(ip.get(16..20));
    // Later fragments have no ports: all fragments of a flow are to have the same number.
    let is_fragment = (ip.get(6)? & 0x3f) | ip.get(7)? != 0;
    let ports = match is_fragment {
        true => 0,
        false => ports(protocol, ip.get(header..)),
    };
    Some(addresses ^ ports ^ u64::from(protocol) << 56)
}

fn of_ip6(ip: &[u8]) -> Option<u64> {
    let protocol = *ip.get(6)?;
    let addresses = sum(ip.get(8..24)) ^ sum(ip.get(24..40));
    Some(addresses ^ ports(protocol, ip.get(40..)) ^ u64::from(protocol) << 56)
}

/// The ports of TCP and UDP, in one number whichever comes first.
fn ports(protocol: u8, transport: Option<&[u8]>) -> u64 {
    match (protocol, transport) {
        (TCP | UDP, Some(bytes)) => (sum(bytes.get(..2)) ^ sum(bytes.get(2..4))).rotate_left(32),
        _ => 0,
    }
}

/// A number for some bytes; addresses of two hosts seldom have the same.
fn sum(bytes: Option<&[u8]>) -> u64 {
    let bytes = bytes.unwrap_or_default();
    bytes.iter().fold(0_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::HashSet;

    fn udp4(from: (u8, u16), to: (u8, u16)) -> Vec<u8> {
        let mut packet = vec![0; 42];
        packet[12] = 8;
        packet[14] = 0x45;
        packet[23] = UDP;
        packet[26..30].copy_from_slice(&[10, 0, 0, from.0]);
        packet[30..34].copy_from_slice(&[10, 0, 0, to.0]);
        packet[34..36].copy_from_slice(&from.1.to_be_bytes());
        packet[36..38].copy_from_slice(&to.1.to_be_bytes());
        packet
    }

    #[test]
    fn both_directions_are_one_flow_and_flows_spread() {
        let mut numbers = HashSet::new();
        for port in 0..500 {
            let there = udp4((1, 40_000 + port), (2, 80));
            let back = udp4((2, 80), (1, 40_000 + port));
            assert_eq!(flow_of_bytes(&there), flow_of_bytes(&back));
            numbers.insert(flow_of_bytes(&there));
        }
        // Of 1024 numbers, 500 flows drawn by chance would have about 395.
        assert!(numbers.len() > 300, "{}", numbers.len());
    }

    #[test]
    fn fragments_are_in_one_flow_and_tags_are_passed_over() {
        let whole = udp4((1, 1000), (2, 80));
        let mut first = whole.clone();
        first[20] = 0x20;
        let mut second = udp4((1, 7), (2, 9));
        second[21] = 100;
        assert_eq!(flow_of_bytes(&first), flow_of_bytes(&second));
        let mut tagged = whole[..12].to_vec();
        tagged.extend([0x81, 0, 0, 5]);
        tagged.extend(&whole[12..]);
        assert_eq!(flow_of_bytes(&tagged), flow_of_bytes(&whole));
    }

    #[test]
    fn any_bytes_have_a_flow() {
        let mut random = SplitMix64::new(7);
        for _ in 0..20_000 {
            let mut packet = vec![0; usize::try_from(random.below(70)).unwrap()];
            for byte in &mut packet {
                *byte = u8::try_from(random.below(256)).unwrap();
            }
            if packet.len() > 14 && random.below(2) == 0 {
                let ether_type = [[8, 0], [0x86, 0xdd]][usize::from(packet[0] & 1)];
                packet[12..14].copy_from_slice(&ether_type);
            }
            assert!(flow_of_bytes(&packet) < FLOWS);
        }
    }
}
