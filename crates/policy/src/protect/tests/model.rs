// SPDX-License-Identifier: Apache-2.0
//! Policies against models that keep a vector and scan all of it each time.

use crate::protect::{
    Change, Fate, PolicyReport, PromotionAge, ProtectionPolicy, Touch,
    adp::{Adp, AdpParams},
    lru::{Lru, LruParams},
    parameters::Share,
};
use pagetide_addr::{Access, PAGE_BYTES, SectionNo};
use pagetide_random::SplitMix64;
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// Sections of the VM, and of them those that the device touches.
const VM_SECTIONS: u64 = 100;
const TOUCHED_SECTIONS: u64 = 60;

struct Seen {
    section: SectionNo,
    last: Duration,
    /// Orders two touches at the same time.
    touch: u64,
    place: Place,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Active,
    Inactive,
    /// In the inactive block, and touched there: until when, and by which touch first.
    Leaving(Duration, u64),
}

/// The paper's protector, by its rules and nothing else.
struct AdpModel {
    params: AdpParams,
    age: PromotionAge,
    surplus: Vec<SectionNo>,
    last_due: Duration,
    sections: u64,
    seen: Vec<Seen>,
    touches: u64,
    scanned_at: Option<Duration>,
    dropped: u64,
}

impl AdpModel {
    fn new(params: AdpParams, sections: u64) -> Self {
        Self {
            params,
            age: PromotionAge::starting_at(params.promote_after),
            surplus: Vec::new(),
            last_due: Duration::ZERO,
            sections,
            seen: Vec::new(),
            touches: 0,
            scanned_at: None,
            dropped: 0,
        }
    }

    fn follow(&self) -> u64 {
        self.params.follow.unwrap_or(0)
    }

    fn promote_after(&self) -> Duration {
        match self.follow() {
            0 => self.params.promote_after,
            _ => self.age.get(),
        }
    }

    fn in_proportion(&self, time: Duration) -> Duration {
        let part = self.promote_after().as_secs_f64() / self.params.promote_after.as_secs_f64();
        if part < 1.0 { time.mul_f64(part) } else { time }
    }

    fn demote_after(&self) -> Duration {
        let written = self.params.demote_after;
        self.in_proportion(written).max(Duration::from_secs(5))
    }

    fn count(&self, is_counted: impl Fn(Place) -> bool) -> u64 {
        self.seen
            .iter()
            .filter(|seen| is_counted(seen.place))
            .count() as u64
    }

    /// Position of the oldest section in a place.
    fn oldest(&self, is_wanted: impl Fn(Place) -> bool) -> Option<usize> {
        (0..self.seen.len())
            .filter(|position| is_wanted(self.seen[*position].place))
            .min_by_key(|position| (self.seen[*position].last, self.seen[*position].touch))
    }

    fn promote(&mut self, position: usize, changes: &mut Vec<Change>) {
        let seen = &mut self.seen[position];
        if seen.place == Place::Active {
            changes.push(Change::Protect(seen.section));
        }
        seen.place = Place::Inactive;
    }

    fn keep_limits(&mut self, changes: &mut Vec<Change>) {
        let active_max = self.params.active_max.of(self.sections);
        let inactive_max = self.params.protected_max.of(self.sections);
        while self.count(|place| place == Place::Active) > active_max {
            let oldest = self.oldest(|place| place != Place::Inactive);
            self.promote(oldest.expect("one is active"), changes);
        }
        while self.count(|place| place != Place::Active) > inactive_max {
            let oldest = self.oldest(|place| place != Place::Active);
            let dropped = self.seen.remove(oldest.expect("one is inactive"));
            changes.push(Change::Release(dropped.section));
            self.dropped += 1;
            self.age.dropped();
            self.surplus.push(dropped.section);
        }
        while self.surplus.len() as u64 > inactive_max {
            self.surplus.remove(0);
        }
    }

    fn demote(&mut self, now: Duration, changes: &mut Vec<Change>) {
        let since = |seen: &Seen| match seen.place {
            Place::Leaving(due, touch) if due <= now => Some((due, touch)),
            _ => None,
        };
        let mut due: Vec<(Duration, u64)> = self.seen.iter().filter_map(since).collect();
        due.sort_unstable();
        for (at, touch) in due {
            let place = Place::Leaving(at, touch);
            for seen in self.seen.iter_mut().filter(|seen| seen.place == place) {
                seen.place = Place::Active;
                changes.push(Change::Release(seen.section));
            }
        }
    }
}

