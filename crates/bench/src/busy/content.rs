// SPDX-License-Identifier: Apache-2.0
//! The content of a page: a function of its number and its version.
//!
//! ```text
//!   word  0        version
//!        64, 128 … 448   stamps: of number, version and place     (words are of 8 bytes)
//!        others    body: of number and place alone
//! ```
//! So a write is eight words in eight cache lines, whatever the size of a page, and a reader of these eight
//! can check that they belong together. What the body is like is the RAM's [`Mix`].

use crate::pool::content as fleet;
use pagetide_addr::{PAGE_BYTES, PageNo};
use pagetide_random::{GAMMA, SplitMix64, mixed};

/// Words of a page.
pub const WORDS: usize = 512;
/// Words between two stamps: each is in its own cache line, and in another eighth of the page.
pub const STAMP_STRIDE: usize = WORDS / 8;
/// Pages after which kinds of pages repeat.
const KINDS: u64 = 16;

const _: () = assert!(WORDS as u64 * 8 == PAGE_BYTES);

/// What the pages of a RAM are like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mix {
    /// Of sixteen pages one is all zeros until it is written, one does not compress, and the others shrink to
    /// about half: each way of storing a page is used.
    Halves,
    /// As in the Taiji paper's fleet (5.3.3): most are all zeros until they are written, the others shrink to
    /// about half.
    Fleet,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Zero,
    Random,
    Compressible,
    Fleet,
}

impl Mix {
    const fn kind(self, page: PageNo) -> Kind {
        match self {
            Self::Fleet if fleet::is_zero(page) => Kind::Zero,
            Self::Fleet => Kind::Fleet,
            Self::Halves => match page.0 % KINDS {
                0 => Kind::Zero,
                1 => Kind::Random,
                _ => Kind::Compressible,
            },
        }
    }
}

/// The stamps of one version of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamps {
    version: u64,
    /// Zero if all stamps are.
    base: u64,
}

impl Stamps {
    /// Of `page` in `version`.
    #[inline]
    #[must_use]
    pub const fn of(mix: Mix, page: PageNo, version: u32) -> Self {
        let base = if version == 0 && matches!(mix.kind(page), Kind::Zero) {
            0
        } else {
            mixed((page.0 << 32 | version as u64).wrapping_add(GAMMA)) | 1
        };
        Self {
            version: version as u64,
            base,
        }
    }

    /// The word at `STAMP_STRIDE * number`, with `number` below 8.
    #[inline]
    #[must_use]
    pub const fn word(self, number: usize) -> u64 {
        if number == 0 {
            self.version
        } else {
            self.base.wrapping_mul(2 * number as u64 + 1)
        }
    }
}

/// All words of `page` in `version`.
#[must_use]
pub fn words(mix: Mix, page: PageNo, version: u32) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    let mut random = SplitMix64::new(page.0);
    match mix.kind(page) {
        Kind::Zero => {}
        Kind::Random => words.fill_with(|| random.next_u64()),
        Kind::Compressible => {
            for (at, word) in words.iter_mut().enumerate() {
                let random = random.next_u64();
                // As in tables of small numbers and pointers.
                *word = match at % 2 {
                    0 => random & 0xffff_ffff,
                    _ => 0x7f00_0000_0000 | page.0 << 4,
                };
            }
        }
        Kind::Fleet => {
            let bytes = fleet::content(page, 0);
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
        }
    }
    let stamps = Stamps::of(mix, page, version);
    for number in 0..WORDS / STAMP_STRIDE {
        words[number * STAMP_STRIDE] = stamps.word(number);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::figures::to_f64;
    use pagetide_swap::tier::{Packer, STORED_BYTES_MAX, Seed};

    fn bytes(page: u64, version: u32) -> Vec<u8> {
        let words = words(Mix::Halves, PageNo(page), version);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn content_differs_by_page_and_by_version_in_each_stamp() {
        for (page, other) in [(1, 17), (2, 3), (0, 16), (5, 1 << 31)] {
            assert_ne!(bytes(page, 1), bytes(other, 1), "{page} {other}");
        }
        for page in 0..32 {
            let versions =
                [0, 1, 2, 1 << 20, u32::MAX].map(|v| Stamps::of(Mix::Halves, PageNo(page), v));
            for (at, one) in versions.iter().enumerate() {
                for other in &versions[at + 1..] {
                    for number in 0..WORDS / STAMP_STRIDE {
                        assert_ne!(one.word(number), other.word(number), "{page}.{number}");
                    }
                }
            }
        }
    }

    #[test]
    fn versions_differ_in_their_stamps_alone() {
        for mix in [Mix::Halves, Mix::Fleet] {
            for page in (0..16).map(PageNo) {
                let (one, other) = (words(mix, page, 4), words(mix, page, 6));
                let differing = (0..WORDS).filter(|at| one[*at] != other[*at]);
                assert!(differing.eq((0..8).map(|number| number * STAMP_STRIDE)));
            }
        }
    }

    #[test]
    fn each_way_of_storing_a_page_is_used() {
        assert!(bytes(16, 0).iter().all(|byte| *byte == 0));
        assert!(bytes(16, 1).iter().any(|byte| *byte != 0));
        let mut packer = Packer::default();
        let mut packed = |page| {
            let content: [u8; 4096] = bytes(page, 1).try_into().unwrap();
            packer
                .pack(Seed(0), PageNo(page), &content)
                .map(|stored| stored.len())
        };
        assert_eq!(packed(17), Some(STORED_BYTES_MAX));
        let len = packed(18).unwrap();
        assert!((1500..2800).contains(&len), "{len}");
    }

    #[test]
    fn pages_of_the_fleet_are_zero_as_often_as_in_the_paper_until_they_are_written() {
        const PAGES: u64 = 20_000;
        let zeros = |version| {
            let all = (0..PAGES).map(|page| words(Mix::Fleet, PageNo(page), version));
            all.filter(|words| *words == [0; WORDS]).count() as u64
        };
        let wanted = to_f64(PAGES) * fleet::ZERO_SHARE;
        assert!((to_f64(zeros(0)) - wanted).abs() < to_f64(PAGES) / 100.0);
        assert_eq!(zeros(2), 0);
    }
}
