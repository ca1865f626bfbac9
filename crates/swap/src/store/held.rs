// SPDX-License-Identifier: Apache-2.0
//! [`Held`]: slots that are not given out again, though they may be freed. See `holding.rs`.

use crate::{slots::Slots, tier::InPool};

/// Slots that are held, and whether each was freed meanwhile: some, for a short time.
#[derive(Debug, Default)]
pub(super) struct Held {
    slots: Vec<(InPool, Fate)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    InUse,
    Freed,
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub fn hold(&mut self, slot: InPool) {
        self.slots.push((slot, Fate::InUse));
    }

    pub fn holds(&self, slot: InPool) -> bool {
        self.slots.iter().any(|(held, _)| *held == slot)
    }

    /// Frees a slot, now or when it is released.
    pub fn free(&mut self, slots: &mut Slots, freed: InPool) {
        let held = self.slots.iter_mut().find(|(held, _)| *held == freed);
        match held {
            Some((_, fate)) => {
                assert_eq!(*fate, Fate::InUse, "slot {:?} freed twice", freed.slot);
                *fate = Fate::Freed;
            }
            None => slots.free(freed.slot, freed.bytes),
        }
    }

    /// None is held any more, and those are free that were freed meanwhile.
    pub fn release(&mut self, slots: &mut Slots) {
        for (slot, fate) in self.slots.drain(..) {
            if fate == Fate::Freed {
                slots.free(slot.slot, slot.bytes);
            }
        }
    }
}
