// SPDX-License-Identifier: Apache-2.0
//! Look-ups hot and cold, beside dependent loads from an array of the same size.

use super::{PaBitmapBenchOptions, Random, Times, rig::Rig};
use crate::harness::{
    figures::{median, rounded, to_f64},
    report::BenchReport,
    rounds::{WarmUp, silent_rounds},
};
use pagetide_addr::{Access, FilePage, to_usize};
use pagetide_sys::clock;
use pagetide_vpri::{EnginePort, LookUp};
use serde_json::{Value, json};
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

/// log2 of the pages that are hot: their words are 16 KiB.
const HOT_LOG2: u32 = 16;
/// Pages of a word.
const PAGES_PER_WORD: u64 = 32;

/// What is looked up.
#[derive(Clone, Copy)]
enum Table {
    Bitmap,
    Array,
}

/// Measures look-ups, and adds them to `report`.
pub fn measure(rig: &Rig, options: &PaBitmapBenchOptions, report: &mut BenchReport) {
    let bitmap = rig.window.domain().attributes().bitmap();
    let array = Array::new(rig.pages_log2);
    let ours = |page| bitmap.attribute(FilePage(page)) as u64;
    let theirs = |page| array.load(page);
    let (steps, cold) = (options.look_ups, rig.pages_log2);
    let (mut hot_ns, mut cold_ns, mut dram_ns) = (Vec::new(), Vec::new(), Vec::new());
    let (mut ratios, mut overlapped_ns) = (Vec::new(), Vec::new());
    for round in silent_rounds(options.rounds, WarmUp::First) {
        let seed = round.seed() + 1;
        let (mut ours_ns, mut theirs_ns) = (f64::NAN, f64::NAN);
        for side in round.turns([Table::Bitmap, Table::Array]) {
            match side {
                Table::Bitmap => ours_ns = chain(seed, steps, cold, ours),
                Table::Array => theirs_ns = chain(seed, steps, cold, theirs),
            }
        }
        // The next page does not depend on the last look-up, so the processor can overlap them.
        let free_ns = chain(seed, steps, cold, |page| {
            black_box(ours(page));
            0
        });
        let warm_ns = chain(seed, steps, HOT_LOG2, ours);
        if round.counts || options.rounds == 0 {
            hot_ns.push(warm_ns);
            cold_ns.push(ours_ns);
            dram_ns.push(theirs_ns);
            ratios.push(ours_ns / theirs_ns);
            overlapped_ns.push(free_ns);
        }
    }
    let figures = &mut report.figures;
    let put = |mean, times: Times| with_mean(mean, &times);
    let hot = put(median(hot_ns), single(steps, HOT_LOG2, ours));
    figures.insert("lookup_hot_ns".into(), hot);
    let cold_times = put(median(cold_ns), single(steps, cold, ours));
    figures.insert("lookup_cold_ns".into(), cold_times);
    let overlapped = rounded(median(overlapped_ns));
    figures.insert("lookup_cold_overlapped_ns".into(), overlapped.into());
    figures.insert("space_bytes".into(), rig.window.domain().len_bytes().into());
    figures.insert("bitmap_bytes".into(), bitmap.bytes().into());
    for (name, log2) in [("lease_hot_ns", HOT_LOG2), ("lease_cold_ns", cold)] {
        let ns = leases(rig, steps, log2);
        figures.insert(name.into(), rounded(ns).into());
    }
    let dram = put(median(dram_ns), single(steps, cold, theirs));
    report.peers.insert("dram_ns".into(), dram);
    let over = rounded(median(ratios));
    report.ratios.insert("cold_over_dram".into(), over.into());
}

/// The peer: an array as large as the words of the bitmap, at a known address.
struct Array(Vec<u64>);

impl Array {
    fn new(pages_log2: u32) -> Self {
        let mut random = Random(2);
        let words = (0..(1 << pages_log2) / PAGES_PER_WORD).map(|_| random.next(0, 63));
        Self(words.collect())
    }

    #[inline]
    fn load(&self, page: u64) -> u64 {
        let word = self.0[to_usize(page / PAGES_PER_WORD)];
        word >> (2 * (page % PAGES_PER_WORD)) & 0b11
    }
}

/// Time of a look-up, in nanoseconds, where each determines the next page.
fn chain(seed: u64, steps: u32, pages_log2: u32, look: impl Fn(u64) -> u64) -> f64 {
    let mut random = Random(seed);
    let mut found = 0;
    let began = Instant::now();
    for _ in 0..steps {
        found = look(random.next(found, pages_log2));
    }
    let time = began.elapsed();
    black_box(found);
    per_step(time, steps)
}

/// Times of single look-ups, less the clock's own; the clock waits for loads to end, as the chain does.
fn single(steps: u32, pages_log2: u32, look: impl Fn(u64) -> u64) -> Times {
    let mut empty = Times::default();
    for _ in 0..steps {
        empty.add(Instant::now().elapsed());
    }
    let clock_ns = empty.at(500);
    let mut random = Random(3);
    let mut found = 0;
    let mut times = Times::default();
    for _ in 0..steps {
        let page = random.next(found, pages_log2);
        let began = Instant::now();
        found = black_box(look(page));
        let ns = to_f64(clock::ns(began.elapsed()));
        times.add(Duration::from_secs_f64((ns - clock_ns).max(0.0) / 1e9));
    }
    times
}

fn with_mean(mean_ns: f64, times: &Times) -> Value {
    json!({
        "mean": rounded(mean_ns),
        "p50": times.at(500),
        "p99": times.at_of_all(990),
        "p99_undisturbed": times.at(990),
    })
}

/// Time of a lease with its look-up and its return, in nanoseconds, as in an engine: one after the other,
/// of pages that do not depend on one another.
fn leases(rig: &Rig, steps: u32, pages_log2: u32) -> f64 {
    let port = match EnginePort::new(rig.window.clone(), 0, LookUp::On) {
        Ok(port) => port,
        Err(error) => unreachable!("any port may look pages up: {error}"),
    };
    let mut random = Random(4);
    let mut time = Duration::MAX;
    // The first pass creates the counters, and is not the shortest.
    for _ in 0..3 {
        let began = Instant::now();
        for _ in 0..steps {
            let page = FilePage(random.next(0, pages_log2)).single();
            if let Some(lease) = black_box(port.lease(page, Access::Read)) {
                port.release(lease);
            }
        }
        time = time.min(began.elapsed());
    }
    per_step(time, steps)
}

fn per_step(time: Duration, steps: u32) -> f64 {
    time.as_secs_f64() * 1e9 / f64::from(steps.max(1))
}
