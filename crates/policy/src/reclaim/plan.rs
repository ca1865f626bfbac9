// SPDX-License-Identifier: Apache-2.0
//! [`Plan`]: the sections that a pass leaves to be unmapped, for a later eviction.

use crate::candidates::Readiness;
use pagetide_addr::{SECTION_PAGES, SectionNo};

/// Fewest pages unmapped at a time for eviction: 32 MiB.
const AHEAD_PAGES_MIN: u64 = 8 << 10;
/// Most: 256 MiB, about a second's work.
const AHEAD_PAGES_MAX: u64 = 64 << 10;
/// And at most this many sections, however few pages they have.
const AHEAD_SECTIONS_MAX: usize = 512;
const _: () = assert!(AHEAD_PAGES_MIN <= AHEAD_PAGES_MAX);
// Whole sections reach the bound by pages first.
const _: () = assert!(AHEAD_SECTIONS_MAX as u64 * SECTION_PAGES >= AHEAD_PAGES_MAX);

/// Sections found by a pass that could not be evicted yet.
pub(super) struct Plan {
    /// Pages that should be unmapped.
    pub(super) ahead_pages: u64,
    /// Pages that are.
    pub(super) standing_pages: u64,
    /// Of these, the ones that have not aged enough yet.
    pub(super) resting_pages: u64,
    /// Sections to unmap.
    pub(super) next: Vec<SectionNo>,
    pub(super) next_pages: u64,
    /// The pass was told to end before it had taken all that was ready.
    pub(super) was_cut: bool,
}

impl Plan {
    /// For a pass that wants this many pages.
    pub(super) fn new(pages: u64) -> Self {
        Self {
            ahead_pages: pages.clamp(AHEAD_PAGES_MIN, AHEAD_PAGES_MAX),
            standing_pages: 0,
            resting_pages: 0,
            next: Vec::new(),
            next_pages: 0,
            was_cut: false,
        }
    }

    /// True if nothing is left that could be evicted.
    pub(super) fn is_empty(&self) -> bool {
        self.standing_pages == 0 && self.next.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.standing_pages + self.next_pages >= self.ahead_pages
            || self.next.len() >= AHEAD_SECTIONS_MAX
    }

    /// Notes a section of `pages` pages that was not evicted.
    pub(super) fn take(&mut self, section: SectionNo, readiness: Readiness, pages: u64) {
        match readiness {
            Readiness::Mapped => {
                self.next.push(section);
                self.next_pages += pages;
            }
            Readiness::Resting => {
                self.standing_pages += pages;
                self.resting_pages += pages;
            }
            Readiness::Ready => {
                self.standing_pages += pages;
                self.was_cut = true;
            }
            Readiness::Tried => {}
        }
    }
}
