// SPDX-License-Identifier: Apache-2.0
//! Reads one file of an access log, a batch of each column at a time.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use pagetide_addr::{DeviceId, DomainId};
use parquet::data_type::{Int32Type, Int64Type};
use parquet::file::reader::{FileReader, SerializedFileReader};

use crate::columns::{Column, open_file, pairs};
use crate::error::TraceError;
use crate::record::AccessRecord;
use crate::regular::open_regular;
use crate::schema::{
    AccessLogMeta, FORMAT, FORMAT_KEY, LOG_KEY, VERSION, VERSION_KEY, access_of, service_of,
};

/// Most rows read at a time.
const BATCH_ROWS: usize = 4096;

/// Reads records from one file of an access log.
pub struct AccessLogReader {
    path: PathBuf,
    /// `None` once the end or an error was reached.
    file: Option<SerializedFileReader<File>>,
    meta: AccessLogMeta,
    records: u64,
    columns: Columns,
    /// Row group to be opened next.
    next_group: usize,
    /// Rows of the open row group not read yet.
    rows_left: u64,
    /// Records returned so far.
    done: u64,
    /// Time of the last record.
    last_time_ns: u64,
    /// The error after the records returned last.
    broken: Option<TraceError>,
}

struct Columns {
    time_ns: Column<Int64Type>,
    device: Column<Int32Type>,
    space: Column<Int32Type>,
    address: Column<Int64Type>,
    len_bytes: Column<Int32Type>,
    access: Column<Int32Type>,
    service: Column<Int32Type>,
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
        let records = u64::try_from(file.metadata().file_metadata().num_rows())
            .map_err(|_| wrong("the number of rows is negative".to_owned()))?;
        Ok(Self {
            path: path.to_owned(),
            file: Some(file),
            meta,
            records,
            columns,
            next_group: 0,
            rows_left: 0,
            done: 0,
            last_time_ns: 0,
            broken: None,
        })
    }

    /// The file's metadata.
    #[must_use]
    pub const fn meta(&self) -> &AccessLogMeta {
        &self.meta
    }

    /// The file's own count of its records.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.records
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the next records to `batch`, at most [`BATCH_ROWS`]; none means the end.
    ///
    /// # Errors
    /// If the file is broken there; records before the break were returned, and there are none after it.
    pub fn next_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<usize, TraceError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        if self.file.is_none() {
            return Ok(0);
        }
        let rows = match self.read_columns() {
            Ok(rows) => rows,
            Err(reason) => return Err(self.fail(&reason)),
        };
        if rows == 0 {
            return self.end();
        }
        batch.reserve(rows);
        for row in 0..rows {
            match self.assemble(row) {
                Ok(record) => batch.push(record),
                Err(reason) => {
                    self.done += row as u64;
                    let error = self.fail(&reason);
                    if row == 0 {
                        return Err(error);
                    }
                    self.broken = Some(error);
                    return Ok(row);
                }
            }
        }
        self.done += rows as u64;
        Ok(rows)
    }

    /// Checks at the end that all rows were read.
    fn end(&mut self) -> Result<usize, TraceError> {
        self.file = None;
        if self.done == self.records {
            return Ok(0);
        }
        Err(TraceError::Record {
            path: self.path.clone(),
            record: self.done,
            reason: format!(
                "the file says it has {} records, and has {}",
                self.records, self.done
            ),
        })
    }

    /// Opens the next row group that has rows; returns whether there was one.
    fn open_group(&mut self) -> Result<bool, String> {
        let Some(file) = &self.file else {
            return Ok(false);
        };
        while self.rows_left == 0 && self.next_group < file.num_row_groups() {
            let group = self.next_group;
            self.next_group += 1;
            let rows = file.metadata().row_group(group).num_rows();
            self.rows_left = u64::try_from(rows).map_err(|_| format!("it claims {rows} rows"))?;
            self.columns.open(file, group, self.rows_left)?;
        }
        Ok(self.rows_left != 0)
    }

    /// Reads a batch of every column; returns the rows read.
    fn read_columns(&mut self) -> Result<usize, String> {
        if !self.open_group()? {
            return Ok(0);
        }
        let rows = usize::try_from(self.rows_left)
            .unwrap_or(usize::MAX)
            .min(BATCH_ROWS);
        self.columns.read(rows)?;
        self.rows_left -= rows as u64;
        Ok(rows)
    }

    /// The batch's next row as a record.
    fn assemble(&mut self, row: usize) -> Result<AccessRecord, String> {
        let columns = &mut self.columns;
        let time = columns.time_ns.required(row)?;
        let time_ns = u64::try_from(time).map_err(|_| format!("time_ns is {time}, below zero"))?;
        if time_ns < self.last_time_ns {
            return Err(format!(
                "time_ns is {time_ns}, before the {} of a record above",
                self.last_time_ns
            ));
        }
        let address = columns.address.required(row)?.cast_unsigned();
        let len_bytes = columns.len_bytes.required(row)?.cast_unsigned();
        if address.checked_add(len_bytes.into()).is_none() {
            return Err(format!(
                "{len_bytes} bytes from address {address:#x} end past 2^64"
            ));
        }
        let access = columns.access.required(row)?;
        let service = columns.service.required(row)?;
        let record = AccessRecord {
            time_ns,
            device: DeviceId(columns.device.required(row)?.cast_unsigned()),
            space: DomainId(columns.space.required(row)?.cast_unsigned()),
            address,
            len_bytes,
            access: access_of(access).ok_or_else(|| format!("access {access} is not known"))?,
            service: service_of(service)
                .ok_or_else(|| format!("service {service} is not known"))?,
        };
        self.last_time_ns = time_ns;
        Ok(record)
    }

    /// Ends the reading with an error at the next record.
    fn fail(&mut self, reason: &str) -> TraceError {
        self.file = None;
        TraceError::Record {
            path: self.path.clone(),
            record: self.done,
            reason: format!("row group {}: {reason}", self.next_group.saturating_sub(1)),
        }
    }
}

