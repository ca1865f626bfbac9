// SPDX-License-Identifier: Apache-2.0
//! Hot and cold sections: Taiji's multi-level sets (4.2.1, Fig 7).
//!
//! One touched page must not make two megabytes hot, nor one quiet scan make them cold. So between
//! *hot* and *cold* there are sets through which a section moves one step at a time:
//!
//! ```text
//!   scan found it touched: one set warmer            (again at the next scan, if touched again)
//!   ──────────────────────────────────────────────►
//!   Cold ── Cool ── Inactive ┊ Active ── Warm ── Hot
//!   ◄──────────────────────────────────────────────
//!   not touched for the time of its set: one set colder          (see `set_times.rs`)
//! ```
//! New sections and those that came back by a fault are Active: in between, on the warm side.
//! A section that was swapped in ahead of any touch is Cool until it is touched.
//!
//! # Order of arrival
//! Within a set the first to arrive is the coldest. A touch of a section that is Hot already counts as
//! another arrival. So each set is a list ordered by the time of arrival, and the sections that have
//! stayed for the time of their set are at its front: a scan looks at no others. Each step down was
//! preceded by a touch or a fault, so the cost of a scan depends on what was touched, not on all sections.
//!
//! # Which sections are in the sets
//! Memory is added and removed while the VM runs: new sections start Active, and removed ones leave
//! ([`HotColdSets::follow`]). A section whose pages were all evicted is in no set either, since it
//! has nothing to evict; it is remembered, and Active again when it is touched or has pages again
//! ([`HotColdSets::emptied`], [`HotColdSets::filled`]).

use crate::{
    cells::{List, Slot},
    dense_links::DenseLinks,
    set_times::SetTimes,
};
use pagetide_addr::SectionNo;
use std::time::Duration;

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
    /// The set that is one step warmer.
    #[must_use]
    pub const fn warmer(self) -> Self {
        match self {
            Self::Cold => Self::Cool,
            Self::Cool => Self::Inactive,
            Self::Inactive => Self::Active,
            Self::Active => Self::Warm,
            Self::Warm | Self::Hot => Self::Hot,
        }
    }

    /// The set that is one step colder.
    #[must_use]
    pub const fn colder(self) -> Self {
        match self {
            Self::Cold | Self::Cool => Self::Cold,
            Self::Inactive => Self::Cool,
            Self::Active => Self::Inactive,
            Self::Warm => Self::Active,
            Self::Hot => Self::Warm,
        }
    }

    /// True of the sets from Active on.
    #[must_use]
    pub fn is_warm_side(self) -> bool {
        self >= Self::Active
    }
}

/// Time on the sets' clock, in tenths of a second. It wraps around after 13 years, and only differences
/// are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Tick(u32);

impl Tick {
    const MILLIS: u128 = 100;

    #[expect(
        clippy::cast_possible_truncation,
        reason = "it wraps around, see the type"
    )]
    const fn of(time: Duration) -> Self {
        Self((time.as_millis() / Self::MILLIS) as u32)
    }

    const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

/// The record of a section.
#[derive(Clone, Copy, Default, Debug)]
struct SectionHeat {
    /// When it arrived in its list.
    since: Tick,
    /// Its list, whether it was used since it was last empty or added (of an empty one: whether it was in use
    /// when it was emptied), and a mark: the last scan that saw it touched, or the last look that found it
    /// there. The marks wrap around after 2^28 scans, which take years; a section that was not touched in all
    /// that time would be wrong for one scan.
    packed: u32,
}

/// Number of a list: that of its set, or [`EMPTY`].
type ListNo = u8;

const LIST_BITS: u32 = 0b0111;
const USED_BIT: u32 = 0b1000;
const MARK_SHIFT: u32 = 4;
const MARK_MAX: u32 = u32::MAX >> MARK_SHIFT;
/// List of the sections without pages, after those of the sets.
const EMPTY: ListNo = 6;
const _: () = assert!(EMPTY as usize == LEVELS.len() && EMPTY as u32 <= LIST_BITS);

