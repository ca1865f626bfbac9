// SPDX-License-Identifier: Apache-2.0
//! A back end and the front end that drives it.

use super::{
    Traffic,
    testpmd::{Forward, Forwarded, Testpmd, TestpmdOptions},
};
use crate::{
    blk::process::SideCpus,
    harness::figures::to_f64,
    orders::{Ordered, this_program},
};
use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// Longest wait for our back end to listen.
const LISTEN_WAIT: Duration = Duration::from_secs(20);

/// Whose back end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// Ours.
    Ours,
    /// Ours, which does not look pages up.
    WithoutLookUp,
    /// DPDK's vhost library, in testpmd.
    Dpdk,
}

impl Whose {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::WithoutLookUp => "blind",
            Self::Dpdk => "dpdk",
        }
    }
}

enum BackEnd {
    Ours(Ordered),
    Dpdk(Testpmd),
}

/// See the module documentation.
pub(super) struct Side {
    /// Declared before the back end: it is ended first.
    front: Testpmd,
    back: BackEnd,
    traffic: Traffic,
}

impl Side {
    /// Starts both, in `dir`, for packets of `bytes`.
    ///
    /// # Errors
    /// A message.
    pub fn start(
        dir: &Path,
        whose: Whose,
        (traffic, bytes): (Traffic, u16),
        cpus: SideCpus,
    ) -> Result<Self, String> {
        let name = format!("{}-{}-{bytes}", whose.name(), traffic.name());
        let socket = dir.join(format!("{name}.sock"));
        let socket = socket.to_string_lossy();
        let back = match whose {
            Whose::Dpdk => {
                let options = TestpmdOptions {
                    vdev: format!("net_vhost0,iface={socket},queues=1"),
                    forward: traffic.back(),
                    bytes,
                    cpu: cpus.backend,
                    name: &format!("{name}-back"),
                };
                BackEnd::Dpdk(Testpmd::start(dir, &options)?)
            }
            Whose::Ours | Whose::WithoutLookUp => {
                BackEnd::Ours(start_ours(dir, &socket, whose, (traffic, bytes), cpus)?)
            }
        };
        let options = TestpmdOptions {
            vdev: format!("net_virtio_user0,path={socket},queues=1,queue_size=1024"),
            forward: traffic.front(),
            bytes,
            cpu: cpus.frontend,
            name: &format!("{name}-front"),
        };
        Ok(Self {
            front: Testpmd::start(dir, &options)?,
            back,
            traffic,
        })
    }

    /// Packets a second in a slice of that length.
    ///
    /// # Errors
    /// A message.
    pub fn pps(&mut self, slice: Duration) -> Result<f64, String> {
        if let BackEnd::Dpdk(back) = &mut self.back {
            back.begin()?;
        }
        let begun = Instant::now();
        self.front.begin()?;
        std::thread::sleep(slice);
        let counted = self.front.end()?;
        let seconds = begun.elapsed().as_secs_f64();
        if let BackEnd::Dpdk(back) = &mut self.back {
            back.end()?;
        }
        let packets = self.traffic.count(counted);
        match packets {
            0 => Err("no packet passed".into()),
            packets => Ok(to_f64(packets) / seconds),
        }
    }

    /// Resident memory of the back end, the front end's as far as it has touched that.
    ///
    /// # Errors
    /// A message.
    pub fn back_rss_bytes(&self) -> Result<u64, String> {
        let pid = match &self.back {
            BackEnd::Ours(process) => process.pid(),
            BackEnd::Dpdk(process) => process.pid(),
        };
        let path = format!("/proc/{pid}/status");
        let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let mut lines = status.lines();
        lines
            .find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next())
            .and_then(|kib| kib.parse::<u64>().ok())
            .map(|kib| kib << 10)
            .ok_or_else(|| format!("{path} has no VmRSS"))
    }
}

fn start_ours(
    dir: &Path,
    socket: &str,
    whose: Whose,
    (traffic, bytes): (Traffic, u16),
    cpus: SideCpus,
) -> Result<Ordered, String> {
    let state_dir = dir.join(format!("{}-{}-{bytes}", whose.name(), traffic.name()));
    std::fs::create_dir(&state_dir).map_err(|error| error.to_string())?;
    let mut command = Command::new("taskset");
    command
        .args(["-c", &cpus.backend.to_string()])
        .arg(this_program()?)
        .args(["bench-part", "net-backend", "--socket", socket])
        .arg("--state-dir")
        .arg(state_dir);
    match traffic {
        Traffic::Transmit => {}
        Traffic::Receive => {
            command.args(["--source-bytes", &bytes.to_string()]);
        }
        Traffic::Loop => {
            command.arg("--echo");
        }
    }
    if whose == Whose::WithoutLookUp {
        command.args(["--look-up", "off"]);
    }
    let mut process = Ordered::start(&mut command)?;
    match process.line_within(LISTEN_WAIT)?.as_str() {
        "listening" => Ok(process),
        other => Err(format!("our back end said {other:?}")),
    }
}

impl Traffic {
    fn front(self) -> Forward {
        match self {
            Self::Transmit => Forward::TxOnly,
            Self::Receive => Forward::RxOnly,
            Self::Loop => Forward::IoFirst,
        }
    }

    fn back(self) -> Forward {
        match self {
            Self::Transmit => Forward::RxOnly,
            Self::Receive => Forward::TxOnly,
            Self::Loop => Forward::Io,
        }
    }

    /// The front end's packets that count.
    fn count(self, counted: Forwarded) -> u64 {
        match self {
            Self::Transmit => counted.sent,
            Self::Receive | Self::Loop => counted.received,
        }
    }
}
