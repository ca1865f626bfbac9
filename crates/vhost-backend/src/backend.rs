// SPDX-License-Identifier: Apache-2.0
//! [`Backend`]: the parts of a device that are its own.

use crate::ring::{RingSettings, Runs};
use pagetide_addr::{FrontendVa, Gpa};
use pagetide_sys::signal::EventSignal;
use std::{
    fs::File,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};
use vhost::vhost_user::{
    Error, Result, VhostUserProtocolFeatures,
    message::{VhostUserInflight, VhostUserMemoryRegion},
};

/// What a device offers to every front end.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    /// Virtio features.
    pub features: u64,
    /// Those of them that a front end must accept.
    pub required_features: u64,
    /// Protocol features of vhost-user.
    pub protocol_features: VhostUserProtocolFeatures,
    /// Queues.
    pub queue_count: u16,
    /// What a front end is told when it asks for that: the number of queues, or of queue pairs for
    /// a network device.
    pub queues_told: u16,
    /// Most entries of a queue.
    pub queue_size_max: u16,
    /// Most memory regions that are added one by one; 0 for a device that takes only all at once.
    pub regions_max: u64,
}

/// A memory region as a front end describes it. Nothing of it has been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionShape {
    /// Its address in descriptors.
    pub gpa: Gpa,
    /// Its length.
    pub bytes: u64,
    /// Its address in messages that set up rings.
    pub frontend: FrontendVa,
    /// Its first byte in its file.
    pub file_offset: u64,
}

impl From<&VhostUserMemoryRegion> for RegionShape {
    fn from(wire: &VhostUserMemoryRegion) -> Self {
        Self {
            gpa: Gpa(wire.guest_phys_addr),
            bytes: wire.memory_size,
            frontend: FrontendVa(wire.user_addr),
            file_offset: wire.mmap_offset,
        }
    }
}

/// How to stop a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Finish what was taken from it first.
    Drain,
    /// Finish only what cannot be dropped: nobody waits for the rest.
    Abandon,
}

/// Whether a ring that runs waits on another kick descriptor now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KickChange {
    /// It does.
    Done,
    /// It takes a descriptor only when it starts.
    NeedsRestart,
}

/// The parts of a device that are its own. A method that refuses logs why.
pub trait Backend {
    /// Memory of a front end, mapped and checked.
    type Memory: Default;

    /// What it offers; always the same.
    fn offer(&self) -> Offer;

    /// The front end has accepted these features, which were offered.
    fn set_features(&mut self, features: u64);

    /// Part of its configuration space; `None` if that has no such part.
    fn config(&self, offset: u32, bytes: u32) -> Option<Vec<u8>>;

    /// Maps all memory of a front end, and changes nothing yet.
    ///
    /// # Errors
    /// If the memory is refused.
    fn map(&mut self, regions: &[(RegionShape, BorrowedFd<'_>)]) -> Result<Self::Memory>;

    /// Like [`Self::map`]: the present memory and one more region.
    ///
    /// # Errors
    /// If the region is refused, or the device does not take single regions.
    fn map_one_more(&mut self, _shape: RegionShape, _file: BorrowedFd<'_>) -> Result<Self::Memory> {
        Err(Error::InvalidOperation("ADD_MEM_REG"))
    }

    /// Like [`Self::map`]: the present memory without one region.
    ///
    /// # Errors
    /// If there is no such region, or the device does not take single regions.
    fn map_one_less(&mut self, _shape: RegionShape) -> Result<Self::Memory> {
        Err(Error::InvalidOperation("REM_MEM_REG"))
    }

    /// Uses this memory from now on. No ring runs that needs what it lacks; the previous memory is
    /// unmapped when this returns.
    ///
    /// # Errors
    /// If the device has failed; then it keeps the previous memory.
    fn use_memory(&mut self, memory: Self::Memory) -> Result<()>;

    /// Starts a ring that has all settings. [`Runs::No`] if it is not in memory: memory or another
    /// address may still come.
    ///
    /// # Errors
    /// If the ring is refused, or the device has failed.
    fn start(&mut self, queue: u16, ring: &RingSettings) -> Result<Runs>;

    /// Stops a ring that runs, waits until nothing of it is under way, and returns where its avail
    /// ring is to be read next.
    ///
    /// # Errors
    /// If the device has failed.
    fn stop(&mut self, queue: u16, how: Stop) -> Result<u16>;

    /// Signals completions of a ring that runs to this eventfd from now on.
    ///
    /// # Errors
    /// If the device has failed.
    fn set_call(&mut self, queue: u16, call: Option<EventSignal>) -> Result<()>;

    /// Waits on this kick descriptor of a ring that runs from now on, if it can.
    fn set_kick(&mut self, _queue: u16, _kick: &Arc<OwnedFd>) -> KickChange {
        KickChange::NeedsRestart
    }

    /// Signals a broken ring to this eventfd from now on. A device that does not take it while the
    /// ring runs uses it from the ring's next start on.
    fn set_error(&mut self, _queue: u16, _error: Option<EventSignal>) {}

    /// Creates the region in which requests in flight are recorded.
    ///
    /// # Errors
    /// If it cannot, or the device keeps no record.
    fn create_inflight(
        &mut self,
        _wanted: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        Err(Error::InvalidOperation("GET_INFLIGHT_FD"))
    }

    /// Uses a region that was created for it, or for a predecessor.
    ///
    /// # Errors
    /// If the region is refused, or the device keeps no record.
    fn set_inflight(&mut self, _region: &VhostUserInflight, _file: BorrowedFd<'_>) -> Result<()> {
        Err(Error::InvalidOperation("SET_INFLIGHT_FD"))
    }

    /// True if it knows without an in-flight region what of a ring is under way, also after its end.
    fn keeps_record(&self, _queue: u16) -> bool {
        false
    }

    /// The front end goes: nothing waits for its requests any more. Its rings are stopped next.
    fn hurry(&mut self) {}

    /// The front end is gone, its rings are stopped and its memory is unmapped.
    fn end(&mut self) {}
}
