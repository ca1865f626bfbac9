// SPDX-License-Identifier: Apache-2.0
//! fio on the guest's disk, past the page cache: 4 KiB at random; 70 % of it reads, or each block written, read again
//! and verified.

use std::fs;
use std::process::Command;

use super::{LoadError, Ran, output_of};
use crate::fio;

const JOB: &str = "load";
const REPORT: &str = "/tmp/fio-load.json";
const BLOCK_BYTES: u64 = 4096;

/// What fio does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// It reads and writes.
    Mixed,
    /// It writes, and verifies what it has written. The first wrong byte is an error.
    Verified,
}

impl Job {
    const fn words(self) -> &'static [&'static str] {
        match self {
            Self::Mixed => &[
                "--rw=randrw",
                "--rwmixread=70",
                "--norandommap",
                "--iodepth=16",
            ],
            Self::Verified => &[
                "--rw=randwrite",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_backlog=32",
                "--verify_state_save=0",
                // Two writes of a block at a time would be an error of nobody's.
                "--serialize_overlap=1",
                "--iodepth=4",
            ],
        }
    }
}

/// Runs it for this time; an operation is a request.
pub(super) fn run(job: Job, seconds: u64) -> Result<Ran, LoadError> {
    let mut command = Command::new(fio::PROGRAM);
    command
        .args([
            "--name=load",
            "--filename=/dev/vda",
            "--ioengine=libaio",
            "--direct=1",
            "--time_based",
            "--output-format=json",
            "--eta=never",
            // Threads suffice, and need no System V shared memory.
            "--thread=1",
        ])
        .args(job.words())
        .arg(format!("--bs={BLOCK_BYTES}"))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--output={REPORT}"));
    output_of("fio", &mut command)?;
    let report = fs::read_to_string(REPORT).map_err(|source| LoadError::Io {
        what: REPORT,
        source,
    })?;
    let moved = fio::moved(JOB, &report)?;
    Ok(Ran {
        operations: (moved.read_bytes + moved.written_bytes) / BLOCK_BYTES,
        took: fio::took(JOB, &report)?,
    })
}
