// SPDX-License-Identifier: Apache-2.0
//! Events from record batches that somebody else made: nothing about them is trusted but that they are batches.
//!
//! Columns are found by name. Any integer type will do, since tools change them (pandas makes most things 64 bits
//! wide, and floats of integers with nulls); a value that does not fit is an error of its row. `source`, `domain` and `iova` are required; without
//! `kind` all rows are requests, and `time_ns`, `page_size_bytes` and `access` are not known where they are missing
//! or null.

use std::collections::HashMap;

use arrow_array::types::{
    Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type,
    UInt64Type,
};
use arrow_array::{Array, PrimitiveArray, RecordBatch};
use arrow_schema::{DataType, Schema};
use pagetide_trace::{Event, EventRow, TraceMeta};

/// Most events that are read into memory: 10 GiB of them. Longer traces are files.
pub const EVENTS_MAX: usize = 1 << 28;

/// Why a table is no trace.
#[derive(Debug, thiserror::Error)]
pub enum ArrowError {
    /// The table as a whole.
    #[error("the table is no trace: {0}")]
    Table(String),
    /// One row.
    #[error("the table, record {record}: {reason}")]
    Record {
        /// Its number, from 0.
        record: u64,
        /// What is wrong.
        reason: String,
    },
}

/// Reads the events in `batches`, whose schema is `schema`, and what their metadata says about them; `None` if
/// they have none of ours.
///
/// # Errors
/// The column or the first row that is wrong, or why there is no next batch.
pub fn read_events(
    schema: &Schema,
    batches: impl Iterator<Item = Result<RecordBatch, arrow_schema::ArrowError>>,
) -> Result<(Vec<Event>, Option<TraceMeta>), ArrowError> {
    Columns::check(schema)?;
    let meta = meta(schema)?;
    let mut events = Vec::new();
    let mut last_time_ns = 0;
    for batch in batches {
        let batch = batch.map_err(|error| {
            let reason = format!("the table's source fails here: {error}");
            wrong_row(events.len(), reason)
        })?;
        let columns = Columns::of(&batch)?;
        if batch.num_rows() > EVENTS_MAX - events.len() {
            return Err(ArrowError::Table(format!(
                "it has more than {EVENTS_MAX} rows; write it to a Parquet file and read that"
            )));
        }
        events.reserve(batch.num_rows());
        for row in 0..batch.num_rows() {
            let event = columns
                .row(row)
                .and_then(|row| row.event(&mut last_time_ns))
                .map_err(|reason| wrong_row(events.len(), reason))?;
            events.push(event);
        }
    }
    Ok((events, meta))
}

fn wrong_row(record: usize, reason: String) -> ArrowError {
    let record = record as u64;
    ArrowError::Record { record, reason }
}

/// The metadata of a trace, if there is any.
fn meta(schema: &Schema) -> Result<Option<TraceMeta>, ArrowError> {
    let pairs: HashMap<&str, &str> = schema
        .metadata()
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    if !pairs.keys().any(|key| key.starts_with("pagetide.")) {
        return Ok(None);
    }
    TraceMeta::of_pairs(&pairs)
        .map(Some)
        .map_err(ArrowError::Table)
}

