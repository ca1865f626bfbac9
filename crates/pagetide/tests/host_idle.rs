// SPDX-License-Identifier: Apache-2.0
//! An idle VM under a budget of the host shrinks though nobody needs its memory, down towards its floor, and has
//! it back at once when it wakes. The VMM is this process: a file of RAM, mapped shared.

mod vmm;

use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use serde_json::Value;
use std::{
    fs,
    os::fd::AsFd as _,
    process::{Child, Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

const TEST: &str = "idle_vm_shrinks_by_itself_and_has_its_memory_back_at_once_when_it_wakes";
const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
const RAM_BYTES: u64 = 256 * MIB;
/// What it uses when it is awake.
const USED_BYTES: u64 = 128 * MIB;
/// How much it is seen to shrink: the rest would go the same way, in minutes.
const SHRUNK_BYTES: u64 = 8 * MIB;
const PATIENCE: Duration = Duration::from_secs(240);

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(["run", "--state-dir"])
            .arg(dir.path().join("state"))
            .arg("--budget-lock")
            .arg(dir.path().join("budget.lock"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut daemon = Self { child, dir };
        daemon.until("an answer", |daemon| {
            daemon.client(&["vm", "list"]).status.success()
        });
        daemon
    }

    fn client(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(words)
            .env("PAGETIDE_API", self.dir.path().join("state/api.sock"))
            .output()
            .unwrap()
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.client(words);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}\n{}", self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn vm(&self) -> Value {
        self.json(&["vm", "show", "a", "--json"])
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?} before {what}: {}", self.log());
            if begun.elapsed() > PATIENCE {
                let host = self.client(&["host", "show"]).stdout;
                let host = String::from_utf8_lossy(&host);
                panic!("no {what}: {host}\n{}", self.log());
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

fn number(of: &Value, name: &str) -> u64 {
    of[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} in {of}"))
}

/// Compresses well and is not zero.
fn content(page: u64) -> Vec<u8> {
    let word = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    word.to_le_bytes().repeat(512)
}

/// Compares pages, which touches them.
fn touch(ram: &SharedMapping, pages: impl Iterator<Item = u64>) {
    let mut found = vec![0; 4096];
    for page in pages {
        ram.copy_from(page * PAGE_BYTES, &mut found).unwrap();
        assert!(found == content(page), "page {page}");
    }
}

#[test]
fn idle_vm_shrinks_by_itself_and_has_its_memory_back_at_once_when_it_wakes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    if !vmm::is_this(TEST) {
        return;
    }
    let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
    let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
    for page in 0..RAM_BYTES / PAGE_BYTES {
        ram.copy_to(page * PAGE_BYTES, &content(page)).unwrap();
    }
    let mut daemon = Daemon::start();
    let own = std::process::id().to_string();
    daemon.json(&[
        "attach", "--pid", &own, "--name", "a", "--floor", "16M", "--json",
    ]);
    // Twice what it could ever take.
    daemon.json(&["host", "budget", "512M", "--json"]);
    daemon.until("an idle VM that is shrunk", |daemon| {
        let vm = daemon.vm();
        let resident = number(&vm, "resident_bytes");
        vm["target_reason"] == "idle" && resident + SHRUNK_BYTES <= RAM_BYTES
    });
    // A client takes the rest, so that this need not last for five minutes.
    daemon.until("a VM of which nearly nothing is left", |daemon| {
        daemon.json(&["vm", "reclaim", "a", "--json"]);
        number(&daemon.vm(), "resident_bytes") <= 16 * MIB
    });
    wakes(&ram, &mut daemon);
    touch(&ram, 0..RAM_BYTES / PAGE_BYTES);
    daemon.json(&["vm", "detach", "a", "--json"]);
    touch(&ram, 0..RAM_BYTES / PAGE_BYTES);
}

/// Ends a thread, also when the test fails meanwhile.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Uses part of the RAM again and again, until its faults are below a hundredth of those of the first second.
fn wakes(ram: &SharedMapping, daemon: &mut Daemon) {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending(&ends);
        let begun = Instant::now();
        scope.spawn(|| {
            let pages = (0..USED_BYTES / PAGE_BYTES).cycle();
            touch(ram, pages.take_while(|_| !ends.load(Relaxed)));
        });
        let mut seconds: Vec<u64> = Vec::new();
        let (mut before, mut at) = (number(&daemon.vm(), "vcpu_faults"), begun);
        daemon.until("an end of faults", |daemon| {
            if at.elapsed() < Duration::from_secs(1) {
                return false;
            }
            at = Instant::now();
            let now = number(&daemon.vm(), "vcpu_faults");
            seconds.push(now - std::mem::replace(&mut before, now));
            seconds.last().is_some_and(|last| *last * 100 < seconds[0])
        });
        let used = number(&daemon.vm(), "resident_bytes");
        assert!(used + 2 * MIB >= USED_BYTES, "{used} resident");
        eprintln!("faults in each second: {seconds:?}");
    });
}
