// SPDX-License-Identifier: Apache-2.0
//! The programs and the daemon of the bench.
//!
//! Only a program that is root's alone may become the daemon, so copies of it lie in a directory of root's. The
//! daemon's process changes with each upgrade, and only the first one is a child of the bench.

use crate::{
    daemon::{Daemon, directory_in},
    fault::process::add_blk_of,
    orders::{daemon_program, this_program},
    programs::Programs,
};
use hyper::Method;
use pagetide_daemon::{
    api::{AttachBody, Health, ReclaimBody},
    client::vm_path,
    control::{ReclaimReport, VmReport},
    upgrade::UpgradeReport,
};
use pagetide_sys::process::ProcessFd;
use rustix::process::Signal;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Name of this program beside them.
const LAB: &str = "pagetide-lab";
/// Longest wait for anything: hand-overs that fail take as long as the daemon's bounds, which are shorter.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Bounds of the daemon, shorter than by default so that programs that hang do not take long.
const SETTINGS: [&str; 2] = ["--upgrade-ready-ms=2000", "--upgrade-serving-ms=2000"];

/// Directories that a run needs, removed with it.
pub(super) struct Place {
    programs: Programs,
    state: tempfile::TempDir,
    files: tempfile::TempDir,
}

impl Place {
    /// Puts the daemon's program there twice, so that each upgrade is to another file.
    pub(super) fn new() -> Result<Self, String> {
        let place = Self {
            programs: Programs::new()?,
            state: directory_in(Path::new("/dev/shm"))?,
            files: directory_in(&std::env::temp_dir())?,
        };
        for number in 0..2 {
            place.put(&daemon_program()?, &Self::name(number))?;
        }
        place.put(&this_program()?, LAB)?;
        Ok(place)
    }

    fn name(number: u64) -> String {
        format!("pagetide-{}", number % 2)
    }

    /// The program of the upgrade with this number.
    pub(super) fn program(&self, number: u64) -> PathBuf {
        self.programs.at(&Self::name(number))
    }

    /// A copy of `program` under this name.
    pub(super) fn put(&self, program: &Path, name: &str) -> Result<PathBuf, String> {
        self.programs.put(program, name)
    }

    /// This program under the name of a way to fail.
    pub(super) fn broken(&self, name: &str) -> Result<PathBuf, String> {
        let path = self.programs.at(name);
        let linked = fs::hard_link(self.programs.at(LAB), &path);
        linked.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }

    /// For files of guests.
    pub(super) fn files(&self) -> &Path {
        self.files.path()
    }

    /// Where the daemon has its state.
    pub(super) fn state_dir(&self) -> PathBuf {
        self.state.path().join("daemon")
    }

    /// A disk's socket and its image, of so many bytes and in memory.
    pub(super) fn disk(&self, name: &str, bytes: u64) -> Result<(PathBuf, PathBuf), String> {
        let path = |end| self.state.path().join(format!("{name}.{end}"));
        let (socket, image) = (path("sock"), path("image"));
        let made = fs::File::create(&image).and_then(|file| file.set_len(bytes));
        made.map_err(|error| format!("{}: {error}", image.display()))?;
        Ok((socket, image))
    }
}

/// The daemon, whichever process it is. It is ended when this is dropped.
pub(super) struct Running {
    daemon: Daemon,
    socket: PathBuf,
}

/// How an upgrade came out.
pub(super) type Outcome = Result<UpgradeReport, String>;

impl Running {
    pub(super) fn start(place: &Place, ram_bytes: u64) -> Result<Self, String> {
        let state_dir = place.state_dir();
        Ok(Self {
            daemon: Daemon::start_for(&state_dir, &SETTINGS, ram_bytes)?,
            socket: state_dir.join("api.sock"),
        })
    }

    /// Adds a disk, with as many queues as a stock guest wants.
    pub(super) fn add_disk(&self, (socket, image): &(PathBuf, PathBuf)) -> Result<(), String> {
        add_blk_of(&self.daemon, socket, image, 2)
    }