/// One column, of whichever integer type.
enum Integers<'a> {
    Int8(&'a PrimitiveArray<Int8Type>),
    Int16(&'a PrimitiveArray<Int16Type>),
    Int32(&'a PrimitiveArray<Int32Type>),
    Int64(&'a PrimitiveArray<Int64Type>),
    UInt8(&'a PrimitiveArray<UInt8Type>),
    UInt16(&'a PrimitiveArray<UInt16Type>),
    UInt32(&'a PrimitiveArray<UInt32Type>),
    UInt64(&'a PrimitiveArray<UInt64Type>),
    /// Whole numbers, and NaN for null: pandas has a column of integers with nulls like this.
    Float64(&'a PrimitiveArray<Float64Type>),
    /// The column is missing, or of nulls.
    Nulls,
}

impl<'a> Integers<'a> {
    fn of(array: &'a dyn Array) -> Self {
        let any = array.as_any();
        let found = match array.data_type() {
            DataType::Int8 => any.downcast_ref().map(Self::Int8),
            DataType::Int16 => any.downcast_ref().map(Self::Int16),
            DataType::Int32 => any.downcast_ref().map(Self::Int32),
            DataType::Int64 => any.downcast_ref().map(Self::Int64),
            DataType::UInt8 => any.downcast_ref().map(Self::UInt8),
            DataType::UInt16 => any.downcast_ref().map(Self::UInt16),
            DataType::UInt32 => any.downcast_ref().map(Self::UInt32),
            DataType::UInt64 => any.downcast_ref().map(Self::UInt64),
            DataType::Float64 => any.downcast_ref().map(Self::Float64),
            _ => None,
        };
        found.unwrap_or(Self::Nulls)
    }

    fn get(&self, row: usize) -> Option<i128> {
        match self {
            Self::Int8(array) => value(array, row).map(i128::from),
            Self::Int16(array) => value(array, row).map(i128::from),
            Self::Int32(array) => value(array, row).map(i128::from),
            Self::Int64(array) => value(array, row).map(i128::from),
            Self::UInt8(array) => value(array, row).map(i128::from),
            Self::UInt16(array) => value(array, row).map(i128::from),
            Self::UInt32(array) => value(array, row).map(i128::from),
            Self::UInt64(array) => value(array, row).map(i128::from),
            Self::Float64(array) => value(array, row).and_then(whole),
            Self::Nulls => None,
        }
    }
}

/// A float as a number; `None` for NaN. One that is not whole, or not exact, is out of any column's range.
fn whole(value: f64) -> Option<i128> {
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    if value.is_nan() {
        return None;
    }
    if value.fract() != 0.0 || value.abs() > EXACT_MAX {
        return Some(i128::MAX);
    }
    #[expect(clippy::cast_possible_truncation, reason = "a whole number below 2^53")]
    let exact = value as i64;
    Some(i128::from(exact))
}

fn value<T: arrow_array::ArrowPrimitiveType>(
    array: &PrimitiveArray<T>,
    row: usize,
) -> Option<T::Native> {
    array.is_valid(row).then(|| array.value(row))
}

/// The columns of a batch.
struct Columns<'a>([Integers<'a>; NAMES.len()]);

const NAMES: [&str; 7] = [
    "time_ns",
    "source",
    "domain",
    "iova",
    "page_size_bytes",
    "access",
    "kind",
];
/// Those that may be null, so that a tool may have made floats of them.
const NULLABLE: [&str; 2] = ["time_ns", "page_size_bytes"];
/// Those that may not be missing.
const REQUIRED: [&str; 3] = ["source", "domain", "iova"];

impl<'a> Columns<'a> {
    fn check(schema: &Schema) -> Result<(), ArrowError> {
        for name in NAMES {
            let mut found = schema.fields().iter().filter(|field| field.name() == name);
            let Some(field) = found.next() else {
                if REQUIRED.contains(&name) {
                    let reason = format!("it has no column '{name}'");
                    return Err(ArrowError::Table(reason));
                }
                continue;
            };
            let kind = field.data_type();
            let floats = *kind == DataType::Float64 && NULLABLE.contains(&name);
            if !(kind.is_integer() || floats || *kind == DataType::Null) {
                return Err(ArrowError::Table(format!(
                    "its column '{name}' is of type {kind}; integers are expected"
                )));
            }
            if found.next().is_some() {
                let reason = format!("it has several columns '{name}'");
                return Err(ArrowError::Table(reason));
            }
        }
        Ok(())
    }

    fn of(batch: &'a RecordBatch) -> Result<Self, ArrowError> {
        // A batch is of its reader's schema only if the reader says the truth.
        Self::check(batch.schema_ref())?;
        Ok(Self(NAMES.map(|name| {
            batch
                .column_by_name(name)
                .map_or(Integers::Nulls, |column| Integers::of(column.as_ref()))
        })))
    }

    fn row(&self, row: usize) -> Result<EventRow, String> {
        let [time_ns, source, domain, iova, page_size_bytes, access, kind] = &self.0;
        Ok(EventRow {
            time_ns: optional("time_ns", time_ns.get(row))?,
            source: required("source", source.get(row))?,
            domain: required("domain", domain.get(row))?,
            iova: required("iova", iova.get(row))?,
            page_size_bytes: optional("page_size_bytes", page_size_bytes.get(row))?,
            access: optional("access", access.get(row))?.unwrap_or(0),
            kind: match kind {
                Integers::Nulls => 0,
                kind => required("kind", kind.get(row))?,
            },
        })
    }
}

fn optional<T: TryFrom<i128>>(name: &str, value: Option<i128>) -> Result<Option<T>, String> {
    let fits = |value: i128| {
        T::try_from(value).map_err(|_| match value {
            i128::MAX => format!("{name} is no whole number that a float has exactly"),
            _ => format!("{name} is {value}, which is out of range"),
        })
    };
    value.map(fits).transpose()
}

fn required<T: TryFrom<i128>>(name: &str, value: Option<i128>) -> Result<T, String> {
    optional(name, value)?.ok_or_else(|| format!("{name} is null"))
}
