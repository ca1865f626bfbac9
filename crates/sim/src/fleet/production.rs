// SPDX-License-Identifier: Apache-2.0
//! Days of production: hosts whose VMs mostly sleep, overcommitted by 10 to 15 % (VPRI 3.4, 7.4).
//!
//! The paper counts some dozens of faults a device and *day* (figures 7 and 18), where its synthetic environment,
//! our [`Round`](super::Round), has thousands an hour. Its words for the difference: intensities are far lower, and
//! "the memory reclaim ratio of each VM varies from 0% to 50%, balanced by the pressure stall information". So
//! the memory that a host lacks comes from VMs that do little, and these fault when they do something:
//! ```text
//!   working VMs     the guests of a round. They fault much when squeezed, so that their pressure spares them:
//!                   they stand last in the order in which a host's VMs are squeezed
//!   sleeping VMs    each device sleeps, and wakes a few times a day for some seconds
//!
//!     disk  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁█▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁██▁▁▁▁▁▁▁▁▁     awake: the loads of a round, at their speed
//!     NIC   ▁▁▁▁██▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁█▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁     asleep: nothing
//!                ▲ all that it used is evicted by then, and faults in a burst
//! ```
//! Some VMs wake more often than others: the numbers of wakings are log-normal over VMs. Most use little of their
//! disks, and some much. Pressure has moved memory for weeks: those give it that do little, each all that is cold in
//! it, and the rest gives nothing ([`Division::FirstFirst`]).
//!
//! All have been running for weeks when the day begins: see [`Aged`]. What the disk of a sleeping VM uses was used as
//! long ago as it takes the disk to be awake for that long.
//!
//! # What was fitted
//! To the mean faults a day of NICs and of disks without a protector (Fig 7) how often each wakes ([`Wakings`]); to
//! their 99th percentiles the spreads. These came out small: only a quarter of the VMs is squeezed, and few use much
//! of their disks, which makes most of the tail. The share of VMs with a burst needed nothing. How long a waking
//! lasts, that only the first are squeezed, and how many use how much of their disks ([`Fleet::files_share`],
//! [`Fleet::files_power`]) were chosen: the paper does not state them. How much a protector saves is a result, for
//! disks one of the last choice.

use super::{
    activity::Pace,
    aged::{Aged, LastUse},
    disk::{Disk, DiskLoad},
    guest::{self, Guest, GuestRecipe, Load, PERIODIC, Places, storage_disk},
    nic::{BUFFERS_PER_SECTION, Nic},
    random::{LoadRandom, number, whole},
    round::{SQUEEZE_FROM, cold_after, since},
    sink::{GuestTouch, Sink, Work},
    stream::{GuestStream, PROLOGUE},
};
use crate::replay::{
    AccessStream, Division, DmaTouches, FleetParams, FleetReplay, ReplayError, Start, VmAccount,
    VmParams,
};
use pagetide_addr::SECTION_BYTES;
use pagetide_policy::protect::PolicyChoice;
use std::time::Duration;

/// VMs of a host: 20,000 on 1,000 servers (1).
const HOST_VMS: usize = 20;
/// Overcommit of a host, least and most.
const OVERCOMMIT: (f64, f64) = (0.10, 0.15);
/// Memory of a VM in GiB, least and one more than most, as in 7.3.
const VM_GIB: (u64, u64) = (8, 65);
const GIB_SECTIONS: u64 = (1 << 30) / SECTION_BYTES;
const DAY_S: f64 = 24.0 * 3_600.0;
/// Share of time in which the NIC of a working VM is busy.
const INTENSITY: f64 = 0.1;
/// How many of the working VMs work over the network: 4 of 14 in 7.3.
const NETWORK_SHARE: f64 = 4.0 / 14.0;
/// Memory of a sleeping VM that CPUs use all the time, least and most: 45 % of memory is cold after two minutes (1).
const BUSY: (f64, f64) = (0.45, 0.65);
const PACKETS_PER_S: f64 = 5_000.0;
/// How often it is found what CPUs have touched; every five seconds, as in a round, takes most of the time of a replay.
const SCAN: Duration = Duration::from_secs(20);
/// How often a host's limits are recomputed.
const BALANCE_EVERY: Duration = Duration::from_secs(20);

