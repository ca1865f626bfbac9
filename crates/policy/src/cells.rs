// SPDX-License-Identifier: Apache-2.0
//! [`Cells`]: lists that share one vector.
//!
//! ```text
//!   List { first ─────────────► cell ◄──► cell ◄──► cell ◄───────────── last }
//! ```
//! One vector of cells serves any number of lists; a cell is in one of them, or in none. Every step is O(1).
//! The owners, `links.rs` and `dense_links.rs`,
//! know which section a cell is for, and which cells are free.

use crate::chunks::push;
use std::num::NonZeroU32;

/// Most cells: one less than there are slot numbers.
pub(crate) const CELLS_MAX: usize = u32::MAX as usize;

/// Place of a section's cell. Valid until the section is removed.
///
/// Its number is one more than the index, so that an `Option` takes no more room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(NonZeroU32);

impl Slot {
    /// The slot of the cell at `index`.
    ///
    /// # Panics
    /// If there are too many cells; the owners prevent that.
    pub(crate) fn new(index: usize) -> Self {
        assert!(index < CELLS_MAX, "too many sections to remember");
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        Self(number.expect("below the limit"))
    }

    pub(crate) const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A 64-bit number with the alignment of its half, so that cells have no gaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Halves([u32; 2]);

impl From<u64> for Halves {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the high half is kept beside the low one"
    )]
    fn from(number: u64) -> Self {
        Self([number as u32, (number >> 32) as u32])
    }
}

impl From<Halves> for u64 {
    fn from(Halves([low, high]): Halves) -> Self {
        Self::from(low) | Self::from(high) << 32
    }
}

/// Both ends of a list; the links are in the cells.
#[derive(Debug, Default)]
pub(crate) struct List {
    first: Option<Slot>,
    last: Option<Slot>,
    len: u64,
}

impl List {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn first(&self) -> Option<Slot> {
        self.first
    }

    pub(crate) fn last(&self) -> Option<Slot> {
        self.last
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell<T> {
    pub(crate) before: Option<Slot>,
    pub(crate) after: Option<Slot>,
    pub(crate) value: T,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Cells<T>(Vec<Cell<T>>);

impl<T> Default for Cells<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Cells<T> {
    /// Memory they take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.0.capacity() * size_of::<Cell<T>>()) as u64
    }

    /// Reads each cache line of the cells, in order, which is many times faster than following a list.
    /// Changes nothing.
    pub(crate) fn warm_up(&self) {
        const LINE_BYTES: usize = 64;
        let cells = (LINE_BYTES / size_of::<Cell<T>>()).max(1);
        for cell in self.0.iter().step_by(cells) {
            std::hint::black_box(cell.after);
        }
    }

    pub(crate) fn at(&self, slot: Slot) -> &Cell<T> {
        &self.0[slot.index()]
    }

    pub(crate) fn at_mut(&mut self, slot: Slot) -> &mut Cell<T> {
        &mut self.0[slot.index()]
    }

    /// Adds a cell that is in no list.
    pub(crate) fn push(&mut self, value: T) -> Slot {
        let len = self.0.len();
        let slot = Slot::new(len);
        let cell = Cell {
            before: None,
            after: None,
            value,
        };
        push(&mut self.0, cell);
        slot
    }

    /// Puts the cell at `slot`, which is in no list, at the end of `list`.
    pub(crate) fn put_last(&mut self, list: &mut List, slot: Slot) {
        let before = list.last.replace(slot);
        let cell = self.at_mut(slot);
        (cell.before, cell.after) = (before, None);
        match before {
            Some(before) => self.at_mut(before).after = Some(slot),
            None => list.first = Some(slot),
        }
        list.len += 1;
    }

    /// Takes the cell at `slot` out of `list`, which it is in.
    pub(crate) fn take_out(&mut self, list: &mut List, slot: Slot) {
        let Cell { before, after, .. } = *self.at(slot);
        match before {
            Some(before) => self.at_mut(before).after = after,
            None => list.first = after,
        }
        match after {
            Some(after) => self.at_mut(after).before = before,
            None => list.last = before,
        }
        list.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_make_up_the_number_they_were_made_of() {
        for number in [
            0,
            1,
            u64::from(u32::MAX),
            1 << 32,
            0x1234_5678_9ABC_DEF0,
            u64::MAX,
        ] {
            assert_eq!(u64::from(Halves::from(number)), number);
        }
    }

    #[test]
    fn cell_has_no_gaps() {
        assert_eq!(size_of::<Option<Slot>>(), 4);
        assert_eq!(size_of::<Cell<(Halves, u32)>>(), 20);
    }
}
