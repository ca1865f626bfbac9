// SPDX-License-Identifier: Apache-2.0
//! [`Wiring`]: how a region is to be wired; and [`SetCore`]: which mappings are unmapped together.
//!
//! What the operations on wired mappings share ([`super::mapping`] makes them, the queue of
//! operations unmaps them): the request, its checks, and the set that a mapping joins.

use crate::{
    attachments::{Attachment, List},
    error::GmError,
    region::{Inner, Leaver, Protection, RegionCore, RegionState},
    sync::{Arc, Mutex, lock},
};
use pagetide_addr::{Access, PAGE_BYTES, Pa, PageRange};

/// How a region is to be wired, as the space keeps it.
#[derive(Clone)]
pub(crate) struct Wiring {
    pub(crate) access: Access,
    pub(crate) page_bytes: u64,
    pub(crate) set: Option<Arc<SetCore>>,
}

/// The mappings of a set: a region, and which of its mappings.
pub(crate) struct SetCore(Mutex<Vec<(Arc<RegionCore>, u64)>>);

impl SetCore {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Number of its mappings.
    pub(crate) fn mapping_count(&self) -> usize {
        let all = lock(&self.0);
        all.iter()
            .filter(|(region, serial)| region.is_mapped_as(*serial))
            .count()
    }

    /// Takes all mappings out of the set. Only the queue calls this, one call at a time, so no
    /// other unmap finds the set empty while its mappings are being removed.
    pub(crate) fn take(&self) -> Vec<Leaver> {
        let all = std::mem::take(&mut *lock(&self.0));
        let leaver = |(region, mapping)| Leaver {
            region,
            mapping: Some(mapping),
        };
        all.into_iter().map(leaver).collect()
    }

    /// Handles the result for one of its mappings. Waits for one that another thread is unmapping
    /// at this moment; a mapping that failed to unmap is still in the set.
    pub(crate) fn settle(
        &self,
        leaver: &Leaver,
        result: Result<(), GmError>,
    ) -> Result<(), GmError> {
        let (Err(error), Some(mapping)) = (&result, leaver.mapping) else {
            return result;
        };
        while leaver.region.is_leaving() {
            crate::sync::yield_now();
        }
        if leaver.region.is_mapped_as(mapping) {
            let error = match error {
                // It failed for the thread that came first.
                GmError::NotMapped { .. } => GmError::InUse {
                    by: "a device that failed another unmap of it",
                },
                other => other.clone(),
            };
            self.add(&leaver.region, mapping);
            return Err(error);
        }
        // It was unmapped on its own.
        Ok(())
    }

    /// Puts back a mapping that may not have been removed.
    pub(crate) fn keep(&self, region: &Arc<RegionCore>, mapping: u64) {
        if region.may_be_mapped_as(mapping) {
            self.add(region, mapping);
        }
    }

    pub(crate) fn add(&self, region: &Arc<RegionCore>, serial: u64) {
        let mut all = lock(&self.0);
        // Mappings that ended on their own are pruned when the list would grow.
        if all.len() == all.capacity() {
            all.retain(|(known, serial)| known.may_be_mapped_as(*serial));
        }
        all.push((Arc::clone(region), serial));
    }
}

/// The access that both allow.
pub(super) fn allowed(protection: Protection, access: Access) -> Option<Access> {
    match (protection.strongest(), access) {
        (None, _) => None,
        (Some(Access::Write), Access::Write) => Some(Access::Write),
        _ => Some(Access::Read),
    }
}

fn wrong(argument: &'static str, why: &'static str) -> GmError {
    GmError::InvalidArgument { argument, why }
}

pub(super) fn check_mappable(
    inner: &Inner,
    core: &RegionCore,
    access: Access,
) -> Result<(), GmError> {
    let va = core.start();
    match &inner.state {
        RegionState::Empty => {}
        RegionState::Freed => return Err(GmError::Destroyed),
        RegionState::Mapped(_) | RegionState::Leaving | RegionState::Stuck(_) => {
            return Err(GmError::AlreadyMapped { va });
        }
    }
    if inner.protection.allows(access) {
        Ok(())
    } else {
        Err(GmError::Denied { va, access })
    }
}

pub(super) fn require_page_size(list: &List, page_bytes: u64) -> Result<(), GmError> {
    let can = |known: &Attachment| known.device.limits().page_sizes.contains(page_bytes);
    if list.iter().all(can) {
        Ok(())
    } else {
        Err(GmError::Unsupported {
            what: "pages of that size, by a device that is attached",
        })
    }
}

/// Joins consecutive frames into runs, so that a table gets one call per run.
pub(super) fn runs_of(
    pages: PageRange,
    frames: &[Pa],
    page_bytes: u64,
) -> Result<Vec<(PageRange, Pa)>, GmError> {
    if !page_bytes.is_power_of_two() || page_bytes < PAGE_BYTES {
        return Err(wrong(
            "page size",
            "it must be a power of two from 4 KiB on",
        ));
    }
    let pages_each = page_bytes / PAGE_BYTES;
    if !pages.start.0.is_multiple_of(pages_each) || !pages.len().is_multiple_of(pages_each) {
        return Err(wrong(
            "page size",
            "the region is not made of whole pages of it",
        ));
    }
    if frames.len() as u64 != pages.len() / pages_each {
        return Err(wrong(
            "frames",
            "there must be one for each page of the region",
        ));
    }
    let mut runs: Vec<(PageRange, Pa)> = Vec::new();
    for (number, frame) in (0_u64..).zip(frames) {
        let start = pages.start.plus(number * pages_each);
        let one = start.run(pages_each);
        if !frame.0.is_multiple_of(page_bytes) || frame.checked_add(page_bytes).is_none() {
            return Err(wrong("frames", "each must be aligned to the page size"));
        }
        match runs.last_mut() {
            Some((run, first)) if first.checked_add(run.bytes()) == Some(*frame) => {
                run.end = one.end;
            }
            _ => runs.push((one, *frame)),
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PageNo;

    #[test]
    fn frames_that_follow_one_another_are_one_run() {
        let pages = PageRange::new(PageNo(16), PageNo(20));
        let frames = [Pa(0x8000), Pa(0x9000), Pa(0x4000), Pa(0x5000)];
        let runs = runs_of(pages, &frames, PAGE_BYTES).unwrap();
        let range = |start, end| PageRange::new(PageNo(start), PageNo(end));
        assert_eq!(
            runs,
            [(range(16, 18), Pa(0x8000)), (range(18, 20), Pa(0x4000))]
        );
    }

    #[test]
    fn frames_that_do_not_fit_the_region_are_refused() {
        let pages = PageRange::new(PageNo(512), PageNo(1024));
        let huge = 2 << 20;
        assert!(runs_of(pages, &[Pa(huge)], huge).is_ok());
        assert!(runs_of(pages, &[Pa(4096)], huge).is_err());
        assert!(runs_of(pages, &[Pa(huge), Pa(2 * huge)], huge).is_err());
        assert!(runs_of(pages, &[Pa(huge)], 4096).is_err());
        assert!(runs_of(pages, &[Pa(huge)], 3000).is_err());
        let off = PageRange::new(PageNo(513), PageNo(1025));
        assert!(runs_of(off, &[Pa(huge)], huge).is_err());
    }
}
