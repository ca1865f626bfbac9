// SPDX-License-Identifier: Apache-2.0
//! The thread that measures every VM once a period, has the policy decide, and puts targets into force.
//!
//! It sleeps while there is no budget. A bell wakes it early: a VM that came or went, another share, a fill
//! that found the budget short. Rates over less than [`STEP_MIN`] would be noise, so it waits for that even
//! then; a fill that is short evicts by itself meanwhile.

use super::{
    super::{failure::failed, lock::lock},
    Budget, come_back,
    governed::Governed,
    seat::{Standing, VmSeat},
    state::{InForce, State},
};
use crate::control::ControlError;
use pagetide_policy::budget::{Bytes, Change, Decision, Refaults, VmId, VmReport};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Time between two steps.
const PERIOD: Duration = Duration::from_millis(500);
/// Time between two attempts to put into force what was not possible at the start.
const RETRY: Duration = Duration::from_secs(5);
/// Least time between two steps.
const STEP_MIN: Duration = Duration::from_millis(100);

/// A VM, measured.
struct Seen {
    id: VmId,
    report: VmReport,
    refaults: Refaults,
}

impl Budget {
    /// Starts the thread. It ends after [`Self::stop`].
    ///
    /// # Errors
    /// There is no thread for it.
    pub(in crate::host) fn start(self: &Arc<Self>) -> Result<(), ControlError> {
        let budget = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("pt-budget".into())
            .spawn(move || budget.run());
        match spawned {
            Ok(_detached) => Ok(()),
            Err(error) => Err(failed(format!("no thread for the host's budget: {error}"))),
        }
    }

    /// Ends the thread soon, and lifts all targets: the daemon ends, so every VM is detached, one after the other.
    /// What would be evicted of one for the sake of another comes back in a moment. What was set stays written.
    pub(in crate::host) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopped = true;
        self.room.lift();
        state.lift_targets();
        drop(state);
        self.room.ring();
    }

    fn run(&self) {
        loop {
            let stepped = Instant::now();
            let (stopped, in_force) = {
                let state = lock(&self.state);
                (state.stopped, state.force.is_some())
            };
            if stopped {
                return;
            }
            if in_force {
                self.step();
            }
            let waits = !in_force && self.try_again();
            let pause = match in_force {
                true => Some(PERIOD),
                false => waits.then_some(RETRY),
            };
            self.room.wait(pause);
            if in_force {
                let early = STEP_MIN.saturating_sub(stepped.elapsed());
                std::thread::sleep(early);
            }
        }
    }

    /// Measures, decides, and puts into force what was decided.
    pub(super) fn step(&self) {
        self.step_at(self.started.elapsed());
    }

    /// The same at `now`, since any fixed moment.
    pub(super) fn step_at(&self, now: Duration) {
        let seen = self.measure();
        let mut state = lock(&self.state);
        if state.stopped {
            return;
        }
        let State { force, members, .. } = &mut *state;
        // It may have been lifted meanwhile.
        let Some(InForce {
            budget, decision, ..
        }) = force
        else {
            return;
        };
        // Who could not come before may find room now.
        for (name, member) in members.iter() {
            if member.is_governed()
                && budget.vm(member.id).is_none()
                && let Err(error) = come_back(budget, member)
            {
                tracing::debug!(vm = name, %error, "it does not come under the budget as it was set");
            }
        }
        for vm in &seen {
            // Whoever left since has nothing to be observed.
            if let Err(error) = budget.observe(vm.id, vm.report, &vm.refaults) {
                tracing::debug!(%error, "a VM left while it was measured");
            }
        }
        let used: Bytes = seen
            .iter()
            .map(|vm| vm.report.resident + vm.report.stored)
            .sum();
        let plan = budget.plan();
        let left = plan.budget.less(plan.watermarks.min.of(plan.budget));
        self.room.correct(left, used);
        let decided = budget.step(now);
        let changes: BTreeMap<VmId, &Change> = decided
            .changes
            .iter()
            .map(|change| (change.vm, change))
            .collect();
        let pressures: BTreeMap<VmId, _> =
            seen.iter().map(|vm| (vm.id, vm.report.pressure)).collect();
        for (name, member) in members.iter() {
            let change = changes.get(&member.id).copied();
            let status = budget.vm(member.id);
            let before = member.seat.standing();
            let standing = Standing {
                target: status.and_then(|status| status.target),
                need: status.map(|status| status.need),
                reason: change.map(|change| change.reason).or(before.reason),
                stalled: pressures.get(&member.id).copied().flatten(),
                share: before.share,
            };
            if member.seat.decided(budget.gate(member.id), standing)
                && let Some(vm) = member.governed()
            {
                vm.enforce();
                tell(name, change);
            }
        }
        note(decision.as_ref(), &decided);
        *decision = Some(decided);
    }

    fn measure(&self) -> Vec<Seen> {
        let vms: Vec<(VmId, Arc<VmSeat>, Arc<dyn Governed>)> = {
            let state = lock(&self.state);
            let there = |member: &super::Member| {
                Some((member.id, Arc::clone(&member.seat), member.governed()?))
            };
            let governed = state.members.values().filter(|member| member.is_governed());
            governed.filter_map(there).collect()
        };
        let see = |(id, seat, vm): (VmId, Arc<VmSeat>, Arc<dyn Governed>)| {
            let report = VmReport {
                pressure: seat.stalled(Instant::now()),
                ..vm.measure()?
            };
            Some(Seen {
                id,
                report,
                refaults: seat.take_refaults(),
            })
        };
        vms.into_iter().filter_map(see).collect()
    }
}

fn tell(name: &str, change: Option<&Change>) {
    if let Some(change) = change {
        tracing::debug!(vm = name, target = %change.to, reason = ?change.reason, "another target");
    }
}

/// Logs what an operator should know: the budget is short, or not any more.
fn note(before: Option<&Decision>, now: &Decision) {
    use pagetide_policy::budget::Water::BelowMin;
    let was_short = before.is_some_and(|before| before.water == BelowMin);
    match (was_short, now.water == BelowMin) {
        (false, true) => tracing::warn!(
            free = %now.free,
            over = %now.over,
            "the host's budget is short: fills first evict of their own VM"
        ),
        (true, false) => tracing::info!(free = %now.free, "the host's budget has room again"),
        (true, true) | (false, false) => {}
    }
}
