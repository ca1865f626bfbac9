// SPDX-License-Identifier: Apache-2.0
//! Three VMs under one budget of the host: the sum holds, memory moves from who leaves it alone to who uses
//! it, what was set survives the daemon's death, and every byte is as it was.
//!
//! A VMM is a process of this program with a file of RAM, mapped shared, and an emulator's name. It touches a
//! part of its RAM again and again, as it is told on its input, and compares what it reads.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use serde_json::Value;

/// Set in a process that is a VMM.
const IS_VMM: &str = "PAGETIDE_TEST_IS_VMM";
const TEST: &str = "memory_moves_to_the_vm_that_uses_it_and_what_was_set_survives_the_daemon";
const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
/// RAM of each VM.
const RAM_BYTES: u64 = 160 * MIB;
/// Of all three together less than half can stay.
const BUDGET: &str = "256M";
/// What a busy VM uses.
const USED_MIB: u64 = 112;
/// A fill goes ahead, counted, if no page could be evicted within a tenth of a second: on a busy machine a
/// few may be under way at any moment. With the least of eviction they would come to hundreds of MiB.
const UNDER_WAY_BYTES: u64 = 8 * MIB;
const PATIENCE: Duration = Duration::from_secs(240);

/// Mostly the page's number, so that it compresses, and partly mixed.
fn content(page: u64) -> Vec<u8> {
    let mut mixed = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = |at: u64| {
        mixed ^= mixed << 13;
        mixed ^= mixed >> 7;
        mixed ^= mixed << 17;
        if at.is_multiple_of(16) { mixed } else { page }
    };
    (0..PAGE_BYTES / 8)
        .flat_map(|at| word(at).to_le_bytes())
        .collect()
}

fn compare(ram: &SharedMapping, page: u64) {
    let mut found = vec![0; 4096];
    ram.copy_from(page * PAGE_BYTES, &mut found).unwrap();
    if found != content(page) {
        eprintln!("page {page} is wrong");
        std::process::exit(3);
    }
}

/// The VMM: fills its RAM, then obeys until its input ends.
fn be_a_vmm() {
    let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
    let ram = Arc::new(SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap());
    for page in 0..RAM_BYTES / PAGE_BYTES {
        ram.copy_to(page * PAGE_BYTES, &content(page)).unwrap();
    }
    let used_pages = Arc::new(AtomicU64::new(0));
    let (of_thread, used) = (Arc::clone(&ram), Arc::clone(&used_pages));
    std::thread::spawn(move || {
        let mut page = 0;
        loop {
            match used.load(Relaxed) {
                0 => std::thread::park_timeout(Duration::from_millis(20)),
                used => {
                    page = (page + 1) % used;
                    compare(&of_thread, page);
                }
            }
            if page.is_multiple_of(512) {
                // The host has other work.
                std::thread::park_timeout(Duration::from_millis(2));
            }
        }
    });
    // The test harness has begun a line.
    say("\nvmm: ready");
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.strip_prefix("use ").map(str::parse::<u64>) {
            Some(mib) => used_pages.store(mib.unwrap() * MIB / PAGE_BYTES, Relaxed),
            None => (0..RAM_BYTES / PAGE_BYTES).for_each(|page| compare(&ram, page)),
        }
        say("vmm: done");
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}

