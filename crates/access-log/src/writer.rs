// SPDX-License-Identifier: Apache-2.0
//! Writes one file of an access log. Nothing exists at its path until it is complete.

use std::fs::{File, Permissions};
use std::io::BufWriter;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use parquet::data_type::{Int32Type, Int64Type};
use parquet::errors::Result as ParquetResult;
use parquet::file::writer::SerializedRowGroupWriter;

use crate::columns::{RowWriter, properties, write_column};
use crate::error::TraceError;
use crate::partial::PartialFile;
use crate::record::AccessRecord;
use crate::schema::{AccessLogMeta, FORMAT, LOG_KEY, SCHEMA, access_code, service_code};

/// Records of a row group: at 36 bytes each the writer gathers some 2 MB.
pub const LOG_GROUP_RECORDS: usize = 1 << 16;

/// Records held back to be sorted with later ones. At the highest rate of the engines, some millions a
/// second, that is several milliseconds; an engine passes a record on within microseconds after reading the
/// clock.
pub const LOG_SLACK_RECORDS: usize = 1 << 14;

/// Largest size of a record in the file, in bytes: its columns uncompressed, and a little more
const RECORD_BYTES_MAX: u64 = 40;

/// Writes records to one file of an access log.
pub struct AccessLogWriter {
    writer: RowWriter,
    meta: AccessLogMeta,
    /// Records not written yet, in the order they came.
    waiting: Vec<AccessRecord>,
    /// Records written.
    done: u64,
    /// Time of the record written last.
    last_time_ns: u64,
}

impl AccessLogWriter {
    /// Creates a file that will be at `path`. It shows where a guest's data lies and when it was used, so
    /// only its owner may read it.
    ///
    /// # Errors
    /// If no file can be created beside `path`.
    pub fn create(path: &Path, meta: AccessLogMeta) -> Result<Self, TraceError> {
        let (partial, file) = PartialFile::create(path)?;
        file.set_permissions(Permissions::from_mode(0o600))
            .map_err(|source| TraceError::Io {
                path: path.to_owned(),
                source,
            })?;
        let properties = properties(LOG_GROUP_RECORDS, FORMAT.pairs());
        let writer = RowWriter::begin(partial, file, SCHEMA, properties)?;
        Ok(Self {
            writer,
            meta,
            waiting: Vec::new(),
            done: 0,
            last_time_ns: 0,
        })
    }

    /// Continues after an earlier file: no time in this one is before `time_ns`.
    pub(super) fn follow(&mut self, time_ns: u64) {
        self.last_time_ns = time_ns;
    }

    /// The file's metadata.
    pub const fn meta_mut(&mut self) -> &mut AccessLogMeta {
        &mut self.meta
    }

    /// Records that were appended.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.done + self.waiting.len() as u64
    }

    /// Largest size of the file, in bytes, except for its footer.
    pub(super) fn bytes_max(&self) -> u64 {
        self.writer.bytes_written() + self.waiting.len() as u64 * RECORD_BYTES_MAX
    }

    /// Writes `records`, perhaps later.
    ///
    /// # Errors
    /// If the file cannot take them, or one of them is invalid: it ends past 2^64, or is from after 2^63
    /// ns. Those before it are written.
    pub fn append(&mut self, records: &[AccessRecord]) -> Result<(), TraceError> {
        for record in records {
            if let Err(reason) = check(record) {
                return Err(TraceError::Record {
                    path: self.writer.path().to_owned(),
                    record: self.records(),
                    reason,
                });
            }
            self.push(*record)?;
        }
        Ok(())
    }

    /// Writes a record that [`check`] has accepted, perhaps later.
    pub(super) fn push(&mut self, record: AccessRecord) -> Result<(), TraceError> {
        self.waiting.push(record);
        if self.waiting.len() == LOG_GROUP_RECORDS + LOG_SLACK_RECORDS {
            self.flush(LOG_GROUP_RECORDS)?;
        }
        Ok(())
    }

    /// Completes the file with its metadata; returns the time of its last record.
    ///
    /// # Errors
    /// If the file cannot be completed.
    pub fn finish(mut self) -> Result<u64, TraceError> {
        while !self.waiting.is_empty() {
            self.flush(LOG_GROUP_RECORDS)?;
        }
        let log = serde_json::to_string(&self.meta).map_err(|error| TraceError::File {
            path: self.writer.path().to_owned(),
            reason: format!("its metadata cannot be written: {error}"),
        })?;
        self.writer.add_pair(LOG_KEY, log);
        self.writer.finish()?;
        Ok(self.last_time_ns)
    }

    /// Writes the oldest `count` of the waiting records, or all, as a row group.
    fn flush(&mut self, count: usize) -> Result<(), TraceError> {
        // Stable: records with the same time keep their order.
        self.waiting.sort_by_key(|record| record.time_ns);
        let count = count.min(self.waiting.len());
        let rows = &mut self.waiting[..count];
        for row in &mut *rows {
            if row.time_ns < self.last_time_ns {
                row.time_ns = self.last_time_ns;
                self.meta.late_records += 1;
            }
            self.last_time_ns = row.time_ns;
        }
        self.writer.group(|group| write_rows(group, rows))?;
        self.done += count as u64;
        self.waiting.drain(..count);
        Ok(())
    }
}

impl std::fmt::Debug for AccessLogWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccessLogWriter")
            .field("path", &self.writer.path())
            .field("records", &self.records())
            .finish_non_exhaustive()
    }
}

/// Checks for properties that the reader would refuse.
pub(super) fn check(record: &AccessRecord) -> Result<(), String> {
    let AccessRecord {
        time_ns,
        address,
        len_bytes,
        ..
    } = *record;
    if address.checked_add(len_bytes.into()).is_none() {
        return Err(format!(
            "{len_bytes} bytes from address {address:#x} end past 2^64"
        ));
    }
    if i64::try_from(time_ns).is_err() {
        return Err(format!("time {time_ns} ns is past 2^63"));
    }
    Ok(())
}

fn write_rows(
    group: &mut SerializedRowGroupWriter<'_, BufWriter<File>>,
    rows: &[AccessRecord],
) -> ParquetResult<()> {
    let wide = |of: fn(&AccessRecord) -> u64| -> Vec<i64> {
        rows.iter().map(|row| of(row).cast_signed()).collect()
    };
    let narrow = |of: fn(&AccessRecord) -> i32| -> Vec<i32> { rows.iter().map(of).collect() };
    write_column::<Int64Type>(group, &wide(|row| row.time_ns), None)?;
    write_column::<Int32Type>(group, &narrow(|row| row.device.0.cast_signed()), None)?;
    write_column::<Int32Type>(group, &narrow(|row| row.space.0.cast_signed()), None)?;
    write_column::<Int64Type>(group, &wide(|row| row.address), None)?;
    write_column::<Int32Type>(group, &narrow(|row| row.len_bytes.cast_signed()), None)?;
    write_column::<Int32Type>(group, &narrow(|row| access_code(row.access)), None)?;
    write_column::<Int32Type>(group, &narrow(|row| service_code(row.service)), None)
}
