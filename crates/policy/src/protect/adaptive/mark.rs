// SPDX-License-Identifier: Apache-2.0
//! [`Mark`]: what `adaptive` knows of a section, and the resulting class.

use super::life_table::{AGES_S, CLASSES};
use crate::cells::{Halves, Slot};
use std::time::Duration;

/// No interval between visits was seen yet.
pub(super) const NEVER: u8 = u8::MAX;

/// Class of sections that the device never touched, near others that it did.
pub(super) const STRANGER: usize = CLASSES - 1;

/// The record of a section.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pub(super) touched_ns: Halves,
    /// The section whose visit began next, the last time.
    pub(super) next: Option<Slot>,
    /// Interval of its age.
    pub(super) interval: u8,
    /// Interval of the idle time before its last visit.
    pub(super) rested: u8,
    pub(super) visits: u8,
    pub(super) protected: bool,
    /// The evictor took it once: its CPUs let it become cold.
    pub(super) cold: bool,
}

impl Mark {
    pub(super) fn touched_at(&self) -> Duration {
        Duration::from_nanos(self.touched_ns.into())
    }

    pub(super) fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.touched_at())
    }

    pub(super) fn class(&self) -> usize {
        if self.visits == 0 {
            return STRANGER;
        }
        let rest = match self.rested {
            NEVER => 0,
            rested => match AGES_S[usize::from(rested)] {
                0..180 => 1,
                180..300 => 2,
                300..450 => 3,
                450..750 => 4,
                750..1_500 => 5,
                1_500..3_600 => 6,
                _ => 7,
            },
        };
        let visits = usize::from(self.visits.clamp(1, 3)) - 1;
        rest * 3 + visits
    }
}
