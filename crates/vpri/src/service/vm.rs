// SPDX-License-Identifier: Apache-2.0
//! [`TenantVm`]: a VM as its page requests see it: its memory, its CPUs, its account, and the gate
//! that closes when it leaves. It knows nothing of who serves the requests.

use super::{
    account::Account,
    pause::{Pause, Waited},
    placement::{BusyTimes, TenantCpus},
};
use crate::mmu::DmaMmu;
use arc_swap::{ArcSwap, Guard};
use crossbeam_queue::ArrayQueue;
use pagetide_addr::{DeviceId, PageRange, PageRequest, RequestKind, SectionNo, Tier};
use pagetide_gmem::{AddressSpace, Fault};
use std::{
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, TryLockError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Id of the software DPU in every address space.
pub const DPU: DeviceId = DeviceId(1);

/// Most sections that devices found absent and that are not read yet. The reader comes far more
/// often than so many faults can be served.
const NEWS_MAX: usize = 4096;
/// Most sections reported of one page request; a device may ask for a terabyte.
const SECTIONS_A_FAULT: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Closed,
}

/// Held while a request of the tenant is served.
pub(super) struct Inside<'a>(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, Gate>);

/// See the module.
pub(super) struct TenantVm {
    pub(super) space: Arc<AddressSpace>,
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) account: Account,
    cpus: ArcSwap<TenantCpus>,
    busy: Arc<BusyTimes>,
    /// Held shared while a request is served; closed for good when the tenant leaves.
    gate: RwLock<Gate>,
    leaving: Pause,
    /// Demands and overwrites whose pages were absent; see [`Self::absent_faults`].
    absent_faults: AtomicU64,
    /// Their sections.
    absent_sections: ArrayQueue<SectionNo>,
}

impl TenantVm {
    pub(super) fn new(space: Arc<AddressSpace>, mmu: Arc<DmaMmu>, busy: &Arc<BusyTimes>) -> Self {
        Self {
            space,
            mmu,
            account: Account::default(),
            cpus: ArcSwap::default(),
            busy: Arc::clone(busy),
            gate: RwLock::new(Gate::Open),
            leaving: Pause::default(),
            absent_faults: AtomicU64::new(0),
            absent_sections: ArrayQueue::new(NEWS_MAX),
        }
    }

    /// See [`Tenant::set_cpus`](super::Tenant::set_cpus).
    pub(super) fn set_cpus(&self, cpus: TenantCpus) {
        self.cpus.store(Arc::new(cpus));
        self.busy.measure();
    }

    pub(super) fn cpus(&self) -> Guard<Arc<TenantCpus>> {
        self.cpus.load()
    }

    /// Tenths of its recent time that a CPU was busy.
    pub(super) fn busy_tenths(&self, cpu: usize) -> u8 {
        self.busy.busy_tenths(cpu)
    }

    /// Enters to serve a request; `None` if the tenant has left.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        (*gate == Gate::Open).then_some(Inside(gate))
    }

    /// Like [`Self::enter`], but does not wait for a tenant that is leaving: `None` then, too.
    pub(super) fn try_enter(&self) -> Option<Inside<'_>> {
        let gate = match self.gate.try_read() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (*gate == Gate::Open).then_some(Inside(gate))
    }

    /// From now on no request enters; when this returns, none is inside.
    pub(super) fn leave(&self) {
        self.leaving.end();
        *self.gate.write().unwrap_or_else(PoisonError::into_inner) = Gate::Closed;
    }

    /// Waits for `time`, unless the tenant leaves.
    pub(super) fn wait(&self, time: Duration) -> Waited {
        self.leaving.wait(time)
    }

    pub(super) fn fault(&self, request: &PageRequest) -> Option<Fault> {
        let pages = self.mmu.in_space(request.domain, request.pages)?;
        Some(Fault {
            device: DPU,
            pages,
            access: request.access,
        })
    }

    /// See [`Tenant::absent_faults`](super::Tenant::absent_faults).
    pub(super) fn absent_faults(&self) -> u64 {
        self.absent_faults.load(Relaxed)
    }

    /// See [`Tenant::next_absent_section`](super::Tenant::next_absent_section).
    pub(super) fn next_absent_section(&self) -> Option<SectionNo> {
        self.absent_sections.pop()
    }

    /// A request for pages of `tier` is about to be served.
    pub(super) fn note_fault(&self, request: &PageRequest, pages: PageRange, tier: Tier) {
        let waits = match request.kind {
            RequestKind::Demand | RequestKind::Overwrite { .. } => true,
            RequestKind::Prefault | RequestKind::AliasFault => false,
        };
        if tier == Tier::Present || !waits {
            return;
        }
        self.absent_faults.fetch_add(1, Relaxed);
        for section in pages.sections().take(SECTIONS_A_FAULT) {
            self.absent_sections.force_push(section);
        }
    }

    pub(super) fn tier_of(&self, pages: PageRange) -> Tier {
        let memory = self.space.memory();
        memory.map_or(Tier::Unknown, |memory| memory.tier_of(pages))
    }
}
