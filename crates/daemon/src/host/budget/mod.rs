// SPDX-License-Identifier: Apache-2.0
//! [`Budget`]: one budget for all VMs of the daemon, put into force (ADR 0029).
//!
//! What each VM may have is decided by `pagetide_policy::budget`, which does no I/O. Here is what it lives by:
//!
//! ```text
//!   commands, settings ──► checks ──► SavedFile ──► State ──► bell ─┐
//!                                                                   ▼
//!   VmCore: resident, pool, sets ──► measure ─► observe ─► step ─► targets ──► VmSeat ──► the VM's limit
//!   its cgroup: stalls (PSI) ────────►                             gates ────► VmSeat ──► its fills
//!   VmSeat: refaults by distance ────►
//! ```
//! [`seat`] is one VM under the budget as its faults and evictions see it, [`drive`] the thread that steps,
//! [`governed`] what it needs of a VM, [`saved`] the file that outlives the daemon, [`host_lock`] what keeps
//! two daemons with a budget apart, [`groups`] whether memory cgroups leave room for what is promised.
//!
//! # A change
//! Every change is tried on a copy of what is in force, then written to the file, then put into force. One
//! that is refused has changed nothing; one that was written survives a crash.
//!
//! # A VM's way
//! It takes its [`Seat`] before anything is done to its VMM, so that a floor for which there is no room is
//! found early. Once it is served, the driver sees it. One that a dead daemon left has its seat, and is measured,
//! before the first VM is recovered: what it takes is there, whether or not its recovery succeeds
//! ([`super::waiting`]). It leaves when everything kept for it is freed.
//! While it is detached nothing of it is evicted, and others make room for what it brings back.
//!
//! # Locks
//! One lock for what is set and decided. The driver measures without it, and only commands and reports wait
//! for it. VMs' own locks are taken within it, never the other way round: faults and reclaim know only the
//! [`VmSeat`].

mod drive;
mod governed;
mod groups;
mod host_lock;
mod saved;
mod seat;
mod state;
#[cfg(test)]
mod tests;

pub(super) use governed::Governed;
pub(super) use seat::VmSeat;
pub(super) use state::reason;

use super::{lock::lock, needed::Needed};
use crate::{
    budget::{BudgetBody, HostReport, ShareChange},
    control::ControlError,
    dpu::Owed,
    settings::RunSettings,
};
use groups::Groups;
use host_lock::{HostLock, LOCK_WAIT, SERVED_LOCK_WAIT};
use pagetide_policy::budget::{BudgetError, Bytes, HostBudget, Plan, Rate, VmReport, VmShare};
use saved::{Given, Saved, SavedFile, mark};
use seat::HostRoom;
use state::{InForce, Member, State, told};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

/// What a VM brings when it takes its seat.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newcomer<'a> {
    pub(super) name: &'a str,
    pub(super) pid: u32,
    pub(super) ram_bytes: u64,
    pub(super) resident_bytes: u64,
    /// RAM in huge pages of hugetlbfs.
    pub(super) hugetlb_bytes: u64,
}

/// See the module.
pub(super) struct Budget {
    state: Mutex<State>,
    room: Arc<HostRoom>,
    file: SavedFile,
    lock_path: PathBuf,
    state_dir: PathBuf,
    groups: Groups,
    started: Instant,
}

/// A VM's place under the budget; given up when it is dropped before [`Self::keep`].
pub(super) struct Seat {
    budget: Arc<Budget>,
    name: String,
    seat: Arc<VmSeat>,
    if_dropped: IfDropped,
}

/// What becomes of a seat that is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfDropped {
    /// The VM was not attached: nothing is kept of it.
    Leave,
    /// The VM waits for a daemon that can recover it: what was set for it stays written.
    Withdraw,
    /// The VM is served, and leaves later.
    Stay,
}

impl Seat {
    /// What its faults and evictions meet.
    pub(super) fn share(&self) -> Arc<VmSeat> {
        Arc::clone(&self.seat)
    }

    /// From now on `vm` is measured, for a VM that is not served yet.
    pub(super) fn watch(&self, vm: Weak<dyn Governed>) {
        if let Some(member) = lock(&self.budget.state).members.get_mut(&self.name) {
            member.vm = Some(vm);
        }
        self.budget.room.ring();
    }