/// How often and how long a device wakes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wakings {
    /// Mean number a day, over VMs.
    pub per_day: f64,
    /// Mean length, in seconds.
    pub seconds: f64,
    /// Deviation of the logarithm of the number, over VMs.
    pub spread: f64,
}

/// The fleet. What of it was fitted: see the module.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fleet {
    /// Share of VMs that sleep.
    pub sleeping_share: f64,
    /// Their NICs.
    pub nic: Wakings,
    /// Their disks.
    pub disk: Wakings,
    /// Most memory that the disk of a sleeping VM uses, as a share of that of a round; the least is none.
    pub files_share: f64,
    /// The power of a random number from 0 to 1 that this share is multiplied by: the larger, the fewer use much.
    pub files_power: f64,
    /// All VMs are of one size, in sections, and not of 8 to 64 GiB.
    pub vm_sections: Option<u64>,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            sleeping_share: 0.75,
            nic: Wakings {
                per_day: 1.5,
                seconds: 10.0,
                spread: 0.5,
            },
            disk: Wakings {
                per_day: 4.7,
                seconds: 25.0,
                spread: 0.3,
            },
            files_share: 1.0,
            files_power: 3.0,
            vm_sections: None,
        }
    }
}

/// What a VM does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Life {
    /// A guest of a round.
    Working(Load),
    /// Its devices wake so often a day.
    Sleeping {
        /// The NIC, and for how long.
        nic: Wakings,
        /// The disk, and for how long.
        disk: Wakings,
        /// Memory that CPUs use all the time, as a share.
        busy: f64,
        /// Memory that its disk uses, as a share of that of a round.
        files: f64,
    },
}

/// One VM. The same recipe gives the same VM.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProductionGuest {
    /// Its memory, in sections.
    pub sections: u64,
    /// What it does.
    pub life: Life,
    /// Its random seed.
    pub seed: u64,
}

/// One host.
#[derive(Clone, PartialEq, Debug)]
pub struct ProductionHost {
    /// Its VMs, in the order in which they are squeezed.
    pub guests: Vec<ProductionGuest>,
    /// Memory promised beyond the existing memory, as a share of it.
    pub overcommit: f64,
}

/// A day to be replayed.
#[derive(Clone, PartialEq, Debug)]
pub struct Day {
    /// How DMA is protected.
    pub policy: PolicyChoice,
    /// Whether the evictor hears of DMA.
    pub dma: DmaTouches,
    /// A section left alone for so long is cold.
    pub cold_after: Duration,
    /// Its length, in virtual seconds.
    pub seconds: u64,
    /// How often to record what policies hold, if at all.
    pub capacity_every: Option<Duration>,
}

impl Fleet {
    /// `vms` VMs on hosts of twenty; fewer on the last.
    #[must_use]
    pub fn hosts(&self, seed: u64, vms: usize) -> Vec<ProductionHost> {
        let mut random = LoadRandom::new(seed, 7);
        let full = vms / HOST_VMS;
        let sizes = std::iter::repeat_n(HOST_VMS, full).chain([vms % HOST_VMS]);
        let sizes = sizes.filter(|size| *size > 0);
        sizes.map(|size| self.host(&mut random, size)).collect()
    }

    fn host(&self, random: &mut LoadRandom, vms: usize) -> ProductionHost {
        let overcommit = between(random, OVERCOMMIT);
        let mut guests: Vec<_> = (0..vms).map(|_| self.guest(random)).collect();
        // Sorting is stable: those that sleep stay in random order.
        guests.sort_by_key(|guest| matches!(guest.life, Life::Working(_)));
        ProductionHost { guests, overcommit }
    }

