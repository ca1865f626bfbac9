// SPDX-License-Identifier: Apache-2.0
//! Wired mappings: the caller's frames, in every table of the space (GMEM 4.1, `gm_region_map`).
//!
//! A device that cannot recover from a fault has these mappings and no others. So they are made at
//! once in all tables, and in the table of each device attached later (GMEM 3.1, 4.1: wiring by the
//! host replicates).

use super::{
    AddressSpace,
    attachments::{List, TableMask, coalesce},
};
use crate::{
    error::GmError,
    mmu::Restrict,
    region::{Content, Inner, Kind, Protection, RegionCore, RegionState, Wired, Wiring},
    sync::Arc,
};
use pagetide_addr::{Access, PAGE_BYTES, Pa, PageRange};
use std::sync::atomic::Ordering::Relaxed;

fn wrong(argument: &'static str, why: &'static str) -> GmError {
    GmError::InvalidArgument { argument, why }
}

impl AddressSpace {
    /// See [`crate::Region::map`].
    pub(crate) fn map_now(
        &self,
        core: &Arc<RegionCore>,
        frames: &[Pa],
        wiring: &Wiring,
    ) -> Result<(), GmError> {
        let runs = runs_of(core.pages, frames, wiring.page_bytes)?;
        self.map_runs(core, runs, wiring)
    }

    /// Wires a region to the runs of frames that cover it.
    pub(super) fn map_runs(
        &self,
        core: &Arc<RegionCore>,
        runs: Vec<(PageRange, Pa)>,
        wiring: &Wiring,
    ) -> Result<(), GmError> {
        if core.kind == Kind::Paged {
            return Err(GmError::Unsupported {
                what: "wiring paged memory to other frames",
            });
        }
        let serial = self.next_serial.fetch_add(1, Relaxed);
        let wired = Wired {
            serial,
            access: wiring.access,
            page_bytes: wiring.page_bytes,
            runs,
            tables: TableMask::NONE,
        };
        let list = self.devices.share();
        require_page_size(&list, wiring.page_bytes)?;
        let mut inner = core.lock();
        check_mappable(&inner, core, wiring.access)?;
        // Stuck, in case a driver panics in between.
        inner.state = RegionState::Stuck(Content::Wired(wired));
        let granted = grant_everywhere(&list, &mut inner.state);
        if let Err(error) = granted {
            take_back(&list, &mut inner.state);
            return Err(error);
        }
        inner.state.set_mapped();
        drop(inner);
        drop(list);
        if let Some(set) = &wiring.set {
            set.add(core, serial);
        }
        Ok(())
    }

    /// See [`crate::Region::protect`].
    pub(crate) fn protect(
        &self,
        core: &Arc<RegionCore>,
        protection: Protection,
    ) -> Result<(), GmError> {
        if core.kind == Kind::Paged {
            return Err(GmError::Unsupported {
                what: "protection of paged memory, which belongs to its guest",
            });
        }
        let list = self.devices.share();
        let mut inner = core.lock();
        while matches!(inner.state, RegionState::Leaving) {
            // Another thread is unmapping it, which does not take long.
            drop(inner);
            crate::sync::yield_now();
            inner = core.lock();
        }
        // First, so that a device that fails cannot regain access by faulting.
        inner.protection = protection;
        let (ranges, tables) = match &inner.state {
            RegionState::Empty | RegionState::Leaving => return Ok(()),
            RegionState::Freed => return Err(GmError::Destroyed),
            RegionState::Mapped(content) | RegionState::Stuck(content) => {
                let mut ranges = Vec::new();
                content.add_ranges(&mut ranges);
                (coalesce(ranges), content.tables())
            }
        };
        let to = match protection {
            Protection::ReadWrite => {
                regrant_wired(&list, &inner)?;
                return list.refresh(&ranges, tables);
            }
            Protection::ReadOnly => Restrict::ReadOnly,
            Protection::Nothing => Restrict::NoAccess,
        };
        let taken = list.take_away(&ranges, tables, to);
        taken.map_err(super::attachments::StillReached::error)?;
        // From no access to reading: a device may have cached that there was none.
        regrant_wired(&list, &inner)?;
        if protection == Protection::ReadOnly {
            return list.refresh(&ranges, tables);
        }
        Ok(())
    }
}

/// Gives wired pages the access that both the region's protection and the mapping allow. Demand
/// pages get theirs back by faults.
fn regrant_wired(list: &List, inner: &Inner) -> Result<(), GmError> {
    let RegionState::Mapped(Content::Wired(wired)) = &inner.state else {
        return Ok(());
    };
    let Some(access) = allowed(inner.protection, wired.access) else {
        return Ok(());
    };
    for table in list.tables().filter(|table| wired.tables.contains(table)) {
        for (pages, first) in &wired.runs {
            table.grant(*pages, access, wired.backing(*first))?;
        }
    }
    Ok(())
}

/// The access that both allow.
pub(super) fn allowed(protection: Protection, access: Access) -> Option<Access> {
    match (protection.strongest(), access) {
        (None, _) => None,
        (Some(Access::Write), Access::Write) => Some(Access::Write),
        _ => Some(Access::Read),
    }
}

fn check_mappable(inner: &Inner, core: &RegionCore, access: Access) -> Result<(), GmError> {
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
    let can = |known: &super::attachments::Attachment| {
        known.device.limits().page_sizes.contains(page_bytes)
    };
    if list.iter().all(can) {
        Ok(())
    } else {
        Err(GmError::Unsupported {
            what: "pages of that size, by a device that is attached",
        })
    }
}

fn grant_everywhere(list: &List, state: &mut RegionState) -> Result<(), GmError> {
    if let RegionState::Stuck(Content::Wired(wired)) = state {
        for table in list.tables() {
            wired.tables.insert(table);
            wired.grant(table)?;
        }
    }
    Ok(())
}

/// Undoes the grants made before a table failed. If that fails too, the region stays stuck.
fn take_back(list: &List, state: &mut RegionState) {
    let RegionState::Stuck(content) = state else {
        return;
    };
    let mut ranges = Vec::new();
    content.add_ranges(&mut ranges);
    let taken = list.take_away(&coalesce(ranges), content.tables(), Restrict::NoAccess);
    if taken.is_ok() {
        *state = RegionState::Empty;
    }
}

/// Joins consecutive frames into runs, so that a table gets one call per run.
fn runs_of(
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
