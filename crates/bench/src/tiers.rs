// SPDX-License-Identifier: Apache-2.0
//! What pages take in the tier zstd, over what they take in lz4, as the pool keeps them.
//!
//! Both are packed by the pool's own packers and counted by slots; a page goes to zstd if the demoter would
//! keep it there. Pages that no tier needs room for (of one repeated word) are left out, and so are pages that
//! lz4 does not make smaller: they are not demoted.
//!
//! Two kinds of pages:
//! - [`records`]: as compressible as those that the Taiji paper has found on its fleet (5.3.2: compressed to
//!   47.63 % on average, drawn as in `bench pool`). The paper does not say what is in them. These are records as
//!   programs keep them: pointers that share their upper half, small numbers, and bytes that are drawn from few.
//!   (Pages of `bench pool` are noise and one repeated byte: there is nothing in them for an entropy coder.)
//! - [`memory_of`]: memory of a running program.

use crate::{harness::figures::to_f64, pool::content::RATIO};
use pagetide_addr::{PageNo, to_usize};
use pagetide_random::SplitMix64;
use pagetide_swap::{
    demoter::bytes_max_of_copy,
    slots::Slots,
    tier::{PAGE, Packer, STORED_BYTES_MAX, Seed, ZstdPacker, repeated_word, zstd::ZstdUnusable},
};
use std::{fs::File, io, os::unix::fs::FileExt as _};

const SEED: Seed = Seed(0x7ab1e);
/// Bytes of a record.
const RECORD_BYTES: usize = 32;

/// Bytes that pages take in slots of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierBytes {
    /// Pages that lz4 makes smaller.
    pub pages: u64,
    /// Bytes they take in lz4.
    pub lz4_bytes: u64,
    /// Bytes they take when all of them were demoted.
    pub demoted_bytes: u64,
    /// Of the pages, those that zstd keeps.
    pub zstd_pages: u64,
}

impl TierBytes {
    /// Of `pages`.
    ///
    /// # Errors
    /// zstd cannot be used.
    pub fn of<'a>(pages: impl Iterator<Item = &'a [u8; PAGE]>) -> Result<Self, ZstdUnusable> {
        let (mut lz4, mut zstd) = (Packer::default(), ZstdPacker::new()?);
        let mut bytes = Self::default();
        for (page, content) in (0..).map(PageNo).zip(pages) {
            if repeated_word(content).is_some() {
                continue;
            }
            let packed = lz4.pack(SEED, page, content);
            let Some(length) = packed.map(<[u8]>::len).filter(|it| *it < STORED_BYTES_MAX) else {
                continue;
            };
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            let lz4_bytes = slot_bytes(length);
            let demoted = zstd.pack(SEED, page, content, to_usize(bytes_max_of_copy(length)));
            let zstd_bytes =
                demoted.map(|it| slot_bytes(u32::try_from(it.len()).unwrap_or(u32::MAX)));
            bytes.pages += 1;
            bytes.lz4_bytes += lz4_bytes;
            bytes.demoted_bytes += zstd_bytes.unwrap_or(lz4_bytes);
            bytes.zstd_pages += u64::from(zstd_bytes.is_some());
        }
        Ok(bytes)
    }

    /// Of the pages of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            pages: self.pages + other.pages,
            lz4_bytes: self.lz4_bytes + other.lz4_bytes,
            demoted_bytes: self.demoted_bytes + other.demoted_bytes,
            zstd_pages: self.zstd_pages + other.zstd_pages,
        }
    }

    /// Bytes after demotion over those before: `zstd_tier_bytes_over_lz4_tier`.
    #[must_use]
    pub fn zstd_over_lz4(&self) -> f64 {
        to_f64(self.demoted_bytes) / to_f64(self.lz4_bytes)
    }
}

/// The pages that [`TierBytes`] counts.
#[must_use]
pub fn compressible(pages: &[[u8; PAGE]]) -> Vec<&[u8; PAGE]> {
    let mut lz4 = Packer::default();
    let mut is_compressible = |content: &&[u8; PAGE]| {
        let packed = lz4.pack(SEED, PageNo(0), content).map(<[u8]>::len);
        repeated_word(content).is_none() && packed.is_some_and(|it| it < STORED_BYTES_MAX)
    };
    pages.iter().filter(|it| is_compressible(it)).collect()
}

fn slot_bytes(bytes: u32) -> u64 {
    Slots::bytes_in(Slots::units_for(bytes))
}

