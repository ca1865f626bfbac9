// SPDX-License-Identifier: Apache-2.0
//! [`Workingset`]: how much more memory a VM would have needed to keep what it now faults back in.
//!
//! The idea is that of the kernel's `mm/workingset.c`. Each VM has a clock that counts evicted
//! pages. An evicted section remembers the time at which it went, its *shadow*. When it is faulted
//! back in (a *refault*), it and the evictions since then are its *distance*:
//!
//! ```text
//!   evicted:    A  B  C  D  E          A is touched: distance 5 (A itself, and B, C, D, E after it)
//!     shadow of A ▲           ▲ now
//! ```
//! Sections are evicted in the order in which they were left alone. With five sections more of
//! memory A would still have been there at this touch; with four it would not. So the bytes
//! refaulted at a distance of up to x tell what x bytes more would be worth: the fills that they
//! would have saved. That needs no guess about what the guest does.
//!
//! # What it costs
//! A shadow is 4 bytes: the clock in units of 64 pages, which wraps after 1 PiB of evictions. A
//! section that stays away for longer may seem near once. The pages of a section share a shadow,
//! that of its last eviction. Nothing is allocated on a fault. Shadows do not outlive the process;
//! what was evicted before is a refault of unknown distance ([`Refaults::unknown`]).

use super::units::Bytes;
use crate::chunks::{self, CHUNK, Chunks};
use pagetide_addr::{SECTION_BYTES, SectionNo};
use std::time::Duration;

/// Pages of a unit of the clock.
const UNIT_PAGES: u64 = 64;
/// Distances are counted in classes, each twice as far as the one before; the first goes to one
/// section, the last from 512 GiB on.
const CLASSES: usize = 20;

/// When a section was evicted: 4 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Shadow(u32);

impl Shadow {
    const NONE: Self = Self(0);

    /// The clock has no time 0, which is `NONE`.
    fn at(pages: u64) -> Self {
        Self(1 + u32::try_from(pages / UNIT_PAGES % u64::from(u32::MAX)).unwrap_or(0))
    }

    fn distance_to(self, now: Self) -> Bytes {
        let units = if now.0 >= self.0 {
            now.0 - self.0
        } else {
            u32::MAX - (self.0 - now.0)
        };
        Bytes::of_pages(u64::from(units) * UNIT_PAGES)
    }
}

/// Evictions and refaults of one VM.
#[derive(Debug, Default)]
pub struct Workingset {
    evicted_pages: u64,
    chunks: Chunks,
    shadows: Vec<[Shadow; CHUNK]>,
    refaults: Refaults,
}

impl Workingset {
    /// `pages` of `section` were evicted.
    pub fn evicted(&mut self, section: SectionNo, pages: u64) {
        let (number, offset) = chunks::split(section);
        let place = self.chunks.find(number).unwrap_or_else(|| {
            let place = self.chunks.add(number);
            if place == self.shadows.len() {
                chunks::push(&mut self.shadows, [Shadow::NONE; CHUNK]);
            }
            self.shadows[place] = [Shadow::NONE; CHUNK];
            place
        });
        self.shadows[place][offset] = Shadow::at(self.evicted_pages);
        self.evicted_pages = self.evicted_pages.wrapping_add(pages);
    }

    /// `pages` of `section` were filled from what was stored; returns their distance, if the
    /// eviction is known.
    pub fn refaulted(&mut self, section: SectionNo, pages: u64) -> Option<Bytes> {
        let (number, offset) = chunks::split(section);
        let shadow = self
            .chunks
            .find(number)
            .map(|place| self.shadows[place][offset]);
        let distance = shadow
            .filter(|shadow| *shadow != Shadow::NONE)
            .map(|shadow| shadow.distance_to(Shadow::at(self.evicted_pages)));
        match distance {
            Some(distance) => self.refaults.add(distance, Bytes::of_pages(pages)),
            None => self.refaults.unknown += Bytes::of_pages(pages),
        }
        distance
    }

    /// The refaults since the last call.
    pub fn take_refaults(&mut self) -> Refaults {
        std::mem::take(&mut self.refaults)
    }

    /// Memory that this takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let shadows = self.shadows.capacity() * size_of::<[Shadow; CHUNK]>();
        (size_of::<Self>() + shadows) as u64 + self.chunks.bytes()
    }
}

