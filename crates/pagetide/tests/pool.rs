// SPDX-License-Identifier: Apache-2.0
//! A daemon whose pools have a cap: it keeps within it, says so, evicts pages of zeros all the same, goes
//! on when the cap is raised, and a successor keeps the cap that was set. The VMM is this process: a file
//! of RAM, mapped shared.

mod daemon;
mod ram;
mod refusal;
mod vmm;

use daemon::{Daemon, command, number};
use ram::Ram;
use refusal::{refuses, refuses_both};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 64 * MIB;
const PAGES: u64 = RAM_BYTES / 4096;
const LIMIT_BYTES: u64 = 16 * MIB;
const CAP_BYTES: u64 = 8 * MIB;

/// The first half does not compress, the second is zeros.
fn content(page: u64) -> Vec<u8> {
    if page >= PAGES / 2 {
        return vec![0; 4096];
    }
    let mut state = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..512).flat_map(|_| next()).collect()
}

fn vm_of(daemon: &Daemon) -> Value {
    daemon.json(&["vm", "show", "a"])
}

fn pool_of(daemon: &Daemon) -> Value {
    daemon.json(&["pool", "show"])
}

fn blockers(daemon: &Daemon) -> String {
    vm_of(daemon)["eviction_blockers"].to_string()
}

#[test]
fn cap_is_kept_and_told_zeros_still_go_and_a_successor_keeps_what_was_set() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    if !vmm::is_this("cap_is_kept_and_told_zeros_still_go_and_a_successor_keeps_what_was_set") {
        return;
    }
    let ram = Ram::filled(RAM_BYTES, content);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let start = |cap: &str| Daemon::start(dir.path(), command(dir.path(), &["--pool-max", cap]));
    let mut daemon = start("1G");
    refuse_bad_caps(&daemon);
    let pool = fill_up(&mut daemon);
    assert!(number(&pool, "used_bytes") <= CAP_BYTES, "{pool}");
    ram.verify();

    drop(daemon);
    let daemon = start("2G");
    let pool = pool_of(&daemon);
    assert_eq!(number(&pool, "cap_bytes"), CAP_BYTES, "{pool}");
    assert!(number(&pool, "used_bytes") <= CAP_BYTES, "{pool}");
    assert!(number(&vm_of(&daemon), "pool_peak_bytes") <= CAP_BYTES);

    drop(daemon);
    counts_while_it_waits(dir.path(), &start);
    let mut daemon = start("2G");
    ram.verify();

    daemon.json(&["pool", "cap", "default"]);
    daemon.until("eviction to the limit", |daemon| {
        let vm = vm_of(daemon);
        number(&vm, "resident_bytes") <= LIMIT_BYTES && blockers(daemon) == "[]"
    });
    let vm = vm_of(&daemon);
    assert_eq!(vm["state"], "attached", "{vm}");
    assert_eq!(number(&pool_of(&daemon), "cap_bytes"), 2 << 30);
    // Lowered below what is there: nothing is lost, and nothing more is taken.
    let lowered = daemon.json(&["pool", "cap", "4M"]);
    let used = number(&lowered, "used_bytes");
    ram.verify();
    assert!(number(&pool_of(&daemon), "used_bytes") <= used);
    daemon.json(&["vm", "detach", "a"]);
    daemon.until("an account of nothing", |daemon| {
        number(&pool_of(daemon), "used_bytes") == 0
    });
    ram.verify();
}

/// Where a pool's header has the number of the userfaultfd, without which a VM is not recovered.
const USERFAULTFD_AT: u64 = 11 * 8;

/// A daemon that cannot recover the VM: it waits, and what it takes counts.
fn counts_while_it_waits(dir: &Path, start: &impl Fn(&str) -> Daemon) {
    let path = dir.join("state/a.pool");
    let pool = fs::File::options().read(true).write(true).open(&path);
    let pool = pool.unwrap();
    let mut before = [0; 8];
    pool.read_exact_at(&mut before, USERFAULTFD_AT).unwrap();
    pool.write_all_at(&[0; 8], USERFAULTFD_AT).unwrap();
    let daemon = start("2G");
    let shown = daemon.client(&["vm", "show", "a"]);
    let told = String::from_utf8_lossy(&shown.stderr).into_owned();
    assert!(told.contains("could not be recovered"), "{told}");
    let taken = fs::metadata(&path).unwrap().blocks() * 512;
    assert!(taken > PAGES * 8, "{taken}");
    assert_eq!(number(&pool_of(&daemon), "used_bytes"), taken);
    let host = daemon.json(&["host", "show"]);
    let vm = &host["vms"][0];
    assert_eq!(vm["name"], "a", "{host}");
    assert_eq!(number(vm, "stored_bytes"), taken, "{host}");
    assert!(number(vm, "resident_bytes") > LIMIT_BYTES, "{host}");
    drop(daemon);
    pool.write_all_at(&before, USERFAULTFD_AT).unwrap();
}

/// Nothing changes by them.
fn refuse_bad_caps(daemon: &Daemon) {
    assert_eq!(number(&pool_of(daemon), "cap_bytes"), 1 << 30);
    let request = ("PUT", "/v1/pool", json!({"cap_bytes": 3 * MIB}));
    refuses_both(daemon, &["pool", "cap", "3M"], &request, "4M");
    for (cap, why) in [("much", "size"), ("-1", "")] {
        refuses(daemon, &["pool", "cap", cap], why);
    }
    assert_eq!(number(&pool_of(daemon), "cap_bytes"), 1 << 30);
}

/// Attaches this process with a limit that needs more pool than the cap allows: all of the zeros go, and
/// of the rest as much as there is room for.
fn fill_up(daemon: &mut Daemon) -> Value {
    daemon.json(&["pool", "cap", "8M"]);
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a", "--limit", "16M"]);
    daemon.until("zeros evicted from a full pool", |daemon| {
        let vm = vm_of(daemon);
        blockers(daemon).contains("reached their cap") && number(&vm, "zero_pages") >= PAGES / 2
    });
    let vm = vm_of(daemon);
    assert_eq!(vm["state"], "serving-only", "{vm}");
    assert_eq!(number(&vm, "pool_full"), 1, "{vm}");
    assert!(number(&vm, "uncompressed_pages") >= 1_000, "{vm}");
    assert!(number(&vm, "resident_bytes") > LIMIT_BYTES, "{vm}");
    let pool = pool_of(daemon);
    // The account and the kernel's count, a moment apart.
    let apart = number(&pool, "used_bytes").abs_diff(number(&vm, "pool_bytes"));
    assert!(apart <= MIB, "{pool} {vm}");
    assert_eq!(number(&pool, "full_vms"), 1, "{pool}");
    assert!(number(&vm, "metadata_bytes") >= PAGES * 8, "{vm}");
    assert!(number(&pool, "peak_bytes") <= CAP_BYTES, "{pool}");
    pool
}
