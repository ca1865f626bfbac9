// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench overcommit`: VMs that together demand half again as much memory as there is.
//!
//! # Four VMs under one budget
//! Four dense stand-ins ([`guest`]) serve requests without a pause, one vCPU each. A request touches pages of
//! its VM's working set and checks them. What a VM does not use for ten minutes is 50 to 85 % of its RAM, 70 %
//! on average, as in Taiji's Fig. 3a; the content is that of its fleet (Fig. 15c). All of the RAM is filled,
//! and the budget is two thirds of it.
//!
//! | arm | memory |
//! |---|---|
//! | `all_memory` | all of it; no daemon has the VMs |
//! | `pagetide` | `pagetide host budget`, which counts pools too |
//! | `zram` | a memory cgroup of the same size with kernel swap on zram, whose memory counts too ([`peer`]) |
//!
//! The same VMs go through all arms in each round, in turns; each slice begins when the budget is kept and the
//! VMs have come to rest.
//!
//! # Two VMs whose working sets change
//! [`split`]: one budget, against a static split of the same memory into equal limits.
//!
//! # Figures
//! | | |
//! |---|---|
//! | `throughput_over_all_memory`, `throughput_over_zram` | requests a second |
//! | `p99_over_all_memory`, `p99_over_zram` | of the time of a request |
//! | `hits_over_split` | touches that needed no fault, from the change of the sets on |
//! | `move_mib_s` | what the growing VM got, over the time until nine tenths of it were there |
//!
//! All ratios are medians over the rounds; with `_low95` (`_high95` where less is better) the bound of the
//! mean ([`PairedRatios::bounds`]).

mod arms;
mod group;
pub(crate) mod guest;
mod host;
mod peer;
mod process;
mod split;
mod working_set;

use super::{
    harness::{
        figures::{median, thousandths},
        ratios::PairedRatios,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{WarmUp, progress, rounds},
    },
    interrupt::Interrupted,
    memory::{fitting, ram_key},
    options::SizeOptions,
};
use arms::Arm;
use pagetide_addr::{SECTION_BYTES, to_usize};
use serde_json::{Map, Value, json};
use std::time::Duration;

const NAME: &str = "overcommit";
/// Default RAM of each VM.
const RAM_BYTES: u64 = 512 << 20;
const VMS: u64 = 4;
/// Default number of rounds.
const ROUNDS: u64 = 4;
/// Default length of a slice in seconds.
const SLICE_SECONDS: u64 = 8;

/// Fewer rounds have two VMs whose sets change, each with two changes,
const ROUNDS_A_CHANGE: usize = 4;
/// and longer slices: the sets must be seen to have changed, and the memory must move.
const SLICES_A_CHANGE: u32 = 3;

/// The slices of each arm, by round.
#[derive(Default)]
struct Measured {
    all_memory: Vec<arms::Slice>,
    pagetide: Vec<arms::Slice>,
    zram: Vec<arms::Slice>,
    split: Vec<split::Slice>,
    shared: Vec<split::Slice>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let (all_bytes, smaller) = fitting(VMS * options.ram_bytes(RAM_BYTES)).map_err(unable)?;
    let ram_bytes = all_bytes / VMS / SECTION_BYTES * SECTION_BYTES;
    let plan = Plan {
        ram_bytes,
        rounds: to_usize(options.pairs.unwrap_or(ROUNDS)),
        slice: options.time(SLICE_SECONDS),
        options,
    };
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("ram".into(), json!(ram_key(ram_bytes)));
    figures.insert("smaller".into(), json!(smaller));
    figures.insert("slice_s".into(), plan.slice.as_secs_f64().into());
    let mut measured = Measured::default();
    if options.includes("four-vms") {
        plan.four_vms(&interrupted, &mut measured, &mut report)?;
    }
    if options.includes("two-vms") {
        plan.two_vms(&interrupted, &mut measured, &mut report)?;
    }
    measured.describe(&mut report);
    Ok(report)
}

struct Plan<'a> {
    ram_bytes: u64,
    rounds: usize,
    slice: Duration,
    options: &'a SizeOptions,
}

