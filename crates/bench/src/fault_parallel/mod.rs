// SPDX-License-Identifier: Apache-2.0
//! `bench fault-parallel`: several vCPUs fault at a time.
//!
//! Two questions, each with 1, 2, 4 and 8 threads of a stand-in that fetch all of their evicted pages:
//!
//! | question | ours | beside |
//! |---|---|---|
//! | how many pages a second | `pagetide run`, lz4 tier | kernel zram, the same threads and pages |
//! | the effect of one held fault on the others | each page by its own fault, one held, see [`held`] | none held |
//!
//! The daemon of the first question does readahead, as by default; that of the second does not, so
//! `alone_over_zram_N` is the first question once more with each page by its own fault.
//!
//! The threads are pinned to the available CPUs in turn. `rate_over_zram_N` is the median of the rounds'
//! ratios, `p99_beside_held_over_quiet` that of the worst number of threads.

mod held;

use self::held::HeldRig;
use super::{
    daemon::{Daemon, directory_in},
    fault::{
        content::Kind,
        guest::{Answer, Beside, Order},
        process::{Guest, evict_all},
    },
    harness::{
        figures::{median, median_ratio, rounded, to_f64},
        latencies::Latencies,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{Round, WarmUp, rounds},
    },
    interrupt::Interrupted,
    kernel_swap::{Compressor, KernelSwap},
};
use pagetide_addr::{PAGE_BYTES, to_usize};
use serde_json::{Map, Value, json};
use std::path::Path;

const NAME: &str = "fault-parallel";
/// Numbers of threads that fault at a time.
const THREADS: [u64; 4] = [1, 2, 4, 8];

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultParallelOptions {
    /// Rounds of all cells.
    pub rounds: u64,
    /// Pages of the guest. At least 4,096, as a VM's RAM has.
    pub pages: u64,
}

impl FaultParallelOptions {
    /// With this many rounds, or as many as give meaningful figures.
    #[must_use]
    pub fn of_rounds(rounds: Option<u64>) -> Self {
        let default = Self::default();
        Self {
            rounds: rounds.unwrap_or(default.rounds),
            ..default
        }
    }
}

impl Default for FaultParallelOptions {
    fn default() -> Self {
        Self {
            rounds: 8,
            pages: 8192,
        }
    }
}

/// The times of one turn.
pub(super) struct Turn {
    /// Of each page.
    latencies: Latencies,
    wall_ns: u64,
}

impl Turn {
    /// Makes `guest` touch its pages.
    pub(super) fn take(guest: &mut Guest, order: &Order) -> Result<Self, String> {
        let answer = guest.obey(order)?;
        Self::of(answer)
    }

    /// From an answer of the guest.
    pub(super) fn of(answer: Answer) -> Result<Self, String> {
        match answer {
            Answer::TookTogether { ns, wall_ns } => Ok(Self {
                latencies: ns.into_iter().collect(),
                wall_ns,
            }),
            other => Err(format!("the guest answered {other:?}")),
        }
    }

    fn us(&self, permille: usize) -> f64 {
        self.latencies.us(permille)
    }

    fn pages_per_s(&self) -> f64 {
        to_f64(self.latencies.count() as u64) * 1e9 / to_f64(self.wall_ns.max(1))
    }
}

/// The turns of one number of threads.
#[derive(Default)]
struct Cell {
    ours: Vec<Turn>,
    zram: Vec<Turn>,
    quiet: Vec<Turn>,
    held: Vec<Turn>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &FaultParallelOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let mut bench = Bench::prepare(*options).map_err(unable)?;
    let mut cells = THREADS.map(|threads| (threads, Cell::default()));
    for round in rounds(NAME, to_usize(options.rounds), WarmUp::None) {
        for (threads, cell) in &mut cells {
            interrupted.check().map_err(failed)?;
            bench.turns(*threads, round, cell).map_err(failed)?;
        }
    }
    bench.guest.obey(&Order::Verify).map_err(failed)?;
    Ok(report(&cells, bench.zram.as_ref().err()))
}

