// SPDX-License-Identifier: Apache-2.0
//! Fixed-size records: how they are read, and the two formats that consist only of them.

use std::io::{BufReader, ErrorKind, Read};

use pagetide_addr::Access;

use super::{BlockRequest, Decoder, Input, Wrong};

/// Bytes read at once.
const READ_BYTES: usize = 256 << 10;

/// Bytes of a sector, where formats count in sectors.
pub(super) const SECTOR_BYTES: u64 = 512;

/// Bytes of a record of [`Vscsi`].
pub(super) const VSCSI_BYTES: usize = 32;

/// Bytes of a record of [`OracleGeneral`].
pub(super) const ORACLE_BYTES: usize = 24;

/// Records of `N` bytes, one after the other.
pub(super) struct Records<const N: usize> {
    input: BufReader<Input>,
    /// Records that were begun.
    begun: u64,
}

impl<const N: usize> Records<N> {
    pub(super) fn new(input: Input) -> Self {
        Self {
            input: BufReader::with_capacity(READ_BYTES, input),
            begun: 0,
        }
    }

    /// The next record, `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<[u8; N]>, Wrong> {
        let mut record = [0; N];
        self.begun += 1;
        match fill(&mut self.input, &mut record)? {
            0 => Ok(None),
            bytes if bytes == N => Ok(Some(record)),
            bytes => Err(cut_off(bytes, N)),
        }
    }

    /// Number of the record read last.
    pub(super) const fn number(&self) -> u64 {
        self.begun.saturating_sub(1)
    }
}

/// Reads until `buffer` is full or the input ends; bytes read.
pub(super) fn fill(input: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

pub(super) fn cut_off(bytes: usize, of: usize) -> Wrong {
    Wrong::Record(format!(
        "the file ends within it, after {bytes} of {of} bytes: it is cut off, or of another format"
    ))
}

/// The `N` bytes of `record` from `at` on. A record is always longer than that.
pub(super) fn bytes<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| record.get(at + i).copied().unwrap_or_default())
}

/// An offset on the disk, from a block number.
pub(super) fn offset(block: u64, block_bytes: u64) -> Result<u64, Wrong> {
    block
        .checked_mul(block_bytes)
        .ok_or_else(|| Wrong::Record(format!("block {block} lies past 2^64 bytes")))
}

/// VMware's records, first version.
pub(super) struct Vscsi(Records<VSCSI_BYTES>);

/// Version of the records.
const VSCSI_VERSION: u16 = 1 << 8;

/// The effect of a SCSI command on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Command {
    Read,
    Write,
    /// Carries no blocks: queries, waits, or discards blocks.
    Other,
}

/// The command of a record, if its version is known and its command is one of disks.
pub(super) fn vscsi_command(record: &[u8]) -> Result<Command, String> {
    let version = u16::from_le_bytes(bytes(record, 14));
    if version != VSCSI_VERSION {
        return Err(format!(
            "its version is {version:#06x}; only {VSCSI_VERSION:#06x} is read"
        ));
    }
    match u16::from_le_bytes(bytes(record, 12)) {
        // READ and WRITE of 6, 10, 12 and 16 bytes (SCSI Block Commands).
        0x08 | 0x28 | 0xa8 | 0x88 => Ok(Command::Read),
        0x0a | 0x2a | 0xaa | 0x8a => Ok(Command::Write),
        // TEST UNIT READY, REQUEST SENSE, INQUIRY, MODE SENSE, START STOP UNIT,
        // READ CAPACITY, SYNCHRONIZE CACHE, UNMAP, and their longer forms.
        0x00 | 0x03 | 0x12 | 0x1a | 0x5a | 0x1b | 0x25 | 0x9e | 0x35 | 0x91 | 0x42 => {
            Ok(Command::Other)
        }
        command => Err(format!("its SCSI command {command:#04x} is none of disks")),
    }
}

impl Vscsi {
    pub(super) fn new(input: Input) -> Self {
        Self(Records::new(input))
    }
}

impl Decoder for Vscsi {
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong> {
        loop {
            let Some(record) = self.0.next()? else {
                return Ok(None);
            };
            let access = match vscsi_command(&record).map_err(Wrong::Record)? {
                Command::Read => Access::Read,
                Command::Write => Access::Write,
                Command::Other => continue,
            };
            let time_us = u64::from_le_bytes(bytes(&record, 24));
            let time_ns = time_us.checked_mul(1000).ok_or_else(|| {
                Wrong::Record(format!("its time of {time_us} us is past 2^64 ns"))
            })?;
            return Ok(Some(BlockRequest {
                time_ns: Some(time_ns),
                device: 0,
                offset_bytes: offset(u64::from_le_bytes(bytes(&record, 16)), SECTOR_BYTES)?,
                len_bytes: u32::from_le_bytes(bytes(&record, 4)),
                access: Some(access),
            }));
        }
    }

    fn record(&self) -> u64 {
        self.0.number()
    }
}

/// libCacheSim's records.
///
/// Each announces the next request of its block, so even a trace truncated between two records is detected.
/// (Numbers are from 0 or from 1, depending on the writer.)
pub(super) struct OracleGeneral {
    records: Records<ORACLE_BYTES>,
    block_bytes: u32,
    /// Largest number of a request that was announced.
    announced: u64,
}

/// Index that means 'never again'.
const NEVER: i64 = -1;

/// The index of the block's next request is later, or there is none. In a real trace it has 32 bits; so
/// other data is seldom mistaken for one.
pub(super) fn oracle_next_is_sound(record: &[u8], number: u64) -> bool {
    let next = i64::from_le_bytes(bytes(record, 16));
    next == NEVER || u32::try_from(next).is_ok_and(|next| u64::from(next) > number)
}

impl OracleGeneral {
    pub(super) fn new(input: Input, block_bytes: u32) -> Self {
        Self {
            records: Records::new(input),
            block_bytes,
            announced: 0,
        }
    }

    /// Every announced request must have come.
    fn end(&self) -> Result<Option<BlockRequest>, Wrong> {
        let records = self.records.number();
        if self.announced > records {
            return Err(Wrong::Record(format!(
                "the file ends before it, and request {} is announced: it is cut off",
                self.announced
            )));
        }
        Ok(None)
    }
}

impl Decoder for OracleGeneral {
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong> {
        let Some(record) = self.records.next()? else {
            return self.end();
        };
        let next = i64::from_le_bytes(bytes(&record, 16));
        if next != NEVER {
            let next = u64::try_from(next).map_err(|_| {
                Wrong::Record(format!("its next request is number {next}, below zero"))
            })?;
            self.announced = self.announced.max(next);
        }
        let time_s = u32::from_le_bytes(bytes(&record, 0));
        Ok(Some(BlockRequest {
            time_ns: Some(u64::from(time_s) * 1_000_000_000),
            device: 0,
            offset_bytes: offset(
                u64::from_le_bytes(bytes(&record, 4)),
                self.block_bytes.into(),
            )?,
            len_bytes: u32::from_le_bytes(bytes(&record, 12)),
            access: None,
        }))
    }

    fn record(&self) -> u64 {
        self.records.number()
    }
}
