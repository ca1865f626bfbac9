// SPDX-License-Identifier: Apache-2.0
//! A table of objects in flight, by slot; freed slots are reused.

use crate::error::{SimError, impossible};

/// Most slots: the limit of the bits in the queues' entries. A run reaches it only if requests come faster
/// than a stage serves them, without end.
pub(crate) const SLOTS_MAX: usize = 1 << 20;

/// Slots that may be taken between two checks: the requests of a packet, or the
/// prefetches of a request, of which [`crate::config`] allows 64 each.
const SLOTS_SPARE: usize = 1 << 10;

/// Objects in flight.
#[derive(Debug, Default)]
pub(crate) struct Table<T> {
    slots: Vec<T>,
    /// The free slot after this one, of each free slot.
    next_free: Vec<u32>,
    /// The first free slot; as many as there are slots: none.
    free: u32,
}

impl<T: Copy + Default> Table<T> {
    /// A slot for an object, which the caller writes there. A caller without a bound of its own must call
    /// [`Self::check`] now and then.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> u32 {
        let slot = self.free;
        match self.next_free.get(slot as usize) {
            Some(next) => self.free = *next,
            None => self.append(),
        }
        slot
    }

    #[cold]
    fn append(&mut self) {
        self.slots.push(T::default());
        self.free += 1;
        self.next_free.push(self.free);
    }

    /// Every slot, in use or free.
    pub(crate) fn all(&mut self) -> &mut [T] {
        &mut self.slots
    }

    /// Checks that there is room for another packet's worth.
    ///
    /// # Errors
    /// If [`SLOTS_MAX`] are nearly in use.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), SimError> {
        if self.slots.len() > SLOTS_MAX - SLOTS_SPARE {
            return Err(too_many());
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn get(&self, slot: u32) -> &T {
        &self.slots[slot as usize]
    }

    #[inline(always)]
    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut T {
        &mut self.slots[slot as usize]
    }

    /// Frees the slot; its content may be read until the next [`Self::take`].
    #[inline(always)]
    pub(crate) fn release(&mut self, slot: u32) {
        self.next_free[slot as usize] = self.free;
        self.free = slot;
    }

    /// Objects in the table. Counts the free slots.
    pub(crate) fn len(&self) -> usize {
        let next = |slot: &u32| self.next_free.get(*slot as usize).copied();
        let free = std::iter::successors(Some(self.free), next).count() - 1;
        self.slots.len() - free
    }
}

#[cold]
fn too_many() -> SimError {
    impossible(
        "requests in flight",
        SLOTS_MAX,
        "they pile up, as more come than the stages serve: prefetch fewer pages, slow the \
         link, or take a smaller PTB",
    )
}
