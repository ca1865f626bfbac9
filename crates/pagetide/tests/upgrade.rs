// SPDX-License-Identifier: Apache-2.0
//! Live upgrades of a daemon with a VM whose memory is used all the time, and attempts at them with programs that
//! are broken in many ways. The VMM is this process: a file of RAM, mapped shared.

mod upgrading;
mod vmm;

use pagetide_bench::upgrade::broken::Way;
use pagetide_random::SplitMix64;
use pagetide_swap::Pool;
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use std::{
    fs,
    os::{
        fd::AsFd as _,
        unix::{
            fs::{FileExt as _, PermissionsExt as _},
            process::CommandExt as _,
        },
    },
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};
use upgrading::{Daemon, PATIENCE, Programs};

const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
const RAM_BYTES: u64 = 64 * MIB;
const PAGES: u64 = RAM_BYTES / PAGE_BYTES;
const LIMIT: &str = "24M";
/// Cell 1 of a pool's header.
const VERSION_AT: u64 = 8;

/// The RAM of this process, and the longest that a thread has waited for a page of it.
struct Ram {
    memory: SharedMapping,
    _file: GuestFile,
    longest_us: AtomicU64,
    touched: AtomicU64,
}

impl Ram {
    fn filled() -> Self {
        let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
        let memory = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
        for page in 0..PAGES {
            memory.copy_to(page * PAGE_BYTES, &content(page)).unwrap();
        }
        Self {
            memory,
            _file: file,
            longest_us: AtomicU64::new(0),
            touched: AtomicU64::new(0),
        }
    }

    /// Compares a page, which touches it, and writes part of it again.
    fn touch(&self, page: u64) {
        let mut found = vec![0; 4096];
        let begun = Instant::now();
        self.memory
            .copy_from(page * PAGE_BYTES, &mut found)
            .unwrap();
        let waited = u64::try_from(begun.elapsed().as_micros()).unwrap();
        self.longest_us.fetch_max(waited, Relaxed);
        assert!(found == content(page), "page {page}");
        self.memory
            .copy_to(page * PAGE_BYTES + 64, &found[64..128])
            .unwrap();
        self.touched.fetch_add(1, Relaxed);
    }

    fn verify(&self) {
        (0..PAGES).for_each(|page| self.touch(page));
    }
}

/// Pages of zeros, pages that compress and pages that do not.
fn content(page: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(page);
    match page % 4 {
        0 => vec![0; 4096],
        1 | 2 => (page | 1).to_le_bytes().repeat(512),
        _ => (0..512)
            .flat_map(|_| random.next_u64().to_le_bytes())
            .collect(),
    }
}

fn is_skipped(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return true;
    }
    !vmm::is_this(test)
}

fn attach(daemon: &Daemon) {
    let own = std::process::id().to_string();
    let words = [
        "attach", "--pid", &own, "--name", "a", "--limit", LIMIT, "--json",
    ];
    daemon.json(&words);
}

/// Ends threads, also when the test fails meanwhile.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Does `work` while threads touch pages at random, which compare all that they read.
fn in_use<T>(ram: &Ram, work: impl FnOnce() -> T) -> T {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending(&ends);
        for seed in 0..2 {
            let ends = &ends;
            scope.spawn(move || {
                let mut random = SplitMix64::new(seed);
                while !ends.load(Relaxed) {
                    ram.touch(random.below(PAGES));
                }
            });
        }
        work()
    })
}

fn used_on(ram: &Ram) {
    let before = ram.touched.load(Relaxed);
    let begun = Instant::now();
    while ram.touched.load(Relaxed) < before + 500 {
        assert!(begun.elapsed() < PATIENCE, "its faults are not served");
        std::thread::yield_now();
    }
}

#[test]
fn memory_in_use_is_right_over_ten_upgrades_and_nothing_is_lost() {
    if is_skipped("memory_in_use_is_right_over_ten_upgrades_and_nothing_is_lost") {
        return;
    }
    let programs = Programs::new();
    let names = [
        programs.pagetide("pagetide-0"),
        programs.pagetide("pagetide-1"),
    ];
    let ram = Ram::filled();
    let mut daemon = Daemon::start(&names[0], &[], None);
    attach(&daemon);
    in_use(&ram, || {
        daemon.until("evictions", |daemon| daemon.figure("evicted_pages") > PAGES);
        // Random touches at a limit wait for room now and then, without any upgrade.
        ram.longest_us.store(0, Relaxed);
        for _ in 0..4 {
            used_on(&ram);
        }
        let usual = ram.longest_us.load(Relaxed);
        let mut stalls = Vec::new();
        for number in 0..10 {
            let before = daemon.pid();
            // Without a limit no touch waits for room, and what is measured is the hand-over alone.
            if number % 2 == 1 {
                daemon.json(&["vm", "limit", "a", "none", "--json"]);
                daemon.json(&["vm", "reclaim", "a", "--json"]);
            } else {
                daemon.json(&["vm", "limit", "a", LIMIT, "--json"]);
            }
            ram.longest_us.store(0, Relaxed);
            let report = daemon.upgrade(&names[(number + 1) % 2]);
            used_on(&ram);
            assert_eq!(report["state"], "done", "{report}");
            assert_ne!(daemon.pid(), before);
            assert_eq!(report["pid"], daemon.pid());
            assert_eq!(daemon.hurried_threads(), 0);
            stalls.push((ram.longest_us.load(Relaxed), report["pause_us"].clone()));
        }
        daemon.json(&["vm", "limit", "a", LIMIT, "--json"]);
        eprintln!(
            "longest wait of a touch in us, and pause in us, by upgrade, at a limit and without by turns: {stalls:?}; before: {usual}"
        );
    });
    assert_eq!(daemon.figure("restarts"), 10);
    ram.verify();
    let evicted = daemon.figure("evicted_pages");
    in_use(&ram, || {
        daemon.until("further evictions", |daemon| {
            daemon.figure("evicted_pages") > evicted + 1000
        });
    });
    daemon.json(&["vm", "detach", "a", "--json"]);
    ram.verify();
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
}

