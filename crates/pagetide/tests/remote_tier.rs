// SPDX-License-Identifier: Apache-2.0
//! Memory that goes to another host and comes back: a server that is killed, a wire that flips bits or is cut, a
//! daemon that is killed or upgraded, a server that has lost its data, one that is refused. The VMM is this
//! process: a file of RAM, mapped shared.

mod cold;
mod daemon;
#[path = "../../guestkit/src/far/mod.rs"]
mod far;
mod far_cluster;
mod far_tls;
mod ram;
mod vmm;

use cold::{attach, content, show, tier};
use daemon::{Daemon, command, number};
use far::{FarServer, Wire};
use pagetide_sys::mapping::MappingError;
use ram::Ram;
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
const RAM_BYTES: u64 = 24 * MIB;
const PAGES: u64 = RAM_BYTES / PAGE_BYTES;
const PASSWORD: &str = "a password that nobody sees";

fn filled() -> Arc<Ram> {
    Arc::new(Ram::filled(RAM_BYTES, content))
}

/// Touches every page; returns how many cannot be.
fn survey(ram: &Ram) -> u64 {
    // The kernel reads here: a page that is lost is an error, and no signal.
    let is_lost = |page: &u64| {
        let mut found = vec![0; 4096];
        let read = ram
            .mapping
            .copy_from_by_kernel(page * PAGE_BYTES, &mut found);
        if let Err(MappingError::Kernel { source, .. }) = &read {
            assert_eq!(source.raw_os_error(), Some(libc::EFAULT), "page {page}");
            return true;
        }
        read.unwrap();
        assert!(found == content(*page), "page {page}");
        false
    };
    (0..PAGES).filter(is_lost).count() as u64
}

/// A folder for the state, and a server with the wire to it.
struct Place {
    state: tempfile::TempDir,
    far: tempfile::TempDir,
    server: FarServer,
    wire: Wire,
}

/// What a server does not keep when it ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loses {
    Nothing,
    All,
}

impl Place {
    /// `None` where there can be none, or in the process that runs `test` as a VMM.
    fn of(test: &str, loses: Loses) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: take-over needs root");
            return None;
        }
        let program = FarServer::program()?;
        if !vmm::is_this(test) {
            return None;
        }
        let far = tempfile::tempdir().unwrap();
        let folder = far.path().join("server");
        let server = match loses {
            Loses::Nothing => FarServer::that_keeps_all(program, &folder),
            Loses::All => FarServer::that_keeps_nothing(program, &folder),
        }
        .unwrap();
        fs::write(far.path().join("password"), PASSWORD).unwrap();
        Some(Self {
            state: tempfile::tempdir_in("/dev/shm").unwrap(),
            wire: Wire::to(server.port()).unwrap(),
            far,
            server,
        })
    }

    fn tiers(&self) -> String {
        let port = self.wire.port();
        format!("zero,same,lz4,zstd,remote:redis://127.0.0.1:{port}=512M")
    }

    /// A daemon with the server as a tier, to which pages go at once.
    fn start_with(&self, settings: &[&str]) -> Daemon {
        let tiers = self.tiers();
        let all = [&["--tiers", &tiers, "--sink-after", "100ms"], settings].concat();
        Daemon::start(self.state.path(), command(self.state.path(), &all))
    }

    fn start(&self) -> Daemon {
        self.start_with(&[])
    }
}

/// Until nearly all that is evicted is on the server.
fn sink_all(daemon: &mut Daemon) {
    cold::sink(daemon, "remote_pages", PAGES * 9 / 10);
}

fn until_working(daemon: &mut Daemon) {
    daemon.until("the tier", |daemon| tier(daemon)["standing"] == "working");
}

/// Every other page is touched while `meanwhile` is done: half of the memory stays on the other host.
fn touch_half<T>(ram: &Arc<Ram>, first: u64, meanwhile: impl FnOnce() -> T) -> T {
    let toucher = Arc::clone(ram);
    let touching = thread::spawn(move || {
        for page in (first..PAGES).step_by(2) {
            toucher.touch(page);
        }
    });
    let done = meanwhile();
    touching.join().unwrap();
    done
}

