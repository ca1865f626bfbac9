// SPDX-License-Identifier: Apache-2.0
//! Readahead: which pages to fill along with one that a vCPU faulted on. [`super::serve`] fills them.
//!
//! A fault costs a vCPU two wake-ups besides the fill. A page installed before it is accessed costs
//! only the fill, about half as much. So readahead pays if the page is used with a probability
//! above one half. Two patterns indicate that.
//!
//! *Sequential*: a reader faults on the page after the last one filled.
//!
//! ```text
//!   fault p          window 0: fill p alone, expect p+1
//!   fault p+1        as expected: window 1: fill p+1, then p+2; expect p+3
//!   fault p+3        as expected: window 2: p+3, p+4, p+5; expect p+6 …
//!   fault elsewhere  window 0
//! ```
//! *Dense*: a working set is refilled in any order. Faults are counted per block of [`BLOCK_PAGES`]
//! since its section was last evicted from, and the [`DENSE_FAULTS`]th fills the rest of the block:
//! one wake-up in four, and never more than four pages for each that was accessed.
//!
//! *Swap-in*: a whole section is wanted back before anybody touches it again. What is wanted is not decided here.
//!
//! The faulting page is installed first, so its vCPU never waits for the others. Readahead takes
//! only pages of the same section that are stored and at hand, and never at the limit.
//! `pagetide bench fault` measures with and without it.

use super::{
    fill::FILL_PAGES_MAX,
    memory::PagedMemory,
    table::{BLOCK_PAGES, Section},
};
use pagetide_addr::{PageNo, PageRange};
use std::sync::atomic::Ordering::Relaxed;

/// Faults in a block which show that all of it is wanted.
const DENSE_FAULTS: u64 = 4;

/// Pages around a fault are claimed this many at a time: a fault on one of them meanwhile waits for
/// the whole step.
const AROUND_STEP: u64 = 4;

/// Pages worth reading ahead, all of one section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Readahead {
    /// The next pages of a sequence: fill them at once, before the vCPU gets there.
    Next(PageRange),
    /// The pages around it, in any order: for a thread that has time.
    Around(PageRange),
    /// Pages that no fault has led to: they were in use lately, or evicted together with one that is. For a
    /// thread that has time. How many neighbours a fault may have is no bound for them, and they are not
    /// reported as refilled: a guess shows no need.
    SwapIn(PageRange),
}

impl Readahead {
    /// The pages.
    #[must_use]
    pub const fn pages(self) -> PageRange {
        match self {
            Self::Next(pages) | Self::Around(pages) | Self::SwapIn(pages) => pages,
        }
    }

    /// Most of them that are claimed at a time.
    pub(super) const fn step_pages(self) -> u64 {
        match self {
            Self::Next(_) => FILL_PAGES_MAX,
            Self::Around(_) | Self::SwapIn(_) => AROUND_STEP,
        }
    }
}

impl PagedMemory {
    /// Returns the pages around `page` worth reading ahead after a vCPU's fault on it was served;
    /// see the module. Call it once per fault.
    #[must_use]
    pub fn readahead_after(&self, page: PageNo) -> Option<Readahead> {
        if self.neighbours_max == 0 {
            return None;
        }
        let section = self.table.section(page.section())?;
        let pages = self.table.pages_of(page.section());
        let sequence = if section.next_expected.load(Relaxed) == page.0 {
            Sequence::Continues
        } else {
            Sequence::Ends
        };
        let window = next_window(section.window.load(Relaxed), sequence, self.neighbours_max);
        section.window.store(window, Relaxed);
        let first = page.next();
        let end = first.plus(u64::from(window)).min(pages.end);
        section.next_expected.store(first.max(end).0, Relaxed);
        match window {
            0 => is_dense(section, page).then(|| Readahead::Around(block_of(page, pages))),
            _ => (first < end).then(|| Readahead::Next(PageRange::new(first, end))),
        }
    }
}

/// Counts a fault in the block of `page`; true if it shows that all of it is wanted.
fn is_dense(section: &Section, page: PageNo) -> bool {
    section.count_fault(page) == DENSE_FAULTS
}

fn block_of(page: PageNo, pages: PageRange) -> PageRange {
    let start = PageNo(page.0 / BLOCK_PAGES * BLOCK_PAGES);
    let end = start.plus(BLOCK_PAGES).min(pages.end);
    // Memory removed since the fault may end before the block.
    PageRange::new(start.min(end), end)
}

/// Whether a fault is the one that a sequential reader would cause next.
#[derive(Clone, Copy)]
enum Sequence {
    Continues,
    Ends,
}

fn next_window(window: u32, sequence: Sequence, max: u32) -> u32 {
    let limit = max.min(u32::try_from(FILL_PAGES_MAX).unwrap_or(u32::MAX));
    match sequence {
        Sequence::Continues => (window * 2).clamp(1, limit),
        Sequence::Ends => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_grows_while_faults_come_as_expected_and_falls_at_once() {
        assert_eq!(next_window(0, Sequence::Continues, 8), 1);
        assert_eq!(next_window(4, Sequence::Continues, 8), 8);
        assert_eq!(next_window(8, Sequence::Continues, 8), 8);
        assert_eq!(next_window(8, Sequence::Continues, 64), 16);
        assert_eq!(next_window(8, Sequence::Ends, 8), 0);
    }

    #[test]
    fn block_lies_in_its_section() {
        let pages = PageRange::new(PageNo(512), PageNo(540));
        let block = |page| {
            let block = block_of(PageNo(page), pages);
            (block.start.0, block.end.0)
        };
        assert_eq!(block(512), (512, 528));
        assert_eq!(block(527), (512, 528));
        assert_eq!(block(530), (528, 540));
        let gone = PageRange::new(PageNo(512), PageNo(512));
        assert!(block_of(PageNo(530), gone).is_empty());
    }

    #[test]
    fn block_is_dense_once_until_its_section_is_evicted_from_again() {
        let section = Section::new();
        let of = |page| is_dense(&section, PageNo(page));
        for _ in 0..2 {
            let block: Vec<bool> = (32..48).map(of).collect();
            let dense: Vec<usize> = (0..16).filter(|page| block[*page]).collect();
            assert_eq!(dense, [3]);
            // Its neighbours' faults are counted apart.
            assert!(!of(31) && !of(48) && !of(511));
            section.next_round();
        }
    }
}
