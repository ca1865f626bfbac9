// SPDX-License-Identifier: Apache-2.0
//! Splits logs into one stream a source, so that a hyper-trace can read thousands of them side by side.
//!
//! The sources of a log are mixed. A reader for each tenant would decode a log as many times as it has
//! sources (24 in the paper's) and would keep thousands of decoders. So each log is read once, and its
//! events go to one unnamed temporary file, each source into its own chain of chunks:
//!
//! ```text
//!   │ A: next=3 │ B: next=4 │ C: next=… │ A: next=5 │ B: end │ A: end │
//! ```
//!
//! A chunk's successor gets its place when the chunk is written, so nothing is written twice and no index
//! grows with the trace: while a log is read, memory holds one chunk for each of its sources, and
//! afterwards one for each tenant that reads. On disk an event takes 24 bytes.
//!
//! A log's invalidations reach the sources that they concern: one of a domain goes to every source seen
//! with that domain so far, a global one to every source seen so far, as one of each of its domains. So a
//! flush on one recorded machine does not empty the caches of tenants that were never on it. Joins and
//! leaves of a log are dropped; the constructor generates its own.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use pagetide_addr::Iova;

use crate::event::{Event, EventKind, IommuDomain, PageSize, SourceId, TraceAccess};
use crate::stream::{BATCH_EVENTS, EventSource};
use pagetide_access_log::TraceError;

const RECORD_BYTES: usize = 24;
/// Records of a chunk: 3 KiB, so that a thousand readers take 3 MiB.
const CHUNK_RECORDS: usize = 128;
/// The number of the next chunk, then records.
const CHUNK_BYTES: usize = 8 + CHUNK_RECORDS * RECORD_BYTES;
/// Most sources of one log: PCIe has no more ids.
pub const MAX_SOURCES_PER_LOG: usize = 1 << 16;
/// Most domains of one source in one log; a device that is handed from the host to a tenant and back has
/// two.
pub const MAX_DOMAINS_PER_SOURCE: usize = 64;
/// Most records that a log may be split into, for each of its events. One request is one record; an
/// invalidation that concerns all 24 devices of a log is 24. Without this limit a short file of global
/// invalidations could fill the disk.
pub const MAX_RECORDS_PER_EVENT: u64 = 32;
/// Records that any log may be split into, however short it is.
const RECORDS_FREE: u64 = 1 << 20;
/// Most page-outs of a log that are kept in memory because nobody has asked for their domains yet: 60 MiB.
const EARLY_MAX: usize = 1 << 20;
const NO_TIME: u64 = u64::MAX;

/// One source of one log.
#[derive(Clone, Debug)]
pub struct RecordedSource {
    /// The log's index, in the order of addition.
    pub log: usize,
    /// Its id in the log.
    pub source: SourceId,
    /// Its translation requests.
    pub requests: u64,
    /// Whether every event had a time.
    pub timed: bool,
    /// Its domains, that of its first request first.
    pub domains: Vec<IommuDomain>,
    first_chunk: u64,
    records: u64,
}

/// Split logs.
#[derive(Debug)]
pub struct Recordings {
    file: Arc<File>,
    chunks: u64,
    logs: usize,
    sources: Vec<RecordedSource>,
}

impl Recordings {
    /// No log yet.
    ///
    /// # Errors
    /// If there is no room for a temporary file.
    pub fn new() -> Result<Self, TraceError> {
        let file = tempfile::tempfile().map_err(spill_error)?;
        Ok(Self {
            file: Arc::new(file),
            chunks: 0,
            logs: 0,
            sources: Vec::new(),
        })
    }

    /// Every source of every log so far, in order of log and first request.
    #[must_use]
    pub fn sources(&self) -> &[RecordedSource] {
        &self.sources
    }

    /// Splits `log`, to its end.
    ///
    /// # Errors
    /// If the log is broken, has more sources or domains than any machine, or the temporary file cannot
    /// take it. Nothing of that log is kept then.
    pub fn add(&mut self, log: &mut dyn EventSource) -> Result<(), TraceError> {
        let mut split = Split {
            file: &self.file,
            chunks: self.chunks,
            log: self.logs,
            events: 0,
            records: 0,
            open: Vec::new(),
            by_source: HashMap::new(),
            by_domain: HashMap::new(),
            early: HashMap::new(),
            early_count: 0,
        };
        let mut batch = Vec::with_capacity(BATCH_EVENTS);
        loop {
            batch.clear();
            if log.next_batch(&mut batch)? == 0 {
                break;
            }
            for event in &batch {
                split.take(event)?;
            }
        }
        let (sources, chunks) = split.finish()?;
        self.sources.extend(sources);
        self.chunks = chunks;
        self.logs += 1;
        Ok(())
    }
}

