// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench single-fault`: how long a stream of packets is interrupted by one absent page (VPRI, Fig 5).
//!
//! ```text
//!   source ──► engine ──► ring of 1024 buffers ──► front end, which posts each again at once
//!                 ▲
//!                 └ now and then one page is taken away; it takes 5 ms to come back
//!   outage = the longest time without a packet in the 50 ms after that
//! ```
//! The policies take turns, each on a device of its own; the source is as fast as the ring. The figure of a policy is
//! the median over its faults, `quiet` is the same without a fault: what threads lose to their scheduler. So the
//! ratio is not of two waits for pages, but of one and of none.
//!
//! The paper's 300 ms are what a TCP sender makes of the packets that are lost in those 5 ms. Here packets are counted
//! as they come, without a transport that reacts.

use super::{
    SizeOptions,
    blk::process::SideCpus,
    harness::{
        figures::{median, rounded, to_f64},
        report::{BenchError, BenchReport, failed},
        rounds::{Round, WarmUp, rounds},
    },
    net_rig::{Cold, Interface, NetRig},
};
use pagetide_dpu::{LinkConfig, OnReceiveFault, Prefault, ReceiveConfig};
use pagetide_random::SplitMix64;
use serde_json::json;
use std::time::{Duration, Instant};

const NAME: &str = "single-fault";
/// Faults of each policy.
const FAULTS: usize = 20;
/// Time that a page takes.
const PAGE_TIME: Duration = Duration::from_millis(5);
/// Time that is watched from a fault on.
const WATCHED: Duration = Duration::from_millis(50);
/// Time before that, for the ring to be in use.
const LEAD: Duration = Duration::from_millis(20);
const RING: u16 = 1024;
const PACKET_BYTES: u16 = 64;

/// Names in the report.
const POLICIES: [(&str, OnReceiveFault); 4] = [
    ("drop", OnReceiveFault::Drop),
    ("pause", OnReceiveFault::Pause),
    ("backup_ring", OnReceiveFault::BackupRing),
    ("out_of_order", OnReceiveFault::OutOfOrder),
];

/// A policy's device, and what was seen of it.
struct Side {
    name: &'static str,
    interface: Interface,
    outages_us: Vec<f64>,
    quiet_us: Vec<f64>,
    packets: u64,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let cpus = SideCpus::choose();
    pagetide_sys::cpu::set_affinity(&[cpus.frontend]).map_err(failed)?;
    let rig = NetRig::start(cpus.backend, PAGE_TIME).map_err(failed)?;
    let mut sides = Vec::new();
    for (name, on_fault) in POLICIES {
        let receive = ReceiveConfig {
            on_fault,
            // The fault is to be met by a packet.
            prefault: Prefault::Off,
            ..ReceiveConfig::default()
        };
        let link = LinkConfig::Source {
            bytes: PACKET_BYTES,
        };
        let interface = rig.add(name, link, receive, RING).map_err(failed)?;
        sides.push(Side {
            name,
            interface,
            outages_us: Vec::new(),
            quiet_us: Vec::new(),
            packets: 0,
        });
    }
    let mut random = SplitMix64::new(5);
    for round in rounds(NAME, sizes.pairs(FAULTS), WarmUp::First) {
        for at in round.rotated(POLICIES.len()) {
            sides[at].meet(round, &mut random).map_err(failed)?;
        }
    }
    let mut report = BenchReport::new(NAME);
    describe(&mut report, &sides, &rig).map_err(failed)?;
    Ok(report)
}

impl Side {
    /// One fault, and as long without one.
    fn meet(&mut self, round: Round, random: &mut SplitMix64) -> Result<(), String> {
        self.longest_gap_us(LEAD)?;
        let quiet = self.longest_gap_us(WATCHED)?;
        self.interface.take_away_of(random.next_u64());
        let outage = self.longest_gap_us(WATCHED)?;
        if round.counts {
            self.quiet_us.push(quiet);
            self.outages_us.push(outage);
        }
        Ok(())
    }

    /// Receives for `time`; returns the longest time between two packets.
    fn longest_gap_us(&mut self, time: Duration) -> Result<f64, String> {
        let begun = Instant::now();
        let (mut last, mut longest) = (begun, Duration::ZERO);
        loop {
            let came = self.interface.receive(Cold::No)?;
            let now = Instant::now();
            // Also that which is not over yet.
            longest = longest.max(now - last);
            if came.is_some_and(|buffer| buffer.written > 0) {
                self.packets += 1;
                last = now;
            }
            if now - begun > time {
                return Ok(longest.as_secs_f64() * 1e6);
            }
        }
    }
}

fn describe(report: &mut BenchReport, sides: &[Side], rig: &NetRig) -> Result<(), String> {
    let outage = |side: &Side| median(side.outages_us.iter().copied());
    for side in sides {
        let device = rig.report(&side.interface)?;
        report.figures.insert(
            format!("{}_outage_us", side.name),
            rounded(outage(side)).into(),
        );
        report.figures.insert(
            side.name.to_owned(),
            json!({
                "quiet_us": rounded(median(side.quiet_us.iter().copied())),
                "outages_us": side.outages_us.iter().map(|us| rounded(*us)).collect::<Vec<_>>(),
                "packets": side.packets,
                "iopfs": device.iopfs,
            }),
        );
    }
    let of = |name: &str| sides.iter().find(|side| side.name == name).map(outage);
    if let (Some(drop), Some(out_of_order)) = (of("drop"), of("out_of_order")) {
        let ratio = drop / out_of_order;
        let name = "drop_outage_over_out_of_order";
        report.ratios.insert(name.into(), ratio.into());
    }
    report.figures.insert(
        "page_ms".into(),
        to_f64(PAGE_TIME.as_millis().try_into().unwrap_or(0)).into(),
    );
    report.peers.insert(
        "paper".into(),
        "about 300 ms of iperf3 over TCP for one fault of 5 ms, the packets being dropped".into(),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outages_of_all_policies_are_measured() {
        let sizes = SizeOptions {
            pairs: Some(1),
            ..SizeOptions::default()
        };
        let report = run(&sizes).unwrap();
        for (name, _) in POLICIES {
            let outage = &report.figures[&format!("{name}_outage_us")];
            assert!(outage.as_f64().unwrap() > 0.0);
            assert!(report.figures[name]["packets"].as_u64().unwrap() > 0);
            assert!(report.figures[name]["iopfs"].as_u64().unwrap() > 0);
        }
        assert!(report.ratios["drop_outage_over_out_of_order"].is_number());
    }
}
