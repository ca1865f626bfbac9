// SPDX-License-Identifier: Apache-2.0
//! `bench gmem-async`: the gain of queued unmaps over unmaps that wait (GMEM 5.3).
//!
//! Flows ([`flow`]) map DMA buffers and unmap them, over and over, in one space with one simulated IOMMU
//! ([`iommu`]) whose invalidation commands have a set cost. A buffer is mapped again only after it was
//! unmapped, and every unmap is checked: when its completion is reported, the device must reach none of its
//! pages, by table or by IOTLB; else the bench fails.
//!
//! | way | an unmap | buffers under way |
//! |---|---|---|
//! | sync | waits for its own invalidation | 1 a flow |
//! | worker | is queued with a callback; a thread of the bench serves the queue | up to [`flow::BUFFERS`] a flow |
//! | caller | is queued with a callback; a flow without buffers processes the queue | the same |
//!
//! A *cycle* is a map and an unmap; throughput and CPU time are those of whole cycles, callbacks and checks
//! included, so the ratios are a little nearer to 1 than those of unmaps alone. CPU time is that of the
//! process (getrusage), the worker's included. Latency is from the call of unmap to its callback (sync: to
//! its return) under that load: with all buffers under way it includes the wait for them. `waiting_flow` is
//! the cost of a single unmap that is waited for at once, with nothing else under way: `unmap_later` and
//! `synchronize` against `unmap`, without a worker and with one that sleeps.
//!
//! All costs, numbers of flows and ways take turns in slices, round after round, so that a slow moment of
//! the machine falls on all; the first round is not counted, and figures are medians of the rounds.
//! `async_over_sync_throughput` is the worker's, the worst over the numbers of flows. With `host.cpus` of
//! 2, four flows and a worker share two CPUs: with sync flows both of them spin.
//!
//! So that ratio depends on the number of CPUs, and [`cpus`] has it for each that is at hand.

mod cpus;
mod flow;
mod iommu;
mod rig;

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::harness::{
    figures::{median, thousandths},
    latencies::Latencies,
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, rounds},
};
use flow::{BUFFERS, Broken, Way};
use iommu::{RANGE_NS, Serving};
use rig::{Measured, Rig, Worker};

const NAME: &str = "gmem-async";
/// Costs of an invalidation command, and their names in the report.
const COSTS: [(&str, u64); 6] = [
    ("0_5us", 500),
    ("1us", 1_000),
    ("2us", 2_000),
    ("5us", 5_000),
    (DEFAULT_COST, 10_100),
    ("20us", 20_000),
];
/// Mean time of `intel_iommu_tlb_sync` as published with F&S (SOSP'24).
const DEFAULT_COST: &str = "10_1us";
/// Numbers of flows.
const FLOWS: [usize; 3] = [1, 2, 4];
/// Ways to unmap, and their names in the report.
const WAYS: [(&str, Way); 3] = [
    ("sync", Way::Sync),
    ("worker", Way::Worker),
    ("caller", Way::Caller),
];
/// How a flow waits for its unmap, and its name in the report.
const WAITS: [(&str, Worker); 2] = [
    ("waiting_flow", Worker::None),
    ("waiting_flow_beside_worker", Worker::Serving),
];

/// How long to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GmemAsyncBenchOptions {
    /// Rounds that count.
    pub rounds: usize,
    /// Each measurement of a round.
    pub slice: Duration,
}

impl Default for GmemAsyncBenchOptions {
    fn default() -> Self {
        Self {
            rounds: 7,
            slice: Duration::from_millis(150),
        }
    }
}

/// One way at one cost with one number of flows; a value for each round.
struct Load {
    cost: &'static str,
    command_ns: u64,
    flows: usize,
    way: &'static str,
    how: Way,
    rounds: Vec<Measured>,
}

/// Waiting at one cost; latencies of `unmap`, and of `unmap_later` with `synchronize`.
struct Waiting {
    cost: &'static str,
    command_ns: u64,
    name: &'static str,
    worker: Worker,
    rounds: Vec<[Latencies; 2]>,
}

