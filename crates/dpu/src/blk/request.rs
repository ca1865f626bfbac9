// SPDX-License-Identifier: Apache-2.0
//! Decoding block requests (virtio 1.2, 5.2.6), from header and buffers alone.
//!
//! A chain consists of a header of 16 bytes that the device reads, data, and one status byte that
//! the device writes, however it is split into descriptors. A chain without header or status byte
//! cannot be answered and stops the device. Every other error is answered with a status.

use crate::{
    blk::{
        config::{DISCARD_SECTORS_MAX, SECTOR_BYTES},
        image::Writes,
    },
    chain::{AnswerPlace, Layout},
    frame::{Frame, copy},
    memory::{DeviceMemory, OutsideMemory, Span},
};
use vm_memory::Bytes;

/// Bytes of a request's header.
pub(crate) const HEADER_BYTES: u32 = 16;
/// What a request consists of besides data.
pub(crate) const LAYOUT: Layout = Layout {
    header_bytes: HEADER_BYTES,
    answer: AnswerPlace::LastByte,
    data_bytes_max: DATA_BYTES_MAX,
};
/// Most bytes of data in a request. Drivers send a few MiB at most.
const DATA_BYTES_MAX: u64 = 64 << 20;
/// Bytes of the serial number that a GET_ID request reads.
pub const SERIAL_BYTES: usize = 20;
/// Bytes of one range of a discard or write-zeroes request.
const RANGE_BYTES: u32 = 16;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;
const FLAG_UNMAP: u32 = 1;

/// Status byte of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// Type and first sector of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: u32,
    pub sector: u64,
}

impl Header {
    /// Reads the header once, so that later changes by the guest have no effect. It must be leased.
    pub fn read(memory: &DeviceMemory, frame: &Frame) -> Result<Self, OutsideMemory> {
        let mut bytes = [0; HEADER_BYTES as usize];
        frame.read_header(memory, &mut bytes)?;
        let [k0, k1, k2, k3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = bytes;
        Ok(Self {
            kind: u32::from_le_bytes([k0, k1, k2, k3]),
            sector: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        })
    }
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Move image bytes from `offset` into the writable data.
    Read { offset: u64 },
    /// Move the readable data into the image at `offset`.
    Write { offset: u64 },
    /// Make all completed writes durable.
    Flush,
    /// Copy the serial number into the writable data.
    Serial,
    /// Read the range from the readable data, then see [`range_work`].
    Range(RangeKind),
    /// Nothing: answer with this status.
    Answer(Status),
}

/// Which request a range belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RangeKind {
    Discard,
    WriteZeroes,
}

/// Size and mode of the device, as far as they decide about requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub sectors: u64,
    pub writes: Writes,
}

/// Decides what a request does, given how many data bytes the device may read and write.
pub(crate) fn decide(limits: Limits, header: Header, readable: u64, writable: u64) -> Work {
    let refused = limits.writes == Writes::Refused;
    match header.kind {
        T_IN => match transfer(limits, header.sector, writable) {
            Some(offset) => Work::Read { offset },
            None => Work::Answer(Status::IoError),
        },
        T_OUT if refused => Work::Answer(Status::IoError),
        T_OUT => match transfer(limits, header.sector, readable) {
            Some(offset) => Work::Write { offset },
            None => Work::Answer(Status::IoError),
        },
        T_FLUSH => Work::Flush,
        T_GET_ID if writable >= SERIAL_BYTES as u64 => Work::Serial,
        T_GET_ID => Work::Answer(Status::IoError),
        T_DISCARD | T_WRITE_ZEROES if refused => Work::Answer(Status::IoError),
        T_DISCARD | T_WRITE_ZEROES if readable != u64::from(RANGE_BYTES) => {
            Work::Answer(Status::Unsupported)
        }
        T_DISCARD => Work::Range(RangeKind::Discard),
        T_WRITE_ZEROES => Work::Range(RangeKind::WriteZeroes),
        _ => Work::Answer(Status::Unsupported),
    }
}

/// The offset in the image of `bytes` at `sector`, if they are whole sectors within it.
fn transfer(limits: Limits, sector: u64, bytes: u64) -> Option<u64> {
    if !bytes.is_multiple_of(SECTOR_BYTES) {
        return None;
    }
    let end = sector.checked_add(bytes / SECTOR_BYTES)?;
    (end <= limits.sectors).then(|| sector * SECTOR_BYTES)
}

/// A range of the image to empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Emptying {
    pub offset: u64,
    pub bytes: u64,
    pub how: EmptyHow,
}

/// How to empty a range, and what it holds afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EmptyHow {
    /// The content does not matter any more.
    Discard,
    /// It reads as zeros, and may lose its blocks.
    ZeroUnmap,
    /// It reads as zeros, and keeps blocks.
    Zero,
}

