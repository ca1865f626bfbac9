// SPDX-License-Identifier: Apache-2.0
//! [`Links`]: sections in lists, each with a value of the owner, found by number. For some of a VM's
//! sections, wherever they are; `dense_links.rs` is for all of them.
//!
//! ```text
//!   List { first ─────────────► cell ◄──► cell ◄──► cell ◄───────────── last }
//!                 cells of one vector; freed cells are used again; a hash table finds a section's
//! ```
//! A section is in one of the lists. Every step is O(1).
//!
//! A cell is 16 bytes and the value, without gaps if the value has an alignment of 4 ([`Halves`]). The table
//! takes 5 bytes per place and is at least 7/16 full after it grew, so at most 11.5 bytes per section. The
//! vector grows by an eighth: with a value of 12 bytes at most 43 bytes per section in all, and 38 on
//! average. Memory is not freed before the owner is dropped: owners limit the number of sections they
//! remember.

use crate::cells::{Cells, Halves, List};
use hashbrown::HashTable;
use pagetide_addr::SectionNo;
use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

pub use crate::cells::Slot;

#[derive(Debug)]
struct Named<T> {
    section: Halves,
    value: T,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Links<T> {
    cells: Cells<Named<T>>,
    slots: HashTable<Slot>,
    /// The first free cell; each links to the next.
    free: Option<Slot>,
}

impl<T> Default for Links<T> {
    fn default() -> Self {
        Self {
            cells: Cells::default(),
            slots: HashTable::new(),
            free: None,
        }
    }
}

impl<T> Links<T> {
    /// Memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.cells.bytes() + self.slots.allocation_size() as u64
    }

    /// Loads all of it into the processor's cache.
    pub(crate) fn warm_up(&self) {
        self.cells.warm_up();
        for slot in &self.slots {
            std::hint::black_box(*slot);
        }
    }

    pub(crate) fn find(&self, section: SectionNo) -> Option<Slot> {
        let is_it = |slot: &Slot| self.section(*slot) == section;
        self.slots.find(hash(section), is_it).copied()
    }

    pub(crate) fn section(&self, slot: Slot) -> SectionNo {
        section_of(&self.cells, slot)
    }

    pub(crate) fn value(&self, slot: Slot) -> &T {
        &self.cells.at(slot).value.value
    }

    pub(crate) fn value_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.cells.at_mut(slot).value.value
    }

    pub(crate) fn before(&self, slot: Slot) -> Option<Slot> {
        self.cells.at(slot).before
    }

    pub(crate) fn after(&self, slot: Slot) -> Option<Slot> {
        self.cells.at(slot).after
    }

    /// Puts `section`, which is in no list, at the end of `list`.
    ///
    /// # Panics
    /// If there are too many sections; the owners prevent that.
    pub(crate) fn insert_last(&mut self, list: &mut List, section: SectionNo, value: T) -> Slot {
        debug_assert!(self.find(section).is_none(), "{section:?} is there already");
        let named = Named {
            section: section.0.into(),
            value,
        };
        let slot = if let Some(reused) = self.free {
            let cell = self.cells.at_mut(reused);
            self.free = cell.after;
            cell.value = named;
            reused
        } else {
            self.cells.push(named)
        };
        self.cells.put_last(list, slot);
        let cells = &self.cells;
        let rehash = |slot: &Slot| hash(section_of(cells, *slot));
        self.slots.insert_unique(hash(section), slot, rehash);
        slot
    }

    /// Forgets the section at `slot`, which is in `list`.
    pub(crate) fn remove(&mut self, list: &mut List, slot: Slot) -> SectionNo {
        self.cells.take_out(list, slot);
        let section = self.section(slot);
        if let Ok(entry) = self.slots.find_entry(hash(section), |other| *other == slot) {
            entry.remove();
        }
        self.cells.at_mut(slot).after = self.free;
        self.free = Some(slot);
        section
    }

    /// Puts the section at `slot`, which was taken out of its list, at the end of `list`.
    pub(crate) fn put_last(&mut self, list: &mut List, slot: Slot) {
        self.cells.put_last(list, slot);
    }

    /// Takes the section at `slot` out of `list`, which it is in, to be put into another at once.
    pub(crate) fn take_out(&mut self, list: &mut List, slot: Slot) {
        self.cells.take_out(list, slot);
    }
}

fn section_of<T>(cells: &Cells<Named<T>>, slot: Slot) -> SectionNo {
    SectionNo(cells.at(slot).value.section.into())
}

fn hash(section: SectionNo) -> u64 {
    FxBuildHasher.hash_one(section)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    /// Lists as vectors of sections with their values.
    type Model = [Vec<(u64, u64)>; 3];

    #[test]
    fn lists_equal_vectors_over_random_changes() {
        for seed in 0..20 {
            let mut random = SplitMix64::new(seed);
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
        random: &mut SplitMix64,
        step: u64,
        links: &mut Links<u64>,
        lists: &mut [List; 3],
        model: &mut Model,
    ) {
        // Numbers far apart work as well.
        let section = random.below(40) << 40;
        let to = random.index(3);
        let place = (0..3).find_map(|list| {
            let at = model[list].iter().position(|entry| entry.0 == section)?;
            Some((list, at))
        });
        let slot = links.find(SectionNo(section));
        assert_eq!(slot.is_some(), place.is_some());
        match (slot, place) {
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
        assert_eq!(links.slots.len() as u64, all as u64);
    }

    #[test]
    fn section_with_a_value_of_12_bytes_takes_at_most_43_bytes_in_a_list_of_any_length() {
        let mut links: Links<[u32; 3]> = Links::default();
        let mut list = List::default();
        for section in 0..100_000_u64 {
            // Numbers far apart work as well.
            links.insert_last(&mut list, SectionNo(section << 17), [0; 3]);
            // A few sections pay for the smallest table.
            if section > 1_000 {
                let bytes_per_section = links.bytes().div_ceil(links.slots.len() as u64);
                assert!(bytes_per_section <= 43, "{bytes_per_section} at {section}");
            }
        }
    }
}
