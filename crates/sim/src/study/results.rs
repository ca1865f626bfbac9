// SPDX-License-Identifier: Apache-2.0
//! Results as Parquet: one row a point, one column for a parameter, an item of provenance, or a figure.
//!
//! | columns | what |
//! |---|---|
//! | `point`, `id` | number in the study, identity |
//! | `variant` | the point's variant, if the study has any |
//! | `preset`, `config_…` | every parameter of the run: `config_devtlb_entries` |
//! | `trace_…` | every parameter of the trace's recipe: `trace_tenants`, `trace_input_synthetic_workload` |
//! | `trace_recipe` | the recipe as JSON, if there is one |
//! | `trace_files`, `trace_file_sha256`, `trace_file_bytes` | the file; of several logs their names and hashes, a space between, and the sum |
//! | `trace_events_sha256` | of a trace that was only in memory, the hash of its events |
//! | `pagetide_version`, `git_commit`, `program_sha256`, `host`, `started_at`, `wall_seconds` | provenance |
//! | all others | figures: `gbps`, `caches_devtlb_hits`, `latency_p99_ns` |
//!
//! A missing value is null; a column without values is omitted. Names have no dots, because tools interpret
//! those as nested columns. The file's metadata has `pagetide.format`, `pagetide.version` and, under
//! `pagetide.study`, the study as JSON.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;

use pagetide_access_log::PartialFile;
use pagetide_access_log::columns::{FORMAT_KEY, VERSION_KEY, write_column};
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use super::columns;
use super::error::StudyError;
use super::identity::PointId;
use super::journal::Run;
use super::points::Study;
use super::trace::Trace;
use super::traces::Traces;

/// The format name of results in their metadata.
pub const RESULTS_FORMAT: &str = "pagetide-sim-results";

/// The only column that is a time.
const STARTED: &str = "started_at";

/// One row of the results.
#[derive(Clone, PartialEq, Debug)]
pub struct SweepRow {
    /// Identity of the point.
    pub id: PointId,
    /// Its run.
    pub run: Run,
}

/// Writes one row a point to `path`, under a temporary name until the file is complete.
pub(super) fn write_results(
    study: &Study,
    traces: &Traces,
    rows: &[SweepRow],
    path: &Path,
) -> Result<(), StudyError> {
    let rows: Vec<_> = rows
        .iter()
        .enumerate()
        .map(|(number, row)| cells(study, traces, number, row))
        .collect();
    write_table(&rows, &study.source, path)
}

