// SPDX-License-Identifier: Apache-2.0
//! An unbounded log in files of bounded size and number.

use std::fs;
use std::path::{Path, PathBuf};

use super::writer::check;
use crate::error::TraceError;
use crate::record::AccessRecord;
use crate::schema::AccessLogMeta;
use crate::writer::AccessLogWriter;

/// Records after which the size of the file is checked.
const LOOK_RECORDS: usize = 1024;

/// Smallest limit of a file, in bytes: below it a file would be mostly metadata.
pub const LOG_FILE_BYTES_MIN: u64 = 256 << 10;

/// Largest number of files that are kept: 4 TiB at 64 MiB each. Completing a file lists the directory,
/// which with this many files takes some hundredths of a second, and a reader of the log opens each of them
/// twice.
pub const LOG_FILES_MAX: u32 = 1 << 16;

/// End of the names of a log's files.
const SUFFIX: &str = ".parquet";

/// The limits of a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogLimits {
    /// Directory of the files.
    pub dir: PathBuf,
    /// Largest size of a file, except for its footer of some kilobytes.
    pub max_file_bytes: u64,
    /// Complete files that are kept, [`LOG_FILES_MAX`] at most; the oldest are removed. One more is being
    /// written.
    pub max_files: u32,
}

/// A log in files `VM-000001.parquet`, `VM-000002.parquet` and so on.
///
/// One log of a VM at a time may be written to a directory: two would use the same numbers. The caller must
/// ensure that.
///
/// A file gets its name when it is complete, so a killed process loses the unfinished file;
/// [`RotatingLog::rotate`] completes it earlier.
#[derive(Debug)]
pub struct RotatingLog {
    limits: LogLimits,
    /// Of the unfinished file, or of the next one.
    meta: AccessLogMeta,
    writer: Option<AccessLogWriter>,
    last_time_ns: u64,
    /// Records in complete files.
    done: u64,
}

impl RotatingLog {
    /// Starts a log. Files that an earlier log of the same VM left in the directory count among those that
    /// are kept.
    ///
    /// # Errors
    /// If the limits allow nothing or too much, the VM's name is not valid for a file, or the directory
    /// cannot be read.
    pub fn create(limits: LogLimits, mut meta: AccessLogMeta) -> Result<Self, TraceError> {
        if limits.max_file_bytes < LOG_FILE_BYTES_MIN || limits.max_files == 0 {
            return Err(TraceError::Asked(format!(
                "an access log of {} files of {} bytes each; it needs at least one of {LOG_FILE_BYTES_MIN}",
                limits.max_files, limits.max_file_bytes
            )));
        }
        if limits.max_files > LOG_FILES_MAX {
            return Err(TraceError::Asked(format!(
                "an access log of {} files; at most {LOG_FILES_MAX} are kept: let each be larger",
                limits.max_files
            )));
        }
        if meta.vm.is_empty() || meta.vm.contains(['/', '\0']) {
            return Err(TraceError::Asked(format!(
                "`{}` cannot begin the name of an access log's file",
                meta.vm
            )));
        }
        let newest = present(&limits.dir, &meta.vm)?.pop();
        meta.sequence = newest.map_or(1, |(sequence, _)| sequence.saturating_add(1));
        Ok(Self {
            limits,
            meta,
            writer: None,
            last_time_ns: 0,
            done: 0,
        })
    }

    /// The metadata of the unfinished file, and of those after it.
    pub const fn meta_mut(&mut self) -> &mut AccessLogMeta {
        &mut self.meta
    }

    /// Records that were appended.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.done + self.writer.as_ref().map_or(0, AccessLogWriter::records)
    }

    /// Writes `records`, perhaps later, to this file and those that follow. An invalid record is counted as
    /// lost: a device that logs nonsense must not end the log of the others.
    ///
    /// # Errors
    /// If a file cannot take them or cannot be completed. The records of such a file are lost with it; the
    /// next call starts another.
    pub fn append(&mut self, records: &[AccessRecord]) -> Result<(), TraceError> {
        for part in records.chunks(LOOK_RECORDS) {
            if self.append_part(part)? >= self.limits.max_file_bytes {
                self.rotate()?;
            }
        }
        Ok(())
    }

    /// Writes to the unfinished file; returns its size.
    fn append_part(&mut self, records: &[AccessRecord]) -> Result<u64, TraceError> {
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => begin(&self.limits, &self.meta, self.last_time_ns)?,
        };
        for record in records {
            match check(record) {
                Ok(()) => writer.push(*record)?,
                Err(_) => self.meta.lost_records += 1,
            }
        }
        let bytes = writer.bytes_max();
        self.writer = Some(writer);
        Ok(bytes)
    }

    /// Completes the unfinished file, if it has records, and removes the oldest excess files; returns the
    /// file.
    ///
    /// # Errors
    /// If it cannot be completed, or an old one cannot be removed.
    pub fn rotate(&mut self) -> Result<Option<PathBuf>, TraceError> {
        let Some(mut writer) = self.writer.take() else {
            return Ok(None);
        };
        let sequence = self.meta.sequence;
        let path = file_path(&self.limits.dir, &self.meta.vm, sequence);
        let late = writer.meta_mut().late_records;
        *writer.meta_mut() = AccessLogMeta {
            late_records: late,
            ..self.meta.clone()
        };
        let records = writer.records();
        // Its number is not used again, even after a failure.
        self.meta.sequence = sequence.saturating_add(1);
        self.last_time_ns = writer.finish()?;
        self.meta.lost_records = 0;
        self.done += records;
        let mut present = present(&self.limits.dir, &self.meta.vm)?;
        let keep = usize::try_from(self.limits.max_files).unwrap_or(usize::MAX);
        present.truncate(present.len().saturating_sub(keep));
        for (_, oldest) in present {
            fs::remove_file(&oldest).map_err(|source| TraceError::Io {
                path: oldest,
                source,
            })?;
        }
        Ok(Some(path))
    }

    /// Ends the log; returns its last file, if that has records.
    ///
    /// # Errors
    /// As [`RotatingLog::rotate`].
    pub fn finish(mut self) -> Result<Option<PathBuf>, TraceError> {
        self.rotate()
    }
}

fn begin(
    limits: &LogLimits,
    meta: &AccessLogMeta,
    last_time_ns: u64,
) -> Result<AccessLogWriter, TraceError> {
    let path = file_path(&limits.dir, &meta.vm, meta.sequence);
    let mut writer = AccessLogWriter::create(&path, meta.clone())?;
    writer.follow(last_time_ns);
    Ok(writer)
}

fn file_path(dir: &Path, vm: &str, sequence: u32) -> PathBuf {
    dir.join(format!("{vm}-{sequence:06}{SUFFIX}"))
}

/// Complete files of the VM's logs in the directory, by their numbers.
fn present(dir: &Path, vm: &str) -> Result<Vec<(u32, PathBuf)>, TraceError> {
    let io = |source| TraceError::Io {
        path: dir.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let digits = name
            .and_then(|name| {
                name.strip_prefix(vm)?
                    .strip_prefix('-')?
                    .strip_suffix(SUFFIX)
            })
            .filter(|digits| digits.len() >= 6 && digits.bytes().all(|b| b.is_ascii_digit()));
        if let Some(sequence) = digits.and_then(|digits| digits.parse().ok()) {
            files.push((sequence, path));
        }
    }
    files.sort();
    Ok(files)
}
