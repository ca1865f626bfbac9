// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench nic-impact`: what receive faults do to network programs in a stock guest (VPRI 3.2, Fig 4).
//!
//! ```text
//!   clients on Linux: 8 connections to redis or memcached, or iperf3 by UDP
//!        │ TAP
//!   our device ── 0, 1, 2 or 10 faults a second are injected, each held for 5 ms
//!        │
//!   stock guest: redis, memcached, iperf3
//! ```
//! The policies *drop* (the paper's device) and *out of order* take turns, by a device that replaces the other on the
//! same socket. A round has for each policy and load a slice without faults and one with each rate, in turns; a ratio is
//! the median over the rounds of a slice over the one without faults.
//!
//! The paper's loss comes of TCP's reaction to a lost packet, a time-out of 200 ms: here the sender is Linux, too, so
//! *drop* shows it. UDP does not react.

use super::{
    SizeOptions,
    guest_net::{Interface, NetGuest, NetGuestOptions, Pings, Receives, in_own_network, iperf3},
    harness::{
        figures::{at_permille, median, median_ratio, rounded, to_f64},
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, progress, rounds},
    },
    key_value::{Clients, Speaks, Until, WorkingSet, rate},
};
use serde_json::{Value, json};
use std::{fmt, time::Duration};

const NAME: &str = "nic-impact";
const ROUNDS: usize = 3;
const SLICE_S: u64 = 10;
const HOLD: Duration = Duration::from_millis(5);
const RAM_MIB: u64 = 512;
const RING: u16 = 1024;
const CONNECTIONS: u64 = 8;
/// Of UDP, which an emulated guest receives without loss of its own.
const UDP_RATE: &str = "40M";

/// Names in the report, and the daemon's.
const POLICIES: [(&str, &str); 2] = [("drop", "drop"), ("out_of_order", "out-of-order")];
/// Faults a second.
const RATES: [u32; 3] = [1, 2, 10];

/// A program of the guest, and its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Load {
    Redis,
    Memcached,
    Udp,
}

const LOADS: [Load; 3] = [Load::Redis, Load::Memcached, Load::Udp];

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redis => "redis",
            Self::Memcached => "memcached",
            Self::Udp => "udp",
        })
    }
}

impl Load {
    const fn server(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memcached => "memcached",
            Self::Udp => "iperf3",
        }
    }

    const fn speaks(self) -> Option<Speaks> {
        match self {
            Self::Redis => Some(Speaks::Redis),
            Self::Memcached => Some(Speaks::Memcached),
            Self::Udp => None,
        }
    }
}

/// One slice.
#[derive(Clone, Copy, Debug)]
struct Slice {
    /// Operations a second, or Mbit/s received.
    rate: f64,
    p99_ms: f64,
    lost_packets: u64,
    injected: u64,
}

/// Slices of a policy and a load, by rate of faults, none first.
struct Row {
    policy: (&'static str, &'static str),
    load: Load,
    slices: Vec<Vec<Slice>>,
}

impl Row {
    fn name(&self) -> String {
        format!("{}_{}", self.policy.0, self.load)
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let mut rows = Vec::new();
    for policy in POLICIES {
        for load in LOADS {
            let row = Row {
                policy,
                load,
                slices: vec![Vec::new(); RATES.len() + 1],
            };
            if sizes.includes(&row.name()) {
                rows.push(row);
            }
        }
    }
    in_own_network(1, || measure(sizes, &mut rows))?;
    let mut report = BenchReport::new(NAME);
    describe(&mut report, &rows);
    Ok(report)
}

fn measure(sizes: &SizeOptions, rows: &mut [Row]) -> Result<(), BenchError> {
    let loads: Vec<Load> = LOADS
        .into_iter()
        .filter(|load| rows.iter().any(|row| row.load == *load))
        .collect();
    let servers: Vec<&str> = loads.iter().map(|load| load.server()).collect();
    let guest = NetGuest::start(&NetGuestOptions {
        ram_mib: RAM_MIB,
        ring: RING,
        servers: &servers,
        pings: Pings::None,
        interface: Interface::Ours(receives(POLICIES[0].1)),
    })?;
    guest.attach().map_err(failed)?;
    let slice = sizes.time(SLICE_S);
    for round in rounds(NAME, sizes.pairs(ROUNDS), WarmUp::None) {
        for policy in round.turns(POLICIES) {
            if !rows.iter().any(|row| row.policy == policy) {
                continue;
            }
            guest.replace_device(receives(policy.1)).map_err(failed)?;
            let of_policy: Vec<_> = rows.iter_mut().filter(|row| row.policy == policy).collect();
            for row in of_policy {
                progress(NAME, row.name());
                let mut client = Client::new(&guest, row.load).map_err(failed)?;
                for at in round.rotated(RATES.len() + 1) {
                    let rate = at.checked_sub(1).map(|at| RATES[at]);
                    let shown = client.slice(&guest, rate, slice).map_err(failed)?;
                    row.slices[at].push(shown);
                }
            }
        }
    }
    guest.daemon().detach().map_err(failed)?;
    Ok(())
}

const fn receives(on_fault: &'static str) -> Receives {
    Receives {
        on_fault,
        wire: "none",
    }
}

enum Client {
    KeyValue(Clients),
    Udp,
}

impl Client {
    fn new(guest: &NetGuest, load: Load) -> Result<Self, String> {
        match load.speaks() {
            Some(speaks) => {
                let address = guest.listening(speaks.port())?;
                Clients::connect(speaks, address, CONNECTIONS, WorkingSet::SMALL)
                    .map(Self::KeyValue)
            }
            None => {
                // Its first answer is to a connection that says nothing.
                let mut tries = 0;
                while let Err(error) = iperf3(&["-t", "1"]) {
                    tries += 1;
                    if tries == 20 {
                        return Err(error);
                    }
                    std::thread::sleep(Duration::from_millis(500));
                }
                Ok(Self::Udp)
            }
        }
    }

