// SPDX-License-Identifier: Apache-2.0
//! The scheduler of background work in a real daemon: a VM is squeezed whatever is set, what is set while it
//! runs holds after a crash, and what makes no sense changes nothing. The VMM is this process.

mod bounded;
mod vmm;

use bounded::{Said, run_until};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use serde_json::Value;
use std::{
    fs,
    os::fd::AsFd as _,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 96 * MIB;
const LIMIT_BYTES: u64 = 32 * MIB;
const PATIENCE: Duration = Duration::from_secs(120);

struct Daemon {
    child: Child,
    dir: PathBuf,
}

impl Daemon {
    fn start(dir: &tempfile::TempDir) -> Self {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.path().join("log"));
        let child = Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(["run", "--scheduler-cycle-us", "10000", "--state-dir"])
            .arg(dir.path().join("state"))
            .stdin(Stdio::null())
            .stderr(log.unwrap())
            .spawn()
            .unwrap();
        let mut daemon = Self {
            child,
            dir: dir.path().to_owned(),
        };
        daemon.until("an answer", |daemon| {
            daemon.client(&["vm", "list"]).status.success()
        });
        daemon
    }

    fn client(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(words)
            .env("PAGETIDE_API", self.dir.join("state/api.sock"))
            .output()
            .unwrap()
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.client(&[words, &["--json"]].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}\n{}", self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn scheduler(&self) -> Value {
        self.json(&["host", "scheduler"])
    }

    fn resident_bytes(&self) -> u64 {
        self.json(&["vm", "show", "a"])["resident_bytes"]
            .as_u64()
            .unwrap()
    }

    fn wait_until_squeezed(&mut self) {
        self.until("eviction to the limit", |daemon| {
            daemon.resident_bytes() <= LIMIT_BYTES
        });
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap()
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?} before {what}: {}", self.log());
            assert!(begun.elapsed() < PATIENCE, "no {what}: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait().map(drop)) {
            eprintln!("the daemon: {error}");
        }
    }
}

/// A page's number in each of its words, so that it compresses.
fn content(page: u64) -> Vec<u8> {
    (page + 1).to_le_bytes().repeat(512)
}

fn verify(ram: &SharedMapping) {
    let mut found = vec![0; 4096];
    for page in 0..RAM_BYTES / 4096 {
        ram.copy_from(page * 4096, &mut found).unwrap();
        assert!(found == content(page), "page {page}");
    }
}

fn class<'a>(scheduler: &'a Value, name: &str) -> &'a Value {
    let classes = scheduler["classes"].as_array().unwrap();
    let found = classes.iter().find(|class| class["class"] == name);
    found.unwrap_or_else(|| panic!("no class {name} in {scheduler}"))
}

/// RAM whose content is that of [`content`], with its file, which a VMM keeps open.
fn filled_ram() -> (GuestFile, SharedMapping) {
    let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
    let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
    for page in 0..RAM_BYTES / 4096 {
        ram.copy_to(page * 4096, &content(page)).unwrap();
    }
    (file, ram)
}

fn squeeze_by_small_shares(daemon: &mut Daemon, ram: &SharedMapping) {
    // Little for reclaim, and nothing lent: each run has to be waited for.
    let set = [
        "host",
        "scheduler",
        "--cycle-us",
        "20000",
        "--longest-run-us",
        "500",
        "--vcpu-faults",
        "5%",
        "--reclaim",
        "10%",
        "--idle-time",
        "unused",
    ];
    let changed = daemon.json(&set);
    assert_eq!(
        (&changed["cycle_us"], &changed["is_kept"]),
        (&20_000.into(), &true.into())
    );
    assert_eq!(class(&changed, "reclaim")["share_permille"], 100);
    // All of it comes back, and a third may stay.
    verify(ram);
    daemon.wait_until_squeezed();
    let scheduler = daemon.scheduler();
    assert!(
        class(&scheduler, "vcpu-faults")["runs"].as_u64() > Some(0),
        "{scheduler}"
    );
    assert!(
        class(&scheduler, "reclaim")["held_runs"].as_u64() > Some(0),
        "{scheduler}"
    );
}

fn detach_with_next_to_no_run(daemon: &Daemon, ram: &SharedMapping) {
    // With next to nothing for any work it still ends in order: a detach asks for no run.
    let none = [
        "host",
        "scheduler",
        "--vcpu-faults",
        "0%",
        "--io-faults",
        "0%",
        "--reclaim",
        "0.1%",
        "--scan",
        "0%",
        "--background",
        "0%",
        "--idle-time",
        "unused",
    ];
    daemon.json(&none);
    daemon.json(&["vm", "detach", "a"]);
    verify(ram);
}

