// SPDX-License-Identifier: Apache-2.0
//! [`AddressSpace`]: addresses that mean the same to the CPU and to all attached devices (GMEM 3).
//!
//! ```text
//!                       AddressSpace
//!        ┌─────────────────┼──────────────────┬───────────────┐
//!      Arena            regions           Attachments      Operations
//!   free addresses   what is allocated   devices, each     unmaps in
//!   (vmem)           and what is behind  with a table      batches
//!                     │          │
//!              Wired, Demand   Paged ──► PagedMemory (a VM's RAM: word by word)
//!              (frames)
//! ```
//! Every page that a device faults on must lie in a region, or the fault is refused. A region's
//! pages are frames (wired by the caller, or taken from registered memory by faults), or pages of
//! the space's paged memory, which may be swapped out. Both kinds of fault enter through
//! [`AddressSpace::fault`].
//!
//! *Invariant:* a device can reach only pages behind an allocated region, and the bit of its table
//! says so. *Invariant:* a frame is freed, and an address reused, only after the invalidation that
//! removed the last translation.

mod attach;
pub(crate) mod attachments;
mod demand;
mod mapping;
#[cfg(all(test, loom))]
mod model;
mod operations;
mod region_map;
mod regions;

pub use attachments::TABLES_MAX;
pub use operations::{Callback, QUEUED_MAX};
pub use regions::RegionRequest;

pub(crate) use operations::{Answer, Leaver, Operation, PendingRegion};

use crate::{
    arena::{Arena, ArenaSettings, CACHED_QUANTA_LIMIT, Fit},
    error::GmError,
    paging::{Fault, FaultOutcome, Overwritten, PagedMemory, Reply},
    region::Kind,
    sync::Arc,
};
use attachments::Attachments;
use operations::Operations;
use pagetide_addr::{PAGE_BYTES, PageRange, Va};
use region_map::RegionMap;
use std::sync::atomic::AtomicU64;

/// Regions of up to this many pages come from the caches of a space that has caches. Addresses are
/// plentiful, and all caches are emptied before a request fails.
const CACHED_PAGES: u32 = CACHED_QUANTA_LIMIT;

/// Whose page table a device uses (GMEM 3.2).
#[doc(alias = "gm_mmu_mode_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A table that devices of the same format share, made if there is none.
    Shared,
    /// A table of its own, kept coherent with the others.
    Coherent,
}

/// Whether a device becomes active when it is attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// It does, and is deactivated everywhere else.
    Now,
    /// It does not: see [`crate::Device::switch`].
    Later,
}

/// How addresses are allocated; the options compose (GMEM 4.1).
#[doc(alias = "gm_as_alloc_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AllocPolicy {
    /// Which of the fitting places is taken.
    pub fit: AddressFit,
    /// Whether an unused page is kept on both sides of each region.
    pub guard: Guard,
    /// Whether freed small regions are cached for the next request of their size.
    pub cache: Caching,
}

/// Which of several free ranges is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AddressFit {
    /// One that is found in constant time.
    #[default]
    Instant,
    /// The lowest.
    First,
}

/// Unused pages around a region, to trap overruns at its ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Guard {
    /// None.
    #[default]
    Unguarded,
    /// One on each side.
    Guarded,
}

/// What happens to the addresses of freed small regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Caching {
    /// They join the free addresses around them.
    #[default]
    Uncached,
    /// They are cached by size, for the next request.
    Cached,
}

/// See the module.
#[doc(alias = "gm_as_t")]
pub struct AddressSpace {
    pages: PageRange,
    policy: AllocPolicy,
    arena: Arena,
    regions: RegionMap,
    pub(crate) devices: Arc<Attachments>,
    memory: Option<Arc<PagedMemory>>,
    operations: Operations,
    next_serial: AtomicU64,
}

impl AddressSpace {
    /// A space of the addresses from `begin` to before `end`, whose pages are frames.
    ///
    /// # Errors
    /// [`GmError::InvalidArgument`] if these are not whole pages, or none.
    #[doc(alias = "gm_as_create")]
    pub fn create(begin: Va, end: Va, policy: AllocPolicy) -> Result<Arc<Self>, GmError> {
        Self::build(begin, end, policy, Arc::default(), None)
    }

