// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench crash`: what a thousand deaths do to VMs and disks.
//!
//! Daemon, DPU process, or both are killed by SIGKILL at random instants of what they do, and started again at once.
//! The VMs are stand-ins that check every page and every block that they touch ([`crate::busy`]), and, for a tenth of
//! the kills, a stock guest that does the same.
//!
//! | part | what runs |
//! |---|---|
//! | `daemon` | a daemon with the disk in it |
//! | `dpu` | a daemon, and a DPU process with the disk |
//! | `guest` | the same, and the VM with the disk is a stock guest |
//!
//! [`mod@plan`] has what may be under way (*acts*), and the seed's list of deaths; [`scene`] the VMs; [`process`] how a
//! process is killed and started; [`mod@play`] one death; [`tally`] the figures.
//!
//! | figure | meaning |
//! |---|---|
//! | `kills`, `guest_kills` | processes killed; of them beside a stock guest |
//! | `wrong_pages`, `lost_pages`, `wrong_blocks`, `failed_requests` | must be 0: pages and blocks that were other than they should, pages that the daemon says are lost, disk requests that failed |
//! | `by_act` | deaths by what was begun before them, and in how many of them it was under way at that instant |
//! | `in_use_mean` | pages of the VM by tier before a death, on average |
//! | `without_remote` | why there was no remote tier; null if there was one |
//! | `deaths_with_disk_requests` | deaths that cut a disk off with requests under way |
//! | `stall_p99_us` | longest time that a vCPU of a stand-in touched no page around the death of a daemon, less the time from `spawn` to `main` of its successors. It includes the end of the dead process. Two deaths in a row count as one |
//! | `gap_between_deaths_p99_us` | the same without a death, between two of them: what pressure on memory and CPUs costs |
//! | `process_start_p99_us` | that time from `spawn` to `main` |
//! | `recovery_p99_us` | from `spawn` until requests are served |
//! | `disk_request_longest_p99_us` | longest request of the disk around a death |
//!
//! Where something is wrong the run ends at once, and `first_wrong` says what it was.

mod guests;
mod plan;
mod play;
mod process;
mod scene;
mod tally;

use super::{
    busy::guest::Order,
    harness::{
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    memory::fitting,
    options::SizeOptions,
};
use plan::{Cast, plan};
use play::{Expected, play, rehearse};
use scene::{MAIN, Main, SMALL, Scene};
use serde_json::{Value, json};
use tally::Tally;

const NAME: &str = "crash";
/// Kills, without `--kills`.
const KILLS: u64 = 1000;
/// Of them, in a hundred: with a stock guest, and half of the rest each with the disk in the daemon or beside it.
const GUEST_PERCENT: u64 = 10;
/// RAM of the stand-in.
const RAM_BYTES: u64 = 512 << 20;
/// Seed, without `--seed`.
const SEED: u64 = 1;
/// Deaths between two lines of progress.
const TELL_EVERY: usize = 20;

/// One part of the bench.
struct Part {
    name: &'static str,
    cast: Cast,
    kills: u64,
}

fn parts(options: &SizeOptions) -> Vec<Part> {
    let kills = options.kills.unwrap_or(KILLS);
    let all = [
        ("daemon", Cast::Daemon),
        ("dpu", Cast::WithDpu),
        ("guest", Cast::Guest),
    ];
    let chosen: Vec<_> = (all.into_iter())
        .filter(|(name, _)| options.includes(name))
        .collect();
    let has_guest = chosen.iter().any(|(_, cast)| *cast == Cast::Guest);
    let stand_ins = chosen.len() as u64 - u64::from(has_guest);
    let of_guest = match (has_guest, stand_ins) {
        (false, _) => 0,
        (true, 0) => kills,
        (true, _) => (kills * GUEST_PERCENT).div_ceil(100),
    };
    let part = |(name, cast)| Part {
        name,
        cast,
        kills: match cast {
            Cast::Guest => of_guest,
            Cast::Daemon | Cast::WithDpu => (kills - of_guest).div_ceil(stand_ins.max(1)),
        },
    };
    chosen.into_iter().map(part).collect()
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    if !rustix::process::geteuid().is_root() {
        return Err(unable("take-over needs root"));
    }
    let interrupted = Interrupted::listen().map_err(failed)?;
    // Programs that go on after an upgrade are orphans, and somebody has to reap them.
    let own = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(own)).map_err(failed)?;
    let seed = options.seed.unwrap_or(SEED);
    let (ram_bytes, smaller) = fitting(options.ram_bytes(RAM_BYTES)).map_err(unable)?;
    progress(NAME, format_args!("seed {seed}"));
    let mut tally = Tally::default();
    for part in parts(options) {
        let bytes = match part.cast {
            Cast::Guest => guests::RAM_BYTES,
            Cast::Daemon | Cast::WithDpu => ram_bytes,
        };
        let mut run = Run {
            part: &part,
            seed,
            options,
            interrupted: &interrupted,
        };
        run.play_all(bytes, &mut tally).map_err(failed)?;
        if tally.is_wrong() {
            break;
        }
    }
    let mut report = BenchReport::new(NAME);
    report.figures = tally.figures();
    report.figures.insert("seed".into(), json!(seed));
    report.figures.insert("ram_bytes".into(), json!(ram_bytes));
    report.figures.insert("smaller".into(), json!(smaller));
    Ok(report)
}

