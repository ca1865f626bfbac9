// SPDX-License-Identifier: Apache-2.0
//! Reads a trace from Parquet, a batch of each column at a time.
//!
//! A batch is read column by column into flat buffers, then assembled row by row. Columns without nulls
//! skip the level buffers, so the common trace (no times, all pages known) costs one dictionary look-up a
//! value.

use std::fs::File;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use pagetide_addr::Iova;
use parquet::data_type::{Int32Type, Int64Type};
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{
    ACCESSES, FORMAT, FORMAT_KEY, KINDS, ORIGIN_KEY, PACKET_KEY, TraceMeta, VERSION, VERSION_KEY,
    decoded,
};
use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId};
use crate::stream::{BATCH_EVENTS, EventSource};
use pagetide_access_log::TraceError;
use pagetide_access_log::columns::{Column, open_file, pairs};

/// Reads events from a Parquet trace of this project.
pub struct ParquetReader {
    path: PathBuf,
    /// `None` once the end or an error was reached.
    file: Option<SerializedFileReader<File>>,
    meta: TraceMeta,
    events: u64,
    columns: Columns,
    /// Row group to be opened next.
    next_group: usize,
    /// Rows of the open row group not read yet.
    rows_left: u64,
    /// Events returned so far.
    done: u64,
    /// Time of the last event that had one.
    last_time_ns: u64,
    /// The error after the events returned last.
    broken: Option<TraceError>,
}

struct Columns {
    time_ns: Column<Int64Type>,
    source: Column<Int32Type>,
    domain: Column<Int32Type>,
    iova: Column<Int64Type>,
    page_size_bytes: Column<Int64Type>,
    access: Column<Int32Type>,
    kind: Column<Int32Type>,
}

impl ParquetReader {
    /// Opens the trace at `path` and checks that it is one.
    ///
    /// # Errors
    /// If it cannot be opened, is no Parquet file, is not a trace of this
    /// project or of a version that is not known here, or lacks a column.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let input = File::open(path).map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
        let wrong = |reason: String| TraceError::File {
            path: path.to_owned(),
            reason,
        };
        let file = open_file(input).map_err(wrong)?;
        let meta = read_meta(&file).map_err(wrong)?;
        let columns = Columns::find(&file).map_err(wrong)?;
        let events = u64::try_from(file.metadata().file_metadata().num_rows())
            .map_err(|_| wrong("the number of rows is negative".to_owned()))?;
        Ok(Self {
            path: path.to_owned(),
            file: Some(file),
            meta,
            events,
            columns,
            next_group: 0,
            rows_left: 0,
            done: 0,
            last_time_ns: 0,
            broken: None,
        })
    }

    /// The trace's metadata.
    #[must_use]
    pub const fn meta(&self) -> &TraceMeta {
        &self.meta
    }

    /// The file's own count of its events.
    #[must_use]
    pub const fn events(&self) -> u64 {
        self.events
    }

    /// Opens the next row group that has rows; returns whether there was one.
    fn open_group(&mut self) -> Result<bool, String> {
        let Some(file) = &self.file else {
            return Ok(false);
        };
        while self.rows_left == 0 && self.next_group < file.num_row_groups() {
            let group = self.next_group;
            let rows = file.metadata().row_group(group).num_rows();
            self.rows_left =
                u64::try_from(rows).map_err(|_| format!("row group {group} claims {rows} rows"))?;
            self.columns.open(file, group, self.rows_left)?;
            self.next_group += 1;
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
            .min(BATCH_EVENTS);
        self.columns.read(rows)?;
        self.rows_left -= rows as u64;
        Ok(rows)
    }

    /// The batch's next row as an event.
    fn assemble(&mut self, row: usize) -> Result<Event, String> {
        let columns = &mut self.columns;
        let iova = columns.iova.required(row)?.cast_unsigned();
        if iova >> IOVA_BITS != 0 {
            return Err(format!("iova {iova:#x} has more than {IOVA_BITS} bits"));
        }
        let kind = columns.kind.required(row)?;
        let kind = decoded(&KINDS, kind).ok_or_else(|| format!("kind {kind} is not known"))?;
        let access = columns.access.required(row)?;
        let access =
            decoded(&ACCESSES, access).ok_or_else(|| format!("access {access} is not known"))?;
        let page_size = match columns.page_size_bytes.optional(row) {
            Some(bytes) => Some(page_size(bytes, kind)?),
            None => None,
        };
        let time_ns = match columns.time_ns.optional(row) {
            Some(time) => Some(checked_time(time, &mut self.last_time_ns)?),
            None => None,
        };
        Ok(Event {
            time_ns,
            source: SourceId(columns.source.required(row)?.cast_unsigned()),
            domain: IommuDomain(columns.domain.required(row)?.cast_unsigned()),
            iova: Iova(iova),
            page_size,
            access,
            kind,
        })
    }

    /// Ends the reading with an error at the next event.
    fn fail(&mut self, reason: String) -> TraceError {
        self.file = None;
        TraceError::Record {
            path: self.path.clone(),
            record: self.done,
            reason,
        }
    }
}

