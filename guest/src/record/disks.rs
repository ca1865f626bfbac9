// SPDX-License-Identifier: Apache-2.0
//! fio on every NVMe disk at once: each disk is a tenant.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::error::RecordError;
use crate::fio;

/// What fio did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ran {
    pub disks: usize,
    /// Read and written.
    pub bytes: u64,
}

/// Runs fio for `seconds`: blocks of 4 KiB at random, two reads for each write, past the page cache.
pub(super) fn run(seconds: u64) -> Result<Ran, RecordError> {
    let disks = disks()?;
    if disks.is_empty() {
        return Err(RecordError::NoDevice("NVMe disk"));
    }
    let mut command = Command::new(fio::PROGRAM);
    command
        .args(["--output-format=json", "--ioengine=libaio", "--direct=1"])
        .args(["--rw=randrw", "--rwmixread=67", "--bs=4k", "--iodepth=16"])
        .args(["--thread", "--time_based", "--norandommap"])
        .arg(format!("--runtime={seconds}"));
    for disk in &disks {
        command
            .arg(format!("--name={disk}"))
            .arg(format!("--filename=/dev/{disk}"));
    }
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(RecordError::io(fio::PROGRAM))?;
    let report = String::from_utf8_lossy(&output.stdout);
    match bytes(&report) {
        Some(bytes) if output.status.success() => Ok(Ran {
            disks: disks.len(),
            bytes,
        }),
        _ => Err(RecordError::Program {
            program: "fio".to_owned(),
            said: format!(
                "{}: {report} {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            ),
        }),
    }
}

/// Namespaces of NVMe controllers, by name.
fn disks() -> Result<Vec<String>, RecordError> {
    const CLASS: &str = "/sys/block";
    let mut disks: Vec<String> = fs::read_dir(CLASS)
        .map_err(RecordError::io(CLASS))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("nvme"))
        .collect();
    disks.sort();
    Ok(disks)
}

/// Bytes of all jobs in fio's report, which may have warnings in front.
fn bytes(report: &str) -> Option<u64> {
    let begin = report.find('{')?;
    let report: Value = match serde_json::from_str(report.get(begin..)?) {
        Ok(report) => report,
        Err(_) => return None,
    };
    let jobs = report.get("jobs")?.as_array()?;
    let of = |job: &Value, what: &str| job.get(what)?.get("io_bytes")?.as_u64();
    jobs.iter()
        .map(|job| Some(of(job, "read")? + of(job, "write")?))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_all_jobs_are_added_up() {
        let report = "fio: a warning\n{\"jobs\": [{\"read\": {\"io_bytes\": 5}, \"write\": {\"io_bytes\": 7}}, \
                      {\"read\": {\"io_bytes\": 1}, \"write\": {\"io_bytes\": 0}}]}";
        assert_eq!(bytes(report), Some(13));
        assert_eq!(bytes("{}"), None);
        assert_eq!(bytes("no report"), None);
    }
}
