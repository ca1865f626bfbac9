// SPDX-License-Identifier: Apache-2.0
//! A stock Linux guest controlled by a bench, with a well-known load.
//!
//! It comes from the project's test kit: `stock-guest`, of the crate `pagetide-guestkit`, lies beside this
//! program when both were built, and becomes a QEMU whose input and output are a port of the guest. There
//! its `guest-work` runs one load at a time:
//!
//! ```text
//!   (start) ready │ run NAME SECONDS │ ran OPERATIONS NANOSECONDS, or failed WORDS
//! ```

use super::guest::{Counted, faults_of};
use crate::orders::{Ordered, kit_program};
use std::{path::Path, process::Command, time::Duration};

const PROGRAM: &str = "stock-guest";
/// RAM of such a guest: twice what its loads need.
pub(crate) const RAM_BYTES: u64 = 1 << 30;
/// Time for its boot and a run, in addition to the requested time: where it is emulated, redis fills its
/// memory for a minute before its first run.
const PATIENCE: Duration = Duration::from_secs(300);
/// Length of the run that measures its speed.
const TRIAL: Duration = Duration::from_secs(2);

/// A load of such a guest (`pagetide_guest::loads`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Load {
    StressVm,
    StressStream,
    Redis,
    SysbenchCpu,
    SysbenchMemory,
    /// On a disk of ours.
    Fio,
    /// The same, verified.
    FioVerify,
}

impl Load {
    /// Those of `bench guest-cost`.
    pub(crate) const BUSY: [Self; 3] = [Self::StressVm, Self::StressStream, Self::Redis];

    /// Its name in an order.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::StressVm => "stress-vm",
            Self::StressStream => "stress-stream",
            Self::Redis => "redis",
            Self::SysbenchCpu => "sysbench-cpu",
            Self::SysbenchMemory => "sysbench-memory",
            Self::Fio => "fio",
            Self::FioVerify => "fio-verify",
        }
    }

    /// True if it works on the guest's disk.
    pub(crate) const fn needs_disk(self) -> bool {
        matches!(self, Self::Fio | Self::FioVerify)
    }
}

/// Where and how such a guest starts.
#[derive(Clone, Copy)]
pub(crate) struct StockOptions<'a> {
    /// Folder for its console output.
    pub dir: &'a Path,
    pub ram_bytes: u64,
    /// Socket of its disk.
    pub disk: Option<&'a Path>,
}

/// A running guest; ended on drop.
pub(crate) struct StockGuest {
    process: Ordered,
    load: Load,
}

impl StockGuest {
    /// Starts it with `load`, and prepares the load's data.
    pub(crate) fn start(options: StockOptions<'_>, load: Load) -> Result<Self, String> {
        let mut guest = Self {
            process: boot(options, &[load])?,
            load,
        };
        guest.count_for(TRIAL)?;
        Ok(guest)
    }

    /// Fails with a message if no guest with the programs of `loads` runs here. Its console output goes into
    /// `dir`.
    pub(crate) fn try_one(dir: &Path, loads: &[Load]) -> Result<(), String> {
        let options = StockOptions {
            dir,
            ram_bytes: RAM_BYTES,
            disk: None,
        };
        boot(options, loads).map(|_guest| ())
    }

    /// QEMU's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The work of its load in about `time` from now.
    pub(crate) fn count_for(&mut self, time: Duration) -> Result<Counted, String> {
        let stat = format!("/proc/{}/stat", self.pid());
        let before = faults_of(&stat)?;
        let seconds = time.as_secs().max(1);
        let order = format!("run {} {seconds}\n", self.load.name());
        self.process.tell(&order)?;
        let line = self.process.line_within(PATIENCE + time)?;
        let (operations, ns) = ran_in(&line)?;
        Ok(Counted {
            operations,
            ns,
            longest_gap_ns: 0,
            faults: faults_of(&stat)?.saturating_sub(before),
        })
    }
}

/// A guest that waits for its first order.
fn boot(options: StockOptions<'_>, loads: &[Load]) -> Result<Ordered, String> {
    let mut command = Command::new(kit_program(PROGRAM)?);
    command
        .args(["--ram-mib", &(options.ram_bytes >> 20).to_string()])
        .arg("--folder")
        .arg(options.dir);
    for load in loads {
        command.args(["--load", load.name()]);
    }
    if let Some(disk) = options.disk {
        command.arg("--disk").arg(disk);
    }
    let mut process = Ordered::start(&mut command)?;
    match process.line_within(PATIENCE)?.as_str() {
        "ready" => Ok(process),
        other => Err(format!("unexpected output of the guest: '{other}'")),
    }
}

/// Operations and nanoseconds of an answer.
fn ran_in(line: &str) -> Result<(u64, u64), String> {
    let numbers = line
        .strip_prefix("ran ")
        .and_then(|rest| rest.split_once(' '))
        .map(|(operations, ns)| (operations.parse(), ns.trim().parse()));
    match numbers {
        Some((Ok(operations), Ok(ns))) => Ok((operations, ns)),
        _ => Err(format!("unexpected output of the guest: '{line}'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_what_failed_is_told_on() {
        assert_eq!(ran_in("ran 12 4000000001"), Ok((12, 4_000_000_001)));
        for wrong in ["failed stress-ng: not found", "ran 12", "ran x 5", ""] {
            let error = ran_in(wrong).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
