// SPDX-License-Identifier: Apache-2.0
//! Detects the format of a block trace. Most have no magic number, so their first records are checked for
//! plausibility.

use std::io::Read;
use std::path::Path;

use super::binary::{ORACLE_BYTES, VSCSI_BYTES, bytes, fill, oracle_next_is_sound, vscsi_command};
use super::{BlockFormat, ids, mqsim, srt};

/// Bytes of a file that are examined.
pub(super) const HEAD_BYTES: usize = 64 << 10;

/// Most records that are examined.
const RECORDS: usize = 256;

/// Fewest records to detect `oracle-general`: its numbers are weak evidence.
const ORACLE_RECORDS_MIN: usize = 2;

/// Largest plausible request when a format is guessed.
const REQUEST_BYTES_MAX: u32 = 1 << 30;

/// The first bytes of `input`, [`HEAD_BYTES`] unless it ends before.
pub(super) fn head_of(input: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut head = vec![0; HEAD_BYTES];
    let read = fill(input, &mut head)?;
    head.truncate(read);
    Ok(head)
}

/// The compression of a file that begins with `head`, and the tool that unpacks it.
pub(super) fn compression(head: &[u8]) -> Option<(&'static str, &'static str)> {
    const KNOWN: [(&[u8], &str, &str); 4] = [
        (b"\xfd7zXZ\0", "xz", "xz -d"),
        (b"\x1f\x8b", "gzip", "gzip -d"),
        (b"\x28\xb5\x2f\xfd", "zstd", "zstd -d"),
        (b"BZh", "bzip2", "bzip2 -d"),
    ];
    KNOWN
        .into_iter()
        .find(|(magic, ..)| head.starts_with(magic))
        .map(|(_, name, command)| (name, command))
}

/// The format of a file that begins with `head`: by its content, or else by its name, since a broken file
/// of a known name gets the best error from its own reader.
pub(super) fn detect(path: &Path, head: &[u8]) -> Option<BlockFormat> {
    by_content(head).or_else(|| by_name(path).filter(|_| !head.is_empty()))
}

fn by_content(head: &[u8]) -> Option<BlockFormat> {
    if head.starts_with(srt::MAGIC) {
        return Some(BlockFormat::HpSrt);
    }
    if is_text(head) {
        let line = head
            .split(|byte| *byte == b'\n')
            .find(|line| !line.trim_ascii().is_empty())?;
        return mqsim::numbers(line).is_ok().then_some(BlockFormat::Mqsim);
    }
    if is_vscsi(head) {
        return Some(BlockFormat::Vscsi);
    }
    if is_oracle(head) {
        return Some(BlockFormat::OracleGeneral);
    }
    ids::is_list(head).then_some(BlockFormat::BlockIds)
}

fn by_name(path: &Path) -> Option<BlockFormat> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    if name.ends_with(".vscsi") {
        Some(BlockFormat::Vscsi)
    } else if name.contains("oraclegeneral") {
        Some(BlockFormat::OracleGeneral)
    } else if name.ends_with(".srt") {
        Some(BlockFormat::HpSrt)
    } else {
        None
    }
}

fn is_text(head: &[u8]) -> bool {
    head.iter()
        .all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace())
}

fn is_vscsi(head: &[u8]) -> bool {
    let (records, _) = head.as_chunks::<VSCSI_BYTES>();
    !records.is_empty()
        && records
            .iter()
            .take(RECORDS)
            .all(|record| vscsi_command(record).is_ok())
}

fn is_oracle(head: &[u8]) -> bool {
    let (records, _) = head.as_chunks::<ORACLE_BYTES>();
    let mut last = 0;
    records.len() >= ORACLE_RECORDS_MIN
        && records
            .iter()
            .take(RECORDS)
            .enumerate()
            .all(|(number, record)| {
                let time = u32::from_le_bytes(bytes(record, 0));
                let size = u32::from_le_bytes(bytes(record, 12));
                let in_order = time >= last;
                last = time;
                in_order
                    && (1..=REQUEST_BYTES_MAX).contains(&size)
                    && oracle_next_is_sound(record, number as u64)
            })
}
