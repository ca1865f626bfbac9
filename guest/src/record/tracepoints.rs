// SPDX-License-Identifier: Apache-2.0
//! The kernel's records of what it mapped. The events are switched on by its command line, from boot on.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use super::error::RecordError;

const TRACEFS: &str = "/sys/kernel/tracing";
/// Where the host reads them.
const DISK: &str = "/dev/vda";
const BUFFER_BYTES: usize = 64 << 10;

/// Stops recording and writes all records to the disk. Returns their bytes.
pub(super) fn store() -> Result<u64, RecordError> {
    let trace = Path::new(TRACEFS).join("trace");
    if !trace.exists() {
        super::tenants::run(&["mount", "-t", "tracefs", "tracefs", TRACEFS])?;
    }
    let switch = Path::new(TRACEFS).join("tracing_on");
    fs::write(&switch, "0").map_err(RecordError::io(switch.to_string_lossy()))?;
    let mut from = File::open(&trace).map_err(RecordError::io(trace.to_string_lossy()))?;
    let mut to = OpenOptions::new()
        .write(true)
        .open(DISK)
        .map_err(RecordError::io(DISK))?;
    let bytes = copy(&mut from, &mut to).map_err(RecordError::io(DISK))?;
    to.sync_all().map_err(RecordError::io(DISK))?;
    Ok(bytes)
}

/// Copies by reading and writing. `io::copy` would have the kernel copy, which not every file of tracefs knows.
fn copy(from: &mut File, to: &mut File) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut bytes = 0;
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(bytes);
        }
        to.write_all(&buffer[..read])?;
        bytes += read as u64;
    }
}
