// SPDX-License-Identifier: Apache-2.0
//! Attaching, activating, switching and detaching devices (GMEM 3.2, 4.1).
//!
//! ```text
//!   attach    table made or shared ─► wired mappings granted ─► listed
//!             ─► inherited mappings, present pages of paged memory
//!             ─► elsewhere: deactivate ─► here: activate
//!   detach    deactivate ─► off the list ─► bits of its table cleared ─► table destroyed
//! ```
//! A device goes on the list only when its table has every wired mapping, since it may not be able
//! to wait for one. All this happens with the list owned, so no mapping changes in between.

use super::{
    address_space::{Activation, AddressSpace},
    wiring::{Wiring, allowed},
};
use crate::{
    attachments::{Activity, Attachment, LastUse, List, Mode, Table},
    device::{Device, DeviceState, Home, Place},
    error::GmError,
    mmu::{Inherited, Restrict},
    region::{Content, Region, RegionState},
    sync::{Arc, lock},
};
use pagetide_addr::{Access, PAGE_BYTES, PageRange, Va};
use std::sync::Weak;

impl AddressSpace {
    /// Attaches `device`. Wired mappings are replicated to it. Mappings that it already has (the
    /// CPU's, see [`crate::Mmu::inherited`]) become wired regions of the space. A device is active
    /// in one space at a time: with [`Activation::Now`] it is first deactivated elsewhere.
    ///
    /// # Errors
    /// [`GmError::AlreadyAttached`], [`GmError::Unsupported`] (a page size, too many tables, a
    /// second space for an MMU with one table, a device that cannot be denied present pages in a
    /// space of frames, or one that cannot wait for a page in a space of paged memory),
    /// [`GmError::NoAddresses`] (an inherited mapping overlaps a region), [`GmError::Destroyed`],
    /// [`GmError::Device`]. The device is then not attached, and active where it was, unless
    /// reactivating it there failed.
    #[doc(alias = "gm_as_attach")]
    pub fn attach(
        self: &Arc<Self>,
        device: &Arc<Device>,
        mode: Mode,
        activation: Activation,
    ) -> Result<(), GmError> {
        self.attach_with(device, mode, activation, |space| space.grant_paged(device))
    }

    /// Attaches and activates `device` without any page of paged memory: it faults on each, until its
    /// section is granted ([`PagedMemory::grant_section`](crate::PagedMemory::grant_section)). So a large
    /// memory is served at once, and what is present is granted beside that.
    ///
    /// # Errors
    /// As [`Self::attach`].
    pub fn attach_ungranted(
        self: &Arc<Self>,
        device: &Arc<Device>,
        mode: Mode,
    ) -> Result<(), GmError> {
        self.attach_with(device, mode, Activation::Now, |_| Ok(()))
    }

    fn attach_with(
        self: &Arc<Self>,
        device: &Arc<Device>,
        mode: Mode,
        activation: Activation,
        grant: impl FnOnce(&Self) -> Result<(), GmError>,
    ) -> Result<(), GmError> {
        // Dropped after the device's lock: the destructor of a space takes that lock.
        let mut elsewhere = None;
        let mut standing = lock(&device.standing);
        self.may_attach(device, &standing)?;
        self.join(device, mode, &mut standing)?;
        let ready = self.inherit(device).and_then(|()| grant(self));
        let activated = match activation {
            Activation::Now => ready.and_then(|()| {
                elsewhere = deactivate_elsewhere(device, &mut standing)?;
                self.activate_or_return(device, &mut standing, elsewhere.as_ref())
            }),
            Activation::Later => ready,
        };
        if let Err(error) = activated {
            // The device was never active here, so none of this can fail.
            self.leave(device, &mut standing)?;
            return Err(error);
        }
        Ok(())
    }

    fn may_attach(&self, device: &Device, standing: &DeviceState) -> Result<(), GmError> {
        if self.memory.is_some() && !device.recovers() {
            return Err(GmError::Unsupported {
                what: "a device that cannot wait for a page, in a space of paged memory",
            });
        }
        if self.memory.is_none() && device.limits().strongest != Restrict::NoAccess {
            return Err(GmError::Unsupported {
                what: "a device that cannot be denied reads, in a space of frames",
            });
        }
        if standing.destroyed || self.is_destroyed() {
            return Err(GmError::Destroyed);
        }
        if standing.is_attached(self) {
            let device = device.id();
            return Err(GmError::AlreadyAttached { device });
        }
        Ok(())
    }

    /// This space, as its devices remember it.
    fn as_home(self: &Arc<Self>) -> Weak<dyn Home> {
        let space: Weak<Self> = Arc::downgrade(self);
        space
    }