impl SectionHeat {
    fn list(self) -> usize {
        (self.packed & LIST_BITS) as usize
    }

    fn level(self) -> Option<Level> {
        LEVELS.get(self.list()).copied()
    }

    fn put(&mut self, list: ListNo, since: Tick) {
        self.packed = self.packed & !LIST_BITS | u32::from(list);
        self.since = since;
    }

    /// A section without pages has the bit if it was in use when it lost them.
    fn is_in_use(self) -> bool {
        self.packed & USED_BIT != 0 && self.level().is_none_or(Level::is_warm_side)
    }

    fn set_used(&mut self, used: Used) {
        self.packed = match used {
            Used::Yes => self.packed | USED_BIT,
            Used::NotYet => self.packed & !USED_BIT,
        };
    }

    fn mark(self) -> u32 {
        self.packed >> MARK_SHIFT
    }

    fn set_mark(&mut self, mark: u32) {
        self.packed = self.packed & (LIST_BITS | USED_BIT) | mark << MARK_SHIFT;
    }
}

/// Whether anything used a section since it was added or emptied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Used {
    Yes,
    NotYet,
}

/// The sets of one VM. A section takes some 16 bytes (see `dense_links.rs`).
#[derive(Debug, Default)]
pub struct HotColdSets {
    sections: DenseLinks<SectionHeat>,
    lists: [List; EMPTY as usize + 1],
    times: SetTimes,
    /// What it was last told.
    now: Duration,
    marks: u32,
}

impl HotColdSets {
    /// `section_count` sections, all Active, since nothing is known yet.
    #[must_use]
    pub fn new(section_count: u64) -> Self {
        let mut sets = Self::default();
        sets.follow((0..section_count).map(SectionNo));
        sets
    }

    /// From now on these times hold, also for the sections that are in a set already.
    pub fn set_times(&mut self, times: SetTimes) {
        self.times = times;
    }

    /// The times that hold.
    #[must_use]
    pub fn times(&self) -> SetTimes {
        self.times
    }

    /// It is `now`. Time never runs backwards here.
    pub fn passed(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// The time that it was told last.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    fn tick(&self) -> Tick {
        Tick::of(self.now)
    }

    fn next_mark(&mut self) -> u32 {
        self.marks = match self.marks {
            MARK_MAX => 0,
            mark => mark + 1,
        };
        self.marks
    }

    /// From now on exactly these sections exist. New ones are Active: nothing is known of them yet.
    pub fn follow(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        let (mark, since) = (self.next_mark(), self.tick());
        let mut there: u64 = 0;
        for section in sections {
            if let Some(slot) = self.sections.find(section) {
                let standing = self.sections.value_mut(slot);
                there += u64::from(standing.mark() != mark);
                standing.set_mark(mark);
            } else {
                let list = Level::Active as ListNo;
                let mut standing = SectionHeat::default();
                standing.put(list, since);
                standing.set_mark(mark);
                let list = &mut self.lists[usize::from(list)];
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
                if self.sections.value(slot).mark() != self.marks {
                    self.sections.remove(list, slot);
                }
            }
        }
    }

    /// Moves all sections by the result of a scan that ended `now`: those that were touched one set warmer,
    /// and those that were left alone for the time of their set one set colder. A section that is not
    /// followed stays in no set, and one named twice counts as touched once.
    pub fn scanned(&mut self, now: Duration, touched: impl IntoIterator<Item = SectionNo>) {
        self.passed(now);
        self.used(touched);
        self.age();
    }

    /// These sections were found in use between two scans: they move one set warmer.
    pub fn used(&mut self, touched: impl IntoIterator<Item = SectionNo>) {
        let mark = self.next_mark();
        for section in touched {
            let Some(slot) = self.sections.find(section) else {
                continue;
            };
            let standing = self.sections.value_mut(slot);
            if standing.mark() == mark {
                continue;
            }
            standing.set_mark(mark);
            standing.set_used(Used::Yes);
            let to = standing.level().map_or(Level::Active, Level::warmer);
            self.put(slot, to as ListNo);
        }
    }

