// SPDX-License-Identifier: Apache-2.0
//! [`Preempt`]: which threads the service's threads preempt.

use pagetide_sys::cpu::{self, Urgency, priority};

/// Which threads the dispatcher and workers preempt on the CPUs they share with vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Preempt {
    /// Every ordinary thread, at once (`SCHED_FIFO`, low priorities); where that is not
    /// allowed, as [`Self::Nice`].
    #[default]
    Fifo,
    /// As ordinary threads with niceness -20, where allowed.
    Nice,
    /// None.
    Off,
}

impl Preempt {
    /// Makes this thread the dispatcher.
    pub(super) fn take_dispatcher(self) {
        self.take(priority::IOPF_DISPATCHER);
    }

    /// Makes this thread a worker.
    pub(super) fn take_worker(self) {
        self.take(priority::IOPF_WORKER);
    }

    /// Makes this thread as urgent as configured and allowed.
    fn take(self, priority: u8) {
        let tries: &[Urgency] = match self {
            Self::Fifo => &[Urgency::Preempting(priority), Urgency::Eager],
            Self::Nice => &[Urgency::Eager],
            Self::Off => &[],
        };
        for urgency in tries {
            match cpu::set_urgency(*urgency) {
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%error, ?urgency, "a thread of the fault service may not be this urgent");
                }
            }
        }
    }
}
