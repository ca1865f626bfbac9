// SPDX-License-Identifier: Apache-2.0
//! What becomes of pages that stay stored: they are packed anew, smaller, and moved down to tiers outside memory.

use super::{Reclaimer, sinking::Sinking};
use crate::{
    demoter::{Demoted, DemotionStop},
    pace::Pace,
    slow::{Sinker, Sunk},
};
use pagetide_policy::demotion::{Demotion, Outcome};
use std::{sync::Arc, time::Duration};

impl Reclaimer {
    /// From now on, `now`, stored pages of sections that were not touched for `after` are packed anew, smaller.
    pub fn demote_after(&mut self, after: Duration, now: Duration) {
        self.demotion.set_after(after);
        self.memory.limit.touched().begin();
        self.find_stored(now);
    }

    /// From now on, `now`, stored pages of sections that were not touched for `after` are moved down by `sinker`,
    /// and those that do not compress after
    /// [`BULKY_AFTER`](pagetide_policy::demotion::BULKY_AFTER); while the pool has no room, those of the oldest
    /// sections at once.
    pub fn sink_after(&mut self, sinker: Sinker, after: Duration, now: Duration) {
        self.sinking = Some(Sinking::new(sinker, after));
        self.memory.limit.touched().begin();
        self.find_stored(now);
    }

    /// What is stored already ages from `now`.
    pub(super) fn find_stored(&mut self, now: Duration) {
        let space = Arc::clone(self.memory.evictor.space());
        let table = space.table();
        for section in table.sections() {
            if table.stored_pages(section) > 0 {
                for demotion in self.demotions() {
                    demotion.stored(section, now);
                }
            }
        }
    }

    pub(super) fn demotions(&mut self) -> impl Iterator<Item = &mut Demotion> {
        let sinking = self.sinking.as_mut().map(Sinking::demotions);
        std::iter::once(&mut self.demotion).chain(sinking.into_iter().flatten())
    }

    /// How long it is from `now` to the next section that is to be demoted or moved down, if any waits.
    pub fn demotion_in(&mut self, now: Duration) -> Option<Duration> {
        if !self.demotion.is_on() && self.sinking.is_none() {
            return None;
        }
        let limit = Arc::clone(&self.memory.limit);
        for section in limit.touched().take_stored() {
            self.demotions().for_each(|it| it.stored(section, now));
        }
        for section in limit.touched().take() {
            self.demotions().for_each(|it| it.touched(section, now));
        }
        if let Some(sinking) = &mut self.sinking {
            sinking.hear(self.memory.evictor.store(), now);
        }
        let due = self.demotions().filter_map(|demotion| demotion.due_in(now));
        due.min()
    }

    /// Begins to move the pages of the next section that stayed cold down, if it is time; or else those that do
    /// not compress of the next section that has some. Keeps to `pace`.
    pub fn sink(&mut self, clock: impl Fn() -> Duration, pace: &impl Pace) -> Sunk {
        let sinking = self.sinking.as_mut();
        sinking.map_or_else(Sunk::default, |sinking| sinking.sink(clock, pace))
    }

    /// Packs the pages of the next section that stayed cold anew, smaller, if it is time. Keeps to `pace`.
    pub fn demote(&mut self, clock: impl Fn() -> Duration, pace: &impl Pace) -> Demoted {
        let Some(section) = self.demotion.next(clock()) else {
            return Demoted::default();
        };
        let done = self.demoter.demote(section, pace);
        let outcome = match &done.stop {
            None => Outcome::Whole,
            Some(DemotionStop::Paced) => Outcome::Part,
            Some(DemotionStop::Store(_) | DemotionStop::Zstd(_)) => Outcome::NoRoom,
        };
        (self.demotion).demoted(section, clock(), done.packed_pages, outcome);
        done
    }
}
