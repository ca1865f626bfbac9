// SPDX-License-Identifier: Apache-2.0
//! [`Demotion`]: of which sections stored pages are packed anew, smaller and slower to load, and when.
//!
//! ```text
//!   pages evicted ─────────► waiting, by the time of the last event, oldest first
//!   stored page needed ────►   (a section that waits goes to the end)
//!                                 │ untouched for `after`
//!                                 ▼
//!                          order: demote ──┬─ all of it, nothing ──► forgotten, until pages of it are evicted again
//!                                          ├─ a part ─────► waiting, in front
//!                                          └─ no room ────► waiting, in front; a pause
//! ```
//! The age of a section is what counts, not of a page: pages of a section are often used together, and a
//! section of which a page was just needed is likely to need others. A page that does not get smaller is tried
//! again when its section has lost other pages and aged once more.
//!
//! The pace is set by what was packed: a second of it holds [`PAGES_A_SECOND`] pages. It is work of the
//! lowest class, so CPU time for it is bounded by the scheduler besides.
//!
//! No clock and no I/O: the caller has the times, packs, and reports what came of it.

use crate::{cells::List, links::Links};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// Pages packed in a second, at most: at 15 us each this is 6 % of a CPU, and 16 GiB take a quarter of an hour.
pub const PAGES_A_SECOND: u32 = 4096;
/// Least time between two sections.
pub const TURN: Duration = Duration::from_millis(50);
/// Time without demotion after there was no room.
pub const NO_ROOM_REST: Duration = Duration::from_secs(5);
/// Unit of ages: 32 bits of them last for thirteen years.
const TICK: Duration = Duration::from_millis(100);
/// Shortest time that can be set: one unit.
pub const AFTER_MIN: Duration = TICK;

/// How long pages that do not compress stay in memory if there is a tier outside: they take as much there as they
/// have freed, so they go as soon as it is likely that they are not needed again at once. (Those that are needed
/// soon after their eviction mostly are so within seconds: they were taken for cold by mistake.)
pub const BULKY_AFTER: Duration = Duration::from_secs(60);

/// What came of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It had no page to be demoted.
    Nothing,
    /// All its pages were tried.
    Whole,
    /// There was no time for the rest.
    Part,
    /// There was no room for smaller copies.
    NoRoom,
}

/// Whether sections are waited for until they have aged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Haste {
    /// They are.
    #[default]
    None,
    /// The oldest one is demoted, whatever its age: there is no room for more where it is.
    Room,
}

/// See the module. One per VM, and one more for the way to tiers outside memory.
#[derive(Debug, Default)]
pub struct Demotion {
    /// `None`: nothing is demoted.
    after: Option<Duration>,
    haste: Haste,
    sections: Links<u32>,
    /// Oldest first.
    waiting: List,
    not_before: Duration,
}

impl Demotion {
    /// From now on sections are demoted that were not touched for this time.
    pub fn set_after(&mut self, after: Duration) {
        self.after = Some(after.max(AFTER_MIN));
    }

    /// From now on sections are waited for, or not.
    pub fn set_haste(&mut self, haste: Haste) {
        self.haste = haste;
    }

    /// True if sections are demoted.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.after.is_some()
    }

    /// Pages of `section` were evicted `now`, or are found to be stored.
    pub fn stored(&mut self, section: SectionNo, now: Duration) {
        if self.is_on() {
            self.forget(section);
            (self.sections).insert_last(&mut self.waiting, section, ticks(now));
        }
    }

    /// Stored pages of `section` were needed `now`.
    pub fn touched(&mut self, section: SectionNo, now: Duration) {
        if self.sections.find(section).is_some() {
            self.stored(section, now);
        }
    }

    /// The memory of `section` is gone.
    fn forget(&mut self, section: SectionNo) {
        if let Some(slot) = self.sections.find(section) {
            self.sections.remove(&mut self.waiting, slot);
        }
    }

    /// Memory was added or removed: nothing is known any more.
    pub fn forget_all(&mut self) {
        self.sections = Links::default();
        self.waiting = List::default();
    }

    /// How long it is from `now` to the next order; `None` while no section waits.
    #[must_use]
    pub fn due_in(&self, now: Duration) -> Option<Duration> {
        let after = self.after?;
        let oldest = self.waiting.first()?;
        let after = match self.haste {
            Haste::None => after,
            Haste::Room => Duration::ZERO,
        };
        let aged_at = TICK * *self.sections.value(oldest) + after;
        Some(aged_at.max(self.not_before).saturating_sub(now))
    }

    /// The section to be demoted `now`, to be reported by [`Self::demoted`].
    #[must_use]
    pub fn next(&mut self, now: Duration) -> Option<SectionNo> {
        if self.due_in(now)? > Duration::ZERO {
            return None;
        }
        let oldest = self.waiting.first()?;
        Some(self.sections.section(oldest))
    }

    /// The section that was ordered is done with, `now`, after `packed_pages` were packed.
    pub fn demoted(
        &mut self,
        section: SectionNo,
        now: Duration,
        packed_pages: u64,
        outcome: Outcome,
    ) {
        let packed_pages = u32::try_from(packed_pages).unwrap_or(u32::MAX);
        let mut rest = (Duration::from_secs(1) * packed_pages / PAGES_A_SECOND).max(TURN);
        match outcome {
            Outcome::Whole => self.forget(section),
            Outcome::Nothing => {
                self.forget(section);
                rest = Duration::ZERO;
            }
            // It has kept its place.
            Outcome::Part => {}
            Outcome::NoRoom => rest = NO_ROOM_REST,
        }
        self.not_before = now + rest;
    }

    /// Sections that wait.
    #[must_use]
    pub fn waiting_sections(&self) -> u64 {
        self.waiting.len()
    }

    /// Memory it takes, in bytes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sections.bytes()
    }
}

