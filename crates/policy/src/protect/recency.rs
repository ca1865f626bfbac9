// SPDX-License-Identifier: Apache-2.0
//! [`Recency`]: sections in the order of their last touch, each with a state of the policy's own.
//!
//! ```text
//!   oldest ──newer──►  ·  ──newer──►  ·  ──newer──► newest
//!          ◄──older──     ◄──older──     ◄──older──
//! ```
//! Touch, removal and a step along the order are O(1). With a state of 4 bytes a section takes 28 bytes
//! besides the table, and at most 43 in all (see `links.rs`).

use crate::{
    cells::{Halves, List},
    links::Links,
};
use pagetide_addr::SectionNo;
use std::time::Duration;

pub use crate::cells::Slot;

#[derive(Debug)]
struct RecencyEntry<S> {
    touched_ns: Halves,
    state: S,
}

/// See the module.
#[derive(Debug)]
pub struct Recency<S> {
    links: Links<RecencyEntry<S>>,
    /// Oldest first.
    order: List,
}

impl<S> Default for Recency<S> {
    fn default() -> Self {
        Self {
            links: Links::default(),
            order: List::default(),
        }
    }
}

impl<S> Recency<S> {
    /// Sections in the order.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.order.len()
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory it takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.links.bytes()
    }

    /// Loads the data into the processor's cache.
    pub fn warm_up(&self) {
        self.links.warm_up();
    }

    /// Where `section` is, if it is in the order.
    #[must_use]
    pub fn find(&self, section: SectionNo) -> Option<Slot> {
        self.links.find(section)
    }

    /// The section at `slot`.
    #[must_use]
    pub fn section(&self, slot: Slot) -> SectionNo {
        self.links.section(slot)
    }

    /// When the section at `slot` was touched last.
    #[must_use]
    pub fn touched_at(&self, slot: Slot) -> Duration {
        Duration::from_nanos(self.links.value(slot).touched_ns.into())
    }

    /// State of the section at `slot`.
    #[must_use]
    pub fn state(&self, slot: Slot) -> &S {
        &self.links.value(slot).state
    }

    /// State of the section at `slot`, to be changed.
    #[must_use]
    pub fn state_mut(&mut self, slot: Slot) -> &mut S {
        &mut self.links.value_mut(slot).state
    }

    /// The section touched last.
    #[must_use]
    pub fn newest(&self) -> Option<Slot> {
        self.order.last()
    }

    /// The least recently touched section.
    #[must_use]
    pub fn oldest(&self) -> Option<Slot> {
        self.order.first()
    }

    /// The section touched next after the one at `slot`.
    #[must_use]
    pub fn newer(&self, slot: Slot) -> Option<Slot> {
        self.links.after(slot)
    }

    /// The section touched last before the one at `slot`.
    #[must_use]
    pub fn older(&self, slot: Slot) -> Option<Slot> {
        self.links.before(slot)
    }

    /// All sections, most recently touched first.
    pub fn newest_first(&self) -> impl Iterator<Item = Slot> + '_ {
        std::iter::successors(self.newest(), |slot| self.older(*slot))
    }

    /// All sections, least recently touched first.
    pub fn oldest_first(&self) -> impl Iterator<Item = Slot> + '_ {
        std::iter::successors(self.oldest(), |slot| self.newer(*slot))
    }

    /// The section at `slot` was touched at `at`: it is the newest now.
    pub fn touch(&mut self, slot: Slot, at: Duration) {
        self.links.value_mut(slot).touched_ns = nanos(at).into();
        if self.newest() != Some(slot) {
            self.links.take_out(&mut self.order, slot);
            self.links.put_last(&mut self.order, slot);
        }
    }

    /// `section`, which is not in the order, was touched at `at`: it is the newest now.
    pub fn insert(&mut self, section: SectionNo, at: Duration, state: S) -> Slot {
        let touched_ns = nanos(at).into();
        let standing = RecencyEntry { touched_ns, state };
        self.links.insert_last(&mut self.order, section, standing)
    }

    /// Forgets the section at `slot`.
    pub fn remove(&mut self, slot: Slot) -> SectionNo {
        self.links.remove(&mut self.order, slot)
    }
}

/// A time in a compact form. It overflows after 584 years.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_by_last_touch_and_tells_its_time() {
        let mut order = Recency::default();
        for section in [5, 6, 7] {
            order.insert(SectionNo(section), Duration::from_secs(section), ());
        }
        let slot = order.find(SectionNo(5)).unwrap();
        order.touch(slot, Duration::from_secs(8));
        let shown: Vec<(u64, u64)> = order
            .oldest_first()
            .map(|slot| (order.section(slot).0, order.touched_at(slot).as_secs()))
            .collect();
        assert_eq!(shown, [(6, 6), (7, 7), (5, 8)]);
        order.remove(slot);
        let newest: Vec<u64> = order
            .newest_first()
            .map(|slot| order.section(slot).0)
            .collect();
        assert_eq!(newest, [7, 6]);
        assert_eq!(order.find(SectionNo(5)), None);
    }

    #[test]
    fn section_with_a_state_of_4_bytes_takes_28_bytes_beside_the_table() {
        assert_eq!(size_of::<RecencyEntry<u32>>() + 16, 28);
    }
}