#[test]
fn memory_outlives_kills_of_server_and_daemon_a_cut_wire_and_flipped_bits() {
    let test = "memory_outlives_kills_of_server_and_daemon_a_cut_wire_and_flipped_bits";
    let Some(mut place) = Place::of(test, Loses::Nothing) else {
        return;
    };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    assert_eq!(tier(&daemon)["keeps"], "all");
    let vm = show(&daemon);
    assert!(number(&vm, "stored_bytes") < RAM_BYTES / 10, "{vm}");
    assert!(number(&vm, "remote_bytes") > RAM_BYTES / 4, "{vm}");
    assert!(place.server.keys().unwrap() > PAGES * 9 / 10);
    // A server that is killed: faults wait until it is back.
    touch_half(&ram, 0, || {
        place.server.kill().unwrap();
        daemon.until("the loss of the server", |daemon| {
            tier(daemon)["standing"] == "gone"
        });
        place.server.start_again().unwrap();
    });
    let vm = show(&daemon);
    assert!(number(&vm, "remote_pages") > PAGES * 4 / 10, "{vm}");
    // A bit flips in many answers: they are asked for again.
    place.wire.flip(100);
    touch_half(&ram, 1, || {});
    assert!(place.wire.flipped() > 10, "{}", place.wire.flipped());
    let vm = show(&daemon);
    assert!(number(&vm, "wrong_answers") > 0, "{vm}");
    assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    place.wire.flip(0);
    sink_all(&mut daemon);
    touch_half(&ram, 0, || {
        place.wire.cut();
        daemon.until("the loss of the wire", |daemon| {
            tier(daemon)["standing"] == "gone"
        });
        place.wire.mend();
        until_working(&mut daemon);
    });
    // Killed while pages go down and up.
    let mut markers = 1;
    for _ in 0..3 {
        daemon.client(&["vm", "reclaim", "a"]);
        drop(daemon);
        markers += 1;
        daemon = place.start();
        touch_half(&ram, 1, || {});
    }
    ram.verify();
    sink_all(&mut daemon);
    let vm = show(&daemon);
    assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    let report = daemon.json(&["vm", "detach", "a"]);
    assert!(number(&report, "filled_pages") > PAGES * 9 / 10, "{report}");
    ram.verify();
    assert_eq!(number(&tier(&daemon), "stored_bytes"), 0);
    // Nothing that a dead daemon was writing or deleting is left but its marker.
    daemon.until("an empty server", |_| {
        place.server.keys().unwrap() == markers
    });
}

#[test]
fn memory_of_a_server_that_lost_its_data_is_told_as_lost_and_is_no_other_memory() {
    let test = "memory_of_a_server_that_lost_its_data_is_told_as_lost_and_is_no_other_memory";
    let Some(mut place) = Place::of(test, Loses::All) else {
        return;
    };
    let ram = filled();
    let mut daemon = place.start_with(&["--remote-when-gone", "lost"]);
    assert!(daemon.log().contains("keeps nothing"), "{}", daemon.log());
    attach(&daemon);
    sink_all(&mut daemon);
    assert_eq!(tier(&daemon)["keeps"], "nothing");
    touch_half(&ram, 0, || {});
    place.server.kill().unwrap();
    place.server.start_again().unwrap();
    daemon.until("the discovery", |daemon| {
        number(&tier(daemon), "losses") == 1
    });
    until_working(&mut daemon);
    let there = number(&show(&daemon), "remote_pages");
    let lost = survey(&ram);
    assert!(lost > PAGES * 3 / 10, "{lost}");
    assert!(lost <= there, "{lost} of {there}");
    let vm = show(&daemon);
    assert_eq!(number(&vm, "poisoned_pages"), lost, "{vm}");
    let refused = daemon.client(&["vm", "detach", "a"]);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(
        told.contains(&format!("{lost} pages of a are lost")),
        "{told}"
    );
    // What was not lost goes on going down and coming back.
    daemon.until("memory on the other host", |daemon| {
        daemon.client(&["vm", "reclaim", "a"]);
        number(&show(daemon), "remote_pages") > PAGES * 3 / 10
    });
    assert_eq!(survey(&ram), lost);
}

