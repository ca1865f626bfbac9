// SPDX-License-Identifier: Apache-2.0
//! Twenty ways in which the program of an upgrade is broken.

use super::{
    broken::Way,
    rig::{Outcome, Place, Running, eventually},
};
use crate::orders::daemon_program;
use pagetide_swap::Pool;
use pagetide_sys::cpu::{Urgency, priority, set_urgency};
use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process},
};
use std::{
    fs,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

/// Where a pool has its version.
const VERSION_AT: u64 = 8;

/// One part in so many is left of a program that is cut short.
const KEPT_OF: u64 = 64;

/// Attempts to disturb an upgrade in time.
const TRIES: u64 = 3;

/// A way in which it is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Broken {
    /// It runs, and fails by itself.
    Program(Way),
    /// It may not be executed.
    NotExecutable,
    /// It is a text.
    NoProgram,
    /// Most of it is missing. (Its second half may be nothing but line numbers, and is not missed.)
    CutShort,
    /// It reads pools of another version than one that is there.
    AnotherFormat,
    /// It is killed while it takes over.
    Killed,
    /// It is stopped while it takes over.
    Stopped,
}

impl Broken {
    /// All, those first that take no bound of the daemon to come to nothing.
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Program(Way::EndsAfterGo),
            Self::AnotherFormat,
            Self::Killed,
            Self::NoProgram,
            Self::NotExecutable,
            Self::CutShort,
        ];
        let programs = Way::BEFORE.into_iter().chain(Way::AFTER);
        let programs = programs.map(Self::Program).filter(|way| !all.contains(way));
        let programs: Vec<Self> = programs.collect();
        all.extend(programs);
        all.push(Self::Stopped);
        all
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Program(way) => way.name(),
            Self::NotExecutable => "not-executable",
            Self::NoProgram => "no-program",
            Self::CutShort => "cut-short",
            Self::AnotherFormat => "another-format",
            Self::Killed => "killed",
            Self::Stopped => "stopped",
        }
    }

    /// Asks for the upgrade; returns the process that was the daemon before it, and how it came out.
    pub(super) fn tried(self, place: &Place, running: &Running) -> Result<(u32, Outcome), String> {
        let program = match self {
            Self::AnotherFormat => {
                let pool = NewerPool::put(place)?;
                let outcome = tried_once(&place.program(0), running);
                pool.remove()?;
                return outcome;
            }
            Self::Killed => return disturbed(place, running, Signal::KILL),
            Self::Stopped => return disturbed(place, running, Signal::STOP),
            Self::Program(_) | Self::NotExecutable | Self::NoProgram | Self::CutShort => {
                self.program(place)?
            }
        };
        tried_once(&program, running)
    }

    fn program(self, place: &Place) -> Result<PathBuf, String> {
        let name = self.name();
        let Self::Program(_) = self else {
            let path = place.put(&daemon_program()?, name)?;
            let broken = self.breaks(&path);
            broken.map_err(|error| format!("{}: {error}", path.display()))?;
            return Ok(path);
        };
        place.broken(name)
    }

    fn breaks(self, path: &Path) -> std::io::Result<()> {
        match self {
            Self::NotExecutable => fs::set_permissions(path, fs::Permissions::from_mode(0o644)),
            Self::NoProgram => fs::write(path, "no program\n"),
            _ => {
                let file = fs::File::options().write(true).open(path)?;
                file.set_len(file.metadata()?.len() / KEPT_OF)
            }
        }
    }
}

/// A pool of a version that no program knows yet.
struct NewerPool(PathBuf);

impl NewerPool {
    fn put(place: &Place) -> Result<Self, String> {
        let path = place.state_dir().join("newer.pool");
        drop(Pool::create(&path, 512, 7, b"{}").map_err(|error| error.to_string())?);
        let newer = Self(path);
        newer.raise_version().map_err(|error| error.to_string())?;
        Ok(newer)
    }

    fn raise_version(&self) -> std::io::Result<()> {
        let file = fs::File::options().read(true).write(true).open(&self.0)?;
        let mut cell = [0; 8];
        file.read_exact_at(&mut cell, VERSION_AT)?;
        let newer = u64::from_ne_bytes(cell) + 1;
        file.write_all_at(&newer.to_ne_bytes(), VERSION_AT)
    }

    fn remove(self) -> Result<(), String> {
        fs::remove_file(&self.0).map_err(|error| error.to_string())
    }
}

/// An upgrade to the right program, which gets this signal while it takes over. The old program stands still
/// meanwhile, so that it does not commit. On a busy machine the bench may come too late; then once more, with the
/// program that has become the daemon.
fn disturbed(place: &Place, running: &Running, signal: Signal) -> Result<(u32, Outcome), String> {
    for number in 0..TRIES {
        let tried = disturbed_once(&place.program(number), running, signal)?;
        if tried.1.is_err() {
            return Ok(tried);
        }
    }
    Err(format!("no upgrade of {TRIES} could be disturbed in time"))
}

fn tried_once(program: &Path, running: &Running) -> Result<(u32, Outcome), String> {
    let before = running.pid()?;
    let outcome = running.outcome(running.begin_upgrade(program)?)?;
    Ok((before, outcome))
}

