// SPDX-License-Identifier: Apache-2.0
//! The composition: VMs, tiers, devices and recovery behind [`Control`].

use std::sync::Arc;

use crate::control::{Control, ControlError};
use crate::settings::RunSettings;

/// Starts the running system and takes up again what a predecessor left.
pub fn start_control(_settings: &RunSettings) -> Result<Arc<dyn Control>, ControlError> {
    Err(ControlError::failed(
        "this build cannot serve VMs yet: its host part is missing",
    ))
}
