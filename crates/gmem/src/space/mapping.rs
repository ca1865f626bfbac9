// SPDX-License-Identifier: Apache-2.0
//! Wired mappings: the caller's frames, in every table of the space (GMEM 4.1, `gm_region_map`).
//!
//! A device that cannot recover from a fault has these mappings and no others. So they are made at
//! once in all tables, and in the table of each device attached later (GMEM 3.1, 4.1: wiring by the
//! host replicates).

use super::{
    address_space::AddressSpace,
    wiring::{Wiring, allowed, check_mappable, require_page_size, runs_of},
};
use crate::{
    attachments::{List, StillReached, TableMask, coalesce},
    error::GmError,
    mmu::Restrict,
    region::{Content, Inner, Kind, Protection, RegionCore, RegionState, Wired},
    sync::Arc,
};
use pagetide_addr::{Pa, PageRange};
use std::sync::atomic::Ordering::Relaxed;

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
        taken.map_err(StillReached::error)?;
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
