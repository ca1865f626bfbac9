// SPDX-License-Identifier: Apache-2.0
//! Writes a trace as Parquet: rows are gathered column by column until they fill a row group, which then
//! goes to the file as a whole.
//!
//! The file has a temporary name until it is complete, so a reader never finds a partial trace.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use parquet::data_type::{Int32Type, Int64Type};
use parquet::errors::Result as ParquetResult;
use parquet::file::writer::SerializedRowGroupWriter;

use super::codes::{access_code, kind_code};
use super::{SCHEMA, TraceMeta};
use crate::event::{Event, EventKind, IOVA_BITS};
use crate::stream::EventSink;
use pagetide_access_log::columns::{RowWriter, properties, write_column};
use pagetide_access_log::{PartialFile, TraceError};

/// Events of a row group: at 29 bytes an event the writer gathers some 8 MB, and the overhead of a row
/// group (dictionaries, metadata) is below one percent.
pub const ROW_GROUP_EVENTS: usize = 1 << 18;

/// Writes events to a Parquet trace.
///
/// Nothing exists at the path until [`EventSink::finish`]; a writer that is dropped before removes its
/// temporary file.
pub struct ParquetWriter {
    writer: RowWriter,
    rows: Rows,
    /// Events written before those in `rows`.
    done: u64,
    /// Time of the last event that had one.
    last_time_ns: u64,
}

/// An unfinished row group. Columns that may be null have a level a row (1: there is a value) and values
/// only for those rows.
#[derive(Default)]
struct Rows {
    time_ns: Vec<i64>,
    time_levels: Vec<i16>,
    source: Vec<i32>,
    domain: Vec<i32>,
    iova: Vec<i64>,
    page_size: Vec<i64>,
    page_size_levels: Vec<i16>,
    access: Vec<i32>,
    kind: Vec<i32>,
}

impl ParquetWriter {
    /// Starts a trace that will be at `path`.
    ///
    /// # Errors
    /// If no file can be created beside `path`.
    pub fn create(path: &Path, meta: &TraceMeta) -> Result<Self, TraceError> {
        let properties = properties(ROW_GROUP_EVENTS, meta.pairs());
        let (partial, file) = PartialFile::create(path)?;
        Ok(Self {
            writer: RowWriter::begin(partial, file, SCHEMA, properties)?,
            rows: Rows::default(),
            done: 0,
            last_time_ns: 0,
        })
    }

    fn path(&self) -> &Path {
        self.writer.path()
    }

    /// Checks for properties that the reader would refuse.
    fn check(&mut self, event: &Event) -> Result<(), String> {
        if event.iova.0 >> IOVA_BITS != 0 {
            return Err(format!(
                "iova {} has more than {IOVA_BITS} bits",
                event.iova
            ));
        }
        if event.kind == EventKind::Translate
            && let Some(size) = event.page_size
            && size.level().is_none()
        {
            return Err(format!(
                "a request for a page of {size}, which no level maps"
            ));
        }
        if let Some(time) = event.time_ns {
            if time < self.last_time_ns || i64::try_from(time).is_err() {
                return Err(format!(
                    "time {time} ns, after {} ns; times never run backwards and end at 2^63",
                    self.last_time_ns
                ));
            }
            self.last_time_ns = time;
        }
        Ok(())
    }

    /// Writes the gathered rows as a row group.
    fn flush(&mut self) -> Result<(), TraceError> {
        if self.rows.kind.is_empty() {
            return Ok(());
        }
        self.writer.group(|group| self.rows.write(group))?;
        self.done += self.rows.kind.len() as u64;
        self.rows.clear();
        Ok(())
    }
}

impl EventSink for ParquetWriter {
    fn write(&mut self, events: &[Event]) -> Result<(), TraceError> {
        for event in events {
            if let Err(reason) = self.check(event) {
                return Err(TraceError::Record {
                    path: self.path().to_owned(),
                    record: self.done + self.rows.kind.len() as u64,
                    reason,
                });
            }
            self.rows.push(event);
            if self.rows.kind.len() == ROW_GROUP_EVENTS {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<(), TraceError> {
        self.flush()?;
        self.writer.finish()
    }
}

impl std::fmt::Debug for ParquetWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParquetWriter")
            .field("path", &self.path())
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl Rows {
    /// Adds a checked event.
    fn push(&mut self, event: &Event) {
        self.time_levels.push(i16::from(event.time_ns.is_some()));
        self.time_ns.extend(event.time_ns.map(u64::cast_signed));
        self.source.push(event.source.0.cast_signed());
        self.domain.push(event.domain.0.cast_signed());
        self.iova.push(event.iova.0.cast_signed());
        self.page_size_levels
            .push(i16::from(event.page_size.is_some()));
        self.page_size
            .extend(event.page_size.map(|size| size.bytes().cast_signed()));
        self.access.push(access_code(event.access));
        self.kind.push(kind_code(event.kind));
    }

    fn write(
        &self,
        group: &mut SerializedRowGroupWriter<'_, BufWriter<File>>,
    ) -> ParquetResult<()> {
        write_column::<Int64Type>(group, &self.time_ns, Some(&self.time_levels))?;
        write_column::<Int32Type>(group, &self.source, None)?;
        write_column::<Int32Type>(group, &self.domain, None)?;
        write_column::<Int64Type>(group, &self.iova, None)?;
        write_column::<Int64Type>(group, &self.page_size, Some(&self.page_size_levels))?;
        write_column::<Int32Type>(group, &self.access, None)?;
        write_column::<Int32Type>(group, &self.kind, None)
    }

    fn clear(&mut self) {
        self.time_ns.clear();
        self.time_levels.clear();
        self.source.clear();
        self.domain.clear();
        self.iova.clear();
        self.page_size.clear();
        self.page_size_levels.clear();
        self.access.clear();
        self.kind.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind, Write};

    use std::sync::Arc;

    use pagetide_access_log::columns::write_error;
    use parquet::errors::ParquetError;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// A disk that is full from the start.
    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Err(ErrorKind::StorageFull.into())
        }
    }

    #[test]
    fn full_disk_is_an_error_of_the_system_and_says_what_to_do() {
        let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
        let properties = Arc::new(properties(ROW_GROUP_EVENTS, TraceMeta::default().pairs()));
        let written = SerializedFileWriter::new(Full, schema, properties)
            .and_then(|mut writer| writer.finish().map(drop));
        let error = write_error(Path::new("a"), written.unwrap_err());
        let TraceError::Io { source, .. } = &error else {
            panic!("{error:?}");
        };
        assert_eq!(source.kind(), ErrorKind::StorageFull);
        assert!(error.to_string().ends_with("make room, or write elsewhere"));
    }

    #[test]
    fn fault_that_is_not_the_systems_stays_one_of_the_file() {
        for fault in [
            ParquetError::General("so".to_owned()),
            ParquetError::External(Box::new(std::fmt::Error)),
        ] {
            let error = write_error(Path::new("a"), fault);
            assert!(matches!(error, TraceError::File { .. }), "{error}");
        }
        let error = write_error(Path::new("a"), Error::other("so").into());
        assert!(matches!(error, TraceError::Io { .. }), "{error}");
    }
}
