// SPDX-License-Identifier: Apache-2.0
//! Links: where packets go to and come from.
//!
//! A device has one link for each of its queue pairs, and a pair's link is used by the one engine
//! that serves the pair. So a link needs no lock of its own, and packets of one link keep their
//! order.
//!
//! ```text
//!   engine ── send(packet, leased) ──────────► link     copies it, or gives it to the kernel
//!   engine ── receive(buffer of ours) ───────► link     a whole packet, or nothing yet
//!   engine ◄─ readiness (polled), or a ring of its doorbell ── link
//! ```
//! Neither call waits. A link that cannot take a packet drops and counts it, as a wire does; a
//! packet that nobody receives stays where it is, as far as the link has room.
//!
//! # When to ask
//! A link with a descriptor is asked once it was readable, until it has nothing. One without
//! ([`Link::readiness`] is `None`) is asked whenever [`Link::is_ready`], and rings the doorbell of
//! the engine at its other end after each packet.
//!
//! A new link is a file here, a variant of [`Link`] and of [`LinkConfig`], and a line in each
//! function below.

pub(crate) mod config;
mod keeper;
mod loopback;
mod null;
mod packet;
pub(crate) mod pair;
pub(crate) mod state;
mod tap;

use super::{
    handed::ParkedNic,
    packet::{Outgoing, PacketBuffer},
};
use keeper::Receives;
use loopback::Loopback;
use null::Null;
use packet::{Packet, PacketKeeper};
use pagetide_vpri::Doorbell;
use pair::{Begun, Joined, PairEnd, PairKeeper, Pairs};
use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};
use tap::{Tap, TapKeeper};

pub use config::LinkConfig;
pub use state::LinkError;
pub(crate) use state::{LinkState, Offloads, Readable, Received, Sent};

/// The link of one queue pair.
#[derive(Debug)]
pub(crate) enum Link {
    Null(Null),
    Loop(Loopback),
    Tap(Tap),
    Packet(Box<Packet>),
    Pair(PairEnd),
}

/// The links of all pairs of a device, and what its control threads need of them.
#[derive(Debug)]
pub(crate) struct Opened {
    pub links: Vec<Link>,
    pub kept: Kept,
}

/// What is kept open for the links of a device.
#[derive(Debug)]
pub(crate) enum Kept {
    Nothing,
    Tap(Arc<TapKeeper>),
    Packet(Arc<PacketKeeper>),
    Pair(PairKeeper),
}

fn receives(running: Option<Offloads>) -> Receives {
    running.map_or(Receives::No, Receives::Yes)
}

impl Kept {
    /// Told before a pair's queues begin, with what its driver takes undone, and after they have
    /// ended.
    pub fn set_running(&self, pair: u16, running: Option<Offloads>) {
        match self {
            // Its engines say so themselves.
            Self::Nothing | Self::Pair(_) => {}
            Self::Tap(keeper) => keeper.set_receiving(pair, receives(running)),
            Self::Packet(keeper) => keeper.set_receiving(pair, receives(running)),
        }
    }

    /// Nothing more will be said of pairs that were handed over and are not used.
    pub fn settle(&self) {
        match self {
            Self::Nothing => {}
            Self::Tap(keeper) => keeper.settle(),
            Self::Packet(keeper) => keeper.settle(),
            Self::Pair(keeper) => keeper.settle(),
        }
    }

    /// Copies of its descriptors, for another process, and the number of the interface.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn hand_over(&self) -> io::Result<(Vec<OwnedFd>, u32)> {
        match self {
            Self::Nothing | Self::Pair(_) => Ok((Vec::new(), 0)),
            Self::Tap(keeper) => keeper.hand_over(),
            Self::Packet(keeper) => keeper.hand_over(),
        }
    }

    /// Gives the host's interface back. No link uses it any more.
    pub fn close(&self) {
        match self {
            Self::Nothing | Self::Pair(_) => {}
            Self::Tap(keeper) => keeper.close(),
            Self::Packet(keeper) => keeper.close(),
        }
    }
}

