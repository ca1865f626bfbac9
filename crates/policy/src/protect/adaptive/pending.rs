// SPDX-License-Identifier: Apache-2.0
//! [`Pending`]: sections of which something is waited for, in the order in which that began.
//!
//! ```text
//!   order   oldest │ ended │ waits │ ended │ ended │ waits │ newest      each with its time
//!                              ▲                       ▲
//!   live    a hash table of those that wait, by section
//! ```
//! One that ends stays in the order until it is the oldest. A section waits once at most. An entry takes 20
//! bytes and its place in the table at most 11.5.

use crate::{cells::Halves, protect::recency::nanos};
use hashbrown::HashTable;
use pagetide_addr::SectionNo;
use rustc_hash::FxBuildHasher;
use std::{collections::VecDeque, hash::BuildHasher, time::Duration};

#[derive(Debug)]
struct Entry<K> {
    at_ns: Halves,
    section: Halves,
    /// None once it has ended.
    kind: Option<K>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pending<K> {
    order: VecDeque<Entry<K>>,
    /// Number of the oldest entry. Numbers come round; there are never that many entries.
    first: u32,
    /// Numbers of the entries that have not ended.
    live: HashTable<u32>,
}

impl<K> Default for Pending<K> {
    fn default() -> Self {
        Self {
            order: VecDeque::new(),
            first: 0,
            live: HashTable::new(),
        }
    }
}

impl<K: Copy> Pending<K> {
    /// Entries, those that have ended too.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Something is waited for from `now` on. What was waited for of this section before has ended.
    pub(super) fn begin(&mut self, section: SectionNo, now: Duration, kind: K) {
        self.end(section);
        let len = self.order.len();
        if len == self.order.capacity() {
            self.order.reserve_exact(len / 8 + 8);
        }
        self.order.push_back(Entry {
            at_ns: nanos(now).into(),
            section: section.0.into(),
            kind: Some(kind),
        });
        // Far fewer entries than numbers: see the limits of the owners.
        let number = self
            .first
            .wrapping_add(u32::try_from(len).unwrap_or(u32::MAX));
        let (order, first) = (&self.order, self.first);
        let rehash = |number: &u32| hash(section_of(order, first, *number));
        self.live.insert_unique(hash(section), number, rehash);
    }

    /// It has ended, if it was waited for.
    pub(super) fn end(&mut self, section: SectionNo) -> Option<K> {
        if self.live.is_empty() {
            return None;
        }
        let (order, first) = (&mut self.order, self.first);
        let is_it = |number: &u32| section_of(order, first, *number) == section;
        let entry = self.live.find_entry(hash(section), is_it).ok()?;
        let (number, _) = entry.remove();
        order[place(first, number)].kind.take()
    }

    /// When the oldest entry began, and whether it has ended.
    pub(super) fn oldest(&self) -> Option<(Duration, bool)> {
        let oldest = self.order.front()?;
        let at = Duration::from_nanos(oldest.at_ns.into());
        Some((at, oldest.kind.is_none()))
    }

    /// Removes the oldest entry; tells its kind if it has not ended.
    pub(super) fn take_oldest(&mut self) -> Option<K> {
        let oldest = self.order.front()?;
        let kind = self.end_of(oldest.kind, SectionNo(oldest.section.into()));
        self.order.pop_front();
        self.first = self.first.wrapping_add(1);
        kind
    }

    fn end_of(&mut self, kind: Option<K>, section: SectionNo) -> Option<K> {
        kind.and_then(|_| self.end(section))
    }

    /// Memory it takes beside itself, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let order = self.order.capacity() * size_of::<Entry<K>>();
        (order + self.live.allocation_size()) as u64
    }
}

fn place(first: u32, number: u32) -> usize {
    number.wrapping_sub(first) as usize
}

fn section_of<K>(order: &VecDeque<Entry<K>>, first: u32, number: u32) -> SectionNo {
    SectionNo(order[place(first, number)].section.into())
}

fn hash(section: SectionNo) -> u64 {
    FxBuildHasher.hash_one(section)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn entries_equal_a_vector_over_random_changes_and_after_all_numbers() {
        let mut random = Random::new(3);
        let mut pending = Pending {
            // So that numbers come round.
            first: u32::MAX - 500,
            ..Pending::default()
        };
        let mut model: Vec<(u64, u64, Option<u64>)> = Vec::new();
        for step in 0..5_000 {
            let section = random.below(60);
            let waits =
                |entry: &&mut (u64, u64, Option<u64>)| entry.1 == section && entry.2.is_some();
            let live = model.iter_mut().find(waits);
            let ended = live.map(|entry| entry.2.take());
            match random.below(3) {
                0 => {
                    let ended = ended.flatten();
                    assert_eq!(pending.end(SectionNo(section)), ended);
                }
                1 => {
                    pending.begin(SectionNo(section), Duration::from_secs(step), step);
                    model.push((step, section, Some(step)));
                }
                _ => {
                    pending.end(SectionNo(section));
                    let oldest = (!model.is_empty()).then(|| model.remove(0));
                    let seen =
                        oldest.map(|entry| (Duration::from_secs(entry.0), entry.2.is_none()));
                    assert_eq!(pending.oldest(), seen);
                    assert_eq!(pending.take_oldest(), oldest.and_then(|entry| entry.2));
                }
            }
            assert_eq!(pending.len(), model.len());
        }
    }
}
