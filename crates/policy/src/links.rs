// SPDX-License-Identifier: Apache-2.0
//! [`Links`]: sections in lists, with a value of the owner's for each, found by number.
//!
//! ```text
//!   List { first ─────────────► cell ◄──► cell ◄──► cell ◄───────────── last }
//!                 cells of one vector; freed cells are used again; a hash table finds a section's
//! ```
//! One set of cells serves any number of lists; a section is in one of them. Every step is O(1),
//! the joining of two lists too.
//!
//! A cell is 16 bytes and the value; with a value of up to 16 bytes, 32. The table takes 5 bytes a
//! place and is at least 7/16 full after it grew, so at most 11.5 bytes a section. The vector grows
//! by an eighth, not by doubling, so that it never wastes more than that: 48 bytes a section in
//! all, at worst. Memory is not given back before the owner goes: its owners limit how many
//! sections they remember.

use hashbrown::HashTable;
use pagetide_addr::SectionNo;
use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

/// Most sections that can be remembered, 8 PiB of RAM: far more than one VM has.
const SECTIONS_MAX: usize = (u32::MAX - 1) as usize;

/// The cell after the last.
const NOWHERE: u32 = u32::MAX;

/// Place of a section's cell. Good until the section is removed.
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

/// Both ends of a list; the links are in the cells.
#[derive(Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    len: u64,
}

impl Default for List {
    fn default() -> Self {
        Self {
            first: NOWHERE,
            last: NOWHERE,
            len: 0,
        }
    }
}

impl List {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn first(&self) -> Option<Slot> {
        Slot::of(self.first)
    }

    pub(crate) fn last(&self) -> Option<Slot> {
        Slot::of(self.last)
    }
}

#[derive(Debug)]
struct Cell<T> {
    section: SectionNo,
    before: u32,
    /// Of a free cell: the next free one.
    after: u32,
    value: T,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Links<T> {
    cells: Vec<Cell<T>>,
    slots: HashTable<u32>,
    free: u32,
}

impl<T> Default for Links<T> {
    fn default() -> Self {
        Self {
            cells: Vec::new(),
            slots: HashTable::new(),
            free: NOWHERE,
        }
    }
}

impl<T> Links<T> {
    /// Sections in all lists.
    pub(crate) fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let cells = self.cells.capacity() * size_of::<Cell<T>>();
        (cells + self.slots.allocation_size()) as u64
    }

    pub(crate) fn find(&self, section: SectionNo) -> Option<Slot> {
        let is_it = |cell: &u32| self.cells[*cell as usize].section == section;
        self.slots.find(hash(section), is_it).copied().map(Slot)
    }

    pub(crate) fn section(&self, slot: Slot) -> SectionNo {
        self.cells[slot.index()].section
    }

    pub(crate) fn value(&self, slot: Slot) -> &T {
        &self.cells[slot.index()].value
    }

    pub(crate) fn value_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.cells[slot.index()].value
    }

    pub(crate) fn before(&self, slot: Slot) -> Option<Slot> {
        Slot::of(self.cells[slot.index()].before)
    }

    pub(crate) fn after(&self, slot: Slot) -> Option<Slot> {
        Slot::of(self.cells[slot.index()].after)
    }

    /// Puts `section`, which is in no list, at the end of `list`.
    ///
    /// # Panics
    /// If there are too many sections, which owners see to that there are not.
    pub(crate) fn insert_last(&mut self, list: &mut List, section: SectionNo, value: T) -> Slot {
        debug_assert!(self.find(section).is_none(), "{section:?} is there already");
        let fresh = Cell {
            section,
            before: NOWHERE,
            after: NOWHERE,
            value,
        };
        let slot = if let Some(reused) = Slot::of(self.free) {
            self.free = self.cells[reused.index()].after;
            self.cells[reused.index()] = fresh;
            reused
        } else {
            self.push(fresh)
        };
        self.put_last(list, slot);
        let cells = &self.cells;
        let rehash = |cell: &u32| hash(cells[*cell as usize].section);
        self.slots.insert_unique(hash(section), slot.0, rehash);
        slot
    }

    fn push(&mut self, fresh: Cell<T>) -> Slot {
        let len = self.cells.len();
        assert!(len < SECTIONS_MAX, "too many sections to remember");
        if len == self.cells.capacity() {
            self.cells.reserve_exact(len / 8 + 8);
        }
        self.cells.push(fresh);
        Slot(u32::try_from(len).expect("below the limit"))
    }

    /// Forgets the section at `slot`, which is in `list`.
    pub(crate) fn remove(&mut self, list: &mut List, slot: Slot) -> SectionNo {
        self.take_out(list, slot);
        let section = self.section(slot);
        let is_it = |cell: &u32| *cell == slot.0;
        if let Ok(entry) = self.slots.find_entry(hash(section), is_it) {
            entry.remove();
        }
        self.cells[slot.index()].after = self.free;
        self.free = slot.0;
        section
    }

    /// Puts the section at `slot`, which was taken out of its list, at the end of `list`.
    pub(crate) fn put_last(&mut self, list: &mut List, slot: Slot) {
        let before = std::mem::replace(&mut list.last, slot.0);
        let cell = &mut self.cells[slot.index()];
        (cell.before, cell.after) = (before, NOWHERE);
        match Slot::of(before) {
            Some(before) => self.cells[before.index()].after = slot.0,
            None => list.first = slot.0,
        }
        list.len += 1;
    }

    /// Takes the section at `slot` out of `list`, which it is in, to be put into another at once.
    pub(crate) fn take_out(&mut self, list: &mut List, slot: Slot) {
        let Cell { before, after, .. } = self.cells[slot.index()];
        match Slot::of(before) {
            Some(before) => self.cells[before.index()].after = after,
            None => list.first = after,
        }
        match Slot::of(after) {
            Some(after) => self.cells[after.index()].before = before,
            None => list.last = before,
        }
        list.len -= 1;
    }

    /// Puts all of `more` at the end of `list`.
    pub(crate) fn append(&mut self, list: &mut List, more: List) {
        let (Some(last), Some(first)) = (list.last(), more.first()) else {
            if list.len == 0 {
                *list = more;
            }
            return;
        };
        self.cells[last.index()].after = first.0;
        self.cells[first.index()].before = last.0;
        list.last = more.last;
        list.len += more.len;
    }
}

