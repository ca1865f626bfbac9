// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench pinning`: which buffers of a network device are wired, what that costs a neighbour, and what it
//! brings ('Page Fault Support for Network Controllers', 2.2, Table 3).
//!
//! ```text
//!   one VM of 258 MiB, one daemon; a turn of a strategy:
//!   device added ─► VM connects, ring of 1024 ─► packets sent round, timed ─► the VM evicted as far as it can be
//!                ─► the first 200 ms of packets after that ─► device removed
//! ```
//! The strategies take turns: *none*, *floor* (the next 256 buffers), *fine* (each posted buffer), *coarse* (a pin-down
//! cache of 16 MiB) and *static* (all RAM). What stays after the eviction is `kept_bytes`; all other RAM a
//! neighbour can have. A strategy that the daemon refuses has the reason
//! instead of figures.
//!
//! The paper's table has crosses and ticks and no numbers; here they are numbers. Its last column, simple programming, is
//! the same for all: no strategy is in the guest.

pub mod guest;

use super::{
    SizeOptions,
    blk::process::SideCpus,
    daemon::{Daemon, directory_in},
    harness::{
        figures::{median, median_ratio, rounded, to_f64},
        report::{BenchError, BenchReport, failed, unable},
        rounds::{Round, WarmUp, progress, rounds},
    },
    orders::{Ordered, daemon_program, vmm_program},
};
use guest::{Answer, Order, PACKET_BYTES};
use hyper::Method;
use pagetide_daemon::client::device_path;
use serde_json::{Value, json};
use std::{path::Path, process::Command, time::Duration};

const NAME: &str = "pinning";
const ROUNDS: usize = 6;
const RAM_MIB: u64 = 252;
/// Left out before a slice.
const LEAD: Duration = Duration::from_millis(100);
const SLICE: Duration = Duration::from_secs(1);
/// From the eviction on.
const AFTER: Duration = Duration::from_millis(200);
/// Evictions in a row: the first may find pages in use.
const RECLAIMS_MAX: u32 = 8;
/// The one that others are compared with.
const STATIC: &str = "static";

/// Names in the report, and as the daemon has them.
const STRATEGIES: [(&str, &str); 5] = [
    ("none", "none"),
    ("floor", "floor:256"),
    ("fine", "fine"),
    ("coarse", "coarse:16M"),
    (STATIC, "static"),
];

/// One turn of a strategy.
#[derive(Debug, Clone, Copy)]
struct Turn {
    pps: f64,
    /// In the first moments after the eviction.
    after_pps: f64,
    wired_bytes: u64,
    kept_bytes: u64,
}

/// A strategy, and its turns.
struct Side {
    name: &'static str,
    wire: &'static str,
    turns: Vec<Turn>,
    refused: Option<String>,
}

struct Vm {
    process: Ordered,
    ram_bytes: u64,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    if !rustix::process::geteuid().is_root() {
        return Err(unable("take-over needs root"));
    }
    daemon_program().map_err(unable)?;
    let cpus = SideCpus::choose();
    let dir = directory_in(Path::new("/dev/shm")).map_err(failed)?;
    let settings = [format!("--engine-cpus={}", cpus.backend)];
    let daemon = Daemon::start(&dir.path().join("state"), &settings).map_err(failed)?;
    let mut vm = Vm::start(dir.path(), cpus.frontend).map_err(failed)?;
    daemon.attach(vm.process.pid(), None).map_err(failed)?;
    let mut sides = STRATEGIES.map(|(name, wire)| Side {
        name,
        wire,
        turns: Vec::new(),
        refused: None,
    });
    let socket = dir.path().join("net.sock");
    for round in rounds(NAME, sizes.pairs(ROUNDS), WarmUp::First) {
        for at in round.rotated(STRATEGIES.len()) {
            sides[at]
                .take_turn(round, &daemon, &mut vm, &socket)
                .map_err(failed)?;
        }
    }
    daemon.detach().map_err(failed)?;
    let mut report = BenchReport::new(NAME);
    describe(&mut report, &sides, vm.ram_bytes);
    Ok(report)
}

impl Vm {
    fn start(dir: &Path, cpu: usize) -> Result<Self, String> {
        let mut command = Command::new(vmm_program(dir)?);
        command
            .args(["bench-part", "nic-guest"])
            .args(["--ram-mib", &RAM_MIB.to_string()])
            .args(["--cpu", &cpu.to_string()]);
        let mut process = Ordered::start(&mut command)?;
        match process.answer()? {
            Answer::Ready { ram_bytes } => Ok(Self { process, ram_bytes }),
            other => Err(format!("the VM began with {other:?}")),
        }
    }

    fn obey(&mut self, order: &Order) -> Result<(), String> {
        self.process.order(order)?;
        match self.process.answer()? {
            Answer::Done => Ok(()),
            other => Err(format!("the VM answered {other:?} to {order:?}")),
        }
    }

    /// Packets a second.
    fn pps(&mut self, time: Duration) -> Result<f64, String> {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.process.order(&Order::Run { ms })?;
        match self.process.answer()? {
            Answer::Ran { packets, ns } => {
                Ok(to_f64(packets) / Duration::from_nanos(ns).as_secs_f64())
            }
            other => Err(format!("the VM answered {other:?} when told to run")),
        }
    }
}

