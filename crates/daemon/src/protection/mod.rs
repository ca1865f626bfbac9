// SPDX-License-Identifier: Apache-2.0
//! Live DMA protection: the access log feeds the policies, and the evictor obeys them (VPRI 5.3, 6.2).
//!
//! ```text
//!   engines, or a VPRI function ══ access log ══► pt-access-log ──► recording ──► files
//!                                                   │
//!      faults of devices, evicted sections ────────►│ VmProtection of each VM: its Protector
//!                                                   │     │
//!                                                   ┘     └─► protected sections ──► reclaim
//! ```
//! [`feed`] is the thread, [`vm`] the state of one VM, [`recently`] filters out records that tell the
//! policies nothing new, [`recording`] writes the log to files.
//!
//! # One thread for all VMs
//! There is one log: engines serve queues of many VMs, and a function has one queue for all. One thread
//! per VM would need another thread to distribute records, which is most of the work: a policy handles a
//! record in less time than a wake-up takes. A single thread also gives one place to bound the rate of
//! the log (`access-log-rate`).
//!
//! # What can go wrong without harm
//! The log is a sample; correctness does not depend on it. A device that floods the log loses records,
//! its own and those of others, for as long as it does. A device that lies about addresses is counted.
//! One that lies about its identity takes one of [`vm::DEVICES_MAX`] places in the VM whose memory it
//! names; the total that all devices protect is bounded. Protected sections are merely not chosen: a
//! page that must go for another reason (a detach, an unplug) goes.

pub mod feed;
mod log_dir;
mod minute;
mod recently;
pub mod recording;
pub mod vm;

use pagetide_policy::protect::{PolicyChoice, PolicyError};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A policy as a setting.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProtectorChoice(pub PolicyChoice);

/// Parameters are times and shares in whole units, so equality is reflexive.
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
