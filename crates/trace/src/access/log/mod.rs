// SPDX-License-Identifier: Apache-2.0
//! Access logs: the project's own format for traces of DMA (VPRI 5.3). One or
//! more Parquet files a VM, one row an access.
//!
//! ```text
//! column     type             is
//! time_ns    int64            host's monotonic clock; never less than in the row above
//! device     uint32           number of the device, one of those in the metadata
//! space      uint32           which of the VM's address spaces
//! address    uint64           first byte, counted in the space
//! len_bytes  uint32           length
//! access     uint8, a code    0 read, 1 write
//! service    uint8, a code    0 block, 1 network
//! ```
//! The file's key-value metadata:
//!
//! | key | value |
//! |---|---|
//! | `pagetide.format` | `pagetide-access-log` |
//! | `pagetide.version` | `1` |
//! | `pagetide.log` | JSON of [`AccessLogMeta`]: VM, memory, devices, records that were lost |
//!
//! The metadata is written when the file is completed, for only then it is known
//! what was lost. Columns are found by name and others are ignored, as in the
//! traces of translation, and hostile files are met the same way.
//!
//! # Order
//! Several engines write one log, each with its own look at the clock, so records
//! may come a little out of order. The writer holds some back and sorts them; one
//! that comes even later gets the time of the record before it, and is counted.
//! So whoever reads finds times that never run backwards.
//!
//! # Rotation
//! A log that runs for days is many files, `VM-000001.parquet` and so on. Each is
//! whole, with all metadata. Files of one log have the same VM and start; their
//! sequence numbers say in which order they follow. The oldest go.

mod reader;
mod rotate;
mod sequence;
mod writer;

pub use reader::AccessLogReader;
pub use rotate::{LOG_FILE_BYTES_MIN, LOG_FILES_MAX, LogLimits, RotatingLog};
pub use sequence::AccessLog;
pub use writer::{AccessLogWriter, LOG_GROUP_RECORDS, LOG_SLACK_RECORDS};

use pagetide_addr::{Access, DeviceId, SECTION_BYTES};

use super::Service;

pub(crate) const FORMAT_KEY: &str = "pagetide.format";
pub(crate) const FORMAT: &str = "pagetide-access-log";
const VERSION_KEY: &str = "pagetide.version";
const VERSION: &str = "1";
const LOG_KEY: &str = "pagetide.log";

/// The columns, in the order they are written in.
const SCHEMA: &str = "message access_log {
    required int64 time_ns;
    required int32 device (integer(32, false));
    required int32 space (integer(32, false));
    required int64 address (integer(64, false));
    required int32 len_bytes (integer(32, false));
    required int32 access (integer(8, false));
    required int32 service (integer(8, false));
}";

/// A device that is in a log.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct LoggedDevice {
    /// Its number in the records.
    pub id: DeviceId,
    /// What its owner calls it.
    pub name: String,
    /// What kind of device it is.
    pub service: Service,
}

/// What an access log says about itself.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct AccessLogMeta {
    /// Name of the VM.
    pub vm: String,
    /// Memory of the VM, in bytes, when the file was completed.
    pub memory_bytes: u64,
    /// What the host tracks memory by, in bytes.
    pub section_bytes: u64,
    /// Devices of the VM that were there while the file was written.
    pub devices: Vec<LoggedDevice>,
    /// When the log was begun, in nanoseconds since 1970; the same in all its files.
    pub started_unix_ns: u64,
    /// Which of the log's files this is.
    pub sequence: u32,
    /// Records that there was no room for while the file was written (VPRI 5.3).
    pub lost_records: u64,
    /// Records that came so late that they got the time of the one before them.
    pub late_records: u64,
}

impl AccessLogMeta {
    /// Of a log that begins.
    #[must_use]
    pub fn new(vm: &str, memory_bytes: u64, started_unix_ns: u64) -> Self {
        Self {
            vm: vm.to_owned(),
            memory_bytes,
            section_bytes: SECTION_BYTES,
            devices: Vec::new(),
            started_unix_ns,
            sequence: 1,
            lost_records: 0,
            late_records: 0,
        }
    }

    /// Enters a device, or what is new about it.
    pub fn enter(&mut self, device: LoggedDevice) {
        match self.devices.iter_mut().find(|known| known.id == device.id) {
            Some(known) => *known = device,
            None => self.devices.push(device),
        }
    }
}

/// Code of `access` in the column of that name.
const fn access_code(access: Access) -> i32 {
    match access {
        Access::Read => 0,
        Access::Write => 1,
    }
}

const fn access_of(code: i32) -> Option<Access> {
    match code {
        0 => Some(Access::Read),
        1 => Some(Access::Write),
        _ => None,
    }
}

/// Code of `service` in the column of that name.
const fn service_code(service: Service) -> i32 {
    match service {
        Service::Block => 0,
        Service::Network => 1,
    }
}

const fn service_of(code: i32) -> Option<Service> {
    match code {
        0 => Some(Service::Block),
        1 => Some(Service::Network),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_back_and_others_are_none() {
        for access in [Access::Read, Access::Write] {
            assert_eq!(access_of(access_code(access)), Some(access));
        }
        for service in Service::ALL {
            assert_eq!(service_of(service_code(service)), Some(service));
        }
        for code in [-1, 2] {
            assert_eq!((access_of(code), service_of(code)), (None, None));
        }
    }
}
