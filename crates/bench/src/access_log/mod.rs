// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench access-log`: the cost of the access log and a DMA protector for a disk (VPRI 5.3, 6.2).
//!
//! Our vhost-user-blk serves 4 KiB requests as fast as one engine can, whose buffers are pages anywhere in
//! 4 GiB of a guest of 8 GiB, on a disk whose log is switched on and off in turns. *On* is everything: the
//! engine's records, the thread that receives them (on the engine's own CPU, where it costs most), and the
//! policy `adp` that processes each, as many a second as `access-log-rate` allows by default. It gets more
//! sections than it may track, so both its blocks are full and it adds, protects and drops sections all the
//! time. *Off* is the daemon without a policy.
//!
//! The disk's image lies on tmpfs where that has direct I/O (Linux 6.6), and requests are for few blocks of
//! it: the less of a request's time the medium takes, the more visible the log is. So the engine's CPU is
//! the bottleneck, and the log's share of it is lost to requests.
//!
//! ```text
//!   alternation = for each cell:  N F, in the next one F N    (oN, oFf; a second and more each)
//!   logging_on_over_off_CELL = IOPS of N / IOPS of F, geometric mean over alternations
//! ```
//! One process serves both, so only the switch differs; the policy keeps its state. `_low95` is the lower
//! end of the two-sided 95% interval of the mean over alternations, by Student's distribution. Without a
//! cell's name both are the lowest of any cell.
//!
//! The bench's processes have a niceness of -15 if permitted, and the report has how many CPUs others kept
//! busy (`cpus_busy_with_others`): on a machine that is not quiet the bounds mean little.
//!
//! An unused log costs nothing, and so does a policy that has nothing to do: the bench fails if in any
//! slice no record reached the policy, or the policy tracks fewer than [`TRACKED_MIN`] sections at its end.

mod others;
mod policy;

use super::{
    blk::{
        backend::{BackendReport, LogSwitch},
        frontend::{Buffers, Direction, Run},
        process::{PartError, SideCpus},
        side::{Sample, Side, make_image},
    },
    harness::{
        figures::{mean, rounded, to_f64},
        ratios::{Overall, PairedRatios},
        report::{BenchError, BenchReport, failed},
        rounds::{Round, WarmUp, progress, rounds},
    },
};
use others::Others;
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tempfile::TempDir;

const NAME: &str = "access-log";
/// The thread of the back end that receives the log, and on which policies run.
const TAKER: &str = "pt-access-log";
/// Least sections that the policy must track at the end of a slice, so that it has work.
const TRACKED_MIN: u64 = 1000;
/// Mount point of a tmpfs.
const TMPFS: &str = "/dev/shm";
/// Niceness of the bench.
const NICE: i32 = -15;
/// Queues of the disk.
const QUEUES: u16 = 4;

/// The load while the log is on and off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Load {
    direction: Direction,
    depth: u16,
    queues: u16,
}

/// Cells: deep enough to keep the engine busy, in one queue and in several.
const CELLS: [Load; 4] = [
    Load::new(Direction::Read, 4, 1),
    Load::new(Direction::Read, 32, 1),
    Load::new(Direction::Write, 32, 1),
    Load::new(Direction::Read, 32, QUEUES),
];

impl Load {
    const fn new(direction: Direction, depth: u16, queues: u16) -> Self {
        Self {
            direction,
            depth,
            queues,
        }
    }

    /// Its name in names of figures.
    fn name(self) -> String {
        let queues = match self.queues {
            1 => String::new(),
            queues => format!("_queues_{queues}"),
        };
        format!("{}_depth_{}{queues}", self.direction.name(), self.depth)
    }

    fn run(self, time: Duration, seed: u64) -> Run {
        Run {
            direction: self.direction,
            depth: self.depth,
            queues: self.queues,
            buffers: Buffers::Spread,
            time,
            seed,
        }
    }
}

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessLogBenchOptions {
    /// Alternations, beside one that warms up; even, so that each switch is first as often as the other.
    pub alternations: usize,
    /// Length of a slice.
    pub slice: Duration,
}

impl Default for AccessLogBenchOptions {
    /// Three and a half minutes in all.
    fn default() -> Self {
        Self {
            alternations: 24,
            slice: Duration::from_secs(1),
        }
    }
}

/// The results of each switch in one cell, by alternation.
#[derive(Default)]
struct Cell {
    on: Vec<Sample>,
    off: Vec<Sample>,
    heard: Heard,
}

