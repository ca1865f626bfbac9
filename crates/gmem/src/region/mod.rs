// SPDX-License-Identifier: Apache-2.0
//! [`Region`]: an allocated range of addresses, and what is behind it (GMEM 4.1).
//!
//! It is backed by frames that the caller wires, frames that faults bring, or pages of the space's
//! paged memory. [`state`] has a diagram of the states and transitions.

pub(crate) mod state;

pub(crate) use state::{
    Content, DemandPage, Inner, Kind, Leaver, Leaving, Origin, RegionCore, RegionState, Wired,
};
pub use state::{Placement, Protection};

use crate::{
    device::Device,
    error::GmError,
    set::MappingSet,
    space::{AddressSpace, Callback, Operation, PendingRegion, Wiring},
    sync::Arc,
};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, Pa, PageRange, Va};

/// How a region is to be wired.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// Access that devices get.
    pub access: Access,
    /// Size of the pages to map by, in bytes; each given frame is one of them.
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

/// What backs a region, as far as a caller can tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapped {
    /// Nothing.
    Nothing,
    /// Frames of the caller.
    Wired,
    /// Frames that faults have brought.
    Demand,
    /// Pages of the space's paged memory.
    Paged,
    /// Being unmapped, or to be unmapped again because a device failed.
    Leaving,
}

/// A region; clones refer to the same one. It lives until [`Region::dealloc`].
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

    /// What backs it now.
    #[must_use]
    pub fn mapped(&self) -> Mapped {
        if self.core.kind == Kind::Paged {
            return Mapped::Paged;
        }
        match &self.core.lock().state {
            RegionState::Empty | RegionState::Freed => Mapped::Nothing,
            RegionState::Mapped(Content::Wired(_)) => Mapped::Wired,
            RegionState::Mapped(Content::Demand(_)) => Mapped::Demand,
            RegionState::Leaving | RegionState::Stuck(_) => Mapped::Leaving,
        }
    }

    /// Wires the region to `frames`, one for each page of `options.page_bytes`, in the tables of
    /// all devices of the space, including future ones.
    ///
    /// # Errors
    /// [`GmError::AlreadyMapped`], [`GmError::InvalidArgument`], [`GmError::Unsupported`],
    /// [`GmError::Destroyed`]; [`GmError::Device`]: nothing is mapped, or (if the device failed to
    /// revoke what it was granted) the region must be unmapped before it is used again.
    #[doc(alias = "gm_region_map")]
    pub fn map(&self, frames: &[Pa], options: &MapOptions) -> Result<(), GmError> {
        let wiring = self.wiring(options)?;
        self.settle_queued();
        self.space.map_now(&self.core, frames, &wiring)
    }

    /// Like [`Self::map`], without waiting: `callback` is called on completion.
    ///
    /// # Errors
    /// [`GmError::Destroyed`]; the callback and [`AddressSpace::synchronize`] report all others.
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

    /// Takes the region from all devices. It stays allocated; pages that faults brought are freed.
    /// When this returns without error, no device can reach it.
    ///
    /// # Errors
    /// [`GmError::NotMapped`] (also while another thread unmaps it), [`GmError::Destroyed`],
    /// [`GmError::Unsupported`] for paged memory; [`GmError::Device`] or [`GmError::Busy`]: some
    /// devices may still reach it, nothing is freed, and it must be unmapped again.
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

    /// Like [`Self::unmap`], without waiting: `callback` is called when no device can reach it any
    /// more.
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

    /// Unmaps the region if necessary and frees its addresses.
    ///
    /// # Errors
    /// [`GmError::Destroyed`]; [`GmError::Device`], [`GmError::Busy`]: it is then still allocated.
    #[doc(alias = "gm_region_dealloc")]
    pub fn dealloc(&self) -> Result<(), GmError> {
        self.settle_queued();
        self.space.dealloc(&self.core)
    }

    /// Sets how a fault treats the region's pages, and in whose memory they are placed: the
    /// faulting device's (the host's if it has none) unless `home` names one. Pages that lie
    /// elsewhere move at their next fault.
    ///
    /// Each page of paged memory has one place, in the CPU's memory, and every device uses it
    /// there: that is [`Placement::RemoteAccess`] at the CPU, and nothing else can be set.
    ///
    /// # Errors
    /// [`GmError::NotAttached`] if `home` is not attached to the space, [`GmError::Unsupported`] for
    /// another policy of paged memory, [`GmError::Destroyed`].
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
        if matches!(inner.state, RegionState::Freed) {
            return Err(GmError::Destroyed);
        }
        if self.core.kind == Kind::Paged {
            let at_cpu = home.is_none_or(|device| device.id() == DeviceId::VCPUS);
            if placement != Placement::RemoteAccess || !at_cpu {
                return Err(GmError::Unsupported {
                    what: "a placement of paged memory other than remote access at the CPU, where its pages stay",
                });
            }
        }
        inner.placement = placement;
        inner.home = home.map(Arc::clone);
        Ok(())
    }

    /// The policy, and the home device if one is named.
    #[must_use]
    pub fn policy(&self) -> (Placement, Option<Arc<Device>>) {
        let inner = self.core.lock();
        (inner.placement, inner.home.as_ref().map(Arc::clone))
    }

    /// Sets the access that the region allows from now on, as `mprotect` does for a process. When
    /// this returns without error, no device has more access than that.
    ///
    /// # Errors
    /// [`GmError::Unsupported`] for paged memory, [`GmError::Destroyed`]; [`GmError::Device`] or
    /// [`GmError::Busy`]: a device may keep its old access; protect again.
    pub fn protect(&self, protection: Protection) -> Result<(), GmError> {
        self.settle_queued();
        self.space.protect(&self.core, protection)
    }

    /// Queued operations take effect first.
    fn settle_queued(&self) {
        if self.core.has_queued() || self.space.has_queued_sets() {
            self.space.wait_for_changes();
        }
    }

    fn refuse_if_freed(&self) -> Result<(), GmError> {
        if matches!(self.core.lock().state, RegionState::Freed) {
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

/// Equal if they are the same region, not if they have the same addresses.
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
