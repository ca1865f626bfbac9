// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench pa-bitmap`: the cost of look-ups and updates (VPRI 7.1, table 2).
//!
//! **Look-ups** ([`lookup`]) in the bitmap of a space of 1 TiB, every GiB of which has its words: 64 MiB,
//! more than caches hold. *Cold* ones are of random pages, *hot* ones of pages whose words fit the first
//! cache. The next page depends on the result, so no look-up begins before the last has ended; the peer,
//! `dram`, does the same in a plain array of the same size, with one load each.
//!
//! **Updates** ([`update`]) by one thread, while an engine on another CPU does DMA under leases all the
//! time: bits cleared and the heavy fence passed, after which no further DMA begins. The rest, waiting for DMA under
//! way, is `lease_wait_us` for sections without any and `lease_wait_engine_us` for those that the engine works on.
//! These are stores in one process. An update is bits and fence: `bits_2mib_us` are a section's bits alone,
//! `membarrier_us` is what asking engines saves, both measured in turns with the updates.
//!
//! **Round trips** ([`round_trip`]) are updates as the paper's: through the event queue of the VPRI function
//! to the device and back, idle and `with_dma`.
//!
//! **A disk** ([`disk`]): our vhost-user-blk three times over one image, with look-ups, without, and with
//! look-ups that take 100 ns more each (a request of 4 KiB does two: its buffer, and its header with its
//! status). They take turns.
//!
//! ```text
//!   alternation = for each cell of (read | write) × (1 | 32 deep):  N F S S F N F S N N S F  (oN, oFf, Slowed)
//!   lookup_plus_100ns_over_off = IOPS of S / IOPS of F; geometric mean over the cells of an alternation
//! ```
//! `p99` of single operations is over all of them. Their `mean`, `p50` and `p99_undisturbed` are those of
//! the median one of 20 parts of the measurement, so that a moment in which the machine was busy with other
//! work does not dominate. `_low95` is the lower end of the two-sided 95% interval of its mean over
//! alternations, by Student's distribution.

mod disk;
mod lookup;
mod rig;
mod round_trip;
mod update;

use super::harness::{
    figures::{median, rounded, to_f64},
    latencies::Latencies,
    report::{BenchError, BenchReport, failed},
    rounds::progress,
};
use pagetide_sys::clock;
use serde_json::{Value, json};
use std::time::Duration;

const NAME: &str = "pa-bitmap";
/// Parts of a sequence of single times that are evaluated separately.
const PARTS: usize = 20;

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PaBitmapBenchOptions {
    /// log2 of the pages of the space, from 18 (a GiB) on.
    pub pages_log2: u32,
    /// Rounds of look-ups.
    pub rounds: usize,
    /// Look-ups in each slice of a round.
    pub look_ups: u32,
    /// Updates of each size.
    pub updates: u32,
    /// Alternations on the disk; 0 skips the disk.
    pub alternations: usize,
    /// Length of a slice on the disk.
    pub slice: Duration,
}

impl Default for PaBitmapBenchOptions {
    /// A minute and a half in all.
    fn default() -> Self {
        Self {
            pages_log2: 28,
            rounds: 15,
            look_ups: 200_000,
            updates: 20_000,
            alternations: 21,
            slice: Duration::from_millis(60),
        }
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &PaBitmapBenchOptions) -> Result<BenchReport, BenchError> {
    let mut report = BenchReport::new(NAME);
    let rig = rig::Rig::new(options.pages_log2).map_err(failed)?;
    progress(NAME, "look-ups");
    lookup::measure(&rig, options, &mut report);
    progress(NAME, "updates");
    update::measure(&rig, options, &mut report).map_err(failed)?;
    drop(rig);
    progress(NAME, "updates by the event queue");
    round_trip::measure(options, &mut report).map_err(failed)?;
    if options.alternations > 0 {
        disk::measure(options, &mut report)?;
    }
    let peers = &mut report.peers;
    peers.insert("paper_lookup_ns".into(), json!({"mean": 69, "p99": 92}));
    peers.insert(
        "paper_update_us".into(),
        json!({"mean": 1.742, "p99": 2.341}),
    );
    Ok(report)
}

/// A sequence of pseudo-random numbers, each from the last. Not the common generator: here each number also
/// depends on what was found, and this is one multiplication between two look-ups.
#[derive(Clone, Copy, Debug)]
struct Random(u64);

impl Random {
    /// The next number below `end`, which depends on `found`.
    #[inline]
    fn next(&mut self, found: u64, bits: u32) -> u64 {
        self.0 = (self.0 ^ found)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> (64 - bits)
    }
}

/// Times of single operations, in nanoseconds, in the order they were measured.
#[derive(Default)]
struct Times(Vec<u64>);

impl Times {
    fn add(&mut self, time: Duration) {
        self.0.push(clock::ns(time));
    }