/// Decides what the range of a discard or write-zeroes request does.
pub(crate) fn range_work(
    limits: Limits,
    kind: RangeKind,
    bytes: [u8; RANGE_BYTES as usize],
) -> Result<Emptying, Status> {
    let [
        s0,
        s1,
        s2,
        s3,
        s4,
        s5,
        s6,
        s7,
        n0,
        n1,
        n2,
        n3,
        f0,
        f1,
        f2,
        f3,
    ] = bytes;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let count = u32::from_le_bytes([n0, n1, n2, n3]);
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    let how = match (kind, flags) {
        (RangeKind::Discard, 0) => EmptyHow::Discard,
        (RangeKind::WriteZeroes, 0) => EmptyHow::Zero,
        (RangeKind::WriteZeroes, FLAG_UNMAP) => EmptyHow::ZeroUnmap,
        // 5.2.6.2: a device must answer this for unknown flags, and for unmap in a discard.
        _ => return Err(Status::Unsupported),
    };
    let bytes = u64::from(count) * SECTOR_BYTES;
    let offset = transfer(limits, sector, bytes).ok_or(Status::IoError)?;
    if count > DISCARD_SECTORS_MAX || count == 0 {
        return Err(Status::IoError);
    }
    Ok(Emptying { offset, bytes, how })
}

/// Reads the range of a discard or write-zeroes request. It must be leased.
pub(crate) fn read_range(
    memory: &DeviceMemory,
    data: &[Span],
) -> Result<[u8; RANGE_BYTES as usize], OutsideMemory> {
    let mut bytes = [0; RANGE_BYTES as usize];
    let mut done = 0;
    for span in data {
        done += copy(memory, *span, &mut bytes[done..])?;
    }
    Ok(bytes)
}

/// Writes the serial number into the data. It must be leased.
pub(crate) fn write_serial(
    memory: &DeviceMemory,
    data: &[Span],
    serial: &[u8; SERIAL_BYTES],
) -> Result<(), OutsideMemory> {
    let mut rest = &serial[..];
    for span in data {
        let slice = memory.slice(*span)?;
        let part = rest.len().min(slice.len());
        slice.copy_from(&rest[..part]);
        rest = &rest[part..];
    }
    Ok(())
}

/// Writes the status byte. It must be leased.
pub(crate) fn write_status(
    memory: &DeviceMemory,
    at: Span,
    status: Status,
) -> Result<(), OutsideMemory> {
    let slice = memory.slice(at)?;
    let written = slice.write_obj(status as u8, 0);
    debug_assert!(written.is_ok(), "a slice of one byte takes one");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        sectors: 100,
        writes: Writes::Taken,
    };

    fn header(kind: u32, sector: u64) -> Header {
        Header { kind, sector }
    }

    #[test]
    fn transfers_beyond_the_image_or_not_in_sectors_are_io_errors() {
        let read = |sector, bytes| decide(LIMITS, header(T_IN, sector), 0, bytes);
        assert_eq!(read(99, 512), Work::Read { offset: 99 * 512 });
        for (sector, bytes) in [
            (99, 1024),
            (100, 512),
            (u64::MAX, 512),
            (0, 511),
            (u64::MAX, 0),
        ] {
            assert_eq!(read(sector, bytes), Work::Answer(Status::IoError));
        }
        assert_eq!(
            decide(LIMITS, header(T_OUT, 1), 512, 0),
            Work::Write { offset: 512 }
        );
    }

    #[test]
    fn read_only_device_refuses_everything_that_changes_the_image() {
        let limits = Limits {
            writes: Writes::Refused,
            ..LIMITS
        };
        for kind in [T_OUT, T_DISCARD, T_WRITE_ZEROES] {
            assert_eq!(
                decide(limits, header(kind, 0), 16, 0),
                Work::Answer(Status::IoError)
            );
        }
        assert_eq!(decide(limits, header(T_FLUSH, 0), 0, 0), Work::Flush);
    }

    #[test]
    fn unknown_requests_and_flags_are_unsupported() {
        assert_eq!(
            decide(LIMITS, header(77, 0), 0, 0),
            Work::Answer(Status::Unsupported)
        );
        let range = |count: u32, flags: u32| {
            let mut bytes = [0; 16];
            bytes[8..12].copy_from_slice(&count.to_le_bytes());
            bytes[12..].copy_from_slice(&flags.to_le_bytes());
            bytes
        };
        let discard = |bytes| range_work(LIMITS, RangeKind::Discard, bytes);
        assert_eq!(discard(range(1, 1)), Err(Status::Unsupported));
        assert_eq!(discard(range(101, 0)), Err(Status::IoError));
        assert_eq!(discard(range(0, 0)), Err(Status::IoError));
        assert_eq!(discard(range(100, 0)).unwrap().bytes, 51200);
        let zeroes = |bytes| range_work(LIMITS, RangeKind::WriteZeroes, bytes);
        assert_eq!(zeroes(range(1, 1)).unwrap().how, EmptyHow::ZeroUnmap);
        assert_eq!(zeroes(range(1, 2)), Err(Status::Unsupported));
    }
}
