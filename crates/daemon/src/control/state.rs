// SPDX-License-Identifier: Apache-2.0
//! How far VMs and devices are.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How far a VM is in its life under Pagetide.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Its faults are served and its cold pages evicted.
    #[default]
    Attached,
    /// Its faults are served, but nothing is evicted, or only pages of zeros; `eviction_blockers` says why.
    ServingOnly,
    /// Its pages are being swapped in before it is released.
    Detaching,
    /// Stopped, because going on could hand out wrong bytes.
    Stopped,
}

/// How far a device is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// No front end is connected.
    #[default]
    Listening,
    /// A front end is connected.
    Connected,
    /// Stopped by a misbehaving front end or a failing image, or not made again after a restart; `error`
    /// says why.
    Stopped,
}
