// SPDX-License-Identifier: Apache-2.0
//! [`Needed`]: whether anybody waits for the daemon that starts.

use super::devices;
use crate::settings::RunSettings;
use std::path::PathBuf;

/// Whether anybody waits for the daemon that starts. If so, it starts also without what cannot be had now (a tier
/// outside memory, the host's budget), which is tried again: VMs and disks are stuck without a daemon. If not, a
/// person has started it by hand, and is told what is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Needed {
    /// There is nothing to serve.
    ByNobody,
    /// A predecessor has handed over, or has left VMs or disks.
    BySomebody,
}

impl Needed {
    /// Of a daemon to which nothing was handed over, and which finds these pools.
    pub(super) fn of_what_is_left(settings: &RunSettings, pools: &[PathBuf]) -> Self {
        match !pools.is_empty() || devices::are_left(settings) {
            true => Self::BySomebody,
            false => Self::ByNobody,
        }
    }
}
