// SPDX-License-Identifier: Apache-2.0
//! What devices of every kind offer: how their rings may be used, and how many there may be.

/// Queue sizes offered.
pub(crate) const QUEUE_SIZE_MAX: u16 = 1024;
/// Most queues of one device.
pub(crate) const QUEUES_MAX: u16 = 64;

/// `VIRTIO_F_INDIRECT_DESC`
pub(crate) const F_INDIRECT_DESC: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`
pub(crate) const F_EVENT_IDX: u64 = 1 << 29;
/// `VHOST_USER_F_PROTOCOL_FEATURES`
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VIRTIO_F_VERSION_1`
const F_VERSION_1: u64 = 1 << 32;

/// Features of rings, and of vhost-user.
pub(crate) const RING_FEATURES: u64 =
    F_INDIRECT_DESC | F_EVENT_IDX | F_PROTOCOL_FEATURES | F_VERSION_1;
