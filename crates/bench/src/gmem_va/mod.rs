// SPDX-License-Identifier: Apache-2.0
//! `bench gmem-va`: allocations and frees a second of the allocator of virtual addresses
//! (`pagetide_gmem::arena`), beside three peers.
//!
//! | peer | what it is |
//! |---|---|
//! | btreemap | free ranges in a `BTreeMap` by address and a `BTreeSet` by length, best fit, coalescing, one lock |
//! | vm_allocator | rust-vmm's crate of that name, first match, one lock |
//! | linux_like | Linux's IOVA allocator rebuilt: rb-tree, per-CPU magazines, depot ([`linux_like`]) |
//!
//! `vm_allocator` searches in O(n) and is meant for the few dozen regions of a VMM: with [`LIVE`] of them
//! its ratio shows only that. Its other policy, last match, is slower.
//!
//! **Load.** [`LIVE`] regions are live in total, divided among the threads. A step frees one drawn at
//! random and allocates one of a size drawn from [`load::MIXED`]; both count as an operation. Every
//! allocator gets the same space (2^48 bytes), the same seeds and the same harness, whose own work
//! (drawing, its table) is included in the measured time, so that ratios are a little nearer to 1 than
//! those of the allocators alone. Ours has its default setup. Its caches reach to 512 pages, Linux's to 32:
//! 5 and 60 of 1,000 allocations are past them.
//!
//! So sizes are also taken apart: `ratios.over_linux_like_up_to_32_pages` has only what Linux's magazines hold
//! ([`load::SMALL`]), where both do the same work and the ratio compares how they do it;
//! `ratios.over_linux_like_above_32_pages` only what they do not ([`load::LARGE`]), where it compares caching
//! with none.
//!
//! **The address space.** The allocator is a part. `address_space` is the whole of allocating and deallocating
//! a region by its address (`gm_as_alloc` returns an address): the region, where it is found, its state.
//! `ratios.address_space_over_btreemap` sets that, of one thread, beside the bare `btreemap`, which keeps no
//! regions; `address_space_2_over_1` and `address_space_8_over_1` are its own rates with more threads, null
//! where there are less than two CPUs a thread (2: less than two). Where threads cannot run in parallel,
//! `address_space_sleeps_per_million` counts how often they sleep, which is for a lock. `address_space_by_handle`
//! is the same by `Region` handles, each of which holds a reference to the space: threads meet there.
//!
//! **Order.** Each number of threads and each allocator has its own instance, filled once. All take turns
//! in slices, round after round, so that a slow moment of the machine falls on all; the first round is not
//! counted, and figures are medians. There are more threads than CPUs when `host.cpus` is below 8: then the
//! figures show the effect of preempted lock holders, not how much runs in parallel.
//!
//! **`million_over_thousand`** is the time of an operation with 10^6 regions live over that with 10^3, one
//! thread. Here victims and sizes are drawn before the clock starts, 64 steps at once: with a million
//! regions the harness's own table no longer fits the CPU's caches, which must not be measured.

mod linux_like;
mod load;
mod mutexed;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::harness::{
    figures::{median, thousandths},
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, rounds, silent_rounds},
};
use linux_like::LinuxLike;
use load::{Allocator, LARGE, Load, MIXED, Mix, SMALL, SPACE_PAGES};
use mutexed::{BestFit, VmAllocator};
use pagetide_addr::{PAGE_BYTES, Va};
use pagetide_gmem::arena::{Arena, ArenaSettings};
use pagetide_gmem::{AddressSpace, AllocPolicy, Caching, RegionRequest};
use pagetide_sys::cpu;

const NAME: &str = "gmem-va";
/// Live regions of the throughput part: 16 queues of 1,024 descriptors.
const LIVE: usize = 16 * 1024;
/// Numbers of threads.
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// Numbers of live regions that are compared with each other.
const FEW_AND_MANY: [usize; 2] = [1_000, 1_000_000];

/// How long to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GmemVaBenchOptions {
    /// Rounds that count.
    pub rounds: usize,
    /// Each measurement of a round.
    pub slice: Duration,
}

impl Default for GmemVaBenchOptions {
    /// Half a minute in all.
    fn default() -> Self {
        Self {
            rounds: 9,
            slice: Duration::from_millis(150),
        }
    }
}

/// Makes an empty allocator.
type Make = fn() -> Box<dyn Allocator>;

/// The allocators by name, ours first.
const KINDS: [(&str, Make); 6] = [
    ("ours", || Box::new(Ours::new())),
    (SPACE, || Box::new(Space::new())),
    (BY_HANDLE, || Box::new(ByHandle(Space::new()))),
    ("btreemap", || Box::new(BestFit::new())),
    ("vm_allocator", || Box::new(VmAllocator::new())),
    ("linux_like", || Box::new(LinuxLike::new())),
];

/// The address space around the allocator.
const SPACE: &str = "address_space";
/// The same by handles.
const BY_HANDLE: &str = "address_space_by_handle";

/// A space whose small regions are cached.
struct Space(Arc<AddressSpace>);

