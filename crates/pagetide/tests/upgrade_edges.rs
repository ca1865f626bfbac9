// SPDX-License-Identifier: Apache-2.0
//! What may come in the way of a live upgrade: signals at its worst moment, a second order, a process without
//! descriptors, a lock that somebody else takes while nobody has it.

#[path = "../../guestkit/src/far/mod.rs"]
#[expect(dead_code, unused_imports, reason = "each test file uses a part of it")]
mod far;
mod upgrading;
mod vmm;

use far::FarServer;
use pagetide_bench::upgrade::broken::Way;
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit},
};
use std::{
    fs,
    os::{
        fd::AsFd as _,
        unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::PathBuf,
    process::Child,
    time::Instant,
};
use upgrading::{Daemon, PATIENCE, Programs};

const RAM_BYTES: u64 = 64 << 20;

fn is_skipped() -> bool {
    let skipped = !rustix::process::geteuid().is_root();
    if skipped {
        eprintln!("SKIPPED: the program of an upgrade must be root's");
    }
    skipped
}

/// A daemon that is told to be replaced by a broken program, and how that one fails.
struct Scene {
    programs: Programs,
    program: PathBuf,
    daemon: Daemon,
}

impl Scene {
    fn new(settings: &[&str]) -> Self {
        let programs = Programs::new();
        let program = programs.pagetide("pagetide");
        Self {
            daemon: Daemon::start(&program, settings, None),
            programs,
            program,
        }
    }

    /// Begins an upgrade to the broken program and waits until the old one holds; its pid, and the client.
    fn until_it_holds(&mut self, way: Way) -> (Pid, Child) {
        let broken = self.programs.broken(way);
        let pid = self.daemon.pid();
        let words = ["upgrade", broken.to_str().unwrap(), "--json"];
        let client = self.daemon.command(&words).spawn().unwrap();
        // By then it has taken over all its descriptors.
        self.daemon.until("process that holds", |daemon| {
            daemon.log().contains("this process holds the VMs")
        });
        (Pid::from_raw(pid.cast_signed()).unwrap(), client)
    }
}

#[test]
fn signal_to_end_that_comes_during_the_hand_over_is_obeyed_by_the_program_that_goes_on() {
    if is_skipped() {
        return;
    }
    let mut scene = Scene::new(&["--upgrade-serving-ms", "1000"]);
    let (pid, client) = scene.until_it_holds(Way::HangsWhenReady);
    kill_process(pid, Signal::TERM).unwrap();
    // The new program fails; the old one goes on, and then ends in order.
    let ended = scene.daemon.wait_for_child();
    assert!(ended.success(), "{ended}: {}", scene.daemon.log());
    let log = scene.daemon.log();
    assert!(
        log.contains("the old one goes on") && log.contains("shutting down"),
        "{log}"
    );
    assert!(!scene.daemon.socket().exists());
    drop(client.wait_with_output().unwrap());
}

#[test]
fn signal_to_end_that_the_old_program_gets_last_is_passed_to_the_new_one() {
    if is_skipped() {
        return;
    }
    let mut scene = Scene::new(&[]);
    let way = Way::ServesUntilASignal;
    let told = scene.programs.broken(way).with_extension("told");
    fs::write(&told, "not yet").unwrap();
    let (pid, mut client) = scene.until_it_holds(way);
    kill_process(pid, Signal::TERM).unwrap();
    fs::write(&told, "now").unwrap();
    scene.daemon.until("signal", |_| {
        fs::read_to_string(&told).unwrap().contains("TERM")
    });
    client.kill().unwrap();
    client.wait().unwrap();
}

/// Whether a signal to be replaced waits for a process to read it.
fn usr2_is_pending(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
    mask & (1 << (Signal::USR2.as_raw() - 1)) != 0
}

#[test]
fn signal_to_be_replaced_that_comes_while_an_upgrade_is_prepared_is_passed_to_the_new_program() {
    if is_skipped() {
        return;
    }
    let mut scene = Scene::new(&["--upgrade-ready-ms", "60000"]);
    let broken = scene.programs.broken(Way::ServesUntilASignal);
    let told = broken.with_extension("told");
    fs::write(&told, "not ready").unwrap();
    let daemon = &mut scene.daemon;
    let pid = Pid::from_raw(daemon.pid().cast_signed()).unwrap();
    let words = ["upgrade", broken.to_str().unwrap(), "--json"];
    let mut client = daemon.command(&words).spawn().unwrap();
    let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
    daemon.until("successor", |_| {
        let mut tasks = fs::read_dir(&tasks).unwrap().flatten();
        tasks.any(|task| {
            let children = fs::read_to_string(task.path().join("children"));
            children.is_ok_and(|list| !list.trim().is_empty())
        })
    });
    kill_process(pid, Signal::USR2).unwrap();
    daemon.until("read signal", |_| !usr2_is_pending(pid));
    fs::write(&told, "not yet").unwrap();
    daemon.until("process that holds", |daemon| {
        daemon.log().contains("this process holds the VMs")
    });
    fs::write(&told, "now").unwrap();
    daemon.until("signal", |_| {
        fs::read_to_string(&told).unwrap().contains("USR2")
    });
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn second_order_is_refused_while_the_first_is_under_way() {
    if is_skipped() {
        return;
    }
    let scene = Scene::new(&["--upgrade-ready-ms", "3000"]);
    let broken = scene.programs.broken(Way::HangsAfterOffer);
    let words = ["upgrade", broken.to_str().unwrap()];
    // Whichever comes first is under way for seconds.
    let both = [(); 2].map(|()| scene.daemon.command(&words).spawn().unwrap());
    let told = both.map(|client| {
        let told = client.wait_with_output().unwrap();
        assert!(!told.status.success());
        String::from_utf8_lossy(&told.stderr).into_owned()
    });
    let of = |reason: &str| told.iter().filter(|told| told.contains(reason)).count();
    assert_eq!(of("is not ready"), 1, "{told:?}");
    assert_eq!(of("under way already"), 1, "{told:?}");
    assert_eq!(scene.daemon.upgrade(&scene.program)["state"], "done");
}

/// Whoever took over would otherwise be refused, then the old program as well, and no daemon would be left.
#[test]
fn upgrade_and_its_rollback_do_not_fail_for_a_remote_server_that_refuses() {
    let Some(server) = FarServer::program().filter(|_| !is_skipped()) else {
        return;
    };
    let far = tempfile::tempdir().unwrap();
    let server = FarServer::that_keeps_all(server, &far.path().join("server")).unwrap();
    let tiers = format!("lz4,remote:redis://127.0.0.1:{}=64M", server.port());
    let scene = Scene::new(&["--tiers", &tiers]);
    let daemon = &scene.daemon;
    // From now on it may drop pages.
    let asked = server.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    assert_eq!(asked.unwrap(), "+OK");
    let pid = daemon.pid();
    let told = daemon.no_upgrade(&scene.programs.broken(Way::RefusesAfterGo));
    assert_eq!(daemon.pid(), pid, "{told}");
    assert_eq!(daemon.asked("/v1/upgrade")["state"], "rolled-back");
    assert_eq!(daemon.upgrade(&scene.program)["state"], "done");
    assert_ne!(daemon.pid(), pid);
    let begun = Instant::now();
    loop {
        let tier = daemon.json(&["pool", "show", "--json"])["tiers"][0].clone();
        if tier["reason"]
            .as_str()
            .is_some_and(|why| why.contains("allkeys-lru"))
        {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{tier}");
    }
}

/// A successor without the tier could not serve what is there, and its predecessor could.
#[test]
fn upgrade_is_refused_while_the_disk_of_a_tier_would_be_or_is_not_where_it_was() {
    if is_skipped() {
        return;
    }
    let disk = tempfile::tempdir_in("/var/tmp").unwrap();
    let (tier, away) = (disk.path().join("tier"), disk.path().join("away"));
    let probe = fs::File::options()
        .write(true)
        .create(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(disk.path().join("probe"));
    if let Err(error) = probe {
        eprintln!("SKIPPED: no direct I/O in /var/tmp: {error}");
        return;
    }
    let tiers = format!("lz4,disk:{}=64M", tier.display());
    let scene = Scene::new(&["--tiers", &tiers]);
    let (daemon, pid) = (&scene.daemon, scene.daemon.pid());
    let is_refused = |why: &str| {
        let told = daemon.no_upgrade(&scene.program);
        assert!(told.contains(why) && told.contains("tier"), "{told}");
        assert_eq!(daemon.pid(), pid);
    };
    let mode = |mode| fs::set_permissions(&tier, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o666);
    is_refused("others may write to it");
    mode(0o600);
    fs::rename(&tier, &away).unwrap();
    is_refused("No such file");
    fs::copy(&away, &tier).unwrap();
    is_refused("is not the file or device that is in use");
    fs::rename(&away, &tier).unwrap();
    assert_eq!(daemon.upgrade(&scene.program)["state"], "done");
    let pool = daemon.json(&["pool", "show", "--json"]);
    assert_eq!(pool["tiers"][0]["standing"], "working", "{pool}");
}

#[test]
fn new_program_that_hangs_is_ended_though_no_descriptor_is_to_be_had() {
    if is_skipped() {
        return;
    }
    let mut scene = Scene::new(&["--upgrade-serving-ms", "1000"]);
    let (pid, client) = scene.until_it_holds(Way::HangsWhenReady);
    let before = rustix::process::getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(3),
        ..before
    };
    let real = prlimit(Some(pid), Resource::Nofile, none).unwrap();
    let restored = std::thread::spawn(move || {
        // As long as the old program holds: then it needs descriptors again.
        let children = format!("/proc/{0}/task/{0}/children", pid.as_raw_nonzero());
        let begun = Instant::now();
        let has_child = || fs::read_to_string(&children).is_ok_and(|list| !list.trim().is_empty());
        while has_child() && begun.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        prlimit(Some(pid), Resource::Nofile, real).unwrap();
        begun.elapsed() < PATIENCE
    });
    let told = client.wait_with_output().unwrap();
    assert!(restored.join().unwrap(), "the new program was not ended");
    assert!(!told.status.success());
    scene.daemon.until("answer", |daemon| daemon.pid() != 0);
}

/// The lock of the host's budget falls with the old program. Whoever takes it then must not keep VMs waiting.
#[test]
fn lock_that_another_takes_during_the_hand_over_delays_nobody() {
    let test = "lock_that_another_takes_during_the_hand_over_delays_nobody";
    if is_skipped() || !vmm::is_this(test) {
        return;
    }
    let file = GuestFile::new_memfd("ram", RAM_BYTES).unwrap();
    let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
    ram.copy_to(0, &[7; 4096]).unwrap();
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let lock = place.path().join("budget.lock");
    let lock_setting = format!("--budget-lock={}", lock.display());
    let mut scene = Scene::new(&["--host-budget", "256M", &lock_setting]);
    let own = std::process::id().to_string();
    let attached = ["attach", "--pid", &own, "--name", "a", "--json"];
    scene.daemon.json(&attached);
    let in_force =
        |daemon: &Daemon| daemon.json(&["host", "show", "--json"])["budget_bytes"].is_u64();
    assert!(in_force(&scene.daemon));
    let way = Way::RefusesAfterGo;
    let told = scene.programs.broken(way).with_extension("told");
    fs::write(&told, "not yet").unwrap();
    let (_, client) = scene.until_it_holds(way);
    let taker = fs::File::options().write(true).open(&lock).unwrap();
    scene.daemon.until("lock that nobody has", |_| {
        flock(&taker, FlockOperation::NonBlockingLockExclusive).is_ok()
    });
    fs::write(&told, "now").unwrap();
    // The old program goes on without it, and a new one as well.
    let refused = client.wait_with_output().unwrap();
    assert!(!refused.status.success());
    let daemon = &scene.daemon;
    assert_eq!(daemon.asked("/v1/upgrade")["state"], "rolled-back");
    assert!(!in_force(daemon));
    let report = daemon.upgrade(&scene.program);
    assert_eq!(report["state"], "done", "{report}");
    assert!(!in_force(daemon));
    drop(taker);
    let begun = Instant::now();
    while !in_force(daemon) {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::yield_now();
    }
    daemon.json(&["vm", "detach", "a", "--json"]);
    let mut page = [0; 4096];
    ram.copy_from(0, &mut page).unwrap();
    assert_eq!(page, [7; 4096]);
}
