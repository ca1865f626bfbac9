// SPDX-License-Identifier: Apache-2.0
//! [`Holds`]: stops a VM's vCPUs for as long as reclaim needs pages that stay untouched.
//!
//! It is the last resort against a VM that touches all of its memory faster than it can be evicted, and
//! would stay above its limit for ever ([`pagetide_policy::reclaim`]).

use pagetide_sys::{process::ProcessFd, ptrace::Held};
use pagetide_vmm::threads;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Number and length of the holds of one VM, since this daemon began.
#[derive(Debug, Default)]
pub(super) struct Holds {
    count: AtomicU64,
    us: AtomicU64,
}

impl Holds {
    /// Stops the vCPUs of `vmm`, which runs the VM called `name`, for `time` at most. `None` if that is not
    /// possible now; reclaim then goes on with what the VM leaves alone.
    pub(super) fn begin(&self, name: &str, vmm: &ProcessFd, time: Duration) -> Option<Held> {
        let held = match threads::hold_vcpus(vmm, time) {
            Ok(held) => held,
            Err(error) => {
                tracing::warn!(
                    vm = name,
                    %error,
                    "the VM is over its limit, uses all of its memory, and its vCPUs cannot be stopped"
                );
                return None;
            }
        };
        // Each VM once: afterwards the counter tells it.
        if self.count.fetch_add(1, Relaxed) == 0 {
            tracing::info!(
                vm = name,
                threads = held.stopped,
                deaf = held.deaf,
                "vCPUs are stopped for a moment: the VM is over its limit and uses all of its memory"
            );
        }
        Some(held)
    }

    /// Lets them go on.
    pub(super) fn end(&self, held: Option<Held>) {
        let Some(held) = held else {
            return;
        };
        let us = u64::try_from(held.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.us.fetch_add(us, Relaxed);
    }

    /// Number of holds.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Length of all of them.
    pub(super) fn time(&self) -> Duration {
        Duration::from_micros(self.us.load(Relaxed))
    }
}