impl Space {
    fn new() -> Self {
        let policy = AllocPolicy {
            cache: Caching::Cached,
            ..AllocPolicy::default()
        };
        match AddressSpace::create(Va(0), Va(SPACE_PAGES * PAGE_BYTES), policy) {
            Ok(space) => Self(space),
            Err(error) => unreachable!("any range of whole pages will do: {error}"),
        }
    }
}

impl Allocator for Space {
    fn alloc(&self, pages: u64) -> Option<u64> {
        let request = RegionRequest::of_bytes(pages * PAGE_BYTES);
        self.0.alloc_va(&request).map(|start| start.0).ok()
    }

    fn free(&self, start: u64, _pages: u64) -> bool {
        self.0.dealloc_va(Va(start)).is_ok()
    }
}

/// A space by [`pagetide_gmem::Region`]s, which are looked up.
struct ByHandle(Space);

impl Allocator for ByHandle {
    fn alloc(&self, pages: u64) -> Option<u64> {
        let request = RegionRequest::of_bytes(pages * PAGE_BYTES);
        let region = self.0.0.alloc(&request);
        region.map(|region| region.start().0).ok()
    }

    fn free(&self, start: u64, _pages: u64) -> bool {
        let region = self.0.0.lookup(Va(start));
        region.and_then(|region| region.dealloc()).is_ok()
    }
}

/// Ours, with its default setup.
struct Ours(Arena);

impl Ours {
    fn new() -> Self {
        let arena = Arena::new(ArenaSettings::default());
        // A fresh arena takes any span of whole pages.
        if let Err(error) = arena.add(0, SPACE_PAGES * PAGE_BYTES - 1) {
            unreachable!("{error}");
        }
        Self(arena)
    }
}

impl Allocator for Ours {
    fn alloc(&self, pages: u64) -> Option<u64> {
        self.0.alloc(pages * PAGE_BYTES).ok()
    }

    fn free(&self, start: u64, pages: u64) -> bool {
        self.0.free(start, pages * PAGE_BYTES).is_ok()
    }
}

/// Operations a second of one allocator with one number of threads, a value for each round.
struct Rates {
    kind: &'static str,
    mix: Mix,
    threads: usize,
    load: Load,
    per_second: Vec<f64>,
}

impl Rates {
    fn new(
        kind: &'static str,
        allocator: Box<dyn Allocator>,
        mix: Mix,
        live: usize,
        threads: usize,
    ) -> Result<Self, BenchError> {
        Ok(Self {
            kind,
            mix,
            threads,
            load: Load::new(allocator, mix, live, threads).map_err(failed)?,
            per_second: Vec::new(),
        })
    }
}

/// Runs the bench.
pub fn run(options: &GmemVaBenchOptions) -> Result<BenchReport, BenchError> {
    progress(NAME, "filling");
    let mut all = Vec::new();
    for threads in THREADS {
        for (kind, make) in KINDS {
            all.push(Rates::new(kind, make(), MIXED, LIVE, threads)?);
            if kind == "ours" || kind == "linux_like" {
                all.push(Rates::new(kind, make(), SMALL, LIVE, threads)?);
                all.push(Rates::new(kind, make(), LARGE, LIVE, threads)?);
            }
        }
    }
    for round in rounds(NAME, options.rounds, WarmUp::First) {
        for rates in &mut all {
            let per_second = rates.load.run(options.slice).map_err(failed)?;
            if round.counts {
                rates.per_second.push(per_second);
            }
        }
    }
    progress(NAME, "a thousand and a million regions");
    let times = few_and_many(options)?;
    Ok(report(&all, times))
}

/// Nanoseconds of an operation with few and with many regions.
fn few_and_many(options: &GmemVaBenchOptions) -> Result<[f64; 2], BenchError> {
    let mut loads = Vec::new();
    for live in FEW_AND_MANY {
        let mut load = Load::new(Box::new(Ours::new()), MIXED, live, 1).map_err(failed)?;
        // Nearly every region has been freed and allocated before it counts.
        load.step_apart(4 * live).map_err(failed)?;
        loads.push((load, Vec::new()));
    }
    for _round in silent_rounds(options.rounds, WarmUp::None) {
        for (load, times) in &mut loads {
            times.push(load.operation_ns(options.slice).map_err(failed)?);
        }
    }
    let mut medians = loads.iter().map(|(_, times)| median(times.iter().copied()));
    Ok([
        medians.next().unwrap_or(f64::NAN),
        medians.next().unwrap_or(f64::NAN),
    ])
}