    fn guest(&self, random: &mut LoadRandom) -> ProductionGuest {
        let sections = random.between(VM_GIB.0, VM_GIB.1) * GIB_SECTIONS;
        let life = match random.unit() < self.sleeping_share {
            true => self.sleeping(random),
            false => Life::Working(match random.unit() < NETWORK_SHARE {
                true => Load::Network,
                false => Load::Storage,
            }),
        };
        ProductionGuest {
            sections: self.vm_sections.unwrap_or(sections),
            life,
            seed: random.next_u64(),
        }
    }

    fn sleeping(&self, random: &mut LoadRandom) -> Life {
        let mut of = |wakings: Wakings| {
            // Of mean 1.
            let factor = (wakings.spread * random.normal() - wakings.spread.powi(2) / 2.0).exp();
            Wakings {
                per_day: wakings.per_day * factor,
                ..wakings
            }
        };
        Life::Sleeping {
            nic: of(self.nic),
            disk: of(self.disk),
            busy: between(random, BUSY),
            files: self.files_share * random.unit().powf(self.files_power),
        }
    }
}

fn between(random: &mut LoadRandom, (least, most): (f64, f64)) -> f64 {
    least + (most - least) * random.unit()
}

impl ProductionHost {
    /// The counters of each VM over the day, without the prologue.
    ///
    /// # Errors
    /// None that a fleet can cause except by VMs that are too large.
    pub fn run(&self, day: &Day) -> Result<Vec<VmAccount>, ReplayError> {
        let params = FleetParams {
            overcommit: self.overcommit,
            division: Division::FirstFirst,
            squeeze_from: SQUEEZE_FROM,
            balance_every: BALANCE_EVERY,
            ..FleetParams::default()
        };
        let vms = self.guests.iter().map(|guest| guest.vm(day)).collect();
        let mut fleet = FleetReplay::new(params, vms)?;
        fleet.run_until(PROLOGUE)?;
        let before = fleet.accounts();
        fleet.run_until(PROLOGUE + Duration::from_secs(day.seconds))?;
        let after = fleet.accounts();
        Ok(before.iter().zip(after).map(|(b, a)| since(b, a)).collect())
    }
}

impl ProductionGuest {
    /// Its last sections, so many, are in use by CPUs all the time, and nothing of that is in its stream.
    #[must_use]
    pub fn busy_sections(&self) -> u64 {
        match self.life {
            Life::Working(load) => self.recipe(load).busy_sections(),
            Life::Sleeping { busy, .. } => whole(number(self.sections) * busy),
        }
    }

    /// Its touches in [`PROLOGUE`] and `seconds` after it.
    #[must_use]
    pub fn stream(&self, seconds: u64) -> GuestStream {
        GuestStream::of(Box::new(self.aged()), seconds)
    }

    fn aged(&self) -> Aged {
        match self.life {
            Life::Working(load) => {
                let recipe = self.recipe(load);
                let guest = Guest::new(&recipe);
                let uses = guest::used_before(&guest, &recipe);
                Aged::new(Box::new(guest), uses)
            }
            Life::Sleeping {
                nic, disk, files, ..
            } => {
                let guest = SleepingGuest::new(self, nic, disk, files);
                let uses = guest.used_before(self.seed);
                Aged::new(Box::new(guest), uses)
            }
        }
    }

    fn recipe(&self, load: Load) -> GuestRecipe {
        GuestRecipe {
            sections: self.sections,
            load,
            intensity: INTENSITY,
            periodic: PERIODIC,
            seed: self.seed,
        }
    }

