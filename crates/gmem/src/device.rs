// SPDX-License-Identifier: Apache-2.0
//! [`Device`]: a user of an address space: the CPU, a device, a virtual function of one.
//!
//! A device may be attached to several spaces and is active in one of them at a
//! time. A virtual function is a device of its own, so two of them may be active
//! in two spaces (GMEM 4.1, footnote 1).
//!
//! Locks are taken in this order: the queue's *draining*, a device's standing, the attachments of a
//! space, the state of a region of frames, pools. The map of regions is held for a look-up only,
//! and no other lock is taken under it. A mapping set's list is held while its regions are
//! examined. A region of paged memory is locked alone, before the map, a section and the
//! attachments: no holder of one of these examines its state.

use crate::{
    error::GmError,
    frames::{Frame, FramePool, PhysicalMemory},
    mmu::{Mmu, MmuLimits, OnAbsent, TableId},
    sync::{Arc, Mutex, RwLock, lock, own, share},
};
use pagetide_addr::{Access, DeviceId, Pa, Va};
use std::sync::{
    Weak,
    atomic::{AtomicU32, Ordering::Relaxed},
};

/// Lower numbers are chosen by callers of [`Device::with_id`].
const FIRST_NUMBER: u32 = 1 << 16;

/// An address space, as a device that is attached to it sees it.
pub(crate) trait Home: Send + Sync {
    /// Serves a fault of the device; see [`Device::fault`].
    fn fault_at(&self, device: &Arc<Device>, addr: Va, access: Access) -> Result<(), GmError>;

    /// From now on the device translates by its table here.
    fn activate_here(&self, device: &Device) -> Result<(), GmError>;

    /// From now on it does not.
    fn deactivate_here(&self, device: &Device) -> Result<(), GmError>;
}

/// Where a device is attached. One lock guards it: a device moves between spaces as a whole.
#[derive(Default)]
pub(crate) struct DeviceState {
    /// The spaces it is attached to.
    pub(crate) attached: Vec<Place>,
    /// The one it is active in.
    pub(crate) active: Option<Weak<dyn Home>>,
    pub(crate) destroyed: bool,
}

/// A space that a device is attached to.
pub(crate) struct Place {
    pub(crate) space: Weak<dyn Home>,
    /// The table that was made for it there, unless it shares another device's.
    pub(crate) own_table: Option<TableId>,
}

impl DeviceState {
    pub(crate) fn is_attached(&self, space: &dyn Home) -> bool {
        self.attached
            .iter()
            .any(|known| is_same(&known.space, space))
    }

    pub(crate) fn is_active(&self, space: &dyn Home) -> bool {
        self.active
            .as_ref()
            .is_some_and(|known| is_same(known, space))
    }

    /// True if it has this table in another space.
    pub(crate) fn has_table(&self, table: TableId) -> bool {
        self.attached
            .iter()
            .any(|known| known.own_table == Some(table) && known.space.strong_count() > 0)
    }

    /// It is no longer attached to `space`.
    pub(crate) fn forget(&mut self, space: &dyn Home) {
        self.attached.retain(|known| !is_same(&known.space, space));
        if self.is_active(space) {
            self.active = None;
        }
    }
}

/// True if `known` is `space`.
fn is_same(known: &Weak<dyn Home>, space: &dyn Home) -> bool {
    std::ptr::addr_eq(known.as_ptr(), std::ptr::from_ref(space))
}

/// See the module.
#[doc(alias = "gm_dev_t")]
pub struct Device {
    id: DeviceId,
    mmu: Arc<dyn Mmu>,
    limits: MmuLimits,
    pools: RwLock<Vec<Arc<FramePool>>>,
    pub(crate) standing: Mutex<DeviceState>,
}

