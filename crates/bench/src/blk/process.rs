// SPDX-License-Identifier: Apache-2.0
//! The processes of the bench: started on their CPUs, controlled by lines, ended with it.

use super::{
    backend::{BackendReport, LogSwitch},
    frontend::{Run, RunResult},
};
use crate::harness::rounds::progress;
use serde::de::DeserializeOwned;
use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

/// Longest wait for a back end to listen.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a part of the bench failed.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// It could not be started.
    #[error("{program} cannot be started: {source}")]
    Start {
        /// The program.
        program: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It did not listen.
    #[error("{program} does not listen on {socket}; see its messages above")]
    NotListening {
        /// The program.
        program: String,
        /// The socket.
        socket: PathBuf,
    },
    /// Some of its requests failed.
    #[error("{0} requests failed")]
    Requests(u64),
    /// It does not answer.
    #[error("{program} does not answer: {reason}")]
    Silent {
        /// The program.
        program: String,
        /// Why.
        reason: String,
    },
}

/// CPUs of the two sides.
#[derive(Debug, Clone, Copy)]
pub struct SideCpus {
    /// Of back ends.
    pub backend: usize,
    /// Of front ends.
    pub frontend: usize,
}

impl SideCpus {
    /// The last CPU for back ends and the one before it for front ends; the same if there is one.
    pub fn choose() -> Self {
        let cpus = pagetide_sys::cpu::affinity().unwrap_or_default();
        let backend = cpus.last().copied().unwrap_or(0);
        let frontend = cpus.iter().rev().nth(1).copied().unwrap_or(backend);
        Self { backend, frontend }
    }
}

/// A process that is ended when it is dropped.
pub(crate) struct Part {
    program: String,
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Part {
    pub fn start(program: &str, arguments: &[&str], cpu: usize) -> Result<Self, PartError> {
        let mut child = Command::new("taskset")
            .args(["-c", &cpu.to_string(), program])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| PartError::Start {
                program: program.to_owned(),
                source,
            })?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            program: program.to_owned(),
            child,
            input,
            output: output.map(BufReader::new),
        })
    }

    /// This program with a hidden command.
    pub fn ourselves(arguments: &[&str], cpu: usize) -> Result<Self, PartError> {
        let program = std::env::current_exe().map_err(|source| PartError::Start {
            program: "pagetide-lab".into(),
            source,
        })?;
        Self::start(&program.to_string_lossy(), arguments, cpu)
    }

    fn silent(&self, reason: impl std::fmt::Display) -> PartError {
        PartError::Silent {
            program: self.program.clone(),
            reason: reason.to_string(),
        }
    }

    /// CPU time of all its threads so far.
    fn cpu_ns(&self) -> Result<u64, PartError> {
        let tasks = format!("/proc/{}/task", self.child.id());
        let mut total = 0;
        for task in std::fs::read_dir(&tasks).map_err(|e| self.silent(e))? {
            let path = task.map_err(|e| self.silent(e))?.path().join("schedstat");
            // A worker thread may end meanwhile; its time is lost to both sides alike.
            if let Ok(line) = std::fs::read_to_string(path) {
                let first = line.split(' ').next().unwrap_or_default();
                total += first.parse::<u64>().map_err(|e| self.silent(e))?;
            }
        }
        Ok(total)
    }

    pub fn read_line(&mut self) -> Result<String, PartError> {
        let mut line = String::new();
        let read = match &mut self.output {
            Some(output) => output.read_line(&mut line),
            None => Ok(0),
        };
        match read {
            Ok(0) => Err(self.silent("it has ended")),
            Ok(_) => Ok(line),
            Err(error) => Err(self.silent(error)),
        }
    }

    pub fn ask<T: DeserializeOwned>(&mut self, line: &str) -> Result<T, PartError> {
        if let Some(input) = &mut self.input {
            let sent = writeln!(input, "{line}").and_then(|()| input.flush());
            sent.map_err(|error| self.silent(error))?;
        }
        let answer = self.read_line()?;
        serde_json::from_str(&answer).map_err(|error| self.silent(error))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // The end of its input ends ours; the peer is killed.
        drop(self.input.take());
        if self.program.contains("qemu")
            && let Err(error) = self.child.kill()
        {
            progress(
                "blk",
                format_args!("{} could not be ended: {error}", self.program),
            );
        }
        if let Err(error) = self.child.wait() {
            progress("blk", format_args!("waiting for {}: {error}", self.program));
        }
    }
}