struct Vmm {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Vmm {
    fn start(program: &Path) -> Self {
        let mut child = Command::new(program)
            .args(["--exact", TEST, "--nocapture"])
            .env(IS_VMM, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut vmm = Self {
            child,
            orders,
            answers,
        };
        vmm.hear("vmm: ready");
        vmm
    }

    fn hear(&mut self, wanted: &str) {
        let mut line = String::new();
        while line.trim() != wanted {
            line.clear();
            let read = self.answers.read_line(&mut line).unwrap();
            assert!(read > 0, "the VMM has ended before '{wanted}'");
        }
    }

    /// Uses the first `mib` of its RAM from now on.
    fn uses(&mut self, mib: u64) {
        writeln!(self.orders, "use {mib}").unwrap();
        self.hear("vmm: done");
    }

    /// Compares every byte.
    fn verify(&mut self) {
        writeln!(self.orders, "verify").unwrap();
        self.hear("vmm: done");
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait().map(drop)) {
            eprintln!("a VMM: {error}");
        }
    }
}

/// A daemon; killed on drop, as by a crash.
struct Daemon {
    child: Child,
    dir: PathBuf,
}

impl Daemon {
    fn start(dir: &Path) -> Self {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.join("log"))
            .unwrap();
        let child = Self::command(dir, "state", &[])
            .stderr(log)
            .spawn()
            .unwrap();
        let mut daemon = Self {
            child,
            dir: dir.to_owned(),
        };
        daemon.until("an answer", |daemon| {
            daemon.client(&["vm", "list"]).status.success()
        });
        daemon
    }

    fn command(dir: &Path, state: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        command
            .args(["run", "--state-dir"])
            .arg(dir.join(state))
            .arg("--budget-lock")
            .arg(dir.join("budget.lock"))
            .args(more)
            .stdin(Stdio::null());
        command
    }