/// Runs the bench.
pub fn run(options: &GmemAsyncBenchOptions) -> Result<BenchReport, BenchError> {
    let (mut loads, mut waits) = (Vec::new(), Vec::new());
    for (cost, command_ns) in COSTS {
        for flows in FLOWS {
            loads.extend(WAYS.map(|(way, how)| Load {
                cost,
                command_ns,
                flows,
                way,
                how,
                rounds: Vec::new(),
            }));
        }
        waits.extend(WAITS.map(|(name, worker)| Waiting {
            cost,
            command_ns,
            name,
            worker,
            rounds: Vec::new(),
        }));
    }
    for round in rounds(NAME, options.rounds, WarmUp::First) {
        one_round(&mut loads, &mut waits, options.slice).map_err(failed)?;
        if !round.counts {
            loads.iter_mut().for_each(|load| load.rounds.clear());
            waits.iter_mut().for_each(|wait| wait.rounds.clear());
        }
    }
    let mut report = report(&loads, &waits);
    cpus::run(&mut report, options)?;
    Ok(report)
}

fn one_round(loads: &mut [Load], waits: &mut [Waiting], slice: Duration) -> Result<(), Broken> {
    for load in loads {
        let rig = Rig::new(load.flows, load.command_ns, Serving::AtOnce)?;
        load.rounds.push(rig.measure(load.how, slice)?);
    }
    for wait in waits {
        let rig = Rig::new(1, wait.command_ns, Serving::AtOnce)?;
        wait.rounds.push(rig.wait(wait.worker, slice)?);
    }
    Ok(())
}

fn report(loads: &[Load], waits: &[Waiting]) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let default_us = COSTS
        .iter()
        .find(|(cost, _)| *cost == DEFAULT_COST)
        .map_or(f64::NAN, |(_, ns)| *ns as f64 / 1e3);
    let figures = &mut report.figures;
    figures.insert("default_invalidation_us".into(), default_us.into());
    figures.insert("range_us".into(), (RANGE_NS as f64 / 1e3).into());
    figures.insert("buffers_a_flow".into(), BUFFERS.into());
    for (name, pick) in FIGURES {
        figures.insert(name.into(), by_cost(|cost| of_cost(loads, cost, pick)));
    }
    for (name, _) in WAITS {
        let of_cost = |cost: &str| {
            let found = waits.iter().find(|w| w.cost == cost && w.name == name);
            found.map_or(Value::Null, Waiting::latencies)
        };
        figures.insert(name.into(), by_cost(of_cost));
    }
    report.peers.insert("paper".into(), PAPER.into());
    report.ratios = ratios(loads, waits);
    report
}

/// The measurements of the paper's authors on their machine.
const PAPER: &str = "GMEM, table 3 (a real IOMMU and a 40 Gb/s network controller, 8 connections): queued \
    unmaps receive 23.7 Gb/s with 52 % CPU, unmaps that wait 13.7 Gb/s with 50 %; they send 37.7 Gb/s \
    with 36 % CPU, against 29.9 Gb/s with 58 %";

fn ratios(loads: &[Load], waits: &[Waiting]) -> Map<String, Value> {
    let mut ratios = Map::new();
    let over_sync = |cost: &str, way: &str, pick: Pick| {
        FLOWS.map(|flows| {
            let of = |way| figure(loads, cost, way, flows, pick);
            of(way) / of("sync")
        })
    };
    let least = |all: [f64; 3]| thousandths(all.into_iter().fold(f64::INFINITY, f64::min));
    let most = |all: [f64; 3]| thousandths(all.into_iter().fold(0.0, f64::max));
    for (name, way) in [("async", "worker"), ("caller", "caller")] {
        let throughput = |cost| least(over_sync(cost, way, |m| m.unmaps_per_second));
        let key = format!("{name}_over_sync_throughput");
        ratios.insert(key.clone(), throughput(DEFAULT_COST));
        for (cost, _) in COSTS {
            ratios.insert(format!("{key}_{cost}"), throughput(cost));
        }
        let cpu = most(over_sync(DEFAULT_COST, way, |m| m.cpu_us_per_unmap));
        ratios.insert(format!("cpu_per_unmap_{name}_over_sync"), cpu);
    }
    for wait in waits.iter().filter(|wait| wait.cost == DEFAULT_COST) {
        for percent in [50, 99] {
            let [unmap, later] = wait.us(percent * 10);
            ratios.insert(
                format!("{}_p{percent}", wait.name),
                thousandths(later / unmap),
            );
        }
    }
    ratios
}

