// SPDX-License-Identifier: Apache-2.0
//! Results of the simulator as one record batch.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, RecordBatch, RecordBatchOptions, StringArray,
    TimestampMillisecondArray, UInt64Array,
};
use arrow_schema::{Field, Schema};
use pagetide_sim::study::{ColumnKind, ResultColumn, result_columns};
use serde_json::Value;

/// Rows of named values as a table with the columns and types that their Parquet file has, and `metadata`.
#[must_use]
pub fn table(rows: &[Vec<(String, Value)>], metadata: HashMap<String, String>) -> RecordBatch {
    let (fields, arrays): (Vec<Field>, Vec<ArrayRef>) = result_columns(rows)
        .iter()
        .map(|column| {
            let array = array(column);
            let field = Field::new(&column.name, array.data_type().clone(), true);
            (field, array)
        })
        .unzip();
    let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
    // Also a table without columns has its rows.
    let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
    match RecordBatch::try_new_with_options(schema, arrays, &options) {
        Ok(batch) => batch,
        Err(error) => unreachable!("columns are as long as there are rows: {error}"),
    }
}

fn array(column: &ResultColumn) -> ArrayRef {
    let values = column.values.iter();
    match column.kind {
        ColumnKind::Time => {
            let times = values.map(|value| value.as_i64());
            Arc::new(TimestampMillisecondArray::from_iter(times).with_timezone("UTC"))
        }
        ColumnKind::Truth => Arc::new(BooleanArray::from_iter(values.map(Value::as_bool))),
        ColumnKind::Whole => Arc::new(UInt64Array::from_iter(values.map(Value::as_u64))),
        ColumnKind::Real => Arc::new(Float64Array::from_iter(values.map(Value::as_f64))),
        ColumnKind::Text => {
            let texts = values.map(|value| (!value.is_null()).then(|| ResultColumn::text(value)));
            Arc::new(StringArray::from_iter(texts))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_schema::{DataType, TimeUnit};
    use serde_json::json;

    #[test]
    fn each_column_has_the_type_that_fits_all_rows_and_nulls_where_a_row_has_none() {
        let row = |pairs: &[(&str, Value)]| {
            let pairs = pairs.iter();
            pairs
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect()
        };
        let rows: Vec<Vec<(String, Value)>> = vec![
            row(&[("a", json!(1)), ("b", json!(1)), ("none", Value::Null)]),
            row(&[
                ("b", json!(0.5)),
                ("c", json!("x")),
                ("d", json!(true)),
                ("started_at", json!(5)),
            ]),
        ];
        let batch = table(&rows, HashMap::new());
        let types: Vec<(String, DataType)> = batch
            .schema()
            .fields()
            .iter()
            .map(|field| (field.name().clone(), field.data_type().clone()))
            .collect();
        let time = DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into()));
        let expected = [
            ("a", DataType::UInt64),
            ("b", DataType::Float64),
            ("c", DataType::Utf8),
            ("d", DataType::Boolean),
            ("started_at", time),
        ];
        let expected: Vec<(String, DataType)> = expected
            .into_iter()
            .map(|(name, kind)| (name.to_owned(), kind))
            .collect();
        assert_eq!(types, expected);
        assert_eq!(batch.num_rows(), 2);
        assert!(batch.columns()[0].is_null(1) && batch.columns()[2].is_null(0));
        assert_eq!(
            table(&[Vec::new(), Vec::new()], HashMap::new()).num_rows(),
            2
        );
    }
}
