// SPDX-License-Identifier: Apache-2.0
//! Policy `adaptive`: replaces the fixed times of `adp` by times learned for each device while it
//! runs (beyond VPRI: its section 8 asks for parameters by online profiling, spatial locality and
//! prefetching).
//!
//! ```text
//!   touch ──► age 0 ─► 15 s ─► … ─► 180 s ─► 240 s ─► …      a list for each interval of age
//!     │                               │  at each border: is it worth protecting from here on?
//!     │  visit (first touch           │      worth := touches saved by second protected  (life_table)
//!     │  after a minute's rest)       ▼      near  := as old as what the evictor takes   (reach)
//!     ▼                          Protect / Release       protected if near, cold, worth >= price
//!   guess: what followed last time, and adjacent ones ──► BringBack
//!
//!   evicted ──► now it is known to be cold. Worth it? BringBack and Protect. Likely to be touched
//!               before the evictor takes it again? BringBack alone. Else it stays absent, and is
//!               evaluated again when it is older.
//! ```
//! - *Age and class decide.* Sections are classified by how long they were idle before their last
//!   visit and by the number of visits. For each class a life table learns how many sections are
//!   touched at which age; from that follows when to begin and when to give up (`life_table.rs`).
//! - *The evictor is observed, not guessed at.* A section that its CPUs use is never evicted, so it
//!   need not be protected; the policy sees only DMA, so it waits until the evictor has taken a
//!   section once. The lower end of the ages at which that happens is the evictor's reach. While
//!   little is protected, the policy does not wait. While nothing is evicted, nothing is protected.
//! - *The price* is the least worth that is protected. It rises while more than `protected-mean` is
//!   protected and falls otherwise, so that the best sections are the ones protected.
//! - *Guesses* (`guess.rs`): where a guest fills memory in the order in which it was freed, a section that
//!   was visited after another last time, or is adjacent to it, is about to be visited. Not all guests do
//!   this, so the number of sections to guess ahead is learned from how many guesses were touched before
//!   they were evicted again.
//! - *Strangers*: an evicted section that the device never touched, but whose adjacent sections it
//!   did, is remembered too, in a class of its own.
//!
//! Where nothing was learned yet the worth falls with age, so that of the sections near the evictor's
//! reach those touched last are protected, as in `adp`.
//!
//! A touch is O(1) except for the guesses (at most 48 look-ups). The work per second is one step for
//! each section that crosses an age boundary, some twenty in its life; every 20 s the tables are
//! recomputed. Memory: at most `tracked-max` of the VM's sections are remembered.
//!
//! A prefetch costs the host work and the VM room below its limit, for which another section is
//! evicted. So prefetches are limited by `bring-backs-a-minute`; and whether they save faults at all is
//! tested by making none for some minutes now and then (`trial.rs`). Where they save none, they are
//! made only to test again.

mod guess;
mod life_table;
mod mark;
mod params;
mod pending;
mod trial;

pub use params::AdaptiveParams;

use super::{
    Change, Fate, PolicyReport, ProtectionPolicy, Touch, parameters::Share, recency::nanos,
};
use crate::{
    cells::{List, Slot},
    links::Links,
};
use guess::{Absent, Guesses, Kind};
use life_table::{AGES_S, INTERVALS, LifeTable, interval_of};
use mark::{Mark, NEVER};
use pagetide_addr::SectionNo;
use std::{collections::VecDeque, time::Duration};
use trial::{RETURN_S, Trial};

