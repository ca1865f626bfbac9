// SPDX-License-Identifier: Apache-2.0
//! Records of the access log: which memory devices have touched, and when (VPRI 5.2).

use super::{
    RECORD_BYTES, WireError,
    fault::{access_number, access_of},
    put, u32_at, u64_at,
};
use pagetide_addr::{Access, DeviceId, DomainId};

/// `type` of a record that reports losses.
const LOST: u8 = 255;

/// What kind of device made an access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Service {
    /// A disk.
    Block,
    /// A network interface.
    Network,
}

/// One DMA access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogRecord {
    /// The time, in nanoseconds of the host's monotonic clock; 0 if the device has no such clock.
    pub time_ns: u64,
    /// The device.
    pub device: DeviceId,
    /// The space.
    pub space: DomainId,
    /// First byte, relative to the space.
    pub address: u64,
    /// Length, in bytes.
    pub len_bytes: u32,
    /// Read or write.
    pub access: Access,
    /// The kind of device.
    pub service: Service,
}

impl LogRecord {
    /// The record as sent over the access log queue.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let service = match self.service {
            Service::Block => 0,
            Service::Network => 1,
        };
        put(&mut bytes, 0, self.time_ns.to_le_bytes());
        put(&mut bytes, 8, self.device.0.to_le_bytes());
        put(&mut bytes, 12, self.space.0.to_le_bytes());
        put(&mut bytes, 16, self.address.to_le_bytes());
        put(&mut bytes, 24, self.len_bytes.to_le_bytes());
        put(&mut bytes, 28, [access_number(self.access), service]);
        bytes
    }

    /// Decodes the record at the beginning of `bytes`.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
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
        Ok(Self {
            time_ns: u64_at(bytes, 0),
            device: DeviceId(u32_at(bytes, 8)),
            space: DomainId(u32_at(bytes, 12)),
            address: u64_at(bytes, 16),
            len_bytes: u32_at(bytes, 24),
            access: access_of(access, 28)?,
            service,
        })
    }
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
            Self::Access(record) => record.encode(),
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
        LogRecord::decode(bytes).map(Self::Access)
    }
}
