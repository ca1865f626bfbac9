// SPDX-License-Identifier: Apache-2.0
//! Network interfaces of the host: what they are, and ways to give them packets and to take theirs.
//!
//! | module | contents |
//! |---|---|
//! | [`interface`] | looking an interface up by name |
//! | [`tap`] | queues of a TAP |
//! | [`namespace`] | a network of a thread's own |
//! | [`packet`] | a socket that is connected to an interface |
//! | `parts` | packets that are partly guest memory |

pub mod interface;
pub mod namespace;
pub mod packet;
mod parts;
pub mod tap;

pub use parts::PARTS_MAX;

#[cfg(test)]
mod tests;
