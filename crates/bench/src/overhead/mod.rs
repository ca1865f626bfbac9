// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench overhead`: what real programs in a stock guest lose by its being attached, while nothing is
//! evicted (Taiji 5.1, Fig. 11 and 12).
//!
//! The paper runs its programs on a DPU's operating system with its virtualization and memory elasticity
//! under it, and without. What corresponds to that here is a VM before and after the take-over: its VMM, its
//! guest and its devices are the same on both sides. So each load has a guest of its own, which is attached
//! and released in turns as in [`super::guest_cost`], by the same code:
//!
//! ```text
//!   one guest's life:  released │ attached  attached │ released  released │ attached …   no limit, no budget
//! ```
//! | load | what (`pagetide_guest::loads`) | the paper's |
//! |---|---|---|
//! | `cpu` | sysbench `cpu`, two threads | Linpack, FFTPI, Unibench |
//! | `memory` | sysbench `memory`, two threads that write 64 MiB each, again and again | Stream, MLC |
//! | `fio` | fio, 4 KiB at random past the page cache, 16 at a time | `fio_blk` |
//! | `redis` | redis-benchmark | Redis |
//!
//! fio's disk is served by the same daemon on both sides, from an image in memory. In the paper, too, the
//! storage stack stays as it is, and memory elasticity comes under it: attached, each DMA looks its pages up
//! and holds leases on them. What our disk costs beside another back end is `bench blk`'s to tell.
//!
//! A slice in which a page was evicted would show something else, so that is an error.

use super::{
    busy::stock::{self, Load, StockGuest},
    daemon::directory_in,
    guest_cost::cell::{self, Cell, Kind, Pair, Plan, SETTLE, Summary, Work},
    harness::{
        figures::thousandths,
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    memory::ram_key,
    options::SizeOptions,
};
use serde_json::{Value, json};

const NAME: &str = "overhead";
/// Default number of alternations of each load.
const PAIRS: u64 = 20;
/// Default length of a slice in seconds.
const SLICE_SECONDS: u64 = 5;
/// The loads by their names in the report.
const LOADS: [(&str, Load); 4] = [
    ("cpu", Load::SysbenchCpu),
    ("memory", Load::SysbenchMemory),
    ("fio", Load::Fio),
    ("redis", Load::Redis),
];
/// The largest losses that the paper reports: of all benchmarks of CPU and memory, of Stream, of fio's IOPS, of
/// nginx (redis is "within acceptable limits").
const PAPER_LOSSES: [(&str, f64); 4] = [
    ("paper_cpu_memory_loss", 0.03),
    ("paper_stream_loss", 0.026),
    ("paper_fio_iops_loss", 0.03),
    ("paper_nginx_loss", 0.03),
];

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let loads = LOADS.into_iter().filter(|(name, _)| options.includes(name));
    let loads: Vec<_> = loads.collect();
    guests_run(&loads).map_err(unable)?;
    let plan = Plan {
        ram_bytes: stock::RAM_BYTES,
        pairs: options.pairs.unwrap_or(PAIRS),
        slice: options.time(SLICE_SECONDS),
        settings: options.settings.clone(),
    };
    let mut measured = Vec::new();
    for (name, load) in loads {
        progress(NAME, name);
        let cell = Cell {
            kind: Kind::Stock,
            work: Work::Load(load),
        };
        let pairs = cell::measure(cell, &plan, &interrupted).map_err(failed)?;
        let evicted_pages: u64 = pairs.iter().map(|pair| pair.evicted_pages).sum();
        if evicted_pages > 0 {
            return Err(failed(format!(
                "{evicted_pages} pages were evicted under {name}, which has no limit: what was measured is not \
                 the cost of being attached alone"
            )));
        }
        measured.push((name, pairs));
    }
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("ram".into(), json!(ram_key(plan.ram_bytes)));
    figures.insert("slice_s".into(), plan.slice.as_secs_f64().into());
    figures.insert("settle_s".into(), SETTLE.as_secs_f64().into());
    describe(&measured, &mut report);
    Ok(report)
}

/// Fails with a message if no guest with the programs of `loads` runs here.
fn guests_run(loads: &[(&str, Load)]) -> Result<(), String> {
    if loads.is_empty() {
        let names = LOADS.map(|(name, _)| name).join(", ");
        return Err(format!("there is no such load: {names} are"));
    }
    let dir = directory_in(&std::env::temp_dir())?;
    let loads: Vec<Load> = loads.iter().map(|(_, load)| *load).collect();
    StockGuest::try_one(dir.path(), &loads)
}

fn describe(measured: &[(&str, Vec<Pair>)], report: &mut BenchReport) {
    let mut least = f64::INFINITY;
    for (name, pairs) in measured {
        let summary = Summary::of(pairs);
        least = least.min(summary.median);
        report
            .ratios
            .insert((*name).into(), thousandths(summary.median));
        report.figures.insert((*name).into(), summary.figures);
    }
    let least = if least.is_finite() {
        thousandths(least)
    } else {
        Value::Null
    };
    report.ratios.insert("min".into(), least);
    for (name, loss) in PAPER_LOSSES {
        report.peers.insert(name.into(), loss.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::busy::guest::Counted;

    fn pair(attached: u64) -> Pair {
        let counted = |operations| Counted {
            operations,
            ns: 1_000_000_000,
            ..Counted::default()
        };
        Pair {
            released: counted(1_000_000),
            attached: counted(attached),
            ..Pair::default()
        }
    }

    #[test]
    fn ratio_of_a_load_is_the_median_of_its_pairs_and_the_least_is_told() {
        let measured = [
            ("cpu", vec![pair(990_000), pair(980_000), pair(500_000)]),
            ("redis", vec![pair(970_000), pair(976_000)]),
        ];
        let mut report = BenchReport::new(NAME);
        describe(&measured, &mut report);
        assert_eq!(report.ratios["cpu"], json!(0.98));
        assert_eq!(report.ratios["redis"], json!(0.973));
        assert_eq!(report.ratios["min"], json!(0.973));
        assert!(!report.ratios.contains_key("fio"));
        assert_eq!(report.figures["cpu"]["pairs"], json!(3));
        assert_eq!(
            report.figures["redis"]["free_ops_per_s"],
            json!(1_000_000.0)
        );
    }

    #[test]
    fn load_that_there_is_not_is_told_with_those_that_there_are() {
        let error = guests_run(&[]).unwrap_err();
        assert!(error.contains("cpu, memory, fio, redis"), "{error}");
    }
}
