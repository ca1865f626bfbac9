// SPDX-License-Identifier: Apache-2.0
//! Packets: how a message of any length passes through a socket that keeps packets apart.
//!
//! ```text
//!    0        4       5        6             8                12           16
//!   ┌────────┬───────┬────────┬─────────────┬────────────────┬────────────┬──────────────
//!   │ "PTHO" │ frame │ more   │ descriptors │ bytes of body  │ reserved   │ part of the
//!   │        │ (1)   │ (0, 1) │ (u16)       │ (u32)          │ (0)        │ message …
//!   └────────┴───────┴────────┴─────────────┴────────────────┴────────────┴──────────────
//! ```
//! Numbers are little-endian. A message is the bodies of its packets, and the descriptors that came with
//! them, in order; the last packet of a message has `more` 0. Several packets are needed because the kernel
//! passes at most 253 descriptors at a time, and a packet must fit into the socket's buffer.

use crate::HandoverError;

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 16;
const MAGIC: [u8; 4] = *b"PTHO";
const FRAME: u8 = 1;
/// Bytes of a message in one packet: a few of them fit into a socket's buffer of 208 KiB, the default.
pub const PACKET_BYTES_MAX: usize = 32 << 10;
/// Descriptors in one packet; the kernel's limit is 253.
pub const PACKET_DESCRIPTORS_MAX: usize = 64;
/// Bytes of a message: a thousand devices with eight rings each need less than 2 MiB.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Descriptors of a message: half of what the service may have open.
pub const DESCRIPTORS_MAX: usize = 32 << 10;

/// Whether more packets of a message follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Follows {
    More,
    Nothing,
}

fn wrong<T>(what: &'static str) -> Result<T, HandoverError> {
    Err(HandoverError::Packet { what })
}

/// A packet of `body` with so many descriptors.
pub(crate) fn encode(body: &[u8], descriptors: usize, follows: Follows) -> Vec<u8> {
    debug_assert!(body.len() <= PACKET_BYTES_MAX && descriptors <= PACKET_DESCRIPTORS_MAX);
    let count = u16::try_from(descriptors).unwrap_or(u16::MAX);
    let bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut packet = Vec::with_capacity(HEADER_BYTES + body.len());
    packet.extend(MAGIC);
    packet.push(FRAME);
    packet.push(u8::from(follows == Follows::More));
    packet.extend(count.to_le_bytes());
    packet.extend(bytes.to_le_bytes());
    packet.extend([0; 4]);
    packet.extend(body);
    packet
}

/// A message of which some packets have come.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    body: Vec<u8>,
    descriptors: usize,
}

impl Assembly {
    /// Takes the next packet, with which `descriptors` came; `None` while more are to come.
    ///
    /// # Errors
    /// It is not a packet, or the message is too long.
    pub(crate) fn take(
        &mut self,
        packet: &[u8],
        descriptors: usize,
    ) -> Result<Option<Vec<u8>>, HandoverError> {
        let Some((header, body)) = packet.split_first_chunk::<HEADER_BYTES>() else {
            return wrong("it is shorter than a header");
        };
        if header[..4] != MAGIC {
            return wrong("it does not begin with PTHO");
        }
        if header[4] != FRAME {
            return wrong("its frame is of another version");
        }
        let follows = match header[5] {
            0 => Follows::Nothing,
            1 => Follows::More,
            _ => return wrong("its continuation flag is neither 0 nor 1"),
        };
        let count = u16::from_le_bytes([header[6], header[7]]);
        let bytes = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if usize::from(count) != descriptors {
            return wrong("not all of its descriptors came with it");
        }
        if u32::try_from(body.len()) != Ok(bytes) {
            return wrong("its length is not that of its header");
        }
        if body.is_empty() && count == 0 && follows == Follows::More {
            return wrong("it carries nothing");
        }
        self.body.extend_from_slice(body);
        self.descriptors += descriptors;
        check_size(self.body.len(), self.descriptors)?;
        Ok(match follows {
            Follows::More => None,
            Follows::Nothing => Some(std::mem::take(&mut self.body)),
        })
    }
}

