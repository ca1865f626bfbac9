// SPDX-License-Identifier: Apache-2.0
//! A live upgrade on the wire: what a daemon and the program that succeeds it say to each other.
//!
//! ```text
//!   daemon                                          successor
//!     │ starts it with a socket as its stdin            │
//!     │ ── Offer: settings, what a reader must know ──► │ checks itself and the state directory
//!     │ ◄─ Ready, or Refused with the reason ────────── │
//!     │ stops its work                                  │
//!     │ ── Go: descriptors, state of connections ─────► │ recovers everything
//!     │ ◄─ Serving, or Refused with the reason ──────── │
//!     │ ── Commit ────────────────────────────────────► │ is the daemon
//!     ▼ ends
//! ```
//! Until *Commit* the daemon may end the successor and go on by itself; after it, never. What the two do
//! between these messages is in the crate of the daemon. This one has the messages ([`message`]), the socket
//! that they pass through with their descriptors ([`Channel`]), and the check of the successor's program
//! ([`Program`]).
//!
//! # Versions
//! Both programs may be of any version, so the rules of the messages are fixed:
//!
//! - A message is one JSON object. A reader ignores fields that it does not know, and a field that was added
//!   after version 1 has a default.
//! - What a reader *must* know to go on correctly is named in [`Offer::requires`](message::Offer::requires). A
//!   successor that does not know one of those names refuses, and nothing has happened.
//! - Fields are never renamed, and never change their meaning.
//!
//! Version 1 is frozen: a recorded hand-over is among the tests.
//!
//! # Bounds
//! Neither side trusts the other more than it must: a message has at most [`MESSAGE_BYTES_MAX`] bytes and
//! [`DESCRIPTORS_MAX`] descriptors, each wait has a bound, and whatever arrives is a message or a typed error.

mod channel;
mod error;
pub mod message;
mod packet;
mod program;

pub use channel::{Channel, Descriptors};
pub use error::HandoverError;
pub use packet::{DESCRIPTORS_MAX, MESSAGE_BYTES_MAX, PACKET_BYTES_MAX, PACKET_DESCRIPTORS_MAX};
pub use program::{Program, ProgramError};
