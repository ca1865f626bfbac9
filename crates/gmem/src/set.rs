// SPDX-License-Identifier: Apache-2.0
//! [`MappingSet`]: wired mappings that are unmapped together (GMEM 4.1, Table 2).
//!
//! A driver maps many buffers for one request and is done with all of them at once; unmapped as a
//! set they cost one invalidation per device. A set holds *mappings*, not regions: a mapping that
//! was unmapped on its own is no longer in the set, even if its region was mapped again since.

use crate::{
    error::GmError,
    region::RegionCore,
    space::{AddressSpace, Callback, Leaver},
    sync::{Arc, Mutex, lock},
};

/// Mappings that a driver unmaps together; clones are the same set.
#[doc(alias = "gm_mapping_set_t")]
#[derive(Clone)]
pub struct MappingSet {
    space: Arc<AddressSpace>,
    core: Arc<SetCore>,
}

/// The mappings of a set: a region, and which of its mappings.
pub(crate) struct SetCore(Mutex<Vec<(Arc<RegionCore>, u64)>>);

impl SetCore {
    /// Takes all mappings out of the set. Only the queue calls this, one call at a time, so no
    /// other unmap finds the set empty while its mappings are being removed.
    pub(crate) fn take(&self) -> Vec<Leaver> {
        let all = std::mem::take(&mut *lock(&self.0));
        let leaver = |(region, mapping)| Leaver {
            region,
            mapping: Some(mapping),
        };
        all.into_iter().map(leaver).collect()
    }

    /// Handles the result for one of its mappings. Waits for one that another thread is unmapping
    /// at this moment; a mapping that failed to unmap is still in the set.
    pub(crate) fn settle(
        &self,
        leaver: &Leaver,
        result: Result<(), GmError>,
    ) -> Result<(), GmError> {
        let (Err(error), Some(mapping)) = (&result, leaver.mapping) else {
            return result;
        };
        while leaver.region.is_leaving() {
            crate::sync::yield_now();
        }
        if leaver.region.is_mapped_as(mapping) {
            let error = match error {
                // It failed for the thread that came first.
                GmError::NotMapped { .. } => GmError::InUse {
                    by: "a device that failed another unmap of it",
                },
                other => other.clone(),
            };
            self.add(&leaver.region, mapping);
            return Err(error);
        }
        // It was unmapped on its own.
        Ok(())
    }

    /// Puts back a mapping that may not have been removed.
    pub(crate) fn keep(&self, region: &Arc<RegionCore>, mapping: u64) {
        if region.may_be_mapped_as(mapping) {
            self.add(region, mapping);
        }
    }

    pub(crate) fn add(&self, region: &Arc<RegionCore>, serial: u64) {
        let mut all = lock(&self.0);
        // Mappings that ended on their own are pruned when the list would grow.
        if all.len() == all.capacity() {
            all.retain(|(known, serial)| known.may_be_mapped_as(*serial));
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

    pub(crate) fn core(&self) -> &Arc<SetCore> {
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

    /// Unmaps all mappings of the set, with one invalidation per device, after all operations
    /// queued before. When this returns without error, no device can reach any of them.
    ///
    /// # Errors
    /// The first error of [`Region::unmap`](crate::Region::unmap); the mappings that failed are
    /// still in the set.
    #[doc(alias = "gm_mapping_set_unmap")]
    pub fn unmap(&self) -> Result<(), GmError> {
        self.space.unmap_set(&self.core)
    }

    /// Like [`Self::unmap`], without waiting: `callback` is called when all of them are unmapped.
    ///
    /// # Errors
    /// [`GmError::Destroyed`] if the space is; then the callback is not called.
    #[doc(alias = "gm_mapping_set_unmap")]
    pub fn unmap_later(&self, callback: Option<Callback>) -> Result<(), GmError> {
        self.space.refuse_if_destroyed()?;
        self.space.enqueue_set(&self.core, callback.into());
        Ok(())
    }
}

impl std::fmt::Debug for MappingSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappingSet({} mappings)", self.mapping_count())
    }
}