/// The log's counters in the slices in which it was on.
#[derive(Default, Clone, Copy)]
struct Heard {
    seconds: f64,
    /// Records of the engine.
    logged: u64,
    /// Lost for lack of credits.
    lost: u64,
    /// Records that reached the policy.
    heard: u64,
    /// CPU time of the thread that receives them.
    taker_ns: u64,
    /// At the end of the slice with the fewest.
    tracked_sections: u64,
    protected_sections: u64,
    /// Memory of the policy then.
    policy_bytes: u64,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &AccessLogBenchOptions) -> Result<BenchReport, BenchError> {
    come_first();
    let (dir, image) = directory()?;
    let queues = QUEUES.to_string();
    let arguments = ["--queues", queues.as_str()];
    let mut side =
        Side::start_ours(dir.path(), &image, &arguments, SideCpus::choose()).map_err(failed)?;
    let mut cells: [Cell; CELLS.len()] = Default::default();
    let others = Others::begin(side.cpu_ns().map_err(failed)?);
    for alternation in rounds(NAME, options.alternations, WarmUp::First) {
        for (cell, load) in cells.iter_mut().zip(CELLS) {
            let run = load.run(options.slice, alternation.seed() << 8 | 1 << 41);
            let turns = turns_of(alternation);
            let (on, off, heard) = alternate(&mut side, run, turns)?;
            if alternation.counts {
                cell.on.push(on);
                cell.off.push(off);
                cell.heard = cell.heard.and(heard);
            }
        }
    }
    let ours_ns = side.cpu_ns().map_err(failed)?;
    let others = others.and_then(|others| others.cpus(ours_ns));
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("cpus_busy_with_others".into(), others.map(rounded).into());
    figures.insert("alternations".into(), options.alternations.into());
    figures.insert("slice_ms".into(), json!(options.slice.as_millis()));
    figures.insert("is_on_tmpfs".into(), dir.path().starts_with(TMPFS).into());
    describe(&cells, &mut report);
    describe_log(&cells, &mut report);
    figures_of_policies(&mut report);
    Ok(report)
}

/// Processes started from now on must not wait for others of this machine.
fn come_first() {
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        progress(
            NAME,
            format_args!("others may disturb it, for it may not come before them: {error}"),
        );
    }
}

/// A directory, on tmpfs if possible, and the image in it.
fn directory() -> Result<(TempDir, PathBuf), BenchError> {
    let made = |dir: &Path| {
        let mut builder = tempfile::Builder::new();
        let dir = builder.prefix("pagetide-bench-access-log-").tempdir_in(dir);
        dir.map_err(failed)
    };
    if let Ok(dir) = made(Path::new(TMPFS))
        && let Ok(image) = make_image(dir.path())
    {
        return Ok((dir, image));
    }
    let dir = made(&std::env::temp_dir())?;
    let image = make_image(dir.path())?;
    Ok((dir, image))
}

/// The switch in the two turns of an alternation.
fn turns_of(alternation: Round) -> [LogSwitch; 2] {
    alternation.turns([LogSwitch::On, LogSwitch::Off])
}

fn alternate(
    side: &mut Side,
    run: Run,
    turns: [LogSwitch; 2],
) -> Result<(Sample, Sample, Heard), BenchError> {
    let (mut on, mut off) = (Sample::NONE, Sample::NONE);
    let mut heard = Heard::default();
    for switch in turns {
        side.backend.switch(switch).map_err(failed)?;
        let before = look(side).map_err(failed)?;
        let sample = side.slice(run).map_err(failed)?.sample();
        match switch {
            LogSwitch::On => {
                on = sample;
                heard = Heard::between(&before, &look(side).map_err(failed)?, &sample);
                heard.check()?;
            }
            LogSwitch::Off => off = sample,
        }
    }
    Ok((on, off, heard))
}

/// The back end's report, and the CPU time of the thread that receives the log.
fn look(side: &mut Side) -> Result<(BackendReport, u64), PartError> {
    let report = side.backend.report()?;
    Ok((report, side.backend.thread_cpu_ns(TAKER)?))
}

