// SPDX-License-Identifier: Apache-2.0
//! How an access log is laid out in Parquet: keys, columns and codes.

use crate::columns::Format;
use crate::record::Service;
use pagetide_addr::{Access, DeviceId, SECTION_BYTES};

/// The format of access logs.
pub const FORMAT: Format = Format {
    name: "pagetide-access-log",
    version: "1",
    file: "an access log",
    rows: "records",
};

pub(super) const LOG_KEY: &str = "pagetide.log";

/// The columns, in the order they are written in.
pub(super) const SCHEMA: &str = "message access_log {
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
    /// Its owner's name for it.
    pub name: String,
    /// What kind of device it is.
    pub service: Service,
}

/// The metadata of an access log.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct AccessLogMeta {
    /// Name of the VM.
    pub vm: String,
    /// Memory of the VM, in bytes, when the file was completed.
    pub memory_bytes: u64,
    /// The unit in which the host tracks memory, in bytes.
    pub section_bytes: u64,
    /// Devices of the VM that existed while the file was written.
    pub devices: Vec<LoggedDevice>,
    /// Start of the log, in nanoseconds since 1970; the same in all its files.
    pub started_unix_ns: u64,
    /// The file's number in the log.
    pub sequence: u32,
    /// Records dropped for lack of room while the file was written (VPRI 5.3).
    pub lost_records: u64,
    /// Records that came so late that they got the time of the one before them.
    pub late_records: u64,
}

impl AccessLogMeta {
    /// The metadata of a new log.
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

    /// Adds a device, or updates its entry.
    pub fn enter(&mut self, device: LoggedDevice) {
        match self.devices.iter_mut().find(|known| known.id == device.id) {
            Some(known) => *known = device,
            None => self.devices.push(device),
        }
    }
}

/// Code of `access` in the column of that name.
pub(super) const fn access_code(access: Access) -> i32 {
    match access {
        Access::Read => 0,
        Access::Write => 1,
    }
}

pub(super) const fn access_of(code: i32) -> Option<Access> {
    match code {
        0 => Some(Access::Read),
        1 => Some(Access::Write),
        _ => None,
    }
}

/// Code of `service` in the column of that name.
pub(super) const fn service_code(service: Service) -> i32 {
    match service {
        Service::Block => 0,
        Service::Network => 1,
    }
}

pub(super) const fn service_of(code: i32) -> Option<Service> {
    match code {
        0 => Some(Service::Block),
        1 => Some(Service::Network),
        _ => None,
    }
}
