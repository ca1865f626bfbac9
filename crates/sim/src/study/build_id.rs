// SPDX-License-Identifier: Apache-2.0
//! The build id that the linker leaves in a program: a note of the ELF file that differs whenever the linked
//! content does. Reading it takes two reads; hashing the program takes a quarter of a second.
//!
//! ```text
//!   ELF header ─► program headers ─► segments of notes ─► note "GNU", type 3: the id
//! ```
//! Only little-endian files of 64 bits are read, which is what this program is.

use std::io::{Read, Seek, SeekFrom};

/// Most bytes of program headers and of a segment of notes: they have some hundred.
const PART_BYTES_MAX: u64 = 1 << 16;

const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const SEGMENT_OF_NOTES: u32 = 4;
const NOTE_BUILD_ID: u32 = 3;

/// The build id of the ELF file in `file`; `None` if it has none, or is no such file.
pub(super) fn build_id(file: &mut (impl Read + Seek)) -> Option<Vec<u8>> {
    let header = part(file, 0, HEADER_BYTES as u64)?;
    // 64 bits, little-endian.
    if !header.starts_with(b"\x7fELF\x02\x01")
        || usize::from(word16(&header, 54)?) != PROGRAM_HEADER_BYTES
    {
        return None;
    }
    let count = usize::from(word16(&header, 56)?);
    let bytes = (count * PROGRAM_HEADER_BYTES) as u64;
    let segments = part(file, word64(&header, 32)?, bytes)?;
    segments
        .chunks_exact(PROGRAM_HEADER_BYTES)
        .filter(|segment| word32(segment, 0) == Some(SEGMENT_OF_NOTES))
        .find_map(|segment| {
            let notes = part(file, word64(segment, 8)?, word64(segment, 32)?)?;
            id_among(&notes)
        })
}

/// The build id among notes: each has the lengths of its name and content and its type, then both, padded to
/// four bytes.
fn id_among(mut notes: &[u8]) -> Option<Vec<u8>> {
    while !notes.is_empty() {
        let (name_bytes, id_bytes) = (word32(notes, 0)? as usize, word32(notes, 4)? as usize);
        let kind = word32(notes, 8)?;
        let name = notes.get(12..)?.get(..name_bytes)?;
        let rest = notes.get(12 + name_bytes.next_multiple_of(4)..)?;
        let id = rest.get(..id_bytes)?;
        if name == b"GNU\0" && kind == NOTE_BUILD_ID && !id.is_empty() {
            return Some(id.to_vec());
        }
        notes = rest.get(id_bytes.next_multiple_of(4)..)?;
    }
    None
}

fn part(file: &mut (impl Read + Seek), at: u64, bytes: u64) -> Option<Vec<u8>> {
    if bytes > PART_BYTES_MAX {
        return None;
    }
    let sought = file.seek(SeekFrom::Start(at)).is_ok();
    let mut part = Vec::new();
    let read = sought && file.take(bytes).read_to_end(&mut part).is_ok();
    (read && part.len() as u64 == bytes).then_some(part)
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_le_bytes(*word))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*word))
}

fn word64(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A file of nothing but a header, a segment of notes, and two notes.
    fn program() -> Vec<u8> {
        let mut notes = Vec::new();
        for (name, kind, content) in [
            (&b"GNU\0"[..], 1_u32, &b"0123456789abcdef"[..]),
            (b"GNU\0", NOTE_BUILD_ID, b"the id"),
        ] {
            for word in [
                u32::try_from(name.len()).unwrap(),
                u32::try_from(content.len()).unwrap(),
                kind,
            ] {
                notes.extend(word.to_le_bytes());
            }
            notes.extend(name);
            notes.extend(content);
            notes.resize(notes.len().next_multiple_of(4), 0);
        }
        let mut file = vec![0; HEADER_BYTES + PROGRAM_HEADER_BYTES];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        file[64] = 4;
        file[72] = 120;
        file[64 + 32] = u8::try_from(notes.len()).unwrap();
        file.extend(notes);
        file
    }

    #[test]
    fn id_is_found_among_other_notes() {
        let id = build_id(&mut Cursor::new(program()));
        assert_eq!(id.as_deref(), Some(&b"the id"[..]));
    }

    #[test]
    fn file_with_any_byte_changed_or_cut_short_is_read_safely() {
        let whole = program();
        for at in 0..whole.len() {
            build_id(&mut Cursor::new(&whole[..at]))
                .ok_or(())
                .unwrap_err();
            for change in [0x01, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[at] ^= change;
                let id = build_id(&mut Cursor::new(changed));
                assert!(id.is_none_or(|id| id.len() < 100));
            }
        }
        assert_eq!(build_id(&mut Cursor::new(b"#!/bin/sh")), None);
    }
}