#[test]
fn vm_waits_for_what_its_server_lost_until_the_data_is_restored() {
    let test = "vm_waits_for_what_its_server_lost_until_the_data_is_restored";
    let Some(mut place) = Place::of(test, Loses::Nothing) else {
        return;
    };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    let (files, aside) = (
        place.far.path().join("server"),
        place.far.path().join("aside"),
    );
    place.server.kill().unwrap();
    fs::rename(&files, &aside).unwrap();
    fs::create_dir(&files).unwrap();
    place.server.start_again().unwrap();
    let (daemon, _place) = touch_half(&ram, 0, move || {
        daemon.until("a fault that waits", |daemon| {
            number(&show(daemon), "missing_pages") > 0
        });
        assert!(daemon.log().contains("does not have a page"));
        assert_eq!(number(&show(&daemon), "poisoned_pages"), 0);
        // As an operator who has a copy: the data first, then another daemon.
        place.server.kill().unwrap();
        fs::rename(&files, place.far.path().join("empty")).unwrap();
        fs::rename(&aside, &files).unwrap();
        place.server.start_again().unwrap();
        drop(daemon);
        (place.start(), place)
    });
    ram.verify();
    assert_eq!(number(&show(&daemon), "poisoned_pages"), 0);
    daemon.json(&["vm", "detach", "a"]);
}

#[test]
fn upgraded_daemon_serves_memory_of_the_other_host() {
    let test = "upgraded_daemon_serves_memory_of_the_other_host";
    let Some(place) = Place::of(test, Loses::Nothing) else {
        return;
    };
    let programs = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir_in("/var/lib")
        .unwrap();
    let program = programs.path().join("pagetide");
    fs::copy(env!("CARGO_BIN_EXE_pagetide"), &program).unwrap();
    let ram = filled();
    let asked = place.server.ask(&[
        "CONFIG",
        "SET",
        "requirepass",
        "\"a password that nobody sees\"",
    ]);
    assert_eq!(asked.unwrap(), "+OK");
    let port = place.wire.port();
    let tiers = format!("lz4,remote:redis://127.0.0.1:{port}?password-env=PT_FAR=512M");
    let settings = ["--tiers", &tiers, "--sink-after", "100ms"];
    let mut run = command(place.state.path(), &settings);
    run.env("PT_FAR", PASSWORD);
    let mut daemon = Daemon::start(place.state.path(), run);
    attach(&daemon);
    sink_all(&mut daemon);
    let report = daemon.json(&["upgrade", program.to_str().unwrap()]);
    let stored = number(&show(&daemon), "remote_pages");
    assert!(stored > PAGES * 9 / 10, "{stored}");
    ram.verify();
    assert_eq!(number(&show(&daemon), "poisoned_pages"), 0);
    daemon.json(&["vm", "detach", "a"]);
    let pid = i32::try_from(number(&report, "pid")).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// So its latency is how long the vCPU waits, and not how long it takes to ask the server.
#[test]
fn fault_is_counted_when_its_page_is_there_and_not_when_its_load_begins() {
    let test = "fault_is_counted_when_its_page_is_there_and_not_when_its_load_begins";
    let Some(place) = Place::of(test, Loses::Nothing) else {
        return;
    };
    let ram = filled();
    let mut daemon = place.start();
    attach(&daemon);
    sink_all(&mut daemon);
    drop(daemon);
    // One that has counted no fault.
    daemon = place.start();
    until_working(&mut daemon);
    place.wire.cut();
    daemon.until("the loss of the wire", |daemon| {
        tier(daemon)["standing"] == "gone"
    });
    // Some pages may be in memory still.
    let (toucher, served) = (Arc::clone(&ram), Arc::new(AtomicU64::new(0)));
    let done = Arc::clone(&served);
    let (tell, begins) = mpsc::channel();
    let touching = thread::spawn(move || {
        tell.send(()).unwrap();
        for page in 0..PAGES / 8 {
            toucher.touch(page);
            done.fetch_add(1, Relaxed);
        }
    });
    begins.recv().unwrap();
    // The same number twice: it waits for one that is on the other host.
    let mut before = u64::MAX;
    daemon.until("a fault that waits", |daemon| {
        show(daemon);
        let now = served.load(Relaxed);
        std::mem::replace(&mut before, now) == now
    });
    assert!(before < PAGES / 8);
    let counted = number(&show(&daemon), "vcpu_faults");
    assert!(counted <= before, "{counted} of {before}");
    place.wire.mend();
    touching.join().unwrap();
    let vm = show(&daemon);
    assert!(number(&vm, "vcpu_faults") > counted, "{vm}");
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
}

/// Runs a daemon that must end by itself with status 2; returns what it said.
fn refused(settings: &[&str]) -> String {
    let state = tempfile::tempdir_in("/dev/shm").unwrap();
    let output = command(state.path(), settings).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(2),
        "{:?}: {told}",
        output.status.signal()
    );
    told
}