impl Heard {
    fn between(
        before: &(BackendReport, u64),
        after: &(BackendReport, u64),
        sample: &Sample,
    ) -> Self {
        let ((before, cpu_before), (after, cpu_after)) = (before, after);
        Self {
            seconds: sample.ios / sample.iops,
            logged: after.logged_accesses - before.logged_accesses,
            lost: after.lost_accesses - before.lost_accesses,
            heard: after.heard_accesses - before.heard_accesses,
            taker_ns: cpu_after - cpu_before,
            tracked_sections: after.tracked_sections,
            protected_sections: after.protected_sections,
            policy_bytes: after.policy_bytes,
        }
    }

    /// Whether there was anything to measure.
    fn check(&self) -> Result<(), BenchError> {
        if self.heard == 0 {
            return Err(failed(
                "no access was heard of in a slice with the log on, so its cost is unknown",
            ));
        }
        if self.tracked_sections < TRACKED_MIN {
            return Err(failed(format!(
                "the policy remembers {} sections at the end of a slice, too few to measure its cost; \
                 it should be {TRACKED_MIN} at least",
                self.tracked_sections
            )));
        }
        Ok(())
    }

    fn and(self, more: Self) -> Self {
        let is_first = self.seconds == 0.0;
        let fewest = match is_first || more.tracked_sections < self.tracked_sections {
            true => more,
            false => self,
        };
        Self {
            seconds: self.seconds + more.seconds,
            logged: self.logged + more.logged,
            lost: self.lost + more.lost,
            heard: self.heard + more.heard,
            taker_ns: self.taker_ns + more.taker_ns,
            ..fewest
        }
    }
}

impl Cell {
    /// IOPS with the log over those without, of each alternation.
    fn ratios(&self) -> Option<Overall> {
        let pairs = self.on.iter().zip(&self.off);
        PairedRatios::bounds(pairs.map(|(on, off)| on.iops / off.iops))
    }

    /// CPU time of a request with the log over that without.
    fn cpu_ratio(&self) -> f64 {
        let of = |samples: &[Sample]| mean(samples.iter().map(|s| s.cpu_ns_per_io.ln()));
        (of(&self.on) - of(&self.off)).exp()
    }
}

fn describe(cells: &[Cell], report: &mut BenchReport) {
    let (mut worst, mut worst_low) = (f64::INFINITY, f64::INFINITY);
    for (cell, load) in cells.iter().zip(CELLS) {
        let name = load.name();
        for (samples, state) in [(&cell.on, "on"), (&cell.off, "off")] {
            let figure = json!({
                "iops": mean(samples.iter().map(|s| s.iops)).round(),
                "cpu_ns_per_io": mean(samples.iter().map(|s| s.cpu_ns_per_io)).round(),
            });
            report.figures.insert(format!("{name}_log_{state}"), figure);
        }
        let ratios = &mut report.ratios;
        if let Some(overall) = cell.ratios() {
            worst = worst.min(overall.mean);
            worst_low = worst_low.min(overall.low95);
            let name = format!("logging_on_over_off_{name}");
            ratios.insert(format!("{name}_low95"), rounded(overall.low95).into());
            ratios.insert(name, rounded(overall.mean).into());
        }
    }
    let cpu = mean(cells.iter().map(|cell| cell.cpu_ratio().ln())).exp();
    let ratios = &mut report.ratios;
    ratios.insert("logging_on_over_off_cpu_per_io".into(), rounded(cpu).into());
    ratios.insert("logging_on_over_off".into(), rounded(worst).into());
    ratios.insert(
        "logging_on_over_off_low95".into(),
        rounded(worst_low).into(),
    );
}

/// The log's own figures: whether it was on, how much of it arrived, and its cost.
fn describe_log(cells: &[Cell], report: &mut BenchReport) {
    let mut all = Heard::default();
    for (cell, load) in cells.iter().zip(CELLS) {
        report
            .figures
            .insert(format!("{}_log", load.name()), cell.heard.figures());
        all = all.and(cell.heard);
    }
    let log = all.figures();
    for name in ["tracked_sections", "policy_bytes_per_tracked_section"] {
        report.figures.insert(name.into(), log[name].clone());
    }
    report.figures.insert("log".into(), log);
}

