// SPDX-License-Identifier: Apache-2.0
//! `pagetide dpu`: the software DPU as a process of its own, beside `pagetide run`.

use crate::{
    control::{Control, ControlError},
    settings::DpuSettings,
};
use std::sync::Arc;

/// Starts the DPU and takes up the devices of a predecessor.
pub fn start_dpu(settings: &DpuSettings) -> Result<Arc<dyn Control>, ControlError> {
    let socket = settings.vpri_path();
    Err(ControlError::failed(format!(
        "nothing listens at {} yet",
        socket.display()
    )))
}
