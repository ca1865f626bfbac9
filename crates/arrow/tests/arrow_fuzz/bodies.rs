// SPDX-License-Identifier: Apache-2.0
//! What the reader of tables is held to, whatever the table: no panic, only events that a trace may have, an error
//! that names column or record.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, Int8Array, Int16Array, Int32Array, Int64Array, NullArray,
    RecordBatch, StringArray, UInt8Array, UInt16Array, UInt32Array, UInt64Array,
};
use arrow_schema::{Field, Schema};
use pagetide_arrow::{ArrowError, TraceBatches, read_events};
use pagetide_trace::{Event, EventSource, IOVA_BITS, TraceMeta};

const NAMES: [&str; 9] = [
    "time_ns",
    "source",
    "domain",
    "iova",
    "page_size_bytes",
    "access",
    "kind",
    "other",
    "source",
];
/// Values near which something ends.
const VALUES: [i64; 12] = [
    0,
    1,
    2,
    3,
    9,
    10,
    4096,
    1 << 21,
    1 << 30,
    1 << 57,
    -1,
    i64::MIN,
];

/// Bytes as choices, and zeros after them.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn next(&mut self) -> u8 {
        match self.0.split_first() {
            None => 0,
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
        }
    }

    fn value(&mut self) -> Option<i64> {
        let choice = usize::from(self.next());
        match choice {
            0..=12 => VALUES.get(choice).copied(),
            13..=100 => Some(i64::try_from(choice).unwrap_or(0) << (self.next() % 60)),
            _ => Some(i64::from(self.next() % 4)),
        }
    }
}

/// A column of some type; values that it cannot have are cut off.
fn column(kind: u8, values: &[Option<i64>]) -> ArrayRef {
    let values = values.iter().copied();
    match kind % 12 {
        0 => Arc::new(Int64Array::from_iter(values)),
        1 => Arc::new(UInt64Array::from_iter(
            values.map(|v| v.map(i64::cast_unsigned)),
        )),
        2 => Arc::new(UInt32Array::from_iter(values.map(|v| v.map(|v| v as u32)))),
        3 => Arc::new(UInt8Array::from_iter(values.map(|v| v.map(|v| v as u8)))),
        4 => Arc::new(Int32Array::from_iter(values.map(|v| v.map(|v| v as i32)))),
        5 => Arc::new(Int16Array::from_iter(values.map(|v| v.map(|v| v as i16)))),
        6 => Arc::new(Int8Array::from_iter(values.map(|v| v.map(|v| v as i8)))),
        7 => Arc::new(UInt16Array::from_iter(values.map(|v| v.map(|v| v as u16)))),
        8 => Arc::new(NullArray::new(values.len())),
        9 => Arc::new(Float64Array::from_iter(values.map(|v| v.map(|v| v as f64)))),
        10 => Arc::new(BooleanArray::from_iter(values.map(|v| v.map(|v| v > 0)))),
        _ => Arc::new(StringArray::from_iter(
            values.map(|v| v.map(|v| v.to_string())),
        )),
    }
}

/// A table that `bytes` choose, in one to three batches.
fn batches(bytes: &[u8]) -> Vec<RecordBatch> {
    let mut choices = Choices(bytes);
    let missing = choices.next();
    let names: Vec<&str> = (0..7)
        .chain((missing > 250).then_some(8))
        .filter(|at| missing & 0x80 == 0 || missing & 7 != *at)
        .map(|at| NAMES[usize::from(at)])
        .collect();
    let kinds: Vec<u8> = names
        .iter()
        .map(|_| match choices.next() {
            // Mostly those of a trace.
            usual @ 0..200 => usual % 3,
            any => any,
        })
        .collect();
    (0..=choices.next() % 3)
        .map(|_| {
            let rows = choices.next() % 8;
            let columns: Vec<ArrayRef> = kinds
                .iter()
                .map(|kind| {
                    let values: Vec<Option<i64>> = (0..rows).map(|_| choices.value()).collect();
                    column(*kind, &values)
                })
                .collect();
            let fields: Vec<Field> = names
                .iter()
                .zip(&columns)
                .map(|(name, column)| Field::new(*name, column.data_type().clone(), true))
                .collect();
            RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
        })
        .collect()
}

/// A copy of events that gives them a batch at a time.
struct Owned(Vec<Event>);

impl EventSource for Owned {
    fn next_batch(
        &mut self,
        batch: &mut Vec<Event>,
    ) -> Result<usize, pagetide_access_log::TraceError> {
        let count = self.0.len().min(3);
        batch.extend(self.0.drain(..count));
        Ok(count)
    }
}

/// Tables whose columns, types, nulls and values `bytes` choose.
pub fn arrow_table(bytes: &[u8]) {
    let batches = batches(bytes);
    let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
    let schema = batches[0].schema();
    match read_events(&schema, batches.into_iter().map(Ok)) {
        Err(ArrowError::Table(reason)) => assert!(reason.contains("column"), "{reason}"),
        Err(ArrowError::Record { record, reason }) => {
            assert!(
                record < rows as u64 && !reason.is_empty(),
                "{record} {reason}"
            );
        }
        Ok((events, meta)) => {
            assert_eq!((events.len(), meta), (rows, None));
            let times: Vec<u64> = events.iter().filter_map(|event| event.time_ns).collect();
            assert!(times.is_sorted());
            assert!(events.iter().all(|event| event.iova.0 >> IOVA_BITS == 0));
            // What was read is a trace, and is the same when it is read again.
            let meta = TraceMeta::default();
            let again = TraceBatches::new(Box::new(Owned(events.clone())), &meta);
            let schema = pagetide_arrow::trace_schema(&meta);
            assert_eq!(read_events(&schema, again).unwrap(), (events, Some(meta)));
        }
    }
}
