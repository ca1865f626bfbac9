// SPDX-License-Identifier: Apache-2.0
//! The vhost-user side of a device: one front end's messages, checked and obeyed.
//!
//! Every back end of ours speaks vhost-user with a front end that it does not trust. What is the
//! same for all of them is here, once; a device brings its own parts as a [`Backend`].
//!
//! ```text
//!   socket ─► Connection ─► Session: features, settings of rings, ─► Backend: memory, rings that
//!             one message    descriptors; when a ring may run         run, configuration space
//!             at a time
//! ```
//!
//! # When a ring runs
//! A ring *runs* once it has addresses, memory to translate them, and a kick descriptor, and is
//! enabled. A message that takes one of these away stops the ring first, and its I/O is done before
//! the message is answered: the front end may reuse the memory or descriptor that it has taken
//! away.
//!
//! # Refusals
//! Every refusal is logged with its reason. The connection is closed if the front end would
//! otherwise go on unaware of the refusal. A front end that adds or removes a memory region waits
//! for the answer (REPLY_ACK), so it may stay.
//!
//! # Descriptors
//! A front end sends descriptors of any kind, and closing one may wait for the front end: the last
//! close of a file on a FUSE file system asks that file system's server. So only the thread that
//! reads the messages closes them, and never with the session locked: [`Connection::serve_one`]. A
//! descriptor is signalled or polled only after it has been found to be an eventfd.
//!
//! # Another process goes on
//! A session can be *parked*: its rings stop, and everything that the front end has set is given away as a
//! [`Record`]. Another process [resumes](Connection::resume) it on the same connection: it has its back end obey
//! the messages that lead to that record, as if the front end had just sent them, and then reads from the
//! connection. The front end notices nothing but a pause.
//!
//! *Invariant:* whatever a front end sends, the worst outcome is that its own connection ends.

mod backend;
mod connection;
mod event;
mod messages;
mod record;
mod replay;
mod ring;
mod session;
#[cfg(test)]
mod tests;

pub use backend::{Backend, KickChange, Offer, RegionShape, Stop};
pub use connection::{Connection, Served, SharedSession};
pub use event::signal_of;
pub use record::{InflightRecord, ParkError, Record};
pub use replay::ReplayError;
pub use ring::{Enabled, RingAddresses, RingSettings, Runs};
pub use session::Session;
