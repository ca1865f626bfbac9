// SPDX-License-Identifier: Apache-2.0
//! Serving one request of a tenant: by a worker, which may wait, or by an engine, which may not.

use super::{
    duty::Duty, pause::Waited, unclaimed::Unclaimed, vm::TenantVm, worker_place::WorkerPlace,
};
use pagetide_addr::{OVERWRITE_PAGES_MAX, PageRange, RequestKind, Tier};
use pagetide_gmem::{Cause, Fault, FaultOutcome, Overwrite, Served, Wait};
use std::{sync::Arc, time::Duration};

/// Pages of a prefault that are filled: as many as a fault serves that may not wait. More would delay
/// demands, and everything else on the CPU of a worker that preempts.
const PREFAULT_PAGES: u64 = 64;

/// Serves on a worker: waits for whatever the request needs.
pub(super) fn serve(unclaimed: &Unclaimed, mut duty: Duty, worker_place: &mut WorkerPlace) {
    duty.begin();
    let hold = Duration::from_micros(duty.request().hold_us.into());
    let Some(tenant) = duty.tenant().map(Arc::clone) else {
        match unclaimed.wait(hold) {
            Waited::Enough => unclaimed.answer(duty),
            Waited::CutShort => duty.abandon(),
        }
        return;
    };
    let entered = match tenant.wait(hold) {
        Waited::Enough => tenant.enter(),
        Waited::CutShort => None,
    };
    let Some(_inside) = entered else {
        unclaimed.answer(duty);
        return;
    };
    if let Err(duty) = serve_at_once(&tenant, duty) {
        worker_place.in_ordinary_class(|| serve_waiting(&tenant, duty));
    }
}

/// Serves it if that needs no waiting; otherwise gives it back. The tenant's gate is held.
pub(super) fn serve_at_once(tenant: &TenantVm, mut duty: Duty) -> Result<(), Duty> {
    let Some(fault) = tenant.fault(duty.request()) else {
        duty.answer(FaultOutcome::OutOfRange);
        return Ok(());
    };
    duty.begin();
    let tier = tenant.tier_of(fault.pages);
    // One that was given back was already reported.
    if duty.tier() == Tier::Present {
        tenant.note_fault(duty.request(), fault.pages, tier);
    }
    duty.set_tier(tier);
    match duty.request().kind {
        RequestKind::Demand | RequestKind::AliasFault => {
            match tenant.space.fault(&Cause::Fault(fault), Wait::Never) {
                Some(served) => duty.answer(served.outcome),
                None => return Err(duty),
            }
        }
        RequestKind::Prefault => duty.answer(prefault(tenant, fault)),
        RequestKind::Overwrite { slot } => {
            return overwrite(tenant, duty, fault, slot, Wait::Never);
        }
    }
    Ok(())
}

/// Serves what [`serve_at_once`] gave back.
fn serve_waiting(tenant: &TenantVm, duty: Duty) {
    let Some(fault) = tenant.fault(duty.request()) else {
        duty.answer(FaultOutcome::OutOfRange);
        return;
    };
    if let RequestKind::Overwrite { slot } = duty.request().kind {
        if let Err(duty) = overwrite(tenant, duty, fault, slot, Wait::Here) {
            // A call that may wait is always over.
            duty.answer(FaultOutcome::Lost);
        }
        return;
    }
    let reply = Box::new(move |outcome| duty.answer(outcome));
    tenant.space.fault(&Cause::Fault(fault), Wait::Reply(reply));
}

/// Installs what the device has written; gives the duty back if that would take time that `wait`
/// does not allow.
fn overwrite(
    tenant: &TenantVm,
    duty: Duty,
    fault: Fault,
    slot: u32,
    wait: Wait,
) -> Result<(), Duty> {
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
    match tenant.space.fault(&Cause::Overwrite(overwrite), wait) {
        Some(Served { outcome, installed }) => {
            duty.answer_overwrite(outcome, installed);
            Ok(())
        }
        None => Err(duty),
    }
}

/// Fills the first pages, if that is possible without waiting. No DMA waits for the others: the
/// device requests them again when one does.
fn prefault(tenant: &TenantVm, fault: Fault) -> FaultOutcome {
    let start = fault.pages.start;
    let end = start.saturating_plus(PREFAULT_PAGES).min(fault.pages.end);
    let part = Fault {
        pages: PageRange::new(start, end),
        ..fault
    };
    match tenant.space.fault(&Cause::Fault(part), Wait::Never) {
        Some(served) => served.outcome,
        None => {
            tenant.account.drop_prefault();
            FaultOutcome::Present
        }
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
