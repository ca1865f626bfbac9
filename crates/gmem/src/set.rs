// SPDX-License-Identifier: Apache-2.0
//! [`MappingSet`]: wired mappings that are unmapped together (GMEM 4.1, Table 2).
//!
//! A driver maps many buffers for one request and is done with all of them at once; unmapped as a
//! set they cost one invalidation per device. A set holds *mappings*, not regions: a mapping that
//! was unmapped on its own is no longer in the set, even if its region was mapped again since.

use crate::{
    error::GmError,
    space::{AddressSpace, Callback, SetCore},
    sync::Arc,
};

/// Mappings that a driver unmaps together; clones are the same set.
#[doc(alias = "gm_mapping_set_t")]
#[derive(Clone)]
pub struct MappingSet {
    space: Arc<AddressSpace>,
    core: Arc<SetCore>,
}

impl MappingSet {
    /// An empty set of mappings in `space`.
    #[must_use]
    pub fn new(space: &Arc<AddressSpace>) -> Self {
        Self {
            space: Arc::clone(space),
            core: Arc::new(SetCore::new()),
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
        self.core.mapping_count()
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