/// A touch after this long an idle time begins a new visit; an earlier one belongs to the same
/// visit.
const VISIT_GAP_S: u64 = 60;
/// The interval of [`VISIT_GAP_S`].
const VISIT_INTERVAL: u8 = 3;
/// The tables are recomputed this often.
const WEIGH_EVERY: Duration = Duration::from_secs(20);
/// A protected section that was touched is released after this time: by then the evictor has scanned
/// it.
const RELEASE_AFTER: Duration = Duration::from_secs(10);
/// Most sections that wait for an allowance.
const DEFERRED_MAX: usize = 1 << 10;
/// Factor of one step of the price of protection.
const PRICE_STEP: f64 = 1.15;
const PRICE_MIN: f64 = 1e-5;
/// Sections this old must be known to be touched again: the prior alone no longer protects them.
const OLD_S: u64 = 3_600;
const PRICE_OLD: f64 = 1.5e-4;
const PRICE_MAX: f64 = 1.0;
/// Prefetching is work for the host: it must save at least this part of the faults.
const GAIN_LEAST: f64 = 0.05;
/// The same where most prefetches are in vain, so that sections displace each other all the time.
const GAIN_OF_CHURN: f64 = 0.35;

/// See the module.
#[derive(Debug)]
pub struct Adaptive {
    params: AdaptiveParams,
    sections: u64,
    links: Links<Mark>,
    /// Sections by the interval of their age, those touched longest ago first.
    ages: [List; INTERVALS],
    table: LifeTable,
    absent: Absent,
    guesses: Guesses,
    /// Least worth that is protected.
    price: f64,
    protected: u64,
    /// Protected sections that were touched, to be released, with the due time in nanoseconds.
    releases: VecDeque<(u64, SectionNo)>,
    /// Lower end of the ages at which the evictor takes sections, in seconds.
    reach_s: f64,
    /// Visits begun.
    last_visit: Option<Slot>,
    /// Prefetches allowed now.
    allowance: f64,
    /// Sections that would have been prefetched with enough allowance, oldest first.
    deferred: VecDeque<SectionNo>,
    trial: Trial,
    passed_at: Option<Duration>,
    weighed_at: Duration,
    faded_at: Duration,
    dropped: u64,
}

impl Adaptive {
    /// The policy for a device of a VM with `sections` sections.
    #[must_use]
    pub fn new(params: AdaptiveParams, sections: u64) -> Self {
        Self {
            params,
            sections,
            links: Links::default(),
            ages: std::array::from_fn(|_| List::default()),
            table: LifeTable::new(),
            absent: Absent::default(),
            guesses: Guesses::default(),
            price: PRICE_MIN,
            protected: 0,
            releases: VecDeque::new(),
            reach_s: params.reach_at_first.as_secs_f64(),
            last_visit: None,
            allowance: 0.0,
            deferred: VecDeque::new(),
            trial: Trial::default(),
            passed_at: None,
            weighed_at: Duration::ZERO,
            faded_at: Duration::ZERO,
            dropped: 0,
        }
    }

    fn visit(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        if let Some(last) = self.last_visit.replace(slot)
            && last != slot
        {
            self.links.value_mut(last).next = Some(slot);
        }
        self.guess_next(slot, changes);
    }

    fn guess_next(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        let section = self.links.section(slot);
        let mut next = slot;
        for _ in 0..self.guesses.depth(Kind::Order) {
            let Some(after) = self.links.value(next).next else {
                break;
            };
            next = after;
            self.bring_back(self.links.section(next), Kind::Order, changes);
        }
        for step in 1..=self.guesses.depth(Kind::Neighbour) {
            let beside = [section.0.checked_add(step), section.0.checked_sub(step)];
            // Only an evicted section is known to have existed.
            for other in beside.into_iter().flatten() {
                self.bring_back(SectionNo(other), Kind::Neighbour, changes);
            }
        }
    }

    fn bring_back(&mut self, section: SectionNo, kind: Kind, changes: &mut Vec<Change>) -> bool {
        let may = self.trial.acts() && self.guesses.depth(kind) > 0;
        if !may || !self.absent.contains(section) {
            return false;
        }
        if self.allowance < 1.0 {
            if kind == Kind::Age && self.deferred.len() < DEFERRED_MAX {
                self.deferred.push_back(section);
            }
            return false;
        }
        self.allowance -= 1.0;
        self.absent.remove(section);
        self.guesses.made(section, kind);
        changes.push(Change::BringBack(section));
        true
    }

