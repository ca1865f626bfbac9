// SPDX-License-Identifier: Apache-2.0
//! `adaptive` with an evictor that takes sections that were idle for too long.

use super::trial::Mode;
use super::*;
use pagetide_addr::{Access, SectionNo};
use pagetide_random::SplitMix64;
use std::collections::{BTreeMap, BTreeSet};

/// A VM of one device, and its evictor: a section is evicted when it was not touched for `reach_s`.
struct Vm {
    policy: Adaptive,
    sections: u64,
    reach_s: u64,
    /// When each present section was touched, or prefetched.
    present: BTreeMap<u64, u64>,
    evicted: BTreeSet<u64>,
    held: BTreeSet<u64>,
    faults: u64,
    bring_backs: u64,
    /// Prefetches that the policy may request, and the least worth it may protect, computed here
    /// independently.
    allowance: f64,
    price: f64,
    weighed_s: u64,
    log: Vec<String>,
}

/// A policy without trials of resting.
fn acting(sections: u64) -> Adaptive {
    Adaptive {
        trial: Trial::of(Mode::Act),
        ..Adaptive::new(AdaptiveParams::default(), sections)
    }
}

impl Vm {
    fn new(sections: u64, reach_s: u64) -> Self {
        Self {
            policy: acting(sections),
            sections,
            reach_s,
            present: BTreeMap::new(),
            evicted: BTreeSet::new(),
            held: BTreeSet::new(),
            faults: 0,
            bring_backs: 0,
            allowance: 0.0,
            price: PRICE_MIN,
            weighed_s: 0,
            log: Vec::new(),
        }
    }

    /// Applies the policy's changes, and checks that they are consistent.
    fn obey(&mut self, now: u64, changes: Vec<Change>) {
        for change in changes {
            self.log.push(format!("{now} {change:?}"));
            match change {
                Change::Protect(section) => {
                    assert!(self.held.insert(section.0), "{section:?} is held already");
                }
                Change::Release(section) => {
                    assert!(self.held.remove(&section.0), "{section:?} is not held");
                }
                Change::BringBack(section) => {
                    self.allowance -= 1.0;
                    assert!(self.allowance > -1e-6, "more prefetches than allowed");
                    if self.evicted.remove(&section.0) {
                        self.bring_backs += 1;
                        self.present.insert(section.0, now);
                    }
                }
            }
        }
        let report = self.policy.report();
        assert_eq!(report.protected_sections, self.held.len() as u64);
        assert!(report.protected_sections <= Share::percent(5).of(self.sections));
        assert!(report.tracked_sections <= Share::percent(60).of(self.sections));
    }

    fn touch(&mut self, now: u64, section: u64) {
        let (at, mut changes) = (Duration::from_secs(now), Vec::new());
        if self.evicted.remove(&section) {
            self.faults += 1;
            self.policy
                .fate(SectionNo(section), Fate::Faulted, at, &mut changes);
        }
        self.present.insert(section, now);
        let touch = Touch {
            section: SectionNo(section),
            at,
            access: Access::Write,
            bytes: 4_096,
        };
        self.policy.touched(touch, &mut changes);
        self.obey(now, changes);
    }

    fn second(&mut self, now: u64) {
        let (at, mut changes) = (Duration::from_secs(now), Vec::new());
        // A tenth of the sections per minute, and at most a quarter of that at once.
        let minute = seconds(self.sections / 10);
        if now > 0 {
            self.allowance = (self.allowance + minute / 60.0).min(minute / 4.0 + 1.0);
        }
        self.policy.passed(at, &mut changes);
        self.obey(now, changes);
        self.check_price(now);
        assert!((self.policy.allowance - self.allowance).abs() < 1e-6);
        let rested = |touched: u64| now.saturating_sub(touched) >= self.reach_s;
        let old = self.present.iter().filter(|(_, at)| rested(**at));
        let victims: Vec<u64> = old
            .map(|(section, _)| *section)
            .filter(|section| !self.held.contains(section))
            .collect();
        for section in victims {
            self.present.remove(&section);
            self.evicted.insert(section);
            let mut changes = Vec::new();
            self.policy
                .fate(SectionNo(section), Fate::Evicted, at, &mut changes);
            self.obey(now, changes);
        }
    }