impl EventSource for ParquetReader {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        if self.file.is_none() {
            return Ok(0);
        }
        let rows = match self.read_columns() {
            Ok(rows) => rows,
            Err(reason) => return Err(self.fail(reason)),
        };
        if rows == 0 {
            self.file = None;
            if self.done != self.events {
                let reason = format!(
                    "the file says it has {} events, and has {}",
                    self.events, self.done
                );
                return Err(self.fail(reason));
            }
            return Ok(0);
        }
        batch.reserve(rows);
        for row in 0..rows {
            match self.assemble(row) {
                Ok(event) => batch.push(event),
                Err(reason) => {
                    self.done += row as u64;
                    let error = self.fail(reason);
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
}

impl std::fmt::Debug for ParquetReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParquetReader")
            .field("path", &self.path)
            .field("meta", &self.meta)
            .field("events", &self.events)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

fn page_size(bytes: i64, kind: EventKind) -> Result<PageSize, String> {
    let size = u64::try_from(bytes)
        .ok()
        .and_then(PageSize::from_bytes)
        .ok_or_else(|| {
            format!(
                "page_size_bytes is {bytes}, which is no power of two from 4096 to 2^{IOVA_BITS}"
            )
        })?;
    if kind == EventKind::Translate && size.level().is_none() {
        return Err(format!(
            "page_size_bytes is {bytes}; a request is for a page of 4 KiB, 2 MiB or 1 GiB"
        ));
    }
    Ok(size)
}

fn checked_time(time_ns: i64, last_ns: &mut u64) -> Result<u64, String> {
    let time = u64::try_from(time_ns).map_err(|_| format!("time_ns is {time_ns}, below zero"))?;
    if time < *last_ns {
        return Err(format!(
            "time_ns is {time}, before the {last_ns} of an event above"
        ));
    }
    *last_ns = time;
    Ok(time)
}

fn read_meta(file: &SerializedFileReader<File>) -> Result<TraceMeta, String> {
    let pairs = pairs(file);
    match pairs.get(FORMAT_KEY) {
        Some(&FORMAT) => {}
        Some(other) => return Err(format!("its {FORMAT_KEY} is `{other}`, not `{FORMAT}`")),
        None => {
            return Err(format!(
                "a Parquet file, but not a trace: its metadata has no {FORMAT_KEY}"
            ));
        }
    }
    match pairs.get(VERSION_KEY) {
        Some(&VERSION) => {}
        other => {
            return Err(format!(
                "a trace of version `{}`; this program reads version `{VERSION}`",
                other.copied().unwrap_or_default()
            ));
        }
    }
    let requests_per_packet = pairs
        .get(PACKET_KEY)
        .and_then(|text| text.parse::<NonZeroU32>().ok())
        .ok_or_else(|| format!("its {PACKET_KEY} is no number above zero"))?;
    let origin = match pairs.get(ORIGIN_KEY) {
        Some(text) => serde_json::from_str(text)
            .map_err(|error| format!("its {ORIGIN_KEY} is no JSON: {error}"))?,
        None => serde_json::Value::Null,
    };
    Ok(TraceMeta {
        requests_per_packet,
        origin,
    })
}

impl Columns {
    fn find(file: &SerializedFileReader<File>) -> Result<Self, String> {
        Ok(Self {
            time_ns: Column::find(file, "time_ns")?,
            source: Column::find(file, "source")?,
            domain: Column::find(file, "domain")?,
            iova: Column::find(file, "iova")?,
            page_size_bytes: Column::find(file, "page_size_bytes")?,
            access: Column::find(file, "access")?,
            kind: Column::find(file, "kind")?,
        })
    }

    fn open(
        &mut self,
        file: &SerializedFileReader<File>,
        group: usize,
        rows: u64,
    ) -> Result<(), String> {
        self.time_ns.open(file, group, rows)?;
        self.source.open(file, group, rows)?;
        self.domain.open(file, group, rows)?;
        self.iova.open(file, group, rows)?;
        self.page_size_bytes.open(file, group, rows)?;
        self.access.open(file, group, rows)?;
        self.kind.open(file, group, rows)
    }

    fn read(&mut self, rows: usize) -> Result<(), String> {
        self.time_ns.read(rows)?;
        self.source.read(rows)?;
        self.domain.read(rows)?;
        self.iova.read(rows)?;
        self.page_size_bytes.read(rows)?;
        self.access.read(rows)?;
        self.kind.read(rows)
    }
}