/// A part that is played.
struct Run<'a> {
    part: &'a Part,
    seed: u64,
    options: &'a SizeOptions,
    interrupted: &'a Interrupted,
}

impl Run<'_> {
    fn play_all(&mut self, ram_bytes: u64, tally: &mut Tally) -> Result<(), String> {
        let Part { name, cast, kills } = *self.part;
        progress(NAME, format_args!("{name}: {kills} kills"));
        let mut scene = Scene::open(cast, ram_bytes, &self.options.settings)?;
        tally.without_remote.clone_from(&scene.without_remote);
        let mut expected = Expected::default();
        rehearse(&mut scene, &mut expected)?;
        for (number, death) in plan(self.seed, cast, kills).into_iter().enumerate() {
            self.interrupted.check()?;
            match play(&mut scene, &mut expected, death) {
                Ok(played) => tally.add(cast, played),
                Err(reason) => {
                    let what = format!("{name}: {death:?}, the {number}th of the seed: {reason}");
                    return wrong_page(&scene, tally, what);
                }
            }
            if tally.is_wrong() {
                return Ok(());
            }
            if number % TELL_EVERY == TELL_EVERY - 1 {
                let kills = tally.kills();
                progress(NAME, format_args!("{name}: {kills} kills, nothing wrong"));
            }
        }
        match finish(&mut scene, tally) {
            Ok(()) => Ok(()),
            Err(reason) => wrong_page(&scene, tally, format!("{name}, at the end: {reason}")),
        }
    }
}

/// A page that was wrong is a figure; whatever else happened is an error.
fn wrong_page(scene: &Scene, tally: &mut Tally, what: String) -> Result<(), String> {
    if !scene.has_wrong_page() {
        return Err(what);
    }
    tally.wrong_pages += 1;
    tally.first_wrong.get_or_insert(what);
    Ok(())
}

/// Compares everything, and reads what the daemons have said.
fn finish(scene: &mut Scene, tally: &mut Tally) -> Result<(), String> {
    scene.drain_disk()?;
    for name in [MAIN, SMALL] {
        let vm: Value = scene.vm(name)?;
        // Those that the server of the tier has lost stand still for ever.
        for lost in ["poisoned_pages", "missing_pages"] {
            tally.lost_pages += vm[lost].as_u64().unwrap_or(0);
        }
    }
    scene.small.obey(&Order::VerifyAll)?;
    match &mut scene.main {
        Main::StandIn(guest) => {
            let disk = guest.disk(&Order::VerifyDisk)?;
            tally.count_disk(&disk);
            guest.obey(&Order::VerifyAll)?;
        }
        Main::Stock(guest) => {
            let last = guest.finish()?;
            tally.wrong_pages += last.memory_errors;
            tally.wrong_blocks += last.disk_errors;
            tally.compared_guest(last.memory_bytes_verified, last.disk_bytes_verified);
            if last.final_memory_bytes != last.memory_bytes
                || last.final_disk_bytes != last.disk_bytes
            {
                return Err(format!("the guest did not compare everything: {last:?}"));
            }
        }
    }
    let disk = std::mem::take(&mut scene.disk_before);
    tally.count_disk(&disk);
    // It detaches what is still there: every page comes back.
    scene.daemon.end()?;
    for process in [Some(&scene.daemon), scene.dpu.as_ref()]
        .into_iter()
        .flatten()
    {
        let log = process.log();
        let errors = log.lines().filter(|line| line.contains(" ERROR "));
        for error in errors {
            tally.logged_errors += 1;
            tally.first_error.get_or_insert_with(|| error.to_owned());
        }
    }
    Ok(())
}
