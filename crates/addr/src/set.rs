// SPDX-License-Identifier: Apache-2.0
//! Sets of pages of one section: 512 bits, by value.

use crate::{
    FilePage, FileRange, FileSection, PageNo, PageRange, SECTION_PAGES, SectionNo, page::to_usize,
};

const WORD_BITS: u64 = 64;
const WORDS: usize = to_usize(SECTION_PAGES / WORD_BITS);
const _: () = assert!(WORDS as u64 * WORD_BITS == SECTION_PAGES);

/// Some of the places in a section, each below [`SECTION_PAGES`].
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Places([u64; WORDS]);

impl Places {
    /// The places from `start` to before `end`.
    fn between(start: u64, end: u64) -> Self {
        let mut places = Self::default();
        let mut place = start;
        while place < end {
            // All that lie in the same word at once.
            let (word, first) = Self::bit(place);
            let room = WORD_BITS - place % WORD_BITS;
            let count = room.min(end - place);
            places.0[word] |= first * (u64::MAX >> (WORD_BITS - count));
            place += count;
        }
        places
    }

    const fn bit(place: u64) -> (usize, u64) {
        (to_usize(place / WORD_BITS), 1 << (place % WORD_BITS))
    }

    fn insert(&mut self, place: u64) {
        let (word, bit) = Self::bit(place);
        self.0[word] |= bit;
    }

    fn remove(&mut self, place: u64) {
        let (word, bit) = Self::bit(place);
        self.0[word] &= !bit;
    }

    fn contains(&self, place: u64) -> bool {
        let (word, bit) = Self::bit(place);
        self.0[word] & bit != 0
    }

    fn combine(&mut self, other: &Self, word_of: impl Fn(u64, u64) -> u64) {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word = word_of(*word, other);
        }
    }

    fn len(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let words = (0_u64..).step_by(to_usize(WORD_BITS)).zip(self.0);
        words.flat_map(|(base, mut left)| {
            std::iter::from_fn(move || {
                let first = base + u64::from(left.trailing_zeros());
                left &= left.checked_sub(1)?;
                Some(first)
            })
        })
    }
}

macro_rules! page_set {
    ($(#[$doc:meta])* $set:ident, $page:ident, $section:ident, $range:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Default)]
        pub struct $set(Places);

        impl $set {
            /// The empty set.
            pub const EMPTY: Self = Self(Places([0; WORDS]));

            /// The pages of `range` that lie in `section`.
            #[must_use]
            pub fn of_range(section: $section, range: $range) -> Self {
                let within = range.intersect(section.all_pages());
                let start = within.start.place_in_section();
                Self(Places::between(start, start + within.len()))
            }

            /// Adds `page` (its place within its section counts).
            pub fn insert(&mut self, page: $page) {
                self.0.insert(page.place_in_section());
            }

            /// Removes `page`.
            pub fn remove(&mut self, page: $page) {
                self.0.remove(page.place_in_section());
            }

            /// True if `page` is in the set.
            #[must_use]
            pub fn contains(&self, page: $page) -> bool {
                self.0.contains(page.place_in_section())
            }

            /// Removes every page of `other`.
            pub fn subtract(&mut self, other: &Self) {
                self.0.combine(&other.0, |own, gone| own & !gone);
            }

            /// Adds every page of `other`.
            pub fn unite(&mut self, other: &Self) {
                self.0.combine(&other.0, |own, more| own | more);
            }

            /// The pages that are in both sets.
            #[must_use]
            pub fn intersection(&self, other: &Self) -> Self {
                let mut both = *self;
                both.0.combine(&other.0, |own, also| own & also);
                both
            }

            /// True if both sets share a page.
            #[must_use]
            pub fn intersects(&self, other: &Self) -> bool {
                !self.intersection(other).is_empty()
            }

            /// Number of pages in the set.
            #[must_use]
            pub fn len(&self) -> u64 {
                self.0.len()
            }

            /// True if the set holds no page.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }

            /// The pages as numbers of `section`, ascending.
            pub fn pages(&self, section: $section) -> impl Iterator<Item = $page> + '_ {
                let first = section.first_page();
                self.0.iter().map(move |place| first.plus(place))
            }

            /// Maximal runs of adjacent pages, ascending.
            #[must_use]
            pub fn runs(&self, section: $section) -> Vec<$range> {
                let mut runs: Vec<$range> = Vec::new();
                for page in self.pages(section) {
                    match runs.last_mut() {
                        Some(run) if run.end == page => run.end = page.next(),
                        _ => runs.push(page.single()),
                    }
                }
                runs
            }
        }

        impl std::fmt::Debug for $set {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($set), "({} pages)"), self.len())
            }
        }
    };
}

page_set! {
    /// Some of the 512 pages of a section of an address space, by place in it.
    PageSet, PageNo, SectionNo, PageRange
}

page_set! {
    /// Some of the 512 pages of a section of one backing file, by place in it.
    FilePageSet, FilePage, FileSection, FileRange
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
            let page = section.first_page().plus((state >> 33) % SECTION_PAGES);
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
        let section = FileSection(1);
        for start in 500..SECTION_PAGES * 2 + 12 {
            for end in start..SECTION_PAGES * 2 + 12 {
                let range = FileRange::new(FilePage(start), FilePage(end));
                let within = range.intersect(section.all_pages());
                let set = FilePageSet::of_range(section, range);
                assert_eq!(set.len(), within.len(), "{range:?}");
                assert!(set.pages(section).eq(within.iter()), "{range:?}");
            }
        }
    }

    #[test]
    fn sets_are_combined_page_by_page() {
        let of = |start, end| {
            PageSet::of_range(SectionNo(0), PageRange::new(PageNo(start), PageNo(end)))
        };
        let (mut one, two) = (of(60, 70), of(65, 80));
        assert!(one.intersects(&two) && !of(0, 5).intersects(&two));
        assert_eq!(one.intersection(&two), of(65, 70));
        one.subtract(&two);
        assert_eq!(one, of(60, 65));
        one.unite(&two);
        assert_eq!(one, of(60, 80));
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
