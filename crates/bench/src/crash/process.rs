// SPDX-License-Identifier: Apache-2.0
//! A process of the product that is killed and started again on the same state: the daemon, or that of its devices.
//!
//! ```text
//!   killed ─► reaped ─► spawned ─────► main ───────► ready
//!                          └─ its start ─┘             by NOTIFY_SOCKET, as a service manager hears it
//! ```
//! The program itself tells when its `main` began (`MONOTONIC_USEC` of its first message), so what the kernel needs to
//! start a program is known exactly, and is not counted as recovery.
//!
//! Each is the leader of a process group of its own. An upgrade makes a further process in that group, which goes on
//! when the leader has ended; so the process that serves is found by the group.

use hyper::Method;
use pagetide_daemon::client::Client;
use pagetide_sys::clock::now_ns;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{
    ffi::OsString,
    fs::File,
    os::{
        fd::OwnedFd,
        unix::{net::UnixDatagram, process::CommandExt as _},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Longest wait for a process to end, or to serve.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// Lines of a log in an error.
const LOG_LINES: usize = 12;

/// What a process is started with.
pub(super) struct Role {
    /// Its program, in a directory that is root's.
    pub program: PathBuf,
    /// `run` or `dpu`, and settings.
    pub arguments: Vec<OsString>,
    /// Its state.
    pub state_dir: PathBuf,
}

/// See the module.
pub(super) struct Served {
    role: Role,
    log: PathBuf,
    client: Client,
    runtime: tokio::runtime::Runtime,
    life: Option<Life>,
    lives: u64,
}

struct Life {
    leader: Child,
    news: UnixDatagram,
    spawned_ns: u64,
    main_ns: Option<u64>,
    ready_ns: Option<u64>,
}

/// A request that somebody else waits for.
pub(super) struct Asked(JoinHandle<Result<Value, String>>);

impl Asked {
    /// True until there is an answer.
    pub(super) fn is_under_way(&self) -> bool {
        !self.0.is_finished()
    }

    /// Waits for the answer.
    pub(super) fn answer(self) -> Result<Value, String> {
        let answer = self.0.join();
        answer.map_err(|_| "the thread that waits for an answer has panicked".to_owned())?
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, String> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())
}

fn pid_of(pid: u32) -> Option<Pid> {
    i32::try_from(pid).map_or(None, Pid::from_raw)
}

/// Processes of the group `leader` that have not ended.
fn members(leader: u32) -> Vec<u32> {
    let Ok(all) = procfs_entries() else {
        return Vec::new();
    };
    let is_member = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After the name: state, parent, group.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        let mut fields = fields.split(' ');
        let (state, group) = (fields.next(), fields.nth(1));
        state != Some("Z") && group == Some(&leader.to_string())
    };
    all.into_iter().filter(is_member).collect()
}

fn procfs_entries() -> std::io::Result<Vec<u32>> {
    let entries = std::fs::read_dir("/proc")?;
    let pid = |entry: std::io::Result<std::fs::DirEntry>| -> Option<u32> {
        let name = entry.map_or(OsString::new(), |entry| entry.file_name());
        name.to_str()?.parse().ok()
    };
    Ok(entries.filter_map(pid).collect())
}

/// Waits until the process has ended.
fn wait_for_end(process: &OwnedFd) -> Result<(), String> {
    let wait = Timespec::try_from(PATIENCE).map_err(|error| error.to_string())?;
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&wait))) {
        Ok(0) => Err("a killed process does not end".into()),
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

impl Served {
    /// Starts the process of `role`, which may find state of an earlier one, and waits until it serves.
    pub(super) fn start(role: Role) -> Result<Self, String> {
        std::fs::create_dir_all(&role.state_dir).map_err(|error| error.to_string())?;
        let client = Client::new(&role.state_dir.join("api.sock")).with_ask_wait(PATIENCE);
        let mut served = Self {
            log: role.state_dir.with_extension("log"),
            role,
            client,
            runtime: runtime()?,
            life: None,
            lives: 0,
        };
        served.spawn()?;
        served.wait_until_ready()?;
        Ok(served)
    }

    /// Starts it, and does not wait.
    pub(super) fn spawn(&mut self) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.role.program.display());
        let log = File::options().create(true).append(true).open(&self.log);
        let news = self
            .role
            .state_dir
            .with_extension(format!("news{}", self.lives));
        let ear = UnixDatagram::bind(&news).map_err(failed)?;
        ear.set_nonblocking(true).map_err(failed)?;
        let mut command = Command::new(&self.role.program);
        command
            .args(&self.role.arguments)
            .arg("--state-dir")
            .arg(&self.role.state_dir)
            .env("NOTIFY_SOCKET", &news)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.map_err(failed)?)
            .process_group(0);
        let spawned_ns = now_ns();
        let leader = command.spawn().map_err(failed)?;
        self.lives += 1;
        self.life = Some(Life {
            leader,
            news: ear,
            spawned_ns,
            main_ns: None,
            ready_ns: None,
        });
        Ok(())
    }

    /// Takes what the process has told.
    fn listen(&mut self) {
        let Some(life) = &mut self.life else { return };
        let mut told = [0; 256];
        while let Ok(bytes) = life.news.recv(&mut told) {
            let text = String::from_utf8_lossy(&told[..bytes]).into_owned();
            for line in text.lines() {
                match line.split_once('=') {
                    Some(("MONOTONIC_USEC", us)) if life.main_ns.is_none() => {
                        life.main_ns = us.parse::<u64>().map_or(None, |us| Some(us * 1000));
                    }
                    Some(("READY", "1")) => life.ready_ns = Some(now_ns()),
                    _ => {}
                }
            }
        }
    }

    /// True if it serves.
    pub(super) fn is_ready(&mut self) -> bool {
        self.listen();
        self.life
            .as_ref()
            .is_some_and(|life| life.ready_ns.is_some())
    }

    /// Waits until it serves.
    pub(super) fn wait_until_ready(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        while !self.is_ready() {
            let has_ended = self
                .life
                .as_mut()
                .is_none_or(|life| matches!(life.leader.try_wait(), Ok(Some(_)) | Err(_)));
            if has_ended || begun.elapsed() > PATIENCE {
                let what = match has_ended {
                    true => "a successor has ended by itself",
                    false => "a successor does not serve",
                };
                return Err(self.with_log(what));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Time from its spawn to its `main`, or so far; 0 if it was spawned before `since_ns`.
    pub(super) fn start_ns_since(&mut self, since_ns: u64) -> u64 {
        self.listen();
        match &self.life {
            Some(life) if life.spawned_ns >= since_ns => {
                let main_ns = life.main_ns.unwrap_or_else(now_ns);
                main_ns.saturating_sub(life.spawned_ns)
            }
            _ => 0,
        }
    }

    /// Time from its spawn to its service.
    pub(super) fn recovery_ns(&mut self) -> u64 {
        self.listen();
        let life = self.life.as_ref();
        life.and_then(|life| Some(life.ready_ns?.saturating_sub(life.spawned_ns)))
            .unwrap_or(0)
    }

    /// Processes that live: more than one during an upgrade, the leader first.
    pub(super) fn pids(&self) -> Vec<u32> {
        // There is a group 0, the kernel's.
        let Some(leader) = self.life.as_ref().map(|life| life.leader.id()) else {
            return Vec::new();
        };
        let mut all = members(leader);
        all.sort_by_key(|pid| (*pid != leader, *pid));
        all
    }

    /// Kills all its processes by SIGKILL, and waits until none is left. Returns when it was.
    pub(super) fn kill(&mut self) -> Result<u64, String> {
        let Some(life) = &mut self.life else {
            return Ok(now_ns());
        };
        let leader = life.leader.id();
        let Some(group) = pid_of(leader) else {
            return Err("a process has no number".into());
        };
        // Opened before the signal: afterwards a number may be another process'.
        let open = |pid: u32| pid_of(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let others = members(leader).into_iter().filter(|pid| *pid != leader);
        let others: Vec<OwnedFd> = others.filter_map(open).filter_map(Result::ok).collect();
        let at = now_ns();
        match kill_process_group(group, Signal::KILL) {
            // It has ended already, and so have all.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(format!("a process cannot be killed: {error}")),
        }
        let life = self.life.take();
        if let Some(mut life) = life {
            life.leader.wait().map_err(|error| error.to_string())?;
        }
        others.iter().try_for_each(wait_for_end)?;
        Ok(at)
    }

    /// Kills one of its processes, and waits until it has ended. Returns when it was.
    pub(super) fn kill_one(&mut self, pid: u32) -> Result<u64, String> {
        let Some(raw) = pid_of(pid) else {
            return Err("a process has no number".into());
        };
        let process = pidfd_open(raw, PidfdFlags::empty());
        let at = now_ns();
        match (kill_process(raw, Signal::KILL), process) {
            (Ok(()), Ok(process)) => wait_for_end(&process).map(|()| at),
            // It has ended by itself: an old program does at the end of an upgrade.
            _ => Ok(at),
        }
    }

    /// Asks for something.
    pub(super) fn ask<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        self.runtime
            .block_on(self.client.ask(Method::GET, path))
            .map_err(|error| self.with_log(error))
    }

    /// Asks, whether there is somebody to answer or not.
    pub(super) fn try_ask(&self, path: &str) -> Option<Value> {
        self.runtime
            .block_on(self.client.ask(Method::GET, path))
            .ok()
    }

    /// Orders something and waits for the answer.
    pub(super) fn order<B: Serialize>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<Value, String> {
        self.runtime
            .block_on(self.client.send(method, path, body))
            .map_err(|error| self.with_log(error))
    }

    /// Orders something that another thread waits for.
    pub(super) fn order_aside(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Asked, String> {
        let (client, path, runtime) = (self.client.clone(), path.to_owned(), runtime()?);
        let asked = std::thread::Builder::new().spawn(move || {
            let answer = match body {
                Some(body) => runtime.block_on(client.send(method, &path, &body)),
                None => runtime.block_on(client.ask(method, &path)),
            };
            answer.map_err(|error| error.to_string())
        });
        asked.map(Asked).map_err(|error| error.to_string())
    }

    /// Its log.
    pub(super) fn log(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// An error with the end of its log.
    pub(super) fn with_log(&self, error: impl std::fmt::Display) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n  ");
        format!(
            "{error}; the log of {} ends with\n  {last}",
            self.log.display()
        )
    }

    /// Ends it in order.
    pub(super) fn end(&mut self) -> Result<(), String> {
        let pids = self.pids();
        for pid in &pids {
            if let Some(pid) = pid_of(*pid) {
                kill_process(pid, Signal::TERM).map_err(|error| error.to_string())?;
            }
        }
        let begun = Instant::now();
        while !self.pids().is_empty() {
            if let Some(life) = &mut self.life {
                life.leader.try_wait().map_err(|error| error.to_string())?;
            }
            if begun.elapsed() > PATIENCE {
                return Err(self.with_log("it does not end"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::error!(%error, "a process of the bench could not be ended");
        }
    }
}
