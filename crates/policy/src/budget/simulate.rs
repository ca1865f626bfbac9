// SPDX-License-Identifier: Apache-2.0
//! Days of a host under a budget, in virtual time.
//!
//! # What is modelled
//! VMs of 4 to 32 GiB that have long touched nine tenths of their RAM. At any moment a guest uses its
//! *working set*, all parts of it equally often. It is large by day in one half of the VMs and by
//! night in the other; it doubles in bursts of minutes; and a guest may do nothing for hours.
//!
//! ```text
//!   RAM   ├─ working set, resident ─┼─ working set, absent ─┼─ resident, unused ─┼─ absent, unused ─┤
//!                                      touched: refaulted        inactive, cool, cold by age
//! ```
//! A touch takes [`TOUCH`], one of an absent page [`FAULT`] more; so a guest that lacks memory does
//! less. What leaves the working set ages by one set a step. A guest within its target fills what it
//! touches; at its target it first evicts what is coldest, and finally what it will touch again.
//! A guest above its target evicts at [`EVICTION`]. Evicted memory is stored at a ratio that is the
//! VM's own, and metadata takes 0.4 % of RAM. Amounts are whole numbers that flow, not pages: of
//! what is refaulted in a step, quarters are counted at an eighth, a quarter, a half and all of the
//! missing part as distance.
//!
//! # What is not
//! CPUs and their scheduling, devices, pinned memory, the cost of eviction, watermarks under each
//! VM's own target, content that changes its ratio.

use super::{
    Admission, Bytes, Fill, Gate, Heat, HostBudget, HostMemory, Permille, Plan, Rate, Refaults,
    VmId, VmReport, VmShare, Weight,
};
use crate::sets::Level;
use pagetide_addr::PAGE_BYTES;
use pagetide_random::SplitMix64;
use std::time::Duration;

/// Time of a touch of a page, with the work on it.
pub const TOUCH: Duration = Duration::from_micros(20);
/// Additional time if the page is absent.
pub const FAULT: Duration = Duration::from_micros(30);
/// How fast a VM above its target evicts.
pub const EVICTION: Rate = Rate(Bytes::mib(512));
/// vCPUs that touch memory all the time, in each VM.
const TOUCHERS: u64 = 2;
/// Parts of a step in which a guest touches, fills and evicts in turn.
const PARTS: u32 = 4;
const DAY: Duration = Duration::from_secs(86_400);

/// Which days are run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recipe {
    /// Determines everything.
    pub seed: u64,
    /// VMs on the host.
    pub vms: u32,
    /// Days.
    pub days: u32,
    /// Time between two steps of the budget, and of the guests.
    pub step: Duration,
    /// The budget, as a share of the RAM of all VMs.
    pub budget: Permille,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            seed: 1,
            vms: 50,
            days: 100,
            step: Duration::from_secs(10),
            budget: Permille(667),
        }
    }
}

/// How the days went.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    /// Steps taken.
    pub steps: u64,
    /// The budget.
    pub budget: Bytes,
    /// The most used at any moment beyond the budget.
    pub overshoot_max: Bytes,
    /// The most beyond the budget and the fill under way at that moment.
    pub overshoot_beyond_fills_max: Bytes,
    /// The most that targets and stored content ever came to.
    pub promised_max: Bytes,
    /// Steps that ended with less than min free.
    pub steps_below_min: u64,
    /// Targets below a floor, counted by step and VM.
    pub floors_broken: u64,
    /// The longest time for which a VM had less than seven eighths of what it used, or of its share
    /// by weight if that is less.
    pub starved_longest: Duration,
    /// Work done, over the work done if all memory were there.
    pub done: Permille,
    /// The same of the VM that fared worst.
    pub done_worst: Permille,
    /// Work done with the budget split by weight once and for all, over the same.
    pub done_split: Permille,
    /// Bytes evicted.
    pub evicted: Bytes,
}

