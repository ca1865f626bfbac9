// SPDX-License-Identifier: Apache-2.0
//! Pages and sections, in two spaces distinguished by type.
//!
//! A page has one number in the file that backs it and another in the address space of its VM,
//! where the files lie one after the other. Both count pages of 4 KiB, and mistaking one for the
//! other accesses the wrong page. So each space has a family of types of its own, with the same
//! operations, and nothing here converts one into the other: only code that knows where a file lies
//! can (`pagetide_vpri::mmu`, `pagetide_vmm::layout`).
//!
//! ```text
//!   address space   PageNo     PageRange    SectionNo     PageSet
//!   one file        FilePage   FileRange    FileSection   FilePageSet
//! ```

use std::fmt;

/// log2 of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page: the unit of faults, of the PA-bitmap and of stored content (Taiji's MP).
pub const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;
/// Pages in a section: the unit of hot and cold, and of eviction rounds (Taiji's MS).
pub const SECTION_PAGES: u64 = 512;
/// Bytes in a section (2 MiB).
pub const SECTION_BYTES: u64 = SECTION_PAGES * PAGE_BYTES;

const _: () = assert!(usize::BITS == 64, "Pagetide is written for 64-bit targets");

/// `n` as a size or an index into an array.
#[must_use]
pub const fn to_usize(n: u64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "usize has 64 bits, as asserted above"
    )]
    let index = n as usize;
    index
}