#[test]
fn vm_is_squeezed_whatever_is_set_and_what_was_set_holds_after_a_crash() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    if !vmm::is_this("vm_is_squeezed_whatever_is_set_and_what_was_set_holds_after_a_crash") {
        return;
    }
    let (_file, ram) = filled_ram();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut daemon = Daemon::start(&dir);
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a", "--limit", "32M"]);
    daemon.wait_until_squeezed();
    let scheduler = daemon.scheduler();
    assert_eq!(
        (&scheduler["cycle_us"], &scheduler["is_kept"]),
        (&10_000.into(), &false.into())
    );
    assert!(
        class(&scheduler, "reclaim")["runs"].as_u64() > Some(0),
        "{scheduler}"
    );

    squeeze_by_small_shares(&mut daemon, &ram);
    daemon.kill();
    let mut daemon = Daemon::start(&dir);
    let after = daemon.scheduler();
    assert_eq!(
        (&after["cycle_us"], &after["is_kept"]),
        (&20_000.into(), &true.into())
    );
    assert_eq!(
        (&after["longest_run_us"], &after["idle_time"]),
        (&500.into(), &"unused".into())
    );
    verify(&ram);
    daemon.wait_until_squeezed();
    let reset = daemon.json(&["host", "scheduler", "--reset"]);
    assert_eq!(
        (&reset["cycle_us"], &reset["is_kept"]),
        (&10_000.into(), &false.into())
    );

    detach_with_next_to_no_run(&daemon, &ram);
}

/// What a client was refused with: status 2, and one line.
fn refused(output: &Output) -> String {
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty());
    said
}

#[test]
fn what_makes_no_sense_is_refused_with_status_2_and_changes_nothing() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = dir.path().join("state");
    let start = |flags: &[&str]| -> Said {
        let mut run = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        run.arg("run").arg("--state-dir").arg(&state).args(flags);
        run_until(&mut run, &[" ready"])
    };
    for (flags, part) in [
        (["--scheduler-shares", "reclaim=60%"], "above 100 %"),
        (["--scheduler-shares", "swap=1%"], "'swap' is no class"),
        (
            ["--scheduler-shares", "reclaim=0%"],
            "a share of 0 for reclaim",
        ),
        (["--scheduler-cycle-us", "0"], "a cycle of 0 us"),
        (["--background-cpus", "1023"], "CPU 1023 is not among"),
        (
            ["--scheduler-penalty-percent", "1001"],
            "a penalty of 1001 %",
        ),
        (
            ["--scheduler-longest-run-us", "99"],
            "a longest run of 99 us",
        ),
    ] {
        let said = start(&flags);
        let code = said.ended.and_then(|ended| ended.code());
        assert_eq!(code, Some(2), "{flags:?}: {}", said.log);
        assert!(said.log.contains(part), "{flags:?}: {}", said.log);
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a daemon needs root");
        return;
    }
    let daemon = Daemon::start(&dir);
    let before = daemon.scheduler();
    for (words, part) in [
        (vec!["--cycle-us", "0"], "a cycle of 0 us"),
        (vec!["--reclaim", "90%"], "above 100 %"),
        (vec!["--reclaim", "101%"], "'101%' is no share"),
        (vec!["--reclaim", "0%"], "a share of 0 for reclaim"),
        (vec!["--background-cpus", "1023"], "CPU 1023 is not among"),
        (vec!["--background-cpus", ""], "is no list of CPUs"),
        (vec!["--penalty-percent", "1001"], "a penalty of 1001 %"),
        (vec!["--longest-run-us", "20000"], "does not fit"),
        (vec!["--reset", "--cycle-us", "20000"], "give it alone"),
    ] {
        let said = refused(&daemon.client(&[&["host", "scheduler"], &words[..]].concat()));
        assert!(said.contains(part), "{words:?}: {said}");
        let after = daemon.scheduler();
        for setting in [
            "cycle_us",
            "longest_run_us",
            "penalty_percent",
            "background_cpus",
            "is_kept",
        ] {
            assert_eq!(after[setting], before[setting], "{words:?}");
        }
    }
    assert!(!state.join("scheduler.json").exists());
}
