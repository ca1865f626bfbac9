// SPDX-License-Identifier: Apache-2.0
//! Pagetide as its users run it: a binary, a state directory, a command line.
//!
//! Each [`Product`] has its own state directory on tmpfs, so that several can run beside each other
//! and beside a real one. The tests also kill it with SIGKILL and restart it on the same directory.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

pub use crate::client::{Answer, Clients, ProductError};
use crate::guest::tail;
use crate::image::repository;
use crate::leaks::{Growth, Snapshot, wait_for_release};

/// Longest wait for the API to answer, recovery after a kill included.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for a clean end, including the recovery of every absent page.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest wait until the resources of a VM or a device are released.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// One daemon with its state.
///
/// Its holdings are recorded when it starts, before its first VM and its first device. On drop it
/// detaches the remaining VMs and devices and must hold no more than that; then it is killed and
/// its state removed.
#[derive(Debug)]
pub struct Product {
    binary: PathBuf,
    state_dir: PathBuf,
    log: PathBuf,
    user: Option<User>,
    role: Role,
    child: Option<Child>,
    /// Its holdings before its first VM and its first device.
    at_first: Snapshot,
}

/// An unprivileged user, `nobody` on most systems.
pub const NOBODY: User = User {
    uid: 65_534,
    gid: 65_534,
};

/// The user that a daemon runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Group number; no further groups.
    pub gid: u32,
}

/// The role of a process of the product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// `pagetide run`, with its devices in it.
    Daemon,
    /// The same with these settings, as flags.
    DaemonWith(Vec<String>),
    /// `pagetide run`, with its devices in the process whose VPRI function listens on this socket.
    DaemonBeside(PathBuf),
    /// `pagetide dpu`.
    Dpu,
}

/// A place in a daemon's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd(u64);

impl Product {
    /// The release binary of this repository, or the one that `PAGETIDE` names.
    ///
    /// # Errors
    /// It is not built.
    pub fn binary() -> Result<PathBuf, ProductError> {
        let path = match std::env::var_os("PAGETIDE") {
            Some(path) => PathBuf::from(path),
            None => repository().join("target/release/pagetide"),
        };
        match fs::metadata(&path) {
            Ok(_) => Ok(path),
            Err(source) => Err(ProductError::File { path, source }),
        }
    }

    /// The program of its benches, which lies beside that binary.
    ///
    /// # Errors
    /// It is not there.
    pub fn lab_binary() -> Result<PathBuf, ProductError> {
        let path = Self::binary()?.with_file_name("pagetide-lab");
        match fs::metadata(&path) {
            Ok(_) => Ok(path),
            Err(source) => Err(ProductError::File { path, source }),
        }
    }

