// SPDX-License-Identifier: Apache-2.0
//! Hot and cold sections: Taiji's multi-level sets (4.2.1).
//!
//! One touched page must not make two megabytes hot, nor one quiet scan make
//! them cold. So between *hot* and *cold* lie sets through which a section
//! drifts, one step a scan:
//!
//! ```text
//!   not touched ─────────────────────────────────────────────►
//!   Hot ── Warm ── Active ┊ Inactive ── Cool ── Cold
//!   ◄───────────── touched ▲
//!                          └── touched on this side: straight to Active
//! ```
//! A section on the warm side that is left alone crosses to Inactive; one on
//! the cold side that is touched goes to Active at once, for a mistake there
//! costs faults. Within a set the order of arrival tells the temperature: the
//! head of Cold is coldest.
//!
//! Memory comes and goes while the VM runs: sections that are new begin Active,
//! and those that are no more leave the sets ([`HotColdSets::follow`]).

use pagetide_addr::SectionNo;
use std::collections::{BTreeMap, BTreeSet};

/// The sets, coldest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[expect(missing_docs, reason = "the module draws them")]
pub enum Level {
    Cold,
    Cool,
    Inactive,
    Active,
    Warm,
    Hot,
}

/// All sets, coldest first.
pub const LEVELS: [Level; 6] = [
    Level::Cold,
    Level::Cool,
    Level::Inactive,
    Level::Active,
    Level::Warm,
    Level::Hot,
];

/// What a scan saw of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// At least one page was accessed.
    Touched,
    /// None was.
    Untouched,
}

impl Level {
    /// The set a section moves to after a scan.
    #[must_use]
    pub fn after(self, seen: Seen) -> Self {
        match (seen, self) {
            (Seen::Touched, Self::Cold | Self::Cool | Self::Inactive) => Self::Active,
            (Seen::Touched, Self::Active) => Self::Warm,
            (Seen::Touched, Self::Warm | Self::Hot) => Self::Hot,
            (Seen::Untouched, Self::Hot) => Self::Warm,
            (Seen::Untouched, Self::Warm) => Self::Active,
            (Seen::Untouched, Self::Active) => Self::Inactive,
            (Seen::Untouched, Self::Inactive) => Self::Cool,
            (Seen::Untouched, Self::Cool | Self::Cold) => Self::Cold,
        }
    }
}

/// Where a section is, and since when.
#[derive(Clone, Copy, Debug)]
struct Standing {
    level: Level,
    arrival: u64,
}

/// The sets of one VM.
#[derive(Debug, Default)]
pub struct HotColdSets {
    /// Of the sections there are; their numbers may lie far apart.
    standing: BTreeMap<SectionNo, Standing>,
    ordered: BTreeSet<(Level, u64, SectionNo)>,
    arrivals: u64,
}

impl HotColdSets {
    /// `section_count` sections, all Active: nothing is known yet.
    #[must_use]
    pub fn new(section_count: u64) -> Self {
        let mut sets = Self::default();
        sets.follow((0..section_count).map(SectionNo));
        sets
    }

    /// From now on there are just these sections. Those that are new are Active: nothing is known of
    /// them yet.
    pub fn follow(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        let there: BTreeSet<SectionNo> = sections.into_iter().collect();
        let known = self.standing.keys().copied();
        let gone: Vec<SectionNo> = known.filter(|section| !there.contains(section)).collect();
        for section in gone {
            self.leave(section);
        }
        for section in there {
            if !self.standing.contains_key(&section) {
                self.enter(section, Level::Active);
            }
        }
    }

    fn enter(&mut self, section: SectionNo, level: Level) {
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.standing.insert(section, Standing { level, arrival });
        self.ordered.insert((level, arrival, section));
    }

    fn leave(&mut self, section: SectionNo) {
        if let Some(Standing { level, arrival }) = self.standing.remove(&section) {
            self.ordered.remove(&(level, arrival, section));
        }
    }

