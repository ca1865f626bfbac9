// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench cold-ring`: a server whose receive ring is cold ('Page Fault Support for Network Controllers', 6.1,
//! Fig 4), with TCP stacks in user space on both sides, as in the paper the server's; and a stock guest that is cold as a
//! whole ([`guest`]).
//!
//! ```text
//!   client: gets (90%) and sets of 1 KB, 16 under way ── TCP ── pair of interfaces ── TCP ── server
//!                                                                             its ring: 16 to 1024 buffers
//!   2,000 operations ─► the pages of all its buffers are taken away, 5 ms each ─► 10,000 operations, timed ─► more, to 2 s
//! ```
//! *Pinned* is the same without taking pages away. A cell is a policy and a size of ring. Of each: operations a second
//! over the last half (`steady`), the time until 50 ms at 90% of the pinned rate (`recovery_s`), the packets that were
//! lost to a fault. The ratio of a policy is that of its worst size, recovery its longest, packets their sum.
//!
//! The paper's client is Linux with memaslap, and reacts to a lost packet by waiting at least 200 ms. Smoltcp has no
//! congestion control here and waits less: *drop* collapses later and less than there.

mod guest;
mod stack;

use super::{
    SizeOptions,
    blk::process::SideCpus,
    harness::{
        figures::{median, rounded, to_f64},
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, progress, silent_rounds},
    },
    key_value,
    net_rig::NetRig,
};
use pagetide_dpu::{Backing, DeviceReport, LinkConfig, OnReceiveFault, Prefault, ReceiveConfig};
use pagetide_random::SplitMix64;
use serde_json::json;
use stack::{Role, Stack};
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

const NAME: &str = "cold-ring";
const RINGS: [u16; 4] = [16, 64, 256, 1024];
const ROUNDS: usize = 3;
/// Operations before the ring gets cold, and timed ones.
const WARM: usize = 2_000;
const TIMED: usize = 10_000;
/// Operations under way.
const UNDER_WAY: usize = 16;
/// Time that a page takes.
const PAGE_TIME: Duration = Duration::from_millis(5);
/// They go on for so long at least, so that a recovery can be seen.
const LEAST: Duration = Duration::from_secs(2);
/// Longest that is waited for the operations. *Drop* may need more; then what was done is told.
const LONGEST: Duration = Duration::from_secs(10);
/// A rate is looked at over so long.
const BIN: Duration = Duration::from_millis(50);
const REQUEST_BYTES: usize = 32;
const VALUE_BYTES: usize = 1024;
const GET: u8 = b'g';
const SET: u8 = b's';

/// Names in the report.
const POLICIES: [(&str, OnReceiveFault); 4] = [
    ("drop", OnReceiveFault::Drop),
    ("pause", OnReceiveFault::Pause),
    ("backup_ring", OnReceiveFault::BackupRing),
    ("out_of_order", OnReceiveFault::OutOfOrder),
];

/// What a run has shown.
#[derive(Debug, Clone, Default)]
struct Shown {
    /// When each operation was done, from the beginning.
    done: Vec<Duration>,
    lost_packets: u64,
    stored_packets: u64,
}

impl Shown {
    /// Operations a second over the last half.
    fn steady(&self) -> f64 {
        let (Some(middle), Some(end)) = (self.done.get(self.done.len() / 2), self.done.last())
        else {
            return 0.0;
        };
        let count = self.done.len() - self.done.len() / 2;
        to_f64(count as u64) / (*end - *middle).as_secs_f64().max(1e-9)
    }

    /// Time that the timed operations took, or as many of them as were done.
    fn took(&self) -> Duration {
        let last = self.done.get(TIMED - 1).or(self.done.last());
        last.copied().unwrap_or_default()
    }