impl Link {
    /// Makes the links of all pairs of a device. `known` are the pairs of devices of its DPU, `handed` is what
    /// another process has left of the device.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn open(
        config: &LinkConfig,
        pairs: u16,
        known: &Pairs,
        handed: Option<&ParkedNic>,
    ) -> Result<Opened, LinkError> {
        let each = 0..pairs;
        let (links, kept) = match config {
            LinkConfig::Null => (
                each.map(|_| Self::Null(Null::sink())).collect(),
                Kept::Nothing,
            ),
            LinkConfig::Source { bytes } => {
                let links = each.map(|pair| Ok(Self::Null(Null::source(*bytes, pair)?)));
                (links.collect::<Result<_, LinkError>>()?, Kept::Nothing)
            }
            LinkConfig::Loop => (
                each.map(|_| Self::Loop(Loopback::new())).collect(),
                Kept::Nothing,
            ),
            LinkConfig::Pair { name } => {
                let begun = handed.map_or(Begun::Anew, |_| Begun::Handed);
                let Joined { ends, keeper } = known.join(name, pairs, begun)?;
                let links = ends.into_iter().map(Self::Pair);
                (links.collect(), Kept::Pair(keeper))
            }
            LinkConfig::Tap { name } => {
                let (links, keeper) = Tap::open(name, pairs, handed)?;
                let links = links.into_iter().map(Self::Tap);
                (links.collect(), Kept::Tap(keeper))
            }
            LinkConfig::Packet { name } => {
                let (links, keeper) = Packet::open(name, pairs, handed)?;
                let links = links.into_iter().map(|link| Self::Packet(Box::new(link)));
                (links.collect(), Kept::Packet(keeper))
            }
        };
        Ok(Opened { links, kept })
    }

    /// Its counters.
    pub fn state(&self) -> &Arc<LinkState> {
        match self {
            Self::Null(link) => link.state(),
            Self::Loop(link) => link.state(),
            Self::Tap(link) => link.state(),
            Self::Packet(link) => link.state(),
            Self::Pair(link) => link.state(),
        }
    }

    /// Told on the engine that uses it from now on, before anything else: the doorbell to ring when
    /// there is something to receive and nothing else would wake that engine.
    pub fn attach(&mut self, bell: &Arc<Doorbell>) {
        match self {
            // What comes was sent by the same engine.
            Self::Null(_) | Self::Loop(_) => {}
            // They have descriptors.
            Self::Tap(_) | Self::Packet(_) => {}
            Self::Pair(link) => link.attach(bell),
        }
    }

    /// Told when a driver begins to receive. What is there already is for it.
    pub fn begin(&self) {
        if let Self::Pair(link) = self {
            link.begin();
        }
    }

    /// Told when it has ended.
    pub fn end(&self) {
        if let Self::Pair(link) = self {
            link.end();
        }
    }

    /// Told when another process goes on with it.
    pub fn leave(&self) {
        if let Self::Pair(link) = self {
            link.leave();
        }
    }

    /// Drops what waits in memory of ours: it was for another front end. Returns how many packets that were.
    pub fn clear(&mut self) -> u64 {
        match self {
            Self::Null(_) | Self::Tap(_) => 0,
            Self::Loop(link) => link.clear(),
            Self::Pair(link) => link.clear(),
            Self::Packet(link) => link.clear(),
        }
    }

    /// Told when the driver has begun to receive: what it takes undone.
    pub fn set_offloads(&mut self, offloads: Offloads) {
        match self {
            // The kernel is told, by the keeper of the TAP.
            Self::Null(_) | Self::Tap(_) => {}
            Self::Loop(link) => link.set_offloads(offloads),
            Self::Packet(link) => link.set_offloads(offloads),
            Self::Pair(link) => link.set_offloads(offloads),
        }
    }

    /// Sends a packet. Its memory is not used any more afterwards.
    pub fn send(&mut self, packet: &Outgoing<'_>) -> Sent {
        match self {
            Self::Null(link) => link.send(packet),
            Self::Loop(link) => link.send(packet),
            Self::Tap(link) => link.send(packet),
            Self::Packet(link) => link.send(packet),
            Self::Pair(link) => link.send(packet),
        }
    }

    /// Receives a packet, if one is there, with a header that was checked.
    pub fn receive(&mut self, into: &mut PacketBuffer) -> Received {
        match self {
            Self::Null(link) => link.receive(into),
            Self::Loop(link) => link.receive(into),
            Self::Tap(link) => link.receive(into),
            Self::Packet(link) => link.receive(into),
            Self::Pair(link) => link.receive(into),
        }
    }

    /// So many packets were received and are not reported to their driver yet.
    pub fn set_in_hand(&self, packets: usize) {
        match self {
            Self::Packet(link) => link.set_in_hand(packets),
            // Each pair has its own flows, or the kernel steers them.
            Self::Null(_) | Self::Loop(_) | Self::Tap(_) | Self::Pair(_) => {}
        }
    }

    /// Takes out what waits in memory of ours, for another process: a packet, as it would be received. What waits in
    /// the kernel stays there.
    pub fn take_out(&mut self, into: &mut PacketBuffer) -> Received {
        match self {
            Self::Null(_) | Self::Tap(_) => Received::Nothing,
            Self::Loop(link) => link.receive(into),
            Self::Pair(link) => link.receive(into),
            Self::Packet(link) => link.receive_own(into),
        }
    }

    /// The descriptor that is readable when there is a packet; `None` if it has none.
    pub fn readiness(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Null(_) | Self::Loop(_) | Self::Pair(_) => None,
            Self::Tap(link) => link.readiness(),
            Self::Packet(link) => link.readiness(),
        }
    }

    /// For a link without such a descriptor: true if there is a packet. Asked again before an
    /// engine sleeps.
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Null(link) => link.is_ready(),
            Self::Loop(link) => link.is_ready(),
            Self::Tap(_) | Self::Packet(_) => false,
            Self::Pair(link) => link.is_ready(),
        }
    }
}
