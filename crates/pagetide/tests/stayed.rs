// SPDX-License-Identifier: Apache-2.0
//! Which pages `vm reclaim` leaves in memory, and why: one that is in use, and none once it is not. The VMM is this
//! process.

mod daemon;
mod ram;
mod vmm;

use daemon::{Daemon, number};
use ram::Ram;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const RAM_BYTES: u64 = 16 << 20;
const IN_USE: u64 = 700;

/// Compresses well and is not zero.
fn content(page: u64) -> Vec<u8> {
    let word = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    word.to_le_bytes().repeat(512)
}

/// Ends a thread, also when the test fails meanwhile.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Evicts all that can be; returns what stayed, or null. Each page of it has one reason.
fn reclaim(daemon: &Daemon) -> Value {
    let report = daemon.json(&["vm", "reclaim", "a"]);
    let stayed = report["stayed"].clone();
    if let Some(stayed) = stayed.as_object() {
        let figures = stayed.iter().map(|(name, value)| (name.as_str(), value));
        let pages = figures.filter_map(|(name, value)| Some((name, value.as_u64()?)));
        let (all, by_reason): (Vec<_>, Vec<_>) = pages.partition(|(name, _)| *name == "pages");
        let sum: u64 = by_reason.iter().map(|(_, pages)| pages).sum();
        assert_eq!(all, [("pages", sum)], "{report}");
    }
    stayed
}

#[test]
fn page_in_use_is_what_stays_and_all_goes_once_it_is_not() {
    let test = "page_in_use_is_what_stays_and_all_goes_once_it_is_not";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    if !vmm::is_this(test) {
        return;
    }
    let ram = Ram::filled(RAM_BYTES, content);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut daemon = Daemon::start(dir.path(), daemon::command(dir.path(), &[]));
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a"]);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending(&ends);
        scope.spawn(|| {
            while !ends.load(Relaxed) {
                ram.touch(IN_USE);
            }
        });
        daemon.until("an eviction of all but what is in use", |daemon| {
            let stayed = reclaim(daemon);
            !stayed.is_null()
                && number(&stayed, "pages") == 1
                && number(&stayed, "touched_pages") == 1
        });
    });
    let words = daemon.client(&["vm", "reclaim", "a", "--bytes", "64M"]);
    let words = String::from_utf8_lossy(&words.stdout).into_owned();
    assert!(words.contains("reclaimed"), "{words}");
    // Pages that came back on other CPUs than that of the thread that unmaps them go, too.
    for page in [3, 900, 2_000] {
        std::thread::scope(|scope| {
            scope.spawn(|| ram.touch(page));
        });
    }
    daemon.until("an eviction of all", |daemon| {
        let stayed = reclaim(daemon);
        stayed.is_null() && number(&daemon.json(&["vm", "show", "a"]), "resident_bytes") == 0
    });
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
    ram.verify();
}
