// SPDX-License-Identifier: Apache-2.0
//! The second part: a stock guest with memcached, which is evicted whole and resumed.
//!
//! ```text
//!   client: Linux, 16 connections, 90% gets of 1 KB ── TAP ── our device ── stock guest with memcached
//!   3 s of operations, at which the rate is taken ─► QEMU stopped (SIGSTOP) ─► all RAM evicted ─► QEMU resumed
//!                                                 ─► 10,000 operations, timed
//! ```
//! All of the guest is cold then, not its ring alone: kernel, program and values come back by faults of its vCPUs. So
//! a policy is compared with the same guest whose ring is *wired* (`fine`), in turns: the recovery of the one over that
//! of the other. The process is stopped, and not the VM by QEMU's monitor: QEMU would stop its device, too, and a device
//! that is stopped wires nothing.
//!
//! Each guest is booted anew, for the size of a ring is the driver's for its life. Cells are named `POLICY_guest_RING`.

use super::super::{
    SizeOptions,
    guest_net::{Interface, NetGuest, NetGuestOptions, Pings, Receives, in_own_network},
    harness::{
        figures::{median, rounded},
        report::{BenchError, BenchReport, failed},
        rounds::{Round, WarmUp, progress, silent_rounds},
    },
    key_value::{Clients, Done, Speaks, Until, WorkingSet, rate, recovery},
};
use super::{BIN, NAME, ROUNDS, TIMED};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::time::Duration;

/// Sizes that QEMU offers.
const RINGS: [u16; 3] = [256, 512, 1024];
const RAM_MIB: u64 = 384;
const CONNECTIONS: u64 = 16;
/// Of operations before the eviction.
const WARM: Duration = Duration::from_secs(3);
/// Longest that is waited for the operations after it.
const LONGEST: Duration = Duration::from_secs(120);

/// Names in the report, and the daemon's.
const POLICIES: [(&str, &str); 3] = [
    ("drop", "drop"),
    ("backup_ring", "backup-ring"),
    ("out_of_order", "out-of-order"),
];

/// What of the guest stays, beside what does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wired {
    Nothing,
    Ring,
}

impl Wired {
    const fn wire(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Ring => "fine",
        }
    }
}

/// One eviction and what followed.
#[derive(Clone, Debug)]
struct Shown {
    warm_per_s: f64,
    recovery: Option<Duration>,
    operations: u64,
    took: Duration,
    lost_packets: u64,
    iopfs: u64,
    kept_bytes: u64,
}

impl Shown {
    fn recovery_s(&self) -> f64 {
        self.recovery.unwrap_or(LONGEST).as_secs_f64()
    }
}

/// Adds this part to the report; where it cannot run, its ratios are null, with the reason.
///
/// # Errors
/// It failed.
pub(super) fn add(sizes: &SizeOptions, report: &mut BenchReport) -> Result<(), BenchError> {
    let wanted = |policy: &str, ring| sizes.includes(&format!("{policy}_guest_{ring}"));
    if !POLICIES
        .iter()
        .any(|(policy, _)| RINGS.iter().any(|ring| wanted(policy, *ring)))
    {
        return Ok(());
    }
    for (policy, on_fault) in POLICIES {
        let (mut worst, mut lost, mut measured) = (0.0_f64, 0, false);
        for ring in RINGS.into_iter().filter(|ring| wanted(policy, *ring)) {
            let mut runs = Vec::new();
            for round in silent_rounds(sizes.pairs(ROUNDS), WarmUp::None) {
                match one_pair(on_fault, ring, round) {
                    Ok(pair) => runs.push(pair),
                    Err(BenchError::Unable { reason }) => {
                        skip(report, &reason);
                        return Ok(());
                    }
                    Err(error) => return Err(error),
                }
            }
            let ratios = runs
                .iter()
                .map(|[bare, wired]| bare.recovery_s() / wired.recovery_s());
            let ratio = median(ratios);
            worst = worst.max(ratio);
            measured = true;
            lost += runs.iter().map(|[bare, _]| bare.lost_packets).sum::<u64>();
            progress(
                NAME,
                format_args!("{policy}, stock guest, {ring} buffers: {ratio:.3}"),
            );
            let cell = json!({
                "evicted": of_side(&runs, |[bare, _]| bare),
                "evicted_but_for_its_ring": of_side(&runs, |[_, wired]| wired),
            });
            report
                .figures
                .insert(format!("{policy}_guest_{ring}"), cell);
        }
        if measured {
            let name = format!("{policy}_recovery_over_wired_ring");
            report.ratios.insert(name, rounded(worst).into());
            report
                .figures
                .insert(format!("{policy}_guest_lost_packets"), lost.into());
        }
    }
    Ok(())
}

