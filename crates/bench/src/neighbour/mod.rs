// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench neighbour`: what a tenant with a cold receive ring costs another one on the same engine
//! ('Page Fault Support for Network Controllers', 3).
//!
//! ```text
//!   A: source ──► ring of 1024 buffers, every one absent whenever it is posted, 5 ms a page ──► posts it again
//!   B: sends 32 packets, gets each back, sends it again                (the same engine, the same CPU)
//! ```
//! In every second slice A has no front end, which is *quiet*. A round is a slice of each, and its ratio is of those
//! two. A's packets go where its policy puts them: *out of order* finds no present buffer, so they fill the store, and
//! then they are lost.
//!
//! Section 3 bounds what must be stored by S = R × T: the rate of A's packets by the time of a page. A source without
//! a rate of its own exceeds any S; `store_bound_bytes` is what the device may store, and `store_peak_bytes` must not
//! exceed it.

use super::{
    SizeOptions,
    blk::process::SideCpus,
    harness::{
        figures::{median, rounded, to_f64},
        latencies::Latencies,
        ratios::PairedRatios,
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, rounds},
    },
    net_rig::{Cold, Interface, NetRig},
};
use pagetide_dpu::{Backing, LinkConfig, OnReceiveFault, ReceiveConfig};
use pagetide_frontend::nic::{NET_HEADER_BYTES, Way};
use serde_json::json;
use std::time::{Duration, Instant};

const NAME: &str = "neighbour";
const ROUNDS: usize = 10;
const SLICE: Duration = Duration::from_millis(500);
/// Left out at the beginning of a slice.
const LEAD: Duration = Duration::from_millis(50);
/// Time that a page takes.
const PAGE_TIME: Duration = Duration::from_millis(5);
const RING: u16 = 1024;
/// B's packets under way.
const WINDOW: u64 = 32;
const PACKET_BYTES: u16 = 64;

/// One slice of B.
#[derive(Debug, Clone, Copy)]
struct Slice {
    pps: f64,
    p99_us: f64,
}

/// Both tenants.
struct Tenants {
    a: Interface,
    b: Interface,
    /// When B's packets were sent, by their number.
    sent: Vec<Instant>,
    a_packets: u64,
}

/// Who has packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    BAlone,
    Both,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let cpus = SideCpus::choose();
    pagetide_sys::cpu::set_affinity(&[cpus.frontend]).map_err(failed)?;
    let rig = NetRig::start(cpus.backend, PAGE_TIME).map_err(failed)?;
    let mut tenants = Tenants::new(&rig).map_err(failed)?;
    let (mut quiet, mut beside) = (Vec::new(), Vec::new());
    for round in rounds(NAME, sizes.pairs(ROUNDS), WarmUp::First) {
        for load in round.turns([Load::BAlone, Load::Both]) {
            let slice = tenants.slice(load).map_err(failed)?;
            if round.counts {
                match load {
                    Load::Both => beside.push(slice),
                    Load::BAlone => quiet.push(slice),
                }
            }
        }
    }
    let mut report = BenchReport::new(NAME);
    describe(&mut report, &quiet, &beside);
    let device = rig.report(&tenants.a).map_err(failed)?;
    let figures = &mut report.figures;
    if let Backing::Nic(nic) = &device.backing {
        figures.insert("store_peak_bytes".into(), nic.stored_peak_bytes.into());
        let bound = nic.receive.store_bytes;
        figures.insert("store_bound_bytes".into(), bound.into());
        figures.insert("a_lost_packets".into(), nic.fault_drops.into());
        figures.insert("a_stored_packets".into(), nic.stored_packets.into());
    }
    figures.insert("a_received_packets".into(), tenants.a_packets.into());
    figures.insert("a_iopfs".into(), device.iopfs.into());
    Ok(report)
}

impl Tenants {
    fn new(rig: &NetRig) -> Result<Self, String> {
        let cold = ReceiveConfig {
            on_fault: OnReceiveFault::OutOfOrder,
            ..ReceiveConfig::default()
        };
        let source = LinkConfig::Source {
            bytes: PACKET_BYTES,
        };
        let mut a = rig.add("a", source, cold, RING)?;
        a.nic().disconnect();
        let mut b = rig.add("b", LinkConfig::Loop, ReceiveConfig::default(), RING)?;
        let sent = vec![Instant::now(); usize::try_from(WINDOW).unwrap_or(0)];
        for number in 0..WINDOW {
            let at = b.sending_place(number);
            let mut packet = vec![0; (NET_HEADER_BYTES + u32::from(PACKET_BYTES)) as usize];
            let place = NET_HEADER_BYTES as usize + NUMBER_AT;
            packet[place..place + 8].copy_from_slice(&number.to_le_bytes());
            b.ram().copy_to(at, &packet).map_err(|e| e.to_string())?;
            give(&mut b, number)?;
        }
        b.nic().kick(Way::Send).map_err(|e| e.to_string())?;
        Ok(Self {
            a,
            b,
            sent,
            a_packets: 0,
        })
    }

