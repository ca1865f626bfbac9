// SPDX-License-Identifier: Apache-2.0
//! [`Recency`]: sections in the order of their last touch, each with a state of the policy's own.
//!
//! ```text
//!   oldest ──newer──►  ·  ──newer──►  ·  ──newer──► newest
//!          ◄──older──     ◄──older──     ◄──older──
//!             cells of one vector; freed cells are used again; a hash table finds a section's cell
//! ```
//! Touch, removal and a step along the order are O(1).
//!
//! A cell is 24 bytes and the state; with a state of up to 8 bytes, 32. The table takes 5 bytes a
//! place and is at least 7/16 full after it grew, so at most 11.5 bytes a section. The vector grows
//! by an eighth, not by doubling, so that it never wastes more than that: 48 bytes a section in
//! all, at worst. Memory is not given back before the device leaves; a policy has a limit on its
//! sections, and so this has.

use hashbrown::HashTable;
use pagetide_addr::SectionNo;
use rustc_hash::FxBuildHasher;
use std::{hash::BuildHasher, time::Duration};

/// Most sections one list can hold, far more than one VM has.
pub const CAPACITY_MAX: usize = (u32::MAX - 1) as usize;

/// The cell after the last.
const NOWHERE: u32 = u32::MAX;

/// Place of a section in a list. Good until the section is removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(u32);

impl Slot {
    fn of(cell: u32) -> Option<Self> {
        (cell != NOWHERE).then_some(Self(cell))
    }

    const fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug)]
struct Cell<S> {
    section: SectionNo,
    touched_ns: u64,
    newer: u32,
    /// Of a free cell: the next free one.
    older: u32,
    state: S,
}

/// See the module.
#[derive(Debug)]
pub struct Recency<S> {
    cells: Vec<Cell<S>>,
    slots: HashTable<u32>,
    newest: u32,
    oldest: u32,
    free: u32,
}

impl<S> Default for Recency<S> {
    fn default() -> Self {
        Self {
            cells: Vec::new(),
            slots: HashTable::new(),
            newest: NOWHERE,
            oldest: NOWHERE,
            free: NOWHERE,
        }
    }
}

impl<S> Recency<S> {
    /// Sections in the list.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    /// True if no section is in the list.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Memory it takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let cells = self.cells.capacity() * size_of::<Cell<S>>();
        (cells + self.slots.allocation_size()) as u64
    }

    /// Where `section` is, if it is in the list.
    #[must_use]
    pub fn find(&self, section: SectionNo) -> Option<Slot> {
        let is_it = |cell: &u32| self.cells[*cell as usize].section == section;
        self.slots.find(hash(section), is_it).copied().map(Slot)
    }

    /// The section at `slot`.
    #[must_use]
    pub fn section(&self, slot: Slot) -> SectionNo {
        self.cells[slot.index()].section
    }

    /// When the section at `slot` was touched last.
    #[must_use]
    pub fn touched_at(&self, slot: Slot) -> Duration {
        Duration::from_nanos(self.cells[slot.index()].touched_ns)
    }

    /// State of the section at `slot`.
    #[must_use]
    pub fn state(&self, slot: Slot) -> &S {
        &self.cells[slot.index()].state
    }

    /// State of the section at `slot`, to be changed.
    #[must_use]
    pub fn state_mut(&mut self, slot: Slot) -> &mut S {
        &mut self.cells[slot.index()].state
    }

    /// The section touched last.
    #[must_use]
    pub fn newest(&self) -> Option<Slot> {
        Slot::of(self.newest)
    }

    /// The section whose last touch is longest ago.
    #[must_use]
    pub fn oldest(&self) -> Option<Slot> {
        Slot::of(self.oldest)
    }

    /// The section touched next after the one at `slot`.
    #[must_use]
    pub fn newer(&self, slot: Slot) -> Option<Slot> {
        Slot::of(self.cells[slot.index()].newer)
    }

    /// The section touched last before the one at `slot`.
    #[must_use]
    pub fn older(&self, slot: Slot) -> Option<Slot> {
        Slot::of(self.cells[slot.index()].older)
    }

    /// All sections, that of the last touch first.
    pub fn newest_first(&self) -> impl Iterator<Item = Slot> + '_ {
        std::iter::successors(self.newest(), |slot| self.older(*slot))
    }

    /// The section at `slot` was touched at `at`: it is the newest now.
    pub fn touch(&mut self, slot: Slot, at: Duration) {
        self.cells[slot.index()].touched_ns = nanos(at);
        if self.newest != slot.0 {
            self.unlink(slot.0);
            self.link_newest(slot.0);
        }
    }

    /// `section`, which is not in the list, was touched at `at`: it is the newest now.
    ///
    /// # Panics
    /// If the list is full ([`CAPACITY_MAX`]): policies have far lower limits.
    pub fn insert(&mut self, section: SectionNo, at: Duration, state: S) -> Slot {
        debug_assert!(self.find(section).is_none(), "{section:?} is there already");
        let fresh = Cell {
            section,
            touched_ns: nanos(at),
            newer: NOWHERE,
            older: NOWHERE,
            state,
        };
        let cell = self.free;
        let cell = if let Some(reused) = Slot::of(cell) {
            self.free = self.cells[reused.index()].older;
            self.cells[reused.index()] = fresh;
            cell
        } else {
            self.push(fresh)
        };
        self.link_newest(cell);
        let cells = &self.cells;
        let rehash = |cell: &u32| hash(cells[*cell as usize].section);
        self.slots.insert_unique(hash(section), cell, rehash);
        Slot(cell)
    }

    fn push(&mut self, fresh: Cell<S>) -> u32 {
        let len = self.cells.len();
        assert!(len < CAPACITY_MAX, "a list of sections is full");
        if len == self.cells.capacity() {
            self.cells.reserve_exact(len / 8 + 8);
        }
        self.cells.push(fresh);
        u32::try_from(len).expect("below the capacity")
    }

    /// Takes the section at `slot` out.
    pub fn remove(&mut self, slot: Slot) -> SectionNo {
        self.unlink(slot.0);
        let section = self.section(slot);
        let is_it = |cell: &u32| *cell == slot.0;
        if let Ok(entry) = self.slots.find_entry(hash(section), is_it) {
            entry.remove();
        }
        self.cells[slot.index()].older = self.free;
        self.free = slot.0;
        section
    }

    fn link_newest(&mut self, cell: u32) {
        let before = std::mem::replace(&mut self.newest, cell);
        let linked = &mut self.cells[cell as usize];
        (linked.newer, linked.older) = (NOWHERE, before);
        match Slot::of(before) {
            Some(before) => self.cells[before.index()].newer = cell,
            None => self.oldest = cell,
        }
    }

    fn unlink(&mut self, cell: u32) {
        let Cell { newer, older, .. } = self.cells[cell as usize];
        match Slot::of(newer) {
            Some(newer) => self.cells[newer.index()].older = older,
            None => self.newest = older,
        }
        match Slot::of(older) {
            Some(older) => self.cells[older.index()].newer = newer,
            None => self.oldest = newer,
        }
    }
}

