// SPDX-License-Identifier: Apache-2.0
//! Requests in order of the time at which they are ready, equal times in order of arrival: no request
//! overtakes another without a reason.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::config::Completion;
use crate::flavour::StageQueue;
use crate::table::SLOTS_MAX;

/// Bits of a slot; the arrival number stands above them, 44 bits.
const SLOT_BITS: u32 = SLOTS_MAX.ilog2();

/// Ready time, then arrival number and slot.
type Entry = (u64, u64);

/// A stage's queue.
#[derive(Debug)]
pub(crate) enum TimedQueue {
    /// By time.
    ByTime {
        /// The waiting requests.
        heap: BinaryHeap<Reverse<Entry>>,
        /// Requests that have ever arrived.
        arrivals: u64,
    },
    /// By arrival: a request that is not ready delays those after it.
    ByArrival(VecDeque<(u64, u32)>),
}

impl StageQueue for TimedQueue {
    fn new(completion: Completion) -> Self {
        match completion {
            Completion::OutOfOrder => Self::ByTime {
                heap: BinaryHeap::with_capacity(256),
                arrivals: 0,
            },
            Completion::InOrder => Self::ByArrival(VecDeque::new()),
        }
    }

    #[inline]
    fn push(&mut self, ready_ns: u64, slot: u32) {
        match self {
            Self::ByTime { heap, arrivals } => {
                heap.push(Reverse((
                    ready_ns,
                    *arrivals << SLOT_BITS | u64::from(slot),
                )));
                *arrivals += 1;
            }
            Self::ByArrival(fifo) => fifo.push_back((ready_ns, slot)),
        }
    }

    #[inline]
    fn next_key(&self) -> u64 {
        match self {
            Self::ByTime { heap, .. } => heap.peek().map_or(u64::MAX, |Reverse((time, _))| *time),
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
            Self::ByTime { heap, .. } => heap.pop().map(|Reverse((_, place))| {
                #[expect(clippy::cast_possible_truncation, reason = "masked to 20 bits")]
                let slot = (place & (SLOTS_MAX as u64 - 1)) as u32;
                slot
            }),
            Self::ByArrival(fifo) => fifo.pop_front().map(|(_, slot)| slot),
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn in_order_queue_with_an_unready_head_hands_out_nothing() {
        let mut queue = TimedQueue::new(Completion::InOrder);
        queue.push(9, 4);
        queue.push(3, 5);
        assert!(drain(&mut queue, 8).is_empty());
        assert_eq!(drain(&mut queue, 9), [4, 5]);
    }
}
