// SPDX-License-Identifier: Apache-2.0
//! The sets against a model that visits every section at every scan.

use crate::{
    set_times::{SetTimes, TIME_MIN},
    sets::{HotColdSets, LEVELS, Level},
};
use pagetide_addr::SectionNo;
use pagetide_random::SplitMix64;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

fn numbers(sections: impl Iterator<Item = SectionNo>) -> Vec<u64> {
    sections.map(|section| section.0).collect()
}

fn named(sections: &[u64]) -> impl Iterator<Item = SectionNo> {
    sections.iter().copied().map(SectionNo)
}

/// Sets that are scanned once in the shortest time of a set.
struct Scanned {
    sets: HotColdSets,
    scans: u32,
}

impl Scanned {
    fn new(sections: u64) -> Self {
        let sets = HotColdSets::new(sections);
        Self { sets, scans: 0 }
    }

    fn scan(&mut self, touched: &[u64]) {
        self.scans += 1;
        self.sets.scanned(self.scans * TIME_MIN, named(touched));
    }

    fn level(&self, section: u64) -> Option<Level> {
        self.sets.level(SectionNo(section))
    }
}

#[test]
fn section_rises_and_sinks_by_one_set_at_a_scan() {
    let mut all = Scanned::new(3);
    for level in [Level::Inactive, Level::Cool, Level::Cold, Level::Cold] {
        all.scan(&[]);
        assert_eq!(all.level(1), Some(level));
    }
    for level in [
        Level::Cool,
        Level::Inactive,
        Level::Active,
        Level::Warm,
        Level::Hot,
        Level::Hot,
    ] {
        all.scan(&[1]);
        assert_eq!(all.level(1), Some(level));
    }
    for level in [Level::Warm, Level::Active, Level::Inactive] {
        all.scan(&[]);
        assert_eq!(all.level(1), Some(level));
    }
    assert_eq!(all.level(0), Some(Level::Cold));
}

#[test]
fn one_touch_makes_nothing_hot_and_one_quiet_scan_nothing_cold() {
    let mut all = Scanned::new(2);
    for _ in 0..4 {
        all.scan(&[1]);
    }
    let before = [all.level(0), all.level(1)];
    assert_eq!(before, [Some(Level::Cold), Some(Level::Hot)]);
    all.scan(&[0]);
    assert_eq!(
        [all.level(0), all.level(1)],
        [Some(Level::Cool), Some(Level::Warm)]
    );
    all.scan(&[1]);
    assert_eq!([all.level(0), all.level(1)], before);
}

#[test]
fn first_to_become_cold_is_coldest_and_is_never_overtaken() {
    let mut all = Scanned::new(3);
    all.scan(&[0, 1]);
    all.scan(&[1]);
    for _ in 0..9 {
        all.scan(&[]);
    }
    assert_eq!(numbers(all.sets.coldest_first()), [2, 0, 1]);
    assert_eq!(all.sets.counts()[0], (Level::Cold, 3));
}

#[test]
fn section_named_twice_in_a_scan_was_touched_once() {
    let mut all = Scanned::new(1);
    all.scan(&[0, 0, 0]);
    assert_eq!(all.level(0), Some(Level::Warm));
}

#[test]
fn section_stays_in_each_set_for_its_time_however_often_it_is_scanned() {
    let second = Duration::from_secs(1);
    let times: SetTimes = "quick:hot=5s,warm=4s,active=3s,inactive=2s,cool=6s"
        .parse()
        .unwrap();
    let mut sets = HotColdSets::new(1);
    sets.set_times(times);
    sets.scanned(second, named(&[0]));
    sets.scanned(2 * second, named(&[0]));
    // A touch when it is hot is another arrival.
    sets.scanned(7 * second, named(&[0]));
    let mut left = Vec::new();
    let mut before = Level::Hot;
    for at in 28..40 * 4 {
        sets.scanned(second * at / 4, []);
        let level = sets.level(SectionNo(0)).unwrap();
        if level != before {
            assert_eq!(level, before.colder());
            left.push(at / 4);
            before = level;
        }
    }
    assert_eq!(left, [12, 16, 19, 21, 27]);
    // Other times hold at once.
    sets.scanned(50 * second, named(&[0]));
    sets.scanned(55 * second, []);
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Cool));
    sets.set_times(SetTimes::QUICK);
    sets.scanned(55 * second, []);
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Cold));
}

