// SPDX-License-Identifier: Apache-2.0
//! The loads of a soak: well-known programs, each with its own check, on one disk.
//!
//! The disk is partitioned by the host:
//!
//! ```text
//!   /dev/vda1   heartbeat: a small direct write each 100 ms      [heartbeat]
//!   /dev/vda2   fio, crc32c, past the page cache                 [fio]
//!   /dev/vda3   swap, for a stress-ng that has too little memory [stress]
//!   /dev/vda4   ext4: redis with its log, file trees             [redis], [trees]
//! ```
//! Beside them the memory loop of the other tests ([`crate::memory`]) works, and the kernel's log is read
//! for errors ([`kernel_log`]). Each load is a thread here and, where it is a program, a process; each
//! repeats until the host's stop command, and then verifies what it left. All findings go to one [`Tally`].
//! A failure does not end a soak: it is counted and printed on the console, and the load goes on, since the
//! next failure may be more informative.
//!
//! The loads run at a low priority and the heartbeat at the highest, so a gap in the heartbeat is caused by
//! the host and not by the loads.

pub mod fio;
pub mod heartbeat;
pub mod kernel_log;
pub mod redis;
pub mod stress;
pub mod tally;
pub mod trees;

use std::fs::{self, File};
use std::io::{self, Write};
use std::process::Command as Process;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::memory;
use crate::params::Params;
use crate::pattern::{self, PAGE_BYTES};
use crate::shared::{Order, Shared};
use crate::wire::{Command, Phase, SoakProgress, soak_progress_line};
use tally::Tally;

/// Partition of the heartbeat.
pub const BEAT_PARTITION: &str = "/dev/vda1";
/// Partition that fio works on.
pub const FIO_PARTITION: &str = "/dev/vda2";
const SWAP_PARTITION: &str = "/dev/vda3";
const FILES_PARTITION: &str = "/dev/vda4";
/// Mount point of the file system.
pub const FILES: &str = "/mnt";
const BUSYBOX: &str = "/bin/busybox";
/// Nice value of the loads.
const BEHIND: i32 = 10;
/// Wait after a failure, so that a lasting one does not fill the console.
const PAUSE: Duration = Duration::from_secs(1);
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for the disk's last partition, in polls.
const DISK_LOOKS: u32 = 600;
const DISK_LOOK: Duration = Duration::from_millis(100);

/// Why a soak could not begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum SoakError {
    /// A program of the set-up failed.
    #[error("`{command}` failed: {said}")]
    SetUp {
        /// The command line.
        command: String,
        /// Its output.
        said: String,
    },
    /// The disk's partitions did not appear.
    #[error("{FILES_PARTITION} did not appear")]
    NoDisk,
    /// The port failed.
    #[error("the port: {0}")]
    Port(#[from] io::Error),
    /// A report could not be written.
    #[error("the report: {0}")]
    Report(#[from] serde_json::Error),
}

/// State shared by all loads.
#[derive(Debug, Default)]
pub struct Soak {
    /// Seed of all content and order.
    pub seed: u64,
    /// The counters of the soak.
    pub tally: Tally,
    /// The stop flag and the memory loop's counters.
    pub shared: Shared,
}

impl Soak {
    /// Whether the loads go on.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.shared.order() == Order::Step
    }

    /// Sleeps, but not much beyond the end of the soak.
    pub fn rest(&self, time: Duration) {
        const MOMENT: Duration = Duration::from_millis(100);
        let mut left = time;
        while !left.is_zero() && self.goes_on() {
            let rest = left.min(MOMENT);
            thread::sleep(rest);
            left -= rest;
        }
    }

    fn progress(&self, phase: Phase) -> SoakProgress {
        let mut progress = self.tally.progress(phase);
        let memory = &self.shared.memory;
        progress.memory_bytes_verified = memory.bytes_verified.load(Relaxed);
        progress.wrong_bytes += memory.errors.load(Relaxed) * PAGE_BYTES as u64;
        progress.swapped_pages = swapped_pages();
        let filled = memory.filled.load(Relaxed) && self.tally.all_loads_began();
        if phase == Phase::Work && !filled {
            progress.phase = Phase::Fill;
        }
        progress
    }
}