#[test]
fn server_that_may_drop_pages_or_wants_another_password_is_refused_with_a_sentence() {
    let Some(program) = FarServer::program() else {
        return;
    };
    let far = tempfile::tempdir().unwrap();
    let options = [
        "--maxmemory-policy",
        "allkeys-lru",
        "--requirepass",
        "right",
    ];
    let server = FarServer::start(program, &far.path().join("server"), &options).unwrap();
    let tiers =
        |options: &str| format!("lz4,remote:redis://127.0.0.1:{}{options}=1G", server.port());
    let by_file = |name: &str, word: &str| {
        let file = far.path().join(name);
        fs::write(&file, format!("{word}\n")).unwrap();
        tiers(&format!("?password-file={}", file.display()))
    };
    for (tiers, why) in [
        (by_file("one", "right"), "maxmemory-policy is allkeys-lru"),
        (
            by_file("other", "wr0ng"),
            "refuses the user or the password",
        ),
        (tiers(""), "wants a password"),
        (tiers("?password-file=/nowhere/at/all"), "cannot be read"),
        (tiers("?password-env=PT_NOT_SET"), "PT_NOT_SET"),
    ] {
        let told = refused(&["--tiers", &tiers]);
        assert!(told.contains(why), "{tiers}: {told}");
        assert!(!told.contains("wr0ng"), "{told}");
    }
}

#[test]
fn password_in_a_setting_is_refused_and_not_repeated_wherever_it_stands() {
    let far = tempfile::tempdir().unwrap();
    let config = far.path().join("settings.toml");
    for (tiers, why) in [
        (
            "lz4,remote:redis://:s3cret@127.0.0.1:1=1G",
            "password-file=",
        ),
        (
            "lz4,remote:redis://:0,s3cret@127.0.0.1:1=1G",
            "is not a URL",
        ),
        (
            "lz4,remote:redis://u:0,s3cret,0@127.0.0.1:1=1G",
            "needs a limit",
        ),
        ("lz4,s3cret,0@127.0.0.1:1=1G", "there is no tier"),
        ("lz4,remote:redis://:0=s3cret@127.0.0.1:1", "is no size"),
        ("lz4,remote:redis://127.0.0.1?password=s3cret", "is no size"),
        ("lz4,remote:redis://u:0/s3cret@127.0.0.1:1=1G", "database"),
        (
            "lz4,remote:redis://u:0?s3cret&0@127.0.0.1:1=1G",
            "no option",
        ),
        ("lz4,remote:s3cret://u@127.0.0.1:1=1G", "not stored by"),
        ("s3cret://u@127.0.0.1,lz4", "there is no tier"),
    ] {
        let told = refused(&["--tiers", tiers]);
        assert!(told.contains(why), "{tiers}: {told}");
        assert!(!told.contains("s3cret"), "{told}");
        for text in [
            format!("# tiers\ntiers = \"{tiers}\"\n"),
            format!("# tiers\ntiers = '{tiers}'\nno-such-setting = 1\n"),
            format!("# tiers\nengines = \"{tiers}\"\n"),
            format!("# tiers\ntiers = {tiers}\n"),
        ] {
            fs::write(&config, &text).unwrap();
            let told = refused(&["--config", config.to_str().unwrap()]);
            assert!(
                told.contains("line ") && told.contains("settings.toml"),
                "{told}"
            );
            assert!(!told.contains("s3cret"), "{text}: {told}");
        }
    }
    // A blank too much, and a flag that is misspelt.
    let url = "remote:redis://:s3cret@127.0.0.1:1=1G";
    for words in [&["--tiers", "lz4", url], &["--tier", "lz4", url]] {
        let told = refused(words);
        assert!(!told.contains("s3cret"), "{told}");
    }
}

