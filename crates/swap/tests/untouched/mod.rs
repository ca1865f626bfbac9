// SPDX-License-Identifier: Apache-2.0
//! A tracker of memory that nobody touches, and a touch of it by a vCPU.

use pagetide_addr::{Access, DeviceId, PageNo, PageSet, SectionNo};
use pagetide_gmem::{AddressSpace, Cause, Fault, Wait};
use pagetide_policy::{
    sampling::{Look, Sampled, Touched},
    tracker::{AccessTracker, TrackerError},
};

/// No page is ever mapped.
pub struct Untouched;

impl AccessTracker for Untouched {
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError> {
        Ok(Sampled {
            touched: vec![Touched::default(); looks.len()],
            ..Sampled::default()
        })
    }

    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        Ok(vec![Touched::default(); sections.len()])
    }

    fn mapped(&self, _: SectionNo) -> Result<PageSet, TrackerError> {
        Ok(PageSet::EMPTY)
    }
}

/// A vCPU writes to `page`.
pub fn touch(space: &AddressSpace, page: PageNo) {
    let fault = Fault {
        device: DeviceId::VCPUS,
        pages: page.single(),
        access: Access::Write,
    };
    let served = space.fault(&Cause::Fault(fault), Wait::Here);
    assert!(served.is_some());
}