    /// The VM is served: from now on `vm` is measured and kept within its target.
    pub(super) fn keep(mut self, vm: Weak<dyn Governed>) {
        self.if_dropped = IfDropped::Stay;
        self.watch(Weak::clone(&vm));
        // A target may have been decided before that.
        if let Some(vm) = vm.upgrade() {
            vm.enforce();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        match self.if_dropped {
            IfDropped::Leave => self.budget.leave(&self.name),
            IfDropped::Withdraw => drop(self.budget.withdraw(&self.name)),
            IfDropped::Stay => {}
        }
    }
}

impl Budget {
    /// What was set before, or else what the settings say, for the daemon of `state_dir`, which has the VMs
    /// `known`. The thread that drives it is started by [`Self::start`].
    ///
    /// # Errors
    /// It is not possible on this host, another daemon has a budget, or the file cannot be read.
    pub(super) fn open(
        settings: &RunSettings,
        state_dir: &Path,
        known: &[String],
        needed: Needed,
        owed: Owed,
    ) -> Result<Arc<Self>, ControlError> {
        let wait = match needed {
            Needed::ByNobody => LOCK_WAIT,
            // Faults and disks wait meanwhile, and the lock is tried for again.
            Needed::BySomebody => SERVED_LOCK_WAIT,
        };
        Self::open_with(
            settings,
            state_dir,
            known,
            needed,
            Groups::of_this_host(),
            owed.wait(wait),
        )
    }

    fn open_with(
        settings: &RunSettings,
        state_dir: &Path,
        known: &[String],
        needed: Needed,
        groups: Groups,
        lock_wait: Duration,
    ) -> Result<Arc<Self>, ControlError> {
        let file = SavedFile::in_dir(state_dir);
        // VMs must be served whatever was set: without a daemon they wait at their next fault.
        let must_serve = needed == Needed::BySomebody;
        let before = match file.read() {
            Err(error) if must_serve => {
                tracing::error!(%error, "what was set of the host's budget is lost");
                file.set_aside();
                None
            }
            before => before?,
        };
        let mut saved = Saved::at_start(before, Given::of(settings));
        saved.vms.retain(|name, _| known.contains(name));
        let budget = Self {
            state: Mutex::new(State::new(saved.clone())),
            room: Arc::default(),
            file,
            lock_path: settings.budget_lock.clone(),
            state_dir: state_dir.to_owned(),
            groups,
            started: Instant::now(),
        };
        if let Some(plan) = saved.plan {
            match budget.in_force(plan, lock_wait) {
                Ok(force) => lock(&budget.state).force = Some(force),
                Err(error) if must_serve => tracing::error!(
                    %error,
                    budget = %plan.budget,
                    "VMs are served without the host's budget, which is tried again"
                ),
                Err(error) => {
                    let way_out = match saved.is_by_command() {
                        true => format!("remove {}", budget.file.path.display()),
                        false => "start with --host-budget off".to_owned(),
                    };
                    let message = format!("{}; or {way_out}", error.message);
                    return Err(ControlError { message, ..error });
                }
            }
        }
        budget.file.write(&saved)?;
        Ok(Arc::new(budget))
    }

    /// `plan` in force, without VMs. Another daemon is given `wait` to let go of its own.
    fn in_force(&self, plan: Plan, wait: Duration) -> Result<InForce, ControlError> {
        let fresh = self.fresh(plan)?;
        let held = HostLock::take(&self.lock_path, &self.state_dir, wait)?;
        tracing::info!(budget = %plan.budget, "VMs are kept within a budget of the host");
        Ok(InForce::new(fresh, held))
    }

    /// Tries to put into force what was set and was not possible until now. Returns false if there is nothing
    /// to try.
    fn try_again(&self) -> bool {
        let mut state = lock(&self.state);
        let (Some(plan), None) = (state.saved.plan, &state.force) else {
            return false;
        };
        match self.in_force(plan, Duration::ZERO) {
            Ok(force) => state.force = Some(force),
            Err(error) => tracing::debug!(%error, "the host's budget is still not possible"),
        }
        true
    }

    /// A budget without VMs, checked against the host as it is now.
    fn fresh(&self, plan: Plan) -> Result<HostBudget, ControlError> {
        HostBudget::new(plan, self.groups.host()?).map_err(|error| told(&error, ""))
    }

    /// Sets the budget, or changes parts of it.
    ///
    /// # Errors
    /// A sentence; nothing has changed.
    pub(super) fn set(&self, change: &BudgetBody) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        // One that is there in spite of a plan came with a restart, and stays apart.
        if state.saved.plan.is_none()
            && let Some(name) = state.in_huge_pages()
        {
            return Err(in_huge_pages(name));
        }
        let plan = changed(&state, change)?;
        let mut next = match &state.force {
            // What was learnt of the VMs is kept.
            Some(force) => {
                let mut next = force.budget.clone();
                next.set_host(self.groups.host()?);
                next.set_plan(plan).map_err(|error| told(&error, ""))?;
                next
            }
            None => self.fresh(plan)?,
        };
        state.join_all(&mut next)?;
        self.groups.refuse_small(plan.budget, state.demands())?;
        let held = match &state.force {
            Some(_) => None,
            None => Some(HostLock::take(
                &self.lock_path,
                &self.state_dir,
                Duration::ZERO,
            )?),
        };
        let saved = state.saved.with_plan(Some(plan));
        self.file.write(&saved)?;
        state.saved = saved;
        match (&mut state.force, held) {
            (Some(force), _) => force.budget = next,
            (None, Some(held)) => state.force = Some(InForce::new(next, held)),
            (None, None) => unreachable!("without a budget the lock was taken above"),
        }
        drop(state);
        tracing::info!(budget = %plan.budget, watermarks = ?plan.watermarks, "the host's budget is set");
        self.step();
        // Without a budget the thread sleeps without end.
        self.room.ring();
        Ok(())
    }

