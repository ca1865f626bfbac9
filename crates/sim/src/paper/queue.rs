// SPDX-License-Identifier: Apache-2.0
//! Requests in order of the time at which they are ready, equal times in order of arrival: no request
//! overtakes another without a reason.
//!
//! A stage adds one of a few delays to the present time, so the times of one delay never run backwards. A
//! request goes to the end of the first *lane* whose last one is not ready later; the next request is the
//! earliest of the lanes' heads. So the order is that of a heap, at the cost of a few comparisons. With more
//! delays than lanes the rest are in a heap.
//!
//! ```text
//!   lane 0   1007 1012 1020      heads: 1007, 13      next: 13
//!   lane 1     13   14           tails: 1020, 14      a request for 15 goes to lane 1
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::config::Completion;
use crate::flavour::StageQueue;
use crate::table::SLOTS_MAX;

/// Bits of a slot; the arrival number stands above them, 44 bits.
const SLOT_BITS: u32 = SLOTS_MAX.ilog2();

/// Lanes of a queue; the stages of the presets have up to five delays.
const LANES: usize = 8;

/// Where the next request is, if it is in the heap.
const HEAP: usize = LANES;

/// Ready time, then arrival number and slot.
type Entry = (u64, u64);

/// Later than every request.
const NEVER: Entry = (u64::MAX, u64::MAX);

/// Requests by time.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: [VecDeque<Entry>; LANES],
    /// The first of each lane.
    heads: [Entry; LANES],
    /// Ready time of the last of each lane; 0 if it is empty.
    tails: [u64; LANES],
    /// Lanes that have ever been used, the first ones.
    used: usize,
    /// What fits into no lane.
    heap: BinaryHeap<Reverse<Entry>>,
    /// The earliest of all, and its lane.
    next: (Entry, usize),
    /// Requests that have ever arrived.
    arrivals: u64,
}

impl Lanes {
    fn new() -> Self {
        Self {
            lanes: std::array::from_fn(|_| VecDeque::new()),
            heads: [NEVER; LANES],
            tails: [0; LANES],
            used: 0,
            heap: BinaryHeap::new(),
            next: (NEVER, HEAP),
            arrivals: 0,
        }
    }

    #[inline]
    fn push(&mut self, ready_ns: u64, slot: u32) {
        let entry = (ready_ns, self.arrivals << SLOT_BITS | u64::from(slot));
        self.arrivals += 1;
        let mut tails = self.tails[..self.used].iter();
        let lane = match tails.position(|tail| *tail <= ready_ns) {
            Some(lane) => lane,
            None if self.used < LANES => {
                self.used += 1;
                self.used - 1
            }
            None => HEAP,
        };
        if lane == HEAP {
            self.heap.push(Reverse(entry));
        } else {
            if self.lanes[lane].is_empty() {
                self.heads[lane] = entry;
            }
            self.lanes[lane].push_back(entry);
            self.tails[lane] = ready_ns;
        }
        if entry < self.next.0 {
            self.next = (entry, lane);
        }
    }

    #[inline]
    fn pop(&mut self) -> u32 {
        let (entry, lane) = self.next;
        if lane == HEAP {
            self.heap.pop();
        } else {
            self.lanes[lane].pop_front();
            match self.lanes[lane].front() {
                Some(head) => self.heads[lane] = *head,
                None => {
                    self.heads[lane] = NEVER;
                    self.tails[lane] = 0;
                }
            }
        }
        let mut next = self
            .heap
            .peek()
            .map_or((NEVER, HEAP), |Reverse(entry)| (*entry, HEAP));
        for (lane, head) in self.heads[..self.used].iter().enumerate() {
            if *head < next.0 {
                next = (*head, lane);
            }
        }
        self.next = next;
        #[expect(clippy::cast_possible_truncation, reason = "masked to 20 bits")]
        let slot = (entry.1 & (SLOTS_MAX as u64 - 1)) as u32;
        slot
    }
}

