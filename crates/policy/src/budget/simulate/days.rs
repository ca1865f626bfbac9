// SPDX-License-Identifier: Apache-2.0
//! The budget and its guests, step by step.

use super::super::{
    Bytes, HostBudget, HostMemory, Plan, Saved, VmId, VmReport, Water, Weight,
    fill::{Claim, share_out},
};
use super::{
    guest::{Account, Guest, share_of, touches_of},
    life::{Operator, Place, Turn, first_guests},
    recipe::{DAY, Events, Figures, Recipe, STARVED_AFTER},
};
use pagetide_random::SplitMix64;
use rustc_hash::FxHashMap;
use std::time::Duration;

/// Parts of a step in which a guest touches, fills and evicts in turn.
pub(super) const PARTS: u32 = 4;

/// The host.
pub(super) struct Days {
    step: Duration,
    pub now: Duration,
    places: Vec<Place>,
    /// By place.
    pub guests: Vec<Option<Guest>>,
    by_id: FxHashMap<VmId, usize>,
    order: SplitMix64,
    operator: Operator,
    host: HostMemory,
    pub budget: HostBudget,
    used: Bytes,
    /// Whether the daemon is down in this step.
    down: bool,
    gone: Account,
    worst: Option<(u64, u64)>,
    pub figures: Figures,
}

impl Days {
    /// A host for `guests`, which never change, under `plan`.
    pub fn of(guests: Vec<Guest>, plan: Plan, step: Duration) -> Self {
        let host = HostMemory {
            ram: guests
                .iter()
                .map(|guest| guest.ram)
                .sum::<Bytes>()
                .max(plan.budget),
            cgroup_limit: None,
        };
        let mut days = Self {
            step,
            now: Duration::ZERO,
            places: Vec::new(),
            guests: Vec::new(),
            by_id: FxHashMap::default(),
            order: SplitMix64::new(1),
            operator: Operator::new(1, Events::NONE),
            host,
            budget: HostBudget::new(plan, host).expect("the plan is sound"),
            used: Bytes::ZERO,
            down: false,
            gone: Account::default(),
            worst: None,
            figures: Figures {
                budget: plan.budget,
                water_steps: vec![0; 4],
                cold_steps: vec![0; 101],
                ..Figures::default()
            },
        };
        for guest in guests {
            days.guests.push(None);
            let joined = days.come(days.guests.len() - 1, guest);
            assert!(joined, "the floors of the first VMs fit");
        }
        days
    }

    /// That of `recipe`.
    pub fn new(recipe: &Recipe) -> Self {
        let (places, guests): (Vec<Place>, Vec<Guest>) = first_guests(recipe);
        let ram: Bytes = guests.iter().map(|guest| guest.ram).sum();
        let days = Self::of(guests, Plan::new(recipe.budget.of(ram)), recipe.step);
        Self {
            places,
            order: SplitMix64::stream(recipe.seed, u64::MAX - 1),
            operator: Operator::new(recipe.seed, recipe.events),
            ..days
        }
    }

