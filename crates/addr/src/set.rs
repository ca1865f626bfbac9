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
        let mut set = Self::EMPTY;
        for page in range.intersect(section.pages(u64::MAX / 2)).iter() {
            set.insert(page);
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
        (0..SECTION_PAGES)
            .map(move |i| PageNo(base + i))
            .filter(|page| self.contains(*page))
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
    fn runs_join_neighbours_and_only_them() {
        let mut set = PageSet::EMPTY;
        for i in [0, 1, 2, 9, 511] {
            set.insert(PageNo(i));
        }
        let runs = set.runs(SectionNo(0));
        assert_eq!(runs.iter().map(|r| r.len()).collect::<Vec<_>>(), [3, 1, 1]);
    }
}