/// A stage's queue.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there are four of them in a run")]
pub(crate) enum TimedQueue {
    /// By time.
    ByTime(Lanes),
    /// By arrival: a request that is not ready delays those after it.
    ByArrival(VecDeque<(u64, u32)>),
}

impl StageQueue for TimedQueue {
    fn new(completion: Completion) -> Self {
        match completion {
            Completion::OutOfOrder => Self::ByTime(Lanes::new()),
            Completion::InOrder => Self::ByArrival(VecDeque::new()),
        }
    }

    #[inline]
    fn push(&mut self, ready_ns: u64, slot: u32) {
        match self {
            Self::ByTime(lanes) => lanes.push(ready_ns, slot),
            Self::ByArrival(fifo) => fifo.push_back((ready_ns, slot)),
        }
    }

    #[inline]
    fn next_key(&self) -> u64 {
        match self {
            Self::ByTime(lanes) => lanes.next.0.0,
            Self::ByArrival(fifo) => fifo.front().map_or(u64::MAX, |(time, _)| *time),
        }
    }

    #[inline]
    fn ready_ns(key: u64) -> u64 {
        key
    }

    #[inline]
    fn pop_ready(&mut self, now_ns: u64) -> Option<u32> {
        if self.next_key() > now_ns {
            return None;
        }
        match self {
            Self::ByTime(lanes) if lanes.next.0 == NEVER => None,
            Self::ByTime(lanes) => Some(lanes.pop()),
            Self::ByArrival(fifo) => fifo.pop_front().map(|(_, slot)| slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use pagetide_random::SplitMix64;

    use super::*;

    fn drain(queue: &mut TimedQueue, now_ns: u64) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop_ready(now_ns)).collect()
    }

    #[test]
    fn equal_times_come_out_in_order_of_arrival() {
        let mut queue = TimedQueue::new(Completion::OutOfOrder);
        for (time, slot) in [(7, 9), (5, 8), (7, 1), (5, 3), (7, 0), (6, 2)] {
            queue.push(time, slot);
        }
        assert_eq!(queue.next_key(), 5);
        assert_eq!(drain(&mut queue, 6), [8, 3, 2]);
        assert_eq!(drain(&mut queue, 7), [9, 1, 0]);
        assert_eq!(queue.next_key(), u64::MAX);
    }

    #[test]
    fn lanes_give_the_order_of_a_heap_whatever_the_times() {
        for seed in 0..200 {
            let mut random = SplitMix64::new(seed);
            let mut queue = TimedQueue::new(Completion::OutOfOrder);
            let mut naive: Vec<(u64, u32)> = Vec::new();
            let delays = 1 + random.below(12);
            let mut now_ns = 0;
            for slot in 0..400 {
                now_ns += random.below(3);
                let ready_ns = match seed % 2 {
                    0 => now_ns + random.below(delays) * 50,
                    _ => random.below(1000),
                };
                queue.push(ready_ns, slot);
                naive.push((ready_ns, slot));
                while random.below(5) < 2 {
                    // The first of those that are ready first.
                    let first = naive.iter().map(|(time, _)| *time).min();
                    let ready = first.filter(|time| *time <= now_ns);
                    let expected = ready.map(|time| {
                        let at = naive.iter().position(|entry| entry.0 == time).unwrap();
                        naive.remove(at).1
                    });
                    assert_eq!(queue.pop_ready(now_ns), expected, "seed {seed}");
                }
                let first = naive.iter().map(|(time, _)| *time).min();
                assert_eq!(queue.next_key(), first.unwrap_or(u64::MAX));
            }
        }
    }

    #[test]
    fn in_order_queue_with_an_unready_head_hands_out_nothing() {
        let mut queue = TimedQueue::new(Completion::InOrder);
        queue.push(9, 4);
        queue.push(3, 5);
        assert!(drain(&mut queue, 8).is_empty());
        assert_eq!(drain(&mut queue, 9), [4, 5]);
    }
}
