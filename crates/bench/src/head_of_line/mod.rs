// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench head-of-line`: the effect of one tenant's page faults on another's requests on the same
//! engine thread.
//!
//! Tenants A and B have a disk each, both served by one engine thread. Pages of A come from a tier that
//! takes 5 ms. B reads 4 KiB at a steady pace.
//!
//! ```text
//!   CPU x   engine thread           of ours:     A's chain parks, B goes on
//!                                   touching:    stands in A's page for 5 ms, B waits
//!   CPU y   client of A and B, and the tier (asleep but for microseconds)
//! ```
//! - *ours* looks every page up before DMA and parks chains with absent pages. Its page requests are served by the
//!   fault service as the daemon runs it, the idle engine assisting; A's pages are evicted from an address space, and
//!   a disk as a model gives their content back after 5 ms.
//! - *touching* is the same engine without the look-up: it touches guest memory, as vhost-user back ends do
//!   today; where a page is absent, a userfaultfd makes it wait for the tier as kernel swap would. All else
//!   is equal, so the difference is due to the fault alone.
//! - *stock* is qemu-storage-daemon with both disks on one iothread: the back end that people run. Its pages are
//!   absent in the same way, by a userfaultfd made inside it. Without the program, or the right to do that, it is
//!   left out with the reason.
//!
//! Each side runs with A's pages *absent* and, for comparison, the same load with A's pages *present*: a
//! ratio is B's p99.9 of the former over that of the latter, of adjacent runs in alternating order. B's
//! time counts from when a request was due, not from when it could be sent (an open loop), so that no wait
//! is hidden. The image is in the page cache: a disk's own tail would hide the effect, on both sides.
//!
//! Engine, client and tier run in the real-time class where that is allowed, so that other work on the
//! machine adds no tail to either.
//!
//! `machine_wakes_us` is, for each of the two CPUs, how late a thread of that class wakes from sleep while
//! nothing else runs: the floor of every tail here, ours and the other's.
//!
//! Faults come ten a second: often enough to affect B's p99.9 if they hold the engine (they take 5% of its
//! time), and seldom enough that serving them (some 50 µs each, 0.05%) adds no tail on the client's CPU,
//! which here represents those of both tenants and of the host. `a_faults_time_share` is that share of B's time; so
//! p99 shows a held engine, too, and is what decides where the machine's own wake-ups drown p99.9
//! (`machine_wakes_us`). They come at random intervals, which are
//! the same for all four runs of a pair's number: in step with B, all of them would fall on the same point
//! of its period.

pub mod backend;
pub mod frontend;
mod tier;
pub mod wakes;

use super::{
    SizeOptions,
    blk::process::{Part, PartError, SideCpus},
    harness::{
        figures::{median, median_ratio},
        report::{BenchError, BenchReport, failed},
        rounds::{Round, WarmUp, progress, rounds},
    },
};
use backend::{FaultMode, TierReport};
use frontend::{Latency, Pages, Run, RunResult};
use serde_json::{Value, json};
use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

const NAME: &str = "head-of-line";
/// Bytes of each image: fits into any page cache.
const IMAGE_BYTES: u64 = 64 << 20;
/// Priority within the real-time class: above none but the idle threads of it.
const PRIORITY: &str = "10";
/// Longest wait for a back end to listen.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether the parts have priority over all else on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// `SCHED_FIFO`; they sleep most of the time, so the machine keeps running.
    RealTime,
    Ordinary,
}

impl Class {
    /// The best class that is available.
    fn choose() -> Self {
        let tried = Command::new("chrt").args(["-f", PRIORITY, "true"]).output();
        if tried.is_ok_and(|output| output.status.success()) {
            Self::RealTime
        } else {
            Self::Ordinary
        }
    }

    /// Starts this program with a hidden command.
    fn start(self, arguments: &[&str], cpu: usize) -> Result<Part, PartError> {
        match self {
            Self::Ordinary => Part::ourselves(arguments, cpu),
            Self::RealTime => {
                let program = std::env::current_exe().map_err(|source| PartError::Start {
                    program: "pagetide-lab".into(),
                    source,
                })?;
                let program = program.to_string_lossy();
                let all = [&["-f", PRIORITY, &*program], arguments].concat();
                Part::start("chrt", &all, cpu)
            }
        }
    }
}

