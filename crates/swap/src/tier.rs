// SPDX-License-Identifier: Apache-2.0
//! The form of stored content, and how a page is packed and unpacked (Taiji 4.2.2, 7.1).
//!
//! | tier | in the page word | in the pool |
//! |---|---|---|
//! | zero | `Content::ZERO` | nothing |
//! | same | the 32-bit word that fills the page | nothing |
//! | lz4 | slot, length | CRC-32C, then an lz4 block |
//! | | slot, length 4,100 | CRC-32C, then the page: it does not compress |
//! | zstd | slot, length | CRC-32C, then a zstd frame: it stayed cold |
//! | disk, remote | extent, place in it | nothing; sealed there: form, then what was in the pool ([`crate::slow`]) |
//!
//! [`located`] has the bits. The CRC covers the stored bytes and is seeded with the pool and the page number,
//! so that content of another page or another VM never passes as this page's. It is checked *before*
//! decompression: the decompressor only ever sees bytes that the compressor wrote.

pub(crate) mod crc;
pub mod located;
pub mod zstd;

pub use crc::{PAGE, STORED_BYTES_MAX, Seed};
pub use located::{Form, InPool, InSlow, Located, UnknownContent};
pub use zstd::ZstdPacker;

use crc::{CRC_BYTES, seal};
use pagetide_addr::PageNo;

/// An lz4 block longer than this saves too little: the page is stored uncompressed, and is loaded
/// without decompression.
const LZ4_BYTES_MAX: usize = 3 * PAGE / 4 + 512;
const _: () = assert!(LZ4_BYTES_MAX < PAGE);
const _: () = assert!(PAGE == 4096);
static ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// True for a page of zeros.
#[must_use]
pub fn is_zero(content: &[u8; PAGE]) -> bool {
    *content == ZERO_PAGE
}

/// The 32-bit word of which `content` consists, if it consists of one, as memory holds it; 0 for a page of
/// zeros.
#[must_use]
pub fn repeated_word(content: &[u8; PAGE]) -> Option<u32> {
    let (first, rest) = content.split_first_chunk::<4>()?;
    // Nearly all other pages differ here.
    if rest.first_chunk::<4>() != Some(first) {
        return None;
    }
    // Equal to itself moved by two words.
    (content[8..] == content[..PAGE - 8]).then(|| u32::from_ne_bytes(*first))
}

/// The page that consists of `word`.
pub fn fill_with_word(word: u32, into: &mut [u8; PAGE]) {
    for part in into.as_chunks_mut::<4>().0 {
        *part = word.to_ne_bytes();
    }
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
        seal(seed, page, stored);
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
    form: Form,
    stored: &[u8],
    into: &mut [u8; PAGE],
) -> Result<(), &'static str> {
    let Some((crc, body)) = stored.split_first_chunk::<CRC_BYTES>() else {
        return Err("it is too short to hold its CRC");
    };
    if seed.crc(page, body) != u32::from_le_bytes(*crc) {
        return Err("its CRC-32C does not match");
    }
    match form {
        Form::Zstd => zstd::decompress(body, into),
        Form::Uncompressed if body.len() == PAGE => {
            into.copy_from_slice(body);
            Ok(())
        }
        Form::Uncompressed => Err("it has not the size of a page"),
        Form::Lz4 => match lz4::block::decompress_to_buffer(body, Some(4096), into) {
            Ok(PAGE) => Ok(()),
            Ok(_) | Err(_) => Err("it does not decompress to a page"),
        },
    }
}

/// The form of what a [`Packer`] has packed.
#[must_use]
pub const fn form_of(stored: &[u8]) -> Form {
    match stored.len() {
        STORED_BYTES_MAX => Form::Uncompressed,
        _ => Form::Lz4,
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
            unpack(SEED, page, form_of(&stored), &stored, &mut back).unwrap();
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
                unpack(SEED, PageNo(5), Form::Lz4, &damaged, &mut into).is_err(),
                "bit {bit}"
            );
        }
        assert!(unpack(SEED, PageNo(6), Form::Lz4, &stored, &mut into).is_err());
        assert!(unpack(Seed(1), PageNo(5), Form::Lz4, &stored, &mut into).is_err());
        for length in 0..stored.len() {
            assert!(unpack(SEED, PageNo(5), Form::Lz4, &stored[..length], &mut into).is_err());
        }
    }

    /// Against the definition, for every single byte that differs.
    #[test]
    fn page_of_one_word_is_known_and_comes_back_and_any_other_page_is_not() {
        let mut random = SplitMix64::new(8);
        for _ in 0..50 {
            let word = match random.below(3) {
                0 => 0,
                1 => u32::from_ne_bytes([random.next_u64().to_le_bytes()[0]; 4]),
                _ => u32::try_from(random.below(1 << 32)).unwrap(),
            };
            let mut page = [0; PAGE];
            fill_with_word(word, &mut page);
            assert_eq!(repeated_word(&page), Some(word));
            assert_eq!(is_zero(&page), word == 0);
            for at in (0..PAGE).step_by(1 + random.index(7)) {
                page[at] ^= 1 << random.below(8);
                assert_eq!(repeated_word(&page), None, "{word:#x}, {at}");
                fill_with_word(word, &mut page);
            }
        }
        // Two words in turn are not one.
        let pairs: [u8; PAGE] = std::array::from_fn(|at| [1, 2, 3, 4, 5, 6, 7, 8][at % 8]);
        assert_eq!(repeated_word(&pairs), None);
    }
}
