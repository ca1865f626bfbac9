// SPDX-License-Identifier: Apache-2.0
//! [`failed`]: any error as the API's *failed*.

use crate::control::ControlError;

pub(super) fn failed(error: impl std::fmt::Display) -> ControlError {
    ControlError::failed(error.to_string())
}