    /// Puts the device on the list, inactive, with a table that has every wired mapping.
    fn join(
        self: &Arc<Self>,
        device: &Arc<Device>,
        mode: Mode,
        standing: &mut DeviceState,
    ) -> Result<(), GmError> {
        let mut list = self.devices.own();
        // Check again: from here on the space cannot be destroyed.
        self.refuse_if_destroyed()?;
        if list.find(device.id()).is_some() {
            let device = device.id();
            return Err(GmError::AlreadyAttached { device });
        }
        let shared = match mode {
            Mode::Shared => list.sharable(device),
            Mode::Coherent => None,
        };
        let (table, made) = match shared {
            Some(table) => (table, LastUse::No),
            None => (list.new_table(device, mode)?, LastUse::Yes),
        };
        if made == LastUse::Yes && standing.has_table(table.id()) {
            // Not destroyed: it belongs to the other space.
            return Err(GmError::Unsupported {
                what: "a second address space, for an MMU that makes no tables and so has only one",
            });
        }
        if let Err(error) = self.replicate(device, &table, made) {
            // The table was never used, so no device can reach its mappings.
            if made == LastUse::Yes {
                self.discard(&table);
            }
            return Err(error);
        }
        standing.attached.push(Place {
            space: self.as_home(),
            own_table: (made == LastUse::Yes).then(|| table.id()),
        });
        list.push(Attachment {
            device: Arc::clone(device),
            table,
            activity: Activity::Inactive,
        });
        Ok(())
    }

    /// Grants all wired mappings in a new table. A shared table has them already, but the device
    /// must support their page sizes.
    fn replicate(&self, device: &Arc<Device>, table: &Table, made: LastUse) -> Result<(), GmError> {
        for core in self.frame_cores() {
            let mut inner = core.lock();
            let protection = inner.protection;
            let RegionState::Mapped(Content::Wired(wired)) = &mut inner.state else {
                continue;
            };
            if !device.limits().page_sizes.contains(wired.page_bytes) {
                return Err(GmError::Unsupported {
                    what: "the page size of a mapping that is wired already",
                });
            }
            let access = allowed(protection, wired.access);
            if made == LastUse::No {
                continue;
            }
            // Also if nothing is allowed now: a later, weaker protection uses this mask.
            wired.tables.insert(table);
            if let Some(access) = access {
                for (pages, first) in &wired.runs {
                    table.grant(*pages, access, wired.backing(*first))?;
                }
            }
        }
        Ok(())
    }

    /// Destroys a table that is not in use.
    fn discard(&self, table: &Table) {
        for core in self.frame_cores() {
            if let RegionState::Mapped(content) | RegionState::Stuck(content) =
                &mut core.lock().state
            {
                content.forget(table);
            }
        }
        table.destroy();
    }