#[test]
fn daemon_with_a_vm_starts_without_the_password_of_its_tier_and_reads_it_when_it_is_there() {
    let test =
        "daemon_with_a_vm_starts_without_the_password_of_its_tier_and_reads_it_when_it_is_there";
    let Some(place) = Place::of(test, Loses::Nothing) else {
        return;
    };
    let set = [
        "CONFIG",
        "SET",
        "requirepass",
        "\"a password that nobody sees\"",
    ];
    assert_eq!(place.server.ask(&set).unwrap(), "+OK");
    let (file, aside) = (
        place.far.path().join("password"),
        place.far.path().join("aside"),
    );
    let port = place.wire.port();
    let tiers = format!(
        "lz4,remote:redis://127.0.0.1:{port}?password-file={}=512M",
        file.display()
    );
    let start = || {
        let settings = ["--tiers", &tiers, "--sink-after", "100ms"];
        Daemon::start(place.state.path(), command(place.state.path(), &settings))
    };
    let ram = filled();
    let mut daemon = start();
    attach(&daemon);
    sink_all(&mut daemon);
    drop(daemon);
    fs::rename(&file, &aside).unwrap();
    daemon = start();
    daemon.until("the reason", |daemon| {
        let tier = tier(daemon);
        let reason = tier["reason"].as_str().unwrap_or_default();
        tier["standing"] == "gone" && reason.contains("cannot be read")
    });
    fs::rename(&aside, &file).unwrap();
    until_working(&mut daemon);
    ram.verify();
    daemon.json(&["vm", "detach", "a"]);
}

#[test]
fn password_is_in_no_list_of_processes_no_log_and_no_report() {
    let Some(program) = FarServer::program() else {
        return;
    };
    let far = tempfile::tempdir().unwrap();
    let options = ["--requirepass", "s3cret"];
    let server = FarServer::start(program, &far.path().join("server"), &options).unwrap();
    let file = far.path().join("password");
    fs::write(&file, "s3cret\n").unwrap();
    let state = tempfile::tempdir_in("/dev/shm").unwrap();
    let tiers = format!(
        "lz4,remote:redis://127.0.0.1:{}?password-file={}=1G",
        server.port(),
        file.display()
    );
    let settings = ["--tiers", &tiers, "--log-filter", "trace"];
    let mut daemon = Daemon::start(state.path(), command(state.path(), &settings));
    until_working(&mut daemon);
    let ps = Command::new("ps")
        .args(["-e", "-o", "args"])
        .output()
        .unwrap();
    let pool = daemon.json(&["pool", "show"]).to_string();
    let metrics = String::from_utf8_lossy(&daemon.client(&["metrics"]).stdout).into_owned();
    let listed = String::from_utf8_lossy(&ps.stdout).into_owned();
    assert!(listed.contains("password-file"), "{listed}");
    for text in [pool, metrics, daemon.log()] {
        assert!(!text.contains("s3cret"), "{text}");
    }
    let ours = listed.lines().filter(|line| line.contains("pagetide"));
    assert!(ours.into_iter().all(|line| !line.contains("s3cret")));
}
