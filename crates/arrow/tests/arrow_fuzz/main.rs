// SPDX-License-Identifier: Apache-2.0
//! The reader of tables: over tables that random bytes choose, and over those that people make.

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "values are cut off to what a type has"
)]
mod bodies;

use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{Field, Schema};
use pagetide_arrow::read_events;
use pagetide_random::SplitMix64;
use pagetide_trace::{EventKind, PageSize};

#[test]
fn tables_of_any_columns_and_values_are_safe_to_read() {
    let mut random = SplitMix64::new(20);
    for length in (0..96).cycle().take(6000) {
        let bytes: Vec<u8> = (0..length)
            .map(|_| u8::try_from(random.below(256)).unwrap())
            .collect();
        bodies::arrow_table(&bytes);
    }
}

#[test]
fn seeds_of_the_target_are_read() {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/arrow_table");
    let mut read = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        bodies::arrow_table(&std::fs::read(seed.unwrap().path()).unwrap());
        read += 1;
    }
    assert!(read > 0);
}

fn table(columns: &[(&str, ArrayRef)]) -> RecordBatch {
    let fields: Vec<Field> = columns
        .iter()
        .map(|(name, column)| Field::new(*name, column.data_type().clone(), true))
        .collect();
    let columns = columns.iter().map(|(_, column)| Arc::clone(column));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns.collect()).unwrap()
}

fn integers(values: &[Option<i64>]) -> ArrayRef {
    Arc::new(Int64Array::from(values.to_vec()))
}

fn told(batch: RecordBatch) -> String {
    let schema = batch.schema();
    read_events(&schema, [Ok(batch)].into_iter())
        .unwrap_err()
        .to_string()
}

#[test]
fn table_with_wide_integers_and_few_columns_is_a_trace_of_requests() {
    let batch = table(&[
        ("iova", integers(&[Some(0x1000), Some(0x20_0000)])),
        ("domain", integers(&[Some(1), Some(1)])),
        ("source", integers(&[Some(8), Some(8)])),
        ("page_size_bytes", integers(&[Some(1 << 21), None])),
        (
            "time_ns",
            Arc::new(Float64Array::from(vec![f64::NAN, 7.0])) as ArrayRef,
        ),
    ]);
    let schema = batch.schema();
    let (events, meta) = read_events(&schema, [Ok(batch)].into_iter()).unwrap();
    assert_eq!(meta, None);
    assert_eq!(events.len(), 2);
    assert!(
        events
            .iter()
            .all(|event| event.kind == EventKind::Translate)
    );
    assert_eq!(events[0].page_size, Some(PageSize::SIZE_2M));
    assert_eq!(events[1].page_size, None);
    assert_eq!((events[0].time_ns, events[1].time_ns), (None, Some(7)));
}

#[test]
fn what_is_wrong_with_a_table_is_told_with_its_column_or_record() {
    let one = || integers(&[Some(1), Some(1)]);
    let with = |name: &'static str, column: ArrayRef| {
        let mut columns = vec![("source", one()), ("domain", one()), ("iova", one())];
        columns.retain(|(known, _)| *known != name);
        columns.push((name, column));
        told(table(&columns))
    };
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![1.0, 1.0]));
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["join", "leave"]));
    let halves: ArrayRef = Arc::new(Float64Array::from(vec![4096.0, 0.5]));
    for (message, expected) in [
        (
            with("page_size_bytes", halves),
            "record 1: page_size_bytes is no whole number",
        ),
        (
            with("iova", floats),
            "its column 'iova' is of type Float64; integers are expected",
        ),
        (
            with("kind", texts),
            "its column 'kind' is of type Utf8; integers are expected",
        ),
        (
            with("source", integers(&[Some(1), None])),
            "record 1: source is null",
        ),
        (
            with("domain", integers(&[Some(1), Some(1 << 32)])),
            "record 1: domain is 4294967296, which is out of range",
        ),
        (
            with("iova", integers(&[Some(1 << 57), Some(0)])),
            "record 0: iova 0x200000000000000 has more than 57 bits",
        ),
        (
            with("kind", integers(&[Some(0), Some(10)])),
            "record 1: kind 10 is not known",
        ),
        (
            with("kind", integers(&[Some(0), None])),
            "record 1: kind is null",
        ),
        (
            with("access", integers(&[Some(3), Some(0)])),
            "record 0: access 3 is not known",
        ),
        (
            with("page_size_bytes", integers(&[Some(4096), Some(8192)])),
            "record 1: page_size_bytes is 8192; a request is for a page of",
        ),
        (
            with("time_ns", integers(&[Some(5), Some(4)])),
            "record 1: time_ns is 4, before the 5 of an event above",
        ),
        (
            with("time_ns", integers(&[Some(-5), Some(4)])),
            "record 0: time_ns is -5, below zero",
        ),
    ] {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn columns_that_are_missing_or_there_twice_are_named() {
    let one = || integers(&[Some(1), Some(1)]);
    for (message, expected) in [
        (
            told(table(&[("source", one())])),
            "it has no column 'domain'",
        ),
        (
            told(table(&[
                ("source", one()),
                ("source", one()),
                ("domain", one()),
                ("iova", one()),
            ])),
            "several columns 'source'",
        ),
    ] {
        assert!(message.contains(expected), "{message}");
    }
}
