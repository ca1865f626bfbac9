// SPDX-License-Identifier: Apache-2.0
//! Which VM is at which place of the host, from when to when.
//!
//! Everything about a VM is drawn from the seed, its place and its turn there, so that all arms of a
//! run see the same VMs.

use super::super::{Bytes, Permille, VmId, VmShare, Weight};
use super::{
    demand::{Daily, Demand, State},
    guest::Guest,
    recipe::{Events, Recipe},
};
use pagetide_random::SplitMix64;
use std::time::Duration;

/// A VM has touched so much of its RAM when it comes: what its firmware and kernel need.
const BOOTED: Permille = Permille(20);
/// Longest time until the next VM comes to a place.
const GAP_MAX: Duration = Duration::from_secs(6 * 3600);

/// A place for a VM.
#[derive(Clone, Debug)]
pub(super) struct Place {
    seed: u64,
    number: u64,
    places: u64,
    turn: u64,
    events: Events,
    stage: Stage,
    /// When that ends.
    until: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Taken,
    Free,
}

/// What happens at a place.
#[derive(Debug)]
pub(super) enum Turn {
    /// Nothing.
    Stays,
    /// The VM there is gone.
    Leaves,
    /// This one comes.
    Comes(Box<Guest>),
}

impl Place {
    /// The place `number` of so many, with its first VM, which has been there for long.
    pub fn first(seed: u64, number: u64, places: u64, events: Events) -> (Self, Guest) {
        let mut place = Self {
            seed,
            number,
            places,
            turn: 0,
            events,
            stage: Stage::Taken,
            until: Duration::MAX,
        };
        let mut guest = place.guest();
        let tenth = guest.ram.part(1, 10);
        guest.touched = guest.footprint();
        (guest.hot, guest.target) = (tenth, tenth);
        guest.forgotten = guest.touched.less(tenth);
        place.until = place.stay(Duration::ZERO);
        (place, guest)
    }

    fn random(&self, what: u64) -> SplitMix64 {
        let id = self.turn * self.places + self.number;
        SplitMix64::stream(self.seed, id * 4 + what)
    }

    /// Until when a VM that comes at `now` stays.
    fn stay(&self, now: Duration) -> Duration {
        let Some(mean) = self.events.stay else {
            return Duration::MAX;
        };
        now + Duration::from_secs(self.random(0).below(2 * mean.as_secs()))
    }

    /// The VM of this turn, as it has just booted.
    fn guest(&self) -> Guest {
        let random = &mut self.random(1);
        let ram = Bytes::gib(4 << random.below(4));
        let quiet = ram.part(100 + random.below(100), 1000);
        let busy = ram.part(400 + random.below(300), 1000);
        let weights = [50, 100, 100, 200];
        let floor = ram.part(50 + random.below(50), 1000);
        let weight = Weight::try_from(weights[random.index(4)]).unwrap_or_default();
        // One in four has a ceiling below what it would use in a burst.
        let ceiling = (random.below(4) == 0).then(|| ram.part(600, 1000));
        let ratio = Permille(80 + u16::try_from(random.below(270)).unwrap_or(0));
        let (by_day, by_night) = if self.number.is_multiple_of(2) {
            (busy, quiet)
        } else {
            (quiet, busy)
        };
        let booted = BOOTED.of(ram);
        let share = VmShare {
            weight,
            floor,
            ceiling,
        };
        let demand = Demand::Daily(Daily {
            by_day,
            by_night,
            state: State::Usual,
            random: self.random(2),
        });
        let id = VmId(self.turn * self.places + self.number);
        let mut guest = Guest::new(id, share, ram, booted, booted, demand);
        guest.ratio = ratio;
        guest
    }

    /// What happens at `now`.
    pub fn turn(&mut self, now: Duration) -> Turn {
        if now < self.until {
            return Turn::Stays;
        }
        match self.stage {
            Stage::Taken => {
                self.stage = Stage::Free;
                let gap = self.random(3).below(GAP_MAX.as_secs());
                self.until = now + Duration::from_secs(gap);
                Turn::Leaves
            }
            Stage::Free => {
                self.stage = Stage::Taken;
                self.turn += 1;
                self.until = self.stay(now);
                Turn::Comes(Box::new(self.guest()))
            }
        }
    }

    /// Its VM could not be taken in: the next one comes later.
    pub fn refused(&mut self, now: Duration) {
        self.stage = Stage::Free;
        self.until = now + GAP_MAX;
    }
}

/// The places of `recipe` with their first VMs.
pub(super) fn first_guests(recipe: &Recipe) -> (Vec<Place>, Vec<Guest>) {
    let places = u64::from(recipe.vms);
    (0..places)
        .map(|number| Place::first(recipe.seed, number, places, recipe.events))
        .unzip()
}

/// When the daemon is started anew, and an operator changes a VM's share.
#[derive(Clone, Debug)]
pub(super) struct Operator {
    random: SplitMix64,
    events: Events,
}

impl Operator {
    pub fn new(seed: u64, events: Events) -> Self {
        Self {
            random: SplitMix64::stream(seed, u64::MAX),
            events,
        }
    }

    fn by_chance(&mut self, once_in: Option<Duration>, step: Duration) -> bool {
        let millis = super::super::units::millis;
        once_in.is_some_and(|time| self.random.below(millis(time)) < millis(step))
    }

    /// Whether the daemon ends within the next `step`.
    pub fn restarts(&mut self, step: Duration) -> bool {
        self.by_chance(self.events.restart, step)
    }

    /// The place of `count` whose VM gets another weight within the next `step`.
    pub fn reweighs(&mut self, count: usize, step: Duration) -> Option<(usize, Weight)> {
        if !self.by_chance(self.events.reweigh, step) {
            return None;
        }
        let place = self.random.index(count);
        let weights = [50, 100, 200, 400];
        let weight = Weight::try_from(weights[self.random.index(4)]).unwrap_or_default();
        Some((place, weight))
    }
}