/// A source whose log is being read.
#[derive(Debug)]
struct Open {
    summary: RecordedSource,
    /// The place of the chunk being filled.
    chunk: u64,
    bytes: Vec<u8>,
}

/// The state of splitting one log.
struct Split<'a> {
    file: &'a File,
    chunks: u64,
    log: usize,
    /// Events read, and the records made from them.
    events: u64,
    records: u64,
    open: Vec<Open>,
    by_source: HashMap<SourceId, usize>,
    /// Sources seen with a domain, each with the domain's place in its list.
    by_domain: HashMap<IommuDomain, Vec<(usize, u32)>>,
    /// What was paged out of domains that no source has been seen with yet.
    early: HashMap<IommuDomain, Vec<Event>>,
    early_count: usize,
}

impl Split<'_> {
    fn take(&mut self, event: &Event) -> Result<(), TraceError> {
        self.events += 1;
        match event.kind {
            EventKind::Translate => {
                let at = self.source(event.source)?;
                let domain = self.domain_of(at, event.domain)?;
                self.open[at].summary.requests += 1;
                self.push(at, event, domain)
            }
            EventKind::InvalidateSource => match self.by_source.get(&event.source) {
                Some(&at) => {
                    let domain = self.domain_of(at, event.domain)?;
                    self.push(at, event, domain)
                }
                None => Ok(()),
            },
            EventKind::InvalidatePages
            | EventKind::InvalidateDomain
            | EventKind::InvalidateContextsOfDomain
            | EventKind::PageOut => {
                let reached = self.by_domain.get(&event.domain).cloned();
                if reached.is_none() && event.kind == EventKind::PageOut {
                    return self.keep_early(event);
                }
                for (at, domain) in reached.unwrap_or_default() {
                    self.push(at, event, domain)?;
                }
                Ok(())
            }
            EventKind::InvalidateAll | EventKind::InvalidateContexts => self.push_to_all(event),
            EventKind::Join | EventKind::Leave => Ok(()),
        }
    }

    /// Keeps a page-out until a source is seen with its domain. Invalidations void nothing before that, and are not
    /// kept.
    fn keep_early(&mut self, event: &Event) -> Result<(), TraceError> {
        if self.early_count == EARLY_MAX {
            return Err(TraceError::Asked(format!(
                "log {} has more than {EARLY_MAX} page-outs of domains that no source has asked for yet",
                self.log
            )));
        }
        self.early_count += 1;
        self.early.entry(event.domain).or_default().push(*event);
        Ok(())
    }

    fn push_to_all(&mut self, event: &Event) -> Result<(), TraceError> {
        for at in 0..self.open.len() {
            for domain in (0..).take(self.open[at].summary.domains.len()) {
                self.push(at, event, domain)?;
            }
        }
        Ok(())
    }

    fn source(&mut self, source: SourceId) -> Result<usize, TraceError> {
        if let Some(&at) = self.by_source.get(&source) {
            return Ok(at);
        }
        let at = self.open.len();
        if at == MAX_SOURCES_PER_LOG {
            return Err(TraceError::Asked(format!(
                "log {} has more than {MAX_SOURCES_PER_LOG} sources",
                self.log
            )));
        }
        let chunk = self.new_chunk();
        self.open.push(Open {
            summary: RecordedSource {
                log: self.log,
                source,
                requests: 0,
                timed: true,
                domains: Vec::new(),
                first_chunk: chunk,
                records: 0,
            },
            chunk,
            bytes: Vec::new(),
        });
        self.by_source.insert(source, at);
        Ok(at)
    }

    /// The place of `domain` in the list of source `at`.
    fn domain_of(&mut self, at: usize, domain: IommuDomain) -> Result<u32, TraceError> {
        let summary = &mut self.open[at].summary;
        if let Some(place) = (0..).zip(&summary.domains).find(|(_, d)| **d == domain) {
            return Ok(place.0);
        }
        if summary.domains.len() == MAX_DOMAINS_PER_SOURCE {
            return Err(TraceError::Asked(format!(
                "log {}: source {:#x} has more than {MAX_DOMAINS_PER_SOURCE} domains",
                summary.log, summary.source.0
            )));
        }
        #[expect(clippy::cast_possible_truncation, reason = "limited just above")]
        let place = summary.domains.len() as u32;
        summary.domains.push(domain);
        self.by_domain.entry(domain).or_default().push((at, place));
        for event in self.early.remove(&domain).unwrap_or_default() {
            self.early_count -= 1;
            self.push(at, &event, place)?;
        }
        Ok(place)
    }

    fn push(&mut self, at: usize, event: &Event, domain: u32) -> Result<(), TraceError> {
        let Some(record) = record(event, domain) else {
            return Ok(());
        };
        self.records += 1;
        if self.records > RECORDS_FREE + self.events.saturating_mul(MAX_RECORDS_PER_EVENT) {
            return Err(TraceError::Asked(format!(
                "log {}: its first {} events concern more than {MAX_RECORDS_PER_EVENT} sources each: \
                 too many invalidations of what many sources share",
                self.log, self.events
            )));
        }
        if self.open[at].bytes.len() == CHUNK_BYTES {
            self.write_chunk(at)?;
        }
        let open = &mut self.open[at];
        if open.bytes.is_empty() {
            open.bytes.extend_from_slice(&[0; 8]);
        }
        open.bytes.extend_from_slice(&record);
        open.summary.records += 1;
        open.summary.timed &= event.time_ns.is_some();
        Ok(())
    }

    /// Writes the full or last chunk of source `at` and gives its successor a place.
    fn write_chunk(&mut self, at: usize) -> Result<(), TraceError> {
        let next = self.new_chunk();
        let open = &mut self.open[at];
        open.bytes[..8].copy_from_slice(&next.to_le_bytes());
        self.file
            .write_all_at(&open.bytes, open.chunk * CHUNK_BYTES as u64)
            .map_err(spill_error)?;
        open.bytes.clear();
        open.chunk = next;
        Ok(())
    }

    fn new_chunk(&mut self) -> u64 {
        self.chunks += 1;
        self.chunks - 1
    }

    fn finish(mut self) -> Result<(Vec<RecordedSource>, u64), TraceError> {
        for at in 0..self.open.len() {
            if !self.open[at].bytes.is_empty() {
                self.write_chunk(at)?;
            }
        }
        let sources = self.open.into_iter().map(|open| open.summary).collect();
        Ok((sources, self.chunks))
    }
}

