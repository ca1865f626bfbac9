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
//! # Four real guests
//! The same with stock guests ([`real`]), smaller, each with a service of its own. Their requests have nothing in
//! common, so the ratios of a round are geometric means over the guests (`guests_…`).
//!
//! # Two VMs whose working sets change
//! [`split`]: one budget, against a static split of the same memory into equal limits.
//!
//! # Figures
//! | | |
//! |---|---|
//! | `throughput_over_all_memory`, `throughput_over_zram` | requests a second |
//! | `guests_throughput_over_…`, `guests_p99_over_…` | the same of the real guests |
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
pub(crate) mod real;
mod split;
mod vms;
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
use arms::{Arm, Slice};
use pagetide_addr::{SECTION_BYTES, to_usize};
use real::RealGuests;
use serde_json::{Map, Value, json};
use std::time::Duration;
use vms::{Speed, Vms};

const NAME: &str = "overcommit";
/// Default RAM of each VM.
const RAM_BYTES: u64 = 512 << 20;
const VMS: u64 = 4;
/// Default number of rounds.
const ROUNDS: u64 = 4;
/// Default length of a slice in seconds.
const SLICE_SECONDS: u64 = 8;

/// Fewer rounds have the real guests: each of their slices is mostly preparation.
const ROUNDS_A_GUEST: usize = 2;
/// Fewer rounds have two VMs whose sets change, each with two changes,
const ROUNDS_A_CHANGE: usize = 4;
/// and longer slices: in the paper the sets stay the same for 50 s.
const SLICES_A_CHANGE: u32 = 6;

/// The slices of each arm, by round.
#[derive(Default)]
struct Arms {
    all_memory: Vec<Slice>,
    pagetide: Vec<Slice>,
    zram: Vec<Slice>,
}

#[derive(Default)]
struct Measured {
    stand_ins: Arms,
    guests: Arms,
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
    if options.includes("four-guests") {
        plan.four_guests(&interrupted, &mut measured, &mut report)?;
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
        let sections = arms::sections_of(self.ram_bytes).map_err(unable)?;
        let demand_bytes = VMS * self.ram_bytes;
        let bench = arms::Bench::prepare(demand_bytes, self.slice, self.options, |place| {
            arms::stand_ins(place, sections)
        });
        let bench = bench.map_err(unable)?;
        report
            .figures
            .insert("demand_bytes".into(), bench.demand_bytes().into());
        report
            .figures
            .insert("budget_bytes".into(), bench.budget_bytes().into());
        let (arms, no_peer) = self.rounds_of(bench, self.rounds, interrupted)?;
        if let Some(reason) = no_peer {
            report.peers.insert("zram".into(), json!(reason));
        }
        measured.stand_ins = arms;
        Ok(())
    }

    fn four_guests(
        &self,
        interrupted: &Interrupted,
        measured: &mut Measured,
        report: &mut BenchReport,
    ) -> Result<(), BenchError> {
        progress(NAME, "starting four guests");
        let demand_bytes = real::SERVICES.len() as u64 * real::RAM_BYTES;
        let bench = arms::Bench::prepare(demand_bytes, self.slice, self.options, RealGuests::start);
        let bench = match bench {
            Ok(bench) => bench,
            Err(reason) => {
                report.figures.insert("guests".into(), json!(reason));
                return Ok(());
            }
        };
        report
            .figures
            .insert("guests_demand_bytes".into(), bench.demand_bytes().into());
        report
            .figures
            .insert("guests_budget_bytes".into(), bench.budget_bytes().into());
        let rounds = self.rounds.div_ceil(ROUNDS_A_GUEST);
        let (arms, no_peer) = self.rounds_of(bench, rounds, interrupted)?;
        if let Some(reason) = no_peer {
            report.peers.insert("guests_zram".into(), json!(reason));
        }
        measured.guests = arms;
        Ok(())
    }

