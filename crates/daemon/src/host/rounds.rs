// SPDX-License-Identifier: Apache-2.0
//! The rounds of one VM: looking for hazards, scanning, reclaiming. One thread a VM.
//!
//! ```text
//!   wait: low mark passed, somebody asks, or a second has gone by
//!     at most once a second   hazards looked for; counts put right and into the pool
//!     every few seconds       scan: hot and cold
//!     below the low mark      reclaim to the high mark: cold sections, then resting
//!                             pages, then scan again and a moment later once more
//! ```
//! While a hazard forbids eviction the limit is not enforced: a fill would only
//! wait for what cannot come.

use super::vm::VmCore;
use pagetide_addr::PAGE_BYTES;
use pagetide_swap::{
    Counter, Reclaimer,
    limit::Wake,
    reclaim::{Reach, Reclaimed, UNMAPPED_MIN},
};
use pagetide_vmm::{hazards, threads};
use std::{
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

/// Hazards are looked for, and counts put right, this often at most.
const LOOK_ROUND: Duration = Duration::from_secs(1);
/// Sections drift among the sets this often when nothing presses.
const SCAN_ROUND: Duration = Duration::from_secs(5);
/// Scans of one reclaim before it gives up for this time: each costs every mapped page a small fault.
const PRESSED_SCANS_MAX: u32 = 4;

/// A request to evict a number of pages now, whatever the limit.
pub(super) struct ReclaimOrder {
    pub(super) pages: u64,
    pub(super) done: mpsc::Sender<Reclaimed>,
}

/// What the rounds need beside the VM.
pub(super) struct Rounds {
    vm: Arc<VmCore>,
    reclaimer: Reclaimer,
    started: Instant,
    looked_at: Option<Instant>,
    scanned_at: Option<Instant>,
    told: Option<String>,
}

impl Rounds {
    pub(super) fn new(vm: Arc<VmCore>, reclaimer: Reclaimer) -> Self {
        Self {
            vm,
            reclaimer,
            started: Instant::now(),
            looked_at: None,
            scanned_at: None,
            told: None,
        }
    }

    /// Until the VM's limit is stopped.
    pub(super) fn run(mut self) {
        loop {
            let wake = self.vm.limit.wait_for_work(LOOK_ROUND);
            if wake == Wake::Stopped {
                break;
            }
            if is_due(self.looked_at, LOOK_ROUND) {
                self.look_round();
            }
            if !self.vm.may_evict() {
                self.refuse_orders();
                continue;
            }
            if is_due(self.scanned_at, SCAN_ROUND) {
                self.scan();
            }
            if self.vm.limit.is_below_low_mark() {
                self.reclaim_to_high_mark();
            }
            self.obey_orders();
        }
        self.refuse_orders();
        self.vm.sync_counters();
    }

    fn look_round(&mut self) {
        self.looked_at = Some(Instant::now());
        match hazards::check(&self.vm.vmm, &self.vm.layout) {
            Ok(bars) => self
                .vm
                .set_bars(bars.iter().map(ToString::to_string).collect()),
            Err(error) => self
                .vm
                .set_bars(vec![format!("the VM cannot be looked at: {error}")]),
        }
        self.vm.enforce_limit();
        self.vm.sync_counters();
        let pid = self.vm.vmm.pid();
        let cpus = threads::cpus_of(pid, &threads::vcpu_threads(pid));
        self.vm.tenant.set_cpus(cpus);
        if let Err(error) = self.reclaimer.trim_store() {
            self.tell(format!(
                "memory of the pool could not be given back: {error}"
            ));
        }
        let counts = self.reclaimer.sets().counts();
        *self.vm.sets.lock().unwrap_or_else(PoisonError::into_inner) = counts.to_vec();
    }

    fn scan(&mut self) {
        self.scanned_at = Some(Instant::now());
        if let Err(error) = self.reclaimer.scan(self.started.elapsed()) {
            self.tell(format!("accesses cannot be told: {error}"));
        }
    }

    fn reclaim_to_high_mark(&mut self) {
        self.vm.enforce_limit();
        let limit = Arc::clone(&self.vm.limit);
        self.reclaim(|_| limit.pages_to_high_mark());
    }

    /// Evicts until `wanted`, told what was evicted so far, says 0 or nothing more can go.
    fn reclaim(&mut self, wanted: impl Fn(u64) -> u64) -> Reclaimed {
        let mut total = Reclaimed::default();
        let mut scans = 0;
        while self.vm.may_evict() {
            for reach in [Reach::ColdOnly, Reach::AllResting] {
                let pages = wanted(total.evicted_pages);
                if pages == 0 {
                    return total;
                }
                let vm = Arc::clone(&self.vm);
                let part = self
                    .reclaimer
                    .reclaim(self.started.elapsed(), pages, reach, || {
                        !vm.limit.is_stopped()
                    });
                total.evicted_pages += part.evicted_pages;
                total.busy_sections += part.busy_sections;
                if let Some(stop) = part.stopped {
                    self.tell(stop.to_string());
                    total.stopped = Some(stop);
                    // Not again at once: nothing here will have changed.
                    self.vm.limit.rest(UNMAPPED_MIN);
                    return total;
                }
            }
            if wanted(total.evicted_pages) == 0 || scans == PRESSED_SCANS_MAX {
                return total;
            }
            self.scan();
            scans += 1;
            if self.vm.limit.rest(UNMAPPED_MIN) == Wake::Stopped {
                return total;
            }
        }
        total
    }

    fn obey_orders(&mut self) {
        while let Some(order) = self.vm.next_order() {
            let pages = order.pages;
            // Unmap everything now, so that what is in use shows itself.
            self.scan();
            let done = match self.vm.limit.rest(UNMAPPED_MIN) {
                Wake::Stopped => Reclaimed::default(),
                _ => self.reclaim(|evicted| pages.saturating_sub(evicted)),
            };
            self.answer(&order, done);
        }
    }

    fn refuse_orders(&self) {
        while let Some(order) = self.vm.next_order() {
            self.answer(&order, Reclaimed::default());
        }
    }

    fn answer(&self, order: &ReclaimOrder, done: Reclaimed) {
        self.vm.sync_counters();
        if order.done.send(done).is_err() {
            tracing::debug!(vm = self.vm.name, "whoever asked for a reclaim has left");
        }
    }

    /// Logs trouble once until it changes.
    fn tell(&mut self, trouble: String) {
        if self.told.as_ref() != Some(&trouble) {
            tracing::warn!(vm = self.vm.name, "{trouble}");
            *self
                .vm
                .trouble
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(trouble.clone());
            self.told = Some(trouble);
        }
    }
}

fn is_due(last: Option<Instant>, every: Duration) -> bool {
    last.is_none_or(|at| at.elapsed() >= every)
}

/// Orders that wait for the rounds.
#[derive(Default)]
pub(super) struct Orders(Mutex<Vec<ReclaimOrder>>);

impl Orders {
    pub(super) fn push(&self, order: ReclaimOrder) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(order);
    }

    pub(super) fn pop(&self) -> Option<ReclaimOrder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

impl VmCore {
    /// Puts the limit right by what the kernel says is present.
    pub(super) fn enforce_limit(&self) {
        match self.layout.allocated_bytes() {
            Ok(bytes) => {
                let limit = if self.may_evict() {
                    self.pool.limit_bytes()
                } else {
                    None
                };
                self.limit
                    .put_right(limit.map(|bytes| bytes / PAGE_BYTES), bytes / PAGE_BYTES);
            }
            Err(error) => tracing::warn!(vm = self.name, %error, "what is resident cannot be told"),
        }
    }

    /// Puts the counts of this process into the pool, where they outlive it.
    pub(super) fn sync_counters(&self) {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        let counters = self.space.counters();
        let pairs: [(Counter, &AtomicU64, usize); 8] = [
            (Counter::EvictedPages, &counters.evicted_pages, 0),
            (Counter::DiscardedPages, &counters.discarded_pages, 1),
            (Counter::CancelledPages, &counters.cancelled_pages, 2),
            (Counter::NeighbourPages, &counters.neighbour_pages, 3),
            (Counter::PoisonedPages, &counters.poisoned_pages, 4),
            (Counter::FilledPages, &counters.filled_pages, 5),
            (Counter::JoinedFaults, &counters.joined_faults, 6),
            (Counter::OverLimitFills, self.limit.over_limit_count(), 7),
        ];
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        for (counter, now, index) in pairs {
            let now = now.load(Relaxed);
            self.pool
                .counter(counter)
                .fetch_add(now - synced[index], Relaxed);
            synced[index] = now;
        }
        let faults = self.tenant.requests();
        self.pool
            .counter(Counter::DeviceFaults)
            .fetch_add(faults - synced[8], Relaxed);
        synced[8] = faults;
        let slips = self
            .alias
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map_or(synced[9], |a| a.faults());
        self.pool
            .counter(Counter::AliasFaults)
            .fetch_add(slips - synced[9], Relaxed);
        synced[9] = slips;
    }
}
