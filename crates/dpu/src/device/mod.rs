// SPDX-License-Identifier: Apache-2.0
//! A device as its front end sees it: a socket, one connection at a time, vhost-user messages.
//!
//! ```text
//!   listener thread ──accept──► connection thread ──Command──► engines
//!        ▲                        blocking reads of messages      rings and I/O
//!        └── a second front end is turned away while one is there
//! ```
//! No message is involved in a request: after the set-up the connection thread only waits for the
//! front end to go.
//!
//! A front end that reconnects before its old connection is cleaned up (as a VMM does that
//! reconnects at once) waits until it is.

mod backend;
mod control;
mod endpoint;
mod inflight_fd;
pub(crate) mod offer;
mod orders;

pub(crate) use control::{Control, Parts};
pub use control::{DeviceState, EngineGone};
pub(crate) use endpoint::Endpoint;
pub use endpoint::{ParkedDevice, ParkedFrontEnd, SocketAccess, SocketError};
