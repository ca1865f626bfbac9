// SPDX-License-Identifier: Apache-2.0
//! All files of an access log, one after the other.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{AccessLogMeta, AccessLogReader};
use crate::access::AccessRecord;
use crate::error::TraceError;

/// An access log of one or more files. Iterates over its records; after an error
/// there are none.
#[derive(Debug)]
pub struct AccessLog {
    meta: AccessLogMeta,
    records: u64,
    /// Files that follow, the next one last.
    files: Vec<PathBuf>,
    /// The file that is read.
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
    /// If there is none, one is broken, they are not of one log, or one in
    /// between is missing.
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
    /// If one is broken, or one in between is missing.
    pub fn open_all(files: &[PathBuf]) -> Result<Vec<Self>, TraceError> {
        let mut logs: BTreeMap<(String, u64), Vec<AccessLogReader>> = BTreeMap::new();
        for file in files {
            let reader = AccessLogReader::open(file)?;
            let meta = reader.meta();
            logs.entry((meta.vm.clone(), meta.started_unix_ns))
                .or_default()
                .push(reader);
        }
        logs.into_values().map(Self::of).collect()
    }

    /// The log of these files, at least one.
    fn of(mut parts: Vec<AccessLogReader>) -> Result<Self, TraceError> {
        parts.sort_by_key(|part| part.meta().sequence);
        for pair in parts.windows(2) {
            let [before, after] = pair else { continue };
            check_order(before, after)?;
        }
        // They are opened again one by one: a log may have more files than a
        // process may have open.
        let mut files: Vec<PathBuf> = parts.iter().map(|part| part.path().to_owned()).collect();
        files.reverse();
        let records = parts.iter().map(AccessLogReader::records).sum();
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else {
            return Err(TraceError::Asked("no file of an access log".to_owned()));
        };
        let mut meta = first.meta().clone();
        for part in parts {
            let part = part.meta();
            meta.memory_bytes = meta.memory_bytes.max(part.memory_bytes);
            meta.lost_records = meta.lost_records.saturating_add(part.lost_records);
            meta.late_records = meta.late_records.saturating_add(part.late_records);
            for device in &part.devices {
                meta.enter(device.clone());
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

    /// What its files say about it, taken together: the largest memory, all
    /// devices, all losses, the sequence number of the first.
    #[must_use]
    pub const fn meta(&self) -> &AccessLogMeta {
        &self.meta
    }

    /// Records that its files say they hold.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.records
    }

    /// Fills the batch; whether there are more records.
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
            // Within a file the reader has looked at the times.
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

/// Whether `after` follows `before` at once.
fn check_order(before: &AccessLogReader, after: &AccessLogReader) -> Result<(), TraceError> {
    let (number, next) = (before.meta().sequence, after.meta().sequence);
    let reason = match next.checked_sub(number) {
        Some(1) => return Ok(()),
        Some(0) | None => format!(
            "is file {next} of its log, and so is {}; give it once",
            before.path().display()
        ),
        Some(_) => format!(
            "is file {next} of its log, and the one before it here is {number}; \
             give those in between too, or only those from {next} on"
        ),
    };
    Err(TraceError::File {
        path: after.path().to_owned(),
        reason,
    })
}
