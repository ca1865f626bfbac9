// SPDX-License-Identifier: Apache-2.0
//! The program's queues: a binary heap ordered by time alone, so that the order of equal times depends on
//! how the heap is repaired.
//!
//! The results depend on that order in the last digits, so the repair is that of the program's C++ library:
//! a new entry rises past parents that are later, not past equal ones; taking the first sinks a hole to the
//! bottom along the earlier child, the right one if equal, and lets the last entry rise from there.

use std::collections::VecDeque;

use crate::config::Completion;
use crate::flavour::StageQueue;
use crate::table::SLOTS_MAX;

/// Time in the upper, slot in the lower bits: entries are compared by time alone.
type Entry = u64;
const SLOT_BITS: u32 = 20;
const _: () = assert!(SLOTS_MAX <= 1 << SLOT_BITS, "a slot has to fit");

/// Later than every entry.
const NONE: Entry = u64::MAX;

const fn entry(ready_ns: u64, slot: u32) -> Entry {
    ready_ns << SLOT_BITS | slot as u64
}

const fn time(entry: Entry) -> u64 {
    entry >> SLOT_BITS
}

const fn slot(entry: Entry) -> u32 {
    (entry & ((1 << SLOT_BITS) - 1)) as u32
}

/// The greatest entry of a time.
#[inline(always)]
const fn last_of(now_ns: u64) -> Entry {
    now_ns << SLOT_BITS | ((1 << SLOT_BITS) - 1)
}

/// True if `one` is ready later than `other`; their slots do not count.
#[inline(always)]
const fn is_later(one: Entry, other: Entry) -> bool {
    one > other | ((1 << SLOT_BITS) - 1)
}

/// Entries that the descent is unrolled for: a pipeline of microseconds holds a few dozen, plus room to
/// spare.
const FEW: usize = 127;
/// Places of these entries and of their children.
const FEW_PLACES: usize = 2 * (FEW + 1);

/// A queue by time.
///
/// Entry `k` has its children at `2k` and `2k + 1`; the first is 1. Unused places hold [`NONE`], and there
/// are twice as many as entries, so that a search for the earlier child need not check whether there is
/// one.
#[derive(Debug)]
pub(crate) struct ProgramHeap {
    few: [Entry; FEW_PLACES],
    len: usize,
    /// The places, while there are more than [`FEW`] entries.
    many: Vec<Entry>,
}

impl StageQueue for ProgramHeap {
    fn new(_completion: Completion) -> Self {
        Self {
            few: [NONE; FEW_PLACES],
            len: 0,
            many: Vec::new(),
        }
    }

    #[inline(always)]
    fn push(&mut self, ready_ns: u64, slot: u32) {
        self.len += 1;
        if self.len > FEW {
            self.push_to_many(entry(ready_ns, slot));
            return;
        }
        rise_in_few(&mut self.few, self.len, entry(ready_ns, slot));
    }

    #[inline(always)]
    fn next_key(&self) -> u64 {
        self.few[1]
    }

    #[inline(always)]
    fn ready_ns(key: u64) -> u64 {
        time(key)
    }

    #[inline(always)]
    fn pop_ready(&mut self, now_ns: u64) -> Option<u32> {
        let first = self.few[1];
        if first > last_of(now_ns) {
            return None;
        }
        if self.len > FEW {
            self.sink_in_many();
        } else {
            self.sink();
        }
        Some(slot(first))
    }
}

impl ProgramHeap {
    /// Takes the first entry out: a hole sinks from its place to the bottom, the last entry rises from
    /// there.
    ///
    /// The path of the hole is as good as random, so the descent has no branch that depends on it: the
    /// number of entries alone determines the number of levels, and each step is a selection of values.
    #[inline(always)]
    fn sink(&mut self) {
        let few = &mut self.few;
        let last = std::mem::replace(&mut few[self.len % FEW_PLACES], NONE);
        self.len -= 1;
        let hole = match self.len {
            63.. => descend::<6>(few),
            31.. => descend::<5>(few),
            15.. => descend::<4>(few),
            7.. => descend::<3>(few),
            3.. => descend::<2>(few),
            1.. => descend::<1>(few),
            0 => return,
        };
        rise_in_few(few, hole, last);
    }

    /// Adds an entry where there are [`FEW`] already.
    #[cold]
    fn push_to_many(&mut self, new: Entry) {
        if self.len == FEW + 1 {
            self.many.clear();
            self.many.extend_from_slice(&self.few);
        }
        if self.many.len() < 2 * self.len + 2 {
            self.many.resize(2 * self.many.len(), NONE);
        }
        rise(&mut self.many, self.len, new);
        self.few[1] = self.many[1];
    }

    /// [`Self::sink`], where there are more than [`FEW`] entries.
    #[cold]
    fn sink_in_many(&mut self) {
        let places = &mut self.many[..];
        let last = std::mem::replace(&mut places[self.len], NONE);
        self.len -= 1;
        let mut hole = 1;
        for _ in 0..(self.len + 1).ilog2() {
            let (child, earlier) = earlier_child(places, hole);
            places[hole] = earlier;
            hole = if earlier == NONE { hole } else { child };
        }
        rise(places, hole, last);
        self.few[1] = places[1];
        if self.len == FEW {
            self.few.copy_from_slice(&places[..FEW_PLACES]);
        }
    }
}

