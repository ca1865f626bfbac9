// SPDX-License-Identifier: Apache-2.0
//! The PA-bitmap: two bits a page that say what a device may do there now (VPRI 4.1, 5.1).
//!
//! ```text
//!   word n:  63 62 │ … │ 3 2 │ 1 0        bit 2k    page 32n+k may be read
//!            page 31       1     0        bit 2k+1  and written
//! ```
//! A page is *unmapped* (00), *read-only* (01) or *read-write* (11). One load
//! tells of 32 pages, so a look-up before a DMA of up to 128 KiB costs one or
//! two loads and no call to the host.

use crate::sync::{AtomicU64, Ordering};
use pagetide_addr::{Access, PageNo, PageRange, PageSet, SectionNo};

const PAGES_PER_WORD: u64 = 32;
const READ_BITS: u64 = 0x5555_5555_5555_5555;

/// What devices may do with a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attribute {
    /// Nothing: a DMA takes an I/O page fault.
    Unmapped,
    /// Read it.
    ReadOnly,
    /// Read and write it.
    ReadWrite,
}

/// Page attributes of one DMA domain.
#[derive(Debug)]
pub struct PaBitmap {
    words: Box<[AtomicU64]>,
    page_count: u64,
}

impl PaBitmap {
    /// A bitmap of `page_count` pages, all `attribute`.
    #[must_use]
    pub fn new(page_count: u64, attribute: Attribute) -> Self {
        let pattern = match attribute {
            Attribute::Unmapped => 0,
            Attribute::ReadOnly => READ_BITS,
            Attribute::ReadWrite => u64::MAX,
        };
        let words = (0..page_count.div_ceil(PAGES_PER_WORD))
            .map(|_| AtomicU64::new(pattern))
            .collect();
        Self { words, page_count }
    }

    /// Number of pages it tells of.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// True if every page of `range` allows `access`. A range past the end is not allowed.
    ///
    /// Relaxed loads: the caller's lease protocol orders them (see the module `lease`).
    #[must_use]
    #[inline]
    pub fn allows(&self, range: PageRange, access: Access) -> bool {
        if range.end.0 > self.page_count {
            return false;
        }
        let mut page = range.start.0;
        while page < range.end.0 {
            let (word, mask, next) = step(page, range.end.0, access);
            if self.words[word].load(Ordering::Relaxed) & mask != mask {
                return false;
            }
            page = next;
        }
        true
    }

    /// What may be done with `page` now; a page past the end is unmapped.
    #[must_use]
    pub fn attribute(&self, page: PageNo) -> Attribute {
        if self.allows(page.single(), Access::Write) {
            Attribute::ReadWrite
        } else if self.allows(page.single(), Access::Read) {
            Attribute::ReadOnly
        } else {
            Attribute::Unmapped
        }
    }

    /// Allows `access` to all of `range` (which must lie within the domain).
    pub fn grant(&self, range: PageRange, access: Access) {
        let mut page = range.start.0;
        while page < range.end.0 {
            let (word, mask, next) = step(page, range.end.0, access);
            // Release pairs with the Acquire of a lease: whoever sees the bits sees the page.
            self.words[word].fetch_or(mask, Ordering::Release);
            page = next;
        }
    }

    /// Makes `pages` of `section` unmapped.
    pub fn unmap(&self, section: SectionNo, pages: &PageSet) {
        for run in pages.runs(section) {
            self.take(run, Access::Write);
        }
    }

    /// Makes `pages` of `section` read-only where they were read-write.
    pub fn forbid_writes(&self, section: SectionNo, pages: &PageSet) {
        for run in pages.runs(section) {
            self.take(run, Access::Read);
        }
    }

    /// Takes the write bits, and with `down_to` [`Access::Write`] the read bits as well.
    fn take(&self, range: PageRange, down_to: Access) {
        let mut page = range.start.0;
        while page < range.end.0 {
            let (word, mask, next) = step(page, range.end.0, Access::Write);
            let gone = match down_to {
                Access::Write => mask,
                Access::Read => mask & !READ_BITS,
            };
            // Relaxed: the heavy fence that follows orders it against the engines.
            self.words[word].fetch_and(!gone, Ordering::Relaxed);
            page = next;
        }
    }
}

/// Word of `page`, the bits of it that stand for pages `page..end`, and the page after them.
#[inline]
fn step(page: u64, end: u64, access: Access) -> (usize, u64, u64) {
    let next = ((page / PAGES_PER_WORD + 1) * PAGES_PER_WORD).min(end);
    let first_bit = 2 * (page % PAGES_PER_WORD);
    let bits = 2 * (next - page);
    let span = if bits == 64 {
        u64::MAX
    } else {
        ((1 << bits) - 1) << first_bit
    };
    let mask = match access {
        Access::Read => span & READ_BITS,
        Access::Write => span,
    };
    (PageNo(page / PAGES_PER_WORD).index(), mask, next)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn bitmap_agrees_with_a_naive_one_under_random_operations() {
        const PAGES: u64 = 512 + 77;
        let bitmap = PaBitmap::new(PAGES, Attribute::Unmapped);
        let mut naive = vec![Attribute::Unmapped; PageNo(PAGES).index()];
        let mut state = 99_u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..3_000 {
            let start = random(PAGES);
            let range = PageRange::new(PageNo(start), PageNo(start + random(PAGES - start + 1)));
            match random(4) {
                0 => {
                    bitmap.grant(range, Access::Write);
                    range
                        .iter()
                        .for_each(|p| naive[p.index()] = Attribute::ReadWrite);
                }
                1 => {
                    bitmap.grant(range, Access::Read);
                    for attribute in &mut naive[range.start.index()..range.end.index()] {
                        if *attribute == Attribute::Unmapped {
                            *attribute = Attribute::ReadOnly;
                        }
                    }
                }
                2 => {
                    for (section, part) in range.by_section() {
                        bitmap.unmap(section, &PageSet::of_range(section, part));
                    }
                    naive[range.start.index()..range.end.index()].fill(Attribute::Unmapped);
                }
                _ => {
                    for (section, part) in range.by_section() {
                        bitmap.forbid_writes(section, &PageSet::of_range(section, part));
                    }
                    for attribute in &mut naive[range.start.index()..range.end.index()] {
                        if *attribute == Attribute::ReadWrite {
                            *attribute = Attribute::ReadOnly;
                        }
                    }
                }
            }
            let all_read = range
                .iter()
                .all(|p| naive[p.index()] != Attribute::Unmapped);
            let all_write = range
                .iter()
                .all(|p| naive[p.index()] == Attribute::ReadWrite);
            assert_eq!(bitmap.allows(range, Access::Read), all_read);
            assert_eq!(bitmap.allows(range, Access::Write), all_write);
        }
        for (i, attribute) in naive.iter().enumerate() {
            assert_eq!(bitmap.attribute(PageNo(i as u64)), *attribute);
        }
    }

    #[test]
    fn range_past_the_end_is_not_allowed_though_its_word_is_set() {
        let bitmap = PaBitmap::new(40, Attribute::ReadWrite);
        assert!(bitmap.allows(PageRange::new(PageNo(0), PageNo(40)), Access::Write));
        assert!(!bitmap.allows(PageRange::new(PageNo(39), PageNo(41)), Access::Read));
    }
}
