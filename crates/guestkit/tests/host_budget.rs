// SPDX-License-Identifier: Apache-2.0
//! Three stock guests under one budget of the host, while their daemon dies five times.
//!
//! ```text
//!   idle     stands still: what it holds goes to the others
//!   steady   a small set in constant use, and a disk of ours
//!   growing  frees half of its memory, and takes it again later
//! ```
//! From the moment at which the budget first holds, what the three have resident and in pools is read from
//! outside, daemon or no daemon: the kernel counts the blocks of the files.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pagetide_guest::params::Params;
use pagetide_guest::wire::{Command, Progress};
use pagetide_guestkit::guest::{Guest, resident_bytes};
use pagetide_guestkit::product::is_listening;
use pagetide_guestkit::qemu::{Disk, GuestSpec};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{PATIENCE, number, sound_end, take_turn, work};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// Less than the three use together, and more than the two that work.
const BUDGET_BYTES: u64 = 768 * MIB;
const HIGH_PERCENT: u64 = 8;
const IDLE: usize = 0;
const STEADY: usize = 1;
const GROWING: usize = 2;
const NAMES: [&str; 3] = ["idle", "steady", "growing"];
/// What is set for each: weight, floor and ceiling.
const SET: [[u64; 3]; 3] = [
    [50, 40 * MIB, 320 * MIB],
    [200, 64 * MIB, 256 * MIB],
    [150, 48 * MIB, 416 * MIB],
];
const DISK_BYTES: u64 = 48 * MIB;
/// Twice as much as it is left with first. What it has beside that, of its start, is cold and goes.
const GROWING_BYTES: u64 = 320 * MIB;
/// Of what it takes, the growing guest has at least this much resident, and the idle one that much less.
const MOVED_BYTES: u64 = 48 * MIB;
const KILLS: u64 = 5;
/// Verified by the guests that work, from one death to the next.
const WORK_BYTES: u64 = 48 * MIB;
/// A fill goes ahead if nothing could be evicted for it within a tenth of a second: on a busy machine a few may be
/// under way at any moment.
const UNDER_WAY_BYTES: u64 = 8 * MIB;
/// Between two samples from outside.
const PERIOD: Duration = Duration::from_millis(25);

fn spec(mem_bytes: u64, pace_us: u64) -> GuestSpec {
    GuestSpec {
        ram_bytes: 448 * MIB,
        cpus: 1,
        work: Params {
            mem_bytes,
            pace_us,
            ..Params::default()
        },
        ..GuestSpec::default()
    }
}

/// The three at work: all their memory, and the disk, has its first content.
fn boot(stage: &mut Stage) -> [Guest; 3] {
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    let idle = spec(224 * MIB, 1_000);
    let mut steady = spec(40 * MIB, 4_000);
    steady.disk = Disk::VhostUser(socket);
    steady.work.file_bytes = DISK_BYTES;
    let mut growing = spec(GROWING_BYTES, 2_000);
    growing.free_page_reporting = true;
    let mut guests = [idle, steady, growing].map(|spec| stage.boot(&spec).expect("a guest"));
    for guest in &mut guests {
        guest.wait_for_work(PATIENCE).expect("work");
    }
    guests
}

fn client(stage: &Stage, words: &[&str]) -> Value {
    let answer = stage.product.client(words.iter().chain(&["--json"]));
    answer.expect("a client").json().expect("an answer")
}

fn host(stage: &Stage) -> Value {
    client(stage, &["host", "show"])
}

fn vm<'a>(host: &'a Value, name: &str) -> &'a Value {
    let vms = host["vms"].as_array().expect("VMs");
    let found = vms.iter().find(|vm| vm["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {host}"))
}

fn resident(host: &Value, place: usize) -> u64 {
    number(vm(host, NAMES[place]), "resident_bytes")
}

/// Has the growing guest free half of its memory, and waits until that is free on the host.
fn shrink(stage: &Stage, guest: &mut Guest) {
    let before = guest.resident_bytes().expect("resident");
    guest.send(Command::Give).expect("a command");
    let given = |p: &Progress| p.memory_bytes == GROWING_BYTES / 2;
    guest
        .wait_for("memory given", PATIENCE, given)
        .expect("given");
    let fallen = || {
        let now = guest.resident_bytes().unwrap_or(u64::MAX);
        Ok(now + GROWING_BYTES / 3 <= before)
    };
    stage
        .until("resident memory fallen", PATIENCE, fallen)
        .expect("free pages reported");
}

/// Attaches all and sets what each may have, and the budget.
fn set_all(stage: &Stage, guests: &[Guest; 3]) {
    for ((guest, name), set) in guests.iter().zip(NAMES).zip(SET) {
        stage.product.attach(guest.pid(), name).expect("attach");
        let [weight, floor, ceiling] = set.map(|number| number.to_string());
        client(
            stage,
            &[
                "vm",
                "set",
                name,
                "--weight",
                &weight,
                "--floor",
                &floor,
                "--ceiling",
                &ceiling,
            ],
        );
    }
    let (budget, high) = (BUDGET_BYTES.to_string(), format!("{HIGH_PERCENT}%"));
    client(stage, &["host", "budget", &budget, "--high", &high]);
}

/// All that was set is in force.
fn is_as_set(host: &Value) {
    assert_eq!(number(host, "budget_bytes"), BUDGET_BYTES, "{host}");
    let high_bytes = BUDGET_BYTES * HIGH_PERCENT / 100;
    assert_eq!(number(host, "high_bytes"), high_bytes, "{host}");
    for (name, set) in NAMES.into_iter().zip(SET) {
        let vm = vm(host, name);
        let found = ["weight", "floor_bytes", "ceiling_bytes"].map(|field| number(vm, field));
        assert_eq!(found, set, "{host}");
    }
}

