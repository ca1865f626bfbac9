// SPDX-License-Identifier: Apache-2.0
//! The cost of look-ups, and of slower ones, for a disk.

use super::{NAME, PaBitmapBenchOptions};
use crate::{
    blk::{
        frontend::{Buffers, Direction, Run},
        process::{PartError, SideCpus},
        side::{Sample, Side, Slice, make_image},
    },
    harness::{
        figures::{mean, rounded, to_f64},
        ratios::PairedRatios,
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, progress, rounds},
    },
};
use serde_json::json;
use std::path::Path;

/// Delay added to look-ups.
const EXTRA_NS: &str = "100";
/// The sides' turns in an alternation: each precedes each other as often as it follows it.
const TURNS: [[usize; 3]; 4] = [
    [ON, OFF, SLOWED],
    [SLOWED, OFF, ON],
    [OFF, SLOWED, ON],
    [ON, SLOWED, OFF],
];
/// Places of the sides in arrays.
const ON: usize = 0;
const OFF: usize = 1;
const SLOWED: usize = 2;
/// Options of the back end of each side.
const SIDES: [(&str, &[&str]); 3] = [
    ("on", &[]),
    ("off", &["--look-up", "off"]),
    ("plus_100ns", &["--look-up-extra-ns", EXTRA_NS]),
];
/// Cells.
const CELLS: [(Direction, u16); 4] = [
    (Direction::Read, 1),
    (Direction::Read, 32),
    (Direction::Write, 1),
    (Direction::Write, 32),
];

/// The results of each side in one cell, by alternation.
#[derive(Default)]
struct Cell {
    samples: [Vec<Sample>; 3],
    /// Time of look-ups and requests they were sampled in, of the side [`ON`].
    lookup_ns: u64,
    lookup_samples: u64,
}

/// Measures, and adds the results to `report`.
///
/// # Errors
/// [`BenchError`].
pub fn measure(options: &PaBitmapBenchOptions, report: &mut BenchReport) -> Result<(), BenchError> {
    let dir = tempfile::Builder::new()
        .prefix("pagetide-bench-pa-bitmap-")
        .tempdir()
        .map_err(failed)?;
    let image = make_image(dir.path())?;
    let at = SideCpus::choose();
    let mut sides = start(dir.path(), &image, at).map_err(failed)?;
    let mut cells: [Cell; CELLS.len()] = Default::default();
    progress(NAME, "disk");
    for alternation in rounds(NAME, options.alternations, WarmUp::First) {
        for (cell, (direction, depth)) in cells.iter_mut().zip(CELLS) {
            let run = Run {
                direction,
                depth,
                queues: 1,
                buffers: Buffers::Packed,
                time: options.slice,
                seed: alternation.seed() << 8 | 1 << 40,
            };
            let done = cell.alternate(&mut sides, run).map_err(failed)?;
            if alternation.counts {
                for (samples, sample) in cell.samples.iter_mut().zip(done) {
                    samples.push(sample);
                }
            }
        }
    }
    describe(&cells, report);
    report
        .figures
        .insert("alternations".into(), options.alternations.into());
    Ok(())
}

fn start(dir: &Path, image: &Path, at: SideCpus) -> Result<[Side; 3], PartError> {
    let start = |place: usize| {
        let (name, options) = SIDES[place];
        let own = dir.join(name);
        std::fs::create_dir(&own).map_err(|source| PartError::Start {
            program: format!("the back end in {}", own.display()),
            source,
        })?;
        Side::start_ours(&own, image, options, at)
    };
    Ok([start(ON)?, start(OFF)?, start(SLOWED)?])
}

impl Cell {
    fn alternate(&mut self, sides: &mut [Side; 3], run: Run) -> Result<[Sample; 3], PartError> {
        let mut slices = [Slice::default(); 3];
        let before = sides[ON].backend.report()?;
        for (turn, order) in TURNS.into_iter().enumerate() {
            let seed = run.seed | turn as u64;
            for place in order {
                slices[place].add(sides[place].slice(Run { seed, ..run })?);
            }
        }
        let after = sides[ON].backend.report()?;
        self.lookup_ns += after.lookup_sampled_ns - before.lookup_sampled_ns;
        self.lookup_samples += after.lookup_samples - before.lookup_samples;
        Ok(slices.map(Slice::sample))
    }

    /// IOPS of `place` over those without look-ups, of each alternation.
    fn over_off(&self, place: usize) -> impl Iterator<Item = f64> {
        let pairs = self.samples[place].iter().zip(&self.samples[OFF]);
        pairs.map(|(sample, off)| sample.iops / off.iops)
    }

