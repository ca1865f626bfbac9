// SPDX-License-Identifier: Apache-2.0
//! Hot and cold sections: Taiji's multi-level sets (4.2.1).
//!
//! One touched page must not make two megabytes hot, nor one quiet scan make them cold. So between
//! *hot* and *cold* there are sets through which a section drifts, one step per scan:
//!
//! ```text
//!   not touched ─────────────────────────────────────────────►
//!   Hot ── Warm ── Active ┊ Inactive ── Cool ── Cold
//!   ◄───────────── touched ▲
//!                          └── touched on this side: straight to Active
//! ```
//! A section on the warm side that is not touched crosses to Inactive; one on the cold side that is
//! touched goes to Active at once, since a mistake there costs faults. Among the cold, the first to
//! arrive is the coldest.
//!
//! # Untouched sections are not visited
//! Most sections are not touched between two scans, and all of those move by one set. So a section
//! stores not its set, but the drift after which it will be cold if it is not touched:
//!
//! ```text
//!   after drift 7:      Cold │ Cool   Inactive  Active   Warm   Hot
//!   cold after drift:    ≤ 7 │   8       9        10      11     12
//!   after drift 8:           │ Cold     Cool   Inactive  Active  Warm
//! ```
//! There is a list for each such drift. A drift appends one list to Cold, and the others only
//! change their names; so the cost of a scan depends on the sections touched, not on all sections.
//!
//! Sections of one list reached their set at the same drift. Their order in the list is only the
//! order in which they arrived.
//!
//! # Which sections are in the sets
//! Memory is added and removed while the VM runs: new sections start Active, and removed ones leave
//! ([`HotColdSets::follow`]). A section whose pages were all evicted is in no set either, since it
//! has nothing to evict; it is remembered, and Active again when it is touched or has pages again
//! ([`HotColdSets::emptied`], [`HotColdSets::filled`]).

use crate::{
    cells::{List, Slot},
    dense_links::DenseLinks,
};
use pagetide_addr::SectionNo;

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

impl Level {
    /// The set a section moves to when a scan has seen it touched.
    #[must_use]
    pub fn touched(self) -> Self {
        match self {
            Self::Cold | Self::Cool | Self::Inactive => Self::Active,
            Self::Active => Self::Warm,
            Self::Warm | Self::Hot => Self::Hot,
        }
    }

    /// Drifts from here to Cold.
    const fn drifts_to_cold(self) -> u32 {
        self as u32
    }
}

/// Whether a scan moves the sections that were not touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drift {
    /// They move one set towards Cold.
    OneSet,
    /// They stay: the previous scan was just now.
    None,
}

/// The record of a section.
#[derive(Clone, Copy, Default, Debug)]
struct SectionHeat {
    /// The drift after which it is cold; [`NEVER`] if it has no pages.
    cold_after: u32,
    /// The last scan that saw it touched, or the last look that found it present. The numbers wrap
    /// around after 2^32 scans, which take years; a section not touched in all that time would be
    /// wrong for one scan.
    mark: u32,
}

const NEVER: u32 = u32::MAX;

/// Lists of sections that are not cold yet. One more than warmer sets: a scan files touched
/// sections by the drift count that follows it, before that drift.
const RIPENING: usize = 6;
const COLD: usize = 0;
const EMPTY: usize = 1;
const RIPENING_FIRST: usize = 2;

/// The sets of one VM. A section takes some 16 bytes (see `dense_links.rs`).
#[derive(Debug, Default)]
pub struct HotColdSets {
    sections: DenseLinks<SectionHeat>,
    lists: [List; RIPENING_FIRST + RIPENING],
    /// At most one per second: the numbers last for 136 years.
    drifts: u32,
    marks: u32,
}

/// The list of the sections that are cold after drift `cold_after`, once there were `drifts`.
fn list_of(cold_after: u32, drifts: u32) -> usize {
    if cold_after == NEVER {
        EMPTY
    } else if cold_after <= drifts {
        COLD
    } else {
        ripening(cold_after)
    }
}

fn ripening(cold_after: u32) -> usize {
    RIPENING_FIRST + cold_after as usize % RIPENING
}

impl HotColdSets {
    /// `section_count` sections, all Active, since nothing is known yet.
    #[must_use]
    pub fn new(section_count: u64) -> Self {
        let mut sets = Self::default();
        sets.follow((0..section_count).map(SectionNo));
        sets
    }

    /// From now on exactly these sections exist. New ones are Active: nothing is known of them yet.
    pub fn follow(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.marks = self.marks.wrapping_add(1);
        let mark = self.marks;
        let mut there: u64 = 0;
        for section in sections {
            if let Some(slot) = self.sections.find(section) {
                let standing = self.sections.value_mut(slot);
                there += u64::from(standing.mark != mark);
                standing.mark = mark;
            } else {
                let cold_after = self.drifts + Level::Active.drifts_to_cold();
                let list = &mut self.lists[ripening(cold_after)];
                let standing = SectionHeat { cold_after, mark };
                self.sections.insert_last(list, section, standing);
                there += 1;
            }
        }
        if there < self.sections.len() {
            self.forget_unmarked();
        }
    }