/// Refaults of a period, by distance.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Refaults {
    classes: [Class; CLASSES],
    /// Filled without a known distance: evicted before the daemon was started.
    pub unknown: Bytes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Class {
    filled: Bytes,
    farthest: Bytes,
}

impl Refaults {
    /// Counts `filled` bytes refaulted at `distance`.
    pub fn add(&mut self, distance: Bytes, filled: Bytes) {
        let sections = distance.0.div_ceil(SECTION_BYTES).max(1);
        let class = sections.next_power_of_two().trailing_zeros() as usize;
        let class = &mut self.classes[class.min(CLASSES - 1)];
        class.filled += filled;
        class.farthest = class.farthest.max(distance);
    }

    /// Counts those of `other` too.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.classes.iter_mut().zip(other.classes) {
            mine.filled += theirs.filled;
            mine.farthest = mine.farthest.max(theirs.farthest);
        }
        self.unknown += other.unknown;
    }

    /// All bytes refaulted.
    #[must_use]
    pub fn filled(&self) -> Bytes {
        self.classes.iter().map(|class| class.filled).sum::<Bytes>() + self.unknown
    }

    /// The most additional memory that is worth having.
    #[must_use]
    pub fn worth(&self, terms: &Terms) -> Bytes {
        let (mut filled, mut worth) = (Bytes::ZERO, Bytes::ZERO);
        let unknown = Class {
            filled: self.unknown,
            farthest: terms.absent,
        };
        for class in self.classes.iter().chain([&unknown]) {
            if class.filled == Bytes::ZERO {
                continue;
            }
            filled += class.filled;
            let needed = class.farthest.min(terms.absent);
            let saved = filled.part(
                super::units::millis(terms.payback),
                super::units::millis(terms.period),
            );
            if needed <= saved {
                let got = if needed <= terms.reach {
                    needed
                } else {
                    needed.min(terms.owed)
                };
                worth = worth.max(got);
            }
        }
        worth
    }
}

