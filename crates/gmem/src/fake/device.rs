// SPDX-License-Identifier: Apache-2.0
//! A device for tests.

use super::lock;
use crate::{Backing, Mmu, MmuError, MmuLimits, Restrict, Restricted, TableId};
use pagetide_addr::{Access, PageNo, PageRange, PageSet, SectionNo};
use std::{collections::BTreeSet, sync::Mutex};

#[derive(Default)]
struct MmuState {
    granted: BTreeSet<PageNo>,
    wired: BTreeSet<PageNo>,
    is_busy: bool,
}

/// A device that obeys, and whose accesses are over at once unless the test says otherwise.
pub struct FakeMmu {
    limits: MmuLimits,
    state: Mutex<MmuState>,
}

impl Default for FakeMmu {
    fn default() -> Self {
        Self::with_limits(MmuLimits::PAGED)
    }
}

impl FakeMmu {
    /// One with other limits than [`MmuLimits::PAGED`].
    #[must_use]
    pub fn with_limits(limits: MmuLimits) -> Self {
        Self {
            limits,
            state: Mutex::default(),
        }
    }

    /// The vCPUs of a VM: they can be kept from writing, but not from reading.
    #[must_use]
    pub fn vcpus() -> Self {
        Self::with_limits(MmuLimits {
            strongest: Restrict::ReadOnly,
            ..MmuLimits::PAGED
        })
    }

    /// The pages granted, and not taken back since.
    #[must_use]
    pub fn granted(&self) -> BTreeSet<PageNo> {
        lock(&self.state).granted.clone()
    }

    /// True if `page` is granted.
    #[must_use]
    pub fn has(&self, page: PageNo) -> bool {
        lock(&self.state).granted.contains(&page)
    }

    /// The device must keep exactly these pages.
    pub fn wire(&self, pages: impl IntoIterator<Item = PageNo>) {
        lock(&self.state).wired = pages.into_iter().collect();
    }

    /// From now on accesses are still under way after access was taken back.
    pub fn be_busy(&self) {
        lock(&self.state).is_busy = true;
    }

    /// From now on no access is under way.
    pub fn be_idle(&self) {
        lock(&self.state).is_busy = false;
    }
}

impl Mmu for FakeMmu {
    fn limits(&self) -> MmuLimits {
        self.limits
    }

    fn wired(&self, section: SectionNo) -> PageSet {
        let mut set = PageSet::EMPTY;
        let state = lock(&self.state);
        let within = (state.wired.iter()).filter(|page| page.section() == section);
        within.for_each(|page| set.insert(*page));
        set
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        let mut state = lock(&self.state);
        if to == Restrict::NoAccess {
            for page in pages.pages(section) {
                state.granted.remove(&page);
            }
        }
        Ok(match state.is_busy {
            true => Restricted::Busy,
            false => Restricted::Done,
        })
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        lock(&self.state).granted.extend(pages.iter());
        Ok(())
    }
}
