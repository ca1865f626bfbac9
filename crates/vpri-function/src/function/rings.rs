// SPDX-License-Identifier: Apache-2.0
//! The three queues as seen by the device: chains taken, filled, and returned.
//!
//! A ring lies in the driver's memory. A ring with impossible indices is *broken*
//! and is not used any more ([`Broken`]). An invalid chain is returned empty and
//! counted, and its queue goes on.

use super::memory::FunctionMemory;
use crate::wire::STATUS_BYTES;
use pagetide_sys::signal::EventSignal;
use pagetide_vhost_backend::{RingAddresses, RingSettings, Runs};
use rustix::fd::OwnedFd;
use std::sync::{Arc, atomic::Ordering};
use virtio_queue::{Queue, QueueOwnedT, QueueT, desc::split::Descriptor};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

/// Most entries of a queue.
pub(super) const QUEUE_SIZE_MAX: u16 = 4096;

/// The driver has written an impossible value into a ring.
#[derive(Debug, thiserror::Error)]
#[error("a ring is broken: {0}")]
pub(super) struct Broken(#[from] virtio_queue::Error);

/// A queue of the driver.
#[derive(Debug, Default)]
pub(super) struct Vring {
    pub kick: Option<Arc<OwnedFd>>,
    pub call: Option<EventSignal>,
    pub error: Option<EventSignal>,
    /// The ring, while it runs.
    pub ring: Option<Queue>,
    /// Where the avail ring of one that ran is to be read next.
    base: u16,
}

/// A part of a chain.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    address: GuestAddress,
    len: usize,
}

/// A chain that was taken and must be returned.
#[must_use = "a chain that is not given back is lost to its driver"]
#[derive(Debug)]
pub(super) struct Chain {
    pub head: u16,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    readable_bytes: usize,
    writable_bytes: usize,
    is_malformed: bool,
}

impl Chain {
    fn add(&mut self, descriptor: Descriptor, memory: &FunctionMemory) {
        let buffer = Buffer {
            address: descriptor.addr(),
            len: descriptor.len() as usize,
        };
        let (list, bytes, access) = if descriptor.is_write_only() {
            let bytes = &mut self.writable_bytes;
            (&mut self.writable, bytes, Permissions::Write)
        } else {
            // Device-readable buffers come before device-writable ones (virtio 1.2, 2.7.4.2).
            self.is_malformed |= !self.writable.is_empty();
            let bytes = &mut self.readable_bytes;
            (&mut self.readable, bytes, Permissions::Read)
        };
        *bytes = bytes.saturating_add(buffer.len);
        list.push(buffer);
        let there = memory
            .mapped()
            .check_range(buffer.address, buffer.len, access);
        self.is_malformed |= !there;
    }

    /// Bytes that may be written.
    pub fn room(&self) -> usize {
        if self.is_malformed {
            0
        } else {
            self.writable_bytes
        }
    }

    /// True if there is room for a status.
    pub fn has_room_for_reply(&self) -> bool {
        self.room() >= STATUS_BYTES
    }

    /// All readable bytes; `None` if they are more than `limit`, or not all in memory.
    pub fn message(&self, memory: &FunctionMemory, limit: usize) -> Option<Vec<u8>> {
        if self.is_malformed || self.readable_bytes > limit {
            return None;
        }
        let mut message = vec![0; self.readable_bytes];
        let mut rest = message.as_mut_slice();
        for buffer in &self.readable {
            let (part, behind) = rest.split_at_mut_checked(buffer.len)?;
            if memory.mapped().read_slice(part, buffer.address).is_err() {
                return None;
            }
            rest = behind;
        }
        Some(message)
    }

    /// Writes as much of `bytes` as there is room for. Returns the number of bytes written.
    pub fn write(&self, memory: &FunctionMemory, bytes: &[u8]) -> u32 {
        let mut rest = bytes
            .get(..bytes.len().min(self.room()))
            .unwrap_or_default();
        let mut written = 0;
        for buffer in &self.writable {
            let (part, behind) = rest.split_at(rest.len().min(buffer.len));
            if memory.mapped().write_slice(part, buffer.address).is_err() {
                break;
            }
            written += part.len();
            rest = behind;
        }
        // A message, a request, or records of one chain: far below 4 GiB.
        u32::try_from(written).unwrap_or(u32::MAX)
    }
}