    /// [`Product::binary`] where a VMM can be taken over; `None` where not, after printing why.
    #[must_use]
    pub fn to_take_over() -> Option<PathBuf> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: take-over needs root");
            return None;
        }
        match Self::binary() {
            Ok(binary) => Some(binary),
            Err(error) => {
                eprintln!("SKIPPED: {error}: build it with `cargo build --release -p pagetide`");
                None
            }
        }
    }

    /// Starts `binary` with an empty state directory; its log is appended to `log`.
    ///
    /// # Errors
    /// It cannot be started or does not answer.
    pub fn start(binary: &Path, state_dir: &Path, log: &Path) -> Result<Self, ProductError> {
        Self::start_by(None, Role::Daemon, binary, state_dir, log)
    }

    /// As [`Product::start`], in another role.
    ///
    /// # Errors
    /// As there.
    pub fn start_in(
        role: Role,
        binary: &Path,
        state_dir: &Path,
        log: &Path,
    ) -> Result<Self, ProductError> {
        Self::start_by(None, role, binary, state_dir, log)
    }

    /// As [`Product::start`], with the daemon running as `user` from its first instruction.
    ///
    /// # Errors
    /// As there; `user` must be able to run `binary`.
    pub fn start_as(
        user: User,
        binary: &Path,
        state_dir: &Path,
        log: &Path,
    ) -> Result<Self, ProductError> {
        Self::start_by(Some(user), Role::Daemon, binary, state_dir, log)
    }

    fn start_by(
        user: Option<User>,
        role: Role,
        binary: &Path,
        state_dir: &Path,
        log: &Path,
    ) -> Result<Self, ProductError> {
        fs::create_dir_all(state_dir).map_err(|source| file_error(state_dir, source))?;
        if let Some(user) = user {
            chown(state_dir, Some(user.uid), Some(user.gid))
                .map_err(|source| file_error(state_dir, source))?;
        }
        let mut product = Self {
            binary: binary.to_owned(),
            state_dir: state_dir.to_owned(),
            log: log.to_owned(),
            user,
            role,
            child: None,
            at_first: Snapshot::default(),
        };
        product.run()?;
        let pid = product.pid().unwrap_or_default();
        product.at_first =
            Snapshot::settled(pid, RELEASE_TIMEOUT).map_err(|source| file_error(binary, source))?;
        Ok(product)
    }

    /// Starts the daemon on the existing state, and waits until it answers.
    ///
    /// # Errors
    /// It cannot be started, ends, or does not answer.
    pub fn run(&mut self) -> Result<(), ProductError> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .map_err(|source| file_error(&self.log, source))?;
        let mut command = Command::new(&self.binary);
        if let Some(user) = self.user {
            command.uid(user.uid).gid(user.gid);
        }
        match &self.role {
            Role::Daemon => command.arg("run"),
            Role::DaemonWith(flags) => command.arg("run").args(flags),
            Role::DaemonBeside(vpri) => command.args(["run", "--dpu"]).arg(vpri),
            Role::Dpu => command.arg("dpu"),
        };
        let child = command
            .arg("--state-dir")
            .arg(&self.state_dir)
            .arg("--api")
            .arg(self.api())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|source| file_error(&self.binary, source))?;
        self.child = Some(child);
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let asked = match self.role {
                Role::Dpu => "dpu",
                Role::Daemon | Role::DaemonWith(_) | Role::DaemonBeside(_) => "vm",
            };
            let reason = match self.client([asked, "list", "--json"])?.json() {
                Ok(_list) => return Ok(()),
                Err(error) => error.to_string(),
            };
            if let Some(status) = self.ended()? {
                return Err(self.silent(format!("it ended with {status}")));
            }
            if Instant::now() > deadline {
                return Err(self.silent(reason));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The API's socket.
    #[must_use]
    pub fn api(&self) -> PathBuf {
        self.state_dir.join("api.sock")
    }

    /// The socket of a DPU process' VPRI function.
    #[must_use]
    pub fn vpri(&self) -> PathBuf {
        self.state_dir.join("vpri.sock")
    }

    /// The daemon's process id while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The end of the daemon's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        tail(&self.log, 25)
    }

    /// Where the daemon's log ends now.
    ///
    /// # Errors
    /// The log cannot be examined.
    pub fn log_end(&self) -> Result<LogEnd, ProductError> {
        let log = fs::metadata(&self.log).map_err(|source| file_error(&self.log, source))?;
        Ok(LogEnd(log.len()))
    }

    /// What this daemon, or its predecessor, has logged since then.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn log_since(&self, end: LogEnd) -> Result<String, ProductError> {
        let bytes = fs::read(&self.log).map_err(|source| file_error(&self.log, source))?;
        let begin = usize::try_from(end.0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[begin.min(bytes.len())..]).into_owned())
    }

    /// Runs a client and waits for it; the answer includes its exit status.
    ///
    /// # Errors
    /// It could not be started.
    pub fn client<I>(&self, words: I) -> Result<Answer, ProductError>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        self.clients().run(words)
    }

    /// Clients for other threads.
    #[must_use]
    pub fn clients(&self) -> Clients {
        Clients::new(self.binary.clone(), self.api())
    }

    /// The device that listens on `socket`, as `dpu list` shows it.
    ///
    /// # Errors
    /// The daemon does not answer, or has no such device.
    pub fn device(&self, socket: &Path) -> Result<Value, ProductError> {
        let name = socket.to_string_lossy();
        let found = self.devices()?.into_iter().find(|d| d["socket"] == *name);
        found.ok_or_else(|| self.silent(format!("it knows no device at {name}")))
    }

    /// Every device, as `dpu list` shows it.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn devices(&self) -> Result<Vec<Value>, ProductError> {
        let mut list = self.client(["dpu", "list", "--json"])?.json()?;
        Ok(match list["devices"].take() {
            Value::Array(devices) => devices,
            _ => Vec::new(),
        })
    }

    /// Serves `image` on the vhost-user socket `socket`.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn serve_disk(&self, socket: &Path, image: &Path) -> Result<(), ProductError> {
        self.serve_disk_with(socket, image, &[])
    }

    /// As [`Product::serve_disk`], with more arguments for `dpu blk`.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn serve_disk_with(
        &self,
        socket: &Path,
        image: &Path,
        options: &[&str],
    ) -> Result<(), ProductError> {
        let words: [&OsStr; 6] = [
            "dpu".as_ref(),
            "blk".as_ref(),
            "--socket".as_ref(),
            socket.as_os_str(),
            "--image".as_ref(),
            image.as_os_str(),
        ];
        let options = options.iter().map(OsStr::new);
        let answer = self.client(words.into_iter().chain(options))?;
        answer.success().map(|_| ())
    }

    /// Takes over the VM of process `pid` under `name`.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn attach(&self, pid: u32, name: &str) -> Result<Value, ProductError> {
        let pid = pid.to_string();
        self.client(["attach", "--pid", &pid, "--name", name, "--json"])?
            .json()
    }

    /// Sets the limit of a VM.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn limit(&self, name: &str, bytes: u64) -> Result<(), ProductError> {
        let size = bytes.to_string();
        self.client(["vm", "limit", name, &size, "--json"])?
            .json()
            .map(|_| ())
    }

    /// State and figures of a VM.
    ///
    /// # Errors
    /// There is no such VM, or the daemon does not answer.
    pub fn show(&self, name: &str) -> Result<Value, ProductError> {
        self.client(["vm", "show", name, "--json"])?.json()
    }

    /// Evicts `bytes` of a VM now.
    ///
    /// # Errors
    /// The daemon refuses or fails.
    pub fn reclaim(&self, name: &str, bytes: u64) -> Result<Value, ProductError> {
        let bytes = bytes.to_string();
        self.client(["vm", "reclaim", name, "--bytes", &bytes, "--json"])?
            .json()
    }

    /// Detaches a VM.
    ///
    /// # Errors
    /// The daemon refuses or fails.
    pub fn detach(&self, name: &str) -> Result<Value, ProductError> {
        self.client(["vm", "detach", name, "--json"])?.json()
    }

    /// Kills the daemon with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            if let Err(error) = child.kill() {
                eprintln!("guestkit: killing process {}: {error}", child.id());
            }
            if let Err(error) = child.wait() {
                eprintln!("guestkit: waiting for process {}: {error}", child.id());
            }
        }
    }

    /// Sends SIGTERM to the daemon and waits until it has detached every VM.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop(&mut self) -> Result<ExitStatus, ProductError> {
        let Some(pid) = self.pid().and_then(|pid| pid.try_into().ok()) else {
            return Err(self.silent("it does not run".to_owned()));
        };
        if self.vms()?.is_empty() && self.devices()?.is_empty() {
            self.released()?;
        }
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)
                .map_err(|error| file_error(&self.binary, error.into()))?;
        }
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            if let Some(status) = self.ended()? {
                self.child = None;
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(self.silent("it does not end on SIGTERM".to_owned()));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Every VM, as `vm list` shows it.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn vms(&self) -> Result<Vec<Value>, ProductError> {
        if self.role == Role::Dpu {
            return Ok(Vec::new());
        }
        let mut list = self.client(["vm", "list", "--json"])?.json()?;
        Ok(match list["vms"].take() {
            Value::Array(vms) => vms,
            _ => Vec::new(),
        })
    }

    /// The daemon's holdings now.
    ///
    /// # Errors
    /// It does not run.
    pub fn holds(&self) -> Result<Snapshot, ProductError> {
        let pid = self.pid().unwrap_or_default();
        Snapshot::of(pid).map_err(|source| file_error(&self.binary, source))
    }

    /// The daemon's holdings beyond those before its first VM and its first device. Waits at most
    /// `patience` for that to be nothing.
    ///
    /// # Errors
    /// It does not run.
    pub fn growth(&self, patience: Duration) -> Result<Growth, ProductError> {
        let pid = self.pid().unwrap_or_default();
        wait_for_release(pid, &self.at_first, patience)
            .map_err(|source| file_error(&self.binary, source))
    }

    /// Fails if the daemon, without VMs and devices, holds more than before it had any.
    ///
    /// # Errors
    /// It does, or it does not run.
    pub fn released(&self) -> Result<(), ProductError> {
        let growth = self.growth(RELEASE_TIMEOUT)?;
        if growth.is_empty() {
            return Ok(());
        }
        Err(self.silent(format!(
            "it holds what it did not before its first VM and its first device: {growth}"
        )))
    }

    /// Detaches all VMs and removes all devices. `Some` has the reason if not all succeeded.
    fn let_all_go(&self) -> Result<Option<String>, ProductError> {
        for device in self.devices()? {
            let socket = device["socket"].as_str().unwrap_or_default();
            let removed = self.client(["dpu", "remove", "--socket", socket])?;
            if let Err(error) = removed.success() {
                return Ok(Some(error.to_string()));
            }
        }
        for vm in self.vms()? {
            let name = vm["name"].as_str().unwrap_or_default();
            let answer = self.client(["vm", "detach", name])?;
            // It may have ended by itself meanwhile.
            let is_listed = |vms: &[Value]| vms.iter().any(|vm| vm["name"] == *name);
            if let Err(error) = answer.success()
                && is_listed(&self.vms()?)
            {
                return Ok(Some(error.to_string()));
            }
        }
        Ok(None)
    }

    /// The daemon's excess holdings at its end, if it runs and the comparison is possible.
    fn last_look(&mut self) -> Option<String> {
        if !matches!(self.ended(), Ok(None)) || self.child.is_none() {
            return None;
        }
        match self.let_all_go() {
            Ok(None) => self.released().err().map(|error| error.to_string()),
            Ok(Some(why)) => {
                eprintln!("guestkit: what the daemon holds is not compared: {why}");
                None
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, ProductError> {
        match &mut self.child {
            None => Ok(None),
            Some(child) => child
                .try_wait()
                .map_err(|source| file_error(&self.binary, source)),
        }
    }

    fn silent(&self, reason: String) -> ProductError {
        ProductError::Silent {
            reason,
            log: self.log_tail(),
        }
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        let wrong = if thread::panicking() {
            None
        } else {
            self.last_look()
        };
        self.kill();
        if let Err(error) = fs::remove_dir_all(&self.state_dir) {
            eprintln!("guestkit: {} stays: {error}", self.state_dir.display());
        }
        if let Some(wrong) = wrong {
            panic!("{wrong}");
        }
    }
}

/// Whether some process listens on the Unix socket at `path`.
///
/// This queries the kernel instead of connecting: a vhost-user back end would take us for its front
/// end.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn is_listening(path: &Path) -> Result<bool, ProductError> {
    let list = Path::new("/proc/net/unix");
    let sockets = fs::read_to_string(list).map_err(|source| file_error(list, source))?;
    let name = path.to_string_lossy();
    // Columns: number, references, protocol, flags (__SO_ACCEPTCON), type, state, inode, path.
    Ok(sockets.lines().any(|line| {
        let mut columns = line.split_whitespace();
        columns.nth(3) == Some("00010000") && columns.nth(3) == Some(&name)
    }))
}

fn file_error(path: &Path, source: io::Error) -> ProductError {
    ProductError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_socket_is_seen_and_others_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        assert!(!is_listening(&path).expect("a list"));
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        assert!(is_listening(&path).expect("a list"));
    }
}