fn settle(stage: &Stage) -> Value {
    let mut last = Value::Null;
    let settled = || {
        last = host(stage);
        let targets = NAMES.map(|name| vm(&last, name)["target_bytes"].is_u64());
        Ok(targets == [true; 3] && number(&last, "over_bytes") == 0)
    };
    stage
        .until("the budget to hold", PATIENCE, settled)
        .expect("settled");
    last
}

/// What the guests take, read from outside until it is dropped.
struct Watch {
    most_bytes: Arc<AtomicU64>,
    samples: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(pids: [u32; 3], state: PathBuf) -> Self {
        let (most_bytes, samples, stop) = (Arc::default(), Arc::default(), Arc::default());
        let mut watch = Self {
            most_bytes: Arc::clone(&most_bytes),
            samples: Arc::clone(&samples),
            stop: Arc::clone(&stop),
            thread: None,
        };
        watch.thread = Some(thread::spawn(move || {
            while !stop.load(Relaxed) {
                // Pages that change places between two of the readings are counted twice: not each time.
                let bytes = (0..3).map(|_| taken(&pids, &state)).min().unwrap_or(0);
                most_bytes.fetch_max(bytes, Relaxed);
                samples.fetch_add(1, Relaxed);
                thread::sleep(PERIOD);
            }
        }));
        watch
    }

    /// No sample since the start is over the budget, but for what is being filled.
    fn holds(&self, when: &str) {
        let most_bytes = self.most_bytes.load(Relaxed);
        eprintln!(
            "{when}: at most {} KiB beside a budget of {} KiB in {} samples",
            most_bytes >> 10,
            BUDGET_BYTES >> 10,
            self.samples.load(Relaxed)
        );
        assert!(most_bytes <= BUDGET_BYTES + UNDER_WAY_BYTES, "{when}");
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !thread::panicking()
        {
            panic!("the watch could not read what the guests take");
        }
    }
}

/// Resident memory of all, and their pools.
fn taken(pids: &[u32; 3], state: &Path) -> u64 {
    let pools = pool_bytes(state).expect("the pools");
    let resident = pids.iter().map(|&pid| resident_bytes(pid).expect("RAM"));
    pools + resident.sum::<u64>()
}

fn pool_bytes(state: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(state)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "pool") {
            bytes += fs::metadata(path)?.blocks() * 512;
        }
    }
    Ok(bytes)
}

/// Kills the daemon and starts another: it has all that was set.
fn restart(stage: &mut Stage, deaths: u64, disk: &Path) {
    stage.product.kill();
    stage.product.run().expect("a successor");
    is_as_set(&host(stage));
    // A QEMU before 9.1 whose back end dies during its handshake never sends anything again.
    let serves =
        || Ok(is_listening(disk)? && number(&stage.product.device(disk)?, "wired_bytes") > 0);
    stage
        .until("the disk's rings to run", PATIENCE, serves)
        .expect("a disk");
    for name in NAMES {
        let vm = stage.product.show(name).expect("show");
        assert_eq!(number(&vm, "restarts"), deaths, "{vm}");
        assert_eq!(number(&vm, "alias_faults"), 0, "{vm}");
        assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    }
}

/// Detaches all and takes the budget away.
fn let_all_go(stage: &Stage) {
    for name in NAMES {
        stage.product.detach(name).expect("detach");
    }
    let host = client(stage, &["host", "budget", "off"]);
    assert_eq!(host["budget_bytes"], Value::Null, "{host}");
    assert_eq!(host["vms"].as_array().map(Vec::len), Some(0), "{host}");
}

#[test]
fn guests_under_one_budget_share_it_by_need_and_verify_all_though_daemons_die() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_budget) else {
        return;
    };
    let disk = stage.folder().join("disk0.sock");
    let mut guests = boot(&mut stage);
    guests[IDLE].send(Command::Quiet).expect("a command");
    shrink(&stage, &mut guests[GROWING]);
    set_all(&stage, &guests);
    let before = settle(&stage);
    let pids = guests.each_ref().map(Guest::pid);
    let watch = Watch::start(pids, stage.folder().join("state"));
    for death in 1..=KILLS {
        for place in [STEADY, GROWING] {
            work(&mut guests[place], WORK_BYTES);
        }
        restart(&mut stage, death, &disk);
        settle(&stage);
        watch.holds(&format!("after death {death}"));
        if death == 1 {
            // The other daemons die while memory moves.
            guests[GROWING].send(Command::Take).expect("a command");
        }
    }
    let mut after = Value::Null;
    let moved = || {
        after = host(&stage);
        Ok(
            resident(&after, GROWING) >= resident(&before, GROWING) + MOVED_BYTES
                && resident(&after, IDLE) + MOVED_BYTES <= resident(&before, IDLE),
        )
    };
    stage
        .until(
            "memory of the idle guest with the growing one",
            PATIENCE,
            moved,
        )
        .expect("it moves");
    eprintln!("before {before}\nafter {after}");
    watch.holds("in the end");
    drop(watch);
    guests[IDLE].send(Command::Go).expect("a command");
    let_all_go(&stage);
    thread::scope(|scope| {
        for guest in &mut guests {
            scope.spawn(|| sound_end(guest));
        }
    });
    assert!(stage.product.stop().expect("an end").success());
}
