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
#[derive(Debug, Default)]
pub struct Reclaimed {
    /// Pages absent now that were present.
    pub evicted_pages: u64,
    /// Sections skipped because a device was using them.
    pub busy_sections: u64,
    /// Of the pages, those that a DMA protector would have kept.
    pub protected_pages: u64,
    /// True if the last pass made progress but was told to end before it reached all sections.
    pub has_more: bool,
    /// True if sections were unmapped and still have to age.
    pub rests: bool,
    /// Why it ended early, if it did.
    pub stopped: Option<ReclaimStop>,
}

impl Reclaimed {
    /// Adds the result of another pass.
    pub fn add(&mut self, pass: Self) {
        self.evicted_pages += pass.evicted_pages;
        self.busy_sections += pass.busy_sections;
        self.protected_pages += pass.protected_pages;
        self.has_more = pass.has_more;
        self.rests = pass.rests;
        self.stopped = pass.stopped.or(self.stopped.take());
    }
}

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
