// SPDX-License-Identifier: Apache-2.0
//! The expected content of a bare guest's pages, implemented independently of the guest's own
//! source.
//!
//! The guest compares only stamps and noise, since a whole page takes a millisecond where KVM
//! emulates the guest. From outside, every byte is compared; this also finds content that the guest
//! accepted in error.

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
const WORDS: usize = PAGE_BYTES / 4;
const STAMP_WORDS: usize = 128;
/// Even: no two pages have the same stamps.
const NUMBER: u32 = 0x7feb_352e;
const KINDS: u32 = 64;
const NOISE_KIND: u32 = 1;

/// Computes what pages hold.
#[derive(Debug)]
pub struct Content {
    noise: Vec<u32>,
}

/// A word that differs from the expected one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("word {word} is {found:#x} instead of {wanted:#x} (version {version})")]
pub struct WrongWord {
    /// Its index in the page.
    pub word: usize,
    /// The word found.
    pub found: u32,
    /// The expected word.
    pub wanted: u32,
    /// The page's version.
    pub version: u32,
}

impl Default for Content {
    fn default() -> Self {
        let mut word: u32 = 0x2545_f491;
        let noise = (0..2 * WORDS).map(|_| {
            word ^= word << 13;
            word ^= word >> 17;
            word ^= word << 5;
            word
        });
        Self {
            noise: noise.collect(),
        }
    }
}

impl Content {
    fn word(&self, page: u32, version: u32, at: usize) -> u32 {
        if at.is_multiple_of(STAMP_WORDS) {
            let multiple = u32::try_from(2 * (at / STAMP_WORDS) + 1).unwrap_or(0);
            let first = page.wrapping_mul(NUMBER).wrapping_add(1);
            return first.wrapping_mul(version).wrapping_mul(multiple);
        }
        if page % KINDS != NOISE_KIND {
            return 0;
        }
        let from = page / KINDS % 1024;
        self.noise[from as usize + at]
    }

    /// Compares each byte of `page`.
    ///
    /// # Errors
    /// The first word that is wrong.
    pub fn compare(
        &self,
        page: u32,
        version: u32,
        found: &[u8; PAGE_BYTES],
    ) -> Result<(), WrongWord> {
        for (at, bytes) in found.as_chunks::<4>().0.iter().enumerate() {
            let (found, wanted) = (u32::from_le_bytes(*bytes), self.word(page, version, at));
            if found != wanted {
                return Err(WrongWord {
                    word: at,
                    found,
                    wanted,
                    version,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(content: &Content, page: u32, version: u32) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        for (at, word) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *word = content.word(page, version, at).to_le_bytes();
        }
        bytes
    }

    #[test]
    fn content_of_another_page_or_version_is_wrong_and_one_wrong_word_is_found() {
        let content = Content::default();
        for page in [0, 1, 2, 64, 65, 129, 524_287] {
            let mut found = bytes(&content, page, 7);
            assert_eq!(content.compare(page, 7, &found), Ok(()));
            for (other, version) in [(page + 1, 7), (page + 64, 7), (page, 6), (page, 0)] {
                assert!(content.compare(other, version, &found).is_err(), "{page}");
            }
            found[4095] ^= 1;
            let wrong = content.compare(page, 7, &found).unwrap_err();
            assert_eq!(wrong.word, 1023);
        }
    }

    #[test]
    fn pages_are_zeros_and_noise_where_they_should() {
        let content = Content::default();
        assert!(bytes(&content, 64, 0).iter().all(|byte| *byte == 0));
        let zeros = |page| {
            bytes(&content, page, 1)
                .iter()
                .filter(|byte| **byte == 0)
                .count()
        };
        assert!(zeros(1) < 200);
        assert!(zeros(2) > 4000);
    }
}
