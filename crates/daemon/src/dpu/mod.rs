// SPDX-License-Identifier: Apache-2.0
//! The software DPU: its devices ([`DeviceSet`]), in the daemon itself or in a separate process
//! ([`process`]).

pub mod access;
mod account;
mod disk;
mod list;
mod make;
pub mod process;
mod report;
mod request;
mod set;

pub(crate) use request::DeviceRequest;
pub(crate) use set::{DeviceSet, Owed};

use crate::control::ControlError;
use std::path::Path;

/// The error of a daemon whose DPU is another process, and which therefore serves no device.
pub(crate) fn no_devices_here(socket: &Path) -> ControlError {
    ControlError::refused(format!(
        "the devices of this host are in the DPU process behind {}: ask that process, by its own --api \
         (see `pagetide dpu --print-settings`)",
        socket.display()
    ))
}
