// SPDX-License-Identifier: Apache-2.0
//! [`Ranges`]: parts of the VMM's address space to be unmapped, in short calls.

use pagetide_addr::{FileKey, Hva};
use std::collections::BTreeMap;

/// How pages of a file are unmapped in the VMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// By `MADV_PAGEOUT` from this process.
    PageOut,
    /// By `MADV_DONTNEED` in the VMM.
    Inside,
}

/// The way of each file.
pub(super) type Ways = BTreeMap<FileKey, Way>;

/// Ranges of the VMM's address space, in order.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Ranges(Vec<(Hva, u64)>);

/// Ranges of the VMM's address space, by the way in which they are unmapped.
#[derive(Default)]
pub(super) struct RangesByWay {
    /// By `MADV_PAGEOUT`.
    pub page_out: Ranges,
    /// The same, for huge pages, which must be passed as a whole: a part of one would be split off.
    pub page_out_huge: Ranges,
    /// In the VMM.
    pub inside: Ranges,
}

impl RangesByWay {
    /// Those of small pages.
    pub fn of(&mut self, way: Way) -> &mut Ranges {
        match way {
            Way::PageOut => &mut self.page_out,
            Way::Inside => &mut self.inside,
        }
    }

    /// Those of huge pages.
    pub fn of_huge(&mut self, way: Way) -> &mut Ranges {
        match way {
            Way::PageOut => &mut self.page_out_huge,
            Way::Inside => &mut self.inside,
        }
    }
}

impl Ranges {
    pub fn add(&mut self, start: Hva, len_bytes: u64) {
        match self.0.last_mut() {
            Some((first, len)) if first.0 + *len == start.0 => *len += len_bytes,
            _ => self.0.push((start, len_bytes)),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges in parts of at most `bytes_max` bytes and `ranges_max` ranges. Ranges are cut
    /// where a part is full.
    pub fn parts(&self, bytes_max: u64, ranges_max: usize) -> Vec<Vec<(Hva, u64)>> {
        let mut runs: Vec<Vec<(Hva, u64)>> = Vec::new();
        let mut room = 0;
        for (start, len_bytes) in &self.0 {
            let mut done = 0;
            while done < *len_bytes {
                let full = runs.last().is_none_or(|run| run.len() == ranges_max);
                if room == 0 || full {
                    runs.push(Vec::new());
                    room = bytes_max;
                }
                let part = room.min(len_bytes - done);
                if let Some(run) = runs.last_mut() {
                    run.push((Hva(start.0 + done), part));
                }
                done += part;
                room -= part;
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_dropped_in_runs_that_are_short_and_miss_nothing() {
        const BYTES_MAX: u64 = 32 << 20;
        const CALLS_MAX: usize = 32;
        let mut ranges = Ranges::default();
        ranges.add(Hva(1 << 40), BYTES_MAX / 2);
        ranges.add(Hva((1 << 40) + BYTES_MAX / 2), 3 * BYTES_MAX);
        for small in 0..100_u64 {
            ranges.add(Hva((2 << 40) + (small << 22)), 4096);
        }
        let runs = ranges.parts(BYTES_MAX, CALLS_MAX);
        for run in &runs {
            let bytes: u64 = run.iter().map(|(_, bytes)| bytes).sum();
            assert!(bytes <= BYTES_MAX && run.len() <= CALLS_MAX);
            assert!(bytes > 0);
        }
        let mut joined = Ranges::default();
        for (start, bytes) in runs.into_iter().flatten() {
            joined.add(start, bytes);
        }
        assert_eq!(joined, ranges);
        assert!(Ranges::default().parts(BYTES_MAX, 1).is_empty());
    }

    #[test]
    fn huge_pages_are_never_cut() {
        const HUGE: u64 = 2 << 20;
        let mut ranges = RangesByWay::default();
        for page in [
            1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        ] {
            ranges.of_huge(Way::PageOut).add(Hva(page * HUGE), HUGE);
        }
        for (start, bytes) in ranges.page_out_huge.parts(8 * HUGE, 2).iter().flatten() {
            assert_eq!((start.0 % HUGE, bytes % HUGE), (0, 0), "{start} {bytes}");
        }
    }
}