/// Writes rows of named values to `path`, with `source`, what they are from, in its metadata.
pub(crate) fn write_table(
    rows: &[Vec<(String, Value)>],
    source: &Value,
    path: &Path,
) -> Result<(), StudyError> {
    let failed = |error: &dyn std::fmt::Display| StudyError::Write {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let (partial, file) = PartialFile::create(path)?;
    let file = write_columns(&result_columns(rows), file, source)
        .map_err(|error| failed(&error))?
        .into_inner()
        .map_err(|error| failed(&error.into_error()))?;
    Ok(partial.complete(&file)?)
}

/// All of row `number` of the results, by column; `row` is what the point gave.
#[must_use]
pub fn cells(
    study: &Study,
    traces: &Traces,
    number: usize,
    row: &SweepRow,
) -> Vec<(String, Value)> {
    let point = &study.points[number];
    let mut cells = vec![
        ("point".to_owned(), json!(number)),
        ("id".to_owned(), json!(row.id)),
        ("variant".to_owned(), json!(point.variant)),
        ("preset".to_owned(), json!(point.preset)),
    ];
    columns::flatten("config", '_', &columns::json(&point.config), &mut cells);
    if let Trace::Made(spec) = &study.traces[point.trace] {
        let recipe = columns::json(spec);
        columns::flatten("trace", '_', &recipe, &mut cells);
        cells.push(("trace_recipe".to_owned(), recipe.to_string().into()));
    }
    if let Trace::Memory(memory) = &study.traces[point.trace] {
        cells.push(("trace_events_sha256".to_owned(), memory.sha256().into()));
    }
    let files = traces.files(point.trace);
    if !files.is_empty() {
        let joined = |parts: Vec<String>| Value::from(parts.join(" "));
        let names = files.iter().map(|file| file.path.display().to_string());
        let hashes = files.iter().map(|file| file.sha256.clone());
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        cells.push(("trace_files".to_owned(), joined(names.collect())));
        cells.push(("trace_file_sha256".to_owned(), joined(hashes.collect())));
        cells.push(("trace_file_bytes".to_owned(), bytes.into()));
    }
    let run = &row.run;
    cells.extend(
        [
            ("pagetide_version", json!(run.build.pagetide_version)),
            ("git_commit", json!(run.build.git_commit)),
            ("program_sha256", json!(run.build.program_sha256)),
            ("host", json!(run.host)),
            (STARTED, json!(run.started_unix_ms)),
            ("wall_seconds", json!(run.wall_seconds)),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    let figures = run.figures.iter();
    cells.extend(figures.map(|(name, value)| (name.clone(), value.clone())));
    cells
}

/// The content of a column of results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColumnKind {
    /// A time, in milliseconds of Unix time.
    Time,
    /// Yes or no.
    Truth,
    /// A whole number.
    Whole,
    /// A number.
    Real,
    /// Text.
    Text,
}

/// One column of results.
#[derive(Clone, PartialEq, Debug)]
pub struct ResultColumn {
    /// Its name.
    pub name: String,
    /// The narrowest kind that fits every value.
    pub kind: ColumnKind,
    /// One a row; null where a row has none.
    pub values: Vec<Value>,
}

/// Rows of named values as columns, in the order of their first appearance; columns without any value are left
/// out.
#[must_use]
pub fn result_columns(rows: &[Vec<(String, Value)>]) -> Vec<ResultColumn> {
    let mut columns: Vec<(String, Vec<Value>)> = Vec::new();
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    for (number, row) in rows.iter().enumerate() {
        for (name, value) in row {
            let at = *by_name.entry(name).or_insert_with(|| {
                columns.push((name.clone(), vec![Value::Null; rows.len()]));
                columns.len() - 1
            });
            columns[at].1[number] = value.clone();
        }
    }
    let typed = columns.into_iter().filter_map(|(name, values)| {
        let kind = match name.as_str() {
            STARTED => ColumnKind::Time,
            _ => kind_of(&values)?,
        };
        Some(ResultColumn { name, kind, values })
    });
    typed.collect()
}

/// The narrowest kind that fits every value; `None` if all are null.
fn kind_of(values: &[Value]) -> Option<ColumnKind> {
    use ColumnKind::{Real, Text, Truth, Whole};
    let kinds = values.iter().filter_map(|value| match value {
        Value::Null => None,
        Value::Bool(_) => Some(Truth),
        Value::Number(number) if number.is_u64() => Some(Whole),
        Value::Number(_) => Some(Real),
        _ => Some(Text),
    });
    kinds.reduce(|a, b| match (a, b) {
        (a, b) if a == b => a,
        (Whole, Real) | (Real, Whole) => Real,
        _ => Text,
    })
}

fn write_columns(
    columns: &[ResultColumn],
    file: File,
    study: &Value,
) -> ParquetResult<BufWriter<File>> {
    let fields: Vec<String> = columns.iter().map(ResultColumn::declaration).collect();
    let schema = format!("message results {{ {} }}", fields.join(" "));
    let pair = |key: &str, value: String| KeyValue::new(key.to_owned(), value);
    let properties = WriterProperties::builder()
        .set_compression(Compression::LZ4_RAW)
        .set_key_value_metadata(Some(vec![
            pair(FORMAT_KEY, RESULTS_FORMAT.to_owned()),
            pair(VERSION_KEY, "1".to_owned()),
            pair("pagetide.study", study.to_string()),
        ]))
        .build();
    let mut writer = SerializedFileWriter::new(
        BufWriter::new(file),
        Arc::new(parse_message_type(&schema)?),
        Arc::new(properties),
    )?;
    let mut group = writer.next_row_group()?;
    for column in columns {
        column.write(&mut group)?;
    }
    group.close()?;
    writer.into_inner()
}

impl ResultColumn {
    /// A value as text without quotes.
    #[must_use]
    pub fn text(value: &Value) -> String {
        columns::plain(value)
    }

    fn declaration(&self) -> String {
        let name = &self.name;
        match self.kind {
            ColumnKind::Time => format!("optional int64 {name} (timestamp(millis,true));"),
            ColumnKind::Truth => format!("optional boolean {name};"),
            ColumnKind::Whole => format!("optional int64 {name} (integer(64,false));"),
            ColumnKind::Real => format!("optional double {name};"),
            ColumnKind::Text => format!("optional binary {name} (string);"),
        }
    }

    fn write(
        &self,
        group: &mut SerializedRowGroupWriter<'_, BufWriter<File>>,
    ) -> ParquetResult<()> {
        let present = || self.values.iter().filter(|value| !value.is_null());
        match self.kind {
            ColumnKind::Truth => {
                let values = present().map(|value| value == &Value::Bool(true));
                self.write_as::<BoolType>(values.collect(), group)
            }
            ColumnKind::Time | ColumnKind::Whole => {
                // The schema declares whole numbers 64 bits unsigned.
                let values = present().map(|value| value.as_u64().unwrap_or_default());
                self.write_as::<Int64Type>(values.map(u64::cast_signed).collect(), group)
            }
            ColumnKind::Real => {
                let values = present().map(|value| value.as_f64().unwrap_or(f64::NAN));
                self.write_as::<DoubleType>(values.collect(), group)
            }
            ColumnKind::Text => {
                let values = present().map(|value| ByteArray::from(columns::plain(value).as_str()));
                self.write_as::<ByteArrayType>(values.collect(), group)
            }
        }
    }

    fn write_as<T: DataType>(
        &self,
        values: Vec<T::T>,
        group: &mut SerializedRowGroupWriter<'_, BufWriter<File>>,
    ) -> ParquetResult<()> {
        let levels: Vec<i16> = self
            .values
            .iter()
            .map(|value| i16::from(!value.is_null()))
            .collect();
        write_column::<T>(group, &values, Some(&levels))
    }
}
