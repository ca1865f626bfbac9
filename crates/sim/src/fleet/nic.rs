// SPDX-License-Identifier: Apache-2.0
//! The guest's network interface: buffers of a bounded pool, posted and recycled in the order of the rings.
//!
//! A driver posts buffers to its receive rings, the device fills them one after the other, and the driver
//! posts each again when the stack has released it. So the whole pool is touched in turn whatever the load,
//! and the load determines only the speed (O1 of VPRI 4.2.1: the footprint does not depend on the
//! intensity). When the guest is quiet a few packets a second remain. Now and then the stack keeps a
//! buffer, and the driver replaces it with another page: the footprint creeps (17 % after weeks).

use super::{
    activity::Pace,
    aged::LastUse,
    random::{LoadRandom, number},
    sink::{Sink, Who},
};
use pagetide_addr::{Access, SECTION_BYTES};

/// Buffers of one page each that a section holds.
pub(super) const BUFFERS_PER_SECTION: f64 = 512.0;
/// Packets a second when the guest is quiet.
pub(super) const QUIET_PACKETS_PER_S: f64 = 20.0;
/// Share of the pool that is replaced by other memory in an hour.
const REPLACED_PER_HOUR: f64 = 0.02;

/// See the module.
#[derive(Debug)]
pub(super) struct Nic {
    random: LoadRandom,
    /// Sections of the pool, in the order of the ring.
    pool: Vec<u64>,
    /// Memory that may replace one of them.
    elsewhere: Vec<u64>,
    packets_per_s: f64,
    /// Position in the ring, in buffers.
    position: f64,
}

impl Nic {
    pub(super) fn new(
        random: LoadRandom,
        pool: Vec<u64>,
        elsewhere: Vec<u64>,
        packets_per_s: f64,
    ) -> Self {
        Self {
            random,
            pool,
            elsewhere,
            packets_per_s,
            position: 0.0,
        }
    }

    /// When each section of the pool was filled last before the first second, if it is filled in turn, one each
    /// `turn_s`: the next is the oldest.
    pub(super) fn used_before(&self, mut turn_s: impl FnMut() -> f64) -> Vec<LastUse> {
        let mut age_s = 0.0;
        let newest_first = self.pool.iter().rev();
        let last = newest_first.map(|section| {
            age_s += turn_s();
            LastUse {
                who: Who::Nic,
                section: *section,
                age_s,
            }
        });
        last.collect()
    }

    /// The touches of one second.
    pub(super) fn second(&mut self, pace: Pace, sink: &mut Sink) {
        if self.pool.is_empty() {
            return;
        }
        self.replace();
        let rate = if pace == Pace::Busy {
            // Traffic is never even: some seconds have a multiple of others.
            self.packets_per_s * self.random.exponential().min(5.0)
        } else {
            QUIET_PACKETS_PER_S * self.random.exponential()
        };
        let end = self.position + rate;
        let first = super::random::whole(self.position / BUFFERS_PER_SECTION);
        let last = super::random::whole(end / BUFFERS_PER_SECTION);
        let turn = self.pool.len() as u64;
        for step in first..=last.min(first + turn - 1) {
            let at = usize::try_from(step % turn).unwrap_or(0);
            sink.touch(Who::Nic, self.pool[at], Access::Write, SECTION_BYTES / 8);
            // The driver looks at what came.
            sink.touch(Who::Cpu, self.pool[at], Access::Read, SECTION_BYTES / 8);
        }
        self.position = end % (number(turn) * BUFFERS_PER_SECTION);
    }

    fn replace(&mut self) {
        let rate = number(self.pool.len() as u64) * REPLACED_PER_HOUR / 3_600.0;
        for _ in 0..self.random.count(rate) {
            if self.elsewhere.is_empty() {
                return;
            }
            let old = usize::try_from(self.random.below(self.pool.len() as u64)).unwrap_or(0);
            let new = usize::try_from(self.random.below(self.elsewhere.len() as u64)).unwrap_or(0);
            std::mem::swap(&mut self.pool[old], &mut self.elsewhere[new]);
        }
    }
}
