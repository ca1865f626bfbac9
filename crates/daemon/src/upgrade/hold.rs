// SPDX-License-Identifier: Apache-2.0
//! The old program while the new one takes over: it holds everything that must not fall, and does nothing.
//!
//! [`pass_on`] is the last thing that the daemon does: it leaves its descriptors open and executes its own
//! program again, as `pagetide hold`, with a record of what they are as its stdin. [`run()`] is that program: it
//! sends *Go* and decides who goes on.

use super::{
    Parts,
    prepare::{Prepared, SEND_WAIT},
    report::{UpgradeReport, UpgradeState},
};
use crate::{
    control::ControlError,
    notify,
    run::{self, name_process},
    settings::{RunSettings, Settings, from_text},
    signals,
};
use pagetide_handover::{
    Channel, HandoverError,
    message::{Go, Message},
};
use pagetide_report::outcome::CommandError;
use pagetide_sys::{hurry::Hurry, inherited};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid},
};
use serde::{Deserialize, Serialize};
use std::{
    convert::Infallible,
    fs::File,
    io::{Read, Seek, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio, exit},
    time::Duration,
};

/// Longest record that is read: a message and as many numbers.
const RECORD_BYTES_MAX: u64 = 32 << 20;

/// What the program that holds must know. It is read by the same program that has written it.
#[derive(Serialize, Deserialize)]
struct Record {
    go: Go,
    /// Numbers of the descriptors that `go` names.
    numbers: Vec<i32>,
    /// That of the socket to the successor.
    channel: i32,
    settings: String,
    /// Where this program lay when the daemon was started.
    own: PathBuf,
    upgrade: UpgradeReport,
    /// Of the process before VMs and disks waited for it.
    scheduling: i32,
}

/// Replaces this process by one that holds `parts` and lets the successor take over. Everything else that the
/// process has is gone then, as if it had been killed.
///
/// # Errors
/// The kernel does not execute the program. The daemon's work has stopped, so the process must end: whoever
/// starts it again recovers everything, as after a crash.
pub(crate) fn pass_on(
    prepared: Prepared,
    parts: Parts,
    settings: &str,
    own: &Path,
    hurry: Hurry,
) -> Result<Infallible, ControlError> {
    let failed = |error: std::io::Error| ControlError::failed(error.to_string());
    let Prepared {
        channel,
        process,
        report,
        ..
    } = prepared;
    let (go, fds) = parts.into_message();
    let numbers: Result<Vec<i32>, _> = fds.into_iter().map(inherited::pass_on).collect();
    let record = Record {
        go,
        numbers: numbers.map_err(failed)?,
        channel: inherited::pass_on(channel.into()).map_err(failed)?,
        settings: settings.to_owned(),
        own: own.to_owned(),
        upgrade: report,
        scheduling: hurry.leave(),
    };
    let record = written(&record).map_err(failed)?;
    // If the program is not executed, the successor ends because nobody holds the other end any more.
    process.leave();
    let error = Command::new("/proc/self/exe")
        .arg0("pagetide")
        .arg("hold")
        .stdin(Stdio::from(record))
        .exec();
    Err(failed(error))
}

fn written(record: &Record) -> std::io::Result<File> {
    let mut file = File::from(memfd_create("pagetide-upgrade", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(record)?)?;
    file.rewind()?;
    Ok(file)
}

fn read() -> std::io::Result<Record> {
    let record = File::from(inherited::take_stdin()?);
    let mut text = Vec::new();
    record.take(RECORD_BYTES_MAX).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Lets the successor take over, and goes on as the daemon if it does not.
///
/// # Errors
/// As for `pagetide run`.
pub(crate) fn run() -> Result<(), CommandError> {
    let no_record = |error: std::io::Error| {
        CommandError::refused(format!(
            "this is a part of `pagetide upgrade`, and not started by hand ({error})"
        ))
    };
    signals::keep().map_err(no_record)?;
    let record = read().map_err(no_record)?;
    let hurry = Hurry::inherited(record.scheduling);
    let numbers = record.numbers.iter();
    let fds: Result<Vec<OwnedFd>, _> = numbers.map(|fd| inherited::take(*fd)).collect();
    let fds = fds.map_err(no_record)?;
    let channel = inherited::take(record.channel).map_err(no_record)?;
    let channel = Channel::of(channel).map_err(CommandError::failed)?;
    name_process();
    let given = from_text(Path::new("of the upgrade"), &record.settings);
    let given = given.map_err(CommandError::refused)?;
    let settings = RunSettings::merge(given, Default::default());
    run::start_log(&settings)?;
    let successor = record.upgrade.successor.unwrap_or_default();
    let wait = Duration::from_millis(settings.upgrade_serving_ms.into());
    tracing::info!(
        successor,
        "this process holds the VMs until the new program serves"
    );
    let reason = match hand_over(&channel, &record.go, &fds, wait) {
        Ok(()) => {
            notify::main_process(successor);
            if let Some(successor) = pid_of(successor) {
                signals::pass_to(successor);
            }
            tracing::info!(successor, "the new program serves; this process ends");
            exit(0);
        }
        Err(error) => error.to_string(),
    };
    tracing::error!(
        successor,
        reason,
        "the new program has failed; the old one goes on"
    );
    end(successor)?;
    // Not before: a successor that finds nobody at the other end goes on.
    drop(channel);
    let parts = Parts::from_message(&record.go, fds.into_iter().collect());
    let parts = parts.map_err(CommandError::failed)?;
    let upgrade = record.upgrade.ended(UpgradeState::RolledBack, reason);
    run::go_on(&settings, parts, &record.own, upgrade, hurry)
}

/// Why the successor has not taken over.
#[derive(Debug, thiserror::Error)]
enum NotTaken {
    #[error("it has failed: {0}")]
    Channel(#[from] HandoverError),
    #[error("it refuses: {0}")]
    Refused(String),
}

/// Once this has returned without an error, the successor is the daemon.
fn hand_over(channel: &Channel, go: &Go, fds: &[OwnedFd], wait: Duration) -> Result<(), NotTaken> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    channel.send(&Message::Go(go.clone()), &fds, SEND_WAIT)?;
    match channel.receive(wait)?.0 {
        Message::Serving => Ok(channel.send(&Message::Commit, &[], SEND_WAIT)?),
        Message::Refused(refused) => Err(NotTaken::Refused(refused.reason)),
        other => Err(other.instead_of("serving").into()),
    }
}

fn pid_of(process: u32) -> Option<Pid> {
    i32::try_from(process).ok().and_then(Pid::from_raw)
}

/// Kills the successor and waits until nothing of it runs any more. This takes no descriptor, which might not be
/// had: the process must end whatever else fails.
fn end(successor: u32) -> Result<(), CommandError> {
    let Some(pid) = pid_of(successor) else {
        return Err(CommandError::failed("the new program has no process"));
    };
    // It is a child that nobody has waited for, so its number is still its own.
    if let Err(error) = kill_process(pid, Signal::KILL) {
        tracing::debug!(%error, successor, "the new program had ended");
    }
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED) {
            Ok(_) | Err(rustix::io::Errno::CHILD) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(CommandError::failed(format!(
                    "the new program cannot be waited for: {error}"
                )));
            }
        }
    }
}
