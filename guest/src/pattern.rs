// SPDX-License-Identifier: Apache-2.0
//! Page content that follows from a key, cheap to make and cheap to check.
//!
//! A checker that costs more than the memory it checks would measure itself,
//! and under software emulation every instruction costs ten. So a page is 512
//! words taken from a table of 16 that belongs to the page's key, one table
//! look-up a word. That makes it
//! - **unique**: the table is a mix of seed, number and generation, so another
//!   page, an older generation and a torn mixture of two all differ;
//! - **compressible** like real memory (about 4:1 with lz4), with one page in
//!   four all zeros and one in sixteen incompressible, so that every tier and
//!   its refusals see traffic.

/// Words of a 4 KiB page.
pub const PAGE_WORDS: usize = 512;
/// Bytes of a page and of a disk block.
pub const PAGE_BYTES: usize = PAGE_WORDS * 8;

/// Mixes a number so that neighbours have nothing in common (splitmix64's finalizer).
#[must_use]
pub const fn mix(number: u64) -> u64 {
    let a = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}

/// The key of page `number` in its `generation` under `seed`.
#[must_use]
pub const fn key(seed: u64, number: u64, generation: u32) -> u64 {
    mix(mix(seed ^ mix(number)) ^ generation as u64)
}

/// The kind of content for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All zeros.
    Zero,
    /// Words of a small table, then runs of them: compressible.
    Text,
    /// No structure a compressor would find.
    Noise,
}

/// The kind of the page with `key`: of 16 pages 4 are zero and 1 is noise.
#[must_use]
pub const fn kind(key: u64) -> Kind {
    match key >> 60 {
        0..=3 => Kind::Zero,
        4 => Kind::Noise,
        _ => Kind::Text,
    }
}

/// The first difference between a page and its expected content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Index of the word in the page.
    pub word: usize,
    /// The expected word.
    pub want: u64,
    /// The word found.
    pub got: u64,
}

/// Fills `page` with the content of `key`.
pub fn fill(page: &mut [u64], key: u64) {
    if kind(key) == Kind::Zero {
        page.fill(0);
    } else {
        fill_nonzero(page, key);
    }
}

/// Compares `page` with the content of `key`.
///
/// # Errors
/// The first word that differs.
pub fn check(page: &[u64], key: u64) -> Result<(), Mismatch> {
    if kind(key) == Kind::Zero {
        check_zero(page)
    } else {
        check_nonzero(page, key)
    }
}

/// Fills `page` with the content of `key`, never with zeros: for disk blocks.
pub fn fill_nonzero(page: &mut [u64], key: u64) {
    each_word(page.len(), key, |index, word| {
        page[index] = word;
        true
    });
}

/// Compares `page` with the output of [`fill_nonzero`] for `key`.
///
/// # Errors
/// The first word that differs.
pub fn check_nonzero(page: &[u64], key: u64) -> Result<(), Mismatch> {
    let mut result = Ok(());
    each_word(page.len(), key, |index, want| {
        let got = page[index];
        if got != want {
            result = Err(Mismatch {
                word: index,
                want,
                got,
            });
        }
        got == want
    });
    result
}

/// Compares `page` with zeros.
///
/// # Errors
/// The first word that is not zero.
pub fn check_zero(page: &[u64]) -> Result<(), Mismatch> {
    match page.iter().position(|&word| word != 0) {
        None => Ok(()),
        Some(word) => Err(Mismatch {
            word,
            want: 0,
            got: page[word],
        }),
    }
}

/// Folds words into a checksum that depends on their order.
#[must_use]
pub fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0x7061_6765_7469_6465, |sum, &word| {
        (sum.rotate_left(5) ^ word).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[inline]
fn each_word(words: usize, key: u64, mut visit: impl FnMut(usize, u64) -> bool) {
    let mut state = key | 1;
    if kind(key) == Kind::Noise {
        for index in 0..words {
            state = step(state);
            if !visit(index, state) {
                return;
            }
        }
        return;
    }
    let table: [u64; 16] = std::array::from_fn(|index| mix(key ^ ((index as u64) << 8)));
    // First half: words in random order. Second half: each of a few words in a row.
    for group in 0..words.div_ceil(16) {
        state = step(state);
        let random = group * 32 < words;
        for lane in 0..16.min(words - group * 16) {
            let choice = if random { state >> (lane * 4) } else { state };
            if !visit(group * 16 + lane, table[(choice & 15) as usize]) {
                return;
            }
        }
    }
}

/// One step of xorshift64.
#[must_use]
pub const fn step(state: u64) -> u64 {
    let a = state ^ (state << 13);
    let b = a ^ (a >> 7);
    b ^ (b << 17)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_page_checks_with_its_own_key_only() {
        let mut page = [0; PAGE_WORDS];
        for number in 0..200 {
            let own = key(7, number, 3);
            fill(&mut page, own);
            assert_eq!(check(&page, own), Ok(()));
            for other in [key(7, number + 1, 3), key(7, number, 4), key(8, number, 3)] {
                let both_zero = kind(own) == Kind::Zero && kind(other) == Kind::Zero;
                assert_eq!(check(&page, other).is_ok(), both_zero, "page {number}");
            }
        }
    }

    #[test]
    fn one_flipped_bit_anywhere_is_found_at_its_word() {
        let text = (0..)
            .map(|number| key(1, number, 0))
            .find(|&key| kind(key) == Kind::Text);
        let text = text.expect("eleven of sixteen keys are text");
        let mut page = [0; PAGE_WORDS];
        for word in 0..PAGE_WORDS {
            fill(&mut page, text);
            page[word] ^= 1 << (word % 64);
            assert_eq!(check(&page, text).expect_err("a bit is wrong").word, word);
        }
    }

    #[test]
    fn kinds_appear_in_their_shares() {
        let count = |wanted| {
            (0..16_000)
                .filter(|&n| kind(key(1, n, 0)) == wanted)
                .count()
        };
        assert!((3_700..4_300).contains(&count(Kind::Zero)));
        assert!((850..1_150).contains(&count(Kind::Noise)));
    }

    #[test]
    fn text_pages_compress_about_four_to_one() {
        let mut page = [0; PAGE_WORDS];
        let (mut raw, mut packed) = (0, 0);
        for number in 0..256 {
            let key = key(1, number, 0);
            if kind(key) == Kind::Text {
                fill(&mut page, key);
                let bytes: Vec<u8> = page.iter().flat_map(|word| word.to_le_bytes()).collect();
                raw += bytes.len();
                packed += lz4_flex::block::compress(&bytes).len();
            }
        }
        assert!(
            packed * 10 < raw * 4 && packed * 10 > raw,
            "{packed} of {raw} bytes"
        );
    }

    #[test]
    fn checksum_depends_on_order() {
        assert_ne!(checksum(&[1, 2, 3]), checksum(&[1, 3, 2]));
    }
}
