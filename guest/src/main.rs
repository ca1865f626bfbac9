// SPDX-License-Identifier: Apache-2.0
//! The main work of a test guest: two loops, and a port that reports on them.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use pagetide_guest::params::Params;
use pagetide_guest::shared::{Counters, Extent, Order, Shared};
use pagetide_guest::wire::{Command, Phase, progress_line};
use pagetide_guest::{disk, fio, loads, memory, port, record, services, soak};

const DISK: &str = "/dev/vda";
const REPORT_EVERY: Duration = Duration::from_secs(1);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() {
    if let Err(error) = run() {
        eprintln!("guest-work: {error}");
    }
    // The first process of the machine must not simply return.
    if std::process::id() == 1
        && let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::PowerOff)
    {
        eprintln!("guest-work: power off: {error}");
    }
}

fn run() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, port] = &words[..]
        && role == "search"
    {
        return Ok(record::search::serve(port.parse()?)?);
    }
    let params = Params::parse(&std::fs::read_to_string("/proc/cmdline")?)?;
    let mut port = port::open()?;
    if params.runs_loads() {
        return Ok(loads::run(&mut port)?);
    }
    if params.services != 0 {
        return Ok(services::run(params.seed, &mut port)?);
    }
    if params.record != 0 {
        return Ok(record::run(&mut port)?);
    }
    let commands = port::listen(port.try_clone()?);
    if params.soak_seed != 0 {
        return Ok(soak::run(params, &mut port, &commands)?);
    }
    let shared = Arc::new(Shared::default());

    let memory_loop = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || memory::run(&params, &shared))
    };
    let disk_loop = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || work_on_disk(&params, &shared))
    };
    report_until_stop(&mut port, &commands, &shared)?;
    while !(memory_loop.is_finished() && disk_loop.is_finished()) {
        tell(&mut port, &shared, Phase::Final)?;
        thread::sleep(REPORT_EVERY / 4);
    }
    for (name, work) in [("memory", memory_loop), ("disk", disk_loop)] {
        if work.join().is_err() {
            return Err(format!("the {name} loop panicked").into());
        }
    }
    tell(&mut port, &shared, Phase::Done)?;
    rustix::termios::tcdrain(&port)?;
    Ok(())
}

fn work_on_disk(params: &Params, shared: &Shared) {
    if params.file_bytes == 0 && params.fio_bytes == 0 {
        shared.disk.filled.store(true, Relaxed);
        return;
    }
    let disk = Path::new(DISK);
    // It may be plugged in later; its node may exist a moment before the disk behind it (ENXIO).
    while File::open(disk).is_err() {
        if shared.order() == Order::Finish {
            return;
        }
        thread::sleep(REPORT_EVERY / 10);
    }
    let ended = if params.fio_bytes == 0 {
        disk::run(disk, params, shared).map_err(|error| error.to_string())
    } else {
        fio::run(params.fio_bytes, shared).map_err(|error| error.to_string())
    };
    if let Err(error) = ended {
        Counters::add(&shared.disk.errors, 1);
        eprintln!("guest-work: the disk loop ends: {error}");
    }
}

fn report_until_stop(
    port: &mut File,
    commands: &Receiver<Command>,
    shared: &Shared,
) -> Outcome<()> {
    loop {
        match commands.recv_timeout(REPORT_EVERY) {
            Ok(Command::Status) | Err(RecvTimeoutError::Timeout) => {}
            Ok(Command::Quiet) => shared.quiet(),
            Ok(Command::Go) => shared.go(),
            Ok(Command::Give) => shared.resize(Extent::Half),
            Ok(Command::Take) => shared.resize(Extent::Whole),
            Ok(Command::Stop) => {
                shared.stop();
                return Ok(());
            }
            Err(RecvTimeoutError::Disconnected) => return Err("the port was closed".into()),
        }
        tell(port, shared, Phase::Work)?;
    }
}

fn tell(port: &mut File, shared: &Shared, phase: Phase) -> Outcome<()> {
    let line = progress_line(&shared.progress(phase))?;
    port.write_all(format!("{line}\n").as_bytes())?;
    Ok(())
}
