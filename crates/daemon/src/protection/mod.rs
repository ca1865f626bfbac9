// SPDX-License-Identifier: Apache-2.0
//! DMA protection live: the access log feeds the policies, the evictor obeys them (VPRI 5.3, 6.2).
//!
//! ```text
//!   engines, or a VPRI function ══ access log ══► pt-access-log ──► recording ──► files
//!                                                   │
//!      faults of devices, evicted sections ────────►│ VmProtection of each VM: its Protector
//!                                                   │     │
//!                          pages brought back ◄─────┘     └─► protected sections ──► rounds
//! ```
//! [`feed`] is the thread, [`vm`] what is kept of a VM, [`recently`] keeps from the policies what
//! tells them nothing new, [`recording`] is the log as files.
//!
//! # One thread for all VMs
//! There is one log: engines serve queues of many VMs, and a function has one queue for
//! all. A thread for each VM would need another that hands records out, which is most of
//! the work: what a policy does with a record takes less time than a wake-up. And so
//! there is one place where the rate of the log is bounded (`access-log-rate`).
//!
//! # What can go wrong, and does no harm
//! The log is a sample; nothing that must be right rests on it. A device that floods it
//! loses records, its own as well as others', for as long as it does. One that lies
//! about addresses is counted; one that lies about who it is takes one of
//! [`vm::DEVICES_MAX`] places in the VM whose memory it names; what all of them protect
//! together is bounded. What is protected is only not chosen: a page that must go for another
//! reason (a detach, an unplug) goes.

pub(crate) mod feed;
#[cfg(test)]
mod live_tests;
mod log_dir;
mod minute;
mod recently;
pub mod recording;
pub(crate) mod vm;

use pagetide_policy::protect::{PolicyChoice, PolicyError};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, time::Duration};

/// A policy as a setting.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProtectorChoice(pub PolicyChoice);

/// Parameters are times and shares in whole units, and equal to themselves.
impl Eq for ProtectorChoice {}

impl FromStr for ProtectorChoice {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for ProtectorChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Now, by the clock that devices stamp records with.
pub(crate) fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let nanos = u32::try_from(now.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), nanos)
}