/// A guest and its memory.
#[derive(Clone, Debug)]
struct Guest {
    id: VmId,
    share: VmShare,
    ram: Bytes,
    /// Stored bytes of evicted ones.
    ratio: Permille,
    /// Working set by day and by night.
    by_day: Bytes,
    by_night: Bytes,
    state: State,
    working_set: Bytes,
    /// Resident: of the working set, and of what has left it: inactive, cool, cold.
    hot: Bytes,
    aged: [Bytes; 3],
    target: Bytes,
    refaults: Refaults,
    wanted: u64,
    done: u64,
    evicted: Bytes,
    starved: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Usual,
    Burst { until: Duration },
    Idle { until: Duration },
}

impl Guest {
    fn new(id: u64, random: &mut SplitMix64) -> Self {
        let ram = Bytes::gib(4 << random.below(4));
        let quiet = ram.part(100 + random.below(100), 1000);
        let busy = ram.part(400 + random.below(300), 1000);
        let weights = [50, 100, 100, 200];
        let by_day = if id.is_multiple_of(2) { busy } else { quiet };
        Self {
            id: VmId(id),
            share: VmShare {
                weight: Weight::try_from(weights[random.index(4)]).unwrap_or_default(),
                floor: ram.part(50 + random.below(50), 1000),
                ceiling: None,
            },
            ram,
            ratio: Permille(80 + u16::try_from(random.below(270)).unwrap_or(0)),
            by_day,
            by_night: if id.is_multiple_of(2) { quiet } else { busy },
            state: State::Usual,
            working_set: by_day,
            hot: ram.part(1, 10),
            aged: [Bytes::ZERO; 3],
            target: ram.part(1, 10),
            refaults: Refaults::default(),
            wanted: 0,
            done: 0,
            evicted: Bytes::ZERO,
            starved: Duration::ZERO,
        }
    }

    fn footprint(&self) -> Bytes {
        self.ram.part(9, 10)
    }

    fn resident(&self) -> Bytes {
        self.hot + self.aged.iter().copied().sum()
    }

    fn content(&self) -> Bytes {
        self.ratio.of(self.footprint().less(self.resident()))
    }

    fn stored(&self) -> Bytes {
        self.content() + Permille(4).of(self.ram)
    }

    fn used(&self) -> Bytes {
        self.resident() + self.stored()
    }

    fn report(&self) -> VmReport {
        let [inactive, cool, cold] = self.aged;
        VmReport {
            ram: self.ram,
            resident: self.resident(),
            swapped: self.footprint().less(self.resident()),
            content: self.content(),
            stored: self.stored(),
            heat: Heat::default()
                .with(Level::Hot, self.hot)
                .with(Level::Inactive, inactive)
                .with(Level::Cool, cool)
                .with(Level::Cold, cold),
            ..VmReport::default()
        }
    }

    /// The working set from `now` on.
    fn live(&mut self, now: Duration, step: Duration, random: &mut SplitMix64) {
        let by_chance = |random: &mut SplitMix64, once_in: Duration| {
            random.below(super::units::millis(once_in)) < super::units::millis(step)
        };
        self.state = match self.state {
            State::Burst { until } | State::Idle { until } if now < until => self.state,
            _ if by_chance(random, DAY / 4) => State::Burst {
                until: now + Duration::from_secs(60 + random.below(900)),
            },
            _ if by_chance(random, DAY * 2) => State::Idle {
                until: now + Duration::from_secs(3600 + random.below(36_000)),
            },
            _ => State::Usual,
        };
        // From midnight to noon and back, in a straight line.
        let of_day = now.as_secs() % DAY.as_secs();
        let noon = DAY.as_secs() / 2;
        let usual = self.by_day.part(noon - of_day.abs_diff(noon), noon)
            + self.by_night.part(of_day.abs_diff(noon), noon);
        let wanted = match self.state {
            State::Usual => usual,
            State::Burst { .. } => usual + usual,
            State::Idle { .. } => self.ram.part(1, 50),
        };
        self.age(wanted.min(self.footprint()));
    }

