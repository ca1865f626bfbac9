// SPDX-License-Identifier: Apache-2.0
//! [`RegionCore`]: a region as its space keeps it, and the states of its backing.
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
//! *Wired*: mapped to frames that the caller owns, in every table of the space. *Demand*: frames of
//! registered memory, given page by page by faults, and mapped in the tables of the devices that
//! faulted. *Stuck*: a device failed while translations were being removed, so some may still be in
//! use; nothing is freed and no address reused until an unmap succeeds. A region of paged memory (a
//! VM's RAM) has none of these states: [`PagedMemory`](crate::PagedMemory) keeps its pages.

use crate::{
    attachments::{Table, TableMask},
    device::Device,
    error::GmError,
    frames::Frame,
    mmu::Backing,
    sync::{Arc, Mutex, MutexGuard, lock, try_lock},
};
use pagetide_addr::{Access, Pa, PageNo, PageRange, Va};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

/// How a fault treats a page's other mappings (GMEM 4.1, `gm_region_placement_t`; 7).
#[doc(alias = "gm_region_placement_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// One mapping in the whole space: others are destroyed first, and the page moves to the memory
    /// of the device that faulted, if it has any.
    #[default]
    Unique,
    /// The page stays where it is, and is mapped by every device that faults on it.
    RemoteAccess,
    /// As [`Self::Unique`], and the pages that follow are prefetched, without a wait for them.
    Prefetch,
}

/// The access that a region's pages allow.
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

/// Frames that a region is wired to.
pub(crate) struct Wired {
    pub(crate) serial: u64,
    pub(crate) access: Access,
    pub(crate) page_bytes: u64,
    /// Runs of consecutive frames.
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

    /// Appends its page ranges.
    pub(crate) fn add_ranges(&self, ranges: &mut Vec<PageRange>) {
        match self {
            Self::Wired(wired) => ranges.extend(wired.runs.iter().map(|(pages, _)| *pages)),
            Self::Demand(pages) => ranges.extend(pages.keys().map(|page| page.single())),
        }
    }

    /// The table no longer exists.
    pub(crate) fn forget(&mut self, table: &Table) {
        match self {
            Self::Wired(wired) => wired.tables.remove(table),
            Self::Demand(pages) => pages
                .values_mut()
                .for_each(|page| page.tables.remove(table)),
        }
    }
}

/// See the diagram.
pub(crate) enum RegionState {
    Empty,
    Mapped(Content),
    Leaving,
    Stuck(Content),
    /// The region was deallocated.
    Freed,
}

/// What a region's lock guards.
pub(crate) struct Inner {
    pub(crate) state: RegionState,
    pub(crate) protection: Protection,
    pub(crate) placement: Placement,
    /// The device whose memory pages are placed in; if none, that of the faulting device.
    pub(crate) home: Option<Arc<Device>>,
}

/// What a region's pages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Frames: wired by the caller, or brought by faults.
    Frames,
    /// Pages of the space's paged memory.
    Paged,
}

/// Where a region's addresses come from, and so how they are returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// From the caches of the arena, including unused pages around it.
    Cached(PageRange),
    /// From the free addresses, by constraints.
    Chosen,
}

/// A region as its space keeps it.
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
                state: RegionState::Empty,
                protection: Protection::default(),
                placement: match kind {
                    Kind::Frames => Placement::default(),
                    // Its pages have one place each, which every device uses.
                    Kind::Paged => Placement::RemoteAccess,
                },
                home: None,
            }),
            queued: AtomicU64::new(0),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Marks an unmapped region freed, if that needs no wait: no operation of it is queued, and no other
    /// thread has its lock.
    pub(crate) fn free_at_once(&self) -> bool {
        if self.kind != Kind::Frames || self.has_queued() {
            return false;
        }
        let Some(mut inner) = try_lock(&self.inner) else {
            return false;
        };
        let is_unmapped = matches!(inner.state, RegionState::Empty);
        if is_unmapped {
            inner.state = RegionState::Freed;
        }
        is_unmapped
    }

    pub(crate) fn start(&self) -> Va {
        self.pages.start.va()
    }

    // Release in `operation_done` pairs with Acquire here: a reader of 0 sees what the operations
    // did.
    pub(crate) fn has_queued(&self) -> bool {
        self.queued.load(Ordering::Acquire) > 0
    }

    pub(crate) fn operation_queued(&self) {
        self.queued.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn operation_done(&self) {
        self.queued.fetch_sub(1, Ordering::Release);
    }

    /// Begins to unmap: from now on no fault can map it again. If a mapping is named, only that one
    /// is unmapped.
    pub(crate) fn begin_unmap(&self, mapping: Option<u64>) -> Result<Leaving<'_>, GmError> {
        let mut inner = self.lock();
        let not_mapped = Err(GmError::NotMapped { va: self.start() });
        if mapping.is_some_and(|serial| !inner.state.is_mapped_as(serial)) {
            return not_mapped;
        }
        match std::mem::replace(&mut inner.state, RegionState::Leaving) {
            RegionState::Mapped(content) | RegionState::Stuck(content) => Ok(Leaving {
                region: self,
                content: Some(content),
            }),
            RegionState::Freed => {
                inner.state = RegionState::Freed;
                Err(GmError::Destroyed)
            }
            before @ (RegionState::Empty | RegionState::Leaving) => {
                inner.state = before;
                not_mapped
            }
        }
    }

    /// True while one of its mappings is being removed.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.lock().state, RegionState::Leaving)
    }

    /// True if it is mapped, or stuck, by the mapping with that number.
    pub(crate) fn is_mapped_as(&self, serial: u64) -> bool {
        self.lock().state.is_mapped_as(serial)
    }

    /// Like [`Self::is_mapped_as`], and also while some mapping is being removed, which may fail.
    pub(crate) fn may_be_mapped_as(&self, serial: u64) -> bool {
        let inner = self.lock();
        matches!(inner.state, RegionState::Leaving) || inner.state.is_mapped_as(serial)
    }
}

impl RegionState {
    /// All tables have it.
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

/// A region to be unmapped; if a mapping is named, only while it has that mapping.
pub(crate) struct Leaver {
    pub(crate) region: Arc<RegionCore>,
    pub(crate) mapping: Option<u64>,
}

/// A region that is being unmapped. If dropped without [`Self::finish`], as by a driver's panic, it
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

    /// Ends the unmap. The frames are freed, unless they may still be mapped in a table that failed.
    pub(crate) fn finish(mut self, failed: Option<&(TableMask, GmError)>) -> Result<(), GmError> {
        let tables = self.content().tables();
        match failed.filter(|(failed, _)| failed.meets(tables)) {
            // Dropping it does the rest.
            Some((_, error)) => Err(error.clone()),
            None => {
                let gone = self.content.take();
                self.region.lock().state = RegionState::Empty;
                drop(gone);
                Ok(())
            }
        }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(content) = self.content.take() {
            self.region.lock().state = RegionState::Stuck(content);
        }
    }
}