#[test]
fn section_is_cold_ten_minutes_after_it_was_hot_with_the_papers_times() {
    let mut sets = HotColdSets::new(1);
    sets.set_times(SetTimes::PAPER);
    let scan = SetTimes::PAPER.scan;
    sets.scanned(scan, named(&[0]));
    sets.scanned(2 * scan, named(&[0]));
    for number in 3..=12 {
        assert_ne!(sets.level(SectionNo(0)), Some(Level::Cold), "scan {number}");
        sets.scanned(number * scan, []);
    }
    assert_eq!(sets.level(SectionNo(0)), Some(Level::Cold));
}

#[test]
fn new_sections_are_active_and_those_that_went_are_in_no_set() {
    let mut all = Scanned::new(4);
    all.scan(&[]);
    all.sets.follow([1, 3, 900].map(SectionNo));
    all.scan(&[0, 1]);
    assert_eq!(all.level(0), None);
    assert_eq!(all.level(1), Some(Level::Active));
    assert_eq!(all.level(3), Some(Level::Cool));
    assert_eq!(all.level(900), Some(Level::Inactive));
    assert_eq!(numbers(all.sets.coldest_first()), [3, 900, 1]);
    all.sets.follow([0, 1].map(SectionNo));
    assert_eq!(all.level(0), Some(Level::Active));
    all.sets.follow([]);
    assert_eq!(all.sets.coldest_first().count(), 0);
}

#[test]
fn emptied_section_is_not_offered_until_it_is_touched_or_filled() {
    let mut all = Scanned::new(4);
    for section in [0, 1, 3] {
        all.sets.emptied(SectionNo(section));
    }
    assert_eq!(numbers(all.sets.coldest_first()), [2]);
    assert_eq!(numbers(all.sets.empty_sections()), [0, 1, 3]);
    assert_eq!(all.level(0), None);
    all.scan(&[0]);
    assert_eq!(all.level(0), Some(Level::Active));
    all.sets.filled(SectionNo(1));
    assert_eq!(all.level(1), Some(Level::Active));
    all.sets.filled_ahead(SectionNo(3));
    assert_eq!(all.level(3), Some(Level::Cool));
    assert_eq!(numbers(all.sets.empty_sections()), []);
    // What is in a set already stays where it is.
    all.sets.filled(SectionNo(2));
    all.sets.filled_ahead(SectionNo(1));
    assert_eq!(all.level(2), Some(Level::Inactive));
    assert_eq!(all.level(1), Some(Level::Active));
}

#[test]
fn section_is_in_use_if_it_was_touched_or_came_back_and_has_not_sunk_since() {
    let mut all = Scanned::new(5);
    let in_use = |all: &Scanned| -> Vec<u64> {
        let is_in_use = |section: &u64| all.sets.is_in_use(SectionNo(*section));
        (0..5).filter(is_in_use).collect()
    };
    // Active, since nothing is known of them.
    assert_eq!(in_use(&all), []);
    for section in [1, 2, 3] {
        all.sets.emptied(SectionNo(section));
    }
    all.sets.filled(SectionNo(1));
    all.sets.filled_ahead(SectionNo(2));
    all.scan(&[0]);
    all.sets.filled(SectionNo(3));
    assert_eq!(in_use(&all), [0, 3]);
    all.sets.used(named(&[1, 2, 4]));
    assert_eq!(in_use(&all), [0, 1, 3, 4]);
    all.sets.used(named(&[2]));
    all.sets.used(named(&[2]));
    assert_eq!(in_use(&all), [0, 1, 2, 3, 4]);
    // Once it is empty: whether it was in use when it was emptied.
    all.sets.emptied(SectionNo(0));
    assert_eq!(in_use(&all), [0, 1, 2, 3, 4]);
    all.sets.filled_ahead(SectionNo(0));
    assert_eq!(in_use(&all), [1, 2, 3, 4]);
    all.sets.emptied(SectionNo(0));
    assert_eq!(in_use(&all), [1, 2, 3, 4]);
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
    /// Level, when it was reached or the section last touched, and the number of that event.
    standing: BTreeMap<u64, (Level, Duration, u64)>,
    empty: BTreeSet<u64>,
    there: BTreeSet<u64>,
    now: Duration,
    events: u64,
}