    /// Turns the mappings that the device already has into wired regions.
    fn inherit(self: &Arc<Self>, device: &Arc<Device>) -> Result<(), GmError> {
        let found = device.mmu().inherited();
        let found = found.map_err(|source| GmError::device(device.id(), source))?;
        if self.memory.is_some() && !found.is_empty() {
            return Err(GmError::Unsupported {
                what: "inherited mappings, where all pages are of the space's own memory",
            });
        }
        let mut made: Vec<Region> = Vec::new();
        for mapping in found {
            match self.inherit_one(&mapping) {
                Ok(region) => made.extend(region),
                Err(error) => {
                    for region in made {
                        // A region that cannot be undone stays allocated: its addresses are not
                        // reused.
                        region.dealloc()?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// `None` if the space has this very mapping already, from an earlier attach of the device.
    fn inherit_one(self: &Arc<Self>, mapping: &Inherited) -> Result<Option<Region>, GmError> {
        let pages = inherited_pages(mapping)?;
        if self.is_inherited(pages, mapping) {
            return Ok(None);
        }
        let region = self.alloc_exactly(pages)?;
        let wiring = Wiring {
            access: mapping.access,
            page_bytes: PAGE_BYTES,
            set: None,
        };
        let runs = vec![(pages, mapping.frames)];
        if let Err(error) = self.map_runs(&region.core, runs, &wiring) {
            region.dealloc()?;
            return Err(error);
        }
        Ok(Some(region))
    }

    fn is_inherited(&self, pages: PageRange, mapping: &Inherited) -> bool {
        let Some(core) = self.region_over(pages) else {
            return false;
        };
        let inner = core.lock();
        core.pages == pages
            && matches!(&inner.state, RegionState::Mapped(Content::Wired(wired))
                if wired.access == mapping.access
                    && wired.runs.first().is_some_and(|(run, first)| *run == pages && *first == mapping.frames))
    }

    /// Grants the present pages of paged memory to a device that was just listed.
    fn grant_paged(&self, device: &Arc<Device>) -> Result<(), GmError> {
        match &self.memory {
            Some(memory) => memory.grant_present(device.id()),
            None => Ok(()),
        }
    }

    /// See [`Device::switch`].
    fn activate_device(self: &Arc<Self>, device: &Arc<Device>) -> Result<(), GmError> {
        // Dropped after the device's lock: the destructor of a space takes that lock.
        let elsewhere;
        let mut standing = lock(&device.standing);
        if !standing.is_attached(&**self) {
            let device = device.id();
            return Err(GmError::NotAttached { device });
        }
        if standing.is_active(&**self) {
            return Ok(());
        }
        elsewhere = deactivate_elsewhere(device, &mut standing)?;
        self.activate_or_return(device, &mut standing, elsewhere.as_ref())
    }

    /// Activates the device here; if that fails, where it was active before.
    fn activate_or_return(
        self: &Arc<Self>,
        device: &Device,
        standing: &mut DeviceState,
        elsewhere: Option<&Arc<dyn Home>>,
    ) -> Result<(), GmError> {
        match self.activate_here(device) {
            Ok(()) => {
                standing.active = Some(self.as_home());
                Ok(())
            }
            Err(error) => {
                return_to(device, standing, elsewhere);
                Err(error)
            }
        }
    }

    /// See [`Device::detach`].
    fn detach_device(self: &Arc<Self>, device: &Arc<Device>) -> Result<(), GmError> {
        // Before the device is locked: a callback that runs here may use it.
        self.wait_for_changes();
        let mut standing = lock(&device.standing);
        if !standing.is_attached(&**self) {
            let device = device.id();
            return Err(GmError::NotAttached { device });
        }
        self.leave(device, &mut standing)
    }

    fn leave(&self, device: &Device, standing: &mut DeviceState) -> Result<(), GmError> {
        let mut list = self.devices.own();
        deactivate(&mut list, device)?;
        if let Some((gone, LastUse::Yes)) = list.remove(device.id()) {
            self.discard(&gone.table);
        }
        standing.forget(self);
        Ok(())
    }
}

impl Home for AddressSpace {
    fn fault_at(&self, device: &Arc<Device>, addr: Va, access: Access) -> Result<(), GmError> {
        self.fault_of_device(device, addr, access)
    }

    fn activate_here(&self, device: &Device) -> Result<(), GmError> {
        let mut list = self.devices.own();
        let Some(known) = list.find_mut(device.id()) else {
            let device = device.id();
            return Err(GmError::NotAttached { device });
        };
        let activated = device.mmu().activate(known.table.id());
        activated.map_err(|source| GmError::device(device.id(), source))?;
        known.activity = Activity::Active;
        Ok(())
    }

    fn deactivate_here(&self, device: &Device) -> Result<(), GmError> {
        let mut list = self.devices.own();
        deactivate(&mut list, device)
    }
}

impl Device {
    /// Activates the device in `space`, to which it is attached; it is deactivated elsewhere.
    ///
    /// # Errors
    /// [`GmError::NotAttached`]; [`GmError::Device`], after which it is active nowhere or where it was.
    #[doc(alias = "gm_dev_switch")]
    pub fn switch(self: &Arc<Self>, space: &Arc<AddressSpace>) -> Result<(), GmError> {
        space.activate_device(self)
    }

    /// Detaches the device from `space`; its page table is destroyed, unless others share it.
    ///
    /// # Errors
    /// [`GmError::NotAttached`]; [`GmError::Device`] if it failed to deactivate: it is then still
    /// attached.
    #[doc(alias = "gm_dev_detach")]
    pub fn detach(self: &Arc<Self>, space: &Arc<AddressSpace>) -> Result<(), GmError> {
        space.detach_device(self)
    }
}

/// The pages of an inherited mapping, if it is page-aligned.
fn inherited_pages(mapping: &Inherited) -> Result<PageRange, GmError> {
    let bytes = mapping.len_bytes;
    let end = mapping.start.checked_add(bytes);
    let whole = mapping.start.is_page_aligned()
        && mapping.frames.is_page_aligned()
        && bytes.is_multiple_of(PAGE_BYTES)
        && mapping.frames.checked_add(bytes).is_some();
    match end {
        Some(end) if whole && bytes > 0 => Ok(PageRange::new(mapping.start.page(), end.page())),
        _ => Err(GmError::InvalidArgument {
            argument: "inherited mapping",
            why: "it must be made of whole pages and frames",
        }),
    }
}

/// Deactivates the device in the space that owns this list.
fn deactivate(list: &mut List, device: &Device) -> Result<(), GmError> {
    let Some(known) = list.find_mut(device.id()) else {
        return Ok(());
    };
    if known.activity == Activity::Active {
        let done = device.mmu().deactivate(known.table.id());
        done.map_err(|source| GmError::device(device.id(), source))?;
        known.activity = Activity::Inactive;
    }
    Ok(())
}

/// Deactivates the device wherever it is active; returns that space.
fn deactivate_elsewhere(
    device: &Device,
    standing: &mut DeviceState,
) -> Result<Option<Arc<dyn Home>>, GmError> {
    let active = standing.active.as_ref().and_then(Weak::upgrade);
    if let Some(space) = &active {
        space.deactivate_here(device)?;
    }
    standing.active = None;
    Ok(active)
}

/// After a failure: reactivates the device where it was, if possible.
fn return_to(device: &Device, standing: &mut DeviceState, before: Option<&Arc<dyn Home>>) {
    if let Some(space) = before
        && space.activate_here(device).is_ok()
    {
        standing.active = Some(Arc::downgrade(space));
    }
}