    /// When operations were first done at `rate` a second for a whole [`BIN`].
    fn recovery(&self, rate: f64) -> Option<Duration> {
        key_value::recovery(&self.done, rate, BIN)
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let mut report = BenchReport::new(NAME);
    let all = pagetide_sys::cpu::affinity().map_err(failed)?;
    add_in_user_space(sizes, &mut report)?;
    pagetide_sys::cpu::set_affinity(&all).map_err(failed)?;
    guest::add(sizes, &mut report)?;
    report.peers.insert(
        "paper".into(),
        "Fig 4: with drops no operation succeeds for seconds; the backup ring is as pinned".into(),
    );
    Ok(report)
}

/// The first part.
fn add_in_user_space(sizes: &SizeOptions, report: &mut BenchReport) -> Result<(), BenchError> {
    let cpus = SideCpus::choose();
    pagetide_sys::cpu::set_affinity(&[cpus.frontend]).map_err(failed)?;
    for (name, on_fault) in POLICIES {
        let (mut worst, mut recovery_s, mut lost) = (f64::INFINITY, 0.0_f64, 0);
        for ring in RINGS {
            if !sizes.includes(&format!("{name}_{ring}")) {
                continue;
            }
            let mut ratios = Vec::new();
            let mut cold_runs = Vec::new();
            for round in silent_rounds(sizes.pairs(ROUNDS), WarmUp::None) {
                let (mut pinned, mut cold) = (Shown::default(), Shown::default());
                for begins in round.turns([Begins::Warm, Begins::Cold]) {
                    let shown = one(on_fault, ring, begins, cpus.backend).map_err(failed)?;
                    match begins {
                        Begins::Cold => cold = shown,
                        Begins::Warm => pinned = shown,
                    }
                }
                let rate = 0.9 * pinned.steady();
                let recovered = cold.recovery(rate).unwrap_or(LONGEST).as_secs_f64();
                recovery_s = recovery_s.max(recovered);
                lost += cold.lost_packets;
                ratios.push(cold.steady() / pinned.steady());
                cold_runs.push((cold, pinned.steady(), recovered));
            }
            let ratio = median(ratios);
            worst = worst.min(ratio);
            progress(NAME, format_args!("{name}, {ring} buffers: {ratio:.3}"));
            let cell = describe(&cold_runs);
            report.figures.insert(format!("{name}_{ring}"), cell);
        }
        if worst.is_finite() {
            let figures = &mut report.figures;
            figures.insert(format!("{name}_recovery_s"), rounded(recovery_s).into());
            figures.insert(format!("{name}_lost_packets"), lost.into());
            let ratio = format!("{name}_steady_over_pinned");
            report.ratios.insert(ratio, worst.into());
        }
    }
    Ok(())
}

fn describe(runs: &[(Shown, f64, f64)]) -> serde_json::Value {
    let of = |figure: fn(&(Shown, f64, f64)) -> f64| rounded(median(runs.iter().map(figure)));
    json!({
        "pinned_per_s": of(|run| run.1),
        "steady_per_s": of(|run| run.0.steady()),
        "recovery_s": of(|run| run.2),
        "operations": runs.iter().map(|run| run.0.done.len().min(TIMED)).min(),
        "took_s": of(|run| run.0.took().as_secs_f64()),
        "lost_packets": runs.iter().map(|run| run.0.lost_packets).sum::<u64>(),
        "stored_packets": runs.iter().map(|run| run.0.stored_packets).sum::<u64>(),
    })
}

/// What of the server's ring is present when the time begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begins {
    /// All of it.
    Warm,
    /// Nothing.
    Cold,
}

/// One run with devices of its own.
fn one(
    on_fault: OnReceiveFault,
    ring: u16,
    begins: Begins,
    engine_cpu: usize,
) -> Result<Shown, String> {
    let rig = NetRig::start(engine_cpu, PAGE_TIME)?;
    let receive = ReceiveConfig {
        on_fault,
        prefault: Prefault::Off,
        ..ReceiveConfig::default()
    };
    let link = || LinkConfig::Pair {
        name: "cold-ring".into(),
    };
    let server = rig.add("server", link(), receive, ring)?;
    let client = rig.add("client", link(), ReceiveConfig::default(), 1024)?;
    let begun = Instant::now();
    let mut talk = Talk {
        server: Stack::new(server, Role::Server, 0)?,
        client: Stack::new(client, Role::Client, 0)?,
        begun,
        random: SplitMix64::new(90),
        unsent: Vec::new(),
        awaited: VecDeque::new(),
        unanswered: VecDeque::new(),
        request: Vec::new(),
    };
    let warm = talk.operate(WARM, Duration::ZERO)?;
    if warm.len() < WARM {
        return Err("the two stacks do not talk".into());
    }
    let before = rig.report(talk.server.interface())?;
    if begins == Begins::Cold {
        talk.server.interface().cool();
    }
    let done = talk.operate(TIMED, LEAST)?;
    let after = rig.report(talk.server.interface())?;
    let more = |count: fn(&DeviceReport) -> u64| count(&after) - count(&before);
    Ok(Shown {
        done,
        lost_packets: more(lost),
        stored_packets: more(stored),
    })
}

