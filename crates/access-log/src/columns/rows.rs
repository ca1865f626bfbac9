// SPDX-License-Identifier: Apache-2.0
//! Whole files of a [`Format`]: their rows a batch at a time, and their row groups one after the other.
//!
//! ```text
//!   RowReader ──► row group ──► a batch of each column ──► Rows::row ──► rows, or the one that is broken
//!   RowWriter ◄── row group ◄── a slice for each column
//! ```
//! A format declares its columns and how a row is put together ([`Rows`]); what is the same for all formats
//! is here: names and versions in the metadata, row groups, the order of errors, the end of the file.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

use super::{AnyColumn, ColumnFile, write_error};
use crate::error::TraceError;
use crate::partial::PartialFile;

/// Key of the metadata that names the format of a file.
pub const FORMAT_KEY: &str = "pagetide.format";

/// Key of the metadata with the version of that format.
pub const VERSION_KEY: &str = "pagetide.version";

/// Bytes gathered before a call into the kernel.
const BUFFER_BYTES: usize = 1 << 18;

/// A Parquet format of this project.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Format {
    /// Its name, under [`FORMAT_KEY`].
    pub name: &'static str,
    /// The version that is read and written, under [`VERSION_KEY`].
    pub version: &'static str,
    /// What a file of it is, with its article.
    pub file: &'static str,
    /// What its rows are.
    pub rows: &'static str,
}

impl Format {
    /// What every file of it has in its metadata.
    #[must_use]
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        vec![
            (FORMAT_KEY, self.name.to_owned()),
            (VERSION_KEY, self.version.to_owned()),
        ]
    }

    /// Checks that the metadata of a file are of this format and version.
    ///
    /// # Errors
    /// What it is instead.
    pub fn check(&self, pairs: &HashMap<&str, &str>) -> Result<(), String> {
        let Self { name, version, .. } = self;
        match pairs.get(FORMAT_KEY) {
            Some(found) if found == name => {}
            Some(other) => return Err(format!("its {FORMAT_KEY} is `{other}`, not `{name}`")),
            None => {
                return Err(format!(
                    "a Parquet file, but not {}: its metadata has no {FORMAT_KEY}",
                    self.file
                ));
            }
        }
        match pairs.get(VERSION_KEY) {
            Some(found) if found == version => Ok(()),
            other => Err(format!(
                "{} of version `{}`; this program reads version `{version}`",
                self.file,
                other.copied().unwrap_or_default()
            )),
        }
    }
}

/// The columns of a format, with a batch of each.
pub trait Rows {
    /// A row, put together and checked.
    type Row;

    /// All columns.
    fn columns(&mut self) -> Vec<&mut dyn AnyColumn>;

    /// Row number `at` of the batch; called for one after the other.
    ///
    /// # Errors
    /// What is wrong with it.
    fn row(&mut self, at: usize) -> Result<Self::Row, String>;
}

/// Reads the rows of a file.
pub struct RowReader<R> {
    format: Format,
    path: PathBuf,
    /// `None` once the end or an error was reached.
    file: Option<ColumnFile>,
    rows: R,
    /// Rows of the file, by its own count.
    count: u64,
    /// Row group to be opened next.
    next_group: usize,
    /// Rows of the open row group not read yet.
    rows_left: u64,
    /// Rows returned so far.
    done: u64,
    /// The error after the rows returned last.
    broken: Option<TraceError>,
}

impl<R: Rows> RowReader<R> {
    /// Of `file`, at `path`, which was checked to be of `format`.
    ///
    /// # Errors
    /// If its number of rows is impossible.
    pub fn new(format: Format, path: &Path, file: ColumnFile, rows: R) -> Result<Self, TraceError> {
        let count = u64::try_from(file.metadata().file_metadata().num_rows()).map_err(|_| {
            TraceError::File {
                path: path.to_owned(),
                reason: "the number of rows is negative".to_owned(),
            }
        })?;
        Ok(Self {
            format,
            path: path.to_owned(),
            file: Some(file),
            rows,
            count,
            next_group: 0,
            rows_left: 0,
            done: 0,
            broken: None,
        })
    }

    /// The file's own count of its rows.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Rows returned so far.
    #[must_use]
    pub const fn done(&self) -> u64 {
        self.done
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the next rows to `batch`, at most `rows_max`; none means the end.
    ///
    /// # Errors
    /// If the file is broken there; rows before the break were returned, and there are none after it.
    pub fn next_batch(
        &mut self,
        batch: &mut Vec<R::Row>,
        rows_max: usize,
    ) -> Result<usize, TraceError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        if self.file.is_none() {
            return Ok(0);
        }
        let rows = match self.read_columns(rows_max) {
            Ok(rows) => rows,
            Err(reason) => return Err(self.fail(&reason)),
        };
        if rows == 0 {
            return self.end();
        }
        batch.reserve(rows);
        for at in 0..rows {
            match self.rows.row(at) {
                Ok(row) => batch.push(row),
                Err(reason) => {
                    self.done += at as u64;
                    let error = self.fail(&reason);
                    if at == 0 {
                        return Err(error);
                    }
                    self.broken = Some(error);
                    return Ok(at);
                }
            }
        }
        self.done += rows as u64;
        Ok(rows)
    }