#[test]
fn broken_program_does_not_become_the_daemon_and_the_old_one_goes_on() {
    if is_skipped("broken_program_does_not_become_the_daemon_and_the_old_one_goes_on") {
        return;
    }
    let programs = Programs::new();
    let program = programs.pagetide("pagetide");
    let ram = Ram::filled();
    let settings = ["--upgrade-ready-ms", "1500", "--upgrade-serving-ms", "1500"];
    let mut daemon = Daemon::start(&program, &settings, None);
    attach(&daemon);
    let pid = daemon.pid();
    in_use(&ram, || {
        daemon.until("evictions", |daemon| daemon.figure("evicted_pages") > PAGES);
        for way in Way::BEFORE {
            let told = daemon.no_upgrade(&programs.broken(way));
            used_on(&ram);
            assert_eq!(
                (daemon.pid(), daemon.figure("restarts")),
                (pid, 0),
                "{way:?}: {told}"
            );
        }
        for (number, way) in Way::AFTER.into_iter().enumerate() {
            let told = daemon.no_upgrade(&programs.broken(way));
            used_on(&ram);
            let restarts = u64::try_from(number).unwrap() + 1;
            assert_eq!(
                (daemon.pid(), daemon.figure("restarts")),
                (pid, restarts),
                "{way:?}: {told}"
            );
            let report = daemon.asked("/v1/upgrade");
            assert_eq!(report["state"], "rolled-back", "{report}");
            assert_eq!(daemon.hurried_threads(), 0, "{way:?}");
        }
        assert_eq!(daemon.upgrade(&program)["state"], "done");
        assert_ne!(daemon.pid(), pid);
        used_on(&ram);
    });
    ram.verify();
    daemon.json(&["vm", "detach", "a", "--json"]);
    ram.verify();
}

/// A program that may not become the daemon, and the word by which that is told.
fn unfit(programs: &Programs) -> Vec<(PathBuf, &'static str)> {
    let put = |name: &str, mode: u32| {
        let path = programs.put(Path::new("/bin/true"), name);
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let others = put("others", 0o755);
    std::os::unix::fs::chown(&others, Some(65_534), None).unwrap();
    let shared = programs.dir().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o775)).unwrap();
    fs::copy("/bin/true", shared.join("program")).unwrap();
    let text = put("text", 0o755);
    fs::write(&text, "no program").unwrap();
    vec![
        (put("writable", 0o757), "can be written by others"),
        (others, "belongs to user 65534"),
        (shared.join("program"), "/shared can be written by others"),
        (put("data", 0o644), "is not executable"),
        (programs.dir().to_owned(), "is not a regular file"),
        (programs.dir().join("nothing"), "cannot find"),
        (text, "does not start"),
        (put("other", 0o755), "has ended without a word"),
    ]
}

#[test]
fn program_that_others_could_have_put_there_is_refused_and_what_is_wrong_is_told() {
    if is_skipped("program_that_others_could_have_put_there_is_refused_and_what_is_wrong_is_told") {
        return;
    }
    let programs = Programs::new();
    let daemon = Daemon::start(&programs.pagetide("pagetide"), &[], None);
    let pid = daemon.pid();
    for (program, why) in unfit(&programs) {
        let told = daemon.no_upgrade(&program);
        assert!(told.contains(why), "{}: {told}", program.display());
    }
    // A newer pool: the new program cannot read it.
    let pool = daemon.state_dir().join("newer.pool");
    drop(Pool::create(&pool, 512, 7, b"{}").unwrap());
    let file = fs::File::options().write(true).open(&pool).unwrap();
    let now = file_cell(&file);
    file.write_all_at(&(now + 1).to_ne_bytes(), VERSION_AT)
        .unwrap();
    let program = programs.pagetide("next");
    let told = daemon.no_upgrade(&program);
    assert!(
        told.contains("refuses") && told.contains("newer.pool"),
        "{told}"
    );
    fs::remove_file(&pool).unwrap();
    assert_eq!(daemon.pid(), pid);
    assert_eq!(daemon.upgrade(&program)["state"], "done");
}

