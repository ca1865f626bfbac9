// SPDX-License-Identifier: Apache-2.0
//! Reads a trace from Parquet, a batch of each column at a time.
//!
//! A batch is read column by column into flat buffers, then assembled row by row. Columns without nulls
//! skip the level buffers, so the common trace (no times, all pages known) costs one dictionary look-up a
//! value.

use std::fs::File;
use std::num::NonZeroU32;
use std::path::Path;

use pagetide_addr::Iova;
use parquet::data_type::{Int32Type, Int64Type};

use super::{ACCESSES, FORMAT, KINDS, ORIGIN_KEY, PACKET_KEY, TraceMeta, decoded};
use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId};
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
        let meta = read_meta(&file).map_err(wrong)?;
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

fn read_meta(file: &ColumnFile) -> Result<TraceMeta, String> {
    let pairs = pairs(file);
    FORMAT.check(&pairs)?;
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
        let iova = self.iova.required(row)?.cast_unsigned();
        if iova >> IOVA_BITS != 0 {
            return Err(format!("iova {iova:#x} has more than {IOVA_BITS} bits"));
        }
        let kind = self.kind.required(row)?;
        let kind = decoded(&KINDS, kind).ok_or_else(|| format!("kind {kind} is not known"))?;
        let access = self.access.required(row)?;
        let access =
            decoded(&ACCESSES, access).ok_or_else(|| format!("access {access} is not known"))?;
        let page_size = match self.page_size_bytes.optional(row) {
            Some(bytes) => Some(page_size(bytes, kind)?),
            None => None,
        };
        let time_ns = match self.time_ns.optional(row) {
            Some(time) => Some(checked_time(time, &mut self.last_time_ns)?),
            None => None,
        };
        Ok(Event {
            time_ns,
            source: SourceId(self.source.required(row)?.cast_unsigned()),
            domain: IommuDomain(self.domain.required(row)?.cast_unsigned()),
            iova: Iova(iova),
            page_size,
            access,
            kind,
        })
    }
}