    fn slice(
        &mut self,
        guest: &NetGuest,
        faults: Option<u32>,
        time: Duration,
    ) -> Result<Slice, String> {
        let lost = guest.count("fault_dropped_packets")?;
        let (mut slice, injected) = match faults {
            None => (self.run(time)?, 0),
            Some(rate) => {
                let ran = guest.with_faults((f64::from(rate), HOLD), time, || self.run(time));
                let (slice, report) = ran?;
                (slice, report.injected_iopfs)
            }
        };
        slice.lost_packets = guest.count("fault_dropped_packets")? - lost;
        slice.injected = injected;
        Ok(slice)
    }

    fn run(&mut self, time: Duration) -> Result<Slice, String> {
        let (rate, p99_ms) = match self {
            Self::KeyValue(clients) => {
                let done = clients.run(Until::Time(time))?;
                let mut took: Vec<Duration> = done.iter().map(|one| one.took).collect();
                took.sort_unstable();
                let p99 = at_permille(&took, 990).unwrap_or_default();
                (rate(&done, time), p99.as_secs_f64() * 1e3)
            }
            Self::Udp => {
                let seconds = time.as_secs().max(1).to_string();
                let told = iperf3(&["-u", "-b", UDP_RATE, "-l", "1200", "-t", &seconds])?;
                (received_mbit_per_s(&told)?, 0.0)
            }
        };
        match rate > 0.0 {
            true => Ok(Slice {
                rate,
                p99_ms,
                lost_packets: 0,
                injected: 0,
            }),
            false => Err("nothing was done in a slice".into()),
        }
    }
}

/// What iperf3's server has received of UDP.
fn received_mbit_per_s(told: &Value) -> Result<f64, String> {
    let of = |name: &str| told["end"]["sum"][name].as_f64();
    match (of("bits_per_second"), of("lost_percent")) {
        (Some(sent), Some(lost)) => Ok(sent * (1.0 - lost / 100.0) / 1e6),
        _ => Err("iperf3 does not tell what was received".into()),
    }
}

fn describe(report: &mut BenchReport, rows: &[Row]) {
    for row in rows {
        let Some((quiet, with_faults)) = row.slices.split_first() else {
            continue;
        };
        let mut cell = json!({"quiet": figures(row.load, quiet)});
        for (rate, slices) in RATES.iter().zip(with_faults) {
            cell[format!("{rate}_per_s")] = figures(row.load, slices);
            let ratio = rounded(median_ratio(slices, quiet, |slice| slice.rate));
            let name = format!("{}_{rate}_over_quiet", row.name());
            report.ratios.insert(name, ratio.into());
        }
        report.figures.insert(row.name(), cell);
    }
    let hold_ms = HOLD.as_millis().try_into().unwrap_or(0);
    report
        .figures
        .insert("hold_ms".into(), to_f64(hold_ms).into());
    report.peers.insert(
        "paper".into(),
        "Fig 4: redis and memcached lose 15 % at two faults a second, whatever they take; UDP loses as disks do".into(),
    );
}

fn figures(load: Load, slices: &[Slice]) -> Value {
    let of = |figure: fn(&Slice) -> f64| rounded(median(slices.iter().map(figure)));
    let mut cell = match load {
        Load::Udp => json!({"mbit_per_s": of(|slice| slice.rate)}),
        Load::Redis | Load::Memcached => json!({
            "per_s": of(|slice| slice.rate),
            "p99_ms": of(|slice| slice.p99_ms),
        }),
    };
    cell["lost_packets"] = slices
        .iter()
        .map(|slice| slice.lost_packets)
        .sum::<u64>()
        .into();
    cell["injected"] = slices
        .iter()
        .map(|slice| slice.injected)
        .sum::<u64>()
        .into();
    cell
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_compared_with_the_quiet_one_of_their_round() {
        let slice = |rate| Slice {
            rate,
            p99_ms: 1.0,
            lost_packets: 1,
            injected: 2,
        };
        let rows = [Row {
            policy: POLICIES[1],
            load: Load::Redis,
            slices: vec![
                vec![slice(100.0), slice(200.0)],
                vec![slice(90.0), slice(180.0)],
                vec![slice(98.0), slice(196.0)],
                vec![slice(50.0), slice(100.0)],
            ],
        }];
        let mut report = BenchReport::new(NAME);
        describe(&mut report, &rows);
        assert_eq!(
            report.ratios["out_of_order_redis_2_over_quiet"],
            json!(0.98)
        );
        let cell = &report.figures["out_of_order_redis"];
        assert_eq!(cell["10_per_s"]["injected"], json!(4));
    }

    #[test]
    fn received_rate_is_what_was_sent_without_what_was_lost() {
        let told = json!({"end": {"sum": {"bits_per_second": 4e7, "lost_percent": 25.0}}});
        let rate = received_mbit_per_s(&told).unwrap();
        assert!((rate - 30.0).abs() < 1e-9);
        received_mbit_per_s(&json!({"end": {}})).unwrap_err();
    }
}
