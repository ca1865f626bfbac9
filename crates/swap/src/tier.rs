// SPDX-License-Identifier: Apache-2.0
//! The form of stored content, and how a page is packed and unpacked (Taiji 4.2.2, 7.1).
//!
//! | tier | in the page word | in the pool |
//! |---|---|---|
//! | zero | `Content::ZERO` | nothing |
//! | lz4 | slot, length | CRC-32C, then an lz4 block |
//! | uncompressed | slot, length 4,096 | CRC-32C, then the page: it does not compress |
//!
//! ```text
//!   Content (56 bits):   │ slot in 64-byte units: 42 │ bytes stored, less 1: 14 │
//! ```
//! The CRC covers the stored bytes and is seeded with the pool and the page number, so that content
//! of another page or another VM never passes as this page's. It is checked *before* decompression:
//! the decompressor only ever sees bytes that the compressor wrote.

use crate::slots::SlotNo;
use pagetide_addr::PageNo;
use pagetide_gmem::Content;

/// Bytes of a page.
pub const PAGE: usize = 4096;
const CRC_BYTES: usize = 4;
/// Largest stored form of a page.
pub const STORED_BYTES_MAX: usize = CRC_BYTES + PAGE;
const LENGTH_BITS: u32 = 14;
/// An lz4 block longer than this saves too little: the page is stored uncompressed, and is loaded
/// without decompression.
const LZ4_BYTES_MAX: usize = 3 * PAGE / 4 + 512;
const _: () = assert!(STORED_BYTES_MAX < 1 << LENGTH_BITS && LZ4_BYTES_MAX < PAGE);
static ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// Which tier a content is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// A page of zeros.
    Zero,
    /// Compressed.
    Lz4,
    /// Uncompressed.
    Uncompressed,
}

/// Where and how long a stored content is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Located {
    /// Its slot.
    pub slot: SlotNo,
    /// Its length with the CRC, in bytes.
    pub bytes: u32,
}

impl Located {
    /// The content as a page word holds it; `None` if the slot number is too large.
    #[must_use]
    pub fn content(self) -> Option<Content> {
        if self.bytes == 0 || self.slot.0 >> (56 - LENGTH_BITS) != 0 {
            return None;
        }
        Content::at(self.slot.0 << LENGTH_BITS | u64::from(self.bytes))
    }

    /// The slot and length in a page word's content.
    #[must_use]
    pub fn of(content: Content) -> Self {
        let bits = content.bits();
        let bytes = u32::try_from(bits & ((1 << LENGTH_BITS) - 1)).unwrap_or(0);
        Self {
            slot: SlotNo(bits >> LENGTH_BITS),
            bytes,
        }
    }

    /// The tier.
    #[must_use]
    pub fn tier(self) -> Tier {
        if self.bytes as usize == STORED_BYTES_MAX {
            Tier::Uncompressed
        } else {
            Tier::Lz4
        }
    }
}

/// Seed of the CRCs of one pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(pub u32);

impl Seed {
    fn crc(self, page: PageNo, stored: &[u8]) -> u32 {
        let crc = crc32c::crc32c_append(self.0, &page.0.to_le_bytes());
        crc32c::crc32c_append(crc, stored)
    }
}

/// True for a page of zeros.
#[must_use]
pub fn is_zero(content: &[u8; PAGE]) -> bool {
    *content == ZERO_PAGE
}

/// Turns pages into their stored form; keeps its buffers.
pub struct Packer {
    stored: Box<[u8]>,
    table: lz4_flex::block::CompressTable,
}

impl Default for Packer {
    fn default() -> Self {
        let bytes = CRC_BYTES + lz4_flex::block::get_maximum_output_size(PAGE);
        Self {
            stored: vec![0; bytes].into(),
            table: lz4_flex::block::CompressTable::small(),
        }
    }
}

