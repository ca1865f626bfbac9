// SPDX-License-Identifier: Apache-2.0
//! The project's own trace format: one Parquet file, one row an event.
//!
//! ```text
//! column           type             null means
//! time_ns          int64            the trace has only the order
//! source           uint32           -
//! domain           uint32           -
//! iova             uint64           -
//! page_size_bytes  int64            the trace does not record it
//! access           uint8, a code    -
//! kind             uint8, a code    -
//! ```
//! The codes are small numbers and not strings, because reading a string for each of 70 million rows costs
//! more than all the other columns; their meaning is in the file itself, under `pagetide.kinds` and
//! `pagetide.accesses`. An event without a source, domain or address has 0 there.
//!
//! The file's key-value metadata:
//!
//! | key | value |
//! |---|---|
//! | `pagetide.format` | `pagetide-trace` |
//! | `pagetide.version` | `1` |
//! | `pagetide.requests_per_packet` | consecutive requests that make a packet |
//! | `pagetide.origin` | JSON: origin of the events, from the writer of the file |
//! | `pagetide.kinds`, `pagetide.accesses` | JSON: name to code |
//!
//! Rows are in row groups of at most [`ROW_GROUP_EVENTS`], which bounds the memory of the writer; the
//! reader needs a page of each column. Columns are found by name and may be nullable even where the table
//! does not require it, so a file rewritten by another tool can still be read; other columns are ignored.
//!
//! Hostile files are stopped by [`pagetide_access_log::columns`].

mod reader;
mod writer;

pub use reader::ParquetReader;
pub use writer::{ParquetWriter, ROW_GROUP_EVENTS};

use std::num::NonZeroU32;

use crate::event::{EventKind, TraceAccess};
use pagetide_access_log::columns::Format;

/// Requests a packet of the devices in the paper (HyperTRIO IV-C).
pub const REQUESTS_PER_PACKET: NonZeroU32 = NonZeroU32::new(3).unwrap();

/// The metadata of a trace.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceMeta {
    /// Consecutive translation requests that make a packet.
    pub requests_per_packet: NonZeroU32,
    /// Origin of the events: recipe, seed, file; free JSON, for people and later tools.
    pub origin: serde_json::Value,
}

impl Default for TraceMeta {
    fn default() -> Self {
        Self {
            requests_per_packet: REQUESTS_PER_PACKET,
            origin: serde_json::Value::Null,
        }
    }
}

const FORMAT: Format = Format {
    name: "pagetide-trace",
    version: "1",
    file: "a trace",
    rows: "events",
};
const PACKET_KEY: &str = "pagetide.requests_per_packet";
const ORIGIN_KEY: &str = "pagetide.origin";
const KINDS_KEY: &str = "pagetide.kinds";
const ACCESSES_KEY: &str = "pagetide.accesses";

/// The columns, in the order they are written in.
const SCHEMA: &str = "message trace {
    optional int64 time_ns;
    required int32 source (integer(32, false));
    required int32 domain (integer(32, false));
    required int64 iova (integer(64, false));
    optional int64 page_size_bytes;
    required int32 access (integer(8, false));
    required int32 kind (integer(8, false));
}";

/// Kinds with their names in the file; the position is the code, so only append.
const KINDS: [(EventKind, &str); 10] = [
    (EventKind::Translate, "translate"),
    (EventKind::InvalidatePages, "invalidate-pages"),
    (EventKind::InvalidateDomain, "invalidate-domain"),
    (EventKind::InvalidateAll, "invalidate-all"),
    (EventKind::InvalidateSource, "invalidate-source"),
    (
        EventKind::InvalidateContextsOfDomain,
        "invalidate-contexts-of-domain",
    ),
    (EventKind::InvalidateContexts, "invalidate-contexts"),
    (EventKind::Join, "join"),
    (EventKind::Leave, "leave"),
    (EventKind::PageOut, "page-out"),
];

/// Accesses with their names in the file; the position is the code, so only append.
const ACCESSES: [(TraceAccess, &str); 3] = [
    (TraceAccess::Unknown, "unknown"),
    (TraceAccess::Read, "read"),
    (TraceAccess::Write, "write"),
];

/// Code of `kind` in the column of that name.
const fn kind_code(kind: EventKind) -> i32 {
    match kind {
        EventKind::Translate => 0,
        EventKind::InvalidatePages => 1,
        EventKind::InvalidateDomain => 2,
        EventKind::InvalidateAll => 3,
        EventKind::InvalidateSource => 4,
        EventKind::InvalidateContextsOfDomain => 5,
        EventKind::InvalidateContexts => 6,
        EventKind::Join => 7,
        EventKind::Leave => 8,
        EventKind::PageOut => 9,
    }
}

/// Code of `access` in the column of that name.
const fn access_code(access: TraceAccess) -> i32 {
    match access {
        TraceAccess::Unknown => 0,
        TraceAccess::Read => 1,
        TraceAccess::Write => 2,
    }
}

/// Name of `kind` in files and documents.
pub(crate) fn kind_name(kind: EventKind) -> &'static str {
    KINDS
        .iter()
        .find(|(known, _)| *known == kind)
        .map_or("", |(_, name)| name)
}

/// Entry of a table of codes.
fn decoded<T: Copy>(table: &[(T, &str)], code: i32) -> Option<T> {
    usize::try_from(code)
        .ok()
        .and_then(|index| table.get(index))
        .map(|(value, _)| *value)
}

/// A table of codes as JSON, name to code.
fn codes_json<T>(table: &[(T, &str)]) -> String {
    let codes = table
        .iter()
        .enumerate()
        .map(|(code, (_, name))| ((*name).to_owned(), code.into()))
        .collect();
    serde_json::Value::Object(codes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_and_access_has_its_position_as_code() {
        for (code, (kind, name)) in KINDS.iter().enumerate() {
            assert_eq!(kind_code(*kind), i32::try_from(code).unwrap(), "{name}");
        }
        for (code, (access, name)) in ACCESSES.iter().enumerate() {
            assert_eq!(access_code(*access), i32::try_from(code).unwrap(), "{name}");
        }
    }

    #[test]
    fn code_outside_the_table_is_none() {
        assert_eq!(decoded(&KINDS, -1), None);
        assert_eq!(decoded(&KINDS, 10), None);
    }
}