impl Side {
    fn take_turn(
        &mut self,
        round: Round,
        daemon: &Daemon,
        vm: &mut Vm,
        socket: &Path,
    ) -> Result<(), String> {
        if self.refused.is_some() {
            return Ok(());
        }
        let request = json!({"socket": socket, "link": "loop", "wire": self.wire});
        if let Err(reason) = daemon.send::<_, Value>("/v1/devices/net", &request) {
            // Its first line; the daemon's log follows.
            let reason = reason.split("; the daemon's log").next().unwrap_or(&reason);
            progress(NAME, format_args!("{} is refused: {reason}", self.name));
            self.refused = Some(reason.to_owned());
            return Ok(());
        }
        vm.obey(&Order::Connect {
            socket: socket.to_owned(),
        })?;
        let turn = measure(daemon, vm)?;
        vm.obey(&Order::Disconnect)?;
        let _removed: Value =
            daemon.ask(Method::DELETE, &device_path(&socket.to_string_lossy()))?;
        if round.counts {
            self.turns.push(turn);
        }
        Ok(())
    }
}

fn measure(daemon: &Daemon, vm: &mut Vm) -> Result<Turn, String> {
    vm.pps(LEAD)?;
    let pps = vm.pps(SLICE)?;
    let mut kept_bytes = u64::MAX;
    for _ in 0..RECLAIMS_MAX {
        daemon.reclaim(None)?;
        let resident_bytes = daemon.vm()?.resident_bytes;
        if resident_bytes >= kept_bytes {
            break;
        }
        kept_bytes = resident_bytes;
    }
    let wired_bytes = daemon.vm()?.wired_bytes;
    Ok(Turn {
        pps,
        after_pps: vm.pps(AFTER)?,
        wired_bytes,
        kept_bytes,
    })
}

fn describe(report: &mut BenchReport, sides: &[Side], ram_bytes: u64) {
    let of = |name: &str| sides.iter().find(|side| side.name == name);
    for side in sides {
        let cell = match &side.refused {
            Some(reason) => json!({"refused": reason}),
            None => side.figures(ram_bytes),
        };
        report.figures.insert(side.name.into(), cell);
    }
    let figures = &mut report.figures;
    figures.insert("ram_bytes".into(), ram_bytes.into());
    // The greater of the two that are to be as fast as static.
    let wired = ["none", "floor"].into_iter().filter_map(of);
    let wired = wired.flat_map(|side| side.turns.iter().map(|turn| turn.wired_bytes));
    let share = wired
        .max()
        .map(|bytes| rounded4(to_f64(bytes) / to_f64(ram_bytes)));
    figures.insert("wired_share_of_ram".into(), share.into());
    for side in sides.iter().filter(|side| side.name != STATIC) {
        let all = of(STATIC).filter(|all| !all.turns.is_empty() && !side.turns.is_empty());
        let ratio = all.map(|all| rounded(median_ratio(&side.turns, &all.turns, |turn| turn.pps)));
        let name = format!("{}_over_static", side.name);
        report.ratios.insert(name, ratio.into());
    }
    report.peers.insert(
        "paper".into(),
        "Table 3: static is fast and not friendly to neighbours, fine-grained the other way round, faults are both".into(),
    );
}

/// To a ten-thousandth: a share is small.
fn rounded4(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

impl Side {
    fn figures(&self, ram_bytes: u64) -> Value {
        let of = |figure: fn(&Turn) -> f64| median(self.turns.iter().map(figure));
        let kept = of(|turn| to_f64(turn.kept_bytes));
        json!({
            "pps": rounded(of(|turn| turn.pps)),
            "gbit_per_s": rounded(of(|turn| turn.pps) * f64::from(PACKET_BYTES) * 8.0 / 1e9),
            "after_eviction_pps": rounded(of(|turn| turn.after_pps)),
            "wired_bytes": of(|turn| to_f64(turn.wired_bytes)),
            "kept_bytes": kept,
            "neighbour_can_have_bytes": to_f64(ram_bytes) - kept,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(name: &'static str, pps: &[f64], wired_bytes: u64, kept_bytes: u64) -> Side {
        let turn = |pps: &f64| Turn {
            pps: *pps,
            after_pps: *pps / 2.0,
            wired_bytes,
            kept_bytes,
        };
        Side {
            name,
            wire: name,
            turns: pps.iter().map(turn).collect(),
            refused: None,
        }
    }

    #[test]
    fn strategies_are_compared_with_static_round_by_round() {
        let sides = [
            side("none", &[90.0, 190.0, 80.0], 1000, 2000),
            side("floor", &[99.0, 198.0, 99.0], 3000, 4000),
            side(STATIC, &[100.0, 200.0, 100.0], 100_000, 100_000),
        ];
        let mut report = BenchReport::new(NAME);
        describe(&mut report, &sides, 100_000);
        assert_eq!(report.ratios["none_over_static"], json!(0.9));
        assert_eq!(report.ratios["floor_over_static"], json!(0.99));
        assert_eq!(report.figures["wired_share_of_ram"], json!(0.03));
        let none = &report.figures["none"];
        assert_eq!(none["neighbour_can_have_bytes"], json!(98_000.0));
    }

    #[test]
    fn strategy_that_is_refused_is_null_with_its_reason() {
        let mut refused = side(STATIC, &[], 0, 0);
        refused.refused = Some("write none, fine, or floor:N".into());
        let sides = [side("none", &[90.0], 1000, 2000), refused];
        let mut report = BenchReport::new(NAME);
        describe(&mut report, &sides, 100_000);
        assert!(report.ratios["none_over_static"].is_null());
        let reason = &report.figures[STATIC]["refused"];
        assert!(reason.as_str().unwrap().contains("floor:N"));
    }
}
