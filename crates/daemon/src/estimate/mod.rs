// SPDX-License-Identifier: Apache-2.0
//! `pagetide estimate`: what taking over a VM would save, without taking it over.

use crate::cli::EstimateArgs;
use crate::outcome::CommandError;

/// Looks at a VM for a while and reports.
pub fn run(_args: &EstimateArgs) -> Result<(), CommandError> {
    Err(CommandError::failed("this build cannot estimate yet"))
}
