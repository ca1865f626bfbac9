// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench net-guest`: iperf3 in a stock guest by our network device, beside QEMU's own virtio-net.
//!
//! ```text
//!   iperf3 on Linux ── TAP ── ours, in `pagetide run` │ QEMU's own ── stock guest with iperf3
//!   to the guest and from it, by TCP, in turns
//! ```
//! Each side has a guest of its own, which is booted for its turn: a round is one boot of each. CPU time is that of all
//! processes that move packets, QEMU and, with ours, the daemon, for each GiB.
//!
//! The third peer, the kernel's vhost-net, needs `/dev/vhost-net`; it is not compared where that is missing, and not built
//! for where it is. *Weak points*: where the guest is emulated, its own work is most of the time on both sides.

use super::{
    SizeOptions,
    guest_net::{Interface, NetGuest, NetGuestOptions, Pings, Receives, in_own_network, iperf3},
    harness::{
        figures::{median, rounded},
        ratios::PairedRatios,
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, rounds},
    },
};
use serde_json::{Value, json};
use std::{path::Path, time::Duration};

const NAME: &str = "net-guest";
const ROUNDS: usize = 4;
const SLICE_S: u64 = 5;
const RAM_MIB: u64 = 384;
/// The usual size.
const RING: u16 = 256;

const OURS: Interface = Interface::Ours(Receives {
    on_fault: "out-of-order",
    wire: "none",
});

/// One run of iperf3.
#[derive(Clone, Copy, Debug)]
struct Run {
    gbit_per_s: f64,
    cpu_s_per_gib: f64,
}

/// To the guest, and from it.
type Runs = [Run; 2];
const WAYS: [&str; 2] = ["to_guest", "from_guest"];

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let time = sizes.time(SLICE_S);
    let (mut ours, mut qemus) = (Vec::new(), Vec::new());
    for round in rounds(NAME, sizes.pairs(ROUNDS), WarmUp::None) {
        for interface in round.turns([OURS, Interface::Qemus]) {
            let runs = in_own_network(1, || one(interface, time))?;
            match interface {
                Interface::Ours(_) => ours.push(runs),
                Interface::Qemus => qemus.push(runs),
            }
        }
    }
    let mut report = BenchReport::new(NAME);
    describe(&mut report, &ours, &qemus);
    Ok(report)
}

fn one(interface: Interface, time: Duration) -> Result<Runs, BenchError> {
    let guest = NetGuest::start(&NetGuestOptions {
        ram_mib: RAM_MIB,
        ring: RING,
        servers: &["iperf3"],
        pings: Pings::None,
        interface,
    })?;
    if interface == OURS {
        guest.attach().map_err(failed)?;
    }
    guest.listening(5201).map_err(failed)?;
    let seconds = time.as_secs().max(1).to_string();
    let run = |words: &[&str]| -> Result<Run, String> {
        let before = guest.cpu_time()?;
        let told = iperf3(&[&["-t", &seconds][..], words].concat())?;
        let cpu_s = (guest.cpu_time()? - before).as_secs_f64();
        let received = &told["end"]["sum_received"];
        let of = |name: &str| received[name].as_f64().ok_or("iperf3 received nothing");
        Ok(Run {
            gbit_per_s: of("bits_per_second")? / 1e9,
            cpu_s_per_gib: cpu_s / (of("bytes")? / f64::from(1 << 30)),
        })
    };
    // The first connection meets a guest that has just begun.
    run(&[]).map_err(failed)?;
    Ok([run(&[]).map_err(failed)?, run(&["-R"]).map_err(failed)?])
}

fn describe(report: &mut BenchReport, ours: &[Runs], qemus: &[Runs]) {
    report.figures = figures(ours);
    report.peers.insert("qemu".into(), figures(qemus).into());
    let vhost = match Path::new("/dev/vhost-net").exists() {
        true => "there is /dev/vhost-net, and no run with it is built",
        false => "there is no /dev/vhost-net here",
    };
    report.peers.insert("vhost_net".into(), vhost.into());
    let pairs = || {
        let both = ours.iter().zip(qemus);
        both.flat_map(|(ours, qemus)| ours.iter().zip(qemus))
    };
    let ratios = &mut report.ratios;
    let gbits = PairedRatios::bounds(pairs().map(|(ours, qemu)| ours.gbit_per_s / qemu.gbit_per_s));
    let cpu =
        PairedRatios::new(pairs().map(|(ours, qemu)| ours.cpu_s_per_gib / qemu.cpu_s_per_gib));
    let mut add = |name: &str, ratio: Option<f64>| {
        ratios.insert(name.into(), ratio.map(rounded).into());
    };
    add(
        "ours_over_qemu_gbits",
        gbits.as_ref().map(|gbits| gbits.mean),
    );
    add("ours_over_qemu_gbits_low95", gbits.map(|gbits| gbits.low95));
    add("cpu_per_gib_over_qemu", cpu.map(|cpu| cpu.mean()));
    add("ours_over_vhost_net_gbits", None);
}

fn figures(runs: &[Runs]) -> serde_json::Map<String, Value> {
    let of = |way: usize| {
        json!({
            "gbit_per_s": rounded(median(runs.iter().map(|run| run[way].gbit_per_s))),
            "cpu_s_per_gib": rounded(median(runs.iter().map(|run| run[way].cpu_s_per_gib))),
        })
    };
    let each = WAYS.iter().enumerate();
    each.map(|(at, way)| ((*way).to_owned(), of(at))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_all_rounds_are_in_the_ratios() {
        let runs = |gbit_per_s, cpu_s_per_gib| {
            [Run {
                gbit_per_s,
                cpu_s_per_gib,
            }; 2]
        };
        let mut report = BenchReport::new(NAME);
        describe(
            &mut report,
            &[runs(2.0, 1.0), runs(4.0, 1.0)],
            &[runs(1.0, 2.0), runs(2.0, 2.0)],
        );
        assert_eq!(report.ratios["ours_over_qemu_gbits"], json!(2.0));
        assert_eq!(report.ratios["cpu_per_gib_over_qemu"], json!(0.5));
        assert!(report.ratios["ours_over_vhost_net_gbits"].is_null());
        assert_eq!(report.figures["to_guest"]["gbit_per_s"], json!(4.0));
    }
}
