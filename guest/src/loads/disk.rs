// SPDX-License-Identifier: Apache-2.0
//! fio on the guest's disk, past the page cache: 4 KiB at random, 70 % of it reads.

use std::fs;
use std::process::Command;

use super::{LoadError, Ran, output_of};
use crate::fio;

const JOB: &str = "load";
const REPORT: &str = "/tmp/fio-load.json";
const BLOCK_BYTES: u64 = 4096;

/// Runs it for this time; an operation is a request.
pub(super) fn run(seconds: u64) -> Result<Ran, LoadError> {
    let mut command = Command::new(fio::PROGRAM);
    command
        .args([
            "--name=load",
            "--filename=/dev/vda",
            "--ioengine=libaio",
            "--direct=1",
            "--rw=randrw",
            "--rwmixread=70",
            "--norandommap",
            "--iodepth=16",
            "--time_based",
            "--output-format=json",
            "--eta=never",
            // Threads suffice, and need no System V shared memory.
            "--thread=1",
        ])
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
