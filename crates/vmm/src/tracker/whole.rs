// SPDX-License-Identifier: Apache-2.0
//! [`WholeSections`]: a sample unmaps all pages of a section, and misses nothing.
//!
//! This is what sampling is measured against: it knows each page that was used since the last look,
//! and each page that is in use costs the guest a small fault per look, two thirds of a busy guest's
//! speed. It is a setting for comparison, not for use.

use super::unmap::UnmapAndLook;
use pagetide_addr::{PageSet, SectionNo};
use pagetide_policy::{
    sampling::{Look, Sampled, Touched},
    tracker::{AccessTracker, TrackerError},
};
use pagetide_sys::cpu;

/// See the module.
pub struct WholeSections(UnmapAndLook);

impl WholeSections {
    /// Looks at the VM of `whole`.
    #[must_use]
    pub const fn new(whole: UnmapAndLook) -> Self {
        Self(whole)
    }
}

impl AccessTracker for WholeSections {
    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        self.0.take_out(sections)
    }

    fn sample(&self, samples: &[Look]) -> Result<Sampled, TrackerError> {
        let sections: Vec<SectionNo> = samples.iter().map(|sample| sample.section).collect();
        let begun = cpu::thread_time();
        let touched = self.0.look_many(&sections)?;
        // What was mapped is unmapped now, and comes back by a fault each if it is in use.
        let unmapped_pages = touched.iter().map(|section| section.cpu.len()).sum();
        Ok(Sampled {
            touched,
            unmapped_pages,
            unmapping: cpu::thread_time().saturating_sub(begun),
        })
    }

    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        self.0.mapped(section)
    }

    fn is_held(&self, section: SectionNo) -> bool {
        self.0.is_held(section)
    }
}
