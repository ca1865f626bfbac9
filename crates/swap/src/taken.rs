// SPDX-License-Identifier: Apache-2.0
//! Result of a reclaim, and why it ended early.

use crate::store::PutError;

/// A pass that took this many eighths of a section's pages took the section. What stays is a page or a
/// few that something else in the section keeps in use.
pub(super) const WHOLE_EIGHTHS: u64 = 7;

/// How much of a section a pass has evicted. See [`crate::reclaim`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Took {
    /// All, or nearly all.
    Whole,
    /// Some pages; a good many stay.
    Part,
}

impl Took {
    pub(crate) fn of(evicted_pages: u64, present_pages: u64) -> Self {
        if evicted_pages * 8 >= present_pages * WHOLE_EIGHTHS {
            Self::Whole
        } else {
            Self::Part
        }
    }
}

/// Result of a reclaim.
pub type Reclaimed = pagetide_policy::reclaim::PassReport<ReclaimStop>;

/// Why a reclaim ends although pages are still wanted.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimStop {
    /// The store is full, or fails.
    #[error(transparent)]
    Store(PutError),
    /// The VM's memory is gone.
    #[error("the VM is gone")]
    Gone,
    /// A system call failed.
    #[error("{0}")]
    Kernel(String),
}
