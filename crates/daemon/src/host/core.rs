// SPDX-License-Identifier: Apache-2.0
//! [`VmCore`]: the parts of a VM that all its threads use, and what is known of it.

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

/// The lock's content, whatever became of its last holder: each is set whole or not at all.
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
    /// What is behind the regions of the space: the VM's RAM.
    pub(super) memory: Arc<PagedMemory>,
    /// The space with its devices, to which RAM is added and from which it is removed.
    pub(super) whole: VmSpace,
    pub(super) limit: Arc<Limit>,
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) spaces: Arc<dyn IoSpaces>,
    pub(super) tenant: Arc<Tenant>,
    /// How its heat is learnt.
    pub(super) tracker: Way,
    /// What keeps sections that devices are about to touch from being chosen.
    pub(super) protection: Arc<VmProtection>,
    pub(super) latencies: Arc<Latencies>,
    pub(super) incidents: Arc<VmIncidents>,
    pub(super) heat: Mutex<Heat>,
    /// Why eviction rests for now, though no hazard forbids it: a full pool, a kernel that refuses.
    pub(super) suspended: Mutex<Option<String>>,
    pub(super) detach: DetachNews,
    pub(super) synced: Mutex<[u64; 10]>,
    pub(super) bars: Mutex<Vec<String>>,
    /// What an operator should know though it forbids nothing.
    pub(super) warnings: Mutex<Vec<String>>,
    pub(super) orders: Orders,
    pub(super) userfaultfd: Arc<Userfaultfd>,
    /// Where those may run who serve its faults beside the reader.
    pub(super) server_cpus: Arc<ServerCpus>,
}

/// What is known of detaches that came, or will come, to nothing.
#[derive(Default)]
pub(super) struct DetachNews {
    /// The one that is under way is to stop.
    pub(super) stop: AtomicBool,
    /// One has failed: eviction rests until another one succeeds.
    pub(super) failed: AtomicBool,
}

/// What is known of how hot the VM's memory is.
#[derive(Clone, Debug, Default)]
pub(super) struct Heat {
    pub(super) sets: Vec<(Level, u64)>,
    pub(super) report: HeatReport,
    /// When all sections had been looked at.
    pub(super) swept_at: Option<Instant>,
    pub(super) reserve_sections: u64,
}

/// A request to evict a number of pages now, whatever the limit.
pub(super) struct ReclaimOrder {
    pub(super) pages: u64,
    pub(super) done: mpsc::Sender<Reclaimed>,
}

/// Orders that wait for the rounds, for as long as those run.
#[derive(Default)]
pub(super) struct Orders(Mutex<OrderList>);

#[derive(Default)]
struct OrderList {
    waiting: Vec<ReclaimOrder>,
    closed: bool,
}

impl Orders {
    /// Gives an order to the rounds; it is dropped unanswered if they have ended.
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

    /// From now on nobody obeys; whoever waits for an answer learns it.
    pub(super) fn close(&self) {
        let mut list = lock(&self.0);
        list.closed = true;
        list.waiting.clear();
    }
}

impl VmCore {
    /// True while nothing forbids eviction.
    pub(super) fn may_evict(&self) -> bool {
        lock(&self.bars).is_empty()
            && lock(&self.suspended).is_none()
            && self.incidents.stopped().is_none()
    }

    /// Guest RAM that somebody has pinned or locked, as far as the kernel tells.
    pub(super) fn pinned_bytes(&self) -> u64 {
        hazards::pinned_bytes(&self.vmm).unwrap_or(0)
    }

    /// TrackerAdapter for what forbids eviction now, beside what is `known` to.
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

    /// Writes into the pool that the VM's RAM is that of `layout`, in one stroke.
    pub(super) fn remember_ram(&self, layout: &RamLayout) -> Result<(), ControlError> {
        identity::remember(&self.pool, &self.identity.with_ram(layout))
    }

    /// RAM has come or gone: what stopped eviction may have been that, and the limit counts anew.
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

    /// Lets eviction rest; said once. The limit is not enforced meanwhile: a fill would only wait.
    pub(super) fn suspend(&self, why: String) {
        self.limit.reserve().close();
        let mut suspended = lock(&self.suspended);
        if suspended.as_ref() != Some(&why) {
            tracing::warn!(vm = self.name, "not evicting for now: {why}");
            *suspended = Some(why);
        }
    }

    /// Takes note of what forbids eviction now.
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

    /// Takes note of what an operator should know now.
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

    /// Puts the limit right by what the kernel says is present.
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
            Err(error) => tracing::warn!(vm = self.name, %error, "what is resident cannot be told"),
        }
    }

    /// Puts the counts of this process into the pool, where they outlive it.
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
