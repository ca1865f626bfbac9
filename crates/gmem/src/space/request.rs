// SPDX-License-Identifier: Apache-2.0
//! [`RegionRequest`]: what a caller wants of a region's addresses.

use crate::error::GmError;
use pagetide_addr::{PAGE_BYTES, PageRange, Va};

/// Requirements on a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionRequest {
    /// Its length, in bytes; rounded up to whole pages.
    pub bytes: u64,
    /// Preferred start. The region begins there if that is free; else above it, if there is room;
    /// else anywhere.
    pub hint: Option<Va>,
    /// Alignment of its start: a power of two, in bytes. 0 for whole pages.
    pub align: u64,
    /// It does not cross a multiple of this: a power of two, in bytes. 0 for no such limit.
    pub no_cross: u64,
    /// The highest address it may contain.
    pub max: Option<Va>,
}

impl RegionRequest {
    /// `bytes`, anywhere.
    #[must_use]
    pub const fn of_bytes(bytes: u64) -> Self {
        Self {
            bytes,
            hint: None,
            align: 0,
            no_cross: 0,
            max: None,
        }
    }

    /// True if any free addresses of a space of `pages` will do.
    pub(super) fn asks_nothing_of(&self, pages: PageRange) -> bool {
        let last = pages.end.byte_offset().saturating_sub(1);
        self.hint.is_none()
            && self.no_cross == 0
            && self.align <= PAGE_BYTES
            && self.max.is_none_or(|max| max.0 >= last)
    }

    pub(super) fn check(&self) -> Result<u64, GmError> {
        let wrong = |argument, why| Err(GmError::InvalidArgument { argument, why });
        let is_power = |value: u64| value == 0 || value.is_power_of_two();
        if self.bytes == 0 {
            return wrong("size", "it must not be 0");
        }
        let Some(bytes) = self.bytes.checked_next_multiple_of(PAGE_BYTES) else {
            return wrong("size", "it is larger than any address space");
        };
        if !is_power(self.align) {
            return wrong("align", "it must be a power of two, or 0");
        }
        if !is_power(self.no_cross) || (self.no_cross != 0 && self.no_cross < bytes) {
            return wrong(
                "no_cross",
                "it must be a power of two not below the size, or 0",
            );
        }
        if !self.hint.is_none_or(Va::is_page_aligned) {
            return wrong("hint", "it must begin a page");
        }
        Ok(bytes)
    }
}
