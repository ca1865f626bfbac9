// SPDX-License-Identifier: Apache-2.0
//! A daemon that is upgraded: its process changes, its folder does not.

#![expect(dead_code, reason = "each test file uses a part of it")]

use pagetide_bench::upgrade::broken::Way;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// Longer than anything takes that a test waits for, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Programs in a directory that is root's alone, so that they may become the daemon.
pub struct Programs {
    dir: tempfile::TempDir,
}

impl Programs {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in("/var/lib")
            .unwrap();
        Self { dir }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A copy of `program` under this name.
    pub fn put(&self, program: &Path, name: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::copy(program, &path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A program that fails in this way.
    pub fn broken(&self, way: Way) -> PathBuf {
        let path = self.dir.path().join(way.name());
        if !path.exists() {
            let lab = self.dir.path().join("pagetide-lab");
            if !lab.exists() {
                self.put(
                    Path::new(env!("CARGO_BIN_EXE_pagetide-lab")),
                    "pagetide-lab",
                );
            }
            fs::hard_link(lab, &path).unwrap();
        }
        path
    }

    /// The program under test.
    pub fn pagetide(&self, name: &str) -> PathBuf {
        self.put(Path::new(env!("CARGO_BIN_EXE_pagetide")), name)
    }
}

/// A daemon whose state and log are in a folder of the test's.
pub struct Daemon {
    /// The process that the test has started; it ends with the first upgrade.
    children: Vec<Child>,
    settings: Vec<String>,
    program: PathBuf,
    socket: Option<PathBuf>,
    dir: tempfile::TempDir,
}

impl Daemon {
    /// Of `program`, with its API at `socket` or in its state directory.
    pub fn start(program: &Path, settings: &[&str], socket: Option<&Path>) -> Self {
        let mut daemon = Self {
            socket: socket.map(Path::to_owned),
            children: Vec::new(),
            settings: settings.iter().map(|&word| word.to_owned()).collect(),
            program: program.to_owned(),
            dir: tempfile::tempdir_in("/dev/shm").unwrap(),
        };
        daemon.run();
        daemon
    }

    /// Starts a daemon in the folder, and waits until it answers.
    pub fn run(&mut self) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        let child = Command::new(&self.program)
            .args(["run", "--state-dir"])
            .arg(self.dir.path().join("state"))
            .args(&self.settings)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.children.push(child);
        self.until("an answer", |daemon| {
            daemon.client(&["vm", "list"]).status.success()
        });
    }

    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub fn socket(&self) -> PathBuf {
        let usual = || self.state_dir().join("api.sock");
        self.socket.clone().unwrap_or_else(usual)
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        command
            .args(words)
            .env("PAGETIDE_API", self.socket())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn client(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    pub fn json(&self, words: &[&str]) -> Value {
        let output = self.client(words);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}\n{}", self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Upgrades to `program`; the report of the new daemon.
    pub fn upgrade(&self, program: &Path) -> Value {
        self.json(&["upgrade", program.to_str().unwrap(), "--json"])
    }

    /// Why an upgrade to `program` fails.
    pub fn no_upgrade(&self, program: &Path) -> String {
        let output = self.client(&["upgrade", program.to_str().unwrap()]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{told}\n{}", self.log());
        told
    }

    /// A route's answer.
    pub fn asked(&self, path: &str) -> Value {
        let output = Command::new("curl")
            .args(["-s", "--max-time", "60", "--unix-socket"])
            .arg(self.socket())
            .arg(format!("http://pagetide{path}"))
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    pub fn pid(&self) -> u32 {
        let pid = self.asked("/v1/health")["pid"].as_u64().unwrap_or(0);
        u32::try_from(pid).unwrap()
    }

    /// Threads of its process that go before ordinary ones, as all do while VMs wait for the process.
    pub fn hurried_threads(&self) -> usize {
        const SCHED_RR: &str = "2";
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let stats = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("stat")));
        // A thread may end meanwhile. Field 41, counted after the name, which may have blanks.
        let policy = |stat: String| -> Option<String> {
            let (_, fields) = stat.rsplit_once(')')?;
            fields.split_ascii_whitespace().nth(38).map(str::to_owned)
        };
        let policies = stats.filter_map(Result::ok).filter_map(policy);
        policies.filter(|policy| policy == SCHED_RR).count()
    }

    /// A figure of the VM.
    pub fn figure(&self, name: &str) -> u64 {
        let vm = self.json(&["vm", "show", "a", "--json"]);
        vm[name]
            .as_u64()
            .unwrap_or_else(|| panic!("{name} in {vm}"))
    }

    /// Waits for the end of the process that was started last.
    pub fn wait_for_child(&mut self) -> std::process::ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(ended) = self.children.last_mut().unwrap().try_wait().unwrap() {
                return ended;
            }
            assert!(begun.elapsed() < PATIENCE, "it goes on: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < PATIENCE, "no {what}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = self.asked("/v1/health")["pid"].as_i64().unwrap_or(0);
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
            && let Err(error) = kill_process(pid, Signal::KILL)
        {
            eprintln!("the daemon: {error}");
        }
        for child in &mut self.children {
            if let Err(error) = child.kill().and_then(|()| child.wait().map(drop)) {
                eprintln!("a daemon: {error}");
            }
        }
    }
}
