// SPDX-License-Identifier: Apache-2.0
//! Content of sampled pages: packed as the product would store them, then discarded.

use pagetide_addr::PageNo;
use pagetide_random::SplitMix64;
use pagetide_swap::tier::{PAGE, Packer, STORED_BYTES_MAX, Seed, repeated_word};

use super::heat::ratio;

/// Store space is allocated in units of this many bytes.
const SLOT_BYTES: u64 = 64;
/// Pages read of each kind: a share of one half is then accurate to about 2% (95%, 1/sqrt(n)).
pub const READ_PAGES: usize = 2_500;

/// Moves `count` random items to the front and truncates the rest.
pub fn choose<T>(random: &mut SplitMix64, items: &mut Vec<T>, count: usize) {
    let count = count.min(items.len());
    for at in 0..count {
        let chosen = at + random.index(items.len() - at);
        items.swap(at, chosen);
    }
    items.truncate(count);
}

/// Statistics of the pages read so far.
#[derive(Default)]
pub struct Contents {
    packer: Packer,
    pages: u64,
    zero_pages: u64,
    lz4_pages: u64,
    lz4_bytes: u64,
    stored_bytes: u64,
}

impl Contents {
    /// Adds the content of one page.
    pub fn take(&mut self, page: PageNo, content: &[u8; PAGE]) {
        self.pages += 1;
        // Kept in its word alone.
        if repeated_word(content).is_some_and(|word| word != 0) {
            return;
        }
        match self.packer.pack(Seed(0), page, content) {
            None => self.zero_pages += 1,
            Some(stored) => {
                let bytes = stored.len() as u64;
                if stored.len() < STORED_BYTES_MAX {
                    self.lz4_pages += 1;
                    self.lz4_bytes += bytes;
                }
                self.stored_bytes += bytes.next_multiple_of(SLOT_BYTES);
            }
        }
    }

    /// Number of pages added.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Share of pages that are all zero.
    #[must_use]
    pub fn zero_share(&self) -> f64 {
        ratio(self.zero_pages, self.pages)
    }

    /// Share of pages that are not zero and are worth compressing.
    #[must_use]
    pub fn compressible_share(&self) -> f64 {
        ratio(self.lz4_pages, self.pages)
    }

    /// Compressed size of these over their size.
    #[must_use]
    pub fn lz4_ratio(&self) -> f64 {
        ratio(self.lz4_bytes, self.lz4_pages * PAGE as u64)
    }

    /// Size in the store over size in memory, of all pages.
    #[must_use]
    pub fn stored_share(&self) -> f64 {
        ratio(self.stored_bytes, self.pages * PAGE as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_told_apart_by_what_they_hold() {
        let mut contents = Contents::default();
        let mut random = SplitMix64::new(1);
        let noise: [u8; PAGE] = std::array::from_fn(|_| random.below(256).to_le_bytes()[0]);
        contents.take(PageNo(0), &[0; PAGE]);
        let text: [u8; PAGE] = std::array::from_fn(|at| b"the tide "[at % 9]);
        contents.take(PageNo(1), &text);
        contents.take(PageNo(2), &noise);
        contents.take(PageNo(3), &[0; PAGE]);
        assert_eq!(contents.pages(), 4);
        assert!((contents.zero_share() - 0.5).abs() < 1e-9);
        assert!((contents.compressible_share() - 0.25).abs() < 1e-9);
        assert!(contents.lz4_ratio() > 0.0 && contents.lz4_ratio() < 0.05);
        // An uncompressed page takes its CRC and the rest of a slot beside its bytes.
        assert!(contents.stored_share() > 0.25 && contents.stored_share() < 0.27);
        // Kept in its word alone.
        let before = contents.stored_bytes;
        contents.take(PageNo(4), &[7; PAGE]);
        assert_eq!((contents.pages(), contents.stored_bytes), (5, before));
    }

    #[test]
    fn choice_is_without_repetition_and_leaves_nobody_out() {
        let mut random = SplitMix64::new(9);
        let mut hits = [0_u32; 20];
        for _ in 0..2_000 {
            let mut items: Vec<usize> = (0..20).collect();
            choose(&mut random, &mut items, 5);
            items.sort_unstable();
            items.dedup();
            assert_eq!(items.len(), 5);
            for item in items {
                hits[item] += 1;
            }
        }
        assert!(hits.iter().all(|hit| (300..700).contains(hit)), "{hits:?}");
    }

    #[test]
    fn choice_of_more_than_there_is_takes_all() {
        let mut items = vec![1, 2, 3];
        choose(&mut SplitMix64::new(3), &mut items, 10);
        items.sort_unstable();
        assert_eq!(items, [1, 2, 3]);
    }
}
