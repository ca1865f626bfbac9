// SPDX-License-Identifier: Apache-2.0
//! What pages hold: eight sectors, each filled from a stamp.
//!
//! A stamp is given out once, so content that turns up in another page, or
//! later than it may, is known for what it is. Sector 0 bytes come from stamp
//! 0; every third stamp makes noise, which does not compress, and every seventh of
//! the others the stamp again and again: a page of it is same-filled. Parsing checks
//! every byte: a page torn in the middle of a sector parses as nothing.

use pagetide_random::SplitMix64;
use std::fmt;

/// Sectors of a page.
pub const SECTORS: usize = 8;
const SECTOR_BYTES: usize = 512;

/// Content of a page: the stamp of each sector.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stamps(pub [u32; SECTORS]);

impl Stamps {
    pub const ZERO: Self = Self([0; SECTORS]);

    /// The same with sectors `from..to` of another stamp.
    #[must_use]
    pub fn with(mut self, sectors: Sectors, stamp: u32) -> Self {
        self.0[sectors.from..sectors.to].fill(stamp);
        self
    }

    pub fn render(self, into: &mut [u8]) {
        for (stamp, sector) in self.0.iter().zip(into.chunks_exact_mut(SECTOR_BYTES)) {
            render_sector(*stamp, sector);
        }
    }

    /// The stamps of a page's bytes, or `None` if no stamps make such bytes.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut stamps = Self::ZERO;
        let mut expected = [0; SECTOR_BYTES];
        for (stamp, sector) in stamps.0.iter_mut().zip(bytes.chunks_exact(SECTOR_BYTES)) {
            *stamp = u32::from_le_bytes([sector[0], sector[1], sector[2], sector[3]]);
            render_sector(*stamp, &mut expected);
            if sector != expected {
                return None;
            }
        }
        (bytes.len() == SECTORS * SECTOR_BYTES).then_some(stamps)
    }
}

impl fmt::Debug for Stamps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// A range of sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sectors {
    pub from: usize,
    pub to: usize,
}

fn render_sector(stamp: u32, into: &mut [u8]) {
    let is_noise = stamp.is_multiple_of(3);
    let other_half = match stamp.is_multiple_of(7) && !is_noise {
        true => stamp,
        false => stamp.rotate_left(16),
    };
    let mut word = u64::from(stamp) | u64::from(other_half) << 32;
    let mut random = SplitMix64::new(word);
    for bytes in into.chunks_exact_mut(8) {
        bytes.copy_from_slice(&word.to_le_bytes());
        if stamp != 0 && is_noise {
            word = random.next_u64();
        }
    }
}

#[test]
fn stamps_survive_rendering_and_a_torn_page_parses_as_nothing() {
    let stamps = Stamps([1, 2, 3, 0, 5, 6, 7, u32::MAX]);
    let mut bytes = [0; 4096];
    stamps.render(&mut bytes);
    assert_eq!(Stamps::parse(&bytes), Some(stamps));
    for at in [9, 700, 1100, 1600, 4095] {
        let mut torn = bytes;
        torn[at] ^= 1;
        assert_eq!(Stamps::parse(&torn), None, "byte {at}");
    }
    Stamps::ZERO.render(&mut bytes);
    assert_eq!(bytes, [0; 4096]);
}