    /// Protects the section at `slot` if that is worth it, or ends its protection.
    fn decide(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        let mark = *self.links.value(slot);
        let section = self.links.section(slot);
        let worth = self.table.worth(mark.class(), usize::from(mark.interval));
        let end_s = AGES_S.get(usize::from(mark.interval) + 1).copied();
        // While there is room, sections are protected before their first eviction, and earlier.
        let half = self.params.protected_mean.of(self.sections) / 2;
        let has_room = self.trial.has_begun() && self.protected < half;
        let reach_s = if has_room {
            self.reach_s / 2.0
        } else {
            self.reach_s
        };
        let near = end_s.is_none_or(|end| seconds(end) > reach_s);
        let wanted = mark.interval >= VISIT_INTERVAL
            && near
            && (mark.cold || has_room)
            && worth >= self.least_worth(mark.interval);
        if wanted
            && !mark.protected
            && self.protected >= self.params.protected_max.of(self.sections)
        {
            self.fetch(slot, changes);
            return;
        }
        if !wanted {
            self.fetch(slot, changes);
        }
        if wanted == mark.protected {
            return;
        }
        if wanted {
            if self.absent.contains(section) && !self.bring_back(section, Kind::Age, changes) {
                return;
            }
            self.protected += 1;
            changes.push(Change::Protect(section));
        } else {
            self.protected -= 1;
            changes.push(Change::Release(section));
        }
        self.links.value_mut(slot).protected = wanted;
    }

    /// Prefetches the section at `slot` if it is absent and will probably be touched before the
    /// evictor takes it again.
    fn fetch(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        let mark = self.links.value(slot);
        let soon = self.table.soon(mark.class(), usize::from(mark.interval));
        if soon >= share_of(self.params.likely) {
            self.bring_back(self.links.section(slot), Kind::Age, changes);
        }
    }

    /// The evictor took a section that the device never touched, among others that it did touch.
    fn meet_stranger(&mut self, section: SectionNo, now: Duration, changes: &mut Vec<Change>) {
        let known = [1, 2, 3]
            .into_iter()
            .flat_map(|step| [section.0.checked_sub(step), section.0.checked_add(step)])
            .flatten()
            .filter(|other| {
                self.links
                    .find(SectionNo(*other))
                    .is_some_and(|slot| self.links.value(slot).visits > 0)
            })
            .count();
        if known < 3 {
            return;
        }
        let mark = Mark {
            touched_ns: nanos(now).into(),
            next: None,
            interval: 0,
            rested: NEVER,
            visits: 0,
            protected: false,
            cold: true,
        };
        let slot = self.links.insert_last(&mut self.ages[0], section, mark);
        self.fetch(slot, changes);
        self.keep_within(changes);
    }

    /// Below this worth, a section of that age is not protected.
    fn least_worth(&self, interval: u8) -> f64 {
        if AGES_S[usize::from(interval)] >= OLD_S {
            self.price.max(PRICE_OLD)
        } else {
            self.price
        }
    }

    /// Moves sections into the intervals of age that they have reached.
    fn grow_older(&mut self, now: Duration, changes: &mut Vec<Change>) {
        for interval in (0..INTERVALS - 1).rev() {
            let reached = Duration::from_secs(AGES_S[interval + 1]);
            while let Some(slot) = self.ages[interval].first() {
                let mark = *self.links.value(slot);
                let age = mark.age(now);
                if age < reached {
                    break;
                }
                self.links.take_out(&mut self.ages[interval], slot);
                self.links.put_last(&mut self.ages[interval + 1], slot);
                let next = interval_number(interval + 1);
                self.links.value_mut(slot).interval = next;
                if next >= VISIT_INTERVAL {
                    self.table.reached(mark.class(), interval + 1);
                }
                self.decide(slot, changes);
            }
        }
    }

    fn release_due(&mut self, now: Duration, changes: &mut Vec<Change>) {
        let now_ns = nanos(now);
        while self
            .releases
            .front()
            .is_some_and(|(due_ns, _)| *due_ns <= now_ns)
        {
            let Some((_, section)) = self.releases.pop_front() else {
                return;
            };
            let Some(slot) = self.links.find(section) else {
                continue;
            };
            let mark = self.links.value_mut(slot);
            if mark.protected && mark.interval < VISIT_INTERVAL {
                mark.protected = false;
                self.protected -= 1;
                changes.push(Change::Release(section));
            }
        }
    }

