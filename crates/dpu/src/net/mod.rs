// SPDX-License-Identifier: Apache-2.0
//! The network device (virtio 1.2, 5.1).
//!
//! A device has queue *pairs*: queue 2n receives, queue 2n + 1 sends. Both are on one engine, with
//! the *link* of the pair, and a page request names the pair as its vector.
//!
//! ```text
//!            queue 2n + 1 (requests)                      queue 2n (posted)
//!   guest ── header, packet ──► check ── send ──► link ── receive ──► policy ──► buffers ──► guest
//!                pauses on a fault                                      └─► store
//! ```
//! A chain to be sent is a header and a packet; it needs no answer besides its entry in the used
//! ring. A packet that cannot be sent is counted and lost, as on any network; its device goes on. A
//! sending queue pauses on a fault ([`OnFault::Pause`](crate::OnFault)): packets of one flow must
//! keep their order.
//!
//! What is received goes into posted chains, or waits for them: `policy` says which.
//!
//! | file | contents |
//! |---|---|
//! | `account` | what faults have cost its packets |
//! | `config` | how a device receives, as an operator chooses it |
//! | `header`, `packet`, `flow` | the header before a packet, packets on their way, flows |
//! | `segment` | packets of TCP, cut for a driver that does not take long ones |
//! | `handed` | what another process gets of a device |
//! | `link` | where packets go to and come from |
//! | `policy`, `store` | what becomes of a packet whose buffers are absent; packets that wait |
//! | `receiver` | a receiving queue: link, policy and store together |
//! | `nic`, `device`, `on_engine` | what is offered; the device; its part on an engine |
//!
//! # What a device in user space cannot do
//! It has no hardware: no SR-IOV, no steering that a driver sets (`VIRTIO_NET_F_RSS`). A packet of a
//! TAP or a socket crosses the kernel once more than with a NIC. What the wire loses, or a TAP whose
//! queue is full, is not counted as lost to a fault.

pub(crate) mod account;
pub(crate) mod config;
pub(crate) mod device;
pub(crate) mod flow;
pub(crate) mod handed;
pub(crate) mod header;
pub(crate) mod link;
pub(crate) mod nic;
pub(crate) mod on_engine;
pub(crate) mod packet;
pub(crate) mod policy;
mod receiver;
pub mod record;
pub(crate) mod segment;
mod steer;
pub(crate) mod store;
