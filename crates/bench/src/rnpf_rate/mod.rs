// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench rnpf-rate`: a stream of messages while buffers fault, by the rate of faults ('Page Fault Support for
//! Network Controllers', 6.4, Fig 10 left).
//!
//! ```text
//!   source ──► engine ──► ring of 1024 buffers, all present ──► front end, which posts each again at once
//!                                │
//!                                └ of the packets posted for, one in 1 / f has its page taken away
//!   a message of 64 KB = 45 packets of 1460 bytes       throughput = messages a second
//! ```
//! A *minor* fault is answered by the host as soon as it looks, a *major* one after 5 ms more, as if it were read from a
//! disk. A round is, for each policy and kind, slices without faults (the *optimum*) and with each rate; the ratio
//! of a cell is the median over the rounds of its slice over the optimum of the same round. The paper gives no rates: from
//! one packet in a million to one in a hundred is our choice.
//!
//! The pages are absent indeed, for an injection ([`pagetide_dpu::inject`]) counts by the second, and holds no more
//! than some hundred faults at a time.
//!
//! *Weak points.* The source has no window and loses nothing by a packet that is lost, so *drop* costs it only that
//! packet; the paper's costs its TCP sender a time-out.

use super::{
    SizeOptions,
    blk::process::SideCpus,
    harness::{
        figures::{median, rounded, to_f64},
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, progress, rounds},
    },
    net_rig::{Cold, Interface, NetRig},
};
use pagetide_dpu::{Backing, LinkConfig, OnReceiveFault, Prefault, ReceiveConfig};
use pagetide_random::SplitMix64;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const NAME: &str = "rnpf-rate";
const ROUNDS: usize = 6;
const SLICE_S: u64 = 2;
/// Left out at the beginning of a slice.
const LEAD: Duration = Duration::from_millis(50);
const RING: u16 = 1024;
const PACKET_BYTES: u16 = 1460;
const MESSAGE_BYTES: u64 = 64 << 10;
/// Packets of a message.
const PACKETS_A_MESSAGE: u64 = MESSAGE_BYTES.div_ceil(PACKET_BYTES as u64);
/// Time that a page of a major fault takes.
const MAJOR: Duration = Duration::from_millis(5);

/// Names in the report.
const POLICIES: [(&str, OnReceiveFault); 4] = [
    ("drop", OnReceiveFault::Drop),
    ("pause", OnReceiveFault::Pause),
    ("backup_ring", OnReceiveFault::BackupRing),
    ("out_of_order", OnReceiveFault::OutOfOrder),
];
/// Packets to a fault, by their names in the report.
const RATES: [(&str, u64); 5] = [
    ("1e6", 1_000_000),
    ("1e5", 100_000),
    ("1e4", 10_000),
    ("1e3", 1_000),
    ("1e2", 100),
];
/// Kinds of faults, by their names in the report, and the host's time for a page.
const KINDS: [(&str, Duration); 2] = [("minor", Duration::ZERO), ("major", MAJOR)];

/// One policy with one kind of faults.
struct Side {
    name: String,
    interface: Interface,
    random: SplitMix64,
    /// Messages a second, of each rate, the optimum first.
    per_s: Vec<Vec<f64>>,
    faults: Vec<u64>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let cpus = SideCpus::choose();
    pagetide_sys::cpu::set_affinity(&[cpus.frontend]).map_err(failed)?;
    let slice = sizes.time(SLICE_S);
    let mut report = BenchReport::new(NAME);
    for (kind, page_time) in KINDS {
        let rig = NetRig::start(cpus.backend, page_time).map_err(failed)?;
        let mut sides = Vec::new();
        for (policy, on_fault) in POLICIES {
            sides.push(Side::new(&rig, &format!("{policy}_{kind}"), on_fault).map_err(failed)?);
        }
        progress(NAME, format_args!("{kind} faults"));
        for round in rounds(NAME, sizes.pairs(ROUNDS), WarmUp::None) {
            for at in round.rotated(sides.len()) {
                for rate in round.rotated(RATES.len() + 1) {
                    sides[at].slice(rate, slice).map_err(failed)?;
                }
            }
        }
        for side in &sides {
            side.describe(&rig, &mut report).map_err(failed)?;
        }
    }
    report.figures.insert(
        "major_ms".into(),
        to_f64(MAJOR.as_millis().try_into().unwrap_or(0)).into(),
    );
    report.peers.insert(
        "paper".into(),
        "Fig 10, left: the backup ring is near the optimum at rates at which dropping has stopped the sender".into(),
    );
    Ok(report)
}