impl Vring {
    /// The next chain, if there is one.
    pub fn take(&mut self, memory: &FunctionMemory) -> Result<Option<Chain>, Broken> {
        let Some(ring) = &mut self.ring else {
            return Ok(None);
        };
        let Some(descriptors) = ring.iter(memory.mapped())?.next() else {
            return Ok(None);
        };
        let mut chain = Chain {
            head: descriptors.head_index(),
            readable: Vec::new(),
            writable: Vec::new(),
            readable_bytes: 0,
            writable_bytes: 0,
            is_malformed: false,
        };
        for descriptor in descriptors {
            chain.add(descriptor, memory);
        }
        Ok(Some(chain))
    }

    /// True if there is a chain to take.
    pub fn has_chain(&self, memory: &FunctionMemory) -> Result<bool, Broken> {
        let Some(ring) = &self.ring else {
            return Ok(false);
        };
        let available = ring.avail_idx(memory.mapped(), Ordering::Acquire)?;
        Ok(available.0 != ring.next_avail())
    }

    /// Puts the chain just taken back, unused.
    pub fn put_back(&mut self, _chain: Chain) {
        if let Some(ring) = &mut self.ring {
            ring.go_to_previous_position();
        }
    }

    /// Returns a chain to the driver, with `len` bytes written, and calls the driver if it wants
    /// that.
    pub fn give_back(
        &mut self,
        chain: Chain,
        len: u32,
        memory: &FunctionMemory,
    ) -> Result<(), Broken> {
        let Some(ring) = &mut self.ring else {
            return Ok(());
        };
        ring.add_used(memory.mapped(), chain.head, len)?;
        if ring.needs_notification(memory.mapped())? {
            notify(self.call.as_mut());
        }
        Ok(())
    }

    /// Asks the driver to kick at its next chain; true if there is already one.
    pub fn arm(&mut self, memory: &FunctionMemory) -> Result<bool, Broken> {
        match &mut self.ring {
            Some(ring) => Ok(ring.enable_notification(memory.mapped())?),
            None => Ok(false),
        }
    }

    /// Asks the driver not to kick.
    pub fn disarm(&mut self, memory: &FunctionMemory) -> Result<(), Broken> {
        match &mut self.ring {
            Some(ring) => Ok(ring.disable_notification(memory.mapped())?),
            None => Ok(()),
        }
    }

    /// Notifies the driver that its ring is broken.
    pub fn complain(&mut self) {
        notify(self.error.as_mut());
    }

    /// Starts the ring. It stays stopped if it is not in memory: memory may still be added.
    pub fn start(
        &mut self,
        settings: &RingSettings,
        memory: &FunctionMemory,
        event_index: EventIndex,
    ) -> Result<Runs, Broken> {
        let Some(at) = settings.addresses else {
            return Ok(Runs::No);
        };
        let Some(mut ring) = made(settings.size, at, memory)? else {
            return Ok(Runs::No);
        };
        ring.set_event_idx(event_index == EventIndex::Negotiated);
        ring.set_next_avail(settings.base);
        ring.set_ready(true);
        let used = ring.used_idx(memory.mapped(), Ordering::Acquire)?;
        ring.set_next_used(used.0);
        self.kick.clone_from(&settings.kick);
        self.ring = Some(ring);
        Ok(Runs::Yes)
    }

    /// Stops the ring; returns where its avail ring is to be read next.
    pub fn stop(&mut self) -> u16 {
        if let Some(ring) = self.ring.take() {
            self.base = ring.next_avail();
        }
        self.base
    }
}

/// Whether notifications are suppressed by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventIndex {
    Negotiated,
    Absent,
}

fn made(size: u16, at: RingAddresses, memory: &FunctionMemory) -> Result<Option<Queue>, Broken> {
    let entries = u64::from(size);
    let places = (
        memory.translate(at.descriptors, 16 * entries),
        memory.translate(at.avail, 6 + 2 * entries),
        memory.translate(at.used, 6 + 8 * entries),
    );
    let (Some(descriptors), Some(avail), Some(used)) = places else {
        return Ok(None);
    };
    let mut ring = Queue::new(QUEUE_SIZE_MAX)?;
    ring.try_set_size(size)?;
    ring.try_set_desc_table_address(descriptors)?;
    ring.try_set_avail_ring_address(avail)?;
    ring.try_set_used_ring_address(used)?;
    Ok(Some(ring))
}

fn notify(event: Option<&mut EventSignal>) {
    if let Some(event) = event
        && let Err(error) = event.signal()
    {
        tracing::error!(%error, "a driver cannot be signalled");
    }
}
