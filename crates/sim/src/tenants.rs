// SPDX-License-Identifier: Apache-2.0
//! Sources by dense number, in order of their first request: the model's state for each tenant is a row of
//! these tables.

use rustc_hash::FxHashMap;

use crate::outcome::{TenantOutcome, ratio};

/// Source ids below this are looked up in an array: the 16-bit ids of hardware and those that a hyper-trace
/// assigns after them.
const ARRAY_SOURCES: u32 = 1 << 18;

/// No number assigned yet.
const NONE: u32 = u32::MAX;

/// Figures of one tenant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) source: u32,
    /// Domain of its last request.
    pub(crate) domain: u32,
    pub(crate) requests: u64,
    /// Whole packets, by the source of their first request.
    pub(crate) packets: u64,
    /// Time that its requests' packets were refused, all requests together.
    pub(crate) waited_ns: u64,
    pub(crate) devtlb_hits: u64,
    pub(crate) prefetch_hits: u64,
    pub(crate) latency_ns: u64,
}

/// All sources seen so far.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_source: Vec<u32>,
    far_sources: FxHashMap<u32, u32>,
    /// Row of each tenant in the tables of its device, with several devices.
    rows: Vec<u32>,
    pub(crate) tallies: Vec<Tally>,
}

impl Tenants {
    /// The dense number of `source`.
    #[inline]
    pub(crate) fn number(&mut self, source: u32) -> u32 {
        match self.by_source.get(source as usize) {
            Some(number) if *number != NONE => *number,
            _ => self.number_new(source),
        }
    }

    #[cold]
    fn number_new(&mut self, source: u32) -> u32 {
        if let Some(number) = self.far_sources.get(&source) {
            return *number;
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most 2^32 source ids, less one"
        )]
        let number = self.tallies.len() as u32;
        self.tallies.push(Tally {
            source,
            ..Tally::default()
        });
        if source < ARRAY_SOURCES {
            let at = source as usize;
            if self.by_source.len() <= at {
                self.by_source.resize(at + 1, NONE);
            }
            self.by_source[at] = number;
        } else {
            self.far_sources.insert(source, number);
        }
        number
    }

    /// The row of `number` in its device's tables.
    pub(crate) fn row(&self, number: u32) -> u32 {
        self.rows[number as usize]
    }

    /// Gives `number` that row if it has none yet; true if it had none.
    pub(crate) fn add_row(&mut self, number: u32, row: u32) -> bool {
        let is_new = self.rows.len() == number as usize;
        if is_new {
            self.rows.push(row);
        }
        is_new
    }

    /// Of `number`.
    #[inline]
    pub(crate) fn tally(&mut self, number: u32) -> &mut Tally {
        &mut self.tallies[number as usize]
    }

    /// Jain's index over the mean time that a request of each tenant took, the including the refusals of
    /// its packet: `(sum x)^2 / (n * sum x^2)`. The bandwidths would show nothing, since the trace fixes
    /// how much each tenant sends.
    pub(crate) fn fairness(&self) -> f64 {
        let times = self
            .tallies
            .iter()
            .filter(|tally| tally.requests > 0)
            .map(|tally| ratio(tally.latency_ns + tally.waited_ns, tally.requests));
        let (count, sum, squares) = times.fold((0.0, 0.0, 0.0), |(count, sum, squares), time| {
            (count + 1.0, sum + time, squares + time * time)
        });
        if squares == 0.0 {
            return 1.0;
        }
        sum * sum / (count * squares)
    }

    /// Each tenant's share of `elapsed_ns`.
    pub(crate) fn outcomes(&self, elapsed_ns: u64, packet_bytes: u64) -> Vec<TenantOutcome> {
        self.tallies
            .iter()
            .map(|tally| TenantOutcome {
                source: tally.source,
                requests: tally.requests,
                packets: tally.packets,
                devtlb_hits: tally.devtlb_hits,
                prefetch_hits: tally.prefetch_hits,
                mean_latency_ns: ratio(tally.latency_ns, tally.requests),
                mean_refused_ns: ratio(tally.waited_ns, tally.requests),
                gbps: ratio(tally.packets * packet_bytes * 8, elapsed_ns),
            })
            .collect()
    }
}