    /// Prefetches allowed per minute.
    fn a_minute(&self) -> f64 {
        let sections = self.params.bring_backs_a_minute.of(self.sections);
        f64::from(u32::try_from(sections).unwrap_or(u32::MAX))
    }

    /// Allows more prefetches, but at once no more than for a quarter of a minute.
    fn allow(&mut self, more: f64) {
        self.allowance = (self.allowance + more).min(self.a_minute().max(1.0) / 4.0 + 1.0);
    }

    /// Decides again about sections whose prefetch lacked an allowance.
    fn decide_deferred(&mut self, changes: &mut Vec<Change>) {
        while self.allowance >= 1.0
            && let Some(section) = self.deferred.pop_front()
        {
            if let Some(slot) = self.links.find(section) {
                self.decide(slot, changes);
            }
        }
    }

    fn forget(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        let mark = *self.links.value(slot);
        let list = &mut self.ages[usize::from(mark.interval)];
        let section = self.links.remove(list, slot);
        if self.last_visit == Some(slot) {
            self.last_visit = None;
        }
        if mark.protected {
            self.protected -= 1;
            changes.push(Change::Release(section));
        }
    }

    fn forget_oldest(&mut self, changes: &mut Vec<Change>) {
        if let Some(slot) = self.ages.iter().rev().find_map(List::first) {
            self.forget(slot, changes);
        }
    }

    fn keep_within(&mut self, changes: &mut Vec<Change>) {
        while self.links.len() > self.params.tracked_max.of(self.sections).max(1) {
            self.forget_oldest(changes);
        }
    }

    fn learn_reach(&mut self, age_s: f64) {
        // A tenth of the evictions happen at younger ages than this.
        let step = self.reach_s * 0.02;
        self.reach_s += if age_s < self.reach_s {
            -step * 0.9
        } else {
            step * 0.1
        };
        self.reach_s = self.reach_s.clamp(30.0, 36_000.0);
    }
}

fn interval_number(interval: usize) -> u8 {
    u8::try_from(interval).unwrap_or(u8::MAX)
}

/// A share as a number.
fn share_of(share: Share) -> f64 {
    seconds(share.of(1_000_000)) / 1e6
}

fn seconds(whole: u64) -> f64 {
    f64::from(u32::try_from(whole).unwrap_or(u32::MAX))
}

