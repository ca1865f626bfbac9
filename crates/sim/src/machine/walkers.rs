// SPDX-License-Identifier: Apache-2.0
//! Walkers of the translation agent: a limited number of walks at a time. Without a limit nothing of this is used.

use super::Machine;
use crate::flavour::{Flavour, StageQueue as _};

impl<F: Flavour, O> Machine<'_, F, O> {
    /// Gives a walk of `takes_ns` to a walker, if one is free.
    #[inline(always)]
    pub(super) fn begin_walk(&mut self, now_ns: u64, slot: u32, takes_ns: u64) {
        let walkers = self.config.walk.walkers;
        if walkers > 0 {
            if self.walkers_busy == walkers {
                self.waiting_walks.push_back((slot, takes_ns));
                return;
            }
            self.walkers_busy += 1;
        }
        self.walking.push(now_ns + takes_ns, slot);
    }

    /// A walker is free: it takes the walk that waits longest.
    #[inline(always)]
    pub(super) fn next_walk(&mut self, now_ns: u64) {
        if self.config.walk.walkers == 0 {
            return;
        }
        match self.waiting_walks.pop_front() {
            Some((slot, takes_ns)) => self.walking.push(now_ns + takes_ns, slot),
            None => self.walkers_busy -= 1,
        }
    }
}
