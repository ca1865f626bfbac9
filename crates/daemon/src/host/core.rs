// SPDX-License-Identifier: Apache-2.0
//! [`VmCore`]: the parts of a VM that all its threads use, and its shared state.

use super::{
    identity::{self, Identity},
    sink::VmIncidents,
    space::VmSpace,
    tracker::Way,
};
use crate::{control::ControlError, protection::vm::VmProtection};
use pagetide_addr::PAGE_BYTES;
use pagetide_gmem::{AddressSpace, PagedMemory};
use pagetide_policy::sets::Level;
use pagetide_swap::{Counter, HeatReport, Limit, Pool, PoolStore, reclaim::Reclaimed};
use pagetide_sys::uffd::Userfaultfd;
use pagetide_vmm::{
    Refusal,
    hazards::{self, EvictionBlocker},
    layout::{LiveLayout, RamLayout},
    process::VmmProcess,
    servers::ServerCpus,
};
use pagetide_vpri::{DmaMmu, IoSpaces, Latencies, Tenant};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    time::Instant,
};

/// The lock's content, even if its last holder panicked: each value is set whole or not at all.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The parts of a VM that its threads use.
pub(super) struct VmCore {
    pub(super) name: String,
    pub(super) identity: Identity,
    pub(super) vmm: VmmProcess,
    pub(super) layout: Arc<LiveLayout>,
    pub(super) pool: Arc<Pool>,
    pub(super) store: Arc<PoolStore>,
    pub(super) space: Arc<AddressSpace>,
    /// The VM's RAM, which backs the regions of the space.
    pub(super) memory: Arc<PagedMemory>,
    /// The space with its devices, to which RAM is added and from which it is removed.
    pub(super) whole: VmSpace,
    pub(super) limit: Arc<Limit>,
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) spaces: Arc<dyn IoSpaces>,
    pub(super) tenant: Arc<Tenant>,
    /// How the VM's heat is measured.
    pub(super) tracker: Way,
    /// Keeps sections that devices are about to touch from being evicted.
    pub(super) protection: Arc<VmProtection>,
    pub(super) latencies: Arc<Latencies>,
    pub(super) incidents: Arc<VmIncidents>,
    pub(super) heat: Mutex<Heat>,
    /// Why eviction is suspended although no hazard forbids it: a full pool, or an error of the kernel.
    pub(super) suspended: Mutex<Option<String>>,
    pub(super) detach: DetachNews,
    pub(super) synced: Mutex<[u64; 10]>,
    pub(super) bars: Mutex<Vec<String>>,
    /// Conditions that an operator should know about although they do not block eviction.
    pub(super) warnings: Mutex<Vec<String>>,
    pub(super) orders: Orders,
    pub(super) userfaultfd: Arc<Userfaultfd>,
    /// CPUs on which the threads that serve its faults beside the reader may run.
    pub(super) server_cpus: Arc<ServerCpus>,
}

/// State of detaches that have failed, or are to stop.
#[derive(Default)]
pub(super) struct DetachNews {
    /// The detach under way is to stop.
    pub(super) stop: AtomicBool,
    /// A detach has failed: eviction stays suspended until another one succeeds.
    pub(super) failed: AtomicBool,
}

/// What is known about the heat of the VM's memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Heat {
    pub(super) sets: Vec<(Level, u64)>,
    pub(super) report: HeatReport,
    /// When the last sweep over all sections ended.
    pub(super) swept_at: Option<Instant>,
    pub(super) reserve_sections: u64,
}

/// A request to evict a number of pages now, regardless of the limit.
pub(super) struct ReclaimOrder {
    pub(super) pages: u64,
    pub(super) done: mpsc::Sender<Reclaimed>,
}

/// Orders that wait for the reclaim thread, as long as it runs.
#[derive(Default)]
pub(super) struct Orders(Mutex<OrderList>);

#[derive(Default)]
struct OrderList {
    waiting: Vec<ReclaimOrder>,
    closed: bool,
}

impl Orders {
    /// Queues an order for the reclaim thread; drops it unanswered if that thread has ended.
    pub(super) fn push(&self, order: ReclaimOrder) {
        let mut list = lock(&self.0);
        if !list.closed {
            list.waiting.push(order);
        }
    }

    /// Undoes [`Self::close`].
    pub(super) fn open(&self) {
        lock(&self.0).closed = false;
    }

    pub(super) fn pop(&self) -> Option<ReclaimOrder> {
        lock(&self.0).waiting.pop()
    }

    /// From now on no thread takes orders; callers that wait for an answer get an error.
    pub(super) fn close(&self) {
        let mut list = lock(&self.0);
        list.closed = true;
        list.waiting.clear();
    }
}