    /// Reads a batch of every column; returns the rows read.
    fn read_columns(&mut self, rows_max: usize) -> Result<usize, String> {
        if !self.open_group()? {
            return Ok(0);
        }
        let rows = usize::try_from(self.rows_left)
            .unwrap_or(usize::MAX)
            .min(rows_max);
        for column in self.rows.columns() {
            column.read(rows)?;
        }
        self.rows_left -= rows as u64;
        Ok(rows)
    }

    /// Opens the next row group that has rows; returns whether there was one.
    fn open_group(&mut self) -> Result<bool, String> {
        let Some(file) = &self.file else {
            return Ok(false);
        };
        while self.rows_left == 0 && self.next_group < file.metadata().num_row_groups() {
            let group = self.next_group;
            self.next_group += 1;
            let rows = file.metadata().row_group(group).num_rows();
            self.rows_left = u64::try_from(rows).map_err(|_| format!("it claims {rows} rows"))?;
            for column in self.rows.columns() {
                column.open(file, group, self.rows_left)?;
            }
        }
        Ok(self.rows_left != 0)
    }

    /// Checks at the end that all rows were read.
    fn end(&mut self) -> Result<usize, TraceError> {
        self.file = None;
        if self.done == self.count {
            return Ok(0);
        }
        let rows = self.format.rows;
        Err(TraceError::Record {
            path: self.path.clone(),
            record: self.done,
            reason: format!(
                "the file says it has {} {rows}, and has {}",
                self.count, self.done
            ),
        })
    }

    /// Ends the reading with an error at the next row.
    fn fail(&mut self, reason: &str) -> TraceError {
        self.file = None;
        TraceError::Record {
            path: self.path.clone(),
            record: self.done,
            reason: format!("row group {}: {reason}", self.next_group.saturating_sub(1)),
        }
    }
}

/// Writes the row groups of a file, which has a temporary name until it is complete; dropped before, it is
/// removed.
pub struct RowWriter {
    partial: PartialFile,
    writer: SerializedFileWriter<BufWriter<File>>,
}

impl RowWriter {
    /// Begins `file`, which `partial` will give its name, with the columns of `schema`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn begin(
        partial: PartialFile,
        file: File,
        schema: &str,
        properties: WriterProperties,
    ) -> Result<Self, TraceError> {
        let writer = parse_message_type(schema)
            .and_then(|schema| {
                let file = BufWriter::with_capacity(BUFFER_BYTES, file);
                SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))
            })
            .map_err(|error| write_error(partial.path(), error))?;
        Ok(Self { partial, writer })
    }

    /// The name that the file will have.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.partial.path()
    }

    /// Bytes written so far.
    #[must_use]
    pub fn bytes_written(&self) -> u64 {
        self.writer.bytes_written() as u64
    }

    /// Writes a row group; `columns` writes its columns, in the order of the schema.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn group(
        &mut self,
        columns: impl FnOnce(&mut SerializedRowGroupWriter<'_, BufWriter<File>>) -> ParquetResult<()>,
    ) -> Result<(), TraceError> {
        let write = || {
            let mut group = self.writer.next_row_group()?;
            columns(&mut group)?;
            group.close().map(drop)
        };
        write().map_err(|error| write_error(self.partial.path(), error))
    }

    /// Adds metadata that is known at the end only.
    pub fn add_pair(&mut self, key: &str, value: String) {
        self.writer
            .append_key_value_metadata(KeyValue::new(key.to_owned(), value));
    }

    /// Completes the file.
    ///
    /// # Errors
    /// If it cannot be completed; then nothing is left of it.
    pub fn finish(self) -> Result<(), TraceError> {
        let path = self.partial.path().to_owned();
        let buffer = self
            .writer
            .into_inner()
            .map_err(|error| write_error(&path, error))?;
        let file = buffer.into_inner().map_err(|error| TraceError::Io {
            path,
            source: error.into_error(),
        })?;
        self.partial.complete(&file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: Format = Format {
        name: "pagetide-test",
        version: "2",
        file: "a test",
        rows: "tests",
    };

    fn checked(pairs: &[(&str, &str)]) -> Result<(), String> {
        FORMAT.check(&pairs.iter().copied().collect())
    }

    #[test]
    fn file_of_another_format_or_version_says_what_it_is() {
        let own = FORMAT.pairs();
        let own: Vec<_> = own.iter().map(|(key, value)| (*key, &**value)).collect();
        assert_eq!(checked(&own), Ok(()));
        let error = checked(&[]).unwrap_err();
        assert!(
            error.starts_with("a Parquet file, but not a test:"),
            "{error}"
        );
        let error = checked(&[(FORMAT_KEY, "other")]).unwrap_err();
        assert!(error.contains("is `other`, not `pagetide-test`"), "{error}");
        let error = checked(&[(FORMAT_KEY, "pagetide-test"), (VERSION_KEY, "3")]).unwrap_err();
        assert_eq!(
            error,
            "a test of version `3`; this program reads version `2`"
        );
        checked(&own[..1]).unwrap_err();
    }
}
