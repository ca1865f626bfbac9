// SPDX-License-Identifier: Apache-2.0
//! [`AdaptiveParams`]: the parameters of `adaptive`. It learns the rest.

use crate::protect::parameters::{Field, Parameters, Share};
use std::time::Duration;

/// Parameters of `adaptive`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdaptiveParams {
    /// Most sections that are remembered, as a share of the VM's.
    pub tracked_max: Share,
    /// Most sections that are protected, as a share of the VM's.
    pub protected_max: Share,
    /// Sections that are protected on average, as a share of the VM's.
    pub protected_mean: Share,
    /// A section is prefetched without protection if the probability of a touch before the evictor
    /// takes it again is at least this.
    pub likely: Share,
    /// Sections that may be prefetched per minute, as a share of the VM's.
    pub bring_backs_a_minute: Share,
    /// First value of the evictor's reach, until it is learned: a section not touched for this long
    /// is near it.
    pub reach_at_first: Duration,
}

impl Default for AdaptiveParams {
    fn default() -> Self {
        Self {
            tracked_max: Share::percent(60),
            protected_max: Share::percent(5),
            protected_mean: Share::millionths(43_000),
            likely: Share::percent(10),
            bring_backs_a_minute: Share::percent(10),
            reach_at_first: Duration::from_secs(180),
        }
    }
}

impl Parameters for AdaptiveParams {
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("tracked-max", Field::Share(&mut self.tracked_max)),
            ("protected-max", Field::Share(&mut self.protected_max)),
            ("protected-mean", Field::Share(&mut self.protected_mean)),
            ("likely", Field::Share(&mut self.likely)),
            (
                "bring-backs-a-minute",
                Field::Share(&mut self.bring_backs_a_minute),
            ),
            ("reach-at-first", Field::Time(&mut self.reach_at_first)),
        ]
    }

    fn check(&self) -> Result<(), String> {
        if self.protected_mean > self.protected_max {
            return Err(format!(
                "protected-mean ({}) must be at most protected-max ({})",
                self.protected_mean, self.protected_max
            ));
        }
        Ok(())
    }
}