    /// A space whose regions are parts of `memory`: a VM's RAM, whose pages may be swapped out. Its
    /// addresses are the page numbers of the memory, in bytes.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn over(
        memory: PagedMemory,
        begin: Va,
        end: Va,
        policy: AllocPolicy,
    ) -> Result<Arc<Self>, GmError> {
        let devices = Arc::clone(memory.devices());
        Self::build(begin, end, policy, devices, Some(Arc::new(memory)))
    }

    fn build(
        begin: Va,
        end: Va,
        policy: AllocPolicy,
        devices: Arc<Attachments>,
        memory: Option<Arc<PagedMemory>>,
    ) -> Result<Arc<Self>, GmError> {
        let wrong = |why| GmError::InvalidArgument {
            argument: "range of addresses",
            why,
        };
        if !begin.is_page_aligned() || !end.is_page_aligned() {
            return Err(wrong("it must be made of whole 4 KiB pages"));
        }
        if begin >= end {
            return Err(wrong("it must end after it begins"));
        }
        let arena = Arena::new(ArenaSettings {
            quantum: PAGE_BYTES,
            fit: match policy.fit {
                AddressFit::Instant => Fit::Instant,
                AddressFit::First => Fit::First,
            },
            cached_quanta_max: match policy.cache {
                Caching::Uncached => 0,
                Caching::Cached => CACHED_PAGES,
            },
        });
        arena
            .add(begin.0, end.0 - 1)
            .map_err(|_| wrong("it cannot be allocated from"))?;
        Ok(Arc::new(Self {
            pages: PageRange::new(begin.page(), end.page()),
            policy,
            arena,
            regions: RegionMap::new(),
            devices,
            memory,
            operations: Operations::new(),
            next_serial: AtomicU64::new(1),
        }))
    }

    /// The range of its addresses, in pages.
    #[must_use]
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// Its paged memory, if it has any.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<PagedMemory>> {
        self.memory.as_ref()
    }

    /// Destroys a space that has neither devices nor regions.
    ///
    /// # Errors
    /// [`GmError::InUse`], [`GmError::Destroyed`].
    #[doc(alias = "gm_as_destroy")]
    pub fn destroy(&self) -> Result<(), GmError> {
        self.wait_for_changes();
        let devices = self.devices.own();
        if self.is_destroyed() {
            return Err(GmError::Destroyed);
        }
        if !devices.is_empty() {
            return Err(GmError::InUse {
                by: "a device that is attached",
            });
        }
        self.regions.destroy()?;
        self.stop_operations();
        Ok(())
    }

    /// Makes the pages of a fault present and grants them, or reports why it cannot. All faults
    /// come here. This wakes a vCPU that waits in the kernel. `reply`, if given, is called exactly
    /// once, possibly by another thread, possibly before this returns.
    pub fn fault(&self, fault: &Fault, reply: Option<Reply>) {
        let region = self.region_over(fault.pages);
        let outcome = match (region, &self.memory) {
            (Some(region), Some(memory)) if region.kind == Kind::Paged => {
                return memory.fault(fault, reply);
            }
            (Some(region), _) => self.fault_on_frames(&region, fault),
            (None, _) => FaultOutcome::OutOfRange,
        };
        if let Some(reply) = reply {
            reply(outcome);
        }
    }

    /// Serves a fault if that needs neither an eviction nor another thread. Otherwise returns
    /// `None`, and the caller must call [`Self::fault`].
    #[must_use]
    pub fn fault_without_waiting(&self, fault: &Fault) -> Option<FaultOutcome> {
        match (self.region_over(fault.pages), &self.memory) {
            (Some(region), Some(memory)) if region.kind == Kind::Paged => {
                memory.fault_without_waiting(fault)
            }
            (Some(_), _) => None,
            (None, _) => Some(FaultOutcome::OutOfRange),
        }
    }

    /// Installs `content`, which a device has written, in those pages of a fault that are absent,
    /// replacing their stored content, which is not loaded (see [`crate::paging::overwrite`]).
    /// Pages of frames are left to the device. May wait for an eviction; `still_wanted` returns
    /// false once the device has given up (see [`PagedMemory::overwrite`]).
    pub fn overwrite(
        &self,
        fault: &Fault,
        content: &[u8],
        still_wanted: &dyn Fn() -> bool,
    ) -> Overwritten {
        match (self.region_over(fault.pages), &self.memory) {
            (Some(region), Some(memory)) if region.kind == Kind::Paged => {
                memory.overwrite(fault, content, still_wanted)
            }
            (Some(_), _) => Overwritten::nothing(FaultOutcome::Present),
            (None, _) => Overwritten::nothing(FaultOutcome::OutOfRange),
        }
    }

    /// Like [`Self::overwrite`], if that needs neither an eviction nor another thread. Otherwise
    /// returns `None`, and the caller must call [`Self::overwrite`]. If the need arises half way,
    /// the remaining pages are left to the device.
    #[must_use]
    pub fn overwrite_without_waiting(
        &self,
        fault: &Fault,
        content: &[u8],
        still_wanted: &dyn Fn() -> bool,
    ) -> Option<Overwritten> {
        match (self.region_over(fault.pages), &self.memory) {
            (Some(region), Some(memory)) if region.kind == Kind::Paged => {
                memory.overwrite_without_waiting(fault, content, still_wanted)
            }
            (Some(_), _) => Some(Overwritten::nothing(FaultOutcome::Present)),
            (None, _) => Some(Overwritten::nothing(FaultOutcome::OutOfRange)),
        }
    }
}

/// A space that is dropped without being destroyed deactivates its devices: none may keep
/// translating by a table whose frames are given to others.
impl Drop for AddressSpace {
    fn drop(&mut self) {
        let mut list = std::mem::take(&mut *self.devices.own());
        let mut used = attachments::TableMask::NONE;
        while let Some((gone, last)) = list.remove_last() {
            if !let_go(self, &gone) {
                used.insert(&gone.table);
            }
            if last == attachments::LastUse::Yes && !used.contains(&gone.table) {
                gone.table.destroy();
            }
        }
        if !used.is_empty() {
            // A device still uses frames that the regions hold: those are never freed.
            self.regions.leak();
        }
        self.abandon_operations();
    }
}

/// Deactivates a device in a space that ends; false if it still translates by its table.
fn let_go(space: &AddressSpace, gone: &attachments::Attachment) -> bool {
    let mut standing = crate::sync::lock(&gone.device.standing);
    // It may be active elsewhere by now: the thread that activated it there found this space ending.
    let is_here = gone.is_active() && standing.is_active(space);
    let let_go = !is_here || gone.device.mmu().deactivate(gone.table.id()).is_ok();
    standing.forget(space);
    let_go
}

impl std::fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.regions.all().len();
        write!(
            f,
            "AddressSpace({} bytes, {count} regions)",
            self.pages.bytes()
        )
    }
}
