// SPDX-License-Identifier: Apache-2.0
//! [`WorkerPlace`]: on which CPUs a worker is, and which threads it preempts there.

use super::{urgency::Preempt, vm::TenantVm};
use pagetide_sys::cpu::{self, Urgency};
use std::sync::Weak;

/// Where a worker runs.
pub(super) enum Home {
    /// On this CPU.
    Cpu(usize),
    /// On any CPU of the tenant, as they are now; anywhere as long as they are not known.
    Tenant(Weak<TenantVm>),
    /// Anywhere.
    Anywhere,
}

/// Where a worker runs now, and which threads it preempts.
pub(super) struct WorkerPlace {
    home: Home,
    preempt: Preempt,
    cpus: Vec<usize>,
    is_urgent: bool,
}

impl WorkerPlace {
    pub(super) fn new(home: Home, preempt: Preempt) -> Self {
        let mut worker_place = Self {
            home,
            preempt,
            cpus: Vec::new(),
            is_urgent: false,
        };
        if let Home::Cpu(cpu) = worker_place.home {
            worker_place.move_to(vec![cpu]);
        }
        worker_place
    }

    /// Moves to its CPUs and becomes urgent there. Where no tenant's CPUs are known it stays
    /// ordinary: it could preempt any VM.
    pub(super) fn stand(&mut self) {
        if let Home::Tenant(tenant) = &self.home
            && let Some(tenant) = tenant.upgrade()
        {
            self.move_to(tenant.cpus().own().to_vec());
        }
        if self.cpus.is_empty() {
            self.be_ordinary();
        } else {
            self.be_urgent();
        }
    }

    /// Runs work that may wait, in the ordinary class (see [`super::workers`]).
    pub(super) fn in_ordinary_class<R>(&self, work: impl FnOnce() -> R) -> R {
        if !self.is_urgent || self.preempt != Preempt::Fifo {
            return work();
        }
        Preempt::Nice.take_worker();
        let done = work();
        Preempt::Fifo.take_worker();
        done
    }

    fn be_urgent(&mut self) {
        if !self.is_urgent {
            self.preempt.take_worker();
            self.is_urgent = true;
        }
    }

    fn be_ordinary(&mut self) {
        if self.is_urgent {
            if let Err(error) = cpu::set_urgency(Urgency::Ordinary) {
                tracing::error!(%error, "a worker of the fault service cannot be made ordinary");
            }
            self.is_urgent = false;
        }
    }

    /// A failure to move costs only speed: the CPU has gone, or is not ours to use.
    fn move_to(&mut self, cpus: Vec<usize>) {
        if cpus.is_empty() || self.cpus == cpus {
            return;
        }
        if let Err(error) = cpu::set_affinity(&cpus) {
            tracing::debug!(%error, ?cpus, "a worker of the fault service stays where it is");
        }
        self.cpus = cpus;
    }
}