    /// All arms in turns; the slices of each, and why the peer was not measured.
    fn rounds_of<V: Vms>(
        &self,
        mut bench: arms::Bench<V>,
        rounds_wanted: usize,
        interrupted: &Interrupted,
    ) -> Result<(Arms, Option<String>), BenchError> {
        let mut arms = Arms::default();
        for round in rounds(NAME, rounds_wanted, WarmUp::None) {
            for turn in round.rotated(Arm::ALL.len()) {
                interrupted.check().map_err(failed)?;
                let arm = Arm::ALL[turn];
                if let Some(slice) = bench.slice(arm).map_err(failed)? {
                    arms.of(arm).push(slice);
                }
            }
        }
        let no_peer = bench.no_peer().map(str::to_owned);
        progress(NAME, "comparing every byte");
        bench.end().map_err(failed)?;
        Ok((arms, no_peer))
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
        report
            .figures
            .insert("shared_budget_bytes".into(), budget.into());
        progress(NAME, "comparing every byte");
        bench.end().map_err(failed)
    }
}

impl Arms {
    fn of(&mut self, arm: Arm) -> &mut Vec<Slice> {
        match arm {
            Arm::AllMemory => &mut self.all_memory,
            Arm::Pagetide => &mut self.pagetide,
            Arm::Zram => &mut self.zram,
        }
    }

    /// The peer's slices: one that was not measured in each round has no pairs.
    fn peer(&self) -> Option<&[Slice]> {
        let is_measured = self.zram.len() == self.pagetide.len() && !self.zram.is_empty();
        is_measured.then_some(&self.zram[..])
    }

    /// Ratios named after `prefix`, of what `compare` says of two slices.
    fn ratios(
        &self,
        prefix: &str,
        [throughput, p99]: [fn(&Slice, &Slice) -> f64; 2],
        ratios: &mut Map<String, Value>,
    ) {
        let (ours, all) = (&self.pagetide, &self.all_memory);
        let mut both = |names: [&str; 2], ours: &[Slice], theirs: &[Slice]| {
            let [throughput_name, p99_name] = names.map(|name| format!("{prefix}{name}"));
            more_is_better(ratios, &throughput_name, pairs(ours, theirs, throughput));
            less_is_better(ratios, &p99_name, pairs(ours, theirs, p99));
        };
        both(
            ["throughput_over_all_memory", "p99_over_all_memory"],
            ours,
            all,
        );
        if let Some(zram) = self.peer() {
            both(["throughput_over_zram", "p99_over_zram"], ours, zram);
            let names = [
                "zram_throughput_over_all_memory",
                "zram_p99_over_all_memory",
            ];
            both(names, zram, all);
        }
    }
}

impl Measured {
    fn describe(&self, report: &mut BenchReport) {
        let figures = &mut report.figures;
        if !self.stand_ins.pagetide.is_empty() {
            figures.insert("all_memory".into(), figures_of(&self.stand_ins.all_memory));
            figures.insert("pagetide".into(), figures_of(&self.stand_ins.pagetide));
            let throughput = |a: &Slice, b: &Slice| a.requests.per_s / b.requests.per_s;
            let p99 = |a: &Slice, b: &Slice| a.requests.times.us(990) / b.requests.times.us(990);
            self.stand_ins
                .ratios("", [throughput, p99], &mut report.ratios);
            if let Some(zram) = self.stand_ins.peer() {
                report.peers.insert("zram".into(), figures_of(zram));
            }
        }
        if !self.shared.is_empty() {
            figures.insert("split".into(), changes_of(&self.split));
            figures.insert("shared".into(), changes_of(&self.shared));
            let speeds = self.shared.iter().filter_map(|slice| slice.move_mib_s);
            figures.insert("move_mib_s".into(), thousandths(median(speeds)));
            let hits = |a: &split::Slice, b: &split::Slice| a.hits_per_s / b.hits_per_s;
            let hits = pairs(&self.shared, &self.split, hits);
            more_is_better(&mut report.ratios, "hits_over_split", hits);
        }
        if !self.guests.pagetide.is_empty() {
            let arms = [
                ("all_memory", &self.guests.all_memory[..]),
                ("pagetide", &self.guests.pagetide[..]),
                ("zram", self.guests.peer().unwrap_or_default()),
            ];
            let arms = arms.into_iter().filter(|(_, slices)| !slices.is_empty());
            let arms = arms.map(|(name, slices)| (name.to_owned(), guests_of(slices)));
            figures.insert("guests".into(), Value::Object(arms.collect()));
            let throughput = |a: &Slice, b: &Slice| mean_ratio(a, b, |vm| vm.per_s);
            let p99 = |a: &Slice, b: &Slice| mean_ratio(a, b, |vm| vm.p99_us);
            self.guests
                .ratios("guests_", [throughput, p99], &mut report.ratios);
        }
    }
}