/// The extent of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct HeadOfLineOptions {
    /// Pairs of runs (present, absent) of each side.
    pub pairs: usize,
    /// Length of a run.
    pub time: Duration,
    /// B's requests a second.
    pub requests_per_s: u32,
    /// A's requests a second on average, each to an absent page in runs with absent pages.
    pub faults_per_s: u32,
    /// Time to supply a page.
    pub hold: Duration,
}

impl HeadOfLineOptions {
    /// What the command line asks for.
    #[must_use]
    pub fn of(sizes: &SizeOptions) -> Self {
        Self {
            pairs: sizes.pairs(5),
            time: sizes.time(4),
            requests_per_s: 4000,
            faults_per_s: 10,
            hold: Duration::from_millis(5),
        }
    }
}

/// The pairs of one side.
#[derive(Debug, Default)]
struct Cell {
    present: Vec<RunResult>,
    absent: Vec<RunResult>,
    tier: Vec<TierReport>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &HeadOfLineOptions) -> Result<BenchReport, BenchError> {
    let dir = tempfile::Builder::new()
        .prefix("pagetide-bench-hol-")
        .tempdir()
        .map_err(failed)?;
    let images = [make_image(dir.path(), "a")?, make_image(dir.path(), "b")?];
    let placement = SideCpus::choose();
    progress(
        NAME,
        format_args!(
            "engine on CPU {}, clients on CPU {}",
            placement.backend, placement.frontend
        ),
    );
    let class = Class::choose();
    let wakes = machine_wakes(class, placement)?;
    let start = |mode| Side::start(dir.path(), &images, mode, options.hold, placement, class);
    let mut report = BenchReport::new(NAME);
    let mut sides = vec![start(FaultMode::Park)?];
    for (mode, name) in [(FaultMode::Touch, "touching"), (FaultMode::Stock, "stock")] {
        match start(mode) {
            Ok(side) => sides.push(side),
            Err(error) => {
                report.peers.insert(name.into(), error.to_string().into());
            }
        }
    }
    let mut cells: Vec<Cell> = sides.iter().map(|_| Cell::default()).collect();
    for side in &mut sides {
        // Warms code, caches and the schedule up.
        side.run(options, Pages::Present, Duration::from_millis(300), 0)?;
    }
    for pair in rounds(NAME, options.pairs, WarmUp::None) {
        for (side, cell) in sides.iter_mut().zip(&mut cells) {
            side.pair(options, pair, cell)?;
        }
        sides.rotate_left(1);
        cells.rotate_left(1);
    }
    describe(&mut report, &sides, &cells);
    let figures = &mut report.figures;
    for (name, value) in [
        ("engine_cpu", json!(placement.backend)),
        ("clients_cpu", json!(placement.frontend)),
        ("machine_wakes_us", wakes),
        ("real_time", json!(class == Class::RealTime)),
        ("pairs", json!(options.pairs)),
        ("run_s", json!(options.time.as_secs_f64())),
        ("b_requests_per_s", json!(options.requests_per_s)),
        ("a_requests_per_s", json!(options.faults_per_s)),
        ("page_ms", json!(options.hold.as_secs_f64() * 1e3)),
        (
            "a_faults_time_share",
            json!(f64::from(options.faults_per_s) * options.hold.as_secs_f64()),
        ),
    ] {
        figures.insert(name.into(), value);
    }
    Ok(report)
}

/// How late threads wake here, on each of the CPUs: see [`wakes`].
fn machine_wakes(class: Class, at: SideCpus) -> Result<Value, BenchError> {
    let on = |cpu| -> Result<Value, BenchError> {
        let arguments = ["bench-part", "head-of-line-wakes"];
        let mut part = class.start(&arguments, cpu).map_err(failed)?;
        let late: Latency = part.ask("\"look\"").map_err(failed)?;
        Ok(
            json!({"p50": late.p50_us, "p99": late.p99_us, "p999": late.p999_us, "max": late.max_us}),
        )
    };
    Ok(json!({"engine_cpu": on(at.backend)?, "clients_cpu": on(at.frontend)?}))
}