impl Visited {
    /// What arrives now; those of one event in any order.
    fn arrive(&mut self, section: u64, level: Level) {
        let arrival = (level, self.now, self.events);
        self.standing.insert(section, arrival);
    }

    fn follow(&mut self, there: &BTreeSet<u64>) {
        self.events += 1;
        self.standing.retain(|section, _| there.contains(section));
        self.empty.retain(|section| there.contains(section));
        for section in there {
            if !self.empty.contains(section) && !self.standing.contains_key(section) {
                self.arrive(*section, Level::Active);
            }
        }
        self.there.clone_from(there);
    }

    fn used(&mut self, touched: &BTreeSet<u64>) {
        self.events += 1;
        for section in touched.intersection(&self.there.clone()) {
            let level = match self.standing.get(section) {
                None => Level::Active,
                Some((Level::Cold, ..)) => Level::Cool,
                Some((Level::Cool, ..)) => Level::Inactive,
                Some((Level::Inactive, ..)) => Level::Active,
                Some((Level::Active, ..)) => Level::Warm,
                Some((Level::Warm | Level::Hot, ..)) => Level::Hot,
            };
            self.empty.remove(section);
            self.arrive(*section, level);
        }
    }

    fn scanned(&mut self, touched: &BTreeSet<u64>, times: &SetTimes) {
        self.used(touched);
        self.events += 1;
        // Those that arrive in a set together keep their order: by when they had arrived in the last one.
        let mut sinking: Vec<(u64, u64, Level)> = Vec::new();
        for (section, (level, since, event)) in &self.standing {
            let (age, to) = match level {
                Level::Hot => (times.hot, Level::Warm),
                Level::Warm => (times.warm, Level::Active),
                Level::Active => (times.active, Level::Inactive),
                Level::Inactive => (times.inactive, Level::Cool),
                Level::Cool => (times.cool, Level::Cold),
                Level::Cold => continue,
            };
            if self.now - *since >= age {
                sinking.push((*event, *section, to));
            }
        }
        sinking.sort_unstable();
        let mut last = None;
        for (event, section, to) in sinking {
            self.events += u64::from(last.is_some_and(|last| last != event));
            last = Some(event);
            self.arrive(section, to);
        }
    }

    fn emptied(&mut self, section: u64) {
        if self.standing.remove(&section).is_some() {
            self.empty.insert(section);
        }
    }

    fn filled(&mut self, section: u64, to: Level) {
        self.events += 1;
        if self.empty.remove(&section) {
            self.arrive(section, to);
        }
    }

    /// Groups of equal temperature, coldest first: by set, and in a set by arrival.
    fn groups(&self) -> Vec<BTreeSet<u64>> {
        let mut groups: BTreeMap<(Level, u64), BTreeSet<u64>> = BTreeMap::new();
        for (section, (level, _, event)) in &self.standing {
            groups.entry((*level, *event)).or_default().insert(*section);
        }
        groups.into_values().collect()
    }
}

