// SPDX-License-Identifier: Apache-2.0
//! A VM's address space: its vCPUs and the software DPU as devices, its RAM files as regions
//! (GMEM 4.2, use example #1).
//!
//! vCPUs and DPU map the same host memory, each by its own tables, and a page stays where it is
//! whichever device faults on it: the regions' placement is *remote access* in the CPU's memory. The
//! VM's RAM grows and shrinks by allocating and deallocating a region.
//!
//! A region begins at a section's border. The files of a VM that was attached before RAM hotplug was
//! supported lie end to end instead, so two may share a section: those form one region, which neither
//! grows nor shrinks.

use super::failure::failed;
use crate::control::ControlError;
use pagetide_addr::{DeviceId, PageNo, PageRange, SECTION_PAGES, Va};
use pagetide_gmem::{
    AddressFit, AddressSpace, AllocPolicy, Device, GmError, GrowthError, Mmu, Mode, PagedMemory,
    Placement, Region, RegionRequest,
};
use pagetide_vmm::layout::RamLayout;
use pagetide_vpri::DPU;
use std::{io::ErrorKind, sync::Arc};

/// How the RAM files of a VM map to regions of its space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Regions {
    /// Each begins at a section's border and is a region.
    FileByFile,
    /// Not all do: together, with any gaps between them, they form this one.
    OneOfAll(PageRange),
}

impl Regions {
    fn of(layout: &RamLayout) -> Self {
        let is_off_border = |first: PageNo| !first.0.is_multiple_of(SECTION_PAGES);
        let mut files = layout.files().iter();
        if files.any(|file| is_off_border(file.pages().start)) {
            let end = PageNo(layout.page_count());
            Self::OneOfAll(PageRange::new(PageNo(0), end))
        } else {
            Self::FileByFile
        }
    }
}

/// The space of a VM, with the devices that are attached to it.
pub(super) struct VmSpace {
    pub(super) space: Arc<AddressSpace>,
    pub(super) memory: Arc<PagedMemory>,
    vcpus: Arc<Device>,
    regions: Regions,
}

impl VmSpace {
    /// Creates the space over `memory`, with vCPUs and DPU attached and the RAM files of `layout` as
    /// regions.
    ///
    /// # Errors
    /// An error message.
    pub(super) fn new(
        memory: Arc<PagedMemory>,
        [vcpus, dpu]: [Arc<dyn Mmu>; 2],
        layout: &RamLayout,
    ) -> Result<Self, ControlError> {
        let policy = AllocPolicy {
            // Files keep their place as others come and go, and the table stays short.
            fit: AddressFit::First,
            ..AllocPolicy::default()
        };
        let end = Va(PageNo(memory.table().capacity_pages()).byte_offset());
        let space = AddressSpace::over(memory, Va(0), end, policy).map_err(failed)?;
        let Some(memory) = space.memory().map(Arc::clone) else {
            return Err(failed("an address space without memory"));
        };
        let vcpus = Device::with_id(DeviceId::VCPUS, vcpus);
        let dpu = Device::with_id(DPU, dpu);
        for device in [&vcpus, &dpu] {
            // In a new space there is no page yet; after a recovery `regrant` grants what is present.
            space
                .attach_ungranted(device, Mode::Coherent)
                .map_err(failed)?;
        }
        let regions = Regions::of(layout);
        let whole = Self {
            space,
            memory,
            vcpus,
            regions,
        };
        match regions {
            Regions::OneOfAll(pages) => {
                whole.add_ram(pages)?;
            }
            Regions::FileByFile => {
                for file in layout.files() {
                    whole.add_ram(file.pages())?;
                }
            }
        }
        Ok(whole)
    }