    /// The price moves every 20 s, by what was protected when it was weighed; that is after the releases
    /// and decisions of that second, so by what is held now.
    fn check_price(&mut self, now: u64) {
        if now - self.weighed_s >= 20 {
            self.weighed_s = now;
            let step = if self.held.len() as u64 > self.sections * 43 / 1_000 {
                1.15
            } else {
                1.0 / 1.15
            };
            self.price = (self.price * step).clamp(PRICE_MIN, 1.0);
        }
        let share = self.policy.price / self.price;
        assert!((share - 1.0).abs() < 1e-6, "{share}");
    }

    /// The evictor takes the sections, whatever they are.
    fn evict(&mut self, now: u64, sections: std::ops::Range<u64>) {
        for section in sections {
            self.tell(now, section, Fate::Evicted);
        }
    }

    /// Reports a fate of a section that is not used otherwise.
    fn tell(&mut self, now: u64, section: u64, fate: Fate) -> Vec<Change> {
        let mut changes = Vec::new();
        let at = Duration::from_secs(now);
        self.policy.fate(SectionNo(section), fate, at, &mut changes);
        if fate == Fate::NotBroughtBack {
            self.allowance = self.policy.allowance;
        }
        self.obey(now, changes.clone());
        changes
    }

    /// Faults of a period in which `count` sections, far apart, are touched in turn every `turn_s`.
    fn cycle(&mut self, from_s: u64, to_s: u64, count: u64, turn_s: u64) -> u64 {
        let before = self.faults;
        for now in from_s..to_s {
            for number in 0..count {
                if now % turn_s == number * turn_s / count {
                    self.touch(now, number * 40);
                }
            }
            self.second(now);
        }
        self.faults - before
    }
}

#[test]
fn random_touches_and_fates_keep_the_caps_and_never_contradict_themselves() {
    for seed in 0..6 {
        let mut random = SplitMix64::new(seed);
        let mut vm = Vm::new(400, 200);
        for now in 0..6_000 {
            for _ in 0..random.below(4) {
                let hot = random.below(3) == 0;
                let section = random.below(if hot { 20 } else { 400 });
                vm.touch(now, section);
            }
            vm.second(now);
            if random.below(500) == 0 {
                let section = random.below(400);
                vm.present.remove(&section);
                vm.evicted.remove(&section);
                let mut changes = Vec::new();
                let at = Duration::from_secs(now);
                vm.policy
                    .fate(SectionNo(section), Fate::Gone, at, &mut changes);
                vm.obey(now, changes);
            }
        }
    }
}

#[test]
fn same_touches_give_the_same_changes() {
    let run = || {
        let mut vm = Vm::new(4_000, 200);
        vm.cycle(0, 4_000, 60, 500);
        vm.log
    };
    assert!(!run().is_empty());
    assert_eq!(run(), run());
}

#[test]
fn cycle_longer_than_the_evictors_reach_faults_seldom_once_it_is_learnt() {
    let mut vm = Vm::new(4_000, 200);
    vm.cycle(0, 3_000, 60, 500);
    // Alone, each of the 60 sections would fault in each of the six turns.
    let faults = vm.cycle(3_000, 6_000, 60, 500);
    assert!(faults <= 36, "{faults}");
}