/// Sinks the hole by `LEVELS` levels, which are all levels; the last may be incomplete. The compiler
/// unrolls the loop and then can prove that no index is out of range.
#[inline(always)]
fn descend<const LEVELS: usize>(places: &mut [Entry; FEW_PLACES]) -> usize {
    let mut hole = 1;
    // All levels but the last, two at a time.
    for _ in 0..(LEVELS - 1) / 2 {
        hole = descend_two(places, hole);
    }
    if LEVELS.is_multiple_of(2) {
        let (child, earlier) = earlier_child(places, hole);
        places[hole] = earlier;
        hole = child;
    }
    let (child, earlier) = earlier_child(places, hole);
    places[hole] = earlier;
    if earlier == NONE { hole } else { child }
}

/// Sinks the hole by two levels, which must be full. The four grandchildren are compared while it is not known yet
/// which two of them count: that takes half the time of one level after the other.
#[inline(always)]
fn descend_two(places: &mut [Entry; FEW_PLACES], hole: usize) -> usize {
    let (child, earlier) = earlier_child(places, hole);
    let left = earlier_child(places, 2 * hole);
    let right = earlier_child(places, 2 * hole + 1);
    let (grandchild, next) = if child == 2 * hole { left } else { right };
    places[hole] = earlier;
    places[child] = next;
    grandchild
}

/// [`rise`], where an index cannot be out of range.
#[inline(always)]
fn rise_in_few(places: &mut [Entry; FEW_PLACES], mut hole: usize, new: Entry) {
    while hole > 1 {
        let parent = places[hole / 2 % FEW_PLACES];
        if !is_later(parent, new) {
            break;
        }
        places[hole % FEW_PLACES] = parent;
        hole /= 2;
    }
    places[hole % FEW_PLACES] = new;
}

/// The child of `parent` that is ready first, the right one if they are equal.
#[inline(always)]
fn earlier_child(places: &[Entry], parent: usize) -> (usize, Entry) {
    let (left, right) = (places[2 * parent], places[2 * parent + 1]);
    let is_left = is_later(right, left);
    let earlier = if is_left { left } else { right };
    (2 * parent + usize::from(!is_left), earlier)
}

/// Lets `new` rise from the free place `hole`.
#[inline(always)]
fn rise(places: &mut [Entry], mut hole: usize, new: Entry) {
    while hole > 1 {
        let parent = places[hole / 2];
        if !is_later(parent, new) {
            break;
        }
        places[hole] = parent;
        hole /= 2;
    }
    places[hole] = new;
}

/// A queue by arrival: later requests wait for those that are not ready yet.
#[derive(Debug)]
pub(crate) struct ProgramFifo(VecDeque<Entry>);

impl StageQueue for ProgramFifo {
    fn new(_completion: Completion) -> Self {
        Self(VecDeque::new())
    }

    fn push(&mut self, ready_ns: u64, slot: u32) {
        self.0.push_back(entry(ready_ns, slot));
    }

    fn next_key(&self) -> u64 {
        self.0.front().copied().unwrap_or(NONE)
    }

    fn ready_ns(key: u64) -> u64 {
        time(key)
    }

    fn pop_ready(&mut self, now_ns: u64) -> Option<u32> {
        if self.next_key() > last_of(now_ns) {
            return None;
        }
        self.0.pop_front().map(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library's algorithm as in its source: counted from 0, children compared one by one.
    #[derive(Default)]
    struct Naive(Vec<(u64, u32)>);

    impl Naive {
        fn push(&mut self, new: (u64, u32)) {
            self.0.push(new);
            self.rise(self.0.len() - 1, new);
        }

        fn rise(&mut self, mut hole: usize, new: (u64, u32)) {
            while hole > 0 && self.0[(hole - 1) / 2].0 > new.0 {
                self.0[hole] = self.0[(hole - 1) / 2];
                hole = (hole - 1) / 2;
            }
            self.0[hole] = new;
        }

        fn pop(&mut self) -> Option<(u64, u32)> {
            let first = *self.0.first()?;
            let last = self.0.pop()?;
            let len = self.0.len();
            let mut hole = 0;
            while 2 * hole + 1 < len {
                let (left, right) = (2 * hole + 1, 2 * hole + 2);
                let is_left = right >= len || self.0[right].0 > self.0[left].0;
                let child = if is_left { left } else { right };
                self.0[hole] = self.0[child];
                hole = child;
            }
            if len > 0 {
                self.rise(hole, last);
            }
            Some(first)
        }
    }

    proptest::proptest! {
        #[test]
        fn order_of_equal_times_is_that_of_the_library(
            steps in proptest::collection::vec((0..3_u32, 1..200_usize, 1..60_u64), 1..40),
        ) {
            let mut heap = ProgramHeap::new(Completion::OutOfOrder);
            let mut naive = Naive::default();
            for (kind, times, modulus) in steps {
                for n in 0..times {
                    if kind == 0 {
                        let popped = heap.pop_ready((u64::MAX >> SLOT_BITS) - 1);
                        proptest::prop_assert_eq!(popped, naive.pop().map(|(_, slot)| slot));
                    } else {
                        let ready_ns = (n as u64).wrapping_mul(7919) % modulus;
                        let slot = u32::try_from(n).unwrap();
                        heap.push(ready_ns, slot);
                        naive.push((ready_ns, slot));
                    }
                }
            }
            let mut next = || heap.pop_ready((u64::MAX >> SLOT_BITS) - 1);
            while let Some((_, slot)) = naive.pop() {
                proptest::prop_assert_eq!(next(), Some(slot));
            }
        }
    }
}