/// The resources of a run. Fields are dropped in this order: nothing is removed while it is in use.
struct Bench {
    daemon: Daemon,
    held: HeldRig,
    guest: Guest,
    zram: Result<KernelSwap, String>,
    options: FaultParallelOptions,
    _dirs: [tempfile::TempDir; 2],
}

impl Bench {
    fn prepare(options: FaultParallelOptions) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let cpus = pagetide_sys::cpu::affinity().map_err(|error| error.to_string())?;
        let cpu = cpus.last().copied().unwrap_or(0);
        let none: [&str; 0] = [];
        Ok(Self {
            daemon: Daemon::start(&in_memory.path().join("daemon"), &none)?,
            held: HeldRig::new(in_memory.path()),
            guest: Guest::start(on_disk.path(), Kind::Program, options.pages, cpu)?,
            zram: KernelSwap::on_zram(2 * options.pages * PAGE_BYTES, Compressor::Lz4),
            options,
            _dirs: [in_memory, on_disk],
        })
    }

    fn turns(&mut self, threads: u64, round: Round, cell: &mut Cell) -> Result<(), String> {
        let touch = |beside| Order::TouchTogether {
            threads,
            seed: round.seed(),
            beside,
        };
        let alone = touch(Beside::Nothing);
        if let Ok(zram) = &mut self.zram {
            let (guest, pages) = (&mut self.guest, self.options.pages);
            let turn = zram.paged_out(guest, pages, |guest, _| Turn::take(guest, &alone))?;
            cell.zram.push(turn);
        }
        self.daemon.attach(self.guest.pid(), None)?;
        evict_all(&self.daemon, self.options.pages)?;
        cell.ours.push(Turn::take(&mut self.guest, &alone)?);
        self.daemon.detach()?;
        for beside in round.turns([Beside::Nothing, Beside::LastPage]) {
            let turn = self.held.turn(&mut self.guest, &touch(beside))?;
            match beside {
                Beside::Nothing => cell.quiet.push(turn),
                Beside::LastPage => cell.held.push(turn),
            }
        }
        Ok(())
    }
}

fn report(cells: &[(u64, Cell)], no_zram: Option<&String>) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let mut worst = f64::NAN;
    for (threads, cell) in cells {
        let key = format!("threads_{threads}");
        let turns = [
            ("ours", &cell.ours),
            ("quiet", &cell.quiet),
            ("held", &cell.held),
        ];
        let ours = turns.map(|(name, turns)| (name.to_owned(), figures_of(turns)));
        report
            .figures
            .insert(key.clone(), Map::from_iter(ours).into());
        if no_zram.is_none() {
            report.peers.insert(key, figures_of(&cell.zram));
            let rate = median_ratio(&cell.ours, &cell.zram, Turn::pages_per_s);
            report
                .ratios
                .insert(format!("rate_over_zram_{threads}"), rounded(rate).into());
            let alone = median_ratio(&cell.quiet, &cell.zram, Turn::pages_per_s);
            report
                .ratios
                .insert(format!("alone_over_zram_{threads}"), rounded(alone).into());
            let p90 = median_ratio(&cell.ours, &cell.zram, |turn| turn.us(900));
            report
                .ratios
                .insert(format!("p90_over_zram_{threads}"), rounded(p90).into());
        }
        let beside = median_ratio(&cell.held, &cell.quiet, |turn| turn.us(990));
        let name = format!("p99_beside_held_over_quiet_{threads}");
        report.ratios.insert(name, rounded(beside).into());
        worst = worst.max(beside);
    }
    let worst = rounded(worst);
    report
        .ratios
        .insert("p99_beside_held_over_quiet".into(), worst.into());
    if let Some(reason) = no_zram {
        report.peers.insert("zram".into(), json!(reason));
    }
    report
}

fn figures_of(turns: &[Turn]) -> Value {
    let of = |figure: &dyn Fn(&Turn) -> f64| rounded(median(turns.iter().map(figure)));
    json!({
        "pages_per_s": of(&Turn::pages_per_s),
        "p50_us": of(&|turn| turn.us(500)),
        "p90_us": of(&|turn| turn.us(900)),
        "p99_us": of(&|turn| turn.us(990)),
    })
}
