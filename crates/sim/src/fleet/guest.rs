// SPDX-License-Identifier: Apache-2.0
//! One guest: its memory laid out among processes, page cache and NIC.

use super::{
    activity::{Activity, Pace},
    cpu::Cpu,
    disk::{Disk, DiskLoad},
    nic::Nic,
    random::{LoadRandom, number, whole},
    sink::{GuestTouch, Sink},
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
    /// Share of the time in which it is busy.
    pub intensity: f64,
    /// Its random seed.
    pub seed: u64,
}

const GIB_SECTIONS: u64 = (1 << 30) / pagetide_addr::SECTION_BYTES;

/// The 14 VMs of 7.3: 8 to 64 GiB, 4 of them network-intensive and 10 storage-intensive.
#[must_use]
pub fn paper_fleet(seed: u64) -> Vec<GuestRecipe> {
    let mut random = LoadRandom::new(seed, 0);
    (0..14)
        .map(|vm| GuestRecipe {
            sections: random.between(8, 65) * GIB_SECTIONS,
            load: if vm < 4 { Load::Network } else { Load::Storage },
            intensity: 0.8,
            seed: random.next_u64(),
        })
        .collect()
}

/// A guest at work. See the module.
#[derive(Debug)]
pub struct Guest {
    /// Of processes, NIC and disk: each has its own busy and quiet times.
    activities: [Activity; 3],
    cpu: Cpu,
    nic: Nic,
    disk: Disk,
    sink: Sink,
}

struct Plan {
    working: f64,
    cache: f64,
    packets_per_s: f64,
    disk: DiskLoad,
}

impl Guest {
    /// The guest of `recipe`, its page cache warm.
    #[must_use]
    pub fn new(recipe: &GuestRecipe) -> Self {
        let mut random = LoadRandom::new(recipe.seed, 1);
        let plan = plan(recipe.load);
        let count = |share: f64| whole(number(recipe.sections) * share);
        let pool = count(0.02 + 0.03 * random.unit());
        let (processes, cache) = lay_out(&mut random, recipe.sections, count(plan.cache));
        let (pool, elsewhere, processes) = pool_of(&mut random, processes, pool);
        let working = whole(number(processes.len() as u64) * plan.working);
        let stream = |number| LoadRandom::new(recipe.seed, number);
        let mut guest = Self {
            activities: [2, 6, 7].map(|number| Activity::new(stream(number), recipe.intensity)),
            cpu: Cpu::new(stream(3), processes, working),
            nic: Nic::new(stream(4), pool, elsewhere, plan.packets_per_s),
            disk: Disk::new(stream(5), cache, plan.disk),
            sink: Sink::new(recipe.sections),
        };
        guest.warm_up();
        guest
    }

    fn warm_up(&mut self) {
        for second in 0..WARM_UP_S {
            self.sink.second = second;
            self.disk.second(Pace::Busy, &mut self.sink);
            self.sink.touches.clear();
        }
        self.sink.second = WARM_UP_S;
    }

    /// The touches of second `second` from the start. Seconds must be requested in order. All parts are
    /// busy until the second `idle_from`, when alternating busy and quiet times begin.
    pub(super) fn second(&mut self, second: u64, idle_from: u64) {
        self.sink.second = WARM_UP_S + second;
        self.sink.touches.clear();
        let [cpu, nic, disk] = self.activities.each_mut().map(|of| {
            second
                .checked_sub(idle_from)
                .map_or(Pace::Busy, |since| of.pace(since))
        });
        self.cpu.second(cpu, &mut self.sink);
        self.nic.second(nic, &mut self.sink);
        self.disk.second(disk, &mut self.sink);
    }
}

impl Guest {
    /// The touches of the second requested last.
    pub(super) fn touches(&self) -> &[GuestTouch] {
        &self.sink.touches
    }
}

/// How long the page cache was in use before the start.
const WARM_UP_S: u64 = 4 * 3_600;

fn plan(load: Load) -> Plan {
    let storage = DiskLoad {
        read: 6.0,
        scanned: 0.3,
        rewritten: 0.8,
        temporary: 0.1,
        dataset: 1.1,
        skew: 0.85,
        rewrite_set: 0.2,
        rewrite_skew: 1.1,
        journal: 0.07,
        quiet: 0.05,
    };
    match load {
        Load::Storage => Plan {
            working: 0.97,
            cache: 0.30,
            packets_per_s: 5_000.0,
            disk: storage,
        },
        Load::Network => Plan {
            working: 0.97,
            cache: 0.20,
            packets_per_s: 100_000.0,
            disk: DiskLoad {
                read: storage.read * 0.3,
                scanned: storage.scanned * 0.3,
                rewritten: storage.rewritten * 0.3,
                temporary: storage.temporary * 0.3,
                ..storage
            },
        },
    }
}

/// Memory in stretches of 16 to 64 MiB that went to processes or to the page cache as each requested it: so
/// neither is contiguous.
fn lay_out(random: &mut LoadRandom, sections: u64, cache: u64) -> (Vec<u64>, Vec<u64>) {
    let (mut processes, mut cached) = (Vec::new(), Vec::new());
    let mut next = 0;
    while next < sections {
        let end = (next + random.between(8, 33)).min(sections);
        let left = cache.saturating_sub(cached.len() as u64);
        if random.below(sections - next) < left {
            cached.extend((next..end).take(usize::try_from(left).unwrap_or(0)));
            processes.extend(next + (end - next).min(left)..end);
        } else {
            processes.extend(next..end);
        }
        next = end;
    }
    (processes, cached)
}

/// The NIC's pool from `memory`: half of it contiguous, as when the driver started, the rest scattered.
fn pool_of(
    random: &mut LoadRandom,
    mut memory: Vec<u64>,
    pool: u64,
) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
    let piece = usize::try_from(pool / 2).unwrap_or(0).min(memory.len());
    let mut taken: Vec<u64> = memory.drain(..piece).collect();
    while (taken.len() as u64) < pool && !memory.is_empty() {
        let at = usize::try_from(random.below(memory.len() as u64)).unwrap_or(0);
        taken.push(memory.swap_remove(at));
    }
    // Memory of the kernel that may later become a buffer.
    let spare = usize::try_from(pool / 4).unwrap_or(0).min(memory.len());
    let elsewhere = memory.split_off(memory.len() - spare);
    for at in (1..memory.len()).rev() {
        let other = usize::try_from(random.below(at as u64 + 1)).unwrap_or(0);
        memory.swap(at, other);
    }
    (taken, elsewhere, memory)
}