fn assert_same(sets: &HotColdSets, model: &Visited, context: &str) {
    for (section, (level, ..)) in &model.standing {
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
    // No section is lost, whatever happened to it.
    let all: BTreeSet<u64> = model.standing.keys().chain(&empty).copied().collect();
    assert_eq!(all, model.there, "{context}");
    let counts = LEVELS.map(|level| {
        let here = model
            .standing
            .values()
            .filter(|(other, ..)| *other == level);
        (level, here.count() as u64)
    });
    assert_eq!(sets.counts(), counts, "{context}");
}

/// Levels of all sections that are in a set.
fn levels(sets: &HotColdSets) -> BTreeMap<u64, Level> {
    let level = |section: SectionNo| sets.level(section).map(|level| (section.0, level));
    sets.coldest_first().filter_map(level).collect()
}

/// What was in a set before and after moved by one set at most.
fn assert_one_step(before: &BTreeMap<u64, Level>, after: &BTreeMap<u64, Level>, context: &str) {
    for (section, to) in after {
        if let Some(from) = before.get(section) {
            let steps = (*from as i32).abs_diff(*to as i32);
            assert!(steps <= 1, "{section} from {from:?} to {to:?}, {context}");
        }
    }
}

fn some_times(random: &mut SplitMix64) -> SetTimes {
    let mut time = || TIME_MIN / 2 * u32::try_from(2 + random.below(8)).unwrap();
    SetTimes {
        scan: time(),
        hot: time(),
        warm: time(),
        active: time(),
        inactive: time(),
        cool: time(),
    }
}

#[test]
fn sets_equal_those_that_visit_every_section_over_random_scans() {
    const SECTIONS: u64 = 40;
    for seed in 0..60 {
        let mut random = SplitMix64::new(seed);
        let mut times = some_times(&mut random);
        let mut sets = HotColdSets::default();
        sets.set_times(times);
        let mut model = Visited::default();
        let some = |random: &mut SplitMix64, one_in: u64| -> BTreeSet<u64> {
            (0..SECTIONS)
                .filter(|_| random.below(one_in) == 0)
                .collect()
        };
        let list = |there: &BTreeSet<u64>| there.iter().copied().map(SectionNo).collect::<Vec<_>>();
        for step in 0..500 {
            let context = format!("seed {seed}, step {step}");
            let before = levels(&sets);
            model.now += Duration::from_millis(100 * random.below(12));
            sets.passed(model.now);
            let section = random.below(SECTIONS);
            match random.below(14) {
                0 if step % 7 == 0 => {
                    let there = some(&mut random, 2);
                    sets.follow(list(&there));
                    model.follow(&there);
                }
                1 => {
                    let there = (0..SECTIONS).collect();
                    sets.follow(list(&there));
                    model.follow(&there);
                }
                2 | 3 => {
                    sets.emptied(SectionNo(section));
                    model.emptied(section);
                }
                4 => {
                    sets.filled(SectionNo(section));
                    model.filled(section, Level::Active);
                }
                5 => {
                    sets.filled_ahead(SectionNo(section));
                    model.filled(section, Level::Cool);
                }
                6 if step % 11 == 0 => {
                    times = some_times(&mut random);
                    sets.set_times(times);
                }
                kind => {
                    let one_in = 2 + random.below(20);
                    let touched = some(&mut random, one_in);
                    // A section that is not followed is in no set, even if touched.
                    if kind == 7 {
                        sets.used(list(&touched));
                        model.used(&touched);
                    } else {
                        sets.scanned(model.now, list(&touched));
                        model.scanned(&touched, &times);
                    }
                }
            }
            assert_one_step(&before, &levels(&sets), &context);
            assert_same(&sets, &model, &context);
        }
    }
}

#[test]
fn nothing_that_was_used_is_cold_before_the_time_that_is_told_and_something_is_then() {
    for seed in 1..=20 {
        let mut random = SplitMix64::new(seed);
        let times = some_times(&mut random);
        let mut sets = HotColdSets::new(8);
        sets.set_times(times);
        let mut used = [None; 8];
        let mut soonest = Duration::MAX;
        let mut now = Duration::ZERO;
        for _ in 0..4_000 {
            now += TIME_MIN / 2;
            let touched: Vec<u64> = (0..8).filter(|_| random.below(40) == 0).collect();
            for section in &touched {
                used[usize::try_from(*section).unwrap()] = Some(now);
            }
            sets.scanned(now, named(&touched));
            let colds = (0..8).filter(|at| sets.level(SectionNo(*at)) == Some(Level::Cold));
            for at in colds {
                if let Some(used) = used[usize::try_from(at).unwrap()] {
                    soonest = soonest.min(now - used);
                }
            }
        }
        assert_eq!(soonest, times.cold_after(), "seed {seed}, {times}");
    }
}