/// A tenant that reads one recorded source.
#[derive(Clone, Debug)]
pub(super) struct Cursor {
    file: Arc<File>,
    next_chunk: u64,
    records_left: u64,
    requests_left: u64,
    requests_per_packet: u32,
    bytes: Vec<u8>,
    at: usize,
    source: SourceId,
    /// New numbers of the source's domains.
    domains: Box<[IommuDomain]>,
}

impl Cursor {
    /// At the start of `recorded`, under its own ids.
    pub(super) fn new(
        recordings: &Recordings,
        recorded: &RecordedSource,
        requests_per_packet: u32,
    ) -> Self {
        Self {
            file: Arc::clone(&recordings.file),
            next_chunk: recorded.first_chunk,
            records_left: recorded.records,
            requests_left: recorded.requests,
            requests_per_packet,
            bytes: Vec::new(),
            at: 0,
            source: recorded.source,
            domains: recorded.domains.clone().into(),
        }
    }

    /// The same under new ids; `domains` has one for each domain of the source.
    pub(super) fn named(self, source: SourceId, domains: Box<[IommuDomain]>) -> Self {
        debug_assert_eq!(domains.len(), self.domains.len());
        Self {
            source,
            domains,
            ..self
        }
    }

    /// The same behind the next `requests` requests.
    pub(super) fn past(mut self, requests: u64) -> Result<Self, TraceError> {
        let end = self.requests_left - requests.min(self.requests_left);
        while self.requests_left > end {
            let Some(bytes) = self.next_record()? else {
                break;
            };
            if self.event(&bytes).kind == EventKind::Translate {
                self.requests_left -= 1;
            }
        }
        Ok(self)
    }

    /// Whole packets left.
    pub(super) fn packets_left(&self) -> u64 {
        self.requests_left / u64::from(self.requests_per_packet)
    }

