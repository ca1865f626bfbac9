// SPDX-License-Identifier: Apache-2.0
//! Three VMs under one budget of the host: the sum holds, memory moves from who leaves it alone to who uses
//! it, what was set survives the daemon's death, and every byte is as it was.
//!
//! A VMM is a process of this program with a file of RAM, mapped shared, and an emulator's name. It touches a
//! part of its RAM again and again, as it is told on its input, and compares what it reads.

mod daemon;
mod refusal;

use daemon::{Daemon, command, number};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use refusal::{refuses, refuses_both};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::fd::AsFd,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

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

fn start(dir: &Path) -> Daemon {
    Daemon::start(dir, command(dir, &[]))
}

fn host_of(daemon: &Daemon) -> Value {
    daemon.json(&["host", "show"])
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

/// What cannot be is refused by the command and by the API alike, and changes nothing.
fn refuses_what_cannot_be(daemon: &Daemon) {
    let before = host_of(daemon);
    let budget = |body| ("PUT", "/v1/host/budget", body);
    let share = |name, body| {
        let path = match name {
            "a" => "/v1/vms/a/share",
            _ => "/v1/vms/c/share",
        };
        ("PUT", path, body)
    };
    let size = |bytes: u64| budget(json!({ "budget_bytes": bytes }));
    for (words, request, part) in [
        (
            &["host", "budget", "64M"][..],
            size(64 * MIB),
            "the floors of its 3 VMs",
        ),
        (
            &["host", "budget", "1000000G"],
            size(1_000_000 << 30),
            "more than the host's memory",
        ),
        (
            &["host", "budget", "--low", "9%"],
            budget(json!({"low": "9%"})),
            "out of order",
        ),
        (
            &["vm", "set", "a", "--weight", "0"],
            share("a", json!({"weight": 0})),
            "weight 0 is not possible",
        ),
        (
            &["vm", "set", "a", "--floor", "161M"],
            share("a", json!({"floor_bytes": 161 * MIB})),
            "more than its RAM",
        ),
        (
            &["vm", "set", "a", "--floor", "15M"],
            share("a", json!({"floor_bytes": 15 * MIB})),
            "less than 16 MiB",
        ),
        (
            &["vm", "set", "c", "--ceiling", "32M"],
            share("c", json!({"ceiling_bytes": 32 * MIB})),
            "less than its floor",
        ),
        (
            &["vm", "limit", "c", "32M"],
            ("PATCH", "/v1/vms/c", json!({"limit_bytes": 32 * MIB})),
            "less than its floor",
        ),
    ] {
        refuses_both(daemon, words, &request, part);
    }
    refuses(
        daemon,
        &["host", "budget", "off", "--low", "3%"],
        "mean nothing without",
    );
    let after = host_of(daemon);
    for field in ["budget_bytes", "low_bytes"] {
        assert_eq!(before[field], after[field]);
    }
    for name in ["a", "b", "c"] {
        for field in ["weight", "floor_bytes", "ceiling_bytes"] {
            assert_eq!(vm(&before, name)[field], vm(&after, name)[field]);
        }
    }
}

/// So is a VM that is about to be attached: it stays as it was.
fn refuses_vms_that_cannot_be(daemon: &Daemon, vmm: &Vmm) {
    let pid = vmm.child.id();
    let with = |field: &str, value: u64| {
        let body = json!({"pid": pid, "name": "z", field: value});
        ("POST", "/v1/vms", body)
    };
    for (flag, given, request, part) in [
        (
            "--weight",
            "0",
            with("weight", 0),
            "weight 0 is not possible",
        ),
        (
            "--floor",
            "161M",
            with("floor_bytes", 161 * MIB),
            "more than its RAM",
        ),
    ] {
        let pid = pid.to_string();
        let words = ["attach", "--pid", &pid, "--name", "z", flag, given];
        refuses_both(daemon, &words, &request, part);
    }
    assert!(host_of(daemon)["vms"].as_array().unwrap().is_empty());
}

/// Another daemon on this host.
fn second_daemon_is_refused(dir: &Path) {
    let mut second = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    second
        .args(["run", "--host-budget", "64M", "--state-dir"])
        .arg(dir.join("second"))
        .arg("--budget-lock")
        .arg(dir.join("budget.lock"));
    let second = second.stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(2), "{told}");
    assert!(told.contains("another pagetide"), "{told}");
    assert!(!dir.join("second/api.sock").exists(), "it does not answer");
}

fn attach(daemon: &Daemon, vmms: &[(&str, Vmm)]) {
    for (name, vmm) in vmms {
        let pid = vmm.child.id().to_string();
        let mut words = vec!["attach", "--pid", &pid, "--name", name];
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
    ]);
    daemon.json(&["host", "budget", "--high", "6%"]);
    // As by a crash.
    drop(daemon);
    let mut daemon = start(dir);
    let host = host_of(&daemon);
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
        let host = host_of(daemon);
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
    let mut daemon = start(dir.path());
    refuses_vms_that_cannot_be(&daemon, &vmms[0].1);
    attach(&daemon, &vmms);
    let host = daemon.json(&["host", "budget", BUDGET]);
    assert_eq!(number(&host, "budget_bytes"), 256 * MIB);
    refuses_what_cannot_be(&daemon);
    second_daemon_is_refused(dir.path());

    vmms[0].1.uses(USED_MIB);
    daemon.until("memory for the busy VM within the budget", |daemon| {
        let host = host_of(daemon);
        number(&host, "over_bytes") == 0 && resident_mib(&host, "a") > USED_MIB - 12
    });
    sum_holds(&host_of(&daemon));

    // The other one begins, and the first ends.
    vmms[0].1.uses(0);
    vmms[1].1.uses(USED_MIB);
    daemon.until("memory for the other VM", |daemon| {
        let host = host_of(daemon);
        sum_holds(&host);
        assert!(number(vm(&host, "c"), "target_bytes") >= 48 * MIB, "{host}");
        resident_mib(&host, "b") > USED_MIB - 12 && resident_mib(&host, "a") < USED_MIB - 24
    });

    let daemon = restarted_with_what_was_set(daemon, dir.path());
    for (_, vmm) in &mut vmms {
        vmm.verify();
    }
    sum_holds(&host_of(&daemon));
    let told = daemon.json(&["host", "budget", "off"]);
    assert_eq!(told["budget_bytes"], Value::Null);
    for (name, vmm) in &mut vmms {
        daemon.json(&["vm", "detach", name]);
        vmm.uses(0);
        vmm.verify();
    }
    assert!(host_of(&daemon)["vms"].as_array().unwrap().is_empty());
}