    /// Moves what was left alone one set colder.
    fn age(&mut self) {
        let now = self.tick();
        // The coldest set first, so that nothing moves twice.
        let times = &self.times;
        for (level, age) in [
            (Level::Cool, times.cool),
            (Level::Inactive, times.inactive),
            (Level::Active, times.active),
            (Level::Warm, times.warm),
            (Level::Hot, times.hot),
        ] {
            let age = Tick::of(age).0;
            while let Some(slot) = self.lists[level as usize].first() {
                if now.since(self.sections.value(slot).since) < age {
                    break;
                }
                self.put(slot, level.colder() as ListNo);
            }
        }
    }

    /// The section at `slot` arrives in `list` now, also if it is in it.
    fn put(&mut self, slot: Slot, list: ListNo) {
        let now = self.tick();
        let standing = self.sections.value_mut(slot);
        let before = standing.list();
        standing.put(list, now);
        self.sections.take_out(&mut self.lists[before], slot);
        self.sections
            .put_last(&mut self.lists[usize::from(list)], slot);
    }

    /// All pages of `section` are evicted: it leaves the sets until [`Self::filled`], or until a
    /// scan sees it touched.
    pub fn emptied(&mut self, section: SectionNo) {
        if let Some(slot) = self.sections.find(section) {
            self.emptied_at(slot);
        }
    }

    /// `section` has pages again: Active, if it was empty.
    pub fn filled(&mut self, section: SectionNo) {
        self.refill(section, Level::Active, Used::Yes);
    }

    /// `section` has pages again that nobody has asked for yet: Cool, if it was empty. The next scan may find it
    /// touched only because its pages were mapped just now; a second one shows that it is in use.
    pub fn filled_ahead(&mut self, section: SectionNo) {
        self.refill(section, Level::Cool, Used::NotYet);
    }

    fn refill(&mut self, section: SectionNo, to: Level, used: Used) {
        if let Some(slot) = self.sections.find(section)
            && self.level_at(slot).is_none()
        {
            self.sections.value_mut(slot).set_used(used);
            self.put(slot, to as ListNo);
        }
    }

    /// True if `section` is on the warm side because it was used, and not because nothing is known of it; or
    /// was so when it was emptied.
    #[must_use]
    pub fn is_in_use(&self, section: SectionNo) -> bool {
        let slot = self.sections.find(section);
        slot.is_some_and(|slot| self.sections.value(slot).is_in_use())
    }

    /// Set of a section, if it is in one.
    #[must_use]
    pub fn level(&self, section: SectionNo) -> Option<Level> {
        self.level_at(self.sections.find(section)?)
    }

    pub(crate) fn level_at(&self, slot: Slot) -> Option<Level> {
        self.sections.value(slot).level()
    }

    pub(crate) fn section(&self, slot: Slot) -> SectionNo {
        self.sections.section(slot)
    }

    /// Takes the section at `slot` out of the sets: see [`Self::emptied`].
    pub(crate) fn emptied_at(&mut self, slot: Slot) {
        if self.level_at(slot).is_some() {
            let standing = self.sections.value_mut(slot);
            standing.set_used(match standing.is_in_use() {
                true => Used::Yes,
                false => Used::NotYet,
            });
            self.put(slot, EMPTY);
        }
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
        std::iter::successors(self.lists[usize::from(EMPTY)].first(), |slot| {
            self.sections.after(*slot)
        })
        .map(|slot| self.section(slot))
    }

    /// Number of sections in each set, coldest first.
    #[must_use]
    pub fn counts(&self) -> [(Level, u64); 6] {
        LEVELS.map(|level| (level, self.list_at(level).len()))
    }

    fn list_at(&self, level: Level) -> &List {
        &self.lists[level as usize]
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