    /// Lifts the budget.
    ///
    /// # Errors
    /// A sentence; nothing has changed.
    pub(super) fn lift(&self) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        let saved = state.saved.with_plan(None);
        self.file.write(&saved)?;
        state.saved = saved;
        self.room.lift();
        state.lift_targets();
        if state.force.take().is_some() {
            tracing::info!("the host's budget is lifted");
        }
        Ok(())
    }

    /// Gives a VM that is about to be attached its seat.
    ///
    /// # Errors
    /// A sentence; nothing has changed.
    pub(super) fn admit(
        self: &Arc<Self>,
        vm: &Newcomer<'_>,
        change: &ShareChange,
    ) -> Result<Seat, ControlError> {
        let mut state = lock(&self.state);
        if vm.hugetlb_bytes > 0 && state.saved.plan.is_some() {
            return Err(in_huge_pages(vm.name));
        }
        let ram = Bytes(vm.ram_bytes);
        let share = state::share_of(change, state::usual_share(ram))?;
        let member = self.member(&mut state, vm, share);
        share
            .check(member.id, ram)
            .map_err(|error| told(&error, vm.name))?;
        let mut tried = state.force.as_ref().map(|force| force.budget.clone());
        if let Some(budget) = &mut tried {
            let joined = budget.join(member.id, share, member.report);
            joined.map_err(|error| told(&error, vm.name))?;
            let demands = state.demands().chain([member.demand(vm.name)]);
            self.groups.refuse_small(budget.plan().budget, demands)?;
        }
        let saved = state.saved_with(vm.name, Some(share));
        self.file.write(&saved)?;
        let next = (saved, tried).into();
        Ok(self.put(&mut state, vm.name, member, next))
    }

    /// Gives a VM whose predecessor daemon has died its seat again. What was set for it before is as it was,
    /// as far as it is still possible: the VM must be served in any case. `ceiling` is its limit by its pool.
    pub(super) fn welcome_back(self: &Arc<Self>, vm: &Newcomer<'_>, ceiling: Option<u64>) -> Seat {
        let mut state = lock(&self.state);
        let usual = state::usual_share(Bytes(vm.ram_bytes));
        let share = state.saved.vms.get(vm.name).copied().unwrap_or(VmShare {
            ceiling: ceiling.map(Bytes),
            ..usual
        });
        let member = self.member(&mut state, vm, share);
        let mut tried = state.force.as_ref().map(|force| force.budget.clone());
        if !member.is_governed() && state.saved.plan.is_some() {
            tracing::warn!(
                vm = vm.name,
                "the VM has its RAM in huge pages of hugetlbfs, and does not come under the host's budget"
            );
        } else if let Some(budget) = &mut tried
            && let Err(error) = come_back(budget, &member)
        {
            tracing::error!(
                vm = vm.name,
                error = %told(&error, vm.name),
                "what was set for the VM is not possible any more: `pagetide vm set` changes it"
            );
        }
        let next = (state.saved.clone(), tried).into();
        let mut seat = self.put(&mut state, vm.name, member, next);
        seat.if_dropped = IfDropped::Withdraw;
        seat
    }

    fn member(&self, state: &mut State, vm: &Newcomer<'_>, share: VmShare) -> Member {
        state.next_id += 1;
        let groups = self.groups.of_process(vm.pid);
        let seat = VmSeat::new(Arc::clone(&self.room), share, groups);
        let report = VmReport {
            ram: Bytes(vm.ram_bytes),
            resident: Bytes(vm.resident_bytes),
            ..VmReport::default()
        };
        let mut member = Member::new(state.next_id, vm.pid, seat, report);
        member.hugetlb_bytes = vm.hugetlb_bytes;
        member
    }

    fn put(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        member: Member,
        next: state::Next,
    ) -> Seat {
        let seat = Arc::clone(&member.seat);
        state.members.insert(name.to_owned(), member);
        state.advance(next);
        Seat {
            budget: Arc::clone(self),
            name: name.to_owned(),
            seat,
            if_dropped: IfDropped::Leave,
        }
    }

    /// Changes what a VM may have, and hands it on to `put`: its pool has ceiling and weight, too.
    ///
    /// # Errors
    /// A sentence; nothing has changed.
    pub(super) fn change_share(
        &self,
        name: &str,
        change: &ShareChange,
        put: impl FnOnce(VmShare),
    ) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        let Some(member) = state.members.get(name) else {
            return Err(ControlError::not_found(format!(
                "there is no VM '{name}' here"
            )));
        };
        let (id, ram) = (member.id, member.now().ram);
        let share = state::share_of(change, member.share())?;
        share.check(id, ram).map_err(|error| told(&error, name))?;
        let mut tried = state.force.as_ref().map(|force| force.budget.clone());
        if let Some(budget) = &mut tried
            && member.is_governed()
        {
            // One that could not come back under the budget comes now.
            let set = match budget.vm(id) {
                Some(_) => budget.set_share(id, share),
                None => budget.join(id, share, member.now()),
            };
            set.map_err(|error| told(&error, name))?;
            let changed = member.demand_with(name, share);
            let others = state.demands().filter(|demand| demand.name != name);
            self.groups
                .refuse_small(budget.plan().budget, others.chain([changed]))?;
        }
        let saved = state.saved_with(name, Some(share));
        self.file.write(&saved)?;
        if let Some(member) = state.members.get(name) {
            member.set_share(share);
        }
        state.advance((saved, tried).into());
        // Within the lock, so that two changes reach the pool in the order in which they were written.
        put(share);
        drop(state);
        self.room.ring();
        Ok(())
    }

    /// A VM is no longer there.
    pub(super) fn leave(&self, name: &str) {
        if self.withdraw(name).is_none() {
            return;
        }
        let mut state = lock(&self.state);
        let saved = state.saved_with(name, None);
        // The next start forgets VMs that are not there.
        if let Err(error) = self.file.write(&saved) {
            tracing::warn!(vm = name, %error, "what was set for a VM that has left is still written down");
        }
        state.saved = saved;
    }

    /// A VM is no longer there, but what was set for it stays written. `None` if it was not there.
    fn withdraw(&self, name: &str) -> Option<Member> {
        let mut state = lock(&self.state);
        let member = state.members.remove(name)?;
        if let Some(force) = &mut state.force
            && let Err(error) = force.budget.leave(member.id)
        {
            tracing::debug!(vm = name, %error, "it had not come under the budget");
        }
        drop(state);
        self.room.ring();
        Some(member)
    }

    /// The host, its budget and each VM.
    pub(super) fn report(&self) -> HostReport {
        let ram = self.groups.host().map(|host| host.ram).unwrap_or_default();
        lock(&self.state).report(ram)
    }
}

