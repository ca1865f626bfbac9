// SPDX-License-Identifier: Apache-2.0
//! The processes of the bench as it holds them: the guest, and daemons as users run them.
//!
//! Both are in process groups of their own, so that a Ctrl-C reaches only the
//! bench, which then ends them in order. Dropped, they are gone.

use super::guest::{Answer, Order};
use crate::{
    api::{AttachBody, ReclaimBody},
    client::{Client, device_path, vm_path},
    control::{BlkRequest, DetachReport, DeviceReport, OnFault, ReclaimReport, VmReport},
};
use hyper::Method;
use pagetide_addr::Hva;
use pagetide_sys::process::ProcessFd;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt::Display,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

/// A program is taken for a VMM by its name (or by KVM, which the stand-in does without).
const GUEST_PROGRAM: &str = "qemu-stand-in";
/// Name of the VM.
const VM: &str = "bench";
/// How long a daemon may take to answer, or to end.
const DAEMON_WAIT: Duration = Duration::from_secs(30);
/// Tries of a whole eviction: the first may find pages in use.
const RECLAIMS_MAX: u32 = 20;

fn this_program() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))
}

/// The guest.
pub(super) struct Guest {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    address: Hva,
    bytes: u64,
}

impl Guest {
    /// Starts it with `pages` filled pages, its vCPU on `cpu`. `dir` takes its program.
    pub(super) fn start(dir: &Path, pages: u64, cpu: usize) -> Result<Self, String> {
        let program = dir.join(GUEST_PROGRAM);
        let ours = this_program()?;
        if std::fs::hard_link(&ours, &program).is_err() {
            std::fs::copy(&ours, &program)
                .map_err(|error| format!("cannot copy to {}: {error}", program.display()))?;
        }
        let mut child = Command::new(&program)
            .args(["bench-part", "fault-guest"])
            .args(["--pages", &pages.to_string(), "--cpu", &cpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("the guest cannot be started: {error}"))?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let mut guest = Self {
            child,
            orders,
            answers: BufReader::new(answers.ok_or("the guest has no output")?),
            address: Hva(0),
            bytes: pages * pagetide_addr::PAGE_BYTES,
        };
        match guest.answer()? {
            Answer::Ready { address } => guest.address = Hva(address),
            other => return Err(format!("the guest began with {other:?}")),
        }
        Ok(guest)
    }

    /// Has it do `order`.
    pub(super) fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        let orders = self.orders.as_mut().ok_or("the guest has ended")?;
        writeln!(orders, "{line}")
            .and_then(|()| orders.flush())
            .map_err(|error| format!("the guest takes no orders: {error}"))?;
        match self.answer()? {
            Answer::Failed { reason } => Err(format!("the guest: {reason}")),
            answer => Ok(answer),
        }
    }

    /// Has it do `order`, which is to be timed.
    pub(super) fn time(&mut self, order: &Order) -> Result<Vec<u32>, String> {
        match self.obey(order)? {
            Answer::Took { ns } => Ok(ns),
            other => Err(format!("the guest answered {other:?} to {order:?}")),
        }
    }

    /// Asks the kernel to take its memory out, to swap.
    pub(super) fn page_out(&self) -> Result<(), String> {
        let process = ProcessFd::open(self.child.id()).map_err(|error| error.to_string())?;
        process
            .page_out(&[(self.address, self.bytes)])
            .map(|_advised| ())
            .map_err(|error| error.to_string())
    }

