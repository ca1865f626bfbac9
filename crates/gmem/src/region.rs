// SPDX-License-Identifier: Apache-2.0
//! [`Region`]: an allocated range of addresses, and what is behind it.
//!
//! ```text
//!            wire (gm_region_map) ┌───────┐
//!           ┌────────────────────►│ Wired │──────┐
//!   ┌───────┤                     └───────┘      │ unmap begins   ┌─────────┐
//!   │ Empty │                                    ├───────────────►│ Leaving │
//!   └───────┤                     ┌────────┐     │                └────┬────┘
//!    ▲      └────────────────────►│ Demand │─────┘                     │
//!    │       first fault          └────────┘   ▲ unmap again           │ invalidated
//!    │                                 ┌───────┴┐                      │
//!    ├─────────────────────────────────│ Stuck  │◄─────────────────────┤ a device failed
//!    │                                 └────────┘                      │
//!    └─────────────────────────────────────────────────────────────────┘
//! ```
//! *Wired*: mapped to frames that the caller owns, in every table of the space.
//! *Demand*: frames of registered memory, given page by page by faults, and
//! mapped in the tables of those who faulted. *Stuck*: a device failed while
//! translations were taken away, so that some may still be in use; nothing is
//! freed and no address reused until an unmap succeeds. A region of paged memory
//! (a VM's RAM) is none of this: its pages are kept by
//! [`PagedMemory`](crate::PagedMemory).

use crate::{
    device::Device,
    error::GmError,
    frames::Frame,
    mmu::Backing,
    set::{MappingSet, SetCore},
    space::{
        AddressSpace, Callback, Leaver, Operation, PendingRegion,
        attachments::{Table, TableMask},
    },
    sync::{Arc, Mutex, MutexGuard, lock},
};
use pagetide_addr::{Access, PAGE_BYTES, PAGE_SHIFT, Pa, PageNo, PageRange, Va};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

/// What a fault makes of a page's other mappings (GMEM 4.1, `gm_region_placement_t`; 7).
#[doc(alias = "gm_region_placement_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// One mapping in the whole space: others are destroyed first, and the page moves to the memory
    /// of the device that faulted, if it has any.
    #[default]
    Unique,
    /// The page stays where it is, and is mapped by everybody who faults on it.
    RemoteAccess,
    /// As [`Self::Unique`], and the pages that follow are brought along without being waited for.
    Prefetch,
}

/// What may be done with the pages of a region.
#[doc(alias = "gm_prot_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protection {
    /// Nothing: every fault is denied.
    Nothing,
    /// Reads.
    ReadOnly,
    /// Reads and writes.
    #[default]
    ReadWrite,
}

impl Protection {
    /// The strongest access it allows.
    #[must_use]
    pub const fn strongest(self) -> Option<Access> {
        match self {
            Self::Nothing => None,
            Self::ReadOnly => Some(Access::Read),
            Self::ReadWrite => Some(Access::Write),
        }
    }

    /// True if it allows `access`.
    #[must_use]
    pub const fn allows(self, access: Access) -> bool {
        matches!(
            (self, access),
            (Self::ReadWrite, _) | (Self::ReadOnly, Access::Read)
        )
    }
}

/// How a region is to be wired.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// Access that devices get.
    pub access: Access,
    /// Size of the pages to map by, in bytes; every frame given is one of them.
    pub page_bytes: u64,
    /// The set that the mapping joins.
    pub set: Option<MappingSet>,
}

impl MapOptions {
    /// Pages of 4 KiB, in no set.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self {
            access,
            page_bytes: PAGE_BYTES,
            set: None,
        }
    }
}

/// The same, as the space keeps it.
#[derive(Clone)]
pub(crate) struct Wiring {
    pub(crate) access: Access,
    pub(crate) page_bytes: u64,
    pub(crate) set: Option<Arc<SetCore>>,
}

/// What is behind a region, as far as a caller can tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapped {
    /// Nothing.
    Nothing,
    /// Frames of the caller's.
    Wired,
    /// Frames that faults have brought.
    Demand,
    /// Pages of the space's paged memory.
    Paged,
    /// Being unmapped, or to be unmapped again because a device failed.
    Leaving,
}

/// Frames that a region is wired to.
pub(crate) struct Wired {
    pub(crate) serial: u64,
    pub(crate) access: Access,
    pub(crate) page_bytes: u64,
    /// Runs of frames that follow one another.
    pub(crate) runs: Vec<(PageRange, Pa)>,
    pub(crate) tables: TableMask,
}

