// SPDX-License-Identifier: Apache-2.0
//! Access logs: the project's own format for traces of DMA (VPRI 5.3). One or more Parquet files a VM, one
//! row an access.
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
//! The metadata is written when the file is completed, since only then the losses are known. Columns are
//! found by name and others are ignored, as in the traces of translation.
//!
//! # Order
//! Several engines write one log, each reading the clock itself, so records may come slightly out of order.
//! The writer holds some back and sorts them; one that comes even later gets the time of the record before
//! it, and is counted. So times in a file never run backwards.
//!
//! # Rotation
//! A log that runs for days is many files, `VM-000001.parquet` and so on. Each is complete, with all
//! metadata. Files of one log have the same VM and start; their sequence numbers give their order. The
//! oldest files are removed.

pub mod columns;
mod error;
mod partial;
mod record;
mod regular;
mod schema;

pub use error::TraceError;
pub use partial::PartialFile;
pub use record::{AccessRecord, Service};
pub use regular::open_regular;
pub use schema::{AccessLogMeta, FORMAT, LoggedDevice};

mod reader;
mod rotate;
mod sequence;
mod writer;

pub use reader::AccessLogReader;
pub use rotate::{LOG_FILE_BYTES_MIN, LOG_FILES_MAX, LogLimits, RotatingLog};
pub use sequence::AccessLog;
pub use writer::{AccessLogWriter, LOG_GROUP_RECORDS, LOG_SLACK_RECORDS};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{access_code, access_of, service_code, service_of};
    use pagetide_addr::Access;

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
