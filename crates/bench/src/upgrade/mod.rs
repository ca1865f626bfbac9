// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench upgrade`: live upgrades of a daemon in use, and attempts at them with programs that are broken
//! (Taiji 4.4).
//!
//! ```text
//!   upgrade:   evict the guests │ they fault │ `pagetide upgrade PATH` │ until each has gone on │ what they have seen
//!   broken:    the same with a program that fails: the old one must go on, and nothing may be lost
//! ```
//! | part | guests | upgrades |
//! |---|---|---|
//! | `stand-ins` | two dense stand-ins ([`super::busy`]) with a disk each | 100, then 20 broken ones |
//! | `network-guest` | a stock guest whose network interface the daemon serves, under iperf3 and pings ([`network`]) | 20 |
//! | `real-guests` | two stock guests under QEMU, one that verifies its memory (stress-ng) and one that verifies its disk (fio), and a stand-in with a disk that times the waits | 100 |
//!
//! Before each upgrade most memory is evicted and no limit holds, so vCPUs fault all the time, and what they wait for
//! is the hand-over alone: at a limit they wait for room now and then, without any upgrade.
//!
//! The *stall* is the longest that a vCPU has waited for a page, or a request of a disk has taken, from before the
//! upgrade until each guest has gone on after it, as the guests themselves see it. *Lost* is a broken upgrade after
//! which another process or none is the daemon, or a guest does not go on, or a request has failed, or a byte is
//! wrong.

pub mod broken;
mod guests;
mod network;
mod rig;
mod ways;

