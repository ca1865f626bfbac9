// SPDX-License-Identifier: Apache-2.0
//! Traces and results as Arrow record batches, for programs that have tables and no files of ours.
//!
//! ```text
//!   EventSource ─► TraceBatches ─► record batches ─► whoever reads Arrow
//!   record batches of anybody ─► read_events ─► events, or the row that is wrong
//!   rows of a sweep ─► table ─► one record batch
//! ```
//! A trace has the columns and the metadata that its Parquet file has, so a table of one written as Parquet by any
//! tool is a trace. How a batch gets from one language to another is not decided here.

mod read;
mod table;
mod write;

pub use read::{ArrowError, EVENTS_MAX, read_events};
pub use table::table;
pub use write::{TraceBatches, trace_schema};
