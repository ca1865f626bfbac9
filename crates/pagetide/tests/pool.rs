// SPDX-License-Identifier: Apache-2.0
//! A daemon whose pools have a cap: it keeps within it, says so, evicts pages of zeros all the same, goes
//! on when the cap is raised, and a successor keeps the cap that was set. The VMM is this process: a file
//! of RAM, mapped shared.

mod vmm;

use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use serde_json::Value;
use std::{
    fs,
    os::fd::AsFd as _,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 64 * MIB;
const PAGES: u64 = RAM_BYTES / 4096;
const LIMIT_BYTES: u64 = 16 * MIB;
const CAP_BYTES: u64 = 8 * MIB;
const PATIENCE: Duration = Duration::from_secs(120);

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start(settings: &[&str]) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let child = Self::spawn(&dir, settings);
        let mut daemon = Self { child, dir };
        daemon.until_it_answers();
        daemon
    }

    fn spawn(dir: &tempfile::TempDir, settings: &[&str]) -> Child {
        let mut log = fs::File::options();
        let log = log.create(true).append(true);
        let log = log.open(dir.path().join("log")).unwrap();
        Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(["run", "--state-dir"])
            .arg(dir.path().join("state"))
            .args(settings)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    fn until_it_answers(&mut self) {
        self.until("an answer", |daemon| {
            daemon.client(&["vm", "list"]).status.success()
        });
    }

    /// SIGKILL, and another one in its place.
    fn replace(&mut self, settings: &[&str]) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::spawn(&self.dir, settings);
        self.until_it_answers();
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

    fn pool(&self) -> Value {
        self.json(&["pool", "show", "--json"])
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?} before {what}: {}", self.log());
            let is_late = begun.elapsed() > PATIENCE;
            let told = || self.client(&["vm", "list", "--json"]).stdout;
            assert!(
                !is_late,
                "no {what}: {:?}\n{}",
                String::from_utf8(told()),
                self.log()
            );
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

fn verify(ram: &SharedMapping) {
    let mut found = vec![0; 4096];
    for page in 0..PAGES {
        ram.copy_from(page * 4096, &mut found).unwrap();
        assert!(found == content(page), "page {page}");
    }
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} in {report}"))
}

fn blockers(daemon: &Daemon) -> String {
    daemon.vm()["eviction_blockers"].to_string()
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
    let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
    let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
    for page in 0..PAGES {
        ram.copy_to(page * 4096, &content(page)).unwrap();
    }
    let mut daemon = Daemon::start(&["--pool-max", "1G"]);
    refuse_bad_caps(&daemon);
    let pool = fill_up(&mut daemon);
    assert!(number(&pool, "used_bytes") <= CAP_BYTES, "{pool}");
    verify(&ram);

    daemon.replace(&["--pool-max", "2G"]);
    let pool = daemon.pool();
    assert_eq!(number(&pool, "cap_bytes"), CAP_BYTES, "{pool}");
    assert!(number(&pool, "used_bytes") <= CAP_BYTES, "{pool}");
    assert!(number(&daemon.vm(), "pool_peak_bytes") <= CAP_BYTES);

    daemon.json(&["pool", "cap", "default", "--json"]);
    daemon.until("eviction to the limit", |daemon| {
        let vm = daemon.vm();
        number(&vm, "resident_bytes") <= LIMIT_BYTES && blockers(daemon) == "[]"
    });
    let vm = daemon.vm();
    assert_eq!(vm["state"], "attached", "{vm}");
    assert_eq!(number(&daemon.pool(), "cap_bytes"), 2 << 30);
    // Lowered below what is there: nothing is lost, and nothing more is taken.
    let lowered = daemon.json(&["pool", "cap", "4M", "--json"]);
    let used = number(&lowered, "used_bytes");
    verify(&ram);
    assert!(number(&daemon.pool(), "used_bytes") <= used);
    daemon.json(&["vm", "detach", "a", "--json"]);
    daemon.until("an account of nothing", |daemon| {
        number(&daemon.pool(), "used_bytes") == 0
    });
    verify(&ram);
}

/// Nothing changes by them.
fn refuse_bad_caps(daemon: &Daemon) {
    assert_eq!(number(&daemon.pool(), "cap_bytes"), 1 << 30);
    for (cap, why) in [("3M", "4M"), ("much", "size"), ("-1", "")] {
        let refused = daemon.client(&["pool", "cap", cap]);
        let told = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{cap}: {told}");
        assert!(told.contains(why), "{cap}: {told}");
    }
    assert_eq!(number(&daemon.pool(), "cap_bytes"), 1 << 30);
}

/// Attaches this process with a limit that needs more pool than the cap allows: all of the zeros go, and
/// of the rest as much as there is room for.
fn fill_up(daemon: &mut Daemon) -> Value {
    daemon.json(&["pool", "cap", "8M", "--json"]);
    let own = std::process::id().to_string();
    daemon.json(&[
        "attach", "--pid", &own, "--name", "a", "--limit", "16M", "--json",
    ]);
    daemon.until("zeros evicted from a full pool", |daemon| {
        let vm = daemon.vm();
        blockers(daemon).contains("reached their cap") && number(&vm, "zero_pages") >= PAGES / 2
    });
    let vm = daemon.vm();
    assert_eq!(vm["state"], "serving-only", "{vm}");
    assert_eq!(number(&vm, "pool_full"), 1, "{vm}");
    assert!(number(&vm, "uncompressed_pages") >= 1_000, "{vm}");
    assert!(number(&vm, "resident_bytes") > LIMIT_BYTES, "{vm}");
    let pool = daemon.pool();
    // The account and the kernel's count, a moment apart.
    let apart = number(&pool, "used_bytes").abs_diff(number(&vm, "pool_bytes"));
    assert!(apart <= MIB, "{pool} {vm}");
    assert_eq!(number(&pool, "full_vms"), 1, "{pool}");
    assert!(number(&vm, "metadata_bytes") >= PAGES * 8, "{vm}");
    assert!(number(&pool, "peak_bytes") <= CAP_BYTES, "{pool}");
    pool
}
