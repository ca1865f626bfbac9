// SPDX-License-Identifier: Apache-2.0
//! The soak: a real guest at work, while its daemon dies again and again and others misbehave.
//!
//! ```text
//!   guest   fio ─ stress-ng in swap ─ redis ─ file trees ─ patterns ─ heartbeats   all on one disk of ours
//!             │ reports each second (serial port)
//!   host    ┌─┴────────────┬──────────────────┬───────────────────┬────────────────┐
//!           deaths         calls              tenants             starvation
//!           SIGKILL, run   the API at random  front ends that     how long QEMU's vCPUs
//!           each 0.5–8 s   and wrongly        misbehave           waited for a CPU
//! ```
//! What must hold: no wrong byte, no I/O error, no gap of more than 10 s in which the guest made no
//! progress, and nothing left in the daemon at the end ([`report`]). With all tiers, memory also goes to a disk
//! and to another host, which fail meanwhile ([`below`]). The guest's memory is limited to about
//! half of what it touches, so pages are evicted and filled all the time, most of them for devices.
//!
//! One seed determines everything random; but the threads and the guest run in real time, so a seed repeats
//! the actions and not their timing.

mod board;

use board::{Board, LINE_EVERY, NAME, SILENCE_MAX, file_error, say};
pub use board::{Options, SoakError, Tiers};

mod below;
mod calls;
mod cpu;
mod deaths;
mod http;
pub mod report;
mod stand;
mod tenants;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::wire::{Command, Phase, SoakProgress};

use crate::guest::tail;
use crate::image::repository;
use crate::leaks::Growth;
use crate::report::mib;
use calls::Caller;
use cpu::Starvation;
use deaths::Deaths;
use report::{Report, is_a_load_idle};
use stand::Stand;

const BOOT_TIMEOUT: Duration = Duration::from_secs(240);
const FINISH_TIMEOUT: Duration = Duration::from_secs(240);
/// How much longer a soak may take until each load has done something, and each tier has had a page.
const WORK_TIMEOUT: Duration = Duration::from_secs(240);
/// Time for the daemon to release what it no longer needs.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a soak; files stay in `target/soak/`.
///
/// # Errors
/// It could not be completed. A report whose bounds do not hold is not an error here.
pub fn run(options: &Options) -> Result<Report, SoakError> {
    let folder = repository().join(match options.tiers {
        Tiers::InMemory => "target/soak",
        Tiers::All => "target/soak-tiers",
    });
    fs::create_dir_all(&folder).map_err(|source| file_error(&folder, source))?;
    // A failed run must not leave an earlier run's report behind.
    let path = folder.join("report.json");
    remove(&path)?;
    if let Some(missing) = stand::missing() {
        return Err(SoakError::Missing(missing));
    }
    say(&format!(
        "seed {}: {} minutes; files are in {}",
        options.seed,
        options.minutes,
        folder.display()
    ));
    let mut stand = Stand::set(options, &folder)?;
    let outcome = play(options, &mut stand);
    stand.keep_logs(&folder)?;
    // Its remaining holdings are in the report; the drop must not check them again.
    stand.product.kill();
    let report = match outcome {
        Ok(report) => report,
        Err(error) => {
            say(&format!(
                "the guest's console:\n{}",
                tail(&stand.guest.paths().console, 40)
            ));
            return Err(error);
        }
    };
    let json = serde_json::to_string_pretty(&report).map_err(io::Error::from);
    json.and_then(|json| fs::write(&path, json + "\n"))
        .map_err(|source| file_error(&path, source))?;
    if report.wrong_bytes + report.io_errors > 0 {
        let console = tail(&stand.guest.paths().console, 40);
        say(&format!("the guest's console:\n{console}"));
    }
    Ok(report)
}

fn play(options: &Options, stand: &mut Stand) -> Result<Report, SoakError> {
    stand.wait_for_loads(BOOT_TIMEOUT)?;
    let touched = stand.guest.resident_bytes()?;
    let limit = touched / 2;
    say(&format!(
        "the guest works on {}; its limit will be about {}",
        mib(touched),
        mib(limit)
    ));
    let board = Board::default();
    let attached = stand.product.attach(stand.guest.pid(), NAME);
    stand.told(attached)?;
    let caller = Caller::new(stand, options.seed, limit);
    caller.attach_with_limit(&board);
    let began = Instant::now();
    let starvation = Starvation::default();
    disturb(options, stand, &board, &caller, &starvation)?;
    let elapsed = began.elapsed();
    say("deaths and calls are over: the guest stays squeezed a while, is detached, and verifies");
    let last = release_and_verify(stand, &board, &caller)?;
    let left = left(stand)?;
    let mut report = stand.report(options, elapsed);
    report.take_board(&board);
    report.tiers = stand.below.as_ref().map(|below| below.seen().clone());
    report.take_guest(&last);
    report.guest_touched_bytes = touched;
    report.limit_bytes = limit;
    report.stolen_in_longest_gap_ms = starvation.in_longest_gap_ms();
    report.longest_host_wait_ms = starvation.longest_ms();
    report.leaked_descriptors = left.leaked_descriptors();
    report.leaked_threads = left.leaked_threads();
    report.leaked_bytes = left.leaked_bytes() + stand.pool_bytes()?;
    report.daemon_panics = stand.panics()?;
    Ok(report)
}

