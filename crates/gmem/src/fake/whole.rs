// SPDX-License-Identifier: Apache-2.0
//! [`FakePlace`] in huge pages: a section is present or absent as a whole.

use super::{FakePlace, lock, packed, refused};
use crate::PlaceError;
use pagetide_addr::{PageRange, SECTION_PAGES};

impl FakePlace {
    /// From now on sections come and go whole, and so many huge pages are free.
    pub fn go_whole(&self, huge_pages_free: u64) {
        lock(&self.state).huge_pages_free = Some(huge_pages_free);
    }

    /// How often a section was installed, and discarded, as a whole.
    #[must_use]
    pub fn whole_calls(&self) -> [u64; 2] {
        lock(&self.state).whole_calls
    }

    /// All of a section, or nothing.
    pub(super) fn install_whole(
        &self,
        pages: PageRange,
        content: &[u8],
    ) -> Result<u64, PlaceError> {
        assert!(pages.start.0.is_multiple_of(SECTION_PAGES), "{pages:?}");
        let mut state = self.running()?;
        if state.stuck.is_some_and(|stuck| pages.contains(stuck)) {
            return Err(refused(pages.start));
        }
        if state.present.contains_key(&pages.start) {
            return Ok(0);
        }
        let left = state.huge_pages_free.and_then(|free| free.checked_sub(1));
        if left.is_none() {
            let (start, end) = (pages.start, pages.end);
            return Err(PlaceError::NoPageFree { start, end });
        }
        state.huge_pages_free = left;
        state.whole_calls[0] += 1;
        for (page, bytes) in pages.iter().zip(content.as_chunks().0) {
            state.present.insert(page, packed(bytes));
        }
        drop(state);
        (self.installed)(pages.start);
        Ok(pages.len())
    }
}