impl Wired {
    /// Grants all of it in `table`.
    pub(crate) fn grant(&self, table: &Table) -> Result<(), GmError> {
        self.runs
            .iter()
            .try_for_each(|(pages, first)| table.grant(*pages, self.access, self.backing(*first)))
    }

    pub(crate) fn backing(&self, first: Pa) -> Backing {
        Backing::Frames {
            first,
            page_bytes: self.page_bytes,
        }
    }
}

/// A page that a fault brought.
pub(crate) struct DemandPage {
    pub(crate) frame: Frame,
    pub(crate) tables: TableMask,
}

/// What is mapped.
pub(crate) enum Content {
    Wired(Wired),
    Demand(BTreeMap<PageNo, DemandPage>),
}

impl Content {
    /// The tables in which some of it may be mapped.
    pub(crate) fn tables(&self) -> TableMask {
        match self {
            Self::Wired(wired) => wired.tables,
            Self::Demand(pages) => pages.values().fold(TableMask::NONE, |mut all, page| {
                all.unite(page.tables);
                all
            }),
        }
    }

    /// The pages of it.
    pub(crate) fn add_ranges(&self, ranges: &mut Vec<PageRange>) {
        match self {
            Self::Wired(wired) => ranges.extend(wired.runs.iter().map(|(pages, _)| *pages)),
            Self::Demand(pages) => ranges.extend(pages.keys().map(|page| page.single())),
        }
    }

    /// The table is no more.
    pub(crate) fn forget(&mut self, table: &Table) {
        match self {
            Self::Wired(wired) => wired.tables.remove(table),
            Self::Demand(pages) => pages
                .values_mut()
                .for_each(|page| page.tables.remove(table)),
        }
    }
}

/// See the picture.
pub(crate) enum State {
    Empty,
    Mapped(Content),
    Leaving,
    Stuck(Content),
    /// The region is no more.
    Freed,
}

/// What a region's lock guards.
pub(crate) struct Inner {
    pub(crate) state: State,
    pub(crate) protection: Protection,
    pub(crate) placement: Placement,
    /// Whose memory pages are placed in; the faulting device's if nobody is named.
    pub(crate) home: Option<Arc<Device>>,
}

/// Whose pages a region has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Frames: wired by the caller, or brought by faults.
    Frames,
    /// Pages of the space's paged memory.
    Paged,
}

/// How a region came by its addresses, and so how they go back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// From the caches of the arena, unused pages around it included.
    Cached(PageRange),
    /// From the free addresses, by constraints.
    Chosen,
}

/// A region as its space knows it.
pub(crate) struct RegionCore {
    pub(crate) pages: PageRange,
    pub(crate) origin: Origin,
    pub(crate) kind: Kind,
    inner: Mutex<Inner>,
    /// Operations in the queue.
    queued: AtomicU64,
}

impl RegionCore {
    pub(crate) fn new(pages: PageRange, origin: Origin, kind: Kind) -> Arc<Self> {
        Arc::new(Self {
            pages,
            origin,
            kind,
            inner: Mutex::new(Inner {
                state: State::Empty,
                protection: Protection::default(),
                placement: Placement::default(),
                home: None,
            }),
            queued: AtomicU64::new(0),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(crate) fn start(&self) -> Va {
        Va(self.pages.start.0 << PAGE_SHIFT)
    }

    // Release in `operation_done` pairs with Acquire here: who sees none queued sees what they did.
    pub(crate) fn has_queued(&self) -> bool {
        self.queued.load(Ordering::Acquire) > 0
    }

    pub(crate) fn operation_queued(&self) {
        self.queued.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn operation_done(&self) {
        self.queued.fetch_sub(1, Ordering::Release);
    }

    /// Begins to unmap: from now on nobody can map it anew by a fault. If a mapping is named, only that
    /// one is unmapped.
    pub(crate) fn begin_unmap(&self, mapping: Option<u64>) -> Result<Leaving<'_>, GmError> {
        let mut inner = self.lock();
        let not_mapped = Err(GmError::NotMapped { va: self.start() });
        if mapping.is_some_and(|serial| !inner.state.is_mapped_as(serial)) {
            return not_mapped;
        }
        match std::mem::replace(&mut inner.state, State::Leaving) {
            State::Mapped(content) | State::Stuck(content) => Ok(Leaving {
                region: self,
                content: Some(content),
            }),
            State::Freed => {
                inner.state = State::Freed;
                Err(GmError::Destroyed)
            }
            before @ (State::Empty | State::Leaving) => {
                inner.state = before;
                not_mapped
            }
        }
    }

    /// True while a mapping of it is being taken away.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.lock().state, State::Leaving)
    }

    /// True if it is mapped, or stuck, by the mapping of that number.
    pub(crate) fn is_mapped_as(&self, serial: u64) -> bool {
        self.lock().state.is_mapped_as(serial)
    }

    /// As [`Self::is_mapped_as`], and also while some mapping is being taken away, which may fail.
    pub(crate) fn may_be_mapped_as(&self, serial: u64) -> bool {
        let inner = self.lock();
        matches!(inner.state, State::Leaving) || inner.state.is_mapped_as(serial)
    }
}

impl State {
    /// Every table has it.
    pub(crate) fn set_mapped(&mut self) {
        *self = match std::mem::replace(self, Self::Empty) {
            Self::Stuck(content) => Self::Mapped(content),
            other => other,
        };
    }

    fn is_mapped_as(&self, serial: u64) -> bool {
        match self {
            Self::Mapped(Content::Wired(wired)) | Self::Stuck(Content::Wired(wired)) => {
                wired.serial == serial
            }
            _ => false,
        }
    }
}

/// A region that is being unmapped. Dropped without [`Self::finish`], as by a driver that panics, it
/// is stuck.
pub(crate) struct Leaving<'a> {
    region: &'a RegionCore,
    content: Option<Content>,
}

impl Leaving<'_> {
    /// What leaves.
    pub(crate) fn content(&self) -> &Content {
        const NOTHING: &Content = &Content::Demand(BTreeMap::new());
        self.content.as_ref().unwrap_or(NOTHING)
    }

