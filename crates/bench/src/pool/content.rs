// SPDX-License-Identifier: Apache-2.0
//! Pages as the Taiji paper has found them on its fleet: most are zero, the others compress to about half.
//!
//! ```text
//!   page   random bytes, compressible by nothing │ one byte again and again
//!          └─ a share of the page, drawn for each page ─┘
//! ```
//! The share is drawn evenly, so that content of nearly all sizes occurs.

use pagetide_addr::{PAGE_BYTES, PageNo};
use pagetide_random::SplitMix64;

/// Share of zeros among the evicted pages (Taiji 5.3.3, Fig. 15c).
pub(crate) const ZERO_SHARE: f64 = 0.7679;
/// Average size of the others, compressed (the same).
pub(crate) const RATIO: f64 = 0.4763;
/// The ratios are drawn from this much below the average to this much above.
const SPREAD: f64 = 0.37;
/// What lz4 and the CRC add to the bytes that do not compress, on average, as a ratio.
const ADDED: f64 = 0.0108;
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

/// The content of `page` in `version`: a page is zero in every version, or in none.
pub(crate) fn content(page: PageNo, version: u32) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    if is_zero(page) {
        return bytes;
    }
    let mut random = SplitMix64::stream(page.0, u64::from(version));
    let ratio = RATIO - ADDED + SPREAD * (2.0 * random.unit() - 1.0);
    let incompressible = part(ratio);
    let (noise, rest) = bytes.split_at_mut(incompressible);
    for word in noise.chunks_mut(8) {
        let drawn = random.next_u64().to_le_bytes();
        word.copy_from_slice(&drawn[..word.len()]);
    }
    rest.fill(random.next_u64().to_le_bytes()[0] | 1);
    bytes
}

/// True for a page that is zero in every version.
pub(crate) const fn is_zero(page: PageNo) -> bool {
    SplitMix64::stream(page.0, u64::MAX).unit() < ZERO_SHARE
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a ratio between 0 and 1 of a small number"
)]
fn part(ratio: f64) -> usize {
    (ratio * PAGE as f64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::figures::{mean, to_f64};
    use pagetide_swap::tier::{Packer, Seed};

    #[test]
    fn mix_of_pages_is_that_of_the_paper() {
        const PAGES: u64 = 40_000;
        let mut packer = Packer::default();
        let stored: Vec<f64> = (0..PAGES)
            .filter_map(|page| {
                let page = PageNo(page);
                let stored = packer.pack(Seed(1), page, &content(page, 3))?;
                Some(to_f64(stored.len() as u64) / to_f64(PAGE_BYTES))
            })
            .collect();
        let zeros = 1.0 - to_f64(stored.len() as u64) / to_f64(PAGES);
        assert!((zeros - ZERO_SHARE).abs() < 0.01, "{zeros}");
        let ratio = mean(stored);
        assert!((ratio - RATIO).abs() < 0.005, "{ratio}");
    }

    #[test]
    fn versions_differ_in_size_and_content_and_zero_pages_stay_zero() {
        for page in (0..200).map(PageNo) {
            let (one, other) = (content(page, 0), content(page, 1));
            let is_zero = one == [0; PAGE];
            assert_eq!(is_zero, other == [0; PAGE]);
            assert_eq!(is_zero, one == other);
        }
    }
}
