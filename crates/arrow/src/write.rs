// SPDX-License-Identifier: Apache-2.0
//! A trace as a stream of record batches; memory for one of them.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{
    ArrayRef, Int64Array, RecordBatch, RecordBatchReader, UInt8Array, UInt32Array, UInt64Array,
};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use pagetide_access_log::TraceError;
use pagetide_trace::{EventRow, EventSource, TraceMeta};

/// Events of a batch, at least, if the trace has so many: at 34 bytes each some 2 MB.
const BATCH_EVENTS_MIN: usize = 1 << 16;

/// The schema of a trace, with `meta` as its metadata.
#[must_use]
pub fn trace_schema(meta: &TraceMeta) -> SchemaRef {
    let pairs = meta.pairs().into_iter();
    let pairs: HashMap<String, String> = pairs.map(|(k, v)| (k.to_owned(), v)).collect();
    let fields = vec![
        Field::new("time_ns", DataType::Int64, true),
        Field::new("source", DataType::UInt32, false),
        Field::new("domain", DataType::UInt32, false),
        Field::new("iova", DataType::UInt64, false),
        Field::new("page_size_bytes", DataType::Int64, true),
        Field::new("access", DataType::UInt8, false),
        Field::new("kind", DataType::UInt8, false),
    ];
    Arc::new(Schema::new_with_metadata(fields, pairs))
}

/// The events of a trace as record batches.
pub struct TraceBatches {
    source: Box<dyn EventSource>,
    schema: SchemaRef,
    ended: bool,
}

impl TraceBatches {
    /// Those of `source`.
    #[must_use]
    pub fn new(source: Box<dyn EventSource>, meta: &TraceMeta) -> Self {
        Self {
            source,
            schema: trace_schema(meta),
            ended: false,
        }
    }

    fn batch(&mut self) -> Result<Option<RecordBatch>, TraceError> {
        let mut events = Vec::with_capacity(BATCH_EVENTS_MIN);
        while events.len() < BATCH_EVENTS_MIN && !self.ended {
            self.ended = self.source.next_batch(&mut events)? == 0;
        }
        if events.is_empty() {
            return Ok(None);
        }
        let rows: Vec<EventRow> = events.iter().map(EventRow::of).collect();
        let code = |code: i32| u8::try_from(code).unwrap_or(u8::MAX);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from_iter(rows.iter().map(|row| row.time_ns))),
            Arc::new(UInt32Array::from_iter_values(
                rows.iter().map(|row| row.source),
            )),
            Arc::new(UInt32Array::from_iter_values(
                rows.iter().map(|row| row.domain),
            )),
            Arc::new(UInt64Array::from_iter_values(
                rows.iter().map(|row| row.iova),
            )),
            Arc::new(Int64Array::from_iter(
                rows.iter().map(|row| row.page_size_bytes),
            )),
            Arc::new(UInt8Array::from_iter_values(
                rows.iter().map(|row| code(row.access)),
            )),
            Arc::new(UInt8Array::from_iter_values(
                rows.iter().map(|row| code(row.kind)),
            )),
        ];
        match RecordBatch::try_new(Arc::clone(&self.schema), columns) {
            Ok(batch) => Ok(Some(batch)),
            Err(error) => unreachable!("columns are of the schema: {error}"),
        }
    }
}

impl Iterator for TraceBatches {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batch();
        self.ended |= batch.is_err();
        batch
            .map_err(|error| ArrowError::ExternalError(Box::new(error)))
            .transpose()
    }
}

impl RecordBatchReader for TraceBatches {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}

impl std::fmt::Debug for TraceBatches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceBatches")
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
