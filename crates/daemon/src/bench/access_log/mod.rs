// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench access-log`: what the access log and a DMA protector cost a disk (VPRI 5.3, 6.2).
//!
//! Our vhost-user-blk as in `bench blk`: 4 KiB requests at random, as fast as one engine
//! goes, on a disk whose log is switched on and off in turns. *On* is all of it: the
//! engine's records, the thread that takes them (on the engine's own CPU, where it costs most), and
//! the policy `adp` that hears of each. *Off* is as the daemon is without a policy.
//!
//! ```text
//!   alternation = for each cell of (read | write) × (1 | 32 deep):  N F F N   (oN, oFf)
//!   logging_on_over_off = IOPS of N / IOPS of F; geometric mean over the cells of an alternation
//! ```
//! One process serves both, so nothing but the switch tells them apart. `_low95` is the
//! lower end of the two-sided 95% interval of the mean over alternations, by Student's
//! distribution.

use super::{
    BenchError, BenchReport,
    blk::{
        backend::{BackendReport, LogSwitch},
        frontend::{Direction, Run},
        process::{PartError, Placement},
        side::{ImageError, Sample, Side, Slice, make_image},
        stats::{PairedRatios, mean, overall},
    },
    figures::{rounded, to_f64},
};
use pagetide_addr::{Access, SectionNo};
use pagetide_policy::protect::{
    PolicyChoice, PolicyReport, ProtectionPolicy, Touch, adp::AdpParams,
};
use serde_json::json;
use std::time::{Duration, Instant};

const NAME: &str = "access-log";
/// The switch in the turns of an alternation: each is before the other as often as after it.
const TURNS: [LogSwitch; 4] = [LogSwitch::On, LogSwitch::Off, LogSwitch::Off, LogSwitch::On];
/// Cells.
const CELLS: [(Direction, u16); 4] = [
    (Direction::Read, 1),
    (Direction::Read, 32),
    (Direction::Write, 1),
    (Direction::Write, 32),
];

/// Sections of a VM of 64 GiB.
const VM_SECTIONS: u64 = 32 * 1024;
/// Touches of each of the two rounds over such a VM.
const TOUCHES: u64 = 500_000;

/// How much to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessLogBenchOptions {
    /// Alternations, beside one that warms up.
    pub alternations: usize,
    /// Length of a slice.
    pub slice: Duration,
}

impl Default for AccessLogBenchOptions {
    /// Three quarters of a minute in all.
    fn default() -> Self {
        Self {
            alternations: 40,
            slice: Duration::from_millis(60),
        }
    }
}

/// What each switch did in one cell, by alternation.
#[derive(Default)]
struct Cell {
    on: Vec<Sample>,
    off: Vec<Sample>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &AccessLogBenchOptions) -> Result<BenchReport, BenchError> {
    let dir = tempfile::Builder::new()
        .prefix("pagetide-bench-access-log-")
        .tempdir()
        .map_err(failed)?;
    let image = make_image(dir.path()).map_err(no_image)?;
    let mut side =
        Side::start_ours(dir.path(), &image, &[], Placement::choose()).map_err(failed)?;
    let mut cells: [Cell; CELLS.len()] = Default::default();
    for alternation in 0..=options.alternations {
        eprintln!("bench {NAME}: {alternation} of {}", options.alternations);
        for (cell, (direction, depth)) in cells.iter_mut().zip(CELLS) {
            let run = Run {
                direction,
                depth,
                time: options.slice,
                seed: (alternation as u64) << 8 | 1 << 41,
            };
            let (on, off) = alternate(&mut side, run).map_err(failed)?;
            if alternation > 0 {
                cell.on.push(on);
                cell.off.push(off);
            }
        }
    }
    let last = side.backend.switch(LogSwitch::Off).map_err(failed)?;
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("alternations".into(), options.alternations.into());
    describe(&cells, &mut report);
    describe_log(&last, &mut report);
    Ok(report)
}

fn alternate(side: &mut Side, run: Run) -> Result<(Sample, Sample), PartError> {
    let (mut on, mut off) = (Slice::default(), Slice::default());
    for (turn, switch) in TURNS.into_iter().enumerate() {
        side.backend.switch(switch)?;
        let seed = run.seed | turn as u64;
        let slice = side.slice(Run { seed, ..run })?;
        match switch {
            LogSwitch::On => on.add(slice),
            LogSwitch::Off => off.add(slice),
        }
    }
    Ok((on.sample(), off.sample()))
}

impl Cell {
    /// IOPS with the log over those without, of each alternation.
    fn ratios(&self) -> impl Iterator<Item = f64> {
        let pairs = self.on.iter().zip(&self.off);
        pairs.map(|(on, off)| on.iops / off.iops)
    }
}