    fn forget_unmarked(&mut self) {
        for list in &mut self.lists {
            let mut next = list.first();
            while let Some(slot) = next {
                next = self.sections.after(slot);
                if self.sections.value(slot).mark != self.marks {
                    self.sections.remove(list, slot);
                }
            }
        }
    }

    /// Moves all sections by the result of a scan. A section that is not followed stays in no set,
    /// and one named twice counts as touched once.
    pub fn scanned(&mut self, touched: impl IntoIterator<Item = SectionNo>, drift: Drift) {
        self.marks = self.marks.wrapping_add(1);
        let after = self.drifts + u32::from(drift == Drift::OneSet);
        for section in touched {
            let Some(slot) = self.sections.find(section) else {
                continue;
            };
            let standing = self.sections.value_mut(slot);
            if std::mem::replace(&mut standing.mark, self.marks) == self.marks {
                continue;
            }
            let to = self
                .level_at(slot)
                .map_or(Level::Active, |level| level.touched());
            self.put(slot, after + to.drifts_to_cold());
        }
        if drift == Drift::OneSet {
            self.drifts = after;
            let ripe = std::mem::take(&mut self.lists[ripening(after)]);
            self.sections.append(&mut self.lists[COLD], ripe);
        }
    }

    fn put(&mut self, slot: Slot, cold_after: u32) {
        let standing = self.sections.value_mut(slot);
        let before = std::mem::replace(&mut standing.cold_after, cold_after);
        if before != cold_after {
            let from = list_of(before, self.drifts);
            self.sections.take_out(&mut self.lists[from], slot);
            let to = list_of(cold_after, self.drifts);
            self.sections.put_last(&mut self.lists[to], slot);
        }
    }

    /// All pages of `section` are evicted: it leaves the sets until [`Self::filled`], or until a
    /// scan sees it touched.
    pub fn emptied(&mut self, section: SectionNo) {
        if let Some(slot) = self.sections.find(section) {
            self.put(slot, NEVER);
        }
    }

    /// `section` has pages again: Active, if it was empty.
    pub fn filled(&mut self, section: SectionNo) {
        if let Some(slot) = self.sections.find(section)
            && self.level_at(slot).is_none()
        {
            self.put(slot, self.drifts + Level::Active.drifts_to_cold());
        }
    }

    /// Set of a section, if it is in one.
    #[must_use]
    pub fn level(&self, section: SectionNo) -> Option<Level> {
        self.level_at(self.sections.find(section)?)
    }

    pub(crate) fn level_at(&self, slot: Slot) -> Option<Level> {
        let cold_after = self.sections.value(slot).cold_after;
        let drifts = cold_after.saturating_sub(self.drifts);
        LEVELS.get(drifts as usize).copied()
    }

    pub(crate) fn section(&self, slot: Slot) -> SectionNo {
        self.sections.section(slot)
    }

    /// Takes the section at `slot` out of the sets: see [`Self::emptied`].
    pub(crate) fn emptied_at(&mut self, slot: Slot) {
        self.put(slot, NEVER);
    }

    /// The coldest section.
    pub(crate) fn coldest(&self) -> Option<Slot> {
        LEVELS.iter().find_map(|level| self.list_at(*level).first())
    }

    /// The coldest section after `slot`.
    pub(crate) fn next_coldest(&self, slot: Slot) -> Option<Slot> {
        self.sections.after(slot).or_else(|| {
            let level = self.level_at(slot)?;
            LEVELS
                .iter()
                .filter(|warmer| **warmer > level)
                .find_map(|level| self.list_at(*level).first())
        })
    }

    /// All sections that are in a set, coldest first.
    pub fn coldest_first(&self) -> impl Iterator<Item = SectionNo> + '_ {
        std::iter::successors(self.coldest(), |slot| self.next_coldest(*slot))
            .map(|slot| self.section(slot))
    }

    /// The sections that were emptied and not filled, the first emptied first.
    pub fn empty_sections(&self) -> impl Iterator<Item = SectionNo> + '_ {
        std::iter::successors(self.lists[EMPTY].first(), |slot| self.sections.after(*slot))
            .map(|slot| self.section(slot))
    }

    /// Number of sections in each set, coldest first.
    #[must_use]
    pub fn counts(&self) -> [(Level, u64); 6] {
        LEVELS.map(|level| (level, self.list_at(level).len()))
    }

    fn list_at(&self, level: Level) -> &List {
        &self.lists[list_of(self.drifts + level.drifts_to_cold(), self.drifts)]
    }

    /// Loads the data into the processor's cache, for a caller that has many VMs and turns to this one
    /// now.
    pub fn warm_up(&self) {
        self.sections.warm_up();
    }

    /// Memory the sets take, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        size_of::<Self>() as u64 + self.sections.bytes()
    }
}
