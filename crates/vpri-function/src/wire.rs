// SPDX-License-Identifier: Apache-2.0
//! Messages between a VPRI function and its driver, byte by byte (VPRI 5).
//!
//! The function is a virtio device, specified in `docs/vpri.md`. This module
//! contains only the layouts, for both sides: no queue, no state.
//!
//! ```text
//!   queue 0  events       driver ──► device   Event ─────────► Reply (Status, a mask)
//!   queue 1  page faults  device ──► driver   PageRequest       answered by Event::Respond
//!   queue 2  access log   device ──► driver   LogRecord …
//! ```
//! All numbers are little-endian. Every decoder is total: for any bytes, it returns a
//! message or reports which field is wrong ([`WireError`]), and the message contains
//! no range that overflows or is empty.
//!
//! A message *to* the device must be exact: reserved fields zero, no flag that the
//! operation does not have, and exactly as many body elements as the header declares.
//! A driver ignores reserved fields, so that a later device may use them.

mod field;

pub use field::{
    ANSWER_BYTES, CONFIG_BYTES, DEVICE_ID, EVENT_QUEUE, FAULT_QUEUE, HEADER_BYTES, LOG_QUEUE,
    MAGIC, MASK_BYTES, PAGES_MAX, QUEUE_COUNT, RANGE_BYTES, RANGES_MIN, RECORD_BYTES,
    REQUEST_BYTES, SLOT_BYTES, STATUS_BYTES, VERSION, WireError,
};
use field::{check, put, put_range, range_at, take, u16_at, u32_at, u64_at};

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
pub use pagetide_vpri::{LogRecord, Service};
pub use record::{LogEntry, decode_record, encode_record};
pub use reply::{Code, Reply, Status};

use pagetide_addr::SECTION_PAGES;

const _: () = assert!(MASK_BYTES as u64 * 8 == SECTION_PAGES);

/// Feature bits of the function, in addition to those of every virtio device.
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
    /// The access log reports how many records were lost.
    pub const LOG_LOSSES: u64 = 1 << 5;
    /// The device may send requests of kind blank, and has the host's clock.
    pub const BLANK: u64 = 1 << 6;
}
