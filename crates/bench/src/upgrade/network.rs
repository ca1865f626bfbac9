// SPDX-License-Identifier: Apache-2.0
//! Upgrades of a daemon that serves the network interface of a stock guest ('Page Fault Support for Network
//! Controllers' with Taiji 4.4).
//!
//! ```text
//!   iperf3, UDP both ways, numbered datagrams │ the guest pings the host as fast as answers come
//!   each upgrade: evict a part of the guest │ iperf3 begins │ `pagetide upgrade PATH` │ iperf3 ends: what was lost?
//! ```
//! A datagram that neither end has is lost wherever that was: in the device, in the TAP or in the guest. UDP shows order
//! as well; TCP would mend both.

use super::rig::{self, PATIENCE, Place};
use crate::{
    guest_net::{Interface, NetGuest, NetGuestOptions, NetHost, Pings, Receives, iperf3},
    harness::{
        figures::to_f64,
        report::{BenchError, failed},
        rounds::progress,
    },
    interrupt::Interrupted,
};
use serde_json::{Value, json};
use std::{
    rc::Rc,
    time::{Duration, Instant},
};

/// Upgrades, unless told otherwise.
pub(super) const UPGRADES: u64 = 20;
const RAM_MIB: u64 = 384;
const RING: u16 = 256;
/// Evicted before each upgrade.
const EVICTED_BYTES: u64 = 64 << 20;
/// A run of iperf3, in seconds: it outlasts an upgrade.
const RUN_S: &str = "4";
/// What an emulated guest sends and takes without a loss of its own.
const RATE: &str = "8M";
/// Bytes of a datagram.
const DATAGRAM: &str = "1200";
/// Between two looks whether packets flow.
const LOOK: Duration = Duration::from_millis(20);

/// What came of the upgrades.
#[derive(Default)]
pub(super) struct Network {
    upgrades: u64,
    pauses_us: Vec<f64>,
    datagrams: Datagrams,
    /// Packets that the device has lost to a page fault, and requests that it has failed.
    lost_to_faults: u64,
    failed_requests: u64,
    /// Lines of a thousand pings, and those of them that tell a loss.
    pings: usize,
    lossy_pings: usize,
}

/// Of both ways.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Datagrams {
    sent: u64,
    lost: u64,
    out_of_order: u64,
}

/// Ends the process that has become the daemon, after its guest.
struct EndsSuccessor(Rc<NetHost>);

impl Drop for EndsSuccessor {
    fn drop(&mut self) {
        if let Err(error) = rig::end_successor(self.0.daemon()) {
            tracing::error!(error, "the daemon of the bench could not be ended");
        }
    }
}

/// So many upgrades, in a network of this thread's own.
pub(super) fn run(upgrades: u64, interrupted: &Interrupted) -> Result<Network, BenchError> {
    let place = Place::new().map_err(failed)?;
    let host = NetHost::start()?;
    let _ends = EndsSuccessor(Rc::clone(&host));
    let guest = host.boot(
        0,
        &NetGuestOptions {
            ram_mib: RAM_MIB,
            ring: RING,
            servers: &["iperf3"],
            pings: Pings::Flood,
            interface: Interface::Ours(Receives {
                on_fault: "out-of-order",
                wire: "none",
            }),
        },
    )?;
    guest.attach().map_err(failed)?;
    guest.listening(5201).map_err(failed)?;
    let mut seen = Network::default();
    for number in 1..=upgrades {
        interrupted.check().map_err(failed)?;
        progress(
            super::NAME,
            format_args!("upgrade {number} of {upgrades}, under iperf3"),
        );
        seen.upgrade(&place, &host, &guest, number)
            .map_err(failed)?;
    }
    seen.listen_to_pings(&guest).map_err(failed)?;
    seen.count_losses(&guest).map_err(failed)?;
    Ok(seen)
}

impl Network {
    fn upgrade(
        &mut self,
        place: &Place,
        host: &NetHost,
        guest: &NetGuest,
        number: u64,
    ) -> Result<(), String> {
        let daemon = host.daemon();
        let _done = daemon.reclaim(Some(EVICTED_BYTES))?;
        let before = rig::pid(daemon)?;
        let (received, outcome) = std::thread::scope(|scope| {
            let running = scope.spawn(datagrams);
            let outcome = flowing(guest).and_then(|()| {
                // They begin anew with the process. What it loses until it hands over is among the datagrams.
                self.count_losses(guest)?;
                let client = rig::begin_upgrade(&place.program(number), &host.api())?;
                let outcome = rig::outcome(daemon, client)?;
                match running.is_finished() {
                    true => Err("iperf3 ended before the upgrade".to_owned()),
                    false => Ok(outcome),
                }
            });
            (running.join(), outcome)
        });
        let report = outcome?.map_err(|told| daemon.with_log(told))?;
        if report.pid == before {
            return Err(daemon.with_log("an upgrade that is done has changed nothing"));
        }
        let received = received.map_err(|_| "a thread of the bench has panicked")??;
        self.datagrams.sent += received.sent;
        self.datagrams.lost += received.lost;
        self.datagrams.out_of_order += received.out_of_order;
        self.pauses_us.extend(report.pause_us.map(to_f64));
        self.upgrades += 1;
        Ok(())
    }

