// SPDX-License-Identifier: Apache-2.0
//! The VMM's access tracker as the reclaimer wants it.

use pagetide_addr::{FileKey, Marks, PageNo, PageRange, PageSet, SectionNo};
use pagetide_swap::{AccessTracker, Touched, reclaim::TrackerError};
use pagetide_vmm::tracker::DmaLook;
use pagetide_vpri::DmaMmu;
use std::sync::Arc;

/// What the devices of a VM touch.
pub(super) struct Dma(pub(super) Arc<DmaMmu>);

impl DmaLook for Dma {
    fn touched(
        &self,
        file: FileKey,
        pages: PageRange,
        marks: Marks,
        visit: &mut dyn FnMut(PageNo),
    ) -> Result<(), String> {
        let domains = self.0.domains();
        let Some(domain) = domains.iter().find(|domain| domain.key() == file) else {
            return Ok(());
        };
        domain
            .touched(pages, marks, visit)
            .map_err(|error| error.to_string())
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