/// What decides whether more memory for a VM is worth it.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Absent memory of the VM: with that much more nothing would be refaulted, however many
    /// evictions there were.
    pub absent: Bytes,
    /// The most the VM could get: out of what others do not need, and its share by weight beside
    /// those that want more. If what is refaulted needs more than that, it would be refaulted all
    /// the same, as when a guest goes round through more memory than there is.
    pub reach: Bytes,
    /// What it may have even so: its share by weight, without the cold memory of others.
    pub owed: Bytes,
    /// The time in which refaults occurred.
    pub period: Duration,
    /// Moving a byte costs an eviction elsewhere and a fill here; it is worth that if the refaults
    /// that it ends would have filled as much within this time.
    pub payback: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::VecDeque;

    const SECTION: Bytes = Bytes(SECTION_BYTES);
    const PAGES: u64 = 512;

    fn terms() -> Terms {
        Terms {
            absent: Bytes::gib(64),
            reach: Bytes::gib(64),
            owed: Bytes::ZERO,
            period: Duration::from_secs(1),
            payback: Duration::from_secs(60),
        }
    }

    #[test]
    fn distance_is_what_was_evicted_since() {
        let mut set = Workingset::default();
        for section in [10, 11, 12, 1 << 40, 14] {
            set.evicted(SectionNo(section), PAGES);
        }
        assert_eq!(set.refaulted(SectionNo(10), 1), Some(Bytes(5 * SECTION.0)));
        assert_eq!(
            set.refaulted(SectionNo(1 << 40), 1),
            Some(Bytes(2 * SECTION.0))
        );
        assert_eq!(set.refaulted(SectionNo(14), 1), Some(SECTION));
        assert_eq!(set.refaulted(SectionNo(15), 1), None);
        assert_eq!(set.refaulted(SectionNo(9999), 1), None);
        let refaults = set.take_refaults();
        assert_eq!(refaults.filled(), Bytes::of_pages(5));
        assert_eq!(refaults.unknown, Bytes::of_pages(2));
        assert_eq!(set.take_refaults(), Refaults::default());
    }

    #[test]
    fn shadow_is_right_when_the_clock_wraps_and_small_evictions_add_up() {
        let wrap = UNIT_PAGES * u64::from(u32::MAX);
        for start in [0, wrap - 1, wrap - 640, wrap, 5 * wrap - 64] {
            let mut set = Workingset {
                evicted_pages: start,
                ..Workingset::default()
            };
            set.evicted(SectionNo(0), 1);
            for _ in 0..640 {
                set.evicted(SectionNo(1), 2);
            }
            let distance = set.refaulted(SectionNo(0), 1).unwrap();
            assert!(distance.pages().abs_diff(1280) <= UNIT_PAGES, "{distance}");
        }
    }

    /// An LRU of `capacity` sections that refaults through a `Workingset`: who gets as much more as
    /// the distance says would not have refaulted.
    #[test]
    fn distance_is_the_additional_memory_with_which_a_touch_would_have_hit() {
        let mut random = SplitMix64::new(3);
        let touches: Vec<u64> = (0..4000)
            .map(|_| random.below(40).min(random.below(40)))
            .collect();
        let capacity = 12;
        let mut set = Workingset::default();
        let mut small: VecDeque<u64> = VecDeque::new();
        // The sections touched, last one first: a touch hits an LRU that is longer than its depth.
        let mut order: VecDeque<u64> = VecDeque::new();
        let mut refaults = 0;
        for section in touches {
            let depth = order.iter().position(|other| *other == section);
            order.retain(|other| *other != section);
            order.push_front(section);
            if let Some(at) = small.iter().position(|other| *other == section) {
                small.remove(at);
            } else if let Some(depth) = depth {
                let distance = set.refaulted(SectionNo(section), PAGES).unwrap();
                let more = distance.0 / SECTION_BYTES;
                // It hits an LRU with more places than its depth. Sections that went twice count
                // twice, so the distance is an upper bound; the kernel's is, too.
                assert!((depth as u64) < capacity + more, "{depth} {more}");
                refaults += 1;
            }
            small.push_front(section);
            if small.len() as u64 > capacity {
                set.evicted(SectionNo(small.pop_back().unwrap()), PAGES);
            }
        }
        assert!(refaults > 500);
    }

    #[test]
    fn memory_is_worth_having_up_to_the_farthest_refault_that_pays() {
        let mut refaults = Refaults::default();
        refaults.add(Bytes::mib(100), Bytes::mib(2));
        assert_eq!(refaults.worth(&terms()), Bytes::mib(100));
        // 3 MiB a second do not pay for 1,000 MiB within a minute; 20 MiB do.
        refaults.add(Bytes::mib(1000), Bytes::mib(1));
        assert_eq!(refaults.worth(&terms()), Bytes::mib(100));
        refaults.add(Bytes::mib(990), Bytes::mib(17));
        assert_eq!(refaults.worth(&terms()), Bytes::mib(1000));
    }

    #[test]
    fn memory_beyond_reach_is_worth_what_is_owed_and_no_more_than_what_is_absent_is_needed() {
        let mut refaults = Refaults::default();
        refaults.add(Bytes::mib(100), Bytes::mib(100));
        let reach = |reach| Terms { reach, ..terms() };
        assert_eq!(refaults.worth(&reach(Bytes::mib(99))), Bytes::ZERO);
        assert_eq!(refaults.worth(&reach(Bytes::mib(100))), Bytes::mib(100));
        let owed = Terms {
            owed: Bytes::mib(40),
            ..reach(Bytes::mib(99))
        };
        assert_eq!(refaults.worth(&owed), Bytes::mib(40));
        let absent = Terms {
            absent: Bytes::mib(30),
            ..reach(Bytes::mib(50))
        };
        assert_eq!(refaults.worth(&absent), Bytes::mib(30));
    }

    #[test]
    fn refault_of_unknown_distance_is_as_far_as_anything_absent() {
        let mut refaults = Refaults {
            unknown: Bytes::mib(4),
            ..Refaults::default()
        };
        refaults.merge(&refaults.clone());
        let absent = Terms {
            absent: Bytes::mib(480),
            ..terms()
        };
        assert_eq!(refaults.worth(&absent), Bytes::mib(480));
        let more = Terms {
            absent: Bytes::mib(481),
            ..terms()
        };
        assert_eq!(refaults.worth(&more), Bytes::ZERO);
    }

    #[test]
    fn shadow_takes_four_bytes_a_section() {
        let mut set = Workingset::default();
        for section in 0..8192 {
            set.evicted(SectionNo(section), PAGES);
        }
        assert!(set.bytes() < 8192 * 6, "{}", set.bytes());
    }
}
