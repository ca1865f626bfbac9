// SPDX-License-Identifier: Apache-2.0
//! Records of the access log: which memory devices have touched, and when (VPRI 5.2).

use super::{
    RECORD_BYTES, WireError,
    fault::{access_number, access_of},
    put, u32_at, u64_at,
};
use pagetide_addr::{DeviceId, DomainId};
use pagetide_vpri::{LogRecord, Service};

/// `type` of a record that reports losses.
const LOST: u8 = 255;

/// The record as sent over the access log queue.
#[must_use]
pub fn encode_record(record: &LogRecord) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    let service = match record.service {
        Service::Block => 0,
        Service::Network => 1,
    };
    put(&mut bytes, 0, record.time_ns.to_le_bytes());
    put(&mut bytes, 8, record.device.0.to_le_bytes());
    put(&mut bytes, 12, record.space.0.to_le_bytes());
    put(&mut bytes, 16, record.address.to_le_bytes());
    put(&mut bytes, 24, record.len_bytes.to_le_bytes());
    put(&mut bytes, 28, [access_number(record.access), service]);
    bytes
}

/// Decodes the record at the beginning of `bytes`.
///
/// # Errors
/// [`WireError`].
pub fn decode_record(bytes: &[u8]) -> Result<LogRecord, WireError> {
    let len = bytes.len();
    if len < RECORD_BYTES {
        let expected = RECORD_BYTES;
        return Err(WireError::Length { len, expected });
    }
    let [access, service] = super::take(bytes, 28);
    let service = match service {
        0 => Service::Block,
        1 => Service::Network,
        _ => {
            let value = service.into();
            return Err(WireError::Field { at: 29, value });
        }
    };
    Ok(LogRecord {
        time_ns: u64_at(bytes, 0),
        device: DeviceId(u32_at(bytes, 8)),
        space: DomainId(u32_at(bytes, 12)),
        address: u64_at(bytes, 16),
        len_bytes: u32_at(bytes, 24),
        access: access_of(access, 28)?,
        service,
    })
}
/// One entry of the log, as received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogEntry {
    /// An access.
    Access(LogRecord),
    /// Records were lost since the last entry that reported losses (feature `LOG_LOSSES`).
    Lost {
        /// When it was reported, in nanoseconds of the host's monotonic clock.
        time_ns: u64,
        /// Number of lost records.
        records: u64,
    },
}

impl LogEntry {
    /// The entry as sent over the access log queue.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        match self {
            Self::Access(record) => encode_record(record),
            Self::Lost { time_ns, records } => {
                let mut bytes = [0; RECORD_BYTES];
                put(&mut bytes, 0, time_ns.to_le_bytes());
                put(&mut bytes, 16, records.to_le_bytes());
                put(&mut bytes, 29, [LOST]);
                bytes
            }
        }
    }

    /// Decodes the entry at the beginning of `bytes`.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() >= RECORD_BYTES && super::take(bytes, 29) == [LOST] {
            return Ok(Self::Lost {
                time_ns: u64_at(bytes, 0),
                records: u64_at(bytes, 16),
            });
        }
        decode_record(bytes).map(Self::Access)
    }
}