    fn vm(&self, day: &Day) -> (VmParams, Box<dyn AccessStream>) {
        let guest = self.aged();
        let params = VmParams {
            sections: self.sections,
            section_bytes: SECTION_BYTES,
            start: Start::AllPresent,
            policy: day.policy.clone(),
            dma: day.dma,
            set_times: cold_after(day.cold_after, SCAN),
            busy_sections: self.busy_sections(),
            capacity_every: day.capacity_every,
            oldest_first: guest.oldest_first(),
        };
        let stream = GuestStream::of(Box::new(guest), day.seconds);
        (params, Box::new(stream))
    }
}

/// When a device is awake.
#[derive(Clone, Debug)]
struct Sleep {
    random: LoadRandom,
    wakings: Wakings,
    is_awake: bool,
    until_s: f64,
    /// Seconds that it has been awake.
    awake_s: u64,
}

impl Sleep {
    /// At a random moment of its life.
    fn new(mut random: LoadRandom, wakings: Wakings) -> Self {
        let asleep_s = DAY_S / wakings.per_day.max(f64::MIN_POSITIVE);
        let is_awake = random.unit() < wakings.seconds / (wakings.seconds + asleep_s);
        let mean_s = if is_awake { wakings.seconds } else { asleep_s };
        // Lengths are without memory: what is left of one is as long as one.
        let until_s = mean_s * random.exponential();
        Self {
            random,
            wakings,
            is_awake,
            until_s,
            awake_s: 0,
        }
    }

    /// The device's own second, if it is awake in this one. Seconds come in order.
    fn own_second(&mut self, second: u64) -> Option<u64> {
        while self.until_s <= number(second) {
            self.is_awake = !self.is_awake;
            let mean_s = match self.is_awake {
                true => self.wakings.seconds,
                false => DAY_S / self.wakings.per_day.max(f64::MIN_POSITIVE),
            };
            // A waking that ends within the second in which it began is one of that second.
            let least_s = if self.is_awake { 1.0 } else { 0.0 };
            self.until_s += (mean_s * self.random.exponential()).max(least_s);
        }
        self.is_awake.then(|| {
            self.awake_s += 1;
            self.awake_s - 1
        })
    }
}

/// A guest whose devices sleep. See the module.
#[derive(Debug)]
struct SleepingGuest {
    nic_sleep: Sleep,
    nic: Nic,
    disk_sleep: Sleep,
    disk: Disk,
    sink: Sink,
}

impl SleepingGuest {
    fn new(guest: &ProductionGuest, nic: Wakings, disk: Wakings, files: f64) -> Self {
        let stream = |number| LoadRandom::new(guest.seed, number);
        let mut random = stream(1);
        let places = Places::new(&mut random, guest.sections, guest.busy_sections());
        let all = storage_disk(PERIODIC);
        let load = DiskLoad {
            popular: all.popular * files,
            periodic: all.periodic * files,
            ..all
        };
        Self {
            nic_sleep: Sleep::new(stream(2), nic),
            nic: Nic::new(stream(4), places.buffers, places.spare, PACKETS_PER_S),
            disk_sleep: Sleep::new(stream(3), disk),
            disk: Disk::new(stream(5), &places.files, guest.sections, &load),
            sink: Sink::new(guest.sections),
        }
    }
}

impl SleepingGuest {
    /// When its devices used its memory last: so long ago as it takes them to be awake for that long.
    fn used_before(&self, seed: u64) -> Vec<LastUse> {
        let mut random = LoadRandom::new(seed, 8);
        let slept_s = |wakings: &Wakings| DAY_S / wakings.per_day.max(f64::MIN_POSITIVE);
        let nic = &self.nic_sleep.wakings;
        // Sections that a waking fills, and the sleep before it with the first of them.
        let each = (nic.seconds * PACKETS_PER_S / BUFFERS_PER_SECTION).max(1.0);
        let mut left = 0.0;
        let mut uses = self.nic.used_before(|| {
            if left > 0.0 {
                left -= 1.0;
                return BUFFERS_PER_SECTION / PACKETS_PER_S;
            }
            left = each - 1.0;
            slept_s(nic) * random.exponential()
        });
        let disk = &self.disk_sleep.wakings;
        let asleep_s = slept_s(disk) * random.exponential();
        let ratio = (slept_s(disk) + disk.seconds) / disk.seconds.max(f64::MIN_POSITIVE);
        let of_disk = self.disk.used_before(LoadRandom::new(seed, 9));
        uses.extend(of_disk.into_iter().map(|last| LastUse {
            age_s: asleep_s + last.age_s * ratio,
            ..last
        }));
        uses
    }
}

