// SPDX-License-Identifier: Apache-2.0
//! [`VmCore`]: the parts of a VM that all its threads use, and its shared state.

use super::{
    blockers::{Blocker, EvictionGate},
    budget::VmSeat,
    counters::PoolCounters,
    holds::Holds,
    identity::{self, Identity},
    lock::lock,
    reclaim_requests::ReclaimRequests,
    sink::VmIncidents,
    space::VmSpace,
    tracker::SampleMethod,
};
use crate::{control::ControlError, protection::vm::VmProtection};
use pagetide_addr::PAGE_BYTES;
use pagetide_policy::sets::Level;
use pagetide_swap::{
    HeatReport, Limit, Pool, PoolStore,
    limit::{Force, Ruling},
    slow::SlowStore,
};
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
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

/// The parts of a VM that its threads use.
pub(super) struct VmCore {
    pub(super) name: String,
    pub(super) identity: Identity,
    pub(super) vmm: VmmProcess,
    pub(super) layout: Arc<LiveLayout>,
    pub(super) pool: Arc<Pool>,
    pub(super) store: Arc<PoolStore>,
    /// What it has in slow tiers, if there can be anything.
    pub(super) slow: Option<Arc<SlowStore>>,
    /// The space with its devices, to which RAM is added and from which it is removed, and the memory
    /// behind its regions.
    pub(super) space: VmSpace,
    pub(super) limit: Arc<Limit>,
    /// Its place under the host's budget.
    pub(super) seat: Arc<VmSeat>,
    pub(super) dma: VmDma,
    pub(super) faults: VmFaults,
    pub(super) heat: VmHeat,
    /// Keeps sections that devices are about to touch from being evicted.
    pub(super) protection: Arc<VmProtection>,
    pub(super) counters: PoolCounters,
    /// Times that its vCPUs were stopped.
    pub(super) holds: Holds,
    /// Whether pages may be evicted, and why not.
    pub(super) gate: EvictionGate,
    pub(super) detach: DetachNews,
    pub(super) requests: ReclaimRequests,
}

/// The VM as its devices' DMA and their page requests see it.
pub(super) struct VmDma {
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) spaces: Arc<dyn IoSpaces>,
    pub(super) tenant: Arc<Tenant>,
}

/// What the faults of its vCPUs come by, and what is known of them.
pub(super) struct VmFaults {
    pub(super) userfaultfd: Arc<Userfaultfd>,
    /// CPUs on which the threads that serve its faults beside the reader may run.
    pub(super) server_cpus: Arc<ServerCpus>,
    pub(super) latencies: Arc<Latencies>,
    pub(super) incidents: Arc<VmIncidents>,
}

/// How the VM's heat is measured, and what the last round of its reclaim thread knew of it.
pub(super) struct VmHeat {
    pub(super) method: SampleMethod,
    pub(super) last: Mutex<Heat>,
}

impl VmHeat {
    /// Nothing is known yet.
    pub(super) fn new(method: SampleMethod) -> Self {
        Self {
            method,
            last: Mutex::default(),
        }
    }
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
    /// Memory that all this takes.
    pub(super) metadata_bytes: u64,
}

impl VmCore {
    /// True while eviction is allowed.
    pub(super) fn may_evict(&self) -> bool {
        self.gate.is_open() && self.faults.incidents.stopped().is_none()
    }

    /// Guest RAM that some process has pinned or locked, as far as the kernel reports it.
    pub(super) fn pinned_bytes(&self) -> u64 {
        hazards::pinned_bytes(&self.vmm).unwrap_or(0)
    }

    /// Checks for hazards, and sets the eviction blockers to those found and those in `known`.
    pub(super) fn look_for_hazards(&self, known: Result<Vec<EvictionBlocker>, Refusal>) {
        let found = hazards::check(&self.vmm, &self.layout.look(), &self.dma.spaces.processes());
        let blockers = match known.and_then(|known| Ok((known, found?))) {
            Ok((known, found)) => {
                let hazards = known.into_iter().chain(found).map(Blocker::from);
                let devices = self.dma.spaces.eviction_blocker().map(Blocker::Devices);
                hazards.chain(devices).collect()
            }
            Err(refusal) => vec![Blocker::Unknown {
                why: refusal.to_string(),
            }],
        };
        self.gate.set_blockers(&self.name, blockers);
    }

    /// Looks whether the store is full, and whether a full one has room again. The limit of fills follows:
    /// none waits for room that may not come.
    pub(super) fn look_at_store(&self) {
        self.store.look_for_room(Instant::now());
        let full = self.store.full();
        if self.gate.store_is(&self.name, full) {
            self.enforce_limit();
        }
    }

    /// Memory that the record of the VM's pages takes, but for policies.
    pub(super) fn metadata_bytes(&self) -> u64 {
        let bytes = self.store.bytes();
        let in_pool = (self.pool.charged_bytes()).saturating_sub(bytes.chunk_bytes);
        let sections = self.space.memory.table().section_bytes();
        let domains = self.dma.mmu.domains();
        let attributes: u64 = domains.iter().map(|domain| domain.metadata_bytes()).sum();
        let heat = lock(&self.heat.last).metadata_bytes;
        let extents = self.slow.as_ref().map_or(0, |slow| slow.metadata_bytes());
        in_pool + bytes.slots_bytes + sections + attributes + heat + extents
    }

    /// Records the files of `layout` as the VM's RAM in the pool, atomically.
    pub(super) fn remember_ram(&self, layout: &RamLayout) -> Result<(), ControlError> {
        identity::remember(&self.pool, &self.identity.with_ram(layout))
    }

    /// RAM was plugged or unplugged: this may end a suspension of eviction, and the limit is recomputed.
    pub(super) fn ram_changed(&self) {
        self.limit.reserve().ram_changed();
        if !self.detach.failed.load(Relaxed) {
            self.gate.resume();
        }
        let layout = self.layout.look();
        let ram = layout.files().iter().map(|file| file.pages()).collect();
        self.protection.ram_changed(ram);
        self.enforce_limit();
        self.limit.want_reclaim();
    }

    /// Suspends eviction. The limit is not enforced meanwhile: fills would only wait.
    pub(super) fn suspend(&self, why: String) {
        self.limit.reserve().close();
        self.gate.suspend(&self.name, why);
    }

    /// Puts the limit in force that is set now, none while nothing may be evicted, with its count corrected by
    /// what the kernel reports as resident.
    pub(super) fn enforce_limit(&self) {
        self.limit.rule(|| {
            // Before what is resident: a page that becomes so meanwhile may count twice, never not at all.
            let loading_pages = self.space.memory.loading_pages();
            let resident_bytes = match self.layout.look().allocated_bytes() {
                Ok(bytes) => bytes,
                Err(error) => {
                    tracing::warn!(vm = self.name, %error, "how much is resident is unknown");
                    return None;
                }
            };
            // One that is being detached has its limit stopped.
            let limit = match self.may_evict() && !self.limit.is_stopped() {
                true => self.seat.limit(self.pool.limit_bytes()),
                false => None,
            };
            Some(Ruling {
                limit_pages: limit.map(|bytes| bytes / PAGE_BYTES),
                resident_pages: resident_bytes / PAGE_BYTES + loading_pages,
                force: match self.store.full() {
                    Some(_) => Force::Advisory,
                    None => Force::Enforced,
                },
            })
        });
    }
}
