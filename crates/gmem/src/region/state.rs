// SPDX-License-Identifier: Apache-2.0
//! [`RegionCore`]: a region as its space knows it, and the states of what is behind it.
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

use super::{Placement, Protection};
use crate::{
    device::Device,
    error::GmError,
    frames::Frame,
    mmu::Backing,
    set::SetCore,
    space::attachments::{Table, TableMask},
    sync::{Arc, Mutex, MutexGuard, lock},
};
use pagetide_addr::{Access, Pa, PageNo, PageRange, Va};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

/// How a region is to be wired, as the space keeps it.
#[derive(Clone)]
pub(crate) struct Wiring {
    pub(crate) access: Access,
    pub(crate) page_bytes: u64,
    pub(crate) set: Option<Arc<SetCore>>,
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
pub(crate) enum RegionState {
    Empty,
    Mapped(Content),
    Leaving,
    Stuck(Content),
    /// The region is no more.
    Freed,
}

/// What a region's lock guards.
pub(crate) struct Inner {
    pub(crate) state: RegionState,
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
                state: RegionState::Empty,
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
        self.pages.start.va()
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

    /// True while a mapping of it is being taken away.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.lock().state, RegionState::Leaving)
    }

    /// True if it is mapped, or stuck, by the mapping of that number.
    pub(crate) fn is_mapped_as(&self, serial: u64) -> bool {
        self.lock().state.is_mapped_as(serial)
    }

    /// As [`Self::is_mapped_as`], and also while some mapping is being taken away, which may fail.
    pub(crate) fn may_be_mapped_as(&self, serial: u64) -> bool {
        let inner = self.lock();
        matches!(inner.state, RegionState::Leaving) || inner.state.is_mapped_as(serial)
    }
}

impl RegionState {
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
