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

/// Time in the upper, slot in the lower bits: entries are compared by time alone.
type Entry = u64;
const SLOT_BITS: u32 = 20;

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

/// A queue of the program.
#[derive(Debug)]
pub(crate) enum ProgramQueue {
    /// By time.
    Heap(Vec<Entry>),
    /// By arrival.
    Fifo(VecDeque<Entry>),
}

impl StageQueue for ProgramQueue {
    fn new(completion: Completion) -> Self {
        match completion {
            Completion::OutOfOrder => Self::Heap(Vec::with_capacity(256)),
            Completion::InOrder => Self::Fifo(VecDeque::new()),
        }
    }

    #[inline]
    fn push(&mut self, ready_ns: u64, slot: u32) {
        let new = entry(ready_ns, slot);
        match self {
            Self::Heap(heap) => {
                heap.push(new);
                let last = heap.len() - 1;
                rise(heap, last, new);
            }
            Self::Fifo(fifo) => fifo.push_back(new),
        }
    }

    #[inline]
    fn next_ready_ns(&self) -> u64 {
        let first = match self {
            Self::Heap(heap) => heap.first(),
            Self::Fifo(fifo) => fifo.front(),
        };
        first.map_or(u64::MAX, |first| time(*first))
    }

    #[inline]
    fn pop_ready(&mut self, now_ns: u64) -> Option<u32> {
        if self.next_ready_ns() > now_ns {
            return None;
        }
        match self {
            Self::Heap(heap) => {
                let first = heap[0];
                if let Some(last) = heap.pop()
                    && !heap.is_empty()
                {
                    sink(heap, last);
                }
                Some(slot(first))
            }
            Self::Fifo(fifo) => fifo.pop_front().map(slot),
        }
    }
}

/// Lets `new` rise from the free place `hole`.
#[inline]
fn rise(heap: &mut [Entry], mut hole: usize, new: Entry) {
    while hole > 0 {
        let parent = (hole - 1) / 2;
        if time(heap[parent]) <= time(new) {
            break;
        }
        heap[hole] = heap[parent];
        hole = parent;
    }
    heap[hole] = new;
}

/// Fills the free first place: the hole sinks to the bottom, `last` rises from there.
#[inline]
fn sink(heap: &mut [Entry], last: Entry) {
    let len = heap.len();
    let mut hole = 0;
    while hole < (len - 1) / 2 {
        let right = 2 * hole + 2;
        let earlier = right - usize::from(time(heap[right]) > time(heap[right - 1]));
        heap[hole] = heap[earlier];
        hole = earlier;
    }
    if len.is_multiple_of(2) && hole == (len - 2) / 2 {
        let only = 2 * hole + 1;
        heap[hole] = heap[only];
        hole = only;
    }
    rise(heap, hole, last);
}