    /// Ends it. The frames are freed, unless they may still be mapped in a table that failed.
    pub(crate) fn finish(mut self, failed: Option<&(TableMask, GmError)>) -> Result<(), GmError> {
        let tables = self.content().tables();
        match failed.filter(|(failed, _)| failed.meets(tables)) {
            // The drop does the rest.
            Some((_, error)) => Err(error.clone()),
            None => {
                let gone = self.content.take();
                self.region.lock().state = State::Empty;
                drop(gone);
                Ok(())
            }
        }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(content) = self.content.take() {
            self.region.lock().state = State::Stuck(content);
        }
    }
}

/// A region; clones are the same one. It lives until [`Region::dealloc`].
#[doc(alias = "gm_region_t")]
#[derive(Clone)]
pub struct Region {
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) core: Arc<RegionCore>,
}

impl Region {
    /// Its first address.
    #[must_use]
    pub fn start(&self) -> Va {
        self.core.start()
    }

    /// Its length, in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.core.pages.bytes()
    }

    /// Its pages.
    #[must_use]
    pub fn pages(&self) -> PageRange {
        self.core.pages
    }

    /// The space it was allocated from.
    #[must_use]
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// What is behind it now.
    #[must_use]
    pub fn mapped(&self) -> Mapped {
        if self.core.kind == Kind::Paged {
            return Mapped::Paged;
        }
        match &self.core.lock().state {
            State::Empty | State::Freed => Mapped::Nothing,
            State::Mapped(Content::Wired(_)) => Mapped::Wired,
            State::Mapped(Content::Demand(_)) => Mapped::Demand,
            State::Leaving | State::Stuck(_) => Mapped::Leaving,
        }
    }

    /// Wires the region to `frames`, one for each page of `options.page_bytes`, in the tables of all
    /// devices of the space, those to come included.
    ///
    /// # Errors
    /// [`GmError::AlreadyMapped`], [`GmError::InvalidArgument`], [`GmError::Unsupported`],
    /// [`GmError::Destroyed`]; [`GmError::Device`], and then nothing is mapped, or (if the device
    /// would not take back what it had got) the region must be unmapped before it is used again.
    #[doc(alias = "gm_region_map")]
    pub fn map(&self, frames: &[Pa], options: &MapOptions) -> Result<(), GmError> {
        let wiring = self.wiring(options)?;
        self.settle_queued();
        self.space.map_now(&self.core, frames, &wiring)
    }

    /// As [`Self::map`], without waiting: `callback` tells when it is done.
    ///
    /// # Errors
    /// [`GmError::Destroyed`]; all others are told by the callback and by
    /// [`AddressSpace::synchronize`].
    #[doc(alias = "gm_region_map")]
    pub fn map_later(
        &self,
        frames: Vec<Pa>,
        options: MapOptions,
        callback: Option<Callback>,
    ) -> Result<(), GmError> {
        self.refuse_if_freed()?;
        let operation = Operation::Map {
            region: PendingRegion::new(&self.core),
            frames,
            wiring: self.wiring(&options)?,
        };
        self.space.enqueue(operation, callback.into());
        Ok(())
    }

    fn wiring(&self, options: &MapOptions) -> Result<Wiring, GmError> {
        let set = options.set.as_ref();
        if set.is_some_and(|set| !set.is_of(&self.space)) {
            return Err(GmError::InvalidArgument {
                argument: "mapping set",
                why: "it must belong to the region's space",
            });
        }
        Ok(Wiring {
            access: options.access,
            page_bytes: options.page_bytes,
            set: set.map(|set| Arc::clone(set.core())),
        })
    }

    /// Takes the region from all devices. It stays allocated, and pages that faults brought are
    /// freed. When this returns without error, no device can reach it.
    ///
    /// # Errors
    /// [`GmError::NotMapped`] (also while another thread unmaps it), [`GmError::Destroyed`],
    /// [`GmError::Unsupported`] for paged memory; [`GmError::Device`] or [`GmError::Busy`], after which some devices may still reach it: nothing is freed, unmap again.
    #[doc(alias = "gm_region_unmap")]
    pub fn unmap(&self) -> Result<(), GmError> {
        self.refuse_if_freed()?;
        self.settle_queued();
        let leaver = Leaver {
            region: Arc::clone(&self.core),
            mapping: None,
        };
        let mut results = self.space.unmap_together(&[leaver]);
        results.pop().unwrap_or(Ok(()))
    }

    /// As [`Self::unmap`], without waiting: `callback` tells when no device can reach it any more.
    ///
    /// # Errors
    /// As [`Self::map_later`].
    #[doc(alias = "gm_region_unmap")]
    pub fn unmap_later(&self, callback: Option<Callback>) -> Result<(), GmError> {
        self.refuse_if_freed()?;
        let region = PendingRegion::new(&self.core);
        self.space
            .enqueue(Operation::Unmap { region }, callback.into());
        Ok(())
    }

    /// Unmaps the region if need be and gives its addresses back.
    ///
    /// # Errors
    /// [`GmError::Destroyed`]; [`GmError::Device`], [`GmError::Busy`]: it is then still allocated.
    #[doc(alias = "gm_region_dealloc")]
    pub fn dealloc(&self) -> Result<(), GmError> {
        self.settle_queued();
        self.space.dealloc(&self.core)
    }

    /// Says what a fault makes of the region's pages, and in whose memory they are placed: the
    /// faulting device's (the host's if it has none) unless `home` names one. Pages that lie
    /// elsewhere move when they are next faulted on.
    ///
    /// # Errors
    /// [`GmError::NotAttached`] if `home` is not attached to the space, [`GmError::Destroyed`].
    #[doc(alias = "gm_region_set_policy")]
    pub fn set_policy(
        &self,
        placement: Placement,
        home: Option<&Arc<Device>>,
    ) -> Result<(), GmError> {
        if let Some(device) = home {
            self.space.require_attached(device)?;
        }
        let mut inner = self.core.lock();
        if matches!(inner.state, State::Freed) {
            return Err(GmError::Destroyed);
        }
        inner.placement = placement;
        inner.home = home.map(Arc::clone);
        Ok(())
    }

    /// The policy, and the device named by it.
    #[must_use]
    pub fn policy(&self) -> (Placement, Option<Arc<Device>>) {
        let inner = self.core.lock();
        (inner.placement, inner.home.as_ref().map(Arc::clone))
    }

    /// Says what may be done with the region from now on, as `mprotect` does for a process. When this
    /// returns without error, no device has more access than that.
    ///
    /// # Errors
    /// [`GmError::Unsupported`] for paged memory, [`GmError::Destroyed`]; [`GmError::Device`] or
    /// [`GmError::Busy`], after which a device may keep the access it had: protect again.
    pub fn protect(&self, protection: Protection) -> Result<(), GmError> {
        self.settle_queued();
        self.space.protect(&self.core, protection)
    }

    /// Operations that were queued come first.
    fn settle_queued(&self) {
        if self.core.has_queued() || self.space.has_queued_sets() {
            self.space.wait_for_changes();
        }
    }

    fn refuse_if_freed(&self) -> Result<(), GmError> {
        if matches!(self.core.lock().state, State::Freed) {
            return Err(GmError::Destroyed);
        }
        if self.core.kind == Kind::Paged {
            return Err(GmError::Unsupported {
                what: "mapping and unmapping of paged memory, which faults and evictions do",
            });
        }
        Ok(())
    }
}

/// Two are equal if they are the same region, not if they lie in the same place.
impl PartialEq for Region {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for Region {}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes at {})", self.len_bytes(), self.start())
    }
}
