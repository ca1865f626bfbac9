// SPDX-License-Identifier: Apache-2.0
//! Faults on regions of frames: where a page is placed, and which other tables may map it (GMEM 3,
//! 3.2, 4.1).
//!
//! ```text
//!   no frame yet     frame of the named device's memory, else of the faulting
//!                    device's, else of the host's; zeros; mapped here
//!   Unique           every other mapping is taken away first; the page is copied
//!                    to the memory it belongs in by now, if it lies elsewhere
//!   RemoteAccess     mapped here as well
//!   Prefetch         as Unique; then the pages behind are queued for this device
//! ```
//! A frame is copied only while no device can reach it, and is freed after that. A fault that fails
//! half way leaves the page where it was, with a bit for every table that may still map it.

use super::{
    address_space::AddressSpace,
    queue::{Answer, Operation, PendingRegion},
    wiring::allowed,
};
use crate::{
    attachments::{Activity, Attachment, List, StillReached, TableMask},
    device::Device,
    error::GmError,
    frames::Frame,
    mmu::{Backing, Restrict},
    paging::{Fault, FaultOutcome},
    region::{Content, DemandPage, Inner, Placement, RegionCore, RegionState},
    sync::Arc,
};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, PageNo, PageRange, Va};
use std::collections::{BTreeMap, btree_map::Entry};

/// Pages that a fault prefetches in a region with [`Placement::Prefetch`].
pub(crate) const PREFETCH_PAGES: u64 = 15;

impl AddressSpace {
    /// A device's fault at an address in a region of frames.
    pub(super) fn fault_on_frame(
        &self,
        core: &Arc<RegionCore>,
        device: &Arc<Device>,
        addr: Va,
        access: Access,
    ) -> Result<(), GmError> {
        let page = addr.page();
        let placement = {
            let list = self.devices.share();
            let attached = may_fault(list.find_same(device), device.id(), addr)?;
            serve(&list, attached, core, page, access)?
        };
        if placement == Placement::Prefetch {
            self.queue_prefetch(core, device, page);
        }
        Ok(())
    }

    /// Handles a fault on pages of a region of frames; the fault names its device by number.
    pub(super) fn fault_on_frames(&self, core: &Arc<RegionCore>, fault: &Fault) -> FaultOutcome {
        let served = self.serve_pages(core, fault);
        match served {
            Ok(None) => FaultOutcome::Present,
            Ok(Some(device)) => {
                if let Some(last) = fault.pages.last() {
                    self.queue_prefetch(core, &device, last);
                }
                FaultOutcome::Present
            }
            Err(
                GmError::NoMemory { .. }
                | GmError::Busy { .. }
                | GmError::Device { .. }
                | GmError::Lost { .. },
            ) => FaultOutcome::Lost,
            Err(_) => FaultOutcome::OutOfRange,
        }
    }

    /// Returns the device if pages are to be prefetched for it.
    fn serve_pages(
        &self,
        core: &Arc<RegionCore>,
        fault: &Fault,
    ) -> Result<Option<Arc<Device>>, GmError> {
        let list = self.devices.share();
        let mut prefetching = None;
        for page in fault.pages.iter() {
            let attached = may_fault(list.find(fault.device), fault.device, page.va())?;
            let placement = serve(&list, attached, core, page, fault.access)?;
            if placement == Placement::Prefetch {
                prefetching = Some(Arc::clone(&attached.device));
            }
        }
        Ok(prefetching)
    }

    fn queue_prefetch(&self, core: &Arc<RegionCore>, device: &Arc<Device>, page: PageNo) {
        let first = page.next();
        let end = core.pages.end.min(first.plus(PREFETCH_PAGES));
        if first < end {
            let operation = Operation::Prefetch {
                region: PendingRegion::new(core),
                device: Arc::clone(device),
                pages: PageRange::new(first, end),
            };
            self.enqueue(operation, Answer::Nobody);
        }
    }

    /// Prefetches pages for a device. Pages that cannot be had are skipped: the device will fault
    /// on them.
    pub(super) fn prefetch_now(
        &self,
        core: &Arc<RegionCore>,
        device: &Arc<Device>,
        pages: PageRange,
    ) {
        let list = self.devices.share();
        for page in pages.iter() {
            let served = may_fault(list.find_same(device), device.id(), page.va())
                .and_then(|attached| serve(&list, attached, core, page, Access::Read));
            if served.is_err() {
                return;
            }
        }
    }
}

/// The attachment of a device, if it may fault here.
pub(super) fn may_fault(
    attached: Option<&Attachment>,
    device: DeviceId,
    va: Va,
) -> Result<&Attachment, GmError> {
    let attached = attached.ok_or(GmError::NotAttached { device })?;
    if attached.activity == Activity::Inactive {
        return Err(GmError::NotActive { device });
    }
    if !attached.device.recovers() {
        return Err(GmError::CannotRecover { device, va });
    }
    Ok(attached)
}