    fn answer(&mut self) -> Result<Answer, String> {
        let mut line = String::new();
        let read = self
            .answers
            .read_line(&mut line)
            .map_err(|error| format!("the guest cannot be heard: {error}"))?;
        if read == 0 {
            return Err("the guest has ended; see its messages above".into());
        }
        serde_json::from_str(&line).map_err(|error| format!("the guest said {line:?}: {error}"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It may be stuck in a fault that nobody serves any more.
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            tracing::error!(%error, "the bench's guest could not be ended");
        }
    }
}

/// A daemon with settings of its own.
pub(super) struct Daemon {
    child: Child,
    client: Client,
    log: PathBuf,
    runtime: tokio::runtime::Runtime,
}

impl Daemon {
    /// Starts `pagetide run` on `state_dir` with default settings but for `settings`.
    pub(super) fn start(state_dir: &Path, settings: &[&str]) -> Result<Self, String> {
        std::fs::create_dir_all(state_dir)
            .map_err(|error| format!("{}: {error}", state_dir.display()))?;
        let log = state_dir.with_extension("log");
        let stderr = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let child = Command::new(this_program()?)
            .arg("run")
            .arg("--state-dir")
            .arg(state_dir)
            .args(settings)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .process_group(0)
            .spawn()
            .map_err(|error| format!("the daemon cannot be started: {error}"))?;
        let mut daemon = Self {
            child,
            client: Client::new(&state_dir.join("api.sock")),
            log,
            runtime,
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
                    if ended || begun.elapsed() > DAEMON_WAIT {
                        return Err(reason);
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ask<T: DeserializeOwned>(&self, method: Method, path: &str) -> Result<T, String> {
        self.runtime
            .block_on(self.client.ask(method, path))
            .map_err(|error| self.with_log(error))
    }

    fn send<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, String> {
        self.runtime
            .block_on(self.client.send(Method::POST, path, body))
            .map_err(|error| self.with_log(error))
    }

    /// An error with the end of the daemon's log, which goes with the bench.
    fn with_log(&self, error: impl Display) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(5)..].join("\n  ");
        format!("{error}; the daemon's log ends with\n  {last}")
    }

    /// Takes over the guest.
    pub(super) fn attach(&self, guest: &Guest) -> Result<(), String> {
        let body = AttachBody {
            pid: guest.child.id(),
            name: Some(VM.into()),
            limit_bytes: None,
        };
        self.send::<_, VmReport>("/v1/vms", &body).map(|_| ())
    }

    /// Lets go of the guest.
    pub(super) fn detach(&self) -> Result<(), String> {
        self.ask::<DetachReport>(Method::DELETE, &vm_path(VM))
            .map(|_| ())
    }

    /// The VM's figures now.
    pub(super) fn vm(&self) -> Result<VmReport, String> {
        self.ask(Method::GET, &vm_path(VM))
    }

    /// Evicts all of the guest; returns its figures then, with every page stored.
    pub(super) fn evict_all(&self, pages: u64) -> Result<VmReport, String> {
        for _ in 0..RECLAIMS_MAX {
            let path = vm_path(VM) + "/reclaim";
            self.send::<_, ReclaimReport>(&path, &ReclaimBody { bytes: None })?;
            let vm = self.vm()?;
            if vm.lz4_pages == pages && vm.resident_bytes == 0 {
                return Ok(vm);
            }
        }
        let vm = self.vm()?;
        Err(self.with_log(format!(
            "of {pages} pages {} are stored by lz4 and {} are still present after {RECLAIMS_MAX} reclaims{}",
            vm.lz4_pages,
            vm.resident_bytes / pagetide_addr::PAGE_BYTES,
            vm.eviction_bars.first().map_or_else(String::new, |bar| format!(" ({bar})")),
        )))
    }

    /// Adds a block device.
    pub(super) fn add_blk(&self, socket: &Path, image: &Path) -> Result<(), String> {
        let body = BlkRequest {
            socket: socket.to_owned(),
            image: image.to_owned(),
            queues: 1,
            read_only: false,
            weight: pagetide_dpu::WEIGHT_DEFAULT,
            lookup: true,
            serial: None,
            on_fault: OnFault::OutOfOrder,
            require_sealed: false,
            allow_ram: Vec::new(),
            ram_max_bytes: pagetide_dpu::RAM_BYTES_MAX,
            shared: true,
            raw: true,
            owner: None,
            group: None,
            mode: None,
        };
        self.send::<_, DeviceReport>("/v1/devices", &body)
            .map(|_| ())
    }

    /// Removes a block device.
    pub(super) fn remove_blk(&self, socket: &Path) -> Result<(), String> {
        let path = device_path(&socket.to_string_lossy());
        self.ask::<serde_json::Value>(Method::DELETE, &path)
            .map(|_| ())
    }

    /// CPU time of all its threads that run now, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> Result<u64, String> {
        let tasks = format!("/proc/{}/task", self.child.id());
        let failed = |error: std::io::Error| format!("{tasks}: {error}");
        let mut total = 0;
        for task in std::fs::read_dir(&tasks).map_err(failed)? {
            let path = task.map_err(failed)?.path().join("schedstat");
            // A thread that ends while we look has had its time.
            if let Ok(line) = std::fs::read_to_string(path) {
                let first = line.split(' ').next().and_then(|ns| ns.parse::<u64>().ok());
                total += first.unwrap_or(0);
            }
        }
        Ok(total)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It detaches and ends; if it does not, it is killed.
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let told = pid.map(|pid| kill_process(pid, Signal::TERM));
        let begun = Instant::now();
        while told == Some(Ok(())) && begun.elapsed() < DAEMON_WAIT {
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
