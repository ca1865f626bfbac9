// SPDX-License-Identifier: Apache-2.0
//! The stand-in, controlled by a bench.

use super::disk::DiskCounted;
use super::guest::{Answer, BusyGuestOptions, Counted, Order, Presence};
use crate::orders::{Ordered, vmm_program};
use clap::ValueEnum as _;
use std::{path::Path, process::Command, time::Duration};

/// A running stand-in; ended on drop.
pub(crate) struct BusyGuest {
    process: Ordered,
    wrong: Option<String>,
    /// Time to fill its RAM.
    pub fill: Duration,
}

impl BusyGuest {
    /// Starts it and waits until its RAM is filled. Its program goes into `dir`.
    pub(crate) fn start(dir: &Path, options: &BusyGuestOptions) -> Result<Self, String> {
        let huge = options.huge_pages.to_possible_value();
        let mut command = Command::new(vmm_program(dir)?);
        command
            .args(["bench-part", "busy-guest"])
            .args(["--ram-mib", &options.ram_mib.to_string()])
            .args(["--vcpus", &options.vcpus.to_string()])
            .args(["--pattern", &options.pattern.to_string()])
            .args([
                "--huge-pages",
                huge.as_ref().map_or("", |huge| huge.get_name()),
            ]);
        command.args(["--first-cpu", &options.first_cpu.to_string()]);
        command.args(["--batch", &options.batch.to_string()]);
        command.args(["--rest-us", &options.rest_us.to_string()]);
        if let Some(disk) = &options.disk {
            command.arg("--disk").arg(disk);
        }
        if options.time_faults {
            command.arg("--time-faults");
        }
        let mut process = Ordered::start(&mut command)?;
        match process.answer()? {
            Answer::Ready { fill_ns, .. } => Ok(Self {
                process,
                wrong: None,
                fill: Duration::from_nanos(fill_ns),
            }),
            other => Err(format!("the guest began with {other:?}")),
        }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn ask(&mut self, order: &Order) -> Result<Answer, String> {
        self.process.order(order)?;
        match self.process.answer()? {
            Answer::Wrong { reason } => {
                self.wrong = Some(reason.clone());
                Err(format!("the guest: {reason}"))
            }
            Answer::Failed { reason } => Err(format!("the guest: {reason}")),
            answer => Ok(answer),
        }
    }

    /// The page that it has found wrong, if it was asked since.
    pub(crate) fn wrong(&self) -> Option<&str> {
        self.wrong.as_deref()
    }

    /// Makes it execute `order`; returns the time it took.
    pub(crate) fn obey(&mut self, order: &Order) -> Result<Duration, String> {
        match self.ask(order)? {
            Answer::Done { ns } => Ok(Duration::from_nanos(ns)),
            other => Err(format!("the guest answered {other:?} to {order:?}")),
        }
    }

    /// The work of its vCPUs since the last call.
    pub(crate) fn count(&mut self) -> Result<Counted, String> {
        match self.ask(&Order::Count)? {
            Answer::Counted(counted) => Ok(counted),
            other => Err(format!("the guest answered {other:?} when asked to count")),
        }
    }

    /// The work of its vCPUs in `time` from now.
    pub(crate) fn count_for(&mut self, time: Duration) -> Result<Counted, String> {
        self.count()?;
        std::thread::sleep(time);
        self.count()
    }

    /// Times of the faults since the last call, in nanoseconds, if it times them.
    pub(crate) fn faults(&mut self) -> Result<Vec<u32>, String> {
        match self.ask(&Order::Faults)? {
            Answer::Faults { ns } => Ok(ns),
            other => Err(format!(
                "the guest answered {other:?} when asked for its faults"
            )),
        }
    }

    /// How many of its vCPUs have touched no page since `since_ns` of the monotonic clock.
    pub(crate) fn laggards(&mut self, since_ns: u64) -> Result<u64, String> {
        match self.ask(&Order::Laggards { since_ns })? {
            Answer::Laggards { vcpus } => Ok(vcpus),
            other => Err(format!(
                "the guest answered {other:?} to a question for laggards"
            )),
        }
    }

    /// The work on its disk since the last call, or, by [`Order::VerifyDisk`], that of a check of all blocks.
    pub(crate) fn disk(&mut self, order: &Order) -> Result<DiskCounted, String> {
        match self.ask(order)? {
            Answer::Disk(counted) => Ok(counted),
            other => Err(format!(
                "the guest answered {other:?} when asked for its disk"
            )),
        }
    }

    /// Which of its pages are in memory.
    pub(crate) fn presence(&mut self) -> Result<Presence, String> {
        match self.ask(&Order::Presence)? {
            Answer::Presence(presence) => Ok(presence),
            other => Err(format!(
                "the guest answered {other:?} when asked for its pages"
            )),
        }
    }
}

/// Bytes of shared memory that the page tables of `pid` map by huge pages.
pub(crate) fn huge_bytes(pid: u32) -> Result<u64, String> {
    let path = format!("/proc/{pid}/smaps");
    let smaps = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    Ok(huge_bytes_of(&smaps))
}

fn huge_bytes_of(smaps: &str) -> u64 {
    let kib = |line: &str| -> Option<u64> {
        let number = line
            .strip_prefix("ShmemPmdMapped:")?
            .split_whitespace()
            .next()?;
        number.parse().ok()
    };
    smaps.lines().filter_map(kib).sum::<u64>() << 10
}

#[cfg(test)]
mod tests {
    #[test]
    fn huge_pages_are_added_up_over_mappings() {
        let smaps = "Rss: 4 kB\nShmemPmdMapped:     2048 kB\nShmemPmdMapped:        0 kB\n\
                     ShmemPmdMapped: 4096 kB\n";
        assert_eq!(super::huge_bytes_of(smaps), 6 << 20);
    }
}