/// Makes one page reachable for a device; returns the region's placement policy.
fn serve(
    list: &List,
    attached: &Attachment,
    core: &RegionCore,
    page: PageNo,
    access: Access,
) -> Result<Placement, GmError> {
    let va = page.va();
    let mut inner = core.lock();
    if !inner.protection.allows(access) {
        return Err(GmError::Denied { va, access });
    }
    if matches!(inner.state, RegionState::Empty) {
        inner.state = RegionState::Mapped(Content::Demand(BTreeMap::new()));
    }
    let Inner {
        state,
        protection,
        placement,
        home,
    } = &mut *inner;
    let strongest = protection.strongest().unwrap_or(access);
    match state {
        RegionState::Mapped(Content::Wired(wired)) => {
            let granted = allowed(*protection, wired.access);
            if access == Access::Write && granted != Some(Access::Write) {
                return Err(GmError::Denied { va, access });
            }
            // It has the mapping, and faulted on a stale TLB entry.
            for (run, first) in wired.runs.iter().filter(|(run, _)| run.contains(page)) {
                wired.tables.insert(&attached.table);
                let granted = granted.unwrap_or(access);
                attached.table.grant(*run, granted, wired.backing(*first))?;
            }
        }
        RegionState::Mapped(Content::Demand(pages)) => {
            let memory = Memory {
                list,
                attached,
                home: home.as_ref(),
                placement: *placement,
            };
            let served = memory.serve_page(pages, page, strongest);
            if pages.is_empty() {
                *state = RegionState::Empty;
            }
            served?;
        }
        RegionState::Freed | RegionState::Empty => return Err(GmError::NotAllocated { va }),
        RegionState::Leaving | RegionState::Stuck(_) => {
            return Err(GmError::NotMapped { va: core.start() });
        }
    }
    Ok(*placement)
}

/// A device's fault on pages of a region, and the memory to choose from.
struct Memory<'a> {
    list: &'a List,
    attached: &'a Attachment,
    home: Option<&'a Arc<Device>>,
    placement: Placement,
}

impl Memory<'_> {
    fn serve_page(
        &self,
        pages: &mut BTreeMap<PageNo, DemandPage>,
        page: PageNo,
        access: Access,
    ) -> Result<(), GmError> {
        let known = match pages.entry(page) {
            Entry::Occupied(known) => {
                let known = known.into_mut();
                if self.placement != Placement::RemoteAccess {
                    self.make_unique(known, page)?;
                }
                known
            }
            Entry::Vacant(vacant) => {
                let frame = self
                    .new_frame()
                    .ok_or(GmError::NoMemory { va: page.va() })?;
                frame.prepare()?;
                vacant.insert(DemandPage {
                    frame,
                    tables: TableMask::NONE,
                })
            }
        };
        known.tables.insert(&self.attached.table);
        let backing = Backing::Frames {
            first: known.frame.pa(),
            page_bytes: PAGE_BYTES,
        };
        self.attached.table.grant(page.single(), access, backing)
    }

    /// Takes the page from all other devices, and moves it to the memory it belongs in.
    fn make_unique(&self, known: &mut DemandPage, page: PageNo) -> Result<(), GmError> {
        let table = &self.attached.table;
        self.take(known, page, known.tables.without(table))?;
        let wanted = self.wanted();
        if wanted.is_none_or(|device| device.id() == known.frame.owner()) {
            return Ok(());
        }
        let Some(frame) = wanted.and_then(|device| device.allocate_frame()) else {
            // Full: the page is used where it is.
            return Ok(());
        };
        // No device may write to it while it is copied.
        self.take(known, page, known.tables)?;
        frame.copy_from(&known.frame)?;
        known.frame = frame;
        Ok(())
    }

    fn take(&self, known: &mut DemandPage, page: PageNo, from: TableMask) -> Result<(), GmError> {
        if from.is_empty() {
            return Ok(());
        }
        let taken = self
            .list
            .take_away(&[page.single()], from, Restrict::NoAccess);
        taken.map_err(StillReached::error)?;
        known.tables = known.tables.minus(from);
        Ok(())
    }

    /// The device whose memory the page belongs in: the named one, else the faulting device, else
    /// the host.
    fn wanted(&self) -> Option<&Arc<Device>> {
        let local = [self.home, Some(&self.attached.device), self.list.host()];
        local
            .into_iter()
            .flatten()
            .find(|device| device.has_memory())
    }

    /// A frame of that memory; if it is full, one of the host's.
    fn new_frame(&self) -> Option<Frame> {
        let wanted = self.wanted().and_then(|device| device.allocate_frame());
        wanted.or_else(|| self.list.host().and_then(|host| host.allocate_frame()))
    }
}
