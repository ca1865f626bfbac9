// SPDX-License-Identifier: Apache-2.0
//! Guesses about absent sections: which are absent, which were prefetched on a guess, and whether
//! that helped.
//!
//! ```text
//!   prefetched ───► touched without a fault   good
//!                   evicted again             bad: another was evicted for it in vain
//!                   an hour goes by           bad
//!                   faulted on                it came too late, or never: ignored
//!                   not prefetched, gone      ignored
//!                   16,384 newer guesses      ignored
//! ```
//! Not every evicted section is still absent: faults of CPUs fill them again, and are not reported. The
//! prefetcher finds such a section present, and reports that it was not prefetched.

use super::pending::Pending;
use crate::section_set::SectionSet;
use pagetide_addr::SectionNo;
use rustc_hash::FxHashMap;
use std::time::Duration;

/// Why a section was prefetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Its age makes a touch likely.
    Age,
    /// It followed last time.
    Order,
    /// It is adjacent to a section that was touched.
    Neighbour,
}

/// Sections that were evicted, without an event since: one bit each.
#[derive(Debug, Default)]
pub(super) struct Absent(SectionSet);

impl Absent {
    pub(super) fn contains(&self, section: SectionNo) -> bool {
        self.0.contains(section)
    }

    pub(super) fn insert(&mut self, section: SectionNo) {
        self.0.insert(section);
    }

