// SPDX-License-Identifier: Apache-2.0
//! [`Granule`]: the regions that lie within one granule of 2 MiB.
//!
//! A bit for each page says where a region begins, and the regions stand in that order. The region before
//! a page is the one of the highest bit up to it, and its place is the number of bits below: eight words are
//! looked at, and no tree.
//!
//! ```text
//!   pages     0 1 2 3 4 5 6 7
//!             a a . b c c c .        starts  1 0 0 1 1 0 0 0
//!                                    regions [a, b, c]       page 6: bit 4, below it 2 ─► c
//! ```

use crate::{region::RegionCore, sync::Arc};
use pagetide_addr::{PageNo, SECTION_PAGES, to_usize};

/// Words of the bits.
const WORDS: usize = to_usize(SECTION_PAGES / 64);

/// See the module.
#[derive(Default)]
pub(super) struct Granule {
    starts: [u64; WORDS],
    regions: Vec<Arc<RegionCore>>,
}

/// The word of a page, and its bit there.
fn place_of(page: PageNo) -> (usize, u64) {
    let place = page.place_in_section();
    (to_usize(place / 64), 1 << (place % 64))
}

impl Granule {
    pub(super) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Its regions, ascending.
    pub(super) fn regions(&self) -> &[Arc<RegionCore>] {
        &self.regions
    }

    /// How many regions begin before the bit `bit` of the word `word`.
    fn rank(&self, word: usize, bit: u64) -> usize {
        let before = self.starts[..word].iter().map(|bits| bits.count_ones());
        let here = (self.starts[word] & (bit - 1)).count_ones();
        before.sum::<u32>() as usize + here as usize
    }

    /// Adds a region. One that begins at the same page is replaced.
    pub(super) fn insert(&mut self, core: Arc<RegionCore>) {
        let (word, bit) = place_of(core.pages.start);
        let rank = self.rank(word, bit);
        if self.starts[word] & bit == 0 {
            self.starts[word] |= bit;
            self.regions.insert(rank, core);
        } else {
            self.regions[rank] = core;
        }
    }

    /// The region that begins at `page`.
    pub(super) fn get(&self, page: PageNo) -> Option<&Arc<RegionCore>> {
        let (word, bit) = place_of(page);
        let begins = self.starts[word] & bit != 0;
        begins.then(|| &self.regions[self.rank(word, bit)])
    }

    /// Removes the region that begins at `page`.
    pub(super) fn remove(&mut self, page: PageNo) -> Option<Arc<RegionCore>> {
        let (word, bit) = place_of(page);
        if self.starts[word] & bit == 0 {
            return None;
        }
        self.starts[word] &= !bit;
        Some(self.regions.remove(self.rank(word, bit)))
    }

    /// The last region that begins at `page` or before.
    pub(super) fn at_or_before(&self, page: PageNo) -> Option<&Arc<RegionCore>> {
        let (word, bit) = place_of(page);
        let here = self.starts[word] & bit != 0;
        let rank = self.rank(word, bit) + usize::from(here);
        rank.checked_sub(1).map(|last| &self.regions[last])
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::{Kind, Origin};
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    fn region(page: u64) -> Arc<RegionCore> {
        RegionCore::new(PageNo(page).single(), Origin::Chosen, Kind::Frames)
    }

    #[test]
    fn granule_answers_as_a_tree_does_under_random_operations() {
        let mut random = SplitMix64::new(18);
        let (mut granule, mut tree) = (Granule::default(), BTreeMap::new());
        let first = 7 * SECTION_PAGES;
        for step in 0..20_000 {
            // Crowded at first, then sparse.
            let span = if step < 10_000 { SECTION_PAGES } else { 70 };
            let page = PageNo(first + random.below(span));
            match random.below(3) {
                0 => {
                    let core = region(page.0);
                    granule.insert(Arc::clone(&core));
                    tree.insert(page, core);
                }
                1 => {
                    let (ours, wanted) = (granule.remove(page), tree.remove(&page));
                    assert_eq!(ours.is_some(), wanted.is_some());
                }
                _ => {}
            }
            let wanted = tree.get(&page);
            assert!(same(granule.get(page), wanted), "{page}");
            let wanted = tree.range(..=page).next_back().map(|(_, core)| core);
            assert!(same(granule.at_or_before(page), wanted), "{page}");
            assert_eq!(granule.is_empty(), tree.is_empty());
        }
        let all = granule.regions().iter().zip(tree.values());
        assert!(
            all.into_iter()
                .all(|(ours, wanted)| Arc::ptr_eq(ours, wanted))
        );
        assert_eq!(granule.regions().len(), tree.len());
    }

    fn same(ours: Option<&Arc<RegionCore>>, wanted: Option<&Arc<RegionCore>>) -> bool {
        match (ours, wanted) {
            (Some(ours), Some(wanted)) => Arc::ptr_eq(ours, wanted),
            (None, None) => true,
            _ => false,
        }
    }
}
