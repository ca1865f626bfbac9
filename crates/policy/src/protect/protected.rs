// SPDX-License-Identifier: Apache-2.0
//! [`ProtectedSections`]: what must not be chosen for eviction, as the evictor reads it.

use pagetide_addr::SectionNo;
use rustc_hash::FxHashMap;
use std::sync::{
    PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// The sections that at least one device of a VM protects. Written by the VM's
/// [`Protector`](super::Protector) alone, a section at a time; read by its evictor, which may see
/// it a moment late: it protects from being chosen, and a section chosen a moment ago goes.
#[derive(Debug, Default)]
pub struct ProtectedSections {
    /// Numbers of sections may lie far apart. With the number of devices that protect each.
    devices: RwLock<FxHashMap<SectionNo, u32>>,
    len: AtomicU64,
    taken_pages: AtomicU64,
}

impl ProtectedSections {
    /// True if a device protects `section`.
    #[must_use]
    pub fn contains(&self, section: SectionNo) -> bool {
        // Mostly there are none, or no device of this VM has a policy.
        !self.is_empty() && self.read().contains_key(&section)
    }

    /// Number of sections that are protected, each counted once.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len.load(Relaxed)
    }

    /// True if nothing is protected.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The evictor had to take `pages` pages of protected sections.
    pub fn count_taken(&self, pages: u64) {
        self.taken_pages.fetch_add(pages, Relaxed);
    }

    /// Pages of protected sections that were evicted all the same, since the start.
    #[must_use]
    pub fn taken_pages(&self) -> u64 {
        self.taken_pages.load(Relaxed)
    }

    /// One more device protects `section`.
    pub(super) fn add(&self, section: SectionNo) {
        let mut devices = self.write();
        *devices.entry(section).or_insert(0) += 1;
        self.len.store(devices.len() as u64, Relaxed);
    }

    /// One device less protects `section`.
    pub(super) fn remove(&self, section: SectionNo) {
        let mut devices = self.write();
        if let Some(count) = devices.get_mut(&section) {
            *count -= 1;
            if *count == 0 {
                devices.remove(&section);
            }
        }
        self.len.store(devices.len() as u64, Relaxed);
    }

    // Nothing between two changes can panic, so what a lock guards is whole even if its holder did.
    fn read(&self) -> RwLockReadGuard<'_, FxHashMap<SectionNo, u32>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, FxHashMap<SectionNo, u32>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }
}
