// SPDX-License-Identifier: Apache-2.0
//! The VMM's access tracker as the reclaimer wants it.

use pagetide_addr::{FileKey, PageSet, SectionNo};
use pagetide_swap::{AccessTracker, Touched, reclaim::TrackerError};
use pagetide_sys::mapping::SharedMapping;
use pagetide_vmm::tracker::OwnMappings;
use pagetide_vpri::DmaMmu;
use std::sync::Arc;

/// The mappings that our devices do DMA by.
pub(super) struct OurMappings(pub(super) Arc<DmaMmu>);

impl OwnMappings for OurMappings {
    fn of(&self, file: FileKey) -> Option<Arc<SharedMapping>> {
        let domains = self.0.domains();
        let domain = domains.iter().find(|domain| domain.key() == file)?;
        Some(Arc::clone(domain.mapping()))
    }
}

/// Hands looks on to a tracker of `pagetide-vmm`.
pub(super) struct Looks<T>(pub(super) T);

impl<T: pagetide_vmm::tracker::AccessTracker> AccessTracker for Looks<T> {
    fn look(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let touched = self.0.look_many(sections)?;
        Ok(touched
            .into_iter()
            .map(|t| Touched {
                cpu: t.cpu,
                dma: t.dma,
            })
            .collect())
    }

    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        Ok(self.0.is_mapped(section)?)
    }
}
