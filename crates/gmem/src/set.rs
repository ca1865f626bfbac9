// SPDX-License-Identifier: Apache-2.0
//! [`MappingSet`]: wired mappings that go together (GMEM 4.1, Table 2).
//!
//! A driver maps many buffers for one request and has done with all of them at
//! once; unmapped as a set they cost one invalidation a device. A set holds
//! *mappings*, not regions: one that was unmapped on its own, and whose region
//! was mapped anew since, is not in the set any more.

use crate::{
    error::GmError,
    region::{Content, RegionCore, State},
    space::{AddressSpace, Callback, Operation},
    sync::{Arc, Mutex, lock},
};

/// Mappings that a driver regards as belonging together; clones are the same set.
#[doc(alias = "gm_mapping_set_t")]
#[derive(Clone)]
pub struct MappingSet {
    space: Arc<AddressSpace>,
    core: Arc<SetCore>,
}

/// The mappings of a set: a region, and which of its mappings.
pub(crate) struct SetCore(Mutex<Vec<(Arc<RegionCore>, u64)>>);

impl SetCore {
    /// The regions whose mapping still is the one that joined, each with an operation on it begun.
    /// The set is empty then.
    pub(crate) fn take_mapped(&self) -> Vec<Arc<RegionCore>> {
        let all = std::mem::take(&mut *lock(&self.0));
        let mapped = all
            .into_iter()
            .filter(|(region, serial)| region.is_mapped_as(*serial));
        let begun = mapped.map(|(region, _)| {
            region.operation_queued();
            region
        });
        begun.collect()
    }

    /// A mapping that would not go is in the set still.
    pub(crate) fn put_back(&self, region: &Arc<RegionCore>) {
        let serial = match &region.lock().state {
            State::Stuck(Content::Wired(wired)) => Some(wired.serial),
            _ => None,
        };
        if let Some(serial) = serial {
            self.add(region, serial);
        }
    }

    pub(crate) fn add(&self, region: &Arc<RegionCore>, serial: u64) {
        let mut all = lock(&self.0);
        // Mappings that ended on their own are swept out when the list would grow.
        if all.len() == all.capacity() {
            all.retain(|(known, serial)| known.is_mapped_as(*serial));
        }
        all.push((Arc::clone(region), serial));
    }
}

impl MappingSet {
    /// An empty set of mappings in `space`.
    #[must_use]
    pub fn new(space: &Arc<AddressSpace>) -> Self {
        Self {
            space: Arc::clone(space),
            core: Arc::new(SetCore(Mutex::new(Vec::new()))),
        }
    }

    pub(crate) fn is_of(&self, space: &AddressSpace) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.space), space)
    }

    pub(crate) fn core(&self) -> &SetCore {
        &self.core
    }

    /// Number of its mappings.
    #[must_use]
    pub fn mapping_count(&self) -> usize {
        let all = lock(&self.core.0);
        all.iter()
            .filter(|(region, serial)| region.is_mapped_as(*serial))
            .count()
    }

    /// Unmaps all mappings of the set, with one invalidation a device.
    ///
    /// # Errors
    /// As [`Region::unmap`], the first of them; those that failed are in the set still.
    #[doc(alias = "gm_mapping_set_unmap")]
    pub fn unmap(&self) -> Result<(), GmError> {
        self.space.wait_for_changes();
        self.space.unmap_set(&self.core)
    }

    /// As [`Self::unmap`], without waiting: `callback` tells when all of them are gone.
    #[doc(alias = "gm_mapping_set_unmap")]
    pub fn unmap_later(&self, callback: Option<Callback>) {
        let set = Arc::clone(&self.core);
        self.space.enqueue(Operation::UnmapSet { set }, callback);
    }
}

impl std::fmt::Debug for MappingSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappingSet({} mappings)", self.mapping_count())
    }
}
