// SPDX-License-Identifier: Apache-2.0
//! Reads a trace from Parquet, a batch of each column at a time.
//!
//! A batch is read column by column into flat buffers, then assembled row by row. Columns without nulls
//! skip the level buffers, so the common trace (no times, all pages known) costs one dictionary look-up a
//! value.

use std::fs::File;
use std::path::Path;

use parquet::data_type::{Int32Type, Int64Type};

use super::{EventRow, FORMAT, TraceMeta};
use crate::event::Event;
use crate::stream::{BATCH_EVENTS, EventSource};
use pagetide_access_log::TraceError;
use pagetide_access_log::columns::{
    AnyColumn, Column, ColumnFile, RowReader, Rows, open_file, pairs,
};

/// Reads events from a Parquet trace of this project.
pub struct ParquetReader {
    meta: TraceMeta,
    rows: RowReader<Columns>,
}

struct Columns {
    time_ns: Column<Int64Type>,
    source: Column<Int32Type>,
    domain: Column<Int32Type>,
    iova: Column<Int64Type>,
    page_size_bytes: Column<Int64Type>,
    access: Column<Int32Type>,
    kind: Column<Int32Type>,
    /// Time of the last event that had one.
    last_time_ns: u64,
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
        let meta = TraceMeta::of_pairs(&pairs(&file)).map_err(wrong)?;
        let columns = Columns::find(&file).map_err(wrong)?;
        let rows = RowReader::new(FORMAT, path, file, columns)?;
        Ok(Self { meta, rows })
    }

    /// The trace's metadata.
    #[must_use]
    pub const fn meta(&self) -> &TraceMeta {
        &self.meta
    }

    /// The file's own count of its events.
    #[must_use]
    pub const fn events(&self) -> u64 {
        self.rows.count()
    }
}

impl EventSource for ParquetReader {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        self.rows.next_batch(batch, BATCH_EVENTS)
    }
}

impl std::fmt::Debug for ParquetReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParquetReader")
            .field("path", &self.rows.path())
            .field("meta", &self.meta)
            .field("events", &self.events())
            .field("done", &self.rows.done())
            .finish_non_exhaustive()
    }
}

impl Columns {
    fn find(file: &ColumnFile) -> Result<Self, String> {
        Ok(Self {
            time_ns: Column::find(file, "time_ns")?,
            source: Column::find(file, "source")?,
            domain: Column::find(file, "domain")?,
            iova: Column::find(file, "iova")?,
            page_size_bytes: Column::find(file, "page_size_bytes")?,
            access: Column::find(file, "access")?,
            kind: Column::find(file, "kind")?,
            last_time_ns: 0,
        })
    }
}

impl Rows for Columns {
    type Row = Event;

    fn columns(&mut self) -> Vec<&mut dyn AnyColumn> {
        vec![
            &mut self.time_ns,
            &mut self.source,
            &mut self.domain,
            &mut self.iova,
            &mut self.page_size_bytes,
            &mut self.access,
            &mut self.kind,
        ]
    }

    fn row(&mut self, row: usize) -> Result<Event, String> {
        let row = EventRow {
            time_ns: self.time_ns.optional(row),
            source: self.source.required(row)?.cast_unsigned(),
            domain: self.domain.required(row)?.cast_unsigned(),
            iova: self.iova.required(row)?.cast_unsigned(),
            page_size_bytes: self.page_size_bytes.optional(row),
            access: self.access.required(row)?,
            kind: self.kind.required(row)?,
        };
        row.event(&mut self.last_time_ns)
    }
}
