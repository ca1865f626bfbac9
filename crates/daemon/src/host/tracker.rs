// SPDX-License-Identifier: Apache-2.0
//! The VMM's access tracker as the reclaimer wants it.

use crate::percent::Percent;
use pagetide_addr::{FileKey, Marks, PageNo, PageRange, PageSet, SectionNo};
use pagetide_policy::sampling::Look;
use pagetide_swap::{AccessTracker, HeatCost, Sampled, Touched, reclaim::TrackerError};
use pagetide_vmm::tracker::{DmaLook, Sample};
use pagetide_vpri::DmaMmu;
use std::sync::Arc;

/// How accesses are told.
pub(super) const TRACKER: &str = "unmap-and-look, sampled";

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

/// What learning a VM's heat may cost it, with what a small fault costs on this host.
pub(super) fn heat_cost(share: Percent) -> HeatCost {
    let refault = match pagetide_vmm::tracker::refault_cost() {
        Ok(refault) => refault,
        Err(error) => {
            tracing::warn!(%error, "what a small fault costs cannot be measured; 2 us are assumed");
            HeatCost::default().refault
        }
    };
    tracing::info!(
        tracker = TRACKER,
        refault_ns = refault.as_nanos(),
        cost = %share,
        "how hot memory is is learnt from samples"
    );
    HeatCost {
        share_ppm: share.ppm(),
        refault,
    }
}

impl<T: pagetide_vmm::tracker::AccessTracker> AccessTracker for Looks<T> {
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError> {
        let samples: Vec<_> = looks
            .iter()
            .map(|look| Sample {
                section: look.section,
                asked: look.asked,
                next: look.next,
            })
            .collect();
        let sampled = self.0.sample(&samples)?;
        Ok(Sampled {
            touched: sampled.touched.into_iter().map(touched_of).collect(),
            unmapped_pages: sampled.unmapped_pages,
            unmapping: sampled.unmapping,
        })
    }

    fn look(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let touched = self.0.take_out(sections)?;
        Ok(touched.into_iter().map(touched_of).collect())
    }

    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        Ok(self.0.is_mapped(section)?)
    }
}

fn touched_of(touched: pagetide_vmm::tracker::Touched) -> Touched {
    Touched {
        cpu: touched.cpu,
        dma: touched.dma,
    }
}