fn skip(report: &mut BenchReport, reason: &str) {
    progress(NAME, format_args!("no stock guest: {reason}"));
    for (policy, _) in POLICIES {
        let name = format!("{policy}_recovery_over_wired_ring");
        report.ratios.insert(name, Value::Null);
    }
    report.peers.insert("stock_guest".into(), reason.into());
}

fn of_side(runs: &[[Shown; 2]], side: fn(&[Shown; 2]) -> &Shown) -> Value {
    let of = |figure: fn(&Shown) -> f64| rounded(median(runs.iter().map(|run| figure(side(run)))));
    json!({
        "warm_per_s": of(|shown| shown.warm_per_s),
        "recovery_s": of(Shown::recovery_s),
        "recovered": runs.iter().filter(|run| side(run).recovery.is_some()).count(),
        "operations": runs.iter().map(|run| side(run).operations).min(),
        "took_s": of(|shown| shown.took.as_secs_f64()),
        "lost_packets": runs.iter().map(|run| side(run).lost_packets).sum::<u64>(),
        "iopfs": runs.iter().map(|run| side(run).iopfs).max(),
        "kept_bytes": runs.iter().map(|run| side(run).kept_bytes).max(),
    })
}

/// A guest without and one with its ring wired, in the order of the round.
fn one_pair(on_fault: &'static str, ring: u16, round: Round) -> Result<[Shown; 2], BenchError> {
    let mut pair = [None, None];
    for wired in round.turns([Wired::Nothing, Wired::Ring]) {
        pair[wired as usize] = Some(in_own_network(1, || one(on_fault, ring, wired))?);
    }
    match pair {
        [Some(bare), Some(wired)] => Ok([bare, wired]),
        _ => Err(failed("a guest had no turn")),
    }
}

fn one(on_fault: &'static str, ring: u16, wired: Wired) -> Result<Shown, BenchError> {
    let guest = NetGuest::start(&NetGuestOptions {
        ram_mib: RAM_MIB,
        ring,
        servers: &["memcached"],
        pings: Pings::None,
        interface: Interface::Ours(Receives {
            on_fault,
            wire: wired.wire(),
        }),
    })?;
    evict_and_resume(&guest, WARM, TIMED as u64).map_err(failed)
}

fn evict_and_resume(guest: &NetGuest, warm: Duration, timed: u64) -> Result<Shown, String> {
    let address = guest.listening(Speaks::Memcached.port())?;
    guest.attach()?;
    let mut clients = Clients::connect(Speaks::Memcached, address, CONNECTIONS, WorkingSet::SMALL)?;
    let warm_per_s = rate(&clients.run(Until::Time(warm))?, warm);
    let (lost, iopfs) = (guest.count("fault_dropped_packets")?, guest.count("iopfs")?);
    let kept_bytes = {
        let _stopped = Stopped::process(guest.pid())?;
        evict(guest)?
    };
    let done = clients.run(Until::Operations(timed, LONGEST))?;
    let at: Vec<Duration> = done.iter().map(|operation: &Done| operation.at).collect();
    Ok(Shown {
        warm_per_s,
        recovery: recovery(&at, 0.9 * warm_per_s, BIN),
        operations: done.len() as u64,
        took: at.last().copied().unwrap_or(LONGEST),
        lost_packets: guest.count("fault_dropped_packets")? - lost,
        iopfs: guest.count("iopfs")? - iopfs,
        kept_bytes,
    })
}

/// Evicts what can be evicted; returns what stays.
fn evict(guest: &NetGuest) -> Result<u64, String> {
    let mut kept_bytes = u64::MAX;
    loop {
        guest.daemon().reclaim(None)?;
        let resident_bytes = guest.daemon().vm()?.resident_bytes;
        if resident_bytes >= kept_bytes {
            return Ok(kept_bytes);
        }
        kept_bytes = resident_bytes;
    }
}

/// A process that is stopped until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn process(pid: u32) -> Result<Self, String> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or("the guest has no process id")?;
        kill_process(pid, Signal::STOP).map_err(|error| format!("stopping the guest: {error}"))?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Err(error) = kill_process(self.0, Signal::CONT) {
            tracing::error!(%error, "the bench's guest stays stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_that_cannot_be_are_null_with_the_reason() {
        let mut report = BenchReport::new(NAME);
        skip(&mut report, "there is no memcached");
        assert!(report.ratios["out_of_order_recovery_over_wired_ring"].is_null());
        assert_eq!(report.peers["stock_guest"], "there is no memcached");
    }
}
