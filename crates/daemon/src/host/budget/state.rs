// SPDX-License-Identifier: Apache-2.0
//! [`State`]: what is set, who is under the budget, and what was decided; and how it is told.

use super::{
    governed::Governed,
    groups::Demand,
    host_lock::HostLock,
    saved::Saved,
    seat::{Standing, VmSeat},
};
use crate::{
    budget::{HostReport, HostVmReport, ShareChange, WaterState},
    control::ControlError,
};
use pagetide_policy::{
    budget::{
        BudgetError, Bytes, Decision, FLOOR_MIN, HostBudget, Mark, Plan, Reason, VmId, VmReport,
        VmShare, Water, Weight,
    },
    sets::Level,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

/// What is set and decided. Behind one lock.
pub(super) struct State {
    /// As the file says.
    pub(super) saved: Saved,
    pub(super) members: BTreeMap<String, Member>,
    pub(super) next_id: u64,
    /// `None` without a budget.
    pub(super) force: Option<InForce>,
    pub(super) stopped: bool,
}

/// A budget in force.
pub(super) struct InForce {
    pub(super) budget: HostBudget,
    pub(super) decision: Option<Decision>,
    _held: HostLock,
}

/// A VM under the budget, or about to be.
pub(super) struct Member {
    pub(super) id: VmId,
    pid: u32,
    pub(super) seat: Arc<VmSeat>,
    /// `None` while it is attached or recovered.
    pub(super) vm: Option<Weak<dyn Governed>>,
    /// RAM in huge pages of hugetlbfs.
    pub(super) hugetlb_bytes: u64,
    /// As it was when it came.
    pub(super) report: VmReport,
}

/// What holds after a change.
pub(super) struct Next {
    saved: Saved,
    budget: Option<HostBudget>,
}

impl From<(Saved, Option<HostBudget>)> for Next {
    fn from((saved, budget): (Saved, Option<HostBudget>)) -> Self {
        Self { saved, budget }
    }
}

impl InForce {
    pub(super) fn new(budget: HostBudget, held: HostLock) -> Self {
        Self {
            budget,
            decision: None,
            _held: held,
        }
    }
}

impl Member {
    pub(super) fn new(id: u64, pid: u32, seat: VmSeat, report: VmReport) -> Self {
        Self {
            id: VmId(id),
            pid,
            seat: Arc::new(seat),
            vm: None,
            hugetlb_bytes: 0,
            report,
        }
    }

    /// Whether the budget counts it and divides its memory. What a VM in huge pages gives up goes to a pool of the
    /// kernel's own.
    pub(super) fn is_governed(&self) -> bool {
        self.hugetlb_bytes == 0
    }

    pub(super) fn share(&self) -> VmShare {
        self.seat.standing().share
    }

    pub(super) fn set_share(&self, share: VmShare) {
        self.seat.set_share(share);
    }

    pub(super) fn governed(&self) -> Option<Arc<dyn Governed>> {
        self.vm.as_ref().and_then(Weak::upgrade)
    }

    /// As it is now, or as it was when it came.
    pub(super) fn now(&self) -> VmReport {
        let now = self.governed().and_then(|vm| vm.measure());
        now.unwrap_or(self.report)
    }

    /// What it may have at most, with the RAM that it has now.
    pub(super) fn demand<'a>(&self, name: &'a str) -> Demand<'a> {
        self.demand_with(name, self.share())
    }

    pub(super) fn demand_with<'a>(&self, name: &'a str, share: VmShare) -> Demand<'a> {
        Demand {
            name,
            pid: self.pid,
            most: share.ceiling.unwrap_or(Bytes(u64::MAX)).min(self.now().ram),
        }
    }
}

impl State {
    pub(super) fn new(saved: Saved) -> Self {
        Self {
            saved,
            members: BTreeMap::new(),
            next_id: 0,
            force: None,
            stopped: false,
        }
    }

    /// Brings every VM under `budget` that is not there yet.
    ///
    /// # Errors
    /// Of the first VM that cannot come.
    pub(super) fn join_all(&self, budget: &mut HostBudget) -> Result<(), ControlError> {
        let missing = |(_, member): &(&String, &Member)| {
            member.is_governed() && budget.vm(member.id).is_none()
        };
        let missing: Vec<_> = self.members.iter().filter(missing).collect();
        for (name, member) in missing {
            let joined = budget.join(member.id, member.share(), member.now());
            joined.map_err(|error| told(&error, name))?;
        }
        Ok(())
    }

    /// A VM in huge pages, if there is one.
    pub(super) fn in_huge_pages(&self) -> Option<&str> {
        let mut all = self.members.iter();
        let huge = all.find(|(_, member)| !member.is_governed());
        huge.map(|(name, _)| name.as_str())
    }

    /// From now on no VM has a target.
    pub(super) fn lift_targets(&self) {
        for member in self.members.values() {
            if member.seat.lift()
                && let Some(vm) = member.governed()
            {
                vm.enforce();
            }
        }
    }

