// SPDX-License-Identifier: Apache-2.0
//! The sets against a model that visits every section at every scan.

use crate::sets::{Drift, HotColdSets, LEVELS, Level};
use pagetide_addr::SectionNo;
use pagetide_random::SplitMix64;
use std::collections::{BTreeMap, BTreeSet};

fn numbers(sections: impl Iterator<Item = SectionNo>) -> Vec<u64> {
    sections.map(|section| section.0).collect()
}

fn scan(sets: &mut HotColdSets, touched: &[u64]) {
    sets.scanned(touched.iter().copied().map(SectionNo), Drift::OneSet);
}

#[test]
fn section_left_alone_drifts_to_cold_and_one_touch_brings_it_to_active() {
    let mut sets = HotColdSets::new(3);
    let seen = |sets: &HotColdSets| sets.level(SectionNo(1));
    for level in [Level::Warm, Level::Hot, Level::Hot] {
        scan(&mut sets, &[1]);
        assert_eq!(seen(&sets), Some(level));
    }
    for level in [
        Level::Warm,
        Level::Active,
        Level::Inactive,
        Level::Cool,
        Level::Cold,
        Level::Cold,
    ] {
        scan(&mut sets, &[]);
        assert_eq!(seen(&sets), Some(level));
    }
    scan(&mut sets, &[1]);
    assert_eq!(seen(&sets), Some(Level::Active));
}

#[test]
fn first_to_become_cold_is_coldest_and_is_never_overtaken() {
    let mut sets = HotColdSets::new(3);
    scan(&mut sets, &[0, 1]);
    scan(&mut sets, &[1]);
    for _ in 0..9 {
        scan(&mut sets, &[]);
    }
    assert_eq!(numbers(sets.coldest_first()), [2, 0, 1]);
    assert_eq!(sets.counts()[0], (Level::Cold, 3));
}

#[test]
fn section_named_twice_in_a_scan_was_touched_once() {
    let mut sets = HotColdSets::new(1);
    scan(&mut sets, &[0, 0, 0]);
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Warm));
}

#[test]
fn scan_without_drift_moves_only_what_was_touched() {
    let mut sets = HotColdSets::new(2);
    sets.scanned([SectionNo(0)], Drift::None);
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Warm));
    assert_eq!(sets.level(SectionNo(1)), Some(Level::Active));
}

#[test]
fn new_sections_are_active_and_those_that_went_are_in_no_set() {
    let mut sets = HotColdSets::new(4);
    scan(&mut sets, &[]);
    sets.follow([1, 3, 900].map(SectionNo));
    scan(&mut sets, &[0, 1]);
    assert_eq!(sets.level(SectionNo(0)), None);
    assert_eq!(sets.level(SectionNo(1)), Some(Level::Active));
    assert_eq!(sets.level(SectionNo(3)), Some(Level::Cool));
    assert_eq!(sets.level(SectionNo(900)), Some(Level::Inactive));
    assert_eq!(numbers(sets.coldest_first()), [3, 900, 1]);
    sets.follow([0, 1].map(SectionNo));
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Active));
    sets.follow([]);
    assert_eq!(sets.coldest_first().count(), 0);
}

#[test]
fn emptied_section_is_not_offered_until_it_is_touched_or_filled() {
    let mut sets = HotColdSets::new(3);
    for section in [0, 1] {
        sets.emptied(SectionNo(section));
    }
    assert_eq!(numbers(sets.coldest_first()), [2]);
    assert_eq!(numbers(sets.empty_sections()), [0, 1]);
    assert_eq!(sets.level(SectionNo(0)), None);
    scan(&mut sets, &[0]);
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Active));
    sets.filled(SectionNo(1));
    assert_eq!(sets.level(SectionNo(1)), Some(Level::Active));
    assert_eq!(numbers(sets.empty_sections()), []);
    // What is in a set already stays where it is.
    sets.filled(SectionNo(2));
    assert_eq!(sets.level(SectionNo(2)), Some(Level::Inactive));
}

#[test]
fn emptied_sections_are_told_in_order_and_those_that_are_filled_no_more() {
    let mut sets = HotColdSets::new(5);
    for section in [3, 0, 1, 4, 2] {
        sets.emptied(SectionNo(section));
    }
    assert_eq!(numbers(sets.empty_sections()), [3, 0, 1, 4, 2]);
    sets.filled(SectionNo(1));
    assert_eq!(numbers(sets.coldest_first()), [1]);
    assert_eq!(numbers(sets.empty_sections()), [3, 0, 4, 2]);
}

/// The sets by definition: each scan visits each section.
#[derive(Default)]
struct Visited {
    /// Level and the scan at which it was reached.
    standing: BTreeMap<u64, (Level, u64)>,
    empty: BTreeSet<u64>,
    scans: u64,
}