/// Geometric mean over the VMs.
fn mean_ratio(a: &Slice, b: &Slice, figure: fn(&Speed) -> f64) -> f64 {
    let ratios = a.vms.iter().zip(&b.vms).map(|(a, b)| figure(a) / figure(b));
    let (sum, count) = ratios.fold((0.0, 0.0), |(sum, count), ratio| {
        (sum + ratio.ln(), count + 1.0)
    });
    f64::exp(sum / count)
}

/// The ratio of each round.
fn pairs<T>(ours: &[T], theirs: &[T], ratio: impl Fn(&T, &T) -> f64) -> Vec<f64> {
    let both = ours.iter().zip(theirs);
    both.map(|(ours, theirs)| ratio(ours, theirs)).collect()
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
fn figures_of(slices: &[Slice]) -> Value {
    let of = |figure: &dyn Fn(&Slice) -> f64| thousandths(median(slices.iter().map(figure)));
    let us = |permille| of(&|slice| slice.requests.times.us(permille));
    let mut figures = Map::new();
    figures.insert("requests_per_s".into(), of(&|slice| slice.requests.per_s));
    for (name, permille) in [("p50_us", 500), ("p99_us", 990), ("p999_us", 999)] {
        figures.insert(name.into(), us(permille));
    }
    figures.extend(medians(slices.iter().map(|slice| &slice.figures[..])));
    Value::Object(figures)
}

/// Medians of an arm of the real guests, by service.
fn guests_of(slices: &[Slice]) -> Value {
    let mut figures = Map::new();
    for (vm, service) in real::SERVICES.iter().enumerate() {
        let of = |figure: fn(&Speed) -> f64| {
            thousandths(median(slices.iter().map(|slice| figure(&slice.vms[vm]))))
        };
        let speed = json!({
            "requests_per_s": of(|vm| vm.per_s),
            "p99_us": of(|vm| vm.p99_us),
        });
        figures.insert((*service).into(), speed);
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
    use super::process::Requests;
    use super::*;
    use crate::harness::latencies::Latencies;

    fn slice(per_s: f64, us: u32) -> Slice {
        Slice {
            requests: Requests {
                per_s,
                times: [us * 1000].into_iter().collect::<Latencies>(),
            },
            vms: vec![
                Speed {
                    per_s,
                    p99_us: f64::from(us),
                };
                real::SERVICES.len()
            ],
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

    fn arms() -> Arms {
        Arms {
            all_memory: vec![slice(100.0, 10), slice(200.0, 10), slice(100.0, 10)],
            pagetide: vec![slice(90.0, 11), slice(180.0, 12), slice(99.0, 13)],
            zram: vec![slice(100.0, 10), slice(90.0, 10), slice(90.0, 10)],
        }
    }

    fn measured() -> Measured {
        Measured {
            stand_ins: arms(),
            guests: arms(),
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
        assert!((ratio("guests_throughput_over_zram") - 1.1).abs() < 1e-9);
        assert_eq!(
            report.figures["guests"]["pagetide"]["sqlite"]["p99_us"],
            json!(12.0)
        );
    }

    #[test]
    fn peer_that_was_not_measured_leaves_its_reason_and_no_ratio() {
        let mut report = BenchReport::new(NAME);
        report
            .peers
            .insert("zram".into(), json!("this kernel has no zram"));
        let without = Measured {
            stand_ins: Arms {
                zram: vec![slice(1.0, 1)],
                ..arms()
            },
            ..measured()
        };
        without.describe(&mut report);
        assert!(report.peers["zram"].is_string());
        assert!(!report.ratios.contains_key("throughput_over_zram"));
    }
}
