// SPDX-License-Identifier: Apache-2.0
//! A VM's address space: its vCPUs and the software DPU as devices, its RAM files as regions
//! (GMEM 4.2, use example #1).
//!
//! vCPUs and DPU map the same host memory, each by its own tables, and a page
//! stays where it is whoever faults on it: the regions' placement is *remote
//! access* in the CPU's memory. Growing and shrinking the VM's RAM is allocating
//! and deallocating a region.

use super::vm::failed;
use crate::control::ControlError;
use pagetide_addr::{DeviceId, PageNo, PageRange, Va};
use pagetide_gmem::{
    Activation, AddressFit, AddressSpace, AllocPolicy, Device, GmError, Mmu, Mode, PagedMemory,
    Placement, Region, RegionRequest,
};
use pagetide_vmm::place::VcpuMmu;
use pagetide_vpri::{DPU, DmaMmu};
use std::sync::Arc;

/// The space of a VM, with the devices that are attached to it.
pub(super) struct VmSpace {
    pub(super) space: Arc<AddressSpace>,
    pub(super) memory: Arc<PagedMemory>,
    vcpus: Arc<Device>,
}

impl VmSpace {
    /// The space over `memory`, vCPUs and DPU attached, no region yet.
    ///
    /// # Errors
    /// A sentence.
    pub(super) fn new(
        memory: PagedMemory,
        vcpus: VcpuMmu,
        dpu: &Arc<DmaMmu>,
    ) -> Result<Self, ControlError> {
        let policy = AllocPolicy {
            // Files stay where they were as others come and go, and the table stays short.
            fit: AddressFit::First,
            ..AllocPolicy::default()
        };
        let end = Va(PageNo(memory.table().capacity_pages()).byte_offset());
        let space = AddressSpace::over(memory, Va(0), end, policy).map_err(failed)?;
        let Some(memory) = space.memory().map(Arc::clone) else {
            return Err(failed("an address space without memory"));
        };
        let vcpus = Device::with_id(DeviceId::VCPUS, Arc::new(vcpus));
        let dpu = Device::with_id(DPU, Arc::clone(dpu) as Arc<dyn Mmu>);
        for device in [&vcpus, &dpu] {
            space
                .attach(device, Mode::Coherent, Activation::Now)
                .map_err(failed)?;
        }
        Ok(Self {
            space,
            memory,
            vcpus,
        })
    }

    /// Makes a RAM file, whose pages these are, part of the space.
    ///
    /// # Errors
    /// A sentence; the file is then no part of it.
    pub(super) fn add_ram(&self, pages: PageRange) -> Result<Region, ControlError> {
        let there = Va(pages.start.byte_offset());
        let request = RegionRequest {
            hint: Some(there),
            ..RegionRequest::of_bytes(pages.bytes())
        };
        let region = self.space.alloc(&request).map_err(|error| match error {
            GmError::NoMemory { .. } => ControlError::refused(format!(
                "the tmpfs of the state directory has no room for the words of {} pages: make it larger (mount -o remount,size=…)",
                pages.len()
            )),
            other => failed(other),
        })?;
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

    /// Takes a RAM file, whose pages these are, out of the space: no device reaches it any more, and
    /// what was stored of it is freed. If it is no part of the space there is nothing to do.
    ///
    /// # Errors
    /// A sentence: a device is in the middle of a transfer. Once more, and it goes on.
    pub(super) fn remove_ram(&self, pages: PageRange) -> Result<(), ControlError> {
        match self.space.lookup(Va(pages.start.byte_offset())) {
            Ok(region) => region.dealloc().map_err(failed),
            Err(GmError::NotAllocated { .. }) => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }
}
