// SPDX-License-Identifier: Apache-2.0
//! The bytes of a record, version 1: words of 8 bytes, little-endian.
//!
//! ```text
//!   word 0   "PTRXHELD", or 0: empty
//!        1   u16 version = 1, u16 size, u16 queue, u16 words of the header = 8
//!        2   device number of the RAM file
//!        3   its inode
//!        4   address of the descriptors
//!        5   of the avail ring
//!        6   of the used ring
//!        7   u32 CRC of words 0 to 6, u32 0
//!        8   u48 entries of the used ring from its beginning, u16 check
//!        9…15 0
//!   16 + 2h  u32 low half of the sequence number, u32 CRC; 0: not held      the buffer with head h
//!       + 1  u32 high half of the sequence number, u32 CRC of the descriptor
//! ```
//! CRCs are CRC-32C. That of an entry begins with that of the header, and is over head, sequence
//! number and the descriptor's CRC; 1 stands for 0. The check of word 8 is the two halves, combined
//! by exclusive or, of one that begins alike and is over the six bytes before it.
//!
//! Header, counter and entries are on cache lines of their own: the header is never written while
//! the ring is served, the counter with each batch, entries rarely.

use super::{Refusal, Tie, Words};

/// Words of the header.
pub(super) const HEADER_WORDS: usize = 8;
/// The word that counts entries of the used ring.
pub(super) const RETURNED_WORD: usize = 8;
const FIRST_ENTRY: usize = 16;
const ENTRY_WORDS: usize = 2;
const MAGIC: u64 = u64::from_le_bytes(*b"PTRXHELD");
const VERSION: u16 = 1;
/// Bits of the counter.
const RETURNED_BITS: u32 = 48;

/// Words of a record for a ring of the largest size.
pub const RECORD_WORDS_MAX: usize = record_words(1 << 15);

/// Words of a record for a ring of `size` descriptors.
#[must_use]
pub const fn record_words(size: u16) -> usize {
    FIRST_ENTRY + ENTRY_WORDS * size as usize
}

/// Where the entry of the buffer with that head is.
pub(super) fn entry_at(head: u16) -> usize {
    FIRST_ENTRY + ENTRY_WORDS * usize::from(head)
}

/// The header for a ring.
pub(super) fn header(tie: &Tie) -> [u64; HEADER_WORDS] {
    let mut words = [
        MAGIC,
        shape(VERSION, tie.size, tie.queue),
        tie.dev,
        tie.ino,
        tie.descriptors,
        tie.avail,
        tie.used,
        0,
    ];
    words[HEADER_WORDS - 1] = u64::from(header_crc(&words));
    words
}

fn shape(version: u16, size: u16, queue: u16) -> u64 {
    u64::from(version)
        | u64::from(size) << 16
        | u64::from(queue) << 32
        | (HEADER_WORDS as u64) << 48
}

/// The CRC of the words before it.
pub(super) fn header_crc(words: &[u64; HEADER_WORDS]) -> u32 {
    let [before @ .., _] = words;
    before.iter().fold(0, |crc, word| append(crc, *word))
}

/// Checks that the header is that for `tie`; returns its CRC.
pub(super) fn check_header(words: &impl Words, tie: &Tie) -> Result<u32, Refusal> {
    if !tie.size.is_power_of_two() || words.count() < record_words(tie.size) {
        return Err(Refusal::Another("its size"));
    }
    let mut found = [0; HEADER_WORDS];
    for (at, word) in found.iter_mut().enumerate() {
        *word = words.load(at);
    }
    if found[0] == 0 {
        return Err(Refusal::Empty);
    }
    if found[0] != MAGIC {
        return Err(Refusal::Damaged("it is no record"));
    }
    let crc = header_crc(&found);
    if found[HEADER_WORDS - 1] != u64::from(crc) {
        return Err(Refusal::Damaged("the header"));
    }
    let [version, ..] = halves(found[1]);
    if version != VERSION {
        return Err(Refusal::Version(version));
    }
    let wanted = header(tie);
    let names = [
        "what it is",
        "its size or queue",
        "the RAM file",
        "the RAM file",
        "the place of its descriptors",
        "the place of the avail ring",
        "the place of the used ring",
        "the header",
    ];
    for ((found, wanted), name) in found.iter().zip(wanted).zip(names) {
        if *found != wanted {
            return Err(Refusal::Another(name));
        }
    }
    Ok(crc)
}

/// The word that counts entries of the used ring.
pub(super) fn seal_returned(tie_crc: u32, returned: u64) -> u64 {
    let count = returned & ((1 << RETURNED_BITS) - 1);
    count | u64::from(check(tie_crc, count)) << RETURNED_BITS
}

/// The count in such a word, if it is one.
pub(super) fn open_returned(tie_crc: u32, word: u64) -> Option<u64> {
    let count = word & ((1 << RETURNED_BITS) - 1);
    (seal_returned(tie_crc, count) == word).then_some(count)
}

fn check(tie_crc: u32, count: u64) -> u16 {
    let [a, b, c, d, e, f, _, _] = count.to_le_bytes();
    let crc = crc32c::crc32c_append(tie_crc, &[a, b, c, d, e, f]);
    let [a, b, c, d] = crc.to_le_bytes();
    u16::from_le_bytes([a ^ c, b ^ d])
}

/// A buffer that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub sequence: u64,
    /// CRC of the descriptor with which it begins.
    fingerprint: u32,
}

impl Entry {
    pub fn new(sequence: u64, descriptor: &[u8; 16]) -> Self {
        Self {
            sequence,
            fingerprint: crc32c::crc32c(descriptor),
        }
    }

    /// True if the buffer begins with that descriptor.
    pub fn is_for(&self, descriptor: &[u8; 16]) -> bool {
        self.fingerprint == crc32c::crc32c(descriptor)
    }