    /// Appends the requests of the next packet, and before each the
    /// invalidations and page-outs that came before it.
    pub(super) fn next_packet(&mut self, out: &mut Vec<Event>) -> Result<(), TraceError> {
        let mut requests = 0;
        while requests < self.requests_per_packet {
            let Some(bytes) = self.next_record()? else {
                break;
            };
            let event = self.event(&bytes);
            if event.kind == EventKind::Translate {
                requests += 1;
                self.requests_left -= 1;
            }
            out.push(event);
        }
        Ok(())
    }

    /// When the next event is; `None` without times and at the end.
    pub(super) fn next_time_ns(&mut self) -> Result<Option<u64>, TraceError> {
        let Some(bytes) = self.next_record()? else {
            return Ok(None);
        };
        self.at -= RECORD_BYTES;
        self.records_left += 1;
        Ok(self.event(&bytes).time_ns)
    }

    fn next_record(&mut self) -> Result<Option<[u8; RECORD_BYTES]>, TraceError> {
        if self.records_left == 0 {
            return Ok(None);
        }
        if self.at == self.bytes.len() {
            self.read_chunk()?;
        }
        let record = self.bytes[self.at..].first_chunk().copied();
        self.at += RECORD_BYTES;
        self.records_left -= 1;
        Ok(record)
    }

    fn read_chunk(&mut self) -> Result<(), TraceError> {
        let records = usize::try_from(self.records_left)
            .unwrap_or(usize::MAX)
            .min(CHUNK_RECORDS);
        self.bytes.resize(8 + records * RECORD_BYTES, 0);
        self.file
            .read_exact_at(&mut self.bytes, self.next_chunk * CHUNK_BYTES as u64)
            .map_err(spill_error)?;
        self.next_chunk = word(&self.bytes, 0);
        self.at = 8;
        Ok(())
    }

    fn event(&self, bytes: &[u8; RECORD_BYTES]) -> Event {
        let [kind, access, shift, domain, ..] = word(bytes, 16).to_le_bytes();
        let time_ns = word(bytes, 8);
        Event {
            time_ns: (time_ns != NO_TIME).then_some(time_ns),
            source: self.source,
            domain: self
                .domains
                .get(usize::from(domain))
                .copied()
                .unwrap_or_default(),
            iova: Iova(word(bytes, 0)),
            page_size: PageSize::from_shift(u32::from(shift)),
            access: [TraceAccess::Unknown, TraceAccess::Read, TraceAccess::Write]
                [usize::from(access).min(2)],
            kind: KINDS[usize::from(kind).min(KINDS.len() - 1)],
        }
    }
}

/// Kinds as numbered in a record.
const KINDS: [EventKind; 6] = [
    EventKind::Translate,
    EventKind::InvalidatePages,
    EventKind::InvalidateDomain,
    EventKind::InvalidateSource,
    EventKind::InvalidateContextsOfDomain,
    EventKind::PageOut,
];

const _: () = assert!(
    MAX_DOMAINS_PER_SOURCE <= 1 << 8,
    "a domain's place is a byte"
);

/// 24 bytes: address, time, then kind, access, log2 of the page size (0: unknown) and domain, a byte each.
///
/// What is void everywhere is recorded as void in this domain; `None` for what a source's tenant does not repeat.
fn record(event: &Event, domain: u32) -> Option<[u8; RECORD_BYTES]> {
    let kind = match event.kind {
        EventKind::Translate => 0,
        EventKind::InvalidatePages => 1,
        EventKind::InvalidateDomain | EventKind::InvalidateAll => 2,
        EventKind::InvalidateSource => 3,
        EventKind::InvalidateContextsOfDomain | EventKind::InvalidateContexts => 4,
        EventKind::PageOut => 5,
        EventKind::Join | EventKind::Leave => return None,
    };
    let access = match event.access {
        TraceAccess::Unknown => 0,
        TraceAccess::Read => 1,
        TraceAccess::Write => 2,
    };
    let shift = u64::from(event.page_size.map_or(0, PageSize::shift));
    let tail: u64 = kind | access << 8 | shift << 16 | u64::from(domain) << 24;
    let mut bytes = [0; RECORD_BYTES];
    bytes[..8].copy_from_slice(&event.iova.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&event.time_ns.unwrap_or(NO_TIME).to_le_bytes());
    bytes[16..].copy_from_slice(&tail.to_le_bytes());
    Some(bytes)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn spill_error(source: std::io::Error) -> TraceError {
    TraceError::Io {
        path: std::env::temp_dir(),
        source,
    }
}
