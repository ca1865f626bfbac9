// SPDX-License-Identifier: Apache-2.0
//! Reports of the trace commands.

use std::path::PathBuf;

use pagetide_trace::{Distinct, PageSize, TraceFormat, TraceInfo};
use serde::Serialize;

use pagetide_report::text::{Text, table};

/// A trace that was written.
#[derive(Debug, Serialize)]
pub struct WrittenReport {
    /// The file.
    pub out: PathBuf,
    /// Its format.
    pub format: TraceFormat,
    /// The side file with its figures, if one was written.
    pub params: Option<PathBuf>,
    /// Number of tenants, if the trace was built here; likewise the next two.
    pub tenants: Option<usize>,
    /// Number of packets.
    pub packets: Option<u64>,
    /// Number of translation requests.
    pub requests: Option<u64>,
    /// Number of events of any kind.
    pub events: u64,
    /// Time it took.
    pub elapsed_seconds: f64,
}

impl Text for WrittenReport {
    fn text(&self) -> String {
        let mut text = format!(
            "{}: {}, {} events",
            self.out.display(),
            self.format,
            self.events
        );
        if let (Some(tenants), Some(packets)) = (self.tenants, self.packets) {
            text += &format!(", {packets} packets of {tenants} tenants");
        }
        text += &format!(", in {:.1} s\n", self.elapsed_seconds);
        if let Some(params) = &self.params {
            text += &format!("{}: what it was made with\n", params.display());
        }
        text
    }
}

/// What a trace is, for people.
pub(super) fn info_text(info: &TraceInfo) -> String {
    let mut rows = vec![
        row("format", info.format),
        row("events", info.events),
        row("requests a packet", info.requests_per_packet),
        row("sources", distinct(info.sources)),
        row("domains", distinct(info.domains)),
        row("distinct pages", distinct(info.distinct_pages)),
    ];
    for (kind, count) in &info.kinds {
        rows.push(row(&format!("events {kind}"), count));
    }
    for (bytes, requests) in &info.page_sizes.by_bytes {
        let size = PageSize::from_bytes(*bytes);
        let size = size.map_or_else(|| format!("{bytes} B"), |size| size.to_string());
        rows.push(row(&format!("requests of {size}"), requests));
    }
    if info.page_sizes.unknown > 0 {
        rows.push(row("requests of unknown size", info.page_sizes.unknown));
    }
    if let Some(requests) = info.requests_per_source {
        let range = format!("{} to {}", requests.min, requests.max);
        rows.push(row("requests a source", range));
    }
    if let Some((first, last)) = info.time_span_ns {
        rows.push(row("time", format!("{first} to {last} ns")));
    }
    if !info.origin.is_null() {
        rows.push(row("origin", &info.origin));
    }
    table(&rows)
}

fn row(name: &str, value: impl std::fmt::Display) -> [String; 2] {
    [name.to_owned(), value.to_string()]
}

fn distinct(count: Distinct) -> String {
    match count {
        Distinct::Exactly(count) => count.to_string(),
        Distinct::AtLeast(count) => format!("more than {count}"),
    }
}