/// Deaths, calls and tenants for the whole duration, with a line of progress at intervals.
fn disturb(
    options: &Options,
    stand: &mut Stand,
    board: &Board,
    caller: &Caller,
    starvation: &Starvation,
) -> Result<(), SoakError> {
    let length = Duration::from_secs_f64(options.minutes * 60.0);
    let attackers = tenants::attackers(stand, options)?;
    let qemu = stand.guest.pid();
    let mut below = stand.below.take();
    board.tier_is_awaited.store(below.is_some(), Relaxed);
    let outcome = thread::scope(|scope| {
        let mut others = vec![("API calls", scope.spawn(|| caller.run(board)))];
        for attacker in &attackers {
            others.push(("tenant", scope.spawn(|| attacker.run(board))));
        }
        others.push((
            "CPU samples",
            scope.spawn(|| starvation.sample(qemu, board)),
        ));
        if let Some(below) = &mut below {
            others.push(("tiers", scope.spawn(|| below.run(board))));
        }
        let mut deaths = Deaths::new(options, length);
        let outcome = until(length, || {
            let guest = stand.guest.soak_report();
            let idle = guest
                .as_ref()
                .is_none_or(|report| is_a_load_idle(&report.progress));
            starvation.look(guest);
            deaths.turn(stand, board)?;
            Ok(idle || board.tier_is_awaited.load(Relaxed))
        });
        board.over.store(true, Relaxed);
        for (name, other) in others {
            other.join().map_err(|_| SoakError::Panicked(name))?;
        }
        outcome
    });
    stand.below = below;
    outcome
}

/// Turns for `length`, and on for up to [`WORK_TIMEOUT`] while a turn says that it still awaits something:
/// on a busy machine that takes longer than a short soak.
fn until(
    length: Duration,
    mut turn: impl FnMut() -> Result<bool, SoakError>,
) -> Result<(), SoakError> {
    let begun = Instant::now();
    let mut is_awaited = true;
    while begun.elapsed() < length || is_awaited && begun.elapsed() < length + WORK_TIMEOUT {
        is_awaited = turn()?;
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn release_and_verify(
    stand: &mut Stand,
    board: &Board,
    caller: &Caller,
) -> Result<SoakProgress, SoakError> {
    caller.attach_with_limit(board);
    // The daemon that is checked for leaks must itself have evicted, served and detached.
    thread::sleep(Duration::from_secs(5));
    if let Some(below) = &mut stand.below {
        below.look();
    }
    let detached = stand.product.detach(NAME);
    stand.told(detached)?;
    stand.guest.send(Command::Stop)?;
    let deadline = Instant::now() + FINISH_TIMEOUT;
    let done = |stand: &Stand| {
        let report = stand.guest.soak_report();
        report.filter(|report| report.progress.phase == Phase::Done)
    };
    let last = loop {
        if let Some(report) = done(stand) {
            break report.progress;
        }
        if Instant::now() > deadline || stand.guest.ended()?.is_some() {
            // The last report may have come between the two checks.
            if let Some(report) = done(stand) {
                break report.progress;
            }
            let what = "the last verification".to_owned();
            return Err(stand.guest.late(what, FINISH_TIMEOUT).into());
        }
        thread::sleep(Duration::from_millis(50));
    };
    while stand.guest.ended()?.is_none() {
        if Instant::now() > deadline {
            let what = "power off".to_owned();
            return Err(stand.guest.late(what, FINISH_TIMEOUT).into());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(last)
}

/// Holdings of the last daemon beyond a fresh one's, after all devices are removed and it had time to
/// release.
fn left(stand: &Stand) -> Result<Growth, SoakError> {
    stand.remove_devices()?;
    let left = stand.product.growth(SETTLE_TIMEOUT);
    let left = stand.told(left)?;
    if !left.is_empty() {
        say(&format!("left in the daemon: {left}"));
    }
    Ok(left)
}

fn remove(path: &Path) -> Result<(), SoakError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(file_error(path, source)),
        _ => Ok(()),
    }
}
