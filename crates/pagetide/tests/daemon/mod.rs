// SPDX-License-Identifier: Apache-2.0
//! A daemon of a test's own, and its client.

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// Longer than anything takes that a test waits for, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// A daemon whose state and log are in a folder of the test's; killed on drop, as by a crash.
pub struct Daemon {
    child: Child,
    dir: PathBuf,
}

/// The command of a daemon in `dir`. Another one there is its successor.
pub fn command(dir: &Path, settings: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    command
        .args(["run", "--state-dir"])
        .arg(dir.join("state"))
        .arg("--budget-lock")
        .arg(dir.join("budget.lock"))
        .args(settings)
        .stdin(Stdio::null());
    command
}

impl Daemon {
    /// Starts `command`, a daemon in `dir`, and waits until it answers.
    pub fn start(dir: &Path, mut command: Command) -> Self {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.join("log"));
        let child = command.stderr(log.unwrap()).spawn().unwrap();
        let mut daemon = Self {
            child,
            dir: dir.to_owned(),
        };
        daemon.until("an answer", |daemon| {
            daemon.client(&["vm", "list"]).status.success()
        });
        daemon
    }

    /// Where it answers.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("state/api.sock")
    }

    pub fn client(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(words)
            .env("PAGETIDE_API", self.socket())
            .output()
            .unwrap()
    }

    /// The report of a command that succeeds.
    pub fn json(&self, words: &[&str]) -> Value {
        let output = self.client(&[words, &["--json"]].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}\n{}", self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap()
    }

    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?} before {what}: {}", self.log());
            if begun.elapsed() > PATIENCE {
                let told = [["vm", "list", "--json"], ["host", "show", "--json"]]
                    .map(|words| String::from_utf8_lossy(&self.client(&words).stdout).into_owned());
                panic!("no {what}: {told:?}\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait().map(drop)) {
            eprintln!("the daemon: {error}");
        }
    }
}

/// A figure of a report.
pub fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} in {report}"))
}
