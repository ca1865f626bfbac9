// SPDX-License-Identifier: Apache-2.0
//! The software DPU: its devices ([`DeviceSet`]), in the daemon itself or in a
//! process of their own ([`process`]).

mod account;
pub mod disk;
pub mod process;
mod set;

pub(crate) use set::DeviceSet;

use crate::control::ControlError;
use std::path::Path;

/// Why a daemon whose DPU is another process serves no device.
pub(crate) fn no_devices_here(socket: &Path) -> ControlError {
    ControlError::refused(format!(
        "the devices of this host are in the DPU process behind {}: ask that process, by its own --api \
         (see `pagetide dpu --print-settings`)",
        socket.display()
    ))
}