#[test]
fn worth_rises_before_the_age_of_a_cycle_and_falls_behind_it() {
    let mut table = LifeTable::new();
    let before: Vec<f64> = (0..INTERVALS).map(|age| table.worth(0, age)).collect();
    assert!(
        before[3..].is_sorted_by(|young, old| young >= old),
        "{before:?}"
    );
    // A hundred sections, all of which are touched at an age of 450 to 600 s.
    let cycle = interval_of(500);
    for _ in 0..100 {
        (3..=cycle).for_each(|age| table.reached(0, age));
        table.ended(0, cycle);
    }
    table.weigh(300.0);
    let learnt = |age_s: u64| table.worth(0, interval_of(age_s));
    assert!(learnt(70) < learnt(250) && learnt(250) < learnt(500));
    assert!(learnt(700) < learnt(250));
    let soon = |age_s: u64| table.soon(0, interval_of(age_s));
    assert!(
        soon(70) < 0.1 && soon(310) > 0.9,
        "{} {}",
        soon(70),
        soon(310)
    );
    for _ in 0..600 {
        table.fade();
    }
    table.weigh(300.0);
    let faded = table.worth(0, interval_of(500));
    assert!(
        (faded / before[cycle] - 1.0).abs() < 0.01,
        "what fades is forgotten"
    );
}

#[test]
fn sections_that_are_not_used_any_more_are_released_within_two_hours() {
    let mut vm = Vm::new(4_000, 200);
    vm.cycle(0, 6_000, 60, 500);
    assert!(!vm.held.is_empty());
    for now in 6_000..13_200 {
        vm.touch(now, 3_000 + now % 7);
        vm.second(now);
    }
    assert!(vm.held.is_empty(), "{:?}", vm.held);
}

#[test]
fn nothing_is_protected_or_brought_back_while_nothing_is_evicted() {
    let mut vm = Vm::new(4_000, 1_000_000);
    vm.cycle(0, 4_000, 60, 500);
    assert!(vm.held.is_empty());
    assert_eq!(vm.bring_backs, 0);
}

/// Changes of one short run, all of them.
#[test]
fn golden_run_of_two_sections() {
    let mut vm = Vm::new(1_000, 150);
    for now in 0..1_000 {
        if now % 240 == 0 {
            vm.touch(now, 100);
        }
        if now % 400 == 0 {
            vm.touch(now, 200);
        }
        vm.second(now);
    }
    let golden = include_str!("golden.txt");
    assert_eq!(
        vm.log.join("\n"),
        golden.trim_end(),
        "the log is left, the golden one right"
    );
}

#[test]
fn vm_that_shrinks_is_within_its_new_caps_at_once() {
    let mut vm = Vm::new(4_000, 200);
    vm.cycle(0, 6_000, 60, 500);
    let mut changes = Vec::new();
    vm.sections = 40;
    vm.policy.resized(40, &mut changes);
    vm.obey(6_000, changes);
}

#[test]
fn dma_over_memory_that_is_all_present_wishes_nothing_back() {
    let mut vm = Vm::new(4_000, 1_000_000);
    for now in 0..2_000 {
        vm.touch(now, 2 * now % 4_000);
        vm.second(now);
    }
    assert_eq!(vm.log, [""; 0]);
}

/// CPUs fill again what the evictor takes, again and again, and the device finds all of it present.
#[test]
fn guesses_that_brought_nothing_are_not_good() {
    let mut vm = Vm::new(4_000, 1_000_000);
    for now in 0..4_000 {
        if now % 1_000 == 0 {
            vm.evict(now, 0..4_000);
        }
        let wished = vm.log.len();
        for section in [4 * now % 4_000, (4 * now + 2) % 4_000] {
            vm.touch(now, section);
        }
        let wishes: Vec<String> = vm.log[wished..].to_vec();
        for wish in wishes {
            let section = wish.split(['(', ')']).nth(2).and_then(|it| it.parse().ok());
            vm.tell(now, section.unwrap_or(0), Fate::NotBroughtBack);
        }
        vm.second(now);
    }
    let depth = vm.policy.guesses.depth(Kind::Neighbour);
    assert!(depth <= 2, "{depth}");
}