fn report(all: &[Rates], [few_ns, many_ns]: [f64; 2]) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    report_space(&mut report, all);
    let rates_of = |kind| by_threads(|threads| rate(all, kind, MIXED, threads).round().into());
    (report.figures).insert("operations_per_second".into(), rates_of("ours"));
    for (kind, _) in KINDS {
        if ["ours", SPACE, BY_HANDLE].contains(&kind) {
            continue;
        }
        let ratio = |mix, threads| rate(all, "ours", mix, threads) / rate(all, kind, mix, threads);
        let worst = |mix| {
            let worst = THREADS.map(|threads| ratio(mix, threads));
            thousandths(worst.into_iter().fold(f64::INFINITY, f64::min))
        };
        (report.ratios).insert(format!("over_{kind}"), worst(MIXED));
        let mut peer = json!({
            "operations_per_second": rates_of(kind),
            "ours_over_it": by_threads(|threads| thousandths(ratio(MIXED, threads))),
        });
        if kind == "linux_like" {
            for (name, mix) in [("up_to_32_pages", SMALL), ("above_32_pages", LARGE)] {
                (report.ratios).insert(format!("over_{kind}_{name}"), worst(mix));
                peer[format!("ours_over_it_{name}")] =
                    by_threads(|threads| thousandths(ratio(mix, threads)));
            }
        }
        report.peers.insert(kind.into(), peer);
    }
    let figures = &mut report.figures;
    figures.insert("live_regions".into(), LIVE.into());
    figures.insert("operation_ns_at_thousand_live".into(), thousandths(few_ns));
    figures.insert("operation_ns_at_million_live".into(), thousandths(many_ns));
    let ratio = thousandths(many_ns / few_ns);
    report.ratios.insert("million_over_thousand".into(), ratio);
    report
}

/// The address space beside the bare tree, and beside itself with fewer threads.
fn report_space(report: &mut BenchReport, all: &[Rates]) {
    let cpus = cpu::affinity().map_or(1, |cpus| cpus.len());
    let of = |kind, threads| rate(all, kind, MIXED, threads);
    let over_tree = |kind, threads| thousandths(of(kind, threads) / of("btreemap", threads));
    let ratios = &mut report.ratios;
    ratios.insert("address_space_over_btreemap".into(), over_tree(SPACE, 1));
    for (threads, cpus_min) in [(2, 2), (8, 16)] {
        let over_one = thousandths(of(SPACE, threads) / of(SPACE, 1));
        let told = if cpus < cpus_min {
            Value::Null
        } else {
            over_one
        };
        ratios.insert(format!("address_space_{threads}_over_1"), told);
    }
    let sleeps = |threads| {
        let found = find(all, SPACE, MIXED, threads);
        found.map_or(Value::Null, |rates| {
            thousandths(rates.load.sleeps_per_million())
        })
    };
    let figures = &mut report.figures;
    figures.insert("cpus".into(), cpus.into());
    for kind in [SPACE, BY_HANDLE] {
        let rates = by_threads(|threads| of(kind, threads).round().into());
        figures.insert(format!("{kind}_operations_per_second"), rates);
        let over = by_threads(|threads| over_tree(kind, threads));
        figures.insert(format!("{kind}_over_btreemap"), over);
    }
    figures.insert(
        "address_space_sleeps_per_million".into(),
        by_threads(sleeps),
    );
}

fn find<'a>(all: &'a [Rates], kind: &str, mix: Mix, threads: usize) -> Option<&'a Rates> {
    all.iter()
        .find(|rates| (rates.kind, rates.mix, rates.threads) == (kind, mix, threads))
}

/// Median of the rounds; NaN if this was not measured.
fn rate(all: &[Rates], kind: &str, mix: Mix, threads: usize) -> f64 {
    let found = find(all, kind, mix, threads);
    found.map_or(f64::NAN, |rates| median(rates.per_second.iter().copied()))
}

/// An object with a value for each number of threads.
fn by_threads(value: impl Fn(usize) -> Value) -> Value {
    let values = THREADS.map(|threads| (format!("threads_{threads}"), value(threads)));
    Map::from_iter(values).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ratio_is_there_after_a_short_run() {
        let options = GmemVaBenchOptions {
            rounds: 1,
            slice: Duration::from_millis(1),
        };
        let mut all = Vec::new();
        for (kind, make) in KINDS {
            for threads in THREADS {
                let mut rates = Rates::new(kind, make(), MIXED, 64, threads).unwrap();
                rates.per_second = vec![rates.load.run(options.slice).unwrap()];
                all.push(rates);
            }
        }
        let report = report(&all, [2.0, 3.0]);
        for ratio in ["over_btreemap", "over_vm_allocator", "over_linux_like"] {
            // NaN would be null; a slice this short gives no meaningful value.
            assert!(report.ratios[ratio].is_f64(), "{ratio}");
        }
        assert_eq!(report.ratios["million_over_thousand"], 1.5);
        assert!(report.ratios["address_space_over_btreemap"].is_f64());
        assert!(report.ratios.contains_key("address_space_8_over_1"));
        let sleeps = &report.figures["address_space_sleeps_per_million"];
        assert!(sleeps["threads_8"].is_f64());
    }

    #[test]
    fn every_allocator_keeps_what_it_gives_apart() {
        for (kind, make) in KINDS {
            let mut load = Load::new(make(), MIXED, 500, 3).unwrap();
            load.step_apart(5_000).unwrap();
            let mut regions = load.regions();
            regions.sort_unstable();
            assert_eq!(regions.len(), 500 / 3 * 3);
            for pair in regions.windows(2) {
                let (end, start) = (pair[0].0 + pair[0].1 * PAGE_BYTES, pair[1].0);
                assert!(end <= start, "{kind}: {pair:?}");
            }
        }
    }
}