impl ProtectionPolicy for Adaptive {
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
        let touched_ns = nanos(touch.at);
        self.absent.remove(touch.section);
        self.guesses.touched(touch.section);
        if let Some(slot) = self.links.find(touch.section) {
            let mark = *self.links.value(slot);
            let touched_before_ns = u64::from(mark.touched_ns);
            let age_s = touched_ns.saturating_sub(touched_before_ns) / 1_000_000_000;
            let visits = age_s >= VISIT_GAP_S || mark.visits == 0;
            if mark.interval >= VISIT_INTERVAL {
                self.table.ended(mark.class(), usize::from(mark.interval));
            }
            self.links
                .take_out(&mut self.ages[usize::from(mark.interval)], slot);
            self.links.put_last(&mut self.ages[0], slot);
            let kept = self.links.value_mut(slot);
            kept.touched_ns = touched_ns.max(touched_before_ns).into();
            kept.interval = 0;
            if visits {
                kept.rested = if mark.visits == 0 {
                    NEVER
                } else {
                    interval_number(interval_of(age_s))
                };
                kept.visits = mark.visits.saturating_add(1);
            }
            if mark.protected && mark.interval >= VISIT_INTERVAL {
                self.releases
                    .push_back((nanos(touch.at + RELEASE_AFTER), touch.section));
            }
            if age_s >= RETURN_S {
                self.trial.returned(touch.at);
            }
            if visits {
                self.visit(slot, changes);
            }
        } else {
            let mark = Mark {
                touched_ns: touched_ns.into(),
                next: None,
                interval: 0,
                rested: NEVER,
                visits: 1,
                protected: false,
                cold: false,
            };
            let slot = self
                .links
                .insert_last(&mut self.ages[0], touch.section, mark);
            self.visit(slot, changes);
            self.keep_within(changes);
        }
    }

    fn passed(&mut self, now: Duration, changes: &mut Vec<Change>) {
        let since = self
            .passed_at
            .map_or(Duration::ZERO, |at| now.saturating_sub(at));
        self.passed_at = Some(now);
        self.allow(self.a_minute() * since.as_secs_f64() / 60.0);
        self.guesses.passed(now);
        let mostly_in_vain = self.guesses.good_share().is_some_and(|good| good < 0.5);
        let least = if mostly_in_vain {
            GAIN_OF_CHURN
        } else {
            GAIN_LEAST
        };
        self.trial.passed(now, least);
        self.release_due(now, changes);
        self.grow_older(now, changes);
        self.decide_deferred(changes);
        if now.saturating_sub(self.weighed_at) >= WEIGH_EVERY {
            self.weighed_at = now;
            self.table.weigh(self.reach_s);
            self.guesses.weigh();
            let mean = self.params.protected_mean.of(self.sections);
            self.price = if self.protected > mean {
                (self.price * PRICE_STEP).min(PRICE_MAX)
            } else {
                (self.price / PRICE_STEP).max(PRICE_MIN)
            };
        }
        if now.saturating_sub(self.faded_at) >= Duration::from_secs(60) {
            self.faded_at = now;
            self.table.fade();
        }
    }

    fn fate(&mut self, section: SectionNo, fate: Fate, now: Duration, changes: &mut Vec<Change>) {
        let slot = self.links.find(section);
        match fate {
            Fate::Evicted => {
                self.guesses.evicted(section);
                self.trial.evicted(now);
                self.absent.insert(section);
                if let Some(slot) = slot {
                    let mark = self.links.value_mut(slot);
                    mark.cold = true;
                    let age = mark.age(now);
                    self.learn_reach(age.as_secs_f64());
                    self.decide(slot, changes);
                } else {
                    self.meet_stranger(section, now, changes);
                }
            }
            Fate::Faulted => {
                self.absent.remove(section);
                self.guesses.faulted(section);
                if slot.is_some_and(|slot| self.links.value(slot).age(now).as_secs() >= RETURN_S) {
                    self.trial.faulted(now);
                }
            }
            Fate::NotBroughtBack => {
                if self.guesses.came_to_nothing(section) {
                    self.allow(1.0);
                }
            }
            Fate::Gone => {
                self.absent.remove(section);
                self.guesses.came_to_nothing(section);
                if let Some(slot) = slot {
                    self.forget(slot, changes);
                }
            }
        }
    }

    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>) {
        self.sections = sections;
        self.keep_within(changes);
        while self.protected > self.params.protected_max.of(sections)
            && let Some(slot) = self.oldest_protected()
        {
            self.forget(slot, changes);
            self.dropped += 1;
        }
    }

    fn warm_up(&self) {
        self.links.warm_up();
    }

    fn report(&self) -> PolicyReport {
        PolicyReport {
            tracked_sections: self.links.len(),
            protected_sections: self.protected,
            dropped_sections: self.dropped,
            bytes: size_of::<Self>() as u64
                + self.links.bytes()
                + self.absent.bytes()
                + self.guesses.bytes()
                + (self.releases.capacity() * size_of::<(u64, SectionNo)>()) as u64
                + (self.deferred.capacity() * size_of::<SectionNo>()) as u64,
        }
    }
}

impl Adaptive {
    /// For a VM that has shrunk, which is rare.
    fn oldest_protected(&self) -> Option<Slot> {
        self.ages.iter().rev().find_map(|list| {
            std::iter::successors(list.first(), |slot| self.links.after(*slot))
                .find(|slot| self.links.value(*slot).protected)
        })
    }
}

#[cfg(test)]
mod tests;