    /// Its words; the first is not 0.
    pub fn words(&self, tie_crc: u32, head: u16) -> [u64; 2] {
        let half = (1_u64 << 32) - 1;
        let crc = u64::from(self.crc(tie_crc, head));
        [
            self.sequence & half | crc << 32,
            self.sequence >> 32 | u64::from(self.fingerprint) << 32,
        ]
    }

    /// The entry in these words, if there is one.
    pub fn open(tie_crc: u32, head: u16, words: [u64; 2]) -> Option<Self> {
        let [low, _] = split(words[0]);
        let [high, fingerprint] = split(words[1]);
        let entry = Self {
            sequence: u64::from(low) | u64::from(high) << 32,
            fingerprint,
        };
        (entry.words(tie_crc, head) == words).then_some(entry)
    }

    fn crc(&self, tie_crc: u32, head: u16) -> u32 {
        let crc = crc32c::crc32c_append(tie_crc, &head.to_le_bytes());
        let crc = append(crc, self.sequence);
        crc32c::crc32c_append(crc, &self.fingerprint.to_le_bytes()).max(1)
    }
}

fn append(crc: u32, word: u64) -> u32 {
    crc32c::crc32c_append(crc, &word.to_le_bytes())
}

fn split(word: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [[a, b, c, d], [e, f, g, h]].map(u32::from_le_bytes)
}

fn halves(word: u64) -> [u16; 4] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [[a, b], [c, d], [e, f], [g, h]].map(u16::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::{super::HeldRecord, *};
    use crate::net::record::model::Cells;

    const TIE: Tie = Tie {
        dev: 0x1a,
        ino: 0x0123_4567,
        descriptors: 0x1_0000_0000,
        avail: 0x1_0000_1000,
        used: 0x1_0000_2000,
        queue: 2,
        size: 4,
    };

    /// Version 1 must be read by every later program.
    const GOLDEN: &str = include_str!("golden.txt");

    fn golden() -> Vec<u64> {
        let words = GOLDEN.split_whitespace();
        words
            .map(|word| u64::from_str_radix(word, 16).unwrap())
            .collect()
    }

    #[test]
    fn record_is_written_as_the_golden_bytes() {
        let cells = Cells::zeros(record_words(4));
        let mut record = HeldRecord::begin(cells, &TIE, 0xfffe).unwrap();
        record.hold(3, 0xffff, &[7; 16]);
        record.hold(0, 2, &[9; 16]);
        record.hold(1, 0xfffe, &[1; 16]);
        record.settle([1], 0xffff);
        let cells = record.words().snapshot();
        let text: Vec<String> = cells.iter().map(|word| format!("{word:016x}")).collect();
        assert_eq!(text.join("\n"), GOLDEN.trim(), "what is written");
    }

    #[test]
    fn golden_bytes_are_read() {
        let words = Cells::of(golden());
        let crc = check_header(&words, &TIE).unwrap();
        assert_eq!(
            open_returned(crc, words.load(RETURNED_WORD)),
            Some(0xffff),
            "returned"
        );
        let entry = |head| {
            let at = entry_at(head);
            Entry::open(crc, head, [words.load(at), words.load(at + 1)])
        };
        assert_eq!(entry(3), Some(Entry::new(0xffff, &[7; 16])));
        assert_eq!(entry(0), Some(Entry::new(0x1_0002, &[9; 16])));
        assert_eq!((entry(1), entry(2)), (None, None));
    }

    #[test]
    fn any_changed_bit_is_noticed() {
        let golden = golden();
        for (at, word) in golden.iter().enumerate() {
            for bit in 0..64 {
                let mut changed = golden.clone();
                changed[at] = word ^ 1 << bit;
                let words = Cells::of(changed);
                let is_noticed = match at {
                    0..HEADER_WORDS => check_header(&words, &TIE).is_err(),
                    RETURNED_WORD => {
                        let crc = check_header(&words, &TIE).unwrap();
                        open_returned(crc, words.load(at)).is_none()
                    }
                    FIRST_ENTRY.. => {
                        let crc = check_header(&words, &TIE).unwrap();
                        let head = u16::try_from((at - FIRST_ENTRY) / 2).unwrap();
                        let at = entry_at(head);
                        let found = [words.load(at), words.load(at + 1)];
                        // The second word of a buffer that is not held means nothing.
                        found[0] == 0 || Entry::open(crc, head, found).is_none()
                    }
                    _ => true,
                };
                assert!(is_noticed, "bit {bit} of word {at}");
            }
        }
    }

    #[test]
    fn another_ring_is_told_from_damage() {
        let words = Cells::of(golden());
        for tie in [
            Tie { dev: 0x1b, ..TIE },
            Tie { ino: 1, ..TIE },
            Tie {
                descriptors: 0,
                ..TIE
            },
            Tie { avail: 0, ..TIE },
            Tie { used: 0, ..TIE },
            Tie { queue: 0, ..TIE },
            Tie { size: 2, ..TIE },
            Tie { size: 8, ..TIE },
            Tie { size: 3, ..TIE },
        ] {
            let found = check_header(&words, &tie);
            assert!(matches!(found, Err(Refusal::Another(_))), "{tie:?}");
        }
        // A later version, with a header that is right otherwise.
        let mut later = golden();
        later[1] += 1;
        let header: [u64; HEADER_WORDS] = later[..HEADER_WORDS].try_into().unwrap();
        later[7] = u64::from(header_crc(&header));
        let found = check_header(&Cells::of(later), &TIE);
        assert_eq!(found, Err(Refusal::Version(2)));
        let empty = Cells::zeros(record_words(4));
        assert_eq!(check_header(&empty, &TIE), Err(Refusal::Empty));
    }
}