    fn lookup_ns_per_request(&self) -> f64 {
        to_f64(self.lookup_ns) / to_f64(self.lookup_samples.max(1))
    }
}

fn describe(cells: &[Cell], report: &mut BenchReport) {
    let (mut lookup_ns, mut cpu_ns, mut share_max) = (0.0, 0.0, 0.0_f64);
    for (cell, (direction, depth)) in cells.iter().zip(CELLS) {
        let name = format!("{}_depth_{depth}", direction.name());
        let of = |place: usize| {
            let samples = &cell.samples[place];
            let iops = mean(samples.iter().map(|s| s.iops)).round();
            json!({ "iops": iops, "cpu_ns_per_io": mean(samples.iter().map(|s| s.cpu_ns_per_io)).round() })
        };
        for (place, (side, _)) in SIDES.iter().enumerate() {
            report
                .figures
                .insert(format!("{name}_lookup_{side}"), of(place));
        }
        let per_request = cell.lookup_ns_per_request();
        let figure = format!("{name}_lookup_ns_per_request");
        report.figures.insert(figure, rounded(per_request).into());
        let ours = &cell.samples[ON];
        let ios: f64 = ours.iter().map(|s| s.ios).sum();
        let cpu: f64 = ours.iter().map(|s| s.ios * s.cpu_ns_per_io).sum();
        lookup_ns += per_request * ios;
        cpu_ns += cpu;
        share_max = share_max.max(per_request * ios / cpu);
        if let Some(ratio) = PairedRatios::new(cell.over_off(SLOWED)) {
            let name = format!("lookup_plus_100ns_over_off_{name}");
            report.ratios.insert(name, rounded(ratio.mean()).into());
        }
    }
    let ratios = &mut report.ratios;
    ratios.insert("lookup_share_of_cpu".into(), (lookup_ns / cpu_ns).into());
    ratios.insert("lookup_share_of_cpu_max".into(), share_max.into());
    for (place, name) in [
        (ON, "lookup_over_off"),
        (SLOWED, "lookup_plus_100ns_over_off"),
    ] {
        let of_place = of_alternations(cells, place).into_iter();
        if let Some(overall) = PairedRatios::bounds(of_place) {
            ratios.insert(name.into(), rounded(overall.mean).into());
            ratios.insert(format!("{name}_low95"), rounded(overall.low95).into());
        }
    }
}

/// The ratio of each alternation: the geometric mean over its cells.
fn of_alternations(cells: &[Cell], place: usize) -> Vec<f64> {
    let by_cell: Vec<Vec<f64>> = cells.iter().map(|c| c.over_off(place).collect()).collect();
    let count = by_cell.iter().map(Vec::len).min().unwrap_or(0);
    let ratio = |i: usize| mean(by_cell.iter().map(|ratios| ratios[i].ln())).exp();
    (0..count).map(ratio).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(iops: f64) -> Sample {
        Sample {
            ios: iops,
            iops,
            cpu_ns_per_io: 1000.0,
        }
    }

    #[test]
    fn each_side_has_its_turn_before_each_other_as_often_as_after() {
        let before = |a: usize, b: usize| {
            let place = |order: &[usize; 3], side| order.iter().position(|s| *s == side);
            TURNS.iter().filter(|o| place(o, a) < place(o, b)).count()
        };
        for (a, b) in [(ON, OFF), (ON, SLOWED), (OFF, SLOWED)] {
            assert_eq!(before(a, b), TURNS.len() / 2, "{a} {b}");
        }
    }

    #[test]
    fn ratios_and_shares_follow_from_what_the_sides_did() {
        let cell = |slowed: f64| Cell {
            samples: [20.0, 20.0, slowed].map(|iops| vec![sample(iops); 15]),
            lookup_ns: 500,
            lookup_samples: 50,
        };
        let cells = [cell(18.0), cell(20.0), cell(18.0), cell(20.0)];
        let mut report = BenchReport::new(NAME);
        describe(&cells, &mut report);
        let ratio = |name: &str| report.ratios[name].as_f64().unwrap();
        assert!((ratio("lookup_share_of_cpu") - 0.01).abs() < 1e-9);
        assert!((ratio("lookup_plus_100ns_over_off_low95") - 0.9_f64.sqrt()).abs() < 1e-3);
        assert!((ratio("lookup_over_off_low95") - 1.0).abs() < 1e-3);
        assert!((ratio("lookup_plus_100ns_over_off_read_depth_1") - 0.9).abs() < 1e-3);
    }
}
