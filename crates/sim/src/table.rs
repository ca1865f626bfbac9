// SPDX-License-Identifier: Apache-2.0
//! A table of things in flight, by slot; freed slots are used again.

use crate::error::{SimError, impossible};

/// Slots at most: what the queues' entries have bits for. A run gets there only
/// if requests come faster than a stage serves them, without end.
pub(crate) const SLOTS_MAX: usize = 1 << 20;

/// Things in flight.
#[derive(Debug, Default)]
pub(crate) struct Table<T> {
    slots: Vec<T>,
    free: Vec<u32>,
}

impl<T: Copy> Table<T> {
    /// Puts `thing` into a slot.
    ///
    /// # Errors
    /// If [`SLOTS_MAX`] are in use.
    #[inline]
    pub(crate) fn insert(&mut self, thing: T) -> Result<u32, SimError> {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = thing;
            return Ok(slot);
        }
        if self.slots.len() == SLOTS_MAX {
            return Err(too_many());
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most SLOTS_MAX")]
        let slot = self.slots.len() as u32;
        self.slots.push(thing);
        Ok(slot)
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> &T {
        &self.slots[slot as usize]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut T {
        &mut self.slots[slot as usize]
    }

    /// Takes the thing out; its slot is free again.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) -> T {
        self.free.push(slot);
        self.slots[slot as usize]
    }

    /// Things in the table.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cold]
fn too_many() -> SimError {
    impossible(
        "prefetch.pages_per_tenant",
        "requests in flight",
        "prefetches pile up without end, as a stage cannot serve as many as come; \
         prefetch fewer pages or slow the link",
    )
}
