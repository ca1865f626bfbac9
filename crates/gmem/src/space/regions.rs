// SPDX-License-Identifier: Apache-2.0
//! Regions of a space: allocation, look-up, and deallocation (GMEM 4.1).

use super::{
    address_space::{AddressSpace, Caching, Guard},
    request::RegionRequest,
};
use crate::{
    arena::{ArenaError, Constraints},
    device::Device,
    error::GmError,
    paging::GrowthError,
    region::{Kind, Leaver, Origin, Region, RegionCore, RegionState},
    sync::Arc,
};
use pagetide_addr::{PAGE_BYTES, PAGE_SHIFT, PageNo, PageRange, SECTION_BYTES, Va};

impl AddressSpace {
    /// Allocates a region. In a space over paged memory its pages become part of that memory,
    /// present or absent as their place reports; the region then begins at a section of 2 MiB.
    ///
    /// # Errors
    /// [`GmError::InvalidArgument`], [`GmError::NoAddresses`], [`GmError::Destroyed`]. In a space
    /// over paged memory also [`GmError::NoMemory`]: there is none for the words of its pages;
    /// [`GmError::InUse`]: it overlaps a region of another length, or an incomplete removal;
    /// [`GmError::Lost`]: it cannot be determined which pages are present. If a device then does
    /// not give up access that it was already granted, the error is that of [`Region::dealloc`]
    /// ([`GmError::Busy`], the device's own error): the region stays, and is found by its address.
    #[doc(alias = "gm_as_alloc")]
    pub fn alloc(self: &Arc<Self>, request: &RegionRequest) -> Result<Region, GmError> {
        let core = self.alloc_core(request)?;
        Ok(Region {
            space: Arc::clone(self),
            core,
        })
    }

    /// Like [`Self::alloc`], for a caller that keeps addresses and no handles: its first address. No
    /// two threads meet at the space's reference count, as those that make and drop handles do.
    ///
    /// # Errors
    /// As for [`Self::alloc`].
    pub fn alloc_va(&self, request: &RegionRequest) -> Result<Va, GmError> {
        let core = self.alloc_core(request)?;
        Ok(core.start())
    }

    fn alloc_core(&self, request: &RegionRequest) -> Result<Arc<RegionCore>, GmError> {
        let bytes = request.check()?;
        let (pages, origin) = self.take_addresses(request, bytes)?;
        let kind = if self.memory.is_some() {
            Kind::Paged
        } else {
            Kind::Frames
        };
        let core = RegionCore::new(pages, origin, kind);
        if let Err(error) = self.insert(&core) {
            if !self.regions.knows(&core) {
                self.give_addresses_back(&core);
            }
            return Err(error);
        }
        Ok(core)
    }

    /// A region of exactly these pages, without guards.
    pub(super) fn alloc_exactly(self: &Arc<Self>, pages: PageRange) -> Result<Region, GmError> {
        let bytes = pages.bytes();
        let taken = self.arena.alloc_at(pages.start.byte_offset(), bytes);
        taken.map_err(|_| GmError::NoAddresses { bytes })?;
        let core = RegionCore::new(pages, Origin::Chosen, Kind::Frames);
        if let Err(error) = self.insert(&core) {
            self.give_addresses_back(&core);
            return Err(error);
        }
        Ok(Region {
            space: Arc::clone(self),
            core,
        })
    }

    fn insert(&self, core: &Arc<RegionCore>) -> Result<(), GmError> {
        let Some(memory) = &self.memory else {
            return self.regions.insert(core);
        };
        // Held so that no thread that looks the region up frees it half made.
        let _making = core.lock();
        self.regions.insert(core)?;
        // Inserted first: the allocation wakes threads that faulted too early, and they retry in
        // the space.
        let Err(error) = memory.allocate(core.pages) else {
            return Ok(());
        };
        if matches!(error, GrowthError::Place { .. }) {
            // The sections before are part of the memory. If they cannot be removed, the region
            // stays.
            memory.deallocate(core.pages)?;
        }
        self.regions.remove(core);
        Err(error.into())
    }

    fn guard_bytes(&self) -> u64 {
        match self.policy.guard {
            Guard::Unguarded => 0,
            Guard::Guarded => PAGE_BYTES,
        }
    }

    /// Free addresses that satisfy the request.
    fn take_addresses(
        &self,
        request: &RegionRequest,
        bytes: u64,
    ) -> Result<(PageRange, Origin), GmError> {
        let full = |_| GmError::NoAddresses { bytes };
        let is_plain = request.asks_nothing_of(self.pages);
        if is_plain && self.memory.is_none() && self.policy.cache == Caching::Cached {
            let guard = self.guard_bytes();
            let all = bytes.saturating_add(2 * guard);
            let start = self.arena.alloc(all).map_err(full)?;
            let origin = Origin::Cached(pages_from(start, all));
            return Ok((pages_from(start + guard, bytes), origin));
        }
        let start = self.choose_addresses(request, bytes).map_err(full)?;
        Ok((pages_from(start, bytes), Origin::Chosen))
    }

