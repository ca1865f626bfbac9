// SPDX-License-Identifier: Apache-2.0
//! [`prepare`]: starts the new program, which checks itself, while the daemon serves on.

use super::report::{UpgradeReport, UpgradeState};
use crate::control::ControlError;
use pagetide_handover::{
    Channel, HandoverError, Program,
    message::{Message, Offer, VERSION},
};
use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// How long the new program may take to read an offer: it fits into the socket's buffer.
pub(super) const SEND_WAIT: Duration = Duration::from_secs(5);

/// A new program that is ready and waits. It is killed when this is dropped.
pub(crate) struct Prepared {
    pub(super) channel: Channel,
    pub(super) process: Successor,
    pub(super) report: UpgradeReport,
    /// What it has said that it knows.
    requires: Vec<String>,
}

/// Its process, killed and waited for when dropped.
pub(super) struct Successor(Option<Child>);

impl Successor {
    /// Its pid; the process stays a child that is waited for elsewhere.
    pub(super) fn leave(mut self) -> u32 {
        self.0.take().map_or(0, |child| child.id())
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take()
            && let Err(error) = child.kill().and_then(|()| child.wait())
        {
            tracing::error!(%error, pid = child.id(), "the program of an upgrade that was given up cannot be ended");
        }
    }
}

impl Prepared {
    /// The upgrade as it stands.
    pub(crate) fn report(&self) -> &UpgradeReport {
        &self.report
    }

    /// True if it has said that it knows what these are.
    pub(crate) fn knows(&self, required: &[&str]) -> bool {
        required
            .iter()
            .all(|what| self.requires.iter().any(|known| known == what))
    }

    /// The process ends unused.
    pub(crate) fn give_up(self, reason: &str) -> UpgradeReport {
        tracing::warn!(reason, "an upgrade is given up; nothing has been stopped");
        self.report
            .clone()
            .ended(UpgradeState::GivenUp, reason.to_owned())
    }
}

/// Starts the program at `path`, which must know what the hand-over `requires`, and waits until it is ready.
///
/// # Errors
/// It may not become the daemon, does not start, refuses, or is not ready in time. Nothing has happened then.
pub(crate) fn prepare(
    path: &Path,
    settings: &str,
    requires: &[&str],
    ready_wait: Duration,
) -> Result<Prepared, ControlError> {
    let program = Program::open(path).map_err(|error| ControlError::refused(error.to_string()))?;
    let (channel, process) = start(&program)?;
    let pid = process.0.as_ref().map_or(0, Child::id);
    let requires: Vec<String> = requires.iter().map(|what| (*what).to_owned()).collect();
    let offer = Message::Offer(Offer {
        version: VERSION,
        requires: requires.clone(),
        program: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        settings: settings.to_owned(),
    });
    // A program that has ended is told of by what it has said, or not said.
    let sent = channel.send(&offer, &[], SEND_WAIT);
    let answer = channel.receive(ready_wait);
    let name = path.display();
    let ready = match (answer, sent) {
        (Ok((Message::Ready(ready), _)), Ok(())) => ready,
        (Ok((Message::Refused(refused), _)), _) => {
            return Err(ControlError::refused(format!(
                "{name} refuses to take over: {}",
                refused.reason
            )));
        }
        (Ok((other, _)), Ok(())) => return Err(not_ready(path, &other.instead_of("ready"))),
        (Err(HandoverError::HungUp), _) => {
            return Err(ControlError::failed(format!(
                "{name} has ended without a word: is it a pagetide that can take over? See the log"
            )));
        }
        (Err(error), _) | (_, Err(error)) => return Err(not_ready(path, &error)),
    };
    tracing::info!(program = %name, pid, version = ready.program, "the new program is ready");
    let report = UpgradeReport {
        successor: Some(pid),
        program: Some(name.to_string()),
        ..UpgradeReport::none().ended(UpgradeState::UnderWay, None)
    };
    Ok(Prepared {
        channel,
        process,
        report,
        requires,
    })
}

fn start(program: &Program) -> Result<(Channel, Successor), ControlError> {
    let failed = |error: std::io::Error| {
        ControlError::failed(format!(
            "{} does not start: {error}",
            program.path().display()
        ))
    };
    let (channel, theirs) = Channel::pair().map_err(failed)?;
    let child = Command::new(program.by_descriptor())
        .arg0("pagetide")
        .arg("successor")
        .stdin(Stdio::from(theirs))
        .spawn()
        .map_err(failed)?;
    Ok((channel, Successor(Some(child))))
}

fn not_ready(path: &Path, error: &HandoverError) -> ControlError {
    ControlError::failed(format!("{} is not ready: {error}", path.display()))
}
