// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench fairness`: the effect of a hostile tenant on a steady one on the same engine.
//!
//! The steady tenant reads 4 KiB at a time, with [`STEADY_DEPTH`] requests in flight, and sleeps until it
//! is called: it uses all the throughput it can get. Beside it a hostile tenant floods the engine with one
//! [`Load`] at a time. Each has its own image in the page cache: only the engine is shared, and a disk's
//! own tail would hide the effect.
//!
//! ```text
//!   quiet    engine 1: steady                      the steady tenant alone
//!   beside   engine 1: steady and hostile          the case of interest
//!   apart    engine 1: hostile, engine 2: steady   the same CPUs, shared by the kernel's scheduler
//!   alone    engine 1: hostile                     the hostile tenant alone
//! ```
//! The engines run on one CPU and the clients on another, in all four. So *apart* is the alternative of a
//! separate engine for each tenant: there the steady tenant suffers only from the busy CPUs.
//!
//! The four take turns within a round, each first in turn; a ratio is the median over the rounds of the
//! ratio within a round. Ratios of times are better when small, those of rates when large.
//!
//! The steady client runs in the real-time class where that is allowed: it represents a guest with its own
//! CPU, and must not wait for the hostile client's thread.

mod load;
mod rig;
mod tenant;

use super::harness::{
    figures::{median, median_ratio, thousandths, to_f64},
    latencies::Latencies,
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, silent_rounds},
};
use load::Load;
use rig::{Rig, TenantCpus};
use serde_json::{Map, Value, json};
use std::time::Duration;
use tenant::{Client, STEADY_DEPTH};

const NAME: &str = "fairness";
/// How long a hostile load goes on before the steady tenant is measured.
const WARM_UP: Duration = Duration::from_millis(150);

/// The extent of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct FairnessOptions {
    /// Rounds of each load.
    pub rounds: usize,
    /// Length of each of the four slices of a round.
    pub slice: Duration,
}

impl Default for FairnessOptions {
    /// Some three minutes.
    fn default() -> Self {
        Self {
            rounds: 5,
            slice: Duration::from_millis(1200),
        }
    }
}

/// The tenants at work in a slice, and their engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Quiet,
    Beside,
    Apart,
    Alone,
}

const PLACES: [Place; 4] = [Place::Quiet, Place::Beside, Place::Apart, Place::Alone];

/// The result of a slice.
#[derive(Debug, Clone, Default)]
struct Slice {
    /// Of the steady tenant.
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// Of the hostile tenant, in its own unit.
    hostile_per_s: f64,
}

/// All slices of a load, by place.
#[derive(Debug, Default)]
struct Cell([Vec<Slice>; PLACES.len()]);

impl Cell {
    fn of(&self, place: Place) -> &[Slice] {
        let at = PLACES.iter().position(|other| *other == place);
        &self.0[at.unwrap_or(0)]
    }

    fn middle(&self, place: Place, figure: impl Fn(&Slice) -> f64) -> f64 {
        median(self.of(place).iter().map(figure))
    }

