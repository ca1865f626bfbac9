// SPDX-License-Identifier: Apache-2.0
//! fio as the guest's work on its disk, instead of our own loop: a well-known storage load.
//!
//! The host puts fio and three of its job files into the initramfs. This module runs them in turn and adds
//! fio's figures to our counters:
//!
//! ```text
//!   fill.fio   writes every block once, each with its number and checksum     then the guest works
//!   work.fio   until the host says stop (SIGINT)
//!   check.fio  reads every block past the page cache                          the last verification
//! ```
//! In every job fio verifies what it reads, so bytes read are bytes compared: a wrong byte ends fio with an
//! error, which is counted as ours. fio goes on while the host wants quiet.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::shared::{Counters, Order, Shared};

/// The program, at the path where the host puts it.
pub const PROGRAM: &str = "/bin/fio";
/// Folder of the job files.
pub const JOBS: &str = "/fio";
/// Between two polls for the end of fio or the stop command.
const LOOK: Duration = Duration::from_millis(250);

/// A job of fio's failed.
#[derive(Debug, thiserror::Error)]
pub enum FioError {
    /// It could not be run, or its report could not be read.
    #[error("fio, {job}: {source}")]
    Io {
        /// Name of the job file.
        job: &'static str,
        /// Why.
        source: io::Error,
    },
    /// It ended before the stop command.
    #[error("fio, {job}: it ended early, with {status}")]
    Early {
        /// Name of the job file.
        job: &'static str,
        /// How it ended.
        status: ExitStatus,
    },
    /// Its report is invalid.
    #[error("fio, {job}: its report cannot be read ({reason})")]
    Report {
        /// Name of the job file.
        job: &'static str,
        /// Why.
        reason: String,
    },
    /// A block was wrong, or an operation failed.
    #[error("fio, {job}: it reports errors {errors:?} of its threads")]
    Wrong {
        /// Name of the job file.
        job: &'static str,
        /// Number of the error of each thread that has one.
        errors: Vec<u64>,
    },
}

/// Fills the disk, lets fio work until the host's stop command, verifies every block.
///
/// # Errors
/// [`FioError`], of the first job that failed.
pub fn run(bytes: u64, shared: &Shared) -> Result<(), FioError> {
    let counters = &shared.disk;
    counters.bytes.store(bytes, Relaxed);
    Counters::add(&counters.bytes_verified, to_its_end("fill")?);
    counters.filled.store(true, Relaxed);
    Counters::add(&counters.bytes_verified, until_stop("work", shared)?);
    Counters::add(&counters.final_bytes, to_its_end("check")?);
    Ok(())
}

fn to_its_end(job: &'static str) -> Result<u64, FioError> {
    let mut child = start(job)?;
    let status = child
        .wait()
        .map_err(|source| FioError::Io { job, source })?;
    let read = bytes_read(job, &report(job)?)?;
    if status.success() {
        Ok(read)
    } else {
        Err(FioError::Early { job, status })
    }
}

fn until_stop(job: &'static str, shared: &Shared) -> Result<u64, FioError> {
    let failed = |source| FioError::Io { job, source };
    let mut child = start(job)?;
    while shared.order() == Order::Step {
        if let Some(status) = child.try_wait().map_err(failed)? {
            // The errors of its threads are more specific than its exit status.
            bytes_read(job, &report(job)?)?;
            return Err(FioError::Early { job, status });
        }
        thread::sleep(LOOK);
    }
    if let Some(pid) = child.id().try_into().ok().and_then(Pid::from_raw) {
        // On this signal it ends its threads and reports.
        kill_process(pid, Signal::INT).map_err(|error| failed(error.into()))?;
    }
    child.wait().map_err(failed)?;
    bytes_read(job, &report(job)?)
}

fn start(job: &'static str) -> Result<Child, FioError> {
    let child = Command::new(PROGRAM)
        .arg("--output-format=json")
        .arg(format!("--output={}", report_path(job)))
        .arg(Path::new(JOBS).join(format!("{job}.fio")))
        .spawn();
    child.map_err(|source| FioError::Io { job, source })
}

