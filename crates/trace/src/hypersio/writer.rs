// SPDX-License-Identifier: Apache-2.0
//! Writes the three files that the authors' simulator reads.
//!
//! `next` of a request is known only when the next request for its page has come. A second pass fills it in
//! from the end of the file to its beginning, so that the next request has always been seen. Both passes go
//! through the file in large blocks; memory is that of the distinct pages.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{NEVER, NEXT_AT, RECORD_BYTES, TYPE_TRANSLATE, field, mask_of};
use crate::event::{Event, EventKind, IOVA_BITS};
use crate::parquet::kind_name;
use crate::stream::{BATCH_EVENTS, EventSink};
use pagetide_access_log::PartialFile;
use pagetide_access_log::TraceError;

/// Suffix of the file with the requests; the others have their own.
const TRACE_SUFFIX: &str = "iotlb_trace.bin";
const CONTEXT_SUFFIX: &str = "cc_data.bin";
const TABLE_SUFFIX: &str = "slpt_data.bin";

/// Bit 0 of a context entry: present.
const CONTEXT_PRESENT: u64 = 1;

/// Generation of every context entry; the program ignores it.
const GENERATION: u16 = 1;

/// Writes `…iotlb_trace.bin`, and `…cc_data.bin` and `…slpt_data.bin` beside it.
///
/// The format can express requests with a page size, of sources and domains of 16 bits; it has no time,
/// access or invalidation. Sources that join, or issue requests, are in `…cc_data.bin`. Our traces have no
/// page-table entries: `…slpt_data.bin` is empty, and `slpte` of each request 0 (the program uses neither).
#[derive(Debug)]
pub struct HypersioWriter {
    partial: PartialFile,
    output: BufWriter<File>,
    context_path: PathBuf,
    table_path: PathBuf,
    /// Domain of each source.
    contexts: BTreeMap<u16, u16>,
    /// Events accepted.
    done: u64,
    /// Requests among them, each of which is a record.
    requests: u64,
}

