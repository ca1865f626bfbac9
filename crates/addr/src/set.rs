// SPDX-License-Identifier: Apache-2.0
//! Set of pages of one section: 512 bits, by value.

use crate::{PageNo, PageRange, SECTION_PAGES, SectionNo};

const WORD_BITS: usize = 64;
const WORDS: usize = 512 / WORD_BITS;
const _: () = assert!(WORDS * WORD_BITS == 512 && SECTION_PAGES == 512);

/// Some of the 512 pages of a section, by position in it.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct PageSet([u64; WORDS]);

impl PageSet {
    /// The set without a page.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// The pages of `range` that lie in `section`.
    #[must_use]
    pub fn of_range(section: SectionNo, range: PageRange) -> Self {
        let within = range.intersect(section.pages(u64::MAX / 2));
        let mut set = Self::EMPTY;
        let mut page = within.start;
        while page < within.end {
            // As many as lie in the same word.
            let (word, first) = Self::place(page);
            let room = WORD_BITS as u64 - page.0 % WORD_BITS as u64;
            let count = room.min(within.end.0 - page.0);
            set.0[word] |= first * (u64::MAX >> (WORD_BITS as u64 - count));
            page.0 += count;
        }
        set
    }

    fn place(page: PageNo) -> (usize, u64) {
        let position = PageNo(page.0 % SECTION_PAGES).index();
        (position / WORD_BITS, 1 << (position % WORD_BITS))
    }

    /// Adds `page` (its position within its section counts).
    pub fn insert(&mut self, page: PageNo) {
        let (word, bit) = Self::place(page);
        self.0[word] |= bit;
    }

    /// Takes `page` out.
    pub fn remove(&mut self, page: PageNo) {
        let (word, bit) = Self::place(page);
        self.0[word] &= !bit;
    }

    /// True if `page` is in the set.
    #[must_use]
    pub fn contains(&self, page: PageNo) -> bool {
        let (word, bit) = Self::place(page);
        self.0[word] & bit != 0
    }

    /// Takes every page of `other` out.
    pub fn subtract(&mut self, other: &Self) {
        for (word, gone) in self.0.iter_mut().zip(other.0) {
            *word &= !gone;
        }
    }

    /// Adds every page of `other`.
    pub fn unite(&mut self, other: &Self) {
        for (word, more) in self.0.iter_mut().zip(other.0) {
            *word |= more;
        }
    }

    /// The pages that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let mut both = *self;
        for (word, also) in both.0.iter_mut().zip(other.0) {
            *word &= also;
        }
        both
    }

    /// True if both sets share a page.
    #[must_use]
    pub fn intersects(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).any(|(a, b)| a & b != 0)
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// True if the set holds no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// The pages as numbers of `section`, ascending.
    pub fn pages(&self, section: SectionNo) -> impl Iterator<Item = PageNo> + '_ {
        let base = section.0 * SECTION_PAGES;
        let words = (base..).step_by(WORD_BITS).zip(self.0);
        words.flat_map(|(base, mut left)| {
            std::iter::from_fn(move || {
                let first = PageNo(base + u64::from(left.trailing_zeros()));
                left &= left.checked_sub(1)?;
                Some(first)
            })
        })
    }

    /// Maximal runs of neighbouring pages, ascending.
    #[must_use]
    pub fn runs(&self, section: SectionNo) -> Vec<PageRange> {
        let mut runs: Vec<PageRange> = Vec::new();
        for page in self.pages(section) {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end = PageNo(page.0 + 1),
                _ => runs.push(page.single()),
            }
        }
        runs
    }
}

impl std::fmt::Debug for PageSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageSet({} pages)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn set_agrees_with_a_naive_one_under_random_operations() {
        let mut naive = BTreeSet::new();
        let mut set = PageSet::EMPTY;
        let section = SectionNo(3);
        let mut state = 12_345_u64;
        for _ in 0..20_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let page = PageNo(3 * SECTION_PAGES + (state >> 33) % SECTION_PAGES);
            if state >> 63 == 0 {
                naive.insert(page);
                set.insert(page);
            } else {
                naive.remove(&page);
                set.remove(page);
            }
            assert_eq!(set.contains(page), naive.contains(&page));
        }
        assert_eq!(
            set.pages(section).collect::<Vec<_>>(),
            naive.iter().copied().collect::<Vec<_>>()
        );
        assert_eq!(set.len(), naive.len() as u64);
        assert_eq!(
            set.runs(section).iter().map(|r| r.len()).sum::<u64>(),
            set.len()
        );
    }

    #[test]
    fn set_of_any_range_holds_its_pages_within_the_section_and_no_others() {
        let section = SectionNo(1);
        for start in 500..SECTION_PAGES * 2 + 12 {
            for end in start..SECTION_PAGES * 2 + 12 {
                let range = PageRange::new(PageNo(start), PageNo(end));
                let within = range.intersect(section.pages(u64::MAX / 2));
                let set = PageSet::of_range(section, range);
                assert_eq!(set.len(), within.len(), "{range:?}");
                assert!(set.pages(section).eq(within.iter()), "{range:?}");
            }
        }
    }

    #[test]
    fn runs_join_neighbours_and_only_them() {
        let mut set = PageSet::EMPTY;
        for i in [0, 1, 2, 9, 511] {
            set.insert(PageNo(i));
        }
        let runs = set.runs(SectionNo(0));
        assert_eq!(runs.iter().map(|r| r.len()).collect::<Vec<_>>(), [3, 1, 1]);
    }
}
