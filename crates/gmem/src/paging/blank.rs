// SPDX-License-Identifier: Apache-2.0
//! Blanking: absent pages whose content has been given up become zeros, without being loaded.
//!
//! # Idea
//! A driver that posts a buffer lets the device write all of it, and may not count on any byte of it
//! before it has the buffer back (virtio 1.2, 2.7.8). So the old content of an absent page that lies
//! wholly in posted buffers is worthless already, whichever tier it is on. A device that wants such
//! pages for a packet says so, and gets zeros:
//!
//! ```text
//!   Stored(old) ── claim ──► Filling(old) ── install zeros ──► Present; old freed
//!   anything else            as for any fault
//! ```
//! These are the steps and locks of a fill, so a reader sees the old content or zeros, and nothing
//! is ever in between. Content that is not at hand is not loaded; damaged content is not even read.
//!
//! # A page that was used meanwhile
//! The request takes its time: it is sent, it waits for a CPU, for room, for a lock. Meanwhile the
//! buffer may go back to the driver (the queue stops, the guest is reset, the device dies), the
//! guest writes the page, and the page is evicted. Then its stored content is the only copy of what
//! the guest has written, and must be loaded. The device is not asked whether it still has the
//! buffer: it may be dead. What decides is *when the content was stored*:
//!
//! > The device read the time, and then saw in the ring that the buffers are posted. Content that
//! > was stored before that time was written before it, so the driver has given it up. A page that
//! > anybody has read or written since was present since, so its content was stored after that time.
//!
//! Each section has the time of its last eviction, read after its pages were punched and before
//! their lock is released: until then somebody may have read them. A page of a section that was
//! evicted from since the buffers were posted is loaded like any other. Content that a dead daemon
//! has stored was stored before this one began; so a request that is older than that is a plain
//! fault.
//!
//! *Invariant:* zeros replace content only if that was stored before the time of the request.
//!
//! Sections that go whole are filled whole, with their content: their other pages are not the device's.

use super::{fault::Fault, memory::PagedMemory, store::NO_CLOCK, table::Section};
use std::sync::atomic::Ordering::Relaxed;

/// Pages that a device waits for, or soon will, and whose old content nobody needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blank {
    /// The device, and the pages.
    pub fault: Fault,
    /// At this time or later the device saw that all of them lie wholly in posted buffers: by the clock of
    /// [`Admission::clock_ns`](super::Admission::clock_ns). It was read before the device looked.
    pub posted_ns: u64,
}

impl PagedMemory {
    /// True if what is stored of the section's pages was stored before `posted_ns`. Its lock is held.
    pub(super) fn was_stored_before(&self, section: &Section, posted_ns: u64) -> bool {
        let last = section.evicted_ns.load(Relaxed).max(self.began_ns);
        last != NO_CLOCK && last < posted_ns
    }

    /// Pages of the section have been evicted. Its lock is held exclusively.
    pub(super) fn note_eviction(&self, section: &Section) {
        (section.evicted_ns).store(self.admission.clock_ns(), Relaxed);
    }
}
