// SPDX-License-Identifier: Apache-2.0
//! What a VPRI function and its driver write to one another, byte by byte (VPRI 5).
//!
//! The function is a virtio device. `docs/vpri.md` specifies it; this module is the
//! layouts, for both sides, and nothing else: no queue, no state.
//!
//! ```text
//!   queue 0  events       driver ──► device   Event ─────────► Reply (Status, a mask)
//!   queue 1  page faults  device ──► driver   PageRequest       answered by Event::Respond
//!   queue 2  access log   device ──► driver   LogRecord …
//! ```
//! All numbers are little-endian. Every decoder is total: whatever the bytes are, it
//! returns a message or says which field is wrong ([`WireError`]), and what it returns
//! holds no range that overflows or is empty.
//!
//! A message *to* the device must be exact: reserved fields zero, no flag that the
//! operation does not have, as many body elements as the header says and no byte more.
//! A driver ignores reserved fields, so that a later device may use them.

mod config;
mod event;
mod fault;
mod header;
mod record;
mod reply;
#[cfg(test)]
mod tests;

pub use config::Config;
pub use event::{Event, Farewell};
pub use fault::{Answer, decode_request, encode_request, request_id};
pub use header::Opcode;
pub use record::{LogEntry, LogRecord, Service};
pub use reply::{Code, Reply, Status};

use pagetide_addr::{FilePage, FileRange, SECTION_PAGES};

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
/// Most pages of a space: so that the address of each byte fits 63 bits.
pub const PAGES_MAX: u64 = 1 << 51;
/// Bytes of a bounce buffer: one page.
pub const SLOT_BYTES: u64 = 4096;

const _: () = assert!(MASK_BYTES as u64 * 8 == SECTION_PAGES);

/// Feature bits of the function, beside those that every virtio device has.
pub mod feature {
    /// The device has an access log queue.
    pub const ACCESS_LOG: u64 = 1 << 0;
    /// The device may send requests of kind overwrite; the driver may give it a bounce area.
    pub const OVERWRITE: u64 = 1 << 1;
    /// The driver honours the hold time of requests: fault injection.
    pub const INJECT: u64 = 1 << 2;
    /// The device knows which pages DMA has touched.
    pub const TOUCHED: u64 = 1 << 3;
    /// Faults of two levels. Specified, never offered.
    pub const NESTED: u64 = 1 << 4;
    /// The access log tells how many records were lost.
    pub const LOG_LOSSES: u64 = 1 << 5;
}

/// Why bytes are no message. `at` is the offset of the field that is wrong, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// The message has not the length that it should have.
    #[error("the message has {len} bytes, not {expected}")]
    Length {
        /// Bytes there are.
        len: usize,
        /// Bytes there should be.
        expected: usize,
    },
    /// No such operation.
    #[error("there is no operation {0}")]
    Opcode(u16),
    /// A field has a value that it cannot have.
    #[error("the field at byte {at} has a value that it cannot have: {value:#x}")]
    Field {
        /// Offset of the field.
        at: usize,
        /// Its value.
        value: u64,
    },
    /// A range is empty, or ends behind the last page there can be.
    #[error("the range at byte {at} is none: {page_count} pages from {first_page} on")]
    Range {
        /// Offset of the range.
        at: usize,
        /// Its first page.
        first_page: u64,
        /// Its length.
        page_count: u64,
    },
}

impl WireError {
    /// Offset of the field that is wrong, in bytes.
    #[must_use]
    pub fn at(&self) -> usize {
        match self {
            Self::Length { len, expected } => *len.min(expected),
            Self::Opcode(_) => 0,
            Self::Field { at, .. } | Self::Range { at, .. } => *at,
        }
    }

    /// The status by which a device refuses the event.
    #[must_use]
    pub fn status(&self) -> Status {
        let code = match self {
            Self::Opcode(_) => Code::Unsupported,
            _ => Code::Invalid,
        };
        Status {
            code,
            detail: u32::try_from(self.at()).unwrap_or(u32::MAX),
            value: 0,
        }
    }
}

/// The field of `N` bytes at `at`. Whoever reads has looked at the length; what is missing is zero.
fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    if let Some(there) = bytes.get(at..at.saturating_add(N)) {
        field.copy_from_slice(there);
    }
    field
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(bytes, at))
}

/// Puts `field` at `at` of a message that has room for it: layouts are constants, so a test of each
/// message has shown that it has.
fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    if let Some(there) = bytes.get_mut(at..at.saturating_add(N)) {
        there.copy_from_slice(&field);
    }
}

/// Refuses a field that has a value it cannot have.
fn check(
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
fn range_at(bytes: &[u8], at: usize) -> Result<FileRange, WireError> {
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

fn put_range(into: &mut Vec<u8>, range: FileRange) {
    into.extend(range.start.0.to_le_bytes());
    into.extend(range.len().to_le_bytes());
}