fn hash(section: SectionNo) -> u64 {
    FxBuildHasher.hash_one(section)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Lists as vectors of sections with their values.
    type Model = [Vec<(u64, u64)>; 3];

    #[test]
    fn lists_equal_vectors_over_random_changes() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let mut links = Links::default();
            let mut lists: [List; 3] = Default::default();
            let mut model = Model::default();
            for step in 0..2_000 {
                change_one(&mut random, step, &mut links, &mut lists, &mut model);
                assert_same(&links, &lists, &model);
            }
        }
    }

    fn change_one(
        random: &mut Random,
        step: u64,
        links: &mut Links<u64>,
        lists: &mut [List; 3],
        model: &mut Model,
    ) {
        let section = random.below(40);
        let [from, to] = [random.index(3), random.index(3)];
        let place = (0..3).find_map(|list| {
            let at = model[list].iter().position(|entry| entry.0 == section)?;
            Some((list, at))
        });
        let slot = links.find(SectionNo(section));
        assert_eq!(slot.is_some(), place.is_some());
        match (slot, place) {
            _ if from != to && random.below(12) == 0 => {
                let more = std::mem::take(&mut lists[from]);
                links.append(&mut lists[to], more);
                let more = std::mem::take(&mut model[from]);
                model[to].extend(more);
            }
            (Some(slot), Some((list, at))) if random.below(2) == 0 => {
                assert_eq!(links.remove(&mut lists[list], slot), SectionNo(section));
                model[list].remove(at);
            }
            (Some(slot), Some((list, at))) => {
                links.take_out(&mut lists[list], slot);
                links.put_last(&mut lists[to], slot);
                *links.value_mut(slot) = step;
                model[list].remove(at);
                model[to].push((section, step));
            }
            _ => {
                links.insert_last(&mut lists[to], SectionNo(section), step);
                model[to].push((section, step));
            }
        }
    }

    fn assert_same(links: &Links<u64>, lists: &[List; 3], model: &Model) {
        for (list, model) in lists.iter().zip(model) {
            let entry = |slot: Slot| (links.section(slot).0, *links.value(slot));
            let forth = std::iter::successors(list.first(), |slot| links.after(*slot));
            let back = std::iter::successors(list.last(), |slot| links.before(*slot));
            assert!(forth.map(entry).eq(model.iter().copied()));
            assert!(back.map(entry).eq(model.iter().rev().copied()));
            assert_eq!(list.len(), model.len() as u64);
        }
        let all: usize = model.iter().map(Vec::len).sum();
        assert_eq!(links.len(), all as u64);
    }

    #[test]
    fn section_takes_at_most_48_bytes_in_a_list_of_any_length() {
        let mut links: Links<[u64; 2]> = Links::default();
        let mut list = List::default();
        for section in 0..100_000_u64 {
            // Numbers far apart are as good as others.
            links.insert_last(&mut list, SectionNo(section << 17), [0; 2]);
            // A few sections pay for the smallest table there is.
            if section > 1_000 {
                let bytes_per_section = links.bytes().div_ceil(links.len());
                assert!(bytes_per_section <= 48, "{bytes_per_section} at {section}");
            }
        }
    }
}