/// Units until `now`, rounded up: no section is demoted too early.
fn ticks(now: Duration) -> u32 {
    u32::try_from(now.as_millis().div_ceil(TICK.as_millis())).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    const AFTER: Duration = Duration::from_secs(10);

    fn on() -> Demotion {
        let mut demotion = Demotion::default();
        demotion.set_after(AFTER);
        demotion
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn nothing_is_remembered_while_it_is_off() {
        let mut demotion = Demotion::default();
        demotion.stored(SectionNo(1), at(1));
        demotion.touched(SectionNo(1), at(1));
        assert_eq!(demotion.due_in(at(1_000)), None);
        assert_eq!(demotion.next(at(1_000)), None);
        assert_eq!(demotion.bytes(), Demotion::default().bytes());
    }

    #[test]
    fn section_is_demoted_once_it_was_left_alone_for_the_time_set() {
        let mut demotion = on();
        demotion.stored(SectionNo(1), at(1));
        assert_eq!(demotion.due_in(at(2)), Some(at(9)));
        assert_eq!(demotion.next(at(10)), None);
        demotion.touched(SectionNo(1), at(10));
        assert_eq!(demotion.next(at(11)), None);
        assert_eq!(demotion.next(at(20)), Some(SectionNo(1)));
        demotion.demoted(SectionNo(1), at(20), 512, Outcome::Whole);
        // What is demoted and needed is present then: there is nothing to demote.
        demotion.touched(SectionNo(1), at(21));
        assert_eq!(demotion.due_in(at(99)), None);
        demotion.stored(SectionNo(1), at(99));
        assert_eq!(demotion.next(at(109)), Some(SectionNo(1)));
    }

    #[test]
    fn pace_follows_what_was_packed_and_rests_where_there_is_no_room() {
        let mut demotion = on();
        for section in 0..4 {
            demotion.stored(SectionNo(section), at(0));
        }
        let now = at(50);
        assert_eq!(demotion.next(now), Some(SectionNo(0)));
        demotion.demoted(SectionNo(0), now, 512, Outcome::Whole);
        let rest = Duration::from_secs(1) * 512 / PAGES_A_SECOND;
        assert_eq!(demotion.due_in(now), Some(rest));
        assert_eq!(demotion.next(now), None);
        assert_eq!(demotion.next(now + rest), Some(SectionNo(1)));
        // A part of it: the rest is next.
        demotion.demoted(SectionNo(1), now, 0, Outcome::Part);
        assert_eq!(demotion.due_in(now), Some(TURN));
        assert_eq!(demotion.next(now + TURN), Some(SectionNo(1)));
        demotion.demoted(SectionNo(1), now, 3, Outcome::NoRoom);
        assert_eq!(demotion.due_in(now), Some(NO_ROOM_REST));
        demotion.forget_all();
        assert_eq!(demotion.due_in(now), None);
        // One without any such page costs no time.
        demotion.stored(SectionNo(7), at(0));
        demotion.stored(SectionNo(8), at(0));
        let now = now + NO_ROOM_REST;
        assert_eq!(demotion.next(now), Some(SectionNo(7)));
        demotion.demoted(SectionNo(7), now, 0, Outcome::Nothing);
        assert_eq!(demotion.next(now), Some(SectionNo(8)));
    }

    #[test]
    fn without_room_the_oldest_section_is_not_waited_for() {
        let mut demotion = on();
        demotion.stored(SectionNo(1), at(1));
        demotion.stored(SectionNo(2), at(2));
        assert_eq!(demotion.next(at(3)), None);
        demotion.set_haste(Haste::Room);
        assert_eq!(demotion.next(at(3)), Some(SectionNo(1)));
        demotion.demoted(SectionNo(1), at(3), 0, Outcome::Whole);
        assert_eq!(demotion.next(at(3)), None, "its pace holds");
        demotion.set_haste(Haste::None);
        assert_eq!(demotion.next(at(11)), None);
        assert_eq!(demotion.next(at(12)), Some(SectionNo(2)));
    }

    #[test]
    fn order_is_that_of_the_last_events_whatever_comes() {
        let mut random = SplitMix64::new(11);
        let mut demotion = on();
        // Oldest first.
        let mut model: Vec<(SectionNo, u32)> = Vec::new();
        let mut now = Duration::ZERO;
        for _ in 0..40_000 {
            now += Duration::from_millis(random.below(40));
            let section = SectionNo(random.below(300));
            match random.below(8) {
                0..=2 => {
                    demotion.stored(section, now);
                    model.retain(|(other, _)| *other != section);
                    model.push((section, ticks(now)));
                }
                3 => {
                    demotion.touched(section, now);
                    let before = model.len();
                    model.retain(|(other, _)| *other != section);
                    if model.len() < before {
                        model.push((section, ticks(now)));
                    }
                }
                _ => {
                    let oldest = model.first().copied();
                    let is_aged = |since: u32| now >= TICK * since + AFTER;
                    let aged = oldest.filter(|(_, since)| is_aged(*since));
                    let wanted = match now >= demotion.not_before {
                        true => aged.map(|(section, _)| section),
                        false => None,
                    };
                    let next = demotion.next(now);
                    assert_eq!(next, wanted);
                    if let Some(section) = next {
                        let outcome = [Outcome::Whole, Outcome::Whole, Outcome::Part];
                        let outcome = outcome[random.index(3)];
                        demotion.demoted(section, now, random.below(64), outcome);
                        if outcome == Outcome::Whole {
                            model.remove(0);
                        }
                    }
                }
            }
            assert_eq!(demotion.waiting_sections(), model.len() as u64);
        }
    }
}
