// SPDX-License-Identifier: Apache-2.0
//! [`FleetReplay`]: the VMs of an overcommitted host.
//!
//! The host's budget is the sum of its VMs' memory less the overcommit. Limits add up to it, equal shares
//! at first and by need once a minute ([`balance()`]). Between two such moments VMs are independent, so they
//! run on all cores.

use super::{
    AccessStream, Division, ReplayError, VmAccount, VmParams, VmReplay,
    balance::{balance, first_first, in_turn},
};
use std::{
    num::NonZeroUsize,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How a host manages its VMs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FleetParams {
    /// Memory promised beyond the existing memory, as a share of it: 0.2 promises 120 % of it.
    pub overcommit: f64,
    /// Most memory taken from one VM, in thousandths of its size: 500 in the paper.
    pub taken_max_permille: u64,
    /// Which VMs give it.
    pub division: Division,
    /// When limits begin: before, nothing is known of what is cold.
    pub squeeze_from: Duration,
    /// How often limits are recomputed.
    pub balance_every: Duration,
    /// Threads; they affect only the speed.
    pub threads: NonZeroUsize,
}

impl Default for FleetParams {
    /// As in VPRI 7.3, overcommitted by 20 %, on one thread.
    fn default() -> Self {
        Self {
            overcommit: 0.2,
            taken_max_permille: 500,
            division: Division::ByNeed,
            squeeze_from: Duration::ZERO,
            balance_every: Duration::from_secs(60),
            threads: NonZeroUsize::MIN,
        }
    }
}

/// See the module.
pub struct FleetReplay {
    params: FleetParams,
    vms: Vec<VmReplay>,
    /// Sections that all VMs together must lack.
    wanted: u64,
    now: Duration,
}

impl FleetReplay {
    /// A host with VMs, each with its accesses.
    ///
    /// # Errors
    /// [`ReplayError::Asked`] if the overcommit exceeds what may be taken, or a VM cannot be replayed.
    pub fn new(
        params: FleetParams,
        vms: Vec<(VmParams, Box<dyn AccessStream>)>,
    ) -> Result<Self, ReplayError> {
        let most = f64::from(u32::try_from(params.taken_max_permille).unwrap_or(1000)) / 1000.0;
        let share = params.overcommit / (1.0 + params.overcommit);
        if !(0.0..=most).contains(&share) {
            return Err(ReplayError::Asked(format!(
                "an overcommit of {} takes {share:.2} of all memory, and at most {most:.2} of a VM may be \
                 taken; give one from 0 to {:.2}",
                params.overcommit,
                most / (1.0 - most)
            )));
        }
        let every = params.balance_every;
        if every.is_zero() {
            return Err(ReplayError::Asked(
                "limits cannot be set anew every 0 s".into(),
            ));
        }
        let vms: Vec<VmReplay> = vms
            .into_iter()
            .map(|(params, stream)| VmReplay::new(params, stream))
            .collect::<Result<_, _>>()?;
        let mut fleet = Self {
            params,
            wanted: 0,
            now: Duration::ZERO,
            vms,
        };
        fleet.share_equally(share);
        Ok(fleet)
    }

    /// The VMs, in the order they were given.
    #[must_use]
    pub fn vms(&self) -> &[VmReplay] {
        &self.vms
    }

    /// Virtual time so far.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Everything before `end`.
    ///
    /// # Errors
    /// That of the first VM, in the order they were given, whose accesses are wrong.
    pub fn run_until(&mut self, end: Duration) -> Result<(), ReplayError> {
        while self.now < end {
            let every = self.params.balance_every.as_nanos();
            let next = (self.now.as_nanos() / every + 1) * every;
            let next = Duration::from_nanos(u64::try_from(next).unwrap_or(u64::MAX)).min(end);
            self.run_all(next)?;
            self.now = next;
            if next.as_nanos().is_multiple_of(every) {
                self.balance();
            }
        }
        Ok(())
    }

    /// True if every VM has made all its accesses.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.vms.iter().all(VmReplay::is_ended)
    }

    /// The counters of each VM.
    #[must_use]
    pub fn accounts(&mut self) -> Vec<VmAccount> {
        self.vms.iter_mut().map(VmReplay::account).collect()
    }

    fn run_all(&mut self, end: Duration) -> Result<(), ReplayError> {
        let threads = self.params.threads.get().min(self.vms.len());
        if threads < 2 {
            return self.vms.iter_mut().try_for_each(|vm| vm.run_until(end));
        }
        let mut results: Vec<Result<(), ReplayError>> = Vec::new();
        results.resize_with(self.vms.len(), || Ok(()));
        let queue = Mutex::new(self.vms.iter_mut().zip(&mut results));
        let work = || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((vm, result)) = next else { return };
                *result = vm.run_until(end);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        results.into_iter().collect()
    }

    fn share_equally(&mut self, share: f64) {
        if share == 0.0 {
            return;
        }
        for vm in &mut self.vms {
            let sections = vm.need().sections;
            let taken = share_of(sections, share);
            self.wanted += taken;
            if self.params.squeeze_from.is_zero() {
                vm.set_limit(Some(sections - taken));
            }
        }
    }

    fn balance(&mut self) {
        if self.wanted == 0 || self.now < self.params.squeeze_from {
            return;
        }
        let needs: Vec<_> = self.vms.iter_mut().map(VmReplay::need).collect();
        let divide = match self.params.division {
            Division::ByNeed => balance,
            Division::InTurn => in_turn,
            Division::FirstFirst => first_first,
        };
        let taken = divide(&needs, self.wanted, self.params.taken_max_permille);
        for ((vm, need), taken) in self.vms.iter_mut().zip(&needs).zip(taken) {
            if taken != need.taken_sections {
                vm.set_limit(Some(need.sections - taken));
            }
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a number far below 2^52, rounded"
)]
fn share_of(sections: u64, share: f64) -> u64 {
    (sections as f64 * share).round() as u64
}