fn hash(section: SectionNo) -> u64 {
    FxBuildHasher.hash_one(section)
}

/// A time as policies keep it. It overflows after 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn list_equals_a_vector_kept_in_order_over_random_changes() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let mut list = Recency::default();
            // Newest first.
            let mut model: Vec<(u64, u64)> = Vec::new();
            for step in 0..3_000 {
                let section = random.below(60);
                let known = model.iter().position(|(other, _)| *other == section);
                let slot = list.find(SectionNo(section));
                assert_eq!(slot.is_some(), known.is_some());
                match (slot, known) {
                    (Some(slot), Some(place)) if random.below(3) == 0 => {
                        assert_eq!(list.remove(slot), SectionNo(section));
                        model.remove(place);
                    }
                    (Some(slot), Some(place)) => {
                        list.touch(slot, Duration::from_nanos(step));
                        model.remove(place);
                        model.insert(0, (section, step));
                    }
                    _ => {
                        list.insert(SectionNo(section), Duration::from_nanos(step), ());
                        model.insert(0, (section, step));
                    }
                }
                assert_same(&list, &model);
            }
        }
    }

    fn assert_same(list: &Recency<()>, model: &[(u64, u64)]) {
        let forth: Vec<(u64, u64)> = list
            .newest_first()
            .map(|slot| {
                let touched = u64::try_from(list.touched_at(slot).as_nanos()).unwrap();
                (list.section(slot).0, touched)
            })
            .collect();
        assert_eq!(forth, model);
        let back: Vec<u64> = std::iter::successors(list.oldest(), |slot| list.newer(*slot))
            .map(|slot| list.section(slot).0)
            .collect();
        let backwards: Vec<u64> = model.iter().rev().map(|(section, _)| *section).collect();
        assert_eq!(back, backwards);
        assert_eq!(list.len(), model.len() as u64);
    }

    #[test]
    fn section_takes_at_most_48_bytes_at_any_length() {
        let mut list: Recency<u64> = Recency::default();
        for section in 0..100_000_u64 {
            // Numbers far apart are as good as others.
            list.insert(SectionNo(section << 17), Duration::ZERO, 0);
            // A list of few sections pays for the smallest table there is.
            if section > 1_000 {
                let bytes_per_section = list.bytes().div_ceil(list.len());
                assert!(bytes_per_section <= 48, "{bytes_per_section} at {section}");
            }
        }
    }
}
