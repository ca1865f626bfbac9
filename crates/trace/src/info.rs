// SPDX-License-Identifier: Apache-2.0
//! Statistics of a trace in one pass, and conversion between formats.
//!
//! Memory is bounded for any trace: pages and sources are counted exactly up to a limit, and past it as 'at
//! least'.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use crate::event::{Event, EventKind, IommuDomain, SourceId};
use crate::open::{FormatChoice, OpenTrace, TraceFormat, open_trace};
use crate::parquet::kind_name;
use crate::stream::{BATCH_EVENTS, EventSink, EventSource};
use pagetide_access_log::TraceError;

/// Distinct pages that are counted: some 100 MB. The paper's largest trace has 72,000.
const DISTINCT_PAGES_MAX: usize = 1 << 21;

/// Distinct sources and domains that are counted; hyper-traces go to some thousands.
const DISTINCT_IDS_MAX: usize = 1 << 20;

/// Shift of the assumed page size if the trace does not record it.
const UNKNOWN_SIZE_SHIFT: u32 = 12;

/// A count of distinct items.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Distinct {
    /// This many.
    Exactly(u64),
    /// This many were distinguished, and there are more.
    AtLeast(u64),
}

/// Translation requests by the size of their page.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct PageSizes {
    /// Requests for each size, by the bytes of the page.
    pub by_bytes: BTreeMap<u64, u64>,
    /// Requests whose page size the trace does not record.
    pub unknown: u64,
}

/// Requests that a source issued.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct RequestsPerSource {
    /// Those of the source with the fewest (of those with any).
    pub min: u64,
    /// Those of the source with the most.
    pub max: u64,
}

/// What is in a trace.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct TraceInfo {
    /// Format that the file was read as.
    pub format: TraceFormat,
    /// Consecutive requests that make a packet.
    pub requests_per_packet: u32,
    /// The file's description of its events' origin; null for formats without room for it.
    pub origin: serde_json::Value,
    /// All events.
    pub events: u64,
    /// Events of each kind that occurs, by the kind's name.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Sources that issued requests.
    pub sources: Distinct,
    /// Domains that requests were for.
    pub domains: Distinct,
    /// Distinct pages of domains in requests; one of unknown size counts as 4 KiB.
    pub distinct_pages: Distinct,
    /// Requests by the size of their page.
    pub page_sizes: PageSizes,
    /// Lowest and highest time, in ns; `None` if no event has one.
    pub time_span_ns: Option<(u64, u64)>,
    /// Requests a source; `None` if there were none, or too many sources to count.
    pub requests_per_source: Option<RequestsPerSource>,
}

/// Computes the statistics of the trace at `path`, reading all of it.
///
/// # Errors
/// If it cannot be opened, or is broken anywhere.
pub fn info(path: &Path, choice: FormatChoice) -> Result<TraceInfo, TraceError> {
    info_of(open_trace(path, choice)?)
}

/// The same of an open trace.
///
/// # Errors
/// If it is broken anywhere.
pub fn info_of(trace: OpenTrace) -> Result<TraceInfo, TraceError> {
    let OpenTrace {
        format,
        meta,
        mut source,
    } = trace;
    let mut census = Census::default();
    let mut batch = Vec::with_capacity(BATCH_EVENTS);
    while source.next_batch(&mut batch)? != 0 {
        batch.iter().for_each(|event| census.count(event));
        batch.clear();
    }
    Ok(TraceInfo {
        format,
        requests_per_packet: meta.requests_per_packet.get(),
        origin: meta.origin,
        events: census.kinds.values().sum(),
        sources: census.sources.distinct(),
        domains: census.domains.distinct(),
        distinct_pages: census.pages.distinct(),
        page_sizes: census.page_sizes,
        time_span_ns: census.time_span_ns,
        requests_per_source: census.sources.range(),
        kinds: census.kinds,
    })
}

/// Passes all events of `source` to `sink` and completes it; returns their number.
///
/// # Errors
/// If the source is broken, or the sink cannot take an event; then the sink's file is not created.
pub fn convert(
    source: &mut dyn EventSource,
    mut sink: Box<dyn EventSink>,
) -> Result<u64, TraceError> {
    let mut batch = Vec::with_capacity(BATCH_EVENTS);
    let mut events = 0;
    while source.next_batch(&mut batch)? != 0 {
        sink.write(&batch)?;
        events += batch.len() as u64;
        batch.clear();
    }
    sink.finish()?;
    Ok(events)
}

#[derive(Default)]
struct Census {
    kinds: BTreeMap<&'static str, u64>,
    sources: Tally<SourceId>,
    domains: Tally<IommuDomain>,
    pages: Pages,
    page_sizes: PageSizes,
    time_span_ns: Option<(u64, u64)>,
}

impl Census {
    fn count(&mut self, event: &Event) {
        *self.kinds.entry(kind_name(event.kind)).or_default() += 1;
        if let Some(time) = event.time_ns {
            let (first, last) = self.time_span_ns.get_or_insert((time, time));
            *first = time.min(*first);
            *last = time.max(*last);
        }
        if event.kind != EventKind::Translate {
            return;
        }
        self.sources.count(event.source);
        self.domains.count(event.domain);
        match event.page_size {
            Some(size) => *self.page_sizes.by_bytes.entry(size.bytes()).or_default() += 1,
            None => self.page_sizes.unknown += 1,
        }
        self.pages.count(event);
    }
}

/// Requests by an id, as long as there are not too many ids.
struct Tally<T> {
    requests: HashMap<T, u64>,
    room: Room,
}

impl<T> Default for Tally<T> {
    fn default() -> Self {
        Self {
            requests: HashMap::new(),
            room: Room::Enough,
        }
    }
}

impl<T: Eq + std::hash::Hash> Tally<T> {
    fn count(&mut self, id: T) {
        if let Some(requests) = self.requests.get_mut(&id) {
            *requests += 1;
        } else if self.requests.len() < DISTINCT_IDS_MAX {
            self.requests.insert(id, 1);
        } else {
            self.room = Room::Exceeded;
        }
    }

    fn distinct(&self) -> Distinct {
        self.room.distinct(self.requests.len())
    }

    fn range(&self) -> Option<RequestsPerSource> {
        let (min, max) = (self.requests.values().min()?, self.requests.values().max()?);
        (self.room == Room::Enough).then_some(RequestsPerSource {
            min: *min,
            max: *max,
        })
    }
}

#[derive(Default)]
struct Pages {
    /// Domain, page number and size of each.
    seen: HashSet<(IommuDomain, u64, u32)>,
    room: Room,
}

impl Pages {
    fn count(&mut self, event: &Event) {
        let shift = event
            .page_size
            .map_or(UNKNOWN_SIZE_SHIFT, |size| size.shift());
        let page = (event.domain, event.iova.0 >> shift, shift);
        if self.seen.len() < DISTINCT_PAGES_MAX {
            self.seen.insert(page);
        } else if !self.seen.contains(&page) {
            self.room = Room::Exceeded;
        }
    }

    fn distinct(&self) -> Distinct {
        self.room.distinct(self.seen.len())
    }
}

/// Whether the limit of distinct items was exceeded.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Room {
    #[default]
    Enough,
    Exceeded,
}

impl Room {
    fn distinct(self, count: usize) -> Distinct {
        match self {
            Self::Enough => Distinct::Exactly(count as u64),
            Self::Exceeded => Distinct::AtLeast(count as u64),
        }
    }
}