/// A page of records, number `page` of its kind. See the module.
#[must_use]
pub fn records(page: PageNo) -> [u8; PAGE] {
    let mut random = SplitMix64::stream(page.0, 0x0007_ec04d5);
    // Part of the page that is in use; the rest was never written.
    let used = 0.62 + 0.56 * (random.unit() - 0.5);
    let heap = 0x7f00_0000_0000 | (random.next_u64() & 0xff_0000_0000);
    let mut bytes = [0; PAGE];
    let records = PAGE / RECORD_BYTES;
    for record in bytes
        .chunks_exact_mut(RECORD_BYTES)
        .take(share_of(records, used))
    {
        let words = [
            heap | random.below(1 << 24) << 4,
            random.below(1 << 12),
            heap | random.below(1 << 24) << 4,
        ];
        for (into, word) in record.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        for letter in &mut record[24..] {
            *letter = b"etaoinshrdlu-_01"[random.index(16)];
        }
    }
    bytes
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share between 0 and 1 of a small number"
)]
fn share_of(count: usize, share: f64) -> usize {
    (count as f64 * share) as usize
}

/// Up to `pages_max` pages of private memory that process `pid` has written, evenly over all of it, but for those
/// of zeros.
///
/// # Errors
/// It cannot be read.
pub fn memory_of(pid: u32, pages_max: usize) -> io::Result<Vec<[u8; PAGE]>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut pages = Vec::new();
    // Every so many of those read so far are kept.
    let (mut stride, mut read) = (1, 0_usize);
    for range in maps.lines().filter_map(private_range) {
        for at in range.step_by(PAGE) {
            let mut page = [0; PAGE];
            // A guard page, or one that was unmapped meanwhile.
            if memory.read_exact_at(&mut page, at).is_err() || repeated_word(&page) == Some(0) {
                continue;
            }
            if read.is_multiple_of(stride) {
                pages.push(page);
            }
            read += 1;
            if pages.len() > pages_max {
                let mut number = 0_usize;
                pages.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
                stride *= 2;
            }
        }
    }
    Ok(pages)
}

/// The addresses of a line of `maps`, if it is heap or anonymous memory that can be written.
fn private_range(line: &str) -> Option<std::ops::Range<u64>> {
    let mut fields = line.split_whitespace();
    let (addresses, rights) = (fields.next()?, fields.next()?);
    let name = fields.nth(3);
    if !rights.starts_with("rw-p") || !matches!(name, None | Some("[heap]")) {
        return None;
    }
    let (start, end) = addresses.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16);
    match (address(start), address(end)) {
        (Ok(start), Ok(end)) => Some(start..end),
        _ => None,
    }
}

/// The ratio of bytes in lz4 that pages of the paper's fleet have, on average.
pub const FLEET_RATIO: f64 = RATIO;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::content as fleet;
    use std::collections::BTreeMap;

    const PAGES: u64 = 4_000;

    #[test]
    fn pages_of_records_compress_as_those_of_the_paper_and_zstd_saves_a_seventh_at_least() {
        let pages: Vec<[u8; PAGE]> = (0..PAGES).map(PageNo).map(records).collect();
        let mut lz4 = Packer::default();
        let stored = pages
            .iter()
            .filter_map(|page| lz4.pack(SEED, PageNo(0), page).map(<[u8]>::len));
        let ratio = to_f64(stored.sum::<usize>() as u64) / to_f64(PAGES * PAGE as u64);
        assert!((ratio - FLEET_RATIO).abs() < 0.01, "{ratio}");
        let bytes = TierBytes::of(pages.iter()).unwrap();
        eprintln!(
            "records: {ratio:.4}, zstd over lz4 {:.4}",
            bytes.zstd_over_lz4()
        );
        assert!(bytes.zstd_over_lz4() <= 0.85, "{bytes:?}");
    }

    #[test]
    fn pages_of_noise_and_one_byte_have_nothing_for_zstd() {
        let all = (0..PAGES).map(|page| fleet::content(PageNo(page), 0));
        let pages: Vec<[u8; PAGE]> = all.filter(|page| repeated_word(page).is_none()).collect();
        let bytes = TierBytes::of(pages.iter()).unwrap();
        eprintln!("noise: zstd over lz4 {:.4}", bytes.zstd_over_lz4());
        assert!(bytes.zstd_over_lz4() > 0.95 && bytes.zstd_over_lz4() <= 1.0);
    }

    #[test]
    fn memory_of_this_program_takes_less_in_zstd() {
        // What programs have: tables of strings and numbers.
        let names = |number: u64| format!("section-{number:06}");
        let table: BTreeMap<String, u64> = (0..60_000).map(|it| (names(it), it * it)).collect();
        let pages = memory_of(std::process::id(), 4_000).unwrap();
        assert!(pages.len() > 500, "{}", pages.len());
        let bytes = TierBytes::of(pages.iter()).unwrap();
        assert_eq!(table.len(), 60_000);
        eprintln!(
            "this program: zstd over lz4 {:.4}, {bytes:?}",
            bytes.zstd_over_lz4()
        );
        assert!(bytes.zstd_over_lz4() <= 0.85, "{bytes:?}");
    }
}
