// SPDX-License-Identifier: Apache-2.0
//! [`Sinking`]: the way down to tiers outside memory, carried out as [`pagetide_policy::demotion`] orders.
//!
//! Two machines order it. One has all pages of sections that stayed cold for long. The other has those pages alone
//! that do not compress: they take as much in the pool as they have freed, so they pass down much sooner, and at
//! once while such pages find no room.

use crate::{
    pace::Pace,
    slow::{SinkStop, Sinker, Sunk, Which},
    store::PoolStore,
};
use pagetide_policy::demotion::{BULKY_AFTER, Demotion, Haste, Outcome};
use pagetide_tiers::TierError;
use std::time::{Duration, Instant};

/// Sections in which pages that do not compress are looked for in one call: some microseconds each.
const BULKY_SECTIONS_MAX: u32 = 64;

/// See the module.
pub(super) struct Sinking {
    /// Of all pages of sections.
    demotion: Demotion,
    /// Of those that do not compress.
    bulky: Demotion,
    sinker: Sinker,
}

impl Sinking {
    /// Sections are moved down by `sinker` that were not touched for `after`.
    pub fn new(sinker: Sinker, after: Duration) -> Self {
        let (mut demotion, mut bulky) = (Demotion::default(), Demotion::default());
        demotion.set_after(after);
        bulky.set_after(after.min(BULKY_AFTER));
        Self {
            demotion,
            bulky,
            sinker,
        }
    }

    /// Both machines, to be told what happens.
    pub fn demotions(&mut self) -> [&mut Demotion; 2] {
        [&mut self.demotion, &mut self.bulky]
    }

    /// Hears what became of batches, and whether `store` is short of room.
    pub fn hear(&mut self, store: &PoolStore, now: Duration) {
        for section in self.sinker.take_failed() {
            self.demotion.stored(section, now);
            self.bulky.stored(section, now);
        }
        let is_full = store.full().is_some();
        let is_short = is_full || store.turned_away(Instant::now()).is_some();
        let haste = |is_needed| match is_needed {
            true => Haste::Room,
            false => Haste::None,
        };
        self.demotion.set_haste(haste(is_full));
        self.bulky.set_haste(haste(is_short));
    }

    /// Begins to move the pages of the next section that stayed cold down, if it is time; or else those that do
    /// not compress of the next section that has some. Keeps to `pace`.
    pub fn sink(&mut self, clock: impl Fn() -> Duration, pace: &impl Pace) -> Sunk {
        if let Some(section) = self.demotion.next(clock()) {
            let sunk = self.sinker.sink(section, Which::All, pace);
            (self.demotion).demoted(section, clock(), sunk.pages, outcome_of(&sunk));
            return sunk;
        }
        for _ in 0..BULKY_SECTIONS_MAX {
            let Some(section) = self.bulky.next(clock()) else {
                break;
            };
            let sunk = self.sinker.sink(section, Which::Uncompressed, pace);
            let outcome = outcome_of(&sunk);
            (self.bulky).demoted(section, clock(), sunk.pages, outcome);
            if outcome != Outcome::Nothing || !pace.may_stay() {
                return sunk;
            }
        }
        Sunk::default()
    }

    /// Memory it takes, in bytes, about.
    pub fn bytes(&self) -> u64 {
        self.demotion.bytes() + self.bulky.bytes()
    }
}

/// What came of a section of which pages were to be moved down.
fn outcome_of(sunk: &Sunk) -> Outcome {
    match &sunk.stop {
        None if sunk.pages == 0 => Outcome::Nothing,
        None => Outcome::Whole,
        Some(SinkStop::UnderWay | SinkStop::Tier(TierError::Busy(_))) => Outcome::Part,
        Some(SinkStop::Tier(_) | SinkStop::TableFull | SinkStop::NoRoom(_) | SinkStop::Seal(_)) => {
            Outcome::NoRoom
        }
    }
}
