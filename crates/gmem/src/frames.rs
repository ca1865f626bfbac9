// SPDX-License-Identifier: Apache-2.0
//! Physical memory that is registered with a device, and its frames (GMEM 5.4).
//!
//! An [`Arena`] over the device's range hands out each frame, and takes it back when its [`Frame`]
//! is dropped. So every translation to a frame must be invalidated before its [`Frame`] is dropped.

use crate::{
    arena::{Arena, ArenaSettings, Fit},
    error::GmError,
    mmu::MmuError,
    sync::Arc,
};
use pagetide_addr::{DeviceId, PAGE_BYTES, Pa};

/// Quanta of 4 KiB that the arena of a pool caches: single frames are allocated and freed most.
const CACHED_FRAMES: u32 = 1;

/// Operations on frames of registered memory, implemented by the owner of the copy engines.
pub trait PhysicalMemory: Send + Sync {
    /// Fills `bytes` from `frame` on with zeros.
    ///
    /// # Errors
    /// [`MmuError`]; the content of the frame is then undefined.
    fn prepare(&self, frame: Pa, bytes: u64) -> Result<(), MmuError>;

    /// Copies `bytes` from `from` to `to`. One of them lies in this memory, the other may lie in
    /// another device's or the host's.
    ///
    /// # Errors
    /// [`MmuError`]; `from` is then unchanged.
    fn copy(&self, from: Pa, to: Pa, bytes: u64) -> Result<(), MmuError>;
}

/// A registered range of physical memory.
pub(crate) struct FramePool {
    owner: DeviceId,
    begin: Pa,
    end: Pa,
    arena: Arena,
    memory: Arc<dyn PhysicalMemory>,
}

impl FramePool {
    /// The frames from `begin` to before `end`.
    pub(crate) fn new(
        owner: DeviceId,
        begin: Pa,
        end: Pa,
        memory: Arc<dyn PhysicalMemory>,
    ) -> Result<Arc<Self>, GmError> {
        let wrong = |why| GmError::InvalidArgument {
            argument: "range of physical memory",
            why,
        };
        if !begin.is_page_aligned() || !end.is_page_aligned() {
            return Err(wrong("it must be made of whole 4 KiB frames"));
        }
        if begin >= end {
            return Err(wrong("it must end after it begins"));
        }
        let arena = Arena::new(ArenaSettings {
            quantum: PAGE_BYTES,
            fit: Fit::Instant,
            cached_quanta_max: CACHED_FRAMES,
        });
        arena
            .add(begin.0, end.0 - 1)
            .map_err(|_| wrong("it overlaps itself"))?;
        Ok(Arc::new(Self {
            owner,
            begin,
            end,
            arena,
            memory,
        }))
    }

    /// True if `begin..end` and this range have a byte in common.
    pub(crate) fn overlaps(&self, begin: Pa, end: Pa) -> bool {
        begin < self.end && self.begin < end
    }

    /// True if this is the range from `begin` to before `end`.
    pub(crate) fn is_range(&self, begin: Pa, end: Pa) -> bool {
        (begin, end) == (self.begin, self.end)
    }

    /// A free frame, if there is one.
    pub(crate) fn allocate(self: &Arc<Self>) -> Option<Frame> {
        let start = self.arena.alloc(PAGE_BYTES);
        start.ok().map(|start| Frame {
            pa: Pa(start),
            pool: Arc::clone(self),
        })
    }

    /// Bytes that are handed out.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.arena.usage().allocated_bytes
    }
}

/// A frame in use.
pub(crate) struct Frame {
    pa: Pa,
    pool: Arc<FramePool>,
}

impl Frame {
    /// Its address.
    pub(crate) fn pa(&self) -> Pa {
        self.pa
    }

    /// The device that owns the memory.
    pub(crate) fn owner(&self) -> DeviceId {
        self.pool.owner
    }

    /// Fills it with zeros.
    pub(crate) fn prepare(&self) -> Result<(), GmError> {
        let prepared = self.pool.memory.prepare(self.pa, PAGE_BYTES);
        prepared.map_err(|source| GmError::device(self.owner(), source))
    }

    /// Copies the content of `from` into it, by the device's own engine if one of the two is a
    /// device's.
    pub(crate) fn copy_from(&self, from: &Self) -> Result<(), GmError> {
        let engine = if self.owner() == DeviceId::VCPUS {
            from
        } else {
            self
        };
        let copied = engine.pool.memory.copy(from.pa, self.pa, PAGE_BYTES);
        copied.map_err(|source| GmError::device(engine.owner(), source))
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        let freed = self.pool.arena.free(self.pa.0, PAGE_BYTES);
        debug_assert!(freed.is_ok(), "{:?} was not allocated", self.pa);
    }
}
