// SPDX-License-Identifier: Apache-2.0
//! A process of a bench that executes orders: one line of JSON each on its input (or other text), answered
//! by one line on its output. The end of input ends it.
//!
//! It is in its own process group, so that a Ctrl-C reaches only the bench, which then ends it in order.
//! Drop ends it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

/// A program is recognised as a VMM by its name (or by its use of KVM, which stand-ins do not have).
const VMM_PROGRAM: &str = "qemu-stand-in";

/// This program, to be started in another role.
pub(super) fn this_program() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))
}

/// The daemon's program, which lies beside this one.
pub(super) fn daemon_program() -> Result<PathBuf, String> {
    beside("pagetide", "pagetide")
}

/// A program of the project's test kit, which lies beside this one.
pub(super) fn kit_program(name: &str) -> Result<PathBuf, String> {
    beside(name, "pagetide-guestkit")
}

fn beside(name: &str, package: &str) -> Result<PathBuf, String> {
    let beside = this_program()?.with_file_name(name);
    if beside.exists() {
        return Ok(beside);
    }
    Err(format!(
        "there is no {}; build it by `cargo build --release -p {package}`",
        beside.display()
    ))
}

/// This program in `dir` under a name that is recognised as a VMM's.
pub(super) fn vmm_program(dir: &Path) -> Result<PathBuf, String> {
    let program = dir.join(VMM_PROGRAM);
    if program.exists() {
        return Ok(program);
    }
    let ours = this_program()?;
    if std::fs::hard_link(&ours, &program).is_err() {
        std::fs::copy(&ours, &program)
            .map_err(|error| format!("cannot copy to {}: {error}", program.display()))?;
    }
    Ok(program)
}

/// Prints `answer` on the output of such a process.
pub(super) fn say<A: Serialize>(answer: &A) -> Result<(), String> {
    let line = serde_json::to_string(answer).map_err(|error| error.to_string())?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(|error| error.to_string())
}

/// Such a process, seen from the bench.
pub(super) struct Ordered {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Ordered {
    /// Starts `command`.
    pub(super) fn start(command: &mut Command) -> Result<Self, String> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("the guest cannot be started: {error}"))?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            child,
            orders,
            answers: BufReader::new(answers.ok_or("the guest has no output")?),
        })
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives it an order.
    pub(super) fn order<O: Serialize>(&mut self, order: &O) -> Result<(), String> {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        self.tell(&(line + "\n"))
    }

    /// Writes `text` to its input, for a process that does not use JSON.
    pub(super) fn tell(&mut self, text: &str) -> Result<(), String> {
        let orders = self.orders.as_mut().ok_or("the guest has ended")?;
        orders
            .write_all(text.as_bytes())
            .and_then(|()| orders.flush())
            .map_err(|error| format!("the guest takes no orders: {error}"))
    }

    /// Waits for its next answer.
    pub(super) fn answer<A: DeserializeOwned>(&mut self) -> Result<A, String> {
        let line = self.line()?;
        serde_json::from_str(&line).map_err(|error| format!("the guest said {line:?}: {error}"))
    }

    /// Waits at most `wait` for the beginning of its next line, and without limit for the rest.
    pub(super) fn line_within(&mut self, wait: Duration) -> Result<String, String> {
        if self.answers.buffer().is_empty() {
            let deadline = Timespec::try_from(wait).map_err(|error| error.to_string())?;
            let mut heard = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
            let ready = rustix::io::retry_on_intr(|| poll(&mut heard, Some(&deadline)));
            if ready.map_err(|error| format!("cannot read from the guest: {error}"))? == 0 {
                return Err(format!("the guest is silent for {} s", wait.as_secs()));
            }
        }
        Ok(self.line()?.trim().to_owned())
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        let read = self
            .answers
            .read_line(&mut line)
            .map_err(|error| format!("cannot read from the guest: {error}"))?;
        if read == 0 {
            return Err("the guest has ended; see its messages above".into());
        }
        Ok(line)
    }
}

impl Drop for Ordered {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It may be stuck in a fault that is no longer served.
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            tracing::error!(%error, "the bench's guest could not be ended");
        }
    }
}