impl Side {
    fn new(rig: &NetRig, name: &str, on_fault: OnReceiveFault) -> Result<Self, String> {
        let receive = ReceiveConfig {
            on_fault,
            // The faults are to be met by packets.
            prefault: Prefault::Off,
            ..ReceiveConfig::default()
        };
        let link = LinkConfig::Source {
            bytes: PACKET_BYTES,
        };
        let interface = rig.add(name, link, receive, RING)?;
        // It is the only one with packets in its slices.
        let mut side = Self {
            name: name.to_owned(),
            interface,
            random: SplitMix64::new(10),
            per_s: vec![Vec::new(); RATES.len() + 1],
            faults: vec![0; RATES.len() + 1],
        };
        side.interface.nic().disconnect();
        Ok(side)
    }

    /// A slice at the rate of this place, 0 being none.
    fn slice(&mut self, rate: usize, time: Duration) -> Result<(), String> {
        self.interface.connect()?;
        let packets_to_a_fault = rate.checked_sub(1).map(|at| RATES[at].1);
        let begun = Instant::now();
        let mut packets = 0;
        while begun.elapsed() < LEAD + time {
            let cold = match packets_to_a_fault {
                Some(packets) if self.random.below(packets) == 0 => Cold::Yes,
                _ => Cold::No,
            };
            let came = self.interface.receive(cold)?;
            if came.is_some() && cold == Cold::Yes {
                self.faults[rate] += 1;
            }
            if came.is_some_and(|buffer| buffer.written > 0) && begun.elapsed() > LEAD {
                packets += 1;
            }
        }
        self.interface.nic().disconnect();
        if packets == 0 {
            return Err(format!("no packet came ({})", self.name));
        }
        let messages = to_f64(packets) / to_f64(PACKETS_A_MESSAGE);
        self.per_s[rate].push(messages / time.as_secs_f64());
        Ok(())
    }

    fn describe(&self, rig: &NetRig, report: &mut BenchReport) -> Result<(), String> {
        let (optimum, with_faults) = self.per_s.split_first().ok_or("no slice")?;
        let per_s = |slices: &[f64]| rounded(median(slices.iter().copied()));
        let device = rig.report(&self.interface)?;
        let mut cell = json!({
            "optimum_messages_per_s": per_s(optimum),
            "iopfs": device.iopfs,
        });
        if let Backing::Nic(nic) = &device.backing {
            cell["lost_packets"] = nic.fault_drops.into();
            cell["stored_packets"] = nic.stored_packets.into();
        }
        for ((rate, _), (slices, faults)) in
            RATES.iter().zip(with_faults.iter().zip(&self.faults[1..]))
        {
            cell[*rate] = json!({"messages_per_s": per_s(slices), "faults": faults});
            let ratio = median(slices.iter().zip(optimum).map(|(with, best)| with / best));
            // Of a slice that is too short for a fault there is nothing to tell.
            let ratio = match faults {
                0 => Value::Null,
                _ => rounded(ratio).into(),
            };
            report.ratios.insert(format!("{}_{rate}", self.name), ratio);
        }
        report.figures.insert(self.name.clone(), cell);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_counted_at_each_rate_and_compared_with_the_optimum() {
        let cpus = SideCpus::choose();
        let rig = NetRig::start(cpus.backend, MAJOR).unwrap();
        let mut side = Side::new(&rig, "out_of_order_major", OnReceiveFault::OutOfOrder).unwrap();
        let time = Duration::from_millis(200);
        for rate in [0, RATES.len()] {
            side.slice(rate, time).unwrap();
        }
        let mut report = BenchReport::new(NAME);
        side.describe(&rig, &mut report).unwrap();
        let ratios = &report.ratios;
        assert!(ratios["out_of_order_major_1e2"].as_f64().unwrap() > 0.0);
        assert!(ratios["out_of_order_major_1e6"].is_null());
        let cell = &report.figures["out_of_order_major"];
        assert!(cell["iopfs"].as_u64().unwrap() > 0, "{cell}");
        assert!(cell["1e2"]["faults"].as_u64().unwrap() > 0, "{cell}");
        assert!(cell["optimum_messages_per_s"].as_f64().unwrap() > 0.0);
    }
}
