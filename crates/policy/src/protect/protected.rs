// SPDX-License-Identifier: Apache-2.0
//! [`ProtectedSections`]: the sections not to be chosen for eviction, as the evictor reads them.

use crate::section_set::SectionSet;
use pagetide_addr::SectionNo;
use rustc_hash::FxHashMap;
use std::sync::{
    PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// The sections that at least one device of a VM protects. Written only by the VM's
/// [`Protector`](super::Protector), a section at a time; read by its evictor, which may see a
/// change a moment late: protection prevents the choice of a section, and one chosen a moment ago
/// is still evicted.
#[derive(Debug, Default)]
pub struct ProtectedSections {
    protected: RwLock<Protected>,
    len: AtomicU64,
    taken_pages: AtomicU64,
}

#[derive(Debug, Default)]
struct Protected {
    sections: SectionSet,
    /// Sections that more than one device protects, and the number of devices beside the first.
    again: FxHashMap<SectionNo, u32>,
}

impl ProtectedSections {
    /// True if a device protects `section`.
    #[must_use]
    pub fn contains(&self, section: SectionNo) -> bool {
        // Mostly the set is empty, or no device of this VM has a policy.
        !self.is_empty() && self.read().sections.contains(section)
    }

    /// Number of sections that are protected, each counted once.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len.load(Relaxed)
    }

    /// Number of protected sections of which `is_counted` is true.
    #[must_use]
    pub fn count(&self, mut is_counted: impl FnMut(SectionNo) -> bool) -> u64 {
        let protected = self.read();
        let sections = protected.sections.iter();
        sections.filter(|section| is_counted(*section)).count() as u64
    }

    /// True if nothing is protected.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory it takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let protected = self.read();
        let again = protected.again.capacity() * (size_of::<(SectionNo, u32)>() + 1) * 8 / 7;
        protected.sections.bytes() + again as u64
    }

    /// The evictor had to evict `pages` pages of protected sections.
    pub fn count_taken(&self, pages: u64) {
        self.taken_pages.fetch_add(pages, Relaxed);
    }

    /// Pages of protected sections that were evicted nevertheless, since the start.
    #[must_use]
    pub fn taken_pages(&self) -> u64 {
        self.taken_pages.load(Relaxed)
    }

    /// One more device protects `section`.
    pub(crate) fn add(&self, section: SectionNo) {
        let mut protected = self.write();
        if !protected.sections.insert(section) {
            *protected.again.entry(section).or_insert(0) += 1;
        }
        self.len.store(protected.sections.len(), Relaxed);
    }

    /// One device fewer protects `section`.
    pub(super) fn remove(&self, section: SectionNo) {
        let mut protected = self.write();
        match protected.again.get_mut(&section) {
            Some(1) => {
                protected.again.remove(&section);
            }
            Some(count) => *count -= 1,
            None => {
                protected.sections.remove(section);
            }
        }
        self.len.store(protected.sections.len(), Relaxed);
    }

    // Nothing within a change can panic, so the guarded data is consistent even if the lock's
    // holder panicked.
    fn read(&self) -> RwLockReadGuard<'_, Protected> {
        self.protected
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Protected> {
        self.protected
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
