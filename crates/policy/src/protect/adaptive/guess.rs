// SPDX-License-Identifier: Apache-2.0
//! Guesses about absent sections: which are absent, which were brought back on a guess, and
//! whether that was any good.

use pagetide_addr::SectionNo;
use rustc_hash::FxHashMap;

/// Why a section was brought back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Its age makes a touch likely.
    Age,
    /// It followed last time.
    Order,
    /// It lies behind a section that was touched.
    Neighbour,
}

/// Sections that were evicted and not heard of since: a bit each.
#[derive(Debug, Default)]
pub(super) struct Absent(FxHashMap<u64, u64>);

impl Absent {
    fn place(section: SectionNo) -> (u64, u64) {
        (section.0 / 64, 1 << (section.0 % 64))
    }

    pub(super) fn contains(&self, section: SectionNo) -> bool {
        let (word, bit) = Self::place(section);
        self.0.get(&word).is_some_and(|bits| bits & bit != 0)
    }

    pub(super) fn insert(&mut self, section: SectionNo) {
        let (word, bit) = Self::place(section);
        *self.0.entry(word).or_insert(0) |= bit;
    }

    pub(super) fn remove(&mut self, section: SectionNo) {
        let (word, bit) = Self::place(section);
        if let Some(bits) = self.0.get_mut(&word) {
            *bits &= !bit;
            if *bits == 0 {
                self.0.remove(&word);
            }
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.0.capacity() * 17) as u64
    }
}

/// Most guesses whose end is waited for.
const WAITING_MAX: usize = 1 << 14;
/// Sections that are guessed ahead at most.
const DEPTH_MAX: u64 = 16;
/// Share of guesses that must have been good for more to be made.
const GOOD: f64 = 0.4;

#[derive(Clone, Copy, Debug)]
struct Record {
    good: f64,
    bad: f64,
    depth: u64,
}

/// How good guesses were.
#[derive(Debug)]
pub(super) struct Guesses {
    waiting: FxHashMap<SectionNo, Kind>,
    records: [Record; 3],
    turns: u64,
}

impl Default for Guesses {
    fn default() -> Self {
        let record = Record {
            good: 0.0,
            bad: 0.0,
            depth: 2,
        };
        Self {
            waiting: FxHashMap::default(),
            records: [record; 3],
            turns: 0,
        }
    }
}

impl Guesses {
    /// How many sections ahead to guess.
    pub(super) fn depth(&self, kind: Kind) -> u64 {
        self.records[kind as usize].depth
    }

    pub(super) fn made(&mut self, section: SectionNo, kind: Kind) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.insert(section, kind);
        }
    }

    pub(super) fn touched(&mut self, section: SectionNo) {
        if self.waiting.is_empty() {
            return;
        }
        if let Some(kind) = self.waiting.remove(&section) {
            self.records[kind as usize].good += 1.0;
        }
    }

    pub(super) fn evicted(&mut self, section: SectionNo) {
        if let Some(kind) = self.waiting.remove(&section) {
            self.records[kind as usize].bad += 1.0;
        }
    }

    /// Makes more guesses of the kinds that were good.
    pub(super) fn weigh(&mut self) {
        self.turns += 1;
        for record in &mut self.records {
            let known = record.good + record.bad;
            if known >= 4.0 {
                record.depth = if record.good > GOOD * known {
                    (record.depth * 2).clamp(1, DEPTH_MAX)
                } else {
                    record.depth / 2
                };
            }
            // One that was given up is tried again now and then.
            if record.depth == 0 && self.turns.is_multiple_of(16) {
                record.depth = 1;
            }
            record.good *= 0.9;
            record.bad *= 0.9;
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.waiting.capacity() * 17) as u64
    }
}
