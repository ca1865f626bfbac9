// SPDX-License-Identifier: Apache-2.0
//! What a network device offers, and what its queues are.

use super::{
    header::{HEADER_BYTES, LEGACY_HEADER_BYTES, PACKET_BYTES_MAX},
    link::Offloads,
};
use crate::{
    chain::{AnswerPlace, Layout},
    kind::work::{Chains, Completes, Keeping, QueueRole},
    net::config::Wiring,
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
pub(crate) const F_MRG_RXBUF: u64 = 1 << 15;
/// `VIRTIO_NET_F_MQ`
const F_MQ: u64 = 1 << 22;
/// `VIRTIO_F_VERSION_1`
const F_VERSION_1: u64 = 1 << 32;

/// Most bytes of a posted chain. Drivers post what the longest packet needs, and no more.
const POSTED_BYTES_MAX: u64 = 2 * PACKET_BYTES_MAX;

/// The features of a network device, besides those of rings.
pub(crate) const FEATURES: u64 =
    Offloads::ALL | F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN | F_MRG_RXBUF | F_MQ;

/// The pair that a queue belongs to.
pub(crate) fn pair_of(queue: u16) -> u16 {
    queue / 2
}

/// Bytes of a header, for a driver that has accepted `features`.
pub(crate) fn header_bytes(features: u64) -> u32 {
    match features & (F_VERSION_1 | F_MRG_RXBUF) {
        0 => LEGACY_HEADER_BYTES,
        _ => HEADER_BYTES,
    }
}

/// True for the queue of a pair that receives.
pub(crate) fn is_receiving(queue: u16) -> bool {
    queue.is_multiple_of(2)
}

/// What the chains of a queue are made of, for a driver that has accepted `features`.
pub(crate) fn role_of(queue: u16, features: u64) -> QueueRole {
    QueueRole {
        layout: Layout {
            header_bytes: header_bytes(features),
            answer: AnswerPlace::Nowhere,
            data_bytes_max: match is_receiving(queue) {
                true => POSTED_BYTES_MAX,
                false => PACKET_BYTES_MAX,
            },
        },
        chains: match is_receiving(queue) {
            true => Chains::Posted,
            false => Chains::Requests,
        },
        vector: pair_of(queue),
        keeping: Keeping::ToUse,
        // Packets that are sent begin in the order of the ring, pause on a fault, and are sent at once.
        completes: match is_receiving(queue) {
            true => Completes::InAnyOrder,
            false => Completes::InRingOrder,
        },
    }
}

/// What stays present for a queue of a device of so many pairs, besides its rings.
pub(crate) fn keeping_of(queue: u16, wiring: Wiring, pairs: u16) -> Keeping {
    match wiring {
        Wiring::Coarse { bytes } => Keeping::Cache {
            bytes: bytes / u64::from(pairs.max(1)),
        },
        // The first queue of a device sees to all of its memory. A driver that uses the device uses it.
        Wiring::Static if queue == 0 => Keeping::Everything,
        Wiring::Static | Wiring::None | Wiring::Floor { .. } | Wiring::Fine => Keeping::ToUse,
    }
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