impl HypersioWriter {
    /// Starts a trace; `path` ends in `iotlb_trace.bin`, as the program requires.
    ///
    /// # Errors
    /// If the name ends otherwise, or no file can be created beside `path`.
    pub fn create(path: &Path) -> Result<Self, TraceError> {
        let prefix = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_suffix(TRACE_SUFFIX));
        let Some(prefix) = prefix else {
            return Err(TraceError::Asked(format!(
                "{}: a HyperSIO trace is named …{TRACE_SUFFIX}, for its program finds it by that",
                path.display()
            )));
        };
        let context_path = path.with_file_name(format!("{prefix}{CONTEXT_SUFFIX}"));
        let table_path = path.with_file_name(format!("{prefix}{TABLE_SUFFIX}"));
        // They are written last; anything in their way is reported first.
        PartialFile::check(&context_path)?;
        PartialFile::check(&table_path)?;
        let (partial, file) = PartialFile::create(path)?;
        Ok(Self {
            context_path,
            table_path,
            partial,
            output: BufWriter::with_capacity(1 << 20, file),
            contexts: BTreeMap::new(),
            done: 0,
            requests: 0,
        })
    }

    /// The event's source and domain, as the format has them.
    fn ids(event: &Event) -> Result<(u16, u16), String> {
        let narrow = |what: &str, id: u32| {
            u16::try_from(id)
                .map_err(|_| format!("{what} {id} does not fit in the 16 bits of the format"))
        };
        Ok((
            narrow("source", event.source.0)?,
            narrow("domain", event.domain.0)?,
        ))
    }

    /// The event as a record, with `next` still open.
    fn encode(event: &Event) -> Result<[u8; RECORD_BYTES], String> {
        let (source, domain) = Self::ids(event)?;
        let Some((size, level)) = event
            .page_size
            .and_then(|size| size.level().map(|level| (size, level)))
        else {
            return Err("the page size is not known, and the format has no way to say so".into());
        };
        if event.iova.0 >> IOVA_BITS != 0 {
            return Err(format!(
                "iova {} has more than {IOVA_BITS} bits",
                event.iova
            ));
        }
        let mut record = [0; RECORD_BYTES];
        record[..4].copy_from_slice(&TYPE_TRANSLATE.to_le_bytes());
        record[4..6].copy_from_slice(&source.to_le_bytes());
        record[6..8].copy_from_slice(&domain.to_le_bytes());
        record[8..16].copy_from_slice(&event.iova.0.to_le_bytes());
        record[16..24].copy_from_slice(&mask_of(size).to_le_bytes());
        record[24..32].copy_from_slice(&u64::from(level).to_le_bytes());
        record[NEXT_AT..].copy_from_slice(&NEVER.to_le_bytes());
        Ok(record)
    }

    fn record_error(&self, reason: String) -> TraceError {
        TraceError::Record {
            path: self.partial.path().to_owned(),
            record: self.done,
            reason,
        }
    }

    /// Takes one event.
    fn push(&mut self, event: &Event) -> Result<(), TraceError> {
        match event.kind {
            EventKind::Translate => {
                let record = Self::encode(event).map_err(|reason| self.record_error(reason))?;
                self.output
                    .write_all(&record)
                    .map_err(|source| self.partial.error(source))?;
                self.requests += 1;
            }
            EventKind::Join => {}
            other => {
                return Err(self.record_error(format!(
                    "the format has no word for {}: write parquet, or make the trace without \
                     such events (unmap = \"never\", membership = \"silent\")",
                    kind_name(other)
                )));
            }
        }
        let (source, domain) = Self::ids(event).map_err(|reason| self.record_error(reason))?;
        self.contexts.insert(source, domain);
        self.done += 1;
        Ok(())
    }

    /// The second pass: fills in `next`, from the last record to the first.
    fn link(file: &mut File, requests: u64) -> std::io::Result<()> {
        let mut next_of: HashMap<(u64, u16), u64> = HashMap::new();
        let mut block = vec![0; BATCH_EVENTS * RECORD_BYTES];
        let mut end = requests;
        while end != 0 {
            let start = end.saturating_sub(BATCH_EVENTS as u64);
            let bytes = usize::try_from((end - start) * RECORD_BYTES as u64)
                .unwrap_or(block.len())
                .min(block.len());
            let (block, at) = (&mut block[..bytes], start * RECORD_BYTES as u64);
            file.seek(SeekFrom::Start(at))?;
            file.read_exact(block)?;
            let (records, _) = block.as_chunks_mut::<RECORD_BYTES>();
            for (index, record) in (start..end).rev().zip(records.iter_mut().rev()) {
                let iova = u64::from_le_bytes(field(record, 8));
                let mask = u64::from_le_bytes(field(record, 16));
                let domain = u16::from_le_bytes(field(record, 6));
                let next = next_of.insert((iova & mask, domain), index);
                record[NEXT_AT..].copy_from_slice(&next.unwrap_or(NEVER).to_le_bytes());
            }
            file.seek(SeekFrom::Start(at))?;
            file.write_all(block)?;
            end = start;
        }
        Ok(())
    }

    /// Content of `…cc_data.bin`.
    fn context_data(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(self.contexts.len() * 20);
        for (source, domain) in &self.contexts {
            data.extend_from_slice(&source.to_le_bytes());
            data.extend_from_slice(&(u64::from(*domain) << 8).to_le_bytes());
            data.extend_from_slice(&CONTEXT_PRESENT.to_le_bytes());
            data.extend_from_slice(&GENERATION.to_le_bytes());
        }
        data
    }
}

impl EventSink for HypersioWriter {
    fn write(&mut self, events: &[Event]) -> Result<(), TraceError> {
        events.iter().try_for_each(|event| self.push(event))
    }

    fn finish(self: Box<Self>) -> Result<(), TraceError> {
        let contexts = self.context_data();
        let mut file = self
            .output
            .into_inner()
            .map_err(|error| self.partial.error(error.into_error()))?;
        Self::link(&mut file, self.requests).map_err(|source| self.partial.error(source))?;
        for (path, data) in [
            (&self.context_path, contexts.as_slice()),
            (&self.table_path, &[]),
        ] {
            let (partial, mut file) = PartialFile::create(path)?;
            file.write_all(data)
                .map_err(|source| partial.error(source))?;
            partial.complete(&file)?;
        }
        self.partial.complete(&file)
    }
}
