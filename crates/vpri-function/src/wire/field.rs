// SPDX-License-Identifier: Apache-2.0
//! Sizes and numbers that all messages share, and code to read and write fields: little-endian, at fixed places.

use pagetide_addr::{FilePage, FileRange};

/// Virtio device id: provisional, none has been assigned.
pub const DEVICE_ID: u32 = 63;

/// "VPRI" in the configuration space.
pub const MAGIC: u32 = u32::from_le_bytes(*b"VPRI");

/// Version of these layouts.
pub const VERSION: u16 = 1;

/// Index of the event queue.
pub const EVENT_QUEUE: u16 = 0;

/// Index of the page fault queue.
pub const FAULT_QUEUE: u16 = 1;

/// Index of the access log queue.
pub const LOG_QUEUE: u16 = 2;

/// Number of queues of the function.
pub const QUEUE_COUNT: u16 = 3;

/// Bytes of the configuration space.
pub const CONFIG_BYTES: usize = 64;

/// Bytes of an event's header.
pub const HEADER_BYTES: usize = 32;

/// Bytes of one range in an event's body.
pub const RANGE_BYTES: usize = 16;

/// Bytes of one page response in the body of RESPOND.
pub const ANSWER_BYTES: usize = 40;

/// Bytes of an event's status.
pub const STATUS_BYTES: usize = 16;

/// Bytes of the mask that follows the status where an operation has one: a bit for each page of a
/// section.
pub const MASK_BYTES: usize = 64;

/// Bytes of a page request.
pub const REQUEST_BYTES: usize = 64;

/// Bytes of a record of the access log.
pub const RECORD_BYTES: usize = 32;

/// Least number of body elements that each device takes in one event.
pub const RANGES_MIN: u32 = 256;

/// Most pages of a space, so that the address of each byte fits 63 bits.
pub const PAGES_MAX: u64 = 1 << 51;

/// Bytes of a bounce buffer: one page.
pub const SLOT_BYTES: u64 = 4096;

/// Why bytes are no valid message. `at` is the offset of the field that is wrong, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// The message has the wrong length.
    #[error("the message has {len} bytes, not {expected}")]
    Length {
        /// Actual length, in bytes.
        len: usize,
        /// Expected length, in bytes.
        expected: usize,
    },
    /// No such operation.
    #[error("there is no operation {0}")]
    Opcode(u16),
    /// A field has an invalid value.
    #[error("the field at byte {at} has a value that it cannot have: {value:#x}")]
    Field {
        /// Offset of the field.
        at: usize,
        /// Its value.
        value: u64,
    },
    /// A range is empty, or ends behind the last possible page.
    #[error("the range at byte {at} is invalid: {page_count} pages from {first_page} on")]
    Range {
        /// Offset of the range.
        at: usize,
        /// Its first page.
        first_page: u64,
        /// Its length.
        page_count: u64,
    },
}

/// The field of `N` bytes at `at`. The caller has checked the length; missing bytes read as zero.
pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    if let Some(there) = bytes.get(at..at.saturating_add(N)) {
        field.copy_from_slice(there);
    }
    field
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(bytes, at))
}

/// Puts `field` at `at` of a message that has room for it: layouts are constants, and a test of
/// each message has shown that it fits.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    if let Some(there) = bytes.get_mut(at..at.saturating_add(N)) {
        there.copy_from_slice(&field);
    }
}

/// Refuses a field with an invalid value.
pub(super) fn check(
    is_right: impl FnOnce() -> bool,
    at: usize,
    value: impl Into<u64>,
) -> Result<(), WireError> {
    if is_right() {
        return Ok(());
    }
    let value = value.into();
    Err(WireError::Field { at, value })
}

/// The range whose first page is at `at` and whose length follows.
pub(super) fn range_at(bytes: &[u8], at: usize) -> Result<FileRange, WireError> {
    let (first_page, page_count) = (u64_at(bytes, at), u64_at(bytes, at + 8));
    match first_page.checked_add(page_count) {
        Some(end) if page_count > 0 && end <= PAGES_MAX => {
            Ok(FileRange::new(FilePage(first_page), FilePage(end)))
        }
        _ => Err(WireError::Range {
            at,
            first_page,
            page_count,
        }),
    }
}

pub(super) fn put_range(into: &mut Vec<u8>, range: FileRange) {
    into.extend(range.start.0.to_le_bytes());
    into.extend(range.len().to_le_bytes());
}