/// A back end.
pub struct Backend(Part);

impl Backend {
    /// Ours. `options` are further ones of its command line.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn ours(
        socket: &Path,
        image: &Path,
        state_dir: &Path,
        options: &[&str],
        at: SideCpus,
    ) -> Result<Self, PartError> {
        let (socket_text, image, state_dir) = (text(socket), text(image), text(state_dir));
        let mut arguments = vec![
            "bench-part",
            "blk-backend",
            "--socket",
            &socket_text,
            "--image",
            &image,
            "--state-dir",
            &state_dir,
        ];
        arguments.extend(options);
        let part = Part::ourselves(&arguments, at.backend)?;
        Self(part).listening(socket)
    }

    /// The peer: QEMU's storage daemon with the same kind of I/O and its own iothread.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn qsd(socket: &Path, image: &Path, at: SideCpus) -> Result<Self, PartError> {
        let blockdev = format!(
            "driver=file,node-name=f,filename={},aio=io_uring,cache.direct=on",
            text(image)
        );
        let export = format!(
            "type=vhost-user-blk,id=e,addr.type=unix,addr.path={},node-name=f,iothread=i0,writable=on,num-queues=1",
            text(socket)
        );
        let arguments = [
            "--blockdev",
            &blockdev,
            "--object",
            "iothread,id=i0",
            "--export",
            &export,
        ];
        let part = Part::start("qemu-storage-daemon", &arguments, at.backend)?;
        Self(part).listening(socket)
    }

    fn listening(mut self, socket: &Path) -> Result<Self, PartError> {
        let began = Instant::now();
        while !socket.exists() {
            let ended = self.0.child.try_wait().is_ok_and(|status| status.is_some());
            if ended || began.elapsed() > START_TIMEOUT {
                return Err(PartError::NotListening {
                    program: self.0.program.clone(),
                    socket: socket.to_owned(),
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(self)
    }

    /// CPU time of all its threads so far.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn cpu_ns(&self) -> Result<u64, PartError> {
        self.0.cpu_ns()
    }

    /// CPU time so far of its threads of this name.
    ///
    /// # Errors
    /// [`PartError`], also if there is none.
    pub fn thread_cpu_ns(&self, name: &str) -> Result<u64, PartError> {
        let tasks = format!("/proc/{}/task", self.0.child.id());
        let (mut total, mut found) = (0, false);
        for task in std::fs::read_dir(&tasks).map_err(|e| self.0.silent(e))? {
            let path = task.map_err(|e| self.0.silent(e))?.path();
            let is_it = |comm: String| comm.trim_end() == name;
            if std::fs::read_to_string(path.join("comm")).is_ok_and(is_it) {
                let line = std::fs::read_to_string(path.join("schedstat"));
                let line = line.map_err(|e| self.0.silent(e))?;
                let first = line.split(' ').next().unwrap_or_default();
                total += first.parse::<u64>().map_err(|e| self.0.silent(e))?;
                found = true;
            }
        }
        match found {
            true => Ok(total),
            false => Err(self.0.silent(format!("it has no thread {name}"))),
        }
    }

    /// Switches the access log of ours; returns its report.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn switch(&mut self, switch: LogSwitch) -> Result<BackendReport, PartError> {
        self.0.ask(switch.line())
    }

    /// The report of ours.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn report(&mut self) -> Result<BackendReport, PartError> {
        self.0.ask("report")
    }
}

/// A front end, connected.
pub struct Frontend(Part);

impl Frontend {
    /// Connects to the back end that listens on `socket`.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn start(socket: &Path, at: SideCpus) -> Result<Self, PartError> {
        let socket = text(socket);
        let arguments = ["bench-part", "blk-frontend", "--socket", &socket];
        let mut part = Part::ourselves(&arguments, at.frontend)?;
        part.read_line()?;
        Ok(Self(part))
    }

    /// CPU time of all its threads so far.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn cpu_ns(&self) -> Result<u64, PartError> {
        self.0.cpu_ns()
    }

    /// Does one run.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn run(&mut self, run: Run) -> Result<RunResult, PartError> {
        let line = serde_json::to_string(&run).map_err(|e| self.0.silent(e))?;
        self.0.ask(&line)
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
