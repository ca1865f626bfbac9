// SPDX-License-Identifier: Apache-2.0
//! Memory that comes back before anything asks for it: what was in use, once a limit is raised, within the new
//! limit and without an eviction; and, where that is switched on, what was evicted together with a page that
//! faults. The VMM is this process: a file of RAM, mapped shared.

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

const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
const SECTION_PAGES: u64 = 512;
const RAM_BYTES: u64 = 96 * MIB;
/// What is in use: more than the first limit, and less than the second.
const USED_BYTES: u64 = 48 * MIB;
const LOW_LIMIT: &str = "24M";
const HIGH_LIMIT: &str = "72M";
const HIGH_LIMIT_BYTES: u64 = 72 * MIB;
const PATIENCE: Duration = Duration::from_secs(120);

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start(settings: &[&str]) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(["run", "--state-dir"])
            .arg(dir.path().join("state"))
            .args(settings)
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

    /// A figure of the VM.
    fn figure(&self, name: &str) -> u64 {
        let vm = self.json(&["vm", "show", "a", "--json"]);
        vm[name]
            .as_u64()
            .unwrap_or_else(|| panic!("{name} in {vm}"))
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
                let vm = self.client(&["vm", "show", "a"]).stdout;
                let vm = String::from_utf8_lossy(&vm);
                panic!("no {what}: {vm}\n{}", self.log());
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

/// The RAM of this process.
struct Ram {
    memory: SharedMapping,
    _file: GuestFile,
}

impl Ram {
    fn filled() -> Self {
        let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
        let memory = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
        for page in 0..RAM_BYTES / PAGE_BYTES {
            memory.copy_to(page * PAGE_BYTES, &content(page)).unwrap();
        }
        Self {
            memory,
            _file: file,
        }
    }

    /// Compares a page, which touches it.
    fn touch(&self, page: u64) {
        let mut found = vec![0; 4096];
        self.memory
            .copy_from(page * PAGE_BYTES, &mut found)
            .unwrap();
        assert!(found == content(page), "page {page}");
    }

    fn verify(&self) {
        (0..RAM_BYTES / PAGE_BYTES).for_each(|page| self.touch(page));
    }
}

/// Compresses well and is not zero.
fn content(page: u64) -> Vec<u8> {
    let word = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    word.to_le_bytes().repeat(512)
}

fn is_skipped(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return true;
    }
    !vmm::is_this(test)
}

fn attach(daemon: &Daemon, more: &[&str]) {
    let own = std::process::id().to_string();
    let mut words = vec!["attach", "--pid", &own, "--name", "a", "--json"];
    words.extend(more);
    daemon.json(&words);
}

#[test]
fn what_was_in_use_comes_back_untouched_when_the_limit_is_raised_and_nothing_is_evicted_for_it() {
    let test = "what_was_in_use_comes_back_untouched_when_the_limit_is_raised_and_nothing_is_evicted_for_it";
    if is_skipped(test) {
        return;
    }
    let ram = Ram::filled();
    let mut daemon = Daemon::start(&[]);
    attach(&daemon, &["--limit", LOW_LIMIT]);
    use_until(&ram, &mut daemon, |daemon| {
        let evicted = daemon.figure("evicted_pages") * PAGE_BYTES;
        evicted > RAM_BYTES + USED_BYTES
    });
    let before = daemon.figure("resident_bytes");
    daemon.json(&["vm", "limit", "a", HIGH_LIMIT, "--json"]);
    daemon.until("memory that comes back by itself", |daemon| {
        daemon.figure("swapped_in_ahead_pages") >= 4 * SECTION_PAGES
    });
    let evicted = daemon.figure("evicted_pages");
    // Until no more comes in a while in which a turn would have come many times.
    let (mut ahead, mut since) = (0, Instant::now());
    daemon.until("an end of that", |daemon| {
        let now = daemon.figure("swapped_in_ahead_pages");
        if std::mem::replace(&mut ahead, now) != now {
            since = Instant::now();
        }
        since.elapsed() > Duration::from_secs(3)
    });
    let resident = daemon.figure("resident_bytes");
    assert!(resident >= before + 8 * MIB, "{before}, then {resident}");
    assert!(resident < HIGH_LIMIT_BYTES, "{resident}");
    assert_eq!(daemon.figure("evicted_pages"), evicted);
    ram.verify();
    daemon.json(&["vm", "detach", "a", "--json"]);
    ram.verify();
}

/// Ends a thread, also when the test fails meanwhile.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Uses part of the RAM again and again until `is_enough`.
fn use_until(ram: &Ram, daemon: &mut Daemon, is_enough: impl Fn(&Daemon) -> bool) {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending(&ends);
        scope.spawn(|| {
            let pages = (0..USED_BYTES / PAGE_BYTES).cycle();
            pages
                .take_while(|_| !ends.load(Relaxed))
                .for_each(|page| ram.touch(page));
        });
        daemon.until("many evictions", &is_enough);
    });
}

#[test]
fn page_that_faults_brings_back_its_section_where_that_is_switched_on() {
    if is_skipped("page_that_faults_brings_back_its_section_where_that_is_switched_on") {
        return;
    }
    let ram = Ram::filled();
    let mut daemon = Daemon::start(&["--swap-in-together", "on"]);
    attach(&daemon, &[]);
    // At once some of it may have been mapped a moment ago.
    daemon.until("eviction of nearly all", |daemon| {
        daemon.json(&["vm", "reclaim", "a", "--json"]);
        daemon.figure("resident_bytes") <= 4 * MIB
    });
    assert_eq!(daemon.figure("swapped_in_ahead_pages"), 0);
    let sections = 6;
    for section in 0..sections {
        ram.touch(section * 3 * SECTION_PAGES + 40);
    }
    daemon.until("what was evicted with them", |daemon| {
        // Less what their faults read ahead, and what was there.
        daemon.figure("swapped_in_ahead_pages") >= sections * (SECTION_PAGES - 32)
    });
    ram.verify();
    daemon.json(&["vm", "detach", "a", "--json"]);
    ram.verify();
}