use self::{
    guests::{Seen, StandIn, Stock},
    network::Network,
    rig::{Place, Running},
    ways::Broken,
};
use super::{
    busy::stock::Load,
    guest_net::in_own_network,
    harness::{
        figures::to_f64,
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    memory::fitting,
    options::SizeOptions,
};
use serde_json::{Map, Value, json};

const NAME: &str = "upgrade";
/// Upgrades of each part.
const UPGRADES: u64 = 100;
/// RAM of a stand-in.
const RAM_BYTES: u64 = 256 << 20;
/// Stand-ins of the part without stock guests.
const STAND_INS: usize = 2;
/// Loads of the stock guests.
const LOADS: [Load; 2] = [Load::StressVm, Load::FioVerify];
/// Progress is told every so many upgrades.
const TOLD_EVERY: u64 = 10;

/// What came of the upgrades of a part.
#[derive(Default)]
struct Part {
    upgrades: u64,
    seen: Seen,
    stalls_us: Vec<f64>,
    pauses_us: Vec<f64>,
    /// Of broken programs, by name: what went wrong.
    broken: Vec<(&'static str, Result<Seen, String>)>,
    operations: u64,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    if !rustix::process::geteuid().is_root() {
        return Err(unable("take-over and upgrades need root"));
    }
    let (both_bytes, smaller) =
        fitting(STAND_INS as u64 * options.ram_bytes(RAM_BYTES)).map_err(unable)?;
    let plan = Plan {
        upgrades: options.upgrades.unwrap_or(UPGRADES),
        ram_bytes: both_bytes / STAND_INS as u64,
        interrupted,
    };
    let mut report = BenchReport::new(NAME);
    let mut all = Vec::new();
    if options.includes("stand-ins") {
        let part = plan.stand_ins().map_err(failed)?;
        report.figures.insert("stand_ins".into(), part.figures());
        all.push(part);
    }
    if options.includes("real-guests") {
        match plan.real_guests().map_err(failed)? {
            Ok(part) => {
                report.figures.insert("real_guests".into(), part.figures());
                all.push(part);
            }
            Err(reason) => {
                progress(NAME, &reason);
                report.figures.insert("real_guests".into(), json!(reason));
            }
        }
    }
    let network = match options.includes("network-guest") {
        true => plan.network_guest(options, &mut report)?,
        false => None,
    };
    report.figures.insert("smaller".into(), json!(smaller));
    sum_up(&all, network.as_ref(), &mut report.figures);
    Ok(report)
}

/// How much is done.
struct Plan {
    upgrades: u64,
    ram_bytes: u64,
    interrupted: Interrupted,
}

impl Plan {
    fn stand_ins(&self) -> Result<Part, String> {
        let place = Place::new()?;
        let running = Running::start(&place, STAND_INS as u64 * self.ram_bytes)?;
        let start = |number| StandIn::start(&place, &running, number, self.ram_bytes);
        let mut guests = (0..STAND_INS).map(start).collect::<Result<Vec<_>, _>>()?;
        let mut part = Part::default();
        self.upgrade(&place, &running, &mut guests, &[], &mut part)?;
        let ways = Broken::all();
        let count = usize::try_from(self.upgrades).unwrap_or(usize::MAX);
        for (number, way) in ways.into_iter().take(count).enumerate() {
            self.interrupted.check()?;
            progress(NAME, format_args!("broken {}: {}", number + 1, way.name()));
            let seen = lost_by(way, &place, &running, &mut guests)?;
            if let Err(reason) = &seen {
                progress(NAME, format_args!("lost by {}: {reason}", way.name()));
            }
            part.broken.push((way.name(), seen));
        }
        // Without a daemon, no guest would ever come to its end.
        running.pid()?;
        for guest in guests {
            part.seen = part.seen.and(guest.end(&running)?);
        }
        Ok(part)
    }

    /// The inner error is why there are no stock guests here.
    fn real_guests(&self) -> Result<Result<Part, String>, String> {
        let place = Place::new()?;
        let running = Running::start(&place, self.ram_bytes)?;
        progress(NAME, "two stock guests boot");
        let start = |load| Stock::start(&place, &running, load);
        let stocks = match LOADS.into_iter().map(start).collect::<Result<Vec<_>, _>>() {
            Ok(stocks) => stocks,
            Err(reason) => return Ok(Err(format!("no stock guests here: {reason}"))),
        };
        let mut meter = [StandIn::start(&place, &running, 0, self.ram_bytes)?];
        let mut part = Part::default();
        self.upgrade(&place, &running, &mut meter, &stocks, &mut part)?;
        for stock in stocks {
            part.operations += stock.end(&running)?;
        }
        part.seen.failed_requests += running.failed_requests()?;
        let [meter] = meter;
        part.seen = part.seen.and(meter.end(&running)?);
        Ok(Ok(part))
    }

    /// `None` if there is no such guest here; the report says why.
    fn network_guest(
        &self,
        options: &SizeOptions,
        report: &mut BenchReport,
    ) -> Result<Option<Network>, BenchError> {
        let upgrades = options.upgrades.unwrap_or(network::UPGRADES);
        progress(NAME, "a stock guest with a network interface boots");
        let ran = in_own_network(1, || network::run(upgrades, &self.interrupted));
        let (told, network) = match ran {
            Ok(network) => (network.figures(), Some(network)),
            Err(BenchError::Unable { reason }) => {
                progress(NAME, &reason);
                (json!(reason), None)
            }
            Err(error) => return Err(error),
        };
        report.figures.insert("network_guest".into(), told);
        Ok(network)
    }

    /// All upgrades, one after the other.
    fn upgrade(
        &self,
        place: &Place,
        running: &Running,
        guests: &mut [StandIn],
        stocks: &[Stock],
        part: &mut Part,
    ) -> Result<(), String> {
        for number in 1..=self.upgrades {
            self.interrupted.check()?;
            if number % TOLD_EVERY == 1 {
                progress(NAME, format_args!("upgrade {number} of {}", self.upgrades));
            }
            let before = running.pid()?;
            stocks.iter().try_for_each(|stock| stock.begin(running))?;
            guests
                .iter_mut()
                .try_for_each(|guest| guest.begin(running))?;
            let outcome = running.outcome(running.begin_upgrade(&place.program(number))?)?;
            let report = outcome.map_err(|told| running.with_log(told))?;
            let seen = what_they_see(guests)?;
            if report.pid == before {
                return Err(running.with_log("an upgrade that is done has changed nothing"));
            }
            part.upgrades += 1;
            part.stalls_us.push(seen.stall_us());
            part.pauses_us.extend(report.pause_us.map(to_f64));
            part.seen = part.seen.and(seen);
        }
        stocks.iter().try_for_each(Stock::check)
    }
}

/// What all have seen since they were asked last, once each has gone on.
fn what_they_see(guests: &mut [StandIn]) -> Result<Seen, String> {
    let mut all = Seen::default();
    for guest in guests.iter_mut() {
        all = all.and(guest.goes_on()?);
    }
    // Those that were asked first may have had something under way.
    for guest in guests {
        all = all.and(guest.seen()?);
    }
    Ok(all)
}

/// What the guests have seen of an upgrade to a broken program, or what was lost by it.
fn lost_by(
    way: Broken,
    place: &Place,
    running: &Running,
    guests: &mut [StandIn],
) -> Result<Result<Seen, String>, String> {
    guests
        .iter_mut()
        .try_for_each(|guest| guest.begin(running))?;
    let (before, outcome) = way.tried(place, running)?;
    if let Ok(report) = outcome {
        return Ok(Err(format!(
            "it has become the daemon: process {}",
            report.pid
        )));
    }
    let seen = match (running.pid(), what_they_see(guests)) {
        (Ok(pid), Ok(seen)) if pid == before => seen,
        (Ok(pid), Ok(_)) => return Ok(Err(format!("process {pid} is the daemon"))),
        (Err(reason), _) | (_, Err(reason)) => return Ok(Err(reason)),
    };
    Ok(match (seen.failed_requests, seen.wrong_bytes) {
        (0, 0) => Ok(seen),
        (failed, wrong) => Err(format!("{failed} requests failed, {wrong} bytes are wrong")),
    })
}

fn at(sorted: &[f64], permille: usize) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    sorted
        .get((last * permille).div_ceil(1000))
        .map(|us| us.round())
}

/// The middle and the largest of microseconds.
fn spread(us: &[f64]) -> Value {
    let mut sorted = us.to_vec();
    sorted.sort_by(f64::total_cmp);
    json!({"p50": at(&sorted, 500), "p90": at(&sorted, 900), "max": at(&sorted, 1000)})
}

impl Part {
    fn lost(&self) -> u64 {
        self.broken.iter().filter(|(_, seen)| seen.is_err()).count() as u64
    }

    fn figures(&self) -> Value {
        let mut broken = Map::new();
        for (name, seen) in &self.broken {
            let told = match seen {
                Ok(seen) => json!({"stall_us": seen.stall_us().round()}),
                Err(reason) => json!(reason),
            };
            broken.insert((*name).to_owned(), told);
        }
        json!({
            "upgrades": self.upgrades,
            "stall_us": spread(&self.stalls_us),
            "pause_us": spread(&self.pauses_us),
            "fault_max_us": to_f64(self.seen.fault_ns) / 1e3,
            "request_max_us": to_f64(self.seen.request_ns) / 1e3,
            "faults": self.seen.faults,
            "requests": self.seen.requests,
            "failed_requests": self.seen.failed_requests,
            "wrong_bytes": self.seen.wrong_bytes,
            "stock_operations": self.operations,
            "broken": broken,
        })
    }
}

fn sum_up(parts: &[Part], network: Option<&Network>, figures: &mut Map<String, Value>) {
    let sum = |of: fn(&Part) -> u64| parts.iter().map(of).sum::<u64>();
    let stalls = parts.iter().flat_map(|part| &part.stalls_us);
    let stall_max_us = stalls.copied().fold(0.0, f64::max).round();
    for (name, value) in [
        (
            "upgrades",
            json!(sum(|part| part.upgrades) + network.map_or(0, Network::upgrades)),
        ),
        ("stall_max_us", json!(stall_max_us)),
        (
            "failed_requests",
            json!(
                sum(|part| part.seen.failed_requests) + network.map_or(0, Network::failed_requests)
            ),
        ),
        ("lost_packets", json!(network.map(Network::lost_packets))),
        ("wrong_bytes", json!(sum(|part| part.seen.wrong_bytes))),
        (
            "broken_upgrades",
            json!(sum(|part| part.broken.len() as u64)),
        ),
        ("broken_lost", json!(sum(Part::lost))),
    ] {
        figures.insert(name.into(), value);
    }
    let broken = parts.iter().flat_map(|part| &part.broken);
    let after = broken.filter_map(|(_, seen)| seen.as_ref().ok().map(Seen::stall_us));
    let broken_max_us = after.fold(0.0, f64::max).round();
    figures.insert("broken_stall_max_us".into(), json!(broken_max_us));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_summed_up_and_what_is_lost_is_counted() {
        let seen = |fault_ns| Seen {
            fault_ns,
            ..Seen::default()
        };
        let part = Part {
            upgrades: 3,
            stalls_us: vec![5.0, 9.0],
            broken: vec![("one", Ok(seen(7000))), ("two", Err("gone".into()))],
            ..Part::default()
        };
        let mut figures = Map::new();
        sum_up(&[part, Part::default()], None, &mut figures);
        let of = |name: &str| figures[name].as_f64().unwrap();
        assert_eq!((of("upgrades"), of("stall_max_us")), (3.0, 9.0));
        assert_eq!((of("broken_upgrades"), of("broken_lost")), (2.0, 1.0));
        assert_eq!(of("broken_stall_max_us"), 7.0);
    }

    #[test]
    fn spread_of_nothing_is_nothing() {
        assert_eq!(spread(&[]), json!({"p50": null, "p90": null, "max": null}));
        assert_eq!(
            spread(&[3.0, 1.0]),
            json!({"p50": 3.0, "p90": 3.0, "max": 3.0})
        );
    }
}
