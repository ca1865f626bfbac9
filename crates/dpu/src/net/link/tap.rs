// SPDX-License-Identifier: Apache-2.0
//! A TAP of the host: each pair has a queue of it.
//!
//! The kernel gives a flow to the queue on which it was sent last, which is the pair that its driver
//! wants it on (virtio 1.2, 5.1.6.5.6). It computes checksums and segments for a driver that does
//! not take them undone. A pair that its driver does not use must not be given packets, so its queue
//! is detached meanwhile.

use super::{
    keeper::{Interface, Keeper, Port, ReadySet, Receives, ready_sets},
    state::{LinkError, LinkState, Received, Sent, count, is_gone},
};
use crate::net::{
    handed::ParkedNic,
    packet::{HEADER_LEN, Outgoing, PacketBuffer},
};
use pagetide_sys::net::tap::{self, Receiving, TapOffloads, TapQueue};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

/// The TAP that a queue was of is gone, or the queue is detached, which none that is in use is.
const DELETED: i32 = libc::EBADFD;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Tap {
    pair: usize,
    port: Port<TapInterface>,
    state: Arc<LinkState>,
    /// For a packet of more parts than are sent at once.
    copy: Vec<u8>,
}

/// A TAP, by name.
#[derive(Debug)]
pub(crate) struct TapInterface {
    name: String,
    queues: u16,
    /// Number of the interface that was opened last.
    index: AtomicU32,
    /// By pair.
    ready: Box<[ReadySet]>,
}

/// What control threads need of a TAP.
pub(crate) type TapKeeper = Keeper<TapInterface>;

impl Interface for TapInterface {
    type Part = TapQueue;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self) -> Result<Vec<TapQueue>, LinkError> {
        let (queues, index) = tap::open_queues(&self.name, self.queues)?;
        self.index.store(index, Ordering::Relaxed);
        Ok(queues)
    }

    fn is_gone(&self) -> bool {
        is_gone(&self.name, self.index.load(Ordering::Relaxed))
    }

    fn index(&self) -> u32 {
        self.index.load(Ordering::Relaxed)
    }

    fn copy(queue: &TapQueue) -> io::Result<OwnedFd> {
        queue.as_fd().try_clone_to_owned()
    }

    fn apply(&self, queues: &[Arc<TapQueue>], receiving: &[Receives]) -> io::Result<()> {
        // All pairs have one driver, so what one takes, all take.
        let offloads = receiving.iter().find_map(|its| its.offloads());
        let is_as_before = offloads.is_none() && receiving.contains(&Receives::AsBefore);
        let offloads = offloads.unwrap_or_default();
        if let Some(queue) = queues.first().filter(|_| !is_as_before) {
            queue.set_offloads(TapOffloads {
                checksum: offloads.has_checksum(),
                tso4: offloads.has_tso4(),
                tso6: offloads.has_tso6(),
                ecn: offloads.has_ecn(),
            })?;
        }
        for ((queue, receiving), ready) in queues.iter().zip(receiving).zip(&self.ready) {
            ready.add(&**queue)?;
            queue.set_receiving(match receiving {
                Receives::Yes(_) => Receiving::Yes,
                Receives::No => Receiving::No,
                Receives::AsBefore => continue,
            })?;
        }
        Ok(())
    }
}

impl Tap {
    /// Opens a TAP for a device of so many pairs, or goes on with what another process has opened.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn open(
        name: &str,
        pairs: u16,
        handed: Option<&ParkedNic>,
    ) -> Result<(Vec<Self>, Arc<TapKeeper>), LinkError> {
        let interface = TapInterface {
            name: name.to_owned(),
            queues: pairs,
            index: AtomicU32::new(handed.map_or(0, |handed| handed.interface)),
            ready: ready_sets(name, pairs)?,
        };
        let states: Vec<Arc<LinkState>> = (0..pairs).map(|_| Arc::default()).collect();
        let first = states.first().cloned().unwrap_or_default();
        let keeper = match handed {
            None => Keeper::open(interface, pairs, first)?,
            Some(handed) => {
                let queues = handed.copies(name)?.into_iter().map(TapQueue::from);
                Keeper::adopt(interface, queues.collect(), pairs, first)?
            }
        };
        let links = states.into_iter().enumerate().map(|(pair, state)| Self {
            pair,
            port: Port::new(&keeper, pair),
            state,
            copy: Vec::new(),
        });
        Ok((links.collect(), keeper))
    }

    pub fn state(&self) -> &Arc<LinkState> {
        &self.state
    }

    pub fn send(&mut self, packet: &Outgoing<'_>) -> Sent {
        let Some(queue) = self.port.part() else {
            count(&self.state.send_drops, 1);
            return Sent::Dropped;
        };
        let sent = match queue.send(packet.header(), packet.parts()) {
            Err(error)
                if error.kind() == io::ErrorKind::InvalidInput
                    && error.raw_os_error().is_none() =>
            {
                self.copy.resize(HEADER_LEN + packet.bytes(), 0);
                self.copy[..HEADER_LEN].copy_from_slice(packet.header());
                packet.copy_to(&mut self.copy[HEADER_LEN..]);
                queue.send_whole(&self.copy)
            }
            sent => sent,
        };
        match sent {
            Ok(()) => {
                count(&self.state.sent, 1);
                Sent::Gone
            }
            Err(error) => {
                if error.raw_os_error() == Some(DELETED) {
                    self.port.suspect();
                }
                count(&self.state.send_drops, 1);
                Sent::Dropped
            }
        }
    }

    pub fn receive(&mut self, into: &mut PacketBuffer) -> Received {
        let Some(queue) = self.port.part() else {
            return Received::Nothing;
        };
        match queue.receive(into.whole_mut()) {
            Ok(Some(bytes)) if bytes >= HEADER_LEN => {
                into.set_packet_bytes(bytes - HEADER_LEN);
                count(&self.state.received, 1);
                Received::Packet
            }
            Ok(_) => Received::Nothing,
            Err(error) => {
                if error.raw_os_error() == Some(DELETED) {
                    self.port.suspect();
                }
                Received::Nothing
            }
        }
    }

    pub fn readiness(&self) -> Option<BorrowedFd<'_>> {
        let sets = &self.port.keeper().interface().ready;
        sets.get(self.pair).map(AsFd::as_fd)
    }
}
