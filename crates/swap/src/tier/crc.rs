// SPDX-License-Identifier: Apache-2.0
//! Sizes of stored content, and the CRC in front of it.

use pagetide_addr::PageNo;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of the CRC.
pub(crate) const CRC_BYTES: usize = 4;
/// Largest stored form of a page.
pub const STORED_BYTES_MAX: usize = CRC_BYTES + PAGE;

/// Seed of the CRCs of one pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(pub u32);

impl Seed {
    pub(super) fn crc(self, page: PageNo, stored: &[u8]) -> u32 {
        let crc = crc32c::crc32c_append(self.0, &page.0.to_le_bytes());
        crc32c::crc32c_append(crc, stored)
    }
}

/// Writes the CRC in front of the stored bytes.
pub(super) fn seal(seed: Seed, page: PageNo, stored: &mut [u8]) {
    if let Some((crc, body)) = stored.split_first_chunk_mut::<CRC_BYTES>() {
        *crc = seed.crc(page, body).to_le_bytes();
    }
}
