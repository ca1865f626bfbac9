// SPDX-License-Identifier: Apache-2.0
//! Columns of a Parquet file, read a batch at a time and written a row group at a time; `rows` puts them
//! together to files. All of our Parquet formats use this module.
//!
//! Pages are decompressed by `codec`, not by the crate. All calls into the `parquet` crate that look at a file's bytes go through
//! `contain::contained`.
//!
//! # Hostile files
//! The `parquet` crate is careful but large. `contain::contained` turns a panic into an error, and pages pass
//! `contain::CheckedPages`, which stops those that would make it reserve memory out of proportion to the file.
//! `footer` first checks that the schema is not nested so deep that the crate would overflow the stack.

mod codec;
mod contain;
mod footer;
mod rows;

pub use rows::{FORMAT_KEY, Format, RowReader, RowWriter, Rows, VERSION_KEY};

use std::collections::HashMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::column::reader::{ColumnReaderImpl, get_column_reader, get_typed_column_reader};
use parquet::data_type::DataType;
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::{KeyValue, ParquetMetaData};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::file::writer::SerializedRowGroupWriter;
use parquet::schema::types::ColumnPath;

use crate::error::TraceError;
use codec::Codec;
use contain::{CheckedPages, contained};

/// An open Parquet file.
pub struct ColumnFile {
    input: Arc<File>,
    reader: SerializedFileReader<File>,
}

impl ColumnFile {
    /// What the footer says.
    #[must_use]
    pub fn metadata(&self) -> &ParquetMetaData {
        self.reader.metadata()
    }
}

/// Opens `input` as a Parquet file, after a check of its footer.
pub fn open_file(mut input: File) -> Result<ColumnFile, String> {
    footer::check(&mut input)?;
    let pages = input.try_clone().map_err(|error| error.to_string())?;
    Ok(ColumnFile {
        input: Arc::new(pages),
        reader: contained(|| SerializedFileReader::new(input))?,
    })
}

/// The file's key-value metadata.
pub fn pairs(file: &ColumnFile) -> HashMap<&str, &str> {
    file.metadata()
        .file_metadata()
        .key_value_metadata()
        .into_iter()
        .flatten()
        .map(|pair| (pair.key.as_str(), pair.value.as_deref().unwrap_or_default()))
        .collect()
}

/// A column of any type.
pub trait AnyColumn {
    /// Goes to the row group `group`, which has `rows` rows.
    ///
    /// # Errors
    /// If the file is broken there.
    fn open(&mut self, file: &ColumnFile, group: usize, rows: u64) -> Result<(), String>;

    /// Reads the values of the next `rows` rows, all of them or none.
    ///
    /// # Errors
    /// If the file is broken there.
    fn read(&mut self, rows: usize) -> Result<(), String>;
}

/// One column: where it is, and its part of the batch.
pub struct Column<T: DataType> {
    name: &'static str,
    index: usize,
    /// Whether rows may be null, by the schema.
    max_level: i16,
    reader: Option<ColumnReaderImpl<T>>,
    values: Vec<T::T>,
    levels: Vec<i16>,
    /// Next value of `values`, while rows are put together.
    next: usize,
}

impl<T: DataType> Column<T>
where
    T::T: Copy,
{
    /// Looks for the top-level column `name` and checks its type.
    pub fn find(file: &ColumnFile, name: &'static str) -> Result<Self, String> {
        let schema = file.metadata().file_metadata().schema_descr();
        let index = schema
            .columns()
            .iter()
            .position(|column| column.path().parts() == [name])
            .ok_or_else(|| format!("it has no column `{name}`"))?;
        let column = schema.column(index);
        if column.physical_type() != T::get_physical_type() || column.max_rep_level() != 0 {
            return Err(format!(
                "its column `{name}` is of type {}, and should be {}",
                column.physical_type(),
                T::get_physical_type()
            ));
        }
        Ok(Self {
            name,
            index,
            max_level: column.max_def_level(),
            reader: None,
            values: Vec::new(),
            levels: Vec::new(),
            next: 0,
        })
    }

    /// Value of row `row` of the batch; rows must be requested in order.
    pub fn optional(&mut self, row: usize) -> Option<T::T> {
        let present = self
            .levels
            .get(row)
            .is_none_or(|level| *level == self.max_level);
        if !present {
            return None;
        }
        let value = self.values.get(self.next).copied();
        self.next += 1;
        value
    }

    /// The value of row `row` of the batch, which must not be null.
    pub fn required(&mut self, row: usize) -> Result<T::T, String> {
        self.optional(row)
            .ok_or_else(|| format!("column `{}` is null", self.name))
    }

    fn complaint(&self, reason: &str) -> String {
        format!("column `{}`: {reason}", self.name)
    }
}