    fn slice(&mut self, load: Load) -> Result<Slice, String> {
        if load == Load::Both {
            self.a.cool();
            self.a.connect()?;
        }
        let begun = Instant::now();
        let mut times_ns: Vec<u64> = Vec::new();
        while begun.elapsed() < LEAD + SLICE {
            if self.a.receive(Cold::Yes)?.is_some_and(|b| b.written > 0) {
                self.a_packets += 1;
            }
            if let Some(ns) = self.turn_of_b()?
                && begun.elapsed() > LEAD
            {
                times_ns.push(ns);
            }
        }
        self.a.nic().disconnect();
        let times: Latencies = times_ns.into_iter().collect();
        if times.count() == 0 {
            return Err("no packet of B came back".into());
        }
        Ok(Slice {
            pps: to_f64(times.count() as u64) / SLICE.as_secs_f64(),
            p99_us: times.us(990),
        })
    }

    /// Takes one packet back and sends it again; returns how long it was away.
    fn turn_of_b(&mut self) -> Result<Option<u64>, String> {
        while self
            .b
            .nic()
            .take(Way::Send)
            .map_err(|e| e.to_string())?
            .is_some()
        {}
        let Some(back) = self.b.receive(Cold::No)? else {
            return Ok(None);
        };
        if back.written == 0 {
            return Ok(None);
        }
        let mut number = [0; 8];
        let at = back.at + u64::from(NET_HEADER_BYTES) + NUMBER_AT as u64;
        let read = self.b.ram().copy_from(at, &mut number);
        read.map_err(|e| e.to_string())?;
        let number = u64::from_le_bytes(number);
        let place = usize::try_from(number)
            .ok()
            .and_then(|n| self.sent.get_mut(n));
        let sent = place.ok_or("a packet of B came back changed")?;
        let away = sent.elapsed();
        *sent = Instant::now();
        give(&mut self.b, number)?;
        self.b.nic().kick(Way::Send).map_err(|e| e.to_string())?;
        Ok(Some(u64::try_from(away.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Where the number of a packet is in it: behind the Ethernet header.
const NUMBER_AT: usize = 14;

fn give(b: &mut Interface, number: u64) -> Result<(), String> {
    let at = b.sending_place(number);
    let bytes = NET_HEADER_BYTES + u32::from(PACKET_BYTES);
    match b.nic().give(Way::Send, at, bytes) {
        Ok(true) => Ok(()),
        Ok(false) => Err("B's ring is full".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn describe(report: &mut BenchReport, quiet: &[Slice], beside: &[Slice]) {
    let of = |slices: &[Slice]| {
        json!({
            "pps": rounded(median(slices.iter().map(|s| s.pps))),
            "p99_us": rounded(median(slices.iter().map(|s| s.p99_us))),
        })
    };
    report.figures.insert("b_quiet".into(), of(quiet));
    report.figures.insert("b_beside_a".into(), of(beside));
    let pairs = || beside.iter().zip(quiet);
    let ratios = &mut report.ratios;
    let mut add = |name: &str, ratio: Option<PairedRatios>| {
        let mean = ratio.map(|ratio| ratio.mean());
        ratios.insert(name.into(), mean.into());
    };
    add(
        "b_pps_over_quiet",
        PairedRatios::new(pairs().map(|(b, q)| b.pps / q.pps)),
    );
    add(
        "b_p99_over_quiet",
        PairedRatios::new(pairs().map(|(b, q)| b.p99_us / q.p99_us)),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbour_is_measured_beside_a_ring_that_is_cold() {
        let sizes = SizeOptions {
            pairs: Some(1),
            ..SizeOptions::default()
        };
        let report = run(&sizes).unwrap();
        let figure = |name: &str| report.figures[name].as_u64().unwrap();
        assert!(figure("a_iopfs") > 0);
        assert!(figure("store_peak_bytes") <= figure("store_bound_bytes"));
        for name in ["b_pps_over_quiet", "b_p99_over_quiet"] {
            assert!(report.ratios[name].as_f64().unwrap() > 0.0, "{name}");
        }
    }
}