    fn client(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(words)
            .env("PAGETIDE_API", self.dir.join("state/api.sock"))
            .output()
            .unwrap()
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.client(words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {told}\n{}", self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// A command that is refused with `part` in its one sentence.
    fn refuses(&self, words: &[&str], part: &str) {
        let output = self.client(words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
        assert!(told.contains(part), "{words:?}: {told}");
    }

    fn host(&self) -> Value {
        self.json(&["host", "show", "--json"])
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap()
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?} before {what}: {}", self.log());
            if begun.elapsed() > PATIENCE {
                let host = self.client(&["host", "show"]).stdout;
                panic!(
                    "no {what}: {}{}",
                    String::from_utf8_lossy(&host),
                    self.log()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
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

fn vm<'a>(host: &'a Value, name: &str) -> &'a Value {
    let vms = host["vms"].as_array().unwrap();
    let found = vms.iter().find(|vm| vm["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {host}"))
}

/// What is resident of a VM, in MiB.
fn resident_mib(host: &Value, name: &str) -> u64 {
    number(vm(host, name), "resident_bytes") / MIB
}

/// The sum holds, but for what is being filled.
fn sum_holds(host: &Value) {
    let targets: u64 = host["vms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|vm| number(vm, "target_bytes") + number(vm, "stored_bytes"))
        .sum();
    assert!(targets <= number(host, "budget_bytes"), "{host}");
    assert!(number(host, "over_bytes") <= UNDER_WAY_BYTES, "{host}");
}

fn refuses_what_cannot_be(daemon: &Daemon) {
    let before = daemon.host();
    daemon.refuses(&["host", "budget", "64M"], "the floors of its 3 VMs");
    daemon.refuses(
        &["host", "budget", "1000000G"],
        "more than the host's memory",
    );
    daemon.refuses(&["host", "budget", "--low", "9%"], "out of order");
    daemon.refuses(
        &["host", "budget", "off", "--low", "3%"],
        "mean nothing without",
    );
    daemon.refuses(
        &["vm", "set", "a", "--weight", "0"],
        "weight 0 is not possible",
    );
    daemon.refuses(&["vm", "set", "a", "--floor", "161M"], "more than its RAM");
    daemon.refuses(
        &["vm", "set", "c", "--ceiling", "32M"],
        "less than its floor",
    );
    daemon.refuses(&["vm", "limit", "c", "32M"], "less than its floor");
    let after = daemon.host();
    for field in ["budget_bytes", "low_bytes"] {
        assert_eq!(before[field], after[field]);
    }
    for name in ["a", "b", "c"] {
        for field in ["weight", "floor_bytes", "ceiling_bytes"] {
            assert_eq!(vm(&before, name)[field], vm(&after, name)[field]);
        }
    }
}

/// Another daemon on this host.
fn second_daemon_is_refused(dir: &Path) {
    let second = Daemon::command(dir, "second", &["--host-budget", "64M"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(2), "{told}");
    assert!(told.contains("another pagetide"), "{told}");
}

fn attach(daemon: &Daemon, vmms: &[(&str, Vmm)]) {
    for (name, vmm) in vmms {
        let pid = vmm.child.id().to_string();
        let mut words = vec!["attach", "--pid", &pid, "--name", name, "--json"];
        if *name == "c" {
            words.extend(["--floor", "48M", "--weight", "200"]);
        }
        let told = daemon.json(&words);
        assert_eq!(told["target_bytes"], Value::Null, "there is no budget yet");
    }
}

/// Sets more, kills the daemon, and starts another: all of it is in force again.
fn restarted_with_what_was_set(daemon: Daemon, dir: &Path) -> Daemon {
    daemon.json(&[
        "vm",
        "set",
        "a",
        "--weight",
        "50",
        "--floor",
        "20M",
        "--ceiling",
        "120M",
        "--json",
    ]);
    daemon.json(&["host", "budget", "--high", "6%", "--json"]);
    // As by a crash.
    drop(daemon);
    let mut daemon = Daemon::start(dir);
    let host = daemon.host();
    assert_eq!(number(&host, "budget_bytes"), 256 * MIB);
    assert_eq!(number(&host, "high_bytes"), 256 * MIB * 6 / 100);
    let (a, c) = (vm(&host, "a"), vm(&host, "c"));
    let set = ["weight", "floor_bytes", "ceiling_bytes"].map(|field| number(a, field));
    assert_eq!(set, [50, 20 * MIB, 120 * MIB]);
    assert_eq!(
        (number(c, "weight"), number(c, "floor_bytes")),
        (200, 48 * MIB)
    );
    daemon.until("the budget to hold again", |daemon| {
        let host = daemon.host();
        number(&host, "over_bytes") == 0 && vm(&host, "a")["target_bytes"].is_u64()
    });
    daemon
}

#[test]
fn memory_moves_to_the_vm_that_uses_it_and_what_was_set_survives_the_daemon() {
    if std::env::var_os(IS_VMM).is_some() {
        be_a_vmm();
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    let own = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(own.parent().unwrap()).unwrap();
    let program = folder.path().join("qemu-test");
    fs::hard_link(&own, &program).unwrap();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut vmms = ["a", "b", "c"].map(|name| (name, Vmm::start(&program)));
    let mut daemon = Daemon::start(dir.path());
    attach(&daemon, &vmms);
    let host = daemon.json(&["host", "budget", BUDGET, "--json"]);
    assert_eq!(number(&host, "budget_bytes"), 256 * MIB);
    refuses_what_cannot_be(&daemon);
    second_daemon_is_refused(dir.path());

    vmms[0].1.uses(USED_MIB);
    daemon.until("memory for the busy VM within the budget", |daemon| {
        let host = daemon.host();
        number(&host, "over_bytes") == 0 && resident_mib(&host, "a") > USED_MIB - 12
    });
    sum_holds(&daemon.host());

    // The other one begins, and the first ends.
    vmms[0].1.uses(0);
    vmms[1].1.uses(USED_MIB);
    daemon.until("memory for the other VM", |daemon| {
        let host = daemon.host();
        sum_holds(&host);
        assert!(number(vm(&host, "c"), "target_bytes") >= 48 * MIB, "{host}");
        resident_mib(&host, "b") > USED_MIB - 12 && resident_mib(&host, "a") < USED_MIB - 24
    });

    let daemon = restarted_with_what_was_set(daemon, dir.path());
    for (_, vmm) in &mut vmms {
        vmm.verify();
    }
    sum_holds(&daemon.host());
    let told = daemon.json(&["host", "budget", "off", "--json"]);
    assert_eq!(told["budget_bytes"], Value::Null);
    for (name, vmm) in &mut vmms {
        daemon.json(&["vm", "detach", name, "--json"]);
        vmm.uses(0);
        vmm.verify();
    }
    assert!(daemon.host()["vms"].as_array().unwrap().is_empty());
}