    /// Goes on for `time`.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step();
        }
    }

    pub fn step(&mut self) {
        self.change_places();
        if self.down {
            self.restart();
        }
        self.decide();
        self.down = self.operator.restarts(self.step);
        self.live();
        self.account();
        self.now += self.step;
    }

    pub fn there(&self) -> impl Iterator<Item = &Guest> {
        self.guests.iter().flatten()
    }

    fn change_places(&mut self) {
        for index in 0..self.places.len() {
            match self.places[index].turn(self.now) {
                Turn::Stays => {}
                Turn::Leaves => self.leave(index),
                Turn::Comes(guest) => {
                    if self.come(index, *guest) {
                        self.figures.came += 1;
                    } else {
                        self.places[index].refused(self.now);
                        self.figures.refused += 1;
                    }
                }
            }
        }
        let count = self.guests.len();
        if let Some((index, weight)) = self.operator.reweighs(count, self.step) {
            self.reweigh(index, weight);
        }
    }

    /// Takes the VM in, if its floor fits.
    pub fn come(&mut self, index: usize, guest: Guest) -> bool {
        let joined = self.budget.join(guest.id, guest.share, guest.report());
        if joined.is_ok() {
            self.by_id.insert(guest.id, index);
            self.guests[index] = Some(guest);
        }
        joined.is_ok()
    }

    pub fn leave(&mut self, index: usize) {
        let Some(guest) = self.guests[index].take() else {
            return;
        };
        let left = self.budget.leave(guest.id);
        left.expect("the guest is under the budget");
        self.by_id.remove(&guest.id);
        self.settle(&guest.account);
    }

    pub fn reweigh(&mut self, index: usize, weight: Weight) {
        let Some(guest) = &mut self.guests[index] else {
            return;
        };
        guest.share.weight = weight;
        let set = self.budget.set_share(guest.id, guest.share);
        set.expect("the floor is as before");
    }

    /// The daemon is there again, with what was set, and knows nothing else.
    fn restart(&mut self) {
        let Saved { plan, vms } = self.budget.saved();
        let mut budget = HostBudget::new(plan, self.host).expect("the plan was in force");
        for guest in self.guests.iter_mut().flatten() {
            guest.forget();
            let joined = budget.join(guest.id, vms[&guest.id], guest.report());
            joined.expect("it was under the budget");
        }
        self.budget = budget;
        self.figures.restarts += 1;
    }

    fn decide(&mut self) {
        let (mut used, mut promised) = (Bytes::ZERO, Bytes::ZERO);
        for guest in self.guests.iter_mut().flatten() {
            let refaults = std::mem::take(&mut guest.refaults);
            let report: VmReport = guest.report();
            used += report.resident + report.stored;
            let observed = self.budget.observe(guest.id, report, &refaults);
            observed.expect("the guest is under the budget");
        }
        self.used = used;
        let decision = self.budget.step(self.now);
        for change in decision.changes {
            let lowered = change.from.unwrap_or_default().less(change.to);
            self.figures.lowered += lowered;
            if let Some(guest) = &mut self.guests[self.by_id[&change.vm]] {
                guest.target = change.to;
            }
        }
        for guest in self.there() {
            promised += guest.target + guest.stored();
        }
        self.figures.promised_max = self.figures.promised_max.max(promised);
        self.figures.water_steps[decision.water as usize] += 1;
        self.figures.below_min_steps += u64::from(decision.water == Water::BelowMin);
        self.figures.steps += 1;
    }

    /// What the guests do in a step.
    fn live(&mut self) {
        for guest in self.guests.iter_mut().flatten() {
            guest.live(self.now, self.step);
        }
        let part = self.step / PARTS;
        let count = self.guests.len();
        for index in 0..PARTS {
            // Not always the same first.
            let first = self.order.index(count) + index as usize;
            for place in 0..count {
                self.touch((first + place) % count, part);
            }
        }
    }

    fn touch(&mut self, place: usize, time: Duration) {
        let Some(guest) = &mut self.guests[place] else {
            return;
        };
        if self.down {
            guest.touch_unserved(time);
            return;
        }
        let others = self.used.less(guest.used());
        guest.obey(time);
        let gate = self.budget.gate(guest.id);
        let over = guest.touch(time, others, gate.as_ref());
        self.used = others + guest.used();
        let figures = &mut self.figures;
        figures.over_max = figures.over_max.max(over.bytes);
        let beyond = figures.over_beyond_fill_max.max(over.beyond_fill);
        figures.over_beyond_fill_max = beyond;
    }

    /// What each VM would have if all wanted all there is: its share by weight, between its floor and
    /// its ceiling.
    pub fn fair_shares(&self) -> Vec<Bytes> {
        self.shares(self.there().map(|guest| (guest, guest.ceiling())))
    }

    fn shares<'a>(&self, wants: impl Iterator<Item = (&'a Guest, Bytes)>) -> Vec<Bytes> {
        let marks = self.budget.plan().marks();
        let stored: Bytes = self.there().map(Guest::stored).sum();
        let left = marks.budget.less(marks.high).less(stored);
        let claims = wants.map(|(guest, wanted)| Claim {
            weight: guest.share.weight,
            lower: guest.floor(),
            upper: wanted.max(guest.floor()),
        });
        share_out(left, &claims.collect::<Vec<_>>())
    }

    /// The same if each wanted just what it uses: what some do not use goes to the others.
    pub fn shares_of_users(&self) -> Vec<Bytes> {
        let claims = self.there().map(|guest| {
            let used = guest.working_set.min(guest.ceiling());
            (guest, used)
        });
        self.shares(claims)
    }

    fn account(&mut self) {
        let fair = self.fair_shares();
        let (mut unused, mut touched) = (Bytes::ZERO, Bytes::ZERO);
        for (guest, fair) in self.guests.iter_mut().flatten().zip(fair) {
            self.figures.floors_short += u64::from(guest.lacks_floor());
            let (cold, all) = guest.cold_share();
            unused += cold;
            touched += all;
            let owed = guest.working_set.min(fair).part(7, 8);
            let is_starved = guest.resident() < owed && guest.target < owed;
            let starved = &mut guest.account.starved;
            let before = *starved;
            *starved = if is_starved {
                before + self.step
            } else {
                Duration::ZERO
            };
            let figures = &mut self.figures;
            figures.starved_longest = figures.starved_longest.max(*starved);
            figures.starved += u64::from(before < STARVED_AFTER && *starved >= STARVED_AFTER);
        }
        let percent = unused.part(100, touched.0).0.min(100);
        self.figures.cold_steps[pagetide_addr::to_usize(percent)] += 1;
    }

    /// Counts in how a VM has fared that is gone, or is at the end.
    fn settle(&mut self, account: &Account) {
        self.gone.wanted += account.wanted;
        self.gone.done += account.done;
        self.gone.evicted += account.evicted;
        self.gone.floors_broken += account.floors_broken;
        // One that was hardly there says nothing.
        let one_day = touches_of(DAY);
        let worse = |(done, wanted): (u64, u64)| {
            u128::from(account.done) * u128::from(wanted)
                < u128::from(done) * u128::from(account.wanted)
        };
        if account.wanted >= one_day.min(touches_of(self.now)) && self.worst.is_none_or(worse) {
            self.worst = Some((account.done, account.wanted));
        }
    }

    /// The figures of all that came to pass.
    pub fn end(mut self) -> Figures {
        let accounts: Vec<Account> = self.there().map(|guest| guest.account).collect();
        for account in accounts {
            self.settle(&account);
        }
        let gone = &self.gone;
        let (done, wanted) = self.worst.unwrap_or((0, 0));
        Figures {
            done: share_of(gone.done, gone.wanted),
            done_worst: share_of(done, wanted),
            evicted: gone.evicted,
            floors_broken: gone.floors_broken,
            ..self.figures
        }
    }
}