fn file_cell(pool: &fs::File) -> u64 {
    let pool = pool.try_clone().unwrap();
    let mut cell = [0; 8];
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&pool));
    let pool = fs::File::open(path).unwrap();
    pool.read_exact_at(&mut cell, VERSION_AT).unwrap();
    u64::from_ne_bytes(cell)
}

#[test]
fn another_user_who_may_use_the_api_may_not_upgrade() {
    if is_skipped("another_user_who_may_use_the_api_may_not_upgrade") {
        return;
    }
    let programs = Programs::new();
    let program = programs.pagetide("pagetide");
    let place = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir_in("/dev/shm")
        .unwrap();
    let socket = place.path().join("api.sock");
    let api = socket.to_str().unwrap();
    let daemon = Daemon::start(&program, &["--api", api], Some(&socket));
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let pid = daemon.pid();
    let as_nobody = |words: &[&str]| {
        let mut command = Command::new(&program);
        command
            .args(words)
            .args(["--api", api])
            .uid(65_534)
            .gid(65_534);
        command.output().unwrap()
    };
    let listed = as_nobody(&["vm", "list"]);
    assert!(
        listed.status.success(),
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let refused = as_nobody(&["upgrade", program.to_str().unwrap()]);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{told}");
    assert!(
        told.contains("only root") && told.contains("65534"),
        "{told}"
    );
    assert_eq!(daemon.pid(), pid);
}

#[test]
fn signal_upgrades_to_the_program_that_lies_where_the_own_one_lay() {
    if is_skipped("signal_upgrades_to_the_program_that_lies_where_the_own_one_lay") {
        return;
    }
    let programs = Programs::new();
    let program = programs.pagetide("pagetide");
    let mut daemon = Daemon::start(&program, &[], None);
    for _ in 0..3 {
        let pid = daemon.pid();
        // As a package manager does it: the old file is deleted.
        let new = programs.pagetide("pagetide.new");
        fs::rename(&new, &program).unwrap();
        let own = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(own, rustix::process::Signal::USR2).unwrap();
        daemon.until("another process", |daemon| {
            let now = daemon.pid();
            now != 0 && now != pid
        });
        assert_eq!(
            daemon.asked("/v1/upgrade")["program"],
            program.to_str().unwrap()
        );
    }
}

/// The new program is killed at a random moment of its taking over: the old one goes on, or it was the daemon already
/// and the next one recovers everything.
#[test]
fn new_program_that_is_killed_at_any_moment_loses_nothing() {
    if is_skipped("new_program_that_is_killed_at_any_moment_loses_nothing") {
        return;
    }
    let programs = Programs::new();
    let program = programs.pagetide("pagetide");
    let ram = Ram::filled();
    let mut daemon = Daemon::start(&program, &[], None);
    attach(&daemon);
    let mut random = SplitMix64::new(4);
    let (mut done, mut rolled_back, mut kills) = (0, 0, 0);
    in_use(&ram, || {
        daemon.until("evictions", |daemon| daemon.figure("evicted_pages") > PAGES);
        for _ in 0..12 {
            let before = daemon.pid();
            let words = ["upgrade", program.to_str().unwrap(), "--json"];
            let mut client = daemon.command(&words).spawn().unwrap();
            // On a busy machine the upgrade may be over before it is seen.
            let successor = child_of(before, || client.try_wait().unwrap().is_some());
            let moment = Duration::from_micros(random.below(300_000));
            let begun = Instant::now();
            while begun.elapsed() < moment {
                std::thread::yield_now();
            }
            if let Some(successor) = successor {
                let killed =
                    rustix::process::kill_process(successor, rustix::process::Signal::KILL);
                // It may have ended by itself: then nothing was broken.
                assert!(
                    matches!(killed, Ok(()) | Err(rustix::io::Errno::SRCH)),
                    "{killed:?}"
                );
                kills += 1;
            }
            drop(client.wait_with_output().unwrap());
            match daemon.pid() {
                0 => {
                    done += 1;
                    daemon.run();
                }
                now if now == before => rolled_back += 1,
                _ => done += 1,
            }
            used_on(&ram);
        }
    });
    eprintln!("{done} had taken over, {rolled_back} had not; {kills} were killed");
    assert!(kills > 0, "nothing was killed");
    ram.verify();
    daemon.json(&["vm", "detach", "a", "--json"]);
    ram.verify();
}

/// The process that `parent` has started, once it is there; `None` if all `is_over` before.
fn child_of(parent: u32, mut is_over: impl FnMut() -> bool) -> Option<rustix::process::Pid> {
    while !is_over() {
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
            let its = fields.split(' ').nth(1).and_then(|pid| pid.parse().ok());
            if its == Some(parent) {
                let pid = name.to_str().and_then(|pid| pid.parse().ok());
                return pid.and_then(rustix::process::Pid::from_raw);
            }
        }
    }
    None
}
