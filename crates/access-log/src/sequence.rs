// SPDX-License-Identifier: Apache-2.0
//! All files of an access log, one after the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::TraceError;
use crate::reader::AccessLogReader;
use crate::record::AccessRecord;
use crate::schema::AccessLogMeta;

/// One file of a log, closed: a log may have more files than a process may have open.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    meta: AccessLogMeta,
    /// Its own count of its records.
    records: u64,
}

/// An access log of one or more files, of which at most one is open. Iterates over its records; after an
/// error there are none.
#[derive(Debug)]
pub struct AccessLog {
    meta: AccessLogMeta,
    records: u64,
    /// Files that follow, the next one last.
    files: Vec<PathBuf>,
    /// The file being read.
    reader: Option<AccessLogReader>,
    batch: Vec<AccessRecord>,
    /// Next of `batch`.
    next: usize,
    last_time_ns: u64,
}

impl AccessLog {
    /// Opens a log by its files, given in any order.
    ///
    /// # Errors
    /// If there is none, one is broken, they are not of one log, one in between is missing, or their counts
    /// of records add up to 2^64 or more.
    pub fn open(files: &[PathBuf]) -> Result<Self, TraceError> {
        let mut logs = Self::open_all(files)?.into_iter();
        match (logs.next(), logs.next()) {
            (Some(log), None) => Ok(log),
            (Some(one), Some(other)) => Err(TraceError::Asked(format!(
                "the files are of more than one log: of `{}` and of `{}`, or begun at different \
                 times; give the files of one",
                one.meta.vm, other.meta.vm
            ))),
            (None, _) => Err(TraceError::Asked("no file of an access log".to_owned())),
        }
    }

    /// Opens all logs that `files` belong to, by the names of their VMs.
    ///
    /// # Errors
    /// If one is broken, one in between is missing, or the counts of records in a log add up to 2^64 or
    /// more.
    pub fn open_all(files: &[PathBuf]) -> Result<Vec<Self>, TraceError> {
        let mut logs: BTreeMap<(String, u64), Vec<Part>> = BTreeMap::new();
        for file in files {
            let part = Part::look(file)?;
            logs.entry((part.meta.vm.clone(), part.meta.started_unix_ns))
                .or_default()
                .push(part);
        }
        logs.into_values().map(Self::of).collect()
    }

    /// The log of these files, at least one.
    fn of(mut parts: Vec<Part>) -> Result<Self, TraceError> {
        parts.sort_by_key(|part| part.meta.sequence);
        for pair in parts.windows(2) {
            let [before, after] = pair else { continue };
            check_order(before, after)?;
        }
        let mut files: Vec<PathBuf> = parts.iter().map(|part| part.path.clone()).collect();
        files.reverse();
        let records = records_of(&parts)?;
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else {
            return Err(TraceError::Asked("no file of an access log".to_owned()));
        };
        let mut meta = first.meta;
        for Part { meta: part, .. } in parts {
            meta.memory_bytes = meta.memory_bytes.max(part.memory_bytes);
            meta.lost_records = meta.lost_records.saturating_add(part.lost_records);
            meta.late_records = meta.late_records.saturating_add(part.late_records);
            for device in part.devices {
                meta.enter(device);
            }
        }
        Ok(Self {
            meta,
            records,
            files,
            reader: None,
            batch: Vec::new(),
            next: 0,
            last_time_ns: 0,
        })
    }

    /// The metadata of its files, merged: the largest memory, all devices, all losses, the sequence number
    /// of the first.
    #[must_use]
    pub const fn meta(&self) -> &AccessLogMeta {
        &self.meta
    }

    /// Its files' own counts of their records.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.records
    }

    /// Fills the batch; returns whether there are more records.
    fn fill(&mut self) -> Result<bool, TraceError> {
        loop {
            let reader = match &mut self.reader {
                Some(reader) => reader,
                None => match self.files.pop() {
                    Some(file) => self.reader.insert(AccessLogReader::open(&file)?),
                    None => return Ok(false),
                },
            };
            self.batch.clear();
            self.next = 0;
            if reader.next_batch(&mut self.batch)? == 0 {
                self.reader = None;
                continue;
            }
            // Within a file the reader has checked the times.
            if let (Some(first), Some(last)) = (self.batch.first(), self.batch.last()) {
                if first.time_ns < self.last_time_ns {
                    return Err(TraceError::File {
                        path: reader.path().to_owned(),
                        reason: format!(
                            "begins at {} ns, before the {} ns that the file before it ends at",
                            first.time_ns, self.last_time_ns
                        ),
                    });
                }
                self.last_time_ns = last.time_ns;
            }
            return Ok(true);
        }
    }
}

impl Iterator for AccessLog {
    type Item = Result<AccessRecord, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.batch.len() {
            match self.fill() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.files.clear();
                    self.reader = None;
                    self.batch.clear();
                    self.next = 0;
                    return Some(Err(error));
                }
            }
        }
        let record = self.batch.get(self.next).copied()?;
        self.next += 1;
        Some(Ok(record))
    }
}

impl Part {
    /// Opens the file for its metadata, and closes it.
    fn look(file: &Path) -> Result<Self, TraceError> {
        let reader = AccessLogReader::open(file)?;
        Ok(Self {
            path: file.to_owned(),
            meta: reader.meta().clone(),
            records: reader.records(),
        })
    }
}

/// The files' own counts of their records, which may be false.
fn records_of(parts: &[Part]) -> Result<u64, TraceError> {
    let mut records: u64 = 0;
    for part in parts {
        records = records
            .checked_add(part.records)
            .ok_or_else(|| TraceError::File {
                path: part.path.clone(),
                reason: format!(
                    "says it has {} records, and the files of its log before it {records}: \
                     together 2^64 or more, so one of them is broken",
                    part.records
                ),
            })?;
    }
    Ok(records)
}

/// Whether `after` is the direct successor of `before`.
fn check_order(before: &Part, after: &Part) -> Result<(), TraceError> {
    let (number, next) = (before.meta.sequence, after.meta.sequence);
    let reason = match next.checked_sub(number) {
        Some(1) => return Ok(()),
        Some(0) | None => format!(
            "is file {next} of its log, and so is {}; give it once",
            before.path.display()
        ),
        Some(_) => format!(
            "is file {next} of its log, and the one before it here is {number}; \
             give those in between too, or only those from {next} on"
        ),
    };
    Err(TraceError::File {
        path: after.path.clone(),
        reason,
    })
}
