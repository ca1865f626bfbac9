// SPDX-License-Identifier: Apache-2.0
//! Daemons under a bench: run as users run them, and controlled through their API.
//!
//! Each is in its own process group, so that a Ctrl-C reaches only the bench, which then ends it in order.
//! Drop ends it.

use super::orders::daemon_program;
use hyper::Method;
use pagetide_daemon::{
    api::{AttachBody, LimitBody, ReclaimBody},
    client::{Client, vm_path},
    control::{DetachReport, ReclaimReport, VmReport},
};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt::Display,
    fs::File,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Name of the VM: a bench's daemon has one.
pub(super) const VM: &str = "bench";
/// Requests to evict all before it is given up: the first may find pages in use.
const RECLAIMS_MAX: u32 = 40;
/// Longest wait for a daemon to answer, or to end.
const DAEMON_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for a daemon that recovers a VM of `ram_bytes`, or detaches it at its end: that of a small
/// one, plus the time to read all RAM at a hundredth of the memory's bandwidth.
fn daemon_wait(ram_bytes: u64) -> Duration {
    DAEMON_WAIT + Duration::from_secs(ram_bytes >> 26)
}

/// A folder for the bench in `parent`.
pub(super) fn directory_in(parent: &Path) -> Result<tempfile::TempDir, String> {
    tempfile::Builder::new()
        .prefix("pagetide-bench-")
        .tempdir_in(parent)
        .map_err(|error| format!("no directory in {}: {error}", parent.display()))
}

/// A daemon with its own settings.
pub(super) struct Daemon {
    child: Child,
    client: Client,
    log: PathBuf,
    runtime: tokio::runtime::Runtime,
    wait: Duration,
}

impl Daemon {
    /// Starts `pagetide run` on `state_dir` with default settings except `settings`.
    pub(super) fn start<S: AsRef<str>>(state_dir: &Path, settings: &[S]) -> Result<Self, String> {
        Self::start_for(state_dir, settings, 0)
    }

    /// The same for a VM with `ram_bytes` of RAM, which may be in the directory already.
    pub(super) fn start_for<S: AsRef<str>>(
        state_dir: &Path,
        settings: &[S],
        ram_bytes: u64,
    ) -> Result<Self, String> {
        std::fs::create_dir_all(state_dir)
            .map_err(|error| format!("{}: {error}", state_dir.display()))?;
        let log = state_dir.with_extension("log");
        let stderr = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let child = Command::new(daemon_program()?)
            .arg("run")
            .arg("--state-dir")
            .arg(state_dir)
            .args(settings.iter().map(AsRef::as_ref))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .process_group(0)
            .spawn()
            .map_err(|error| format!("the daemon cannot be started: {error}"))?;
        let wait = daemon_wait(ram_bytes);
        let mut daemon = Self {
            child,
            client: Client::new(&state_dir.join("api.sock")).with_ask_wait(wait),
            log,
            runtime,
            wait,
        };
        daemon.wait_until_it_answers()?;
        Ok(daemon)
    }

