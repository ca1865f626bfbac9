// SPDX-License-Identifier: Apache-2.0
//! The guest kernel's log, searched for lines that must not occur.

use std::fs::File;
use std::io::{ErrorKind, Read};

use super::tally::Tally;

const LOG: &str = "/dev/kmsg";
/// Longer than any record.
const RECORD_BYTES: usize = 8192;
/// Parts of lines about a failed disk.
const DISK: [&str; 10] = [
    "I/O error",
    "critical target error",
    "critical medium error",
    "EXT4-fs error",
    "EXT4-fs warning",
    "Aborting journal",
    "JBD2: Detected IO errors",
    "Remounting filesystem read-only",
    "Read-error on swap-device",
    "Write-error on swap-device",
];
/// Parts of lines about corrupted memory.
const MEMORY: [&str; 9] = [
    "segfault at",
    "general protection fault",
    "invalid opcode",
    "traps:",
    "BUG: Bad",
    "BUG: unable",
    "kernel BUG at",
    "list_add corruption",
    "list_del corruption",
];

/// The subject of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Disk,
    Memory,
}

/// Reads the log from its beginning, follows it, and counts lines about errors.
pub fn read(tally: &Tally) {
    let mut log = match File::open(LOG) {
        Ok(log) => log,
        Err(error) => return tally.failed(&format!("{LOG}: {error}")),
    };
    let mut record = vec![0; RECORD_BYTES];
    loop {
        let length = match log.read(&mut record) {
            Ok(length) => length,
            // EPIPE: older lines were overwritten; the next read continues with the oldest remaining one.
            Err(error)
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) =>
            {
                continue;
            }
            Err(error) => return tally.failed(&format!("{LOG}: {error}")),
        };
        let line = String::from_utf8_lossy(&record[..length]);
        let line = line.lines().next().unwrap_or_default();
        let text = line.split_once(';').map_or(line, |(_, text)| text);
        match trouble(text) {
            Some(Trouble::Disk) => tally.failed(&format!("kernel: {text}")),
            Some(Trouble::Memory) => tally.wrong(1, &format!("kernel: {text}")),
            None => {}
        }
    }
}

fn trouble(text: &str) -> Option<Trouble> {
    let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    if has(&DISK) {
        Some(Trouble::Disk)
    } else if has(&MEMORY) {
        Some(Trouble::Memory)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_trouble_are_told_from_others() {
        for (line, told) in [
            (
                "I/O error, dev vda, sector 5 op 0x1:(WRITE)",
                Some(Trouble::Disk),
            ),
            (
                "Buffer I/O error on dev vda4, logical block 0",
                Some(Trouble::Disk),
            ),
            (
                "EXT4-fs error (device vda4): ext4_lookup",
                Some(Trouble::Disk),
            ),
            (
                "redis-server[88]: segfault at 0 ip 0",
                Some(Trouble::Memory),
            ),
            ("BUG: workqueue lockup - pool cpus=1", None),
            ("EXT4-fs (vda4): mounted filesystem", None),
        ] {
            assert_eq!(trouble(line), told, "{line}");
        }
    }
}