#[test]
fn wish_that_came_to_nothing_may_be_made_anew_elsewhere() {
    let mut vm = Vm::new(4_000, 200);
    vm.cycle(0, 1_000, 60, 500);
    let before = vm.policy.allowance;
    let wished = SectionNo(2_001);
    vm.policy.absent.insert(wished);
    assert!(vm.policy.bring_back(wished, Kind::Order, &mut Vec::new()));
    assert!(vm.policy.allowance < before);
    vm.allowance -= 1.0;
    for _ in 0..2 {
        // The second time, the prefetch is no longer pending.
        vm.allowance = before;
        vm.tell(1_000, 2_001, Fate::NotBroughtBack);
        assert!((vm.policy.allowance - before).abs() < 1e-6);
    }
}

#[test]
fn absent_section_worth_protecting_is_protected_once_there_is_an_allowance() {
    let mut vm = Vm::new(4_000, 200);
    vm.cycle(0, 6_000, 60, 500);
    vm.policy.allowance = 0.0;
    vm.allowance = 0.0;
    let held = vm.held.iter().copied().find(|section| {
        let slot = vm.policy.links.find(SectionNo(*section));
        slot.is_some_and(|slot| vm.policy.links.value(slot).interval > VISIT_INTERVAL + 2)
    });
    let section = held.expect("some section is protected and near its touch");
    // It is evicted nevertheless, and its protection ends; then a decision comes at the wrong
    // moment.
    let slot = vm
        .policy
        .links
        .find(SectionNo(section))
        .expect("remembered");
    vm.policy.links.value_mut(slot).protected = false;
    vm.policy.protected -= 1;
    vm.held.remove(&section);
    vm.present.remove(&section);
    vm.evicted.insert(section);
    let changes = vm.tell(6_000, section, Fate::Evicted);
    assert!(changes.is_empty(), "{changes:?}");
    vm.second(6_000);
    assert!(vm.held.contains(&section) && !vm.evicted.contains(&section));
}

#[test]
fn waiting_guesses_are_bounded_and_the_newest_still_count() {
    let mut guesses = Guesses::default();
    for section in 0..100_000 {
        guesses.made(SectionNo(section), Kind::Neighbour);
    }
    let bytes = guesses.bytes();
    assert!(bytes < 2 << 20, "{bytes}");
    for section in 99_000..100_000 {
        guesses.touched(SectionNo(section));
    }
    guesses.weigh();
    assert_eq!(guesses.depth(Kind::Neighbour), 4);
    // Guesses without an outcome are bad after an hour.
    guesses.passed(Duration::from_secs(3_600));
    guesses.weigh();
    assert_eq!(guesses.depth(Kind::Neighbour), 2);
    assert!(!guesses.came_to_nothing(SectionNo(98_000)));
}

#[test]
fn section_that_is_gone_is_neither_guessed_at_nor_waited_for() {
    let mut vm = Vm::new(4_000, 1_000_000);
    vm.evict(0, 100..110);
    vm.tell(0, 101, Fate::Gone);
    for now in 0..10 {
        vm.second(now);
    }
    vm.touch(10, 100);
    assert!(!vm.log.contains(&"10 BringBack(SectionNo(101))".to_owned()));
    assert!(vm.log.contains(&"10 BringBack(SectionNo(102))".to_owned()));
    assert!(!vm.policy.guesses.came_to_nothing(SectionNo(101)));
}

#[test]
fn sections_are_guessed_beyond_their_count_and_never_in_gaps() {
    // 1,000 sections, half of which were plugged far above the others.
    let mut vm = Vm::new(1_000, 1_000_000);
    let high = 1 << 20;
    vm.evict(0, high..high + 3);
    for now in 0..10 {
        vm.second(now);
    }
    vm.touch(10, high);
    assert_eq!(
        vm.log,
        [
            format!("10 BringBack(SectionNo({}))", high + 1),
            format!("10 BringBack(SectionNo({}))", high + 2),
        ]
    );
}

#[test]
fn report_counts_releases_that_are_due_later() {
    let mut policy = Adaptive::new(AdaptiveParams::default(), 100);
    let before = policy.report().bytes;
    policy.releases.reserve_exact(1_000);
    assert!(policy.report().bytes >= before + 1_000 * 16);
}