impl Packer {
    /// The stored form of `page`'s content, or `None` for a page of zeros.
    pub fn pack(&mut self, seed: Seed, page: PageNo, content: &[u8; PAGE]) -> Option<&[u8]> {
        if is_zero(content) {
            return None;
        }
        let room = &mut self.stored[CRC_BYTES..];
        let compressed = lz4_flex::block::compress_into_with_table(content, room, &mut self.table);
        let length = match compressed {
            Ok(length) if length <= LZ4_BYTES_MAX => length,
            // Too long, or no room (which the buffer's size rules out): stored uncompressed.
            _ => {
                self.stored[CRC_BYTES..STORED_BYTES_MAX].copy_from_slice(content);
                PAGE
            }
        };
        let stored = &mut self.stored[..CRC_BYTES + length];
        let crc = seed.crc(page, &stored[CRC_BYTES..]);
        stored[..CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
        Some(stored)
    }
}

/// Turns the stored form back into the page.
///
/// # Errors
/// The reason, as text: the content is lost.
pub fn unpack(
    seed: Seed,
    page: PageNo,
    stored: &[u8],
    into: &mut [u8; PAGE],
) -> Result<(), &'static str> {
    let Some((crc, body)) = stored.split_first_chunk::<CRC_BYTES>() else {
        return Err("it is too short to hold its CRC");
    };
    if seed.crc(page, body) != u32::from_le_bytes(*crc) {
        return Err("its CRC-32C does not match");
    }
    if stored.len() == STORED_BYTES_MAX {
        into.copy_from_slice(body);
        return Ok(());
    }
    match lz4_flex::block::decompress_into(body, into) {
        Ok(PAGE) => Ok(()),
        Ok(_) | Err(_) => Err("it does not decompress to a page"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    const SEED: Seed = Seed(0xfeed);

    fn texts() -> Vec<[u8; PAGE]> {
        let mut random = SplitMix64::new(1);
        let noise = std::array::from_fn(|_| random.next_u64().to_le_bytes()[0]);
        let text = std::array::from_fn(|i| b"the tide comes in, the tide goes out; "[i % 38]);
        let mut last_byte_only = [0; PAGE];
        last_byte_only[PAGE - 1] = 1;
        vec![noise, text, last_byte_only]
    }

    #[test]
    fn page_survives_packing_whatever_it_holds() {
        let mut packer = Packer::default();
        for (number, content) in texts().into_iter().enumerate() {
            let page = PageNo(number as u64);
            let stored = packer.pack(SEED, page, &content).unwrap().to_vec();
            assert!(stored.len() <= STORED_BYTES_MAX);
            let mut back = [0; PAGE];
            unpack(SEED, page, &stored, &mut back).unwrap();
            assert!(back == content);
        }
        assert!(packer.pack(SEED, PageNo(0), &ZERO_PAGE).is_none());
    }

    #[test]
    fn noise_is_stored_uncompressed_and_text_is_not() {
        let mut packer = Packer::default();
        let lengths: Vec<usize> = texts()
            .iter()
            .map(|t| packer.pack(SEED, PageNo(1), t).unwrap().len())
            .collect();
        assert_eq!(lengths[0], STORED_BYTES_MAX);
        assert!(lengths[1] < PAGE / 8 && lengths[2] < PAGE / 8);
    }

    #[test]
    fn any_flipped_bit_and_any_other_page_or_pool_is_noticed() {
        let mut packer = Packer::default();
        let content = texts()[1];
        let stored = packer.pack(SEED, PageNo(5), &content).unwrap().to_vec();
        let mut into = [0; PAGE];
        for bit in 0..stored.len() * 8 {
            let mut damaged = stored.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(
                unpack(SEED, PageNo(5), &damaged, &mut into).is_err(),
                "bit {bit}"
            );
        }
        assert!(unpack(SEED, PageNo(6), &stored, &mut into).is_err());
        assert!(unpack(Seed(1), PageNo(5), &stored, &mut into).is_err());
        for length in 0..stored.len() {
            assert!(unpack(SEED, PageNo(5), &stored[..length], &mut into).is_err());
        }
    }

    #[test]
    fn location_survives_the_way_through_a_page_word() {
        for (slot, bytes) in [(0, 5), (1, 4100), ((1 << 42) - 1, 1)] {
            let located = Located {
                slot: SlotNo(slot),
                bytes,
            };
            assert_eq!(Located::of(located.content().unwrap()), located);
        }
        assert_eq!(
            Located {
                slot: SlotNo(1 << 42),
                bytes: 1
            }
            .content(),
            None
        );
    }
}