    fn age(&mut self, working_set: Bytes) {
        let [inactive, cool, cold] = self.aged;
        self.aged = [Bytes::ZERO, inactive, cool + cold];
        let before = self.working_set;
        if working_set < before {
            let stays = self.hot.part(working_set.pages(), before.pages());
            self.aged[0] = self.hot.less(stays);
            self.hot = stays;
        } else {
            // What is resident comes back without a fault, the warmest first.
            let mut grown = working_set.less(before);
            for aged in &mut self.aged {
                let back = grown.min(*aged);
                *aged = aged.less(back);
                grown = grown.less(back);
                self.hot += back;
            }
        }
        self.working_set = working_set;
    }

    /// Evicts up to `bytes`, the coldest first.
    fn evict(&mut self, bytes: Bytes) {
        let mut left = bytes;
        for part in self.aged.iter_mut().rev().chain([&mut self.hot]) {
            let gone = left.min(*part);
            *part = part.less(gone);
            left = left.less(gone);
        }
        self.evicted += bytes.less(left);
    }

    /// Touches memory for `time`. `others` is what the rest of the host uses; returns what was
    /// filled at once at the end, which is the fill under way.
    fn touch(&mut self, time: Duration, others: Bytes, gate: Option<&Gate>) -> Bytes {
        let missing = self.working_set.less(self.hot);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let touches = |each: u64| nanos(time) / each * TOUCHERS;
        let all = touches(nanos(TOUCH));
        self.wanted += all;
        if missing == Bytes::ZERO {
            self.done += all;
            return Bytes::ZERO;
        }
        let miss = missing.part(1000, self.working_set.0).0;
        let some = touches(nanos(TOUCH) + nanos(FAULT) * miss / 1000);
        self.done += some;
        // Pages that are touched twice are filled once.
        let filled = missing.part(some, some + self.working_set.pages());
        let room = self.target.less(self.resident()) + self.aged.iter().copied().sum();
        let grown = filled.min(room);
        for parts in [8, 4, 2, 1] {
            self.refaults.add(missing.part(1, parts), filled.part(1, 4));
        }
        self.make_room(grown, others, gate);
        self.hot = (self.hot + grown).min(self.working_set);
        // The rest replaces what was hot.
        self.evicted += filled.less(grown);
        grown
    }

    fn make_room(&mut self, fill: Bytes, others: Bytes, gate: Option<&Gate>) {
        self.evict((self.resident() + fill).less(self.target).min(fill));
        let Some(gate) = gate else { return };
        // Each page of it is a fill that the gate sees; what came before is there already.
        let page = Bytes(PAGE_BYTES);
        for _ in 0..fill.pages() {
            let answer = gate.admit(&Fill {
                bytes: page,
                resident: self.resident() + fill.less(page),
                host_used: others + self.used() + fill.less(page),
            });
            match answer {
                Admission::ReclaimFirst(bytes) if self.resident() > Bytes::ZERO => {
                    self.evict(bytes)
                }
                _ => return,
            }
        }
    }

    fn is_starved(&self, fair: Bytes) -> bool {
        let owed = self.working_set.min(fair);
        self.resident() < owed.part(7, 8) && self.target < owed.part(7, 8)
    }
}

fn share_of(done: u64, wanted: u64) -> Permille {
    Permille(u16::try_from(Bytes(done).part(1000, wanted).0).unwrap_or(u16::MAX))
}