impl Work for SleepingGuest {
    fn second(&mut self, second: u64) {
        self.sink.second = second;
        self.sink.touches.clear();
        if self.nic_sleep.own_second(second).is_some() {
            self.nic.second(Pace::Busy, &mut self.sink);
        }
        if let Some(own) = self.disk_sleep.own_second(second) {
            self.disk.second(own, &mut self.sink);
        }
    }

    fn touches(&self) -> &[GuestTouch] {
        &self.sink.touches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_wakes_as_often_and_as_long_as_it_was_told() {
        let wakings = Wakings {
            per_day: 20.0,
            seconds: 30.0,
            spread: 0.0,
        };
        let mut sleep = Sleep::new(LoadRandom::new(1, 2), wakings);
        const DAYS: u64 = 100;
        let mut was_awake = true;
        let (mut times, mut awake) = (0, 0);
        for second in 0..DAYS * 86_400 {
            let is_awake = sleep.own_second(second).is_some();
            times += u64::from(is_awake && !was_awake);
            awake += u64::from(is_awake);
            was_awake = is_awake;
        }
        let per_day = number(times) / number(DAYS);
        assert!((18.0..22.0).contains(&per_day), "{per_day}");
        let seconds = number(awake) / number(times);
        assert!((28.0..33.0).contains(&seconds), "{seconds}");
    }

    #[test]
    fn fleet_is_that_of_its_seed_and_its_working_vms_are_squeezed_last() {
        let fleet = Fleet::default();
        let hosts = fleet.hosts(3, 50);
        assert_eq!(hosts, fleet.hosts(3, 50));
        assert_ne!(hosts, fleet.hosts(4, 50));
        let sizes: Vec<usize> = hosts.iter().map(|host| host.guests.len()).collect();
        assert_eq!(sizes, [20, 20, 10]);
        for host in &hosts {
            let works = |guest: &ProductionGuest| matches!(guest.life, Life::Working(_));
            assert!(host.guests.is_sorted_by_key(works));
            assert!((0.10..0.15).contains(&host.overcommit));
        }
        // A larger fleet has the hosts of a smaller one.
        assert_eq!(fleet.hosts(3, 60)[..2], hosts[..2]);
    }

    #[test]
    fn sleeping_vms_fault_in_bursts_when_they_wake_and_adp_saves_their_nics_faults() {
        let fleet = Fleet {
            nic: Wakings {
                per_day: 48.0,
                seconds: 10.0,
                spread: 0.0,
            },
            sleeping_share: 1.0,
            vm_sections: Some(2_048),
            ..Fleet::default()
        };
        let host = &fleet.hosts(1, 6)[0];
        let run = |policy: &str| {
            let day = Day {
                policy: policy.parse().unwrap(),
                dma: DmaTouches::Unseen,
                cold_after: Duration::from_secs(200),
                seconds: 7_200,
                capacity_every: None,
            };
            host.run(&day).unwrap()
        };
        let faults = |vms: &[VmAccount]| -> u64 {
            vms.iter()
                .map(|vm| vm.faults(pagetide_access_log::Service::Network))
                .sum()
        };
        let (none, adp) = (run("none"), run("adp"));
        assert_eq!(none, run("none"));
        assert!(none.iter().any(|vm| vm.bursts.bursts > 0));
        assert!(
            faults(&none) > 4 * faults(&adp),
            "{} and {}",
            faults(&none),
            faults(&adp)
        );
    }
}