    /// Moves `section` by what a scan saw; one that is in no set stays in none.
    pub fn saw(&mut self, section: SectionNo, seen: Seen) {
        let Some(level) = self.level(section) else {
            return;
        };
        let to = level.after(seen);
        if to != level {
            self.leave(section);
            self.enter(section, to);
        }
    }

    /// Set of a section, if it is in one.
    #[must_use]
    pub fn level(&self, section: SectionNo) -> Option<Level> {
        self.standing.get(&section).map(|standing| standing.level)
    }

    /// All sections, coldest first.
    pub fn coldest_first(&self) -> impl Iterator<Item = SectionNo> + '_ {
        self.ordered.iter().map(|(_, _, section)| *section)
    }

    /// Number of sections in each set, coldest first.
    #[must_use]
    pub fn counts(&self) -> [(Level, u64); 6] {
        LEVELS.map(|level| {
            let in_set = |standing: &&Standing| standing.level == level;
            let count = self.standing.values().filter(in_set).count();
            (level, count as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_left_alone_drifts_to_cold_and_one_touch_brings_it_to_active() {
        let mut sets = HotColdSets::new(3);
        for _ in 0..3 {
            sets.saw(SectionNo(1), Seen::Touched);
        }
        assert_eq!(sets.level(SectionNo(1)), Some(Level::Hot));
        for _ in 0..4 {
            sets.saw(SectionNo(1), Seen::Untouched);
        }
        assert_eq!(
            sets.level(SectionNo(1)),
            Some(Level::Cool),
            "one quiet scan is not enough for Cold"
        );
        sets.saw(SectionNo(1), Seen::Untouched);
        assert_eq!(sets.level(SectionNo(1)), Some(Level::Cold));
        sets.saw(SectionNo(1), Seen::Touched);
        assert_eq!(sets.level(SectionNo(1)), Some(Level::Active));
    }

    #[test]
    fn within_a_set_the_first_to_arrive_is_coldest() {
        let mut sets = HotColdSets::new(3);
        for section in [2, 0, 1] {
            for _ in 0..3 {
                sets.saw(SectionNo(section), Seen::Untouched);
            }
        }
        let order: Vec<u64> = sets.coldest_first().map(|s| s.0).collect();
        assert_eq!(order, [2, 0, 1]);
        assert_eq!(sets.counts()[0], (Level::Cold, 3));
    }

    #[test]
    fn sets_always_hold_every_section_once() {
        let mut sets = HotColdSets::new(50);
        let mut state = 5_u64;
        for _ in 0..5_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let seen = if state >> 63 == 0 {
                Seen::Touched
            } else {
                Seen::Untouched
            };
            sets.saw(SectionNo((state >> 33) % 50), seen);
        }
        let mut all: Vec<u64> = sets.coldest_first().map(|s| s.0).collect();
        let levels: Vec<_> = sets.coldest_first().map(|s| sets.level(s)).collect();
        assert!(levels.is_sorted());
        all.sort_unstable();
        assert_eq!(all, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn new_sections_are_active_and_those_that_went_are_in_no_set() {
        let mut sets = HotColdSets::new(4);
        for section in 0..4 {
            sets.saw(SectionNo(section), Seen::Untouched);
        }
        sets.follow([1, 3, 900].map(SectionNo));
        sets.saw(SectionNo(0), Seen::Touched);
        let order: Vec<u64> = sets.coldest_first().map(|section| section.0).collect();
        assert_eq!(order, [1, 3, 900]);
        assert_eq!(sets.level(SectionNo(0)), None);
        assert_eq!(sets.level(SectionNo(3)), Some(Level::Inactive));
        assert_eq!(sets.level(SectionNo(900)), Some(Level::Active));
        sets.follow([0, 1].map(SectionNo));
        assert_eq!(sets.level(SectionNo(0)), Some(Level::Active));
        assert_eq!(
            sets.counts()[2..4],
            [(Level::Inactive, 1), (Level::Active, 1)]
        );
        sets.follow([]);
        assert_eq!(sets.coldest_first().count(), 0);
    }
}