fn lost(report: &DeviceReport) -> u64 {
    match &report.backing {
        Backing::Nic(nic) => nic.fault_drops,
        Backing::Disk(_) => 0,
    }
}

fn stored(report: &DeviceReport) -> u64 {
    match &report.backing {
        Backing::Nic(nic) => nic.stored_packets,
        Backing::Disk(_) => 0,
    }
}

/// Client and server.
struct Talk {
    server: Stack,
    client: Stack,
    begun: Instant,
    random: SplitMix64,
    /// Bytes of the client's requests that are still to be sent.
    unsent: Vec<u8>,
    /// Bytes of each response that is awaited.
    awaited: VecDeque<usize>,
    /// The server's responses: bytes still to be sent of each.
    unanswered: VecDeque<usize>,
    /// What the server has of a request.
    request: Vec<u8>,
}

impl Talk {
    /// Does so many operations and goes on until `least` is over, or does as many as [`LONGEST`] allows; when each was
    /// done.
    fn operate(&mut self, count: usize, least: Duration) -> Result<Vec<Duration>, String> {
        let begun = Instant::now();
        let mut done = Vec::with_capacity(count);
        let mut asked = 0;
        loop {
            let now = begun.elapsed();
            let goes_on = |asked| asked < count || now < least;
            if now >= LONGEST || (!goes_on(asked) && self.awaited.is_empty()) {
                break;
            }
            while goes_on(asked) && self.awaited.len() < UNDER_WAY {
                self.ask();
                asked += 1;
            }
            let sent = self.client.send(&self.unsent);
            self.unsent.drain(..sent);
            let now_us = i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX);
            self.client.poll(now_us)?;
            self.server.poll(now_us)?;
            self.serve();
            for _ in 0..self.responses() {
                done.push(begun.elapsed());
            }
        }
        Ok(done)
    }

    fn ask(&mut self) {
        let (kind, bytes, response) = match self.random.below(10) {
            0 => (SET, REQUEST_BYTES + VALUE_BYTES, REQUEST_BYTES),
            _ => (GET, REQUEST_BYTES, VALUE_BYTES),
        };
        self.unsent.push(kind);
        self.unsent.resize(self.unsent.len() + bytes - 1, 0);
        self.awaited.push_back(response);
    }

    /// The server reads requests and answers them.
    fn serve(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            let came = self.server.take(&mut buffer);
            if came == 0 {
                break;
            }
            self.request.extend(&buffer[..came]);
        }
        let mut read = 0;
        while let Some(kind) = self.request.get(read) {
            let (bytes, response) = match *kind {
                SET => (REQUEST_BYTES + VALUE_BYTES, REQUEST_BYTES),
                _ => (REQUEST_BYTES, VALUE_BYTES),
            };
            if self.request.len() < read + bytes {
                break;
            }
            read += bytes;
            self.unanswered.push_back(response);
        }
        self.request.drain(..read);
        let value = [0; VALUE_BYTES];
        while let Some(left) = self.unanswered.front_mut() {
            let sent = self.server.send(&value[..*left]);
            *left -= sent;
            if *left > 0 {
                break;
            }
            self.unanswered.pop_front();
        }
    }

    /// Responses that the client has got whole since the last time.
    fn responses(&mut self) -> usize {
        let mut buffer = [0; 4096];
        let mut whole = 0;
        loop {
            let mut came = self.client.take(&mut buffer);
            if came == 0 {
                return whole;
            }
            while let Some(left) = self.awaited.front_mut() {
                let its = came.min(*left);
                *left -= its;
                came -= its;
                if *left > 0 {
                    break;
                }
                self.awaited.pop_front();
                whole += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_recovery_are_those_of_the_operations() {
        // None for a second, then a thousand a second.
        let done = (0..1000).map(|n| Duration::from_millis(1000 + n));
        let shown = Shown {
            done: done.collect(),
            ..Shown::default()
        };
        assert!((shown.steady() - 1002.0).abs() < 2.0, "{}", shown.steady());
        let recovered = shown.recovery(900.0).unwrap();
        assert_eq!(recovered, Duration::from_secs(1));
        assert_eq!(shown.recovery(2000.0), None);
    }

    #[test]
    fn cold_ring_loses_nothing_out_of_order_and_stacks_talk() {
        let cpus = SideCpus::choose();
        let shown = one(OnReceiveFault::OutOfOrder, 64, Begins::Cold, cpus.backend).unwrap();
        assert_eq!(shown.lost_packets, 0);
        assert!(shown.done.len() > 100, "{} operations", shown.done.len());
    }
}