    /// The median of `of` over [`PARTS`] consecutive parts. A temporary disturbance of the machine is in
    /// only a few of them.
    fn middle(&self, of: impl Fn(&[u64]) -> f64) -> f64 {
        let parts = self.0.chunks(self.0.len().div_ceil(PARTS).max(1));
        median(parts.map(of))
    }

    /// The value that `permille` thousandths do not exceed, in the middle part.
    fn at(&self, permille: usize) -> f64 {
        self.middle(|part| least_at(part, permille))
    }

    /// The value that `permille` thousandths of all do not exceed.
    fn at_of_all(&self, permille: usize) -> f64 {
        least_at(&self.0, permille)
    }

    fn mean(&self) -> f64 {
        self.middle(|part| to_f64(part.iter().sum()) / to_f64(part.len() as u64))
    }

    /// `{mean, p50, p99, p99_undisturbed}` in microseconds.
    fn report_us(&self) -> Value {
        json!({
            "mean": rounded(self.mean() / 1e3),
            "p50": rounded(self.at(500) / 1e3),
            "p99": rounded(self.at_of_all(990) / 1e3),
            "p99_undisturbed": rounded(self.at(990) / 1e3),
        })
    }
}

/// The least of `times` that `permille` thousandths do not exceed.
fn least_at(times: &[u64], permille: usize) -> f64 {
    let sorted: Latencies = times.iter().copied().collect();
    match sorted.count() {
        0 => f64::NAN,
        _ => to_f64(sorted.ns(permille)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_of_the_bitmap_is_there_after_a_short_run() {
        let report = run(&PaBitmapBenchOptions {
            pages_log2: 19,
            rounds: 1,
            look_ups: 100,
            updates: 10,
            alternations: 0,
            slice: Duration::from_millis(1),
        })
        .unwrap();
        for name in [
            "update_4kib_us",
            "update_2mib_us",
            "bits_2mib_us",
            "membarrier_us",
            "lease_wait_us",
            "grant_2mib_us",
        ] {
            for part in ["mean", "p50", "p99", "p99_undisturbed"] {
                assert!(report.figures[name][part].is_number(), "{name}.{part}");
            }
        }
        for name in ["update_round_trip_4kib_us", "update_round_trip_2mib_us"] {
            for of in [&report.figures[name], &report.figures[name]["with_dma"]] {
                assert!(of["mean"].is_number() && of["p99"].is_number(), "{name}");
            }
        }
        for name in ["lookup_hot_ns", "lookup_cold_ns"] {
            for part in ["mean", "p50", "p99", "p99_undisturbed"] {
                assert!(report.figures[name][part].is_number(), "{name}.{part}");
            }
        }
        assert!(report.ratios["cold_over_dram"].as_f64().unwrap() > 0.0);
        assert_eq!(report.figures["bitmap_bytes"], 2 * (65_536 + 32));
        assert_eq!(report.peers["paper_lookup_ns"]["p99"], 92);
    }

    #[test]
    fn p99_is_of_all_times_and_other_figures_are_those_of_an_undisturbed_part() {
        let mut times = Times::default();
        for part in 0..PARTS as u64 {
            // Some parts are a thousand times slower.
            let unit_us = if part % 3 == 0 { 1000 } else { 1 };
            (1..=100).for_each(|n| times.add(Duration::from_micros(n * unit_us)));
        }
        assert_eq!(
            times.report_us(),
            json!({"mean": 50.5, "p50": 50.0, "p99": 98_000.0, "p99_undisturbed": 99.0})
        );
    }
}
