// SPDX-License-Identifier: Apache-2.0
//! The content of the guest's pages, by [`Kind`]. Each page that is not of one word begins with a stamp: a
//! function of its number.
//!
//! *Program* is pages of this program. Synthetic bytes compress too well or not at all, and both change the cost
//! of decompression; a program is typical content of guests: code, strings, tables. Only pages that the lz4 tier
//! accepts are used, since zero and uncompressed pages are filled in other, cheaper ways. The peers get the same
//! bytes.
//!
//! *Records* and *paper* are made: see [`crate::tiers`].

use crate::{harness::figures::to_f64, pool::content as fleet, tiers::records};
use pagetide_addr::PageNo;
use pagetide_random::{GAMMA, SplitMix64, mixed};
use pagetide_swap::tier::{Packer, STORED_BYTES_MAX, Seed, fill_with_word};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
/// Bytes of the stamp, at the start of each page.
const STAMP: usize = 8;
/// Most pages of the program that are used; beyond that they repeat, apart from their stamps.
const MODELS_MAX: usize = 4096;

/// What the pages of a guest are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Kind {
    /// Of this program
    Program,
    /// Records, as compressible as the pages of the paper's fleet that are not zeros
    Records,
    /// As on the paper's fleet: mostly zeros, else records
    Paper,
    /// Zeros
    Zero,
    /// Each of one repeated word
    Same,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Program => "program",
            Self::Records => "records",
            Self::Paper => "paper",
            Self::Zero => "zero",
            Self::Same => "same",
        })
    }
}

impl Kind {
    /// First word of page `page`.
    pub(crate) fn first_word(self, page: PageNo) -> u64 {
        match self {
            Self::Paper if fleet::is_zero(page) => 0,
            Self::Program | Self::Records | Self::Paper => stamp(page),
            Self::Zero => 0,
            Self::Same => {
                let word = same_word(page).to_ne_bytes();
                let [a, b, c, d] = word;
                u64::from_ne_bytes([a, b, c, d, a, b, c, d])
            }
        }
    }
}

/// The word that page `page` of [`Kind::Same`] consists of.
fn same_word(page: PageNo) -> u32 {
    let [a, b, c, ..] = mixed(page.0).to_ne_bytes();
    u32::from_ne_bytes([a, b, c, 1])
}

/// Pages to fill a guest with.
pub(crate) struct Content {
    kind: Kind,
    /// Those of the program.
    models: Vec<u8>,
    stored_bytes: u64,
}

impl Content {
    /// Of `kind`.
    ///
    /// # Errors
    /// [`Self::of_this_program`].
    pub(crate) fn of(kind: Kind) -> Result<Self, String> {
        match kind {
            Kind::Program => Self::of_this_program(),
            _ => Ok(Self {
                kind,
                models: Vec::new(),
                stored_bytes: 0,
            }),
        }
    }

    /// From the running program.
    ///
    /// # Errors
    /// It cannot be read, or none of its pages is suitable.
    pub(crate) fn of_this_program() -> Result<Self, String> {
        let program = std::fs::read("/proc/self/exe")
            .map_err(|error| format!("cannot read this program: {error}"))?;
        let mut packer = Packer::default();
        let mut content = Self {
            kind: Kind::Program,
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

    /// Compressed size of the program's pages over size.
    pub(crate) fn lz4_ratio(&self) -> f64 {
        to_f64(self.stored_bytes) / to_f64(self.models.len() as u64)
    }

    /// Content of page `page`.
    pub(crate) fn page(&self, page: PageNo) -> [u8; PAGE] {
        let mut bytes = match self.kind {
            Kind::Program => self.program_page(page),
            Kind::Paper if fleet::is_zero(page) => return [0; PAGE],
            Kind::Records | Kind::Paper => records(page),
            Kind::Zero => return [0; PAGE],
            Kind::Same => {
                let mut bytes = [0; PAGE];
                fill_with_word(same_word(page), &mut bytes);
                return bytes;
            }
        };
        bytes[..STAMP].copy_from_slice(&stamp(page).to_ne_bytes());
        bytes
    }

    fn program_page(&self, page: PageNo) -> [u8; PAGE] {
        let models = self.models.len() / PAGE;
        let model = page.index() % models * PAGE;
        let mut bytes = [0; PAGE];
        bytes.copy_from_slice(&self.models[model..model + PAGE]);
        bytes
    }
}

/// First word of page `page`, if it has a stamp.
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

    #[test]
    fn pages_begin_with_the_word_that_is_looked_for() {
        for kind in [
            Kind::Program,
            Kind::Records,
            Kind::Paper,
            Kind::Zero,
            Kind::Same,
        ] {
            let content = Content::of(kind).unwrap();
            for page in (0..100).map(PageNo) {
                let first = kind.first_word(page).to_ne_bytes();
                assert_eq!(content.page(page)[..8], first, "{kind} {page}");
            }
        }
        let word = |kind: Kind, page| kind.first_word(PageNo(page));
        assert_ne!(word(Kind::Same, 1), word(Kind::Same, 2));
        assert_ne!(word(Kind::Same, 1), 0);
    }
}