/// Brings a VM under `budget` with what was set for it, or else with the least floor.
///
/// # Errors
/// Why it did not come with what was set; it may have come all the same.
fn come_back(budget: &mut HostBudget, member: &Member) -> Result<(), BudgetError> {
    let (share, report) = (member.share(), member.now());
    let Err(error) = budget.join(member.id, share, report) else {
        return Ok(());
    };
    let least = VmShare {
        floor: state::usual_share(report.ram).floor,
        ..share
    };
    if budget.join(member.id, least, report).is_ok() {
        member.set_share(least);
    }
    Err(error)
}

/// What a VM gives up goes to the pool of huge pages, where no other VM can use it.
fn in_huge_pages(name: &str) -> ControlError {
    ControlError::refused(format!(
        "VM '{name}' has its RAM in huge pages of hugetlbfs, which are a pool of their own: a budget cannot give them \
         to other VMs. Use limits (`pagetide vm limit`) without a budget, or RAM without hugetlb"
    ))
}

/// The plan that a change asks for.
fn changed(state: &State, change: &BudgetBody) -> Result<Plan, ControlError> {
    let mut plan = match (&state.saved.plan, change.budget_bytes) {
        (Some(plan), bytes) => Plan {
            budget: bytes.map_or(plan.budget, Bytes),
            ..*plan
        },
        (None, Some(bytes)) => state.saved.given().plan_of(Bytes(bytes)),
        (None, None) => {
            return Err(ControlError::refused(
                "there is no budget whose watermarks could be changed: set one, such as `pagetide host budget 48G`",
            ));
        }
    };
    let marks = &mut plan.watermarks;
    for (amount, place) in [
        (change.min, &mut marks.min),
        (change.low, &mut marks.low),
        (change.high, &mut marks.high),
    ] {
        if let Some(amount) = amount {
            *place = mark(amount);
        }
    }
    if let Some(pace) = change.pace_bytes {
        plan.tuning.pace = Rate(Bytes(pace));
    }
    Ok(plan)
}
