// SPDX-License-Identifier: Apache-2.0
//! Another host's memory, on this machine: a Redis server and the wire to it.
//!
//! [`FarServer`] is a server in a folder of its own, which is killed and started again. [`Wire`] stands between it
//! and a client: it flips bits of what the server sends, and cuts all connections.
//!
//! It uses nothing but the standard library: tests of other crates have it by its path.

mod server;
mod wire;

pub use server::FarServer;
pub use wire::Wire;