/// Runs all loads until the host's stop command, verifies, and reports all the time.
///
/// # Errors
/// The disk cannot be set up, or the port is gone. The loads' findings are in the reports.
pub fn run(params: Params, port: &mut File, commands: &Receiver<Command>) -> Result<(), SoakError> {
    set_up()?;
    let soak = Arc::new(Soak {
        seed: params.soak_seed,
        ..Soak::default()
    });
    let loads = start(params, &soak);
    loop {
        match commands.recv_timeout(REPORT_EVERY) {
            Ok(Command::Stop) => break,
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(SoakError::Port(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        tell(port, &soak, Phase::Work)?;
    }
    soak.shared.stop();
    while !loads.iter().all(|(_, load)| load.is_finished()) {
        tell(port, &soak, Phase::Final)?;
        thread::sleep(REPORT_EVERY / 4);
    }
    for (name, load) in loads {
        if load.join().is_err() {
            soak.tally.failed(&format!("the {name} load panicked"));
        }
    }
    tell(port, &soak, Phase::Done)?;
    rustix::termios::tcdrain(&*port).map_err(io::Error::from)?;
    Ok(())
}

/// Bytes derived from a key, for values and files.
#[must_use]
pub fn content(key: u64, bytes: usize) -> Vec<u8> {
    let mut content = Vec::with_capacity(bytes + 8);
    let mut word = key;
    while content.len() < bytes {
        // One word is used sixteen times, so that the content is cheap and compressible.
        word = pattern::mix(word);
        for _ in 0..16 {
            content.extend_from_slice(&word.to_le_bytes());
        }
    }
    content.truncate(bytes);
    content
}

/// Number of bytes that differ, including those that one of the two lacks.
#[must_use]
pub fn different_bytes(want: &[u8], got: &[u8]) -> u64 {
    let differ = want.iter().zip(got).filter(|(a, b)| a != b).count();
    (differ + want.len().abs_diff(got.len())) as u64
}

fn start(params: Params, soak: &Arc<Soak>) -> Vec<(&'static str, JoinHandle<()>)> {
    type Work = (&'static str, fn(&Soak));
    let works: [Work; 6] = [
        ("disk heartbeat", heartbeat::on_disk),
        ("memory heartbeat", heartbeat::in_memory),
        ("fio", fio::run),
        ("stress-ng", stress::run),
        ("redis", redis::run),
        ("tree", trees::run),
    ];
    let mut loads = Vec::new();
    for (name, work) in works {
        let soak = Arc::clone(soak);
        let load = thread::spawn(move || {
            step_back(&soak);
            work(&soak);
        });
        loads.push((name, load));
    }
    let remembering = Arc::clone(soak);
    let memory = thread::spawn(move || {
        step_back(&remembering);
        memory::run(&params, &remembering.shared);
    });
    loads.push(("memory", memory));
    let listening = Arc::clone(soak);
    // It blocks for the kernel's next line for ever, so no thread joins it.
    thread::spawn(move || kernel_log::read(&listening.tally));
    loads
}

fn tell(port: &mut File, soak: &Soak, phase: Phase) -> Result<(), SoakError> {
    let line = soak_progress_line(&soak.progress(phase))?;
    port.write_all(format!("{line}\n").as_bytes())?;
    Ok(())
}

fn set_up() -> Result<(), SoakError> {
    let mut looks = 0;
    while File::open(FILES_PARTITION).is_err() {
        looks += 1;
        if looks > DISK_LOOKS {
            return Err(SoakError::NoDisk);
        }
        thread::sleep(DISK_LOOK);
    }
    for folder in [FILES, stress::GROUPS] {
        fs::create_dir_all(folder)?;
    }
    busybox(&["mount", "-t", "ext4", FILES_PARTITION, FILES])?;
    busybox(&["mkswap", SWAP_PARTITION])?;
    busybox(&["swapon", SWAP_PARTITION])?;
    busybox(&["mount", "-t", "cgroup2", "none", stress::GROUPS])?;
    // redis forks to rewrite its log, which must not fail.
    fs::write("/proc/sys/vm/overcommit_memory", "1")?;
    Ok(())
}

fn busybox(words: &[&str]) -> Result<(), SoakError> {
    let output = Process::new(BUSYBOX).args(words).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(SoakError::SetUp {
        command: words.join(" "),
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Gives the calling thread, and the programs that it starts, a lower priority than the heartbeat.
fn step_back(soak: &Soak) {
    // 0 means the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, BEHIND) {
        soak.tally.failed(&format!("priority of a load: {error}"));
    }
}

/// Makes the next reads of files come from the disk.
///
/// # Errors
/// The kernel refuses.
pub fn drop_page_cache() -> io::Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "1")
}

fn swapped_pages() -> u64 {
    let Ok(text) = fs::read_to_string("/proc/vmstat") else {
        return 0;
    };
    let of = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        matches!(name, "pswpin" | "pswpout").then(|| value.parse::<u64>().unwrap_or(0))
    };
    text.lines().filter_map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_follows_from_its_key() {
        assert_eq!(content(1, 1000), content(1, 1000));
        assert_eq!(content(1, 1000).len(), 1000);
        assert!(different_bytes(&content(1, 1000), &content(2, 1000)) > 900);
    }

    #[test]
    fn missing_and_surplus_bytes_differ() {
        assert_eq!(different_bytes(b"abc", b"abd"), 1);
        assert_eq!(different_bytes(b"abc", b"ab"), 1);
        assert_eq!(different_bytes(b"", b"abcd"), 4);
        assert_eq!(different_bytes(b"abc", b"abc"), 0);
    }
}