impl VmCore {
    /// True while eviction is allowed.
    pub(super) fn may_evict(&self) -> bool {
        lock(&self.bars).is_empty()
            && lock(&self.suspended).is_none()
            && self.incidents.stopped().is_none()
    }

    /// Guest RAM that some process has pinned or locked, as far as the kernel reports it.
    pub(super) fn pinned_bytes(&self) -> u64 {
        hazards::pinned_bytes(&self.vmm).unwrap_or(0)
    }

    /// Checks for hazards, and sets the eviction blockers to those found and those in `known`.
    pub(super) fn look_for_hazards(&self, known: Result<Vec<EvictionBlocker>, Refusal>) {
        let found = hazards::check(&self.vmm, &self.layout.look(), &self.spaces.processes());
        match known.and_then(|known| Ok((known, found?))) {
            Ok((known, found)) => {
                let bars = known.iter().chain(&found).map(ToString::to_string);
                let shortage = self.store.room().shortage().map(|it| it.to_string());
                self.set_bars(
                    bars.chain(self.spaces.eviction_blocker())
                        .chain(shortage)
                        .collect(),
                );
            }
            Err(error) => self.set_bars(vec![format!("the VM cannot be looked at: {error}")]),
        }
    }

    /// Records the files of `layout` as the VM's RAM in the pool, atomically.
    pub(super) fn remember_ram(&self, layout: &RamLayout) -> Result<(), ControlError> {
        identity::remember(&self.pool, &self.identity.with_ram(layout))
    }

    /// RAM was plugged or unplugged: this may end a suspension of eviction, and the limit is recomputed.
    pub(super) fn ram_changed(&self) {
        self.limit.reserve().ram_changed();
        if !self.detach.failed.load(Relaxed) {
            *lock(&self.suspended) = None;
        }
        let layout = self.layout.look();
        let ram = layout.files().iter().map(|file| file.pages()).collect();
        self.protection.ram_changed(ram);
        self.enforce_limit();
        self.limit.want_reclaim();
    }

    /// Suspends eviction; logged once per reason. The limit is not enforced meanwhile: fills would only
    /// wait.
    pub(super) fn suspend(&self, why: String) {
        self.limit.reserve().close();
        let mut suspended = lock(&self.suspended);
        if suspended.as_ref() != Some(&why) {
            tracing::warn!(vm = self.name, "not evicting for now: {why}");
            *suspended = Some(why);
        }
    }

    /// Sets the eviction blockers and logs changes.
    pub(super) fn set_bars(&self, bars: Vec<String>) {
        let mut known = lock(&self.bars);
        if *known != bars {
            for bar in &bars {
                tracing::warn!(vm = self.name, "not evicting: {bar}");
            }
            if bars.is_empty() {
                tracing::info!(
                    vm = self.name,
                    "evicting again: nothing forbids it any more"
                );
            }
            *known = bars;
        }
    }

    /// Sets the operator warnings and logs new ones.
    pub(super) fn set_warnings(&self, warnings: Vec<String>) {
        let mut known = lock(&self.warnings);
        for warning in warnings.iter().filter(|warning| !known.contains(warning)) {
            tracing::warn!(vm = self.name, "{warning}");
        }
        *known = warnings;
    }

    pub(super) fn bars(&self) -> Vec<String> {
        lock(&self.bars).clone()
    }

    pub(super) fn next_order(&self) -> Option<ReclaimOrder> {
        self.orders.pop()
    }

    /// Corrects the limit's count by what the kernel reports as resident.
    pub(super) fn enforce_limit(&self) {
        match self.layout.look().allocated_bytes() {
            Ok(bytes) => {
                let limit = if self.may_evict() {
                    self.pool.limit_bytes()
                } else {
                    None
                };
                self.limit
                    .put_right(limit.map(|bytes| bytes / PAGE_BYTES), bytes / PAGE_BYTES);
            }
            Err(error) => tracing::warn!(vm = self.name, %error, "how much is resident is unknown"),
        }
    }

    /// Adds the counts of this process to the pool, where they outlive it.
    pub(super) fn sync_counters(&self) {
        use std::sync::atomic::AtomicU64;
        let counters = self.memory.counters();
        let pairs: [(Counter, &AtomicU64, usize); 8] = [
            (Counter::EvictedPages, &counters.evicted_pages, 0),
            (Counter::DiscardedPages, &counters.discarded_pages, 1),
            (Counter::CancelledPages, &counters.cancelled_pages, 2),
            (Counter::NeighbourPages, &counters.readahead_pages, 3),
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
        let alias_faults = self.tenant.alias_faults();
        self.pool
            .counter(Counter::AliasFaults)
            .fetch_add(alias_faults - synced[9], Relaxed);
        synced[9] = alias_faults;
    }
}