    /// Median over the rounds of a figure in one place over the same in another.
    fn ratio(&self, one: Place, other: Place, figure: impl Fn(&Slice) -> f64) -> f64 {
        median_ratio(self.of(one), self.of(other), figure)
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &FairnessOptions) -> Result<BenchReport, BenchError> {
    let cpus = pagetide_sys::cpu::affinity().map_err(failed)?;
    let placement = TenantCpus::choose(&cpus);
    progress(
        NAME,
        format_args!(
            "engines on CPU {}, clients on CPU {}",
            placement.engines, placement.clients
        ),
    );
    // All threads of both tenants inherit it: among themselves they are equal, but other work on the
    // machine yields to them.
    if let Err(error) = rustix::process::nice(-20) {
        progress(NAME, format_args!("its threads have no priority: {error}"));
    }
    // Threads that the engines' crate starts for front ends inherit it.
    pagetide_sys::cpu::set_affinity(&[placement.clients]).map_err(failed)?;
    let measured = measure(placement, options);
    pagetide_sys::cpu::set_affinity(&cpus).map_err(failed)?;
    let cells = measured?;
    let mut report = BenchReport::new(NAME);
    for (load, cell) in &cells {
        describe(&mut report, *load, cell);
    }
    for (name, value) in [
        ("engines_cpu", json!(placement.engines)),
        ("clients_cpu", json!(placement.clients)),
        ("steady_depth", json!(STEADY_DEPTH)),
        ("rounds", json!(options.rounds)),
        ("slice_s", json!(options.slice.as_secs_f64())),
    ] {
        report.figures.insert(name.into(), value);
    }
    Ok(report)
}

fn measure(
    placement: TenantCpus,
    options: &FairnessOptions,
) -> Result<Vec<(Load, Cell)>, BenchError> {
    let rig = Rig::start(placement).map_err(failed)?;
    let steady = [
        Client::steady(&rig, rig.steady_beside()).map_err(failed)?,
        Client::steady(&rig, rig.steady_apart()).map_err(failed)?,
    ];
    let mut cells = Vec::new();
    for load in Load::ALL {
        let hostile = Client::hostile(&rig, load).map_err(failed)?;
        let mut cell = Cell::default();
        for round in silent_rounds(options.rounds, WarmUp::First) {
            for at in round.rotated(PLACES.len()) {
                let slice = one_slice(PLACES[at], &steady, &hostile, options.slice)?;
                if round.counts {
                    cell.0[at].push(slice);
                }
            }
        }
        progress(NAME, line(load, &cell));
        cells.push((load, cell));
        drop(hostile);
    }
    Ok(cells)
}

fn one_slice(
    place: Place,
    steady: &[Client; 2],
    hostile: &Client,
    time: Duration,
) -> Result<Slice, BenchError> {
    let victim = match place {
        Place::Quiet | Place::Beside => Some(&steady[0]),
        Place::Apart => Some(&steady[1]),
        Place::Alone => None,
    };
    let floods = place != Place::Quiet;
    if floods {
        hostile.begin();
        std::thread::sleep(WARM_UP);
    }
    let before = hostile.done();
    let began = std::time::Instant::now();
    if let Some(victim) = victim {
        victim.begin();
    }
    std::thread::sleep(time);
    let done = hostile.done() - before;
    let took = began.elapsed().as_secs_f64();
    let latencies: Latencies = match victim {
        Some(victim) => victim.end().map_err(failed)?.into_iter().collect(),
        None => Latencies::default(),
    };
    if floods {
        hostile.end().map_err(failed)?;
    }
    let at = |permille| to_f64(latencies.ns(permille)) / 1e3;
    Ok(Slice {
        iops: to_f64(latencies.count() as u64) / took,
        p50_us: at(500),
        p99_us: at(990),
        p999_us: at(999),
        max_us: at(1000),
        hostile_per_s: to_f64(done) / took,
    })
}

fn line(load: Load, cell: &Cell) -> String {
    let p99 = |place| cell.middle(place, |s| s.p99_us);
    let iops = |place| cell.middle(place, |s| s.iops);
    let hostile = |place| cell.middle(place, |s| s.hostile_per_s);
    format!(
        "{}: p99 {:.0} us beside, {:.0} apart, {:.0} quiet; {:.0} IOPS beside, {:.0} apart, {:.0} quiet; hostile {:.0} {} beside, {:.0} apart, {:.0} alone",
        load.name(),
        p99(Place::Beside),
        p99(Place::Apart),
        p99(Place::Quiet),
        iops(Place::Beside),
        iops(Place::Apart),
        iops(Place::Quiet),
        hostile(Place::Beside),
        load.unit(),
        hostile(Place::Apart),
        hostile(Place::Alone),
    )
}

fn describe(report: &mut BenchReport, load: Load, cell: &Cell) {
    let name = load.name();
    for (place, word) in [
        (Place::Quiet, "quiet"),
        (Place::Beside, "beside"),
        (Place::Apart, "apart"),
    ] {
        let middle = |figure: fn(&Slice) -> f64| thousandths(cell.middle(place, figure));
        let figures = match place {
            Place::Apart => &mut report.peers,
            _ => &mut report.figures,
        };
        figures.insert(
            format!("{name}_{word}"),
            json!({
                "iops": middle(|s| s.iops),
                "p50_us": middle(|s| s.p50_us),
                "p99_us": middle(|s| s.p99_us),
                "p999_us": middle(|s| s.p999_us),
                "max_us": middle(|s| s.max_us),
            }),
        );
    }
    let mut hostile = Map::new();
    for (place, word) in [
        (Place::Beside, "beside"),
        (Place::Apart, "apart"),
        (Place::Alone, "alone"),
    ] {
        let rate = thousandths(cell.middle(place, |s| s.hostile_per_s));
        hostile.insert(format!("{word}_{}", load.unit()), rate);
    }
    let figures = &mut report.figures;
    figures.insert(format!("{name}_hostile"), Value::Object(hostile));
    let p99 = |s: &Slice| s.p99_us;
    for (ratio, value) in [
        (
            "p99_over_apart",
            cell.ratio(Place::Beside, Place::Apart, p99),
        ),
        (
            "p99_over_quiet",
            cell.ratio(Place::Beside, Place::Quiet, p99),
        ),
        (
            "iops_over_quiet",
            cell.ratio(Place::Beside, Place::Quiet, |s| s.iops),
        ),
        (
            "hostile_over_alone",
            cell.ratio(Place::Beside, Place::Alone, |s| s.hostile_per_s),
        ),
        (
            "hostile_over_apart",
            cell.ratio(Place::Beside, Place::Apart, |s| s.hostile_per_s),
        ),
    ] {
        let ratios = &mut report.ratios;
        ratios.insert(format!("{name}_{ratio}"), thousandths(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_the_median_of_those_within_rounds() {
        let slices = |p99s: [f64; 3]| {
            p99s.map(|p99_us| Slice {
                p99_us,
                ..Slice::default()
            })
            .to_vec()
        };
        let cell = Cell([
            slices([10.0, 100.0, 1000.0]),
            slices([20.0, 100.0, 3000.0]),
            Vec::new(),
            Vec::new(),
        ]);
        let ratio = cell.ratio(Place::Beside, Place::Quiet, |s| s.p99_us);
        assert!((ratio - 2.0).abs() < 1e-9);
    }

    #[test]
    fn every_load_is_measured_and_told() {
        let options = FairnessOptions {
            rounds: 1,
            // Long enough for some of the largest requests, also in unoptimized builds on a busy host.
            slice: Duration::from_millis(1000),
        };
        let report = run(&options).unwrap();
        for load in Load::ALL {
            for ratio in [
                "p99_over_apart",
                "iops_over_quiet",
                "hostile_over_alone",
                "hostile_over_apart",
            ] {
                let value = &report.ratios[&format!("{}_{ratio}", load.name())];
                let value = value.as_f64().unwrap_or(f64::NAN);
                assert!(value > 0.0, "{} {ratio}: {value}", load.name());
            }
        }
    }
}
