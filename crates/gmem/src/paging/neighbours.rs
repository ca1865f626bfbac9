// SPDX-License-Identifier: Apache-2.0
//! Neighbours: pages brought along with one that a vCPU faulted on.
//!
//! A fault costs a vCPU two wake-ups beside the fill; a page installed before
//! it is asked for costs the fill alone, about a fifth. That pays if the page
//! is used with a probability above that, which a sequential reader shows by
//! faulting on the page after the last one brought in:
//!
//! ```text
//!   fault p          window 0: fill p alone, expect p+1
//!   fault p+1        as expected: window 1: fill p+1, then p+2; expect p+3
//!   fault p+3        as expected: window 2: p+3, p+4, p+5; expect p+6 …
//!   fault elsewhere  window 0
//! ```
//! The faulting page is installed first, so its vCPU never waits for the
//! others. Only pages of the same section that were stored are brought, never
//! at the limit, and `pagetide bench fault` measures with and without.

use super::{fill::FILL_PAGES_MAX, memory::PagedMemory};
use pagetide_addr::{PageNo, PageRange};
use std::sync::atomic::Ordering::Relaxed;

/// See the module; called after the fault on `page` is served.
pub(crate) fn bring_along(space: &PagedMemory, page: PageNo) {
    if space.neighbours_max == 0 {
        return;
    }
    let Some(section) = space.table.section(page.section()) else {
        return;
    };
    let expected = section.next_expected.load(Relaxed) == page.0;
    let window = next_window(section.window.load(Relaxed), expected, space.neighbours_max);
    section.window.store(window, Relaxed);
    let first = PageNo(page.0 + 1);
    let end = PageNo((first.0 + u64::from(window)).min(space.table.pages_of(page.section()).end.0));
    let asked = end.0.saturating_sub(first.0);
    let brought = if asked > 0 && space.admission.try_admit(asked) {
        let brought = space.fill_neighbours(PageRange::new(first, end));
        space.admission.give_back(asked - brought);
        brought
    } else {
        0
    };
    section.next_expected.store(first.0 + brought, Relaxed);
    space.counters.neighbour_pages.fetch_add(brought, Relaxed);
}

fn next_window(window: u32, as_expected: impl Into<bool>, max: u32) -> u32 {
    let limit = max.min(u32::try_from(FILL_PAGES_MAX).unwrap_or(u32::MAX));
    if as_expected.into() {
        (window * 2).clamp(1, limit)
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::next_window;

    #[test]
    fn window_grows_while_faults_come_as_expected_and_falls_at_once() {
        assert_eq!(next_window(0, true, 8), 1);
        assert_eq!(next_window(4, true, 8), 8);
        assert_eq!(next_window(8, true, 8), 8);
        assert_eq!(next_window(8, true, 64), 16);
        assert_eq!(next_window(8, false, 8), 0);
    }
}
