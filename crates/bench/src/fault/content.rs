// SPDX-License-Identifier: Apache-2.0
//! The content of the guest's pages: pages of this program, each stamped with its number.
//!
//! Synthetic bytes compress too well or not at all, and both change the cost of decompression. A program is
//! typical content of guests: code, strings, tables. Only pages that the lz4 tier accepts are used, since
//! zero and uncompressed pages are filled in other, cheaper ways; kernel zram gets the same bytes.

use crate::harness::figures::to_f64;
use pagetide_addr::PageNo;
use pagetide_random::{GAMMA, SplitMix64};
use pagetide_swap::tier::{Packer, STORED_BYTES_MAX, Seed};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
/// Bytes of the stamp, at the start of each page.
const STAMP: usize = 8;
/// Most pages of the program that are used; beyond that they repeat, apart from their stamps.
const MODELS_MAX: usize = 4096;

/// Pages to fill a guest with.
pub(crate) struct Content {
    models: Vec<u8>,
    stored_bytes: u64,
}

impl Content {
    /// From the running program.
    ///
    /// # Errors
    /// It cannot be read, or none of its pages is suitable.
    pub(crate) fn of_this_program() -> Result<Self, String> {
        let program = std::fs::read("/proc/self/exe")
            .map_err(|error| format!("cannot read this program: {error}"))?;
        let mut packer = Packer::default();
        let mut content = Self {
            models: Vec::new(),
            stored_bytes: 0,
        };
        for page in program.chunks_exact(PAGE) {
            let Ok(page) = <&[u8; PAGE]>::try_from(page) else {
                continue;
            };
            if let Some(stored) = packer.pack(Seed(0), PageNo(0), page)
                && stored.len() < STORED_BYTES_MAX * 3 / 4
                && stored.len() > PAGE / 8
            {
                content.stored_bytes += stored.len() as u64;
                content.models.extend_from_slice(page);
            }
            if content.models.len() == MODELS_MAX * PAGE {
                break;
            }
        }
        if content.models.is_empty() {
            return Err("no page of this program compresses".into());
        }
        Ok(content)
    }

    /// Compressed size over size.
    pub(crate) fn lz4_ratio(&self) -> f64 {
        to_f64(self.stored_bytes) / to_f64(self.models.len() as u64)
    }

    /// Content of page `page`.
    pub(crate) fn page(&self, page: PageNo) -> [u8; PAGE] {
        let models = self.models.len() / PAGE;
        let model = page.index() % models * PAGE;
        let mut bytes = [0; PAGE];
        bytes.copy_from_slice(&self.models[model..model + PAGE]);
        bytes[..STAMP].copy_from_slice(&stamp(page).to_ne_bytes());
        bytes
    }
}

/// First word of page `page`.
pub(crate) const fn stamp(page: PageNo) -> u64 {
    (page.0 + 1).wrapping_mul(GAMMA)
}

/// A reproducible order of `pages` pages in which no page predicts the next.
pub(crate) fn random_order(pages: u64, seed: u64) -> Vec<PageNo> {
    let mut order: Vec<PageNo> = (0..pages).map(PageNo).collect();
    SplitMix64::new(seed).shuffle(&mut order);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_order_holds_each_page_once_and_differs_by_seed() {
        let order = random_order(1000, 1);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).map(PageNo).collect::<Vec<_>>());
        assert_ne!(order, random_order(1000, 2));
        let in_sequence = order.windows(2).filter(|w| w[1].0 == w[0].0 + 1).count();
        assert!(in_sequence < 10, "{in_sequence}");
    }

    #[test]
    fn pages_of_this_program_compress_and_differ_by_their_stamps() {
        let content = Content::of_this_program().unwrap();
        assert!(content.lz4_ratio() > 0.1 && content.lz4_ratio() < 0.9);
        let (one, other) = (content.page(PageNo(1)), content.page(PageNo(2)));
        assert_eq!(one[..8], stamp(PageNo(1)).to_ne_bytes());
        assert_ne!(one, other);
    }
}