impl Heard {
    fn figures(&self) -> serde_json::Value {
        let a_second = |count: u64| (to_f64(count) / self.seconds).round();
        let each = to_f64(self.policy_bytes) / to_f64(self.tracked_sections.max(1));
        // Nanoseconds a record are milliseconds a million.
        let taker = to_f64(self.taker_ns) / to_f64(self.heard.max(1));
        json!({
            "logged_a_second": a_second(self.logged),
            "heard_a_second": a_second(self.heard),
            "lost_a_second": a_second(self.lost),
            "logged_accesses": self.logged,
            "heard_accesses": self.heard,
            "lost_accesses": self.lost,
            "tracked_sections": self.tracked_sections,
            "protected_sections": self.protected_sections,
            "policy_bytes": self.policy_bytes,
            "policy_bytes_per_tracked_section": (each * 10.0).round() / 10.0,
            "taker_cpu_seconds_per_million_heard": rounded(taker / 1e3),
        })
    }
}

/// The memory of policies that track all they may of a large VM.
fn figures_of_policies(report: &mut BenchReport) {
    for (name, full) in policy::full() {
        let each = to_f64(full.report.bytes) / to_f64(full.report.tracked_sections.max(1));
        let figure = json!({
            "tracked_sections": full.report.tracked_sections,
            "bytes_per_tracked_section": (each * 10.0).round() / 10.0,
            "touch_ns": (full.touch_ns * 10.0).round() / 10.0,
        });
        let name = format!("policy_{name}_of_64_gib");
        report.figures.insert(name, figure);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::rounds::silent_rounds;

    fn samples(iops: f64) -> Vec<Sample> {
        let sample = Sample {
            ios: iops,
            iops,
            cpu_ns_per_io: 1e6 / iops,
        };
        vec![sample; 15]
    }

    #[test]
    fn each_switch_is_first_as_often_as_the_other() {
        let alternations = AccessLogBenchOptions::default().alternations;
        let counted = || silent_rounds(alternations, WarmUp::First).filter(|it| it.counts);
        let first = counted().filter(|it| turns_of(*it)[0] == LogSwitch::On);
        assert_eq!(first.count() * 2, alternations);
        assert!(counted().all(|it| turns_of(it)[0] != turns_of(it)[1]));
    }

    #[test]
    fn worst_cell_is_what_is_said_of_all() {
        let cell = |on: f64| Cell {
            on: samples(on),
            off: samples(100.0),
            heard: Heard::default(),
        };
        let cells = [cell(99.0), cell(101.0), cell(81.0), cell(100.0)];
        let mut report = BenchReport::new(NAME);
        describe(&cells, &mut report);
        let is = |name: &str, expected: f64| {
            let ratio = report.ratios[name].as_f64().unwrap();
            assert!((ratio - expected).abs() < 1e-3, "{name}: {ratio}");
        };
        is("logging_on_over_off", 0.81);
        is("logging_on_over_off_low95", 0.81);
        is("logging_on_over_off_write_depth_32", 0.81);
        is("logging_on_over_off_read_depth_32_low95", 1.01);
        is("logging_on_over_off_read_depth_32_queues_4", 1.0);
        let cpu = 1.0 / (0.99_f64 * 1.01 * 0.81).powf(0.25);
        is("logging_on_over_off_cpu_per_io", cpu);
    }

    const FULL: Heard = Heard {
        seconds: 2.0,
        logged: 90,
        lost: 10,
        heard: 80,
        taker_ns: 160_000,
        tracked_sections: 2000,
        protected_sections: 5,
        policy_bytes: 100_000,
    };

    #[test]
    fn log_that_was_not_heard_or_gave_the_policy_nothing_to_do_is_no_result() {
        FULL.check().unwrap();
        let unheard = Heard { heard: 0, ..FULL };
        assert!(unheard.check().unwrap_err().to_string().contains("heard"));
        let idle = Heard {
            tracked_sections: 1,
            ..FULL
        };
        assert!(idle.check().unwrap_err().to_string().contains("1 sections"));
    }

    #[test]
    fn figures_of_the_log_are_those_of_all_slices_and_of_the_fewest_sections() {
        let fewer = Heard {
            tracked_sections: 1000,
            ..FULL
        };
        let figures = Heard::default().and(FULL).and(fewer).and(FULL).figures();
        let is = |name: &str, expected: f64| {
            let figure = figures[name].as_f64().unwrap();
            assert!((figure - expected).abs() < 1e-6, "{name}: {figure}");
        };
        is("logged_a_second", 45.0);
        is("lost_accesses", 30.0);
        is("tracked_sections", 1000.0);
        is("policy_bytes_per_tracked_section", 100.0);
        is("taker_cpu_seconds_per_million_heard", 2.0);
    }
}