/// Refuses a message of this size if it is too large.
pub(crate) fn check_size(bytes: usize, descriptors: usize) -> Result<(), HandoverError> {
    let too_much = |what, found: usize, most: usize| HandoverError::TooMuch {
        what,
        found: found as u64,
        most: most as u64,
    };
    if bytes > MESSAGE_BYTES_MAX {
        return Err(too_much("bytes", bytes, MESSAGE_BYTES_MAX));
    }
    if descriptors > DESCRIPTORS_MAX {
        return Err(too_much("descriptors", descriptors, DESCRIPTORS_MAX));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    #[test]
    fn message_in_any_number_of_packets_is_assembled_as_it_was() {
        let mut random = SplitMix64::new(1);
        for _ in 0..200 {
            let bytes: Vec<u8> = (0..random.below(5000))
                .map(|_| random.next_u64().to_le_bytes()[0])
                .collect();
            let mut assembly = Assembly::default();
            let mut left = &bytes[..];
            loop {
                let most = u64::try_from(left.len()).unwrap();
                let cut = usize::try_from(random.below(most + 1)).unwrap();
                let follows = if cut == left.len() {
                    Follows::Nothing
                } else {
                    Follows::More
                };
                let fds = usize::from(cut == 0);
                let whole = assembly
                    .take(&encode(&left[..cut], fds, follows), fds)
                    .unwrap();
                left = &left[cut..];
                if follows == Follows::Nothing {
                    assert_eq!(whole, Some(bytes));
                    break;
                }
                assert_eq!(whole, None);
            }
        }
    }

    #[test]
    fn damaged_packet_is_a_packet_still_or_an_error_and_never_a_panic() {
        let mut random = SplitMix64::new(2);
        let sound = encode(br#"{"kind":"serving"}"#, 3, Follows::Nothing);
        let mut refused = 0;
        for _ in 0..20_000 {
            let mut packet = sound.clone();
            for _ in 0..=random.below(3) {
                let at = usize::try_from(random.below(packet.len() as u64)).unwrap();
                packet[at] = random.next_u64().to_le_bytes()[0];
            }
            if random.below(4) == 0 {
                packet.truncate(usize::try_from(random.below(40)).unwrap());
            }
            refused += u32::from(Assembly::default().take(&packet, 3).is_err());
        }
        assert!(refused > 10_000, "{refused}");
    }

    #[test]
    fn each_field_of_the_header_is_checked() {
        let sound = encode(b"{}", 2, Follows::Nothing);
        assert!(Assembly::default().take(&sound, 2).is_ok());
        assert!(
            Assembly::default().take(&sound, 1).is_err(),
            "a descriptor was lost"
        );
        assert!(Assembly::default().take(&sound[..15], 2).is_err());
        assert!(Assembly::default().take(&sound[..17], 2).is_err());
        for (at, value) in [(0, b'X'), (4, 2), (5, 2), (6, 3), (8, 9)] {
            let mut packet = sound.clone();
            packet[at] = value;
            assert!(Assembly::default().take(&packet, 2).is_err(), "byte {at}");
        }
        let nothing = encode(b"", 0, Follows::More);
        assert!(Assembly::default().take(&nothing, 0).is_err());
    }

    #[test]
    fn endless_message_is_refused_at_the_limit() {
        let part = encode(&[b' '; PACKET_BYTES_MAX], 0, Follows::More);
        let mut assembly = Assembly::default();
        let taken = (0..).find(|_| assembly.take(&part, 0).is_err());
        assert_eq!(taken, Some(MESSAGE_BYTES_MAX / PACKET_BYTES_MAX));
        let part = encode(b"", PACKET_DESCRIPTORS_MAX, Follows::More);
        let mut assembly = Assembly::default();
        let taken = (0..).find(|_| assembly.take(&part, PACKET_DESCRIPTORS_MAX).is_err());
        assert_eq!(taken, Some(DESCRIPTORS_MAX / PACKET_DESCRIPTORS_MAX));
    }
}