fn report_path(job: &str) -> String {
    format!("/tmp/{job}.json")
}

fn report(job: &'static str) -> Result<String, FioError> {
    fs::read_to_string(report_path(job)).map_err(|source| FioError::Io { job, source })
}

/// Bytes that the threads of a job moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Bytes read, and so compared.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

fn bytes_read(job: &'static str, report: &str) -> Result<u64, FioError> {
    moved(job, report).map(|moved| moved.read_bytes)
}

/// The threads in a report of fio.
fn threads(job: &'static str, report: &str) -> Result<Vec<Value>, FioError> {
    let wrong = |reason: String| FioError::Report { job, reason };
    // fio prints notes before the object.
    let object = report.find('{').map_or("", |begin| &report[begin..]);
    let mut report: Value =
        serde_json::from_str(object).map_err(|error| wrong(error.to_string()))?;
    match report["jobs"].take() {
        Value::Array(threads) => Ok(threads),
        _ => Err(wrong("it has no jobs".to_owned())),
    }
}

fn number(job: &'static str, value: &Value) -> Result<u64, FioError> {
    value.as_u64().ok_or_else(|| FioError::Report {
        job,
        reason: format!("{value} is no number"),
    })
}

/// How long a job ran, by fio's report: its longest thread.
pub(crate) fn took(job: &'static str, report: &str) -> Result<Duration, FioError> {
    let mut longest_ms = 0;
    for thread in threads(job, report)? {
        longest_ms = longest_ms.max(number(job, &thread["job_runtime"])?);
    }
    Ok(Duration::from_millis(longest_ms))
}

/// Bytes that a job moved, by fio's report, if all its threads ended without an error.
pub(crate) fn moved(job: &'static str, report: &str) -> Result<Moved, FioError> {
    let number = |value: &Value| number(job, value);
    let (mut moved, mut errors) = (
        Moved {
            read_bytes: 0,
            written_bytes: 0,
        },
        Vec::new(),
    );
    for thread in threads(job, report)? {
        moved.read_bytes += number(&thread["read"]["io_bytes"])?;
        moved.written_bytes += number(&thread["write"]["io_bytes"])?;
        match number(&thread["error"])? {
            0 => {}
            error => errors.push(error),
        }
    }
    if errors.is_empty() {
        Ok(moved)
    } else {
        Err(FioError::Wrong { job, errors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_sound_threads_tells_the_bytes_they_read() {
        let report = "fio: a note\n{\"jobs\": [\
            {\"error\": 0, \"read\": {\"io_bytes\": 4096}, \"write\": {\"io_bytes\": 512}},\
            {\"error\": 0, \"read\": {\"io_bytes\": 8192}, \"write\": {\"io_bytes\": 512}}]}";
        let wanted = Moved {
            read_bytes: 12_288,
            written_bytes: 1024,
        };
        assert_eq!(moved("work", report).expect("it is sound"), wanted);
    }

    #[test]
    fn job_took_as_long_as_its_longest_thread() {
        let report = r#"{"jobs": [{"job_runtime": 5001}, {"job_runtime": 5020}]}"#;
        assert_eq!(took("work", report).expect("times").as_millis(), 5020);
        took("work", r#"{"jobs": [{"error": 0}]}"#).expect_err("no time");
    }

    #[test]
    fn report_of_a_thread_with_an_error_is_an_error_with_its_number() {
        let report =
            r#"{"jobs": [{"error": 84, "read": {"io_bytes": 4096}, "write": {"io_bytes": 0}}]}"#;
        let Err(FioError::Wrong { errors, .. }) = bytes_read("work", report) else {
            panic!("a wrong block was taken for a right one");
        };
        assert_eq!(errors, [84]);
    }

    #[test]
    fn report_that_is_cut_off_is_an_error() {
        for report in [
            "",
            "fio: killed",
            "{\"jobs\": [",
            "{}",
            r#"{"jobs": [{"error": 0}]}"#,
        ] {
            assert!(
                matches!(bytes_read("work", report), Err(FioError::Report { .. })),
                "{report}"
            );
        }
    }
}