    fn choose_addresses(&self, request: &RegionRequest, bytes: u64) -> Result<u64, ArenaError> {
        let align_min = if self.memory.is_some() {
            SECTION_BYTES
        } else {
            PAGE_BYTES
        };
        let anywhere = Constraints {
            align: request.align.max(align_min),
            no_cross: request.no_cross,
            last: request.max.map_or(u64::MAX, |max| max.0),
            guard: self.guard_bytes(),
            ..Constraints::default()
        };
        if let Some(hint) = request.hint {
            // Exactly there, or at the next place above.
            let there = Constraints {
                min: hint.0,
                last: anywhere.last.min(hint.0.saturating_add(bytes - 1)),
                ..anywhere
            };
            let above = Constraints {
                min: hint.0,
                ..anywhere
            };
            for constraints in [there, above] {
                if let Ok(start) = self.arena.alloc_with(bytes, &constraints) {
                    return Ok(start);
                }
            }
        }
        self.arena.alloc_with(bytes, &anywhere)
    }

    fn give_addresses_back(&self, core: &RegionCore) {
        let freed = match core.origin {
            Origin::Cached(all) => self.arena.free(all.start.byte_offset(), all.bytes()),
            Origin::Chosen => self
                .arena
                .free_direct(core.pages.start.byte_offset(), core.pages.bytes()),
        };
        debug_assert!(freed.is_ok(), "{:?} was not allocated", core.pages);
    }

    /// The region that holds `addr`.
    ///
    /// # Errors
    /// [`GmError::NotAllocated`].
    #[doc(alias = "gm_as_lookup")]
    pub fn lookup(self: &Arc<Self>, addr: Va) -> Result<Region, GmError> {
        let page = addr.page();
        let core = self.region_over(page.single());
        core.map_or(Err(GmError::NotAllocated { va: addr }), |core| {
            Ok(Region {
                space: Arc::clone(self),
                core,
            })
        })
    }

    /// All regions, ascending.
    #[must_use]
    pub fn regions(self: &Arc<Self>) -> Vec<Region> {
        let all = self.cores();
        let handle = |core| Region {
            space: Arc::clone(self),
            core,
        };
        all.into_iter().map(handle).collect()
    }

    pub(super) fn cores(&self) -> Vec<Arc<RegionCore>> {
        self.regions.all()
    }

    /// The regions of frames. The others have no mappings to maintain, and their lock is held while
    /// their memory takes access from devices: before the list of devices, not after it.
    pub(super) fn frame_cores(&self) -> impl Iterator<Item = Arc<RegionCore>> {
        let all = self.cores().into_iter();
        all.filter(|core| core.kind == Kind::Frames)
    }

    /// The region that holds all of `pages`.
    pub(super) fn region_over(&self, pages: PageRange) -> Option<Arc<RegionCore>> {
        self.regions.over(pages)
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.regions.is_destroyed()
    }

    /// Deallocates the region that begins at `start`, as [`Region::dealloc`] does, for a caller that
    /// keeps addresses and no handles. A region that is not mapped goes in one step.
    ///
    /// # Errors
    /// [`GmError::NotAllocated`] if none begins there; else as for [`Region::dealloc`].
    pub fn dealloc_va(self: &Arc<Self>, start: Va) -> Result<(), GmError> {
        if start.is_page_aligned() && !self.has_queued_sets() {
            let taken = (self.regions).take_if(start.page(), RegionCore::free_at_once);
            if let Some(core) = taken {
                self.give_addresses_back(&core);
                return Ok(());
            }
        }
        let region = self.lookup(start)?;
        if region.start() != start {
            return Err(GmError::NotAllocated { va: start });
        }
        region.dealloc()
    }

    /// See [`Region::dealloc`].
    pub(crate) fn dealloc(&self, core: &Arc<RegionCore>) -> Result<(), GmError> {
        match &self.memory {
            Some(memory) if core.kind == Kind::Paged => {
                let mut inner = core.lock();
                if matches!(inner.state, RegionState::Freed) {
                    return Err(GmError::Destroyed);
                }
                memory.deallocate(core.pages)?;
                inner.state = RegionState::Freed;
            }
            _ => self.free_frames(core)?,
        }
        self.regions.remove(core);
        self.give_addresses_back(core);
        Ok(())
    }

    /// Unmaps the region and marks it freed, in one step with respect to a concurrent map.
    fn free_frames(&self, core: &Arc<RegionCore>) -> Result<(), GmError> {
        loop {
            let mut inner = core.lock();
            match &inner.state {
                RegionState::Freed => return Err(GmError::Destroyed),
                RegionState::Empty => {
                    inner.state = RegionState::Freed;
                    return Ok(());
                }
                RegionState::Mapped(_) | RegionState::Stuck(_) => drop(inner),
                RegionState::Leaving => {
                    drop(inner);
                    crate::sync::yield_now();
                    continue;
                }
            }
            let leaver = Leaver {
                region: Arc::clone(core),
                mapping: None,
            };
            let unmapped = self.unmap_together(&[leaver]).pop();
            match unmapped {
                None | Some(Ok(()) | Err(GmError::NotMapped { .. })) => {}
                Some(Err(error)) => return Err(error),
            }
        }
    }

    /// # Errors
    /// [`GmError::Destroyed`].
    pub(crate) fn refuse_if_destroyed(&self) -> Result<(), GmError> {
        if self.is_destroyed() {
            Err(GmError::Destroyed)
        } else {
            Ok(())
        }
    }

    pub(crate) fn require_attached(&self, device: &Device) -> Result<(), GmError> {
        let list = self.devices.share();
        let attached = list.find_same(device).map(|_| ());
        let device = device.id();
        attached.ok_or(GmError::NotAttached { device })
    }
}

fn pages_from(start: u64, bytes: u64) -> PageRange {
    let first = PageNo::containing(start);
    first.run(bytes >> PAGE_SHIFT)
}
