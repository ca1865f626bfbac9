// SPDX-License-Identifier: Apache-2.0
//! Queued unmaps over waiting ones by number of CPUs, at the cost of an invalidation as published.
//!
//! ```text
//!   CPUs            flows that wait                          flows that queue
//!   fewer than      share the CPUs: each spins for its       the worker spins for one command of many
//!   flows           own command, and nothing else runs       unmaps; the flows have the rest
//!   as many, more   a CPU each: with an IOMMU that serves    one worker as before, and locks and lines
//!                   them all at once, throughput is that     that cross from CPU to CPU
//!                   of one flow times their number
//! ```
//! So with commands served at once the ratio falls as CPUs are added, because what it is divided by scales. Hardware
//! has one invalidation queue, which serves commands in order: there flows that wait do not scale either.
//! Both are reported, `at_once` and `one_queue`, for each number of CPUs, with the threads that ran on them.

use super::{
    DEFAULT_COST, FLOWS, GmemAsyncBenchOptions, NAME, flow::Way, iommu::Serving, rig::Rig,
};
use crate::harness::{
    figures::{median, thousandths},
    report::{BenchError, BenchReport, failed},
    rounds::{Round, WarmUp, progress, silent_rounds},
};
use pagetide_sys::cpu;
use serde_json::{Map, Value, json};

/// Numbers of CPUs, as far as there are so many.
const CPUS: [usize; 5] = [1, 2, 4, 8, 16];
/// Ways that commands are served, their names in the report, and what their ratios' names end with.
const SERVINGS: [(Serving, &str, &str); 2] = [
    (Serving::AtOnce, "at_once", ""),
    (Serving::InTurn, "one_queue", "_one_queue"),
];
/// What is compared: the name in the report, and threads beside the flows.
const SIDES: [(Way, &str, usize); 2] = [(Way::Sync, "sync", 0), (Way::Worker, "worker", 1)];

/// Unmaps a second of each side, one for each round.
type Rates = [Vec<f64>; SIDES.len()];

/// Adds the figures for each number of CPUs. This thread and those it starts are confined to them meanwhile.
pub(super) fn run(
    report: &mut BenchReport,
    options: &GmemAsyncBenchOptions,
) -> Result<(), BenchError> {
    let all = cpu::affinity().map_err(failed)?;
    let measured = measure(report, options, &all);
    cpu::set_affinity(&all).map_err(failed)?;
    measured
}

fn measure(
    report: &mut BenchReport,
    options: &GmemAsyncBenchOptions,
    all: &[usize],
) -> Result<(), BenchError> {
    let mut figures = Map::new();
    for count in CPUS.into_iter().filter(|count| *count <= all.len()) {
        progress(NAME, format_args!("on {count} of {} CPUs", all.len()));
        cpu::set_affinity(&all[..count]).map_err(failed)?;
        let mut of_count = Map::new();
        for (serving, name, suffix) in SERVINGS {
            let mut rates = FLOWS.map(|flows| (flows, Rates::default()));
            for round in silent_rounds(options.rounds, WarmUp::First) {
                for (flows, rates) in &mut rates {
                    one_round(*flows, serving, options, round, rates)?;
                }
            }
            let (of_serving, worst) = figures_of(&rates);
            of_count.insert(name.into(), of_serving);
            let ratio = format!("async_over_sync_throughput_{count}_cpus{suffix}");
            report.ratios.insert(ratio, thousandths(worst));
        }
        figures.insert(format!("cpus_{count}"), of_count.into());
    }
    report.figures.insert("by_cpus".into(), figures.into());
    Ok(())
}

fn one_round(
    flows: usize,
    serving: Serving,
    options: &GmemAsyncBenchOptions,
    round: Round,
    rates: &mut Rates,
) -> Result<(), BenchError> {
    let command_ns = super::COSTS
        .iter()
        .find(|(cost, _)| *cost == DEFAULT_COST)
        .map_or(0, |(_, ns)| *ns);
    for ((way, ..), rates) in SIDES.into_iter().zip(rates) {
        let rig = Rig::new(flows, command_ns, serving).map_err(failed)?;
        let measured = rig.measure(way, options.slice).map_err(failed)?;
        if round.counts {
            rates.push(measured.unmaps_per_second);
        }
    }
    Ok(())
}

/// Figures by number of flows, and the least ratio.
fn figures_of(rates: &[(usize, Rates)]) -> (Value, f64) {
    let mut figures = Map::new();
    let mut worst = f64::INFINITY;
    for (flows, rates) in rates {
        let [sync, worker] = rates.each_ref().map(|rates| median(rates.iter().copied()));
        let mut own = Map::new();
        for ((_, name, others), rate) in SIDES.into_iter().zip([sync, worker]) {
            own.insert(format!("{name}_unmaps_per_second"), json!(rate.round()));
            own.insert(format!("{name}_threads"), (flows + others).into());
        }
        let ratio = worker / sync;
        worst = worst.min(ratio);
        own.insert("ratio".into(), thousandths(ratio));
        figures.insert(format!("flows_{flows}"), own.into());
    }
    (figures.into(), worst)
}