impl<T: DataType> AnyColumn for Column<T>
where
    T::T: Copy,
{
    fn open(&mut self, file: &ColumnFile, group: usize, rows: u64) -> Result<(), String> {
        let index = self.index;
        let chunk = file.metadata().row_group(group).column(index);
        let codec = Codec::of(chunk.compression()).map_err(|reason| self.complaint(&reason))?;
        let reader = contained(|| {
            // The crate hands out the pages as they are if it believes that they are not compressed.
            let chunk = chunk.clone().into_builder();
            let chunk = chunk.set_compression(Compression::UNCOMPRESSED).build()?;
            let rows_max = usize::try_from(rows)?;
            let inner = SerializedPageReader::new(file.input.clone(), &chunk, rows_max, None)?;
            let pages = CheckedPages {
                inner: Box::new(inner),
                codec,
                rows,
                value_bytes: size_of::<T::T>() as u64,
            };
            let descr = file.metadata().file_metadata().schema_descr().column(index);
            Ok(get_typed_column_reader(get_column_reader(
                descr,
                Box::new(pages),
            )))
        });
        self.reader = Some(reader.map_err(|reason| self.complaint(&reason))?);
        Ok(())
    }

    fn read(&mut self, rows: usize) -> Result<(), String> {
        self.values.clear();
        self.levels.clear();
        self.next = 0;
        let (values, levels) = (&mut self.values, &mut self.levels);
        let Some(reader) = &mut self.reader else {
            return Err("no row group is open".to_owned());
        };
        let read = contained(|| reader.read_records(rows, Some(levels), None, values));
        match read {
            Ok((count, ..)) if count == rows => {}
            Ok((count, ..)) => {
                return Err(self.complaint(&format!("{count} rows where {rows} should be")));
            }
            Err(reason) => return Err(self.complaint(&reason)),
        }
        // If the batch has no null, the levels carry no information.
        if self.max_level != 0 && self.values.len() == rows {
            self.levels.clear();
        }
        Ok(())
    }
}

/// How our files are written: times are stored as differences; all other columns have many repeated values,
/// so they use dictionaries, and where one grows too large the crate falls back to plain values. `pairs` is
/// the key-value metadata.
#[must_use]
pub fn properties(group_rows: usize, pairs: Vec<(&str, String)>) -> WriterProperties {
    let time = ColumnPath::from("time_ns");
    let pairs = pairs
        .into_iter()
        .map(|(key, value)| KeyValue::new(key.to_owned(), value));
    WriterProperties::builder()
        .set_compression(Compression::LZ4_RAW)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_column_dictionary_enabled(time.clone(), false)
        .set_column_encoding(time, Encoding::DELTA_BINARY_PACKED)
        .set_max_row_group_row_count(Some(group_rows))
        .set_created_by(concat!("pagetide ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_key_value_metadata(Some(pairs.collect()))
        .build()
}

/// Writes the next column of a row group.
pub fn write_column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, BufWriter<File>>,
    values: &[T::T],
    levels: Option<&[i16]>,
) -> ParquetResult<()> {
    let Some(mut writer) = group.next_column()? else {
        return Err(ParquetError::General(
            "more columns than the schema has".to_owned(),
        ));
    };
    writer.typed::<T>().write_batch(values, levels, None)?;
    writer.close()
}

/// The crate wraps the system's error; this extracts it, since a full disk is no fault of the trace.
pub fn write_error(path: &Path, error: ParquetError) -> TraceError {
    let refused = |reason: &dyn std::fmt::Display| TraceError::File {
        path: path.to_owned(),
        reason: format!("cannot be written: {reason}"),
    };
    match error {
        ParquetError::External(inner) => match inner.downcast::<std::io::Error>() {
            Ok(source) => TraceError::Io {
                path: path.to_owned(),
                source: *source,
            },
            Err(inner) => refused(&inner),
        },
        other => refused(&other),
    }
}