fn make_image(dir: &Path, name: &str) -> Result<PathBuf, BenchError> {
    let path = dir.join(format!("image-{name}"));
    let mut file = std::fs::File::create(&path).map_err(failed)?;
    let block = vec![0x5a_u8; 1 << 20];
    for _ in 0..IMAGE_BYTES >> 20 {
        file.write_all(&block).map_err(failed)?;
    }
    // Nothing must be written back during the measurement.
    file.sync_all().map_err(failed)?;
    Ok(path)
}

/// A back end and the client that drives its two disks.
struct Side {
    mode: FaultMode,
    backend: Part,
    client: Part,
}

impl Side {
    fn start(
        dir: &Path,
        images: &[PathBuf; 2],
        mode: FaultMode,
        hold: Duration,
        at: SideCpus,
        class: Class,
    ) -> Result<Self, BenchError> {
        let state_dir = dir.join(mode.name());
        std::fs::create_dir(&state_dir).map_err(failed)?;
        let socket = |tenant: &str| dir.join(format!("{}-{tenant}.sock", mode.name()));
        let (a, b) = (socket("a"), socket("b"));
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let arguments = [
            "bench-part".to_owned(),
            "head-of-line-backend".to_owned(),
            format!("--state-dir={}", text(&state_dir)),
            format!("--socket-a={}", text(&a)),
            format!("--socket-b={}", text(&b)),
            format!("--image-a={}", text(&images[0])),
            format!("--image-b={}", text(&images[1])),
            format!("--engine-cpu={}", at.backend),
            format!("--tier-cpu={}", at.frontend),
            format!("--hold-us={}", hold.as_micros()),
            format!("--mode={}", mode.name()),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut backend = class.start(&arguments, at.frontend).map_err(failed)?;
        backend.read_line().map_err(failed)?;
        let (a, b) = (text(&a), text(&b));
        let arguments = [
            "bench-part",
            "head-of-line-frontend",
            "--socket-a",
            &a,
            "--socket-b",
            &b,
        ];
        let client = wait_listening(&[&a, &b])
            .and_then(|()| class.start(&arguments, at.frontend))
            .map_err(failed)?;
        let mut side = Self {
            mode,
            backend,
            client,
        };
        let named = side.client.read_line().map_err(failed)?;
        // The client names the memory that holds A's pages.
        let ready: bool = side.backend.ask(named.trim()).map_err(failed)?;
        if ready {
            Ok(side)
        } else {
            Err(failed(
                "A's memory cannot be made absent; see the message above",
            ))
        }
    }

    /// A run with A's pages present and one with them absent, in alternating order.
    fn pair(
        &mut self,
        options: &HeadOfLineOptions,
        pair: Round,
        cell: &mut Cell,
    ) -> Result<(), BenchError> {
        let seed = pair.seed() + 1;
        for pages in pair.turns([Pages::Present, Pages::Absent]) {
            let (result, tier) = self.run(options, pages, options.time, seed)?;
            match pages {
                Pages::Present => cell.present.push(result),
                Pages::Absent => {
                    cell.absent.push(result);
                    cell.tier.push(tier);
                }
            }
        }
        Ok(())
    }

    fn run(
        &mut self,
        options: &HeadOfLineOptions,
        pages: Pages,
        time: Duration,
        seed: u64,
    ) -> Result<(RunResult, TierReport), BenchError> {
        let run = Run {
            pages,
            time,
            requests_per_s: options.requests_per_s,
            faults_per_s: options.faults_per_s,
            seed,
        };
        let line = serde_json::to_string(&run).map_err(failed)?;
        // The client empties or fills its pages, then the back end updates their state.
        let prepared: bool = self.client.ask(&line).map_err(failed)?;
        let word = serde_json::to_string(&pages).map_err(failed)?;
        let told: bool = self.backend.ask(&word).map_err(failed)?;
        if !(prepared && told) {
            return Err(failed("A's pages cannot be made so; see the message above"));
        }
        let result: RunResult = self.client.ask("\"go\"").map_err(failed)?;
        let tier: TierReport = self.backend.ask("\"report\"").map_err(failed)?;
        if result.errors > 0 {
            return Err(failed(format!("{} requests failed", result.errors)));
        }
        progress(
            NAME,
            format_args!(
                "{} {}: B p99.9 {:.0} us, A {:.0} us, {} pages waited for",
                self.mode.name(),
                pages.name(),
                result.b.p999_us,
                result.a.p50_us,
                tier.waited_for
            ),
        );
        Ok((result, tier))
    }
}

fn wait_listening(sockets: &[&str]) -> Result<(), PartError> {
    let began = Instant::now();
    while !sockets.iter().all(|socket| Path::new(socket).exists()) {
        if began.elapsed() > START_TIMEOUT {
            return Err(PartError::NotListening {
                program: "the back end".into(),
                socket: sockets[0].into(),
            });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn middle(runs: &[RunResult], of: impl Fn(&RunResult) -> f64) -> f64 {
    median(runs.iter().map(of))
}

/// Median over the pairs of one of B's latencies with A's faults over the same without.
fn ratio(cell: &Cell, of: impl Fn(&Latency) -> f64) -> f64 {
    median_ratio(&cell.absent, &cell.present, |run| of(&run.b))
}

fn tenant_b(runs: &[RunResult]) -> Value {
    json!({
        "p50": middle(runs, |r| r.b.p50_us),
        "p99": middle(runs, |r| r.b.p99_us),
        "p999": middle(runs, |r| r.b.p999_us),
        "max": middle(runs, |r| r.b.max_us),
    })
}

fn describe(report: &mut BenchReport, sides: &[Side], cells: &[Cell]) {
    for (side, cell) in sides.iter().zip(cells) {
        let (figures, prefix, names) = match side.mode {
            FaultMode::Park => {
                let names = ["ours_p99_over_quiet", "ours_p999_over_quiet"];
                (&mut report.figures, "", names)
            }
            FaultMode::Touch => {
                let names = ["touching_p99_over_quiet", "touching_p999_over_quiet"];
                (&mut report.peers, "touching_", names)
            }
            FaultMode::Stock => {
                let names = ["stock_p99_over_quiet", "stock_p999_over_quiet"];
                (&mut report.peers, "stock_", names)
            }
        };
        let mut put = |name: &str, value: Value| {
            figures.insert(format!("{prefix}{name}"), value);
        };
        put("b_quiet_us", tenant_b(&cell.present));
        put("b_with_faults_us", tenant_b(&cell.absent));
        put(
            "a_quiet_p50_us",
            middle(&cell.present, |r| r.a.p50_us).into(),
        );
        put(
            "a_faulting_p50_us",
            middle(&cell.absent, |r| r.a.p50_us).into(),
        );
        let waited: u64 = cell.tier.iter().map(|tier| tier.waited_for).sum();
        put("pages_waited_for", waited.into());
        let of: [fn(&Latency) -> f64; 2] = [|b| b.p99_us, |b| b.p999_us];
        for (name, of) in names.into_iter().zip(of) {
            report.ratios.insert(name.into(), ratio(cell, of).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(p999_us: f64) -> RunResult {
        let latency = |p999_us| Latency {
            count: 1000,
            p50_us: 10.0,
            p99_us: 20.0,
            p999_us,
            max_us: 2.0 * p999_us,
        };
        RunResult {
            a: latency(5000.0),
            b: latency(p999_us),
            errors: 0,
        }
    }

    #[test]
    fn ratio_is_the_median_of_pairs_and_not_the_pair_of_medians() {
        let cell = Cell {
            present: [10.0, 100.0, 1000.0].map(result).to_vec(),
            absent: [20.0, 100.0, 3000.0].map(result).to_vec(),
            tier: Vec::new(),
        };
        assert!((ratio(&cell, |b| b.p999_us) - 2.0).abs() < 1e-9);
    }
}