impl Visited {
    fn follow(&mut self, there: &BTreeSet<u64>) {
        self.standing.retain(|section, _| there.contains(section));
        self.empty.retain(|section| there.contains(section));
        for section in there {
            if !self.empty.contains(section) {
                let fresh = (Level::Active, self.scans);
                self.standing.entry(*section).or_insert(fresh);
            }
        }
    }

    fn scanned(&mut self, touched: &BTreeSet<u64>, drift: Drift) {
        self.scans += 1;
        for (section, (level, since)) in &mut self.standing {
            let to = match (touched.contains(section), drift, *level) {
                (true, _, Level::Cold | Level::Cool | Level::Inactive) => Level::Active,
                (true, _, Level::Active) => Level::Warm,
                (true, _, Level::Warm | Level::Hot) => Level::Hot,
                (false, Drift::None, level) => level,
                (false, Drift::OneSet, Level::Hot) => Level::Warm,
                (false, Drift::OneSet, Level::Warm) => Level::Active,
                (false, Drift::OneSet, Level::Active) => Level::Inactive,
                (false, Drift::OneSet, Level::Inactive) => Level::Cool,
                (false, Drift::OneSet, Level::Cool | Level::Cold) => Level::Cold,
            };
            if to != *level {
                (*level, *since) = (to, self.scans);
            }
        }
        for section in touched {
            if self.empty.remove(section) {
                self.standing.insert(*section, (Level::Active, self.scans));
            }
        }
    }

    fn emptied(&mut self, section: u64) {
        if self.standing.remove(&section).is_some() {
            self.empty.insert(section);
        }
    }

    fn filled(&mut self, section: u64) {
        if self.empty.remove(&section) {
            self.standing.insert(section, (Level::Active, self.scans));
        }
    }

    /// Groups of equal temperature, coldest first. Among the cold, earlier is colder; otherwise
    /// only the level counts.
    fn groups(&self) -> Vec<BTreeSet<u64>> {
        let mut groups: BTreeMap<(Level, u64), BTreeSet<u64>> = BTreeMap::new();
        for (section, (level, since)) in &self.standing {
            let since = if *level == Level::Cold { *since } else { 0 };
            groups.entry((*level, since)).or_default().insert(*section);
        }
        groups.into_values().collect()
    }
}

fn assert_same(sets: &HotColdSets, model: &Visited, context: &str) {
    for (section, (level, _)) in &model.standing {
        assert_eq!(sets.level(SectionNo(*section)), Some(*level), "{context}");
    }
    let mut order = sets.coldest_first().map(|section| section.0);
    for group in model.groups() {
        let same: BTreeSet<u64> = order.by_ref().take(group.len()).collect();
        assert_eq!(same, group, "{context}");
    }
    assert_eq!(order.next(), None, "{context}");
    let empty: BTreeSet<u64> = sets.empty_sections().map(|section| section.0).collect();
    assert_eq!(empty, model.empty, "{context}");
    let counts = LEVELS.map(|level| {
        let here = model.standing.values().filter(|(other, _)| *other == level);
        (level, here.count() as u64)
    });
    assert_eq!(sets.counts(), counts, "{context}");
}

#[test]
fn sets_equal_those_that_visit_every_section_over_random_scans() {
    const SECTIONS: u64 = 40;
    for seed in 0..40 {
        let mut random = SplitMix64::new(seed);
        let mut sets = HotColdSets::default();
        let mut model = Visited::default();
        let some = |random: &mut SplitMix64, one_in: u64| -> BTreeSet<u64> {
            (0..SECTIONS)
                .filter(|_| random.below(one_in) == 0)
                .collect()
        };
        let followed =
            |there: &BTreeSet<u64>| there.iter().copied().map(SectionNo).collect::<Vec<_>>();
        for step in 0..500 {
            match random.below(12) {
                0 if step % 7 == 0 => {
                    let there = some(&mut random, 2);
                    sets.follow(followed(&there));
                    model.follow(&there);
                }
                1 => {
                    let there = (0..SECTIONS).collect();
                    sets.follow(followed(&there));
                    model.follow(&there);
                }
                2 | 3 => {
                    let section = random.below(SECTIONS);
                    sets.emptied(SectionNo(section));
                    model.emptied(section);
                }
                4 => {
                    let section = random.below(SECTIONS);
                    sets.filled(SectionNo(section));
                    model.filled(section);
                }
                kind => {
                    let drift = [Drift::OneSet, Drift::None][usize::from(kind == 5)];
                    let one_in = 2 + random.below(20);
                    let touched = some(&mut random, one_in);
                    sets.scanned(followed(&touched), drift);
                    // A section that is not followed is in no set, even if touched.
                    model.scanned(&touched, drift);
                }
            }
            assert_same(&sets, &model, &format!("seed {seed}, step {step}"));
        }
    }
}
