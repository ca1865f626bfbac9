// SPDX-License-Identifier: Apache-2.0
//! [`DenseLinks`]: sections in lists, each with a value of the owner. For all of a VM's sections;
//! `links.rs` is for some of them.
//!
//! RAM consists of long pieces, so the cells of 64 consecutive sections are created at once, and a section's
//! number gives its cell (`chunks.rs`). A cell is 8 bytes and the value; nothing else is needed to find it or
//! its section.
//!
//! A section is in one of the lists, and every step is O(1). The memory of 64 sections is reused for
//! others once none of them exists any more.

use crate::{
    cells::{Cell, Cells, List, Slot},
    chunks::{CHUNK, Chunks, split},
};
use pagetide_addr::SectionNo;

/// See the module.
#[derive(Debug)]
pub(crate) struct DenseLinks<T> {
    chunks: Chunks,
    /// [`CHUNK`] for each place of a chunk. The cell of a missing section links to itself.
    cells: Cells<T>,
    /// Number of existing sections, by place of the chunk.
    there: Vec<u8>,
    len: u64,
}

impl<T> Default for DenseLinks<T> {
    fn default() -> Self {
        Self {
            chunks: Chunks::default(),
            cells: Cells::default(),
            there: Vec::new(),
            len: 0,
        }
    }
}

impl<T: Copy + Default> DenseLinks<T> {
    /// Sections in all lists.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.cells.bytes() + self.chunks.bytes() + self.there.capacity() as u64
    }

    /// Loads all of it into the processor's cache.
    pub(crate) fn warm_up(&self) {
        self.cells.warm_up();
    }

    #[inline]
    pub(crate) fn find(&self, section: SectionNo) -> Option<Slot> {
        let (number, offset) = split(section);
        let slot = Slot::new(self.chunks.find(number)? * CHUNK + offset);
        (self.cells.at(slot).after != Some(slot)).then_some(slot)
    }

    #[inline]
    pub(crate) fn section(&self, slot: Slot) -> SectionNo {
        let index = slot.index();
        self.chunks.section(index / CHUNK, index % CHUNK)
    }

    #[inline]
    pub(crate) fn value(&self, slot: Slot) -> &T {
        &self.cells.at(slot).value
    }

    #[inline]
    pub(crate) fn value_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.cells.at_mut(slot).value
    }

    #[inline]
    pub(crate) fn after(&self, slot: Slot) -> Option<Slot> {
        self.cells.at(slot).after
    }

    /// Puts `section`, which is in no list, at the end of `list`.
    ///
    /// # Panics
    /// If there are too many sections; the owners prevent that.
    pub(crate) fn insert_last(&mut self, list: &mut List, section: SectionNo, value: T) -> Slot {
        debug_assert!(self.find(section).is_none(), "{section:?} is there already");
        let (number, offset) = split(section);
        let place = self.chunks.find(number).unwrap_or_else(|| {
            let place = self.chunks.add(number);
            if place == self.there.len() {
                self.push_chunk();
            }
            place
        });
        self.there[place] += 1;
        self.len += 1;
        let slot = Slot::new(place * CHUNK + offset);
        *self.value_mut(slot) = value;
        self.cells.put_last(list, slot);
        slot
    }

    fn push_chunk(&mut self) {
        self.there.push(0);
        for _ in 0..CHUNK {
            let slot = self.cells.push(T::default());
            self.cells.at_mut(slot).after = Some(slot);
        }
    }

    /// Forgets the section at `slot`, which is in `list`.
    pub(crate) fn remove(&mut self, list: &mut List, slot: Slot) {
        self.cells.take_out(list, slot);
        *self.cells.at_mut(slot) = Cell {
            before: None,
            after: Some(slot),
            value: T::default(),
        };
        let place = slot.index() / CHUNK;
        self.there[place] -= 1;
        if self.there[place] == 0 {
            self.chunks.remove(place);
        }
        self.len -= 1;
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::iter::successors;

    /// Lists as vectors of sections with their values.
    type Model = [Vec<(u64, u64)>; 3];

    #[test]
    fn lists_equal_vectors_over_random_changes_near_and_far() {
        for seed in 0..20 {
            let mut random = SplitMix64::new(seed);
            let mut links = DenseLinks::default();
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
        links: &mut DenseLinks<u64>,
        lists: &mut [List; 3],
        model: &mut Model,
    ) {
        let section = [50, 1 << 40][random.index(2)] + random.below(20);
        let to = random.index(3);
        let place = (0..3).find_map(|list| {
            let at = model[list].iter().position(|entry| entry.0 == section)?;
            Some((list, at))
        });
        let slot = links.find(SectionNo(section));
        assert_eq!(slot.is_some(), place.is_some());
        match (slot, place) {
            (Some(slot), Some((list, at))) if random.below(2) == 0 => {
                links.remove(&mut lists[list], slot);
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

    fn assert_same(links: &DenseLinks<u64>, lists: &[List; 3], model: &Model) {
        for (list, model) in lists.iter().zip(model) {
            let entry = |slot: Slot| (links.section(slot).0, *links.value(slot));
            let forth = successors(list.first(), |slot| links.after(*slot));
            let back = successors(list.last(), |slot| links.cells.at(*slot).before);
            assert!(forth.map(entry).eq(model.iter().copied()));
            assert!(back.map(entry).eq(model.iter().rev().copied()));
            assert_eq!(list.len(), model.len() as u64);
        }
        let all: usize = model.iter().map(Vec::len).sum();
        assert_eq!(links.len(), all as u64);
    }

    #[test]
    fn memory_of_sections_that_went_is_used_again() {
        let mut links = DenseLinks::<[u32; 2]>::default();
        let mut list = List::default();
        for begin in (0..100).map(|number| number << 20) {
            let slots: Vec<Slot> = (begin..begin + 1_000)
                .map(|section| links.insert_last(&mut list, SectionNo(section), [0; 2]))
                .collect();
            for slot in slots {
                links.remove(&mut list, slot);
            }
        }
        assert_eq!(links.len(), 0);
        assert!(
            links.bytes() < 1_000 * 16 * 2 + (64 << 10),
            "{}",
            links.bytes()
        );
    }

    #[test]
    fn section_of_a_vm_takes_16_bytes_and_little_more_with_a_value_of_8() {
        let mut links = DenseLinks::<[u32; 2]>::default();
        let mut list = List::default();
        for section in (0..8_192).map(SectionNo) {
            links.insert_last(&mut list, section, [0; 2]);
        }
        let bytes_per_section = links.bytes().div_ceil(links.len());
        assert!(bytes_per_section <= 19, "{bytes_per_section}");
    }
}