fn disturbed_once(
    program: &Path,
    running: &Running,
    signal: Signal,
) -> Result<(u32, Outcome), String> {
    let before = running.pid()?;
    let client = running.begin_upgrade(program)?;
    let disturbed = disturb_first(before, signal);
    if let Ok(Some(successor)) = disturbed
        && signal == Signal::STOP
        && eventually(|| has_ended(before) || goes_on(before))
        && has_ended(before)
    {
        // It came too late: this is the daemon, and must not stay so.
        send(successor, Signal::CONT).map_err(|error| format!("signal: {error}"))?;
    }
    // Also if it could not be disturbed, the upgrade is awaited.
    let outcome = running.outcome(client)?;
    disturbed?;
    Ok((before, outcome))
}

/// Disturbs the upgrade of `old` with a priority beyond those of both programs. With its own, this thread runs when the
/// others have done all, and stops the old program as it commits. Without the right to such a priority it must do.
fn disturb_first(old: u32, signal: Signal) -> Result<Option<Pid>, String> {
    let is_first = match set_urgency(Urgency::Preempting(priority::DISTURBER)) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(%error, "the bench may come too late to disturb an upgrade");
            false
        }
    };
    let disturbed = disturb(old, signal);
    if is_first {
        set_urgency(Urgency::Ordinary).map_err(|error| format!("priority: {error}"))?;
    }
    disturbed.map_err(|error| format!("signal: {error}"))
}

/// Waits until `old` holds everything, and gives its successor this signal while it stands still. Returns the
/// successor, if it was not too late.
fn disturb(old: u32, signal: Signal) -> Result<Option<Pid>, Errno> {
    let known = pid_of(old)?;
    if !eventually(|| holds(old) || has_ended(old)) || !holds(old) {
        return Ok(None);
    }
    send(known, Signal::STOP)?;
    // A signal that was sent has come to nothing yet.
    let stands = eventually(|| is_stopped(old) || has_ended(old)) && holds(old);
    let successor = child_of(old).filter(|_| stands);
    let disturbed = successor.map(|successor| send(successor, signal));
    if let (Some(successor), Some(Ok(()))) = (successor, &disturbed) {
        // One that dies a little later would be told to go on.
        let number = successor.as_raw_pid().cast_unsigned();
        eventually(|| has_ended(number) || is_stopped(number));
    }
    send(known, Signal::CONT)?;
    disturbed.transpose()?;
    Ok(successor)
}

/// Sends a signal to a process, unless it has ended.
fn send(process: Pid, signal: Signal) -> Result<(), Errno> {
    match kill_process(process, signal) {
        Err(Errno::SRCH) => Ok(()),
        sent => sent,
    }
}

/// Whether the process has ended. (In the middle of an `exec` it has no words.)
fn has_ended(process: u32) -> bool {
    match fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => fields_of(&stat).is_some_and(|fields| fields.starts_with('Z')),
        Err(_) => true,
    }
}

/// Whether it stands still by a signal.
fn is_stopped(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| fields_of(&stat).is_some_and(|fields| fields.starts_with('T')))
}

fn pid_of(process: u32) -> Result<Pid, Errno> {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    pid.ok_or(Errno::SRCH)
}

/// Whether the process holds everything for a successor, and so has one thread. A daemon that has held and gone on
/// has the same words.
fn holds(process: u32) -> bool {
    threads_of_holder(process) == Some(1)
}

/// Whether the process has held everything, and is the daemon again.
fn goes_on(process: u32) -> bool {
    threads_of_holder(process).is_some_and(|threads| threads > 1)
}

/// Threads of a process that holds or has held. One that is about to end has no words any more.
fn threads_of_holder(process: u32) -> Option<usize> {
    let words = fs::read(format!("/proc/{process}/cmdline"));
    let is_holder = words.is_ok_and(|words| words.ends_with(b"\0hold\0"));
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    match (is_holder, threads) {
        (true, Ok(threads)) => Some(threads.count()),
        _ => None,
    }
}

/// A process that `parent` has started and not waited for.
fn child_of(parent: u32) -> Option<Pid> {
    let processes = fs::read_dir("/proc").ok().into_iter().flatten().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        parent_in(&stat) == Some(parent)
    })
    .and_then(Pid::from_raw)
}

/// What is behind the name, which is in parentheses: state, parent, and more.
fn fields_of(stat: &str) -> Option<&str> {
    stat.rsplit_once(") ").map(|(_, fields)| fields)
}

fn parent_in(stat: &str) -> Option<u32> {
    fields_of(stat)?.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_are_twenty_ways_with_names_of_their_own() {
        let names: BTreeSet<&str> = Broken::all().into_iter().map(Broken::name).collect();
        assert_eq!((names.len(), Broken::all().len()), (20, 20));
    }

    #[test]
    fn child_is_found_by_its_parent() {
        assert_eq!(parent_in("12 (a) b) S 7 12 12"), Some(7));
        assert_eq!(parent_in("no stat"), None);
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        assert!(child_of(std::process::id()).is_some());
        assert!(!has_ended(child.id()));
        let id = pid_of(child.id()).unwrap();
        assert!(!is_stopped(child.id()));
        kill_process(id, Signal::STOP).unwrap();
        assert!(eventually(|| is_stopped(child.id())));
        child.kill().unwrap();
        assert!(
            eventually(|| has_ended(child.id())),
            "nobody has waited for it"
        );
        child.wait().unwrap();
        assert!(has_ended(child.id()));
    }
}
