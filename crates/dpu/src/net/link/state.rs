// SPDX-License-Identifier: Apache-2.0
//! What all links have: counters, errors, what their calls return.

use pagetide_sys::net::{interface, packet::PacketError, tap::TapError};
use std::{
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Why a link cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Packets of a source have no such length.
    #[error("packets of a source have {0} bytes; they must have from 60 to 9014")]
    SourceBytes(u16),
    /// The TAP.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The interface.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The kernel refuses.
    #[error("the interface {name} cannot be used: {source}")]
    Kernel {
        /// Its name.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Two devices have that pair.
    #[error("pair {0:?} has two devices already; give this one another name")]
    PairTaken(String),
}

impl LinkError {
    /// Whether another process has what is wanted: one that is ending gives it up in a moment.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Tap(TapError::Busy(_)))
    }
}

/// What became of a packet that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It is on its way.
    Gone,
    /// The link had no room: it is lost, and counted.
    Dropped,
}

/// Whether there was a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// The buffer has it, with its header.
    Packet,
    /// There was one that the driver cannot take, and it was dropped. There may be more.
    Dropped,
    /// None yet.
    Nothing,
}

/// Whether a link with a descriptor has something, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readable {
    Perhaps,
    No,
}

/// What the driver leaves undone in packets that it receives (virtio 1.2, 5.1.3), as it has
/// accepted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Offloads(u64);

impl Offloads {
    const CHECKSUM: u64 = 1 << 1;
    const TSO4: u64 = 1 << 7;
    const TSO6: u64 = 1 << 8;
    const ECN: u64 = 1 << 9;
    /// All there are: `VIRTIO_NET_F_GUEST_CSUM`, `GUEST_TSO4`, `GUEST_TSO6`, `GUEST_ECN`.
    pub const ALL: u64 = Self::CHECKSUM | Self::TSO4 | Self::TSO6 | Self::ECN;

    /// Those among the features that a driver has accepted.
    pub fn of_features(features: u64) -> Self {
        Self(features & Self::ALL)
    }

    /// It takes packets whose checksum is not computed.
    pub fn has_checksum(self) -> bool {
        self.0 & Self::CHECKSUM != 0
    }

    /// It takes segments of TCP over IPv4 that belong together as one packet.
    pub fn has_tso4(self) -> bool {
        self.0 & Self::TSO4 != 0
    }

    /// The same over IPv6.
    pub fn has_tso6(self) -> bool {
        self.0 & Self::TSO6 != 0
    }

    /// The same with congestion marks.
    pub fn has_ecn(self) -> bool {
        self.0 & Self::ECN != 0
    }
}

/// A link's counters and its state, for reports. Only the link's engine writes the counters.
#[derive(Debug, Default)]
pub(crate) struct LinkState {
    pub sent: AtomicU64,
    /// Packets that were sent and lost, because the link had no room.
    pub send_drops: AtomicU64,
    pub received: AtomicU64,
    /// Packets that the link itself has lost before they were received, as far as it knows.
    pub receive_drops: AtomicU64,
    error: Mutex<Option<String>>,
}

impl LinkState {
    /// What is wrong with the link, as a sentence.
    pub fn error(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Sets what is wrong with the link.
    pub fn set_error(&self, error: Option<String>) {
        *self.lock() = error;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds to a counter of a link.
pub(crate) fn count(counter: &AtomicU64, amount: u64) {
    // One thread writes it at a time.
    let now = counter.load(Ordering::Relaxed).wrapping_add(amount);
    counter.store(now, Ordering::Relaxed);
}

/// What the kernel says to the use of an interface.
pub(super) fn kernel(name: &str, source: io::Error) -> LinkError {
    let name = name.to_owned();
    LinkError::Kernel { name, source }
}

/// Whether no interface has that name, or another one than had it.
pub(super) fn is_gone(name: &str, index: u32) -> bool {
    match interface::look_up(name) {
        Ok(found) => found.is_none_or(|found| found.index != index),
        // Nothing is known.
        Err(_) => false,
    }
}