impl Plan<'_> {
    fn four_vms(
        &self,
        interrupted: &Interrupted,
        measured: &mut Measured,
        report: &mut BenchReport,
    ) -> Result<(), BenchError> {
        progress(NAME, "filling the RAM of four VMs");
        let mut bench =
            arms::Bench::prepare(self.ram_bytes, self.slice, self.options).map_err(unable)?;
        for round in rounds(NAME, self.rounds, WarmUp::None) {
            for turn in round.rotated(Arm::ALL.len()) {
                interrupted.check().map_err(failed)?;
                let arm = Arm::ALL[turn];
                let Some(slice) = bench.slice(arm).map_err(failed)? else {
                    continue;
                };
                match arm {
                    Arm::AllMemory => measured.all_memory.push(slice),
                    Arm::Pagetide => measured.pagetide.push(slice),
                    Arm::Zram => measured.zram.push(slice),
                }
            }
        }
        let figures = &mut report.figures;
        figures.insert("demand_bytes".into(), bench.demand_bytes().into());
        figures.insert("budget_bytes".into(), bench.budget_bytes().into());
        if let Some(reason) = bench.no_peer() {
            report.peers.insert("zram".into(), json!(reason));
        }
        progress(NAME, "comparing every byte");
        bench.end().map_err(failed)
    }

    fn two_vms(
        &self,
        interrupted: &Interrupted,
        measured: &mut Measured,
        report: &mut BenchReport,
    ) -> Result<(), BenchError> {
        progress(NAME, "two VMs whose working sets change");
        let mut bench =
            split::Bench::prepare(self.ram_bytes, self.slice * SLICES_A_CHANGE, self.options)
                .map_err(unable)?;
        for round in rounds(NAME, self.rounds.div_ceil(ROUNDS_A_CHANGE), WarmUp::None) {
            for arm in round.turns(split::Arm::ALL) {
                interrupted.check().map_err(failed)?;
                let slices = bench.slices(arm).map_err(failed)?;
                match arm {
                    split::Arm::Split => measured.split.extend(slices),
                    split::Arm::Shared => measured.shared.extend(slices),
                }
            }
        }
        let budget = bench.budget_bytes();
        report.figures.insert("shared_budget_bytes".into(), budget.into());
        progress(NAME, "comparing every byte");
        bench.end().map_err(failed)
    }
}

impl Measured {
    fn describe(&self, report: &mut BenchReport) {
        let figures = &mut report.figures;
        figures.insert("all_memory".into(), figures_of(&self.all_memory));
        figures.insert("pagetide".into(), figures_of(&self.pagetide));
        figures.insert("split".into(), changes_of(&self.split));
        figures.insert("shared".into(), changes_of(&self.shared));
        let speeds = self.shared.iter().filter_map(|slice| slice.move_mib_s);
        figures.insert("move_mib_s".into(), thousandths(median(speeds)));
        let per_s = |slice: &arms::Slice| slice.requests.per_s;
        let p99 = |slice: &arms::Slice| slice.requests.times.us(990);
        let (ours, all) = (&self.pagetide, &self.all_memory);
        let ratios = &mut report.ratios;
        more_is_better(ratios, "throughput_over_all_memory", pairs(ours, all, per_s));
        less_is_better(ratios, "p99_over_all_memory", pairs(ours, all, p99));
        // A peer that was not measured in each round has no pairs.
        if self.zram.len() == ours.len() && !ours.is_empty() {
            let zram = &self.zram;
            report.peers.insert("zram".into(), figures_of(zram));
            more_is_better(ratios, "throughput_over_zram", pairs(ours, zram, per_s));
            less_is_better(ratios, "p99_over_zram", pairs(ours, zram, p99));
            more_is_better(ratios, "zram_throughput_over_all_memory", pairs(zram, all, per_s));
            less_is_better(ratios, "zram_p99_over_all_memory", pairs(zram, all, p99));
        }
        let hits = |slice: &split::Slice| slice.hits_per_s;
        more_is_better(ratios, "hits_over_split", pairs(&self.shared, &self.split, hits));
    }
}

/// The ratio of each round.
fn pairs<T>(ours: &[T], theirs: &[T], figure: impl Fn(&T) -> f64) -> Vec<f64> {
    let both = ours.iter().zip(theirs);
    both.map(|(ours, theirs)| figure(ours) / figure(theirs)).collect()
}

fn more_is_better(ratios: &mut Map<String, Value>, name: &str, pairs: Vec<f64>) {
    let bounds = PairedRatios::bounds(pairs.iter().copied());
    let low = bounds.map_or(Value::Null, |bounds| thousandths(bounds.low95));
    ratios.insert(name.into(), thousandths(median(pairs)));
    ratios.insert(format!("{name}_low95"), low);
}

