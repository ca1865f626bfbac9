// SPDX-License-Identifier: Apache-2.0
//! [`TenantVm`]: a VM as its page requests see it: its memory, its CPUs, its account, and the gate
//! that closes when it leaves; and how a request for it is served, by a worker, which may wait, or by
//! an engine, which may not. It knows nothing of either.

use super::{
    account::Account,
    duty::Duty,
    pause::{Pause, Waited},
    placement::{BusyTimes, TenantCpus},
};
use crate::{handoff::Handoff, mmu::DmaMmu};
use arc_swap::{ArcSwap, Guard};
use pagetide_addr::{
    DeviceId, OVERWRITE_PAGES_MAX, PageRange, PageRequest, RequestKind, SectionNo, Tier,
};
use pagetide_gmem::{AddressSpace, Blank, Cause, Fault, FaultOutcome, Overwrite, Served, Wait};
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

/// Pages of a prefault that are filled: as many as a fault serves that may not wait. More would delay
/// demands, and everything else on the CPU of a worker that preempts.
const PREFAULT_PAGES: u64 = 64;

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
    absent_sections: Handoff<SectionNo>,
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
            absent_sections: Handoff::new(NEWS_MAX),
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

    fn fault(&self, request: &PageRequest) -> Option<Fault> {
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
            RequestKind::Demand | RequestKind::Blank | RequestKind::Overwrite { .. } => true,
            RequestKind::Prefault | RequestKind::BlankAhead | RequestKind::AliasFault => false,
        };
        if tier == Tier::Present || !waits {
            return;
        }
        self.absent_faults.fetch_add(1, Relaxed);
        for section in pages.sections().take(SECTIONS_A_FAULT) {
            self.absent_sections.push_over(section);
        }
    }

    fn tier_of(&self, pages: PageRange) -> Tier {
        let memory = self.space.memory();
        memory.map_or(Tier::Unknown, |memory| memory.tier_of(pages))
    }

    /// Serves it if that needs no waiting; otherwise gives it back. The gate is held.
    pub(super) fn serve_at_once(&self, mut duty: Duty) -> Result<(), Duty> {
        let Some(fault) = self.fault(duty.request()) else {
            duty.answer(FaultOutcome::OutOfRange);
            return Ok(());
        };
        duty.begin();
        let tier = self.tier_of(fault.pages);
        // One that was given back was already reported.
        if duty.tier() == Tier::Present {
            self.note_fault(duty.request(), fault.pages, tier);
        }
        duty.set_tier(tier);
        match duty.request().kind {
            RequestKind::Demand | RequestKind::Blank | RequestKind::AliasFault => {
                match self
                    .space
                    .fault(&cause_of(duty.request(), fault), Wait::Never)
                {
                    Some(served) => duty.answer(served.outcome),
                    None => return Err(duty),
                }
            }
            RequestKind::Prefault | RequestKind::BlankAhead => {
                let outcome = self.prefault(duty.request(), fault);
                duty.answer(outcome);
            }
            RequestKind::Overwrite { slot } => {
                return self.overwrite(duty, fault, slot, Wait::Never);
            }
        }
        Ok(())
    }

    /// Serves what [`Self::serve_at_once`] gave back.
    pub(super) fn serve_waiting(&self, duty: Duty) {
        let Some(fault) = self.fault(duty.request()) else {
            duty.answer(FaultOutcome::OutOfRange);
            return;
        };
        if let RequestKind::Overwrite { slot } = duty.request().kind {
            if let Err(duty) = self.overwrite(duty, fault, slot, Wait::Here) {
                // A call that may wait is always over.
                duty.answer(FaultOutcome::Lost);
            }
            return;
        }
        let cause = cause_of(duty.request(), fault);
        let reply = Box::new(move |outcome| duty.answer(outcome));
        self.space.fault(&cause, Wait::Reply(reply));
    }

    /// Installs what the device has written; gives the duty back if that would take time that `wait`
    /// does not allow.
    fn overwrite(&self, duty: Duty, fault: Fault, slot: u32, wait: Wait) -> Result<(), Duty> {
        let content = match read_bounced(&duty, slot, fault.pages) {
            Ok(content) => content,
            Err(outcome) => {
                duty.answer(outcome);
                return Ok(());
            }
        };
        let overwrite = Overwrite {
            fault,
            content: &content,
            still_wanted: &|| duty.source().still_wants(slot),
        };
        match self.space.fault(&Cause::Overwrite(overwrite), wait) {
            Some(Served { outcome, installed }) => {
                duty.answer_overwrite(outcome, installed);
                Ok(())
            }
            None => Err(duty),
        }
    }

    /// Fills the first pages, if that is possible without waiting. No DMA waits for the others: the
    /// device requests them again when one does.
    fn prefault(&self, request: &PageRequest, fault: Fault) -> FaultOutcome {
        let start = fault.pages.start;
        let end = start.saturating_plus(PREFAULT_PAGES).min(fault.pages.end);
        let part = Fault {
            pages: PageRange::new(start, end),
            ..fault
        };
        match self.space.fault(&cause_of(request, part), Wait::Never) {
            Some(served) => served.outcome,
            None => {
                self.account.drop_prefault();
                FaultOutcome::Present
            }
        }
    }
}

/// Why the pages of a request are to be present, unless its device has written them.
fn cause_of(request: &PageRequest, fault: Fault) -> Cause<'static> {
    match request.kind {
        RequestKind::Blank | RequestKind::BlankAhead => Cause::Blank(Blank {
            fault,
            posted_ns: request.sent_ns,
        }),
        RequestKind::Demand
        | RequestKind::Prefault
        | RequestKind::AliasFault
        | RequestKind::Overwrite { .. } => Cause::Fault(fault),
    }
}

/// The bytes that the device has written. A request whose slots do not hold all of it is invalid.
fn read_bounced(duty: &Duty, slot: u32, pages: PageRange) -> Result<Vec<u8>, FaultOutcome> {
    let mut content = Vec::new();
    let is_sound = pages.len() <= OVERWRITE_PAGES_MAX
        && duty.source().read_bounced(slot, pages.len(), &mut content)
        && content.len() as u64 == pages.bytes();
    if is_sound {
        Ok(content)
    } else {
        Err(FaultOutcome::OutOfRange)
    }
}