impl ProtectionPolicy for AdpModel {
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
        let newest = self.seen.iter().map(|seen| seen.last).max();
        let last = newest.map_or(touch.at, |newest| newest.max(touch.at));
        let demote_after = self.demote_after();
        self.touches += 1;
        let number = self.touches;
        let known = |seen: &&mut Seen| seen.section == touch.section;
        if let Some(seen) = self.seen.iter_mut().find(known) {
            (seen.last, seen.touch) = (last, number);
            if seen.place == Place::Inactive {
                self.last_due = self.last_due.max(last + demote_after);
                seen.place = Place::Leaving(self.last_due, number);
            }
        } else {
            self.surplus.retain(|known| *known != touch.section);
            self.seen.push(Seen {
                section: touch.section,
                last,
                touch: number,
                place: Place::Active,
            });
            self.keep_limits(changes);
        }
    }

    fn passed(&mut self, now: Duration, changes: &mut Vec<Change>) {
        self.demote(now, changes);
        self.keep_limits(changes);
        let is_due =
            |at: Duration| now.saturating_sub(at) >= self.in_proportion(self.params.scan_every);
        if self.scanned_at.is_none_or(is_due) {
            self.scanned_at = Some(now);
            let promote_after = self.promote_after();
            while let Some(oldest) = self.oldest(|place| place != Place::Inactive)
                && now.saturating_sub(self.seen[oldest].last) >= promote_after
            {
                if self.seen[oldest].place == Place::Active && self.follow() > 0 {
                    self.age.promoted_first();
                }
                self.promote(oldest, changes);
            }
            self.keep_limits(changes);
            if self.follow() > 0 {
                self.age.look(now, self.follow());
            }
        }
    }

    fn fate(&mut self, section: SectionNo, fate: Fate, now: Duration, changes: &mut Vec<Change>) {
        let is_known = |known: &[SectionNo]| known.contains(&section);
        let is_tracked = self.seen.iter().any(|seen| seen.section == section);
        if fate == Fate::Evicted && (is_known(&self.surplus) || is_tracked) {
            self.age.evicted(now);
        }
        if fate != Fate::Faulted {
            self.surplus.retain(|known| *known != section);
        }
        if let Some(position) = self.seen.iter().position(|seen| seen.section == section)
            && fate != Fate::Faulted
        {
            let gone = self.seen.remove(position);
            if gone.place != Place::Active {
                changes.push(Change::Release(section));
            } else if fate == Fate::Evicted && self.follow() > 0 {
                self.age.evicted_first(now.saturating_sub(gone.last));
            }
        }
    }

    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>) {
        self.sections = sections;
        self.keep_limits(changes);
    }

    fn report(&self) -> PolicyReport {
        PolicyReport {
            tracked_sections: self.seen.len() as u64,
            protected_sections: self.count(|place| place != Place::Active),
            dropped_sections: self.dropped,
            bytes: 0,
        }
    }
}

/// The last distinct sections, up to a maximum.
struct LruModel {
    share: Share,
    sections: u64,
    newest_last: Vec<SectionNo>,
    dropped: u64,
}

impl LruModel {
    fn keep_limit(&mut self, changes: &mut Vec<Change>) {
        while self.newest_last.len() as u64 > self.share.of(self.sections) {
            changes.push(Change::Release(self.newest_last.remove(0)));
            self.dropped += 1;
        }
    }
}

impl ProtectionPolicy for LruModel {
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
        let before = self.newest_last.len();
        self.newest_last.retain(|section| *section != touch.section);
        if self.newest_last.len() == before {
            changes.push(Change::Protect(touch.section));
        }
        self.newest_last.push(touch.section);
        self.keep_limit(changes);
    }

    fn passed(&mut self, _: Duration, _: &mut Vec<Change>) {}

    fn fate(&mut self, section: SectionNo, fate: Fate, _: Duration, changes: &mut Vec<Change>) {
        if fate != Fate::Faulted && self.newest_last.contains(&section) {
            self.newest_last.retain(|other| *other != section);
            changes.push(Change::Release(section));
        }
    }

    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>) {
        self.sections = sections;
        self.keep_limit(changes);
    }

    fn report(&self) -> PolicyReport {
        PolicyReport {
            tracked_sections: self.newest_last.len() as u64,
            protected_sections: self.newest_last.len() as u64,
            dropped_sections: self.dropped,
            bytes: 0,
        }
    }
}

/// How often each event happens, and how fast time passes.
struct Workload {
    /// Touches among a hundred events.
    touches: u64,
    /// Most milliseconds between two events.
    step_ms: u64,
    /// One touch in this many is of any section, the others are of a few.
    any_one_in: u64,
}

