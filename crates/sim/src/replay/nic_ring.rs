// SPDX-License-Identifier: Apache-2.0
//! [`NicRing`]: a synthetic network interface, added to a trace that has none.
//!
//! A driver posts the same buffers again and again, so the whole pool is touched in turn whatever the load
//! (O1 of VPRI 4.2.1); the load determines how fast. Here a guest is busy for one minute of five:
//! ```text
//!   busy    2,000 packets a second, one page each: a pool of 240 MiB is passed twice
//!   quiet      20 packets a second: a section of 2 MiB lasts 26 s
//! ```
//! so that most of the pool is idle for about four minutes each time, which misleads an evictor.

use super::{Actor, ReplayAccess, Service};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, SectionNo};
use std::{collections::VecDeque, time::Duration};

const TURN_S: u64 = 300;
const BUSY_S: u64 = 60;
const BUSY_PACKETS_PER_S: u64 = 2_000;
const QUIET_PACKETS_PER_S: u64 = 20;

/// See the module. It never ends.
#[derive(Clone, Debug)]
pub struct NicRing {
    device: DeviceId,
    pool: Vec<SectionNo>,
    section_pages: u64,
    second: u64,
    /// The next buffer, counted in pages from the start of the pool.
    next_page: u64,
    ready: VecDeque<ReplayAccess>,
}

impl NicRing {
    /// A NIC whose buffers fill the sections of `pool`.
    #[must_use]
    pub fn new(device: DeviceId, pool: Vec<SectionNo>, section_bytes: u64) -> Self {
        Self {
            device,
            pool,
            section_pages: (section_bytes / PAGE_BYTES).max(1),
            second: 0,
            next_page: 0,
            ready: VecDeque::new(),
        }
    }

    /// The packets of one second, as one access for each section that they fill.
    fn fill_second(&mut self) {
        let at = Duration::from_secs(self.second);
        let mut packets = if self.second % TURN_S < BUSY_S {
            BUSY_PACKETS_PER_S
        } else {
            QUIET_PACKETS_PER_S
        };
        self.second += 1;
        let pool_pages = self.pool.len() as u64 * self.section_pages;
        while packets > 0 {
            let left = self.section_pages - self.next_page % self.section_pages;
            let pages = packets.min(left);
            let index = SectionNo(self.next_page / self.section_pages).index();
            self.ready.push_back(ReplayAccess {
                at,
                actor: Actor::Device(self.device, Service::Network),
                section: self.pool[index],
                access: Access::Write,
                bytes: pages * PAGE_BYTES,
            });
            packets -= pages;
            self.next_page = (self.next_page + pages) % pool_pages;
        }
    }
}

impl Iterator for NicRing {
    type Item = ReplayAccess;

    fn next(&mut self) -> Option<ReplayAccess> {
        if self.pool.is_empty() {
            return None;
        }
        if self.ready.is_empty() {
            self.fill_second();
        }
        self.ready.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_passes_its_whole_pool_in_turn_and_slows_down_after_a_minute() {
        let pool: Vec<_> = [5, 9, 2].map(SectionNo).into();
        let ring = NicRing::new(DeviceId(4), pool, 2 << 20);
        let day: Vec<_> = ring
            .take_while(|a| a.at < Duration::from_secs(600))
            .collect();
        let first: Vec<_> = day.iter().take(5).map(|a| a.section.0).collect();
        assert_eq!(
            first,
            [5, 9, 2, 5, 5],
            "1536 pages, then 464, then the next second"
        );
        let pages = |from: u64, to: u64| -> u64 {
            let within = |a: &&ReplayAccess| (from..to).contains(&a.at.as_secs());
            day.iter()
                .filter(within)
                .map(|a| a.bytes / PAGE_BYTES)
                .sum()
        };
        assert_eq!(pages(0, 60), 120_000);
        assert_eq!(pages(60, 300), 4_800);
        assert_eq!(pages(300, 360), 120_000);
        assert!(NicRing::new(DeviceId(4), Vec::new(), 4096).next().is_none());
    }
}
