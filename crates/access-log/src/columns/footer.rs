// SPDX-License-Identifier: Apache-2.0
//! Checks a Parquet file's footer before the `parquet` crate reads it.
//!
//! The crate builds the schema by recursion, one call a level. A footer of a hundred kilobytes can nest
//! groups deep enough to overflow the stack, which ends the process and cannot be caught. A schema is no
//! deeper than its number of elements, and that number is near the footer's beginning:
//!
//! ```text
//!   … row groups │ FileMetaData (Thrift, compact protocol) │ its length, u32 │ PAR1
//!                  0x15 version  0x19 size, type of elements, elements …
//!                  field 1: i32  field 2: list of SchemaElement
//! ```
//! The crate uses the first field 2 it finds and only the numbers of fields, not their types. So only a
//! footer that begins with exactly these two is accepted, as every writer's does; then the crate and this
//! check read the same size.

use std::fs::File;
use std::io::{Read, Result as IoResult, Seek, SeekFrom};

/// Most elements of a schema. A trace has eight; other columns may be added, and this many calls use a
/// small part of any thread's stack.
const SCHEMA_ELEMENTS_MAX: u64 = 256;

/// Length and magic at the end of the file.
const TAIL_BYTES: u64 = 8;

/// Largest size of two fields, with numbers of up to ten bytes.
const START_BYTES: u64 = 32;

/// Field 1 (one after 0) of type i32.
const VERSION_FIELD: u8 = 0x15;
/// Field 2 (one after 1) of type list.
const SCHEMA_FIELD: u8 = 0x19;
/// Type of an element that is a structure.
const STRUCT: u8 = 12;
/// Size of a list that is given by a number after it.
const SIZE_APART: u8 = 15;

/// Checks that the schema in the footer of `file` has few elements.
pub(super) fn check(file: &mut File) -> Result<(), String> {
    match start(file).map_err(|error| error.to_string())? {
        // Too short, or without the magic: the crate gives a better error.
        None => Ok(()),
        Some(start) => match schema_elements(&start) {
            Some(0..=SCHEMA_ELEMENTS_MAX) => Ok(()),
            Some(count) => Err(format!(
                "its schema has {count} elements; a trace with more than {SCHEMA_ELEMENTS_MAX} is none of ours"
            )),
            None => Err("its footer does not begin with a version and a schema".to_owned()),
        },
    }
}

/// First bytes of the footer; `None` if there is none. Leaves the file at its beginning.
fn start(file: &mut File) -> IoResult<Option<Vec<u8>>> {
    let length = file.seek(SeekFrom::End(0))?;
    let Some(tail_at) = length.checked_sub(TAIL_BYTES) else {
        return Ok(None);
    };
    let mut tail = [0; 8];
    file.seek(SeekFrom::Start(tail_at))?;
    file.read_exact(&mut tail)?;
    let [a, b, c, d, magic @ ..] = tail;
    let bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
    let mut start = None;
    if let Some(at) = tail_at.checked_sub(bytes).filter(|_| magic == *b"PAR1") {
        let mut first = Vec::new();
        file.seek(SeekFrom::Start(at))?;
        file.take(bytes.min(START_BYTES)).read_to_end(&mut first)?;
        start = Some(first);
    }
    file.rewind()?;
    Ok(start)
}

/// Number of elements of the schema in a footer that begins with `start`.
fn schema_elements(start: &[u8]) -> Option<u64> {
    let (_, rest) = varint(start.strip_prefix(&[VERSION_FIELD])?)?;
    let (head, rest) = rest.strip_prefix(&[SCHEMA_FIELD])?.split_first()?;
    if head & 0xf != STRUCT {
        return None;
    }
    match head >> 4 {
        SIZE_APART => varint(rest).map(|(count, _)| count),
        count => Some(count.into()),
    }
}

/// A number of seven bits a byte, the lowest first, and the bytes after it; `None` if it is truncated or
/// has more than 63 bits.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let last = bytes.iter().take(9).position(|byte| byte & 0x80 == 0)?;
    let (number, rest) = bytes.split_at(last + 1);
    let value = number
        .iter()
        .rev()
        .fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f));
    Some((value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer with a schema of `depth` nested groups.
    fn nested(depth: usize) -> Vec<u8> {
        let mut footer = vec![VERSION_FIELD, 2, SCHEMA_FIELD, 0xfc];
        let mut count = depth;
        while count >= 0x80 {
            footer.push(u8::try_from(count & 0x7f).unwrap() | 0x80);
            count >>= 7;
        }
        footer.push(u8::try_from(count).unwrap());
        // Field 4: a name of one letter; field 5: one child.
        footer.extend([0x48, 1, b'g', 0x15, 2, 0].repeat(depth));
        footer.push(0);
        footer
    }

    #[test]
    fn elements_are_counted_in_either_form_of_a_list() {
        assert_eq!(schema_elements(&nested(5)), Some(5));
        assert_eq!(schema_elements(&nested(1_000_000)), Some(1_000_000));
        assert_eq!(schema_elements(&[0x15, 2, 0x19, 0x8c, 0x48]), Some(8));
    }

    #[test]
    fn footer_that_begins_otherwise_is_not_understood() {
        for start in [
            &[][..],
            &[0x15],
            &[0x19, 0x8c],
            &[0x16, 2, 0x19, 0x8c],
            &[0x15, 2, 0x29, 0x8c],
            &[0x15, 2, 0x19, 0x88],
            &[0x15, 2, 0x19, 0xfc],
            &[0x15, 2, 0x19, 0xfc, 0x80],
        ] {
            assert_eq!(schema_elements(start), None, "{start:x?}");
        }
        let endless = [[0x15].as_slice(), &[0x80; 30]].concat();
        assert_eq!(schema_elements(&endless), None);
    }

    #[test]
    fn file_of_hostile_depth_is_an_error_and_not_the_end_of_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep");
        let footer = nested(1_000_000);
        let length = u32::try_from(footer.len()).unwrap().to_le_bytes();
        let bytes = [b"PAR1", footer.as_slice(), &length, b"PAR1"].concat();
        std::fs::write(&path, bytes).unwrap();
        let error = crate::AccessLogReader::open(&path)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("1000000 elements"), "{error}");
    }
}
