// SPDX-License-Identifier: Apache-2.0
//! A stock Linux guest that verifies all of its memory and its disk, under QEMU.
//!
//! It comes from the project's test kit: `stock-guest` lies beside this program when both were built, and becomes a
//! QEMU whose input and output are a port of the guest. Its `guest-work` writes pages and blocks whose content follows
//! from their number and generation, compares them for ever, and tells its counts each second, a line each.

use crate::orders::kit_program;
use serde::Deserialize;
use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

const PROGRAM: &str = "stock-guest";
/// Prefix of a line with counts.
const PREFIX: &str = "PT ";
/// Bytes of memory that it works on, in eighths of its RAM.
const WORK_EIGHTHS: u64 = 4;
/// Of its disk.
pub(super) const DISK_BYTES: u64 = 32 << 20;
/// Longest boot, and longest last verification: it may be emulated.
const BOOT_WAIT: Duration = Duration::from_secs(240);
/// Least RAM that it boots with.
pub(super) const RAM_BYTES: u64 = 256 << 20;

/// Its counts since its start, as far as they matter here.
#[derive(Clone, PartialEq, Eq, Default, Debug, Deserialize)]
pub(super) struct Progress {
    phase: String,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    pub memory_bytes_verified: u64,
    pub disk_bytes_verified: u64,
    pub memory_errors: u64,
    pub disk_errors: u64,
    pub final_memory_bytes: u64,
    pub final_disk_bytes: u64,
}

#[derive(Default)]
struct Heard {
    last: Mutex<(Progress, bool)>,
    news: Condvar,
}

impl Heard {
    fn lock(&self) -> MutexGuard<'_, (Progress, bool)> {
        // It is replaced as a whole.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running guest; ended on drop.
pub(super) struct VerifiedGuest {
    qemu: Child,
    port: ChildStdin,
    heard: Arc<Heard>,
}

fn progress_in(line: &str) -> Option<Progress> {
    let json = line.trim().strip_prefix(PREFIX)?;
    serde_json::from_str(json).ok()
}

impl VerifiedGuest {
    /// Boots it, with its disk at `disk`, and waits until it works on memory and disk.
    pub(super) fn boot(dir: &Path, ram_bytes: u64, disk: &Path) -> Result<Self, String> {
        let memory_bytes = ram_bytes / 8 * WORK_EIGHTHS;
        let mut qemu = Command::new(kit_program(PROGRAM)?)
            .args(["--ram-mib", &(ram_bytes >> 20).to_string()])
            .args(["--verify-memory-mib", &(memory_bytes >> 20).to_string()])
            .args(["--verify-disk-mib", &(DISK_BYTES >> 20).to_string()])
            .arg("--folder")
            .arg(dir)
            .arg("--disk")
            .arg(disk)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("the guest cannot be started: {error}"))?;
        let (Some(port), Some(lines)) = (qemu.stdin.take(), qemu.stdout.take()) else {
            return Err("the guest has no port".into());
        };
        let heard = Arc::new(Heard::default());
        let told = Arc::clone(&heard);
        std::thread::spawn(move || {
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                match progress_in(&line) {
                    Some(progress) => told.lock().0 = progress,
                    None => eprintln!("the guest: {line}"),
                }
                told.news.notify_all();
            }
            told.lock().1 = true;
            told.news.notify_all();
        });
        let guest = Self { qemu, port, heard };
        guest.wait(BOOT_WAIT, "the guest's work", |now| {
            now.phase == "work" && now.disk_bytes > 0
        })?;
        Ok(guest)
    }

    /// QEMU's process id.
    pub(super) fn pid(&self) -> u32 {
        self.qemu.id()
    }

    /// Its last counts.
    pub(super) fn progress(&self) -> Progress {
        self.heard.lock().0.clone()
    }

    fn wait(
        &self,
        patience: Duration,
        what: &str,
        holds: impl Fn(&Progress) -> bool,
    ) -> Result<Progress, String> {
        let begun = Instant::now();
        let mut last = self.heard.lock();
        while !holds(&last.0) {
            let left = patience.saturating_sub(begun.elapsed());
            if last.1 || left.is_zero() {
                return Err(format!("no sign of {what}: {:?}", last.0));
            }
            let waited = self.heard.news.wait_timeout(last, left);
            last = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(last.0.clone())
    }

    /// Waits until it has compared more memory.
    pub(super) fn wait_for_memory(&self, patience: Duration) -> Result<(), String> {
        let before = self.progress().memory_bytes_verified;
        let more = |now: &Progress| now.memory_bytes_verified > before;
        self.wait(patience, "work on memory", more).map(|_| ())
    }

    /// Has everything compared a last time; its last counts.
    pub(super) fn finish(&mut self) -> Result<Progress, String> {
        writeln!(self.port, "stop")
            .and_then(|()| self.port.flush())
            .map_err(|error| format!("the guest takes no orders: {error}"))?;
        self.wait(BOOT_WAIT, "the last verification", |now| {
            now.phase == "done"
        })
    }
}

impl Drop for VerifiedGuest {
    fn drop(&mut self) {
        if let Err(error) = self.qemu.kill().and_then(|()| self.qemu.wait()) {
            tracing::error!(%error, "the bench's guest could not be ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_and_noise_is_not() {
        let line = r#"PT {"phase":"work","memory_bytes":5,"disk_bytes":6,"memory_bytes_verified":7,
            "disk_bytes_verified":8,"memory_errors":1,"disk_errors":2,"memory_rounds":0,"disk_rounds":0,
            "final_memory_bytes":0,"final_disk_bytes":0,"memory_plugged_bytes":0,"disk_plugged_bytes":0}"#;
        let progress = progress_in(line).unwrap();
        assert_eq!((progress.memory_errors, progress.disk_errors), (1, 2));
        assert_eq!(progress.phase, "work");
        assert_eq!(progress_in("Kernel panic"), None);
        assert_eq!(progress_in("PT nothing"), None);
    }
}
