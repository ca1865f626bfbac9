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

mod codes;
mod reader;
mod row;
mod writer;

pub use reader::ParquetReader;
pub use row::EventRow;
pub use writer::{ParquetWriter, ROW_GROUP_EVENTS};

use std::collections::HashMap;
use std::num::NonZeroU32;

pub(crate) use codes::kind_name;
use codes::{ACCESSES, KINDS, codes_json};
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

impl TraceMeta {
    /// What stands in a file's metadata, as pairs of key and value.
    #[must_use]
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let mut pairs = FORMAT.pairs();
        pairs.extend([
            (PACKET_KEY, self.requests_per_packet.to_string()),
            (ORIGIN_KEY, self.origin.to_string()),
            (KINDS_KEY, codes_json(&KINDS)),
            (ACCESSES_KEY, codes_json(&ACCESSES)),
        ]);
        pairs
    }

    /// The same from such pairs.
    ///
    /// # Errors
    /// If they are of no trace, or of a version that is not known here.
    pub fn of_pairs(pairs: &HashMap<&str, &str>) -> Result<Self, String> {
        FORMAT.check(pairs)?;
        let requests_per_packet = pairs
            .get(PACKET_KEY)
            .and_then(|text| text.parse::<NonZeroU32>().ok())
            .ok_or_else(|| format!("its {PACKET_KEY} is no number above zero"))?;
        let origin = match pairs.get(ORIGIN_KEY) {
            Some(text) => serde_json::from_str(text)
                .map_err(|error| format!("its {ORIGIN_KEY} is no JSON: {error}"))?,
            None => serde_json::Value::Null,
        };
        Ok(Self {
            requests_per_packet,
            origin,
        })
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

#[cfg(test)]
mod tests {
    use super::codes::{access_code, decoded, kind_code};
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
