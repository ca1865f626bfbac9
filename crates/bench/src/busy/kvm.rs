// SPDX-License-Identifier: Apache-2.0
//! A guest under KVM, controlled by a bench.
//!
//! The stand-in is a process whose threads touch RAM through its own page tables. KVM accesses a guest's
//! RAM, through its own page tables where hardware is behind it. So there is also a guest from the
//! project's test kit: `kvm-guest`, of the crate `pagetide-guestkit`, lies beside this program when both
//! were built, and becomes a QEMU with a guest without an operating system. That guest works on one vCPU as
//! the stand-in does, and its serial port is the process' standard input and output:
//!
//! ```text
//!   (start) ready PAGES HOT │ c  counted TOUCHED SWEPT TICKS GAP │ v  sound PAGES
//! ```
//! Numbers are hexadecimal. `TICKS` is the vCPU's time stamp counter, and `GAP` the most ticks that 64
//! touches have taken since the last such line. Any other line is an error message.

use super::guest::{Counted, faults_of};
use crate::{
    harness::figures::to_f64,
    orders::{Ordered, kit_program},
};
use pagetide_addr::PAGE_BYTES;
use pagetide_sys::clock;
use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

const PROGRAM: &str = "kvm-guest";
/// Most RAM of such a guest: it uses one piece below 4 GiB.
pub(crate) const RAM_BYTES_MAX: u64 = 2 << 30;
/// RAM of a guest that only has to show that it runs.
const TRIAL_RAM_BYTES: u64 = 32 << 20;
/// Longest boot where KVM emulates each instruction, on a busy machine.
const BOOT_WAIT: Duration = Duration::from_secs(60);
/// Longest time for a page there, filled or compared.
const PAGE_WAIT: Duration = Duration::from_micros(300);

/// A running guest; ended on drop.
pub(crate) struct KvmGuest {
    process: Ordered,
    wait: Duration,
    before: Reading,
}

/// Its counters at one time.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    touched: u64,
    ticks: u64,
    faults: u64,
}

impl KvmGuest {
    /// Starts it and waits until its RAM is filled. Its program goes into `dir`.
    pub(crate) fn start(dir: &Path, ram_bytes: u64, hot_permille: u32) -> Result<Self, String> {
        let mut command = Command::new(kit_program(PROGRAM)?);
        command
            .args(["--ram-mib", &(ram_bytes >> 20).to_string()])
            .args(["--hot-permille", &hot_permille.to_string()])
            .arg("--folder")
            .arg(dir);
        let pages = u32::try_from(ram_bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        let mut guest = Self {
            process: Ordered::start(&mut command)?,
            wait: BOOT_WAIT + PAGE_WAIT * pages,
            before: Reading {
                at: Instant::now(),
                touched: 0,
                ticks: 0,
                faults: 0,
            },
        };
        guest.numbers("ready")?;
        guest.count()?;
        Ok(guest)
    }

    /// Fails with a message if such guests do not run here.
    pub(crate) fn try_one(dir: &Path) -> Result<(), String> {
        Self::start(dir, TRIAL_RAM_BYTES, 500).map(|_guest| ())
    }

    /// QEMU's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The work of its vCPU since the last call.
    pub(crate) fn count(&mut self) -> Result<Counted, String> {
        self.process.tell("c")?;
        let numbers = self.numbers("counted")?;
        let [touched, _, ticks, gap] = numbers[..] else {
            return Err(format!("the guest counted {numbers:x?}"));
        };
        let now = Reading {
            at: Instant::now(),
            touched,
            ticks,
            faults: faults_of(&format!("/proc/{}/stat", self.pid()))?,
        };
        let counted = between(&self.before, &now, gap);
        self.before = now;
        Ok(counted)
    }

    /// Makes it compare all its pages.
    pub(crate) fn verify_all(&mut self) -> Result<(), String> {
        self.process.tell("v")?;
        self.numbers("sound").map(|_pages| ())
    }

    fn numbers(&mut self, word: &str) -> Result<Vec<u64>, String> {
        let line = self.process.line_within(self.wait)?;
        numbers_after(word, &line)
    }
}

fn between(before: &Reading, now: &Reading, gap_ticks: u64) -> Counted {
    let ns = clock::ns(now.at - before.at);
    let ticks = now.ticks.saturating_sub(before.ticks).max(1);
    let gap_ns = to_f64(gap_ticks) / to_f64(ticks) * to_f64(ns);
    Counted {
        operations: now.touched.saturating_sub(before.touched),
        ns,
        longest_gap_ns: Duration::from_secs_f64(gap_ns / 1e9)
            .as_nanos()
            .try_into()
            .unwrap_or(u64::MAX),
        faults: now.faults.saturating_sub(before.faults),
    }
}

fn numbers_after(word: &str, line: &str) -> Result<Vec<u64>, String> {
    let wrong = || format!("the guest printed '{line}' instead of '{word}'");
    let (first, numbers) = line.split_once(' ').unwrap_or((line, ""));
    if first != word {
        return Err(wrong());
    }
    numbers
        .split_whitespace()
        .map(|number| u64::from_str_radix(number, 16).map_err(|_| wrong()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_guest_are_read_and_what_is_wrong_is_told_on() {
        let counted = numbers_after("counted", "counted c0 1f 35a1 0");
        assert_eq!(counted, Ok(vec![192, 31, 0x35a1, 0]));
        let error = numbers_after("sound", "wrong 7 80 1 2 3").unwrap_err();
        assert!(error.contains("wrong 7 80 1 2 3"), "{error}");
        numbers_after("sound", "sound x").unwrap_err();
        numbers_after("sound", "").unwrap_err();
    }

    #[test]
    fn gap_is_told_in_time_by_the_ticks_of_the_interval() {
        let before = Reading {
            at: Instant::now(),
            touched: 100,
            ticks: 1_000_000,
            faults: 7,
        };
        let now = Reading {
            at: before.at + Duration::from_secs(1),
            touched: 400,
            ticks: 3_000_000,
            faults: 9,
        };
        let counted = between(&before, &now, 500_000);
        assert_eq!((counted.operations, counted.faults), (300, 2));
        assert_eq!(counted.ns, 1_000_000_000);
        assert_eq!(counted.longest_gap_ns, 250_000_000);
    }
}
