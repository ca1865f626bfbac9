// SPDX-License-Identifier: Apache-2.0
//! What holds after each step, whatever has failed.

use super::life::Life;
use crate::kit::Reach;
use pagetide_addr::{PAGE_SHIFT, Va};
use pagetide_gmem::Mapped;
use std::collections::{BTreeMap, BTreeSet};

/// Everything that does not hold.
pub fn broken(life: &Life) -> Vec<String> {
    let mut found = life.machine.world().violations.clone();
    let reaches = life.machine.world().reaches();
    let mut frames: BTreeMap<u64, u64> = BTreeMap::new();
    for reach in &reaches {
        if let Some(what) = wrong_reach(life, reach) {
            found.push(format!("{what}: {reach:?}"));
        }
        let page = *frames.entry(reach.entry.pa).or_insert(reach.page);
        if page != reach.page {
            found.push(format!(
                "the frame of page {page} is behind another: {reach:?}"
            ));
        }
    }
    activity(life, &mut found);
    memory(life, &frames, &mut found);
    found
}

/// What a device can reach must be behind a region, and by the frame that is behind it.
fn wrong_reach(life: &Life, reach: &Reach) -> Option<&'static str> {
    let va = Va(reach.page << PAGE_SHIFT);
    let region = life.spaces.iter().find_map(|space| space.lookup(va).ok());
    let Some(region) = region else {
        return Some("reached outside of regions");
    };
    let is_pool = life.is_in_a_pool(reach.entry.pa);
    match region.mapped() {
        Mapped::Nothing | Mapped::Paged => return Some("reached while not mapped"),
        Mapped::Wired if life.wired_frame(&region, reach.page) != Some(reach.entry.pa) => {
            return Some("not the wired frame");
        }
        Mapped::Demand if !is_pool => return Some("not a frame of registered memory"),
        // A device failed: what it has is what it had.
        Mapped::Wired | Mapped::Demand | Mapped::Leaving => {}
    }
    let protection = life.protections.get(&region.start())?;
    let allowed = protection.allows(reach.entry.access);
    (!allowed && region.mapped() != Mapped::Leaving).then_some("more than the region allows")
}

/// The interface and the hardware agree on where devices are active.
fn activity(life: &Life, found: &mut Vec<String>) {
    for actor in &life.actors {
        let (is, does) = (actor.device.is_active(), actor.table().is_some());
        if is != does {
            found.push(format!(
                "{:?}: active {is}, translates {does}",
                actor.device
            ));
        }
    }
    let world = life.machine.world();
    for (number, unit) in world.units.iter().enumerate() {
        if unit.active.is_none() && !unit.tlb.is_empty() {
            found.push(format!("unit {number} has a TLB and is not active"));
        }
    }
}

/// Memory in use is that of pages which faults brought, and no other.
fn memory(life: &Life, frames: &BTreeMap<u64, u64>, found: &mut Vec<String>) {
    let used: u64 = life
        .actors
        .iter()
        .map(|a| a.device.used_memory_bytes())
        .sum();
    let reached: BTreeSet<_> = frames.keys().filter(|pa| life.is_in_a_pool(**pa)).collect();
    if used < reached.len() as u64 * 4096 {
        found.push(format!(
            "{used} bytes are in use, {} pages reached",
            reached.len()
        ));
    }
    let regions = life.spaces.iter().flat_map(|space| space.regions());
    let has_pages = |region: &pagetide_gmem::Region| {
        matches!(region.mapped(), Mapped::Demand | Mapped::Leaving)
    };
    let most: u64 = regions
        .filter(has_pages)
        .map(|region| region.len_bytes())
        .sum();
    if used > most {
        found.push(format!("{used} bytes are in use, regions have {most}"));
    }
}
