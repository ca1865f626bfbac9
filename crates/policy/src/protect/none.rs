// SPDX-License-Identifier: Apache-2.0
//! Policy `none`: nothing is protected. The baseline for the others.

use super::{Change, PolicyReport, ProtectionPolicy, Touch};

/// See the module.
#[derive(Debug, Default)]
pub struct Nothing;

impl ProtectionPolicy for Nothing {
    fn touched(&mut self, _touch: Touch, _changes: &mut Vec<Change>) {}

    fn passed(&mut self, _now: std::time::Duration, _changes: &mut Vec<Change>) {}

    fn resized(&mut self, _sections: u64, _changes: &mut Vec<Change>) {}

    fn report(&self) -> PolicyReport {
        PolicyReport::default()
    }
}