    /// What each VM may have at most.
    pub(super) fn demands(&self) -> impl Iterator<Item = Demand<'_>> {
        self.members
            .iter()
            .filter(|(_, member)| member.is_governed())
            .map(|(name, member)| member.demand(name))
    }

    /// What is to be written when the share of `name` changes, or (`None`) it leaves. What is usual is not
    /// written: the pool has the ceiling, too.
    pub(super) fn saved_with(&self, name: &str, share: Option<VmShare>) -> Saved {
        let mut saved = self.saved.clone();
        let is_unusual =
            |share: &VmShare| share.weight != Weight::default() || share.floor > FLOOR_MIN;
        match share.filter(is_unusual) {
            Some(share) => saved.vms.insert(name.to_owned(), share),
            None => saved.vms.remove(name),
        };
        saved
    }

    /// A change was written.
    pub(super) fn advance(&mut self, next: Next) {
        self.saved = next.saved;
        if let (Some(force), Some(budget)) = (&mut self.force, next.budget) {
            force.budget = budget;
        }
    }

    /// The host, of `ram`, and each VM.
    pub(super) fn report(&self, ram: Bytes) -> HostReport {
        let vms: Vec<_> = self
            .members
            .iter()
            .map(|(name, member)| vm_report(name, &member.now(), &member.seat.standing()))
            .collect();
        let used_bytes = vms
            .iter()
            .map(|vm| vm.resident_bytes + vm.stored_bytes)
            .sum();
        let mut report = HostReport {
            ram_bytes: ram.0,
            used_bytes,
            vms,
            ..HostReport::default()
        };
        if let Some(force) = &self.force {
            let apart = self.members.values().filter(|member| !member.is_governed());
            let apart_bytes: u64 = apart
                .map(|member| member.now().resident.0 + member.now().stored.0)
                .sum();
            let used_bytes = used_bytes.saturating_sub(apart_bytes);
            let Plan {
                budget,
                watermarks,
                tuning,
            } = *force.budget.plan();
            let of = |mark: Mark| Some(mark.of(budget).0);
            report.budget_bytes = Some(budget.0);
            report.min_bytes = of(watermarks.min);
            report.low_bytes = of(watermarks.low);
            report.high_bytes = of(watermarks.high);
            report.pace_bytes = Some(tuning.pace.0.0);
            report.free_bytes = Some(budget.0.saturating_sub(used_bytes));
            report.over_bytes = Some(used_bytes.saturating_sub(budget.0));
            report.water = force
                .decision
                .as_ref()
                .map(|decision| water(decision.water));
        }
        report
    }
}

fn vm_report(name: &str, now: &VmReport, standing: &Standing) -> HostVmReport {
    HostVmReport {
        name: name.to_owned(),
        weight: standing.share.weight.get(),
        floor_bytes: standing.share.floor.0,
        ceiling_bytes: standing.share.ceiling.map(|bytes| bytes.0),
        target_bytes: standing.target.map(|bytes| bytes.0),
        reason: standing.reason.map(reason),
        need_bytes: standing.need.map(|bytes| bytes.0),
        ram_bytes: now.ram.0,
        resident_bytes: now.resident.0,
        stored_bytes: now.stored.0,
        stalled_permille: standing.stalled.map(|share| share.0),
    }
}

fn water(water: Water) -> WaterState {
    match water {
        Water::BelowMin => WaterState::BelowMin,
        Water::BelowLow => WaterState::BelowLow,
        Water::Between => WaterState::Between,
        Water::AboveHigh => WaterState::AboveHigh,
    }
}

/// Why a target changed, in a word or two.
pub(in crate::host) fn reason(reason: Reason) -> String {
    match reason {
        Reason::Joined => "joined",
        Reason::Floor => "floor",
        Reason::Refaults => "refaults",
        Reason::Room => "room",
        Reason::Unused => "unused",
        Reason::Taken(Level::Cold) => "taken-cold",
        Reason::Taken(Level::Cool) => "taken-cool",
        Reason::Taken(_) => "taken-inactive",
        Reason::Share => "share",
        Reason::Idle => "idle",
        Reason::Paced => "paced",
        Reason::Ceiling => "ceiling",
        Reason::BelowFloor => "below-floor",
    }
    .to_owned()
}

/// What a VM has for which nothing was set.
pub(super) fn usual_share(ram: Bytes) -> VmShare {
    VmShare {
        floor: FLOOR_MIN.min(ram),
        ..VmShare::default()
    }
}

/// A share, changed.
///
/// # Errors
/// There is no such weight.
pub(super) fn share_of(change: &ShareChange, before: VmShare) -> Result<VmShare, ControlError> {
    let weight = match change.weight {
        None => before.weight,
        Some(weight) => {
            Weight::try_from(weight).map_err(|error| ControlError::wrong_use(error.to_string()))?
        }
    };
    let ceiling = before.ceiling.map(|bytes| bytes.0);
    Ok(VmShare {
        weight,
        floor: change.floor_bytes.map_or(before.floor, Bytes),
        ceiling: change.ceiling_bytes.of(ceiling).map(Bytes),
    })
}

/// A refusal in a sentence that calls the VM by its name.
pub(super) fn told(error: &BudgetError, name: &str) -> ControlError {
    let sentence = match error.vm() {
        Some(vm) => error
            .to_string()
            .replacen(&vm.to_string(), &format!("VM '{name}'"), 1),
        None => error.to_string(),
    };
    match error {
        BudgetError::TooManyVms | BudgetError::VmTwice { .. } => ControlError::refused(sentence),
        _ => ControlError::wrong_use(sentence),
    }
}
