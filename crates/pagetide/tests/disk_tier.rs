// SPDX-License-Identifier: Apache-2.0
//! Memory that goes to a disk and comes back: over restarts, a daemon that is killed, a bit that flips, a
//! daemon without the disk. The VMM is this process: a file of RAM, mapped shared.

mod cold;
mod daemon;
mod ram;
mod vmm;

use cold::{attach, content, show, tier};
use daemon::{Daemon, command, number};
use pagetide_sys::memory_file::GuestFile;
use ram::Ram;
use std::{
    fs::OpenOptions,
    os::{
        fd::AsFd as _,
        unix::fs::{FileExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
const RAM_BYTES: u64 = 48 * MIB;
const PAGES: u64 = RAM_BYTES / PAGE_BYTES;
/// Where the tier puts its first page.
const FIRST_PAGE_AT: u64 = 16 * MIB;

/// A folder for the state, and the file of a disk tier; `None` where there can be none.
struct Place {
    state: tempfile::TempDir,
    disk: tempfile::TempDir,
}

impl Place {
    fn of(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: take-over needs root");
            return None;
        }
        let disk = tempfile::tempdir_in("/var/tmp").unwrap();
        let probe = OpenOptions::new()
            .write(true)
            .create(true)
            .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
            .open(disk.path().join("probe"));
        if let Err(error) = probe {
            eprintln!("SKIPPED: no direct I/O in /var/tmp: {error}");
            return None;
        }
        if !vmm::is_this(test) {
            return None;
        }
        let state = tempfile::tempdir_in("/dev/shm").unwrap();
        Some(Self { state, disk })
    }

    fn disk(&self) -> PathBuf {
        self.disk.path().join("tier")
    }

    /// A daemon with the disk at `disk`, to which pages go at once.
    fn start_with(&self, disk: &Path) -> Daemon {
        let tiers = format!("zero,same,lz4,zstd,disk:{}=512M", disk.display());
        let settings = ["--tiers", &tiers, "--sink-after", "100ms"];
        Daemon::start(self.state.path(), command(self.state.path(), &settings))
    }

    fn start(&self) -> Daemon {
        self.start_with(&self.disk())
    }
}

fn filled() -> Ram {
    Ram::filled(RAM_BYTES, content)
}

/// Until nearly all that is evicted is on the disk.
fn sink_all(daemon: &mut Daemon) {
    cold::sink(daemon, "disk_pages", PAGES * 9 / 10);
}

#[test]
fn memory_goes_to_disk_outlives_a_killed_daemon_and_comes_back_by_faults_and_detach() {
    let test = "memory_goes_to_disk_outlives_a_killed_daemon_and_comes_back_by_faults_and_detach";
    let Some(place) = Place::of(test) else { return };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    assert_eq!(tier(&daemon)["standing"], "working");
    let vm = show(&daemon);
    assert!(number(&vm, "stored_bytes") < RAM_BYTES / 10, "{vm}");
    assert!(number(&vm, "disk_bytes") > RAM_BYTES / 4, "{vm}");
    (0..PAGES).step_by(3).for_each(|page| ram.touch(page));
    // Killed while pages go down and up.
    for _ in 0..3 {
        daemon.client(&["vm", "reclaim", "a"]);
        drop(daemon);
        daemon = place.start();
        let vm = show(&daemon);
        assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
        (0..PAGES).step_by(7).for_each(|page| ram.touch(page));
    }
    ram.verify();
    sink_all(&mut daemon);
    let report = daemon.json(&["vm", "detach", "a"]);
    assert!(number(&report, "filled_pages") > PAGES * 9 / 10, "{report}");
    ram.verify();
    assert_eq!(number(&tier(&daemon), "stored_bytes"), 0);
}

#[test]
fn flipped_bit_on_the_disk_costs_that_page_alone_and_is_told() {
    let test = "flipped_bit_on_the_disk_costs_that_page_alone_and_is_told";
    let Some(place) = Place::of(test) else { return };
    let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
    let same = file.as_fd().try_clone_to_owned().unwrap();
    let ram = Ram::filled_in(same.into(), RAM_BYTES, content);
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(place.disk())
        .unwrap();
    let mut byte = [0];
    disk.read_exact_at(&mut byte, FIRST_PAGE_AT + 100).unwrap();
    byte[0] ^= 1;
    disk.write_all_at(&byte, FIRST_PAGE_AT + 100).unwrap();
    disk.sync_all().unwrap();
    // It brings all pages back, and one of them cannot be.
    let refused = daemon.client(&["vm", "detach", "a"]);
    assert!(!refused.status.success());
    let lost = lost_page(&daemon.log());
    (0..PAGES)
        .filter(|page| *page != lost)
        .for_each(|page| ram.touch(page));
    let vm = show(&daemon);
    assert_eq!(number(&vm, "poisoned_pages"), 1, "{vm}");
    // It is a hole, and has no byte of anything.
    let mut found = vec![1; 4096];
    file.read_at(lost * PAGE_BYTES, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "page {lost}");
    let refused = daemon.client(&["vm", "detach", "a"]);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(told.contains("1 pages of a are lost"), "{told}");
}

/// The page that the log says is lost, and why.
fn lost_page(log: &str) -> u64 {
    let line = log.lines().find(|line| line.contains("content is lost"));
    let line = line.unwrap_or_else(|| panic!("nothing is lost: {log}"));
    assert!(line.contains("not what was stored"), "{line}");
    let (_, page) = line.split_once(" page=").unwrap();
    let digits: String = page
        .chars()
        .skip_while(|it| !it.is_ascii_digit())
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap()
}

#[test]
fn vm_waits_for_the_disk_that_it_has_pages_on() {
    let test = "vm_waits_for_the_disk_that_it_has_pages_on";
    let Some(place) = Place::of(test) else { return };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    drop(daemon);
    let without = Daemon::start(place.state.path(), command(place.state.path(), &[]));
    assert!(
        without.log().contains("--tiers of before"),
        "{}",
        without.log()
    );
    drop(without);
    // Another disk is not taken in its place, nor written to.
    let path = place.disk.path().join("other");
    let other = place.start_with(&path);
    let log = other.log();
    assert!(log.contains("the disk tier does not work"), "{log}");
    drop(other);
    assert!(!path.exists());
    let daemon = place.start();
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
}

#[test]
fn daemon_whose_disk_has_gone_serves_what_is_elsewhere_and_the_rest_when_it_is_back() {
    let test = "daemon_whose_disk_has_gone_serves_what_is_elsewhere_and_the_rest_when_it_is_back";
    let Some(place) = Place::of(test) else { return };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    // Some are in memory.
    (0..PAGES / 4).for_each(|page| ram.touch(page));
    daemon.client(&["vm", "reclaim", "a"]);
    (0..PAGES / 8).for_each(|page| ram.touch(page));
    drop(daemon);
    let away = place.disk.path().join("away");
    std::fs::rename(place.disk(), &away).unwrap();
    let mut daemon = place.start();
    assert_eq!(tier(&daemon)["standing"], "gone");
    (0..PAGES / 8).for_each(|page| ram.touch(page));
    let vm = show(&daemon);
    assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    assert!(number(&vm, "disk_pages") > PAGES / 2, "{vm}");
    std::fs::rename(&away, place.disk()).unwrap();
    daemon.until("the disk is back", |daemon| {
        tier(daemon)["standing"] == "working"
    });
    ram.verify();
    sink_all(&mut daemon);
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
}

/// As for lack of descriptors or memory.
#[test]
fn pool_that_cannot_be_opened_now_keeps_no_other_vm_from_being_served() {
    let test = "pool_that_cannot_be_opened_now_keeps_no_other_vm_from_being_served";
    let Some(place) = Place::of(test) else { return };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    drop(daemon);
    let other = place.state.path().join("state/b.pool");
    std::fs::create_dir(&other).unwrap();
    let daemon = place.start();
    let log = daemon.log();
    assert!(
        log.contains("it is not known what its VM has on disk"),
        "{log}"
    );
    ram.verify();
    let vm = show(&daemon);
    assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    std::fs::remove_dir(&other).unwrap();
    drop(daemon);
    let mut daemon = place.start();
    sink_all(&mut daemon);
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
}

#[test]
fn disk_with_pages_of_a_daemon_that_is_dead_is_refused_to_another_one() {
    let test = "disk_with_pages_of_a_daemon_that_is_dead_is_refused_to_another_one";
    let Some(place) = Place::of(test) else { return };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    drop(daemon);
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let tiers = format!("lz4,disk:{}=512M", place.disk().display());
    let output = command(other.path(), &["--tiers", &tiers])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    let first = place.state.path().display().to_string();
    assert!(told.contains(&first), "{told}");
    let daemon = place.start();
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
}

#[test]
fn disk_that_cannot_be_a_tier_is_refused_with_one_sentence_and_status_2() {
    let state = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = state.path().join("tier");
    let tiers = format!("lz4,disk:{}=512M", file.display());
    let output = command(state.path(), &["--tiers", &tiers])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("it is in memory itself"), "{told}");
}