impl std::fmt::Debug for AccessLogReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccessLogReader")
            .field("path", &self.path)
            .field("meta", &self.meta)
            .field("records", &self.records)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

fn read_meta(pairs: &HashMap<&str, &str>) -> Result<AccessLogMeta, String> {
    match pairs.get(FORMAT_KEY) {
        Some(&FORMAT) => {}
        Some(other) => return Err(format!("its {FORMAT_KEY} is `{other}`, not `{FORMAT}`")),
        None => {
            return Err(format!(
                "a Parquet file, but no access log: its metadata has no {FORMAT_KEY}"
            ));
        }
    }
    match pairs.get(VERSION_KEY) {
        Some(&VERSION) => {}
        other => {
            return Err(format!(
                "an access log of version `{}`; this program reads version `{VERSION}`",
                other.copied().unwrap_or_default()
            ));
        }
    }
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
    fn find(file: &SerializedFileReader<File>) -> Result<Self, String> {
        Ok(Self {
            time_ns: Column::find(file, "time_ns")?,
            device: Column::find(file, "device")?,
            space: Column::find(file, "space")?,
            address: Column::find(file, "address")?,
            len_bytes: Column::find(file, "len_bytes")?,
            access: Column::find(file, "access")?,
            service: Column::find(file, "service")?,
        })
    }

    fn open(
        &mut self,
        file: &SerializedFileReader<File>,
        group: usize,
        rows: u64,
    ) -> Result<(), String> {
        self.time_ns.open(file, group, rows)?;
        self.device.open(file, group, rows)?;
        self.space.open(file, group, rows)?;
        self.address.open(file, group, rows)?;
        self.len_bytes.open(file, group, rows)?;
        self.access.open(file, group, rows)?;
        self.service.open(file, group, rows)
    }

    fn read(&mut self, rows: usize) -> Result<(), String> {
        self.time_ns.read(rows)?;
        self.device.read(rows)?;
        self.space.read(rows)?;
        self.address.read(rows)?;
        self.len_bytes.read(rows)?;
        self.access.read(rows)?;
        self.service.read(rows)
    }
}