    /// Takes a VMM over.
    pub(super) fn attach(&self, name: &str, pid: u32) -> Result<(), String> {
        let body = AttachBody {
            pid,
            name: Some(name.to_owned()),
            limit_bytes: None,
            weight: None,
            floor_bytes: None,
        };
        let vm: VmReport = self.daemon.send("/v1/vms", &body)?;
        match vm.eviction_blockers.first() {
            None => Ok(()),
            Some(blocker) => Err(format!("nothing of {name} can be evicted: {blocker}")),
        }
    }

    /// Evicts so many bytes of a VM, or all that can be: so its vCPUs fault from now on.
    pub(super) fn evict(&self, name: &str, bytes: Option<u64>) -> Result<(), String> {
        let path = vm_path(name) + "/reclaim";
        let _done: ReclaimReport = self.daemon.send(&path, &ReclaimBody { bytes })?;
        Ok(())
    }

    /// Releases a VM.
    pub(super) fn detach(&self, name: &str) -> Result<(), String> {
        let _gone: Value = self.daemon.ask(Method::DELETE, &vm_path(name))?;
        Ok(())
    }

    /// Requests of disks that it counts as failed since the process was started.
    pub(super) fn failed_requests(&self) -> Result<u64, String> {
        let list: Value = self.daemon.ask(Method::GET, "/v1/devices")?;
        let devices = list["devices"].as_array().into_iter().flatten();
        let failed = devices.map(|device| device["failed_requests"].as_u64().unwrap_or(0));
        Ok(failed.sum())
    }

    /// Its process.
    pub(super) fn pid(&self) -> Result<u32, String> {
        pid(&self.daemon)
    }

    /// See [`begin_upgrade`].
    pub(super) fn begin_upgrade(&self, program: &Path) -> Result<Child, String> {
        begin_upgrade(program, &self.socket)
    }

    /// See [`outcome`].
    pub(super) fn outcome(&self, client: Child) -> Result<Outcome, String> {
        outcome(&self.daemon, client)
    }

    /// An error with the end of the log.
    pub(super) fn with_log(&self, error: impl std::fmt::Display) -> String {
        self.daemon.with_log(error)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = end_successor(&self.daemon) {
            tracing::error!(error, "the daemon of the bench could not be ended");
        }
    }
}

/// The process that is the daemon now.
pub(super) fn pid(daemon: &Daemon) -> Result<u32, String> {
    let health: Health = daemon.ask(Method::GET, "/v1/health")?;
    Ok(health.pid)
}

/// Asks for an upgrade as an operator does, by the socket of the daemon's interface.
pub(super) fn begin_upgrade(program: &Path, api: &Path) -> Result<Child, String> {
    Command::new(daemon_program()?)
        .arg("upgrade")
        .arg(program)
        .arg("--json")
        .arg("--api")
        .arg(api)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("`pagetide upgrade` cannot be started: {error}"))
}

/// Waits for how it comes out; `Err` if it is not done, with what the command says.
///
/// # Errors
/// The command cannot be waited for.
pub(super) fn outcome(daemon: &Daemon, client: Child) -> Result<Outcome, String> {
    let output = client
        .wait_with_output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        return Ok(Err(told.trim().to_owned()));
    }
    let report = serde_json::from_slice(&output.stdout);
    report.map(Ok).map_err(|error| daemon.with_log(error))
}

/// Ends the daemon if it is not the child that is ended with the rest.
pub(super) fn end_successor(daemon: &Daemon) -> Result<(), String> {
    let pid = pid(daemon)?;
    if pid == daemon.pid() {
        return Ok(());
    }
    let told = |error: pagetide_sys::process::ProcessError| error.to_string();
    let process = ProcessFd::open(pid).map_err(told)?;
    process.signal(Signal::TERM).map_err(told)?;
    if !process.ends_within(PATIENCE).map_err(told)? {
        process.signal(Signal::KILL).map_err(told)?;
    }
    Ok(())
}

/// Waits until `condition` holds; false if it does not within [`PATIENCE`].
pub(super) fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    false
}