/// Runs the days under a budget, and again under a fixed split.
///
/// # Panics
/// If the recipe has no VM, no step, or a budget of less than a quarter or more than all of the RAM.
#[must_use]
pub fn run(recipe: &Recipe) -> Figures {
    assert!(recipe.vms > 0 && !recipe.step.is_zero(), "an empty recipe");
    assert!(
        (250..=1000).contains(&recipe.budget.0),
        "a budget out of range"
    );
    let mut random = SplitMix64::new(recipe.seed);
    let guests: Vec<Guest> = (0..u64::from(recipe.vms))
        .map(|id| Guest::new(id, &mut random))
        .collect();
    let mut days = Days::new(recipe, guests.clone(), SplitMix64::new(recipe.seed));
    let mut figures = days.run();
    figures.done_split = split(recipe, guests);
    figures
}

struct Days {
    recipe: Recipe,
    guests: Vec<Guest>,
    random: SplitMix64,
    budget: HostBudget,
    used: Bytes,
    figures: Figures,
}

impl Days {
    fn new(recipe: &Recipe, guests: Vec<Guest>, random: SplitMix64) -> Self {
        let ram = guests.iter().map(|guest| guest.ram).sum();
        let plan = Plan::new(recipe.budget.of(ram));
        let host = HostMemory {
            ram,
            cgroup_limit: None,
        };
        let mut budget = HostBudget::new(plan, host).expect("the default plan is sound");
        for guest in &guests {
            let joined = budget.join(guest.id, guest.share, guest.report());
            joined.expect("floors are a tenth of RAM at most");
        }
        Self {
            recipe: *recipe,
            guests,
            random,
            budget,
            used: Bytes::ZERO,
            figures: Figures {
                budget: plan.budget,
                ..Figures::default()
            },
        }
    }

    fn run(&mut self) -> Figures {
        let mut now = Duration::ZERO;
        while now < DAY * self.recipe.days {
            self.decide(now);
            self.step(now);
            now += self.recipe.step;
        }
        let guests = &self.guests;
        let (done, wanted) = (
            guests.iter().map(|g| g.done),
            guests.iter().map(|g| g.wanted),
        );
        self.figures.done = share_of(done.sum(), wanted.sum());
        let shares = guests
            .iter()
            .map(|guest| share_of(guest.done, guest.wanted));
        self.figures.done_worst = shares.min().unwrap_or_default();
        self.figures.evicted = guests.iter().map(|guest| guest.evicted).sum();
        self.figures
    }

    fn decide(&mut self, now: Duration) {
        for guest in &mut self.guests {
            let refaults = std::mem::take(&mut guest.refaults);
            let observed = self.budget.observe(guest.id, guest.report(), &refaults);
            observed.expect("the guest is under the budget");
        }
        let decision = self.budget.step(now);
        for change in decision.changes {
            let place = usize::try_from(change.vm.0).expect("ids are places");
            self.guests[place].target = change.to;
        }
        let guests = &self.guests;
        self.used = guests.iter().map(Guest::used).sum();
        let promised = guests
            .iter()
            .map(|guest| guest.target + guest.stored())
            .sum();
        let broken = guests
            .iter()
            .filter(|guest| guest.target < guest.share.floor);
        self.figures.floors_broken += broken.count() as u64;
        self.figures.promised_max = self.figures.promised_max.max(promised);
        self.figures.steps += 1;
    }

    fn step(&mut self, now: Duration) {
        for guest in &mut self.guests {
            guest.live(now, self.recipe.step, &mut self.random);
        }
        let part = self.recipe.step / PARTS;
        for index in 0..PARTS {
            // Not always the same first.
            let count = self.guests.len();
            let first = self.random.index(count) + index as usize;
            for place in 0..count {
                self.touch((first + place) % count, part);
            }
        }
        self.account();
    }

    fn touch(&mut self, place: usize, time: Duration) {
        let guest = &mut self.guests[place];
        let others = self.used.less(guest.used());
        guest.evict(guest.resident().less(guest.target).min(EVICTION.over(time)));
        let gate = self.budget.gate(guest.id);
        let filled = guest.touch(time, others, gate.as_ref());
        self.used = others + guest.used();
        let over = self.used.less(self.figures.budget);
        let figures = &mut self.figures;
        figures.overshoot_max = figures.overshoot_max.max(over);
        let beyond = figures.overshoot_beyond_fills_max.max(over.less(filled));
        figures.overshoot_beyond_fills_max = beyond;
    }

