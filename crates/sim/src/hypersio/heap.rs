// SPDX-License-Identifier: Apache-2.0
//! The program's queues: a binary heap ordered by time alone, which leaves the
//! order of equal times to the way the heap is repaired.
//!
//! The results depend on that order in the last digits, so the repair is the
//! one that the program's C++ library does: a new entry rises past parents that
//! are later, not past equal ones; taking the first sinks a hole to the bottom
//! along the earlier child, the right one if equal, and lets the last entry
//! rise from there.

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
    #[expect(clippy::cast_possible_truncation, reason = "20 bits")]
    let slot = (entry & ((1 << SLOT_BITS) - 1)) as u32;
    slot
}

/// True if `one` is ready later than `other`; their slots do not count.
#[inline(always)]
const fn is_later(one: Entry, other: Entry) -> bool {
    one > other | ((1 << SLOT_BITS) - 1)
}

/// A queue by time.
///
/// Entry `k` has its children at `2k` and `2k + 1`; the first is 1. Places that
/// are not used hold [`NONE`], and there are twice as many as entries, so that a
/// search for the earlier child needs no question whether there is one.
#[derive(Debug)]
pub(crate) struct ProgramHeap {
    places: Vec<Entry>,
    len: usize,
}

impl StageQueue for ProgramHeap {
    fn new(_completion: Completion) -> Self {
        Self {
            places: vec![NONE; 64],
            len: 0,
        }
    }

    #[inline(always)]
    fn push(&mut self, ready_ns: u64, slot: u32) {
        self.len += 1;
        if self.places.len() < 2 * self.len + 2 {
            self.grow();
        }
        rise(&mut self.places, self.len, entry(ready_ns, slot));
    }

    #[inline(always)]
    fn next_ready_ns(&self) -> u64 {
        time(self.places[1])
    }

    #[inline(always)]
    fn pop_ready(&mut self, now_ns: u64) -> Option<u32> {
        let first = self.places[1];
        if time(first) > now_ns {
            return None;
        }
        self.sink();
        Some(slot(first))
    }
}

impl ProgramHeap {
    #[cold]
    fn grow(&mut self) {
        self.places.resize(2 * self.places.len(), NONE);
    }

    /// Takes the first entry out: a hole sinks from its place to the bottom, the
    /// last entry rises from there.
    ///
    /// Which way the hole goes is as good as random, so the descent has no
    /// branch that depends on it: the number of entries alone says how many
    /// levels are whole, and the step below them is a choice of values.
    #[inline(always)]
    fn sink(&mut self) {
        let places = &mut self.places[..];
        let last = std::mem::replace(&mut places[self.len], NONE);
        self.len -= 1;
        if self.len == 0 {
            return;
        }
        let mut hole = 1;
        for _ in 1..(self.len + 1).ilog2() {
            let (child, earlier) = earlier_child(places, hole);
            places[hole] = earlier;
            hole = child;
        }
        let (child, earlier) = earlier_child(places, hole);
        places[hole] = earlier;
        hole = if earlier == NONE { hole } else { child };
        rise(places, hole, last);
    }
}

/// The child of `parent` that is ready first, the right one if they are equal.
#[inline(always)]
fn earlier_child(places: &[Entry], parent: usize) -> (usize, Entry) {
    let pair = &places[2 * parent..][..2];
    let is_left = is_later(pair[1], pair[0]);
    let earlier = if is_left { pair[0] } else { pair[1] };
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

/// A queue by arrival: what comes later waits for what is not ready yet.
#[derive(Debug)]
pub(crate) struct ProgramFifo(VecDeque<Entry>);

impl StageQueue for ProgramFifo {
    fn new(_completion: Completion) -> Self {
        Self(VecDeque::new())
    }

    fn push(&mut self, ready_ns: u64, slot: u32) {
        self.0.push_back(entry(ready_ns, slot));
    }

    fn next_ready_ns(&self) -> u64 {
        self.0.front().map_or(u64::MAX, |first| time(*first))
    }

    fn pop_ready(&mut self, now_ns: u64) -> Option<u32> {
        if self.next_ready_ns() > now_ns {
            return None;
        }
        self.0.pop_front().map(slot)
    }
}
