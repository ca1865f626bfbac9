// SPDX-License-Identifier: Apache-2.0
//! One guest: its memory laid out among processes, page cache and NIC.
//!
//! ```text
//!   scattered:  ░░▒▒░▓░▒░░▓▒░…        page cache ▒, buffers of the NIC ▓, memory that nobody touches ░
//!   at the end: ████████████          memory that CPUs touch all the time: it is never cold
//! ```
//! How much is of which kind follows from the paper's shares of cold memory (1): 45 % of memory was not touched
//! for two minutes. What is touched less often than that and more often than every seven minutes is page cache.

use super::{
    activity::Activity,
    aged::LastUse,
    disk::{Disk, DiskLoad},
    nic::{BUFFERS_PER_SECTION, Nic, QUIET_PACKETS_PER_S},
    random::{LoadRandom, number, whole},
    sink::{GuestTouch, Sink, Work},
};

/// The main activity of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// It serves over the network.
    Network,
    /// It works on files.
    Storage,
}

/// The parameters of a guest. The same recipe gives the same guest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GuestRecipe {
    /// Its memory, in sections.
    pub sections: u64,
    /// Its activity.
    pub load: Load,
    /// Share of the time in which its network interface is busy.
    pub intensity: f64,
    /// Share of a storage guest's memory that its disk touches again after three to five minutes, as jobs do that
    /// go over their data. The footprint in half an hour is the same without.
    pub periodic: f64,
    /// Its random seed.
    pub seed: u64,
}

impl GuestRecipe {
    /// Its last sections, so many, are in use by CPUs all the time, and nothing of that is in its stream.
    #[must_use]
    pub fn busy_sections(&self) -> u64 {
        whole(number(self.sections) * plan(self).busy)
    }
}

const GIB_SECTIONS: u64 = (1 << 30) / pagetide_addr::SECTION_BYTES;

/// Where nothing else is asked for; see [`GuestRecipe::periodic`].
pub(super) const PERIODIC: f64 = 0.04;
/// Popular sections of a storage guest's disk, with [`PERIODIC`].
const POPULAR: f64 = 0.43;
/// Popular sections that have the footprint of one periodic one in half an hour.
const POPULAR_FOR_PERIODIC: f64 = 1.8;

/// The 14 VMs of 7.3 in random order: 8 to 64 GiB, 4 of them network-intensive and 10 storage-intensive.
#[must_use]
pub fn paper_fleet(seed: u64) -> Vec<GuestRecipe> {
    let mut random = LoadRandom::new(seed, 0);
    let mut guests: Vec<GuestRecipe> = (0..14)
        .map(|vm| GuestRecipe {
            sections: random.between(8, 65) * GIB_SECTIONS,
            load: if vm < 4 { Load::Network } else { Load::Storage },
            intensity: 0.8,
            periodic: PERIODIC,
            seed: random.next_u64(),
        })
        .collect();
    for at in (1..guests.len()).rev() {
        guests.swap(at, index_below(&mut random, at + 1));
    }
    guests
}

/// A guest at work. See the module.
#[derive(Debug)]
pub struct Guest {
    activity: Activity,
    nic: Nic,
    disk: Disk,
    sink: Sink,
}

/// Where a guest's memory is, scattered over what CPUs do not use all the time.
pub(super) struct Places {
    /// Memory for the page cache, more than it uses.
    pub(super) files: Vec<u64>,
    /// Buffers of the NIC.
    pub(super) buffers: Vec<u64>,
    /// Memory of the kernel that may later become a buffer: it is cold until then.
    pub(super) spare: Vec<u64>,
}

impl Places {
    pub(super) fn new(random: &mut LoadRandom, sections: u64, busy_sections: u64) -> Self {
        let pool = whole(number(sections) * (0.02 + 0.03 * random.unit()));
        let mut files: Vec<u64> = (0..sections - busy_sections).collect();
        for at in (1..files.len()).rev() {
            files.swap(at, index_below(random, at + 1));
        }
        let buffers = files.split_off(files.len().saturating_sub(index_of(pool)));
        let spare = files.split_off(files.len().saturating_sub(index_of(pool / 4)));
        Self {
            files,
            buffers,
            spare,
        }
    }
}

/// Shares of a guest's memory.
struct Plan {
    /// In use all the time.
    busy: f64,
    packets_per_s: f64,
    disk: DiskLoad,
}

impl Guest {
    /// The guest of `recipe`.
    #[must_use]
    pub fn new(recipe: &GuestRecipe) -> Self {
        let mut random = LoadRandom::new(recipe.seed, 1);
        let plan = plan(recipe);
        let places = Places::new(&mut random, recipe.sections, recipe.busy_sections());
        let stream = |number| LoadRandom::new(recipe.seed, number);
        Self {
            activity: Activity::new(stream(6), recipe.intensity),
            nic: Nic::new(stream(4), places.buffers, places.spare, plan.packets_per_s),
            disk: Disk::new(stream(5), &places.files, recipe.sections, &plan.disk),
            sink: Sink::new(recipe.sections),
        }
    }
}

/// When the devices of the guest of `recipe`, which is this one, used its memory last.
pub(super) fn used_before(guest: &Guest, recipe: &GuestRecipe) -> Vec<LastUse> {
    let busy = plan(recipe).packets_per_s * recipe.intensity;
    let packets_per_s = busy + QUIET_PACKETS_PER_S * (1.0 - recipe.intensity);
    let mut uses = guest
        .nic
        .used_before(|| BUFFERS_PER_SECTION / packets_per_s);
    uses.extend(guest.disk.used_before(LoadRandom::new(recipe.seed, 8)));
    uses
}

impl Work for Guest {
    fn second(&mut self, second: u64) {
        self.sink.second = second;
        self.sink.touches.clear();
        self.nic.second(self.activity.pace(second), &mut self.sink);
        self.disk.second(second, &mut self.sink);
    }

    fn touches(&self) -> &[GuestTouch] {
        &self.sink.touches
    }
}

fn plan(recipe: &GuestRecipe) -> Plan {
    let storage = storage_disk(recipe.periodic);
    match recipe.load {
        Load::Storage => Plan {
            busy: 0.45,
            packets_per_s: 5_000.0,
            disk: storage,
        },
        Load::Network => Plan {
            busy: 0.50,
            packets_per_s: 20_000.0,
            disk: DiskLoad {
                popular: storage.popular * 0.25,
                periodic: storage.periodic * 0.25,
                ..storage
            },
        },
    }
}

/// The disk of a storage guest of which this share is periodic.
pub(super) fn storage_disk(periodic: f64) -> DiskLoad {
    DiskLoad {
        popular: POPULAR + (PERIODIC - periodic) * POPULAR_FOR_PERIODIC,
        periodic,
        written: 0.0,
    }
}

fn index_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn index_below(random: &mut LoadRandom, end: usize) -> usize {
    index_of(random.below(end as u64))
}
