// SPDX-License-Identifier: Apache-2.0
//! Debian's `dpdk-testpmd` as a process that is told when to forward packets.
//!
//! Its threads are all on one CPU: one that forwards, which polls while it does, and one that waits for
//! orders.

use crate::orders::Ordered;
use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Longest wait for an answer. It takes a second to begin on a quiet machine.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
/// Its memory, and the packet buffers in it: enough for two rings of the longest size.
const MEMORY_MIB: &str = "128";
const BUFFERS: &str = "--total-num-mbufs=8192";
/// The package that has the program.
const PACKAGE: &str = "dpdk-dev";

/// What it does with packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forward {
    /// Sends as many as it can.
    TxOnly,
    /// Receives.
    RxOnly,
    /// Sends what it receives.
    Io,
    /// The same, and begins by sending some.
    IoFirst,
}

impl Forward {
    fn flag(self) -> &'static str {
        match self {
            Self::TxOnly => "--forward-mode=txonly",
            Self::RxOnly => "--forward-mode=rxonly",
            Self::Io | Self::IoFirst => "--forward-mode=io",
        }
    }

    fn start(self) -> &'static str {
        match self {
            // Bursts of 32.
            Self::IoFirst => "start tx_first 8\n",
            _ => "start\n",
        }
    }
}

/// What one is started with.
#[derive(Debug, Clone)]
pub(super) struct TestpmdOptions<'a> {
    /// Its device, as DPDK names it.
    pub vdev: String,
    pub forward: Forward,
    /// Bytes of the packets that it makes.
    pub bytes: u16,
    pub cpu: usize,
    /// Tells its messages from those of others.
    pub name: &'a str,
}

/// Packets between a start and a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Forwarded {
    pub received: u64,
    pub sent: u64,
}

/// See the module documentation. Dropping it ends it.
pub(super) struct Testpmd {
    process: Ordered,
    forward: Forward,
    messages: PathBuf,
}

impl Testpmd {
    /// Starts it in `dir`, where its messages go. It does not forward yet.
    ///
    /// # Errors
    /// A message: it is not installed, or does not begin.
    pub fn start(dir: &Path, options: &TestpmdOptions<'_>) -> Result<Self, String> {
        let messages = dir.join(format!("{}.log", options.name));
        let file = File::create(&messages).map_err(|error| error.to_string())?;
        let cpu = options.cpu;
        // Its answers come line by line only from a buffer of that kind.
        let mut command = Command::new("stdbuf");
        command
            .args(["-oL", "dpdk-testpmd", "--lcores"])
            .arg(format!("0@{cpu},1@{cpu}"))
            .args(["--no-huge", "-m", MEMORY_MIB, "--no-pci", "--no-telemetry"])
            .args(["--no-shconf", "--vdev", &options.vdev])
            .args(["--", "--interactive", "--nb-cores=1", BUFFERS])
            .arg(options.forward.flag())
            .arg(format!("--txpkts={}", options.bytes))
            .stderr(file);
        let mut this = Self {
            process: Ordered::start(&mut command)?,
            forward: options.forward,
            messages,
        };
        this.wait_for("Done")?;
        Ok(this)
    }

    /// Its process id. (`stdbuf` has become the program.)
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Begins to forward.
    ///
    /// # Errors
    /// A message.
    pub fn begin(&mut self) -> Result<(), String> {
        self.process.tell(self.forward.start())
    }

    /// Ends that; returns what it has forwarded.
    ///
    /// # Errors
    /// A message.
    pub fn end(&mut self) -> Result<Forwarded, String> {
        self.process.tell("stop\n")?;
        let lines = self.wait_for("Done.")?;
        forwarded(&lines).ok_or_else(|| format!("dpdk-testpmd said nothing of packets: {lines:?}"))
    }

    /// The lines up to one that is `end`, which may follow a prompt.
    fn wait_for(&mut self, end: &str) -> Result<Vec<String>, String> {
        let begun = Instant::now();
        let mut lines = Vec::new();
        while begun.elapsed() < ANSWER_WAIT {
            let line = (self.process.line_within(ANSWER_WAIT)).map_err(|_| self.silent())?;
            if line == end {
                return Ok(lines);
            }
            lines.push(line);
        }
        Err(self.silent())
    }

    fn silent(&self) -> String {
        let said = std::fs::read_to_string(&self.messages).unwrap_or_default();
        let tail: Vec<&str> = said.lines().rev().take(3).collect();
        match said.contains("No such file") && !said.contains("EAL") {
            true => format!("there is no dpdk-testpmd (Debian's {PACKAGE})"),
            false => format!(
                "dpdk-testpmd does not answer; it said last: {}",
                tail.into_iter().rev().collect::<Vec<_>>().join(" / ")
            ),
        }
    }
}

/// The packets of its first port, as `stop` tells them.
fn forwarded(lines: &[String]) -> Option<Forwarded> {
    let mut words = lines.iter().flat_map(|line| line.split_whitespace());
    let mut after = |name: &str| {
        words
            .find(|word| *word == name)
            .and(words.next()?.parse().ok())
    };
    Some(Forwarded {
        received: after("RX-packets:")?,
        sent: after("TX-packets:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_those_of_the_port() {
        let told = "
            testpmd> stop
            ---------------------- Forward statistics for port 0  ----------------------
            RX-packets: 12             RX-dropped: 3             RX-total: 15
            TX-packets: 845856         TX-dropped: 225481504     TX-total: 226327360
            +++++++++++++++ Accumulated forward statistics for all ports+++++++++++++++
            RX-packets: 1              RX-dropped: 0             RX-total: 0
            TX-packets: 2              TX-dropped: 0             TX-total: 0";
        let lines: Vec<String> = told.lines().map(str::to_owned).collect();
        let of_port = Forwarded {
            received: 12,
            sent: 845_856,
        };
        assert_eq!(forwarded(&lines), Some(of_port));
        assert_eq!(forwarded(&lines[..3]), None);
    }
}
