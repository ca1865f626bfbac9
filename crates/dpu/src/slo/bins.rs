// SPDX-License-Identifier: Apache-2.0
//! Throughput in bins of 100 ms, and the lowest throughput of bins with demand (VPRI 2.2: minimum
//! instantaneous throughput).
//!
//! *Demand*: a bin counts if an engine had requests of the device in flight (including parked ones)
//! for at least nine tenths of it. Not for all of it: a guest that answers each completion with its
//! next request leaves gaps of microseconds. A device without requests has no least throughput, and
//! a device with few requests is not slow.
//!
//! Engines report with a delay ([`SETTLE_NS`] at most, unless an engine is kept from running), so a
//! bin stays open for that long.

use std::collections::VecDeque;

/// Length of a bin.
pub(crate) const BIN_NS: u64 = 100_000_000;
/// Bins per second.
pub(crate) const BINS_PER_SECOND: u64 = 10;
/// A bin has demand if requests were in flight for this long.
const DEMAND_NS: u64 = BIN_NS / 10 * 9;
/// A bin is closed this long after its end.
const SETTLE_NS: u64 = 4 * BIN_NS;

/// The throughput of a bin with demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Throughput {
    pub requests: u32,
    pub bytes: u64,
}

#[derive(Debug, Clone)]
struct Bin {
    done: Throughput,
    /// How long each engine had requests in flight.
    busy_ns: Box<[u64]>,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Bins {
    /// Number of the first open bin.
    first: u64,
    open: VecDeque<Bin>,
    /// Since when each engine has had requests in flight.
    busy_since: Box<[Option<u64>]>,
}

impl Bins {
    /// All engines idle, for a device with `engine_count` engines.
    pub fn new(engine_count: usize, now_ns: u64) -> Self {
        Self {
            first: now_ns / BIN_NS,
            open: VecDeque::new(),
            busy_since: vec![None; engine_count].into(),
        }
    }

    /// Records a completed request. Requests of closed bins count in the first open one.
    pub fn done(&mut self, at_ns: u64, bytes: u64) {
        let bin = self.bin(at_ns / BIN_NS);
        bin.done.requests = bin.done.requests.saturating_add(1);
        bin.done.bytes = bin.done.bytes.saturating_add(bytes);
    }

    /// The engine has requests in flight from now on.
    pub fn busy(&mut self, engine: usize, at_ns: u64) {
        if let Some(since) = self.busy_since.get_mut(engine) {
            since.get_or_insert(at_ns);
        }
    }

    /// The engine has no request in flight any more.
    pub fn idle(&mut self, engine: usize, at_ns: u64) {
        let since = self.busy_since.get_mut(engine).and_then(Option::take);
        let Some(since) = since else {
            return;
        };
        let mut from = since.max(self.first * BIN_NS);
        while from < at_ns {
            let number = from / BIN_NS;
            let to = at_ns.min((number + 1) * BIN_NS);
            if let Some(busy_ns) = self.bin(number).busy_ns.get_mut(engine) {
                *busy_ns += to - from;
            }
            from = to;
        }
    }

    fn bin(&mut self, number: u64) -> &mut Bin {
        // The index always fits in usize: bins are settled as time passes.
        let at = usize::try_from(number.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let engine_count = self.busy_since.len();
        while self.open.len() <= at {
            self.open.push_back(Bin {
                done: Throughput {
                    requests: 0,
                    bytes: 0,
                },
                busy_ns: vec![0; engine_count].into(),
            });
        }
        &mut self.open[at]
    }

    /// Closes the bins that are over at `now_ns`, and reports each bin with demand.
    pub fn settle(&mut self, now_ns: u64, mut tell: impl FnMut(Throughput)) {
        let until = now_ns.saturating_sub(SETTLE_NS) / BIN_NS;
        while self.first < until {
            let closed = self.open.pop_front();
            if closed.is_none() && self.busy_since.iter().all(Option::is_none) {
                // Only idle time up to there.
                self.first = until;
                return;
            }
            let (start, end) = (self.first * BIN_NS, (self.first + 1) * BIN_NS);
            self.first += 1;
            let told = |engine: usize| closed.as_ref().map_or(0, |bin| bin.busy_ns[engine]);
            let goes_on =
                |since: &Option<u64>| since.map_or(0, |since| end.saturating_sub(since.max(start)));
            let mut busy_ns = self.busy_since.iter().enumerate();
            if busy_ns.any(|(engine, since)| told(engine) + goes_on(since) >= DEMAND_NS) {
                tell(closed.map_or(
                    Throughput {
                        requests: 0,
                        bytes: 0,
                    },
                    |bin| bin.done,
                ));
            }
        }
    }

    /// Heap memory it uses.
    pub fn heap_bytes(&self) -> usize {
        let engines = self.busy_since.len();
        let bin = size_of::<Bin>() + engines * size_of::<u64>();
        self.open.capacity() * bin + engines * size_of::<Option<u64>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn settled(bins: &mut Bins, now_ms: u64) -> Vec<u32> {
        let mut told = Vec::new();
        bins.settle(now_ms * MS, |t| told.push(t.requests));
        told
    }

    #[test]
    fn bin_counts_only_if_requests_were_in_flight_for_nearly_all_of_it() {
        let mut bins = Bins::new(1, 0);
        bins.busy(0, 0);
        bins.done(50 * MS, 4096);
        // Twenty gaps of 400 us: still demand. Then one long gap: none.
        for gap in 0..20 {
            bins.idle(0, (100 + 5 * gap) * MS);
            bins.busy(0, (100 + 5 * gap) * MS + 400_000);
        }
        bins.done(199 * MS, 4096);
        bins.idle(0, 210 * MS);
        bins.done(210 * MS, 4096);
        assert_eq!(settled(&mut bins, 590), [1]);
        assert_eq!(settled(&mut bins, 10_000), [1]);
    }

    #[test]
    fn stall_gives_bins_without_a_request_for_as_long_as_it_lasts() {
        let mut bins = Bins::new(2, 0);
        bins.busy(1, 150 * MS);
        assert_eq!(settled(&mut bins, 1_050), [0, 0, 0, 0]);
        bins.idle(1, 1_120 * MS);
        bins.done(1_120 * MS, 512);
        assert_eq!(settled(&mut bins, 60_000), [0, 0, 0, 0, 0]);
    }

    #[test]
    fn engines_that_are_busy_in_turn_make_no_demand_together() {
        let mut bins = Bins::new(2, 0);
        for engine in 0..2 {
            bins.busy(engine, engine as u64 * 50 * MS);
            bins.idle(engine, (engine as u64 + 1) * 50 * MS);
        }
        assert!(settled(&mut bins, 10_000).is_empty());
    }

    #[test]
    fn engine_that_was_never_named_changes_nothing() {
        let mut bins = Bins::new(1, 0);
        bins.busy(7, 0);
        bins.idle(7, 5_000 * MS);
        assert!(settled(&mut bins, 10_000).is_empty());
    }
}
