// SPDX-License-Identifier: Apache-2.0
//! [`AddressSpace`]: what a space is made of. The files beside this one say what it does.

use super::{queue::Operations, region_map::RegionMap};
use crate::{
    arena::{Arena, ArenaSettings, CACHED_QUANTA_LIMIT, Fit},
    attachments::Attachments,
    error::GmError,
    paging::PagedMemory,
    sync::Arc,
};
use pagetide_addr::{PAGE_BYTES, PageRange, Va};
use std::sync::atomic::AtomicU64;

/// Regions of up to this many pages come from the caches of a space that has caches. Addresses are
/// plentiful, and all caches are emptied before a request fails.
const CACHED_PAGES: u32 = CACHED_QUANTA_LIMIT;

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
    pub(super) pages: PageRange,
    pub(super) policy: AllocPolicy,
    pub(super) arena: Arena,
    pub(super) regions: RegionMap,
    pub(super) devices: Arc<Attachments>,
    pub(super) memory: Option<Arc<PagedMemory>>,
    pub(super) operations: Operations,
    pub(super) next_serial: AtomicU64,
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
        memory: Arc<PagedMemory>,
        begin: Va,
        end: Va,
        policy: AllocPolicy,
    ) -> Result<Arc<Self>, GmError> {
        let devices = Arc::clone(memory.devices());
        Self::build(begin, end, policy, devices, Some(memory))
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
