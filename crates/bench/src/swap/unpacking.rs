// SPDX-License-Identifier: Apache-2.0
//! What it takes to check and unpack a page, as the product does it, and nothing else: with a bare round trip of
//! a fault the floor of a fault on a page in the tier lz4.

use crate::fault::content::{Content, Kind, random_order};
use pagetide_addr::{PageNo, to_usize};
use pagetide_swap::tier::{PAGE, Packer, Seed, form_of, unpack};
use std::time::Instant;

const SEED: Seed = Seed(0x5eed);

/// Stored forms of the pages of a guest.
pub(super) struct Stored(Vec<Vec<u8>>);

impl Stored {
    /// Of a guest of `pages` pages of records.
    pub(super) fn new(pages: u64) -> Result<Self, String> {
        let content = Content::of(Kind::Records)?;
        let mut packer = Packer::default();
        let packed = (0..pages).map(PageNo).map(|page| {
            let packed = packer.pack(SEED, page, &content.page(page));
            packed.map(<[u8]>::to_vec).ok_or("records are not zeros")
        });
        Ok(Self(packed.collect::<Result<_, _>>()?))
    }

    /// Times for each page, in random order, in nanoseconds.
    pub(super) fn unpack_all(&self, seed: u64) -> Result<Vec<u32>, String> {
        let mut into = [0; PAGE];
        let mut taken = Vec::with_capacity(self.0.len());
        for page in random_order(self.0.len() as u64, seed) {
            let stored = &self.0[to_usize(page.0)];
            let begun = Instant::now();
            unpack(SEED, page, form_of(stored), stored, &mut into)?;
            taken.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
            std::hint::black_box(&into);
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_unpacked_once() {
        let stored = Stored::new(64).unwrap();
        assert_eq!(stored.unpack_all(3).unwrap().len(), 64);
    }
}
