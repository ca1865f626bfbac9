// SPDX-License-Identifier: Apache-2.0
//! [`SteadyLoad`]: a VM with the same load in each second, to time a replay without the cost of generating its load.
//!
//! ```text
//!   each second   disk   4 sections: 2 of the whole VM, 2 of a sixteenth of it
//!                 NIC    4 sections of its pool, the last 200
//!                 CPUs   8 sections of the lower half
//! ```
//! All random, so that touches are scattered, which is the worst case for caches.

use super::{Actor, ReplayAccess, Service};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, SectionNo};
use std::time::Duration;

const DISK: Actor = Actor::Device(DeviceId(1), Service::Block);
const NIC: Actor = Actor::Device(DeviceId(2), Service::Network);
const NIC_SECTIONS: u64 = 200;

/// See the module. It never ends.
#[derive(Clone, Debug)]
pub struct SteadyLoad {
    sections: u64,
    state: u64,
    count: u64,
}

impl SteadyLoad {
    /// Touches in a second of virtual time.
    pub const PER_SECOND: u64 = 16;

    /// The load of a VM with `sections` sections, determined by a seed.
    #[must_use]
    pub fn new(sections: u64, seed: u64) -> Self {
        Self {
            sections,
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            count: 0,
        }
    }

    /// Xorshift (Marsaglia, 2003).
    fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 33) % end.max(1)
    }
}

impl Iterator for SteadyLoad {
    type Item = ReplayAccess;

    fn next(&mut self) -> Option<ReplayAccess> {
        let at = Duration::from_nanos(self.count * (1_000_000_000 / Self::PER_SECOND));
        let turn = self.count % Self::PER_SECOND;
        self.count += 1;
        let sections = self.sections;
        let (actor, section) = match turn % 4 {
            0 if turn < Self::PER_SECOND / 2 => (DISK, self.below(sections)),
            0 => (DISK, sections / 2 + self.below(sections / 16)),
            1 => (NIC, sections - 1 - self.below(NIC_SECTIONS.min(sections))),
            _ => (Actor::Cpu, self.below(sections / 2)),
        };
        Some(ReplayAccess {
            at,
            actor,
            section: SectionNo(section),
            access: Access::Write,
            bytes: PAGE_BYTES,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_has_its_touches_in_order_within_the_vm() {
        for sections in [1, 300] {
            let touches: Vec<ReplayAccess> = SteadyLoad::new(sections, 4).take(160).collect();
            assert!(touches.is_sorted_by_key(|touch| touch.at));
            assert!(touches.iter().all(|touch| touch.section.0 < sections));
            for (second, touches) in touches.chunks(16).enumerate() {
                let is_in = |touch: &ReplayAccess| touch.at.as_secs() == second as u64;
                assert!(touches.iter().all(is_in));
                let of = |actor| touches.iter().filter(|touch| touch.actor == actor).count();
                assert_eq!([of(DISK), of(NIC), of(Actor::Cpu)], [4, 4, 8]);
            }
        }
    }
}