/// A figure of a measurement.
type Pick = fn(&Measured) -> f64;

/// The figures of flows under load.
const FIGURES: [(&str, Pick); 5] = [
    ("unmaps_per_second", |m| m.unmaps_per_second.round()),
    ("cpu_per_unmap_us", |m| m.cpu_us_per_unmap),
    ("invalidations_per_unmap", |m| m.invalidations_per_unmap),
    ("latency_p50_us", |m| m.latency_p50_us),
    ("latency_p99_us", |m| m.latency_p99_us),
];

fn by_cost(of_cost: impl Fn(&str) -> Value) -> Value {
    let all = COSTS.map(|(cost, _)| (cost.to_owned(), of_cost(cost)));
    Map::from_iter(all).into()
}

fn of_cost(loads: &[Load], cost: &str, pick: Pick) -> Value {
    let of_way = |(way, _)| {
        let of_flows = FLOWS.map(|flows| {
            let value = figure(loads, cost, way, flows, pick);
            (format!("flows_{flows}"), thousandths(value))
        });
        (String::from(way), Value::from(Map::from_iter(of_flows)))
    };
    Map::from_iter(WAYS.map(of_way)).into()
}

/// The median over the rounds of a cost, a way and a number of flows.
fn figure(loads: &[Load], cost: &str, way: &str, flows: usize, pick: Pick) -> f64 {
    let load = loads
        .iter()
        .find(|load| load.cost == cost && load.way == way && load.flows == flows);
    load.map_or(f64::NAN, |load| median(load.rounds.iter().map(pick)))
}

impl Waiting {
    /// Of `unmap`, and of `unmap_later` with `synchronize`: the median of the rounds' percentiles.
    fn us(&self, permille: usize) -> [f64; 2] {
        [0, 1].map(|which: usize| {
            let rounds = self.rounds.iter();
            median(rounds.map(|both| both[which].us(permille)))
        })
    }

    fn latencies(&self) -> Value {
        let ([unmap_p50, later_p50], [unmap_p99, later_p99]) = (self.us(500), self.us(990));
        json!({
            "unmap_p50_us": thousandths(unmap_p50),
            "unmap_later_p50_us": thousandths(later_p50),
            "unmap_p99_us": thousandths(unmap_p99),
            "unmap_later_p99_us": thousandths(later_p99),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ratio_is_there_after_a_short_run() {
        // On a busy machine a flow may not run at all in a slice as short as the first.
        let reports = [10, 40, 160, 640].map(Duration::from_millis).into_iter();
        let report = reports
            .map(|slice| run(&GmemAsyncBenchOptions { rounds: 1, slice }).unwrap())
            .find(|report| invalidations(report, "sync", "flows_4").is_some())
            .unwrap();
        let costs = COSTS.map(|(cost, _)| format!("async_over_sync_throughput_{cost}"));
        let others = [
            "async_over_sync_throughput",
            "caller_over_sync_throughput",
            "cpu_per_unmap_async_over_sync",
            "waiting_flow_p50",
            "waiting_flow_p99",
            "waiting_flow_beside_worker_p50",
        ];
        for ratio in costs.iter().map(String::as_str).chain(others) {
            // Slices this short give no meaningful value.
            assert!(report.ratios.contains_key(ratio), "{ratio}");
        }
        let one = &report.figures["by_cpus"]["cpus_1"];
        assert_eq!(
            one["one_queue"]["flows_4"]["worker_threads"],
            Value::from(5)
        );
        assert!(
            report
                .ratios
                .contains_key("async_over_sync_throughput_1_cpus")
        );
        assert!(
            report
                .ratios
                .contains_key("async_over_sync_throughput_1_cpus_one_queue")
        );
        assert_eq!(invalidations(&report, "sync", "flows_4"), Some(1.0));
        let of_caller = invalidations(&report, "caller", "flows_1");
        assert!(of_caller.is_none_or(|per_unmap| per_unmap < 0.1));
    }

    fn invalidations(report: &BenchReport, way: &str, flows: &str) -> Option<f64> {
        report.figures["invalidations_per_unmap"][DEFAULT_COST][way][flows].as_f64()
    }
}