impl Device {
    /// A device with a new number.
    #[doc(alias = "gm_dev_create")]
    #[must_use]
    pub fn create(mmu: Arc<dyn Mmu>) -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(FIRST_NUMBER);
        Self::with_id(DeviceId(NEXT.fetch_add(1, Relaxed)), mmu)
    }

    /// A device whose number others know; [`DeviceId::VCPUS`] is the CPU of its space
    /// (`gm_dev_CPU`), and memory registered with it is the host's.
    #[must_use]
    pub fn with_id(id: DeviceId, mmu: Arc<dyn Mmu>) -> Arc<Self> {
        Arc::new(Self {
            id,
            limits: mmu.limits(),
            mmu,
            pools: RwLock::new(Vec::new()),
            standing: Mutex::new(DeviceState::default()),
        })
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// What its MMU can do.
    #[must_use]
    pub fn limits(&self) -> &MmuLimits {
        &self.limits
    }

    /// Its translations.
    #[must_use]
    pub fn mmu(&self) -> &Arc<dyn Mmu> {
        &self.mmu
    }

    pub(crate) fn recovers(&self) -> bool {
        self.limits.on_absent == OnAbsent::Recovers
    }

    /// Destroys a device that is not attached anywhere.
    ///
    /// # Errors
    /// [`GmError::InUse`], [`GmError::Destroyed`].
    #[doc(alias = "gm_dev_destroy")]
    pub fn destroy(&self) -> Result<(), GmError> {
        let mut standing = lock(&self.standing);
        if standing.destroyed {
            return Err(GmError::Destroyed);
        }
        standing
            .attached
            .retain(|known| known.space.strong_count() > 0);
        if !standing.attached.is_empty() {
            return Err(GmError::InUse {
                by: "an address space that the device is attached to",
            });
        }
        // Owned, so that no fault takes a frame meanwhile.
        let mut pools = own(&self.pools);
        if pools.iter().any(|pool| pool.used_bytes() > 0) {
            return Err(GmError::InUse {
                by: "pages that lie in the device's memory",
            });
        }
        standing.destroyed = true;
        pools.clear();
        Ok(())
    }

    /// Registers memory of the device, from `begin` to before `end`: pages that it faults on are
    /// placed there (see [`crate::Placement`]).
    ///
    /// # Errors
    /// [`GmError::InvalidArgument`] if the range is empty, not of whole frames, or already
    /// registered with this device.
    #[doc(alias = "gm_dev_register_physmem")]
    pub fn register_physmem(
        &self,
        begin: Pa,
        end: Pa,
        memory: Arc<dyn PhysicalMemory>,
    ) -> Result<(), GmError> {
        let pool = FramePool::new(self.id, begin, end, memory)?;
        let standing = lock(&self.standing);
        if standing.destroyed {
            return Err(GmError::Destroyed);
        }
        let mut pools = own(&self.pools);
        if pools.iter().any(|known| known.overlaps(begin, end)) {
            return Err(GmError::InvalidArgument {
                argument: "range of physical memory",
                why: "part of it is registered with the device already",
            });
        }
        pools.push(pool);
        Ok(())
    }

    /// Unregisters memory of the device that was registered as `begin` to before `end` and holds no
    /// page.
    ///
    /// # Errors
    /// [`GmError::InvalidArgument`] if exactly that range was not registered, [`GmError::InUse`].
    pub fn unregister_physmem(&self, begin: Pa, end: Pa) -> Result<(), GmError> {
        // Owned, so that no fault takes a frame meanwhile.
        let mut pools = own(&self.pools);
        let Some(at) = pools.iter().position(|pool| pool.is_range(begin, end)) else {
            return Err(GmError::InvalidArgument {
                argument: "range of physical memory",
                why: "it was not registered with the device, as a whole",
            });
        };
        if pools[at].used_bytes() > 0 {
            return Err(GmError::InUse {
                by: "pages that lie in that memory",
            });
        }
        pools.remove(at);
        Ok(())
    }

    /// True if memory is registered with it.
    pub(crate) fn has_memory(&self) -> bool {
        !share(&self.pools).is_empty()
    }

    /// A free frame of its memory.
    pub(crate) fn allocate_frame(&self) -> Option<Frame> {
        share(&self.pools).iter().find_map(FramePool::allocate)
    }

    /// Bytes of its registered memory that hold pages now.
    #[must_use]
    pub fn used_memory_bytes(&self) -> u64 {
        share(&self.pools)
            .iter()
            .map(|pool| pool.used_bytes())
            .sum()
    }

    /// True if the device is active in a space now.
    #[must_use]
    pub fn is_active(&self) -> bool {
        let standing = lock(&self.standing);
        standing
            .active
            .as_ref()
            .is_some_and(|space| space.strong_count() > 0)
    }

    /// Serves a fault of the device at `addr` in the space it is active in. When this returns
    /// without error the access may be retried.
    ///
    /// # Errors
    /// [`GmError::NotActive`], [`GmError::NotAllocated`], [`GmError::NotMapped`] (the region is being
    /// unmapped), [`GmError::Denied`], [`GmError::CannotRecover`], [`GmError::NoMemory`],
    /// [`GmError::Lost`], [`GmError::Device`], [`GmError::Busy`], [`GmError::Destroyed`].
    #[doc(alias = "gm_dev_fault")]
    pub fn fault(self: &Arc<Self>, addr: Va, access: Access) -> Result<(), GmError> {
        let space = {
            let standing = lock(&self.standing);
            if standing.destroyed {
                return Err(GmError::Destroyed);
            }
            standing.active.as_ref().and_then(Weak::upgrade)
        };
        match space {
            Some(space) => space.fault_at(self, addr, access),
            None => Err(GmError::NotActive { device: self.id }),
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.id)
    }
}
