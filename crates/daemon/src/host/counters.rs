// SPDX-License-Identifier: Apache-2.0
//! [`PoolCounters`]: what this process counts of a VM, added to the counters in its pool, which outlive
//! the process.
//!
//! Each thing is counted where it happens: by the VM's memory, its limit, its tenant. A source here names
//! that place and the pool's counter, and remembers how much the pool has got.

use super::lock::lock;
use pagetide_gmem::PagedMemory;
use pagetide_swap::{Counter, Limit, Pool};
use pagetide_vpri::Tenant;
use std::sync::{Arc, Mutex, atomic::Ordering::Relaxed};

/// The count of this process so far.
type Count = Box<dyn Fn() -> u64 + Send + Sync>;

struct Source {
    counter: Counter,
    count: Count,
    /// Added to the pool so far.
    added: u64,
}

/// See the module. One per VM.
pub(super) struct PoolCounters {
    pool: Arc<Pool>,
    sources: Mutex<Vec<Source>>,
}

impl PoolCounters {
    pub(super) fn new(
        pool: &Arc<Pool>,
        memory: &Arc<PagedMemory>,
        limit: &Arc<Limit>,
        tenant: &Arc<Tenant>,
    ) -> Self {
        let mut sources = of_memory(memory);
        let limit = Arc::clone(limit);
        let over_limit: Count = Box::new(move || limit.over_limit_fills());
        sources.push((Counter::OverLimitFills, over_limit));
        let faulted = Arc::clone(tenant);
        let requests: Count = Box::new(move || faulted.requests());
        sources.push((Counter::DeviceFaults, requests));
        let faulted = Arc::clone(tenant);
        let alias_faults: Count = Box::new(move || faulted.alias_faults());
        sources.push((Counter::AliasFaults, alias_faults));
        let source = |(counter, count)| Source {
            counter,
            count,
            added: 0,
        };
        Self {
            pool: Arc::clone(pool),
            sources: Mutex::new(sources.into_iter().map(source).collect()),
        }
    }

    /// Brings the pool's counters up to date.
    pub(super) fn sync(&self) {
        for source in lock(&self.sources).iter_mut() {
            let now = (source.count)();
            let counter = self.pool.counter(source.counter);
            counter.fetch_add(now - source.added, Relaxed);
            source.added = now;
        }
    }
}

fn of_memory(memory: &Arc<PagedMemory>) -> Vec<(Counter, Count)> {
    macro_rules! counted {
        ($($counter:ident => $field:ident),* $(,)?) => {
            vec![$({
                let memory = Arc::clone(memory);
                let count: Count = Box::new(move || memory.counters().$field.load(Relaxed));
                (Counter::$counter, count)
            }),*]
        };
    }
    counted! {
        EvictedPages => evicted_pages,
        DiscardedPages => discarded_pages,
        CancelledPages => cancelled_pages,
        NeighbourPages => readahead_pages,
        PoisonedPages => poisoned_pages,
        FilledPages => filled_pages,
        JoinedFaults => joined_faults,
        SwappedInAheadPages => swapped_in_ahead_pages,
    }
}