    pub(super) fn remove(&mut self, section: SectionNo) {
        self.0.remove(section);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

/// Most guesses with an awaited outcome. Beyond that, the oldest is forgotten.
const WAITING_MAX: usize = 1 << 14;
/// A guess that was neither touched nor evicted for this long was bad: it took up room all the
/// time.
const WAITING_TIME: Duration = Duration::from_secs(3_600);
/// Most sections to guess ahead.
const DEPTH_MAX: u64 = 16;
/// Share of guesses ahead that must have been good for more to be made.
const GOOD: f64 = 0.4;
/// The same for prefetches by age, which were likely and are also tested as a whole.
const GOOD_AGE: f64 = 0.1;
/// Fewest and most prefetches by age from one weighing to the next. The maximum is arbitrary: the
/// policy's allowance is below it.
const AGE_LEAST: u64 = 4;
const AGE_MAX: u64 = 1 << 20;
const AGE_FIRST: u64 = 1 << 10;
/// A kind that was given up is tried again this many weighings after the previous try, then after twice as
/// many, and so on; so at once, if that try was long ago.
const TRY_AGAIN: u64 = 16;
const PAUSE_MAX: u64 = 1_024;
/// Part of the counts that is left after each weighing.
const KEPT: f64 = 0.9;
/// The same for [`Guesses::good_share`].
const KEPT_LONG: f64 = 0.97;
/// Fewer guesses with a known outcome are ignored.
const KNOWN_LEAST: f64 = 4.0;

#[derive(Clone, Copy, Debug)]
struct Record {
    good: f64,
    bad: f64,
    /// Guesses allowed: sections ahead; for [`Kind::Age`], prefetches until the next weighing.
    depth: u64,
    /// Weighings from one try of a kind that was given up to the next, and when that is.
    pause: u64,
    again_at: u64,
}

/// How good guesses were.
#[derive(Debug)]
pub(super) struct Guesses {
    waiting: Pending,
    /// Touched since the last weighing: good, unless a report follows that they were not prefetched.
    touched: FxHashMap<SectionNo, Kind>,
    records: [Record; 3],
    /// Prefetches of [`Kind::Age`] allowed before the next weighing.
    age_left: u64,
    turns: u64,
    now: Duration,
    /// Of all kinds, over a longer time than in the records.
    good: f64,
    bad: f64,
}

impl Default for Guesses {
    fn default() -> Self {
        let record = |depth| Record {
            good: 0.0,
            bad: 0.0,
            depth,
            pause: TRY_AGAIN,
            again_at: TRY_AGAIN,
        };
        Self {
            waiting: Pending::default(),
            touched: FxHashMap::default(),
            records: [record(AGE_FIRST), record(2), record(2)],
            age_left: AGE_FIRST,
            turns: 0,
            now: Duration::ZERO,
            good: 0.0,
            bad: 0.0,
        }
    }
}

impl Guesses {
    /// How many sections ahead to guess; for [`Kind::Age`], how many more may be prefetched for now.
    pub(super) fn depth(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Age => self.age_left,
            Kind::Order | Kind::Neighbour => self.records[kind as usize].depth,
        }
    }

    pub(super) fn made(&mut self, section: SectionNo, kind: Kind) {
        if kind == Kind::Age {
            self.age_left = self.age_left.saturating_sub(1);
        }
        if self.waiting.len() == WAITING_MAX {
            self.waiting.take_oldest();
        }
        self.waiting.begin(section, self.now, kind);
    }

    /// The device touched it, without a fault.
    pub(super) fn touched(&mut self, section: SectionNo) {
        if let Some(kind) = self.waiting.end(section) {
            self.touched.insert(section, kind);
        }
    }

    /// A device touched it, and it was absent.
    pub(super) fn faulted(&mut self, section: SectionNo) {
        self.waiting.end(section);
    }

    pub(super) fn evicted(&mut self, section: SectionNo) {
        if let Some(kind) = self.waiting.end(section) {
            self.count_bad(kind);
        }
    }

    fn count_bad(&mut self, kind: Kind) {
        self.records[kind as usize].bad += 1.0;
        self.bad += 1.0;
    }

    /// It was not prefetched, or no longer exists. True if a prefetch was requested.
    pub(super) fn came_to_nothing(&mut self, section: SectionNo) -> bool {
        self.waiting.end(section).is_some() || self.touched.remove(&section).is_some()
    }

    /// It is `now`.
    pub(super) fn passed(&mut self, now: Duration) {
        self.now = now;
        while let Some((age, ended)) = self.waiting.oldest(now) {
            if !ended && age < WAITING_TIME {
                break;
            }
            if let Some(kind) = self.waiting.take_oldest() {
                self.count_bad(kind);
            }
        }
    }

    /// Share of good ones among all prefetches; none if few outcomes are known.
    pub(super) fn good_share(&self) -> Option<f64> {
        let known = self.good + self.bad;
        (known >= KNOWN_LEAST).then(|| self.good / known)
    }

    /// Makes more guesses of the kinds that were good.
    pub(super) fn weigh(&mut self) {
        self.turns += 1;
        for kind in self.touched.drain().map(|(_, kind)| kind) {
            self.records[kind as usize].good += 1.0;
            self.good += 1.0;
        }
        for (index, record) in self.records.iter_mut().enumerate() {
            let (first, most, wanted) = if index == Kind::Age as usize {
                (AGE_LEAST, AGE_MAX, GOOD_AGE)
            } else {
                (1, DEPTH_MAX, GOOD)
            };
            let known = record.good + record.bad;
            if known >= KNOWN_LEAST {
                record.depth = if record.good > wanted * known {
                    record.pause = TRY_AGAIN;
                    (record.depth * 2).clamp(first, most)
                } else {
                    record.depth / 2
                };
            }
            // A kind that was given up is tried again now and then.
            if record.depth == 0 && self.turns >= record.again_at {
                record.depth = first;
                record.again_at = self.turns + record.pause;
                record.pause = (record.pause * 2).min(PAUSE_MAX);
            }
            record.good *= KEPT;
            record.bad *= KEPT;
        }
        self.age_left = self.records[Kind::Age as usize].depth;
        self.good *= KEPT_LONG;
        self.bad *= KEPT_LONG;
    }

    pub(super) fn bytes(&self) -> u64 {
        let touched = self.touched.capacity() * (size_of::<(SectionNo, Kind)>() + 1) * 8 / 7;
        self.waiting.bytes() + touched as u64
    }
}
