// SPDX-License-Identifier: Apache-2.0
//! Reads one file of an access log, a batch of each column at a time.

use std::collections::HashMap;
use std::path::Path;

use pagetide_addr::{DeviceId, DomainId};
use parquet::data_type::{Int32Type, Int64Type};

use crate::columns::{AnyColumn, Column, ColumnFile, RowReader, Rows, open_file, pairs};
use crate::error::TraceError;
use crate::record::AccessRecord;
use crate::regular::open_regular;
use crate::schema::{AccessLogMeta, FORMAT, LOG_KEY, access_of, service_of};

/// Most rows read at a time.
const BATCH_ROWS: usize = 4096;

/// Reads records from one file of an access log.
pub struct AccessLogReader {
    meta: AccessLogMeta,
    rows: RowReader<Columns>,
}

struct Columns {
    time_ns: Column<Int64Type>,
    device: Column<Int32Type>,
    space: Column<Int32Type>,
    address: Column<Int64Type>,
    len_bytes: Column<Int32Type>,
    access: Column<Int32Type>,
    service: Column<Int32Type>,
    /// Time of the last record.
    last_time_ns: u64,
}

impl AccessLogReader {
    /// Opens the file at `path` and checks that it is an access log.
    ///
    /// # Errors
    /// If it cannot be opened, is truncated or no Parquet file, is of another format or of an unknown
    /// version, or lacks a column.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let input = open_regular(path)?;
        let wrong = |reason: String| TraceError::File {
            path: path.to_owned(),
            reason,
        };
        let file = open_file(input).map_err(|reason| {
            wrong(format!("it is no Parquet file, or it is cut off: {reason}"))
        })?;
        let meta = read_meta(&pairs(&file)).map_err(wrong)?;
        let columns = Columns::find(&file).map_err(wrong)?;
        let rows = RowReader::new(FORMAT, path, file, columns)?;
        Ok(Self { meta, rows })
    }

    /// The file's metadata.
    #[must_use]
    pub const fn meta(&self) -> &AccessLogMeta {
        &self.meta
    }

    /// The file's own count of its records.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.rows.count()
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.rows.path()
    }

    /// Appends the next records to `batch`, at most [`BATCH_ROWS`]; none means the end.
    ///
    /// # Errors
    /// If the file is broken there; records before the break were returned, and there are none after it.
    pub fn next_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<usize, TraceError> {
        self.rows.next_batch(batch, BATCH_ROWS)
    }
}

impl std::fmt::Debug for AccessLogReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccessLogReader")
            .field("path", &self.path())
            .field("meta", &self.meta)
            .field("records", &self.records())
            .field("done", &self.rows.done())
            .finish_non_exhaustive()
    }
}

fn read_meta(pairs: &HashMap<&str, &str>) -> Result<AccessLogMeta, String> {
    FORMAT.check(pairs)?;
    let text = pairs
        .get(LOG_KEY)
        .ok_or_else(|| format!("its metadata has no {LOG_KEY}"))?;
    let meta: AccessLogMeta =
        serde_json::from_str(text).map_err(|error| format!("its {LOG_KEY}: {error}"))?;
    if meta.section_bytes == 0 {
        return Err(format!("its {LOG_KEY}: sections of 0 bytes"));
    }
    Ok(meta)
}

impl Columns {
    fn find(file: &ColumnFile) -> Result<Self, String> {
        Ok(Self {
            time_ns: Column::find(file, "time_ns")?,
            device: Column::find(file, "device")?,
            space: Column::find(file, "space")?,
            address: Column::find(file, "address")?,
            len_bytes: Column::find(file, "len_bytes")?,
            access: Column::find(file, "access")?,
            service: Column::find(file, "service")?,
            last_time_ns: 0,
        })
    }
}

impl Rows for Columns {
    type Row = AccessRecord;

    fn columns(&mut self) -> Vec<&mut dyn AnyColumn> {
        vec![
            &mut self.time_ns,
            &mut self.device,
            &mut self.space,
            &mut self.address,
            &mut self.len_bytes,
            &mut self.access,
            &mut self.service,
        ]
    }

    fn row(&mut self, row: usize) -> Result<AccessRecord, String> {
        let time = self.time_ns.required(row)?;
        let time_ns = u64::try_from(time).map_err(|_| format!("time_ns is {time}, below zero"))?;
        if time_ns < self.last_time_ns {
            return Err(format!(
                "time_ns is {time_ns}, before the {} of a record above",
                self.last_time_ns
            ));
        }
        let address = self.address.required(row)?.cast_unsigned();
        let len_bytes = self.len_bytes.required(row)?.cast_unsigned();
        if address.checked_add(len_bytes.into()).is_none() {
            return Err(format!(
                "{len_bytes} bytes from address {address:#x} end past 2^64"
            ));
        }
        let access = self.access.required(row)?;
        let service = self.service.required(row)?;
        let record = AccessRecord {
            time_ns,
            device: DeviceId(self.device.required(row)?.cast_unsigned()),
            space: DomainId(self.space.required(row)?.cast_unsigned()),
            address,
            len_bytes,
            access: access_of(access).ok_or_else(|| format!("access {access} is not known"))?,
            service: service_of(service)
                .ok_or_else(|| format!("service {service} is not known"))?,
        };
        self.last_time_ns = time_ns;
        Ok(record)
    }
}
