// SPDX-License-Identifier: Apache-2.0
//! Pages and sections of a VM's RAM, counted along its backing files.

use std::fmt;

/// log2 of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page: the unit of faults, of the PA-bitmap and of stored content (Taiji's MP).
pub const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;
/// Pages in a section: the unit of hot and cold, and of eviction rounds (Taiji's MS).
pub const SECTION_PAGES: u64 = 512;
/// Bytes in a section (2 MiB).
pub const SECTION_BYTES: u64 = SECTION_PAGES * PAGE_BYTES;

/// Number of a 4 KiB page in a VM's RAM, its backing files laid end to end.
///
/// It is not a [`Gfn`](crate::Gfn): the daemon knows the files, not where the
/// VMM has put them in guest-physical space.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct PageNo(pub u64);

impl PageNo {
    /// Position as an index into an array of pages.
    #[must_use]
    pub const fn index(self) -> usize {
        // Targets are 64 bit (see the assertion below), so this never truncates.
        #[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide")]
        let index = self.0 as usize;
        index
    }

    /// The section this page belongs to.
    #[must_use]
    pub const fn section(self) -> SectionNo {
        SectionNo(self.0 / SECTION_PAGES)
    }

    /// Offset of the page's first byte from the start of the RAM, in bytes.
    #[must_use]
    pub const fn byte_offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }

    /// The page that holds byte `offset` of the RAM.
    #[must_use]
    pub const fn containing(offset: u64) -> Self {
        Self(offset >> PAGE_SHIFT)
    }

    /// The range of this one page.
    #[must_use]
    pub const fn single(self) -> PageRange {
        PageRange {
            start: self,
            end: Self(self.0 + 1),
        }
    }
}

const _: () = assert!(usize::BITS == 64, "Pagetide is written for 64-bit targets");

impl fmt::Debug for PageNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

impl fmt::Display for PageNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Number of a 2 MiB section in a VM's RAM.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SectionNo(pub u64);

impl SectionNo {
    /// Position as an index into an array of sections.
    #[must_use]
    pub const fn index(self) -> usize {
        PageNo(self.0).index()
    }

    /// The pages of the section, cut off at `page_count` for a last section that is not whole.
    #[must_use]
    pub fn pages(self, page_count: u64) -> PageRange {
        let start = (self.0 * SECTION_PAGES).min(page_count);
        PageRange::new(
            PageNo(start),
            PageNo((start + SECTION_PAGES).min(page_count)),
        )
    }

    /// Number of sections that `page_count` pages fill, the last perhaps not whole.
    #[must_use]
    pub const fn count_for(page_count: u64) -> u64 {
        page_count.div_ceil(SECTION_PAGES)
    }
}

/// Half-open range of pages, `start <= end`.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Debug, Default, serde::Serialize, serde::Deserialize,
)]
pub struct PageRange {
    /// First page of the range.
    pub start: PageNo,
    /// Page after the last one.
    pub end: PageNo,
}

impl PageRange {
    /// The range from `start` up to, not including, `end`.
    ///
    /// # Panics
    /// If `end` lies before `start`: a range is made by our own code, never from input unchecked.
    #[must_use]
    pub const fn new(start: PageNo, end: PageNo) -> Self {
        assert!(start.0 <= end.0, "page range ends before it starts");
        Self { start, end }
    }

    /// The pages that hold bytes `offset .. offset + len` of the RAM; `None` on overflow.
    #[must_use]
    pub const fn covering(offset: u64, len: u64) -> Option<Self> {
        match offset.checked_add(len) {
            Some(end) => {
                let first = offset >> PAGE_SHIFT;
                let last = if len == 0 {
                    first
                } else {
                    ((end - 1) >> PAGE_SHIFT) + 1
                };
                Some(Self {
                    start: PageNo(first),
                    end: PageNo(last),
                })
            }
            None => None,
        }
    }

    /// Number of pages in the range.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end.0 - self.start.0
    }

    /// True if the range holds no page.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start.0 == self.end.0
    }

    /// Bytes in the range.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.len() << PAGE_SHIFT
    }

    /// True if `page` lies in the range.
    #[must_use]
    pub fn contains(self, page: PageNo) -> bool {
        self.start <= page && page < self.end
    }

    /// The pages both ranges hold; empty (at `other.start`) if they share none.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        if start < end {
            Self { start, end }
        } else {
            Self {
                start: other.start,
                end: other.start,
            }
        }
    }

    /// All pages in ascending order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = PageNo> + ExactSizeIterator {
        let first = self.start.0;
        (0..self.end.index() - self.start.index()).map(move |i| PageNo(first + i as u64))
    }

    /// The sections the range touches, in ascending order.
    pub fn sections(self) -> impl Iterator<Item = SectionNo> {
        let last = if self.is_empty() {
            self.start.0
        } else {
            self.end.0.div_ceil(SECTION_PAGES) * SECTION_PAGES
        };
        (self.start.0 / SECTION_PAGES..last / SECTION_PAGES).map(SectionNo)
    }

    /// The range cut at section borders, in ascending order.
    pub fn by_section(self) -> impl Iterator<Item = (SectionNo, PageRange)> {
        self.sections()
            .map(move |s| (s, self.intersect(s.pages(u64::MAX / 2))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_counts_every_page_a_byte_range_touches() {
        let range = PageRange::covering(4095, 2).unwrap();
        assert_eq!((range.start, range.end), (PageNo(0), PageNo(2)));
        assert!(PageRange::covering(8192, 0).unwrap().is_empty());
        assert_eq!(PageRange::covering(u64::MAX, 2), None);
    }

    #[test]
    fn by_section_cuts_at_borders_and_keeps_every_page() {
        let range = PageRange::new(PageNo(500), PageNo(1100));
        let parts: Vec<_> = range.by_section().collect();
        assert_eq!(parts.len(), 3);
        assert_eq!(parts.iter().map(|(_, r)| r.len()).sum::<u64>(), range.len());
        assert_eq!(parts[1].1, PageRange::new(PageNo(512), PageNo(1024)));
    }

    #[test]
    fn sections_of_an_empty_range_are_none() {
        assert_eq!(PageRange::new(PageNo(7), PageNo(7)).sections().count(), 0);
    }

    #[test]
    fn last_section_is_cut_at_the_end_of_ram() {
        assert_eq!(SectionNo(1).pages(600).len(), 88);
        assert_eq!(SectionNo::count_for(600), 2);
    }
}
