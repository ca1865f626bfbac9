// SPDX-License-Identifier: Apache-2.0
//! [`Pending`]: sections with an awaited outcome, in the order in which the wait began.
//!
//! ```text
//!   order   oldest │ ended │ waits │ ended │ ended │ waits │ newest      each with its time
//!                              ▲                       ▲
//!   live    a hash table of those that wait, by section
//! ```
//! An ended entry stays in the order until it is the oldest. A section waits at most once. An entry takes
//! 12 bytes and its place in the table at most 11.5: there may be thousands.
//!
//! Times are whole milliseconds, rounded up, and wrap around after twelve days, far longer than any
//! wait.

use super::guess::Kind;
use crate::{cells::Halves, protect::recency::nanos};
use hashbrown::HashTable;
use pagetide_addr::SectionNo;
use rustc_hash::FxBuildHasher;
use std::{collections::VecDeque, hash::BuildHasher, time::Duration};

/// When something began, and why: the time above the two lowest bits, which are 1 more than the number of the
/// [`Kind`], or 0 once it has ended.
#[derive(Clone, Copy, Debug)]
struct Stamp(u32);

const KIND: u32 = 3;
const TIMES: u64 = 1 << 30;

impl Stamp {
    fn new(at: Duration, kind: Kind) -> Self {
        let at_ms = nanos(at).div_ceil(1_000_000) % TIMES;
        // Below 2^30.
        Self(u32::try_from(at_ms).unwrap_or(0) << 2 | (kind as u32 + 1))
    }

    /// None once it has ended.
    fn kind(self) -> Option<Kind> {
        match self.0 & KIND {
            0 => None,
            1 => Some(Kind::Age),
            2 => Some(Kind::Order),
            _ => Some(Kind::Neighbour),
        }
    }

    fn ended(self) -> Self {
        Self(self.0 & !KIND)
    }

    fn age(self, now: Duration) -> Duration {
        let now_ms = nanos(now) / 1_000_000 % TIMES;
        let age_ms = (now_ms + TIMES - u64::from(self.0 >> 2)) % TIMES;
        // An entry that began within this very millisecond would be twelve days old.
        Duration::from_millis(if age_ms == TIMES - 1 { 0 } else { age_ms })
    }
}

#[derive(Debug)]
struct Entry {
    section: Halves,
    stamp: Stamp,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Pending {
    order: VecDeque<Entry>,
    /// Number of the oldest entry. Numbers wrap around; there are never that many entries.
    first: u32,
    /// Numbers of the entries that have not ended.
    live: HashTable<u32>,
}

impl Pending {
    /// Number of entries, including ended ones.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Begins a wait for `section` at `now`. An earlier wait for it ends.
    pub(super) fn begin(&mut self, section: SectionNo, now: Duration, kind: Kind) {
        self.end(section);
        let len = self.order.len();
        if len == self.order.capacity() {
            self.order.reserve_exact(len / 8 + 8);
        }
        self.order.push_back(Entry {
            section: section.0.into(),
            stamp: Stamp::new(now, kind),
        });
        // Far fewer entries than numbers: see the limits of the owners.
        let number = self
            .first
            .wrapping_add(u32::try_from(len).unwrap_or(u32::MAX));
        let (order, first) = (&self.order, self.first);
        let rehash = |number: &u32| hash(section_of(order, first, *number));
        self.live.insert_unique(hash(section), number, rehash);
    }

    /// Ends the wait for `section`, if there is one.
    pub(super) fn end(&mut self, section: SectionNo) -> Option<Kind> {
        if self.live.is_empty() {
            return None;
        }
        let (order, first) = (&mut self.order, self.first);
        let is_it = |number: &u32| section_of(order, first, *number) == section;
        let Ok(entry) = self.live.find_entry(hash(section), is_it) else {
            return None;
        };
        let (number, _) = entry.remove();
        let stamp = &mut order[place(first, number)].stamp;
        let kind = stamp.kind();
        *stamp = stamp.ended();
        kind
    }

    /// Age of the oldest entry, and whether it has ended.
    pub(super) fn oldest(&self, now: Duration) -> Option<(Duration, bool)> {
        let stamp = self.order.front()?.stamp;
        Some((stamp.age(now), stamp.kind().is_none()))
    }

    /// Removes the oldest entry; returns its kind if it has not ended.
    pub(super) fn take_oldest(&mut self) -> Option<Kind> {
        let oldest = self.order.front()?;
        let (waits, section) = (oldest.stamp.kind(), SectionNo(oldest.section.into()));
        let kind = waits.and_then(|_| self.end(section));
        self.order.pop_front();
        self.first = self.first.wrapping_add(1);
        kind
    }

    /// Memory it takes besides itself, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let order = self.order.capacity() * size_of::<Entry>();
        (order + self.live.allocation_size()) as u64
    }
}

fn place(first: u32, number: u32) -> usize {
    number.wrapping_sub(first) as usize
}

fn section_of(order: &VecDeque<Entry>, first: u32, number: u32) -> SectionNo {
    SectionNo(order[place(first, number)].section.into())
}

fn hash(section: SectionNo) -> u64 {
    FxBuildHasher.hash_one(section)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    /// When it began, its section and kind; none once it has ended.
    type Model = Vec<(Duration, u64, Option<Kind>)>;

    #[test]
    fn entries_equal_a_vector_over_random_changes_while_numbers_and_times_come_round() {
        let mut random = SplitMix64::new(3);
        let mut pending = Pending {
            first: u32::MAX - 500,
            ..Pending::default()
        };
        let mut model = Model::new();
        let begin_ms = TIMES - 2_000;
        for now in (begin_ms..begin_ms + 5_000).map(Duration::from_millis) {
            let section = random.below(60);
            let seen = model
                .first()
                .map(|entry| (now - entry.0, entry.2.is_none()));
            assert_eq!(pending.oldest(now), seen);
            match random.below(3) {
                0 => {
                    let ended = end(&mut model, section);
                    assert_eq!(pending.end(SectionNo(section)), ended);
                }
                1 => {
                    let kind = [Kind::Age, Kind::Order, Kind::Neighbour][random.index(3)];
                    pending.begin(SectionNo(section), now, kind);
                    end(&mut model, section);
                    model.push((now, section, Some(kind)));
                }
                _ => {
                    let oldest = (!model.is_empty()).then(|| model.remove(0));
                    assert_eq!(pending.take_oldest(), oldest.and_then(|entry| entry.2));
                }
            }
            assert_eq!(pending.len(), model.len());
        }
    }

    fn end(model: &mut Model, section: u64) -> Option<Kind> {
        let is_it =
            |entry: &&mut (Duration, u64, Option<Kind>)| entry.1 == section && entry.2.is_some();
        model.iter_mut().find(is_it)?.2.take()
    }

    #[test]
    fn age_is_told_in_whole_milliseconds_and_never_before_its_time() {
        let at = Duration::from_micros(1_500);
        let stamp = Stamp::new(at, Kind::Age);
        for (now_us, age_ms) in [
            (1_500, 0),
            (2_000, 0),
            (2_999, 0),
            (3_000, 1),
            (1_002_000, 1_000),
        ] {
            let age = stamp.age(Duration::from_micros(now_us));
            assert_eq!(age, Duration::from_millis(age_ms), "{now_us}");
        }
        assert_eq!(size_of::<Entry>(), 12);
    }
}
