// SPDX-License-Identifier: Apache-2.0
//! Policy `adaptive`: for now, `adp`.

use super::{
    Change, Fate, PolicyReport, ProtectionPolicy, Touch,
    adp::{Adp, AdpParams},
    parameters::{Field, Parameters},
};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// Parameters of `adaptive`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AdaptiveParams {
    adp: AdpParams,
}

impl Parameters for AdaptiveParams {
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        self.adp.fields()
    }

    fn check(&self) -> Result<(), String> {
        self.adp.check()
    }
}

/// See the module.
#[derive(Debug)]
pub struct Adaptive {
    adp: Adp,
}

impl Adaptive {
    /// The policy for a device of a VM with `sections` sections.
    #[must_use]
    pub fn new(params: AdaptiveParams, sections: u64) -> Self {
        Self {
            adp: Adp::new(params.adp, sections),
        }
    }
}

impl ProtectionPolicy for Adaptive {
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
        self.adp.touched(touch, changes);
    }

    fn passed(&mut self, now: Duration, changes: &mut Vec<Change>) {
        self.adp.passed(now, changes);
    }

    fn fate(&mut self, section: SectionNo, fate: Fate, now: Duration, changes: &mut Vec<Change>) {
        self.adp.fate(section, fate, now, changes);
    }

    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>) {
        self.adp.resized(sections, changes);
    }

    fn report(&self) -> PolicyReport {
        self.adp.report()
    }
}