fn less_is_better(ratios: &mut Map<String, Value>, name: &str, pairs: Vec<f64>) {
    let bounds = PairedRatios::bounds(pairs.iter().copied());
    let high = bounds.map_or(Value::Null, |bounds| thousandths(bounds.high95));
    ratios.insert(name.into(), thousandths(median(pairs)));
    ratios.insert(format!("{name}_high95"), high);
}

/// Medians of an arm.
fn figures_of(slices: &[arms::Slice]) -> Value {
    let of = |figure: &dyn Fn(&arms::Slice) -> f64| thousandths(median(slices.iter().map(figure)));
    let us = |permille| of(&|slice| slice.requests.times.us(permille));
    let mut figures = Map::new();
    figures.insert("requests_per_s".into(), of(&|slice| slice.requests.per_s));
    for (name, permille) in [("p50_us", 500), ("p99_us", 990), ("p999_us", 999)] {
        figures.insert(name.into(), us(permille));
    }
    figures.extend(medians(slices.iter().map(|slice| &slice.figures[..])));
    Value::Object(figures)
}

/// Medians of the changes of an arm.
fn changes_of(slices: &[split::Slice]) -> Value {
    let of = |figure: &dyn Fn(&split::Slice) -> f64| thousandths(median(slices.iter().map(figure)));
    let mut figures = Map::new();
    figures.insert("hits_per_s".into(), of(&|slice| slice.hits_per_s));
    figures.insert("hit_share".into(), of(&|slice| slice.hit_share));
    figures.extend(medians(slices.iter().map(|slice| &slice.figures[..])));
    Value::Object(figures)
}

/// Medians of figures by name: each slice has the same.
fn medians<'a>(
    slices: impl Iterator<Item = &'a [(&'static str, f64)]> + Clone,
) -> Vec<(String, Value)> {
    let names = slices.clone().next().unwrap_or_default().iter();
    let figures = names.enumerate().map(|(at, (name, _))| {
        let values = slices.clone().map(|figures| figures[at].1);
        ((*name).to_owned(), thousandths(median(values)))
    });
    figures.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use super::process::Requests;
    use crate::harness::latencies::Latencies;

    fn slice(per_s: f64, us: u64) -> arms::Slice {
        arms::Slice {
            requests: Requests {
                per_s,
                times: [us * 1000].into_iter().collect::<Latencies>(),
            },
            figures: vec![("resident_mib", per_s * 2.0)],
        }
    }

    fn change(hits_per_s: f64, move_mib_s: Option<f64>) -> split::Slice {
        split::Slice {
            hits_per_s,
            hit_share: 0.5,
            move_mib_s,
            figures: Vec::new(),
        }
    }

    fn measured() -> Measured {
        Measured {
            all_memory: vec![slice(100.0, 10), slice(200.0, 10), slice(100.0, 10)],
            pagetide: vec![slice(90.0, 11), slice(180.0, 12), slice(99.0, 13)],
            zram: vec![slice(100.0, 10), slice(90.0, 10), slice(90.0, 10)],
            split: vec![change(10.0, None), change(20.0, Some(5.0))],
            shared: vec![change(15.0, Some(80.0)), change(24.0, None)],
        }
    }

    #[test]
    fn ratios_are_medians_of_rounds() {
        let mut report = BenchReport::new(NAME);
        measured().describe(&mut report);
        let ratio = |name: &str| report.ratios[name].as_f64().unwrap();
        assert!((ratio("throughput_over_all_memory") - 0.9).abs() < 1e-9);
        assert!((ratio("p99_over_all_memory") - 1.2).abs() < 1e-9);
        assert!((ratio("throughput_over_zram") - 1.1).abs() < 1e-9);
        assert!((ratio("hits_over_split") - 1.5).abs() < 1e-9);
        assert!(ratio("throughput_over_all_memory_low95") < 0.9);
        assert!(ratio("p99_over_all_memory_high95") > 1.2);
        assert_eq!(report.figures["move_mib_s"], json!(80.0));
        assert_eq!(report.figures["pagetide"]["resident_mib"], json!(198.0));
        assert_eq!(report.peers["zram"]["p99_us"], json!(10.0));
    }

    #[test]
    fn peer_that_was_not_measured_leaves_its_reason_and_no_ratio() {
        let mut report = BenchReport::new(NAME);
        report.peers.insert("zram".into(), json!("this kernel has no zram"));
        let without = Measured {
            zram: vec![slice(1.0, 1)],
            ..measured()
        };
        without.describe(&mut report);
        assert!(report.peers["zram"].is_string());
        assert!(!report.ratios.contains_key("throughput_over_zram"));
    }
}