    /// Adds what the present process has counted, which is about to end.
    fn count_losses(&mut self, guest: &NetGuest) -> Result<(), String> {
        self.lost_to_faults += guest.count("fault_dropped_packets")?;
        self.failed_requests += guest.count("failed_requests")?;
        Ok(())
    }

    /// Waits for a thousand pings that have come back since the last upgrade, and counts all.
    fn listen_to_pings(&mut self, guest: &NetGuest) -> Result<(), String> {
        let before = guest.pings()?.len();
        let begun = Instant::now();
        loop {
            let told = guest.pings()?;
            // The first of them may have begun before.
            if told.len() >= before + 2 {
                self.pings = told.len();
                let lossless = |line: &&String| line.contains(" 0% packet loss");
                self.lossy_pings = told.len() - told.iter().filter(lossless).count();
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return Err("the guest's pings do not come back any more".into());
            }
            std::thread::sleep(LOOK);
        }
    }

    pub(super) const fn upgrades(&self) -> u64 {
        self.upgrades
    }

    pub(super) const fn failed_requests(&self) -> u64 {
        self.failed_requests
    }

    /// Datagrams that did not come; those that the device has lost to a fault are among them.
    pub(super) const fn lost_packets(&self) -> u64 {
        self.datagrams.lost
    }

    pub(super) fn figures(&self) -> Value {
        json!({
            "upgrades": self.upgrades,
            "pause_us": super::spread(&self.pauses_us),
            "datagrams": self.datagrams.sent,
            "lost_datagrams": self.datagrams.lost,
            "datagrams_out_of_order": self.datagrams.out_of_order,
            "lost_to_faults": self.lost_to_faults,
            "failed_requests": self.failed_requests,
            "pings": self.pings * 1000,
            "lossy_thousands_of_pings": self.lossy_pings,
        })
    }
}

/// Waits until packets for the guest have come since now.
fn flowing(guest: &NetGuest) -> Result<(), String> {
    let (before, begun) = (guest.count("read_bytes")?, Instant::now());
    // More than pings make of a moment.
    while guest.count("read_bytes")? < before + (256 << 10) {
        if begun.elapsed() > PATIENCE {
            return Err("no packets come to the guest".into());
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn datagrams() -> Result<Datagrams, String> {
    let words = ["-u", "-b", RATE, "-l", DATAGRAM, "-t", RUN_S, "--bidir"];
    told(&iperf3(&[&words[..], &["--get-server-output"]].concat())?)
}

fn told(report: &Value) -> Result<Datagrams, String> {
    let streams = report["end"]["streams"].as_array();
    let mut all = Datagrams::default();
    for stream in streams.into_iter().flatten() {
        let of = |name: &str| stream["udp"][name].as_u64();
        let of = |name: &str| of(name).ok_or(format!("iperf3 does not tell {name}"));
        all.sent += of("packets")?;
        all.lost += of("lost_packets")?;
        all.out_of_order += of("out_of_order")?;
    }
    // What came to the guest in another order, only its own end knows.
    let server = report["server_output_text"].as_str().unwrap_or_default();
    for line in server.lines() {
        if let Some((before, _)) = line.split_once(" datagrams received out-of-order") {
            let count = before.split_whitespace().next_back();
            all.out_of_order += count.and_then(|count| count.parse().ok()).unwrap_or(1);
        }
    }
    match all.sent {
        0 => Err("iperf3 has sent nothing".into()),
        _ => Ok(all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_are_added_and_order_is_known_to_the_other_end() {
        let stream =
            |lost| json!({"udp": {"packets": 10, "lost_packets": lost, "out_of_order": 1}});
        let text = "[  5]   0.00-4.00   sec  3 datagrams received out-of-order\nelse\n";
        let report = json!({
            "end": {"streams": [stream(2), stream(0)]},
            "server_output_text": text,
        });
        let all = Datagrams {
            sent: 20,
            lost: 2,
            out_of_order: 5,
        };
        assert_eq!(told(&report), Ok(all));
        assert!(told(&json!({"end": {"streams": []}})).is_err());
        assert!(told(&json!({"end": {"streams": [{"udp": {}}]}})).is_err());
    }
}
