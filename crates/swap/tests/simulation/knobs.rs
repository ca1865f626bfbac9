// SPDX-License-Identifier: Apache-2.0
//! What kind of run a seed makes: most runs lack most troubles, so that each is also met alone.

use crate::{
    dimm::BASE,
    random::{OneIn, Random},
};
use pagetide_addr::PageNo;
use pagetide_swap::slow::WhenGone;

/// Who chooses what is evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Eviction {
    /// The run, any pages at any time.
    AtRandom,
    /// The reclaimer, by its tracker; then the VMM may also hold kernel pins for a while.
    Reclaimer,
}

/// How finely a device counts its leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseUnit {
    Page,
    Section,
}

/// How the pool fares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    Ample,
    /// Others have all but filled it.
    Scarce,
}

/// Which stored content is not at hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Far {
    Nothing,
    Half,
    All,
}

/// Whether there is a slow tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slow {
    Nothing,
    /// What it is asked it does, in any order.
    Sound,
    /// It fails, goes and comes back, returns other bytes.
    Troubled,
}

/// The settings of one run.
#[derive(Clone, Debug)]
pub struct Knobs {
    pub steps: u32,
    pub vcpus: usize,
    pub devices: usize,
    /// Pages the guest uses.
    pub active: Vec<PageNo>,
    pub eviction: Eviction,
    pub lease_unit: LeaseUnit,
    pub room: Room,
    pub limit_pages: Option<u64>,
    pub neighbours_max: u32,
    /// Most steps of guest and devices at one call into the kernel.
    pub bustle: u64,
    /// Deaths, in calls into the kernel.
    pub deaths: OneIn,
    /// Failures of the kernel and the store, in calls.
    pub errors: OneIn,
    /// Devices that are busy for no reason seen here, in restrictions.
    pub busy: OneIn,
    /// Pages given up by the guest, in its steps.
    pub discards: OneIn,
    /// Memory plugged or unplugged, in steps of guest and devices.
    pub plugging: OneIn,
    /// Bits flipped in the pool, in steps of the run.
    pub flips: OneIn,
    /// Stored pages packed anew, in steps of the run.
    pub demotion: OneIn,
    /// Death of the VMM, which ends the run, in calls into the kernel.
    pub vmm_deaths: OneIn,
    pub far: Far,
    pub slow: Slow,
    /// Of the slow tier.
    pub when_gone: WhenGone,
}

impl Knobs {
    pub fn of(random: &mut Random) -> Self {
        let active = active_pages(random);
        let eviction = random.pick(&[Eviction::AtRandom, Eviction::AtRandom, Eviction::Reclaimer]);
        let limit = 4 + random.below(active.len() as u64);
        let knobs = Self {
            steps: random.pick(&[60, 150, 300]),
            vcpus: random.pick(&[1, 2, 4]),
            devices: random.pick(&[0, 1, 1, 2]),
            active,
            eviction,
            lease_unit: random.pick(&[LeaseUnit::Page, LeaseUnit::Section]),
            room: if random.below(16) == 0 {
                Room::Scarce
            } else {
                Room::Ample
            },
            limit_pages: random.pick(&[None, Some(limit)]),
            neighbours_max: random.pick(&[0, 2, 16]),
            bustle: random.pick(&[0, 1, 3]),
            deaths: OneIn(random.pick(&[0, 0, 1500, 300, 100])),
            errors: OneIn(random.pick(&[0, 0, 200, 40, 12])),
            busy: OneIn(random.pick(&[0, 10])),
            discards: OneIn(random.pick(&[0, 0, 60, 15])),
            plugging: OneIn(random.pick(&[0, 0, 150, 40])),
            flips: OneIn(random.pick(&[0, 0, 0, 40])),
            demotion: demotion(random.clone()),
            // Of a copy: runs without it go as they did before there was this trouble.
            vmm_deaths: OneIn(random.clone().pick(&[0, 0, 0, 5000, 700])),
            slow: of_copy(
                random,
                3,
                &[Slow::Nothing, Slow::Nothing, Slow::Sound, Slow::Troubled],
            ),
            when_gone: of_copy(random, 4, &[WhenGone::Wait, WhenGone::Wait, WhenGone::Lost]),
            // Of another copy, likewise.
            far: {
                let mut copy = random.clone();
                copy.below(1000);
                copy.pick(&[Far::Nothing, Far::Nothing, Far::Half, Far::All])
            },
        };
        match knobs.far {
            Far::Nothing | Far::Half => knobs,
            // Memory comes and goes while content is loaded.
            Far::All => Self {
                plugging: OneIn(20),
                ..knobs
            },
        }
    }

    /// Switches every trouble off: the end of a run.
    pub fn calm(&mut self) {
        for trouble in [
            &mut self.deaths,
            &mut self.errors,
            &mut self.busy,
            &mut self.discards,
            &mut self.plugging,
            &mut self.flips,
            &mut self.vmm_deaths,
        ] {
            *trouble = OneIn(0);
        }
        if self.slow == Slow::Troubled {
            self.slow = Slow::Sound;
        }
    }
}

/// Drawn of a copy after so many other draws, likewise.
fn of_copy<T: Copy>(random: &Random, draws: u32, from: &[T]) -> T {
    let mut copy = random.clone();
    for _ in 0..draws {
        copy.below(1000);
    }
    copy.pick(from)
}

/// Of a copy, too.
fn demotion(mut random: Random) -> OneIn {
    // Another draw than those of the next knobs.
    random.below(1000);
    random.below(1000);
    OneIn(random.pick(&[0, 0, 3, 12]))
}

/// Clusters of neighbours across both borders, at the end, and a few pages alone.
fn active_pages(random: &mut Random) -> Vec<PageNo> {
    let cluster = random.pick(&[3, 8, 20]);
    let mut pages: Vec<u64> = (512 - cluster / 2..512 + cluster).collect();
    pages.extend(1024..1024 + cluster);
    pages.push(BASE.end.0 - 1);
    for _ in 0..cluster {
        pages.push(random.below(BASE.end.0));
    }
    pages.sort_unstable();
    pages.dedup();
    pages.into_iter().map(PageNo).collect()
}
