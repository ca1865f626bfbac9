// SPDX-License-Identifier: Apache-2.0
//! [`Plan`]: what a pass leaves to be unmapped, so that it may go later.

use pagetide_addr::SectionNo;
use pagetide_policy::candidates::Readiness;

/// Fewest pages that are unmapped at a time to go: 32 MiB.
const AHEAD_PAGES_MIN: u64 = 8 << 10;
/// Most: 256 MiB, a second's work or so.
const AHEAD_PAGES_MAX: u64 = 64 << 10;
/// And at most so many sections, however few pages they have.
const AHEAD_SECTIONS_MAX: usize = 512;

/// What a pass has found that could not go yet.
pub(super) struct Plan {
    /// Pages that are to stand unmapped.
    pub(super) ahead_pages: u64,
    /// Those that do.
    pub(super) standing_pages: u64,
    /// Of these, the ones that have not rested yet.
    pub(super) resting_pages: u64,
    /// Sections that are to be unmapped.
    pub(super) next: Vec<SectionNo>,
    pub(super) next_pages: u64,
    /// It was told to end before it had taken all that stood ready.
    pub(super) was_cut: bool,
}

impl Plan {
    /// For a pass that wants so many pages.
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

    /// True if nothing is left that could go.
    pub(super) fn is_empty(&self) -> bool {
        self.standing_pages == 0 && self.next.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.standing_pages + self.next_pages >= self.ahead_pages
            || self.next.len() >= AHEAD_SECTIONS_MAX
    }

    /// A section that did not go, of so many pages.
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