fn describe(cells: &[Cell], report: &mut BenchReport) {
    let (mut on_cpu, mut off_cpu) = (Vec::new(), Vec::new());
    for (cell, (direction, depth)) in cells.iter().zip(CELLS) {
        let name = format!("{}_depth_{depth}", direction.name());
        for (samples, state) in [(&cell.on, "on"), (&cell.off, "off")] {
            let figure = json!({
                "iops": mean(samples.iter().map(|s| s.iops)).round(),
                "cpu_ns_per_io": mean(samples.iter().map(|s| s.cpu_ns_per_io)).round(),
            });
            report.figures.insert(format!("{name}_log_{state}"), figure);
        }
        on_cpu.extend(cell.on.iter().map(|s| s.cpu_ns_per_io.ln()));
        off_cpu.extend(cell.off.iter().map(|s| s.cpu_ns_per_io.ln()));
        if let Some(ratio) = PairedRatios::new(cell.ratios()) {
            let name = format!("logging_on_over_off_{name}");
            report.ratios.insert(name, rounded(ratio.mean()).into());
        }
    }
    let cpu = (mean(on_cpu.into_iter()) - mean(off_cpu.into_iter())).exp();
    let ratios = &mut report.ratios;
    ratios.insert("logging_on_over_off_cpu_per_io".into(), rounded(cpu).into());
    let all = PairedRatios::new(of_alternations(cells).into_iter());
    if let Some(overall) = all.and_then(|ratios| overall(&[ratios])) {
        ratios.insert("logging_on_over_off".into(), rounded(overall.mean).into());
        let low = rounded(overall.low95);
        ratios.insert("logging_on_over_off_low95".into(), low.into());
    }
}

/// What the log itself was: that it was on, and how much of it came through.
fn describe_log(last: &BackendReport, report: &mut BenchReport) {
    let figures = &mut report.figures;
    figures.insert("logged_accesses".into(), last.logged_accesses.into());
    figures.insert("lost_accesses".into(), last.lost_accesses.into());
    figures.insert("heard_accesses".into(), last.heard_accesses.into());
    figures.insert("tracked_sections".into(), last.tracked_sections.into());
    figures.insert("policy_bytes".into(), last.policy_bytes.into());
    let full = full_policy();
    let each = to_f64(full.report.bytes) / to_f64(full.report.tracked_sections.max(1));
    let figure = json!({
        "tracked_sections": full.report.tracked_sections,
        "bytes_per_tracked_section": (each * 10.0).round() / 10.0,
        "touch_ns": (full.touch_ns * 10.0).round() / 10.0,
    });
    figures.insert("policy_of_64_gib".into(), figure);
}

/// A policy that remembers all it may.
struct FullPolicy {
    report: PolicyReport,
    /// Mean time of one touch.
    touch_ns: f64,
}

/// What `adp` takes in a VM of 64 GiB all of which one device touches at random.
fn full_policy() -> FullPolicy {
    let mut policy = PolicyChoice::Adp(AdpParams::default()).policy(VM_SECTIONS);
    let mut changes = Vec::new();
    let (mut state, mut micros) = (1_u64, 0_u64);
    let mut touch_all = |policy: &mut dyn ProtectionPolicy| {
        for _ in 0..TOUCHES {
            micros += 1;
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            changes.clear();
            let touch = Touch {
                section: SectionNo((state >> 33) % VM_SECTIONS),
                at: Duration::from_micros(micros),
                access: Access::Write,
                bytes: 4096,
            };
            policy.touched(touch, &mut changes);
        }
    };
    // Once to fill it.
    touch_all(policy.as_mut());
    let began = Instant::now();
    touch_all(policy.as_mut());
    FullPolicy {
        touch_ns: began.elapsed().as_secs_f64() * 1e9 / to_f64(TOUCHES),
        report: policy.report(),
    }
}

/// The ratio of each alternation: the geometric mean over its cells.
fn of_alternations(cells: &[Cell]) -> Vec<f64> {
    let by_cell: Vec<Vec<f64>> = cells.iter().map(|cell| cell.ratios().collect()).collect();
    let count = by_cell.iter().map(Vec::len).min().unwrap_or(0);
    let ratio = |i: usize| mean(by_cell.iter().filter_map(|r| r.get(i)).map(|r| r.ln())).exp();
    (0..count).map(ratio).collect()
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Failed {
        name: NAME,
        reason: error.to_string(),
    }
}

fn no_image(error: ImageError) -> BenchError {
    match error {
        ImageError::Write { .. } => failed(error),
        ImageError::Direct { .. } => BenchError::Unable {
            name: NAME,
            reason: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(iops: f64) -> Vec<Sample> {
        let sample = Sample {
            ios: iops,
            iops,
            cpu_ns_per_io: 1e6 / iops,
        };
        vec![sample; 15]
    }

    #[test]
    fn each_switch_has_its_turn_before_the_other_as_often_as_after() {
        let places = |switch| {
            let turns = TURNS.iter().enumerate();
            turns
                .filter(move |(_, turn)| **turn == switch)
                .map(|(place, _)| place)
        };
        let before = places(LogSwitch::On)
            .flat_map(|on| places(LogSwitch::Off).map(move |off| on < off))
            .filter(|before| *before)
            .count();
        assert_eq!(before, TURNS.len() * TURNS.len() / 8);
    }

    #[test]
    fn ratios_follow_from_what_was_measured() {
        let cell = |on: f64| Cell {
            on: samples(on),
            off: samples(100.0),
        };
        let cells = [cell(81.0), cell(100.0), cell(100.0), cell(100.0)];
        let mut report = BenchReport::new(NAME);
        describe(&cells, &mut report);
        let ratio = |name: &str| report.ratios[name].as_f64().unwrap();
        let expected = 0.81_f64.powf(0.25);
        assert!((ratio("logging_on_over_off") - expected).abs() < 1e-3);
        assert!((ratio("logging_on_over_off_low95") - expected).abs() < 1e-3);
        assert!((ratio("logging_on_over_off_read_depth_1") - 0.81).abs() < 1e-3);
        assert!((ratio("logging_on_over_off_cpu_per_io") - 1.0 / expected).abs() < 1e-3);
    }
}