macro_rules! page_space {
    (
        $(#[$page_doc:meta])* $page:ident,
        $(#[$section_doc:meta])* $section:ident,
        $(#[$range_doc:meta])* $range:ident,
    ) => {
        $(#[$page_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $page(pub u64);

        impl $page {
            /// Position as an index into an array of pages.
            #[must_use]
            pub const fn index(self) -> usize {
                to_usize(self.0)
            }

            /// The page after this one.
            #[must_use]
            pub const fn next(self) -> Self {
                self.plus(1)
            }

            /// The page `pages` further on. Our own page numbers lie far below the end of `u64`;
            /// numbers from outside must be checked first.
            #[must_use]
            pub const fn plus(self, pages: u64) -> Self {
                Self(self.0 + pages)
            }

            /// The same, saturating at the highest number.
            #[must_use]
            pub const fn saturating_plus(self, pages: u64) -> Self {
                Self(self.0.saturating_add(pages))
            }

            /// How many pages this one lies after `start`; it must not lie before it.
            #[must_use]
            pub const fn since(self, start: Self) -> u64 {
                self.0 - start.0
            }

            /// The section this page belongs to.
            #[must_use]
            pub const fn section(self) -> $section {
                $section(self.0 / SECTION_PAGES)
            }

            /// Its place in its section, from 0.
            #[must_use]
            pub const fn place_in_section(self) -> u64 {
                self.0 % SECTION_PAGES
            }

            /// Offset of the page's first byte from the start of its space, in bytes.
            #[must_use]
            pub const fn byte_offset(self) -> u64 {
                self.0 << PAGE_SHIFT
            }

            /// The page that holds byte `offset` of its space.
            #[must_use]
            pub const fn containing(offset: u64) -> Self {
                Self(offset >> PAGE_SHIFT)
            }

            /// The range of this one page.
            #[must_use]
            pub const fn single(self) -> $range {
                self.run(1)
            }

            /// The range of `pages` pages starting with this one.
            #[must_use]
            pub const fn run(self, pages: u64) -> $range {
                $range {
                    start: self,
                    end: self.plus(pages),
                }
            }
        }

        impl fmt::Debug for $page {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "page {}", self.0)
            }
        }

        impl fmt::Display for $page {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        $(#[$section_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $section(pub u64);

        impl $section {
            /// Position as an index into an array of sections.
            #[must_use]
            pub const fn index(self) -> usize {
                to_usize(self.0)
            }

            /// The first page of the section.
            #[must_use]
            pub const fn first_page(self) -> $page {
                $page(self.0 * SECTION_PAGES)
            }

            /// All pages of the section, even past the end of its space.
            #[must_use]
            pub const fn all_pages(self) -> $range {
                self.first_page().run(SECTION_PAGES)
            }

            /// The pages of the section, cut off at `page_count` if the last section is partial.
            #[must_use]
            pub fn pages(self, page_count: u64) -> $range {
                let end = $page(page_count);
                let start = self.first_page().min(end);
                $range::new(start, start.plus(SECTION_PAGES).min(end))
            }

            /// Number of sections that `page_count` pages occupy; the last may be partial.
            #[must_use]
            pub const fn count_for(page_count: u64) -> u64 {
                page_count.div_ceil(SECTION_PAGES)
            }
        }

        $(#[$range_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        #[derive(serde::Serialize, serde::Deserialize)]
        pub struct $range {
            /// First page of the range.
            pub start: $page,
            /// Page after the last one.
            pub end: $page,
        }

        impl $range {
            /// The range from `start` up to, not including, `end`.
            ///
            /// # Panics
            /// If `end` lies before `start`: our own code makes ranges, never from unchecked input.
            #[must_use]
            pub const fn new(start: $page, end: $page) -> Self {
                assert!(start.0 <= end.0, "page range ends before it starts");
                Self { start, end }
            }

            /// The pages that hold bytes `offset .. offset + len` of the space; `None` on overflow.
            #[must_use]
            pub const fn covering(offset: u64, len: u64) -> Option<Self> {
                match offset.checked_add(len) {
                    Some(end) => {
                        let start = $page::containing(offset);
                        let end = if len == 0 {
                            start
                        } else {
                            $page::containing(end - 1).next()
                        };
                        Some(Self { start, end })
                    }
                    None => None,
                }
            }

            /// The last page of the range, if it holds one.
            #[must_use]
            pub const fn last(self) -> Option<$page> {
                if self.is_empty() {
                    None
                } else {
                    Some($page(self.end.0 - 1))
                }
            }

            /// Number of pages in the range.
            #[must_use]
            pub const fn len(self) -> u64 {
                self.end.since(self.start)
            }

            /// The same as a `usize`.
            #[must_use]
            pub const fn len_usize(self) -> usize {
                to_usize(self.len())
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
            pub fn contains(self, page: $page) -> bool {
                self.start <= page && page < self.end
            }

            /// The pages in both ranges; empty (at `other.start`) if there are none.
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
            pub fn iter(self) -> impl DoubleEndedIterator<Item = $page> + ExactSizeIterator {
                (0..self.len_usize()).map(move |place| self.start.plus(place as u64))
            }

            /// The sections the range touches, in ascending order.
            pub fn sections(self) -> impl Iterator<Item = $section> {
                let first = self.start.section().0;
                let end = if self.is_empty() {
                    first
                } else {
                    self.end.0.div_ceil(SECTION_PAGES)
                };
                (first..end).map($section)
            }

            /// The range cut at section borders, in ascending order.
            pub fn by_section(self) -> impl Iterator<Item = ($section, $range)> {
                self.sections()
                    .map(move |section| (section, self.intersect(section.all_pages())))
            }
        }
    };
}

page_space! {
    /// Number of a 4 KiB page in the address space of a VM, its backing files laid end to end.
    ///
    /// Not a guest frame number: the daemon knows the files, not where the VMM has put them in
    /// guest-physical space.
    PageNo,
    /// Number of a 2 MiB section in the address space of a VM.
    SectionNo,
    /// Half-open range of pages of an address space, `start <= end`.
    PageRange,
}

page_space! {
    /// Number of a 4 KiB page in one backing file of guest RAM: the unit of a device's domain.
    FilePage,
    /// Number of a 2 MiB section in one backing file of guest RAM.
    FileSection,
    /// Half-open range of pages of one backing file, `start <= end`.
    FileRange,
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
        let range = FileRange::new(FilePage(500), FilePage(1100));
        let parts: Vec<_> = range.by_section().collect();
        assert_eq!(parts.len(), 3);
        assert_eq!(parts.iter().map(|(_, r)| r.len()).sum::<u64>(), range.len());
        assert_eq!(parts[1].1, FilePage(512).run(512));
    }

    #[test]
    fn sections_of_an_empty_range_are_none() {
        assert_eq!(PageNo(7).run(0).sections().count(), 0);
    }

    #[test]
    fn last_section_is_cut_at_the_end_of_ram() {
        assert_eq!(SectionNo(1).pages(600).len(), 88);
        assert_eq!(SectionNo(1).all_pages().len(), SECTION_PAGES);
        assert!(SectionNo(2).pages(600).is_empty());
        assert_eq!(SectionNo::count_for(600), 2);
    }

    #[test]
    fn arithmetic_of_pages_is_in_pages() {
        let page = PageNo(1030);
        assert_eq!(page.next().since(page), 1);
        assert_eq!((page.section(), page.place_in_section()), (SectionNo(2), 6));
        assert_eq!(page.section().first_page().plus(6), page);
        assert_eq!(page.run(3).len_usize(), 3);
    }
}