    fn account(&mut self) {
        let marks = self.budget.plan().marks();
        let stored: Bytes = self.guests.iter().map(Guest::stored).sum();
        let left = marks.budget.less(marks.high).less(stored);
        let weight = |guest: &Guest| u64::from(guest.share.weight.get());
        let weights: u64 = self.guests.iter().map(weight).sum();
        let free = marks.budget.less(self.used);
        self.figures.steps_below_min += u64::from(free < marks.min);
        for guest in &mut self.guests {
            if guest.is_starved(left.part(weight(guest), weights)) {
                guest.starved += self.recipe.step;
            } else {
                guest.starved = Duration::ZERO;
            }
            self.figures.starved_longest = self.figures.starved_longest.max(guest.starved);
        }
    }
}

/// The same days with a fixed target for each VM, so that it and what is stored of it use its share
/// of the budget by weight.
fn split(recipe: &Recipe, mut guests: Vec<Guest>) -> Permille {
    let mut random = SplitMix64::new(recipe.seed);
    let budget = recipe.budget.of(guests.iter().map(|guest| guest.ram).sum());
    let weight = |guest: &Guest| u64::from(guest.share.weight.get());
    let weights: u64 = guests.iter().map(weight).sum();
    for guest in &mut guests {
        let share = budget.part(weight(guest), weights);
        let resident = share.less(guest.ratio.of(guest.footprint()) + Permille(4).of(guest.ram));
        let target = resident.part(1000, u64::from(1000 - guest.ratio.0));
        guest.target = target.min(guest.ram);
    }
    let mut now = Duration::ZERO;
    while now < DAY * recipe.days {
        for guest in &mut guests {
            guest.live(now, recipe.step, &mut random);
        }
        for _ in 0..PARTS {
            // As above, so that both arms see the same days.
            random.index(guests.len());
            for guest in &mut guests {
                guest.touch(recipe.step / PARTS, Bytes::ZERO, None);
                guest.refaults = Refaults::default();
            }
        }
        now += recipe.step;
    }
    let (done, wanted) = (
        guests.iter().map(|g| g.done),
        guests.iter().map(|g| g.wanted),
    );
    share_of(done.sum(), wanted.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weeks_of_fifty_vms_keep_the_budget_and_starve_nobody() {
        let figures = run(&Recipe {
            days: 25,
            step: Duration::from_secs(60),
            ..Recipe::default()
        });
        assert_eq!(figures.steps, 36_000);
        assert_eq!(figures.overshoot_beyond_fills_max, Bytes::ZERO);
        assert!(figures.promised_max <= figures.budget);
        assert_eq!(figures.floors_broken, 0);
        assert!(figures.starved_longest <= Duration::from_secs(300));
        assert!(figures.done >= Permille(980));
        assert!(figures.done > figures.done_split);
        assert!(figures.done_worst >= Permille(900));
    }

    #[test]
    fn days_are_determined_by_their_seed() {
        let recipe = Recipe {
            vms: 8,
            days: 1,
            ..Recipe::default()
        };
        let figures = run(&recipe);
        assert_eq!(figures, run(&recipe));
        assert_ne!(figures, run(&Recipe { seed: 2, ..recipe }));
    }

    #[test]
    fn fine_steps_keep_the_budget_too() {
        for seed in 1..=3 {
            let figures = run(&Recipe {
                seed,
                vms: 12,
                days: 1,
                step: Duration::from_secs(5),
                budget: Permille(500),
            });
            assert_eq!(figures.overshoot_beyond_fills_max, Bytes::ZERO);
            assert!(figures.promised_max <= figures.budget);
            assert_eq!(figures.floors_broken, 0);
            assert!(figures.starved_longest <= Duration::from_secs(60));
        }
    }
}