    fn wait_until_it_answers(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match self.ask::<serde_json::Value>(Method::GET, "/v1/vms") {
                Ok(_) => return Ok(()),
                Err(reason) => {
                    let ended = self.child.try_wait().is_ok_and(|status| status.is_some());
                    if ended || begun.elapsed() > self.wait {
                        return Err(reason);
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends a request without a body.
    pub(super) fn ask<T: DeserializeOwned>(&self, method: Method, path: &str) -> Result<T, String> {
        self.runtime
            .block_on(self.client.ask(method, path))
            .map_err(|error| self.with_log(error))
    }

    /// The page of metrics.
    pub(super) fn metrics(&self) -> Result<String, String> {
        self.runtime
            .block_on(self.client.text("/metrics"))
            .map_err(|error| self.with_log(error))
    }

    /// Posts `body`.
    pub(super) fn send<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, String> {
        self.send_by(Method::POST, path, body)
    }

    /// Sends `body` by `method`.
    pub(super) fn send_by<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<T, String> {
        self.runtime
            .block_on(self.client.send(method, path, body))
            .map_err(|error| self.with_log(error))
    }

    /// An error with the end of the daemon's log, which is deleted with the bench.
    pub(super) fn with_log(&self, error: impl Display) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(5)..].join("\n  ");
        format!("{error}; the daemon's log ends with\n  {last}")
    }

    /// A separate client for another thread.
    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Takes over the VMM `pid`.
    pub(super) fn attach(&self, pid: u32, limit_bytes: Option<u64>) -> Result<VmReport, String> {
        let body = AttachBody {
            weight: None,
            floor_bytes: None,
            pid,
            name: Some(VM.into()),
            limit_bytes,
        };
        self.send("/v1/vms", &body)
    }

    /// Detaches the VM.
    pub(super) fn detach(&self) -> Result<DetachReport, String> {
        self.ask(Method::DELETE, &vm_path(VM))
    }

    /// The VM's figures now.
    pub(super) fn vm(&self) -> Result<VmReport, String> {
        self.ask(Method::GET, &vm_path(VM))
    }

    /// Evicts `bytes` of the VM, or all that can be evicted.
    pub(super) fn reclaim(&self, bytes: Option<u64>) -> Result<ReclaimReport, String> {
        self.send(&(vm_path(VM) + "/reclaim"), &ReclaimBody { bytes })
    }

    /// Evicts all of the VM; returns its figures then.
    pub(super) fn evict_whole(&self) -> Result<VmReport, String> {
        self.evict_down_to(0)
    }

    /// Evicts until at most `resident_bytes` of the VM are present; returns its figures then.
    pub(super) fn evict_down_to(&self, resident_bytes: u64) -> Result<VmReport, String> {
        let mut vm = self.vm()?;
        let mut last = ReclaimReport::default();
        for _ in 0..RECLAIMS_MAX {
            let excess_bytes = vm.resident_bytes.saturating_sub(resident_bytes);
            let wanted = (resident_bytes > 0).then_some(excess_bytes);
            last = self.reclaim(wanted)?;
            vm = self.vm()?;
            if vm.resident_bytes <= resident_bytes {
                return Ok(vm);
            }
        }
        let bar = vm.eviction_blockers.first();
        Err(self.with_log(format!(
            "{} bytes are still present after {RECLAIMS_MAX} reclaims{}{}",
            vm.resident_bytes,
            bar.map_or_else(String::new, |bar| format!(" ({bar})")),
            last.stayed_text(),
        )))
    }

    /// Sets or lifts the VM's limit.
    pub(super) fn set_limit(&self, limit_bytes: Option<u64>) -> Result<VmReport, String> {
        self.send_by(Method::PATCH, &vm_path(VM), &LimitBody { limit_bytes })
    }

    /// CPU time of all its current threads, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> Result<u64, String> {
        let tasks = format!("/proc/{}/task", self.child.id());
        let failed = |error: std::io::Error| format!("{tasks}: {error}");
        let mut total = 0;
        for task in std::fs::read_dir(&tasks).map_err(failed)? {
            let path = task.map_err(failed)?.path().join("schedstat");
            // The time of a thread that ends meanwhile is no longer visible.
            if let Ok(line) = std::fs::read_to_string(path) {
                let first = line.split(' ').next().and_then(|ns| ns.parse::<u64>().ok());
                total += first.unwrap_or(0);
            }
        }
        Ok(total)
    }

    /// Memory of the process that no file backs, in bytes: the VM's report counts the pool.
    pub(super) fn anonymous_bytes(&self) -> Result<u64, String> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:")?.split_whitespace().next())
            .and_then(|kib| kib.parse::<u64>().ok())
            .map(|kib| kib << 10)
            .ok_or_else(|| format!("{path} has no RssAnon"))
    }

    /// Kills it with SIGKILL, without an orderly end, as a bug would.
    pub(super) fn kill(mut self) -> Result<(), String> {
        self.child
            .kill()
            .and_then(|()| self.child.wait())
            .map(|_status| ())
            .map_err(|error| format!("the daemon cannot be killed: {error}"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It was killed, and has been waited for.
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // It detaches and ends; if it does not, it is killed.
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let told = pid.map(|pid| kill_process(pid, Signal::TERM));
        let begun = Instant::now();
        while told == Some(Ok(())) && begun.elapsed() < self.wait {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            tracing::error!(%error, "a daemon of the bench could not be ended");
        }
    }
}