/// Applies the events that follow from `seed` to both policies; their changes must be equal and
/// consistent.
fn assert_alike(
    seed: u64,
    workload: &Workload,
    policy: &mut dyn ProtectionPolicy,
    model: &mut dyn ProtectionPolicy,
) {
    // By remainder: with these draws every seed reaches the overflow that its test demands.
    let mut random = SplitMix64::new(seed);
    let mut now = Duration::from_secs(1_000);
    let mut protected = BTreeSet::new();
    for event in 0..4_000 {
        let (mut changes, mut expected) = (Vec::new(), Vec::new());
        now += Duration::from_millis(random.remainder(workload.step_ms));
        let any = random.remainder(workload.any_one_in) == 0;
        let section = SectionNo(random.remainder(if any { TOUCHED_SECTIONS } else { 8 }));
        match random.remainder(100) {
            kind if kind < workload.touches => {
                let touch = Touch {
                    section,
                    // Logs of several queues are not quite in order.
                    at: now.saturating_sub(Duration::from_millis(random.remainder(3) * 700)),
                    access: Access::Write,
                    bytes: PAGE_BYTES,
                };
                policy.touched(touch, &mut changes);
                model.touched(touch, &mut expected);
            }
            kind @ (97 | 98) => {
                let fate = match kind {
                    97 => Fate::Evicted,
                    _ => Fate::Gone,
                };
                policy.fate(section, fate, now, &mut changes);
                model.fate(section, fate, now, &mut expected);
            }
            99 if event % 8 == 0 => {
                let sections = VM_SECTIONS / (1 + random.remainder(10));
                policy.resized(sections, &mut changes);
                model.resized(sections, &mut expected);
            }
            _ => {
                policy.passed(now, &mut changes);
                model.passed(now, &mut expected);
            }
        }
        assert_eq!(changes, expected, "seed {seed}, event {event}, at {now:?}");
        for change in changes {
            match change {
                Change::Protect(section) => assert!(protected.insert(section)),
                Change::Release(section) => assert!(protected.remove(&section)),
            }
        }
        let report = PolicyReport {
            bytes: 0,
            ..policy.report()
        };
        assert_eq!(report, model.report(), "seed {seed}, event {event}");
        assert_eq!(report.protected_sections, protected.len() as u64);
    }
}

/// A quiet device, a busy one, and one that goes through all of memory.
const WORKLOADS: [Workload; 3] = [
    Workload {
        touches: 50,
        step_ms: 20_000,
        any_one_in: 4,
    },
    Workload {
        touches: 90,
        step_ms: 2_000,
        any_one_in: 2,
    },
    Workload {
        touches: 95,
        step_ms: 500,
        any_one_in: 1,
    },
];

#[test]
fn adp_equals_its_model_over_random_touches() {
    for (seed, workload) in (0..60).zip(WORKLOADS.iter().cycle()) {
        let params = AdpParams {
            protected_max: Share::percent([5, 10, 30][usize::try_from(seed / 20).unwrap()]),
            follow: [None, Some(1), Some(4)][usize::try_from(seed / 3 % 3).unwrap()],
            ..AdpParams::default()
        };
        let age = Arc::new(PromotionAge::starting_at(params.promote_after));
        let mut policy = Adp::new(params, VM_SECTIONS, &age);
        let mut model = AdpModel::new(params, VM_SECTIONS);
        assert_alike(seed, workload, &mut policy, &mut model);
        assert!(policy.report().dropped_sections > 0, "nothing overflowed");
    }
}

#[test]
fn lru_equals_its_model_over_random_touches() {
    for (seed, workload) in (0..30).zip(WORKLOADS.iter().cycle()) {
        let params = LruParams::default();
        let mut policy = Lru::new(params, VM_SECTIONS);
        let mut model = LruModel {
            share: params.share,
            sections: VM_SECTIONS,
            newest_last: Vec::new(),
            dropped: 0,
        };
        assert_alike(seed, workload, &mut policy, &mut model);
        assert!(policy.report().dropped_sections > 0, "nothing overflowed");
    }
}

#[test]
fn device_that_touches_other_sections_for_ever_takes_no_more_than_its_shares() {
    const SECTIONS: u64 = 30_000;
    let age = Arc::new(PromotionAge::starting_at(Duration::from_secs(180)));
    let mut policy = Adp::new(AdpParams::default(), SECTIONS, &age);
    let mut changes = Vec::new();
    for number in 0..200_000_u64 {
        let touch = Touch {
            // Twice in a row, the second time when it is resting.
            section: SectionNo(if number % 2 == 0 {
                number
            } else {
                number.saturating_sub(20_001)
            }),
            at: Duration::from_millis(number),
            access: Access::Read,
            bytes: PAGE_BYTES,
        };
        policy.touched(touch, &mut changes);
        if number % 1_000 == 0 {
            policy.passed(touch.at, &mut changes);
        }
        changes.clear();
    }
    let report = policy.report();
    assert!(report.tracked_sections <= SECTIONS * 35 / 100);
    let bytes_per_section = report.bytes / report.tracked_sections;
    assert!(bytes_per_section <= 56, "{bytes_per_section}");
}
