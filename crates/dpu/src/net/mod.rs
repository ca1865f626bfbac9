// SPDX-License-Identifier: Apache-2.0
//! The network device (virtio 1.2, 5.1), as far as it sends.
//!
//! A device has queue *pairs*: queue 2n receives, queue 2n + 1 sends. Both are on one engine, and a
//! page request names the pair as its vector. A chain to be sent is a header and a packet; it needs
//! no answer besides its entry in the used ring. A packet that cannot be sent is counted and lost,
//! as on any network; its device goes on.
//!
//! What is sent goes to the link *null*: it is checked and counted. Nothing is ever received, so
//! chains of receiving queues stay in their rings ([`Chains::Posted`](crate::kind::work::Chains)).
//!
//! A sending queue pauses on a fault ([`OnFault::Pause`](crate::OnFault)): packets of one flow must
//! keep their order.

pub(crate) mod header;
pub(crate) mod nic;
