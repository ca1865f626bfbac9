// SPDX-License-Identifier: Apache-2.0
//! Pages of a VM in each tier of the pool: what stays cold is packed anew, a successor serves it, also one
//! that uses fewer tiers. The VMM is this process: a file of RAM, mapped shared.

mod daemon;
mod ram;
mod vmm;

use daemon::{Daemon, command, number};
use ram::Ram;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 64 * MIB;

/// One page in four is zeros, one is a word again and again, one does not compress, and one is hexadecimal
/// digits, in which lz4 finds little and zstd half.
fn content(page: u64) -> Vec<u8> {
    let mut state = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    match page % 4 {
        0 => vec![0; 4096],
        1 => [1, 2, 3, page.to_le_bytes()[1]].repeat(1024),
        2 => (0..512).flat_map(|_| next()).collect(),
        _ => {
            let digits = (0..512).flat_map(|_| next());
            let digits = digits.map(|byte| b"0123456789abcdef"[usize::from(byte % 16)]);
            digits.take(2048).chain([b' '; 2048]).collect()
        }
    }
}

fn vm_of(daemon: &Daemon) -> Value {
    daemon.json(&["vm", "show", "a"])
}

#[test]
fn pages_that_stay_cold_are_packed_anew_and_come_back_whole_from_whichever_daemon() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    if !vmm::is_this(
        "pages_that_stay_cold_are_packed_anew_and_come_back_whole_from_whichever_daemon",
    ) {
        return;
    }
    let ram = Ram::filled(RAM_BYTES, content);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let start = |tiers: &str| {
        let settings = ["--tiers", tiers, "--demote-after", "1s"];
        Daemon::start(dir.path(), command(dir.path(), &settings))
    };
    let mut daemon = start("zero,same,lz4,zstd");
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a", "--limit", "16M"]);
    daemon.until("cold pages in zstd", |daemon| {
        let vm = vm_of(daemon);
        number(&vm, "demoted_pages") >= 1_000 && number(&vm, "demotion_saved_bytes") > 0
    });
    let vm = vm_of(&daemon);
    for figure in ["zero_pages", "same_filled_pages", "uncompressed_pages"] {
        assert!(number(&vm, figure) > 1_000, "{figure}: {vm}");
    }
    let pool = daemon.json(&["pool", "show"]);
    assert!(number(&pool, "zstd_bytes") > 0, "{pool}");
    assert!(number(&pool, "same_filled_pages") > 1_000, "{pool}");
    // Without a fault of the VM, what is in the tiers outlives the daemon.
    drop(daemon);
    let mut daemon = start("lz4");
    let vm = vm_of(&daemon);
    assert!(number(&vm, "zstd_pages") >= 500, "{vm}");
    assert!(number(&vm, "same_filled_pages") > 1_000, "{vm}");
    ram.verify();
    daemon.until("nothing in zstd", |daemon| {
        number(&vm_of(daemon), "zstd_pages") == 0
    });
    daemon.json(&["vm", "detach", "a"]);
    ram.verify();
}

#[test]
fn tiers_that_cannot_work_end_the_start_with_status_2_and_say_what_is_allowed() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    for (setting, value) in [
        ("--tiers", "zero,same"),
        ("--tiers", "zero,same,lz4,snappy"),
        ("--tiers", "lz4=1"),
        ("--demote-after", "soon"),
    ] {
        let ended = command(dir.path(), &[setting, value]).output().unwrap();
        let told = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{value}: {told}");
        assert!(told.contains("write"), "{value}: {told}");
    }
}
