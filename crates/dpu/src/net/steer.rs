// SPDX-License-Identifier: Apache-2.0
//! Which pair a packet of a flow is received on.
//!
//! A driver sends the packets of a flow on the pair of the CPU that works on it, so what comes back
//! should be received on the same pair (virtio 1.2, 5.1.6.5.6). A table remembers that for each
//! number of a [flow](super::flow); a flow that was never sent goes to a pair by its number.
//!
//! ```text
//!   flow ─► entry │ wanted: pair that sent last │ current: pair that receives │
//! ```
//! Packets that wait on the *current* pair must not be overtaken. So a flow moves to the wanted pair
//! only while nothing waits on the current one: neither in its queue, nor for its buffers.
//!
//! Engines of all pairs write it, one reads it, and a lost update only costs a detour until the next
//! packet: entries are plain atomics.

use super::flow::FLOWS;
use std::sync::atomic::{AtomicU16, Ordering};

/// An entry of a flow that was never sent.
const UNKNOWN: u16 = u16::MAX;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct FlowTable {
    pairs: u16,
    entries: Box<[AtomicU16]>,
}

/// An entry, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    wanted: u16,
    current: u16,
}

impl Entry {
    fn of(word: u16) -> Option<Self> {
        (word != UNKNOWN).then_some(Self {
            wanted: word >> 8,
            current: word & 0xff,
        })
    }

    fn word(self) -> u16 {
        self.wanted << 8 | self.current
    }
}

impl FlowTable {
    /// An empty one, for a device of so many pairs, fewer than 255.
    pub fn new(pairs: u16) -> Self {
        debug_assert!((1..255).contains(&pairs), "{pairs} pairs");
        Self {
            pairs,
            entries: (0..FLOWS).map(|_| AtomicU16::new(UNKNOWN)).collect(),
        }
    }

    fn by_number(&self, flow: usize) -> u16 {
        u16::try_from(flow).unwrap_or(0) % self.pairs
    }

    /// A packet of the flow was sent on `pair`.
    pub fn sent(&self, flow: usize, pair: u16) {
        let place = &self.entries[flow % FLOWS];
        let word = place.load(Ordering::Relaxed);
        let current = match Entry::of(word) {
            Some(entry) if entry.wanted == pair => return,
            Some(entry) => entry.current,
            None => self.by_number(flow),
        };
        let wanted = pair;
        let entry = Entry { wanted, current };
        // If another engine was faster, the next packet tells it again.
        let _told =
            place.compare_exchange(word, entry.word(), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The pair for a packet of the flow that came. `is_idle` tells whether nothing waits on a pair.
    pub fn steer(&self, flow: usize, is_idle: impl Fn(u16) -> bool) -> u16 {
        let place = &self.entries[flow % FLOWS];
        let word = place.load(Ordering::Relaxed);
        let Some(entry) = Entry::of(word) else {
            return self.by_number(flow);
        };
        if entry.wanted == entry.current || !is_idle(entry.current) {
            return entry.current;
        }
        let current = entry.wanted;
        let moved = Entry { current, ..entry };
        match place.compare_exchange(word, moved.word(), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => current,
            Err(_) => entry.current,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::HashMap;

    /// A flow is received where it was sent last, as soon as nothing waits where it is.
    #[test]
    fn table_does_what_a_map_does() {
        for seed in 0..30 {
            let mut random = SplitMix64::new(seed);
            let pairs = 1 + u16::try_from(random.below(32)).unwrap();
            let table = FlowTable::new(pairs);
            // By flow: the pair that sent last, and the pair that receives.
            let mut map: HashMap<usize, (u16, u16)> = HashMap::new();
            for _ in 0..5_000 {
                let flow = usize::try_from(random.below(40)).unwrap() * 25;
                let pair = u16::try_from(random.below(u64::from(pairs))).unwrap();
                let by_number = u16::try_from(flow).unwrap() % pairs;
                let known = map.get(&flow).copied();
                if random.below(2) == 0 {
                    table.sent(flow, pair);
                    map.insert(flow, (pair, known.map_or(by_number, |(_, at)| at)));
                    continue;
                }
                let busy = u16::try_from(random.below(u64::from(pairs))).unwrap();
                let steered = table.steer(flow, |pair| pair != busy);
                let expected = match known {
                    None => by_number,
                    Some((wanted, current)) if current != busy => {
                        map.insert(flow, (wanted, wanted));
                        wanted
                    }
                    Some((_, current)) => current,
                };
                assert_eq!(steered, expected);
            }
        }
    }
}
