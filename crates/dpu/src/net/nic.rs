// SPDX-License-Identifier: Apache-2.0
//! The device itself: what it offers, and what is done with a packet.

use super::header::{HEADER_BYTES, LEGACY_HEADER_BYTES, NetHeader};
use crate::{
    chain::{AnswerPlace, Layout},
    kind::work::{Acted, Chain, Chains, Outcome, QueueRole},
};

/// Most queue pairs of one device.
pub const PAIRS_MAX: u16 = 32;

/// `VIRTIO_NET_F_CSUM`: the driver may leave checksums to the device.
const F_CSUM: u64 = 1 << 0;
/// `VIRTIO_NET_F_HOST_TSO4`: the driver may leave segmentation of TCP to the device.
const F_HOST_TSO4: u64 = 1 << 11;
/// `VIRTIO_NET_F_HOST_TSO6`
const F_HOST_TSO6: u64 = 1 << 12;
/// `VIRTIO_NET_F_HOST_ECN`
const F_HOST_ECN: u64 = 1 << 13;
/// `VIRTIO_NET_F_MRG_RXBUF`
const F_MRG_RXBUF: u64 = 1 << 15;
/// `VIRTIO_NET_F_MQ`
const F_MQ: u64 = 1 << 22;
/// `VIRTIO_F_VERSION_1`
const F_VERSION_1: u64 = 1 << 32;

/// The features of a network device, besides those of rings.
pub(crate) const FEATURES: u64 =
    F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN | F_MRG_RXBUF | F_MQ;

/// The network interface of a device.
#[derive(Debug, Clone)]
pub struct NicReport {
    /// Queue pairs offered.
    pub pairs: u16,
}

/// The pair that a queue belongs to.
pub(crate) fn pair_of(queue: u16) -> u16 {
    queue / 2
}

/// What the chains of a queue are made of, for a driver that has accepted `features`.
pub(crate) fn role_of(queue: u16, features: u64) -> QueueRole {
    QueueRole {
        layout: Layout {
            header_bytes: match features & (F_VERSION_1 | F_MRG_RXBUF) {
                0 => LEGACY_HEADER_BYTES,
                _ => HEADER_BYTES,
            },
            answer: AnswerPlace::Nowhere,
        },
        chains: match queue.is_multiple_of(2) {
            true => Chains::Posted,
            false => Chains::Requests,
        },
        vector: pair_of(queue),
    }
}

/// Whether a packet may be sent. Its header is leased.
pub(crate) fn check(chain: Chain<'_>) -> Outcome {
    let mut bytes = [0; HEADER_BYTES as usize];
    if chain.frame.read_header(chain.memory, &mut bytes).is_err()
        || !chain.buffers.writable.is_empty()
    {
        return Outcome::Failed;
    }
    let [fields @ .., _, _] = bytes;
    match NetHeader::parse(fields).check(packet_bytes(chain)) {
        Ok(()) => Outcome::Done,
        Err(error) => {
            tracing::debug!(%error, "a packet is not sent");
            Outcome::Failed
        }
    }
}

/// Sends a packet to the link null.
pub(crate) fn send(chain: Chain<'_>) -> Acted {
    Acted {
        outcome: Outcome::Done,
        from_guest_bytes: u32::try_from(packet_bytes(chain)).unwrap_or(u32::MAX),
    }
}

fn packet_bytes(chain: Chain<'_>) -> u64 {
    let lengths = chain.buffers.readable.iter().map(|s| u64::from(s.len));
    lengths.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_a_pair_share_its_vector_and_only_one_of_them_sends() {
        for queue in 0..2 * PAIRS_MAX {
            let role = role_of(queue, F_VERSION_1);
            assert_eq!(role.vector, queue / 2);
            assert_eq!(role.chains == Chains::Requests, queue % 2 == 1);
        }
    }

    #[test]
    fn header_is_short_only_for_a_legacy_driver_without_mergeable_buffers() {
        let bytes = |features| role_of(1, features).layout.header_bytes;
        assert_eq!(bytes(F_CSUM), 10);
        assert_eq!(bytes(F_MRG_RXBUF), 12);
        assert_eq!(bytes(F_VERSION_1), 12);
    }
}