    /// Ensures that [`Self::add_ram`] of these pages will find addresses and memory for their words.
    /// Adds no page to the space.
    ///
    /// # Errors
    /// An error message: what there is no room for, and what to do about it.
    pub(super) fn make_room_for(&self, pages: PageRange) -> Result<(), ControlError> {
        let detach = "detach the VM and attach it again, then it will be managed";
        if self.regions != Regions::FileByFile {
            return Err(ControlError::refused(format!(
                "the VM was attached before RAM could come and go, and its RAM files lie too close for more: {detach}"
            )));
        }
        let capacity_pages = self.memory.table().capacity_pages();
        if pages.end.0 > capacity_pages {
            let capacity_bytes = PageNo(capacity_pages).byte_offset();
            return Err(ControlError::refused(format!(
                "the VM's pool was made for {capacity_bytes} bytes of RAM and has no room for more: {detach}"
            )));
        }
        let made = self.memory.make_room_for(pages);
        made.map_err(|error| no_room(pages, error))
    }

    /// Adds a RAM file with these pages to the space.
    ///
    /// # Errors
    /// An error message; the file is then not part of the space.
    pub(super) fn add_ram(&self, pages: PageRange) -> Result<Region, ControlError> {
        let there = pages.start.va();
        let request = RegionRequest {
            hint: Some(there),
            ..RegionRequest::of_bytes(pages.bytes())
        };
        let memory = &self.memory;
        memory
            .make_room_for(pages)
            .map_err(|error| no_room(pages, error))?;
        let region = self.space.alloc(&request).map_err(failed)?;
        let placed = if region.start() == there {
            region.set_policy(Placement::RemoteAccess, Some(&self.vcpus))
        } else {
            region.dealloc().map_err(failed)?;
            return Err(failed(format!(
                "pages {}..{} belong to other RAM",
                pages.start, pages.end
            )));
        };
        placed.map_err(failed)?;
        Ok(region)
    }

    /// Removes a RAM file with these pages from the space: devices no longer reach it, and its stored
    /// content is freed. Does nothing if the file is not part of the space.
    ///
    /// # Errors
    /// An error message: a device is in the middle of a transfer, and a retry continues the removal; or
    /// the file cannot be removed on its own.
    pub(super) fn remove_ram(&self, pages: PageRange) -> Result<(), ControlError> {
        match self.space.lookup(pages.start.va()) {
            Ok(region) if region.pages() == pages => region.dealloc().map_err(failed),
            Ok(_) if self.regions != Regions::FileByFile => Err(ControlError::refused(
                "the VM was attached before RAM could come and go, and its RAM files cannot be told apart: \
                 detach the VM",
            )),
            Ok(other) => Err(failed(format!(
                "pages {}..{} belong to other RAM",
                other.pages().start,
                other.pages().end
            ))),
            Err(GmError::NotAllocated { .. }) => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }

    /// Gives back regions in which no file of `layout` has a page: these remain when RAM could not be
    /// taken over and a device did not release it at once.
    ///
    /// # Errors
    /// An error message: a device is still in the middle of a transfer.
    pub(super) fn remove_strays(&self, layout: &RamLayout) -> Result<(), ControlError> {
        let mut first = Ok(());
        for region in self.space.regions() {
            let has_page = |pages: PageRange| !pages.intersect(region.pages()).is_empty();
            if layout.files().iter().any(|file| has_page(file.pages())) {
                continue;
            }
            if let Err(error) = region.dealloc() {
                first = first.and(Err(failed(error)));
            }
        }
        first
    }
}

fn no_room(pages: PageRange, error: GrowthError) -> ControlError {
    match error {
        GrowthError::Words(no_room) if no_room.source.kind() == ErrorKind::StorageFull => {
            ControlError::refused(format!(
                "the tmpfs of the state directory has no room for the words of {} pages ({}): make it larger \
                 (mount -o remount,size=…), or give the daemon another --state-dir",
                pages.len(),
                no_room.source
            ))
        }
        GrowthError::Words(no_room) if no_room.source.kind() == ErrorKind::QuotaExceeded => {
            ControlError::refused(format!(
                "there is no room for the words of {} pages: {}",
                pages.len(),
                no_room.source
            ))
        }
        other => failed(other),
    }
}
